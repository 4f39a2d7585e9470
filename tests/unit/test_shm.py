"""Transport shm by itself: which segment is used again, who can write one, and what a lack of memory looks like."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import gc
import mmap
import os
import socket
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec
import pytest

from reef_bus.backends import Pieces
from reef_bus.manifest import describe
from reef_bus.transport import Offer, Ticket
from reef_bus.transport import shm as module
from reef_bus.transport.door import Answer, Hello
from reef_bus.transport.shm import ShmTransport
from tests.loop import until
from tests.transfers import BIG, PUBLICATION, fails, message, offered, pieces, receive, run, segments, works

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memfd is Linux's")


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    gc.collect()
    assert segments() == set()
    yield
    gc.collect()
    assert segments() == set()


@contextlib.asynccontextmanager
async def reader(offer: Offer, source: Pieces) -> AsyncIterator[tuple[socket.socket, int]]:
    """A receiver by hand, up to the point where it holds the segment."""
    hello = Hello(offer.ticket.token, PUBLICATION, 1, describe(source).digest)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(2)
        sock.connect(f"\0{offer.ticket.address}")
        sock.sendall(message(msgspec.json.encode(hello)))
        answer = message(msgspec.json.encode(Answer()))
        assert await asyncio.to_thread(sock.recv, len(answer)) == answer
        _, (descriptor,), *_ = await asyncio.to_thread(socket.recv_fds, sock, 1, 1)
        try:
            yield sock, descriptor
        finally:
            os.close(descriptor)


def test_a_segment_that_all_have_read_is_used_again_and_only_one_is_kept() -> None:
    async def story() -> None:
        transport, used = ShmTransport(), set()
        for fill in range(1, 4):
            await works(transport, pieces(fill))
            used |= segments()
        assert len(used) == 1
        await works(transport, pieces(4, 2000))  # fits into what is there
        assert segments() == used
        await works(transport, pieces(5, 4000))
        assert len(segments()) == 1 and segments() != used

    run(story())


def test_a_receiver_maps_a_segment_once(monkeypatch: pytest.MonkeyPatch) -> None:
    mapped, map_ = [], mmap.mmap

    def counted(*about: Any, **more: Any) -> mmap.mmap:
        mapped.append(about)
        return map_(*about, **more)

    async def story() -> None:
        sender, receiver = ShmTransport(), ShmTransport()
        for fill in range(1, 4):
            source, target = pieces(fill), pieces(0)
            async with offered(sender, source) as offer:
                await receive(receiver, offer.ticket, describe(source), target)
            assert describe(target) == describe(source)
        assert len(mapped) == 1

    with monkeypatch.context() as patch:
        patch.setattr(module.mmap, "mmap", counted)
        run(story())


def test_two_offers_at_once_have_a_segment_each_and_the_larger_is_kept() -> None:
    async def story() -> None:
        sender = ShmTransport()
        async with offered(sender, pieces(1, 5000)) as first, offered(sender, pieces(2)) as second:
            assert len(segments()) == 2
            for offer, source in ((first, pieces(1, 5000)), (second, pieces(2))):
                target = pieces(0, len(source["w"].data))
                await receive(ShmTransport(), offer.ticket, describe(source), target)
                assert describe(target) == describe(source)
        (kept,) = segments()
        async with offered(sender, pieces(3, 5000)):
            assert segments() == {kept}

    run(story())


def test_a_segment_that_somebody_may_still_read_is_never_written_again() -> None:
    async def story() -> None:
        transport, source = ShmTransport(), pieces(1)
        async with offered(transport, source) as offer, reader(offer, source) as (_, descriptor):
            await offer.close()
            await works(transport, pieces(2))
            assert os.pread(descriptor, 3008, 0) == bytes(source["b"].data) + bytes(source["w"].data)
            assert len(segments()) == 2
        assert len(segments()) == 1

    run(story())


def test_a_reader_may_take_longer_than_the_senders_deadline() -> None:
    async def story() -> None:
        source = pieces(1)
        async with offered(ShmTransport(stall_s=0.1), source) as offer, reader(offer, source) as (sock, _):
            await asyncio.sleep(0.3)
            sock.setblocking(False)
            with pytest.raises(BlockingIOError):  # open, and nothing to say
                sock.recv(1)

    run(story())


def test_a_reader_that_has_ended_gives_the_segment_back() -> None:
    async def story() -> None:
        transport, source = ShmTransport(), pieces(1)
        async with offered(transport, source) as offer, reader(offer, source) as (sock, _):
            sock.close()
            await offer.close()
            await works(transport, pieces(2))
            assert len(segments()) == 1

    run(story())


def test_who_gets_the_segment_can_read_it_and_nothing_else() -> None:
    async def story() -> None:
        source = pieces(1)
        async with offered(ShmTransport(), source) as offer, reader(offer, source) as (_, descriptor):
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.write(descriptor, b"x")
            with pytest.raises(PermissionError):
                mmap.mmap(descriptor, 8, prot=mmap.PROT_READ | mmap.PROT_WRITE)
            with pytest.raises(OSError):
                os.ftruncate(descriptor, 0)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            assert fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) == seals

    run(story())


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.ENOMEM])
def test_no_room_for_a_segment(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def full(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    async def story() -> None:
        transport, source = ShmTransport(), pieces(1)
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", full)
            said = await fails("memory", transport.offer(describe(source), source, publication=PUBLICATION, attempt=1))
            assert "a segment of 3008 bytes" in said
        await works(transport, source)

    run(story())


def test_no_room_for_a_mapping(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> mmap.mmap:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    async def story() -> None:
        transport, source, target = ShmTransport(), pieces(1), pieces(0)
        async with offered(transport, source) as offer:
            with monkeypatch.context() as patch:
                patch.setattr(module.mmap, "mmap", full)
                await fails("memory", receive(transport, offer.ticket, describe(source), target))
            assert not any(target["w"].data)
            await receive(transport, offer.ticket, describe(source), target)
        await works(transport, source)

    run(story())


def test_an_offer_cancelled_while_it_writes_stops_writing_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    written, began, may_end, write = [], threading.Event(), threading.Event(), os.pwrite

    def slow(*slice_: Any) -> int:
        written.append(slice_)
        began.set()
        assert may_end.wait(10)
        return write(*slice_)

    async def story() -> None:
        transport, source = ShmTransport(), pieces(1, BIG)
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", slow)
            offer = asyncio.create_task(transport.offer(describe(source), source, publication=PUBLICATION, attempt=1))
            await until(began.is_set)
            offer.cancel()
            with pytest.raises(asyncio.CancelledError):
                await offer
            may_end.set()
            await until(lambda: not segments())
            assert len(written) == 1  # of seven
        await works(transport, source)

    run(story())


def named(what: str) -> str:
    """An address that no other run of these tests has."""
    return f"reef-bus-{what}-{os.getpid()}"


@contextlib.asynccontextmanager
async def passing(descriptor: int | None) -> AsyncIterator[Ticket]:
    """A sender that answers well, then passes that descriptor, or none."""

    async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(int.from_bytes(await reader.readexactly(4), "big"))
        with writer.get_extra_info("socket")._sock.dup() as sock:
            sock.sendall(message(msgspec.json.encode(Answer())))
            socket.send_fds(sock, [b"\0"], [] if descriptor is None else [descriptor])
        await reader.read()
        writer.close()

    address = named("strange")
    server = await asyncio.start_unix_server(once, f"\0{address}")
    async with server:
        yield Ticket("shm", address, "")
    await asyncio.sleep(0.01)


@pytest.mark.parametrize("what", ["nothing", "a file", "a segment that is too short"])
def test_what_is_no_segment_is_not_mapped(what: str) -> None:
    async def story() -> None:
        with tempfile.TemporaryFile() as file, os.fdopen(os.memfd_create("short", os.MFD_ALLOW_SEALING)) as short:
            os.truncate(file.fileno(), 4096)
            found = {"nothing": None, "a file": file.fileno(), "a segment that is too short": short.fileno()}[what]
            async with passing(found) as ticket:
                await fails("protocol", receive(ShmTransport(), ticket, describe(pieces(1)), pieces(0)))

    run(story())


def test_a_door_with_a_full_queue_is_waited_for_and_no_longer_than_the_deadline() -> None:
    async def story() -> None:
        address = named("full")
        with contextlib.ExitStack() as stack, socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"\0{address}")
            listener.listen(0)
            with contextlib.suppress(BlockingIOError):
                while True:
                    waiting = stack.enter_context(socket.socket(socket.AF_UNIX))
                    waiting.setblocking(False)
                    waiting.connect(f"\0{address}")
            ticket = Ticket("shm", address, "")
            await fails("stalled", receive(ShmTransport(), ticket, describe(pieces(1)), pieces(0), stall_s=0.3), 1.5)

    run(story())
