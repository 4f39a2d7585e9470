"""The loop's ends: debts that disappear, contradictions, outages, retirement.

Knows: the runner's promises and the two brokers' retry semantics. Must not know: any real role.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from reef_bus import runner as runner_module
from reef_bus.core.effects import Append, Debt, Retire
from reef_bus.core.world import World
from reef_bus.errors import ContractError, TransferError, Unavailable
from reef_bus.events import Event
from reef_bus.journal import LOG, MemoryJournal, MemoryStreams
from reef_bus.runner import Beat, Retired, Runner
from tests.facts import opened, target
from tests.loop import Scripted, Work, began, names, once, put, quiet, running, starts, until


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "RETRY_S", 0.01)


@pytest.fixture
def streams() -> MemoryStreams:
    return MemoryStreams()


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

    journal, role = MemoryJournal(streams), Scripted(owed, work)
    await put(journal, opened())
    async with running(journal, role):
        await until(lambda: len(begun) == 1)
        await put(journal, began(1))
        await until(lambda: role.asked[-1] == 2)  # for a while it is not owed
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
    said: list[str] = []
    beats: list[Beat] = []

    async def work(debt: Debt, scope: contextlib.AsyncExitStack) -> Event:
        scope.callback(said.append, "closed")
        said.append("begun")
        await asyncio.sleep(60)
        return began(1)

    journal = MemoryJournal(streams)
    role = Scripted(lambda world, now: [Debt(key="k", effect=Work())] if world.incarnation else [], work)
    await put(journal, opened())
    async with running(journal, role) as found:
        await until(lambda: said == ["begun"])
        await put(journal, began(4), target(1, "c1"), began(5))
        await until(lambda: bool(found.halted))
        assert "event 3 TargetPersisted" in found.halted
        assert (found.world.seq, starts(found.world)) == (2, 4)
        assert [r.seq for batch in role.batches for r in batch] == [1, 2]
        await until(lambda: said == ["begun", "closed"])
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
