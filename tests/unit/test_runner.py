"""The loop: a key's effect once, a fact never lost and never doubled, and an end that says why.

Knows: the runner's promises and the two brokers' retry semantics. Must not know: any real role.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Literal

import pytest

from reef_bus import runner as runner_module
from reef_bus.core.effects import Append, Debt, Effect, Me, Retire
from reef_bus.core.world import World
from reef_bus.errors import ContractError, TransferError, Unavailable
from reef_bus.events import ComponentStarted, Draft, Event, Recorded
from reef_bus.journal import LOG, MemoryJournal, MemoryStreams, Stored
from reef_bus.runner import Beat, Retired, Role, Runner
from tests.facts import joined, opened, target, trainer_joined

BOTH = pytest.mark.parametrize("semantics", ["single", "cluster"])


class Work(Effect, frozen=True):
    """An effect of these tests."""


def began(starts: int, pid: int = 1) -> ComponentStarted:
    return ComponentStarted(component="c", pid=pid, starts=starts)


def starts(world: World) -> int:
    return world.components["c"].starts if "c" in world.components else 0


class Scripted(Role):
    """A role whose question and hands are the test's."""

    name = "supervisor"

    def __init__(self, owed: Callable[[World, int], Sequence[Debt]], work: Callable[..., Any] | None = None) -> None:
        super().__init__(Me("supervisor", "s1"))
        self.owed, self.work = owed, work
        self.batches: list[list[Recorded]] = []
        self.asked: list[int] = []

    def react(self, world: World, now: int) -> Sequence[Debt]:
        self.asked.append(world.seq)
        return self.owed(world, now)

    async def perform(self, debt: Debt, scope: contextlib.AsyncExitStack) -> Event | None:
        assert self.work is not None
        found: Event | None = await self.work(debt, scope)
        return found

    def folded(self, world: World, batch: Sequence[Recorded]) -> None:
        self.batches.append(list(batch))


def once(world: World, now: int = 0) -> list[Debt]:
    """One fact: the component shall have been started once."""
    return [Debt(key="start", effect=Work(), cause=1)] if world.incarnation and starts(world) < 1 else []


async def put(journal: MemoryJournal, *events: Event, boot: str = "other") -> None:
    """Append as somebody else would, whatever the runner does meanwhile."""
    for event in events:
        prev = journal.streams.tails.get(event.chain, 0)
        await journal.append(Draft(event=event, writer="other/1", boot=boot), prev)


def names(streams: MemoryStreams) -> list[str]:
    return [message.subject.rpartition(".")[2] for message in streams.messages[LOG]]


@contextlib.asynccontextmanager
async def running(journal: MemoryJournal, role: Role, clock: Callable[[], int] = lambda: 0) -> AsyncIterator[Runner]:
    found = Runner(journal, role, clock=clock, tick_s=0.01)
    task = asyncio.create_task(found.run())
    try:
        yield found
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(holds: Callable[[], bool], seconds: float = 5.0) -> None:
    async with asyncio.timeout(seconds):
        while not holds():  # noqa: ASYNC110 - what is waited for is a state of the loop under test
            await asyncio.sleep(0.005)


async def quiet(seconds: float = 0.1) -> None:
    """Long enough for many ticks of the loop."""
    await asyncio.sleep(seconds)


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "RETRY_S", 0.01)


@pytest.fixture
def streams() -> MemoryStreams:
    return MemoryStreams()


# -- an effect once per key, a fact once per effect


async def test_an_effect_starts_once_per_key_however_often_it_is_owed(streams: MemoryStreams) -> None:
    """Rule 3: react may return the same debt on every fold, and nothing trains twice."""
    begun: list[str] = []
    release = asyncio.Event()

    async def work(debt: Debt, scope: Any) -> Event:
        begun.append(debt.key)
        await release.wait()
        return began(1)

    journal = MemoryJournal(streams)
    await put(journal, opened())
    async with running(journal, Scripted(once, work)) as found:
        await until(lambda: bool(begun))
        await put(journal, trainer_joined(), joined("e0"), boot="b")
        await until(lambda: found.world.seq == 3)
        release.set()
        await until(lambda: starts(found.world) == 1)
        await quiet()
    assert begun == ["start"]
    assert names(streams) == ["LogOpened", "TrainerJoined", "EngineJoined", "ComponentStarted"]


