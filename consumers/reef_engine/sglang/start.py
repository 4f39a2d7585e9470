"""Starts what one SGLang engine consists of: the server, the room, the oracle.

Knows: the order of starting and of ending. Must not know: what any of them is used for.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from pathlib import Path

from consumers.reef_engine.sglang.backend import SGLangEngine
from consumers.reef_engine.sglang.client import Client
from consumers.reef_engine.sglang.launch import (
    Process,
    device,
    environment,
    free_port,
    model_flags,
    require_installed,
    server_flags,
)
from consumers.reef_engine.sglang.room import Room, place
from consumers.reef_engine.sglang.sums import Oracle
from reef_bus.config import Config
from reef_bus.core.effects import Me
from reef_bus.core.publication import IN_PLACE
from reef_bus.runner import blocking

log = logging.getLogger(__name__)


async def start(config: Config, me: Me, died: Callable[[str], None], stack: contextlib.AsyncExitStack) -> SGLangEngine:
    """An engine that may be loaded. `died` is told, once, when its server ends by itself later on. Raises Rejected for
    a configuration that no server comes of, and Unavailable when it does not come up."""
    require_installed()
    inference, run = config.inference, config.folder("run")
    where = await blocking(device, inference.device)
    room = Room(Path(inference.model_path), place(Path(config.state_dir), me.id))
    stack.callback(room.close)
    flags, port = model_flags(inference, room.folder, where), free_port()
    around = environment(where, room.scratch)
    oracle = Oracle(flags, inference.tensor_parallel_size, free_port(), around, run / f"{me.id}.oracle.log")
    stack.callback(oracle.close)
    spans = config.publication.pause == IN_PLACE
    argv = ["-m", "sglang.launch_server", *flags, *server_flags(inference, port, me.boot, spans=spans)]
    server = Process(argv, around, run / f"{me.id}.sglang.log")
    stack.callback(server.end)
    client = Client(f"http://127.0.0.1:{port}", me.boot)
    await server.ready(client, inference.start_s)
    engine = SGLangEngine(inference, client, room, oracle, where, died)
    stack.push_async_callback(engine.disconnect)
    watching = asyncio.create_task(_watch(server, died))
    stack.callback(watching.cancel)
    return engine


async def _watch(server: Process, died: Callable[[str], None]) -> None:
    status = await server.ended()
    died(f"SGLang ended with status {status}:{server.last_words()}")
