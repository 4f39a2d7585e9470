"""Starts what one SGLang engine consists of: the server, the room, the oracle.

Knows: the order of starting and of ending. Must not know: what any of them is used for.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

from consumers.reef_engine.sglang import borrowed
from consumers.reef_engine.sglang.adapters import Held, incomplete, reads_folders
from consumers.reef_engine.sglang.backend import SGLangEngine
from consumers.reef_engine.sglang.client import Client
from consumers.reef_engine.sglang.launch import (
    Process,
    adapter_flags,
    device,
    environment,
    free_port,
    model_flags,
    require_installed,
    server_flags,
    silent,
)
from consumers.reef_engine.sglang.limits import Limits
from consumers.reef_engine.sglang.probes import Reference
from consumers.reef_engine.sglang.room import Room, place
from consumers.reef_engine.sglang.sums import Oracle
from reef_bus.config import Config
from reef_bus.core.effects import Me
from reef_bus.core.memory import REGIONS
from reef_bus.core.publication import IN_PLACE
from reef_bus.errors import Rejected
from reef_bus.runner import blocking

KEY = "SGLANG_API_KEY"
"""The environment's variable with the key of servers that are borrowed."""
GONE = (2.0, 30.0)
"""As `LOOK_S` and `SILENT_S`, for a server that is borrowed: its end is seen by that alone, and /model_info waits for
no batch."""


async def start(config: Config, me: Me, died: Callable[[str], None], stack: contextlib.AsyncExitStack) -> SGLangEngine:
    """An engine that may be loaded. `died` is told when its server ends by itself later on, or hangs. Raises Rejected
    for a configuration that no server comes of, and Unavailable when it does not come up."""
    require_installed()
    if config.adapters.most() and (unfit := incomplete(config.adapters.targets)):
        raise Rejected(f"adapters.targets: {unfit}")
    inference, run = config.inference, config.folder("run")
    Limits.of(Path(inference.model_path))
    where = await blocking(device, inference.device)
    room = Room(Path(inference.model_path), place(Path(config.state_dir), me.id))
    stack.callback(room.close)
    ranks, flags = inference.tensor_parallel_size, model_flags(inference, room.folder, where)
    around = environment(where, room.scratch, ranks)
    oracle = Oracle(flags, ranks, free_port(), around, run / f"{me.id}.oracle.log")
    stack.callback(oracle.close)
    reference = None
    if config.adapters.most():
        reference = Reference(around, run / f"{me.id}.reference.log")
        stack.callback(reference.close)
    spans = config.publication.pause == IN_PLACE
    saver = config.training.colocate and where == "cuda"  # without a GPU the server says yes, and keeps everything
    if url := inference.urls.get(me.id):
        client = Client(url.rstrip("/"), _key())
        await borrowed.ready(client, inference, config.adapters, spans=spans)
        ends = [silent(client, "model_info", *GONE)]
    else:
        port, weights = free_port(), reads_folders(config)
        client = Client(f"http://127.0.0.1:{port}", me.boot)
        own = server_flags(inference, port, me.boot, where, spans=spans, saver=saver, weights=weights)
        argv = ["-m", "sglang.launch_server", *flags, *own, *adapter_flags(config.adapters, where)]
        with room.with_weights(Path(inference.model_path)) if weights else contextlib.nullcontext():
            server = Process(argv, around, run / f"{me.id}.sglang.log")
            stack.callback(server.end)
            await server.ready(client, inference.start_s)
        ends = [server.ended(), silent(client, "server_info")]  # which its scheduler answers, also while it is paused
    for end in ends:
        stack.callback(asyncio.create_task(_watch(end, died)).cancel)
    held = Held(client, room, reference, config, where) if reference else None
    engine = SGLangEngine(inference, client, room, oracle, where, died, held, spans=spans, borrowed=bool(url))
    engine.releases = REGIONS if saver else ()
    stack.push_async_callback(engine.disconnect)
    return engine


def _key() -> str:
    """A file that it was read from may have ended in a line break."""
    key = os.environ.get(KEY, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise Rejected(f"{KEY} has characters that no key has: it is sent in a header, in ASCII")
    return key


async def _watch(ended: Awaitable[str], died: Callable[[str], None]) -> None:
    died(await ended)
