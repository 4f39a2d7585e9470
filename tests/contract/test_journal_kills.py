"""Servers killed under writers and followers: nothing acknowledged is lost, nothing is stored twice, nobody hangs.

Knows: the runner's own rule, which the writers follow, and who leads. Must not know: any real role.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator
from typing import NamedTuple

import pytest

from reef_bus.envelope import identify, payload
from reef_bus.events import ComponentStarted, Draft
from reef_bus.journal import LOG, Journal, Stored, open_log
from tests.contract.brokers import Served, everything, out_of_chain, verdicts
from tests.contract.test_journal import counting
from tests.loop import Scripted, running, until

pytestmark = pytest.mark.integration

WRITERS = ("a", "b", "c")
FOR_EVER = 1_000_000


class Ack(NamedTuple):
    when: float
    seq: int
    id: str


class Traffic:
    """What writers were told and what followers got."""

    def __init__(self) -> None:
        self.acks: list[Ack] = []
        self.seen: list[list[int]] = []
        self.longest = 0.0

    def note(self, journal: Journal) -> None:
        """Write down every acknowledgement of this client, and how long any append or look at the head took."""
        append, head = journal.append, journal.head

        async def noted_append(draft: Draft, prev: int) -> Stored:
            stored = await self._timed(append(draft, prev))
            self.acks.append(Ack(time.monotonic(), stored.seq, identify(draft, prev, payload(draft.event))))
            return stored

        journal.append = noted_append  # type: ignore[method-assign]
        journal.head = lambda stream: self._timed(head(stream))  # type: ignore[method-assign]

    async def _timed(self, call):
        began = time.monotonic()
        try:
            return await call
        finally:
            self.longest = max(self.longest, time.monotonic() - began)

    async def follow(self, journal: Journal) -> None:
        seen: list[int] = []
        self.seen.append(seen)
        async for batch in journal.follow(LOG):
            seen.extend(recorded.seq for recorded in batch)

    async def goes_on(self) -> None:
        """Wait until appends are acknowledged that began later than this; one of each writer may be on its way."""
        enough = len(self.acks) + 2 * len(WRITERS)
        await until(lambda: len(self.acks) > enough, 40.0)

    def outage(self) -> float:
        """The longest time without an acknowledgement, in seconds."""
        whens = [ack.when for ack in self.acks]
        return max(later - earlier for earlier, later in itertools.pairwise(whens))

    async def caught_up(self, head: int) -> None:
        await until(lambda: all(seen and seen[-1] >= head for seen in self.seen), 15.0)


@contextlib.asynccontextmanager
async def traffic(served: Served) -> AsyncIterator[Traffic]:
    """Three writers of one family, each a runner with its own facts, and two followers; all with a connection each."""
    found = Traffic()
    await open_log(served.clients[0], "inc", "w")
    following = [asyncio.create_task(found.follow(await served.open())) for _ in range(2)]
    try:
        async with contextlib.AsyncExitStack() as writers:
            for name in WRITERS:
                journal = await served.open()
                found.note(journal)
                await writers.enter_async_context(running(journal, Scripted(counting(name, FOR_EVER))))
            await found.goes_on()
            yield found
        await found.caught_up(await served.clients[0].head(LOG))
    finally:
        for task in following:
            task.cancel()
        await asyncio.gather(*following, return_exceptions=True)


async def nothing_is_amiss(served: Served, found: Traffic) -> None:
    """The audit: the log against what writers were told and followers got."""
    log = await everything(served.clients[0])
    assert [recorded.seq for recorded in log] == list(range(1, len(log) + 1))
    assert [ack for ack in found.acks if log[ack.seq - 1].id != ack.id] == []
    assert len({recorded.id for recorded in log}) == len(log)
    assert out_of_chain(log) == []
    assert [why for why in verdicts(log) if why] == []
    facts = [recorded.event for recorded in log if isinstance(recorded.event, ComponentStarted)]
    for name in WRITERS:
        starts = [fact.starts for fact in facts if fact.component == name]
        assert starts == list(range(1, len(starts) + 1))  # one of them may have lost every race
    for seen in found.seen:
        assert seen == list(range(1, len(log) + 1))
    assert found.longest < 15.0


async def test_a_single_server_killed_again_and_again(single: Served) -> None:
    async with traffic(single) as found:
        for n in range(8):
            await asyncio.sleep(0.05 * n)  # so that each kill meets another moment
            single.servers.kill()
            await asyncio.sleep(0.4 * (n % 2))
            single.servers.start()
            if n % 3 == 2:  # again, while its clients are just coming back
                await asyncio.sleep(0.1)
                single.servers.kill()
                single.servers.start()
            await found.goes_on()
    await nothing_is_amiss(single, found)


async def test_the_leader_of_a_cluster_killed(replicated: Served) -> None:
    """Finding 5: without appends for 4 to 8 s, which is transient; what is read of the next leader is all there."""
    async with traffic(replicated) as found:
        leader = await replicated.servers.leader(replicated.clients[0], LOG)
        leader.kill()
        last = found.acks[-1]
        await found.goes_on()
        fresh = await replicated.open()
        assert await fresh.head(LOG) >= last.seq
        recorded = await fresh.read(LOG, last.seq)
        assert recorded and recorded.id == last.id
        leader.start()
        assert await replicated.servers.leader(fresh, LOG) is not leader
        await found.goes_on()
    await nothing_is_amiss(replicated, found)
    assert 1.0 < found.outage() < 15.0


async def test_a_whole_cluster_killed_at_once(replicated: Served) -> None:
    async with traffic(replicated) as found:
        for node in replicated.servers.nodes.values():
            node.kill()
        await asyncio.sleep(0.5)
        for node in replicated.servers.nodes.values():
            node.start()
        await found.goes_on()
    await nothing_is_amiss(replicated, found)
