"""A runner under test: a role whose question and hands are the test's, over an in-memory journal.

Knows: the runner's port. Must not know: any real role.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from reef_bus.core.effects import Debt, Effect, Me
from reef_bus.core.world import World
from reef_bus.events import ComponentStarted, Draft, Event, Recorded
from reef_bus.journal import LOG, MemoryJournal, MemoryStreams
from reef_bus.runner import Role, Runner


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
