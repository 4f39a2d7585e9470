"""SGLang's router as a component: its process, and who its workers are.

Knows: the configuration, one process, the fold. Must not know: requests, weights, or records.
It writes nothing to the log, and never speaks to an engine: the router does, as soon as it is told of one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Sequence

import aiohttp

from consumers.reef_router.launch import Process, settings
from consumers.reef_router.membership import Membership
from reef_bus import process
from reef_bus.config import Config, require_router
from reef_bus.core.effects import Debt, Me
from reef_bus.core.world import World
from reef_bus.errors import Unavailable
from reef_bus.events import Event, Recorded
from reef_bus.journal import Beat, Journal
from reef_bus.runner import Role

log = logging.getLogger(__name__)

START_S = 30.0
ANSWER_S = 5.0  # of the router, about its workers
POLL_S = 0.05


class Router(Role):
    """One router process."""

    name = "router"

    def __init__(self, me: Me, membership: Membership) -> None:
        super().__init__(me)
        self.membership = membership

    def react(self, world: World, now: int) -> Sequence[Debt]:
        return ()

    async def perform(self, debt: Debt, scope: contextlib.AsyncExitStack) -> Event | None:
        raise AssertionError(f"a router owes nothing, and was asked for {debt.effect}")

    def beat(self) -> Beat:
        return {"workers": sorted(self.membership.found)}

    def folded(self, world: World, batch: Sequence[Recorded]) -> None:
        self.membership.moved(world)


async def _build(config: Config, journal: Journal, me: Me, stack: contextlib.AsyncExitStack) -> Role:
    require_router(config)
    key = os.urandom(16).hex()
    child = Process(settings(config, key), config.folder("run") / f"{me.id}.sglang-router.log")
    stack.callback(child.end)
    session = await stack.enter_async_context(
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}, timeout=aiohttp.ClientTimeout(total=ANSWER_S))
    )
    membership = Membership(session, _url(config))
    await _ready(child, membership)
    log.info("SGLang's router listens on %s", membership.url)
    for part in (membership.keep(), child.ended()):
        task = asyncio.create_task(part)
        task.add_done_callback(_over)
        stack.callback(task.cancel)
    return Router(me, membership)


def _url(config: Config) -> str:
    """Where this process reaches it."""
    host = config.gateway.host
    return f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{config.inference.router_port}"


async def _ready(child: Process, membership: Membership) -> None:
    """Wait until it says who its workers are: nobody. Raises Unavailable when it ends first, or takes too long."""
    ended = asyncio.ensure_future(child.ended())
    try:
        async with asyncio.timeout(START_S):
            while not await _answers(membership):
                if ended.done():
                    raise Unavailable(ended.result())
                await asyncio.sleep(POLL_S)
    except TimeoutError as error:
        raise Unavailable(f"SGLang's router did not come up within {START_S:g} s:{child.last_words()}") from error
    finally:
        ended.cancel()


async def _answers(membership: Membership) -> bool:
    try:
        return await membership.workers() == []
    except Unavailable:
        return False


def _over(task: asyncio.Task[str]) -> None:
    """A role without its router, or whose router follows nobody, is none: end the process. The next boot starts another
    one, with the right workers from its first look."""
    if task.cancelled():
        return
    if error := task.exception():
        log.error("the router's workers cannot be followed", exc_info=error)
        os._exit(process.DEFECT)
    log.error("this boot ends: %s", task.result())
    os._exit(process.OVER)


def run(config: Config, id_: str) -> int:
    """Run a router in this process; returns its exit status."""
    return process.run(id_, config, _build)
