"""Weights through torch.distributed: for every receiver of an attempt a process group of two, used once and torn down.

Knows: groups, buckets, the handshake. Must not know: the log, files, or what the bytes mean.

After the handshake the sender names its kind of group and its store, both make the group, and buckets of the canonical
byte stream follow. A group notices neither a dead peer nor a stopped one, and of gloo's nothing ends an operation that
waits in it but the operation's own timeout: so the handshake's socket stays open beside it and tells who is gone, and
operations only touch buckets. What an abandoned one writes within its last seconds lands in a bucket that nobody reads
any more, in a thread for which the process does not wait when it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import timedelta
from typing import Any

from reef_bus.backends import Pieces
from reef_bus.errors import TransferError
from reef_bus.manifest import Manifest, require_fit
from reef_bus.transport import STALL_S, Offer, Ticket, Transport, transfer_errors
from reef_bus.transport.beside import Beside
from reef_bus.transport.door import Answer, Door, Hello, Link
from reef_bus.transport.held import Held
from reef_bus.transport.tcp import address_of, family, host_port, listening
from reef_bus.transport.torch_backends import BUCKET_BYTES, Group, distributed, group, missing

SENDER, RECEIVER = 0, 1
"""Ranks."""


class TorchTransport(Transport):
    """`host` is where senders listen, and what their tickets name. `device`, alike at both ends: "cpu", and groups are
    gloo's; or "cuda", and they are NCCL's, each end on a GPU of its own."""

    name = "torch"

    def __init__(self, host: str = "127.0.0.1", stall_s: float = STALL_S, device: str = "cpu") -> None:
        self._host, self._stall_s, self._device = host, stall_s, device

    def lacks(self) -> str:
        return missing(self._device)

    async def offer(self, manifest: Manifest, source: Pieces, *, publication: str, attempt: int) -> Offer:
        require_fit(manifest, source)
        hello = Hello(secrets.token_urlsafe(16), publication, attempt, manifest.digest)
        held = Held([source[entry.name].data for entry in manifest.tensors], full=True)
        await asyncio.to_thread(group, self._device)  # to load torch takes seconds: before any deadline begins
        with transfer_errors(f"listening on {self._host}"):
            return TorchOffer(listening(self._host), hello, held, self._device, self._stall_s)

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
        if ticket.transport != self.name:
            raise TransferError("protocol", f"expected a torch ticket, found {ticket.transport} {ticket.address!r}")
        peer, hello = host_port(ticket.address), Hello(ticket.token, publication, attempt, manifest.digest)
        held = Held([target[entry.name].data for entry in manifest.tensors])
        own = await asyncio.to_thread(group, self._device)
        with transfer_errors(f"sender {ticket.address}"), socket.socket(family(peer[0])) as sock:
            async with asyncio.timeout(stall_s) as deadline:
                link = Link(sock, deadline, stall_s)
                await asyncio.get_running_loop().sock_connect(sock, peer)
                await link.enter(hello)
                async with _pair(link, own, stall_s) as pair:
                    store = _store((await link.hear(Answer)).message, own.name)
                    await pair.done(pair.make(RECEIVER, store, sock.getsockname()[0]))
                    await _receive(pair, held, progress)
        return held.have


class TorchOffer(Offer):
    """A door, and a group for each whom it admits."""

    def __init__(self, listener: socket.socket, hello: Hello, held: Held, device: str, stall_s: float) -> None:
        self._device, self._host = device, listener.getsockname()[0]
        self._ticket = Ticket("torch", address_of(listener), hello.token)
        self._held, self._stall_s, self._sent = held, stall_s, 0
        self._making = asyncio.Lock()  # one group after the other: many at once take each other's time
        self._door = Door(listener, hello, stall_s, self._send)

    @property
    def ticket(self) -> Ticket:
        return self._ticket

    @property
    def sent_bytes(self) -> int:
        return self._sent

    async def close(self) -> None:
        await self._door.close()

    async def _send(self, link: Link, hello: Hello) -> None:
        own = group(self._device)
        async with _pair(link, own, self._stall_s) as pair:
            async with self._making:
                store = pair.listen(self._host)
                await link.say(Answer(message=f"{own.name} {self._host}:{store.port}"))
                making = pair.make(SENDER, store, self._host)
                with contextlib.suppress(TimeoutError):  # who does not come in time holds up nobody else
                    async with asyncio.timeout(self._stall_s / 10):
                        await pair.done(making)
            await pair.done(making)
            filled: asyncio.Future[Any] | None = None
            for number, (start, stop) in enumerate(_spans(self._held.total)):
                bucket = pair.bucket(number)[: stop - start]
                _fill(bucket, self._held.parts(start, stop))
                await pair.done(filled)
                filled = pair.start("send", bucket, RECEIVER)
                self._sent += stop - start
            await pair.done(filled)
            await pair.ended()  # it closes when everything has arrived


async def _receive(pair: _Pair, held: Held, progress: Callable[[int], None] | None) -> None:
    """Copied on the loop, bucket by bucket, while the next one arrives: no thread ever holds the target."""
    spans = list(_spans(held.total))
    coming = pair.start("recv", pair.bucket(0)[: spans[0][1]], SENDER) if spans else None
    for number, (start, stop) in enumerate(spans):
        await pair.done(coming)
        if number + 1 < len(spans):
            then, end = spans[number + 1]
            coming = pair.start("recv", pair.bucket(number + 1)[: end - then], SENDER)
        with memoryview(pair.bucket(number).numpy()) as bucket:
            for part in held.parts(start, stop):
                part[:] = bucket[held.have - start : held.have - start + part.nbytes]
                held.grow(part.nbytes)
        if progress is not None:
            progress(held.have)


@contextlib.asynccontextmanager
async def _pair(link: Link, own: Group, stall_s: float) -> AsyncIterator[_Pair]:
    pair = _Pair(link, own, stall_s)
    try:
        yield pair
    finally:
        await pair.close()


class _Pair:
    """A group of two, its thread and its two buckets; the socket beside it tells whether the peer lives."""

    def __init__(self, link: Link, own: Group, stall_s: float) -> None:
        import torch

        self._group, self._timeout = own, timedelta(seconds=stall_s)
        self._beside = Beside(link, "reef-torch")
        self._buckets = [torch.empty(BUCKET_BYTES, dtype=torch.uint8) for _ in range(2)]

    def bucket(self, number: int) -> Any:
        return self._buckets[number % 2]

    def listen(self, host: str) -> Any:
        """A store of this pair, at a port of its own."""
        return distributed().TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=self._timeout)

    def make(self, rank: int, store: Any, host: str) -> asyncio.Future[Any]:
        """The group, in time. `store`: the sender's own, or its address."""
        self._beside.watch()
        return self._beside.start(self._make, rank, store, host)

    async def close(self) -> None:
        self._group.abort()
        await self._beside.close()

    def _make(self, rank: int, store: Any, host: str) -> None:
        if isinstance(store, tuple):
            store = distributed().TCPStore(*store, is_master=False, timeout=self._timeout)
        self._group.make(rank, store, host, self._timeout)

    def start(self, what: str, bucket: Any, peer: int) -> asyncio.Future[Any]:
        """One operation in the pair's thread, after those that were started before."""
        return self._beside.start(self._group.move, what, bucket, peer)

    async def ended(self) -> None:
        await self._beside.ended()

    async def done(self, operation: asyncio.Future[Any] | None) -> None:
        """Wait for it, or for the end of the peer. Raises TransferError."""
        if operation is None:
            return
        try:
            await self._beside.done(operation, BUCKET_BYTES)
        except RuntimeError as error:
            raise TransferError("closed", f"the group says: {str(error).splitlines()[0]}") from error


def _store(message: str, kind: str) -> tuple[str, int]:
    """Where the sender's is, whose group must be of the same kind."""
    theirs, _, address = message.rpartition(" ")
    if theirs != kind:
        raise TransferError("mismatch", f"the sender's group is {theirs!r}, expected {kind}: set torch-device alike")
    return host_port(address)


def _spans(total: int) -> Iterator[tuple[int, int]]:
    return ((start, min(start + BUCKET_BYTES, total)) for start in range(0, total, BUCKET_BYTES))


def _fill(bucket: Any, parts: Iterator[memoryview]) -> None:
    with memoryview(bucket.numpy()) as view:
        place = 0
        for part in parts:
            view[place : place + part.nbytes] = part
            place += part.nbytes
