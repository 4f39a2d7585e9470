"""Keeps the router's workers equal to the engines that may generate: add, remove, look again.

Knows: the fold, the routes by which sglang-router 0.3.2 is told. Must not know: its process, requests, or weights.
Level-triggered: what is there is read anew each time, so that a lost answer, a worker that comes late and one that
nobody wants are all the same case. A worker's URL names its boot, so none is ever taken for another. An API key would
not do: the router keeps the first one that it was given for a URL, and lists none.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import aiohttp

from reef_bus.backends import boot_url
from reef_bus.core.serving import present, serving
from reef_bus.core.world import World
from reef_bus.errors import Unavailable

log = logging.getLogger(__name__)

LOOK_S = 0.25
AGAIN_S = 1.0
"""When a worker is added once more that the router accepted and does not list: its registration may have failed. While
that still goes on, the router takes both for one."""
SILENT_S = 30.0
"""A router that does not answer for so long is of no use."""


class Worker(NamedTuple):
    id: str
    url: str


def members(world: World) -> frozenset[str]:
    """Where the engines answer that may generate and whose process has not ended, as far as this fold shows."""
    return frozenset(boot_url(engine.url, engine.boot) for engine in serving(world) if present(world, engine))


def difference(wanted: frozenset[str], have: Sequence[Worker]) -> tuple[list[str], list[str]]:
    """The URLs to add, and the ids to remove: of what is not wanted, and of what is there twice."""
    first: dict[str, str] = {}
    for worker in have:
        first.setdefault(worker.url, worker.id)
    stays = {id_ for url, id_ in first.items() if url in wanted}
    return sorted(wanted - first.keys()), [worker.id for worker in have if worker.id not in stays]


class Membership:
    """What the router at `url` is to have, and how it gets there."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self.session, self.url = session, url
        self.wanted: frozenset[str] = frozenset()
        self.found: frozenset[str] = frozenset()  # at the last look
        self._added: dict[str, float] = {}  # by URL: when the router accepted it
        self._moved = asyncio.Event()

    def moved(self, world: World) -> None:
        """The fold has moved."""
        wanted = members(world)
        if wanted != self.wanted:
            self.wanted = wanted
            self._moved.set()

    async def keep(self) -> str:
        """Until the router has failed for too long; says how. Whatever fails is seen again at the next look."""
        loop = asyncio.get_running_loop()
        settled = loop.time()
        while True:
            self._moved.clear()
            try:
                await self.settle()
                settled = loop.time()
            except Unavailable as error:
                if loop.time() - settled > SILENT_S:
                    return str(error)
                log.warning("%s; asking again", error)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._moved.wait()

    async def settle(self) -> None:
        """Remove first: who is fenced gets nothing new. Raises Unavailable when it does not do as it is told."""
        wanted, have = self.wanted, await self.workers()
        add, remove = difference(wanted, have)
        self.found = frozenset(worker.url for worker in have)
        self._added = {url: at for url, at in self._added.items() if url in wanted - self.found}
        for id_ in remove:
            await self._ask("DELETE", f"/workers/{id_}", (200, 202, 404))
        for url in add:
            await self._add(url)

    async def workers(self) -> list[Worker]:
        """Raises Unavailable."""
        said = await self._ask("GET", "/workers", (200,))
        try:
            return [Worker(str(each["id"]), str(each["url"])) for each in said["workers"]]
        except (KeyError, TypeError) as error:
            raise Unavailable(f"the router lists its workers as {said!r}") from error

    async def _add(self, url: str) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._added.get(url, -AGAIN_S) < AGAIN_S:
            return
        await self._ask("POST", "/workers", (200, 202), {"url": url})
        self._added[url] = now

    async def _ask(self, method: str, route: str, expected: tuple[int, ...], body: Any = None) -> Any:
        try:
            async with self.session.request(method, self.url + route, json=body) as reply:
                if reply.status not in expected:
                    text = (await reply.text(errors="replace"))[:200]
                    raise Unavailable(f"the router answered {method} {route} with {reply.status}: {text}")
                return await reply.json(content_type=None)
        except (aiohttp.ClientError, OSError, ValueError) as error:  # TimeoutError is an OSError
            raise Unavailable(f"the router does not answer {method} {route}: {error!r}") from error
