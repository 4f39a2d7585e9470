"""What this machine does at the moment: its load, a memcpy, and how fast a server makes appends durable.

Knows: arrays, one embedded server. Must not know: weights.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

from nats.aio.client import Client
from nats.js import JetStreamContext, api

from reef_bus.embedded import NatsServer
from tests.bench.transports import GIB, copied, memory
from tests.bench.weights.table import Row, median, spread

APPENDS, AT_ONCE, BODY = 300, 32, 600
"""Bytes of a message: what the events of a release have on the average, with their headers."""


def load() -> float:
    return round(os.getloadavg()[0], 2)


def copy_rate(runs: int) -> Row:
    source, target = memory([GIB // 16] * 16, fill=True), memory([GIB // 16] * 16, fill=False)
    copied(source, target)
    rates = [GIB / copied(source, target) / 1e9 for _ in range(runs)]
    detail = {"quartiles": spread(rates), "load": load()}
    return Row(measure="memcpy, 1 GiB, one thread", value=median(rates), unit="GB/s", count=runs, detail=detail)


class Rates:
    """Durable appends per second, one after the other and 32 at a time."""

    def __init__(self, sequential: list[float], parallel: list[float]) -> None:
        self.sequential, self.parallel = sequential, parallel

    @property
    def one_ms(self) -> float:
        return median(self.sequential) * 1e3

    @property
    def many_ms(self) -> float:
        """Per append, when as many are under way."""
        return median(self.parallel) * 1e3

    def rows(self) -> list[Row]:
        both = (
            ("one after the other", self.sequential, len(self.sequential)),
            ("32 at a time", self.parallel, APPENDS),
        )
        return [
            Row(
                measure=f"durable appends, {how}",
                value=1 / median(seconds),
                unit="per s",
                count=count,
                detail={"quartiles": sorted(1 / s for s in spread(seconds)), "load": load()},
            )
            for how, seconds, count in both
        ]


async def append_rates(folder: Path) -> Rates:
    """On a server of its own, as a deployment has one: every append is synced before it is acknowledged."""
    server = NatsServer(folder)
    server.start()
    try:
        client = Client()
        await client.connect(server.url)
        js = client.jetstream()
        await js.add_stream(api.StreamConfig(name="APPENDS", subjects=["a.>"], storage=api.StorageType.FILE))
        found = Rates(await _one_by_one(js), await _at_once(js))
        await client.close()
        return found
    finally:
        server.stop()


async def _one_by_one(js: JetStreamContext) -> list[float]:
    seconds = []
    for _ in range(APPENDS):
        began = time.monotonic()
        await js.publish("a.b", bytes(BODY))
        seconds.append(time.monotonic() - began)
    return seconds


async def _at_once(js: JetStreamContext) -> list[float]:
    """Seconds per append, of waves that keep 32 under way."""

    async def lane() -> None:
        for _ in range(APPENDS // 10):
            await js.publish("a.b", bytes(BODY))

    seconds = []
    for _ in range(3):
        began = time.monotonic()
        await asyncio.gather(*(lane() for _ in range(AT_ONCE)))
        seconds.append((time.monotonic() - began) / (AT_ONCE * (APPENDS // 10)))
    return seconds