async def test_an_effect_without_a_fact_is_settled(streams: MemoryStreams) -> None:
    begun: list[str] = []

    async def work(debt: Debt, scope: Any) -> None:
        begun.append(debt.key)

    journal = MemoryJournal(streams)
    await put(journal, opened())
    async with running(journal, Scripted(once, work)):
        await until(lambda: bool(begun))
        await quiet()
    assert begun == ["start"] and names(streams) == ["LogOpened"]


async def test_a_fact_names_its_cause_writer_and_boot(streams: MemoryStreams) -> None:
    def owed(world: World, now: int) -> list[Debt]:
        if not world.incarnation or starts(world):
            return []
        return [Debt(key="k", effect=Append(began(1)), cause=1, correlation="job-7")]

    journal = MemoryJournal(streams)
    await put(journal, opened())
    async with running(journal, Scripted(owed)) as found:
        await until(lambda: starts(found.world) == 1)
    stored = await journal.read(LOG, 2)
    assert stored and (stored.cause, stored.correlation, stored.writer, stored.boot, stored.prev) == (
        *(1, "job-7", "supervisor/supervisor", "s1", 1),
    )


# -- outcomes of appends


@BOTH
async def test_a_lost_ack_neither_loses_nor_doubles_a_fact(semantics: Literal["single", "cluster"]) -> None:
    """Row "ack of any append lost": it is there; rule 5."""
    streams = MemoryStreams(semantics)
    lost = [True, True]
    journal = MemoryJournal(streams, lose_ack=lambda draft: draft.boot == "s1" and bool(lost and lost.pop()))
    await put(journal, opened())

    async def work(debt: Debt, scope: Any) -> Event:
        return began(1)

    async with running(journal, Scripted(once, work)) as found:
        await until(lambda: starts(found.world) == 1)
        await quiet()
    assert names(streams) == ["LogOpened", "ComponentStarted"]


class Slow(MemoryJournal):
    """A broker that answers nothing and stores what it was sent later, or never."""

    late: float | None = 0.05
    sent = 0

    async def append(self, draft: Draft, prev: int) -> Stored:
        if draft.boot != "s1":
            return await super().append(draft, prev)
        self.sent += 1
        if self.sent > 1:
            return await super().append(draft, prev)
        if self.late is not None:
            self.task = asyncio.create_task(self._later(draft, prev, self.late))
        raise Unavailable("no answer")

    async def _later(self, draft: Draft, prev: int, seconds: float) -> None:
        await asyncio.sleep(seconds)
        with contextlib.suppress(Exception):
            await super().append(draft, prev)


@BOTH
@pytest.mark.parametrize("late", [None, 0.0, 0.015, 0.05], ids=["never", "at once", "between tries", "after the retry"])
async def test_an_unknown_outcome_is_a_state(semantics: Literal["single", "cluster"], late: float | None) -> None:
    """It is there, or not, or comes yet: one fact in every case."""
    streams = MemoryStreams(semantics)
    journal = Slow(streams)
    journal.late = late
    await put(journal, opened())

    async def work(debt: Debt, scope: Any) -> Event:
        return began(1)

    async with running(journal, Scripted(once, work)) as found:
        await until(lambda: starts(found.world) == 1)
        await quiet()
    assert names(streams) == ["LogOpened", "ComponentStarted"]


@BOTH
async def test_somebody_else_appended_first_fold_and_decide_again(semantics: Literal["single", "cluster"]) -> None:
    """Conflict: two publishers, one append wins."""
    streams = MemoryStreams(semantics)
    journals = [MemoryJournal(streams) for _ in range(2)]
    await put(journals[0], opened())

    def owed(world: World, now: int) -> list[Debt]:
        have = starts(world)
        return [Debt(key=f"start/{have}", effect=Append(began(have + 1)))] if world.incarnation and have < 20 else []

    async with running(journals[0], Scripted(owed)) as a, running(journals[1], Scripted(owed)) as b:
        await until(lambda: starts(a.world) == starts(b.world) == 20)
        await quiet()
    assert len(streams.messages[LOG]) == 21 and a.world == b.world and a.world.void == 0


