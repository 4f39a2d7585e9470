"""Generates for an engine that batches by itself: every prompt is passed on as it comes.

Knows: the agent's gate, memory lock and pauses. Must not know: HTTP, chat formats, records, or other engines.
A session holds the memory from the first prompt until nothing is in hand, or until the memory is wanted; then it ends
as the pause says: everything is answered first, starts over later, or is kept halfway.
"""

from __future__ import annotations

import asyncio
import collections
import logging
from functools import partial
from typing import Any

from consumers.reef_engine.agent import Agent
from consumers.reef_engine.endpoint import MAX_RETRACTIONS, Endpoint, Waiting
from reef_bus.backends import Answer, ContinuousBackend, Generated
from reef_bus.core.publication import DRAIN, RETRACT
from reef_bus.core.serving import may_continue
from reef_bus.errors import Rejected
from reef_bus.events import Span

log = logging.getLogger(__name__)

ABORT_S = 0.05  # between two calls to abort what is in hand


class Part:
    """A time without a stop in which a request was in hand: under this head, from one point of the fold to another."""

    def __init__(self, load_id: str, as_of: int) -> None:
        self.load_id = load_id
        self.as_of = self.done_as_of = as_of


class Request:
    """One prompt, with the engine or on its way there again."""

    def __init__(self, waiting: Waiting) -> None:
        self.waiting = waiting
        self.retractions = 0
        self.parts: list[Part] = []

    def spans(self, answer: Answer) -> list[Span] | None:
        """Which version sampled what, and when; None if the engine names another one than it was given, or other
        numbers. In a part that ended before its first token nothing was sampled."""
        versions, found, first = collections.deque(answer.versions), list[Span](), 0
        for part in self.parts:
            if versions and versions[0][0] == part.load_id:
                count = versions.popleft()[1]
                found.append(Span(part.load_id, first, count, part.as_of, part.done_as_of))
                first += count
        return found if not versions and found and first == len(answer.completion.ids) else None


class Continuous(Endpoint):
    """At most `max_batch` prompts are in hand at a time."""

    def __init__(self, agent: Agent, backend: ContinuousBackend, max_batch: int) -> None:
        super().__init__(agent, max_batch)
        self.backend = backend
        self.again = collections.deque[Request]()
        self.in_hand: dict[asyncio.Task[Answer], Request] = {}

    async def serve(self) -> None:
        if not self.in_hand and not self.again:
            self.again.append(Request(await self.queue.get()))
        await self.agent.open.wait()
        async with self.agent.memory:
            if self.agent.gate():
                await self._session()

    async def _session(self) -> None:
        if self.in_hand:
            await self._go_on()
        while self._admit() or self.in_hand:
            await self._progress()
            if self.agent.wanted.is_set() and self.agent.pause != DRAIN and self.in_hand:
                if self.agent.pause != RETRACT:
                    return await self._halt()
                await self._retract()

    def _open(self) -> bool:
        """Whether others may come in: generation is allowed, and nobody wants the memory."""
        return len(self.in_hand) < self.max_batch and not self.agent.wanted.is_set() and self.agent.gate()

    def _admit(self) -> bool:
        """Pass on whoever waits; whether anybody was passed on."""
        before = len(self.in_hand)
        while self._open() and (request := self._next()) is not None:
            if not request.waiting.done.done():  # somebody waits for it
                self._pass_on(request)
        return len(self.in_hand) > before

    def _pass_on(self, request: Request) -> None:
        head = self.agent.world.publications.head
        assert head is not None  # the gate is open
        request.parts = [Part(head.load_id, self.agent.world.seq)]
        task = asyncio.create_task(self.backend.answer(request.waiting.prompt))
        request.waiting.done.add_done_callback(partial(_cancel, task))
        self.in_hand[task] = request

    def _next(self) -> Request | None:
        if self.again:
            return self.again.popleft()
        return None if self.queue.empty() else Request(self.queue.get_nowait())

    async def _progress(self) -> None:
        """Wait for an answer, for another request, or for somebody who wants the memory; take what has come."""
        asked = asyncio.create_task(self.queue.get()) if self._open() else None
        wanted = None if self.agent.wanted.is_set() else asyncio.create_task(self.agent.wanted.wait())
        others: list[asyncio.Task[Any]] = [each for each in (asked, wanted) if each is not None]
        try:
            await asyncio.wait([*self.in_hand, *others], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in others:
                each.cancel()
            if asked is not None and asked.done() and not asked.cancelled():
                self.again.append(Request(asked.result()))
        self._take()

    def _take(self, halted: bool = False) -> None:
        """What has been answered. If everything was `halted` before, then it was before that."""
        for request in [] if halted else self.in_hand.values():
            request.parts[-1].done_as_of = self.agent.world.seq
        for task in [task for task in self.in_hand if task.done()]:
            self._answered(task, self.in_hand.pop(task))

    def _answered(self, task: asyncio.Task[Answer], request: Request) -> None:
        """Raises what makes the engine unfit to go on."""
        if task.cancelled():
            return
        try:
            answer = task.result()
        except Rejected as error:
            if not request.waiting.done.done():
                request.waiting.done.set_exception(error)
            return
        spans = request.spans(answer) if answer.completion.finish_reason else None
        if spans is not None:
            return self.answer(request.waiting, answer.completion, spans)
        if answer.completion.finish_reason:
            given = [part.load_id for part in request.parts]
            log.warning("an answer names %s, sampled under %s; asking again", answer.versions, given)
        self.again.appendleft(request)

    async def _retract(self) -> None:
        """Whatever is in hand starts over later; what has done so too often is answered first. Until nothing is left:
        one that had not arrived when the others were aborted goes on."""
        for request in self.in_hand.values():
            request.retractions += 1
        patient = any(request.retractions > MAX_RETRACTIONS for request in self.in_hand.values())
        while self.in_hand:
            if not patient:
                await self.backend.abort()
            await asyncio.wait([*self.in_hand], timeout=ABORT_S, return_when=asyncio.FIRST_COMPLETED)
            self._take()

    async def _halt(self) -> None:
        """Keep what is in hand, halfway."""
        await self.backend.halt()
        self._take()

    async def _go_on(self) -> None:
        """With the head, where that is allowed: the engine tells versions apart by their names, and not two times of
        the same one. The others start over."""
        self._take(halted=True)
        head, releases = self.agent.world.publications.head, self.agent.world.publications.releases
        assert head is not None  # the gate is open
        for task, request in list(self.in_hand.items()):
            begun = request.parts[-1].load_id
            if begun == head.load_id or not may_continue(releases, begun, head.load_id):
                task.cancel()
                await asyncio.wait({task})
                self.again.append(self.in_hand.pop(task))
            else:
                request.parts.append(Part(head.load_id, self.agent.world.seq))
        await self.backend.go_on()


def _cancel(task: asyncio.Task[Answer], waiting: asyncio.Future[Generated]) -> None:
    """Whoever has its answer, or does not wait for one any more, needs the engine no more."""
    task.cancel()
