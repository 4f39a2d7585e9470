"""Receivers of large weights over tcp take them from each other: the sender sends them once, and nobody depends on it.

Knows: the transport's contract, sockets. Must not know: the log. Loopback only.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import pytest
from xxhash import xxh3_128_hexdigest

from reef_bus.backends import Piece
from reef_bus.errors import TransferError
from reef_bus.manifest import Manifest, describe
from reef_bus.transport import Offer, Ticket
from reef_bus.transport.door import Answer, Hello
from reef_bus.transport.tcp import CHAIN_BYTES, TcpTransport, host_port

LARGE = 3 * CHAIN_BYTES  # the loop turns to others several times in it


def weights(size: int = LARGE) -> dict[str, Piece]:
    body = bytes(range(251)) * (size // 251 + 1)
    half = size // 2
    return {
        "a": Piece("U8", (half,), memoryview(bytearray(body[:half]))),
        "b": Piece("U8", (size - half,), memoryview(bytearray(body[half:size]))),
    }


def empty(like: dict[str, Piece]) -> dict[str, Piece]:
    return {name: piece._replace(data=memoryview(bytearray(piece.data.nbytes))) for name, piece in like.items()}


class Sending:
    """One offer, and the receivers that come to it."""

    def __init__(self, offer: Offer, source: dict[str, Piece], manifest: Manifest, attempt: int) -> None:
        self.offer, self.source, self.manifest, self.attempt = offer, source, manifest, attempt

    async def receive(
        self,
        progress: Callable[[int], object] | None = None,
        stall_s: float = 2.0,
        ticket: Ticket | None = None,
    ) -> bool:
        """Whether the right bytes have arrived."""
        target = empty(self.source)
        await TcpTransport().receive(
            ticket or self.offer.ticket,
            self.manifest,
            target,
            publication="p",
            attempt=self.attempt,
            stall_s=stall_s,
            progress=progress,
        )
        return describe(target) == self.manifest

    def hello(self, **other: Any) -> bytes:
        found = Hello(self.offer.ticket.token, "p", 1, self.manifest.digest, **other)
        return message(found)


def message(value: Hello | Answer) -> bytes:
    body = msgspec.json.encode(value)
    return len(body).to_bytes(4, "big") + body


@pytest.fixture
async def sending() -> AsyncIterator[Sending]:
    async with sending_of(weights()) as found:
        yield found


@contextlib.asynccontextmanager
async def sending_of(source: dict[str, Piece], attempt: int = 1) -> AsyncIterator[Sending]:
    manifest = describe(source)
    offer = await TcpTransport(stall_s=2.0).offer(manifest, source, publication="p", attempt=attempt)
    try:
        yield Sending(offer, source, manifest, attempt)
    finally:
        await offer.close()


async def test_the_sender_sends_large_weights_once_however_many_receivers_there_are(sending: Sending) -> None:
    assert await asyncio.gather(*(sending.receive() for _ in range(5))) == [True] * 5
    assert sending.offer.sent_bytes == LARGE


async def test_after_a_failed_attempt_everybody_takes_from_the_sender() -> None:
    async with sending_of(weights(), attempt=2) as sending:
        assert await asyncio.gather(*(sending.receive() for _ in range(3))) == [True] * 3
        assert sending.offer.sent_bytes == 3 * LARGE


async def test_small_weights_come_to_everybody_from_the_sender() -> None:
    async with sending_of(weights(1000)) as sending:
        assert await asyncio.gather(*(sending.receive() for _ in range(5))) == [True] * 5
        assert sending.offer.sent_bytes == 5000


async def test_who_comes_when_all_others_have_finished_takes_everything_from_the_sender(sending: Sending) -> None:
    for times in (1, 2, 3):
        assert await sending.receive()
        assert sending.offer.sent_bytes == times * LARGE


async def test_a_receiver_whose_neighbour_gives_up_takes_the_rest_from_the_sender(sending: Sending) -> None:
    begun = asyncio.Event()
    async with half_way(sending) as ticket:
        first = asyncio.create_task(sending.receive(lambda have: begun.set(), ticket=ticket))
        await asyncio.wait_for(begun.wait(), 10)  # it is the head of the chain: who comes now is sent to it
        assert await asyncio.wait_for(sending.receive(lambda have: have < LARGE // 2 or first.cancel()), 10)
        with pytest.raises(asyncio.CancelledError):
            await first
    assert LARGE <= sending.offer.sent_bytes < 1.9 * LARGE


@contextlib.asynccontextmanager
async def half_way(sending: Sending) -> AsyncIterator[Ticket]:
    """Who comes by this way gets half of the weights, and then waits for the rest."""

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        source, sink = await asyncio.open_connection(*host_port(sending.offer.ticket.address))
        with contextlib.closing(writer), contextlib.closing(sink):
            sink.write(await said(reader))
            writer.write(await said(source) + await source.readexactly(LARGE // 2))
            await reader.read()

    async with await asyncio.start_server(relay, "127.0.0.1", 0) as server:
        address = "{}:{}".format(*server.sockets[0].getsockname())
        yield Ticket("tcp", address, sending.offer.ticket.token)


async def said(reader: asyncio.StreamReader) -> bytes:
    """One message of a handshake, as it came."""
    size = await reader.readexactly(4)
    return size + await reader.readexactly(int.from_bytes(size))


@contextlib.asynccontextmanager
async def neighbour(
    sending: Sending, says: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
) -> AsyncIterator[None]:
    """A receiver that came first, takes nothing, and treats who is sent to it as `says` does. Somebody has to be."""
    came = False

    async def treat(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal came
        came = True
        with contextlib.suppress(ConnectionError), contextlib.closing(writer):
            await says(reader, writer)

    async with await asyncio.start_server(treat, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        there, _, number = sending.offer.ticket.address.rpartition(":")
        with socket.create_connection((there, int(number))) as sock:
            sock.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(sock, sending.hello(serves=f"{host}:{port}"))
            assert await loop.sock_recv(sock, 4)
            yield
            assert came


async def silence(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(30)


async def lies(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(message(Answer()) + bytes(LARGE))
    await writer.drain()
    await asyncio.sleep(30)


async def half(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(message(Answer()) + bytes(weights()["a"].data))
    await writer.drain()


async def lies_and_goes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(message(Answer()) + bytes(LARGE * 3 // 4))
    await writer.drain()


async def noise(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    await writer.drain()


async def refuses(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(message(Answer("refused", "not here")))
    await writer.drain()


async def elsewhere(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(message(Answer(take="127.0.0.1:1")))
    await writer.drain()


@pytest.mark.parametrize("says", [silence, lies, lies_and_goes, noise, refuses, elsewhere])
async def test_nobody_suffers_from_what_its_neighbour_does(sending: Sending, says: Any) -> None:
    async with neighbour(sending, says):
        before = sending.offer.sent_bytes
        assert await asyncio.wait_for(sending.receive(stall_s=1.0), 10)
        assert sending.offer.sent_bytes >= before + LARGE


async def test_what_a_neighbour_had_passed_on_is_not_sent_again(sending: Sending) -> None:
    arrived: list[int] = []
    async with neighbour(sending, half):
        assert await asyncio.wait_for(sending.receive(arrived.append), 10)
    assert arrived == sorted(arrived) and arrived[-1] == LARGE


async def test_the_time_that_hashing_takes_is_nobodys_silence(
    sending: Sending, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(view: memoryview) -> str:
        time.sleep(0.6)
        return xxh3_128_hexdigest(view)

    monkeypatch.setattr("reef_bus.transport.tcp.xxh3_128_hexdigest", slow)
    both = (sending.receive(stall_s=1.0) for _ in range(2))
    assert await asyncio.gather(*both) == [True] * 2


async def test_who_takes_from_a_receiver_and_then_stops_is_given_up() -> None:
    """Also while that receiver still waits for more itself, again and again."""
    source = weights()
    target, body = empty(source), b"".join(piece.data for piece in source.values())
    stopped = socket.socket()

    async def send(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hello = msgspec.json.decode((await said(reader))[4:], type=Hello)
        writer.write(message(Answer()))
        await asyncio.get_running_loop().run_in_executor(None, stopped.connect, host_port(hello.serves))
        stopped.sendall(message(hello))
        for place in range(0, LARGE, 1 << 20):
            writer.write(body[place : place + (1 << 20)])
            await writer.drain()
            await asyncio.sleep(0.005)
        writer.close()

    with stopped:
        async with await asyncio.start_server(send, "127.0.0.1", 0) as server:
            ticket = Ticket("tcp", "{}:{}".format(*server.sockets[0].getsockname()), "token")
            await TcpTransport().receive(ticket, describe(source), target, publication="p", attempt=1, stall_s=0.5)
        await asyncio.sleep(1.5)
        assert await asyncio.to_thread(everything, stopped) < LARGE


def everything(sock: socket.socket) -> int:
    """Until it is closed; how much it was."""
    sock.settimeout(3)
    return sum(iter(lambda: len(sock.recv(1 << 20)), 0))


async def test_when_the_sender_retracts_everybody_in_the_chain_fails(sending: Sending) -> None:
    begun = asyncio.Event()
    receivers = [asyncio.create_task(sending.receive(lambda have: begun.set())) for _ in range(3)]
    await begun.wait()
    await sending.offer.close()
    found = await asyncio.wait_for(asyncio.gather(*receivers, return_exceptions=True), 10)
    assert {type(each) for each in found} == {TransferError}


async def test_a_door_that_is_told_nonsense_closes_it(sending: Sending) -> None:
    host, _, port = sending.offer.ticket.address.rpartition(":")
    for nonsense in (
        sending.hello(after=LARGE + 1),
        message(Hello("", "p", 1, "")).replace(b'"after":0', b'"after":-'),
    ):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(nonsense)
        assert len(await asyncio.wait_for(reader.read(), 5)) < 100
        writer.close()
    assert await sending.receive()


async def test_a_ticket_names_a_host_and_a_port(sending: Sending) -> None:
    for address in ("nowhere", "host:port", ":1", "host:99999", "two..dots:1", "no\0thing:1", f"{'long' * 20}:1"):
        with pytest.raises(TransferError, match="expected host:port"):
            await TcpTransport().receive(
                Ticket("tcp", address, ""), sending.manifest, empty(sending.source), publication="p", attempt=1
            )
