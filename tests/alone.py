"""One engine over a log of its own: the real agent, runner and endpoint; the test speaks for trainer and publisher.

Knows: an engine of four floats, three kept versions of it, a transport that does as it is told. Must not know: what a
test is about, or processes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from msgspec.structs import replace

from consumers.reef_engine.server import Server
from reef_bus.artifacts import save_weights
from reef_bus.backends import Completion, Generated, Piece, Pieces, Prompt
from reef_bus.core.effects import Me
from reef_bus.envelope import decode
from reef_bus.errors import TransferError
from reef_bus.events import Blob, Event, Member, Recorded
from reef_bus.http import listen
from reef_bus.journal import LOG, MemoryJournal, MemoryStreams
from reef_bus.manifest import Manifest
from reef_bus.transport import Offer, Ticket, Transport
from tests.facts import (
    L,
    committed,
    dispatched,
    evaluated,
    offered,
    opened,
    ready,
    registered,
    selected,
    started,
    target,
    trainer_joined,
)
from tests.loop import put, running, until
from tests.unit.test_agent import BASE, NEXT, Floats, agent
from tests.unit.test_engine_server import Running

OTHER = b"\x00\x00\x40\x40" * 4  # four times 3.0
CONTENT = {"base": BASE, "c1": NEXT, "c2": OTHER}


class Wire(Transport):
    """Writes what it `brings` and says that sixteen bytes arrived, whatever did; half way it waits, and may fail."""

    name = "tcp"

    def __init__(self) -> None:
        self.brings = NEXT
        self.half = asyncio.Event()
        self.may_end = asyncio.Event()
        self.may_end.set()
        self.fails = False

    async def offer(self, manifest: Manifest, source: Pieces, *, publication: str, attempt: int) -> Offer:
        raise AssertionError("nobody sends here")

    async def receive(  # type: ignore[override]
        self, ticket: Ticket, manifest: Manifest, target: Pieces, **_: object
    ) -> int:
        view, middle = target["w"].data, len(self.brings) // 2
        view[:middle] = self.brings[:middle]
        self.half.set()
        await self.may_end.wait()
        if self.fails:
            raise TransferError("closed", "the sender went away")
        view[middle : len(self.brings)] = self.brings[middle:]
        return 16


class Whole(Floats):
    """Answers with every byte that it holds."""

    def generate(self, prompts: Sequence[Prompt]) -> list[Completion]:
        batch = super().generate(prompts)
        return [replace(each, ids=tuple(self.memory), logprobs=(0.0,) * 16) for each in batch]


class Alone:
    """One boot of engine e0 over a log; the test speaks for trainer and publisher."""

    def __init__(self, folder: Path, journal: MemoryJournal, start: int) -> None:
        self.journal = journal
        self.agent = agent(folder)
        self.agent.me = Me("e0", f"e0.{start}")
        self.agent.backend = Whole()
        self.wire = Wire()
        self.agent.transports["tcp"] = self.wire
        self.kept: dict[str, tuple[Blob, str]] = {}
        for name, data in CONTENT.items():
            self.keep(name, data)
        self.client: Running

    def keep(self, name: str, data: bytes) -> None:
        piece = Piece("F32", (len(data) // 4,), memoryview(data))
        weights, manifest = save_weights(self.agent.store, {"w": piece})
        self.kept[name] = weights, manifest.digest

    def real(self, event: Any, candidate: str) -> Event:
        """The same fact, about weights that are really kept."""
        weights, manifest = self.kept[candidate]
        named = {"manifest": manifest, **({"weights": weights} if hasattr(event, "weights") else {})}
        return replace(event, **named)  # type: ignore[no-any-return]

    async def trains(self, *events: Event) -> None:
        await put(self.journal, *events, boot="t1")

    async def register(self) -> None:
        await put(self.journal, opened())
        await self.trains(trainer_joined(), self.real(registered(), "base"))

    async def aim(self, n: int, candidate: str, *members: Member, parent: int | None = None) -> None:
        """A candidate is made from the base model, selected, targeted at this boot or others, and offered."""
        job, named = f"job-{candidate}", members or (Member("e0", self.agent.me.boot),)
        made = self.real(ready(job, candidate), candidate)
        await self.trains(dispatched(job), started(job), made, evaluated(candidate), selected(candidate))
        await put(self.journal, self.real(target(n, candidate, *named, parent=parent), candidate))
        await self.trains(self.real(offered(n, candidate), candidate))

    async def commit(
        self, n: int, candidate: str, *members: Member, attempt: int = 1, parent: int | None = None
    ) -> None:
        named = members or (Member("e0", self.agent.me.boot),)
        event = committed(n, candidate, *named, attempt=attempt, parent=parent)
        await put(self.journal, self.real(event, candidate))

    async def release(self, n: int, candidate: str, parent: int | None = None) -> None:
        """From the dispatch until this boot serves it."""
        self.wire.brings = CONTENT[candidate]
        await self.aim(n, candidate, parent=parent)
        await self.says("ReceiverVerified", publication=f"pub{n}")
        await self.commit(n, candidate, parent=parent)
        await self.serves(n)

    def log(self) -> list[Recorded]:
        return [decode(*message) for message in self.journal.streams.messages[LOG]]

    def said(self, name: str, **fields: object) -> list[Any]:
        """What this boot said by that name, in order."""
        own = [r.event for r in self.log() if r.name == name and r.boot == self.agent.me.boot]
        return [event for event in own if all(getattr(event, key) == value for key, value in fields.items())]

    async def says(self, name: str, **fields: object) -> Any:
        await until(lambda: bool(self.said(name, **fields)))
        return self.said(name, **fields)[-1]

    async def serves(self, n: int) -> None:
        await until(lambda: self.agent.serving() == L(n))

    async def answer(self) -> tuple[str, bytes]:
        """The load id that an answer names, and the bytes that it was computed from."""
        status, found = await self.client.ask(boot=self.agent.me.boot)
        assert status == 200 and isinstance(found, Generated), (status, found)
        return found.load_id, bytes(found.completion.ids)


@contextlib.asynccontextmanager
async def alone(folder: Path, journal: MemoryJournal | None = None, start: int = 1) -> AsyncIterator[Alone]:
    """The engine runs; without a journal, on a new log whose release 0 it serves."""
    found = Alone(folder, journal or MemoryJournal(MemoryStreams()), start)
    server, app = Server(found.agent, max_batch=8), web.Application()
    app.add_routes(server.routes())
    async with contextlib.AsyncExitStack() as stack:
        url = await listen(app, "127.0.0.1", 0, stack)
        session = await stack.enter_async_context(aiohttp.ClientSession())
        worker = asyncio.create_task(server.work())
        stack.callback(worker.cancel)
        found.client = Running(server, url, session)
        await stack.enter_async_context(running(found.journal, found.agent))
        if journal is None:
            await found.register()
            await found.serves(0)
        yield found
