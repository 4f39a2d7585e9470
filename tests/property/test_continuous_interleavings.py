"""Releases one after the other, each with a pause of its own, and requests that come and go at any moment.

Knows: the scene of tests/unit/test_continuous.py. Must not know: in what order anything happens; a seed says it.
Nobody who stays is forgotten; every token is that of the version that is named for it; and the audit finds nothing.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from msgspec.structs import replace

from reef_bus.backends import Generated, Prompt
from reef_bus.events import EngineStaged, ReceiverVerified
from tests.apart import by_hand
from tests.facts import (
    E0,
    E1,
    SERVING,
    committed,
    fenced,
    halted,
    holds,
    offered,
    staged,
    swapped,
    target,
    trained,
    verified,
)
from tests.spec import Step
from tests.unit.test_continuous import VERSIONS, Scene, scene, violations

PAUSES = ("drain", "retract", "in_place")


class Story:
    """What the seed makes of it."""

    def __init__(self, it: Scene, chance: random.Random) -> None:
        self.it, self.chance = it, chance
        self.history: tuple[Step, ...] = SERVING
        self.asked = list[tuple[Prompt, asyncio.Future[Generated]]]()

    async def moments(self, most: int = 12) -> None:
        for _ in range(self.chance.randrange(most)):
            await asyncio.sleep(0)

    def see(self, *steps: Step) -> None:
        self.history = (*self.history, *steps)
        self.it.found.see(*self.history)

    async def people(self) -> None:
        """They ask, and some of them do not wait for the answer; the roads are slow now and then."""
        while True:
            await self.moments()
            match self.chance.choice(("ask", "ask", "ask", "go", "there", "back")):
                case "ask" if len(self.asked) < 60:
                    prompt = Prompt(ids=(11, 3), max_tokens=self.chance.randint(1, 30), seed=len(self.asked))
                    self.asked.append((prompt, *self.it.ask(prompt)))
                case "go" if self.asked and self.chance.random() < 0.5:
                    self.chance.choice(self.asked)[1].cancel()
                case "there" | "back" as road:
                    way = getattr(self.it.server, road)
                    way.clear() if way.is_set() else way.set()
            await asyncio.sleep(0)

    async def staged(self, n: int, parent: int, name: str) -> int:
        """The n-th publication, beside what is served; the swap may fail, and then it is loaded. Returns the head."""
        pause, base = self.chance.choice(PAUSES), VERSIONS[f"inc:{parent}"]
        beside = replace(target(n, name, E0, E1, parent=parent), mode="staged", pause=pause)
        self.see(*trained(name, base, n), beside, offered(n, name))
        await self.moments()
        assert isinstance(await self.it.found.say(self.it.found.staging(name, n)), EngineStaged)
        self.see(staged("e0", n, name), staged("e1", n, name))
        await self.moments(30)
        self.see(committed(n, name, E0, E1, parent=parent))
        await self.moments(30)
        if self.chance.random() < 0.3:
            self.it.server.updates.append("drops a tensor")
        said = await self.it.found.say(self.it.found.heading(name, n, pause))
        assert isinstance(said, ReceiverVerified)
        self.see(replace(swapped("e0", n, name), method=said.method))
        return n

    async def fenced(self, n: int, parent: int, name: str) -> int:
        """The n-th publication: committed, or halted and the head proven again. Returns the head."""
        pause, base = self.chance.choice(PAUSES), VERSIONS[f"inc:{parent}"]
        self.see(*trained(name, base, n), replace(target(n, name, E0, E1, parent=parent), pause=pause))
        await self.moments()
        await self._given_up(n, pause)
        await self.it.fence(n, pause=pause)
        self.see(fenced("e0", n), fenced("e1", n))
        if self.chance.random() < 0.3:
            self.see(halted(n))
            said = await self.it.found.say(self.it.found.heading(base, parent, pause))
            assert isinstance(said, ReceiverVerified)
            self.see(holds("e0", parent, base), holds("e1", parent, base))
            return parent
        self.see(offered(n, name))
        await self.it.receive(name, n)
        words = verified("e0", n, name), verified("e1", n, name)
        self.see(*words, committed(n, name, E0, E1, parent=parent))
        return n

    async def _given_up(self, n: int, pause: str) -> None:
        """Now and then the hands are told to stop, and told to begin again."""
        while self.chance.random() < 0.3:
            fence = asyncio.create_task(self.it.fence(n, pause=pause))
            await self.moments(6)
            fence.cancel()
            await asyncio.gather(fence, return_exceptions=True)


@pytest.mark.parametrize("seed", range(60))
async def test_whatever_the_order_nobody_is_forgotten_and_every_token_is_named_rightly(
    tmp_path: Path, seed: int
) -> None:
    chance = random.Random(seed)
    async with scene(tmp_path, most=chance.choice((1, 3, 8))) as it:
        story, head = Story(it, chance), 0
        people = asyncio.create_task(story.people())
        for n in (1, 2, 3):
            await story.moments(60)
            it.server.there.set()  # a drain waits for what is on its way
            it.server.back.set()
            opening = asyncio.create_task(open_again(it))
            head = await chance.choice((story.fenced, story.staged))(n, head, f"c{n}")
            opening.cancel()
        await story.moments(60)
        people.cancel()
        it.server.there.set()
        it.server.back.set()
        async with asyncio.timeout(10):
            await asyncio.gather(*(done for _, done in story.asked), return_exceptions=True)
        answers = [(prompt, done.result()) for prompt, done in story.asked if not done.cancelled()]
    for prompt, answer in answers:
        spans = [(VERSIONS[span.load_id], span.count) for span in answer.spans]
        assert answer.completion == by_hand(prompt, *(spans or [(VERSIONS[answer.load_id], prompt.max_tokens)]))
    assert violations([answer for _, answer in answers], "", *story.history) == []
    assert it.server.most <= it.endpoint.max_batch


async def open_again(it: Scene) -> None:
    """The roads are closed for a while, and not for ever."""
    while True:
        await asyncio.sleep(0.002)
        it.server.there.set()
        it.server.back.set()
