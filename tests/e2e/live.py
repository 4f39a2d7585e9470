"""A real deployment under traffic, for tests that break it: server, roles and harness as real processes.

Knows: how to start one, and how to wait for what its log shows. Must not know: what a test is about.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import msgspec

from consumers.reef_supervisor.deployment import Deployment, deployment
from consumers.reef_supervisor.harness import Harness, harness
from reef_bus.artifacts import ArtifactStore
from reef_bus.audit import audit_history, read_history
from reef_bus.config import Config, Publication, Training
from reef_bus.core.effects import Deadlines, Restarts
from reef_bus.core.invariants import Audit
from reef_bus.core.serving import serving
from reef_bus.core.world import World
from reef_bus.events import Recorded

CONCURRENCY, PAUSE_S = 8, 0.4  # little traffic, so that what is killed comes back at its own speed
CONFIG = Config(
    deployment="live",
    publication=Publication(
        publishers=1, deadlines=Deadlines(fence_s=8.0, sender_s=15.0, stall_s=4.0, verify_s=8.0, heartbeat_s=5.0)
    ),
    training=Training(groups=4, group_size=4),  # a release per 16 answers: tested is what happens between releases
    supervision=Restarts(max_restarts=1000, delay_s=0.1),
)


def in_mode(mode: str) -> Config:
    return msgspec.structs.replace(CONFIG, publication=msgspec.structs.replace(CONFIG.publication, mode=mode))


class Live:
    """The deployment, its client, and every event since this process began to watch."""

    def __init__(self) -> None:
        self.events: list[Recorded] = []
        self.watchers: list[Callable[[Recorded], None]] = []
        self.killed: dict[str, int] = {}
        self.running: Deployment
        self.client: Harness

    @property
    def world(self) -> World:
        return self.running.world

    def see(self, world: World, batch: Sequence[Recorded]) -> None:
        for recorded in batch:
            self.events.append(recorded)
            for watcher in list(self.watchers):
                watcher(recorded)

    async def until(self, what: str, holds: Callable[[], bool], seconds: float = 60.0) -> float:
        """Wait until `holds`; returns the seconds that it took. Fails naming `what` and the last events."""
        began = time.monotonic()
        while not holds():
            if self.running.failure.done():
                self.running.failure.result()
            if time.monotonic() - began > seconds:
                last = [f"{r.seq} {r.name} {r.writer}" for r in self.events[-12:]]
                raise AssertionError(f"{what}: not within {seconds:g} s; the log ends with {last}")
            await asyncio.sleep(0.02)
        return time.monotonic() - began

    def releases(self) -> int:
        return len(self.world.publications.releases) - 1

    def all_serve(self) -> bool:
        return len(serving(self.world)) == len(self.running.config.inference.engines)

    def whole(self) -> bool:
        """Every process runs, the log says so, and what was killed was started again: a process takes time to die."""
        components, children = self.world.components, self.running.supervisor.children
        again = all(components[name].starts > starts for name, starts in self.killed.items())
        return again and all(components[name].running and child.poll() is None for name, child in children.items())

    def kill(self, component: str) -> None:
        """SIGKILL one component, or `nats`, and remember which of its starts that was."""
        if component != "nats":
            self.killed[component] = self.world.components[component].starts
        self.running.kill(component)

    async def audit(self) -> Audit:
        history = await read_history(self.running.journal, ArtifactStore(self.running.config.artifact_root()))
        return audit_history(history)


@contextlib.asynccontextmanager
async def live(
    folder: Path,
    config: Config = CONFIG,
    *,
    traffic: bool = True,
    pause_s: float = PAUSE_S,
    before: Callable[[Live], None] | None = None,
) -> AsyncIterator[Live]:
    """Bring a deployment up in `folder`; with `traffic`, a harness asks, scores and reports all the time, and each of
    its clients rests `pause_s` in between. `before` is called when the processes are being started."""
    found = Live()
    config = msgspec.structs.replace(config, state_dir=str(folder))
    async with deployment(config, found.see) as found.running:
        if before:
            before(found)
        async with harness(found.running.url, config.model, time.time_ns()) as found.client:
            await found.until("every engine serves", found.all_serve)
            if traffic:
                found.client.start(CONCURRENCY, pause_s)
            yield found
            if error := found.client.failed():
                raise error


async def kill_at(found: Live, component: str, event: str) -> int:
    """SIGKILL the component when the event appears next; returns the event's sequence."""
    hit: list[int] = []

    def watch(recorded: Recorded) -> None:
        if not hit and recorded.name == event:
            hit.append(recorded.seq)
            found.kill(component)

    found.watchers.append(watch)
    await found.until(f"{event} appears", lambda: bool(hit))
    found.watchers.remove(watch)
    return hit[0]


async def recovered(found: Live, seq: int) -> float:
    """Wait until every process is up, every engine serves a release after `seq`, and a request is answered."""

    def holds() -> bool:
        head = found.world.publications.head
        return head is not None and head.seq > seq and found.all_serve() and found.whole()

    began = time.monotonic()
    await found.until(f"a release after {seq}, served by every engine, with every process up", holds)
    await found.client.exchange("7", {"phase": "probe"}, train=False)
    return time.monotonic() - began
