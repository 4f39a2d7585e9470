"""SGLang's native route of an engine: what is answered, in which shape, and what is refused in so many words.

Knows: the routes over an agent's gate, without a model. Must not know: SGLang's router; tests/sglang runs the real one.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from msgspec.structs import replace

from consumers.reef_engine import native
from consumers.reef_engine.native import Native
from consumers.reef_engine.server import Server
from reef_bus.backends import Completion, Generated
from reef_bus.config import Adapters
from reef_bus.errors import Rejected
from reef_bus.events import Span
from reef_bus.http import listen
from tests.facts import E0, E1, FROZEN, MATH, SERVING, target, trained
from tests.unit.test_agent import BASE, agent, memory, see

FENCED = (*SERVING, *trained("c1"), target(1, "c1", E0, E1))
SAMPLING = {"max_new_tokens": 4, "temperature": 0.5, "ignore_eos": True}
BODY: dict[str, Any] = {"input_ids": [1, 2], "sampling_params": SAMPLING}

# What sglang-router 0.3.2 made of the body above with return_logprob, as a worker that printed it was sent it.
REWRITTEN = {
    "model": None,
    "input_ids": [1, 2],
    "sampling_params": {"temperature": 0.5, "max_new_tokens": 4, "ignore_eos": True},
    "return_logprob": True,
    "return_text_in_logprobs": False,
    "stream": False,
    "log_metrics": True,
    "return_hidden_states": False,
    "background": False,
    "no_logs": False,
    "return_bytes": False,
    "return_entropy": False,
}


class Running:
    def __init__(self, server: Server, url: str, session: aiohttp.ClientSession) -> None:
        self.server, self.url, self.session = server, url, session

    async def ask(self, boot: str = "e0.1", **fields: Any) -> tuple[int, Any]:
        url = f"{self.url}/boot/{boot}/generate"
        async with asyncio.timeout(5), self.session.post(url, json={**BODY, **fields}) as reply:
            return reply.status, await reply.json()

    async def healthy(self, boot: str = "e0.1") -> bool:
        async with self.session.get(f"{self.url}/boot/{boot}/health") as reply:
            assert reply.status in (200, 503)
            return reply.status == 200


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[Running]:
    found = agent(tmp_path)
    memory(found)[:] = BASE
    server = Server(found, max_batch=8)
    app = web.Application()
    app.add_routes([*server.routes(), *Native(server).routes()])
    async with contextlib.AsyncExitStack() as stack:
        url = await listen(app, "127.0.0.1", 0, stack)
        session = await stack.enter_async_context(aiohttp.ClientSession())
        worker = asyncio.create_task(server.work())
        yield Running(server, url, session)
        worker.cancel()
        await asyncio.gather(worker, return_exceptions=True)


async def test_an_answer_is_in_sglangs_shape_and_names_its_release(running: Running) -> None:
    see(running.server.agent, *SERVING)
    status, found = await running.ask(rid="r1", return_logprob=True)
    ids = [int(each) for each in BASE[:4]]
    logprobs = found["meta_info"].pop("output_token_logprobs")
    assert status == 200 and found["output_ids"] == ids
    assert [(token, text) for _, token, text in logprobs] == [(each, None) for each in ids]
    assert found["meta_info"] == {
        "id": "r1",
        "finish_reason": {"type": "length", "length": 4},
        "prompt_tokens": 2,
        "completion_tokens": 4,
        "weight_version": "inc:0",
        "weight_versions": [{"version": "inc:0", "start": 0, "end": 4}],
        "input_token_logprobs": [],
    }


async def test_without_return_logprob_there_is_none(running: Running) -> None:
    see(running.server.agent, *SERVING)
    assert "output_token_logprobs" not in (await running.ask())[1]["meta_info"]


async def test_what_the_router_makes_of_a_body_is_answered(running: Running) -> None:
    see(running.server.agent, *SERVING)
    assert (await running.ask(**REWRITTEN))[0] == 200


async def test_it_is_healthy_only_while_it_may_generate(running: Running) -> None:
    assert not await running.healthy()
    see(running.server.agent, *SERVING)
    assert await running.healthy() and not await running.healthy("e0.0")
    see(running.server.agent, *FENCED)
    assert not await running.healthy()


async def test_another_boots_request_is_to_be_asked_elsewhere(running: Running) -> None:
    see(running.server.agent, *SERVING)
    status, found = await running.ask(boot="e0.0")
    assert status == 503 and "e0.1" in found["error"]["message"]


async def test_a_request_waits_for_the_gate(running: Running) -> None:
    see(running.server.agent, *FENCED)
    asked = asyncio.create_task(running.ask())
    await asyncio.sleep(0.05)
    assert not asked.done()
    see(running.server.agent, *SERVING)
    assert (await asked)[0] == 200


async def test_too_many_waiting_and_an_end_are_to_be_asked_elsewhere(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running.server, "queue", asyncio.Queue(1))
    running.server.queue.put_nowait(None)  # type: ignore[arg-type]
    assert (await running.ask())[0] == 503
    running.server.end()
    assert (await running.ask())[0] == 503


REFUSED = [
    ({"input_ids": [], "text": "hello"}, "text"),
    ({"input_ids": []}, "input_ids"),
    ({"input_ids": [[1, 2], [3]]}, "input_ids"),
    ({"stream": True}, "stream"),
    ({"logprob_start_len": 0, "return_hidden_states": True}, "return_hidden_states"),
    ({"top_logprobs_num": 3}, "top_logprobs_num"),
    ({"logprob_start_len": 5}, "logprob_start_len"),
    ({"session_params": {"id": 1}}, "session_params"),
    ({"sampling_params": {**SAMPLING, "n": 2}}, "n is 2"),
    ({"sampling_params": {**SAMPLING, "top_p": 0.9}}, "top_p"),
    ({"sampling_params": {**SAMPLING, "top_k": 10}}, "top_k"),
    ({"sampling_params": {**SAMPLING, "min_p": 0.1}}, "min_p"),
    ({"sampling_params": {**SAMPLING, "stop": ["x"]}}, "stop"),
    ({"sampling_params": {**SAMPLING, "repetition_penalty": 1.1}}, "repetition_penalty"),
    ({"sampling_params": {**SAMPLING, "regex": "a+"}}, "regex"),
    ({"sampling_params": {**SAMPLING, "ignore_eos": False}}, "ignore_eos"),
    ({"sampling_params": {"max_new_tokens": 4}}, "ignore_eos"),
    ({"sampling_params": {**SAMPLING, "max_new_tokens": 0}}, "max_new_tokens"),
    ({"sampling_params": {**SAMPLING, "max_new_tokens": None}}, "max_new_tokens"),
    ({"sampling_params": {**SAMPLING, "temperature": -1}}, "temperature"),
    ({"sampling_params": [SAMPLING]}, "sampling_params"),
]


@pytest.mark.parametrize(("fields", "named"), REFUSED, ids=[named for _, named in REFUSED])
async def test_what_is_not_supported_is_refused_by_name(running: Running, fields: dict[str, Any], named: str) -> None:
    see(running.server.agent, *SERVING)
    status, found = await running.ask(**fields)
    assert status == 400 and named in found["error"]["message"]


@pytest.mark.parametrize(
    "harmless",
    [
        {
            "sampling_params": {
                **SAMPLING,
                "n": 1,
                "top_p": 1.0,
                "top_k": -1,
                "stop": None,
                "skip_special_tokens": False,
            }
        },
        {"stream": False, "top_logprobs_num": 0, "logprob_start_len": -1, "image_data": None, "rid": "r"},
    ],
)
async def test_what_says_the_default_is_no_reason_to_refuse(running: Running, harmless: dict[str, Any]) -> None:
    see(running.server.agent, *SERVING)
    assert (await running.ask(**harmless))[0] == 200


def test_what_is_no_json_is_refused() -> None:
    for body in (b"{", b"[]", b"\xff", b"[" * 100_000):
        with pytest.raises(Rejected):
            native.read(body)


async def test_a_scenario_that_nobody_knows_is_404_and_its_own_name_is_the_base_models(running: Running) -> None:
    see(running.server.agent, *SERVING)
    status, found = await running.ask(lora_path="foo")
    assert status == 404 and "digit" in found["error"]["message"]
    assert (await running.ask(lora_path="digit"))[0] == 200


async def test_a_scenario_whose_adapter_is_not_here_is_to_be_asked_elsewhere(running: Running) -> None:
    """It was registered, and has no release yet that this boot was proven to hold."""
    found = running.server.agent
    found.config = replace(found.config, adapters=Adapters(scenarios=("late",)))
    see(found, *SERVING)
    status, said = await running.ask(lora_path="late")
    assert status == 503 and "late" in said["error"]["message"]


async def test_a_scenario_before_its_first_adapter_is_answered_by_the_base_model(running: Running) -> None:
    see(running.server.agent, *FROZEN)
    status, found = await running.ask(lora_path=MATH)
    head = running.server.agent.world.publications.head_of(MATH)
    assert head is not None and status == 200 and found["meta_info"]["weight_version"] == head.load_id


def test_an_answer_of_several_releases_says_which_token_is_whose() -> None:
    request = native.read(b'{"input_ids": [1], "sampling_params": {"ignore_eos": true}}')
    spans = (Span("inc:1", 0, 2, 7, 8), Span("inc:2", 2, 1, 9, 9))
    done = Completion(ids=(5, 6, 7), logprobs=(-1.0, -2.0, -3.0), finish_reason="length")
    made = Generated(engine="e0", boot="e0.1", load_id="inc:1", as_of=7, done_as_of=9, completion=done, spans=spans)
    meta = native.answer(request, made)["meta_info"]
    assert meta["weight_version"] == "inc:2"
    assert meta["weight_versions"] == [
        {"version": "inc:1", "start": 0, "end": 2},
        {"version": "inc:2", "start": 2, "end": 3},
    ]


async def test_a_connection_that_speaks_http_2_is_no_error_of_ours(
    running: Running, caplog: pytest.LogCaptureFixture
) -> None:
    """sglang-router tries gRPC, too, at each worker that it gets."""
    _, port = running.url.rsplit(":", 1)
    reader, writer = await asyncio.open_connection("127.0.0.1", int(port))
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
    assert await reader.read()
    writer.close()
    await writer.wait_closed()
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []
