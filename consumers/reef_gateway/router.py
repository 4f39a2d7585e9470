"""Finds an engine that may generate, by the serving rule of its own fold, and asks it; waits while there is none.

Knows: the fold and engines' endpoints. Must not know: chat formats or records.
A request is routed by boot, never by address, and is asked again elsewhere when an engine goes away: an answer that
nobody recorded was never given.
"""

from __future__ import annotations

import asyncio
import collections
import logging
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import aiohttp
import msgspec

from reef_bus.backends import BOOT_HEADER, Generated, Prompt
from reef_bus.core.membership import Engine
from reef_bus.core.records import make_up
from reef_bus.core.serving import may_continue, present, serving, version
from reef_bus.core.world import World
from reef_bus.errors import Rejected
from reef_bus.events import Span

log = logging.getLogger(__name__)

BACK_OFF_S = 0.05
"""After an engine refused or broke off; doubles up to a second."""


class Router:
    """Routes to the engine with the fewest requests in flight."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self.session = session
        self.world = World()
        self.in_flight: dict[str, int] = {}
        self._gone: dict[str, asyncio.Future[None]] = {}
        self._moved = asyncio.Event()

    def moved(self, world: World) -> None:
        """The fold has moved: wake who waits for an engine, and free who waits for one that is out."""
        self.world = world
        self._moved.set()
        self._moved.clear()
        current = {engine.boot for engine in world.membership.engines.values() if present(world, engine)}
        for boot in [boot for boot in self._gone if boot not in current]:
            self._gone.pop(boot).set_result(None)

    async def generate(self, prompt: Prompt) -> Generated:
        """An answer by a release that this fold shows committed. Waits as long as the caller lets it."""
        pause, failures = BACK_OFF_S, collections.Counter[str]()
        while True:
            engine = await self._engine(prompt.scenario, failures)
            answer = await self._ask(engine, prompt)
            if answer and await self._holds(answer, prompt.scenario):
                return answer
            failures[engine.boot] += 1
            await asyncio.sleep(pause)
            pause = min(2 * pause, 1.0)

    def able(self, scenario: str = "") -> list[Engine]:
        """The engines that may generate, hold what the scenario is answered with, and whose process has not ended, as
        far as this fold shows."""
        world = self.world
        return [e for e in serving(world) if present(world, e) and version(world, e, scenario)]

    async def _engine(self, scenario: str, failures: Mapping[str, int]) -> Engine:
        """One that failed this request comes last: whoever refuses at once also has the fewest in flight."""
        while True:
            found = self.able(scenario)
            if found:
                return min(found, key=lambda e: (failures.get(e.boot, 0), self.in_flight.get(e.boot, 0)))
            await self._moved.wait()

    async def _ask(self, engine: Engine, prompt: Prompt) -> Generated | None:
        """The engine's answer, or None when it refused, broke off, or was replaced or excluded meanwhile."""
        gone = self._gone.setdefault(engine.boot, asyncio.get_running_loop().create_future())
        asked = asyncio.ensure_future(self._post(engine, prompt))
        self.in_flight[engine.boot] = self.in_flight.get(engine.boot, 0) + 1
        try:
            either: set[asyncio.Future[Any]] = {asked, gone}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            return asked.result() if asked.done() else None
        except (aiohttp.ClientError, msgspec.DecodeError, OSError) as error:
            log.info("%s boot %s: %s; asking again", engine.id, engine.boot, type(error).__name__)
            return None
        finally:
            asked.cancel()
            self.in_flight[engine.boot] -= 1
            if not self.in_flight[engine.boot]:
                del self.in_flight[engine.boot]

    async def _post(self, engine: Engine, prompt: Prompt) -> Generated | None:
        async with self.session.post(
            f"{engine.url}/generate", data=msgspec.json.encode(prompt), headers={BOOT_HEADER: engine.boot}
        ) as reply:
            body = await reply.read()
            if reply.status == 400:
                raise Rejected(f"the engine cannot serve this: {body.decode(errors='replace')[:200]}")
            return msgspec.json.decode(body, type=Generated) if reply.status == 200 else None

    async def _holds(self, answer: Generated, scenario: str) -> bool:
        """Every load id that the answer names is a committed release of the scenario: checked again, on a fold as far
        as the engine's; and if it names several, each of its tokens has one, and each of them may go on where the one
        before stopped."""
        if answer.spans and not make_up(answer.spans, _whole(answer)):
            log.warning("%s boot %s: its spans are not its answer: %s", answer.engine, answer.boot, answer.spans)
            return False
        while self.world.seq < max([answer.as_of, *(span.as_of for span in answer.spans)]):
            await self._moved.wait()
        published = self.world.publications
        releases, load_ids = published.releases, [answer.load_id, *(span.load_id for span in answer.spans)]
        committed = all(published.release(scenario, load_id) for load_id in load_ids)
        if committed and all(may_continue(releases, begun, load_id) for begun, load_id in pairwise(load_ids)):
            return True
        log.warning("%s boot %s: it names %s, not committed or not in place", answer.engine, answer.boot, load_ids)
        return False


def _whole(answer: Generated) -> Span:
    return Span(answer.load_id, 0, len(answer.completion.ids), answer.as_of, answer.done_as_of)
