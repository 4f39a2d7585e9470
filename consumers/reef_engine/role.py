"""The engine as a process: backend, agent and endpoint put together.

Knows: configuration and what to build. Must not know: anything that happens afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from pathlib import Path

from aiohttp import web

from consumers.reef_engine.agent import Agent
from consumers.reef_engine.continuous import Continuous
from consumers.reef_engine.endpoint import Endpoint
from consumers.reef_engine.fault import Fault
from consumers.reef_engine.native import Native
from consumers.reef_engine.server import Server
from reef_bus import process
from reef_bus.artifacts import ArtifactStore
from reef_bus.backends import ContinuousBackend, InferenceBackend
from reef_bus.collector import without_collector
from reef_bus.config import Config
from reef_bus.core.effects import Me
from reef_bus.errors import Rejected
from reef_bus.http import listen
from reef_bus.journal import Journal
from reef_bus.runner import Role, blocking

log = logging.getLogger(__name__)


async def _build(config: Config, journal: Journal, me: Me, stack: contextlib.AsyncExitStack) -> Role:
    backend = await _backend(config, me, stack)
    stack.callback(backend.close)
    if config.training.colocate and not backend.releases:
        raise Rejected(
            f"training.colocate needs engines that give their memory back, and inference.backend "
            f"{config.inference.backend} cannot on this machine; train elsewhere, or see docs/colocate.md"
        )
    store = ArtifactStore(config.artifact_root())
    app = web.Application()
    agent = Agent(config, me, "", backend, store, _fault(me.id))
    server = _endpoint(agent, backend, config.inference.max_batch)
    app.add_routes([*server.routes(), *Native(server).routes()])
    agent.url = await listen(app, config.inference.host, 0, stack)
    worker = asyncio.create_task(server.work())
    worker.add_done_callback(_died)
    stack.callback(worker.cancel)
    stack.callback(server.end)  # nobody waits for what is being generated when the process ends
    if config.inference.lease_s:
        renewing = asyncio.create_task(agent.renew(journal))
        renewing.add_done_callback(_died)
        stack.callback(renewing.cancel)
    return agent


def _endpoint(agent: Agent, backend: InferenceBackend, most: int) -> Endpoint:
    return Continuous(agent, backend, most) if isinstance(backend, ContinuousBackend) else Server(agent, most)


def _died(worker: asyncio.Task[None]) -> None:
    """An engine that cannot generate any more is no engine: end the process, so that a new boot can take over."""
    if not worker.cancelled() and worker.exception():
        asyncio.get_running_loop().call_exception_handler(
            {"message": "the engine cannot go on", "exception": worker.exception()}
        )
        os._exit(process.DEFECT)


def _over(why: str) -> None:
    log.error("this boot ends: %s", why)
    os._exit(process.OVER)


async def _backend(config: Config, me: Me, stack: contextlib.AsyncExitStack) -> InferenceBackend:
    if config.inference.backend == "sglang":
        from consumers.reef_engine.sglang.start import start

        return await start(config, me, _over, stack)
    return await blocking(_torch, config.inference.model_path)


def _torch(model: str) -> InferenceBackend:
    with without_collector():
        from consumers.reef_engine.torch_backend import TorchEngine
        from reef_bus.model_folder import read_policy_config

    engine = TorchEngine(read_policy_config(Path(model)) if model else None)
    engine.start()
    return engine


def _fault(engine: str) -> Fault:
    name, _, sequence = os.environ.get(process.FAULT, "").partition("@")
    return Fault(int(sequence) if name == engine else 0)


def run(config: Config, id_: str) -> int:
    """Run one engine in this process; returns its exit status."""
    return process.run(id_, config, _build)
