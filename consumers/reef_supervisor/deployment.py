"""A whole deployment on one machine: embedded server where none is named, streams, supervisor, children.

Knows: the order in which things come up and go down. Must not know: what is done with it (`up`, `demo`, tests).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from consumers.reef_supervisor.role import Supervisor, prepare, watch
from reef_bus.artifacts import ArtifactStore
from reef_bus.config import Artifacts, Config, dump, require_router
from reef_bus.core.effects import Me
from reef_bus.core.world import World
from reef_bus.embedded import Lock, NatsServer
from reef_bus.errors import Rejected
from reef_bus.events import Recorded
from reef_bus.jetstream import connect
from reef_bus.journal import Journal
from reef_bus.origin import blobs_in
from reef_bus.runner import Runner, blocking

CONFIG_FILE = "deployment.json"
Watcher = Callable[[World, Sequence[Recorded]], None]


class Watched(Supervisor):
    """A supervisor whose fold somebody else in this process looks at."""

    watcher: Watcher = staticmethod(lambda world, batch: None)

    def folded(self, world: World, batch: Sequence[Recorded]) -> None:
        self.watcher(world, batch)


class Deployment:
    """A running deployment; everything in it belongs to this process and ends with it."""

    def __init__(self, config: Config, journal: Journal, supervisor: Watched, server: NatsServer | None) -> None:
        self.config = config
        self.journal = journal
        self.supervisor = supervisor
        self.server = server
        self.runner = Runner(journal, supervisor, fetch=blobs_in(config.artifact_root()))
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def world(self) -> World:
        return self.runner.world

    @property
    def url(self) -> str:
        return f"http://{self.config.gateway.host}:{self.config.gateway.port}"

    def kill(self, component: str) -> None:
        """SIGKILL one component, or `nats`."""
        if component == "nats":
            if self.server:
                self.server.kill()
        else:
            self.supervisor.kill(component)

    def pids(self) -> list[int]:
        server = self.server.process if self.server else None
        return [*self.supervisor.pids(), *([server.pid] if server and server.poll() is None else [])]

    def report(self, task: asyncio.Task[None]) -> None:
        """A background task of the deployment has ended, which none should: whoever waits for `failure` learns why."""
        if not task.cancelled() and not self.failure.done() and (error := task.exception()):
            self.failure.set_exception(error)


@contextlib.asynccontextmanager
async def deployment(
    config: Config, watcher: Watcher | None = None, extra: Mapping[str, Mapping[str, str]] | None = None
) -> AsyncIterator[Deployment]:
    """Bring a deployment up, and down again in order. Raises Rejected for a state folder, port or server in the way."""
    async with contextlib.AsyncExitStack() as stack:
        lock = Lock(config.folder() / "lock", f"state folder {config.state_dir}")
        stack.callback(lock.release)
        server = await _server(config, stack)
        config, path = _settle(config, server)
        if config.artifacts.at:  # a URL that does not do is told here, once, and not by every component
            await blocking(ArtifactStore(config.artifact_root()).probe)
        journal = await connect(config.nats.url, config.deployment, "reef-supervisor")
        stack.push_async_callback(journal.close)
        await prepare(config, journal)
        supervisor = Watched(config, path, Me("supervisor", lock.token), extra)
        if watcher:
            supervisor.watcher = watcher
        await journal.beats(supervisor.hear)
        running = Deployment(config, journal, supervisor, server)
        if config.metrics.port:
            from reef_bus import metrics  # an extra, and half a second of imports, for those who ask for it

            await metrics.serve(config, "supervisor", running.runner, stack)
        stack.push_async_callback(supervisor.stop)
        for part in (running.runner.run(), *([watch(server)] if server else [])):
            task = asyncio.create_task(part)
            task.add_done_callback(running.report)
            stack.push_async_callback(_cancelled, task)
        yield running


async def _server(config: Config, stack: contextlib.AsyncExitStack) -> NatsServer | None:
    if config.nats.url:
        return None
    server = NatsServer(config.folder("nats"))
    stack.callback(server.stop)
    await blocking(server.start)
    return server


def _settle(config: Config, server: NatsServer | None) -> tuple[Config, Path]:
    """Fix what was left open, so that a restarted child comes back where it was; write it for the children."""
    nats = msgspec.structs.replace(config.nats, url=server.url) if server else config.nats
    gateway = msgspec.structs.replace(
        config.gateway, port=_free_port("gateway.port", config.gateway.host, config.gateway.port)
    )
    if config.inference.router_port:
        require_router(config)
        _free_port("inference.router-port", config.gateway.host, config.inference.router_port)
    path = config.folder("run") / CONFIG_FILE
    config = msgspec.structs.replace(
        config,
        nats=nats,
        gateway=gateway,
        state_dir=str(Path(config.state_dir).resolve()),
        artifacts=_settled(config),
    )
    path.write_bytes(dump(config))
    return config, path


def _settled(config: Config) -> Artifacts:
    """A folder in the state folder stays there wherever that is moved to; any other one is where it is from here."""
    at = config.artifacts.at
    folder = bool(at) and "://" not in at
    return msgspec.structs.replace(config.artifacts, at=str(Path(at).resolve()) if folder else at)


def _free_port(key: str, host: str, port: int) -> int:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise Rejected(f"{key} {port} on {host}: {error.strerror}; free it or configure another") from error
        return int(probe.getsockname()[1])


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
