"""Requests to both receivers all the time: every answer is judged by its content and handed to the trainer's side.

Knows: what the tensors of a version hash to. Must not know: kills, or updates.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import NamedTuple

import aiohttp

from tests.bench.baselines.fleet import Fleet
from tests.bench.baselines.patterns import RECEIVERS
from tests.bench.baselines.process import POLL_S
from tests.bench.baselines.weights import Fingerprint, expected

ASK_S = 1.0  # who gets no answer in this time asks again
PAUSE_S = 0.05

RIGHT, WRONG, TORN = "right", "wrong", "torn"


class Seen(NamedTuple):
    """One answer: right (its tensors are those of its label), wrong (of another version), or torn (of none)."""

    receiver: str
    asked: float
    got: float
    label: int
    verdict: str


def judge(label: int, found: Fingerprint, versions: int) -> str:
    """`versions`: the newest that may exist."""
    if found == expected(label):
        return RIGHT
    return WRONG if any(found == expected(version) for version in range(versions + 1)) else TORN


class Traffic:
    """`accepted` are the records for which the trainer's side said that it had them."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet, self.seen, self.accepted = fleet, list[Seen](), set[str]()
        self.newest = 0
        self._undelivered: list[str] = []

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for receiver in RECEIVERS:
                group.create_task(self._asking(receiver))
            group.create_task(self._delivering())

    async def _asking(self, receiver: str) -> None:
        while True:
            await self.ask(receiver)
            await asyncio.sleep(PAUSE_S)

    async def ask(self, receiver: str) -> Seen | None:
        """None when there is no answer."""
        asked = time.monotonic()
        try:
            async with asyncio.timeout(ASK_S):
                found = await self.fleet.peers.call(self.fleet.ports[receiver], "/ask")
        except (OSError, RuntimeError, aiohttp.ClientError):
            return None
        verdict = judge(found["label"], tuple(found["found"]), self.newest)
        seen = Seen(receiver, asked, time.monotonic(), found["label"], verdict)
        self.seen.append(seen)
        self._undelivered.append(found["record"])
        return seen

    async def _delivering(self) -> None:
        """Until it is accepted, with the same id."""
        while True:
            while self._undelivered:
                with contextlib.suppress(Exception):
                    port = self.fleet.ports[self.fleet.pattern.samples]
                    await self.fleet.peers.call(port, "/sample", record=self._undelivered[0])
                    self.accepted.add(self._undelivered.pop(0))
                    continue
                break
            await asyncio.sleep(POLL_S)

    async def torn_memory(self, receiver: str) -> bool:
        """What it holds is no version, whether it answers or not."""
        with contextlib.suppress(Exception):
            found = await self.fleet.peers.call(self.fleet.ports[receiver], "/memory")
            return all(tuple(found["found"]) != expected(version) for version in range(self.newest + 1))
        return False
