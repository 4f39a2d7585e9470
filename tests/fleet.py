"""A deployment in a box: a trainer, publishers and engines over one log, with canned effects and faults on demand.

Knows: how the runner treats debts and how a broker compares. Must not know: what will be owed; it asks `reactions`.
What each engine's memory really holds is kept here, so that the serving rule can be held against the truth.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Literal

from msgspec.structs import replace

from reef_bus.core import effects as do
from reef_bus.core import invariants, reactions
from reef_bus.core.effects import Debt, Effect, Me, Policy
from reef_bus.core.serving import may_generate
from reef_bus.core.world import World, fold
from reef_bus.envelope import identify, payload
from reef_bus.events import (
    ComponentLost,
    Draft,
    Event,
    Member,
    Recorded,
)
from tests import facts
from tests.judge import Audit
from tests.spec import MILLI, SECOND, Scribe

Fault = Literal["none", "fail", "lie", "lose_ack", "late", "never", "misspell"]
FAULTS: tuple[Fault, ...] = ("none", "none", "none", "none", "fail", "lie", "lose_ack", "late", "never", "misspell")

Request = Literal["rollback", "promote", "discard", "restore", "retire", "halt"]
REQUESTS: tuple[Request, ...] = ("rollback", "promote", "discard", "restore", "retire", "halt")


class Actor:
    """One component: its current boot, its own fold, and what its effects came to."""

    def __init__(self, kind: str, name: str) -> None:
        self.kind, self.name = kind, name
        self.starts = 0
        self.reboot()

    def reboot(self) -> None:
        self.starts += 1
        self.world = World()
        self.results: dict[str, Event | None] = {}
        self.settled: set[str] = set()
        self.memory = ""

    @property
    def boot(self) -> str:
        return f"{self.name}.{self.starts}"

    @property
    def me(self) -> Me:
        return Me(self.name, self.boot)


class Fleet:
    def __init__(
        self,
        semantics: Literal["single", "cluster"] = "single",
        engines: int = 3,
        publish: str = "every",
        in_place: bool = False,
        hold: bool = False,
    ) -> None:
        self.semantics, self.scribe, self.truth = semantics, Scribe(), World()
        self.policy, self.in_place, self.hold = Policy(publish=publish), in_place, hold
        self.trainer = Actor("trainer", "t")
        self.publishers = [Actor("publisher", "p0"), Actor("publisher", "p1")]
        self.engines = [Actor("engine", f"e{n}") for n in range(engines)]
        self.actors = [self.trainer, *self.publishers, *self.engines]
        self.in_flight: list[tuple[Draft, int, bool]] = []
        self.slandered: frozenset[str] = frozenset()
        self.ids: dict[str, int] = {}
        self.jobs = 0
        self.dispatching = True
        self.audit = Audit()
        self._store(Draft(event=facts.opened(), writer="s", boot="s"), 0)
        for actor in self.actors:
            self.catch_up(actor)

    @property
    def log(self) -> list[Recorded]:
        return self.scribe.log

    # -- what can happen

    def catch_up(self, actor: Actor, events: int = 1 << 30) -> None:
        """Fold some of what the actor has not seen yet."""
        for recorded in self.log[actor.world.seq : actor.world.seq + events]:
            fold(actor.world, recorded)

    def crash(self, actor: Actor) -> None:
        actor.reboot()
        self.catch_up(actor)

    def die_in_step(self) -> None:
        """The trainer ends between its first optimizer step and a durable candidate, if it is there."""
        job = self.truth.training.job
        if job and job.boot == self.trainer.boot and not job.candidate:
            self.crash(self.trainer)

    def lose(self, actor: Actor) -> None:
        """A supervisor records that the actor's process ended; whether it really did is another matter."""
        event = ComponentLost(component=actor.name, exit=-9)
        self._store(Draft(event=event, writer="s", boot="s"), self.scribe.tails.get(event.chain, 0))

    def wait(self, seconds: float) -> None:
        self.scribe.now += int(seconds * SECOND)

    def ask(self, kind: Request, chance: random.Random) -> None:
        """A person asks for something: mostly on the head as it is and about what is there, else about anything."""
        event = self._request(kind, chance)
        if chance.random() < 0.2:
            event = replace(event, head=facts.L(chance.randrange(9)))
        self._store(Draft(event=event, writer="person/ann", boot="cli"), 0)

    def decide(self, chance: random.Random) -> None:
        """A person looks at the job, and decides on it if it waits for that."""
        job = self.truth.training.job
        asked = {request.about for request in self.truth.requests.values() if not request.refused}
        if job and job.ambiguous and job.id not in asked:
            self._say(chance.choice([facts.restore_asked(job.id), facts.discard_asked(job.id)]))
        elif self.hold and job and job.evaluated and not asked & {job.id, job.candidate}:
            promote = chance.random() < 0.8
            self._say(facts.promotion_asked(job.candidate) if promote else facts.discard_asked(job.id))

    def _say(self, event: Event) -> None:
        """On the head as it is."""
        now = self.truth.publications.head
        known = replace(event, head=now.load_id if now else "")  # type: ignore[call-arg]
        self._store(Draft(event=known, writer="person/ann", boot="cli"), 0)

    def _request(self, kind: Request, chance: random.Random) -> Event:
        world = self.truth
        now, job, open_ = world.publications.head, world.training.job, world.publications.open
        on = int(now.load_id.removeprefix("inc:")) if now else 0
        releases = [int(name.removeprefix("inc:")) for name in world.publications.releases]
        match kind:
            case "rollback":
                return facts.rollback_asked(chance.choice([*releases, 99]), on)
            case "promote":
                return facts.promotion_asked(chance.choice([*list(world.training.candidates)[-2:], "c?"]), on)
            case "discard":
                return facts.discard_asked(job.id if job else "j?", on)
            case "restore":
                return facts.restore_asked(job.id if job else "j?", on)
            case "retire":
                engine = chance.choice(self.engines)
                return facts.retire_asked(engine.name, max(1, engine.starts - chance.randrange(2)), on)
            case "halt":
                event = facts.halt_asked(99, on)
                return replace(event, publication=open_.id) if open_ else event

    def land(self) -> None:
        """What was under way arrives: compared as any append is, or, by another spelling of the filter, not at all."""
        flying, self.in_flight = self.in_flight, []
        for draft, prev, compared in flying:
            if not compared or self.scribe.tails.get(draft.event.chain, 0) == prev:
                self._store(draft, prev)

    def act(self, actor: Actor, fault: Fault = "none") -> bool:
        """One turn of the runner: perform what is newly owed, append the first fact that is due. True if it did."""
        debts = self.owed(actor)
        keys = {debt.key for debt in debts}
        actor.results = {key: event for key, event in actor.results.items() if key in keys}
        actor.settled &= keys
        for debt in debts:
            if debt.key not in actor.results and not isinstance(debt.effect, do.Append):
                if isinstance(debt.effect, do.Retire) or (isinstance(debt.effect, do.VerifyHead) and fault == "fail"):
                    self.crash(actor)  # a failed load ends the boot, too
                    return True
                if isinstance(debt.effect, do.AssembleBatch) and not self.dispatching:
                    continue
                actor.results[debt.key] = self._perform(actor, debt.effect, fault)
        return self._append_first(actor, debts, fault)

    def owed(self, actor: Actor) -> Sequence[Debt]:
        match actor.kind:
            case "trainer":
                return reactions.trainer(actor.world, actor.me)
            case "engine":
                return reactions.engine(actor.world, actor.me, Policy().deadlines)
        alive = {engine.boot for engine in self.engines} - self.slandered
        silent = {e.boot for e in actor.world.membership.engines.values()} - alive
        return reactions.publisher(actor.world, self.policy, self.scribe.now, frozenset(silent))

    # -- hands

    def _append_first(self, actor: Actor, debts: Sequence[Debt], fault: Fault) -> bool:
        for debt in debts:
            event = debt.effect.event if isinstance(debt.effect, do.Append) else actor.results.get(debt.key)
            if event is None or debt.key in actor.settled:
                continue
            if debt.at_head:
                self.catch_up(actor)
                found = next((d.effect for d in self.owed(actor) if d.key == debt.key), None)
                if not isinstance(found, do.Append):
                    return True
                event = found.event
            self._append(actor, debt, event, fault)
            return True
        return False

    def _append(self, actor: Actor, debt: Debt, event: Event, fault: Fault) -> None:
        prev = actor.world.tail(event.chain)
        draft = Draft(event=event, writer=actor.name, boot=actor.boot, cause=debt.cause, correlation=debt.correlation)
        if fault in ("late", "misspell"):
            self.in_flight.append((draft, prev, fault == "late"))
        elif fault != "never":
            id_ = identify(draft, prev, payload(event))
            known = self.ids.get(id_)
            if self.scribe.tails.get(event.chain, 0) == prev and known is None:
                self._store(draft, prev)
            # else a conflict or, on a cluster, a duplicate's acknowledgement: either way only the own fold says.
            if self.semantics == "cluster" and fault == "none" and known is not None:
                self.catch_up(actor, known - actor.world.seq)
                return
        self.catch_up(actor)  # an unknown outcome, too, is waited out at the head before anything else is tried
        if any(r.event == event and r.boot == actor.boot and r.prev == prev for r in self.log[prev:]):
            actor.settled.add(debt.key)

    def _store(self, draft: Draft, prev: int) -> None:
        self.scribe.now += MILLI
        recorded = self.scribe.store(draft, prev)
        self.ids[recorded.id] = recorded.seq
        void = fold(self.truth, recorded)
        if not void:
            self.audit.saw(recorded)

    def _perform(self, actor: Actor, effect: Effect, fault: Fault) -> Event | None:
        name = actor.name
        match effect:
            case do.Join():
                return facts.trainer_joined(in_place=self.in_place) if actor is self.trainer else facts.joined(name)
            case do.Register():
                return facts.registered()
            case do.AssembleBatch(bases=(base,), step=step):
                self.jobs += 1
                return facts.dispatched(f"j{self.jobs}", base, step)
            case do.Train(job=job):
                made = facts.ready(job.id, f"c-{job.id}-{job.attempt}", job.base, job.attempt)
                return facts.dropped(job.id) if fault == "fail" else made
            case do.Evaluate(candidate=candidate):
                return facts.evaluated(candidate.id)
            case do.Decide(candidate=candidate):
                if self.hold and fault != "fail":
                    return None
                return facts.rejected(candidate.id) if fault == "fail" else facts.selected(candidate.id)
            case do.OfferWeights(publication=open_):
                word = facts.offer_failed(0) if fault == "fail" else facts.offered(0, open_.candidate)
                known = {"load_id": open_.load_id} if fault != "fail" else {}
                return replace(word, publication=open_.id, attempt=open_.attempt, **known)
            case do.Fence(publication=publication, attempt=attempt):
                return replace(facts.fenced(name, 1), publication=publication, attempt=attempt)
            case do.Receive():
                return self._receive(actor, effect, fault)
            case do.VerifyHead(load_id=load_id, manifest=manifest):
                actor.memory = manifest
                return replace(facts.holds(name, 0, "base"), load_id=load_id, manifest=manifest)
        raise AssertionError(effect)

    def _receive(self, actor: Actor, effect: do.Receive, fault: Fault) -> Event:
        attempt = {"publication": effect.publication, "attempt": effect.attempt, "load_id": effect.load_id}
        actor.memory = effect.manifest if fault not in ("fail", "lie") else f"half of {effect.manifest}"
        if fault == "fail":
            return replace(facts.failed(actor.name, 0, observed=actor.memory), **attempt)
        return replace(facts.verified(actor.name, 0, "base"), manifest=actor.memory, **attempt)

    # -- what must hold

    def check(self) -> None:
        """After every step, whatever happened."""
        assert self.truth.seq == len(self.log)
        selected, ended = self.truth.training.selected, self.truth.publications.ended
        assert self.truth.queue == [candidate for candidate in selected if candidate not in ended]
        for engine in self.engines:
            if may_generate(engine.world, engine.name, engine.boot):
                head = engine.world.publications.head
                assert head is not None and engine.memory == head.manifest, f"{engine.boot} serves {engine.memory}"
                assert self.audit.committed.get(head.load_id) == head.manifest
                assert Member(engine.name, engine.boot) not in self.audit.fence(engine.world.seq), "generates, fenced"

    def settle(self, seconds: int = 1500, seed: int = 0) -> None:
        """Faults off: time passes, everybody reads and acts, people too. Invariant 12 is that this ends."""
        self.dispatching, self.slandered = False, frozenset()
        end, chance = self.scribe.now + seconds * SECOND, random.Random(seed)
        self.land()
        while not self.done():
            assert self.scribe.now < end, [f"{r.seq} {r.name} {r.boot}" for r in self.log[-20:]]
            moved = False
            for actor in self.actors:
                self.catch_up(actor)
                moved |= self.act(actor)
                self.check()
            self.decide(chance)
            self.wait(0 if moved else 5)
        assert [v.text for v in invariants.check(self.log, [], None).violations] == []

    def done(self) -> bool:
        world = self.truth
        ended = all(c in world.publications.ended for c in world.training.selected)
        idle = world.publications.open is None and world.training.job is None and world.training.scenario != ""
        answered = not world.requests and not self.audit.pending
        return ended and idle and answered and all(may_generate(world, e.name, e.boot) for e in self.engines)


def wander(seed: int, steps: int = 500) -> Fleet:
    """A deployment that goes whatever way the seed says, and is then let come to its end. Raises what must not be."""
    chance = random.Random(seed)
    publish = "latest" if seed & 2 else "every"
    fleet = Fleet("cluster" if seed & 1 else "single", publish=publish, in_place=bool(seed & 4), hold=bool(seed & 8))
    for _ in range(steps):
        actor = chance.choice(fleet.actors)
        fleet.catch_up(actor, chance.choice([1, 3, 99]))
        fleet.act(actor, chance.choice(FAULTS) if chance.random() < 0.3 else "none")
        _befall(fleet, chance)
        fleet.check()
    fleet.settle(seed=seed)
    return fleet


def _befall(fleet: Fleet, chance: random.Random) -> None:
    if chance.random() < 0.02:
        fleet.crash(chance.choice(fleet.actors))
    if chance.random() < 0.05:
        fleet.die_in_step()
    if chance.random() < 0.1:
        fleet.land()
    if chance.random() < 0.02:
        fleet.wait(chance.choice([1, 11, 31]))
    if chance.random() < 0.03:
        fleet.ask(chance.choice(REQUESTS), chance)
    if chance.random() < 0.2:
        fleet.decide(chance)
