"""One failure suite over the transports: each failure ends in a TransferError with its cause, within the deadline,
leaves nothing behind, and the next transfer works. Loopback only."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from reef_bus.artifacts import ArtifactStore, save_weights
from reef_bus.backends import Piece, Pieces
from reef_bus.errors import TransferError
from reef_bus.manifest import Manifest, describe
from reef_bus.transport import Offer, Ticket, Transport, files, transports
from reef_bus.transport.door import Answer, Hello
from reef_bus.transport.tcp import TcpTransport

PUBLICATION = "p1"
BIG = 24 << 20  # more than loopback's buffers hold, so that a transfer can be caught in the middle


def pieces(fill: int, size: int = 3000) -> dict[str, Piece]:
    body = bytes(range(251)) * (size // 251 + 1) if fill else bytes(size)
    view = memoryview(bytearray(body[:size]))
    return {
        "w": Piece("U8", (size,), view),
        "empty": Piece("F32", (0, 3), memoryview(bytearray())),
        "b": Piece("F32", (2,), memoryview(bytearray([fill] * 8))),
    }


def run(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(story, 20))


@pytest.fixture(params=["tcp", "files"])
def transport(request: pytest.FixtureRequest, tmp_path: Path) -> Transport:
    store = ArtifactStore(tmp_path)
    save_weights(store, pieces(7))
    return transports(store)[request.param]


@contextlib.asynccontextmanager
async def offered(transport: Transport, source: Pieces, attempt: int = 1) -> AsyncIterator[Offer]:
    offer = await transport.offer(describe(source), source, publication=PUBLICATION, attempt=attempt)
    try:
        yield offer
    finally:
        await offer.close()


async def receive(transport: Transport, ticket: Ticket, manifest: Manifest, target: Pieces, **other: Any) -> int:
    """As the contract; tests name only what is unusual."""
    usual: dict[str, Any] = {"publication": PUBLICATION, "attempt": 1, "stall_s": 2.0}
    return await transport.receive(ticket, manifest, target, **{**usual, **other})


async def fails(cause: str, transfer: Awaitable[int], within_s: float = 1.0) -> str:
    begun = time.monotonic()
    with pytest.raises(TransferError) as caught:
        await transfer
    assert caught.value.cause == cause
    assert time.monotonic() - begun < within_s
    return str(caught.value)


async def works(transport: Transport, source: Pieces | None = None) -> None:
    source = source or pieces(7)
    target = {name: piece._replace(data=memoryview(bytearray(piece.data.nbytes))) for name, piece in source.items()}
    manifest = describe(source)
    async with offered(transport, source) as offer:
        assert await receive(transport, offer.ticket, manifest, target) == manifest.total
    assert describe(target) == manifest


Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def strange_sender(talk: Talk) -> AsyncIterator[Ticket]:
    """A peer on loopback that does as `talk` says, then closes."""

    async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await talk(reader, writer)
        writer.close()

    server = await asyncio.start_server(once, "127.0.0.1", 0)
    async with server:
        yield Ticket("tcp", f"127.0.0.1:{server.sockets[0].getsockname()[1]}", "token")
    await asyncio.sleep(0.01)  # what `talk` still held is closed by now


def message(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


async def hear(reader: asyncio.StreamReader) -> bytes:
    return await reader.readexactly(int.from_bytes(await reader.readexactly(4), "big"))


# What works.


def test_bytes_arrive_where_the_target_already_lives(transport: Transport) -> None:
    run(works(transport))


def test_progress_grows_to_the_total(transport: Transport) -> None:
    async def story() -> None:
        seen: list[int] = []
        async with offered(transport, pieces(7)) as offer:
            await receive(transport, offer.ticket, describe(pieces(7)), pieces(0), progress=seen.append)
        assert seen == sorted(seen) and seen[-1] == 3008

    run(story())


def test_many_receivers_share_one_offer(transport: Transport) -> None:
    async def story() -> None:
        targets = [pieces(0) for _ in range(16)]
        manifest = describe(pieces(7))
        async with offered(transport, pieces(7)) as offer:
            await asyncio.gather(*(receive(transport, offer.ticket, manifest, target) for target in targets))
            assert offer.sent_bytes == (16 * 3008 if transport.name == "tcp" else 0)
        assert all(describe(target) == manifest for target in targets)

    run(story())


def test_a_source_larger_than_every_buffer_arrives_whole() -> None:
    run(works(TcpTransport(), pieces(3, BIG)))


def test_ipv6_loopback_works_where_there_is_one() -> None:
    with contextlib.suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        run(works(TcpTransport("::1")))


# What fails, on every transport.


@pytest.mark.parametrize("change", ["missing", "retyped", "cut", "read-only"])
def test_target_not_fitting(transport: Transport, change: str) -> None:
    async def story() -> None:
        target = pieces(0)
        if change == "missing":
            del target["b"]
        else:
            replaced = {
                "retyped": target["b"]._replace(dtype="I32"),
                "cut": target["b"]._replace(data=memoryview(bytearray(4))),
                "read-only": target["b"]._replace(data=memoryview(bytes(8))),
            }
            target["b"] = replaced[change]
        async with offered(transport, pieces(7)) as offer:
            said = await fails("mismatch", receive(transport, offer.ticket, describe(pieces(7)), target))
            assert "'b'" in said
            assert offer.sent_bytes == 0
        assert not any(target["w"].data)
        await works(transport)

    run(story())


def test_wrong_manifest(transport: Transport) -> None:
    async def story() -> None:
        target = pieces(0)
        async with offered(transport, pieces(7)) as offer:
            await fails("mismatch", receive(transport, offer.ticket, describe(pieces(8)), target))
        assert not any(target["w"].data)
        await works(transport)

    run(story())


def test_nothing_is_there(transport: Transport) -> None:
    async def story() -> None:
        with socket.create_server(("127.0.0.1", 0)) as gone:
            port = gone.getsockname()[1]
        dead = {"tcp": f"127.0.0.1:{port}", "files": "0" * 64}
        ticket = Ticket(transport.name, dead[transport.name], "token")
        await fails("refused", receive(transport, ticket, describe(pieces(7)), pieces(0)))
        await works(transport)

    run(story())


@pytest.mark.parametrize("address", ["", "127.0.0.1", "127.0.0.1:99999", "127.0.0.1:x", "../../etc"])
def test_a_ticket_that_is_none(transport: Transport, address: str) -> None:
    async def story() -> None:
        for kind in ("tcp", "files", "pigeon"):
            ticket = Ticket(kind, address, "")
            await fails("protocol", receive(transport, ticket, describe(pieces(7)), pieces(0)))

    run(story())


def test_a_source_that_is_not_what_the_manifest_says_is_not_offered(transport: Transport) -> None:
    async def story() -> None:
        source = pieces(7)
        del source["b"]
        with pytest.raises(TransferError, match="'b' is missing"):
            await transport.offer(describe(pieces(7)), source, publication=PUBLICATION, attempt=1)

    run(story())


def test_cancel_in_the_middle_ends_every_write(transport: Transport, tmp_path: Path) -> None:
    async def story() -> None:
        source, target = pieces(7, BIG), pieces(0, BIG)
        save_weights(ArtifactStore(tmp_path), source)
        begun = asyncio.Event()
        async with offered(transport, source) as offer:
            transfer = asyncio.create_task(
                receive(transport, offer.ticket, describe(source), target, progress=lambda _: begun.set())
            )
            await begun.wait()
            transfer.cancel()
            with pytest.raises(asyncio.CancelledError):
                await transfer
            held = describe(target)
            await asyncio.sleep(0.05)
            assert describe(target) == held != describe(source)
        await works(transport)

    run(story())


def test_a_disk_that_hangs_is_found_by_the_deadline_and_a_slow_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses = iter([0.2, 0.2, 0.6])

    def slowly(*_: object) -> Iterator[int]:
        for pause in pauses:
            time.sleep(pause)
            yield 1

    monkeypatch.setattr(files, "verify_weights", slowly)

    async def story() -> None:
        target = pieces(0)
        transport, ticket = transports(ArtifactStore(tmp_path))["files"], Ticket("files", "0" * 64, "")
        begun = time.monotonic()
        await fails("stalled", receive(transport, ticket, describe(pieces(7)), target, stall_s=0.3))
        assert time.monotonic() - begun > 0.6
        assert not any(target["w"].data)

    run(story())


# What fails on tcp: there is a peer, and it may do anything.


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"attempt": 2}, "attempt 2 of p1 is not open here, attempt 1 of p1 is"),
        ({"publication": "p0"}, "attempt 1 of p0 is not open"),
    ],
)
def test_wrong_attempt(other: dict[str, Any], says: str) -> None:
    async def story() -> None:
        transport, target = TcpTransport(), pieces(0)
        async with offered(transport, pieces(7)) as offer:
            said = await fails("refused", receive(transport, offer.ticket, describe(pieces(7)), target, **other))
            assert says in said and offer.sent_bytes == 0
        assert not any(target["w"].data)
        await works(transport)

    run(story())


def test_wrong_token() -> None:
    async def story() -> None:
        transport = TcpTransport()
        async with offered(transport, pieces(7)) as offer:
            stranger = msgspec.structs.replace(offer.ticket, token="guess")
            said = await fails("refused", receive(transport, stranger, describe(pieces(7)), pieces(0)))
            assert "token" in said and offer.ticket.token not in said
            await receive(transport, offer.ticket, describe(pieces(7)), pieces(0))  # the door is still open

    run(story())


def test_peer_stopped_before_its_answer() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()  # returns when the receiver has given up

    async def story() -> None:
        async with strange_sender(talk) as ticket:
            await fails("stalled", receive(TcpTransport(), ticket, describe(pieces(7)), pieces(0), stall_s=0.3), 0.6)
        await works(TcpTransport())

    run(story())


def test_peer_stopped_in_the_middle_counts_from_the_last_progress() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await hear(reader)
        writer.write(message(msgspec.json.encode(Answer())))
        for _ in range(4):
            writer.write(b"four")
            await asyncio.sleep(0.2)
        await reader.read()

    async def story() -> None:
        seen: list[int] = []
        async with strange_sender(talk) as ticket:
            transfer = receive(
                TcpTransport(), ticket, describe(pieces(7)), pieces(0), stall_s=0.3, progress=seen.append
            )
            await fails("stalled", transfer, within_s=1.4)
        assert seen[-1] == 16  # slow is not stopped: 0.6 s of drops passed the deadline of 0.3 s

    run(story())


@pytest.mark.parametrize("ending", ["closed", "killed"])
@pytest.mark.parametrize(
    ("reply", "cause"),
    [
        (b"", "closed"),
        (b"\0\0\0", "closed"),
        (message(b"{}") + b"half", "closed"),
        (message(b"nonsense"), "protocol"),
        (message(b'{"cause":"whim"}'), "protocol"),
        (message(b'{"cause":"refused","message":"no"}'), "refused"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "protocol"),
    ],
)
def test_peer_that_ends_early_or_speaks_something_else(reply: bytes, cause: str, ending: str) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await hear(reader)
        writer.write(reply)
        await writer.drain()
        await asyncio.sleep(0.01)  # a reset may overtake what was sent before it
        if ending == "killed":
            linger_never = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger_never)

    async def story() -> None:
        async with strange_sender(talk) as ticket:
            await fails(cause, receive(TcpTransport(), ticket, describe(pieces(7)), pieces(0)))
        await works(TcpTransport())

    run(story())


def test_sender_closes_its_offer_in_the_middle() -> None:
    async def story() -> None:
        transport, source, target = TcpTransport(), pieces(7, BIG), pieces(0, BIG)
        begun = asyncio.Event()
        async with offered(transport, source) as offer:
            transfer = asyncio.create_task(
                receive(transport, offer.ticket, describe(source), target, progress=lambda _: begun.set())
            )
            await begun.wait()
            await offer.close()
            await fails("closed", transfer)
            await fails("refused", receive(transport, offer.ticket, describe(source), target))
        assert describe(target) != describe(source)
        await works(transport)

    run(story())


@pytest.mark.parametrize("first", [b"", b"\0", b"GET / HTTP/1.1\r\n\r\n", message(b"{}"), message(b"\xff" * 99)])
def test_strangers_do_not_disturb_an_offer(first: bytes) -> None:
    async def story() -> None:
        transport = TcpTransport(stall_s=0.2)
        async with offered(transport, pieces(7)) as offer:
            host, port = offer.ticket.address.split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(first)
            begun = time.monotonic()
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
            assert time.monotonic() - begun < 0.6
            writer.close()
            await receive(transport, offer.ticket, describe(pieces(7)), pieces(0))

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


# What is left behind: nothing.


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts descriptors in /proc")
def test_two_hundred_aborted_transfers_leak_nothing(transport: Transport, tmp_path: Path) -> None:
    source, manifest = pieces(7, 1 << 20), describe(pieces(7, 1 << 20))
    target = pieces(0, 1 << 20)
    save_weights(ArtifactStore(tmp_path), source)

    async def abort(how: int) -> None:
        async with offered(transport, source) as offer:
            ticket = msgspec.structs.replace(offer.ticket, token="guess") if how == 1 else offer.ticket
            expected = describe(pieces(8)) if how == 2 else manifest
            transfer = asyncio.create_task(receive(transport, ticket, expected, target))
            for _ in range(how):
                await asyncio.sleep(0)
            if how % 2:
                await offer.close()
            transfer.cancel()
            await asyncio.gather(transfer, return_exceptions=True)

    async def story() -> None:
        await asyncio.gather(*(abort(how) for how in range(8)))
        before, tasks = len(os.listdir("/proc/self/fd")), asyncio.all_tasks()
        for how in range(200):
            await abort(how % 8)
        await asyncio.sleep(0.05)
        assert len(os.listdir("/proc/self/fd")) <= before
        assert asyncio.all_tasks() == tasks
        await works(transport, source)

    run(story())
