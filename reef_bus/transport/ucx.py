"""Weights over UCX, for networks with RDMA: from the sender's tensors into the receiver's, with no buffer of our own.

Knows: ucxx's workers, endpoints and requests, the handshake. Must not know: the log, files, or what the bytes mean.

After the handshake the sender opens a listener for this receiver alone and names its port; slices of the canonical byte
stream follow as tagged messages. UCX notices a dead peer in its own time and a stopped one never: so the handshake's
socket stays open beside it and tells who is gone, under the progress deadline. Each end has a worker of its own, and
destroys it before the transfer ends: with it goes every connection through which a peer could still write here.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import importlib
import os
import secrets
import socket
import threading
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

from xxhash import xxh3_64_intdigest

from reef_bus.backends import Pieces
from reef_bus.errors import TransferError
from reef_bus.manifest import Manifest, require_fit
from reef_bus.transport import STALL_S, Offer, Ticket, Transport, transfer_errors
from reef_bus.transport.beside import Beside
from reef_bus.transport.door import Answer, Door, Hello, Link
from reef_bus.transport.held import Held
from reef_bus.transport.tcp import address_of, family, host_port, listening

WINDOW = 8
"""Slices of 4 MiB under way at once, two buckets together: with two slices a busy loopback moved half as much.
They share the link, so that it must move 32 MiB within the deadline: 3.4 MB/s in 10 s."""
TURN_MS = 20
"""How long the thread waits for the network before it looks whether it is still wanted."""
CLOSE_NS = 10**9
"""For an endpoint to close; ucxx' own 10 s are longer than any grace."""
CLOSE_TURNS = 1000
"""Of a millisecond at most, until what was under way is cancelled; it took one when it was tried."""
OURS = {
    # Shared memory aside: UCX picks none for a peer that it reached by address, and cma would let a sender that was
    # stopped write into this process after its attempt has ended.
    "TLS": "^sm",
    # Without it, large messages go through UCX's own fragments: five times slower over tcp, at six times the CPU.
    "RNDV_SCHEME": "put_zcopy",
    # A small tensor waits for its receiver too, instead of piling up there.
    "RNDV_THRESH": "0",
}
"""What UCX is told, where the environment (UCX_TLS, …) says nothing else."""
_SETTINGS = {name: value for name, value in OURS.items() if f"UCX_{name}" not in os.environ}  # ucxx adds to it later
PROCESS = {
    "UCX_DEBUG_SIGNO": "0",  # else a terminal that closes (SIGHUP) starts UCX's debugger instead of ending the process
    "UCX_LOG_FILE": "stderr",  # else warnings are printed between what a role says on stdout
    "UCX_WARN_UNUSED_ENV_VARS": "n",  # ucxx itself sets one that UCX does not use without CUDA
}
"""The same, for what UCX reads only when it is loaded."""
INSTALL = "pip install 'reef-bus[ucx]'"


class UcxTransport(Transport):
    """`host` is where senders listen, and what their tickets name: an IPv4 address of the interface that shall carry
    the weights, because UCX takes the devices that belong to it."""

    name = "ucx"

    def __init__(self, host: str = "127.0.0.1", stall_s: float = STALL_S) -> None:
        self._host, self._stall_s = host, stall_s
        self._context: Any = None  # kept: it knows the devices, and what memory was registered with them

    def lacks(self) -> str:
        """Found by loading it, which takes most of a second: better at a role's start than while engines are paused."""
        try:
            self._context = _translated(_context)
        except TransferError as error:
            return str(error)
        return ""

    async def offer(self, manifest: Manifest, source: Pieces, *, publication: str, attempt: int) -> Offer:
        require_fit(manifest, source)
        hello = Hello(secrets.token_urlsafe(16), publication, attempt, manifest.digest)
        held = Held([source[entry.name].data for entry in manifest.tensors], full=True)
        if family(self._host) != socket.AF_INET:
            raise TransferError(
                "refused", f"ucxx listens on IPv4 only, found {self._host}; set another host, or use tcp"
            )
        context = await self._ready()
        with transfer_errors(f"listening on {self._host}"):
            return UcxOffer(listening(self._host), hello, held, context, self._stall_s)

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
            raise TransferError("protocol", f"expected a ucx ticket, found {ticket.transport} {ticket.address!r}")
        peer, hello = host_port(ticket.address), Hello(ticket.token, publication, attempt, manifest.digest)
        held = Held([target[entry.name].data for entry in manifest.tensors])
        context = await self._ready()

        async def moved(count: int) -> None:
            held.grow(count)
            if progress is not None:
                progress(held.have)
            await link.moved(count)

        with transfer_errors(f"sender {ticket.address}"), socket.socket(family(peer[0])) as sock:
            async with asyncio.timeout(stall_s) as deadline:
                link = Link(sock, deadline, stall_s)
                await asyncio.get_running_loop().sock_connect(sock, peer)
                await link.enter(hello)
                _, port = host_port((await link.hear(Answer)).message)
                async with _lane(context, link, hello.token) as lane:
                    await lane.done(lane.connect, sock.getpeername()[0], port)
                    await lane.done(lane.receive, held.parts(0, held.total), moved)
        return held.have

    async def _ready(self) -> Any:
        """In a thread, and before any deadline begins: to load UCX takes most of a second."""
        if self._context is None:
            self._context = await asyncio.to_thread(_translated, _context)
        return self._context


