"""What every process of the baselines has: a few HTTP routes, calls with a timeout, and the moment of its own death.

Knows: ports of this machine, aiohttp, SIGKILL. Must not know: any pattern.

A victim is told a named point of an update and sends SIGKILL to itself there. It is the same signal, and nothing
of the process runs after it, but it hits where the seed says instead of where a loaded machine happens to be.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from tests.bench.baselines.engine import Engine
from tests.bench.baselines.weights import fingerprint

HOST = "127.0.0.1"
STEP_S = 5.0
"""The timeout of every step of every pattern: one call, one collective, one wait for a peer that restarts."""
START_S = 60.0  # of a whole fleet, on a machine that does other things too
POLL_S = 0.05

Json = dict[str, Any]
Handler = Callable[[Json], Awaitable[Json]]


class Moment:
    """The point at which this process is to die, if any."""

    def __init__(self) -> None:
        self.point, self.note = "", ""

    async def arm(self, body: Json) -> Json:
        self.point, self.note = body["point"], body["note"]
        return {}

    def reached(self, point: str) -> None:
        if point == self.point:
            Path(self.note).write_text(str(time.monotonic()))  # one clock for all processes of a machine
            os.kill(os.getpid(), signal.SIGKILL)


def route(path: str, handler: Handler) -> web.RouteDef:
    """JSON in, JSON out; what the handler raises is the caller's error 500, as with any web framework."""

    async def answer(request: web.Request) -> web.Response:
        try:
            return web.json_response(await handler(await request.json()))
        except Exception as error:
            return web.json_response({"error": repr(error)}, status=500)

    return web.post(path, answer)


def engine_routes(engine: Engine, moment: Moment) -> list[web.RouteDef]:
    """What an engine offers to those who ask; `/pause` and `/resume` are for whoever updates it."""

    async def ask(_: Json) -> Json:
        while (found := engine.answer()) is None:  # noqa: ASYNC110  (an engine is written to from threads)
            await asyncio.sleep(0.005)
        return found

    async def pause(_: Json) -> Json:
        engine.pause()
        moment.reached("paused")
        return {}

    async def resume(_: Json) -> Json:
        moment.reached("resuming")
        engine.resume()
        moment.reached("resumed")
        return {}

    async def state(_: Json) -> Json:
        return {"pid": os.getpid()}

    async def memory(_: Json) -> Json:
        return {"found": fingerprint(engine.tensors)}

    handlers = {"/ask": ask, "/pause": pause, "/resume": resume, "/state": state, "/memory": memory}
    handlers["/moment"] = moment.arm
    return [route(path, handler) for path, handler in handlers.items()]


async def serve(port: int, routes: Iterable[web.RouteDef]) -> None:
    """Returns once the port answers. A restarted process may find the port still in its predecessor's hands."""
    app = web.Application()
    app.add_routes(routes)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    async with asyncio.timeout(START_S):
        await _listen(runner, port)


async def _listen(runner: web.AppRunner, port: int) -> None:
    while True:
        try:
            return await web.TCPSite(runner, HOST, port, reuse_address=True).start()
        except OSError:
            await asyncio.sleep(POLL_S)


async def within(waiting: Coroutine[Any, Any, Any]) -> Any:
    async with asyncio.timeout(STEP_S):
        return await waiting


class Peers:
    """Calls to other processes; each raises after STEP_S, or for any answer but 200."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self.session = session

    async def call(self, port: int, path: str, **body: Any) -> Json:
        async with self.session.post(f"http://{HOST}:{port}{path}", json=body) as reply:
            found: Json = await reply.json()
            if reply.status != 200:
                raise RuntimeError(f"{path} of {port}: {found['error']}")
            return found

    async def everyone(self, ports: Iterable[int], path: str, **body: Any) -> list[Json]:
        """Raises the first error, after everybody has answered or failed."""
        found = await self.everyone_who_can(ports, path, **body)
        for each in found:
            if isinstance(each, BaseException):
                raise each
        return [each for each in found if isinstance(each, dict)]

    async def everyone_who_can(self, ports: Iterable[int], path: str, **body: Any) -> list[Json | BaseException]:
        return await asyncio.gather(*(self.call(port, path, **body) for port in ports), return_exceptions=True)

    async def up(self, ports: Iterable[int]) -> None:
        """Wait until all of them answer."""
        ports = list(ports)
        while not all(isinstance(each, dict) for each in await self.everyone_who_can(ports, "/state")):  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)


def connection() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=STEP_S))


Update = Callable[[], Coroutine[Any, Any, None]]


async def twice(what: str, update: Update, ready: Update) -> bool:
    """The one retry of every pattern: if `update` fails, wait until everybody is `ready`, and update once more.

    Returns whether it succeeded. Whoever fails twice says so, gives this version up, and lives on for the next one.
    """
    for attempt in (1, 2):
        try:
            await update()
            return True
        except Exception as error:
            print(f"{what}: attempt {attempt} failed: {error!r}", file=sys.stderr, flush=True)
        with contextlib.suppress(Exception):
            await within(ready())
    return False
