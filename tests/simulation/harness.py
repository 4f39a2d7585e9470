"""Clients: a few that ask for answers and report on them, again and again, until no job needs any more.

Knows: the gateway's promise: a receipt that was handed out is known for ever. Must not know: what is done with them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import aiohttp

from reef_bus.backends import Prompt
from reef_bus.errors import Unavailable
from reef_bus.events import InferenceRecorded
from reef_bus.samples import TokenRow
from tests.simulation.boots import Boot, Machines
from tests.simulation.truth import Truth

PATIENCE_S = 5.0
AGAIN_S = 30.0

Request = Callable[[Boot], Coroutine[Any, Any, Any]]


class Gone(Exception):
    """The gateway went away in the middle of a request."""


class Harness:
    """One client. It asks whichever gateway runs."""

    def __init__(self, machines: Machines, truth: Truth, name: str, scenario: str = "") -> None:
        """It asks for answers of that scenario's adapter; of none: of the base model.

        It makes `enough` groups for the next job from the present head, and after a while again: a commit between two
        answers of a group may have made it too old. More would only make the run slow; where an answer takes its
        time, there are some in hand whenever engines pause.

        `idle_s`: how long it then waits before it looks again.
        """
        self.machines, self.truth, self.name, self.scenario = machines, truth, name, scenario
        eager, slow = machines.shape.eager, machines.shape.generate_s > 0
        self.groups, self.enough = 0, 5 if eager else 3 if slow else 1
        self.pace_s, self.idle_s = (0.03, 0.05) if eager or slow else (0.2, 0.3)

    async def run(self) -> None:
        last, since, loop = ("", 0), 0, self.machines.loop
        again = loop.now
        while True:
            head = self.truth.world.publications.head_of(self.scenario)
            now = (head.load_id if head else "", self.truth.world.training.dispatched)
            if now != last or loop.now > again:
                last, since, again = now, 0, loop.now + AGAIN_S
            if since < self.enough and await self._group():
                since += 1
            patience = self.pace_s if since < self.enough else self.idle_s
            await asyncio.sleep(patience * (0.3 + self.machines.chance.random() * 1.5))

    async def _group(self) -> bool:
        """Two answers to one prompt and a report on each. Whatever fails, fails: the next group is another one."""
        self.groups += 1
        group, chance = f"{self.name}-{self.groups}", self.machines.chance
        try:
            receipts = [await self._call(lambda boot: self._chat(boot, group)) for _ in range(2)]
            for receipt in receipts:
                score = round(chance.random(), 3)
                said = 1 + bool(self.machines.nemesis.befalls(("repeat",)))
                for _ in range(said):
                    await self._call(lambda boot, r=receipt, s=score: self._report(boot, r, s))  # type: ignore[misc]
        except (Gone, Unavailable, TimeoutError):
            return False
        return True

    async def _call(self, request: Request) -> Any:
        gateways = [boot for boot in self.machines.running() if boot.recorder is not None]
        if not gateways:
            raise Gone
        boot, answer = self.machines.chance.choice(gateways), self.machines.loop.create_future()
        boot.calls[answer] = None
        boot.spawn(_answer(request, boot, answer))
        try:
            async with asyncio.timeout(2 * PATIENCE_S):
                return await answer
        except aiohttp.ClientError as error:
            raise Gone from error
        finally:
            boot.calls.pop(answer, None)

    # -- in the gateway's process: what its handlers do with a request once it is parsed

    async def _chat(self, boot: Boot, group: str) -> str:
        prompt = Prompt(ids=(1, 2, 3), max_tokens=4, scenario=self.scenario)
        async with asyncio.timeout(PATIENCE_S):
            answer = await boot.role.router.generate(prompt)  # type: ignore[union-attr]
            self.truth.check_answer(answer, self.machines.shape.pause, self.scenario)
            done = answer.completion
            named = [span.load_id for span in answer.spans for _ in range(span.count)]
            load_ids = tuple(named or [answer.load_id] * len(done.ids))
            row = TokenRow(prompt=prompt.ids, answer=done.ids, logprobs=done.logprobs, load_ids=load_ids)
            blob, place = await boot.recorder.row(row)  # type: ignore[union-attr]
            event = InferenceRecorded(
                scenario=self.scenario or self.machines.config.scenario,
                record=f"rec-{self.machines.chance.randbytes(6).hex()}",
                engine=answer.engine,
                boot=answer.boot,
                load_id=answer.load_id,
                as_of=answer.as_of,
                done_as_of=answer.done_as_of,
                prompt="123",
                answer="",
                prompt_tokens=3,
                answer_tokens=len(done.ids),
                temperature=1.0,
                blob=blob,
                row=place,
                tags={"group": group},
                spans=answer.spans,
            )
            await boot.recorder.answer(event)  # type: ignore[union-attr]
        self.truth.receipts[event.record] = event
        return event.record

    async def _report(self, boot: Boot, receipt: str, score: float) -> None:
        scenario = self.scenario or self.machines.config.scenario
        async with asyncio.timeout(PATIENCE_S):
            id_, _ = await boot.recorder.report(scenario, None, (receipt,), score, "", {})  # type: ignore[union-attr]
        self.truth.reports[id_] = score


async def _answer(request: Request, boot: Boot, answer: asyncio.Future[Any]) -> None:
    try:
        found = await request(boot)
    except Exception as error:
        if not answer.done():
            answer.set_exception(error)
    else:
        if not answer.done():
            answer.set_result(found)
