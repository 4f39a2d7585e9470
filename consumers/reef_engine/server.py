"""Generates for an engine that samples batch after batch.

Knows: the agent's gate, memory lock and pauses. Must not know: HTTP, chat formats, records, or other engines.
What is generated together was checked at one point of the fold.
"""

from __future__ import annotations

from typing import Any

from consumers.reef_engine.endpoint import MAX_RETRACTIONS, Endpoint, Waiting
from reef_bus.backends import Completion, Generation, Stop
from reef_bus.core.publication import RETRACT
from reef_bus.core.serving import may_continue
from reef_bus.errors import Rejected
from reef_bus.events import Span
from reef_bus.runner import blocking


class _Batch:
    """Requests that are generated for together. Once stopped in place, `kept` is what the engine goes on from, and
    `spans` say of each request what it has so far."""

    def __init__(self, *requests: Waiting) -> None:
        self.requests = list(requests)
        self.retractions = 0
        self.start_over()

    def start_over(self) -> None:
        self.kept: Any = None
        self.spans: list[list[Span]] = []

    def retract(self) -> None:
        self.retractions += 1
        self.start_over()

    def kept_of(self) -> str:
        """The version that it was stopped with; empty if nothing is kept of it."""
        return next((spans[-1].load_id for spans in self.spans if self.kept is not None), "")

    def gone(self) -> bool:
        """Nobody waits for it. Until it was begun, it is rid of those who do not; later, they take their part to the
        end."""
        waiting = [each for each in self.requests if not each.done.done()]
        if self.kept is None:
            self.requests = waiting
        return not waiting

    def add(self, generation: Generation, load_id: str, as_of: int, done_as_of: int) -> None:
        """Enter what was generated in one go."""
        self.kept, self.spans = generation.kept, self.spans or [[] for _ in self.requests]
        for spans, completion in zip(self.spans, generation.completions, strict=True):
            first = sum(span.count for span in spans)
            spans.append(Span(load_id, first, len(completion.ids) - first, as_of, done_as_of))


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
            if len(batch.requests) > 1:
                for waiting in batch.requests:
                    await self._serve(_Batch(waiting), 1)
            elif not batch.requests[0].done.done():
                batch.requests[0].done.set_exception(error)

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
        publications, begun = self.agent.world.publications, batch.kept_of()
        head = publications.head
        if begun and head is not None and not may_continue(publications.releases, begun, head.load_id):
            batch.retract()

    def _stop(self, batch: _Batch) -> Stop:
        """Whether it is to stop: for a pause, unless it has been retracted often enough; and when the engine ends."""
        if batch.retractions >= MAX_RETRACTIONS:
            return self._ends.is_set
        return lambda: self.agent.stop.is_set() or self._ends.is_set()

    async def _generate(self, batch: _Batch) -> bool:
        """Whether it came to its end. Raises Rejected when the engine refuses one of the prompts; then none was
        answered."""
        agent, world = self.agent, self.agent.world
        head = world.publications.head
        assert head is not None  # the gate is open; a lease may end at any moment, and the batch in hand is finished
        load_id, as_of = head.load_id, world.seq
        prompts = [waiting.prompt for waiting in batch.requests]
        found: Generation = await blocking(agent.backend.generate_until, prompts, self._stop(batch), batch.kept)
        batch.add(found, load_id, as_of, agent.world.seq)
        self._answer(batch, found.completions)
        if batch.kept is not None and agent.pause == RETRACT:
            batch.retract()
        return found.kept is None

    def _answer(self, batch: _Batch, completions: list[Completion]) -> None:
        """Whoever has all of an answer gets it, also when others of the batch were stopped."""
        for waiting, completion, spans in zip(batch.requests, completions, batch.spans, strict=True):
            if completion.finish_reason:
                self.answer(waiting, completion, spans)
