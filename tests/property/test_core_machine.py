"""Trainer, publishers and engines under every interleaving that hypothesis can think of (protocol.md section 8).

Knows: what may go wrong, and what must hold after every step and in the end. Must not know: how any of it is decided.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.fleet import FAULTS, REQUESTS, Fault, Fleet, Request, wander

ACTORS = st.integers(0, 5)
ENGINES = st.integers(0, 2)


class Deployment(RuleBasedStateMachine):
    fleet: Fleet

    @initialize(
        semantics=st.sampled_from(["single", "cluster"]),
        publish=st.sampled_from(["every", "latest"]),
        in_place=st.booleans(),
        hold=st.booleans(),
        rounds=st.integers(0, 40),
    )
    def begin(self, semantics: str, publish: str, in_place: bool, hold: bool, rounds: int) -> None:
        known = "cluster" if semantics == "cluster" else "single"
        self.fleet = Fleet(known, publish=publish, in_place=in_place, hold=hold)
        self.rounds(rounds)

    @rule(who=ACTORS, events=st.integers(0, 6), fault=st.sampled_from(FAULTS))
    def turn(self, who: int, events: int, fault: Fault) -> None:
        """Somebody reads a little, and acts on what it has read."""
        actor = self.fleet.actors[who]
        self.fleet.catch_up(actor, events)
        self.fleet.act(actor, fault)

    @rule(count=st.integers(1, 8))
    def rounds(self, count: int) -> None:
        for _ in range(count):
            for actor in self.fleet.actors:
                self.fleet.catch_up(actor)
                self.fleet.act(actor)

    @rule(who=ACTORS)
    def crash(self, who: int) -> None:
        self.fleet.crash(self.fleet.actors[who])

    @rule()
    def die_in_step(self) -> None:
        self.fleet.die_in_step()

    @rule()
    def land(self) -> None:
        self.fleet.land()

    @rule(seconds=st.sampled_from([0.1, 11.0, 31.0]))
    def wait(self, seconds: float) -> None:
        self.fleet.wait(seconds)

    @rule(kind=st.sampled_from(REQUESTS), seed=st.integers(0, 99))
    def ask(self, kind: Request, seed: int) -> None:
        """A person asks, on the right head or not, about what is there or not."""
        self.fleet.ask(kind, random.Random(seed))

    @rule(seed=st.integers(0, 99))
    def decide(self, seed: int) -> None:
        """A person decides on a job that waits for one."""
        self.fleet.decide(random.Random(seed))

    @rule(engines=st.sets(ENGINES, max_size=2))
    def slander(self, engines: set[int]) -> None:
        """Heartbeats of living engines are missed: unjust, and still safe."""
        self.fleet.slandered = frozenset(self.fleet.engines[n].boot for n in engines)

    @rule(engine=ENGINES, really=st.booleans())
    def lose(self, engine: int, really: bool) -> None:
        """A supervisor says that an engine's process ended, rightly or not."""
        if really:
            self.fleet.crash(self.fleet.engines[engine])
        self.fleet.lose(self.fleet.engines[engine])

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "fleet"):
            self.fleet.check()

    def teardown(self) -> None:
        if hasattr(self, "fleet"):
            self.fleet.settle()


TestDeployment = pytest.mark.filterwarnings("default")(Deployment.TestCase)
TestDeployment.settings = settings(
    max_examples=60, stateful_step_count=40, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)


def test_without_faults_everything_is_released() -> None:
    """Ten candidates, ten releases, no void event, nobody excluded."""
    fleet = Fleet()
    while len(fleet.truth.training.selected) < 10:
        for actor in fleet.actors:
            fleet.catch_up(actor)
            fleet.act(actor)
            fleet.check()
    fleet.settle()
    found = fleet.truth.publications
    assert len(found.releases) - 1 == len(fleet.truth.training.selected) == found.sequence >= 10
    assert (fleet.truth.void, found.excluded) == (0, {})


@pytest.mark.parametrize("seed", range(16))
def test_long_runs_with_faults_end_well(seed: int) -> None:
    """Every choice of a deployment twice."""
    fleet = wander(seed)
    assert len(fleet.truth.publications.releases) > 1, "the run released nothing: it tests nothing"
