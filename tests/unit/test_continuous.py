"""The endpoint of engines that batch by themselves: who is passed on, who waits, and how what is in hand stops.

Knows: agent, endpoint, the model of a server. Must not know: HTTP, or who decides on a pause.
What must come out is computed from what was published; when it was, the audit judges.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from consumers.reef_engine.continuous import Continuous
from consumers.reef_engine.endpoint import MAX_RETRACTIONS
from consumers.reef_engine.role import _endpoint
from consumers.reef_engine.server import Server
from reef_bus.backends import Generated, Prompt
from reef_bus.core.effects import Fence, Receive
from reef_bus.errors import Rejected
from reef_bus.events import EngineFenced, ReceiverVerified
from tests.apart import by_hand
from tests.facts import E0, SERVING, fenced, holds, paused
from tests.loop import quiet, until
from tests.spec import Step
from tests.unit.test_agent import Floats
from tests.unit.test_agent_apart import Found
from tests.unit.test_invariants import Play
from tests.unit.test_invariants import answer as record
from tests.unit.test_pauses import FENCED, HALTED, RELEASED, TARGETED

LONG = Prompt(ids=(11, 3, 10), max_tokens=20, seed=7)
TWIN, SHORT = replace(LONG, seed=8), replace(LONG, max_tokens=5)
VERSIONS = {"inc:0": "base", "inc:1": "c1", "inc:2": "c2", "inc:3": "c3"}


class Scene:
    """An engine at work, asked without HTTP between, in a deployment with that pause. No request goes beyond the token
    at which the server is held."""

    def __init__(self, folder: Path, pause: str, most: int) -> None:
        self.pause = pause
        self.found = Found(folder)
        self.agent, self.server = self.found.agent, self.found.server
        self.endpoint = Continuous(self.agent, self.found.backend, most)
        self.unseen = list[object]()
        asyncio.get_running_loop().set_exception_handler(lambda _, about: self.unseen.append(about))
        self.worker = asyncio.create_task(self.endpoint.work())

    def ask(self, *prompts: Prompt) -> list[asyncio.Future[Generated]]:
        return [self.endpoint._enter(prompt) for prompt in prompts]

    async def ask_and_hold(self, at: int, *prompts: Prompt) -> list[asyncio.Future[Generated]]:
        """All of them are in the server's hands, halfway."""
        self.server.hold_at, before = at, len(self.server.in_hand)
        asked = self.ask(*prompts)
        await until(lambda: len(self.server.in_hand) == before + len(prompts) and self._held(at))
        return asked

    def _held(self, at: int) -> bool:
        return all(len(request.ids) == at for request in self.server.in_hand.values())

    def let_go(self) -> None:
        self.server.hold_at = None
        self.server.move()

    def see(self, *history: Step) -> None:
        self.found.see(*paused(self.pause, *history))

    async def fence(self, n: int = 1, attempt: int = 1, pause: str = "") -> EngineFenced:
        said = await self.found.say(Fence(f"pub{n}", attempt, pause or self.pause))
        assert isinstance(said, EngineFenced)
        assert not self.sampling(), "a fence was reported while something is sampled"
        return said

    def sampling(self) -> bool:
        return bool(self.server.in_hand) and not self.server.paused

    async def receive(self, name: str = "c1", n: int = 1) -> None:
        effect = self.found.receiving(name, n)
        assert isinstance(effect, Receive) and isinstance(await self.found.say(effect), ReceiverVerified)

    async def release(self) -> None:
        """The first release, from its target to its commit."""
        self.see(*TARGETED)
        await self.fence()
        self.see(*FENCED)
        await self.receive()
        self.see(*RELEASED)

    async def halt(self) -> None:
        """The first release is given up, and the base model proven again."""
        self.see(*TARGETED)
        await self.fence()
        self.see(*HALTED)
        said = await self.found.say(self.found.heading("base", 0, self.pause))
        assert isinstance(said, ReceiverVerified) and said.method == "memory"
        self.see(*HALTED, holds("e0", 0, "base"))


@contextlib.asynccontextmanager
async def scene(folder: Path, pause: str = "drain", most: int = 4) -> AsyncIterator[Scene]:
    """In the end nothing is left: no task that failed unseen, nothing in the server's hands, the memory to be had."""
    it = Scene(folder, pause, most)
    try:
        yield it
    finally:
        it.worker.cancel()
        await asyncio.gather(it.worker, return_exceptions=True)
    await asyncio.sleep(0)
    assert it.unseen == [] and not it.agent.memory.locked()
    assert not it.server.in_hand and not it.endpoint.in_hand


def check(answer: Generated, prompt: Prompt, *parts: tuple[str, int]) -> None:
    """Its tokens are those versions', so many from each, and it says so."""
    assert answer.completion == by_hand(prompt, *((VERSIONS[load_id], count) for load_id, count in parts))
    assert answer.load_id == parts[0][0]
    assert [(span.load_id, span.count) for span in answer.spans] == (list(parts) if len(parts) > 1 else [])