class UcxOffer(Offer):
    """A door, and a worker with a listener for each whom it admits. `sent_bytes` counts a slice when it is begun."""

    def __init__(self, listener: socket.socket, hello: Hello, held: Held, context: Any, stall_s: float) -> None:
        self._host = listener.getsockname()[0]
        self._ticket = Ticket("ucx", address_of(listener), hello.token)
        self._held, self._context, self._sent = held, context, 0
        self._loop = asyncio.get_running_loop()
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
        async with _lane(self._context, link, hello.token) as lane:
            await link.say(Answer(message=f"{self._host}:{await lane.done(lane.listen)}"))
            await lane.done(lane.accept)
            await lane.done(lane.send, self._counted(), link.moved)
            with contextlib.suppress(TransferError):  # it closes when everything has arrived
                await lane.done(lane.linger)

    def _counted(self) -> Iterator[memoryview]:
        """Taken in the threads of several lanes, counted on the loop."""
        for part in self._held.parts(0, self._held.total):
            self._loop.call_soon_threadsafe(self._count, part.nbytes)
            yield part

    def _count(self, count: int) -> None:
        self._sent += count


@contextlib.asynccontextmanager
async def _lane(context: Any, link: Link, token: str) -> AsyncIterator[_Lane]:
    lane = _Lane(context, link, token)
    try:
        yield lane
    finally:
        await lane.close()


