"""A log in a real server, for what is measured of reading one: filled without waiting, and received without reading.

Knows: the server's streams, the pinned client. Must not know: what is made of the events.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

from nats.aio.msg import Msg

from reef_bus.audit import History
from reef_bus.embedded import NatsServer
from reef_bus.envelope import headers, payload
from reef_bus.events import Draft, Recorded
from reef_bus.jetstream import JetStreamJournal, connect
from reef_bus.journal import LOG, RECORDS
from reef_bus.topology import compare_filter, stream_name

MEMORY = "/dev/shm"  # where there is one, the server's files: it fsyncs each event, and only reading is measured
AHEAD = 2_000  # events that the server may be behind the one that fills it


@contextlib.asynccontextmanager
async def served(history: History) -> AsyncIterator[JetStreamJournal]:
    """A server of its own on loopback, with files, that holds the history."""
    with tempfile.TemporaryDirectory(dir=MEMORY if os.path.isdir(MEMORY) else None) as folder:
        server = NatsServer(Path(folder))
        server.start()
        try:
            journal = await connect(server.url, "test", "bench")
            await journal.apply(replicas=1)
            await _fill(journal, LOG, history.log)
            await _fill(journal, RECORDS, history.records)
            yield journal
            await journal.close()
        finally:
            server.stop()


async def _fill(journal: JetStreamJournal, stream: str, events: Iterable[Recorded]) -> None:
    """With the very headers that an append has, of which those hold that the server compares. Nobody waits for
    acknowledgements; at the end, the server has all."""
    last, tails = 0, dict[str, int]()
    for recorded in events:
        last, event = recorded.seq, recorded.event
        draft = Draft(event=event, writer=recorded.writer, boot=recorded.boot, correlation=recorded.correlation)
        header = headers(draft, recorded.id, recorded.prev, recorded.subject, "2026-01-01T00:00:00.000000+00:00")
        header["Nats-Expected-Stream"] = stream_name(journal.deployment, stream)
        if stream == LOG:
            header["Nats-Expected-Last-Subject-Sequence-Subject"] = compare_filter(journal.deployment, event)
            header["Nats-Expected-Last-Subject-Sequence"] = str(tails.get(event.chain, 0))
            tails[event.chain] = last
        await journal.client.publish(recorded.subject, payload(event), headers=header)
        if last % AHEAD == 0:
            await _stored(journal, stream, last)
    await _stored(journal, stream, last)


async def _stored(journal: JetStreamJournal, stream: str, seq: int) -> None:
    await journal.client.flush()
    while await journal.head(stream) < seq:  # noqa: ASYNC110 - the server calls nobody back
        await asyncio.sleep(0.01)


async def receive_alone(journal: JetStreamJournal) -> None:
    """What the client itself costs: every message of both streams arrives, and nobody looks at it."""
    for stream in (LOG, RECORDS):
        await _receive(journal, stream, await journal.head(stream))


async def _receive(journal: JetStreamJournal, stream: str, count: int) -> None:
    done, left = asyncio.Event(), count

    async def take(message: Msg) -> None:
        nonlocal left
        left -= 1
        if not left:
            done.set()

    subscription = await journal.js.subscribe(
        ">", stream=stream_name(journal.deployment, stream), cb=take, ordered_consumer=True, pending_bytes_limit=1 << 28
    )
    await done.wait()
    await subscription.unsubscribe()
