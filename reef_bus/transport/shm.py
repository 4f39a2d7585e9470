"""Weights through shared memory, for engines on the sender's host: the sender writes them once, receivers map them.

Knows: anonymous segments (memfd), descriptors over a unix socket. Must not know: the log, files, or who maps what.

After the handshake the sender passes the segment's descriptor, read-only, with one byte; then the receiver copies from
its own mapping, and its closing the socket says that it reads no more. No segment has a name: whoever is killed, the
kernel frees it with its last user. Linux only.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import mmap
import os
import secrets
import socket
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import NamedTuple

from reef_bus.backends import Pieces
from reef_bus.errors import TransferError
from reef_bus.manifest import Manifest, require_fit
from reef_bus.transport import STALL_S, Offer, Ticket, Transport, transfer_errors
from reef_bus.transport.door import BACKLOG, Door, Hello, Link

SLICE_BYTES = 4 << 20
"""Copied between two looks at whether the sender is still there."""
DOOR_FULL_PAUSE_S = 0.01
"""A unix socket whose queue is full refuses at once, where TCP would wait: so receivers ask again."""
PREFIX = "reef-bus-"
"""Of addresses, which are names in Linux's abstract namespace: no file, gone with the listener."""


class ShmTransport(Transport):
    """Between processes of one host and one network namespace. `stall_s` is how long a sender waits for a handshake.

    One free segment is kept from offer to offer, because to write into memory that was never touched takes three times
    as long; and a receiver keeps its mapping, for the same reason. So a host holds one more copy of the weights, shared
    by all; a second one while a receiver that hangs holds the first. It counts as shared memory of whoever wrote it
    (the trainer's container), and no size of /dev/shm limits it."""

    name = "shm"

    def __init__(self, stall_s: float = STALL_S) -> None:
        self._stall_s = stall_s
        self._spare: Segment | None = None
        self._mapped: _Mapped | None = None

    async def offer(self, manifest: Manifest, source: Pieces, *, publication: str, attempt: int) -> Offer:
        """As the contract: when this returns, `source` has been read for the last time. Raises TransferError("memory")
        where the segment finds no room, "refused" on a system without memfd."""
        require_fit(manifest, source)
        if not hasattr(os, "memfd_create"):
            raise TransferError("refused", "shm needs Linux; set publication.transport to tcp or files")
        hello = Hello(secrets.token_urlsafe(16), publication, attempt, manifest.digest)
        with transfer_errors(f"a segment of {manifest.total} bytes"):
            segment = self._take(manifest.total)
            await _written(segment, [(entry.offset, source[entry.name].data) for entry in manifest.tensors])
        try:
            with transfer_errors("listening on a unix socket"):
                return ShmOffer(_listener(), hello, segment, manifest.total, self._stall_s, self._give_back)
        except TransferError:
            self._give_back(segment)
            raise

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
        address = _address(ticket)
        # The socket is closed last of all: that is what tells the sender that nobody reads here any more.
        with transfer_errors(f"sender {ticket.address}"), socket.socket(socket.AF_UNIX) as sock:
            async with asyncio.timeout(stall_s) as deadline:
                link = Link(sock, deadline, stall_s)
                await _connect(link, address)
                await link.enter(hello)
                with memoryview(self._map(await _descriptor(link), manifest.total)) as segment:
                    return await _copy(link, segment, manifest, target, progress)

    def _take(self, size: int) -> Segment:
        """The spare one, if it is large enough; else a new one in its place."""
        spare, self._spare = self._spare, None
        if spare is not None and spare.size >= size:
            return spare
        if spare is not None:
            spare.close()
        return Segment(size)

    def _give_back(self, segment: Segment) -> None:
        """A segment that nobody reads: the larger of two is kept."""
        spare, self._spare = self._spare, segment
        if spare is not None:
            self._spare, less = (spare, segment) if spare.size > segment.size else (segment, spare)
            less.close()

    def _map(self, descriptor: int, size: int) -> mmap.mmap:
        """The segment's memory. The mapping is kept, and the segment known again by its inode, which lives as long."""
        try:
            found = os.fstat(descriptor)
            if found.st_size < size or not _sealed(descriptor):
                raise TransferError("protocol", f"expected a sealed segment of {size} bytes, found {found.st_size}")
            if self._mapped is None or self._mapped.inode != found.st_ino:
                self._unmap()
                self._mapped = _Mapped(found.st_ino, mmap.mmap(descriptor, found.st_size, prot=mmap.PROT_READ))
            return self._mapped.memory
        finally:
            os.close(descriptor)

    def _unmap(self) -> None:
        """At once, whatever may still refer to it; but what another transfer is reading ends with that."""
        mapped, self._mapped = self._mapped, None
        if mapped is not None:
            with contextlib.suppress(BufferError):
                mapped.memory.close()


