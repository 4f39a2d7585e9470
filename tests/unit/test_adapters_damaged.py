"""A committed adapter whose artifact cannot be loaded: nothing else waits for it, and it comes back once it is mended.

Knows: two scenarios with an adapter each, and a new boot that holds neither. Must not know: how an artifact is read.
"""

from __future__ import annotations

import pytest

from reef_bus.core import reactions
from reef_bus.core.effects import Append, AwaitArtifact, Deadlines, Debt, Effect, Me, Policy
from reef_bus.core.serving import hindrance, version
from reef_bus.core.world import World
from reef_bus.events import Event
from reef_bus.views import status, waiting
from tests.facts import (
    CODE,
    E0,
    FROZEN,
    MATH,
    NO_LORA,
    L,
    adapter_caught_up,
    adapter_committed,
    adapter_damaged,
    adapter_rollback_asked,
    adapter_staged,
    adapter_target,
    adapter_trained,
    blob,
    digest,
    holds,
    joined_with,
    left,
    m,
    name,
    unloaded,
)
from tests.spec import SECOND, Said, Step, by, given
from tests.unit.test_adapters import TWO, load

AGAIN: tuple[Step, ...] = (*FROZEN, *TWO, by("e1.2", joined_with("e1")), by("e1.2", holds("e1", 0, "base")))
"""Math's adapter is release 1, code's is 2; a new boot of e1 holds the base model."""
DAMAGED: tuple[Step, ...] = (*AGAIN, by("e1.2", adapter_damaged("e1", MATH, 1)))
SAID = len(DAMAGED)
VERIFY_S = 7.0
BACK: tuple[Step, ...] = (by("e1.2", adapter_caught_up("e1", CODE, 2, "c1")),)


def debts(*steps: Step, mended: tuple[int, ...] = ()) -> list[Debt]:
    me, deadlines = Me("e1", "e1.2"), Deadlines(verify_s=VERIFY_S)
    return reactions.engine(given(*steps).then(), me, deadlines, mended=frozenset(mended))


def owes(*steps: Step, mended: tuple[int, ...] = ()) -> list[Effect | Event]:
    effects = (debt.effect for debt in debts(*steps, mended=mended))
    return [effect.event if isinstance(effect, Append) else effect for effect in effects]


def awaited(said: int = SAID, first_s: float = 0.3) -> AwaitArtifact:
    return AwaitArtifact(said, digest("m1"), blob("m1"), first_s, VERIFY_S)


def failing(world: World) -> dict[str, tuple[str, int]]:
    return {each: (f.load_id, f.tries) for each, f in world.membership.engines["e1"].failing.items()}


# -- what is owed


def test_the_next_adapter_is_loaded_and_the_damaged_one_is_looked_for_beside_it() -> None:
    assert owes(*AGAIN) == [load(MATH, 1, "m1")]
    assert owes(*DAMAGED) == [load(CODE, 2, "c1"), awaited()]
    assert owes(*DAMAGED, *BACK) == [awaited()]


def test_the_look_goes_on_whatever_else_is_said_of_adapters() -> None:
    """Under one key: a runner would else begin anew with it each time."""
    assert debts(*DAMAGED)[-1].key == debts(*DAMAGED, *BACK)[-1].key


def test_once_it_can_be_read_it_is_loaded_but_after_everything_else() -> None:
    assert owes(*DAMAGED, mended=(SAID,)) == [load(CODE, 2, "c1")]
    assert owes(*DAMAGED, *BACK, mended=(SAID,)) == [load(MATH, 1, "m1")]
    proven = by("e1.2", adapter_caught_up("e1", MATH, 1, "m1"))
    assert owes(*DAMAGED, *BACK, proven, mended=(SAID,)) == []
    assert failing(given(*DAMAGED, *BACK, proven).then()) == {}


@pytest.mark.parametrize(("scenario", "candidate", "base", "parent"), [(CODE, "c2", "c1", 2), (MATH, "m2", "m1", 1)])
def test_no_publication_waits_for_it_not_even_the_same_scenarios(
    scenario: str, candidate: str, base: str, parent: int
) -> None:
    open_ = adapter_target(scenario, 3, candidate, E0, m("e1", 2), parent=parent)
    begun = (*DAMAGED, *BACK, *adapter_trained(scenario, candidate, base), open_)
    assert owes(*begun) == [load(scenario, 3, candidate, "pub3"), awaited()]
    assert owes(*begun, mended=(SAID,)) == [load(scenario, 3, candidate, "pub3")]


def test_each_time_that_it_cannot_be_loaded_all_the_same_it_is_looked_for_twice_as_much_later() -> None:
    story = [*DAMAGED, *BACK]
    for first_s in (0.6, 1.2, 2.4):
        story.append(by("e1.2", adapter_damaged("e1", MATH, 1)))
        assert owes(*story, mended=(SAID,)) == [awaited(len(story), first_s)]
    assert failing(given(*story).then()) == {MATH: (L(1), 4)}


@pytest.mark.parametrize(("times", "first_s"), [(13, 1228.8), (14, 2457.6), (15, 2457.6), (1100, 2457.6)])
def test_however_often_that_was_it_is_looked_for_again_within_the_hour(times: int, first_s: float) -> None:
    story = [*AGAIN, *BACK, *(by("e1.2", adapter_damaged("e1", MATH, 1)) for _ in range(times))]
    assert owes(*story, mended=(SAID,)) == [awaited(len(story), first_s)]


def test_a_head_for_which_there_is_no_room_is_not_looked_for() -> None:
    small = (by("e1.2", joined_with("e1", 1)), by("e1.2", holds("e1", 0, "base")))
    assert owes(*FROZEN, *TWO, *small, by("e1.2", adapter_caught_up("e1", MATH, 1, "m1"))) == []


