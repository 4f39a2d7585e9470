"""The tests' vocabulary: `given(*events).when(fact).then(*expectations)`, and the scribe that numbers what is given.

Knows: how a broker numbers, stamps and chains what it stores. Must not know: the void rule, the fold, or who owes what:
those are what the tests ask about.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from reef_bus.core import reactions
from reef_bus.core.effects import Append, Debt, Effect, Me, Policy
from reef_bus.core.serving import may_generate
from reef_bus.core.world import World, fold
from reef_bus.envelope import identify, payload
from reef_bus.errors import ContractError
from reef_bus.events import Draft, EngineJoined, Event, Recorded, TrainerJoined
from reef_bus.topology import subject

SECOND = 1_000_000_000
T0 = 1_700_000_000 * SECOND
MILLI = 1_000_000


class Said(NamedTuple):
    """A step that is not the ordinary next one: another boot, another expectation, or after a while."""

    event: Event
    boot: str = ""
    prev: int | None = None
    after_s: float = 0.0


Step = Event | Said


def by(boot: str, event: Event) -> Said:
    return Said(event, boot)


def chained_to(prev: int, event: Event, boot: str = "") -> Said:
    return Said(event, boot, prev)


def after(seconds: float, event: Event) -> Said:
    return Said(event, after_s=seconds)


class Scribe:
    """Turns events into what a log holds: numbered from 1, a millisecond apart, each chained to its family's last."""

    def __init__(self) -> None:
        self.log: list[Recorded] = []
        self.tails: dict[str, int] = {}
        self.boots: dict[str, str] = {}
        self.now = T0

    def write(self, step: Step) -> Recorded:
        said = step if isinstance(step, Said) else Said(step)
        self.now += MILLI + int(said.after_s * SECOND)
        event, chain = said.event, said.event.chain
        boot = said.boot or self._boot(event)
        last = 0 if event.family == "operator" else self.tails.get(chain, 0)  # requests are compared with nothing
        prev = last if said.prev is None else said.prev
        return self.store(Draft(event=event, writer=f"{event.family}/{event.key}", boot=boot), prev)

    def store(self, draft: Draft, prev: int) -> Recorded:
        """Store as it is; whether the expectation held is the caller's business."""
        event, seq = draft.event, len(self.log) + 1
        recorded = Recorded(
            seq=seq,
            time=self.now,
            subject=subject("test", event),
            id=identify(draft, prev, payload(event)),
            prev=prev,
            cause=draft.cause,
            correlation=draft.correlation,
            writer=draft.writer,
            boot=draft.boot,
            event=event,
        )
        self.log.append(recorded)
        self.tails[event.chain] = seq
        if isinstance(event, TrainerJoined | EngineJoined):
            self.boots[event.chain] = draft.boot
        return recorded

    def _boot(self, event: Event) -> str:
        first = {"train": "t1", "release": "p1", "engine": f"{event.key}.1"}.get(event.family, "s1")
        return self.boots.get(event.chain, first)


class Outcome(NamedTuple):
    """What folding the last fact did. `why` is why it is void; `error` the contradiction."""

    world: World
    recorded: Recorded
    why: str
    error: ContractError | None


Expectation = Callable[[Outcome], None]


class Given:
    def __init__(self, steps: tuple[Step, ...]) -> None:
        self.scribe, self.world = Scribe(), World()
        for step in steps:
            recorded = self.scribe.write(step)
            why = fold(self.world, recorded)
            assert not why or isinstance(step, Said), f"{recorded.seq} {recorded.name}: {why}"

    def when(self, step: Step) -> When:
        recorded = self.scribe.write(step)
        try:
            return When(Outcome(self.world, recorded, fold(self.world, recorded), None))
        except ContractError as error:
            return When(Outcome(self.world, recorded, "", error))

    def then(self, *expectations: Expectation) -> World:
        """Expectations of the state as it is given."""
        return When(Outcome(self.world, self.scribe.log[-1], "", None)).then(*expectations)

    @property
    def now(self) -> int:
        return self.scribe.now


class When:
    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome

    def then(self, *expectations: Expectation) -> World:
        for expectation in expectations:
            expectation(self.outcome)
        return self.outcome.world


def given(*steps: Step) -> Given:
    return Given(steps)


# -- expectations


def counts(outcome: Outcome) -> None:
    assert outcome.error is None and outcome.why == "", outcome.error or outcome.why


def void(pattern: str) -> Expectation:
    def check(outcome: Outcome) -> None:
        assert outcome.error is None, outcome.error
        assert outcome.why and re.search(pattern, outcome.why), f"why: {outcome.why!r}"

    return check


def contradicts(pattern: str) -> Expectation:
    """It halts whoever reads it, and says where."""

    def check(outcome: Outcome) -> None:
        assert outcome.error is not None, f"folded; void: {outcome.why!r}"
        assert outcome.error.seq == outcome.recorded.seq
        assert f"event {outcome.recorded.seq} {outcome.recorded.name}" in str(outcome.error)
        assert re.search(pattern, str(outcome.error)), str(outcome.error)

    return check


def serving(*engines: str) -> Expectation:
    """Exactly these engines may generate, by their current boots."""

    def check(outcome: Outcome) -> None:
        found = outcome.world.membership.engines
        able = [name for name in sorted(found) if may_generate(outcome.world, name, found[name].boot)]
        assert able == sorted(engines)

    return check


def head(load_id: str) -> Expectation:
    def check(outcome: Outcome) -> None:
        found = outcome.world.publications.head
        assert found is not None and found.load_id == load_id

    return check


# -- who owes what


def trainer_debts(world: World, boot: str = "t1", *, colocate: bool = False) -> list[Debt]:
    return reactions.trainer(world, Me("trainer", boot), colocate=colocate)


def engine_debts(
    world: World, engine: str, boot: str = "", *, written: bool = False, out: tuple[str, ...] = ()
) -> list[Debt]:
    return reactions.engine(world, Me(engine, boot or f"{engine}.1"), Policy().deadlines, written=written, out=out)


def publisher_debts(
    world: World, now: int, silent: tuple[str, ...] = (), transport: str = "tcp", publish: str = "every"
) -> list[Debt]:
    return reactions.publisher(world, Policy(transport=transport, publish=publish), now, frozenset(silent))


def only(debts: list[Debt]) -> Effect:
    assert len(debts) == 1, debts
    return debts[0].effect


def facts_of(debts: list[Debt]) -> list[Event]:
    """The facts among what is owed: what needs nothing but to be appended."""
    return [debt.effect.event for debt in debts if isinstance(debt.effect, Append)]


def fact(debts: list[Debt]) -> Event:
    found = facts_of(debts)
    assert len(found) == len(debts) == 1, debts
    return found[0]
