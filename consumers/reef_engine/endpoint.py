"""An engine's HTTP endpoint for gateways: token ids in, token ids, logprobs and their load id out.

Knows: the agent's boot and what it serves. Must not know: how anything is generated, chat formats, or other engines.
Requests that arrive while the gate is closed wait; whoever still waits in the end hears of it at once.
"""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from typing import NamedTuple

import msgspec
from aiohttp import web
from msgspec.structs import replace

from consumers.reef_engine.agent import Agent
from reef_bus.backends import BOOT_HEADER, Completion, Generated, Prompt
from reef_bus.core.serving import Version
from reef_bus.errors import Rejected, Unavailable
from reef_bus.events import Span

MAX_WAITING = 4096  # beyond this the engine says so, instead of promising answers that nobody waits for any more
MAX_RETRACTIONS = 3  # of one request: where releases come faster than its answer, it is then drained, or never ends


class Waiting(NamedTuple):
    prompt: Prompt
    done: asyncio.Future[Generated]

    def named(self, version: Version) -> Prompt:
        """The prompt as it is answered by that version."""
        return replace(self.prompt, adapter=version.adapter)


class Endpoint(ABC):
    """Collects requests; who inherits generates for them."""

    def __init__(self, agent: Agent, max_batch: int) -> None:
        self.agent = agent
        self.max_batch = max_batch
        self.queue: asyncio.Queue[Waiting] = asyncio.Queue(MAX_WAITING)
        self._asked: set[asyncio.Future[Generated]] = set()
        self._ends = threading.Event()

    def routes(self) -> list[web.RouteDef]:
        return [web.post("/generate", self.generate), web.get("/healthz", self.healthz)]

    async def healthz(self, request: web.Request) -> web.Response:
        return web.json_response({"boot": self.agent.me.boot, "serving": self.agent.serving()})

    async def generate(self, request: web.Request) -> web.Response:
        """409 for another boot's request, 400 for one that cannot be read or answered, 503 when too many wait, it ends,
        or its engine cannot now."""
        if request.headers.get(BOOT_HEADER) != self.agent.me.boot:
            return web.json_response({"error": f"this is boot {self.agent.me.boot}"}, status=409)
        try:
            generated = await self.ask(msgspec.json.decode(await request.read(), type=Prompt))
        except msgspec.DecodeError as error:
            return web.json_response({"error": str(error)}, status=400)
        except Rejected as error:
            return web.json_response({"error": str(error)}, status=error.status)
        except Unavailable as error:
            return web.json_response({"error": str(error)}, status=503)
        return web.Response(body=msgspec.json.encode(generated), content_type="application/json")

    async def ask(self, prompt: Prompt) -> Generated:
        """Raises Rejected for a prompt that the engine refuses, Unavailable when too many wait or it ends."""
        try:
            return await self._enter(prompt)
        except asyncio.QueueFull as error:
            raise Unavailable(f"{MAX_WAITING} requests wait already") from error

    def _enter(self, prompt: Prompt) -> asyncio.Future[Generated]:
        """Raises QueueFull, and Unavailable once nobody takes anything from the queue any more."""
        if self._ends.is_set():
            raise self._ending()
        waiting = Waiting(prompt, asyncio.get_running_loop().create_future())
        self.queue.put_nowait(waiting)
        self._asked.add(waiting.done)
        waiting.done.add_done_callback(self._asked.discard)
        return waiting.done

    def lost(self, waiting: Waiting) -> None:
        """The engine has not what the fold says that it has: what it holds is to be proven again."""
        self.agent.doubt()
        self.missing(waiting)

    def missing(self, waiting: Waiting) -> None:
        """Its gateway knows more than we, or less: it is asked elsewhere, or later."""
        if not waiting.done.done():
            why = f"boot {self.agent.me.boot} does not hold the adapter of {waiting.prompt.scenario!r}"
            waiting.done.set_exception(Unavailable(why))

    def _ending(self) -> Unavailable:
        return Unavailable(f"boot {self.agent.me.boot} ends")

    def end(self) -> None:
        """Nobody is heard any more, and what is being generated ends at the next token: also what no pause may stop."""
        self._ends.set()

    async def work(self) -> None:
        """Generate for ever."""
        try:
            while True:
                await self.serve()
        finally:
            self.end()
            for done in [done for done in self._asked if not done.done()]:
                done.set_exception(self._ending())

    @abstractmethod
    async def serve(self) -> None:
        """Wait for requests and for the gate, and generate while nobody wants the memory."""

    def answer(self, waiting: Waiting, completion: Completion, spans: list[Span]) -> None:
        """Named by the one version that generated all of it, or token by token. Nobody may wait for it any more."""
        if waiting.done.done():
            return
        parts = tuple(span for span in spans if span.count) or tuple(spans[-1:])
        waiting.done.set_result(
            Generated(
                engine=self.agent.me.id,
                boot=self.agent.me.boot,
                load_id=parts[0].load_id,
                as_of=parts[0].as_of,
                done_as_of=parts[-1].done_as_of,
                completion=completion,
                spans=parts if len(parts) > 1 else (),
            )
        )
        self.agent.served += 1
