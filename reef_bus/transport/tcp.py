"""Weights over TCP: from the sender's tensors into the receiver's, with no buffer of our own between.

Knows: TCP addresses, the order of the bytes. Must not know: the log, files, or what the bytes mean.

After the handshake the sender sends every tensor in manifest order, then end of stream.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Callable

from reef_bus.backends import Pieces
from reef_bus.errors import TransferError
from reef_bus.manifest import Manifest, require_fit
from reef_bus.transport import STALL_S, Offer, Ticket, Transport, transfer_errors
from reef_bus.transport.door import BACKLOG, Door, Hello, Link

SLICE_BYTES = 4 << 20
"""Sent as one unit of progress. sock_sendall tells nothing on its way, so that a slice must fit any usable link's
deadline: 4 MiB in 10 s is 0.4 MB/s."""


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
                link = Link(sock, deadline, stall_s)
                await asyncio.get_running_loop().sock_connect(sock, (host, port))
                await link.moved(0)
                await link.enter(hello)
                return await _fill(link, views, progress)


class TcpOffer(Offer):
    """A door, and the tensors for whoever it admits."""

    def __init__(self, listener: socket.socket, hello: Hello, views: list[memoryview], stall_s: float) -> None:
        host, port = listener.getsockname()[:2]
        self._ticket = Ticket("tcp", f"{host}:{port}", hello.token)
        self._views = views
        self._sent = 0
        self._door = Door(listener, hello, stall_s, self._send)

    @property
    def ticket(self) -> Ticket:
        return self._ticket

    @property
    def sent_bytes(self) -> int:
        return self._sent

    async def close(self) -> None:
        await self._door.close()

    async def _send(self, link: Link) -> None:
        for view in self._views:
            for start in range(0, len(view), SLICE_BYTES):
                part = view[start : start + SLICE_BYTES]
                await link.send(part)
                self._sent += len(part)


async def _fill(link: Link, views: list[memoryview], progress: Callable[[int], None] | None) -> int:
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
