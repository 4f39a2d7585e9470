"""A connection that answers no more is replaced, whatever it died of; followers and listeners do not notice.

Knows: the ways in which the client was seen to stay dead for good. Must not know: which of them a deployment will meet.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import time
import warnings
from collections.abc import AsyncIterator

import msgspec
import pytest
from nats.aio.client import Client

from reef_bus import connection
from reef_bus.config import Config, Nats
from reef_bus.embedded import NatsServer
from reef_bus.errors import Unavailable
from reef_bus.inspect import reach
from reef_bus.jetstream import JetStreamJournal, connect
from reef_bus.journal import LOG, Journal, open_log
from tests.contract.brokers import Served, draft
from tests.contract.test_journal import began
from tests.facts import failed
from tests.loop import until

pytestmark = pytest.mark.integration


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "WATCH_S", 0.3)
    monkeypatch.setattr(connection, "PROBE_S", 1.0)


@pytest.fixture
async def single(server: NatsServer) -> AsyncIterator[Served]:
    """Its clients look after their connections as hastily as these tests do."""
    found = Served(server)
    await open_log(await found.open(), "inc", "w")
    yield found
    await found.close()


class Relay:
    """A way to the server that can vanish: what is on it then stays there, and no end is told."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.open: list[asyncio.Event] = []
        self.pairs: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        listener = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        try:
            yield f"nats://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        finally:
            listener.close()
            for pair in self.pairs:
                pair.cancel()
            await asyncio.gather(*self.pairs, return_exceptions=True)

    def vanish(self) -> None:
        """Every way that is open now; later ones are well."""
        for passing in self.open:
            passing.clear()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        pair = asyncio.create_task(self._pair(reader, writer))  # held: what nobody holds may be collected
        self.pairs.add(pair)

    async def _pair(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        passing = asyncio.Event()
        passing.set()
        self.open.append(passing)
        there, back = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            await asyncio.gather(_carry(reader, back, passing), _carry(there, writer, passing))
        finally:
            for end in (writer, back):
                end.transport.abort()


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, passing: asyncio.Event) -> None:
    with contextlib.suppress(OSError):
        while await passing.wait() and (data := await reader.read(65536)):
            await passing.wait()
            writer.write(data)
            await writer.drain()
    writer.close()


async def append_until_stored(journal: Journal, component: str, prev: int) -> None:
    async with asyncio.timeout(15):
        while True:
            with contextlib.suppress(Unavailable):
                await journal.append(draft(began(component)), prev)
                return
            await asyncio.sleep(0.1)


@contextlib.asynccontextmanager
async def watched(journal: Journal) -> AsyncIterator[tuple[list[int], list[object]]]:
    """What the journal's follower and its listener get meanwhile."""
    seen: list[int] = []
    heard: list[object] = []

    async def follow() -> None:
        async for batch in journal.follow(LOG):
            seen.extend(recorded.seq for recorded in batch)

    await journal.beats(heard.append)
    task = asyncio.create_task(follow())
    await until(lambda: seen == [1], 15.0)
    yield seen, heard
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def goes_on(
    journal: JetStreamJournal, before: Client | None, other: Journal, seen: list[int], heard: list[object]
) -> None:
    """Appends, follows and listens as before, over another connection than `before`."""
    await append_until_stored(journal, "after", 1)
    assert journal.client is not before
    await until(lambda: seen == [1, 2], 15.0)
    heard.clear()
    async with asyncio.timeout(15):
        while not heard:  # a beat may be lost
            await other.beat("engine", "e0", {"n": 1})
            await asyncio.sleep(0.05)
    assert heard[0] == {"n": 1}


async def test_of_several_servers_the_first_that_answers_is_used(single: Served) -> None:
    urls = f"nats://127.0.0.1:1,{single.servers.url}"
    journal = await reach(Config(deployment=single.deployment, nats=Nats(url=urls)))
    assert await journal.head(LOG) == 1
    await journal.close()


async def test_a_client_that_a_server_dismissed_is_replaced(single: Served) -> None:
    """One error line closes the client for good: here for a command line that is too long."""
    journal = await single.open()
    async with watched(journal) as (seen, heard):
        before = journal.client
        await before.publish("x" * 5_000)
        await until(lambda: before.is_closed, 15.0)
        await goes_on(journal, before, single.clients[0], seen, heard)


