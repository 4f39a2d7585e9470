"""What a peer may do to a door and to a link: speak something else, end early, dawdle. Loopback only; the suite that
every transport passes is tests/contract/test_transports.py."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import time
from pathlib import Path

import msgspec
import pytest

from reef_bus.artifacts import ArtifactStore
from reef_bus.manifest import describe
from reef_bus.transport import Transport, transports
from reef_bus.transport.door import Answer, Hello
from reef_bus.transport.tcp import TcpTransport
from tests.transfers import (
    BIG,
    DOORS,
    PUBLICATION,
    fails,
    hear,
    loaded,
    message,
    offered,
    params,
    pieces,
    receive,
    run,
    strange_sender,
    stranger,
    works,
)

STALL_S = 1.0
"""The senders'. Everything takes a while on a machine busy with other tests."""


@pytest.fixture(params=params(DOORS))
def transport(request: pytest.FixtureRequest, tmp_path: Path) -> Transport:
    loaded(request.param)
    return transports(ArtifactStore(tmp_path), stall_s=STALL_S)[request.param]


@pytest.mark.parametrize("ending", ["closed", "killed"])
@pytest.mark.parametrize(
    ("reply", "cause"),
    [
        (b"", "closed"),
        (b"\0\0\0", "closed"),
        (message(b"{}"), "closed"),
        (message(b"nonsense"), "protocol"),
        (message(b'{"cause":"whim"}'), "protocol"),
        (message(b'{"cause":"refused","message":"no"}'), "refused"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "protocol"),
    ],
)
def test_peer_that_ends_early_or_speaks_something_else(
    transport: Transport, reply: bytes, cause: str, ending: str
) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await hear(reader)
        writer.write(reply)
        await writer.drain()
        await asyncio.sleep(0.01)  # a reset may overtake what was sent before it
        if ending == "killed" and transport.name == "tcp":
            linger_never = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger_never)

    async def story() -> None:
        async with strange_sender(transport.name, talk) as ticket:
            await fails(cause, receive(transport, ticket, describe(pieces(7)), pieces(0)))
        await works(transport)

    run(story())


@pytest.mark.parametrize("first", [b"", b"\0", b"GET / HTTP/1.1\r\n\r\n", message(b"{}"), message(b"\xff" * 99)])
def test_strangers_do_not_disturb_an_offer(transport: Transport, first: bytes) -> None:
    async def story() -> None:
        async with offered(transport, pieces(7)) as offer:
            reader, writer = await stranger(offer.ticket)
            writer.write(first)
            begun = time.monotonic()
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
            assert time.monotonic() - begun < 3 * STALL_S
            writer.close()
            await receive(transport, offer.ticket, describe(pieces(7)), pieces(0))

    run(story())


# tcp's own.


def test_ipv6_loopback_works_where_there_is_one() -> None:
    with contextlib.suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        run(works(TcpTransport("::1")))


def test_peer_stopped_in_the_middle_counts_from_the_last_progress() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await hear(reader)
        writer.write(message(msgspec.json.encode(Answer())))
        for _ in range(7):
            writer.write(b"four")
            await asyncio.sleep(0.2)
        await reader.read()

    async def story() -> None:
        seen: list[int] = []
        async with strange_sender("tcp", talk) as ticket:
            transfer = receive(
                TcpTransport(), ticket, describe(pieces(7)), pieces(0), stall_s=1.0, progress=seen.append
            )
            await fails("stalled", transfer)
        assert seen[-1] == 28  # slow is not stopped: 1.2 s of drops passed the deadline of 1 s

    run(story())


def test_receiver_stopped_is_dropped_by_the_senders_deadline() -> None:
    async def story() -> None:
        source = pieces(7, BIG)
        transport, manifest = TcpTransport(stall_s=0.3), describe(source)
        async with offered(transport, source) as offer:
            host, port = offer.ticket.address.split(":")
            with socket.create_connection((host, int(port))) as stopped:
                hello = Hello(offer.ticket.token, PUBLICATION, 1, manifest.digest)
                stopped.sendall(message(msgspec.json.encode(hello)))
                await asyncio.sleep(0.2)
                sent = offer.sent_bytes
                await receive(transport, offer.ticket, manifest, pieces(0, BIG))
                await asyncio.sleep(0.4)
                assert offer.sent_bytes - sent < 2 * manifest.total
                stopped.settimeout(1)
                taken = sum(iter(lambda: len(stopped.recv(1 << 20)), 0))
                assert taken < manifest.total

    run(story())
