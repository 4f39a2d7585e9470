"""Pattern 1, OUR RE-IMPLEMENTATION of what verl, OpenRLHF and TRL do: torch.distributed broadcast, triggered over HTTP.

Knows: one gloo group of a trainer (rank 0) and its receivers. Must not know: who kills whom.

The trainer pauses the engines, tells them to take part, broadcasts tensor by tensor, and resumes them in `finally`.
Kinder than the originals: gloo notices a dead peer, every wait ends after STEP_S, a failed group is made anew for one
retry, the engine changes its label after the last tensor, and a restarted trainer sends its checkpoint at once.
"""

from __future__ import annotations

import asyncio
import socket
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from tests.bench.baselines.engine import Engine
from tests.bench.baselines.process import (
    HOST,
    STEP_S,
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
from tests.bench.baselines.weights import TENSORS, Array, content, load, newest, save

LIMIT = timedelta(seconds=STEP_S)


def join(port: int, rank: int, size: int) -> dist.ProcessGroupGloo:
    """One group of our own, outside torch's global state, so that it can be made anew (as vLLM's stateless groups)."""
    store = dist.TCPStore(HOST, port, size, is_master=rank == 0, timeout=LIMIT, wait_for_workers=False)
    return dist.ProcessGroupGloo(store, rank, size, LIMIT)


def broadcast(group: dist.ProcessGroupGloo, tensor: Array) -> None:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    options.timeout = LIMIT
    group.broadcast([torch.from_numpy(tensor)], options).wait(LIMIT)


class Receiver:
    """An engine that takes part in a group when it is told to."""

    def __init__(self) -> None:
        self.engine, self.moment = Engine(), Moment()
        self.group: dist.ProcessGroupGloo | None = None

    async def join(self, body: Json) -> Json:
        self.group = None  # a group of a trainer that is gone goes first
        self.group = await asyncio.to_thread(join, body["store"], body["rank"], body["size"])
        return {}

    async def update(self, body: Json) -> Json:
        await asyncio.to_thread(self._receive)
        self.moment.reached("loaded")
        self.engine.label = body["version"]
        return {}

    def _receive(self) -> None:
        if self.group is None:
            raise RuntimeError("there is no group")
        for index in range(TENSORS):
            broadcast(self.group, self.engine.tensors[index])
            self.moment.reached(f"tensor:{index}")


async def receiver(told: Json) -> None:
    found = Receiver()
    routes = [route("/join", found.join), route("/update", found.update)]
    await serve(told["port"], [*engine_routes(found.engine, found.moment), *routes])
    await asyncio.Event().wait()


class Trainer:
    """Trains on what is in its queue, in memory; publishes what it has trained."""

    def __init__(self, told: Json, peers: Peers) -> None:
        self.receivers: list[int] = told["receivers"]
        self.folder, self.peers, self.moment = Path(told["folder"]), peers, Moment()
        self.version = newest(self.folder)
        self.tensors = list(load(self.folder, self.version))
        self.queue: list[str] = []
        self.group: dist.ProcessGroupGloo | None = None
        self.busy: asyncio.Task[bool] = asyncio.create_task(self.publish())

    async def sample(self, body: Json) -> Json:
        self.queue.append(body["record"])
        return {}

    async def state(self, _: Json) -> Json:
        return {"idle": self.busy.done(), "version": self.version, "queue": self.queue}

    async def go(self, _: Json) -> Json:
        self.busy = asyncio.create_task(self.step())
        return {}

    async def step(self) -> bool:
        batch, self.queue = self.queue, []
        self.moment.reached("batch")
        self.tensors = content(self.version + 1)
        save(self.folder, self.version + 1, batch, self.tensors, self.moment.reached)
        self.version += 1
        self.moment.reached("saved")
        return await self.publish()

    async def publish(self) -> bool:
        return await twice(f"broadcast of {self.version}", self._push, lambda: self.peers.up(self.receivers))

    async def _push(self) -> None:
        try:
            await self.peers.everyone(self.receivers, "/pause")
            self.moment.reached("paused")
            if self.group is None:
                self.group = await self._group()
            triggered = asyncio.create_task(self.peers.everyone(self.receivers, "/update", version=self.version))
            await asyncio.to_thread(self._broadcast, self.group)
            await triggered
            self.moment.reached("sent")
        except BaseException:
            self.group = None
            raise
        finally:
            await self.peers.everyone_who_can(self.receivers, "/resume")
        self.moment.reached("resumed")

    async def _group(self) -> dist.ProcessGroupGloo:
        with socket.socket() as probe:
            probe.bind((HOST, 0))
            port = probe.getsockname()[1]
        size, ranks = len(self.receivers) + 1, {each: rank for rank, each in enumerate(self.receivers, 1)}
        told = [self.peers.call(each, "/join", store=port, rank=ranks[each], size=size) for each in self.receivers]
        found, *_ = await asyncio.gather(asyncio.to_thread(join, port, 0, size), *told)
        return found

    def _broadcast(self, group: dist.ProcessGroupGloo) -> None:
        for index, tensor in enumerate(self.tensors):
            broadcast(group, tensor)
            self.moment.reached(f"tensor:{index}")


async def trainer(told: Json) -> None:
    async with connection() as session:
        peers = Peers(session)
        await within(peers.up(told["receivers"]))
        found = Trainer(told, peers)
        handlers = {"/sample": found.sample, "/state": found.state, "/go": found.go, "/moment": found.moment.arm}
        await serve(told["port"], [route(path, handler) for path, handler in handlers.items()])
        await asyncio.Event().wait()


ROLES = {"receiver": receiver, "trainer": trainer}
