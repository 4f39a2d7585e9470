"""SGLang's own router before engines: its workers are those that may generate, whatever ends and comes back.

Knows: the real router, whole deployments, histories. Must not know: how the router chooses among its workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import aiohttp
import psutil
from aiohttp import web
from msgspec.structs import replace

from consumers.reef_engine import native
from consumers.reef_router.launch import Process, settings
from consumers.reef_router.membership import Membership
from consumers.reef_router.role import _ready
from reef_bus.config import Config, Gateway, Inference
from reef_bus.events import EngineJoined, ReleaseCommitted
from reef_bus.http import listen
from reef_bus.journal import Beat
from tests.e2e.cluster import free_ports
from tests.e2e.live import CONFIG, Live, live
from tests.facts import E0, E1, SERVING, excluded, joined, released, target, trained
from tests.loop import until
from tests.spec import Said, Step, by, given

BODY = {"input_ids": [11, 7, 10], "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}
KEY = "the-key"


# -- the fields that we speak of are the fields of the SGLang that is installed

OF_THE_ROUTER = {"model"}  # which it adds to every body


def test_every_field_that_we_read_or_ignore_is_sglangs(imported: Callable[[str], ModuleType]) -> None:
    request = {each.name for each in dataclasses.fields(imported("sglang.srt.managers.io_struct").GenerateReqInput)}
    sampling = set(imported("sglang.srt.sampling.sampling_params").SamplingParams.__struct_fields__)
    assert {*native.Request.__struct_fields__, *native.BODY} - request == OF_THE_ROUTER
    assert {*native.Sampling.__struct_fields__, *native.SAMPLING} <= sampling


def test_what_we_take_for_a_default_is_sglangs_default(imported: Callable[[str], ModuleType]) -> None:
    params = imported("sglang.srt.sampling.sampling_params").SamplingParams()
    assert params.max_new_tokens == native.DEFAULT_TOKENS == native.Sampling().max_new_tokens
    assert (params.temperature, params.ignore_eos) == (native.Sampling().temperature, native.Sampling().ignore_eos)
    assert all(getattr(params, name) in may_be for name, may_be in native.SAMPLING.items() if may_be)


# -- histories, engines that only say who they are, and the router that is installed


class Engines:
    """Two addresses; each boot of an engine is heard under its own path, and refuses when it is told to."""

    def __init__(self) -> None:
        self.urls: dict[str, str] = {}
        self.asked: list[str] = []
        self.bodies: list[bytes] = []

    async def start(self, name: str, stack: contextlib.AsyncExitStack) -> None:
        async def generate(request: web.Request) -> web.Response:
            self.asked.append(request.match_info["boot"])
            self.bodies.append(await request.read())
            return web.json_response({"text": "", "output_ids": [1], "meta_info": {}})

        async def health(request: web.Request) -> web.Response:
            return web.Response()

        app = web.Application()
        app.add_routes([web.post("/boot/{boot}/generate", generate), web.get("/boot/{boot}/health", health)])
        self.urls[name] = await listen(app, "127.0.0.1", 0, stack)


class Routed:
    def __init__(self, membership: Membership, engines: Engines, url: str, session: aiohttp.ClientSession) -> None:
        self.membership, self.engines, self.url, self.session = membership, engines, url, session

    def see(self, *steps: Step) -> None:
        self.membership.moved(given(*map(self._at, steps)).world)

    def _at(self, step: Step) -> Step:
        """Who joins does so at the address that it has here."""
        if isinstance(step, Said):
            return step._replace(event=self._at(step.event))
        return replace(step, url=self.engines.urls[step.engine]) if isinstance(step, EngineJoined) else step

    async def has(self, *boots: str) -> None:
        async def listed() -> set[str]:
            return {worker.url.rpartition("/")[2] for worker in await self.membership.workers()}

        async with asyncio.timeout(5):
            while await listed() != set(boots):  # noqa: ASYNC110 - it says nothing by itself
                await asyncio.sleep(0.02)

    async def ask(self, times: int = 1) -> list[int]:
        found = []
        for _ in range(times):
            async with self.session.post(f"{self.url}/generate", json=BODY) as reply:
                found.append(reply.status)
        return found


@contextlib.asynccontextmanager
async def routed(folder: Path, timeout_s: float = 20.0) -> AsyncIterator[Routed]:
    [port] = free_ports(1)
    config = Config(gateway=Gateway(timeout_s=timeout_s), inference=Inference(router_port=port))
    async with contextlib.AsyncExitStack() as stack:
        engines = Engines()
        for name in ("e0", "e1"):
            await engines.start(name, stack)
        child = Process(settings(config, KEY), folder / "router.log")
        stack.callback(child.end)
        keyed = await stack.enter_async_context(aiohttp.ClientSession(headers={"Authorization": f"Bearer {KEY}"}))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        membership = Membership(keyed, f"http://127.0.0.1:{port}")
        await _ready(child, membership)
        keeping = asyncio.create_task(membership.keep())
        stack.callback(keeping.cancel)
        yield Routed(membership, engines, membership.url, session)


async def test_who_may_generate_is_a_worker_and_nobody_else(tmp_path: Path) -> None:
    async with routed(tmp_path) as found:
        found.see(*SERVING)
        await found.has("e0.1", "e1.1")
        assert await found.ask(4) == [200] * 4 and set(found.engines.asked) == {"e0.1", "e1.1"}
        fence = (*SERVING, *trained("c1"), target(1, "c1", E0, E1))
        found.see(*fence)
        await found.has()
        found.engines.asked.clear()
        asked = asyncio.create_task(found.ask())
        await asyncio.sleep(1)
        assert not asked.done() and found.engines.asked == []  # it waits at the router
        found.see(*SERVING, *trained("c1"), *released(1, "c1", E0, E1))
        await found.has("e0.1", "e1.1")
        assert await asked == [200]
        found.see(*SERVING, excluded("e0"))
        await found.has("e1.1")
        found.engines.asked.clear()
        assert await found.ask(4) == [200] * 4 and found.engines.asked == ["e1.1"] * 4


async def test_a_boot_that_comes_back_at_the_same_address_is_another_worker(tmp_path: Path) -> None:
    async with routed(tmp_path) as found:
        found.see(*SERVING)
        await found.has("e0.1", "e1.1")
        found.see(*SERVING, by("e0.2", joined("e0")))
        await found.has("e1.1")
        assert (await found.ask(4), set(found.engines.asked)) == ([200] * 4, {"e1.1"})


async def test_a_worker_that_nobody_wants_goes_and_one_that_is_lost_comes_back(tmp_path: Path) -> None:
    async with routed(tmp_path) as found:
        found.see(*SERVING)
        await found.has("e0.1", "e1.1")
        stranger = {"url": f"{found.engines.urls['e0']}/boot/e0.0"}
        async with found.membership.session.post(f"{found.url}/workers", json=stranger) as reply:
            assert reply.status == 202
        [first, *_] = await found.membership.workers()
        async with found.membership.session.delete(f"{found.url}/workers/{first.id}") as reply:
            assert reply.status == 202
        await asyncio.sleep(0.5)
        await found.has("e0.1", "e1.1")


async def test_nobody_without_the_key_adds_or_removes_a_worker(tmp_path: Path) -> None:
    async with routed(tmp_path) as found:
        found.see(*SERVING)
        await found.has("e0.1", "e1.1")
        [first, *_] = await found.membership.workers()
        async with found.session.post(f"{found.url}/workers", json={"url": "http://127.0.0.1:1"}) as reply:
            assert reply.status == 401
        async with found.session.delete(f"{found.url}/workers/{first.id}") as reply:
            assert reply.status == 401


async def test_every_field_that_we_read_comes_through(tmp_path: Path) -> None:
    async with routed(tmp_path) as found:
        found.see(*SERVING)
        await found.has("e0.1", "e1.1")
        sampling = {"max_new_tokens": 3, "temperature": 0.5, "ignore_eos": True, "sampling_seed": 7}
        sent = {
            "input_ids": [1, 2],
            "sampling_params": sampling,
            "return_logprob": True,
            "lora_path": "math",
            "rid": "r1",
        }
        async with found.session.post(f"{found.url}/generate", json=sent) as reply:
            assert reply.status == 200
        assert native.read(found.engines.bodies[-1]) == native.read(json.dumps(sent).encode())


# -- a whole deployment


class Client:
    """Asks without end, as rollout code would; every answer has to come."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url, self.session = url, session
        self.answers: list[dict[str, Any]] = []
        self.refused: list[tuple[int, str]] = []

    async def ask(self) -> None:
        async with self.session.post(self.url + "/generate", json={**BODY, "return_logprob": True}) as reply:
            if reply.status == 200:
                self.answers.append(await reply.json())
            else:
                self.refused.append((reply.status, await reply.text()))

    async def go_on(self) -> None:
        while True:
            with contextlib.suppress(aiohttp.ClientError):  # the router itself is being killed
                await self.ask()
            await asyncio.sleep(0.05)

    async def more(self, count: int = 10) -> None:
        enough = len(self.answers) + count
        await until(lambda: len(self.answers) >= enough, 30.0)

    def named(self) -> set[str]:
        return {part["version"] for answer in self.answers for part in answer["meta_info"]["weight_versions"]}


