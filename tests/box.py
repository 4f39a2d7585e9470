"""A deployment in one process for the trainer's side: real publisher, real agents over four floats, real transports.

Knows: the roles and an in-memory journal. Must not know: who trains, or what a test is about.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Coroutine, Sequence
from pathlib import Path
from typing import Any

import msgspec

from consumers.reef_engine.agent import Agent
from consumers.reef_engine.fault import Fault
from consumers.reef_publisher.role import Heartbeats, Publisher
from reef_bus.artifacts import ArtifactStore
from reef_bus.audit import audit_history, read_history
from reef_bus.backends import Completion, InferenceBackend, Piece, Pieces, Prompt
from reef_bus.config import Config, Inference, Publication, Training
from reef_bus.core.effects import Deadlines, Me
from reef_bus.events import Event
from reef_bus.journal import LOG, MemoryJournal, MemoryStreams
from reef_bus.runner import Retired, Role, Runner
from tests.facts import S, opened
from tests.loop import names, put

CONFIG = Config(
    scenario=S,
    training=Training(backend="attached"),
    inference=Inference(engines=("e0", "e1")),
    publication=Publication(publishers=1, deadlines=Deadlines(fence_s=2.0, sender_s=2.0, stall_s=1.0, verify_s=2.0)),
)


class Floats(InferenceBackend):
    """An engine's memory: four floats that nobody has written yet."""

    def __init__(self) -> None:
        self.memory = bytearray(b"\xff" * 16)

    def start(self) -> None: ...

    def live(self) -> Pieces:
        return {"w": Piece("F32", (4,), memoryview(self.memory))}

    def generate(self, prompts: Sequence[Prompt]) -> list[Completion]:
        raise AssertionError("nobody asks")

    def close(self) -> None: ...


class Box:
    """The streams, the store, and the roles that run beside whoever is the trainer."""

    def __init__(self, folder: Path, config: Config = CONFIG) -> None:
        self.config = msgspec.structs.replace(config, state_dir=str(folder))
        self.streams = MemoryStreams(clock=lambda: 1)
        self.store = ArtifactStore(self.config.folder("artifacts"))
        self.memories: dict[str, bytearray] = {}
        self.boots = itertools.count(1)
        self.tasks: list[asyncio.Task[None]] = []

    def journal(self) -> MemoryJournal:
        return MemoryJournal(self.streams)

    async def put(self, *events: Event, boot: str = "other") -> None:
        await put(self.journal(), *events, boot=boot)

    async def run(self, role: Role) -> None:
        await Runner(self.journal(), role, clock=lambda: 1, tick_s=0.01).run()

    def begin(self, running: Coroutine[Any, Any, None]) -> None:
        self.tasks.append(asyncio.create_task(running))

    async def publisher(self) -> None:
        journal = self.journal()
        heartbeats = Heartbeats(journal, self.config.publication.deadlines.heartbeat_s)
        self.begin(self.run(Publisher(self.config, Me("publisher", f"p.{next(self.boots)}"), heartbeats)))

    async def engine(self, name: str) -> None:
        """One boot after the other, as if supervised: a receiver whose sender died halfway may be excluded for it."""
        while True:
            backend = Floats()
            self.memories[name] = backend.memory
            boot = f"{name}.{next(self.boots)}"
            with contextlib.suppress(Retired):
                await self.run(Agent(self.config, Me(name, boot), f"http://{name}", backend, self.store, Fault()))

    def engines(self) -> None:
        for name in self.config.inference.engines:
            self.begin(self.engine(name))

    async def start(self) -> None:
        """A log, a publisher, every engine."""
        if not self.streams.messages[LOG]:
            await self.put(opened())
        await self.publisher()
        self.engines()

    async def stop(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    def names(self) -> list[str]:
        return names(self.streams)

    def count(self, name: str) -> int:
        return self.names().count(name)

    async def log(self) -> list[Event]:
        history = await read_history(self.journal())
        return [recorded.event for recorded in history.log]

    async def violations(self) -> list[str]:
        """What the audit finds, and what it could not look at."""
        found = audit_history(await read_history(self.journal(), self.store))
        return [*(violation.text for violation in found.violations), *found.unchecked]


@contextlib.asynccontextmanager
async def box(folder: Path, config: Config = CONFIG, *, start: bool = True) -> AsyncIterator[Box]:
    found = Box(folder, config)
    try:
        if start:
            await found.start()
        yield found
    finally:
        await found.stop()
