"""The broker and everybody's connection to it, in simulated time: delays, lost and late messages, partitions.

Knows: the in-memory journal's rules of storing, and a network. Must not know: what any event means.
A request that was sent arrives whatever becomes of its sender; an answer finds its way back only if somebody listens.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from typing import Any, Literal

from reef_bus.envelope import decode
from reef_bus.errors import Conflict, Unavailable
from reef_bus.events import Draft, Recorded
from reef_bus.journal import LOG, RECORDS, Beat, MemoryJournal, MemoryStreams, Stored, check_position
from reef_bus.topology import FAMILIES
from tests.simulation.faults import APPENDS, Nemesis
from tests.simulation.loop import Loop, Process
from tests.spec import SECOND, T0

TIMEOUT_S = 0.5
LATE_S = 6.0
MOST = 1000


class Link:
    """One process's way to the broker. `lag`: more delay, in seconds, before it sees what was stored; `cut_at`: since
    when it is down, if it is."""

    def __init__(self, loop: Loop) -> None:
        self.loop, self.up = loop, asyncio.Event()
        self.up.set()
        self.silent, self.lag, self.cut_at = False, 0.0, 0.0

    def cut(self) -> None:
        if self.up.is_set():
            self.cut_at = self.loop.now
            self.up.clear()

    def mend(self) -> None:
        self.up.set()


class Feed:
    """One follower's subscription. What is stored reaches it some time later: it has `seen` so many events."""

    def __init__(self, broker: Broker, process: Process, link: Link, stream: str) -> None:
        self.broker, self.process, self.link = broker, process, link
        self.events = broker.read_once[stream]
        self.seen = len(self.events)
        self.due = False
        self.waiting: asyncio.Future[None] | None = None

    def notify(self) -> bool:
        """There is more. Whether anybody still listens."""
        if not self.due:
            self.due, loop = True, self.broker.loop
            loop.call_later(self.broker.delay() + self.link.lag, self._arrive, context=loop.outside)
        return not self.process.dead

    def _arrive(self) -> None:
        self.due, self.seen = False, len(self.events)
        if self.waiting is not None and not self.waiting.done():
            self.waiting.set_result(None)

    async def beyond(self, after: int) -> None:
        """Wait until it has seen more than `after`."""
        while self.seen <= after or not self.link.up.is_set():
            self.waiting = self.broker.loop.create_future()
            if self.seen <= after:
                await self.waiting
            await self.link.up.wait()


class Broker(MemoryStreams):
    """Both streams, and what all connections share. `saw` hears of everything that is stored, in order.

    `read_once` is every event as all followers get it: read from its wire form once, for speed. In the end it must
    still be what the wire form says, or somebody has changed what is everybody's.
    """

    def __init__(
        self,
        loop: Loop,
        chance: random.Random,
        nemesis: Nemesis,
        semantics: Literal["single", "cluster"],
        saw: Callable[[str, Recorded], None],
    ) -> None:
        super().__init__(semantics, self.wall)
        self.loop, self.chance, self.nemesis, self.saw = loop, chance, nemesis, saw
        self.skew = 0
        self.feeds: dict[str, list[Feed]] = {LOG: [], RECORDS: []}
        self.read_once: dict[str, list[Recorded]] = {LOG: [], RECORDS: []}
        self.ears: list[tuple[Process, Link, Callable[[Beat], None]]] = []

    def wall(self) -> int:
        return T0 + int(self.loop.now * SECOND) + self.skew

    def delay(self) -> float:
        return 0.0003 + self.chance.random() ** 4 * 0.02

    def store(self, stream: str, chain: str, prev: int | None, message: Any) -> Stored:
        stored = super().store(stream, chain, prev, message)
        if not stored.duplicate:
            recorded = decode(*self.messages[stream][-1])
            self.read_once[stream].append(recorded)
            self.saw(stream, recorded)
            self.feeds[stream] = [feed for feed in self.feeds[stream] if feed.notify()]
        return stored


