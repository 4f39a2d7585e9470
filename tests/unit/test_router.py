"""Who the workers of SGLang's router are to be, how it is told, and what its configuration refuses.

Knows: histories, a router that is a few lines. Must not know: the real one, which tests/sglang runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from msgspec.structs import replace

from consumers.reef_router import launch
from consumers.reef_router import membership as membership_module
from consumers.reef_router.launch import Process, settings
from consumers.reef_router.membership import Membership, Worker, difference, members
from reef_bus import config as config_module
from reef_bus.config import Config, Gateway, Inference, Metrics, Training, check, require_router
from reef_bus.errors import Rejected, Unavailable
from reef_bus.events import ComponentLost
from reef_bus.http import listen
from tests.facts import (
    E0,
    E1,
    FROZEN,
    MATH,
    SERVING,
    adapter_trained,
    excluded,
    fenced,
    joined,
    released,
    target,
    trained,
)
from tests.loop import until
from tests.spec import Step, by, given

BOTH = {"http://e0/boot/e0.1", "http://e1/boot/e1.1"}
ROUTED = Config(inference=Inference(router_port=30000))


# -- who they are

TARGETED = (*SERVING, *trained("c1"), target(1, "c1", E0, E1))

HISTORIES: list[tuple[str, tuple[Step, ...], set[str]]] = [
    ("before anybody joined", SERVING[:1], set()),
    ("both serve", SERVING, BOTH),
    ("a fence is up, and nobody has stopped yet", TARGETED, set()),
    ("one has stopped", (*TARGETED, fenced("e0", 1)), set()),
    ("the release is committed", (*SERVING, *trained("c1"), *released(1, "c1", E0, E1)), BOTH),
    ("one is excluded", (*SERVING, excluded("e0")), {"http://e1/boot/e1.1"}),
    ("one was started again, and holds nothing", (*SERVING, by("e0.2", joined("e0"))), {"http://e1/boot/e1.1"}),
    ("the process of one has ended", (*SERVING, ComponentLost(component="e0", exit=-9)), {"http://e1/boot/e1.1"}),
    ("adapters over a frozen base", FROZEN, BOTH),
    ("an adapter is selected", (*FROZEN, *adapter_trained(MATH, "m1")), BOTH),
]


@pytest.mark.parametrize(("steps", "expected"), [row[1:] for row in HISTORIES], ids=[row[0] for row in HISTORIES])
def test_the_workers_are_the_boots_that_may_generate(steps: tuple[Step, ...], expected: set[str]) -> None:
    assert members(given(*steps).world) == expected


DIFFERENCES = [
    ({"a", "b"}, [], ["a", "b"], []),
    ({"a"}, [("1", "a")], [], []),
    ({"a"}, [("1", "a"), ("2", "b")], [], ["2"]),
    ({"a"}, [("1", "a"), ("2", "a")], [], ["2"]),
    (set(), [("1", "a"), ("2", "a")], [], ["1", "2"]),
    ({"a/boot/2"}, [("1", "a/boot/1")], ["a/boot/2"], ["1"]),
]


@pytest.mark.parametrize(("wanted", "have", "add", "remove"), DIFFERENCES)
def test_what_is_missing_is_added_and_what_is_too_much_removed(
    wanted: set[str], have: list[tuple[str, str]], add: list[str], remove: list[str]
) -> None:
    assert difference(frozenset(wanted), [Worker(*each) for each in have]) == (add, remove)


# -- how it is told


class Fake:
    """A router: what it registers takes until the test lets it."""

    def __init__(self) -> None:
        self.workers: dict[str, str] = {}
        self.pending: list[str] = []
        self.posts: list[str] = []
        self.broken = ""
        self.slow = False

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/workers", self.get),
            web.post("/workers", self.post),
            web.delete("/workers/{id}", self.delete),
        ]

    async def get(self, request: web.Request) -> web.Response:
        if self.broken:
            return web.Response(status=500, text=self.broken)
        return web.json_response({"workers": [{"id": id_, "url": url} for id_, url in self.workers.items()]})

    async def post(self, request: web.Request) -> web.Response:
        self.posts.append((await request.json())["url"])
        self.pending.append(self.posts[-1])
        if not self.slow:
            self.register()
        return web.json_response({"status": "accepted"}, status=202)

    def register(self) -> None:
        for url in self.pending:
            self.workers[f"id-{len(self.posts)}-{url}".replace("/", "_")] = url
        self.pending.clear()

    async def delete(self, request: web.Request) -> web.Response:
        gone = self.workers.pop(request.match_info["id"], "")
        return web.json_response({}, status=202 if gone else 404)

    def urls(self) -> list[str]:
        return sorted(self.workers.values())


@contextlib.asynccontextmanager
async def followed() -> AsyncIterator[tuple[Fake, Membership]]:
    fake, app = Fake(), web.Application()
    app.add_routes(fake.routes())
    async with contextlib.AsyncExitStack() as stack:
        url = await listen(app, "127.0.0.1", 0, stack)
        yield fake, Membership(await stack.enter_async_context(aiohttp.ClientSession()), url)


async def test_what_cannot_be_told_now_is_told_at_the_next_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership_module, "LOOK_S", 0.01)
    async with followed() as (fake, membership):
        fake.broken = "no"
        keeping = asyncio.create_task(membership.keep())
        membership.moved(given(*SERVING).world)
        await asyncio.sleep(0.05)
        assert fake.posts == [] and not keeping.done()
        fake.broken = ""
        await until(lambda: set(fake.urls()) == BOTH)
        membership.moved(given(*TARGETED).world)
        await until(lambda: fake.urls() == [])
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)


async def test_a_router_that_fails_for_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership_module, "LOOK_S", 0.01)
    monkeypatch.setattr(membership_module, "SILENT_S", 0.05)
    async with followed() as (fake, membership):
        fake.broken = "out of order"
        async with asyncio.timeout(2):
            assert "out of order" in await membership.keep()


async def test_what_it_is_registering_already_is_not_asked_twice() -> None:
    async with followed() as (fake, membership):
        fake.slow = True
        membership.moved(given(*SERVING).world)
        for _ in range(3):
            await membership.settle()
        assert sorted(fake.posts) == sorted(BOTH)


async def test_what_it_accepted_and_does_not_list_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership_module, "AGAIN_S", 0.02)
    async with followed() as (fake, membership):
        fake.slow = True
        membership.moved(given(*SERVING).world)
        await membership.settle()
        await asyncio.sleep(0.03)
        await membership.settle()
        assert len(fake.posts) == 4


async def test_a_worker_that_is_registered_when_nobody_wants_it_any_more_goes_at_the_next_look() -> None:
    async with followed() as (fake, membership):
        fake.slow = True
        membership.moved(given(*SERVING).world)
        await membership.settle()
        membership.moved(given(*TARGETED).world)
        fake.register()
        assert set(fake.urls()) == BOTH
        await membership.settle()
        assert fake.urls() == []


async def test_an_engine_that_comes_back_is_added_at_once_not_after_its_last_registration() -> None:
    async with followed() as (fake, membership):
        for world in (given(*SERVING).world, given(*TARGETED).world, given(*SERVING).world):
            membership.moved(world)
            await membership.settle()
        assert set(fake.urls()) == BOTH and len(fake.posts) == 4


@pytest.mark.parametrize("said", [{"workers": [{"id": "1"}]}, [], {"error": "x"}])
async def test_a_list_that_is_none_is_not_taken_for_an_empty_one(said: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async with followed() as (_, membership):

        async def answer(*_: Any) -> Any:
            return said

        monkeypatch.setattr(membership, "_ask", answer)
        with pytest.raises(Unavailable, match="lists its workers as"):
            await membership.workers()


# -- its process


def test_its_settings_keep_strangers_out_and_retry_for_as_long_as_a_request_may_take() -> None:
    found = settings(replace(ROUTED, gateway=Gateway(host="10.0.0.1", timeout_s=60.0)), "the-key")
    assert (found["host"], found["port"], found["request_timeout_secs"]) == ("10.0.0.1", 30000, 60)
    assert found["retry_max_retries"] * found["retry_max_backoff_ms"] == 60_000
    assert found["control_plane_api_keys"] == [("reef", "reef", "the-key", "admin")]


async def test_a_process_that_ends_says_how_and_the_key_is_not_on_its_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This python has no sglang_router, or a router that these settings do not suit: it ends."""
    seen: list[list[str]] = []
    real = subprocess.Popen

    def popen(argv: list[str], **how: Any) -> subprocess.Popen[bytes]:
        seen.append(argv)
        return real([sys.executable, "-c", "import sys; print(sys.stdin.read()[:40]); sys.exit(7)"], **how)

    monkeypatch.setattr(launch.subprocess, "Popen", popen)
    child = Process({"key": "secret"}, tmp_path / "out.log")
    async with asyncio.timeout(10):
        said = await child.ended()
    child.end()
    child.end()
    assert "status 7" in said and json.dumps({"key": "secret"}).replace(" ", "") in said
    assert not any("secret" in word for argv in seen for word in argv)


