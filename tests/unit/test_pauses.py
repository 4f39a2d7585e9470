"""What becomes of the requests in hand when generation stops: answered first, started over, or gone on with in place.

Knows: agent, endpoint, the torch engine and its model, step by step. Must not know: who decides on a pause.
What must come out is computed from the model itself, token by token, and not by the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from consumers.reef_engine.endpoint import MAX_RETRACTIONS, Waiting
from consumers.reef_engine.server import Server
from consumers.reef_engine.torch_backend import TorchEngine
from reef_bus.backends import Completion, Generated, Generation, Prompt, Stop, never
from reef_bus.core.effects import Fence, Join, Receive, VerifyHead
from reef_bus.events import EngineFenced, EngineJoined, ReceiverVerified, Span
from reef_bus.policy import Cache, Policy, PolicyConfig, new_policy
from tests.facts import (
    E0,
    E1,
    SERVING,
    committed,
    fenced,
    halted,
    holds,
    joined,
    offered,
    paused,
    staged,
    swapped,
    target,
    trained,
)
from tests.facts import verified as verified_fact
from tests.loop import until
from tests.spec import Step
from tests.unit.test_agent_staged import Found
from tests.unit.test_staged import STAGED

CONFIG = PolicyConfig()
LONG = Prompt(ids=(11, 3, 10), max_tokens=20, temperature=1.0, seed=7)
SEEDS = {"base": 0, "c1": 1, "c2": 2, "c3": 3}
COMMITTED = (*STAGED, committed(1, "c1", E0, E1))
SWAPPED = (*COMMITTED, swapped("e0", 1, "c1"))
TARGETED = (*SERVING, *trained("c1"), target(1, "c1", E0, E1))
FENCED = (*TARGETED, fenced("e0", 1), fenced("e1", 1), offered(1, "c1"))
RELEASED = (*FENCED, verified_fact("e0", 1, "c1"), verified_fact("e1", 1, "c1"), committed(1, "c1", E0, E1))


class Paced(TorchEngine):
    """Generates up to the token that it is to halt at, and then no further until it is told to stop, or to go on."""

    def __init__(self) -> None:
        super().__init__()
        self.halt_at: int | None = None
        self.halts, self.goes_on = threading.Event(), threading.Event()
        self.calls = 0

    def generate_until(self, prompts: Sequence[Prompt], stop: Stop, kept: Any = None) -> Generation:
        self.calls += 1
        asked, halt_at, self.halt_at = 0, self.halt_at, None

        def looked() -> bool:
            nonlocal asked
            asked += 1
            if asked - 1 == halt_at:
                self.halts.set()
                while not stop() and not self.goes_on.wait(0.001):
                    pass
            return stop()

        return super().generate_until(prompts, looked, kept)


class Scene:
    """An engine at work, asked for answers without HTTP between, in a deployment with that pause."""

    def __init__(self, folder: Path, pause: str) -> None:
        self.pause = pause
        self.engine = Paced()
        self.found = Found(folder, self.engine)
        self.server = Server(self.found.agent, 4)
        self.worker = asyncio.create_task(self.server.work())

    def ask(self, *prompts: Prompt) -> list[asyncio.Future[Generated]]:
        asked = [Waiting(prompt, asyncio.get_running_loop().create_future()) for prompt in prompts]
        for waiting in asked:
            self.server.queue.put_nowait(waiting)
        return [waiting.done for waiting in asked]

    async def ask_and_halt(self, at: int, *prompts: Prompt) -> list[asyncio.Future[Generated]]:
        """The engine halts at that token of them, with its thread in the middle of the batch."""
        self.engine.halt_at = at
        self.engine.halts.clear()
        asked = self.ask(*prompts)
        await until(self.engine.halts.is_set)
        return asked

    def see(self, *history: Step) -> None:
        self.found.see(*paused(self.pause, *history))

    async def fence(self, attempt: int = 1) -> EngineFenced:
        said = await self.found.say(Fence("pub1", attempt, self.pause))
        assert isinstance(said, EngineFenced)
        return said

    async def receive(self, history: Sequence[Step], n: int, name: str, pause: str) -> None:
        """Stop, and load what the history ends with the offer of."""
        self.found.see(*history)
        await self.found.say(Fence(f"pub{n}", 1, pause))
        blob, manifest = self.found.kept[name]
        await self.found.say(Receive(f"pub{n}", 1, f"inc:{n}", manifest.digest, "files", blob.digest, "", 5.0))

    async def swap(self, name: str = "c1", sequence: int = 1) -> ReceiverVerified:
        said = await self.found.say(msgspec.structs.replace(self.found.heading(name, sequence), pause=self.pause))
        assert isinstance(said, ReceiverVerified) and said.method == "swapped"
        return said


@contextlib.asynccontextmanager
async def scene(folder: Path, pause: str = "drain") -> AsyncIterator[Scene]:
    found = Scene(folder, pause)
    try:
        yield found
    finally:
        found.engine.goes_on.set()
        found.worker.cancel()
        await asyncio.gather(found.worker, return_exceptions=True)


# -- what must come out, from the model itself


def by_hand(prompt: Prompt, *parts: tuple[str, int]) -> Completion:
    """The answer whose tokens come from these versions, so many from each, over one cache that is never made anew."""
    assert prompt.seed is not None and sum(count for _, count in parts) == prompt.max_tokens
    draws = torch.rand(prompt.max_tokens, dtype=torch.float64, generator=torch.Generator().manual_seed(prompt.seed))
    cache, step = Cache(CONFIG, 1, 32), torch.tensor([prompt.ids])
    ids: list[int] = []
    logprobs: list[float] = []
    with torch.inference_mode():
        for name in [name for name, count in parts for _ in range(count)]:
            logits = policy(name)(step, cache)[0, -1] / prompt.temperature
            mass = logits.double().softmax(0).cumsum(0)
            ids.append(int((mass <= draws[len(ids)] * mass[-1]).sum()))
            logprobs.append(float(logits.log_softmax(0)[ids[-1]]))
            step = torch.tensor([ids[-1:]])
    return Completion(ids=tuple(ids), logprobs=tuple(logprobs), finish_reason="length")


def policy(name: str) -> Policy:
    return new_policy(CONFIG, SEEDS[name])


def same(found: Completion, expected: Completion) -> bool:
    return found.ids == expected.ids and found.logprobs == pytest.approx(expected.logprobs, abs=1e-4)


def test_the_versions_of_these_tests_answer_differently_from_the_first_tokens_on() -> None:
    """Else nothing here would tell one from the other; and a kept cache from one that was made anew."""
    answers = {by_hand(LONG, (name, 20)).ids[:8] for name in SEEDS}
    mixed = by_hand(LONG, ("base", 5), ("c1", 15))
    whole = Prompt(ids=(*LONG.ids, *mixed.ids[:5]), max_tokens=20, seed=7)
    draws = torch.rand(20, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    with torch.inference_mode():
        anew = policy("c1")(torch.tensor([whole.ids]), Cache(CONFIG, 1, 32))[0, -1].log_softmax(0)
    assert len(answers) == 4 and draws[5] > 0
    assert abs(float(anew[mixed.ids[5]]) - mixed.logprobs[5]) > 1e-4


# -- the engine


@pytest.mark.parametrize("at", [0, 1, 7, 19])
def test_generation_stops_between_two_tokens_and_goes_on_as_if_it_had_not(tmp_path: Path, at: int) -> None:
    found, prompts = Found(tmp_path), [LONG, msgspec.structs.replace(LONG, seed=8)]
    left = iter([False] * at)
    first = found.engine.generate_until(prompts, lambda: next(left, True))
    assert [(len(each.ids), each.finish_reason) for each in first.completions] == [(at, "")] * 2
    second = found.engine.generate_until(prompts, never, first.kept)
    assert second.kept is None
    assert all(
        same(each, by_hand(prompt, ("base", 20))) for prompt, each in zip(prompts, second.completions, strict=True)
    )


@pytest.mark.parametrize("at", [0, 1, 7, 20])
def test_a_row_that_has_ended_is_whole_and_the_others_go_on(tmp_path: Path, at: int) -> None:
    """Until the last one has ended: nothing is sampled after that."""
    found, prompts = Found(tmp_path), [msgspec.structs.replace(LONG, seed=seed) for seed in range(7, 11)]
    rows = [by_hand(prompt, ("base", 20)).ids for prompt in prompts]
    token = next(each for each in rows[0][2:] if all(each in row for row in rows))
    ends = [row.index(token) + 1 for row in rows]
    assert len(set(ends)) > 1 and max(ends) < 20
    prompts, asked = [msgspec.structs.replace(prompt, stop_ids=(token,)) for prompt in prompts], itertools.count()
    first = found.engine.generate_until(prompts, lambda: next(asked) >= at)
    reasons = ["stop" if end <= at else "" for end in ends]
    assert [(len(each.ids), each.finish_reason) for each in first.completions] == [
        (min(at, end), reason) for end, reason in zip(ends, reasons, strict=True)
    ]
    assert next(asked) == min(at + 1, max(ends))
    if at < max(ends):
        first = found.engine.generate_until(prompts, never, first.kept)
    assert first.kept is None and [each.finish_reason for each in first.completions] == ["stop"] * 4
    assert [each.ids for each in first.completions] == [row[:end] for row, end in zip(rows, ends, strict=True)]


def test_a_stop_that_is_taken_back_at_once_starts_no_second_cache(tmp_path: Path) -> None:
    """A fence that is given up clears it while the engine is between two groups: the second one has not begun."""
    found, short = Found(tmp_path), Prompt(ids=(11, 10), max_tokens=20, seed=3)
    asked = iter([False, False, True])
    first = found.engine.generate_until([short, LONG], lambda: next(asked, False))
    assert [len(each.ids) for each in first.completions] == [2, 0]
    second = found.engine.generate_until([short, LONG], never, first.kept)
    assert same(second.completions[0], by_hand(short, ("base", 20)))
    assert same(second.completions[1], by_hand(LONG, ("base", 20)))


# -- staged: under the swap


async def test_a_drained_answer_is_the_old_versions_and_the_swap_waits_for_it(tmp_path: Path) -> None:
    async with scene(tmp_path) as it:
        await it.found.say(it.found.staging())
        (asked,) = await it.ask_and_halt(7, LONG)
        it.see(*COMMITTED)
        swapping = asyncio.create_task(it.swap())
        await asyncio.sleep(0.05)
        assert not swapping.done() and not asked.done()
        it.engine.goes_on.set()
        answer = await asked
        await swapping
    assert (answer.load_id, answer.spans) == ("inc:0", ()) and same(answer.completion, by_hand(LONG, ("base", 20)))


async def test_a_retracted_answer_is_the_new_versions_as_if_it_had_been_asked_afterwards(tmp_path: Path) -> None:
    async with scene(tmp_path, "retract") as it:
        await it.found.say(it.found.staging())
        (asked,) = await it.ask_and_halt(7, LONG)
        it.see(*COMMITTED)
        said = await it.swap()  # which does not wait for twenty tokens: nothing lets the engine go on
        assert said.load_id == "inc:1" and not asked.done()
        it.see(*SWAPPED)
        answer = await asked
    assert (answer.load_id, answer.spans) == ("inc:1", ()) and same(answer.completion, by_hand(LONG, ("c1", 20)))
    assert answer.as_of == answer.done_as_of == it.found.agent.world.seq


async def test_an_answer_that_goes_on_in_place_names_the_version_of_every_token(tmp_path: Path) -> None:
    async with scene(tmp_path, "in_place") as it:
        await it.found.say(it.found.staging())
        began = it.found.agent.world.seq
        (asked,) = await it.ask_and_halt(7, LONG)
        it.see(*COMMITTED)
        stopped = it.found.agent.world.seq
        await it.swap()
        assert not asked.done()
        it.see(*SWAPPED)
        answer, now = await asked, it.found.agent.world.seq
    assert answer.spans == (Span("inc:0", 0, 7, began, stopped), Span("inc:1", 7, 13, now, now))
    assert (answer.load_id, answer.as_of, answer.done_as_of) == ("inc:0", began, now)
    assert same(answer.completion, by_hand(LONG, ("base", 7), ("c1", 13)))


async def test_two_pauses_make_three_parts(tmp_path: Path) -> None:
    second = (*SWAPPED, swapped("e1", 1, "c1"), *trained("c2", "c1", 2), staged_target(2, "c2"), offered(2, "c2"))
    async with scene(tmp_path, "in_place") as it:
        await it.found.say(it.found.staging())
        (asked,) = await it.ask_and_halt(3, LONG)
        it.see(*COMMITTED)
        await it.swap()
        it.engine.halt_at = 4
        it.engine.halts.clear()
        it.see(*second)
        await until(it.engine.halts.is_set)
        await it.found.say(it.found.staging("c2", 2))
        gone = (*second, staged("e0", 2, "c2"), staged("e1", 2, "c2"), committed(2, "c2", E0, E1))
        it.see(*gone)
        await it.swap("c2", 2)
        it.see(*gone, swapped("e0", 2, "c2"))
        answer = await asked
    assert [(span.load_id, span.first, span.count) for span in answer.spans] == [
        ("inc:0", 0, 3),
        ("inc:1", 3, 4),
        ("inc:2", 7, 13),
    ]
    assert same(answer.completion, by_hand(LONG, ("base", 3), ("c1", 4), ("c2", 13)))


def staged_target(n: int, candidate: str) -> Step:
    return msgspec.structs.replace(target(n, candidate, E0, E1), mode="staged", pause="in_place")


@pytest.mark.parametrize("pause", ["retract", "in_place"])
async def test_what_was_stopped_before_its_first_token_is_the_new_versions_alone(tmp_path: Path, pause: str) -> None:
    async with scene(tmp_path, pause) as it:
        await it.found.say(it.found.staging())
        (asked,) = await it.ask_and_halt(0, LONG)
        it.see(*COMMITTED)
        await it.swap()
        it.see(*SWAPPED)
        answer = await asked
    assert (answer.load_id, answer.spans) == ("inc:1", ()) and same(answer.completion, by_hand(LONG, ("c1", 20)))


async def test_whoever_was_done_when_the_others_were_stopped_is_answered_at_once(tmp_path: Path) -> None:
    """Prompts of two lengths are two forward passes: the shorter ones are whole, the longer ones half way."""
    short = Prompt(ids=(11, 5, 10), max_tokens=2, seed=3)
    async with scene(tmp_path, "retract") as it:
        it.see(*TARGETED)
        asked = it.ask(short, LONG)
        it.engine.halt_at = 2 + 1 + 4  # the short one is asked twice and once more, then the long one
        it.see(*SERVING)
        await until(it.engine.halts.is_set)
        await it.found.say(it.found.staging())
        it.see(*COMMITTED)
        await it.swap()
        first = await asked[0]
        assert not asked[1].done()
        it.see(*SWAPPED)
        second = await asked[1]
    assert (first.load_id, second.load_id) == ("inc:0", "inc:1")
    assert same(first.completion, by_hand(short, ("base", 2))) and same(second.completion, by_hand(LONG, ("c1", 20)))


# -- fenced: through the whole of it


def receiving(found: Found) -> Receive:
    blob, manifest = found.kept["c1"]
    return Receive("pub1", 1, "inc:1", manifest.digest, "files", blob.digest, "", 5.0)


@pytest.mark.parametrize("pause", ["retract", "in_place"])
async def test_a_fence_stops_at_the_next_token_and_the_request_waits_through_it_for_the_commit(
    tmp_path: Path, pause: str
) -> None:
    async with scene(tmp_path, pause) as it:
        (asked,) = await it.ask_and_halt(7, LONG)
        it.see(*TARGETED)
        said = await it.fence()
        assert isinstance(said, EngineFenced) and said.previous == "inc:0"
        it.see(*FENCED)
        assert isinstance(await it.found.say(receiving(it.found)), ReceiverVerified)
        await asyncio.sleep(0.02)
        assert not asked.done() and it.engine.calls == 1
        it.see(*RELEASED)
        answer = await asked
    expected = by_hand(LONG, ("c1", 20)) if pause == "retract" else by_hand(LONG, ("base", 7), ("c1", 13))
    named = [(span.load_id, span.count) for span in answer.spans]
    assert named == ([] if pause == "retract" else [("inc:0", 7), ("inc:1", 13)])
    assert answer.load_id == ("inc:1" if pause == "retract" else "inc:0") and same(answer.completion, expected)


async def test_after_a_halt_it_goes_on_with_the_incumbent_and_says_that_it_had_stopped(tmp_path: Path) -> None:
    """Both parts are of one version; an answer in one go would contradict the fence between them."""
    async with scene(tmp_path, "in_place") as it:
        (asked,) = await it.ask_and_halt(7, LONG)
        it.see(*TARGETED)
        await it.fence()
        stopped = (*TARGETED, fenced("e0", 1), fenced("e1", 1), halted(1))
        it.see(*stopped)
        blob, manifest = it.found.kept["base"]
        said = await it.found.say(VerifyHead("inc:0", manifest.digest, blob))
        assert isinstance(said, ReceiverVerified) and said.method == "memory"
        it.see(*stopped, holds("e0", 0, "base"))
        answer = await asked
    assert [(span.load_id, span.count) for span in answer.spans] == [("inc:0", 7), ("inc:0", 13)]
    assert answer.spans[0].done_as_of < len(TARGETED) + 1 <= answer.spans[1].as_of
    assert same(answer.completion, by_hand(LONG, ("base", 20)))


HALTED = (*paused("in_place", *TARGETED), fenced("e0", 1), fenced("e1", 1), halted(1))


def next_one(n: int, candidate: str, parent: int, pause: str) -> tuple[Step, ...]:
    """A release after one of those, from its job to its ticket; and, from there on, to its commit."""
    base = {0: "base", 2: "c2"}[parent]
    return (
        *trained(candidate, base, n),
        *paused(pause, target(n, candidate, E0, E1, parent=parent)),
        *(fenced("e0", n), fenced("e1", n), offered(n, candidate)),
    )


def commits(n: int, candidate: str, parent: int) -> tuple[Step, ...]:
    words = (verified_fact("e0", n, candidate), verified_fact("e1", n, candidate))
    return (*words, committed(n, candidate, E0, E1, parent=parent))


@pytest.mark.parametrize("pause", ["drain", "retract", "in_place"])
async def test_what_was_stopped_for_a_halted_release_goes_on_over_the_next_one_only_if_that_is_in_place(
    tmp_path: Path, pause: str
) -> None:
    """The second target comes before the incumbent was proven again: nothing is in hand then, and yet it is kept."""
    second = (*HALTED, *next_one(2, "c2", 0, pause))
    async with scene(tmp_path, "in_place") as it:
        (asked,) = await it.ask_and_halt(7, LONG)
        it.see(*TARGETED)
        await it.fence()
        await it.receive(second, 2, "c2", pause)
        it.found.see(*second, *commits(2, "c2", 0))
        answer = await asked
    mixed = pause == "in_place"
    assert [(s.load_id, s.count) for s in answer.spans] == ([("inc:0", 7), ("inc:2", 13)] if mixed else [])
    assert answer.load_id == ("inc:0" if mixed else "inc:2")
    parts = (("base", 7), ("c2", 13)) if mixed else (("c2", 20),)
    assert same(answer.completion, by_hand(LONG, *parts))


async def test_one_release_that_drains_is_enough_though_the_last_one_is_in_place(tmp_path: Path) -> None:
    """Both came about before the engine generated again: how it was stopped last says nothing of the one before."""
    second = (*HALTED, *next_one(2, "c2", 0, "drain"))
    third = (*second, *commits(2, "c2", 0), *next_one(3, "c3", 2, "in_place"))
    async with scene(tmp_path, "in_place") as it:
        (asked,) = await it.ask_and_halt(7, LONG)
        it.see(*TARGETED)
        await it.fence()
        await it.receive(second, 2, "c2", "drain")
        await it.receive(third, 3, "c3", "in_place")
        it.found.see(*third, *commits(3, "c3", 2))
        answer = await asked
    assert (answer.load_id, answer.spans) == ("inc:3", ()) and same(answer.completion, by_hand(LONG, ("c3", 20)))


async def test_a_fence_that_is_given_up_while_it_waits_lets_generation_go_on(tmp_path: Path) -> None:
    async with scene(tmp_path) as it:
        (asked,) = await it.ask_and_halt(7, LONG)
        fence = asyncio.create_task(it.found.say(Fence("pub1", 1, "drain")))
        again = asyncio.create_task(it.found.say(Fence("pub1", 2, "in_place")))
        await asyncio.sleep(0.02)
        fence.cancel()
        await asyncio.gather(fence, return_exceptions=True)
        assert isinstance(await again, EngineFenced) and not it.found.agent.stop.is_set()
        answer = await asked  # the gate was never closed here
    assert [span.count for span in answer.spans] == [7, 13]


# -- who is gone, and who never comes to an end


@pytest.mark.parametrize("pause", ["retract", "in_place"])
async def test_nothing_more_is_generated_for_a_client_that_hung_up_in_a_pause(tmp_path: Path, pause: str) -> None:
    async with scene(tmp_path, pause) as it:
        (asked,) = await it.ask_and_halt(7, LONG)
        it.see(*TARGETED)
        await it.fence()
        asked.cancel()
        it.see(*SERVING)
        (other,) = it.ask(LONG)
        answer = await other
    assert it.engine.calls == 2 and same(answer.completion, by_hand(LONG, ("base", 20)))


async def test_a_client_that_hung_up_costs_the_others_of_its_batch_nothing(tmp_path: Path) -> None:
    twin = msgspec.structs.replace(LONG, seed=8)
    async with scene(tmp_path, "in_place") as it:
        it.see(*TARGETED)
        asked = it.ask(LONG, twin)
        it.engine.halt_at = 7
        it.see(*SERVING)
        await until(it.engine.halts.is_set)
        it.see(*TARGETED)
        await it.fence()
        asked[0].cancel()
        it.see(*SERVING)
        answer = await asked[1]
    assert same(answer.completion, by_hand(twin, ("base", 20)))


async def test_a_batch_is_not_retracted_for_ever(tmp_path: Path) -> None:
    """Where releases come faster than its answers, it would never end: it is drained in the end."""
    async with scene(tmp_path, "retract") as it:
        (asked,) = await it.ask_and_halt(7, LONG)
        for n in range(MAX_RETRACTIONS):
            it.see(*TARGETED)
            await it.fence(n)
            it.engine.halt_at = 7
            it.engine.halts.clear()
            it.see(*SERVING)
            await until(it.engine.halts.is_set)
        it.see(*TARGETED)
        fence = asyncio.create_task(it.fence(9))
        await asyncio.sleep(0.05)
        assert not fence.done()
        it.engine.goes_on.set()
        answer = await asked
        await fence
    assert it.engine.calls == 1 + MAX_RETRACTIONS and answer.spans == ()
    assert same(answer.completion, by_hand(LONG, ("base", 20)))


async def test_an_engine_that_ends_waits_not_even_for_what_is_retracted_no_more(tmp_path: Path) -> None:
    async with scene(tmp_path, "retract") as it:
        (asked,) = await it.ask_and_halt(7, LONG)
        for n in range(MAX_RETRACTIONS):
            it.see(*TARGETED)
            await it.fence(n)
            it.engine.halt_at = 7
            it.engine.halts.clear()
            it.see(*SERVING)
            await until(it.engine.halts.is_set)
        it.server.end()
        it.worker.cancel()
        done, _ = await asyncio.wait({it.worker}, timeout=10.0)
        assert done and not asked.done()


async def test_an_engine_says_how_it_can_be_stopped(tmp_path: Path) -> None:
    found = Found(tmp_path)
    said = await found.say(Join())
    assert isinstance(said, EngineJoined) and said.pauses == ("drain", "retract", "in_place")
    assert joined("e0").pauses == ("drain",)  # one that does not say so
