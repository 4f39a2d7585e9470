"""The client for harnesses: ask, report, wait for a release, over a gateway's HTTP.

Knows: the gateway's routes and headers. Must not know: NATS, events, or what a task is. Needs the extra `serve`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, NamedTuple

import aiohttp

from reef_bus.errors import Rejected

RECEIPT, SCENARIO, LOAD_ID, ENGINE = "x-reef-agent-record-id", "x-reef-scenario", "x-reef-load-id", "x-reef-engine"
SPANS = "x-reef-spans"  # only of an answer of several parts: `<load id>=<tokens>`, comma between them
TAG = "x-reef-tag-"
RETRY_S = 0.1
AWAY = (502, 503, 504)  # of a gateway, or of what stands before it: asked again
POLL_S = 0.1


class Answer(NamedTuple):
    """One recorded answer: `receipt` names its record, `load_id` the release that produced every token of it; or the
    first ones, where `spans` says, release by release, how many tokens each produced."""

    text: str
    receipt: str
    load_id: str
    engine: str
    spans: tuple[tuple[str, int], ...] = ()


class Producer:
    """A harness's connection to one gateway. Calls wait out a gateway that is away or has no engine; they raise
    Rejected, with the gateway's words, for what it refuses."""

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str, scenario: str | None = None) -> None:
        self.session = session
        self.url = url.rstrip("/")
        self.model = model
        self.headers = {SCENARIO: scenario} if scenario else {}

    async def ask(self, text: str, tags: Mapping[str, str] | None = None, **options: Any) -> Answer:
        """One user message, one recorded answer. `tags` go with the record: answers of one `group` are compared with
        each other when they are trained on. `options` are fields of the chat request, such as `max_tokens`."""
        body = {"model": self.model, "messages": [{"role": "user", "content": text}], **options}
        headers = {f"{TAG}{key}": value for key, value in (tags or {}).items()}
        answer, reply = await self._call("POST", "/v1/chat/completions", body, headers)
        content = answer["choices"][0]["message"]["content"]
        return Answer(content, reply[RECEIPT], reply[LOAD_ID], reply[ENGINE], _spans(reply.get(SPANS, "")))

    async def report(
        self, receipts: str | Sequence[str], score: float, *, feedback: str = "", train: bool = True
    ) -> str:
        """Feedback on recorded answers; returns the report's id. Repeating it changes nothing; the same receipts with
        another score are refused. `train=False` keeps the answers out of every batch."""
        references = [receipts] if isinstance(receipts, str) else list(receipts)
        metadata = {} if train else {"training": {"eligible": False}}
        body = {"score": score, "references": references, "feedback": feedback, "metadata": metadata}
        answer, _ = await self._call("POST", "/reef/report", body, {})
        return str(answer["agent_record_id"])

    async def release(self, after: str = "") -> str:
        """Wait until another release than `after` is the scenario's head; returns its load id."""
        while True:
            status, _ = await self._call("GET", "/reef/status", None, {})
            head = status["adapters"].get(self.headers.get(SCENARIO)) or status["head"]
            if head and head["load_id"] != after:
                return str(head["load_id"])
            await asyncio.sleep(POLL_S)

    async def _call(
        self, method: str, path: str, body: Any, headers: Mapping[str, str]
    ) -> tuple[dict[str, Any], Mapping[str, str]]:
        while True:
            with contextlib.suppress(aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, ConnectionError):
                async with self.session.request(
                    method, self.url + path, json=body, headers={**self.headers, **headers}
                ) as reply:
                    if reply.status == 200:
                        return await reply.json(), reply.headers
                    if reply.status not in AWAY:
                        raise Rejected(f"{method} {path}: {reply.status} {await reply.text()}", reply.status)
            await asyncio.sleep(RETRY_S)


def _spans(said: str) -> tuple[tuple[str, int], ...]:
    parts = [part.strip().rpartition("=") for part in said.split(",") if part]
    return tuple((load_id, int(tokens)) for load_id, _, tokens in parts)


@contextlib.asynccontextmanager
async def connect(url: str, model: str, scenario: str | None = None) -> AsyncIterator[Producer]:
    """A producer with connections of its own, as many as there are calls at a time."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as session:
        yield Producer(session, url, model, scenario)