async def test_a_peer_that_vanished_with_bytes_on_their_way_is_replaced(single: Served) -> None:
    """The client waits for its old socket to close, which waits for the peer to take what is still to be sent."""
    relay = Relay(single.servers.port)
    async with relay.listening() as url:
        journal = await connect(url, single.deployment, "far")
        async with watched(journal) as (seen, heard):
            before = journal.client
            relay.vanish()
            heavy = msgspec.structs.replace(failed("e0", 1), detail="x" * 60_000)
            lost = [journal.append(draft(heavy, f"b{n}"), 0) for n in range(150)]
            outcomes = await asyncio.gather(*lost, return_exceptions=True)
            assert {type(outcome) for outcome in outcomes} == {Unavailable}
            await goes_on(journal, before, single.clients[0], seen, heard)
        await journal.close()


async def test_a_server_that_stood_still_leaves_no_deaf_client_behind(single: Served) -> None:
    """The answer to a ping that nobody awaits any more would end the client's read loop, 'connected' as it is."""
    journal = await single.open()
    async with watched(journal) as (seen, heard):
        await stands_still(single.servers, 3.0)
        await goes_on(journal, None, single.clients[0], seen, heard)


async def test_a_connection_that_brings_events_is_not_asked(single: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a long replay the answer stands behind all the events: the connection was replaced again and again."""
    monkeypatch.setattr(connection, "PROBE_S", 0.0)  # whoever is asked fails
    monkeypatch.setattr(connection, "WATCH_S", 1.0)  # an append may take a while, and has to come within it
    writer, journal = single.clients[0], await single.open()
    async with watched(journal) as (seen, _):
        before = journal.client
        for n in range(30):
            await writer.append(draft(began("c", n)), n + 1)
            await asyncio.sleep(connection.WATCH_S / 10)
        await until(lambda: len(seen) == 31, 15.0)
        assert journal.client is before


async def test_a_connection_that_answers_is_left_alone(single: Served) -> None:
    journal = await single.open()
    before = journal.client
    await asyncio.sleep(4 * connection.WATCH_S)
    assert journal.client is before and journal.connected()


async def test_following_again_and_again_leaves_nothing_behind(single: Served) -> None:
    journal = await single.open()
    await anext(follower := journal.follow(LOG))
    await follower.aclose()
    await asyncio.sleep(0.1)
    before = len(asyncio.all_tasks())
    for _ in range(5):
        await anext(follower := journal.follow(LOG))
        await follower.aclose()
    await until(lambda: len(asyncio.all_tasks()) <= before)


async def test_a_follower_that_is_cancelled_ends_whatever_it_waits_for(single: Served) -> None:
    """Python 3.11's `wait_for` swallows a cancellation that comes together with the answer: 15 of 400 went on."""
    journal = await single.open()

    async def follow() -> None:
        async for _ in journal.follow(LOG):
            pass

    for n in range(150):
        task = asyncio.create_task(follow())
        for _ in range(n % 40):
            await asyncio.sleep(0)
        time.sleep(0.002)  # noqa: ASYNC251 - so that what is waited for is there when the loop looks
        task.cancel()
        ended, _ = await asyncio.wait({task}, timeout=2.0)
        assert ended, f"the {n}th follower goes on"


async def test_whoever_finds_no_server_gives_up_in_time_though_the_client_swallows_a_cancellation() -> None:
    """Where something listens and closes at once, 3 to 5 of 60 tried for ever, if they were cancelled only once."""

    async def close(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async def gives_up(url: str, wait_s: float) -> None:
        with pytest.raises(Unavailable, match="no NATS server"):
            await connect(url, "d", "c", wait_s=wait_s)

    with warnings.catch_warnings():  # the client leaves a socket that it had just opened to whoever collects it
        warnings.simplefilter("ignore", ResourceWarning)
        async with await asyncio.start_server(close, "127.0.0.1", 0) as nobody:
            url = f"nats://127.0.0.1:{nobody.sockets[0].getsockname()[1]}"
            for _ in range(5):
                tries = {asyncio.create_task(gives_up(url, 0.3 + n / 1000)) for n in range(60)}
                ended, left = await asyncio.wait(tries, timeout=15)
                for task in left:
                    task.cancel()
                assert not left, f"{len(left)} of {len(tries)} try for ever"
                for task in ended:
                    task.result()
        gc.collect()


async def stands_still(server: NatsServer, seconds: float) -> None:
    """A machine that was suspended: nothing is lost, nothing is answered."""
    assert server.process
    server.process.send_signal(signal.SIGSTOP)
    try:
        await asyncio.sleep(seconds)
    finally:
        server.process.send_signal(signal.SIGCONT)
