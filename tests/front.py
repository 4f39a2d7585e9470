"""A gateway on a real port, before engines that are a function, and what it has recorded.

Knows: an in-memory journal, a real artifact store, the gateway's routes. Must not know: a model.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from consumers.reef_gateway import role as role_module
from consumers.reef_gateway.formats import ChatFormat
from consumers.reef_gateway.recorder import Recorder
from consumers.reef_gateway.role import Gateway
from consumers.reef_gateway.router import Router
from reef_bus.artifacts import ArtifactStore
from reef_bus.backends import Completion, Generated, Prompt
from reef_bus.config import Config
from reef_bus.config import Gateway as GatewayConfig
from reef_bus.core.effects import Me
from reef_bus.core.membership import Engine
from reef_bus.envelope import decode
from reef_bus.events import InferenceRecorded
from reef_bus.http import listen
from reef_bus.journal import RECORDS, MemoryJournal, MemoryStreams
from reef_bus.samples import TokenRow, decode_rows
from tests.facts import SERVING
from tests.spec import given

Hands = Callable[[Engine, Prompt], Awaitable[Generated]]


class Scripted(Router):
    """Engines are a function, which is asked one after the other."""

    def __init__(self, hands: Hands) -> None:
        super().__init__(None)  # type: ignore[arg-type]
        self.hands = hands
        self.asked: list[Prompt] = []

    async def _post(self, engine: Engine, prompt: Prompt) -> Generated | None:
        self.asked.append(prompt)
        return await self.hands(engine, prompt)


def says(ids: Sequence[int], load_ids: Sequence[str] = ("inc:0",)) -> Hands:
    """`ids`, the nth with the logprob -n/8, by one load id after the other, and then by the last for ever."""
    left = list(load_ids)

    async def hands(engine: Engine, prompt: Prompt) -> Generated:
        load_id = left.pop(0) if len(left) > 1 else left[0]
        done = Completion(ids=tuple(ids), logprobs=tuple(-n / 8 for n in range(len(ids))), finish_reason="length")
        return Generated(engine=engine.id, boot=engine.boot, load_id=load_id, as_of=7, done_as_of=7, completion=done)

    return hands


class Front:
    """A gateway, a client's connection to it, and what is recorded."""

    def __init__(self, url: str, session: aiohttp.ClientSession, role: Gateway, router: Scripted) -> None:
        self.url, self.session, self.role, self.router = url, session, role, router

    def events(self) -> list[InferenceRecorded]:
        journal = self.role.recorder.journal
        assert isinstance(journal, MemoryJournal)
        found = [decode(*message).event for message in journal.streams.messages[RECORDS]]
        return [event for event in found if isinstance(event, InferenceRecorded)]

    def rows(self) -> list[TokenRow]:
        store = self.role.recorder.store
        return [decode_rows(store.get(event.blob.digest))[event.row] for event in self.events()]

    async def ask(self, **fields: Any) -> tuple[aiohttp.ClientResponse, bytes]:
        body = {"model": "reef-digit", **fields}
        async with self.session.post(f"{self.url}/v1/chat/completions", json=body) as reply:
            return reply, await reply.read()


@contextlib.asynccontextmanager
async def fronted(folder: Path, format: ChatFormat, hands: Hands, timeout_s: float = 30.0) -> AsyncIterator[Front]:
    """It gives up after `timeout_s`."""
    async with contextlib.AsyncExitStack() as stack:
        recorder = Recorder(MemoryJournal(MemoryStreams()), ArtifactStore(folder), "gateway/g1", "g1")
        await recorder.start(stack)
        router = Scripted(hands)
        router.moved(given(*SERVING).world)
        config = Config(gateway=GatewayConfig(timeout_s=timeout_s))
        role = Gateway(config, Me("gateway", "g1"), router, recorder, format)
        app = web.Application(middlewares=[role_module.errors])
        app.add_routes(role.routes())
        url = await listen(app, "127.0.0.1", 0, stack)
        yield Front(url, await stack.enter_async_context(aiohttp.ClientSession()), role, router)
