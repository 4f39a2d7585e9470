"""A sender's door: the handshake that parts one attempt from another, for every transport that has a peer.

Knows: connected sockets on the running loop, the progress deadline, whom to let in.
Must not know: addresses, tensors, the log. The network is trusted: tokens part attempts, they hide nothing.

Receiver to sender: Hello. Sender to receiver: Answer. Both are JSON after their length (4 bytes, big-endian).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
from collections.abc import Awaitable, Callable
from typing import Annotated, Literal, TypeVar

import msgspec

from reef_bus.errors import TransferError
from reef_bus.transport import transfer_errors

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
    """What a receiver came for: `manifest` is its digest, `after` the bytes that it holds already. `serves`: where
    others may take from it what it has; empty if nowhere. `direct`: from this peer, or not at all. With a `base`, the
    digest of what its memory was proven to hold, it came for a delta from there, and for nothing else."""

    token: str
    publication: str
    attempt: int
    manifest: str
    after: Annotated[int, msgspec.Meta(ge=0)] = 0
    serves: str = ""
    direct: bool = False
    base: str = ""


class Answer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the peer says to it: with an empty `cause` the bytes follow, or are to be had from the receiver `take`. Who
    came for a delta gets as many bytes as `delta` says: 0, where there is none from its base."""

    cause: Literal["", "refused", "mismatch"] = ""
    message: str = ""
    take: str = ""
    delta: Annotated[int, msgspec.Meta(ge=0)] = 0


_Message = TypeVar("_Message", Hello, Answer)


class Door:
    """A listener, and one task per receiver that came; `admit` serves whom the handshake let in, unless `answer` names
    another receiver, which has the same bytes."""

    def __init__(
        self,
        listener: socket.socket,
        hello: Hello,
        stall_s: float,
        admit: Callable[[Link, Hello], Awaitable[None]],
        answer: Callable[[Hello], Answer] = lambda hello: Answer(),
    ) -> None:
        self._listener, self._hello, self._stall_s = listener, hello, stall_s
        self._admit, self._answer = admit, answer
        self._serving: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        listener.setblocking(False)
        self._open()

    async def close(self) -> None:
        """Nobody is admitted, and nothing is sent, from this call on; safe to repeat."""
        self.shut()
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    def shut(self) -> None:
        """Nobody is admitted any more; who is in stays in. Safe to repeat."""
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener)
            self._listener.close()

    def _open(self) -> None:
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
            self._loop.call_later(ACCEPT_PAUSE_S, self._open)
            return
        task = self._loop.create_task(self._serve(sock, f"receiver {peer[0]}:{peer[1]}" if peer else "a receiver"))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)
        # Closed here and not in the task: one that is cancelled before its first step never runs its own clean-up.
        task.add_done_callback(lambda _: sock.close())

    async def _serve(self, sock: socket.socket, peer: str) -> None:
        try:
            with transfer_errors(peer):
                async with asyncio.timeout(self._stall_s) as deadline:
                    link = Link(sock, deadline, self._stall_s)
                    hello = await link.hear(Hello)
                    answer = _judge(hello, self._hello) or self._answer(hello)
                    await link.say(answer)
                    if not answer.cause and not answer.take:
                        await self._admit(link, hello)
        except TransferError as error:
            _logger.info("attempt %d of %s: %s", self._hello.attempt, self._hello.publication, error)


class Link:
    """A socket under a progress deadline, or two: whatever moves puts them off, each by its own span in seconds."""

    def __init__(
        self,
        sock: socket.socket,
        deadline: asyncio.Timeout,
        stall_s: float,
        sooner: tuple[asyncio.Timeout, float] | None = None,
    ) -> None:
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # the handshake is two small messages
        self.sock = sock
        self._deadlines = [(deadline, stall_s)] + ([sooner] if sooner else [])
        self._often = min(span for _, span in self._deadlines) / 10
        self._loop = asyncio.get_running_loop()
        self._put_off, self._since_rest = self._loop.time(), 0

    async def enter(self, hello: Hello) -> Answer:
        """Through the door at the other end. Raises TransferError when it stays shut."""
        await self.say(hello)
        answer = await self.hear(Answer)
        if answer.cause:
            raise TransferError(answer.cause, f"the sender says: {answer.message}")
        return answer

    async def send(self, data: bytes | memoryview) -> None:
        """All of it. Not sock_sendall: that tells nothing on its way, so that only small slices could be given to it;
        and with 4 MiB at a time receivers needed 1.4 times the CPU: the socket's buffer runs low at the end of each."""
        rest = memoryview(data)
        while rest:
            with contextlib.suppress(BlockingIOError):
                count = self.sock.send(rest)
                rest = rest[count:]
                await self.moved(count)
            if rest:  # not at once again: the peer drains meanwhile, and what would be sent is little
                await self._writable()

    async def _writable(self) -> None:
        ready = asyncio.Event()
        self._loop.add_writer(self.sock, ready.set)
        try:
            await ready.wait()
        finally:
            self._loop.remove_writer(self.sock)

    async def read_into(self, view: memoryview) -> int:
        """Some bytes, at least one."""
        count = await self._loop.sock_recv_into(self.sock, view)
        if not count:
            raise TransferError("closed", f"the peer closed with {len(view)} or more bytes to come")
        await self.moved(count)
        return count

    async def say(self, message: Hello | Answer) -> None:
        body = msgspec.json.encode(message)
        await self.send(len(body).to_bytes(4, "big") + body)

    async def hear(self, kind: type[_Message]) -> _Message:
        size = int.from_bytes(await self.exactly(4), "big")
        if size > MESSAGE_LIMIT:
            raise TransferError("protocol", f"a handshake of {size} bytes: that peer speaks something else")
        try:
            return msgspec.json.decode(await self.exactly(size), type=kind)
        except (msgspec.MsgspecError, UnicodeError) as error:
            raise TransferError("protocol", f"expected {kind.__name__}: {error}") from error

    async def exactly(self, size: int) -> bytearray:
        data = bytearray(size)
        rest = memoryview(data)
        while rest:
            rest = rest[await self.read_into(rest) :]
        return data

    def wait(self) -> None:
        """Until something moves again, it is not the peer who is late."""
        self._put_off = 0.0
        for deadline, _ in self._deadlines:
            deadline.reschedule(None)

    async def moved(self, count: int) -> None:
        """So many bytes went one way or the other."""
        now = self._loop.time()
        # Not at every read: a new timer for each cost a quarter of the receiver's CPU. So silence of 0.9 to 1.0 stalls.
        if now > self._put_off + self._often:
            self._put_off = now
            for deadline, span in self._deadlines:
                deadline.reschedule(now + span)
        self._since_rest += count
        if self._since_rest >= REST_BYTES:
            self._since_rest = 0
            await asyncio.sleep(0)


def _judge(hello: Hello, expected: Hello) -> Answer | None:
    """Why a receiver does not belong to this attempt. The token comes first: to strangers nothing else is told."""
    if not secrets.compare_digest(hello.token.encode(), expected.token.encode()):
        return Answer("refused", "the token is not this attempt's")
    if (hello.publication, hello.attempt) != (expected.publication, expected.attempt):
        found, instead = (f"attempt {who.attempt} of {who.publication}" for who in (hello, expected))
        return Answer("refused", f"{found} is not open here, {instead} is")
    if hello.manifest != expected.manifest:
        return Answer("mismatch", f"the receiver expects manifest {hello.manifest}, offered is {expected.manifest}")
    return None
