"""Weights over TCP: from the sender's tensors into the receiver's, with no buffer of our own between.

Knows: how a receiver finds whoever has the bytes. Must not know: the log, files, or what the bytes mean. The network is
trusted: tokens part attempts, they hide nothing.

Receiver to sender: Hello. Sender to receiver: Answer, then every tensor in manifest order, then end of stream. Large
weights only the first receiver takes from the sender; the next one is sent to it, the third to the second: a
chain, so that a sender's cost does not grow with receivers. Who finds nothing there, or other bytes than the manifest
names, takes the rest from the sender itself. Whoever is behind a slow receiver is as slow: so after a failed attempt
everybody takes from the sender, and each is guilty of itself alone.

Who proved to hold a base may first ask the sender for a delta from it, on a connection of its own. Deltas are not
passed on, and who applied one passes nothing on: it was never part of the chain.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from collections.abc import Callable

from msgspec.structs import replace
from xxhash import xxh3_128_hexdigest

from reef_bus.backends import Pieces
from reef_bus.errors import TransferError
from reef_bus.manifest import Manifest, TensorEntry, require_fit
from reef_bus.transport import STALL_S, Delta, Offer, Ticket, Transport, transfer_errors
from reef_bus.transport.door import BACKLOG, Answer, Door, Hello, Link
from reef_bus.transport.held import Held

CHAIN_BYTES = 16 << 20
"""Less than this is everywhere before the next receiver has asked for it."""

_logger = logging.getLogger(__name__)


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
        held = Held([source[entry.name].data for entry in manifest.tensors], full=True)
        with transfer_errors(f"listening on {self._host}"):
            return TcpOffer(listening(self._host), hello, held, self._stall_s)

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
        receiver = Receiver(_address(ticket), hello, manifest, target, stall_s, progress)
        with transfer_errors(f"sender {ticket.address}"):
            async with asyncio.timeout(stall_s) as deadline:
                await receiver.run(deadline)
        return manifest.total

    async def delta(
        self, ticket: Ticket, manifest: Manifest, base: str, *, publication: str, attempt: int, stall_s: float = STALL_S
    ) -> bytes | bytearray | None:
        peer = _address(ticket)
        with transfer_errors(f"sender {ticket.address}"), socket.socket(family(peer[0])) as sock:
            async with asyncio.timeout(stall_s) as deadline:
                link = Link(sock, deadline, stall_s)
                await asyncio.get_running_loop().sock_connect(sock, peer)
                answer = await link.enter(Hello(ticket.token, publication, attempt, manifest.digest, base=base))
                if not 0 < answer.delta < manifest.total:
                    return None
                return await link.exactly(answer.delta)


class TcpOffer(Offer):
    """A sender's door. The first receiver takes from here; each one after it is sent to the one before."""

    def __init__(self, listener: socket.socket, hello: Hello, held: Held, stall_s: float) -> None:
        self._ticket = Ticket("tcp", address_of(listener), hello.token)
        self._held, self._sent = held, 0
        self._last = ""  # where the last receiver serves
        self._delta: Delta | None = None
        self._door = Door(listener, hello, stall_s, self._send, self._answer)

    @property
    def ticket(self) -> Ticket:
        return self._ticket

    @property
    def sent_bytes(self) -> int:
        return self._sent

    async def close(self) -> None:
        await self._door.close()

    def tell(self, delta: Delta) -> None:
        self._delta = delta

    def _answer(self, hello: Hello) -> Answer:
        if hello.base:
            return Answer(delta=len(self._told(hello)))
        return Answer(take=self._elsewhere(hello))

    def _told(self, hello: Hello) -> memoryview:
        """The delta, for who holds its base; nothing for all others, and where the full bytes are no more than that."""
        delta = self._delta
        if delta is None or delta.base != hello.base or len(delta.data) >= self._held.total:
            return memoryview(b"")
        return memoryview(delta.data)

    def _elsewhere(self, hello: Hello) -> str:
        if not hello.serves or hello.attempt > 1:
            return ""
        before, self._last = self._last, hello.serves
        return "" if hello.direct else before

    async def _send(self, link: Link, hello: Hello) -> None:
        source = Held([self._told(hello)], full=True) if hello.base else self._held
        for part in source.parts(hello.after, source.total):
            await link.send(part)
            self._sent += part.nbytes


