"""The demo's harness: an ordinary HTTP client that asks, scores the answers with a verifier, and reports the scores.

Knows: the gateway's URL and the task. Must not know: anything else of the deployment; it could run on another machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import AsyncIterator, Iterator
from typing import Any, NamedTuple

import aiohttp

RETRY_S = 0.1
GROUP_SIZE = 16


class Answer(NamedTuple):
    """One answer as the client sees it."""

    receipt: str
    text: str
    load_id: str
    engine: str
    reward: float


def score(digit: str, answer: str) -> float:
    """The verifier of task `digit`: the fraction of the answer's characters that repeat the question."""
    return sum(character == digit for character in answer) / len(answer) if answer else 0.0


class Harness:
    """Asks for ever while it is let; every answer goes to `answers`."""

    def __init__(self, url: str, model: str, session: aiohttp.ClientSession, seed: int) -> None:
        self.url = url
        self.model = model
        self.session = session
        self.answers: asyncio.Queue[Answer] = asyncio.Queue()
        self._questions = _questions(seed)
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, concurrency: int) -> None:
        """Keep `concurrency` requests in flight."""
        self._tasks = [asyncio.create_task(self._work()) for _ in range(concurrency)]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []

    def failed(self) -> BaseException | None:
        """What a worker died of, which none should."""
        return next((e for t in self._tasks if t.done() and not t.cancelled() and (e := t.exception())), None)

    async def _work(self) -> None:
        for group, digit in self._questions:
            self.answers.put_nowait(await self.exchange(digit, {"group": group}, train=True))

    async def exchange(self, digit: str, tags: dict[str, str], *, train: bool) -> Answer:
        """Ask once, score, report. A gateway that is away is asked again; an answer that it refused raises."""
        headers = {f"x-reef-tag-{key}": value for key, value in tags.items()}
        question = {"model": self.model, "messages": [{"role": "user", "content": digit}]}
        body, reply = await self._post("/v1/chat/completions", question, headers)
        text = body["choices"][0]["message"]["content"]
        receipt, reward = reply["x-reef-agent-record-id"], score(digit, text)
        metadata = {} if train else {"training": {"eligible": False}}
        await self._post("/reef/report", {"score": reward, "references": [receipt], "metadata": metadata}, {})
        return Answer(receipt, text, reply["x-reef-load-id"], reply["x-reef-engine"], reward)

    async def _post(
        self, path: str, body: dict[str, Any], headers: dict[str, str]
    ) -> tuple[dict[str, Any], dict[str, str]]:
        while True:
            with contextlib.suppress(aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, ConnectionError):
                async with self.session.post(self.url + path, json=body, headers=headers) as reply:
                    if reply.status == 200:
                        return await reply.json(), dict(reply.headers)
                    if reply.status < 500:
                        raise RuntimeError(f"POST {path}: {reply.status} {await reply.text()}")
            await asyncio.sleep(RETRY_S)


def _questions(seed: int) -> Iterator[tuple[str, str]]:
    """Groups of the same question, with names that no other run uses."""
    chance = random.Random(seed)
    for _ in itertools.count():
        group, digit = f"g-{chance.getrandbits(64):016x}", str(chance.randrange(10))
        for _ in range(GROUP_SIZE):
            yield group, digit


@contextlib.asynccontextmanager
async def harness(url: str, model: str, seed: int) -> AsyncIterator[Harness]:
    """A harness with its own connections."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as session:
        found = Harness(url, model, session, seed)
        try:
            yield found
        finally:
            await found.stop()
