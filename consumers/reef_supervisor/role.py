"""The supervisor of one machine: starts a deployment's processes, sees them end, starts them again within the budget.

Knows: processes that it started itself. Must not know: what any of them does. It signals nothing that it does not own.
The embedded server's own death is the one thing that the log cannot be told first: it is started again at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from reef_bus.config import Config
from reef_bus.core import supervision
from reef_bus.core.effects import Debt, Me, StartComponent
from reef_bus.core.world import World
from reef_bus.embedded import NatsServer, die_with_parent, held
from reef_bus.errors import Unavailable
from reef_bus.events import ComponentStarted, Event
from reef_bus.jetstream import JetStreamJournal
from reef_bus.journal import open_log
from reef_bus.runner import Role, blocking

log = logging.getLogger(__name__)

STOP_S = 10.0
WATCH_S = 0.05
MAX_SERVER_STARTS = 20  # of the embedded server, per supervisor: beyond, its disk or its port is broken


def components(config: Config) -> dict[str, str]:
    """Component id → role, in the order in which they are started."""
    return config.components()


class Supervisor(Role):
    """One supervisor process and the children that it owns."""

    name = "supervisor"

    def __init__(
        self, config: Config, path: Path, me: Me, extra: Mapping[str, Mapping[str, str]] | None = None
    ) -> None:
        """`path` is the configuration's file, as children read it; `extra` is more environment per component, given
        to its first process only."""
        super().__init__(me)
        self.config = config
        self.path = path
        self.extra = dict(extra or {})
        self.roles = components(config)
        self.children: dict[str, subprocess.Popen[bytes]] = {}
        self.stopping = False

    def react(self, world: World, now: int) -> Sequence[Debt]:
        if self.stopping:
            return ()
        exits = {name: child.poll() for name, child in self.children.items()}
        for name in self.roles.keys() - exits.keys():
            if held(Path(self.config.state_dir, "locks", f"{name}.lock")):
                exits[name] = None  # it runs, though not as a child of ours: neither lost nor to be started
        return supervision.supervisor(world, self.me, tuple(self.roles), exits, self.config.supervision, now)

    async def perform(self, debt: Debt, scope: contextlib.AsyncExitStack) -> Event | None:
        match debt.effect:
            case StartComponent(component=name, starts=starts):
                try:
                    return ComponentStarted(component=name, pid=self._start(name), starts=starts)
                except OSError as error:  # no process, memory or disk to be had now is no reason to end the others
                    raise Unavailable(f"cannot start {name}: {error.strerror}") from error
        raise AssertionError(debt.effect)

    def _start(self, name: str) -> int:
        command = [sys.executable, "-m", "reef_bus.cli", "run", self.roles[name], "-c", str(self.path), "--id", name]
        with (self.config.folder("logs") / f"{name}.log").open("ab") as out:
            self.children[name] = child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with_parent,
                env={**os.environ, "OMP_NUM_THREADS": "1", **self.extra.pop(name, {})},
            )
        return child.pid

    def kill(self, name: str) -> None:
        """SIGKILL a child of ours, as a crash would."""
        self.children[name].kill()

    def pids(self) -> list[int]:
        return [child.pid for child in self.children.values() if child.poll() is None]

    async def stop(self) -> None:
        """End every child in reverse order of start: ask, wait, insist."""
        self.stopping = True
        living = [child for child in reversed(self.children.values()) if child.poll() is None]
        for child in living:
            child.send_signal(signal.SIGTERM)
        for child in living:
            await blocking(_end, child)


def _end(child: subprocess.Popen[bytes]) -> None:
    try:
        child.wait(STOP_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


async def watch(server: NatsServer) -> None:
    """Keep the embedded server up: same port, same store. Raises Unavailable when it does not stay up."""
    for _ in range(MAX_SERVER_STARTS):
        while server.process is not None and server.process.poll() is None:  # noqa: ASYNC110 - a process is no event
            await asyncio.sleep(WATCH_S)
        log.warning("nats-server ended; starting it again")
        await blocking(server.start)
    raise Unavailable(f"nats-server ended {MAX_SERVER_STARTS} times; see {server.folder / 'nats.log'}")


async def prepare(config: Config, journal: JetStreamJournal) -> None:
    """Create missing streams and open the log. Raises Rejected when a stream exists and differs."""
    await journal.apply(config.nats.replicas)
    await open_log(journal, os.urandom(8).hex(), "supervisor")