def violations(answers: Sequence[Generated], pause: str, *history: Step) -> list[str]:
    """What the audit has to say of these answers' times, given what was on the log; its targets have that pause."""
    found = Play(*(paused(pause, *history) if pause else history))
    for number, each in enumerate(answers):
        said = record(f"r{number}", E0, int(each.load_id.removeprefix("inc:")), each.as_of, {})
        tokens = len(each.completion.ids)
        found.record(replace(said, done_as_of=each.done_as_of, answer_tokens=tokens, spans=each.spans))
    return [violation.text for violation in found.audit().violations if violation.invariant in (1, 2)]


def test_the_endpoint_is_the_one_that_the_backend_needs(tmp_path: Path) -> None:
    found = Found(tmp_path).agent
    assert isinstance(_endpoint(found, found.backend, 4), Continuous) and isinstance(
        _endpoint(found, Floats(), 4), Server
    )


# -- who is passed on


async def test_what_is_asked_while_the_gate_is_closed_waits_for_it(tmp_path: Path) -> None:
    async with scene(tmp_path) as it:
        it.see(*TARGETED)
        (asked,) = it.ask(LONG)
        await quiet()
        assert it.server.asked == [] and not asked.done()
        it.see(*SERVING)
        check(await asked, LONG, ("inc:0", 20))
    assert (asked.result().engine, asked.result().boot, it.agent.served) == ("e0", "e0.1", 1)


async def test_prompts_are_passed_on_as_they_come_and_leave_as_they_end(tmp_path: Path) -> None:
    async with scene(tmp_path) as it:
        (first,) = await it.ask_and_hold(7, LONG)
        (second,) = it.ask(SHORT)
        check(await second, SHORT, ("inc:0", 5))
        assert not first.done()
        it.let_go()
        check(await first, LONG, ("inc:0", 20))


async def test_no_more_are_in_hand_than_is_configured(tmp_path: Path) -> None:
    prompts = [replace(LONG, seed=seed) for seed in range(9)]
    async with scene(tmp_path, most=2) as it:
        answers = await asyncio.gather(*it.ask(*prompts))
    assert it.server.most == 2 and it.server.asked == prompts
    for answer, prompt in zip(answers, prompts, strict=True):
        check(answer, prompt, ("inc:0", 20))


async def test_a_prompt_that_is_refused_spoils_nobody_elses_answer(tmp_path: Path) -> None:
    async with scene(tmp_path) as it:
        good, bad, other = it.ask(LONG, replace(LONG, ids=()), TWIN)
        check(await good, LONG, ("inc:0", 20))
        check(await other, TWIN, ("inc:0", 20))
        with pytest.raises(Rejected, match="prompt ids"):
            await bad


async def test_whoever_has_gone_is_aborted_in_the_engine_and_leaves_a_place(tmp_path: Path) -> None:
    async with scene(tmp_path, most=1) as it:
        (first,) = await it.ask_and_hold(7, LONG)
        (second,) = it.ask(TWIN)
        first.cancel()
        await until(lambda: it.server.dropped == [LONG] and it.server.asked == [LONG, TWIN])
        it.let_go()
        check(await second, TWIN, ("inc:0", 20))


async def test_whoever_goes_while_waiting_is_never_passed_on(tmp_path: Path) -> None:
    async with scene(tmp_path) as it:
        it.see(*TARGETED)
        first, second, third = it.ask(LONG, TWIN, SHORT)
        await quiet(0.02)
        first.cancel()
        second.cancel()
        it.see(*SERVING)
        check(await third, SHORT, ("inc:0", 5))
        assert it.server.asked == [SHORT]


# -- drain


async def test_a_drain_answers_what_is_in_hand_first_and_lets_nobody_in(tmp_path: Path) -> None:
    async with scene(tmp_path) as it:
        (first,) = await it.ask_and_hold(7, LONG)
        it.see(*TARGETED)
        fence = asyncio.create_task(it.fence())
        (late,) = it.ask(TWIN)
        await quiet()
        assert not fence.done() and it.server.asked == [LONG]
        it.let_go()
        check(await first, LONG, ("inc:0", 20))
        assert (await fence).served == 1
        assert it.server.asked == [LONG] and not late.done()
        it.see(*FENCED)
        await it.receive()
        it.see(*RELEASED)
        check(await late, TWIN, ("inc:1", 20))
    assert violations([first.result(), late.result()], "drain", *RELEASED) == []


async def test_whoever_wants_the_memory_comes_before_later_requests_though_the_gate_is_open(
    tmp_path: Path,
) -> None:
    async with scene(tmp_path) as it:
        (first,) = await it.ask_and_hold(7, LONG)
        fence = asyncio.create_task(it.fence())
        await quiet(0.02)
        (second,) = it.ask(TWIN)
        await quiet()
        assert it.agent.gate() and it.server.asked == [LONG] and not fence.done()
        it.let_go()
        await fence
        check(await first, LONG, ("inc:0", 20))
        check(await second, TWIN, ("inc:0", 20))


