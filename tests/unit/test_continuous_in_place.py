"""What is stopped in place by an engine that batches by itself; and what comes of engines that err, or end.

Knows: as tests/unit/test_continuous.py. Must not know: HTTP, or who decides on a pause.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from consumers.reef_engine.continuous import MAX_REFUTED
from reef_bus.backends import Generated, Prompt
from reef_bus.core.effects import Fence
from reef_bus.core.publication import IN_PLACE
from reef_bus.errors import Unavailable
from reef_bus.events import ReceiverVerified, Span
from tests.apart import VOCABULARY, Fate, by_hand
from tests.facts import E0, E1, SERVING, committed, fenced, holds, offered, swapped, target, trained, verified
from tests.loop import quiet, until
from tests.unit.test_continuous import LONG, SHORT, TWIN, Scene, check, scene, violations
from tests.unit.test_pauses import FENCED, HALTED, RELEASED, TARGETED, commits, next_one
from tests.unit.test_staged import STAGED

COMMITTED = (*STAGED, committed(1, "c1", E0, E1))
SWAPPED = (*COMMITTED, swapped("e0", 1, "c1"))


# -- what goes on


async def test_it_goes_on_over_a_fence_and_says_who_sampled_what(tmp_path: Path) -> None:
    async with scene(tmp_path, "in_place") as it:
        asked = await it.ask_and_hold(7, LONG, TWIN)
        began = it.agent.world.seq
        await it.release()
        await quiet(0.02)
        it.let_go()
        answers = [await each for each in asked]
        check(answers[0], LONG, ("inc:0", 7), ("inc:1", 13))
        check(answers[1], TWIN, ("inc:0", 7), ("inc:1", 13))
    assert it.server.asked == [LONG, TWIN]
    stopped, now = len(TARGETED), len(RELEASED)
    assert answers[0].spans == (Span("inc:0", 0, 7, began, stopped), Span("inc:1", 7, 13, now, now))
    assert violations(answers, "in_place", *RELEASED) == []
    merged = [Generated(**{**{n: getattr(a, n) for n in a.__struct_fields__}, "spans": ()}) for a in answers]
    assert len(violations(merged, "in_place", *RELEASED)) >= 2, "or the audit would find nothing at all"


async def test_a_part_lasts_until_the_engine_stands_whatever_is_folded_meanwhile(tmp_path: Path) -> None:
    async with scene(tmp_path, "in_place") as it:
        (asked,) = await it.ask_and_hold(7, LONG)
        halting, later = it.found.backend.halt, (*TARGETED, fenced("e1", 1))

        async def halt() -> None:
            it.see(*later)
            await halting()

        it.found.backend.halt = halt  # type: ignore[method-assign]
        await it.release()
        it.let_go()
        assert [span.done_as_of for span in (await asked).spans] == [len(later), len(RELEASED)]


async def test_it_goes_on_over_a_swap_that_was_staged_meanwhile(tmp_path: Path) -> None:
    async with scene(tmp_path, "in_place") as it:
        (asked,) = await it.ask_and_hold(7, LONG)
        await it.found.say(it.found.staging())
        assert it.sampling()
        it.see(*COMMITTED)
        said = await it.found.say(it.found.heading(pause="in_place"))
        assert isinstance(said, ReceiverVerified) and said.method == "swapped" and not asked.done()
        it.see(*SWAPPED)
        it.let_go()
        check(await asked, LONG, ("inc:0", 7), ("inc:1", 13))
    assert violations([asked.result()], "in_place", *SWAPPED) == []


async def test_two_releases_make_three_parts(tmp_path: Path) -> None:
    offers = (fenced("e0", 2), fenced("e1", 2), offered(2, "c2"))
    second = (*RELEASED, *trained("c2", "c1", 2), target(2, "c2", E0, E1), *offers)
    third = (*second, verified("e0", 2, "c2"), verified("e1", 2, "c2"), committed(2, "c2", E0, E1))
    async with scene(tmp_path, "in_place") as it:
        (asked,) = await it.ask_and_hold(3, LONG)
        await it.release()
        it.server.hold_at = 8
        it.server.move()
        await until(lambda: it._held(8))
        it.see(*second[:-3])
        await it.fence(2)
        it.see(*second)
        await it.receive("c2", 2)
        it.see(*third)
        it.let_go()
        check(await asked, LONG, ("inc:0", 3), ("inc:1", 5), ("inc:2", 12))
    assert violations([asked.result()], "in_place", *third) == []


async def test_a_request_that_arrives_after_the_halt_is_the_new_versions_alone(tmp_path: Path) -> None:
    async with scene(tmp_path, "in_place") as it:
        it.server.there.clear()
        (asked,) = it.ask(LONG)
        await until(lambda: bool(it.endpoint.in_hand))
        it.see(*TARGETED)
        await it.fence()
        it.server.there.set()
        await until(lambda: len(it.server.in_hand) == 1)
        assert not asked.done()
        it.see(*FENCED)
        await it.receive()
        it.see(*RELEASED)
        check(await asked, LONG, ("inc:1", 20))
    assert violations([asked.result()], "in_place", *RELEASED) == []


async def test_an_answer_that_was_done_before_the_halt_and_comes_after_it_is_the_old_versions(tmp_path: Path) -> None:
    async with scene(tmp_path, "in_place") as it:
        it.server.back.clear()
        (asked,) = it.ask(SHORT)
        await until(lambda: any(request.ended.is_set() for request in it.server.in_hand.values()))
        await it.release()
        await quiet(0.02)
        assert not asked.done(), "it is on its way"
        it.server.back.set()
        check(await asked, SHORT, ("inc:0", 5))
    assert asked.result().done_as_of == len(TARGETED)
    assert violations([asked.result()], "in_place", *RELEASED) == []


@pytest.mark.parametrize("how", ["answered as it halted", "answered while it stood", "given up while it stood"])
async def test_an_engine_that_stands_with_nothing_in_hand_goes_on_for_the_next_one(tmp_path: Path, how: str) -> None:
    async with scene(tmp_path, "in_place") as it:
        it.server.back.clear()
        (asked,) = it.ask(SHORT)
        await until(lambda: any(request.ended.is_set() for request in it.server.in_hand.values()))
        if how == "answered as it halted":
            halting = it.found.backend.halt

            async def halt() -> None:
                it.server.back.set()
                await halting()
                await asyncio.sleep(0.01)

            it.found.backend.halt = halt  # type: ignore[method-assign]
        it.see(*TARGETED)
        await it.fence()
        if how == "given up while it stood":
            asked.cancel()
            await quiet(0.02)
        it.server.back.set()
        await quiet(0.02)
        assert it.server.halts == 1
        it.see(*SERVING)
        (other,) = it.ask(LONG)
        async with asyncio.timeout(2):
            check(await other, LONG, ("inc:0", 20))
        check(await it.ask(TWIN)[0], TWIN, ("inc:0", 20))
        assert (it.server.halts, it.server.goes) == (1, 1)


async def test_an_engine_stays_as_it_stands_when_the_gate_closes_before_the_memory_is_to_be_had(tmp_path: Path) -> None:
    async with scene(tmp_path, "in_place") as it:
        (asked,) = await it.ask_and_hold(7, LONG)
        it.see(*TARGETED)
        await it.fence()
        async with it.agent.memory:
            it.see(*SERVING)
            await until(lambda: bool(it.agent.memory._waiters))
            it.see(*TARGETED)
        await quiet(0.02)
        assert it.server.paused and it.server.goes == 0
        it.let_go()
        it.see(*SERVING)
        check(await asked, LONG, ("inc:0", 20))


# -- what starts over


async def test_it_starts_over_where_the_head_is_still_the_same(tmp_path: Path) -> None:
    """The engine would name one version for both times, and the fence between them contradict that."""
    async with scene(tmp_path, "in_place") as it:
        (asked,) = await it.ask_and_hold(7, LONG)
        await it.halt()
        it.let_go()
        check(await asked, LONG, ("inc:0", 20))
    assert it.server.asked == [LONG, LONG] and it.server.dropped == [LONG]
    assert violations([asked.result()], "in_place", *HALTED, holds("e0", 0, "base")) == []


@pytest.mark.parametrize("pause", ["drain", "retract", "in_place"])
async def test_it_goes_on_over_the_release_after_a_halted_one_only_if_that_is_in_place(
    tmp_path: Path, pause: str
) -> None:
    second = (*HALTED, *next_one(2, "c2", 0, pause))
    async with scene(tmp_path, "in_place") as it:
        (asked,) = await it.ask_and_hold(7, LONG)
        it.see(*TARGETED)
        await it.fence()
        it.found.see(*second[:-3])
        await it.fence(2, pause=pause)
        it.found.see(*second)
        await it.receive("c2", 2)
        it.found.see(*second, *commits(2, "c2", 0))
        it.let_go()
        parts = [("inc:0", 7), ("inc:2", 13)] if pause == "in_place" else [("inc:2", 20)]
        check(await asked, LONG, *parts)


async def test_what_starts_over_does_so_in_the_order_in_which_it_was_asked(tmp_path: Path) -> None:
    async with scene(tmp_path, "in_place", most=3) as it:
        asked = await it.ask_and_hold(4, LONG, TWIN, SHORT)
        await it.halt()
        it.let_go()
        await asyncio.gather(*asked)
    assert it.server.asked == [LONG, TWIN, SHORT] * 2


# -- answers that end before they have as many tokens as they may


def ending(*parts: tuple[str, int]) -> tuple[Prompt, int]:
    """LONG, which ends with a token that these versions sample in it once, after some others; and after how many."""
    ids = by_hand(LONG, *parts).ids
    last = next(place for place in range(8, len(ids)) if ids.index(ids[place]) == place)
    return replace(LONG, stop_ids=(*(set(range(VOCABULARY)) - set(ids)), ids[last])), last + 1


async def test_an_answer_ends_with_its_stop_token(tmp_path: Path) -> None:
    prompt, count = ending(("base", 20))
    async with scene(tmp_path) as it:
        check(await it.ask(prompt)[0], prompt, ("inc:0", count))


async def test_what_goes_on_in_place_ends_with_its_stop_token_too(tmp_path: Path) -> None:
    prompt, count = ending(("base", 3), ("c1", 17))
    async with scene(tmp_path, IN_PLACE) as it:
        asked = await it.ask_and_hold(3, prompt)
        await it.release()
        it.let_go()
        check(await asked[0], prompt, ("inc:0", 3), ("inc:1", count - 3))


async def test_an_engine_that_does_not_stop_is_asked_again(tmp_path: Path) -> None:
    prompt, count = ending(("base", 20))
    async with scene(tmp_path) as it:
        it.server.answers.append("stops at nothing")
        check(await it.ask(prompt)[0], prompt, ("inc:0", count))
        assert it.server.asked == [prompt, prompt]


# -- engines that err


FOREIGN: tuple[Fate, ...] = ("names another version", "names one too many")
WRONG: tuple[Fate, ...] = (*FOREIGN, "too few tokens", "too few named", "stops too soon")


async def prove_again(it: Scene, fate: Fate) -> None:
    """Where an answer names what was never loaded, somebody else may have loaded it."""
    if fate in FOREIGN:
        await until(lambda: not it.agent.open.is_set())
        said = await it.found.say(it.found.heading("base", 0, it.pause))
        assert isinstance(said, ReceiverVerified) and said.method == "memory"


@pytest.mark.parametrize("fate", WRONG)
async def test_an_answer_that_cannot_be_true_is_asked_again(tmp_path: Path, fate: Fate) -> None:
    async with scene(tmp_path) as it:
        it.server.answers.append(fate)
        (asked,) = it.ask(LONG)
        await prove_again(it, fate)
        check(await asked, LONG, ("inc:0", 20))
        assert it.server.asked == [LONG, LONG]


@pytest.mark.parametrize("fate", WRONG)
async def test_an_answer_that_is_never_true_is_never_given(tmp_path: Path, fate: Fate) -> None:
    """Its gateway hears of it, and asks another engine; whoever is answered rightly notices nothing."""
    async with scene(tmp_path) as it:
        it.server.answers.extend([fate] * MAX_REFUTED)
        (asked,) = it.ask(LONG)
        for _ in range(MAX_REFUTED):
            await prove_again(it, fate)
        with pytest.raises(Unavailable, match="inc:0"):
            await asked
        assert len(it.server.asked) == MAX_REFUTED and it.agent.served == 0
        check(await it.ask(TWIN)[0], TWIN, ("inc:0", 20))


async def test_an_answer_that_the_backend_cancels_is_not_lost(tmp_path: Path) -> None:
    async with scene(tmp_path) as it:
        it.server.answers.append("cancelled")
        check(await it.ask(LONG)[0], LONG, ("inc:0", 20))


# -- how it ends


async def test_a_server_that_is_gone_ends_the_worker_and_everybody_hears_of_it(tmp_path: Path) -> None:
    async with scene(tmp_path, most=2) as it:
        asked = [*await it.ask_and_hold(7, LONG, TWIN), *it.ask(SHORT)]
        it.server.die()
        assert isinstance((await asyncio.gather(it.worker, return_exceptions=True))[0], Unavailable)
        assert all(isinstance(each.exception(), Unavailable) for each in asked)
        with pytest.raises(Unavailable):
            it.ask(LONG)


async def test_a_server_that_is_gone_while_it_stood_ends_the_worker_too(tmp_path: Path) -> None:
    async with scene(tmp_path, "in_place") as it:
        asked = await it.ask_and_hold(7, LONG, TWIN)
        await it.release()
        it.server.die()
        assert isinstance((await asyncio.gather(it.worker, return_exceptions=True))[0], Unavailable)
        assert all(isinstance(each.exception(), Unavailable) for each in asked)


async def test_nothing_is_sampled_any_more_once_the_memory_is_free_though_the_worker_ends(tmp_path: Path) -> None:
    async with scene(tmp_path) as it:
        (asked,) = await it.ask_and_hold(7, LONG)
        it.see(*TARGETED)
        fence = asyncio.create_task(it.found.say(Fence("pub1", 1, "drain")))
        await quiet(0.02)
        free = asyncio.create_task(_free(it))
        it.worker.cancel()
        assert await free == 0
        await fence
        assert isinstance(asked.exception(), Unavailable)


async def _free(it: Scene) -> int:
    """How much is in the server's hands at the first moment in which the worker has the memory no more."""
    while it.agent.memory.locked() and not it.worker.done():  # noqa: ASYNC110 - nothing tells that
        await asyncio.sleep(0)
    return len(it.server.in_hand)


