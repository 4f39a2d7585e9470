"""Words for tests of transports: versions of any size, an offer, a transfer, how it fails, and that the next one works.

Knows: the transports' contract, how a stranger reaches each kind of door. Must not know: any transport's inside.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.util
import os
import secrets
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

import pytest

from reef_bus.backends import Piece, Pieces
from reef_bus.errors import TransferError
from reef_bus.manifest import Manifest, describe
from reef_bus.transport import Offer, Ticket, Transport
from reef_bus.transport.torch_group import TorchTransport
from reef_bus.transport.ucx import UcxTransport

PUBLICATION = "p1"
BIG = 40 << 20  # three buckets, and more than the buffers of loopback hold: a transfer can be caught in the middle
NAMES = ("tcp", "torch", "ucx", "shm", "files")
DOORS = ("tcp", "torch", "ucx", "shm")  # those with a peer, and so with a handshake
NEEDS = {"ucx": "ucxx"}
"""What a transport needs that not every machine can have."""

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def pieces(fill: int, size: int = 3000) -> dict[str, Piece]:
    """A version; 0 is memory that holds nothing yet. Of every two, each byte of "w" differs."""
    body = bytes((byte + fill) % 251 for byte in range(251)) * (size // 251 + 1) if fill else bytes(size)
    return {
        "w": Piece("U8", (size,), memoryview(bytearray(body[:size]))),
        "empty": Piece("F32", (0, 3), memoryview(bytearray())),
        "b": Piece("F32", (2,), memoryview(bytearray([fill] * 8))),
    }


def params(names: tuple[str, ...]) -> list[Any]:
    """For tests to run over; those that this machine cannot have are skipped, and say why."""
    return [pytest.param(name, marks=_skipped(NEEDS.get(name, "sys"))) for name in names]


def _skipped(module: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(module) is None, reason=f"{module} is not installed")


def run(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(story, 20))


@contextlib.asynccontextmanager
async def offered(transport: Transport, source: Pieces, attempt: int = 1) -> AsyncIterator[Offer]:
    offer = await transport.offer(describe(source), source, publication=PUBLICATION, attempt=attempt)
    try:
        yield offer
    finally:
        await offer.close()


async def receive(transport: Transport, ticket: Ticket, manifest: Manifest, target: Pieces, **other: Any) -> int:
    """As the contract; tests name only what is unusual."""
    usual: dict[str, Any] = {"publication": PUBLICATION, "attempt": 1, "stall_s": 10.0}
    return await transport.receive(ticket, manifest, target, **{**usual, **other})


async def fails(cause: str, transfer: Awaitable[Any], within_s: float = 5.0) -> str:
    """Half of the usual deadline is soon enough to tell that nobody waited for it."""
    begun = time.monotonic()
    with pytest.raises(TransferError) as caught:
        await transfer
    assert caught.value.cause == cause, str(caught.value)
    assert time.monotonic() - begun < within_s
    return str(caught.value)


async def works(transport: Transport, source: Pieces | None = None) -> None:
    source = source or pieces(7)
    target = {name: piece._replace(data=memoryview(bytearray(piece.data.nbytes))) for name, piece in source.items()}
    manifest = describe(source)
    async with offered(transport, source) as offer:
        assert await receive(transport, offer.ticket, manifest, target) == manifest.total
    assert describe(target) == manifest


async def still(target: Pieces) -> None:
    """Nothing writes into the target any more."""
    held = describe(target)
    await asyncio.sleep(0.05)
    assert describe(target) == held


@functools.cache
def loaded(name: str) -> None:
    """What a transport loads when it is first used takes seconds, which are no part of any deadline."""
    if kind := {"torch": TorchTransport, "ucx": UcxTransport}.get(name):
        run(works(kind()))


def dead(name: str) -> Ticket:
    """Where nothing is any more."""
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    address = {"shm": "reef-bus-gone", "files": "0" * 64}.get(name, f"127.0.0.1:{port}")
    return Ticket(name, address, "token")


@contextlib.asynccontextmanager
async def strange_sender(name: str, talk: Talk) -> AsyncIterator[Ticket]:
    """A peer of that kind that does as `talk` says, then closes."""

    async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await talk(reader, writer)
        writer.close()

    if name == "shm":
        address = f"reef-bus-{secrets.token_hex(8)}"
        server = await asyncio.start_unix_server(once, f"\0{address}")
    else:
        server = await asyncio.start_server(once, "127.0.0.1", 0)
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server:
        yield Ticket(name, address, "token")
    await asyncio.sleep(0.01)  # what `talk` still held is closed by now


async def stranger(ticket: Ticket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection to an offer's door."""
    if ticket.transport == "shm":
        return await asyncio.open_unix_connection(f"\0{ticket.address}")
    host, port = ticket.address.split(":")
    return await asyncio.open_connection(host, int(port))


def message(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


async def hear(reader: asyncio.StreamReader) -> bytes:
    return await reader.readexactly(int.from_bytes(await reader.readexactly(4), "big"))


def segments() -> set[int]:
    """The shared segments of which this process holds a descriptor, by inode."""
    found = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one that listed the folder
            if os.readlink(f"/proc/self/fd/{descriptor}").startswith("/memfd:reef-bus"):
                found.add(os.stat(f"/proc/self/fd/{descriptor}").st_ino)
    return found
