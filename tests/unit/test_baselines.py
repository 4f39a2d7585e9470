"""How the comparison with other patterns tells a version by its content, and what it refuses to call right."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from reef_bus.artifacts import ArtifactStore, save_weights
from reef_bus.events import InferenceRecorded
from reef_bus.policy import Policy, PolicyConfig, fill, new_policy, pieces, sample
from reef_bus.samples import TokenRow, encode_rows
from tests.bench.baselines.kills import draw, in_turn
from tests.bench.baselines.outcome import Cell, Result, row
from tests.bench.baselines.patterns import PATTERNS, PHASES
from tests.bench.baselines.probabilities import judged
from tests.bench.baselines.traffic import judge
from tests.bench.baselines.weights import content, fingerprint


def test_the_tensors_of_the_label_are_right() -> None:
    assert judge(2, fingerprint(content(2)), 2) == "right"


def test_the_tensors_of_another_version_are_wrong() -> None:
    assert judge(1, fingerprint(content(2)), 2) == "wrong"


def test_one_tensor_of_the_next_version_tears_an_answer() -> None:
    mixed = [*content(2)[:1], *content(1)[1:]]
    assert judge(1, fingerprint(mixed), 2) == "torn"


@pytest.mark.parametrize("name", PATTERNS)
def test_nine_kills_hit_every_role_in_every_phase(name: str) -> None:
    pattern = PATTERNS[name]
    hit = {(victim.split("-")[0], phase) for victim, phase, _ in (draw(pattern, number, 1) for number in range(9))}
    assert hit == {(role, phase) for role in pattern.roles for phase in PHASES}


def test_the_first_kills_are_of_every_phase() -> None:
    assert [phase for _, phase in in_turn(("a", "b", "c"))][:3] == ["before", "during", "after"]


def test_what_never_happened_is_longer_than_any_time_and_counted() -> None:
    cells = [Cell(victim="x", phase="during", point="p", whole_s=seconds) for seconds in (1.0, None, 3.0)]
    assert row(Result(pattern="x", title="x", cells=cells))[9] == "3.0 / >30 (1×)"


class TestProbabilities:
    """An answer of the real policy is told by its logprobs."""

    def recorded(self, store: ArtifactStore, policy: Policy, claims: str) -> InferenceRecorded:
        prompt = torch.tensor([[11, 7, 10]])
        ids, logprobs = sample(policy, prompt, 8, 1.0, torch.Generator().manual_seed(5))
        answer = TokenRow(
            prompt=(11, 7, 10),
            answer=tuple(ids[0].tolist()),
            logprobs=tuple(logprobs[0].tolist()),
            load_ids=(claims,) * 8,
        )
        return InferenceRecorded(
            scenario="digit",
            record="r",
            engine="engine-0",
            boot="b",
            load_id=claims,
            as_of=1,
            done_as_of=1,
            prompt="7",
            answer="",
            prompt_tokens=3,
            answer_tokens=8,
            temperature=1.0,
            blob=store.put(encode_rows([answer])),
            row=0,
            tags={},
        )

    def versions(self, store: ArtifactStore) -> dict[str, str]:
        made = {"i:0": new_policy(PolicyConfig(), 0), "i:1": new_policy(PolicyConfig(), 1)}
        return {name: save_weights(store, pieces(dict(p.named_parameters())))[0].digest for name, p in made.items()}

    @pytest.mark.parametrize(("seed", "verdict"), [(0, "right"), (1, "wrong"), (2, "torn")])
    def test_by_whose_weights_they_are(self, seed: int, verdict: str, tmp_path: Path) -> None:
        store = ArtifactStore(tmp_path)
        versions = self.versions(store)
        answer = self.recorded(store, new_policy(PolicyConfig(), seed), claims="i:0")
        assert judged([answer], versions, store) == {"r": verdict}

    def test_a_mix_of_two_versions_is_torn(self, tmp_path: Path) -> None:
        store = ArtifactStore(tmp_path)
        versions = self.versions(store)
        new, old = (dict(new_policy(PolicyConfig(), seed).named_parameters()) for seed in (1, 0))
        mixed = fill(Policy(PolicyConfig()), {**old, "lm_head.weight": new["lm_head.weight"]})
        assert judged([self.recorded(store, mixed, claims="i:0")], versions, store) == {"r": "torn"}
