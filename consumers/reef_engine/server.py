"""The engine's HTTP endpoint for gateways: token ids in, token ids, logprobs and their load id out.

Knows: the agent's gate, memory lock and pauses. Must not know: chat formats, records, or other engines.
Requests that arrive while the gate is closed wait; what is generated together was checked at one point of the fold.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Any, NamedTuple

import msgspec
from aiohttp import web

from consumers.reef_engine.agent import Agent
from reef_bus.backends import BOOT_HEADER, Completion, Generated, Generation, Prompt, Stop
from reef_bus.core.publication import RETRACT
from reef_bus.core.serving import may_continue
from reef_bus.errors import Rejected, Unavailable
from reef_bus.events import Span
from reef_bus.runner import blocking

MAX_WAITING = 4096  # beyond this the engine says so, instead of promising answers that nobody waits for any more
MAX_RETRACTIONS = 3  # of one batch: where releases come faster than its answers, it is then drained, or it never ends


class _Waiting(NamedTuple):
    prompt: Prompt
    done: asyncio.Future[Generated]


class _Batch:
    """Requests that are generated for together. Once stopped in place, `kept` is what the engine goes on from, and
    `spans` say of each request what it has so far."""

    def __init__(self, *requests: _Waiting) -> None:
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


class Server:
    """Collects requests and generates for as many as fit, one batch at a time."""

    def __init__(self, agent: Agent, max_batch: int) -> None:
        self.agent = agent
        self.max_batch = max_batch
        self.queue: asyncio.Queue[_Waiting] = asyncio.Queue(MAX_WAITING)
        self._asked: set[asyncio.Future[Generated]] = set()
        self._ends = threading.Event()

    def routes(self) -> list[web.RouteDef]:
        return [web.post("/generate", self.generate), web.get("/healthz", self.healthz)]

    async def healthz(self, request: web.Request) -> web.Response:
        return web.json_response({"boot": self.agent.me.boot, "serving": self.agent.serving()})

    async def generate(self, request: web.Request) -> web.Response:
        """409 for another boot's request, 400 for one that cannot be read, 503 when too many wait or it ends."""
        if request.headers.get(BOOT_HEADER) != self.agent.me.boot:
            return web.json_response({"error": f"this is boot {self.agent.me.boot}"}, status=409)
        try:
            generated = await self._enter(msgspec.json.decode(await request.read(), type=Prompt))
        except (msgspec.DecodeError, Rejected) as error:
            return web.json_response({"error": str(error)}, status=400)
        except asyncio.QueueFull:
            return web.json_response({"error": f"{MAX_WAITING} requests wait already"}, status=503)
        except Unavailable as error:
            return web.json_response({"error": str(error)}, status=503)
        return web.Response(body=msgspec.json.encode(generated), content_type="application/json")

    def _enter(self, prompt: Prompt) -> asyncio.Future[Generated]:
        """Raises QueueFull, and Unavailable once nobody takes anything from the queue any more."""
        if self._ends.is_set():
            raise self._ending()
        waiting = _Waiting(prompt, asyncio.get_running_loop().create_future())
        self.queue.put_nowait(waiting)
        self._asked.add(waiting.done)
        waiting.done.add_done_callback(self._asked.discard)
        return waiting.done

    def _ending(self) -> Unavailable:
        return Unavailable(f"boot {self.agent.me.boot} ends")

    def end(self) -> None:
        """Nobody is heard any more, and what is being generated ends at the next token: also what no pause may stop."""
        self._ends.set()

    async def work(self) -> None:
        """Generate for ever. Whoever still waits in the end hears of it at once, and asks another engine."""
        try:
            while True:
                await self._serve(_Batch(await self.queue.get()), self.max_batch)
        finally:
            self.end()
            for done in [done for done in self._asked if not done.done()]:
                done.set_exception(self._ending())

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
            if completion.finish_reason and not waiting.done.done():
                waiting.done.set_result(self._generated(completion, spans))
                self.agent.served += 1

    def _generated(self, completion: Completion, spans: list[Span]) -> Generated:
        """Named by the one version that generated all of it, or token by token."""
        parts = tuple(span for span in spans if span.count) or tuple(spans[-1:])
        return Generated(
            engine=self.agent.me.id,
            boot=self.agent.me.boot,
            load_id=parts[0].load_id,
            as_of=parts[0].as_of,
            done_as_of=parts[-1].done_as_of,
            completion=completion,
            spans=parts if len(parts) > 1 else (),
        )