async def test_an_accepted_but_void_append_is_not_a_success(streams: MemoryStreams) -> None:
    """Section 8: another spelling of the filter slipped in between; the writer's next move chains to it."""
    journal = MemoryJournal(streams)
    await put(journal, opened())

    async def work(debt: Debt, scope: Any) -> Event:
        # Stored though nobody expects 0 there any more, as a writer with another filter could.
        streams.tails["deployment"] = 0
        await journal.append(Draft(event=began(9, pid=666), writer="x/x", boot="x"), 0)
        streams.tails["deployment"] = 1  # and the broker does not see it on our filter
        return began(1)

    async with running(journal, Scripted(once, work)) as found:
        async with asyncio.timeout(5):
            await found.reached(2)
        streams.tails["deployment"] = max(2, streams.tails["deployment"])
        await until(lambda: starts(found.world) == 1)
    assert found.world.void >= 1


async def test_a_bare_fact_is_what_is_owed_now(streams: MemoryStreams) -> None:
    """A key outlives what it was first seen with: a target whose members changed before it could be appended, an abort
    that blames somebody who has answered since. What is appended is today's judgement (protocol.md 1.3)."""
    first = asyncio.Event()

    def owed(world: World, now: int) -> list[Debt]:
        if not world.incarnation or starts(world) == 7:
            return []
        before = [] if starts(world) else [Debt(key="before", effect=Work())]
        return [*before, Debt(key="same", effect=Append(began(7, pid=starts(world))))]

    async def work(debt: Debt, scope: Any) -> Event:
        first.set()
        return began(3)

    class Waits(MemoryJournal):
        async def append(self, draft: Draft, prev: int) -> Stored:
            if draft.boot == "s1":
                await first.wait()
                await asyncio.sleep(0.02)
                if isinstance(draft.event, ComponentStarted) and draft.event.starts == 7 and draft.event.pid == 0:
                    await put(MemoryJournal(self.streams), began(3))  # the world moves under the writer's feet
            return await super().append(draft, prev)

    journal = Waits(streams)
    await put(journal, opened())
    async with running(journal, Scripted(owed, work)) as found:
        await until(lambda: starts(found.world) == 7)
    last = await journal.read(LOG, len(streams.messages[LOG]))
    assert last and isinstance(last.event, ComponentStarted) and last.event.pid == 3


async def test_a_judgement_about_time_is_asked_again_at_the_head(streams: MemoryStreams) -> None:
    """Rule 7: judged only on a fold that has reached the head as read after the deadline."""

    class Behind(MemoryJournal):
        """Its follower is held at event 1 until the head was asked for."""

        asked = asyncio.Event()
        heads = 0

        async def head(self, stream: str) -> int:
            self.heads += 1
            if self.heads == 1:
                return 1  # as it was when the runner started
            await put(MemoryJournal(self.streams), began(1))  # the answer was on its way
            return await super().head(stream)

    def owed(world: World, now: int) -> list[Debt]:
        if not world.incarnation or starts(world):
            return []
        return [Debt(key="deadline", effect=Append(began(5)), at_head=True)]

    journal = Behind(streams)
    await put(journal, opened())
    async with running(journal, Scripted(owed)) as found:
        await until(lambda: starts(found.world) == 1)
        await quiet()
    assert names(streams) == ["LogOpened", "ComponentStarted"] and starts(found.world) == 1


async def test_replay_to_the_head_and_then_ask(streams: MemoryStreams) -> None:
    """Rule 3: half a log owes the wrong things."""

    class Crumbs(MemoryJournal):
        """Its follower brings one event at a time, and takes its time."""

        async def follow(self, stream: str, after: int = 0, last_id: str = "") -> AsyncIterator[list[Recorded]]:
            async for batch in super().follow(stream, after, last_id):
                for recorded in batch:
                    await asyncio.sleep(0.02)
                    yield [recorded]

    journal = Crumbs(streams)
    await put(journal, opened(), began(1), began(2), began(3))
    role = Scripted(lambda world, now: [])
    async with running(journal, role):
        await until(lambda: bool(role.asked))
        await quiet()
    assert min(role.asked) == 4


# -- debts that disappear


