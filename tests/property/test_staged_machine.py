"""Staged and fenced releases in one deployment, under every interleaving that hypothesis can think of.

Knows: how an engine's two copies behave, and that a staged release stops nobody. Must not know: who decides what.
"""

from __future__ import annotations

import random
from typing import Literal

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize
from msgspec.structs import replace

from reef_bus.core import effects as do
from reef_bus.core import reactions
from reef_bus.core.effects import Debt, Effect, Policy
from reef_bus.core.serving import may_generate
from reef_bus.events import Event, Recorded
from tests import facts
from tests.fleet import FAULTS, Actor, Fault, Fleet
from tests.judge import Audit
from tests.property.test_core_machine import Deployment

Modes = tuple[str, str]
MODES: tuple[Modes, ...] = (("staged", "staged"), ("staged", "fenced"))
"""Of the two publishers: the second pair is a deployment whose configuration is being changed."""


class Mixed(Audit):
    """The invariants again, and how often somebody swapped."""

    def __init__(self) -> None:
        super().__init__()
        self.swaps = 0

    def _saw(self, recorded: Recorded) -> None:
        self.swaps += recorded.name == "ReceiverVerified" and recorded.event.method == "swapped"  # type: ignore[attr-defined]
        super()._saw(recorded)


class Staging(Fleet):
    """Engines with two copies. What is beside is private to its boot, and gone with it."""

    def __init__(self, semantics: Literal["single", "cluster"] = "single", modes: Modes = MODES[0]) -> None:
        super().__init__(semantics)
        self.audit: Mixed = Mixed()
        for recorded in self.log:
            self.audit.saw(recorded)
        self.modes = dict(zip(("p0", "p1"), modes, strict=True))
        self.beside: dict[str, tuple[str, str]] = {}

    def owed(self, actor: Actor) -> list[Debt]:
        if actor.kind != "publisher":
            return list(super().owed(actor))
        alive = {engine.boot for engine in self.engines} - self.slandered
        silent = {e.boot for e in actor.world.membership.engines.values()} - alive
        policy = Policy(mode=self.modes[actor.name])
        return reactions.publisher(actor.world, policy, self.scribe.now, frozenset(silent))

    def _perform(self, actor: Actor, effect: Effect, fault: Fault) -> Event | None:
        match effect:
            case do.Stage():
                return self._stage(actor, effect, fault)
            case do.VerifyHead(load_id=load_id, manifest=manifest):
                staged = self.beside.pop(actor.boot, None)
                if staged == (load_id, manifest) and fault == "none":
                    actor.memory = manifest
                    return replace(facts.swapped(actor.name, 0, "base"), load_id=load_id, manifest=manifest)
            case do.Fence():
                self.beside.pop(actor.boot, None)
        return super()._perform(actor, effect, fault)

    def _stage(self, actor: Actor, effect: do.Stage, fault: Fault) -> Event:
        """What is served goes on being served: nothing but the copy beside it changes."""
        served = may_generate(actor.world, actor.name, actor.boot)
        assert served, f"{actor.boot} stages for {effect.publication} and does not serve"
        attempt = {"publication": effect.publication, "attempt": effect.attempt, "load_id": effect.load_id}
        held = effect.manifest if fault not in ("fail", "lie") else f"half of {effect.manifest}"
        self.beside[actor.boot] = effect.load_id, held
        if fault == "fail":
            return replace(facts.failed(actor.name, 0, observed=held), staged=True, **attempt)
        return replace(facts.staged(actor.name, 0, "base"), manifest=held, **attempt)


class StagedDeployment(Deployment):
    @initialize(
        semantics=st.sampled_from(["single", "cluster"]), modes=st.sampled_from(MODES), rounds=st.integers(0, 40)
    )
    def begin(self, semantics: str, modes: Modes, rounds: int) -> None:
        self.fleet = Staging("cluster" if semantics == "cluster" else "single", modes)
        self.rounds(rounds)


TestStagedDeployment = pytest.mark.filterwarnings("default")(StagedDeployment.TestCase)
TestStagedDeployment.settings = settings(
    max_examples=60, stateful_step_count=40, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)


def test_without_faults_nobody_ever_stops_for_a_transfer() -> None:
    """Ten candidates, ten releases, three swaps each; from its first proof on, an engine serves but for its swap."""
    fleet = Staging()
    while len(fleet.truth.training.selected) < 10:
        for actor in fleet.actors:
            fleet.catch_up(actor)
            fleet.act(actor)
            fleet.check()
    fleet.settle()
    releases = len(fleet.truth.publications.releases) - 1
    assert releases == len(fleet.truth.training.selected) >= 10
    assert (fleet.truth.void, fleet.truth.publications.excluded, fleet.audit.swaps) == (0, {}, 3 * releases)
    assert not [r.seq for r in fleet.log if r.name == "EngineFenced"]


@pytest.mark.parametrize("seed", range(12))
def test_long_runs_with_faults_end_well(seed: int) -> None:
    chance = random.Random(seed)
    fleet = Staging("cluster" if seed % 2 else "single", MODES[seed % 3 == 0])
    for _ in range(400):
        actor = chance.choice(fleet.actors)
        fleet.catch_up(actor, chance.choice([1, 3, 99]))
        fleet.act(actor, chance.choice(FAULTS) if chance.random() < 0.3 else "none")
        if chance.random() < 0.02:
            fleet.crash(chance.choice(fleet.actors))
        if chance.random() < 0.1:
            fleet.land()
        if chance.random() < 0.02:
            fleet.wait(chance.choice([1, 11, 31]))
        fleet.check()
    fleet.settle()
    assert len(fleet.truth.publications.releases) > 1, "the run released nothing: it tests nothing"
    assert fleet.audit.swaps or "fenced" in fleet.modes.values(), "nobody swapped: it tests nothing of staged mode"
