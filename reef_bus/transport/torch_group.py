"""Weights through torch.distributed: for every receiver of an attempt a process group of two, used once and torn down.

Knows: groups, buckets, the handshake. Must not know: the log, files, or what the bytes mean.

After the handshake the sender names its store, both make the group, and buckets of the canonical byte stream follow. A
group notices neither a dead peer nor a stopped one, and nothing ends an operation that waits in it but the operation's
own timeout: so the handshake's socket stays open beside it and tells who is gone, and operations only touch buckets.
What an abandoned one writes within its last seconds lands in a bucket that nobody reads any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

from reef_bus.backends import Pieces
from reef_bus.errors import TransferError
from reef_bus.manifest import Manifest, require_fit
from reef_bus.transport import STALL_S, Offer, Ticket, Transport, transfer_errors
from reef_bus.transport.door import Answer, Door, Hello, Link
from reef_bus.transport.held import Held
from reef_bus.transport.tcp import address_of, family, host_port, listening

BUCKET_BYTES = 16 << 20
"""Moved by one operation, and so the unit of progress: 16 MiB in 10 s is 1.6 MB/s."""
SENDER, RECEIVER = 0, 1
"""Ranks."""


class TorchTransport(Transport):
    """Through gloo, on CPUs. `host` is where senders listen, and what their tickets name."""

    name = "torch"

    def __init__(self, host: str = "127.0.0.1", stall_s: float = STALL_S) -> None:
        self._host, self._stall_s = host, stall_s

    async def offer(self, manifest: Manifest, source: Pieces, *, publication: str, attempt: int) -> Offer:
        require_fit(manifest, source)
        hello = Hello(secrets.token_urlsafe(16), publication, attempt, manifest.digest)
        held = Held([source[entry.name].data for entry in manifest.tensors], full=True)
        await asyncio.to_thread(_distributed)
        with transfer_errors(f"listening on {self._host}"):
            return TorchOffer(listening(self._host), hello, held, self._stall_s)

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
        await asyncio.to_thread(_distributed)
        with transfer_errors(f"sender {ticket.address}"), socket.socket(family(peer[0])) as sock:
            async with asyncio.timeout(stall_s) as deadline:
                link = Link(sock, deadline, stall_s)
                await asyncio.get_running_loop().sock_connect(sock, peer)
                await link.enter(hello)
                async with _pair(link, stall_s) as pair:
                    store = host_port((await link.hear(Answer)).message)
                    await pair.done(pair.make(RECEIVER, store, sock.getsockname()[0]))
                    await _receive(pair, held, progress)
        return held.have


class TorchOffer(Offer):
    """A door, and a group for each whom it admits."""

    def __init__(self, listener: socket.socket, hello: Hello, held: Held, stall_s: float) -> None:
        self._host = listener.getsockname()[0]
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
        async with _pair(link, self._stall_s) as pair:
            async with self._making:
                store = pair.listen(self._host)
                await link.say(Answer(message=f"{self._host}:{store.port}"))
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
            with contextlib.suppress(TransferError):  # it closes when everything has arrived
                await pair.done(asyncio.get_running_loop().create_future())


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
async def _pair(link: Link, stall_s: float) -> AsyncIterator[_Pair]:
    pair = _Pair(link, stall_s)
    try:
        yield pair
    finally:
        await pair.close()


class _Pair:
    """A group of two, its thread and its two buckets; the socket beside it tells whether the peer lives."""

    def __init__(self, link: Link, stall_s: float) -> None:
        import torch

        self._link, self._timeout = link, timedelta(seconds=stall_s)
        self._thread = ThreadPoolExecutor(1, "reef-torch")  # our own: an operation may hold it for the whole deadline
        self._buckets = [torch.empty(BUCKET_BYTES, dtype=torch.uint8) for _ in range(2)]
        self._group: Any = None
        self._gone: asyncio.Task[bytes] | None = None

    def bucket(self, number: int) -> Any:
        return self._buckets[number % 2]

    def listen(self, host: str) -> Any:
        """A store of this pair, at a port of its own."""
        return _distributed().TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=self._timeout)

    def make(self, rank: int, store: Any, host: str) -> asyncio.Future[Any]:
        """The group, in time. `store`: the sender's own, or its address."""
        self._gone = asyncio.create_task(asyncio.get_running_loop().sock_recv(self._link.sock, 1))
        return self._run(self._make, rank, store, host)

    async def close(self) -> None:
        if self._gone:
            self._gone.cancel()
            await asyncio.gather(self._gone, return_exceptions=True)
        self._group = None  # with its last operation it closes
        self._thread.shutdown(wait=False)

    def _make(self, rank: int, store: Any, host: str) -> None:
        distributed = _distributed()
        if isinstance(store, tuple):
            store = distributed.TCPStore(*store, is_master=False, timeout=self._timeout)
        options = distributed.ProcessGroupGloo._Options()
        options._timeout = self._timeout
        options._devices = [distributed.ProcessGroupGloo.create_device(hostname=host)]
        self._group = distributed.ProcessGroupGloo(store, rank, 2, options)

    def start(self, what: str, bucket: Any, peer: int) -> asyncio.Future[Any]:
        """One operation in the pair's thread, after those that were started before."""
        operation = getattr(self._group, what)
        return self._run(lambda: operation([bucket], peer, 0).wait(self._timeout))

    def _run(self, function: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        future = asyncio.get_running_loop().run_in_executor(self._thread, function, *args)
        future.add_done_callback(lambda done: done.cancelled() or done.exception())  # seen, also if nobody waits
        return future

    async def done(self, operation: asyncio.Future[Any] | None) -> None:
        """Wait for it, or for the end of the peer. Raises TransferError."""
        if operation is None:
            return
        assert self._gone is not None
        await asyncio.wait({operation, self._gone}, return_when=asyncio.FIRST_COMPLETED)
        if not operation.done():
            raise TransferError("closed", "the peer closed in the middle")
        if error := operation.exception():
            raise TransferError("closed", f"the group says: {str(error).splitlines()[0]}") from error
        await self._link.moved(BUCKET_BYTES)


def _distributed() -> Any:
    """Takes seconds, the first time: so it is loaded before any deadline begins. Untyped: torch does not export what it
    documents."""
    try:
        return importlib.import_module("torch.distributed")
    except ImportError as error:
        raise TransferError("refused", "torch needs PyTorch here; set publication.transport to tcp or files") from error


def _spans(total: int) -> Iterator[tuple[int, int]]:
    return ((start, min(start + BUCKET_BYTES, total)) for start in range(0, total, BUCKET_BYTES))


def _fill(bucket: Any, parts: Iterator[memoryview]) -> None:
    with memoryview(bucket.numpy()) as view:
        place = 0
        for part in parts:
            view[place : place + part.nbytes] = part
            place += part.nbytes
