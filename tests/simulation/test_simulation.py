"""Whole deployments under seeds of faults; the same seed is the same history; and what would be wrong is found.

Knows: the simulation's result. Must not know: any role.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from msgspec.structs import replace

from consumers.reef_engine import agent as agent_module
from consumers.reef_engine.agent import Agent
from consumers.reef_engine.held import Found
from consumers.reef_engine.reports import verified
from reef_bus.core.effects import Deadlines, Debt, Receive, VerifyHead
from reef_bus.core.invariants import check
from reef_bus.core.publication import Publication
from reef_bus.core.world import World
from reef_bus.events import Event
from reef_bus.manifest import Manifest
from reef_bus.runner import blocking
from tests.simulation.deployment import Deployment, Outcome, Shape, simulate
from tests.simulation.faults import EVENTS, KINDS, Faults
from tests.simulation.hands import Ingress, Memory
from tests.simulation.table import missing

ROOT = Path(__file__).parents[2]
publishing = importlib.import_module("reef_bus.core.reactions.publisher")  # of that name there is a function, too


@pytest.mark.parametrize("seed", range(5))
def test_without_faults_every_job_becomes_a_release_and_no_event_is_void(seed: int) -> None:
    found = simulate(seed, Faults(), Shape(jobs=3))
    assert (found.violation, dict(found.ended), found.voids) == ("", {"committed": 3}, 0)
    assert found.events["ReleaseCommitted"] == found.events["TargetPersisted"] == found.events["JobDispatched"] == 3
    assert {name: found.events[name] for name in ("TransferAborted", "EngineExcluded", "ComponentLost")} == {
        "TransferAborted": 0,
        "EngineExcluded": 0,
        "ComponentLost": 0,
    }


# -- training where the engines are


@pytest.mark.parametrize("seed", range(3))
def test_without_faults_every_colocated_job_becomes_a_release_and_memory_goes_out_and_back_once(seed: int) -> None:
    found = simulate(seed, Faults(), Shape(jobs=3, colocate=True))
    assert (found.violation, dict(found.ended), found.voids) == ("", {"committed": 3}, 0)
    assert (found.events["EngineMemoryReleased"], found.events["EngineMemoryRestored"]) == (6, 12)
    assert found.events["TransferAborted"] == found.events["EngineExcluded"] == found.events["EngineLeft"] == 0


@pytest.mark.parametrize("kinds", [{"reject": 1.0}, {"drop": 1.0}], ids=["rejected", "dropped"])
def test_a_colocated_job_that_comes_to_nothing_gives_the_incumbent_back(kinds: dict[str, float]) -> None:
    found = simulate(1, Faults(**kinds), Shape(jobs=2, colocate=True))
    assert (found.violation, dict(found.ended)) == ("", {})
    assert (found.events["EngineMemoryReleased"], found.events["EngineMemoryRestored"]) == (4, 4)


def test_engines_whose_memory_is_uncertain_end_and_others_come() -> None:
    for seed in range(3):
        found = simulate(seed, Faults(no_memory=0.2), Shape(jobs=3, colocate=True))
        assert found.violation == "" and found.events["EngineLeft"] > 0


def test_colocated_deployments_come_to_their_end_whatever_falls_upon_them() -> None:
    command = [sys.executable, "-m", "tests.simulation", "--colocated", "--seeds", "40"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "40 seeds" in found and "0 failed" in found


# -- one seed, one history


PRINT = "from tests.simulation.deployment import simulate; print([simulate(seed).digest for seed in range(6)])"


def told(hash_seed: str) -> str:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    done = subprocess.run(
        [sys.executable, "-c", PRINT], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout


def test_a_seed_gives_the_same_history_byte_for_byte_in_every_process() -> None:
    """In this one, and in another one that orders sets of strings differently."""
    here = f"{[simulate(seed).digest for seed in range(6)]}\n"
    assert told("0" if os.environ.get("PYTHONHASHSEED") != "0" else "4711") == here
    assert len(set(here.split(","))) == 6


def test_the_command_tells_one_seed_as_a_story_and_many_as_a_table() -> None:
    command = [sys.executable, "-m", "tests.simulation"]
    story = subprocess.run([*command, "--seed", "3"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found = simulate(3)
    assert [line.split(maxsplit=1)[1] for line in story.splitlines()[:-1]] == [line.strip() for _, line in found.story]
    many = subprocess.run([*command, "--seeds", "4"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "0 failed" in many and all(event in many for event in EVENTS)


def test_every_kind_of_fault_has_a_switch_and_a_cell_that_was_never_hit_is_named() -> None:
    assert {kind: getattr(Faults(), kind) for kind in KINDS} == dict.fromkeys(KINDS, 0.0)
    everything = Counter({(kind, event): 1 for kind in KINDS for event in EVENTS})
    del everything["crash", "SenderReady"]
    assert "crash at SenderReady" in missing(everything)


# -- what is wrong is found


def any_of(seeds: range, pattern: str, faults: Faults, shape: Shape | None = None, **given: object) -> list[Outcome]:
    found = [simulate(seed, faults, shape, **given) for seed in seeds]  # type: ignore[arg-type]
    wrong = [outcome for outcome in found if outcome.violation]
    assert wrong and any(pattern in outcome.violation for outcome in wrong), [outcome.violation for outcome in found]
    return wrong


class Leak(Ingress):
    """An ingress that lets bytes through after it was destroyed."""

    def write(self, name: str, start: int, data: bytes) -> None:
        self.target[name].data[start : start + len(data)] = data


def test_bytes_of_a_dead_attempt_that_land_after_the_hash_are_found() -> None:
    def leak(deployment: Deployment) -> None:
        deployment.network.ingress = Leak

    any_of(range(4), "with the memory of", Faults(late_bytes=1.0), Shape(jobs=4), prepare=leak)


def test_closed_ingresses_let_nothing_through_however_late() -> None:
    for seed in range(4):
        found = simulate(seed, Faults(late_bytes=1.0), Shape(jobs=4))
        assert (found.violation, found.ended["committed"]) == ("", 4) and found.hits.total() >= 8


def test_an_engine_that_trusts_what_arrived_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were receivers to report the target's digest without hashing their memory, a wrong byte would serve."""
    monkeypatch.setattr(Agent, "_receive", _trusting)
    any_of(range(8), "with the memory of", Faults(corrupt=0.5), Shape(jobs=2))


