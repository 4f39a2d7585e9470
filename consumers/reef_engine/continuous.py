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
from reef_bus.backends import Answer, Completion, ContinuousBackend, Generated, Prompt
from reef_bus.core.publication import DRAIN, IN_PLACE, RETRACT
from reef_bus.core.serving import Version, may_continue
from reef_bus.errors import NotHeld, Rejected, Unavailable
from reef_bus.events import Span

log = logging.getLogger(__name__)

LOOK_S = 0.05  # who lets nobody in looks so often whether that is still so; and between two aborts
MAX_REFUTED = 3  # answers to one request that cannot be true; then its gateway hears of it, and may ask another engine


class Part:
    """A time without a stop in which a request was in hand: from one point of the fold to another. It is recorded under
    `load_id`; the engine `named` the whole model that it holds."""

    def __init__(self, load_id: str, named: str, as_of: int) -> None:
        self.load_id = load_id
        self.named = named
        self.as_of = self.done_as_of = as_of


class Request:
    """One prompt, with the engine or on its way there again."""

    def __init__(self, waiting: Waiting) -> None:
        self.waiting = waiting
        self.retractions = self.refuted = 0
        self.version = Version("")
        self.parts: list[Part] = []

    def spans(self, answer: Answer) -> list[Span] | None:
        """Which version sampled what, and when; None if the engine names another one than it was given, or other
        numbers. In a part that ended before its first token nothing was sampled."""
        versions, found, first = collections.deque(answer.versions), list[Span](), 0
        for part in self.parts:
            if versions and versions[0][0] == part.named:
                count = versions.popleft()[1]
                found.append(Span(part.load_id, first, count, part.as_of, part.done_as_of))
                first += count
        return found if not versions and found and first == self._tokens(answer.completion) else None

    def _tokens(self, completion: Completion) -> int:
        """How many there are, if they are what was asked for, and ended for the reason that it says."""
        right = self.waiting.prompt.reason(completion.ids) == completion.finish_reason
        return len(completion.ids) if right else -1


