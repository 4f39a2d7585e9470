"""What only real servers can show: what they refuse, what they let pass, and what the client and they were measured to
do wrong. An upgrade that changes a finding turns its test red, and the design page that stands on it is read again.

Knows: the pinned server and client. Must not know: any role.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import nats.errors
import pytest
from nats.js.errors import APIError

from reef_bus.embedded import NatsServer
from reef_bus.errors import Conflict, Unavailable
from reef_bus.jetstream import connect
from reef_bus.journal import LOG, Stored, open_log
from reef_bus.topology import compare_filter
from tests.contract.brokers import Served, draft, everything, message, out_of_chain, verdicts
from tests.contract.test_journal import began
from tests.e2e.cluster import NatsCluster, cluster
from tests.facts import joined, opened
from tests.loop import until

pytestmark = pytest.mark.integration

EXPECTED = "Nats-Expected-Last-Subject-Sequence"
RACES = 40


# -- what the streams refuse


async def test_a_full_stream_refuses_new_events_and_drops_none(served: Served) -> None:
    journal = served.clients[0]
    await journal.append(draft(opened()), 0)
    config = (await journal.js.stream_info(served.log())).config
    await journal.js.update_stream(config.evolve(max_msgs=3))
    for n in range(2):
        await journal.append(draft(joined(f"e{n}")), 0)
    with pytest.raises(Unavailable, match="full"):
        await journal.append(draft(joined("e2")), 0)
    assert [recorded.event.key for recorded in await everything(journal)] == ["_", "e0", "e1"]
    await journal.js.update_stream(config)
    assert await journal.append(draft(joined("e2")), 0) == (4, False)


async def test_deletes_and_purges_are_refused_and_stay_so(served: Served) -> None:
    journal = served.clients[0]
    await journal.append(draft(opened()), 0)
    with pytest.raises(APIError, match="delete not permitted"):
        await journal.js.delete_msg(served.log(), 1)
    with pytest.raises(APIError, match="purge not permitted"):
        await journal.js.purge_stream(served.log())
    config = (await journal.js.stream_info(served.log())).config
    for loose in (config.evolve(deny_delete=False), config.evolve(deny_purge=False)):
        with pytest.raises(APIError, match="can not cancel deny"):
            await journal.js.update_stream(loose)
    assert [recorded.seq for recorded in await everything(journal)] == [1]


# -- followers


async def test_a_follower_goes_on_when_its_consumer_was_deleted_under_it(served: Served) -> None:
    journal, seen = served.clients[0], []
    await journal.append(draft(opened()), 0)

    async def follow() -> None:
        async for batch in (await served.open()).follow(LOG):
            seen.extend(recorded.seq for recorded in batch)

    task = asyncio.create_task(follow())
    await until(lambda: seen == [1], 15.0)
    for n in range(3):
        for consumer in await journal.js.consumers_info(served.log()):
            await journal.js.delete_consumer(served.log(), consumer.name)
        await journal.append(draft(joined(f"a{n}")), 0)
        await journal.append(draft(joined(f"b{n}")), 0)
        await until(lambda n=n: len(seen) == 3 + 2 * n, 10.0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert seen == list(range(1, 8))


# -- finding 1: two spellings of a filter are not serialised against each other on a cluster


def otherwise(served: Served, spelling: str, subject: str, prev: int) -> dict[str, str]:
    """The expectation of somebody who spells the family's filter in another way, or names none."""
    if spelling == "none":
        return {}
    if spelling == "exact":
        return {EXPECTED: "0", f"{EXPECTED}-Subject": subject}
    return {EXPECTED: str(prev), f"{EXPECTED}-Subject": f"reef.{served.deployment}.deployment.*.*"}


async def race(served: Served, spelling: str, others: Sequence[NatsServer] = ()) -> int:
    """Have a foreign write and an append of ours meet; how often ours was accepted although the other came first.
    Meanwhile the `others` stand still, without whom a cluster's leader can store neither."""
    journal, prev, slipped = served.clients[0], 1, 0
    for n in range(RACES):
        where, header, body = message(served.deployment, draft(began(f"theirs-{n}"), "x"), 0)
        header |= otherwise(served, spelling, where, prev)
        with standing_still(others):
            sent = journal.client.stats["out_msgs"]
            meeting = asyncio.gather(
                served.publish(where, header, body),
                journal.append(draft(began(f"ours-{n}")), prev),
                return_exceptions=True,
            )
            await until(lambda sent=sent: journal.client.stats["out_msgs"] >= sent + 2)
            await journal.client.flush()  # the server has read both
        theirs, ours = await meeting
        assert isinstance(ours, Stored | Conflict | Unavailable), ours
        slipped += isinstance(theirs, int) and isinstance(ours, Stored) and theirs < ours.seq
        prev = await journal.head(LOG)
    return slipped


@contextlib.contextmanager
def standing_still(nodes: Sequence[NatsServer]) -> Iterator[None]:
    """For so short a time that nobody misses them."""
    running = [node.process for node in nodes if node.process]
    for process in running:
        process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for process in running:
            process.send_signal(signal.SIGCONT)