def kill_process(found: Live) -> None:
    """SGLang's, below the role's, which then ends by itself."""
    [process] = psutil.Process(found.running.supervisor.children["router"].pid).children()
    found.killed["router"] = found.world.components["router"].starts
    process.kill()


async def test_a_deployment_is_served_through_releases_and_kills(tmp_path: Path) -> None:
    [port] = free_ports(1)
    config = replace(CONFIG, inference=replace(CONFIG.inference, router_port=port))
    workers: list[list[str]] = []

    def hear(beat: Beat) -> None:
        if beat.get("id") == "router":
            workers.append([str(url).rpartition("/")[2] for url in beat["workers"]])

    def boots(found: Live) -> list[str]:
        return sorted(engine.boot for engine in found.world.membership.engines.values())

    async with live(tmp_path / "state", config) as found, aiohttp.ClientSession() as session:
        await found.running.journal.beats(hear)
        client = Client(f"http://127.0.0.1:{port}", session)
        both = lambda: bool(workers) and sorted(workers[-1]) == boots(found)  # noqa: E731
        await found.until("the router has both engines", both)
        asking = [asyncio.create_task(client.go_on()) for _ in range(3)]
        await found.until("three releases", lambda: found.releases() >= 3, 90.0)
        await client.more()
        assert client.refused == []

        dead = found.world.membership.engines["engine-0"].boot
        found.kill("engine-0")
        await client.more()
        await found.until("the new boot of the engine is there", lambda: found.whole() and dead not in boots(found))
        await found.until("and a worker", lambda: found.all_serve() and both())
        assert client.refused == [] and dead not in workers[-1]

        for kill in (lambda: found.kill("router"), lambda: kill_process(found)):
            kill()
            workers.clear()
            await found.until("the router is back, with both engines", lambda: found.whole() and both())
            await client.more()
            assert client.refused == []
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        committed = {r.event.load_id for r in found.events if isinstance(r.event, ReleaseCommitted)}
        registered = set(found.world.publications.releases) - committed
        assert len(client.named()) >= 3 and client.named() <= committed | registered and len(registered) == 1
        assert (await found.audit()).violations == ()
    [answer, *_] = client.answers
    assert [token for _, token, _ in answer["meta_info"]["output_token_logprobs"]] == answer["output_ids"]
    assert len(answer["output_ids"]) == answer["meta_info"]["completion_tokens"] == 4
