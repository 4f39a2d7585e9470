"""Three nats-servers on loopback that replicate as a production cluster does: what a leader's death is tried on.

Knows: how servers find each other, and which of them leads a stream. Must not know: events, or what a test is about.
Every node has a store and a fixed port of its own; the kernel ends all of them with the process that started them.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from collections.abc import Iterator
from pathlib import Path

from reef_bus.embedded import NatsServer
from reef_bus.errors import Unavailable
from reef_bus.jetstream import JetStreamJournal
from reef_bus.topology import stream_name

SIZE = 3
READY_S = 30.0
PORTS = (20_000, 32_000)


class NatsCluster:
    """`nodes` by name. A node that was killed comes back with `start`, on its port and with its store."""

    def __init__(self, folder: Path) -> None:
        clients, routes = free_ports(SIZE), free_ports(SIZE)
        peers = ", ".join(f'"nats-route://127.0.0.1:{port}"' for port in routes)
        self.nodes = {
            f"n{n}": NatsServer(
                folder / f"n{n}",
                clients[n],
                name=f"n{n}",
                more=f'cluster {{ name: reef, listen: "127.0.0.1:{routes[n]}", routes: [{peers}] }}\n',
            )
            for n in range(SIZE)
        }

    @property
    def url(self) -> str:
        return ",".join(node.url for node in self.nodes.values())

    def start(self) -> None:
        for node in self.nodes.values():
            node.start()

    def stop(self) -> None:
        for node in self.nodes.values():
            with contextlib.suppress(ProcessLookupError):
                node.kill()
            node.stop()

    async def ready(self, journal: JetStreamJournal) -> None:
        """Create the deployment's streams, as soon as the nodes have elected who may."""
        async with asyncio.timeout(READY_S):
            while True:
                with contextlib.suppress(Unavailable):
                    await journal.apply(len(self.nodes))
                    return
                await asyncio.sleep(0.1)

    async def leader(self, journal: JetStreamJournal, stream: str) -> NatsServer:
        """The node that leads the stream now; waits for an election to end."""
        async with asyncio.timeout(READY_S):
            while True:
                with contextlib.suppress(Unavailable):
                    await journal.head(stream)  # which only a leader answers
                    info = await journal.js.stream_info(stream_name(journal.deployment, stream))
                    if info.cluster and info.cluster.leader in self.nodes:
                        return self.nodes[info.cluster.leader]
                await asyncio.sleep(0.1)


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[NatsCluster]:
    found = NatsCluster(folder)
    try:
        found.start()
        yield found
    finally:
        found.stop()


def free_ports(count: int) -> list[int]:
    """Ports of loopback that nobody has, below those that the system hands out: a server that is away for a moment
    finds its own again, and no client of it can meet itself there."""
    with contextlib.ExitStack() as stack:
        found: list[int] = []
        while len(found) < count:
            port = random.randrange(*PORTS)
            with contextlib.suppress(OSError):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
                found.append(port)
        return found