def test_a_new_boot_tries_at_once() -> None:
    again = (by("e1.3", joined_with("e1")), by("e1.3", holds("e1", 0, "base")))
    world = given(*DAMAGED, *again).then()
    found = reactions.engine(world, Me("e1", "e1.3"), Deadlines())
    assert [debt.effect for debt in found] == [load(MATH, 1, "m1")]


def test_it_takes_no_place_and_nothing_away() -> None:
    before, since = given(*AGAIN, *BACK).then(), given(*AGAIN, *BACK, by("e1.2", adapter_damaged("e1", MATH, 1))).then()
    assert before.membership.engines["e1"].residency == since.membership.engines["e1"].residency
    assert since.publications.excluded == before.publications.excluded and not since.membership.engines["e1"].left


# -- what makes it moot


def replaced(candidate: str, request: int = 0) -> tuple[Step, ...]:
    """Release 3 of math: its target, the words on it, its commit."""
    both = E0, m("e1", 2)
    return (
        adapter_target(MATH, 3, candidate, *both, parent=1, request=request),
        adapter_staged("e0", MATH, 3, candidate),
        by("e1.2", adapter_staged("e1", MATH, 3, candidate)),
        adapter_committed(MATH, 3, candidate, *both, parent=1),
    )


def test_the_scenarios_next_release_ends_it() -> None:
    begun = (*DAMAGED, *BACK, *adapter_trained(MATH, "m2", "m1"), *replaced("m2"))
    assert owes(*begun[:-1]) == [awaited()] and owes(*begun) == []
    world = given(*begun).then()
    assert failing(world) == {} and version(world, world.membership.engines["e1"], MATH)


def test_a_rollback_ends_it_and_as_long_as_that_is_under_way_nobody_looks_for_it() -> None:
    asked = (*DAMAGED, *BACK, adapter_rollback_asked(MATH, 0, 1))
    begun = (*asked, *replaced(NO_LORA[MATH], request=len(asked)))
    assert owes(*asked) == [awaited()]
    assert owes(*asked, begun[len(asked)]) == [load(MATH, 3, NO_LORA[MATH], "pub3")]
    assert owes(*begun) == [] and failing(given(*begun).then()) == {}


def test_a_word_that_comes_too_late_or_of_what_is_held_is_of_nothing() -> None:
    late = by("e1.2", adapter_damaged("e1", MATH, 7))
    assert failing(given(*AGAIN, late).then()) == {} and owes(*AGAIN, late) == [load(MATH, 1, "m1")]
    held = given(*FROZEN, *TWO, adapter_damaged("e1", MATH, 1)).then()
    assert failing(held) == {} and version(held, held.membership.engines["e1"], MATH)


def test_what_was_lost_and_is_damaged_comes_back_as_well() -> None:
    gone = (unloaded("e1", name(MATH, 1), "the engine does not list it"), adapter_damaged("e1", MATH, 1))
    world = given(*FROZEN, *TWO, *gone).then()
    found = reactions.engine(world, Me("e1", "e1.1"), Deadlines(verify_s=VERIFY_S))
    assert [debt.effect for debt in found] == [awaited(len((*FROZEN, *TWO, *gone)))]


# -- what people are told

WHY = "/store/aa is damaged: its bytes hash to bb; remove it and copy it there again"


def test_a_person_hears_which_engine_cannot_load_what_and_why_since_when_and_what_to_do() -> None:
    again = Said(adapter_damaged("e1", MATH, 1, WHY), "e1.2", after_s=4)
    story = given(*DAMAGED, *BACK, again)
    found = waiting(story.world, story.now + 2 * SECOND, Policy())
    assert (found["on"], found["since_s"]) == ("e1", 6.0)
    assert found["command"] == f"reef-bus rollback {MATH} {L(0)} --why …"
    assert f"{MATH}'s adapter {L(1)}" in found["next"] and WHY in found["next"]


def test_of_several_engines_a_person_hears_the_first_word() -> None:
    later = Said(joined_with("e0"), "e0.2", after_s=4)
    words = (holds("e0", 0, "base"), adapter_damaged("e0", MATH, 1, "another"), adapter_caught_up("e0", CODE, 2, "c1"))
    steps = (*AGAIN, by("e1.2", adapter_damaged("e1", MATH, 1, WHY)), *BACK, later, *(by("e0.2", w) for w in words))
    story = given(*steps)
    found = waiting(story.world, story.now + 2 * SECOND, Policy())
    assert (found["on"], found["since_s"], WHY in found["next"]) == ("e0, e1", 6.0, True)


def test_the_status_of_an_engine_names_what_it_cannot_load_and_not_what_another_boot_could_not() -> None:
    steps = (*AGAIN, by("e1.2", adapter_damaged("e1", MATH, 1, WHY)), *BACK)
    engines = status(given(*steps).world, 0, Policy())["engines"]
    assert engines["e1"]["adapters"]["failing"] == {MATH: {"load_id": L(1), "why": WHY}}
    assert engines["e0"]["adapters"]["failing"] == {}


def test_whoever_asks_hears_why_nobody_answers_and_nothing_as_long_as_somebody_does() -> None:
    assert hindrance(given(*DAMAGED, *BACK).world, MATH) == ""
    alone = given(*DAMAGED, *BACK, left("e0")).world
    assert hindrance(alone, MATH) == f"e1 cannot load {MATH}'s adapter {L(1)}: no blob at /store/aa"
    assert hindrance(alone, CODE) == "" and hindrance(alone, "") == ""