async def test_a_debt_that_disappears_cancels_its_effect_and_closes_its_scope(streams: MemoryStreams) -> None:
    said: list[str] = []

    async def work(debt: Debt, scope: contextlib.AsyncExitStack) -> Event:
        scope.callback(said.append, "closed")
        said.append("begun")
        try:
            await asyncio.sleep(60)
        finally:
            said.append("cancelled")
        return began(9)

    journal = MemoryJournal(streams)
    await put(journal, opened())
    async with running(journal, Scripted(once, work)):
        await until(lambda: said == ["begun"])
        await put(journal, began(1))
        await until(lambda: len(said) == 3)
        await quiet()
    assert said == ["begun", "cancelled", "closed"]
    assert names(streams) == ["LogOpened", "ComponentStarted"]


async def test_a_scope_lives_as_long_as_its_debt_and_not_as_its_fact(streams: MemoryStreams) -> None:
    """An offer stays open after SenderReady, until its attempt is over."""
    said: list[str] = []

    def owed(world: World, now: int) -> list[Debt]:
        return [Debt(key="offer", effect=Work())] if world.incarnation and starts(world) < 2 else []

    async def work(debt: Debt, scope: contextlib.AsyncExitStack) -> Event:
        scope.callback(said.append, "closed")
        return began(1)

    journal = MemoryJournal(streams)
    await put(journal, opened())
    async with running(journal, Scripted(owed, work)) as found:
        await until(lambda: starts(found.world) == 1)
        await quiet()
        assert said == []
        await put(journal, began(2))
        await until(lambda: said == ["closed"])
        await quiet()
    assert names(streams) == ["LogOpened", "ComponentStarted", "ComponentStarted"]


async def test_a_key_that_comes_back_is_performed_again(streams: MemoryStreams) -> None:
    begun: list[int] = []

    def owed(world: World, now: int) -> list[Debt]:
        return [Debt(key="even", effect=Work())] if world.incarnation and starts(world) % 2 == 0 else []

    async def work(debt: Debt, scope: Any) -> None:
        begun.append(1)

    journal = MemoryJournal(streams)
    await put(journal, opened())
    async with running(journal, Scripted(owed, work)):
        await until(lambda: len(begun) == 1)
        await put(journal, began(1))
        await quiet()
        await put(journal, began(2))
        await until(lambda: len(begun) == 2)


async def test_the_end_of_a_runner_closes_every_scope(streams: MemoryStreams) -> None:
    said: list[str] = []

    async def work(debt: Debt, scope: contextlib.AsyncExitStack) -> Event:
        scope.callback(said.append, "closed")
        said.append("begun")
        await asyncio.sleep(60)
        return began(9)

    journal = MemoryJournal(streams)
    await put(journal, opened())
    async with running(journal, Scripted(once, work)):
        await until(lambda: said == ["begun"])
    assert said == ["begun", "closed"]


# -- ends


async def test_a_contradiction_halts_and_names_the_sequence(streams: MemoryStreams) -> None:
    """Row "log contradicts what was applied": stop, say so; what came before it counts, nothing is written after."""
    closed: list[str] = []
    beats: list[Beat] = []

    async def work(debt: Debt, scope: contextlib.AsyncExitStack) -> Event:
        scope.callback(closed.append, "closed")
        await asyncio.sleep(60)
        return began(1)

    journal = MemoryJournal(streams)
    role = Scripted(lambda world, now: [Debt(key="k", effect=Work())] if world.incarnation else [], work)
    await put(journal, opened())
    async with running(journal, role) as found:
        await quiet(0.05)
        await put(journal, began(4), target(1, "c1"), began(5))
        await until(lambda: bool(found.halted))
        assert "event 3 TargetPersisted" in found.halted
        assert (found.world.seq, starts(found.world)) == (2, 4)
        assert [r.seq for batch in role.batches for r in batch] == [1, 2]
        await until(lambda: closed == ["closed"])
        await journal.beats(beats.append)
        asked = len(role.asked)
        await until(lambda: bool(beats))
        assert "event 3" in beats[0]["halted"] and beats[0]["seq"] == 2
        await quiet()
        assert len(role.asked) == asked
    assert len(streams.messages[LOG]) == 4