class Continuous(Endpoint):
    """At most `max_batch` prompts are in hand at a time."""

    def __init__(self, agent: Agent, backend: ContinuousBackend, max_batch: int) -> None:
        super().__init__(agent, max_batch)
        self.backend = backend
        self.again = collections.deque[Request]()
        self.in_hand: dict[asyncio.Task[Answer], Request] = {}
        self.halted = False  # also while nothing is in hand any more: the next one would wait for ever

    async def work(self) -> None:
        try:
            await super().work()
        finally:
            await self._drop()

    async def serve(self) -> None:
        if not self.in_hand and not self.again:
            self.again.append(Request(await self.queue.get()))
        await self.agent.open.wait()
        async with self.agent.memory:
            if self.agent.gate():
                await self._session()

    async def _session(self) -> None:
        try:
            if self.halted:
                await self._go_on()
            while self._admit() or self.in_hand:
                await self._progress()
                pause = self._pause()
                if pause == IN_PLACE:
                    return await self._halt()
                if pause == RETRACT:
                    await self._retract()
        except BaseException:
            await self._drop()  # before anybody else has the memory
            raise

    def _open(self) -> bool:
        """Whether others may come in: generation is allowed, and nobody wants the memory."""
        return len(self.in_hand) < self.max_batch and not self.agent.wanted.is_set() and self.agent.gate()

    def _pause(self) -> str:
        """How what is in hand stops now. It comes to its end if nobody wants the memory, or if any of it has started
        over often enough: an abort is for everything."""
        if not self.agent.wanted.is_set() or not self.in_hand:
            return DRAIN
        often = any(request.retractions >= MAX_RETRACTIONS for request in self.in_hand.values())
        return DRAIN if often and self.agent.pause == RETRACT else self.agent.pause

    def _admit(self) -> bool:
        """Pass on whoever waits; whether anybody was passed on."""
        before = len(self.in_hand)
        while self._open() and (request := self._next()) is not None:
            if not request.waiting.done.done():  # somebody waits for it
                self._pass_on(request)
        return len(self.in_hand) > before

    def _pass_on(self, request: Request) -> None:
        version = self.agent.version(request.waiting.prompt.scenario)
        if version is None:
            return self.missing(request.waiting)
        request.version, request.parts = version, [self._part(request, version)]
        task = asyncio.create_task(self._ask(request.waiting.named(version)))
        request.waiting.done.add_done_callback(partial(_cancel, task))
        self.in_hand[task] = request

    async def _ask(self, prompt: Prompt) -> Answer:
        with self.agent.adapters.leased(prompt.adapter):
            return await self.backend.answer(prompt)

    def _part(self, request: Request, version: Version) -> Part:
        """A scenario's version stays what it is, with the base model below it; the whole model is the head's, whichever
        that is now."""
        head = self._head()
        return Part(version.load_id if request.waiting.prompt.scenario else head, head, self.agent.world.seq)

    def _head(self) -> str:
        head = self.agent.world.publications.head
        assert head is not None  # the gate is open
        return head.load_id

    def _next(self) -> Request | None:
        if self.again:
            return self.again.popleft()
        return None if self.queue.empty() else Request(self.queue.get_nowait())

    async def _progress(self) -> None:
        """Wait for an answer, for another request, or for somebody who wants the memory; take what has come."""
        asked = asyncio.create_task(self.queue.get()) if self._open() else None
        wanted = None if self.agent.wanted.is_set() else asyncio.create_task(self.agent.wanted.wait())
        others: list[asyncio.Task[Any]] = [each for each in (asked, wanted) if each is not None]
        timeout = None if asked else LOOK_S
        try:
            await asyncio.wait([*self.in_hand, *others], timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in others:
                each.cancel()
            if asked is not None and asked.done() and not asked.cancelled():
                self.again.append(Request(asked.result()))
        self._sampled()
        self._take()

    def _sampled(self) -> None:
        """Until now, maybe."""
        for request in self.in_hand.values():
            request.parts[-1].done_as_of = self.agent.world.seq

    def _take(self) -> None:
        """What has been answered; what is asked again keeps its order. Raises what makes the engine unfit to go on."""
        for task in reversed([task for task in self.in_hand if task.done()]):
            self._answered(task, self.in_hand.pop(task))

    def _answered(self, task: asyncio.Task[Answer], request: Request) -> None:
        if task.cancelled():
            return self.again.appendleft(request)
        try:
            answer = task.result()
        except NotHeld:
            return self.lost(request.waiting)
        except Rejected as error:
            return _tell(request, error)
        if not answer.completion.finish_reason:
            request.retractions += 1
            self.again.appendleft(request)
        elif spans := request.spans(answer):
            self.answer(request.waiting, answer.completion, spans)
        else:
            self._refute(request, answer)

    def _refute(self, request: Request, answer: Answer) -> None:
        given = {part.named for part in request.parts}
        said = (
            f"{len(answer.completion.ids)} of {request.waiting.prompt.max_tokens} tokens by {answer.versions}, sampled "
            f"under {sorted(given)}, ended by {answer.completion.finish_reason}"
        )
        request.refuted += 1
        if not given.issuperset(load_id for load_id, _ in answer.versions):
            self.agent.doubt()
        if request.refuted >= MAX_REFUTED:
            return _tell(request, Unavailable(f"found {said}; an answer says what sampled it, token by token"))
        log.warning("an answer has %s; asking again", said)
        self.again.appendleft(request)

    async def _retract(self) -> None:
        """Once more, as long as anything is left: what had not arrived when the others were aborted goes on."""
        await self.backend.abort()
        await asyncio.wait(self.in_hand, timeout=LOOK_S)

    async def _halt(self) -> None:
        """Keep what is in hand, halfway."""
        self.halted = True
        await self.backend.halt()
        self._sampled()
        self._take()

    async def _go_on(self) -> None:
        """With the head, where that is allowed: the engine tells versions apart by their names, and not two times of
        the same one. Else everything starts over. What has been answered meanwhile, was so before the halt."""
        self._take()
        if self._may_go_on():
            for request in self.in_hand.values():
                request.parts.append(self._part(request, request.version))
        else:
            for task in self.in_hand:
                task.cancel()
            await asyncio.wait(self.in_hand)
            self._take()
        await self.backend.go_on()
        self.halted = False

    def _may_go_on(self) -> bool:
        releases, load_id = self.agent.world.publications.releases, self._head()
        begun = {request.parts[-1].named for request in self.in_hand.values()}
        return all(each != load_id and may_continue(releases, each, load_id) for each in begun)

    async def _drop(self) -> None:
        """Nobody waits for what is in hand any more."""
        for task in self.in_hand:
            task.cancel()
        await asyncio.gather(*self.in_hand, return_exceptions=True)
        self.in_hand.clear()


def _cancel(task: asyncio.Task[Answer], waiting: asyncio.Future[Generated]) -> None:
    """Whoever has its answer, or does not wait for one any more, needs the engine no more."""
    task.cancel()


def _tell(request: Request, error: Rejected | Unavailable) -> None:
    if not request.waiting.done.done():
        request.waiting.done.set_exception(error)
