"""The demo's harness: asks, scores the answers with a verifier, and reports the scores, as any client would.

Knows: the producer and the task. Must not know: anything else of the deployment; it could run on another machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import NamedTuple

from reef_bus.producer import Answer, Producer, connect

GROUP_SIZE = 16


class Scored(NamedTuple):
    """One answer and what the verifier gave it."""

    answer: Answer
    reward: float


def score(digit: str, answer: str) -> float:
    """The verifier of task `digit`: the fraction of the answer's characters that repeat the question."""
    return sum(character == digit for character in answer) / len(answer) if answer else 0.0


def successor(digit: str, answer: str) -> float:
    """The verifier of task `successor`: the fraction that is the digit after the question; after 9 comes 0."""
    return score(str((int(digit) + 1) % 10), answer)


TASKS: Mapping[str, Callable[[str, str], float]] = {"digit": score, "successor": successor}
"""The verifier of each task: all ask for a digit, and want other answers to it."""


class Harness:
    """Asks for ever while it is let; every scored answer goes to `answers`."""

    def __init__(self, producer: Producer, seed: int, task: str = "digit") -> None:
        self.producer = producer
        self.verifier = TASKS[task]
        self.answers: asyncio.Queue[Scored] = asyncio.Queue()
        self._questions = _questions(seed)
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, concurrency: int, pause_s: float = 0.0) -> None:
        """Keep `concurrency` requests in flight, with a pause after each."""
        self._tasks = [asyncio.create_task(self._work(pause_s)) for _ in range(concurrency)]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []

    def failed(self) -> BaseException | None:
        """What a worker died of, which none should."""
        return next((e for t in self._tasks if t.done() and not t.cancelled() and (e := t.exception())), None)

    async def _work(self, pause_s: float) -> None:
        for group, digit in self._questions:
            self.answers.put_nowait(await self.exchange(digit, {"group": group}))
            await asyncio.sleep(pause_s)

    async def exchange(self, digit: str, tags: dict[str, str], *, train: bool = True) -> Scored:
        """Ask once, score, report."""
        answer = await self.producer.ask(digit, tags)
        reward = self.verifier(digit, answer.text)
        await self.producer.report(answer.receipt, reward, train=train)
        return Scored(answer, reward)


def _questions(seed: int) -> Iterator[tuple[str, str]]:
    """Groups of the same question, with names that no other run uses."""
    chance = random.Random(seed)
    for _ in itertools.count():
        group, digit = f"g-{chance.getrandbits(64):016x}", str(chance.randrange(10))
        for _ in range(GROUP_SIZE):
            yield group, digit


@contextlib.asynccontextmanager
async def harness(
    url: str, model: str, seed: int, task: str = "digit", scenario: str | None = None
) -> AsyncIterator[Harness]:
    """A harness with its own connections; it has stopped when the context ends."""
    async with connect(url, model, scenario) as producer:
        found = Harness(producer, seed, task)
        try:
            yield found
        finally:
            await found.stop()
