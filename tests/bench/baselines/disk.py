"""Pattern 2, OUR RE-IMPLEMENTATION of what prime-rl and AReaL's disk mode do: HTTP fan-out, reload from disk.

Knows: a folder of checkpoints, which a coordinator watches. Must not know: who kills whom.

The trainer writes a complete folder; the coordinator finds it, pauses all engines, tells each to reload, and resumes
them in `finally`. Kinder than the originals: the engine stamps its answers itself, after the last tensor (prime-rl's
orchestrator stamps them, and does so before the engines have changed), the watcher looks every POLL_S instead of every
second, every call ends after STEP_S, and the fan-out is tried a second time.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path

from tests.bench.baselines.engine import Engine
from tests.bench.baselines.process import (
    POLL_S,
    Json,
    Moment,
    Peers,
    connection,
    engine_routes,
    route,
    serve,
    twice,
    within,
)
from tests.bench.baselines.weights import content, load, newest, save


async def receiver(told: Json) -> None:
    engine, moment, folder = Engine(), Moment(), Path(told["folder"])

    def reload(version: int) -> None:
        for index, tensor in enumerate(load(folder, version)):
            engine.write(index, tensor)
            moment.reached(f"tensor:{index}")

    async def update(body: Json) -> Json:
        await asyncio.to_thread(reload, body["version"])
        moment.reached("loaded")
        engine.label = body["version"]
        return {}

    await serve(told["port"], [*engine_routes(engine, moment), route("/update", update)])
    await asyncio.Event().wait()


class Coordinator:
    """Collects samples in memory, writes them down as the batch of a step when the trainer asks, and fans out."""

    def __init__(self, told: Json, peers: Peers) -> None:
        self.receivers: list[int] = told["receivers"]
        self.folder, self.batches, self.peers, self.moment = (
            Path(told["folder"]),
            Path(told["batches"]),
            peers,
            Moment(),
        )
        self.queue: list[str] = []
        self.seen = -1  # so that a restarted coordinator sends the newest version at once

    async def sample(self, body: Json) -> Json:
        self.queue.append(body["record"])
        return {}

    async def state(self, _: Json) -> Json:
        return {"idle": self.seen == newest(self.folder), "version": self.seen, "queue": self.queue}

    async def batch(self, body: Json) -> Json:
        """The batch of a step is written once; a trainer that comes back for it finds the same."""
        path = self.batches / f"{body['step']}.json"
        if not path.exists():
            records, self.queue = self.queue, []
            path.with_suffix(".draft").write_text(json.dumps(records))
            path.with_suffix(".draft").rename(path)
        return {}

    async def watch(self) -> None:
        while True:
            if (version := newest(self.folder)) != self.seen:
                self.moment.reached("seen")
                await self._publish(version)
                self.seen = version
            await asyncio.sleep(POLL_S)

    async def _publish(self, version: int) -> bool:
        return await twice(f"reload of {version}", lambda: self._push(version), lambda: self.peers.up(self.receivers))

    async def _push(self, version: int) -> None:
        try:
            await self.peers.everyone(self.receivers, "/pause")
            self.moment.reached("paused")
            told = asyncio.create_task(self.peers.everyone(self.receivers, "/update", version=version))
            await asyncio.sleep(0.002)  # the requests are out
            self.moment.reached("sending")
            await told
            self.moment.reached("sent")
        finally:
            await self.peers.everyone_who_can(self.receivers, "/resume")
        self.moment.reached("resumed")


async def coordinator(told: Json) -> None:
    async with connection() as session:
        peers = Peers(session)
        await within(peers.up(told["receivers"]))
        found = Coordinator(told, peers)
        handlers = {"/sample": found.sample, "/state": found.state, "/batch": found.batch, "/moment": found.moment.arm}
        await serve(told["port"], [route(path, handler) for path, handler in handlers.items()])
        await found.watch()


class Trainer:
    """Trains the batch of a step, from disk; a step that was cut off is done when it comes back."""

    def __init__(self, told: Json, peers: Peers) -> None:
        self.folder, self.batches, self.peers, self.moment = (
            Path(told["folder"]),
            Path(told["batches"]),
            peers,
            Moment(),
        )
        self.coordinator: int = told["coordinator"]
        self.version = newest(self.folder)
        unfinished = (self.batches / f"{self.version + 1}.json").exists()
        self.busy = asyncio.create_task(self.step() if unfinished else asyncio.sleep(0))

    async def state(self, _: Json) -> Json:
        return {"idle": self.busy.done(), "version": self.version}

    async def go(self, _: Json) -> Json:
        self.busy = asyncio.create_task(self.step())
        return {}

    async def step(self) -> None:
        step = self.version + 1
        with contextlib.suppress(Exception):  # once, and once more: the file is what counts
            await self.peers.call(self.coordinator, "/batch", step=step)
        path = self.batches / f"{step}.json"
        if not path.exists():
            await within(self.peers.up([self.coordinator]))
            await self.peers.call(self.coordinator, "/batch", step=step)
        self.moment.reached("batch")
        save(self.folder, step, json.loads(path.read_text()), content(step), self.moment.reached)
        self.version = step
        self.moment.reached("saved")


async def trainer(told: Json) -> None:
    async with connection() as session:
        found = Trainer(told, Peers(session))
        handlers = {"/state": found.state, "/go": found.go, "/moment": found.moment.arm}
        await serve(told["port"], [route(path, handler) for path, handler in handlers.items()])
        await asyncio.Event().wait()


ROLES = {"receiver": receiver, "coordinator": coordinator, "trainer": trainer}
