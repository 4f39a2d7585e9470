"""The engine's endpoint: who waits, who is answered, by which weights, and what a bad request may not spoil.

Knows: the server over the agent's gate and lock. Must not know: a model.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from consumers.reef_engine import endpoint as endpoint_module
from consumers.reef_engine.server import Server
from reef_bus.backends import BOOT_HEADER, Generated, Prompt
from reef_bus.errors import Rejected
from reef_bus.http import listen
from tests.facts import E0, E1, SERVING, target, trained
from tests.loop import until
from tests.unit.test_agent import BASE, Floats, agent, memory, see

FENCED = (*SERVING, *trained("c1"), target(1, "c1", E0, E1))
PROMPT = Prompt(ids=(1, 2), max_tokens=4)


class Running:
    """A server that generates, and a client of it."""

    def __init__(
        self, server: Server, url: str, session: aiohttp.ClientSession, worker: asyncio.Task[None] | None = None
    ) -> None:
        self.server, self.url, self.session, self.worker = server, url, session, worker
        self.backend = server.agent.backend
        assert isinstance(self.backend, Floats)

    async def ask(self, prompt: Prompt = PROMPT, boot: str = "e0.1", body: bytes = b"") -> tuple[int, Any]:
        data = body or msgspec.json.encode(prompt)
        headers = {BOOT_HEADER: boot}
        async with asyncio.timeout(5), self.session.post(f"{self.url}/generate", data=data, headers=headers) as reply:
            read = await reply.read()
            return reply.status, msgspec.json.decode(read, type=Generated) if reply.status == 200 else read


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[Running]:
    found = agent(tmp_path)
    memory(found)[:] = BASE
    server = Server(found, max_batch=8)
    app = web.Application()
    app.add_routes(server.routes())
    async with contextlib.AsyncExitStack() as stack:
        url = await listen(app, "127.0.0.1", 0, stack)
        session = await stack.enter_async_context(aiohttp.ClientSession())
        worker = asyncio.create_task(server.work())
        yield Running(server, url, session, worker)
        worker.cancel()
        await asyncio.gather(worker, return_exceptions=True)


async def test_an_answer_names_engine_boot_release_and_fold(running: Running) -> None:
    see(running.server.agent, *SERVING)
    status, found = await running.ask()
    assert status == 200
    assert (found.engine, found.boot, found.load_id, found.as_of, found.done_as_of) == ("e0", "e0.1", "inc:0", 7, 7)
    assert found.completion.ids == tuple(BASE[:4])


async def test_another_boots_request_is_refused_even_while_nothing_may_generate(running: Running) -> None:
    assert (await running.ask(boot="e0.0"))[0] == 409


async def test_what_cannot_be_read_is_refused(running: Running) -> None:
    assert (await running.ask(body=b"{"))[0] == 400


async def test_a_request_waits_for_the_gate(running: Running) -> None:
    see(running.server.agent, *FENCED)
    asked = asyncio.create_task(running.ask())
    await asyncio.sleep(0.05)
    assert not asked.done() and running.backend.batches == []
    see(running.server.agent, *SERVING)
    assert (await asked)[0] == 200


async def test_a_gate_that_closes_before_generation_has_the_memory_loses_nobody(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with a full queue: there is no room to put anybody back."""
    monkeypatch.setattr(running.server, "queue", asyncio.Queue(1))
    found = running.server.agent
    worker = asyncio.create_task(running.server.work())  # the fixture's waits at the queue that was replaced
    async with found.memory:
        see(found, *SERVING)
        first = asyncio.create_task(running.ask())
        await until(lambda: running.server.queue.empty() and bool(found.memory._waiters))
        second = asyncio.create_task(running.ask())
        await until(running.server.queue.full)
        see(found, *FENCED)
    await asyncio.sleep(0.02)
    assert running.backend.batches == []
    see(found, *SERVING)
    assert [(await asked)[0] for asked in (first, second)] == [200, 200]
    worker.cancel()
    await asyncio.gather(worker, return_exceptions=True)


