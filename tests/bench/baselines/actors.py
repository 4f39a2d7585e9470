"""Pattern 3, OUR RE-IMPLEMENTATION of what NeMo RL and SkyRL do: Ray actors, `ray.get([e.update.remote(…), …])`.

Knows: one driver, which coordinates a trainer actor and engine actors. Must not know: who kills whom.

The driver pauses the engines, passes the trainer's weights bucket by bucket through the object store, and resumes the
engines in `finally`. Kinder than the originals: actors have `max_restarts=-1`, so that Ray supervises them, every
`ray.get` ends after STEP_S, the update is tried a second time, a step that is asked for twice is trained once, the
engine changes its label after the last bucket, and a restarted driver sends its checkpoint at once.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray

from tests.bench.baselines.engine import Engine
from tests.bench.baselines.process import START_S, STEP_S, Json, Moment, engine_routes, route, serve, twice
from tests.bench.baselines.weights import TENSORS, Array, content, load, newest, save


def get(refs: Any) -> Any:
    return ray.get(refs, timeout=STEP_S)


@ray.remote(max_restarts=-1, num_cpus=0)
class EngineActor:
    """The engine as an actor; its HTTP server, for those who ask, has a thread of its own."""

    def __init__(self, port: int) -> None:
        self.engine, self.moment = Engine(), Moment()
        ready = threading.Event()
        threading.Thread(target=asyncio.run, args=(self._serve(port, ready),), daemon=True).start()
        if not ready.wait(START_S):
            raise RuntimeError(f"no server on {port}")

    async def _serve(self, port: int, ready: threading.Event) -> None:
        await serve(port, engine_routes(self.engine, self.moment))
        ready.set()
        await asyncio.Event().wait()

    def up(self) -> None:
        pass

    def pause(self) -> None:
        self.engine.pause()
        self.moment.reached("paused")

    def update(self, index: int, tensor: Array) -> None:
        self.engine.write(index, tensor)
        self.moment.reached(f"tensor:{index}")
        if index == TENSORS - 1:
            self.moment.reached("loaded")

    def name(self, version: int) -> None:
        self.engine.label = version

    def resume(self) -> None:
        self.moment.reached("resuming")
        self.engine.resume()
        self.moment.reached("resumed")


@ray.remote(max_restarts=-1, num_cpus=0)
class TrainerActor:
    """Has the newest checkpoint in memory."""

    def __init__(self, folder: str) -> None:
        self.folder, self.moment = Path(folder), Moment()
        self.version = newest(self.folder)
        self.tensors = list(load(self.folder, self.version))

    def up(self) -> int:
        return self.version

    def arm(self, point: str, note: str) -> None:
        self.moment.point, self.moment.note = point, note

    def train(self, version: int, records: Sequence[str]) -> None:
        if version == self.version:
            return  # asked again, after an answer that was lost
        self.moment.reached("batch")
        self.tensors = content(version)
        save(self.folder, version, records, self.tensors, self.moment.reached)
        self.version = version
        self.moment.reached("saved")

    def bucket(self, index: int) -> Array:
        self.moment.reached(f"tensor:{index}")
        if index == TENSORS - 1:
            threading.Timer(0.1, self.moment.reached, ("sent",)).start()  # nobody calls it after the last one
        return self.tensors[index]


class Driver:
    """The single controller. Ray's calls block, so they have a thread."""

    def __init__(self, told: Json) -> None:
        self.moment = Moment()
        self.trainer: Any = TrainerActor.remote(told["folder"])
        self.engines: list[Any] = [EngineActor.remote(port) for port in told["receivers"]]
        self.queue: list[str] = []
        self.version = newest(Path(told["folder"]))
        self.busy: asyncio.Task[bool] = asyncio.create_task(self.first())

    async def sample(self, body: Json) -> Json:
        self.queue.append(body["record"])
        return {}

    async def state(self, _: Json) -> Json:
        return {"idle": self.busy.done(), "version": self.version, "queue": self.queue}

    async def go(self, _: Json) -> Json:
        self.busy = asyncio.create_task(self.step())
        return {}

    async def arm_trainer(self, body: Json) -> Json:
        await asyncio.to_thread(get, self.trainer.arm.remote(body["point"], body["note"]))
        return {}

    async def first(self) -> bool:
        await self._up()
        return await self._publish()

    async def step(self) -> bool:
        batch, self.queue = self.queue, []
        self.moment.reached("batch")
        self.version += 1
        version = self.version

        async def train() -> None:
            await asyncio.to_thread(get, self.trainer.train.remote(version, batch))

        if not await twice(f"training of {version}", train, self._up):
            self.version, self.queue = version - 1, batch + self.queue
            return False
        self.moment.reached("saved")
        return await self._publish()

    async def _publish(self) -> bool:
        return await twice(f"update to {self.version}", lambda: asyncio.to_thread(self._push), self._up)

    def _push(self) -> None:
        try:
            get([engine.pause.remote() for engine in self.engines])
            self.moment.reached("paused")
            for index in range(TENSORS):
                ref = self.trainer.bucket.remote(index)
                get([engine.update.remote(index, ref) for engine in self.engines])
                self.moment.reached(f"tensor:{index}")
            get([engine.name.remote(self.version) for engine in self.engines])
            self.moment.reached("sent")
        finally:
            ray.wait([e.resume.remote() for e in self.engines], num_returns=len(self.engines), timeout=STEP_S)
        self.moment.reached("resumed")

    async def _up(self) -> None:
        await asyncio.to_thread(self._wait, time.monotonic() + START_S)

    def _wait(self, until: float) -> None:
        """Wait until every actor answers; calls to one that restarts fail at once."""
        for actor in (self.trainer, *self.engines):
            while True:
                try:
                    get(actor.up.remote())
                    break
                except ray.exceptions.RayError:
                    if time.monotonic() > until:
                        raise
                    time.sleep(0.05)


async def coordinator(told: Json) -> None:
    ray.init(address=told["ray"], log_to_driver=False, configure_logging=False)
    found = Driver(told)
    handlers = {
        "/sample": found.sample,
        "/state": found.state,
        "/go": found.go,
        "/moment": found.moment.arm,
        "/moment-of-trainer": found.arm_trainer,
    }
    await serve(told["port"], [route(path, handler) for path, handler in handlers.items()])
    await asyncio.Event().wait()


ROLES = {"coordinator": coordinator}
