"""Blocking work for one peer in a thread of its own, while the handshake's socket tells whether that peer still lives.

Knows: one link, one thread. Must not know: what the work is, or what is sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from reef_bus.errors import TransferError
from reef_bus.transport.door import Link

_Job = tuple[asyncio.Future[Any], Callable[..., Any], tuple[Any, ...]]


class Beside:
    """Jobs in the order in which they were started, all in the same thread. From `watch` on, nothing more may be read
    from the link."""

    def __init__(self, link: Link, name: str) -> None:
        self._link, self._loop = link, asyncio.get_running_loop()
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._gone: asyncio.Task[bytes] | None = None
        # Not an executor's: Python waits for those when it ends, and a library may hold one for a whole deadline.
        threading.Thread(target=_work, args=(self._jobs, self._loop), name=name, daemon=True).start()

    def watch(self) -> None:
        """From here on the peer has nothing more to say: whatever comes from its socket is its end."""
        self._gone = self._loop.create_task(self._loop.sock_recv(self._link.sock, 1))

    def start(self, job: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = self._loop.create_future()
        future.add_done_callback(lambda done: done.cancelled() or done.exception())  # seen, also if nobody waits
        self._jobs.put((future, job, args))
        return future

    async def done(self, operation: asyncio.Future[Any], count: int = 0) -> Any:
        """Its result, unless the peer ends before. Raises TransferError. `count` bytes went one way or the other."""
        assert self._gone is not None, "watch first"
        await asyncio.wait({operation, self._gone}, return_when=asyncio.FIRST_COMPLETED)
        if not operation.done():
            raise TransferError("closed", "the peer closed in the middle")
        result = operation.result()
        await self._link.moved(count)
        return result

    async def ended(self) -> None:
        """Wait for the end of the peer."""
        assert self._gone is not None, "watch first"
        await asyncio.wait({self._gone})

    async def close(self) -> None:
        """The thread ends after what was started. When this returns, the socket may be closed: not before, because the
        loop knows it by its number, and the next socket may get that."""
        self._jobs.put(None)
        if self._gone:
            self._gone.cancel()
            await asyncio.gather(self._gone, return_exceptions=True)


def _work(jobs: SimpleQueue[_Job | None], loop: asyncio.AbstractEventLoop) -> None:
    while job := jobs.get():
        outcome = _outcome(job)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(_tell, job[0], *outcome)
        del job, outcome  # while the thread waits, it keeps nothing


def _outcome(job: _Job) -> tuple[Any, BaseException | None]:
    try:
        return job[1](*job[2]), None
    except BaseException as error:  # whoever waits decides
        return None, error


def _tell(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
