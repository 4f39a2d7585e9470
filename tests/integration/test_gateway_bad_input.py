"""What clients do wrong, against a real deployment: a 4xx that says what was wrong, nothing recorded twice or lost."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from reef_bus.journal import RECORDS
from tests.e2e.live import Live, live

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]

QUESTION = {"model": "reef-digit", "messages": [{"role": "user", "content": "7"}]}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def found(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Live]:
    folder: Path = tmp_path_factory.mktemp("gateway")
    async with live(folder, traffic=False) as running:
        yield running


async def post(found: Live, path: str, body: Any, headers: dict[str, str] | None = None) -> tuple[int, dict[str, Any]]:
    data = io.BytesIO(body) if isinstance(body, bytes) else body if isinstance(body, str) else json.dumps(body)
    async with found.client.producer.session.post(found.running.url + path, data=data, headers=headers or {}) as reply:
        return reply.status, await reply.json()


async def records(found: Live) -> int:
    return await found.running.journal.head(RECORDS)


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        pytest.param("{not json", 400, "not JSON", id="malformed-json"),
        pytest.param(b"\xff\xfe\x00", 400, "not JSON", id="not-text"),
        pytest.param([], 400, "does not fit", id="not-an-object"),
        pytest.param({"messages": []}, 400, "model", id="no-model"),
        pytest.param({**QUESTION, "model": "gpt-9"}, 404, "reef-digit", id="unknown-model"),
        pytest.param({**QUESTION, "messages": "7"}, 400, "messages", id="messages-no-list"),
        pytest.param({**QUESTION, "messages": []}, 400, "exactly one message", id="no-message"),
        pytest.param({**QUESTION, "messages": [{"role": "user", "content": "hello"}]}, 400, "digits", id="letters"),
        pytest.param({**QUESTION, "messages": [{"role": "user"}]}, 400, "content", id="no-content"),
        pytest.param({**QUESTION, "n": 2}, 400, "n must be 1", id="n"),
        pytest.param({**QUESTION, "stream_options": {}}, 400, "stream to be true", id="no-stream"),
        pytest.param({**QUESTION, "stream": True, "n": 2}, 400, "n must be 1", id="stream-n"),
        pytest.param({**QUESTION, "temperature": -1}, 400, "0 to 2", id="temperature"),
        pytest.param({**QUESTION, "max_tokens": 1000}, 400, "max_tokens is 1000", id="max-tokens"),
        pytest.param({**QUESTION, "max_tokens": 0}, 400, "max_tokens is 0", id="max-tokens-zero"),
        pytest.param({**QUESTION, "max_tokens": "4"}, 400, "max_tokens", id="max-tokens-text"),
        pytest.param(b"x" * 10_000_000, 413, "too large", id="ten-megabytes"),
    ],
)
async def test_a_bad_chat_request_is_refused_and_leaves_nothing(found: Live, body: Any, status: int, says: str) -> None:
    before = await records(found)
    got, answer = await post(found, "/v1/chat/completions", body)
    assert (got, says in answer["error"]["message"]) == (status, True), answer
    assert await records(found) == before


async def test_a_stream_is_one_record(found: Live) -> None:
    before = await records(found)
    session, body = found.client.producer.session, {**QUESTION, "stream": True, "max_tokens": 3}
    async with session.post(found.running.url + "/v1/chat/completions", json=body) as reply:
        told = (await reply.text()).split("\n\n")
    assert (reply.status, len(told), told[-2:]) == (200, 7, ["data: [DONE]", ""])
    assert all(reply.headers["x-reef-agent-record-id"] in chunk for chunk in told[:-2])
    assert await records(found) == before + 1


async def test_an_unknown_scenario_is_named(found: Live) -> None:
    status, answer = await post(found, "/v1/chat/completions", QUESTION, {"x-reef-scenario": "chess"})
    assert status == 404 and "'chess'" in answer["error"]["message"] and "'digit'" in answer["error"]["message"]


async def test_an_unknown_route_is_a_404_in_the_same_form(found: Live) -> None:
    status, answer = await post(found, "/v1/embeddings", {})
    assert status == 404 and "/v1/embeddings" in answer["error"]["message"]


async def receipt(found: Live) -> str:
    async with found.client.producer.session.post(found.running.url + "/v1/chat/completions", json=QUESTION) as reply:
        assert reply.status == 200
        return reply.headers["x-reef-agent-record-id"]


@pytest.mark.parametrize(
    ("change", "status", "says"),
    [
        ({"references": ["rec-0000000000000000"]}, 404, "rec-0000000000000000"),
        ({"references": []}, 400, "at least one receipt"),
        ({"score": True}, 400, "score"),
        ({"score": "good"}, 400, "score"),
        ({"scroe": 1.0}, 400, "scroe"),
        ({"references": "rec"}, 400, "references"),
    ],
)
async def test_a_bad_report_is_refused_and_leaves_nothing(
    found: Live, change: dict[str, Any], status: int, says: str
) -> None:
    report = {"score": 1.0, "references": [await receipt(found)], **change}
    before = await records(found)
    got, answer = await post(found, "/reef/report", report)
    assert (got, says in answer["error"]["message"]) == (status, True), answer
    assert await records(found) == before


async def test_a_non_finite_score_is_refused(found: Live) -> None:
    body = '{"score": 1e999, "references": ["' + await receipt(found) + '"]}'
    status, answer = await post(found, "/reef/report", body)
    assert status == 400, answer


async def test_a_repeated_report_is_one_report_and_other_content_is_a_conflict(found: Live) -> None:
    report = {"score": 0.5, "references": [await receipt(found)]}
    before = await records(found)
    first, second = await post(found, "/reef/report", report), await post(found, "/reef/report", report)
    assert (first[0], second[0]) == (200, 200)
    assert first[1]["agent_record_id"] == second[1]["agent_record_id"]
    assert (first[1]["duplicate"], second[1]["duplicate"]) == (False, True)
    status, answer = await post(found, "/reef/report", {**report, "score": 0.75})
    assert status == 409 and "other content" in answer["error"]["message"]
    assert await records(found) == before + 1


async def test_the_same_report_sent_sixteen_times_at_once_is_recorded_once(found: Live) -> None:
    report = {"score": 0.5, "references": [await receipt(found)]}
    before = await records(found)
    answers = await asyncio.gather(*(post(found, "/reef/report", report) for _ in range(16)))
    assert {status for status, _ in answers} == {200}
    assert sum(not answer["duplicate"] for _, answer in answers) == 1
    assert await records(found) == before + 1


async def test_a_client_that_hangs_up_leaves_at_most_an_unreported_answer(found: Live) -> None:
    before = await records(found)
    host, port = found.running.config.gateway.host, found.running.config.gateway.port
    for cut in (20, 80, 10_000):  # in the headers, in the body, right after the request
        body = json.dumps(QUESTION)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        _, writer = await asyncio.open_connection(host, port)
        writer.write((head + body).encode()[:cut])
        await writer.drain()
        writer.close()
        await writer.wait_closed()
    await asyncio.sleep(0.3)
    assert await records(found) - before <= 1
    assert (await receipt(found)).startswith("rec-")


async def test_status_health_and_readiness(found: Live) -> None:
    async with aiohttp.ClientSession(found.running.url) as session:
        async with session.get("/readyz") as reply:
            assert reply.status == 200 and (await reply.json())["engines"] == ["engine-0", "engine-1"]
        async with session.get("/healthz") as reply:
            assert reply.status == 200
        async with session.get("/reef/status") as reply:
            status = await reply.json()
    assert status["head"]["load_id"].endswith(":0") and status["waiting"]["on"] == "the harness"
