"""Receivers in processes of their own, told over a pipe what to do next; each answers with its times.

Knows: transports, a gloo group, memory that was touched before. Must not know: what is compared with what.
Times are of the one monotonic clock that all processes of a machine share; CPU seconds are the process's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import socket
import threading
import time
from collections.abc import Coroutine, Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy

from reef_bus.artifacts import ArtifactStore
from reef_bus.backends import Pieces
from reef_bus.manifest import Manifest, describe
from reef_bus.transport import Ticket, transports
from reef_bus.transport.door import Hello, Link
from reef_bus.transport.shm import ShmTransport, _address, _connect, _descriptor
from tests.bench.transports import ASK, memory

T = TypeVar("T")

SPAWN = multiprocessing.get_context("spawn")


class Did(NamedTuple):
    """What one receiver says of one transfer: seconds of each part, CPU seconds of both, whether the bytes are right
    (None: not looked at), and when it was done."""

    moved_s: float
    digest_s: float
    cpu_s: float
    right: bool | None
    at: float


class Receivers:
    """`count` processes, each with memory of these lengths."""

    def __init__(self, count: int, lengths: Sequence[int], folder: Path) -> None:
        self.pipes: list[Connection] = []
        self.processes: list[BaseProcess] = []
        for _ in range(count):
            ours, theirs = SPAWN.Pipe()
            process = SPAWN.Process(target=serve, args=(theirs, list(lengths), str(folder)), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        self.ask("ready")

    def tell(self, what: str, *told: Any, only: int | None = None) -> None:
        for pipe in self.pipes[:only]:
            pipe.send((what, *told))

    def answers(self, only: int | None = None) -> list[Any]:
        """Everybody's, once the last one is there. Raises EOFError when one has died."""
        return [pipe.recv() for pipe in self.pipes[:only]]

    def ask(self, what: str, *told: Any, only: int | None = None) -> list[Any]:
        self.tell(what, *told, only=only)
        return self.answers(only)

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
        for process, pipe in zip(self.processes, self.pipes, strict=True):
            process.join()
            pipe.close()


@contextlib.contextmanager
def receivers(count: int, lengths: Sequence[int], folder: Path) -> Iterator[Receivers]:
    found = Receivers(count, lengths, folder)
    try:
        yield found
    finally:
        found.stop()


# -- in their processes


def serve(pipe: Connection, lengths: list[int], folder: str) -> None:
    receiver = Receiver(lengths, folder)
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            what, *told = pipe.recv()
            pipe.send(getattr(receiver, what)(*told))


class Receiver:
    """What one process does when it is told so."""

    def __init__(self, lengths: list[int], folder: str) -> None:
        self.transports = transports(ArtifactStore(Path(folder)))
        self.target: Pieces = memory(lengths, fill=False)
        self.loop = asyncio.new_event_loop()  # always running: who is done still passes on to others
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.group: Any = None

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()

    def ready(self) -> None:
        return None

    def receive(self, ticket: bytes, manifest: bytes, check: bool) -> Did:
        """As an engine does it: into memory of its own, then, to `check`, a hash of that."""
        cpu, began = time.process_time(), time.monotonic()
        found, wanted = msgspec.json.decode(ticket, type=Ticket), Manifest.decode(manifest)
        transport = self.transports[found.transport]
        self._run(transport.receive(found, wanted, self.target, **ASK))  # type: ignore[arg-type]
        moved = time.monotonic()
        right = describe(self.target) == wanted if check else None
        done = time.monotonic()
        return Did(moved - began, done - moved, time.process_time() - cpu, right, done)

    def map(self, ticket: bytes, manifest: bytes) -> Did:
        """No engine does this: hash the segment where it lies, and use it there."""
        cpu, began = time.process_time(), time.monotonic()
        found, wanted = msgspec.json.decode(ticket, type=Ticket), Manifest.decode(manifest)
        mapped, right = self._run(_mapped(self.transports["shm"], found, wanted, self.target))
        done = time.monotonic()
        return Did(mapped - began, done - mapped, time.process_time() - cpu, right, done)

    def load_torch(self) -> None:
        """Which takes longer than a group may take to be made."""
        from tests.bench.baselines import broadcast  # noqa: F401

    def join(self, port: int, size: int, rank: int) -> None:
        from tests.bench.baselines import broadcast

        self.group = None
        self.group = broadcast.join(port, rank, size)

    def broadcast(self) -> Did:
        """Nobody looks at what came: that is how it is used."""
        from tests.bench.baselines import broadcast

        cpu, began = time.process_time(), time.monotonic()
        for name in sorted(self.target):
            broadcast.broadcast(self.group, numpy.frombuffer(self.target[name].data, numpy.uint8))
        done = time.monotonic()
        return Did(done - began, 0.0, time.process_time() - cpu, None, done)

    def open(self) -> float:
        """The moment from which this receiver may generate."""
        return time.monotonic()


async def _mapped(transport: Any, ticket: Ticket, manifest: Manifest, target: Pieces) -> tuple[float, bool]:
    """The handshake of `receive`, and no copy: when the mapping was there, and whether it hashes to the manifest."""
    assert isinstance(transport, ShmTransport)
    hello, stall_s = Hello(ticket.token, "bench", 1, manifest.digest), 60.0
    with socket.socket(socket.AF_UNIX) as sock:
        async with asyncio.timeout(stall_s) as deadline:
            link = Link(sock, deadline, stall_s)
            await _connect(link, _address(ticket))
            await link.enter(hello)
            whole = memoryview(transport._map(await _descriptor(link), manifest.total))
            mapped = time.monotonic()
            views = {e.name: whole[e.offset : e.offset + e.nbytes] for e in manifest.tensors}
            found = describe({name: piece._replace(data=views[name]) for name, piece in target.items()})
            return mapped, found == manifest
