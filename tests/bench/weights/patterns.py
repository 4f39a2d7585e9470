"""What others run between a trainer and its engines, as plain and as fast as we can write it; nobody verifies anything.

Knows: HTTP with a reload from disk, Ray actors. Must not know: our transports, the log.
OUR RE-IMPLEMENTATION of what prime-rl, AReaL's disk mode (HTTP) and NeMo RL, SkyRL (Ray) do: pause everybody, hand the
weights over, resume everybody; no step is durable, and nobody looks at what arrived.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import aiohttp
import numpy
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from tests.bench.weights.receivers import SPAWN

Tensors = dict[str, NDArray[numpy.uint8]]
Update = Callable[[Tensors], float]
"""Hands a version to everybody; returns when the last one may generate again."""

HOST = "127.0.0.1"


def tensors(lengths: Sequence[int]) -> Tensors:
    return {f"t{n:03}": numpy.full(size, n % 251, numpy.uint8) for n, size in enumerate(lengths)}


# -- HTTP, reload from disk


class Reloading:
    """An engine as an ASGI application."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.tensors, self.paused = tensors(lengths), False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        body = json.loads((await receive())["body"] or b"{}")
        answer = await getattr(self, scope["path"][1:])(**body)
        head = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        await send({"type": "http.response.body", "body": json.dumps(answer).encode()})

    async def pause(self) -> float:
        self.paused = True
        return time.monotonic()

    async def update(self, path: str) -> float:
        await asyncio.to_thread(self._load, path)
        return time.monotonic()

    def _load(self, path: str) -> None:
        for name, tensor in load_file(path).items():
            self.tensors[name][:] = tensor

    async def resume(self) -> float:
        self.paused = False
        return time.monotonic()


def _reloading(pipe: Connection, lengths: Sequence[int]) -> None:
    import uvicorn

    config = uvicorn.Config(Reloading(lengths), host=HOST, port=0, log_level="error", access_log=False, lifespan="off")
    server = uvicorn.Server(config)

    async def run() -> None:
        serving = asyncio.create_task(server.serve())
        while not server.started:  # noqa: ASYNC110 - it has no event for that
            await asyncio.sleep(0.01)
        pipe.send(server.servers[0].sockets[0].getsockname()[1])
        await serving

    asyncio.run(run())


@contextlib.contextmanager
def http(count: int, lengths: Sequence[int], folder: Path) -> Iterator[Update]:
    """A checkpoint per version, in one file; not synced, as theirs are not."""
    processes: list[BaseProcess] = []
    pipes = []
    for _ in range(count):
        ours, theirs = SPAWN.Pipe()
        processes.append(SPAWN.Process(target=_reloading, args=(theirs, list(lengths)), daemon=True))
        processes[-1].start()
        pipes.append(ours)
    with asyncio.Runner() as runner:
        session = runner.run(_session())
        fan_out = Fan(session, [pipe.recv() for pipe in pipes], folder)
        try:
            yield lambda version: runner.run(fan_out.update(version))
        finally:
            runner.run(session.close())
            _end(processes)


async def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession()


def _end(processes: Sequence[BaseProcess]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.join()


class Fan:
    """The trainer: it writes the file, and tells everybody."""

    def __init__(self, session: aiohttp.ClientSession, ports: Sequence[int], folder: Path) -> None:
        self.session, self.ports, self.folder, self.version = session, ports, folder, 0

    async def update(self, version: Tensors) -> float:
        path = self.folder / f"step-{self.version}.safetensors"
        self.version += 1
        await asyncio.to_thread(save_file, version, path)
        await self._all("/pause")
        await self._all("/update", path=str(path))
        done = await self._all("/resume")
        path.unlink()
        return max(done)

    async def _all(self, route: str, **body: Any) -> list[float]:
        return await asyncio.gather(*(self._post(port, route, body) for port in self.ports))

    async def _post(self, port: int, route: str, body: dict[str, Any]) -> float:
        async with self.session.post(f"http://{HOST}:{port}{route}", json=body) as reply:
            reply.raise_for_status()
            return float(await reply.json())


# -- Ray actors


@contextlib.contextmanager
def ray_node(folder: Path) -> Iterator[None]:
    """A Ray of our own, for as long as it is needed; nothing of it is asked of the network."""
    from tests.bench.baselines.fleet import ray_head

    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray

    with ray_head(folder / "ray.log") as address:
        ray.init(address=address, log_to_driver=False, configure_logging=False)
        try:
            yield
        finally:
            ray.shutdown()


@contextlib.contextmanager
def actors(count: int, lengths: Sequence[int]) -> Iterator[Update]:
    """The weights go into the object store once, and every engine copies them from there."""
    import ray

    kind = ray.remote(num_cpus=0)(Actor)
    found = [kind.remote(list(lengths)) for _ in range(count)]
    ray.get([each.resume.remote() for each in found])

    def update(version: Tensors) -> float:
        ray.get([each.pause.remote() for each in found])
        ref = ray.put(version)
        ray.get([each.update.remote(ref) for each in found])
        return max(ray.get([each.resume.remote() for each in found]))

    try:
        yield update
    finally:
        for each in found:
            ray.kill(each)


class Actor:
    """An engine as an actor."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.tensors, self.paused = tensors(lengths), False

    def pause(self) -> None:
        self.paused = True

    def update(self, version: Tensors) -> None:
        for name, tensor in version.items():
            self.tensors[name][:] = tensor

    def resume(self) -> float:
        self.paused = False
        return time.monotonic()
