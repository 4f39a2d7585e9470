"""Generates for an engine that samples batch after batch.

Knows: the agent's gate, memory lock and pauses. Must not know: HTTP, chat formats, records, or other engines.
What is generated together was checked at one point of the fold.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from consumers.reef_engine.agent import Agent
from consumers.reef_engine.endpoint import MAX_RETRACTIONS, Endpoint, Waiting
from reef_bus.backends import Completion, Generation, Stop
from reef_bus.core.publication import RETRACT
from reef_bus.core.serving import Version, may_continue
from reef_bus.errors import NotHeld, Rejected
from reef_bus.events import Span
from reef_bus.runner import blocking


class _Batch:
    """Requests that are generated for together. Once stopped in place, `kept` is what the engine goes on from, `head`
    the whole model that it was stopped with, and `spans` say of each request what it has so far. `versions` answer
    them; an adapter among these is leased as long as anything is kept."""

    def __init__(self, *requests: Waiting) -> None:
        self.requests = list(requests)
        self.retractions = 0
        self.leases = contextlib.ExitStack()
        self.start_over()

    def start_over(self) -> None:
        self.kept: Any = None
        self.head = ""
        self.spans: list[list[Span]] = []
        self.versions: list[Version] = []
        self.leases.close()

    def begin(self, agent: Agent, missing: Callable[[Waiting], None]) -> None:
        """Settle what answers each of them. Those that nothing here can answer are told."""
        versions = [(each, agent.version(each.prompt.scenario)) for each in self.requests]
        for waiting in (each for each, version in versions if version is None):
            missing(waiting)
        self.requests = [each for each, version in versions if version is not None]
        self.versions = [version for _, version in versions if version is not None]
        for version in self.versions:
            self.leases.enter_context(agent.adapters.leased(version.adapter))

    def go_on(self, head: str) -> None:
        """With the whole model that is the head now; a scenario's version stays what it is."""
        pairs = zip(self.requests, self.versions, strict=True)
        self.versions = [each if asked.prompt.scenario else Version(head) for asked, each in pairs]

    def retract(self) -> None:
        self.retractions += 1
        self.start_over()

    def gone(self) -> bool:
        """Nobody waits for it. Until it was begun, it is rid of those who do not; later, they take their part to the
        end."""
        waiting = [each for each in self.requests if not each.done.done()]
        if self.kept is None:
            self.requests = waiting
        return not waiting

    def add(self, generation: Generation, as_of: int, done_as_of: int) -> None:
        """Enter what was generated in one go."""
        self.kept, self.spans = generation.kept, self.spans or [[] for _ in self.requests]
        for spans, version, completion in zip(self.spans, self.versions, generation.completions, strict=True):
            first = sum(span.count for span in spans)
            spans.append(Span(version.load_id, first, len(completion.ids) - first, as_of, done_as_of))


class Server(Endpoint):
    """Generates for as many as fit, one batch at a time."""

    async def serve(self) -> None:
        await self._serve(_Batch(await self.queue.get()), self.max_batch)

    async def _serve(self, batch: _Batch, most: int) -> None:
        """Generate for `batch` and up to `most` of those who wait. A gate that closes meanwhile makes them wait on; a
        prompt that is refused spoils nobody else's request."""
        try:
            while not await self._served(batch, most):
                pass
        except Rejected as error:
            batch.leases.close()  # each takes its own again: who waits for these may hold what opens the gate
            if len(batch.requests) > 1:
                for waiting in batch.requests:
                    await self._serve(_Batch(waiting), 1)
            elif isinstance(error, NotHeld):
                self.lost(batch.requests[0])
            elif not batch.requests[0].done.done():
                batch.requests[0].done.set_exception(error)
        finally:
            batch.leases.close()

    async def _served(self, batch: _Batch, most: int) -> bool:
        """Whether everybody has an answer: the gate was open once generation had the memory to itself, and no pause
        stopped it. What waits on holds the memory of its KV cache, and nothing that an update needs."""
        await self.agent.open.wait()
        async with self.agent.memory:
            if not self.agent.gate():
                return False
            self._part(batch)
            while batch.kept is None and len(batch.requests) < most and not self.queue.empty():
                batch.requests.append(self.queue.get_nowait())
            return batch.gone() or await self._generate(batch)

    def _part(self, batch: _Batch) -> None:
        """What is kept starts over where the head may not go on with it: it had been stopped for another release, maybe
        one that did not come about."""
        publications, kept = self.agent.world.publications, batch.kept is not None
        head = publications.head
        if kept and head is not None and not may_continue(publications.releases, batch.head, head.load_id):
            batch.retract()

    def _stop(self, batch: _Batch) -> Stop:
        """Whether it is to stop: for a pause, unless it has been retracted often enough; and when the engine ends."""
        if batch.retractions >= MAX_RETRACTIONS:
            return self._ends.is_set
        return lambda: self.agent.stop.is_set() or self._ends.is_set()

    async def _generate(self, batch: _Batch) -> bool:
        """Whether it came to its end. Raises Rejected when the engine refuses one of the prompts; then none was
        answered."""
        self._name(batch)
        if not batch.requests:
            return True
        done = await self._sample(batch)
        if not done and self.agent.pause == RETRACT:
            batch.retract()
        return done

    def _name(self, batch: _Batch) -> None:
        head = self.agent.world.publications.head
        assert head is not None  # the gate is open; a lease may end at any moment, and the batch in hand is finished
        if batch.kept is None:
            batch.begin(self.agent, self.missing)
        elif head.load_id != batch.head:
            batch.go_on(head.load_id)
        batch.head = head.load_id

    async def _sample(self, batch: _Batch) -> bool:
        agent, as_of = self.agent, self.agent.world.seq
        prompts = [each.named(version) for each, version in zip(batch.requests, batch.versions, strict=True)]
        found: Generation = await blocking(agent.backend.generate_until, prompts, self._stop(batch), batch.kept)
        batch.add(found, as_of, agent.world.seq)
        self._answer(batch, found.completions)
        return found.kept is None

    def _answer(self, batch: _Batch, completions: list[Completion]) -> None:
        """Whoever has all of an answer gets it, also when others of the batch were stopped."""
        for waiting, completion, spans in zip(batch.requests, completions, batch.spans, strict=True):
            if completion.finish_reason:
                self.answer(waiting, completion, spans)