@pytest.mark.parametrize("how", ["given up", "never begun"])
async def test_whoever_waits_is_let_in_again_when_a_pause_does_not_come(tmp_path: Path, how: str) -> None:
    """Though what is in hand takes its time: the publication was halted before this engine had stopped."""
    async with scene(tmp_path) as it:
        (first,) = await it.ask_and_hold(7, LONG)
        it.see(*TARGETED)
        fence = asyncio.create_task(it.fence()) if how == "given up" else None
        await quiet(0.02)
        if fence is not None:
            fence.cancel()
            await asyncio.gather(fence, return_exceptions=True)
        (second,) = it.ask(SHORT)
        await quiet(0.02)
        assert not second.done()
        it.see(*SERVING)
        async with asyncio.timeout(2):
            check(await second, SHORT, ("inc:0", 5))
        assert not first.done()


async def test_a_pause_that_is_another_than_the_one_before_is_heard_while_that_is_waited_for(tmp_path: Path) -> None:
    async with scene(tmp_path) as it:
        (asked,) = await it.ask_and_hold(7, LONG)
        it.see(*TARGETED)
        drain = asyncio.create_task(it.fence(pause="drain"))
        await quiet(0.02)
        drain.cancel()
        async with asyncio.timeout(2):
            await it.fence(attempt=2, pause="retract")
        assert not asked.done() and not it.server.in_hand
        it.let_go()
        it.see(*SERVING)
        check(await asked, LONG, ("inc:0", 20))


# -- retract


async def test_what_is_retracted_starts_over_and_names_one_version(tmp_path: Path) -> None:
    async with scene(tmp_path, "retract") as it:
        asked = await it.ask_and_hold(7, LONG, TWIN)
        await it.release()
        it.let_go()
        answers = [await each for each in asked]
        check(answers[0], LONG, ("inc:1", 20))
        check(answers[1], TWIN, ("inc:1", 20))
    assert it.server.asked == [LONG, TWIN] * 2
    assert [each.as_of for each in answers] == [it.agent.world.seq] * 2
    assert violations(answers, "retract", *RELEASED) == []


async def test_what_is_retracted_too_often_is_drained(tmp_path: Path) -> None:
    """Where releases come faster than its answer, it would never end."""
    async with scene(tmp_path, "retract") as it:
        (asked,) = await it.ask_and_hold(7, LONG)
        for n in range(MAX_RETRACTIONS):
            it.see(*TARGETED)
            await it.fence(n)
            it.see(*SERVING)
            await until(lambda: bool(it.server.in_hand) and it._held(7))
        it.see(*TARGETED)
        fence = asyncio.create_task(it.fence(9))
        await quiet()
        assert not fence.done() and it.server.aborts == MAX_RETRACTIONS
        it.let_go()
        check(await asked, LONG, ("inc:0", 20))
        await fence
    assert len(it.server.asked) == 1 + MAX_RETRACTIONS


async def test_a_request_that_overtakes_an_abort_is_aborted_too(tmp_path: Path) -> None:
    async with scene(tmp_path, "retract") as it:
        it.server.there.clear()
        (asked,) = it.ask(LONG)
        it.server.answers.append("never ends")
        await until(lambda: bool(it.endpoint.in_hand))
        it.see(*TARGETED)
        fence = asyncio.create_task(it.fence())
        await until(lambda: it.server.aborts > 0)
        assert not it.server.in_hand and not fence.done()
        it.server.there.set()
        async with asyncio.timeout(2):
            await fence
        it.see(*SERVING)
        check(await asked, LONG, ("inc:0", 20))


async def test_an_answer_that_never_comes_is_given_back_by_an_abort(tmp_path: Path) -> None:
    async with scene(tmp_path, "retract") as it:
        it.server.answers.append("never ends")
        (asked,) = it.ask(LONG)
        await until(lambda: bool(it.server.in_hand))
        await it.release()
        check(await asked, LONG, ("inc:1", 20))


async def test_what_ends_before_the_abort_is_the_old_versions_though_it_arrives_after_it(tmp_path: Path) -> None:
    async with scene(tmp_path, "retract") as it:
        it.server.back.clear()
        (asked,) = it.ask(SHORT)
        await until(lambda: any(request.ended.is_set() for request in it.server.in_hand.values()))
        it.see(*TARGETED)
        fence = asyncio.create_task(it.fence())
        await until(lambda: it.server.aborts > 0)
        it.server.back.set()
        await fence
        check(await asked, SHORT, ("inc:0", 5))
    assert violations([asked.result()], "retract", *TARGETED, fenced("e0", 1)) == []