async def test_an_event_that_nobody_can_read_halts_after_what_precedes_it(streams: MemoryStreams) -> None:
    """Bad input: a foreign or newer event on the stream: that consumer halts and names the sequence."""
    journal = MemoryJournal(streams)
    await put(journal, opened(), began(1))
    foreign = streams.messages[LOG][-1]
    header = {**foreign.header, "ce-type": "reef.Unheard.v1"}
    streams.messages[LOG].append(foreign._replace(seq=3, header=header))
    async with running(journal, Scripted(lambda world, now: [])) as found:
        await until(lambda: bool(found.halted))
        assert "event 3" in found.halted and "reef.Unheard.v1" in found.halted
        assert (found.world.seq, starts(found.world)) == (2, 1)


async def test_an_effect_that_finds_a_contradiction_halts(streams: MemoryStreams) -> None:
    """Role.perform: ContractError to halt. The heartbeat goes on and says so."""

    async def work(debt: Debt, scope: Any) -> Event:
        raise ContractError("the artifact is damaged", 1)

    journal = MemoryJournal(streams)
    await put(journal, opened())
    async with running(journal, Scripted(once, work)) as found:
        await until(lambda: bool(found.halted))
        assert "damaged" in found.halted
        await quiet()
    assert names(streams) == ["LogOpened"]


async def test_an_effect_that_is_unavailable_is_tried_again(streams: MemoryStreams) -> None:
    tries: list[int] = []

    async def work(debt: Debt, scope: Any) -> Event:
        tries.append(1)
        if len(tries) < 3:
            raise Unavailable("not yet")
        return began(1)

    journal = MemoryJournal(streams)
    await put(journal, opened())
    async with running(journal, Scripted(once, work)) as found:
        await until(lambda: starts(found.world) == 1)
    assert len(tries) == 3


async def test_a_leader_that_does_not_answer_is_waited_for(streams: MemoryStreams) -> None:
    """Row "NATS unreachable": unknown outcome is never "no"."""

    class Away(MemoryJournal):
        silent = 6

        async def head(self, stream: str) -> int:
            self.silent -= 1
            if self.silent >= 0:
                raise Unavailable("no leader")
            return await super().head(stream)

    lost = [True]
    journal = Away(streams, lose_ack=lambda draft: draft.boot == "s1" and bool(lost and lost.pop()))
    await put(journal, opened())

    async def work(debt: Debt, scope: Any) -> Event:
        return began(1)

    async with running(journal, Scripted(once, work)) as found:
        await until(lambda: starts(found.world) == 1)
        await quiet()
    assert names(streams) == ["LogOpened", "ComponentStarted"]


@pytest.mark.parametrize("how", ["debt", "effect"])
async def test_retiring_ends_the_run_and_says_why(streams: MemoryStreams, how: str) -> None:
    async def work(debt: Debt, scope: Any) -> Event:
        raise Retired("replaced by s2")

    def owed(world: World, now: int) -> list[Debt]:
        return [Debt(key="k", effect=Retire("replaced by s2") if how == "debt" else Work())]

    async with asyncio.timeout(5):
        with pytest.raises(Retired, match="replaced by s2"):
            await Runner(MemoryJournal(streams), Scripted(owed, work), tick_s=0.01).run()


async def test_whatever_an_effect_fails_with_ends_the_run(streams: MemoryStreams) -> None:
    async def work(debt: Debt, scope: Any) -> Event:
        raise TransferError("stalled", "a defect of the hands")

    def owed(world: World, now: int) -> list[Debt]:
        return [Debt(key="k", effect=Work())]

    async with asyncio.timeout(5):
        with pytest.raises(TransferError, match="stalled"):
            await Runner(MemoryJournal(streams), Scripted(owed, work), tick_s=0.01).run()


async def test_time_alone_makes_debts(streams: MemoryStreams) -> None:
    """Rule 3: given this state, and the time. No event has to come for a deadline to pass."""
    now = [0]

    def owed(world: World, time: int) -> list[Debt]:
        late = world.incarnation and not starts(world) and time > 100
        return [Debt(key="k", effect=Append(began(1)), at_head=True)] if late else []

    journal = MemoryJournal(streams)
    await put(journal, opened())
    async with running(journal, Scripted(owed), lambda: now[0]) as found:
        await quiet(0.05)
        assert names(streams) == ["LogOpened"]
        now[0] = 101
        await until(lambda: starts(found.world) == 1)
