"""The engine's HTTP endpoint for gateways: token ids in, token ids, logprobs and their load id out.

Knows: the agent's gate and memory lock. Must not know: chat formats, records, or other engines.
Requests that arrive while the gate is closed wait; what is generated together was checked at one point of the fold.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

import msgspec
from aiohttp import web

from consumers.reef_engine.agent import Agent
from reef_bus.backends import BOOT_HEADER, Completion, Generated, Prompt
from reef_bus.errors import Rejected
from reef_bus.runner import blocking

MAX_WAITING = 4096  # beyond this the engine says so, instead of promising answers that nobody waits for any more


class _Waiting(NamedTuple):
    prompt: Prompt
    done: asyncio.Future[Generated]


class Server:
    """Collects requests and generates for as many as fit, one batch at a time."""

    def __init__(self, agent: Agent, max_batch: int) -> None:
        self.agent = agent
        self.max_batch = max_batch
        self.queue: asyncio.Queue[_Waiting] = asyncio.Queue(MAX_WAITING)

    def routes(self) -> list[web.RouteDef]:
        return [web.post("/generate", self.generate), web.get("/healthz", self.healthz)]

    async def healthz(self, request: web.Request) -> web.Response:
        return web.json_response({"boot": self.agent.me.boot, "serving": self.agent.serving()})

    async def generate(self, request: web.Request) -> web.Response:
        """409 for another boot's request, 400 for one that cannot be read, 503 when too many wait."""
        if request.headers.get(BOOT_HEADER) != self.agent.me.boot:
            return web.json_response({"error": f"this is boot {self.agent.me.boot}"}, status=409)
        try:
            prompt = msgspec.json.decode(await request.read(), type=Prompt)
            waiting = _Waiting(prompt, asyncio.get_running_loop().create_future())
            self.queue.put_nowait(waiting)
        except msgspec.DecodeError as error:
            return web.json_response({"error": str(error)}, status=400)
        except asyncio.QueueFull:
            return web.json_response({"error": f"{MAX_WAITING} requests wait already"}, status=503)
        try:
            generated = await waiting.done
        except Rejected as error:
            return web.json_response({"error": str(error)}, status=400)
        return web.Response(body=msgspec.json.encode(generated), content_type="application/json")

    async def work(self) -> None:
        """Generate for ever."""
        while True:
            await self._serve([await self.queue.get()], self.max_batch)

    async def _serve(self, batch: list[_Waiting], most: int) -> None:
        """Generate for `batch` and up to `most` of those who wait. A gate that closes meanwhile makes them wait on; a
        prompt that is refused spoils nobody else's request."""
        try:
            while not await self._served(batch, most):
                pass
        except Rejected as error:
            if len(batch) > 1:
                for waiting in batch:
                    await self._serve([waiting], 1)
            elif not batch[0].done.done():
                batch[0].done.set_exception(error)

    async def _served(self, batch: list[_Waiting], most: int) -> bool:
        """Whether the gate was open once generation had the memory to itself."""
        await self.agent.open.wait()
        async with self.agent.memory:
            if not self.agent.gate():
                return False
            while len(batch) < most and not self.queue.empty():
                batch.append(self.queue.get_nowait())
            if waiting := [each for each in batch if not each.done.done()]:
                await self._generate(waiting)
            return True

    async def _generate(self, batch: list[_Waiting]) -> None:
        """Raises Rejected when the engine refuses one of the prompts; then none was answered."""
        agent, world = self.agent, self.agent.world
        head = world.publications.head
        assert head is not None and agent.may_generate()
        load_id, as_of = head.load_id, world.seq
        completions: list[Completion] = await blocking(agent.backend.generate, [w.prompt for w in batch])
        agent.served += len(batch)
        for waiting, completion in zip(batch, completions, strict=True):
            if not waiting.done.done():
                waiting.done.set_result(
                    Generated(
                        engine=agent.me.id,
                        boot=agent.me.boot,
                        load_id=load_id,
                        as_of=as_of,
                        done_as_of=world.seq,
                        completion=completion,
                    )
                )
