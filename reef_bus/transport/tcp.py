"""Weights over TCP: from the sender's tensors into the receiver's, with no buffer of our own between.

Knows: sockets on the running loop, the handshake, the progress deadline.
Must not know: the log, files, or what the bytes mean. The network is trusted: tokens part attempts, they hide nothing.

Receiver to sender: Hello. Sender to receiver: Answer, then every tensor in manifest order, then end of stream.
Both messages are JSON after their length (4 bytes, big-endian).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from collections.abc import Callable
from typing import Literal, TypeVar

import msgspec

from reef_bus.backends import Pieces
from reef_bus.errors import TransferError
from reef_bus.manifest import Manifest, require_fit
from reef_bus.transport import STALL_S, Offer, Ticket, Transport, transfer_errors

SLICE_BYTES = 4 << 20
"""Sent as one unit of progress. sock_sendall tells nothing on its way, so that a slice must fit any usable link's
deadline: 4 MiB in 10 s is 0.4 MB/s."""
REST_BYTES = 16 << 20
"""Moved between two turns of the loop: a socket that is always ready never suspends, and heartbeats share the loop."""
MESSAGE_LIMIT = 4096
"""Bytes of a handshake message: whoever says more is not one of ours."""
BACKLOG = 128
"""Receivers of one attempt that may wait to be accepted."""
ACCEPT_PAUSE_S = 0.1
"""How long a sender that ran out of descriptors waits before it accepts again."""

_logger = logging.getLogger(__name__)


class Hello(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a receiver came for; `manifest` is its digest."""

    token: str
    publication: str
    attempt: int
    manifest: str


class Answer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The sender's answer: an empty `cause` means that the bytes follow."""

    cause: Literal["", "refused", "mismatch"] = ""
    message: str = ""


_Message = TypeVar("_Message", Hello, Answer)


class TcpTransport(Transport):
    """The default between hosts. `host` is where senders listen, and what their tickets name; `stall_s` is how long a
    sender waits for a receiver that takes nothing."""

    name = "tcp"

    def __init__(self, host: str = "127.0.0.1", stall_s: float = STALL_S) -> None:
        self._host = host
        self._stall_s = stall_s

    async def offer(self, manifest: Manifest, source: Pieces, *, publication: str, attempt: int) -> Offer:
        require_fit(manifest, source)
        hello = Hello(secrets.token_urlsafe(16), publication, attempt, manifest.digest)
        with transfer_errors(f"listening on {self._host}"):
            listener = socket.create_server((self._host, 0), family=_family(self._host), backlog=BACKLOG)
        return TcpOffer(listener, hello, [source[entry.name].data for entry in manifest.tensors], self._stall_s)

    async def receive(
        self,
        ticket: Ticket,
        manifest: Manifest,
        target: Pieces,
        *,
        publication: str,
        attempt: int,
        stall_s: float = STALL_S,
        progress: Callable[[int], None] | None = None,
    ) -> int:
        require_fit(manifest, target, writable=True)
        hello = Hello(ticket.token, publication, attempt, manifest.digest)
        views = [target[entry.name].data for entry in manifest.tensors]
        host, port = _address(ticket)
        with transfer_errors(f"sender {ticket.address}"), socket.socket(_family(host)) as sock:
            async with asyncio.timeout(stall_s) as deadline:
                link = _Link(sock, deadline, stall_s)
                await link.connect(host, port)
                await _enter(link, hello)
                return await _fill(link, views, progress)


class TcpOffer(Offer):
    """A listener, and one task per receiver that came."""

    def __init__(self, listener: socket.socket, hello: Hello, views: list[memoryview], stall_s: float) -> None:
        self._listener, self._hello, self._views, self._stall_s = listener, hello, views, stall_s
        host, port = listener.getsockname()[:2]
        self._ticket = Ticket("tcp", f"{host}:{port}", hello.token)
        self._sent = 0
        self._serving: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        listener.setblocking(False)
        self._open_door()

    @property
    def ticket(self) -> Ticket:
        return self._ticket

    @property
    def sent_bytes(self) -> int:
        return self._sent

    async def close(self) -> None:
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener)
            self._listener.close()
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    def _open_door(self) -> None:
        # Not sock_accept: a task cancelled between the kernel's accept and its own next step would lose the socket.
        if self._listener.fileno() >= 0:
            self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        try:
            sock, peer = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            _logger.warning("cannot accept a receiver: %s; trying again", error)
            self._loop.remove_reader(self._listener)
            self._loop.call_later(ACCEPT_PAUSE_S, self._open_door)
            return
        task = self._loop.create_task(self._serve(sock, f"receiver {peer[0]}:{peer[1]}"))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)
        # Closed here and not in the task: one that is cancelled before its first step never runs its own clean-up.
        task.add_done_callback(lambda _: sock.close())

    async def _serve(self, sock: socket.socket, peer: str) -> None:
        try:
            with transfer_errors(peer):
                async with asyncio.timeout(self._stall_s) as deadline:
                    link = _Link(sock, deadline, self._stall_s)
                    answer = _judge(await link.hear(Hello), self._hello)
                    await link.say(answer)
                    if not answer.cause:
                        await self._send(link)
        except TransferError as error:
            _logger.info("attempt %d of %s: %s", self._hello.attempt, self._hello.publication, error)

    async def _send(self, link: _Link) -> None:
        for view in self._views:
            for start in range(0, len(view), SLICE_BYTES):
                part = view[start : start + SLICE_BYTES]
                await link.send(part)
                self._sent += len(part)