# -- its configuration


def test_by_default_there_is_none() -> None:
    assert "router" not in Config().components()


def test_it_is_started_last_and_moves_nobody_elses_metrics_port() -> None:
    assert list(ROUTED.components().items())[-1] == ("router", "router")
    before, after = (replace(each, metrics=Metrics(port=9000)) for each in (Config(), ROUTED))
    same = [*before.components(), "supervisor"]
    assert [after.metrics_port(name) for name in same] == [before.metrics_port(name) for name in same]
    assert after.metrics_port("router") == after.metrics_port("supervisor") + 1
    attached = replace(after, training=Training(backend="attached"))
    assert attached.metrics_port("router") == attached.metrics_port("trainer") + 1


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_port_that_is_none_is_refused(port: int) -> None:
    with pytest.raises(Rejected, match="router-port"):
        check(Config(inference=Inference(router_port=port)))


def test_the_gateways_port_is_refused() -> None:
    with pytest.raises(Rejected, match="both 30000"):
        check(replace(ROUTED, gateway=Gateway(port=30000)))


def test_no_engine_has_its_name() -> None:
    with pytest.raises(Rejected, match="'router'"):
        check(Config(inference=Inference(engines=("router",))))


def test_a_host_without_one_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_module, "_installed", lambda module: module != "sglang_router")
    check(ROUTED)  # other hosts need none
    with pytest.raises(Rejected, match=r"reef-bus\[router\]"):
        require_router(ROUTED)


def test_a_router_that_nobody_asked_for_is_not_started() -> None:
    with pytest.raises(Rejected, match="router-port is 0"):
        require_router(Config())
