"""The four things that a journal may stand on, behind one face: two in memory, a real server, a real cluster.

Knows: how to get a fresh deployment and another client of it, and how somebody writes past the journal. Must not know:
what any test asks of them.
"""

from __future__ import annotations

import contextlib
import itertools
from abc import ABC, abstractmethod
from typing import Literal

from nats.js.errors import NotFoundError

from reef_bus.core.world import World, fold
from reef_bus.embedded import NatsServer
from reef_bus.envelope import headers, identify, payload
from reef_bus.events import Draft, Event, Recorded
from reef_bus.jetstream import JetStreamJournal, connect
from reef_bus.journal import LOG, Journal, MemoryJournal, MemoryStreams, _Message
from reef_bus.topology import FAMILIES, stream_name, subject
from tests.e2e.cluster import NatsCluster

_NUMBERS = itertools.count(1)


class Broker(ABC):
    """One deployment, and any number of clients of it. `retry`: what an append that went through is told when asked
    again."""

    retry: Literal["conflict", "duplicate"]

    def __init__(self) -> None:
        self.deployment = f"d{next(_NUMBERS)}"

    @abstractmethod
    async def open(self) -> Journal:
        """Another client."""

    @abstractmethod
    async def publish(self, where: str, header: dict[str, str], body: bytes) -> int:
        """Write past the journal, comparing nothing; returns the sequence."""

    async def close(self) -> None:
        return None

    async def slip(self, draft: Draft, prev: int) -> int:
        """Write an event of ours past the comparison; what it names as its `prev` is up to the caller."""
        return await self.publish(*message(self.deployment, draft, prev))


class InMemory(Broker):
    def __init__(self, semantics: Literal["single", "cluster"]) -> None:
        super().__init__()
        self.streams = MemoryStreams(semantics)
        self.retry = "conflict" if semantics == "single" else "duplicate"

    async def open(self) -> Journal:
        return MemoryJournal(self.streams, self.deployment)

    async def publish(self, where: str, header: dict[str, str], body: bytes) -> int:
        family = where.split(".")[2]
        chain = f"{family}.{where.split('.')[3]}" if FAMILIES[family].per_id else family
        return self.streams.store(LOG, chain, None, _Message(0, 0, where, header, body)).seq


class Served(Broker):
    """On a server, or on a cluster of them."""

    def __init__(self, servers: NatsServer | NatsCluster) -> None:
        super().__init__()
        self.servers = servers
        self.retry = "conflict" if isinstance(servers, NatsServer) else "duplicate"
        self.clients: list[JetStreamJournal] = []

    async def open(self) -> JetStreamJournal:
        found = await connect(self.servers.url, self.deployment, f"client-{len(self.clients)}")
        self.clients.append(found)
        if len(self.clients) == 1:
            await (found.apply(1) if isinstance(self.servers, NatsServer) else self.servers.ready(found))
        return found

    async def publish(self, where: str, header: dict[str, str], body: bytes) -> int:
        return (await self.clients[0].js.publish(where, body, timeout=5, headers=dict(header))).seq

    def log(self) -> str:
        return stream_name(self.deployment, LOG)

    async def close(self) -> None:
        """Let go of the streams too: on a cluster each is a group that goes on voting."""
        for name in ("RELEASES", "LOG", "RECORDS", "TELEMETRY"):
            with contextlib.suppress(NotFoundError):  # a single server that was killed forgot the one in memory
                await self.clients[0].js.delete_stream(stream_name(self.deployment, name))
        for client in self.clients:
            await client.close()


def message(deployment: str, draft: Draft, prev: int) -> tuple[str, dict[str, str], bytes]:
    """Subject, headers and body of the event, without any expectation of the broker's."""
    where, body = subject(deployment, draft.event), payload(draft.event)
    return where, headers(draft, identify(draft, prev, body), prev, where, ""), body


def draft(event: Event, boot: str = "b") -> Draft:
    return Draft(event=event, writer="w/1", boot=boot)


async def everything(journal: Journal, stream: str = LOG) -> list[Recorded]:
    """The stream as it is now, to its head."""
    head, found = await journal.head(stream), []
    if head:
        async for batch in journal.follow(stream):
            found += batch
            if found[-1].seq >= head:
                break
    return found


def verdicts(log: list[Recorded]) -> list[str]:
    """What the fold says of each event: empty where it counts."""
    world = World()
    return [fold(world, recorded) for recorded in log]


def out_of_chain(log: list[Recorded]) -> list[int]:
    """The events whose `prev` is not their chain's last stored one, found without the fold."""
    tails: dict[str, int] = {}
    wrong = []
    for recorded in log:
        if recorded.prev != tails.get(recorded.event.chain, 0):
            wrong.append(recorded.seq)
        tails[recorded.event.chain] = recorded.seq
    return wrong