class _Link:
    """A connected socket under a progress deadline: whatever moves puts the deadline off."""

    def __init__(self, sock: socket.socket, deadline: asyncio.Timeout, stall_s: float) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # the handshake is two small messages
        self._sock, self._deadline, self._stall_s = sock, deadline, stall_s
        self._loop = asyncio.get_running_loop()
        self._put_off, self._since_rest = self._loop.time(), 0

    async def connect(self, host: str, port: int) -> None:
        await self._loop.sock_connect(self._sock, (host, port))
        await self._moved(0)

    async def send(self, data: bytes | memoryview) -> None:
        await self._loop.sock_sendall(self._sock, data)
        await self._moved(len(data))

    async def read_into(self, view: memoryview) -> int:
        """Some bytes, at least one."""
        count = await self._loop.sock_recv_into(self._sock, view)
        if not count:
            raise TransferError("closed", f"the peer closed with {len(view)} or more bytes to come")
        await self._moved(count)
        return count

    async def say(self, message: Hello | Answer) -> None:
        body = msgspec.json.encode(message)
        await self.send(len(body).to_bytes(4, "big") + body)

    async def hear(self, kind: type[_Message]) -> _Message:
        size = int.from_bytes(await self._exactly(4), "big")
        if size > MESSAGE_LIMIT:
            raise TransferError("protocol", f"a handshake of {size} bytes: that peer speaks something else")
        try:
            return msgspec.json.decode(await self._exactly(size), type=kind)
        except (msgspec.MsgspecError, UnicodeError) as error:
            raise TransferError("protocol", f"expected {kind.__name__}: {error}") from error

    async def _exactly(self, size: int) -> bytes:
        data = bytearray(size)
        rest = memoryview(data)
        while rest:
            rest = rest[await self.read_into(rest) :]
        return bytes(data)

    async def _moved(self, count: int) -> None:
        now = self._loop.time()
        # Not at every read: a new timer for each cost a quarter of the receiver's CPU. So silence of 0.9 to 1.0 stalls.
        if now > self._put_off + self._stall_s / 10:
            self._put_off = now
            self._deadline.reschedule(now + self._stall_s)
        self._since_rest += count
        if self._since_rest >= REST_BYTES:
            self._since_rest = 0
            await asyncio.sleep(0)


def _judge(hello: Hello, expected: Hello) -> Answer:
    """Whether a receiver belongs to this attempt. The token comes first: to strangers nothing else is told."""
    if not secrets.compare_digest(hello.token.encode(), expected.token.encode()):
        return Answer("refused", "the token is not this attempt's")
    if (hello.publication, hello.attempt) != (expected.publication, expected.attempt):
        found, instead = (f"attempt {who.attempt} of {who.publication}" for who in (hello, expected))
        return Answer("refused", f"{found} is not open here, {instead} is")
    if hello.manifest != expected.manifest:
        return Answer("mismatch", f"the receiver expects manifest {hello.manifest}, offered is {expected.manifest}")
    return Answer()


async def _enter(link: _Link, hello: Hello) -> None:
    await link.say(hello)
    answer = await link.hear(Answer)
    if answer.cause:
        raise TransferError(answer.cause, f"the sender says: {answer.message}")


async def _fill(link: _Link, views: list[memoryview], progress: Callable[[int], None] | None) -> int:
    """Every view in turn, straight from the kernel."""
    total = 0
    for rest in views:
        while rest:
            count = await link.read_into(rest[:SLICE_BYTES])
            rest = rest[count:]
            total += count
            if progress is not None:
                progress(total)
    return total


def _address(ticket: Ticket) -> tuple[str, int]:
    host, _, port = ticket.address.rpartition(":")
    if ticket.transport == "tcp" and host and port.isdecimal() and int(port) < 1 << 16:
        return host, int(port)
    raise TransferError("protocol", f"expected a tcp ticket for host:port, found {ticket.transport} {ticket.address!r}")


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
