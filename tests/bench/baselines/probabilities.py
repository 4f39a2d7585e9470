"""Which release did an answer of ours come from? Told by its probabilities, not by what it claims.

Knows: the policy, the artifacts that targets name. Must not know: engines, or who should have served what.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from safetensors.torch import load_file

from reef_bus.artifacts import ArtifactStore
from reef_bus.events import InferenceRecorded
from reef_bus.policy import Policy, PolicyConfig, fill
from reef_bus.samples import TokenRow, decode_rows
from tests.bench.baselines.traffic import RIGHT, TORN, WRONG

TOLERANCE = 1e-4
"""Of a logprob. Another order of float32 sums moves one by about 1e-6; one release moves some token by far more."""


class Given(NamedTuple):
    """One recorded answer, token by token."""

    event: InferenceRecorded
    row: TokenRow

    @property
    def alike(self) -> tuple[str, int, int, float]:
        """What can be computed in one pass."""
        return self.event.load_id, len(self.row.prompt), len(self.row.answer), self.event.temperature


def judged(recorded: Sequence[InferenceRecorded], weights: Mapping[str, str], store: ArtifactStore) -> dict[str, str]:
    """By record: right, wrong (another version's probabilities), torn (nobody's). `weights`: load id to blob digest,
    of every version that was ever a target."""
    torch.set_num_threads(1)
    policies = {load_id: _policy(store, digest) for load_id, digest in weights.items()}
    verdicts: dict[str, str] = {}
    for (claimed, *_), alike in _groups(_given(recorded, store)).items():
        for given, distance in zip(alike, _distances(policies[claimed], alike), strict=True):
            verdict = RIGHT if distance <= TOLERANCE else _whose(given, policies)
            verdicts[given.event.record] = verdict
    return verdicts


def _whose(given: Given, policies: Mapping[str, Policy]) -> str:
    return WRONG if any(_distances(policy, [given])[0] <= TOLERANCE for policy in policies.values()) else TORN


def _given(recorded: Sequence[InferenceRecorded], store: ArtifactStore) -> list[Given]:
    blobs = {event.blob.digest for event in recorded}
    rows = {digest: decode_rows(store.get(digest)) for digest in blobs}
    return [Given(event, rows[event.blob.digest][event.row]) for event in recorded]


def _groups(given: Sequence[Given]) -> dict[tuple[str, int, int, float], list[Given]]:
    found: dict[tuple[str, int, int, float], list[Given]] = defaultdict(list)
    for each in given:
        found[each.alike].append(each)
    return found


def _policy(store: ArtifactStore, digest: str) -> Policy:
    return fill(Policy(PolicyConfig()), load_file(store.path(digest))).requires_grad_(False)


def _distances(policy: Policy, alike: Sequence[Given]) -> list[float]:
    """Per answer the largest difference between its logprobs and those of `policy`, in one pass over whole answers."""
    ids = torch.tensor([[*given.row.prompt, *given.row.answer] for given in alike])
    start, temperature = len(alike[0].row.prompt), alike[0].event.temperature
    table = torch.log_softmax(policy(ids)[:, start - 1 : -1] / temperature, -1)
    found = table.gather(2, ids[:, start:].unsqueeze(2)).squeeze(2)
    said = torch.tensor([given.row.logprobs for given in alike])
    return [float(each) for each in (found - said).abs().amax(1)]
