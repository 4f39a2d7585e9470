"""The loop: a key's effect once, a fact never lost and never doubled.

Knows: the runner's promises and the two brokers' retry semantics. Must not know: any real role.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, Literal

import pytest

from reef_bus import runner as runner_module
from reef_bus.core.effects import Append, Debt
from reef_bus.core.world import World
from reef_bus.errors import Unavailable
from reef_bus.events import ComponentStarted, Draft, Event, Recorded
from reef_bus.journal import LOG, MemoryJournal, MemoryStreams, Stored
from tests.facts import joined, opened, trainer_joined
from tests.loop import Scripted, Work, began, names, once, put, quiet, running, starts, until

BOTH = pytest.mark.parametrize("semantics", ["single", "cluster"])


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


async def test_a_debt_that_was_gone_just_when_its_effect_was_done_and_is_back_is_paid(streams: MemoryStreams) -> None:
    """What no log knows may make it so, and no event comes to wake anybody."""
    looks = iter([False])  # whether it is owed, once its effect is done: not at the first look
    done = asyncio.Event()

    async def work(debt: Debt, scope: Any) -> Event:
        done.set()
        return began(1)

    def owed(world: World, now: int) -> list[Debt]:
        return once(world) if not done.is_set() or next(looks, True) else []

    journal = MemoryJournal(streams)
    await put(journal, opened())
    async with running(journal, Scripted(owed, work)) as found:
        await until(lambda: starts(found.world) == 1)
    assert names(streams) == ["LogOpened", "ComponentStarted"]


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


class Landing(MemoryJournal):
    """What was sent first lands as soon as its writer has looked for it and has not found it."""

    first: tuple[Draft, int] | None = None
    sent = 0

    async def append(self, draft: Draft, prev: int) -> Stored:
        self.sent += draft.boot == "s1"
        if draft.boot != "s1" or self.sent > 1:
            return await super().append(draft, prev)
        self.first = (draft, prev)
        raise Unavailable("no answer")

    async def head(self, stream: str) -> int:
        found = await super().head(stream)
        if self.first is not None:
            first, self.first = self.first, None
            asyncio.get_running_loop().call_later(0.005, lambda: self.store(*first, compared=True))
        return found


@BOTH
async def test_a_fact_that_lands_after_it_was_given_up_for_lost_is_not_said_again(
    semantics: Literal["single", "cluster"],
) -> None:
    """The debt outlives its fact, as an offer does: only the event's id tells that it is there."""
    streams = MemoryStreams(semantics)
    journal = Landing(streams)
    await put(journal, opened())

    async def work(debt: Debt, scope: Any) -> Event:
        return began(1)

    def always(world: World, now: int) -> list[Debt]:
        return [Debt(key="offer", effect=Work(), cause=1)]

    async with running(journal, Scripted(always, work)) as found:
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


class Blind(MemoryJournal):
    """Once, somebody's other filter slips in before our append, and the broker compares ours with what was before."""

    slipped = False

    async def append(self, draft: Draft, prev: int) -> Stored:
        if not self.slipped and draft.writer.startswith("supervisor/"):
            self.slipped = True
            await put(self, ComponentStarted(component="another", pid=2, starts=1))
            self.streams.tails["deployment"] = prev
        return await super().append(draft, prev)


async def test_an_acknowledged_append_that_is_void_is_made_again(streams: MemoryStreams) -> None:
    journal = Blind(streams)
    await put(journal, opened())

    async def work(debt: Debt, scope: Any) -> Event:
        return began(1)

    async with running(journal, Scripted(once, work)) as found:
        await until(lambda: starts(found.world) == 1)
        await quiet()
    assert names(streams) == ["LogOpened", *["ComponentStarted"] * 3] and found.world.void == 1


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


async def test_at_the_head_the_judgement_may_be_another(streams: MemoryStreams) -> None:
    """The deadline still passed, but somebody answered meanwhile: whoever is blamed is blamed as of the head."""

    class Behind(MemoryJournal):
        heads = 0

        async def head(self, stream: str) -> int:
            self.heads += 1
            if self.heads == 2:  # as asked for the judgement; the first was the replay's
                await put(MemoryJournal(self.streams), began(3))
            return await super().head(stream)

    def owed(world: World, now: int) -> list[Debt]:
        if not world.incarnation or starts(world) == 7:
            return []
        return [Debt(key="deadline", effect=Append(began(7, pid=starts(world))), at_head=True)]

    journal = Behind(streams)
    await put(journal, opened())
    async with running(journal, Scripted(owed)) as found:
        await until(lambda: starts(found.world) == 7)
    last = await journal.read(LOG, 3)
    assert last and isinstance(last.event, ComponentStarted) and last.event.pid == 3