class Connection(MemoryJournal):
    """One process's client."""

    def __init__(self, broker: Broker, process: Process, link: Link) -> None:
        super().__init__(broker)
        self.broker, self.process, self.link = broker, process, link

    async def connect(self, wait_s: float) -> None:
        """Raises Unavailable when there is no way to the broker for so long."""
        try:
            async with asyncio.timeout(wait_s):
                await self.link.up.wait()
        except TimeoutError as error:
            raise Unavailable("no NATS server") from error

    async def append(self, draft: Draft, prev: int) -> Stored:
        fate = self.broker.nemesis.falls_upon(type(draft.event).__name__, APPENDS)
        compared = FAMILIES[draft.event.family].compares and fate != "misspelt"
        return await self._ask(lambda: self.store(draft, prev, compared=compared), fate)  # type: ignore[no-any-return]

    async def head(self, stream: str) -> int:
        return await self._ask(lambda: len(self.streams.messages[stream]))  # type: ignore[no-any-return]

    async def read(self, stream: str, seq: int) -> Recorded | None:
        messages = self.streams.messages[stream]
        return await self._ask(lambda: decode(*messages[seq - 1]) if 0 < seq <= len(messages) else None)  # type: ignore[no-any-return]

    async def _ask(self, at_broker: Callable[[], Any], fate: str = "") -> Any:
        answer = self.broker.loop.create_future()
        if self.link.up.is_set() and fate != "lost":
            late = TIMEOUT_S + self.broker.chance.random() * LATE_S if fate in ("late", "misspelt") else 0.0
            deaf = fate in ("lost_ack", "late", "misspelt")
            self._later(self.broker.delay() + late, self._arrive, at_broker, answer, deaf)
            if fate == "duplicate":
                self._later(self.broker.chance.random(), self._arrive, at_broker, answer, True)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return await answer
        except TimeoutError as error:
            raise Unavailable("no answer") from error

    def _later(self, delay: float, what: Callable[..., None], *args: Any) -> None:
        self.broker.loop.call_later(delay, what, *args, context=self.broker.loop.outside)

    def _arrive(self, at_broker: Callable[[], Any], answer: asyncio.Future[Any], deaf: bool) -> None:
        try:
            found, error = at_broker(), None
        except Conflict as conflict:
            found, error = None, conflict
        if not deaf:
            self._later(self.broker.delay(), self._answer, answer, found, error)

    def _answer(self, answer: asyncio.Future[Any], found: Any, error: Conflict | None) -> None:
        if answer.done() or not self.link.up.is_set():
            return
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(found)

    async def follow(self, stream: str, after: int = 0, last_id: str = "") -> AsyncIterator[list[Recorded]]:
        feed = Feed(self.broker, self.process, self.link, stream)
        self.broker.feeds[stream].append(feed)
        check_position(stream, after, last_id, await self._there(stream, after) if after else None)
        while True:
            await feed.beyond(after)
            batch = feed.events[after : min(feed.seen, after + self.broker.chance.choice((1, 3, MOST)))]
            after += len(batch)
            yield batch

    async def _there(self, stream: str, seq: int) -> Recorded | None:
        while True:
            try:
                return await self.read(stream, seq)
            except Unavailable:
                await asyncio.sleep(0.1)

    async def beat(self, role: str, id_: str, beat: Beat) -> None:
        beat = {**beat, "pid": getattr(self.process, "pid", 0)}
        if self.link.up.is_set() and not self.link.silent:
            for process, link, callback in self.broker.ears:
                if link.up.is_set() and not process.stopped:
                    callback(dict(beat))
                elif link.up.is_set():  # it lies in the socket until the process goes on
                    self.broker.loop.call_soon(callback, dict(beat), context=process.context)

    async def beats(self, callback: Callable[[Beat], None]) -> None:
        self.broker.ears.append((self.process, self.link, callback))

    def connected(self) -> bool:
        return self.link.up.is_set()