async def test_too_many_waiting_is_said_at_once(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running.server, "queue", asyncio.Queue(1))
    asked = asyncio.create_task(running.ask())
    await until(running.server.queue.full)
    assert (await running.ask())[0] == 503
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    assert endpoint_module.MAX_WAITING == 4096


async def test_a_prompt_that_is_refused_spoils_nobody_elses_answer(running: Running) -> None:
    see(running.server.agent, *FENCED)
    bad = Prompt(ids=(1,) * 5, max_tokens=4)
    asked = [asyncio.create_task(running.ask(prompt)) for prompt in (PROMPT, bad, PROMPT)]
    await until(lambda: running.server.queue.qsize() == 2)
    see(running.server.agent, *SERVING)
    assert [(await each)[0] for each in asked] == [200, 400, 200]


async def test_what_the_engine_cannot_do_now_is_asked_again_and_no_mistake_of_whoever_asked(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    see(running.server.agent, *SERVING)
    monkeypatch.setattr(Floats, "generate", lambda *_: (_ for _ in ()).throw(Rejected("the queue is full", 503)))
    assert await running.ask() == (503, b'{"error": "the queue is full"}')


async def test_nothing_is_generated_for_who_has_gone(running: Running) -> None:
    see(running.server.agent, *FENCED)
    asked = [asyncio.create_task(running.ask())]
    await until(lambda: len(running.server._asked) == 1 and running.server.queue.empty())  # it waits for the gate
    asked += [asyncio.create_task(running.ask()) for _ in range(2)]
    await until(lambda: running.server.queue.qsize() == 2)
    asked[1].cancel()
    await asyncio.gather(asked[1], return_exceptions=True)
    waiting = list(running.server.queue._queue)  # type: ignore[attr-defined]
    await until(lambda: any(each.done.cancelled() for each in waiting))
    see(running.server.agent, *SERVING)
    assert [(await each)[0] for each in (asked[0], asked[2])] == [200, 200]
    assert sum(running.backend.batches) == 2


async def test_who_generates_is_generated_to_the_end_before_a_fence_has_the_memory(running: Running) -> None:
    found, backend = running.server.agent, running.backend
    see(found, *SERVING)
    backend.may_end.clear()
    asked = asyncio.create_task(running.ask())
    await until(found.memory.locked)
    see(found, *FENCED)
    fence = asyncio.create_task(found.memory.acquire())
    await asyncio.sleep(0.02)
    assert not fence.done()
    backend.may_end.set()
    assert (await asked)[1].load_id == "inc:0"
    assert await fence
    found.memory.release()


async def test_health_names_the_boot_and_what_it_serves(running: Running) -> None:
    see(running.server.agent, *SERVING)
    async with running.session.get(f"{running.url}/healthz") as reply:
        assert await reply.json() == {"boot": "e0.1", "serving": "inc:0"}


async def test_whoever_waits_when_the_engine_ends_is_told_at_once(running: Running) -> None:
    """Those in hand and those in the queue: else their connections would hold the process up, for no answer at all."""
    found, backend = running.server.agent, running.backend
    see(found, *SERVING)
    backend.may_end.clear()
    asked = [asyncio.create_task(running.ask()) for _ in range(3)]
    await until(lambda: found.memory.locked() and len(running.server._asked) == 3)
    assert running.worker
    running.worker.cancel()
    backend.may_end.set()
    assert [(await each)[0] for each in asked] == [503] * 3


async def test_whoever_asks_when_the_engine_has_ended_is_told_at_once(running: Running) -> None:
    """Connections outlive the worker for a moment: a request that nobody takes would hold the process up."""
    see(running.server.agent, *SERVING)
    assert running.worker
    running.worker.cancel()
    await asyncio.gather(running.worker, return_exceptions=True)
    assert (await running.ask())[0] == 503


async def test_a_lease_that_ends_as_generation_begins_ends_no_engine(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gate was open: the batch is in hand, as if the lease had ended a moment later."""
    looks = iter([True])
    see(running.server.agent, *SERVING)
    monkeypatch.setattr(running.server.agent, "_in_touch", lambda: next(looks, False))
    assert (await running.ask())[0] == 200
    assert running.worker and not running.worker.done()
