"""The other end of a transfer in a process of its own, so that it can be killed or stopped for real.

Knows: one transport, one version. Must not know: what is about to happen to it.

`send FOLDER NAME` prints its ticket, and offers until its input ends. `receive FOLDER NAME TICKET` says "begun" in the
middle, waits there for a line, and prints how it ended: its cause ("" for none), and whether what it holds is right.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy

from reef_bus.artifacts import ArtifactStore
from reef_bus.errors import TransferError
from reef_bus.manifest import describe
from reef_bus.transport import Ticket, Transport, transports
from tests.transfers import BIG, offered, pieces, receive

VERSION = 7


AHEAD = ("ucx",)
"""These fill more than they have told of: several slices at once, each told of when it is whole."""


class Ended(msgspec.Struct, frozen=True):
    """`right`: every byte that had arrived is the version's, and none was written beyond (AHEAD: none of another)."""

    cause: str
    right: bool


class Peer:
    """The process, as its test sees it."""

    def __init__(self, role: str, folder: Path, name: str, *more: str) -> None:
        command = [sys.executable, "-m", "tests.contract.peer", role, str(folder), name, *more]
        root = Path(__file__).parents[2]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root)

    async def said(self) -> str:
        assert self.process.stdout is not None
        line = await asyncio.to_thread(self.process.stdout.readline)
        assert line, f"the peer said nothing; its exit status is {self.process.poll()}"
        return line.strip()

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        """On return its sockets are closed."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """On return none of its threads runs."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)


@contextlib.contextmanager
def peer(role: str, folder: Path, name: str, *more: str) -> Iterator[Peer]:
    found = Peer(role, folder, name, *more)
    try:
        yield found
    finally:
        found.kill()
        for stream in (found.process.stdin, found.process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()


async def _send(transport: Transport) -> None:
    async with offered(transport, pieces(VERSION, BIG)) as offer:
        print(msgspec.json.encode(offer.ticket).decode(), flush=True)
        await asyncio.to_thread(sys.stdin.read)


async def _receive(transport: Transport, ticket: Ticket) -> None:
    source, target, arrived = pieces(VERSION, BIG), pieces(0, BIG), [0]

    def progress(count: int) -> None:
        if not arrived[0]:
            print("begun", flush=True)
            sys.stdin.readline()  # blocks the loop: that is the middle
        arrived[0] = count

    cause = ""
    try:
        await receive(transport, ticket, describe(source), target, progress=progress)
    except TransferError as error:
        cause = error.cause
    held, wanted = (bytes(p["b"].data) + bytes(p["w"].data) for p in (target, source))
    begun = held[: arrived[0]] == wanted[: arrived[0]]
    untouched = not any(held[arrived[0] :])
    right = begun and (untouched or (transport.name in AHEAD and _only_of(held, wanted)))
    print(msgspec.json.encode(Ended(cause, right)).decode(), flush=True)


def _only_of(held: bytes, wanted: bytes) -> bool:
    """Every byte is the version's, or was never written."""
    ours, theirs = (numpy.frombuffer(data, numpy.uint8) for data in (held, wanted))
    return bool(((ours == theirs) | (ours == 0)).all())


if __name__ == "__main__":
    role, folder, name, *more = sys.argv[1:]
    found = transports(ArtifactStore(Path(folder)))[name]
    ticket = msgspec.json.decode(more[0], type=Ticket) if more else None
    asyncio.run(_receive(found, ticket) if ticket else _send(found))