class Receiver:
    """One receiver's way to the bytes, and the door at which it passes them on."""

    def __init__(
        self,
        sender: tuple[str, int],
        hello: Hello,
        manifest: Manifest,
        target: Pieces,
        stall_s: float,
        progress: Callable[[int], None] | None,
    ) -> None:
        self._sender, self._hello, self._stall_s, self._progress = sender, hello, stall_s, progress
        self._manifest, self._views = manifest, [target[entry.name].data for entry in manifest.tensors]
        self._held = Held(self._views)
        self._door: Door | None = None
        self._address = ""  # of this door

    async def run(self, deadline: asyncio.Timeout) -> None:
        """Until everything is here. Who takes from here then gets the rest of it; after a failure, nothing more."""
        try:
            elsewhere = await self._from(self._sender, deadline)
            if elsewhere:
                await self._by_way_of(elsewhere, deadline)
        except BaseException:
            if self._door:
                await self._door.close()
            raise
        finally:
            self._held.end()
        if self._door:
            self._door.shut()

    async def _by_way_of(self, address: str, deadline: asyncio.Timeout) -> None:
        """From that receiver as far as it goes, and from the sender the rest. Also of one that went away in the middle,
        what it passed on may be wrong."""
        whole = await self._from_receiver(address, deadline)
        self._hello, passed_on = replace(self._hello, direct=True), self._held.have
        if not whole:
            await self._from(self._sender, deadline)
        if wrong := await self._first_wrong(passed_on, deadline):
            _logger.warning("receiver %s passed on other bytes for %s; they come from the sender", address, wrong.name)
            self._held.end()
            self._held = Held(self._views, have=wrong.offset)
            await self._from(self._sender, deadline)

    async def _from_receiver(self, address: str, deadline: asyncio.Timeout) -> bool:
        """Whether everything came from there. Half of the time without progress is kept for the sender."""
        sooner_s = self._stall_s / 2
        try:
            with transfer_errors(f"receiver {address}"):
                async with asyncio.timeout(sooner_s) as sooner:
                    await self._from(host_port(address), deadline, (sooner, sooner_s))
        except TransferError as error:
            _logger.info("%s; taking the rest from the sender", error)
        return self._held.have == self._held.total

    async def _first_wrong(self, stop: int, deadline: asyncio.Timeout) -> TensorEntry | None:
        """Of the tensors that begin before `stop`. To hash takes its time, and that is nobody's silence."""
        deadline.reschedule(None)
        wrong = await asyncio.to_thread(self._search, stop)
        deadline.reschedule(asyncio.get_running_loop().time() + self._stall_s)
        return wrong

    def _search(self, stop: int) -> TensorEntry | None:
        pairs = zip(self._manifest.tensors, self._views, strict=True)
        return next((entry for entry, view in pairs if entry.offset < stop and _wrong(entry, view)), None)

    async def _from(
        self, peer: tuple[str, int], deadline: asyncio.Timeout, sooner: tuple[asyncio.Timeout, float] | None = None
    ) -> str:
        """Take what is still missing from that peer. Returns where else it is to be had, if it says so."""
        with socket.socket(family(peer[0])) as sock:
            link = Link(sock, deadline, self._stall_s, sooner)
            await asyncio.get_running_loop().sock_connect(sock, peer)
            await link.moved(0)
            own = str(sock.getsockname()[0])
            answer = await link.enter(replace(self._hello, after=self._held.have, serves=self._serves(own)))
            if not answer.take:
                await self._fill(link)
        return answer.take

    def _serves(self, own: str) -> str:
        """Where this end passes on what it has; the address by which it reached the sender is one for others, too."""
        if self._held.total < CHAIN_BYTES:
            return ""
        if not self._address:
            listener = listening(own)
            self._address = address_of(listener)
            self._door = Door(listener, self._hello, self._stall_s, self._pass_on)
        return self._address

    async def _pass_on(self, link: Link, hello: Hello) -> None:
        held, place = self._held, hello.after
        while place < held.total:
            if held.have <= place:
                link.wait()
                await held.beyond(place)
                await link.moved(0)  # from here on it is the peer who is late
            for part in held.parts(place, held.have):
                await link.send(part)
                place += part.nbytes

    async def _fill(self, link: Link) -> None:
        """Straight from the kernel into every tensor in turn."""
        for rest in self._held.parts(self._held.have, self._held.total):
            while rest:
                count = await link.read_into(rest)
                rest = rest[count:]
                self._held.grow(count)
                if self._progress is not None:
                    self._progress(self._held.have)


def _wrong(entry: TensorEntry, view: memoryview) -> bool:
    return xxh3_128_hexdigest(view) != entry.xxh3


def _address(ticket: Ticket) -> tuple[str, int]:
    if ticket.transport != "tcp":
        raise TransferError("protocol", f"expected a tcp ticket, found {ticket.transport} {ticket.address!r}")
    return host_port(ticket.address)


def host_port(address: str) -> tuple[str, int]:
    """Raises TransferError for what is none."""
    host, _, port = address.rpartition(":")
    if _named(host) and port.isdecimal() and int(port) < 1 << 16:
        return host, int(port)
    raise TransferError("protocol", f"expected host:port, found {address!r}")


def _named(host: str) -> bool:
    """Whether a resolver can be asked for it at all: for other names Python raises what is no OSError."""
    try:
        return bool(host.encode("idna")) and host.isprintable()
    except UnicodeError:
        return False


def listening(host: str) -> socket.socket:
    return socket.create_server((host, 0), family=family(host), backlog=BACKLOG)


def address_of(listener: socket.socket) -> str:
    return "{}:{}".format(*listener.getsockname()[:2])


def family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