async def _trusting(self: Agent, effect: Receive) -> Event:
    """The liar that no protocol can detect: it reports the target's digest, whatever it holds."""
    async with self.memory:
        target = Manifest.decode(await blocking(self.store.get, effect.manifest))
        await self._move(effect, target, self.backend.live())
        self.proven = target.digest
    found = Found(target.digest, len(target.tensors))
    return verified(self.me.id, effect.load_id, found, "received", 0, 1.0, effect.publication, effect.attempt)


def test_a_receiver_that_reports_the_targets_digest_whatever_it_holds_is_invisible_to_the_log(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The one lie that stays: what decides is the engine's word about its own memory (docs/decisions/0004)."""
    monkeypatch.setattr(Agent, "_receive", _trusting)
    kept: list[Deployment] = []
    wrong = any_of(range(8), "with the memory of", Faults(skip=0.5), Shape(jobs=2), prepare=kept.append)
    for deployment in kept:
        assert check(deployment.truth.log, [], None).violations == ()
    assert wrong


def test_an_engine_that_generates_under_a_fence_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_module, "may_generate", _unfenced)
    any_of(range(4), "where a fence covers it", Faults(), Shape(jobs=2))


def _unfenced(world: World, engine: str, boot: str) -> bool:
    found = world.membership.engines.get(engine)
    head = world.publications.head
    proof = found.verified if found and found.boot == boot else None
    return head is not None and proof is not None and proof.load_id == head.load_id


def test_a_publisher_that_counts_too_few_members_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """It commits as soon as anybody has verified: every other consumer would halt on that."""
    monkeypatch.setattr(publishing, "_drive", _hasty)
    any_of(range(4), "its evidence is not the attempt's membership", Faults(), Shape(jobs=2))


_drive = publishing._drive


def _hasty(world: World, open_: Publication, deadlines: Deadlines, now: int) -> list[Debt]:
    done = tuple(m for m in open_.members if world.membership.report(m.boot, open_.id, open_.attempt))
    return _drive(world, replace(open_, members=done or open_.members), deadlines, now)


def test_an_engine_that_goes_on_after_its_lease_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Agent, "_in_touch", lambda self: True)
    any_of(range(8), "cut off since", Faults(partition=3.0), Shape(jobs=2, lease_s=2.0))


def test_an_engine_that_takes_a_swap_on_trust_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is exchanged, and nobody looks where what is served lies now."""
    monkeypatch.setattr(Memory, "swap", lambda self: None)
    monkeypatch.setattr(Agent, "_swap", _credulous)
    any_of(range(4), "with the memory of", Faults(), Shape(jobs=2, mode="staged"))


async def _credulous(self: Agent, effect: VerifyHead) -> Found | None:
    staged, self.staged = self.staged, None
    if staged is None or staged.load_id != effect.load_id:
        return None
    self._writing()
    await blocking(self.backend.swap)
    self.proven = staged.found.digest
    self.gate()
    return staged.found


def test_a_person_whose_request_nobody_answers_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishing, "refusals", lambda world: [])
    asks = (("JobRestoreRequested", "ReleaseCommitted"),)
    any_of(range(2), "not settled", Faults(), Shape(jobs=2, asks=asks))
