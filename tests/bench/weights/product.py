"""The real thing, measured: an attached loop, a publisher and engines' agents over a real server, all processes.

Knows: how they are started, when each engine may generate, what the log says. Must not know: other patterns.
An engine is the agent that a deployment runs, over memory that answers nobody: it is idle. It says by a pipe when it
may generate, and when not, as its own gate has it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy

from consumers.reef_engine.agent import Agent, Fault
from consumers.reef_publisher import role as publisher
from consumers.reef_supervisor.role import prepare
from reef_bus import process
from reef_bus.artifacts import ArtifactStore
from reef_bus.attach import BlockingBus, Committed, attach_blocking
from reef_bus.audit import read_history
from reef_bus.backends import Completion, InferenceBackend, Pieces, Prompt
from reef_bus.config import Config, Inference, Nats, Publication, Training
from reef_bus.core.effects import Me
from reef_bus.embedded import NatsServer
from reef_bus.events import EngineStaged, ReceiverVerified, Recorded
from reef_bus.jetstream import JetStreamJournal, connect
from reef_bus.journal import Journal
from reef_bus.runner import Role
from tests.bench.transports import memory
from tests.bench.weights.patterns import Tensors, tensors
from tests.bench.weights.receivers import SPAWN

LIMIT_S = 300.0  # to fold a million events, several processes at once


class Memory(InferenceBackend):
    """Two copies of the weights, and nothing that reads them."""

    stages = True

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = list(lengths)
        self._live: Pieces = {}
        self._beside: Pieces = {}

    def start(self) -> None:
        self._live = memory(self.lengths, fill=False)

    def live(self) -> Pieces:
        return self._live

    def generate(self, prompts: Sequence[Prompt]) -> list[Completion]:
        raise AssertionError("nobody asks")

    def stage(self) -> Pieces:
        self._beside = self._beside or memory(self.lengths, fill=False)
        return self._beside

    def swap(self) -> None:
        self._live, self._beside = self._beside, self._live

    def unstage(self) -> None:
        self._beside = {}

    def close(self) -> None: ...


class Watched(Agent):
    """The agent, and whoever wants to know when it may generate."""

    pipe: Connection
    said = ""

    def gate(self) -> bool:
        found = super().gate()
        if (now := self.serving()) != self.said:
            self.said = now
            self.pipe.send((now, time.monotonic()))
        return found


def engine(told: bytes, id_: str, lengths: Sequence[int], pipe: Connection) -> None:
    config = msgspec.json.decode(told, type=Config)

    async def build(config: Config, journal: Journal, me: Me, stack: contextlib.AsyncExitStack) -> Role:
        backend = Memory(lengths)
        backend.start()
        store = ArtifactStore(config.folder("artifacts"))
        agent = Watched(config, me, f"http://{me.id}", backend, store, Fault())
        agent.pipe = pipe
        return agent

    process.run(id_, config, build)


def publish(told: bytes) -> None:
    publisher.run(msgspec.json.decode(told, type=Config), "publisher")


class Release(NamedTuple):
    """One publication: when it was called for, and by engine from when to when it was closed."""

    load_id: str
    called: float
    called_ns: int
    closed: list[float]
    opened: list[float]

    @property
    def serving_s(self) -> float:
        return max(self.opened) - self.called

    def pauses(self) -> list[float]:
        return [after - before for before, after in zip(self.closed, self.opened, strict=True)]


class Product:
    """A deployment whose engines can be added to; its trainer is this process."""

    def __init__(self, config: Config, lengths: Sequence[int]) -> None:
        self.config, self.told, self.lengths = config, msgspec.json.encode(config), list(lengths)
        self.version: Tensors = tensors(lengths)
        self.step = 0
        self.pipes: list[Connection] = []
        self.said: list[list[tuple[str, float]]] = []  # per engine: what it serves (empty: nothing), and since when
        self.processes: list[BaseProcess] = []
        self.bus: BlockingBus

    def run(self, target: Any, *args: Any) -> None:
        self.processes.append(SPAWN.Process(target=target, args=args, daemon=True))
        self.processes[-1].start()

    def grow(self, count: int) -> None:
        """Have so many engines, each of which serves the head."""
        for number in range(len(self.pipes), count):
            ours, theirs = SPAWN.Pipe(duplex=False)
            self.run(engine, self.told, f"engine-{number}", self.lengths, theirs)
            self.pipes.append(ours)
            self.said.append([])
        head = self.bus.head
        assert head is not None
        self._until(head.load_id)

    def release(self) -> Release:
        """Publish other weights, and wait until every engine may generate with them."""
        self.step += 1
        for tensor in self.version.values():
            tensor[:8] = numpy.frombuffer(self.step.to_bytes(8, "little"), numpy.uint8)
        called, called_ns = time.monotonic(), time.time_ns()
        found = self.bus.publish(self.version, step=self.step)
        if not isinstance(found, Committed):
            raise RuntimeError(f"step {self.step} was not committed: {found}")
        self._until(found.load_id)
        closed = [max(at for said, at in each if not said) for each in self.said]
        return Release(found.load_id, called, called_ns, closed, [each[-1][1] for each in self.said])

    def _until(self, load_id: str) -> None:
        """Hear the engines until all of them may generate with that release."""
        until = time.monotonic() + LIMIT_S
        while any(not each or each[-1][0] != load_id for each in self.said):
            for pipe in wait(self.pipes, timeout=1.0):
                self.said[self.pipes.index(pipe)].append(pipe.recv())  # type: ignore[arg-type, union-attr]
            if time.monotonic() > until or any(not each.is_alive() for each in self.processes):
                raise RuntimeError(f"not every engine serves {load_id}: they said {[each[-1:] for each in self.said]}")

    def log(self) -> list[Recorded]:
        async def read() -> list[Recorded]:
            journal = await connect(self.config.nats.url, self.config.deployment, "bench")
            try:
                return list((await read_history(journal)).log)
            finally:
                await journal.close()

        return asyncio.run(read())

    def stop(self) -> None:
        for each in self.processes:
            each.terminate()
        for each in self.processes:
            each.join(10)
            each.kill()


def settings(folder: Path, url: str, mode: str, engines: int) -> Config:
    return Config(
        deployment="bench",
        state_dir=str(folder),
        nats=Nats(url=url),
        inference=Inference(engines=tuple(f"engine-{n}" for n in range(engines))),
        training=Training(backend="attached"),
        publication=Publication(publishers=1, mode=mode),
    )


@contextlib.contextmanager
def product(folder: Path, lengths: Sequence[int], engines: int, mode: str = "fenced") -> Iterator[Product]:
    """Everything under `folder`: on a disk it is durable; on a tmpfs the same code waits for no disk."""
    os.environ["REEF_LOG_LEVEL"] = "ERROR"
    server = NatsServer(folder / "nats")
    server.start()
    config = settings(folder / "state", server.url, mode, engines)
    found = Product(config, lengths)
    try:
        asyncio.run(_prepared(config))
        found.run(publish, found.told)
        with attach_blocking(config) as found.bus:
            found.bus.publish(found.version, step=0)
            found.step = found.bus.step  # of a log that was there before
            yield found
    finally:
        found.stop()
        server.stop()


async def _prepared(config: Config) -> None:
    journal: JetStreamJournal = await connect(config.nats.url, config.deployment, "bench")
    try:
        await prepare(config, journal)
    finally:
        await journal.close()


# -- what the log says of a release

HOPS = ("JobDispatched", "CandidateSelected", "TargetPersisted", "SenderReady", "ReceiverVerified", "ReleaseCommitted")


def hops(log: Sequence[Recorded], releases: Sequence[Release]) -> list[dict[str, float]]:
    """Per release, from the call on: seconds until each of these events was stored for the last time; by the clock of
    this machine, which is the server's, too."""
    found: list[dict[str, float]] = []
    ends = {r.event.load_id: r.seq for r in log if r.name == "ReleaseCommitted"}  # type: ignore[attr-defined]
    for release in releases:
        before = max((seq for seq in ends.values() if seq < ends[release.load_id]), default=0)
        stored = {r.name: r.time for r in log[before : ends[release.load_id]]}
        found.append({name: (stored[name] - release.called_ns) / 1e9 for name in HOPS if name in stored})
    return found


def received_s(log: Sequence[Recorded]) -> dict[str, list[float]]:
    """By load id: how long each member moved and hashed, as it says itself."""
    found: dict[str, list[float]] = {}
    for recorded in log:
        event = recorded.event
        if isinstance(event, EngineStaged) or (isinstance(event, ReceiverVerified) and event.publication):
            found.setdefault(event.load_id, []).append(event.ms / 1e3)
    return found
