"""A deployment of `reef-bus up` under traffic, any process of which can be hit, its supervisor and servers too.

Knows: which process is which, and what systemd would do about one that ended. Must not know: what is tried on it.
Its own journal and fold tell what the log shows; nothing of the deployment is asked.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from consumers.reef_supervisor.harness import Harness, Scored, harness
from reef_bus.artifacts import ArtifactStore
from reef_bus.audit import History, read_history
from reef_bus.config import Config, Gateway, Nats, Publication, Training, check, dump
from reef_bus.core.effects import Deadlines, Restarts
from reef_bus.core.serving import serving
from reef_bus.core.world import World, fold
from reef_bus.embedded import NatsServer, die_with_parent
from reef_bus.errors import ContractError, Unavailable
from reef_bus.events import ComponentStarted, Draft, OperatorEvent, Recorded, RecoveryResumeRequested
from reef_bus.jetstream import JetStreamJournal, connect
from reef_bus.journal import LOG
from reef_bus.runner import blocking
from tests.e2e.cluster import NatsCluster, free_ports

DEADLINES = Deadlines(fence_s=2.0, sender_s=3.0, stall_s=1.5, verify_s=2.0, heartbeat_s=2.0)
CONCURRENCY, PAUSE_S = 4, 0.4  # about ten answers, and so about a release, a second
RESTART_S, STARTS, WITHIN_S = 0.1, 5, 10.0  # systemd's RestartSec, StartLimitBurst and StartLimitIntervalSec
UNTIL_S = 120.0
STOP_S = 20.0
POLL_S = 0.02
PROC = Path("/proc")


Kind = Literal["single", "staged", "cluster"]
"""Of a deployment: fenced releases or staged ones on a single server, or fenced ones on a cluster of three."""


class Gone(Exception):
    """The process to be hit is not there, or is not ours."""


class Victim:
    """One process under `parent`, by a handle: once it is gone, no signal reaches whoever has its pid then."""

    def __init__(self, pid: int, parent: int) -> None:
        try:
            self._handle = os.pidfd_open(pid)
        except OSError as error:
            raise Gone(f"process {pid}") from error
        self.pid = pid
        state, found = _stat(pid)
        if found != parent or state in "ZX":
            self.close()
            raise Gone(f"process {pid}: {state}, child of {found}, expected of {parent}")

    def send(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, number)

    def close(self) -> None:
        os.close(self._handle)


def _stat(pid: int) -> tuple[str, int]:
    """State and parent of a process."""
    try:
        state, parent = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return "X", 0
    return state, int(parent)


class Unit:
    """A process that is started again whenever it ends. `beyond` counts what systemd would have left to a person."""

    def __init__(self, name: str, start: Callable[[], subprocess.Popen[bytes]]) -> None:
        self.name = name
        self._start = start
        self._starts: collections.deque[float] = collections.deque(maxlen=STARTS)
        self.beyond = 0
        self.process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        now = time.monotonic()
        if len(self._starts) == STARTS and now - self._starts[0] < WITHIN_S:
            self.beyond += 1
        self._starts.append(now)
        self.process = await blocking(self._start)

    async def keep(self) -> None:
        """Start it, and again for ever."""
        while True:
            with contextlib.suppress(Unavailable):
                await self.start()
            while self.process is not None and self.process.poll() is None:  # noqa: ASYNC110 - a process is no event
                await asyncio.sleep(POLL_S)
            await asyncio.sleep(RESTART_S)

    def stop(self) -> None:
        """Ask it to end, then make it end."""
        if self.process is None or self.process.poll() is not None:
            return
        self.process.send_signal(signal.SIGCONT)
        self.process.terminate()
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Rig:
    """The deployment, its client, and a fold of its log that is nobody else's."""

    def __init__(self, config: Config, servers: Mapping[str, NatsServer]) -> None:
        self.config = config
        self.servers = {name: Unit(name, _starter(server)) for name, server in servers.items()}
        self.up = Unit("supervisor", self._spawn)
        self.world = World()
        self.pids: dict[str, int] = {}
        self.last: collections.deque[Recorded] = collections.deque(maxlen=40)
        self.watchers: list[Callable[[Recorded], None]] = []
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.resumed = 0
        self.journal: JetStreamJournal
        self.client: Harness

    # -- processes

    def _spawn(self) -> subprocess.Popen[bytes]:
        folder = Path(self.config.state_dir)
        command = [sys.executable, "-m", "reef_bus.cli", "up", "-c", str(folder / "up.json"), "--json"]
        with (folder / "up.log").open("ab") as out:
            return subprocess.Popen(
                ["nice", "-n", "5", *command],  # so that a signal lands soon after its event
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=out,
                preexec_fn=die_with_parent,
            )

    def victim(self, name: str) -> Victim:
        """The process of a component, of the supervisor, or of a server. Raises Gone."""
        unit = self.up if name == "supervisor" else self.servers.get(name)
        if unit is not None:
            return Victim(_pid(unit), os.getpid())
        return Victim(self.pids.get(name, 0), _pid(self.up))

    async def kill(self, name: str) -> None:
        """SIGKILL, as soon as there is something to kill."""
        while True:
            with contextlib.suppress(Gone), contextlib.closing(self.victim(name)) as found:
                return found.send(signal.SIGKILL)
            await asyncio.sleep(POLL_S)

    @contextlib.contextmanager
    def stopped(self, name: str) -> Iterator[None]:
        """SIGSTOP, and SIGCONT in the end. Raises Gone."""
        with contextlib.closing(self.victim(name)) as found:
            try:
                found.send(signal.SIGSTOP)
                yield
            finally:
                found.send(signal.SIGCONT)

    @contextlib.asynccontextmanager
    async def background(self, part: Coroutine[object, object, None]) -> AsyncIterator[None]:
        """Run something that never ends by itself; if it fails, whoever waits for the deployment learns of it."""
        task = asyncio.create_task(part)
        task.add_done_callback(self._failed)
        try:
            yield
        finally:
            while not task.done():  # Python 3.11's wait_for, in the client, swallows a cancellation now and then
                task.cancel()
                await asyncio.wait({task}, timeout=1.0)

    def _failed(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and not self.failure.done() and (error := task.exception()):
            self.failure.set_exception(error)

    async def begin(self, stack: contextlib.AsyncExitStack) -> None:
        """Start `up`, and traffic; both go on until the stack ends."""
        await stack.enter_async_context(self.background(self.up.keep()))
        self.client.start(CONCURRENCY, PAUSE_S)
        stack.push_async_callback(self.client.stop)

    async def leader(self) -> str:
        """The server that leads LOG; waits for an election to end."""
        async with asyncio.timeout(UNTIL_S):
            while True:
                with contextlib.suppress(Unavailable):
                    await self.journal.head(LOG)  # which only a leader answers
                    info = await self.journal.js.stream_info(f"REEF_{self.config.deployment}_LOG")
                    if info.cluster and info.cluster.leader in self.servers:
                        return info.cluster.leader
                await asyncio.sleep(POLL_S)

    # -- the log

    async def _made(self) -> None:
        """Until there is a stream to follow: `up` makes it."""
        while True:
            with contextlib.suppress(ContractError, Unavailable):
                await self.journal.head(LOG)
                return
            await asyncio.sleep(POLL_S)

    async def follow(self) -> None:
        await self._made()
        async for batch in self.journal.follow(LOG):
            for recorded in batch:
                if not fold(self.world, recorded):
                    self._see(recorded)

    def _see(self, recorded: Recorded) -> None:
        self.last.append(recorded)
        if isinstance(recorded.event, ComponentStarted):
            self.pids[recorded.event.component] = recorded.event.pid
        for watcher in list(self.watchers):
            watcher(recorded)

    async def next(self, *names: str) -> Recorded:
        """The next event of one of these names."""
        found: asyncio.Future[Recorded] = asyncio.get_running_loop().create_future()

        def watch(recorded: Recorded) -> None:
            if recorded.name in names and not found.done():
                found.set_result(recorded)

        self.watchers.append(watch)
        try:
            return await found
        finally:
            self.watchers.remove(watch)

    async def ask(self, event: OperatorEvent) -> None:
        """Put a person's request onto the log."""
        draft = Draft(event=event, writer=f"person/{event.actor}", boot=f"matrix-{os.urandom(6).hex()}")
        while True:
            with contextlib.suppress(Unavailable):
                await self.journal.append(draft, 0)
                return
            await asyncio.sleep(RESTART_S)

    async def until(self, what: str, holds: Callable[[], bool], seconds: float = UNTIL_S) -> None:
        """Wait until `holds`. Raises AssertionError with `what` and the end of the log."""
        began = time.monotonic()
        while not holds():
            if self.failure.done():
                self.failure.result()
            if error := self.client.failed():
                raise AssertionError(f"{what}: the harness died of {error!r}")
            if time.monotonic() - began > seconds:
                raise AssertionError(f"{what}: not within {seconds:g} s; {self.state()}")
            await self._resume()
            await asyncio.sleep(POLL_S)

    async def _resume(self) -> None:
        """What a person would have to do; counted."""
        for name, component in self.world.components.items():
            asked = any(request.about == name for request in self.world.requests.values())
            if component.given_up and not asked:
                self.resumed += 1
                await self.ask(RecoveryResumeRequested(actor="matrix", why="given up", head="", component=name))

    def state(self) -> str:
        """What a hang is told from."""
        components = {name: f"{c.state} {c.published}" for name, c in self.world.components.items()}
        engines = [engine.id for engine in serving(self.world)]
        last = [f"{r.seq} {r.name} {r.writer}" for r in self.last]
        return f"serving {engines}, components {components}, the log ends with {last}"

    @property
    def operator_actions(self) -> int:
        return self.resumed + self.up.beyond + sum(unit.beyond for unit in self.servers.values())

    def starts(self) -> dict[str, int]:
        return {name: component.starts for name, component in self.world.components.items()}

    def whole(self) -> bool:
        """Every process runs and can be counted on, and every engine serves the head."""
        names = self.config.components()
        known = self.world.components
        ready = all(name in known and known[name].running and known[name].published for name in names)
        alive = [unit.process is not None and unit.process.poll() is None for unit in (self.up, *self.servers.values())]
        return ready and all(alive) and self._run(names) and len(serving(self.world)) == len(self.engines)

    def _run(self, names: Mapping[str, str]) -> bool:
        parent = _pid(self.up)
        return all(_stat(self.pids.get(name, 0))[0] not in "TZX" for name in names) and _stat(parent)[0] not in "TZX"

    @property
    def engines(self) -> tuple[str, ...]:
        return self.config.inference.engines

    def answers(self) -> list[Scored]:
        """The harness's answers since the last call."""
        return [self.client.answers.get_nowait() for _ in range(self.client.answers.qsize())]

    async def history(self) -> History:
        return await read_history(self.journal, ArtifactStore(self.config.artifact_root()))


def _pid(unit: Unit) -> int:
    return unit.process.pid if unit.process else 0


def _starter(server: NatsServer) -> Callable[[], subprocess.Popen[bytes]]:
    def start() -> subprocess.Popen[bytes]:
        server.start()
        assert server.process is not None
        return server.process

    return start


@contextlib.asynccontextmanager
async def rig(folder: Path, kind: Kind = "single", scale: float = 1.0) -> AsyncIterator[Rig]:
    """Servers that run, and a deployment whose `up` starts with `begin`; everything ends with the context."""
    folder.mkdir(parents=True)
    nodes = (
        NatsCluster(folder / "nats").nodes
        if kind == "cluster"
        else {"nats": NatsServer(folder / "nats", free_ports(1)[0])}
    )
    config = configuration(folder / "state", [node.url for node in nodes.values()], kind, scale)
    found = Rig(config, nodes)
    async with contextlib.AsyncExitStack() as stack:
        for name, unit in found.servers.items():
            stack.callback(nodes[name].stop)
            stack.push_async_callback(blocking, unit.stop)
        stack.push_async_callback(blocking, found.up.stop)
        for unit in found.servers.values():
            await stack.enter_async_context(found.background(unit.keep()))
        found.journal = await connect(config.nats.url, config.deployment, "matrix", wait_s=UNTIL_S)
        stack.push_async_callback(found.journal.close)
        gateway = f"http://{config.gateway.host}:{config.gateway.port}"
        found.client = await stack.enter_async_context(harness(gateway, config.model, time.time_ns()))
        await stack.enter_async_context(found.background(found.follow()))
        yield found


def configuration(folder: Path, urls: Sequence[str], kind: Kind, scale: float) -> Config:
    """A deployment with short deadlines, in a folder of its own; `up` reads it from a file there."""
    folder.mkdir()
    mode = "staged" if kind == "staged" else "fenced"
    deadlines = {name: seconds * scale for name, seconds in msgspec.structs.asdict(DEADLINES).items()}
    config = Config(
        deployment="matrix",
        state_dir=str(folder),
        nats=Nats(url=",".join(urls), replicas=len(urls)),
        gateway=Gateway(port=free_ports(1)[0]),
        publication=Publication(publishers=2, deadlines=Deadlines(**deadlines), mode=mode),
        training=Training(groups=2, group_size=4),  # a release per eight answers
        supervision=Restarts(max_restarts=1000, delay_s=0.1),
    )
    (folder / "up.json").write_bytes(dump(check(config)))
    return config
