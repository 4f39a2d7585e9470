"""The supervisor of one machine: starts a deployment's processes, sees them end, cleans up, starts them again.

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
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from consumers.reef_supervisor.processes import Child
from reef_bus.config import Config
from reef_bus.core import recovery
from reef_bus.core.effects import CleanUp, Debt, Me, StartComponent
from reef_bus.core.recovery import Seen
from reef_bus.core.world import World
from reef_bus.embedded import NatsServer, die_with_parent, held
from reef_bus.errors import Unavailable
from reef_bus.events import CleanupUnconfirmed, ComponentLost, ComponentStarted, Event
from reef_bus.jetstream import JetStreamJournal
from reef_bus.journal import Beat, open_log
from reef_bus.runner import Role, blocking

log = logging.getLogger(__name__)

STOP_S = 10.0
CLEAN_UP_S = 10.0
WATCH_S = 0.05
MAX_SERVER_STARTS = 20  # of the embedded server, per supervisor: beyond, its disk or its port is broken


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
        self.roles = config.components()
        self.children: dict[str, Child] = {}
        self.stopping = False

    def react(self, world: World, now: int) -> Sequence[Debt]:
        if self.stopping:
            return ()
        seen = {name: self._see(name, role) for name, role in self.roles.items()}
        return recovery.supervisor(world, self.me, seen, self.config.supervision, now)

    def _see(self, name: str, role: str) -> Seen:
        child = self.children.get(name)
        if child and not child.reaped:
            return Seen(role=role, exit=child.poll(), owned=True, boot=child.boot, halted=child.halted)
        # What holds its lock runs, though not as a child of ours: neither lost nor to be started.
        return Seen(role=role, exit=None if held(self._lock(name)) else 0)

    def _lock(self, name: str) -> Path:
        return Path(self.config.state_dir, "locks", f"{name}.lock")

    def hear(self, beat: Beat) -> None:
        """A heartbeat of the deployment: if it is of a process of ours, that process has said who it is."""
        child = self.children.get(str(beat.get("id")))
        if child and child.pid == beat.get("pid"):
            child.boot, child.halted = str(beat.get("boot")), bool(beat.get("halted"))

    async def perform(self, debt: Debt, scope: contextlib.AsyncExitStack) -> Event | None:
        match debt.effect:
            case StartComponent(component=name, starts=starts):
                try:
                    return ComponentStarted(component=name, pid=self._start(name), starts=starts)
                except OSError as error:  # no process, memory or disk to be had now is no reason to end the others
                    raise Unavailable(f"cannot start {name}: {error.strerror}") from error
            case CleanUp(component=name):
                return await blocking(self._clean_up, name)
        raise AssertionError(debt.effect)

    def _clean_up(self, name: str) -> Event:
        child = self.children.get(name)
        if child is None:
            return self._wait_for_stranger(name)
        left = child.end(CLEAN_UP_S)
        if left:
            detail = f"they belong to process {child.pid}'s session and went on for {CLEAN_UP_S:g} s after SIGKILL"
            return CleanupUnconfirmed(component=name, pids=left, detail=detail)
        assert child.exit is not None  # it was waited for
        return ComponentLost(component=name, exit=child.exit)

    def _wait_for_stranger(self, name: str) -> Event:
        """The process was an earlier supervisor's: we signal nothing, and its lock says whether it lives."""
        lock, until = self._lock(name), time.monotonic() + CLEAN_UP_S
        while held(lock):
            if time.monotonic() >= until:
                pid = lock.read_text().strip()
                detail = f"a process that this supervisor did not start holds {lock}"
                return CleanupUnconfirmed(component=name, pids=(int(pid),) if pid.isdigit() else (), detail=detail)
            time.sleep(WATCH_S)
        return ComponentLost(component=name, exit=0, detail="its supervisor ended")

    def _start(self, name: str) -> int:
        """Start it, unless it was started already and its start is not on the log yet."""
        child = self.children.get(name)
        if child is None or child.reaped:
            child = self.children[name] = Child(self._spawn(name))
        return child.pid

    def _spawn(self, name: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "reef_bus.cli", "run", self.roles[name], "-c", str(self.path), "--id", name]
        with (self.config.folder("logs") / f"{name}.log").open("ab") as out:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with_parent,
                env={**os.environ, "OMP_NUM_THREADS": "1", **self.extra.pop(name, {})},
            )

    def kill(self, name: str) -> None:
        """SIGKILL a child of ours, as a crash would."""
        self.children[name].kill()

    def pids(self) -> list[int]:
        return [child.pid for child in self.children.values() if child.poll() is None]

    async def stop(self) -> None:
        """End every child in reverse order of start, with whatever it left behind: ask, wait, insist."""
        self.stopping = True
        children = list(reversed(self.children.values()))
        for child in children:
            child.send(signal.SIGTERM)
        for child in children:
            await blocking(_end, child)


def _end(child: Child) -> None:
    child.wait(STOP_S)
    if left := child.end(CLEAN_UP_S):
        log.error("processes %s of %s's session do not end, and stay behind", left, child.pid)


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