class Segment:
    """Anonymous memory of a fixed size that only this process can write. Raises OSError where there is no room."""

    def __init__(self, size: int) -> None:
        self.size = max(size, 1)  # nothing at all cannot be mapped
        self._descriptor = os.memfd_create("reef-bus", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._close = weakref.finalize(self, os.close, self._descriptor)
        fixed = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL  # a mapping of what was cut ends in SIGBUS
        os.ftruncate(self._descriptor, self.size)
        fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, fixed)

    def write(self, parts: list[tuple[int, memoryview]], left: threading.Event) -> None:
        """Blocks; stops at its next slice once `left` is set. By system calls and not through a mapping: a lack of
        memory is then an error and not SIGBUS, and other threads run meanwhile."""
        for offset, view in parts:
            rest = view
            while rest and not left.is_set():
                count = os.pwrite(self._descriptor, rest[:SLICE_BYTES], offset + len(view) - len(rest))
                rest = rest[count:]

    @contextlib.contextmanager
    def reader(self) -> Iterator[int]:
        """A descriptor that can read and nothing else."""
        descriptor = os.open(f"/proc/self/fd/{self._descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Let go of it: its memory lives on while somebody maps it. Safe to repeat; happens too when nobody refers to
        the segment any more."""
        self._close()


class ShmOffer(Offer):
    """A door, and the segment for whoever it admits. `sent_bytes` counts a segment in whole when it is handed over."""

    def __init__(
        self,
        listener: socket.socket,
        hello: Hello,
        segment: Segment,
        size: int,
        stall_s: float,
        give_back: Callable[[Segment], None],
    ) -> None:
        self._ticket = Ticket("shm", listener.getsockname()[1:].decode(), hello.token)
        self._segment: Segment | None = segment
        self._size, self._give_back = size, give_back
        self._sent = 0
        self._reading: set[socket.socket] = set()
        self._door = Door(listener, hello, stall_s, self._hand_over)

    @property
    def ticket(self) -> Ticket:
        return self._ticket

    @property
    def sent_bytes(self) -> int:
        return self._sent

    async def close(self) -> None:
        """As the contract. A segment that some receiver may still read is never written again: it is left to the
        kernel, and the next offer takes another."""
        segment, self._segment = self._segment, None
        if segment is not None:
            if all(_ended(sock) for sock in self._reading):
                self._give_back(segment)
            else:
                segment.close()
        await self._door.close()

    async def _hand_over(self, link: Link, hello: Hello) -> None:
        assert self._segment is not None, "a closed door admits nobody"
        with self._segment.reader() as descriptor:
            socket.send_fds(link.sock, [b"\0"], [descriptor])
        self._reading.add(link.sock)
        self._sent += self._size
        link.wait()  # from here on the receiver needs nothing: how slow it is delays nobody
        with contextlib.suppress(ConnectionError):
            while await asyncio.get_running_loop().sock_recv(link.sock, 1):
                pass
        self._reading.discard(link.sock)


class _Mapped(NamedTuple):
    inode: int
    memory: mmap.mmap


async def _written(segment: Segment, parts: list[tuple[int, memoryview]]) -> None:
    """Write `parts` in a thread. Cancelled, the thread stops by itself, and the segment is closed only then: a
    descriptor's number that is free goes to the next file that is opened."""
    left = threading.Event()
    call = asyncio.get_running_loop().run_in_executor(None, segment.write, parts, left)
    try:
        await asyncio.shield(call)
    except BaseException:
        left.set()
        call.add_done_callback(lambda _: segment.close())
        raise


async def _connect(link: Link, address: bytes) -> None:
    # Not sock_connect: it takes a full queue for a connection in progress, then for one that was made.
    while True:
        try:
            link.sock.connect(address)
        except BlockingIOError:
            await asyncio.sleep(DOOR_FULL_PAUSE_S)
        else:
            return await link.moved(0)


async def _descriptor(link: Link) -> int:
    """The one that the sender passes. What comes with it is closed on exec, as our own files are."""
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(link.sock, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(link.sock)
    byte, found, *_ = socket.recv_fds(link.sock, 1, 1, socket.MSG_CMSG_CLOEXEC)
    if found:
        return found[0]
    if not byte:
        raise TransferError("closed", "the sender closed before it passed its segment")
    raise TransferError("protocol", "expected a segment's descriptor, found none: is this process out of descriptors?")


def _sealed(descriptor: int) -> bool:
    """Whether it is memory that nobody can cut while it is mapped."""
    try:
        return bool(fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:  # an ordinary file
        return False


async def _copy(
    link: Link, segment: memoryview, manifest: Manifest, target: Pieces, progress: Callable[[int], None] | None
) -> int:
    """On the loop, slice by slice: no thread ever holds the target, so that nothing is left to write into it after a
    cancel. A sender that has gone, or closed its offer, ends it, as on every other transport."""
    total = 0
    for entry in manifest.tensors:
        view = target[entry.name].data
        for start in range(0, entry.nbytes, SLICE_BYTES):
            if _ended(link.sock):
                raise TransferError("closed", f"the sender closed with {manifest.total - total} bytes to come")
            end = min(start + SLICE_BYTES, entry.nbytes)
            view[start:end] = segment[entry.offset + start : entry.offset + end]
            total += end - start
            if progress is not None:
                progress(total)
            await link.moved(end - start)
    return total


def _ended(sock: socket.socket) -> bool:
    """Whether the other end is closed, or its process dead."""
    try:
        return not sock.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def _listener() -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(f"\0{PREFIX}{secrets.token_hex(8)}".encode())
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def _address(ticket: Ticket) -> bytes:
    if ticket.transport == "shm" and ticket.address.startswith(PREFIX) and len(ticket.address) <= 100:
        return f"\0{ticket.address}".encode()
    raise TransferError("protocol", f"expected a shm ticket for {PREFIX}…, found {ticket.transport} {ticket.address!r}")
