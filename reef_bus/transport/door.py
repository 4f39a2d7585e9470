"""Memory that fills from its beginning, and a door at which others take what is there already.

Knows: byte positions in the canonical stream, listeners. Must not know: how what it holds came there.
A sender's memory is full from the first moment; a receiver's fills while others already take from it.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

from msgspec.structs import replace

from reef_bus.errors import TransferError
from reef_bus.transport import transfer_errors
from reef_bus.transport.link import Answer, Hello, Link, judge

SLICE_BYTES = 4 << 20
"""Sent as one unit of progress. sock_sendall tells nothing on its way, so that a slice must fit any usable link's
deadline: 4 MiB in 10 s is 0.4 MB/s."""
BACKLOG = 128
"""Receivers of one attempt that may wait to be accepted."""
ACCEPT_PAUSE_S = 0.1
"""How long a sender that ran out of descriptors waits before it accepts again."""

_logger = logging.getLogger(__name__)


class Held:
    """The tensors' memory, one behind the other; the first `have` of its `total` bytes are there."""

    def __init__(self, views: Sequence[memoryview], *, full: bool = False, have: int = 0) -> None:
        self._views = [view for view in views if view.nbytes]
        self._ends = list(accumulate(view.nbytes for view in self._views))
        self.total = self._ends[-1] if self._ends else 0
        self.have = self.total if full else have
        self._over = full
        self._moved = asyncio.Event()

    def grow(self, count: int) -> None:
        self.have += count
        self._wake()

    def end(self) -> None:
        """No more will come."""
        self._over = True
        self._wake()

    def _wake(self) -> None:
        self._moved.set()
        self._moved = asyncio.Event()

    async def beyond(self, place: int, link: Link) -> int:
        """Wait until there are more than `place` bytes; returns how many. Raises TransferError if there never will."""
        while self.have <= place:
            if self._over:
                raise TransferError("closed", f"here it ends after {self.have} of {self.total} bytes")
            link.wait()
            await self._moved.wait()
        return self.have

    def parts(self, start: int, stop: int) -> Iterator[memoryview]:
        """The memory between two places, in slices."""
        number = bisect_right(self._ends, start)
        while start < stop:
            view, end = self._views[number], self._ends[number]
            first = start - (end - view.nbytes)
            part = view[first : min(first + SLICE_BYTES, first + stop - start)]
            start += part.nbytes
            number += start == end
            yield part


class Door:
    """A listener, and one task per receiver that came. `host`: the address on which it listens."""

    def __init__(self, host: str, hello: Hello, held: Held, stall_s: float, *, passes_on: bool) -> None:
        """`passes_on`: who comes second is told to take it from the first, and so on, as long as they serve."""
        with transfer_errors(f"listening on {host}"):
            self._listener = socket.create_server((host, 0), family=family(host), backlog=BACKLOG)
        self._hello, self._held, self._stall_s, self._passes_on = hello, held, stall_s, passes_on
        self.address = "{}:{}".format(*self._listener.getsockname()[:2])
        self.sent = 0
        self._last = ""  # where the last receiver serves
        self._serving: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._listener.setblocking(False)
        self._open()

    async def close(self) -> None:
        """End everything."""
        self.admit_nobody()
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    def admit_nobody(self) -> None:
        """Who is in gets the rest of it."""
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
        task = self._loop.create_task(self._serve(sock, f"receiver {peer[0]}:{peer[1]}"))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)
        # Closed here and not in the task: one that is cancelled before its first step never runs its own clean-up.
        task.add_done_callback(lambda _: sock.close())

    async def _serve(self, sock: socket.socket, peer: str) -> None:
        try:
            with transfer_errors(peer):
                async with asyncio.timeout(self._stall_s) as deadline:
                    link = Link(sock, (deadline, self._stall_s))
                    hello = await link.hear(Hello)
                    answer = self._answer(hello)
                    await link.say(answer)
                    if not answer.cause and not answer.take:
                        await self._send(link, hello.after)
        except TransferError as error:
            _logger.info("attempt %d of %s: %s", self._hello.attempt, self._hello.publication, error)

    def _answer(self, hello: Hello) -> Answer:
        answer = judge(hello, self._hello)
        if answer.cause or not self._passes_on or not hello.serves:
            return answer
        before, self._last = self._last, hello.serves
        return answer if hello.direct else replace(answer, take=before)

    async def _send(self, link: Link, place: int) -> None:
        while place < self._held.total:
            for part in self._held.parts(place, await self._held.beyond(place, link)):
                await link.send(part)
                self.sent += part.nbytes
                place += part.nbytes


def family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
