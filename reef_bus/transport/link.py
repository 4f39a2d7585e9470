"""A connected socket under a progress deadline, and the two messages with which receiver and sender find each other.

Knows: sockets on the running loop, the handshake. Must not know: which memory moves, or who waits for whom.
Both messages are JSON after their length (4 bytes, big-endian).
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from typing import Annotated, Literal, TypeVar

import msgspec

from reef_bus.errors import TransferError

REST_BYTES = 16 << 20
"""Moved between two turns of the loop: a socket that is always ready never suspends, and heartbeats share the loop."""
MESSAGE_LIMIT = 4096
"""Bytes of a handshake message: whoever says more is not one of ours."""


class Hello(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a receiver came for: `manifest` is its digest, `after` the bytes that it holds already. `serves`: where
    others may take from it what it has; empty if nowhere. `direct`: from this peer, or not at all."""

    token: str
    publication: str
    attempt: int
    manifest: str
    after: Annotated[int, msgspec.Meta(ge=0)] = 0
    serves: str = ""
    direct: bool = False


class Answer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the peer says to it: with an empty `cause` the bytes follow, or are to be had from the receiver `take`."""

    cause: Literal["", "refused", "mismatch"] = ""
    message: str = ""
    take: str = ""


_Message = TypeVar("_Message", Hello, Answer)


class Link:
    """Whatever moves puts the deadlines off, each by its own span in seconds."""

    def __init__(self, sock: socket.socket, *deadlines: tuple[asyncio.Timeout, float]) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # the handshake is two small messages
        self._sock, self._deadlines = sock, deadlines
        self._loop = asyncio.get_running_loop()
        self._put_off, self._since_rest = self._loop.time(), 0
        self._often = min(span for _, span in deadlines) / 10

    async def connect(self, host: str, port: int) -> str:
        """Returns the address of this end."""
        await self._loop.sock_connect(self._sock, (host, port))
        await self._moved(0)
        return str(self._sock.getsockname()[0])

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

    def wait(self) -> None:
        """Until something moves again it is not the peer who is late."""
        for deadline, _ in self._deadlines:
            deadline.reschedule(None)
        self._put_off = 0.0

    async def _exactly(self, size: int) -> bytes:
        data = bytearray(size)
        rest = memoryview(data)
        while rest:
            rest = rest[await self.read_into(rest) :]
        return bytes(data)

    async def _moved(self, count: int) -> None:
        now = self._loop.time()
        # Not at every read: a new timer for each cost a quarter of the receiver's CPU. So silence of 0.9 to 1.0 spans.
        if now > self._put_off + self._often:
            self._put_off = now
            for deadline, span in self._deadlines:
                deadline.reschedule(now + span)
        self._since_rest += count
        if self._since_rest >= REST_BYTES:
            self._since_rest = 0
            await asyncio.sleep(0)


def judge(hello: Hello, expected: Hello) -> Answer:
    """Whether a receiver belongs to this attempt. The token comes first: to strangers nothing else is told."""
    if not secrets.compare_digest(hello.token.encode(), expected.token.encode()):
        return Answer("refused", "the token is not this attempt's")
    if (hello.publication, hello.attempt) != (expected.publication, expected.attempt):
        found, instead = (f"attempt {who.attempt} of {who.publication}" for who in (hello, expected))
        return Answer("refused", f"{found} is not open here, {instead} is")
    if hello.manifest != expected.manifest:
        return Answer("mismatch", f"the receiver expects manifest {hello.manifest}, offered is {expected.manifest}")
    return Answer()


async def enter(link: Link, hello: Hello) -> Answer:
    """Say what one came for. Raises TransferError if that is not to be had."""
    await link.say(hello)
    answer = await link.hear(Answer)
    if answer.cause:
        raise TransferError(answer.cause, f"the sender says: {answer.message}")
    return answer