ENDS: dict[str, Callable[[Scene], None]] = {
    "drain": lambda it: it.see(*SERVING),
    "retract": lambda it: it.see(*SERVING),
    "in_place": lambda it: it.see(*RELEASED),
}


@pytest.mark.parametrize("pause", ENDS)
@pytest.mark.parametrize("steps", range(1, 60, 2))
async def test_it_may_be_ended_at_any_moment(tmp_path: Path, pause: str, steps: int) -> None:
    """Whoever asked has an answer or hears of it, and `scene` looks for what may be left behind."""
    async with scene(tmp_path, pause, most=2) as it:
        asked = it.ask(LONG, TWIN, SHORT)
        doing = asyncio.create_task(_pause(it))
        for _ in range(steps):
            await asyncio.sleep(0)
        it.worker.cancel()
        await asyncio.gather(it.worker, return_exceptions=True)
        assert all(
            each.done() and (each.exception() is None or isinstance(each.exception(), Unavailable)) for each in asked
        )
        async with asyncio.timeout(2):
            await doing


async def _pause(it: Scene) -> None:
    """A release, if it is one in place; else a fence that comes to nothing."""
    for _ in range(5):
        await asyncio.sleep(0)
    with contextlib.suppress(AssertionError):  # an engine that ends need not have a clean fence any more
        if it.pause == "in_place":
            await it.release()
            return
        it.see(*TARGETED)
        await it.fence()
        it.see(*SERVING)


@pytest.mark.parametrize("state", ["full", "draining", "halted", "closed", "idle"])
async def test_whoever_waits_does_not_spin(tmp_path: Path, state: str) -> None:
    async with scene(tmp_path, "in_place" if state == "halted" else "drain", most=1) as it:
        asked = [] if state == "idle" else await it.ask_and_hold(7, LONG)
        if state in ("draining", "halted", "closed"):
            it.see(*TARGETED)
        fence = asyncio.create_task(it.fence()) if state in ("draining", "halted") else None
        asked += it.ask(TWIN) if state != "idle" else []
        await quiet(0.05)
        turns, looked = 0, it.endpoint._open

        def counted() -> bool:
            nonlocal turns
            turns += 1
            return looked()

        it.endpoint._open = counted  # type: ignore[method-assign]
        await quiet(0.5)
        assert turns <= 40
        it.see(*SERVING)
        it.let_go()
        await asyncio.gather(*asked, *([fence] if fence else []))