@pytest.mark.parametrize("spelling", ["none", "exact", "other"])
async def test_on_a_cluster_another_spelling_slips_in_and_the_fold_voids_what_it_broke(
    replicated: Served, spelling: str
) -> None:
    assert isinstance(replicated.servers, NatsCluster)
    await open_log(replicated.clients[0], "inc", "w")
    leader = await replicated.servers.leader(replicated.clients[0], LOG)
    replicated.clients.insert(0, await connect(leader.url, replicated.deployment, "beside-the-leader"))
    slipped = await race(replicated, spelling, [node for node in replicated.servers.nodes.values() if node != leader])
    log = await everything(replicated.clients[0])
    assert slipped > 0, "this server serialises other spellings too: read decision 2 again"
    wrong = [recorded.seq for recorded, why in zip(log, verdicts(log), strict=True) if why]
    assert wrong == out_of_chain(log)
    assert (
        sum(recorded.writer == "w/1" and recorded.boot == "b" for recorded in log if recorded.seq in wrong) == slipped
    )


@pytest.mark.parametrize("spelling", ["none", "exact", "other"])
async def test_on_a_single_server_no_spelling_slips_in(single: Served, spelling: str) -> None:
    await open_log(single.clients[0], "inc", "w")
    assert await race(single, spelling) == 0
    log = await everything(single.clients[0])
    assert [r.boot for r in log if r.seq in out_of_chain(log)] == ["x"] * len(out_of_chain(log))


async def test_the_one_spelling_is_serialised_on_both(served: Served) -> None:
    """The same race, with the filter that the table gives: whatever is accepted follows what is stored."""
    journal, prev = served.clients[0], 1
    await open_log(journal, "inc", "w")
    for n in range(RACES):
        where, header, body = message(served.deployment, draft(began(f"theirs-{n}"), "x"), prev)
        header |= {EXPECTED: str(prev), f"{EXPECTED}-Subject": compare_filter(served.deployment, began("any"))}
        await asyncio.gather(
            served.publish(where, header, body), journal.append(draft(began(f"ours-{n}")), prev), return_exceptions=True
        )
        assert await journal.head(LOG) == prev + 1
        prev += 1
    assert out_of_chain(await everything(journal)) == []


# -- findings 3 and 6: why appends are requests, one at a time


async def test_the_clients_own_async_publish_never_hears_of_a_refusal(single: Served) -> None:
    js = single.clients[0].js
    where, header, body = message(single.deployment, draft(began("c")), 9)
    future = await js.publish_async(where, body, headers=header | otherwise(single, "other", where, 9))
    await asyncio.sleep(1.5)
    assert not future.done() and js.publish_async_pending() == 1
    assert await single.clients[0].head(LOG) == 0
    future.cancel()


@pytest.fixture
async def on_disk() -> AsyncIterator[Served]:
    """With its store in the checkout: one in memory may be as fast as whoever floods it."""
    build = Path(__file__).parents[2] / "build"
    build.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=build) as folder:
        server = NatsServer(Path(folder))
        server.start()
        found = Served(server)
        try:
            await found.open()
            yield found
        finally:
            await found.close()
            server.stop()


async def test_what_nobody_acknowledges_is_dropped_at_speed_without_a_word(on_disk: Served) -> None:
    """A server holds 128 MiB of what it has not stored yet; what is sent beyond that is gone."""
    sent = 240 * 50
    await asyncio.to_thread(flood, on_disk.servers.port, f"reef.{on_disk.deployment}.operator.me.Asked", 240, 50)
    stored, before = await on_disk.clients[0].head(LOG), -1
    while stored != before:
        await asyncio.sleep(0.5)
        before, stored = stored, await on_disk.clients[0].head(LOG)
    assert 0 < stored < sent


def flood(port: int, subject: str, bursts: int, size: int) -> None:
    """Publish as fast as a socket takes it; returns when the server has read everything."""
    message = b"PUB %s 60000\r\n%s\r\n" % (subject.encode(), b"x" * 60_000)
    with socket.create_connection(("127.0.0.1", port), 30) as connection:
        connection.sendall(b'CONNECT {"verbose": false}\r\n')
        for _ in range(bursts):
            connection.sendall(message * size)
        connection.sendall(b"PING\r\n")
        said = b""
        while b"PONG" not in said:
            said = said[-8:] + connection.recv(65536)


# -- finding 2: one header wedges a replicated stream for good. Last, on a cluster that nobody needs any more


@pytest.fixture
def throw_away(tmp_path: Path) -> NatsCluster:
    with cluster(tmp_path) as found:
        yield found


async def test_a_wrong_expected_message_id_wedges_a_replicated_stream(throw_away: NatsCluster) -> None:
    journal = await connect(throw_away.url, "wedge", "w")
    other = await connect(throw_away.url, "other", "w")
    for found in (journal, other):
        await throw_away.ready(found)
        await open_log(found, "inc", "w")
    where, header, body = message("wedge", draft(began("c")), 1)
    with pytest.raises((APIError, nats.errors.TimeoutError)):
        await journal.js.publish(where, body, headers=header | {"Nats-Expected-Last-Msg-Id": "not-this"})
    for n in range(2):
        with pytest.raises(Unavailable):
            await journal.append(draft(joined(f"e{n}")), 0)
    with pytest.raises(Unavailable):
        await journal.read(LOG, 1)
    assert await other.append(draft(joined("e0")), 0) == (2, False)  # other streams keep working
    for found in (journal, other):
        await found.close()
