"""`reef-bus up -c FILE`: the deployment of a file on this machine, until Ctrl-C or SIGTERM, and down in order.

Knows: how to wait. Must not know: what runs.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from consumers.reef_supervisor.deployment import deployment
from reef_bus.config import Config, dump, load
from reef_bus.core.world import World
from reef_bus.envelope import to_json
from reef_bus.events import Recorded
from reef_bus.views import sentence


def run(args: argparse.Namespace) -> int:
    """Run a deployment until it is asked to end; returns the exit status."""
    if args.example:
        print(dump(Config()).decode(), end="")
        return 0
    config = load(Path(args.config), args.set) if args.config else Config()
    return asyncio.run(_up(config, as_json=args.json))


async def _up(config: Config, *, as_json: bool) -> int:
    asked = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, asked.set)
    stop = asyncio.ensure_future(asked.wait())
    async with deployment(config, _show_json if as_json else _show) as running:
        if not as_json:
            print(f"gateway {running.url}, nats {running.config.nats.url}; Ctrl-C ends it in order", flush=True)
        either: set[asyncio.Future[Any]] = {stop, running.failure}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if running.failure.done():
            running.failure.result()
    return 0


def _show(world: World, batch: Sequence[Recorded]) -> None:
    for recorded in batch:
        print(f"{recorded.seq:6d} {recorded.name:19} {sentence(recorded.event)}", flush=True)


def _show_json(world: World, batch: Sequence[Recorded]) -> None:
    for recorded in batch:
        print(msgspec.json.encode(to_json(recorded)).decode(), flush=True)
