"""The processes of one pattern on this machine: started, supervised, told to update, and told when to die.

Knows: processes and their routes. Must not know: what is measured. Whatever ends is started again after RESTART_S, as
a supervisor would; actors are Ray's to restart. Processes are forked from one that has imported torch already: a
loaded machine takes longer for that than any step of a pattern may take, and the patterns are not to blame for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import psutil

from tests.bench.baselines.patterns import RECEIVERS, Pattern
from tests.bench.baselines.process import HOST, POLL_S, START_S, STEP_S, Json, Peers, connection
from tests.bench.baselines.weights import trained

FORKS = multiprocessing.get_context("forkserver")
RESTART_S = 0.1  # as the deployment that is compared with these


def play(module: str, role: str, told: Json, log: Path) -> None:
    """What a process of a pattern does until it is killed. Its words of failures go to a log: they are no report."""
    with log.open("ab", buffering=0) as out:
        os.dup2(out.fileno(), sys.stdout.fileno())
        os.dup2(out.fileno(), sys.stderr.fileno())
    asyncio.run(importlib.import_module(module).ROLES[role](told))


class Fleet:
    """Two receivers and what updates them."""

    def __init__(self, pattern: Pattern, folder: Path, peers: Peers, log: Path, ray: str) -> None:
        self.pattern, self.folder, self.peers, self.log, self.ray = pattern, folder, peers, log, ray
        self.ports = dict(zip((*RECEIVERS, *pattern.processes), free_ports(len(RECEIVERS) + 2), strict=False))
        self.children: dict[str, ForkServerProcess] = {}

    # -- processes

    def launch(self, name: str) -> None:
        told = {
            "port": self.ports[name],
            "receivers": [self.ports[receiver] for receiver in RECEIVERS],
            "coordinator": self.ports.get("coordinator"),
            "folder": str(self.folder / "checkpoints"),
            "batches": str(self.folder / "batches"),
            "ray": self.ray,
        }
        module = f"tests.bench.baselines.{self.pattern.name}"
        role = "receiver" if name in RECEIVERS else name
        self.children[name] = FORKS.Process(target=play, args=(module, role, told, self.log))
        self.children[name].start()

    async def start(self) -> None:
        for part in ("checkpoints", "batches"):
            (self.folder / part).mkdir()
        receivers = () if self.pattern.ray else RECEIVERS
        for names in (receivers, self.pattern.processes):
            for name in names:
                self.launch(name)
            await asyncio.wait_for(self.peers.up(self.ports[name] for name in names), START_S)

    async def supervise(self) -> None:
        while True:
            for name in [name for name, child in self.children.items() if not child.is_alive()]:
                await asyncio.sleep(RESTART_S)
                self.launch(name)
            await asyncio.sleep(POLL_S / 2)

    def stop(self) -> None:
        for child in self.children.values():
            child.kill()
            child.join()

    async def kill(self, name: str) -> None:
        """SIGKILL by hand; the supervisor, or Ray, starts it again."""
        found = self.children.get(name)
        if found:
            found.kill()
        else:
            os.kill((await self.peers.call(self.ports[name], "/state"))["pid"], signal.SIGKILL)

    # -- updates

    async def arm(self, name: str, point: str) -> Path:
        """`name` will kill itself at `point`; returns the file that will then say when."""
        note = self.folder / f"killed-{time.monotonic_ns()}"
        relayed = self.pattern.ray and name == "trainer"
        port = self.ports["coordinator" if relayed else name]
        await self.peers.call(port, "/moment-of-trainer" if relayed else "/moment", point=point, note=str(note))
        return note

    async def go(self) -> None:
        await self.peers.call(self.ports[self.pattern.go], "/go")

    async def versions(self) -> list[int] | None:
        """What each updater has got to; None while one of them works, or is away."""
        found = await self.peers.everyone_who_can((self.ports[name] for name in self.pattern.processes), "/state")
        states: list[Json] = [each for each in found if isinstance(each, dict) and each["idle"]]
        return [state["version"] for state in states] if len(states) == len(found) else None

    def trained(self) -> list[str]:
        return trained(self.folder / "checkpoints")


@contextlib.asynccontextmanager
async def fleet(pattern: Pattern, folder: Path, log: Path) -> AsyncIterator[Fleet]:
    """A running fleet; every process of it ends with the context."""
    FORKS.set_forkserver_preload([__name__, *(f"tests.bench.baselines.{name}" for name in ("broadcast", "disk"))])
    async with contextlib.AsyncExitStack() as stack:
        ray = stack.enter_context(ray_head(log)) if pattern.ray else ""
        peers = Peers(await stack.enter_async_context(connection()))
        found = Fleet(pattern, folder, peers, log, ray)
        stack.callback(found.stop)
        await found.start()
        task = asyncio.create_task(found.supervise())
        stack.push_async_callback(ended, task)
        yield found


async def ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@contextlib.contextmanager
def ray_head(log: Path) -> Iterator[str]:
    """A Ray node of our own, which outlives its driver as a cluster does; yields its address."""
    (port,) = free_ports(1)
    folder = tempfile.TemporaryDirectory(prefix="reef-ray-", ignore_cleanup_errors=True)  # short, for its sockets
    options = ["--head", "--block", f"--node-ip-address={HOST}", f"--port={port}", "--num-cpus=4"]
    options += [
        "--include-dashboard=false",
        "--disable-usage-stats",
        f"--temp-dir={folder.name}",
        f"--object-store-memory={128 * 1024 * 1024}",
    ]
    with log.open("ab") as out:
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", *options]
        head = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)
    try:
        _wait_for(port, head)
        yield f"{HOST}:{port}"
    finally:
        family = [psutil.Process(head.pid), *psutil.Process(head.pid).children(recursive=True)]
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        head.wait()
        psutil.wait_procs(family, timeout=STEP_S)
        folder.cleanup()


def _wait_for(port: int, head: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + START_S
    while head.poll() is None and time.monotonic() < until:
        with contextlib.suppress(OSError), socket.create_connection((HOST, port), 1):
            return
        time.sleep(POLL_S)
    raise RuntimeError(f"ray start: nothing on port {port}; exit status {head.poll()}")


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind((HOST, 0))
        return [probe.getsockname()[1] for probe in probes]