class _Lane:
    """A worker with one connection, and the one thread that ever touches it: UCX calls Python back from within, and of
    two threads one would hold its lock while it waits for the other's. Its methods are jobs for `done`."""

    def __init__(self, context: Any, link: Link, token: str) -> None:
        self._context = context
        self._tag = xxh3_64_intdigest(token.encode())  # whoever else finds the port gets nothing
        self._loop = asyncio.get_running_loop()
        self._beside = Beside(link, "reef-ucx")
        self._beside.watch()
        self._left = threading.Event()
        self._worker: Any = None
        self._listener: Any = None
        self._endpoint: Any = None
        self._asked: list[int] = []
        # Here and not in a function's frame: who keeps an error keeps its frames, and a request keeps the worker.
        self._under_way: deque[tuple[Any, int]] = deque()

    async def done(self, job: Callable[..., Any], *args: Any) -> Any:
        """Its result, unless the peer ends before. Raises TransferError."""
        return await self._beside.done(self._beside.start(_translated, job, *args))

    async def close(self) -> None:
        """Nothing reaches memory through this lane any more. To the end, however often the caller is cancelled."""
        self._left.set()
        ended, cancelled = self._beside.start(self._end), None
        while not ended.done():
            try:
                await asyncio.wait({ended})
            except asyncio.CancelledError as error:
                cancelled = error
        await self._beside.close()
        if cancelled:
            raise cancelled

    def listen(self) -> int:
        """At a port for one receiver."""
        self._listener = _ucxx().UCXListener.create(self._new_worker(), 0, self._asked.append)
        return int(self._listener.port)

    def accept(self) -> None:
        self._until(lambda: bool(self._asked))
        self._endpoint = self._listener.create_endpoint_from_conn_request(self._asked[0], True)
        self._listener = None

    def connect(self, host: str, port: int) -> None:
        self._endpoint = _ucxx().UCXEndpoint.create(self._new_worker(), host, port, True)

    def send(self, parts: Iterator[memoryview], moved: Callable[[int], Awaitable[None]]) -> None:
        self._move("tag_send", parts, moved)

    def receive(self, parts: Iterator[memoryview], moved: Callable[[int], Awaitable[None]]) -> None:
        self._move("tag_recv", parts, moved)

    def linger(self) -> None:
        """UCX's last words to the peer may not have left yet."""
        self._until(lambda: False)

    def _new_worker(self) -> Any:
        self._worker = _ucxx().UCXWorker(self._context)
        self._worker.init_blocking_progress_mode()
        return self._worker

    def _move(self, what: str, parts: Iterator[memoryview], moved: Callable[[int], Awaitable[None]]) -> None:
        for part in parts:
            if len(self._under_way) == WINDOW:
                self._finish(moved)
            request = getattr(self._endpoint, what)(_array(part), _ucxx().UCXXTag(self._tag))
            self._under_way.append((request, part.nbytes))
            del request
        while self._under_way:
            self._finish(moved)

    def _finish(self, moved: Callable[[int], Awaitable[None]]) -> None:
        """The oldest one under way. Then until the loop knows: where that stands still, no more than a window moves."""
        self._until(lambda: self._under_way[0][0].completed)
        self._under_way[0][0].check_error()
        count = self._under_way.popleft()[1]
        asyncio.run_coroutine_threadsafe(_told(moved, count), self._loop).result()

    def _until(self, ready: Callable[[], bool]) -> None:
        while not ready():
            if self._left.is_set():
                raise TransferError("closed", "this end has left the transfer")
            if self._endpoint is not None:
                self._endpoint.raise_on_error()
            self._worker.progress_worker_event(TURN_MS)

    def _end(self) -> None:
        try:
            if self._endpoint is not None:
                self._disconnect()
        finally:
            self._under_way.clear()
            self._listener = self._endpoint = self._worker = None

    def _disconnect(self) -> None:
        self._endpoint.close_blocking(CLOSE_NS, 1)
        self._endpoint.remove_close_callback()
        for _ in range(CLOSE_TURNS):
            if not _cancelling()(self._endpoint.ucxx_ptr):
                return
            self._worker.progress_worker_event(1)


async def _told(moved: Callable[[int], Awaitable[None]], count: int) -> None:
    await moved(count)


def _translated(job: Callable[..., Any], *args: Any) -> Any:
    """UCX's own errors become the one of this contract."""
    try:
        return job(*args)
    except _ucxx().UCXError as error:
        cause = "memory" if isinstance(error, _ucxx().UCXNoMemoryError) else "closed"
        raise TransferError(cause, f"UCX says: {error or type(error).__name__}") from error


def _array(part: memoryview) -> Any:
    return importlib.import_module("ucxx._lib.arr").Array(part)


def _context() -> Any:
    features = _ucxx().Feature
    return _ucxx().UCXContext(_SETTINGS, (features.TAG, features.WAKEUP))


@functools.cache
def _ucxx() -> Any:
    """What lies below its coroutines: those share one worker for the whole process, and none could be destroyed with
    its attempt."""
    try:
        for name, value in PROCESS.items():
            os.environ.setdefault(name, value)
        importlib.import_module("libucx").load_library()  # ucxx finds it by itself only where its CUDA parts are, too
        _cancelling()
        return importlib.import_module("ucxx._lib.libucxx")
    except (ImportError, OSError, AttributeError) as error:
        raise TransferError("refused", f"ucx needs ucxx 0.52 here: {INSTALL}; or use tcp ({error})") from error


@functools.cache
def _cancelling() -> Any:
    """How many requests of an endpoint are being cancelled. ucxx drops those that are over only when it is asked, and
    its Python cannot ask: each transfer that ended in the middle then kept its worker, and 10 descriptors, for ever."""
    count = importlib.import_module("libucxx").load_library()["_ZNK4ucxx8Endpoint16getCancelingSizeEv"]
    count.argtypes, count.restype = (ctypes.c_void_p,), ctypes.c_size_t
    return count
