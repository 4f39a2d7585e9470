"""Which release did an answer of ours come from? Told by its probabilities, not by what it claims.

Knows: the policy, the artifacts that targets name. Must not know: engines, or who should have served what.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import torch
from safetensors.torch import load_file

from reef_bus.artifacts import ArtifactStore
from reef_bus.events import InferenceRecorded
from reef_bus.policy import Policy, PolicyConfig, fill
from reef_bus.samples import TokenRow, decode_rows
from tests.bench.baselines.traffic import RIGHT, TORN, WRONG

TOLERANCE = 1e-4
"""Of a logprob. Another order of float32 sums moves one by about 1e-6; one release moves some token by far more."""


def judged(recorded: Sequence[InferenceRecorded], weights: Mapping[str, str], store: ArtifactStore) -> dict[str, str]:
    """By record: right, wrong (another version's probabilities), torn (nobody's). `weights`: load id to blob digest,
    of every version that was ever a target."""
    policies = {load_id: _policy(store, digest) for load_id, digest in weights.items()}
    found: dict[str, str] = {}
    for claimed, event, row in _rows(recorded, store):
        if _distance(policies[claimed], event, row) <= TOLERANCE:
            found[event.record] = RIGHT
        else:
            near = any(_distance(policy, event, row) <= TOLERANCE for policy in policies.values())
            found[event.record] = WRONG if near else TORN
    return found


def _rows(
    recorded: Sequence[InferenceRecorded], store: ArtifactStore
) -> Iterator[tuple[str, InferenceRecorded, TokenRow]]:
    by_blob: dict[str, list[InferenceRecorded]] = defaultdict(list)
    for event in recorded:
        by_blob[event.blob.digest].append(event)
    for digest, events in by_blob.items():
        rows = decode_rows(store.get(digest))
        yield from ((event.load_id, event, rows[event.row]) for event in events)


def _policy(store: ArtifactStore, digest: str) -> Policy:
    return fill(Policy(PolicyConfig()), load_file(store.path(digest))).requires_grad_(False)


def _distance(policy: Policy, event: InferenceRecorded, row: TokenRow) -> float:
    """The largest difference between the logprobs of the answer and those of `policy`, in one pass over all of it."""
    ids = torch.tensor([[*row.prompt, *row.answer]])
    table = torch.log_softmax(policy(ids)[0, len(row.prompt) - 1 : -1] / event.temperature, -1)
    ours = table.gather(1, torch.tensor(row.answer).unsqueeze(1)).squeeze(1)
    return float((ours - torch.tensor(row.logprobs)).abs().max())
