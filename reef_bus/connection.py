"""A connection to NATS that comes back, whatever it died of: what the client does not do by itself.

Knows: the pinned client and how it dies. Must not know: streams, or what anybody asks over it.
No call on it hangs: what it asks ends by its own timeout, or when the connection is lost; a dead one is replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine
from functools import lru_cache
from typing import Any, TypeVar

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext

from reef_bus.errors import Unavailable

log = logging.getLogger(__name__)
T = TypeVar("T")

TIMEOUT_S = 2.0
WATCH_S = 5.0  # between two looks at a connection
PROBE_S = 5.0  # within which it must answer
CLOSE_S = 2.0
AGAIN_S = 0.1  # after which a cancellation that had no effect counts as swallowed
_LONG_S = 3600  # longer than a client is kept that does not answer


class QuickClient(Client):
    """The pinned client, with its parser of headers replaced by one that gives the same.

    Its own asks every character of every header's name whether it is white space, which was half of what it costs to
    read a log (measured); a log's names are always the same dozen.
    """

    @staticmethod
    def _parse_header_lines(raw: bytes) -> dict[str, str]:
        found = {}
        for line in raw.split(b"\r\n"):
            before, colon, value = line.partition(b":")
            if colon and (name := _header_name(before)) is not None:
                found[name] = value.strip().decode("utf-8", "replace")
        return found


@lru_cache(maxsize=1024)
def _header_name(raw: bytes) -> str | None:
    """None for what is no name: such a line is left out."""
    name = raw.strip().decode("ascii", "replace")
    return None if "\N{REPLACEMENT CHARACTER}" in name or any(map(str.isspace, name)) else name


class Connection:
    """One connection at a time, over `client`; one that answers no more is replaced, with its listeners."""

    def __init__(self, url: str, name: str) -> None:
        self.url, self.name = url, name
        self.client = Client()
        self.js: JetStreamContext = self.client.jetstream(timeout=TIMEOUT_S)
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._listeners: list[tuple[str, Callable[[Msg], Awaitable[None]]]] = []
        self._asked: set[asyncio.Future[Any]] = set()
        self._ping: asyncio.Future[None] | None = None
        self._watching: asyncio.Task[None] | None = None

    async def open(self, wait_s: float) -> None:
        """Connect, and from then on watch that the connection answers. Raises Unavailable."""
        await self._use(await self._dial(wait_s))
        self._watching = asyncio.create_task(self._watch())

    async def ask(self, request: Awaitable[T]) -> T:
        """The answer, or Unavailable as soon as the connection is lost: the client itself would sit out the timeout.

        The request is left to end by its own timeout, never cancelled. The client's flusher dies, and the connection
        with it, of a future that was cancelled while a reconnect was under way; and a cancellation that comes together
        with the answer would be swallowed (`asyncio.wait_for` of Python 3.11): a role asked to stop would not.
        """
        asked = self.keep(asyncio.ensure_future(request))
        either: set[asyncio.Future[Any]] = {asked, self.lost}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if asked.done():
            return asked.result()
        raise Unavailable("the connection was lost before an answer came")

    def keep(self, asked: asyncio.Future[T]) -> asyncio.Future[T]:
        """Let it run to its end, or until `close`, although nobody waits for it."""
        self._asked.add(asked)
        asked.add_done_callback(self._answered)
        return asked

    def _answered(self, asked: asyncio.Future[Any]) -> None:
        self._asked.discard(asked)
        if not asked.cancelled():
            asked.exception()  # somebody has looked at it

    async def listen(self, subject: str, callback: Callable[[Msg], Awaitable[None]]) -> None:
        self._listeners.append((subject, callback))
        with contextlib.suppress(nats.errors.ConnectionClosedError):  # then the next connection listens
            await self.client.subscribe(subject, cb=callback)

    async def close(self) -> None:
        """Let go of it; safe to repeat. Nothing that was asked goes on."""
        await _cancel(self._watching)
        await _end(self.client)
        await _cancel(self._ping, *self._asked)  # now that no flusher is left to die of it

    async def _watch(self) -> None:
        """The client comes back by itself when its server died, but not from everything: one error line of a server
        closes it for good; a peer that vanished with bytes on their way leaves it waiting for its old socket; an
        exception in its read loop leaves it deaf."""
        while True:
            heard = self.client.stats["in_msgs"]
            await asyncio.sleep(WATCH_S)
            if self.client.stats["in_msgs"] == heard and not await self._answers():
                with contextlib.suppress(Unavailable):
                    await self._replace()

    async def _answers(self) -> bool:
        """Asked only of one that is silent: under a replay an answer would stand behind megabytes of events."""
        if self._ping is None or self._ping.done():
            self._ping = asyncio.ensure_future(_ping(self.client))
        await asyncio.wait({self._ping}, timeout=PROBE_S)
        return self._ping.done() and self._ping.exception() is None

    async def _replace(self) -> None:
        old, ping = self.client, self._ping
        await self._use(await self._dial(PROBE_S))
        log.warning("%s: the connection did not answer within %g s and was replaced", self.name, PROBE_S)
        await _end(old)
        await _cancel(ping)
        self._ping = None

    async def _use(self, client: Client) -> None:
        self.client, self.js = client, client.jetstream(timeout=TIMEOUT_S)
        for subject, callback in self._listeners:
            await client.subscribe(subject, cb=callback)
        await self._on_lost()

    async def _on_lost(self) -> None:
        """What is in flight will not be answered."""
        lost, self.lost = self.lost, asyncio.get_running_loop().create_future()
        lost.set_result(None)

    async def _dial(self, wait_s: float) -> Client:
        errors: list[str] = []

        async def on_error(error: Exception) -> None:
            errors[:] = [str(error) or type(error).__name__]
            log.debug("nats: %s", errors[0])

        client = QuickClient()
        connecting = client.connect(  # for ever, as it must once it is connected
            self.url.split(","),
            name=self.name,
            error_cb=on_error,
            disconnected_cb=self._on_lost,
            connect_timeout=2,
            max_reconnect_attempts=-1,
            reconnect_time_wait=0.1,  # type: ignore[arg-type]  # seconds, of which it sleeps any number
            ping_interval=10,
            flush_timeout=TIMEOUT_S,  # else a full buffer holds its writer for as long as the connection
        )
        try:
            await _within(wait_s, connecting)
        except (TimeoutError, OSError, nats.errors.Error) as error:
            await _end(client)
            why = errors[0] if errors else str(error) or type(error).__name__
            raise Unavailable(f"no NATS server at {self.url}: {why}. Is it running? `reef-bus doctor` looks") from error
        return client


async def _ping(client: Client) -> None:
    """Ends when the client is connected and its server answers. Not to be cancelled while the client lives: the answer
    to a ping that nobody awaits any more ends its read loop."""
    while not client.is_connected and not client.is_closed:  # noqa: ASYNC110 - the client has no such event
        await asyncio.sleep(0.1)
    await client.rtt(_LONG_S)


async def _end(client: Client) -> None:
    """Let go of it, even when its socket does not: a peer that vanished never takes what is still to be sent."""
    with contextlib.suppress(Exception):
        await _within(CLOSE_S, client.close())


async def _within(seconds: float, doing: Coroutine[Any, Any, T]) -> T:
    """Raises TimeoutError. `asyncio.timeout` cancels once, and the client's own `wait_for` may swallow that."""
    task = asyncio.create_task(doing)
    try:
        await asyncio.wait({task}, timeout=seconds)
        if task.done():
            return task.result()
        raise TimeoutError
    finally:
        await _cancel(task)


async def _cancel(*tasks: asyncio.Future[Any] | None) -> None:
    there = {task for task in tasks if task}
    while running := {task for task in there if not task.done()}:
        for task in running:
            task.cancel()
        await asyncio.wait(running, timeout=AGAIN_S)
    await asyncio.gather(*there, return_exceptions=True)  # seen: nobody asks for what they raised
