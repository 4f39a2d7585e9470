"""`status` at any moment: on whom we wait, since when, what happens next, and the command where a person is needed.

Knows: histories and one moment after each. Must not know: how it is shown.
"""

from __future__ import annotations

from typing import Any

import pytest

from reef_bus.core.effects import Policy
from reef_bus.events import (
    ComponentLost,
    ComponentStarted,
    JobAmbiguous,
    JobDiscardRequested,
    ReadinessPublished,
    RollbackRequested,
    TrainerJoined,
)
from reef_bus.views import status, waiting
from tests.facts import (
    E0,
    E1,
    REGISTERED,
    SERVING,
    L,
    S,
    colocated,
    dispatched,
    excluded,
    fenced,
    joined,
    left,
    lent,
    offered,
    opened,
    released,
    started,
    target,
    trained,
    verified,
)
from tests.spec import SECOND, Step, after, by, given

IN_PLACE = TrainerJoined(scenario=S, backend="torch", offers=("tcp",), mutates_in_place=True)
ATTACHED = TrainerJoined(scenario=S, backend="attached", offers=("tcp",), mutates_in_place=False)
LEAVING = (ComponentStarted(component="e1", pid=1, starts=1), ReadinessPublished(component="e1", boot="e1.1"))
TARGETED = (*SERVING, *trained("c1"), target(1, "c1", E0, E1))


def waits(*steps: Step, later_s: float = 5.0) -> dict[str, Any]:
    story = given(*steps)
    return waiting(story.world, story.now + int(later_s * SECOND), Policy())


@pytest.mark.parametrize(
    ("steps", "on", "then"),
    [
        ((opened(),), "the trainer", "registers the base model"),
        (REGISTERED, "an engine", "it joins"),
        ((*REGISTERED, joined("e0")), "e0", "proves the head"),
        (SERVING, "the harness", "next batch"),
        ((*SERVING, dispatched("j")), "the trainer", "finishes j"),
        ((*SERVING, colocated("j")), "e0, e1", "releases its memory, and j starts; after 30 s it is excluded"),
        ((*SERVING, colocated("j"), lent("e0", "j", 8)), "e1", "releases its memory"),
        ((*SERVING, colocated("j"), lent("e0", "j", 8), lent("e1", "j", 8)), "the trainer", "finishes j"),
        ((*SERVING, *LEAVING, colocated("j"), lent("e0", "j", 10), left("e1")), "the supervisor", "what is left of e1"),
        ((*SERVING, by("t2", ATTACHED)), "the training loop", "publishes its next step"),
        (TARGETED, "e0, e1", "after 30 s it is excluded"),
        ((*TARGETED, fenced("e0", 1)), "e1", "stops generating"),
        ((*TARGETED, fenced("e0", 1), fenced("e1", 1)), "the trainer", "offers the weights"),
        ((*TARGETED, fenced("e0", 1), fenced("e1", 1), offered(1, "c1")), "e0, e1", "proves what it received"),
    ],
)
def test_somebody_is_waited_for_and_what_they_do_is_said(steps: tuple[Step, ...], on: str, then: str) -> None:
    found = waits(*steps)
    assert found["on"] == on and then in found["next"], found


def test_a_verified_membership_waits_for_a_publisher_since_its_last_word() -> None:
    words = (fenced("e0", 1), fenced("e1", 1), offered(1, "c1"), verified("e0", 1, "c1"), verified("e1", 1, "c1"))
    found = waits(*TARGETED, *words, later_s=2.5)
    assert (found["on"], found["since_s"]) == ("a publisher", 2.5)


def test_the_wait_for_a_harness_began_with_the_last_thing_the_trainer_said_whatever_else_happened() -> None:
    later = (after(7, joined("e2")), after(1, left("e2")))
    found = waits(*SERVING, *trained("c1"), *released(1, "c1", E0, E1), *later, later_s=1.0)
    assert found["on"] == "the harness" and found["since_s"] == pytest.approx(9.0, abs=0.1)


def test_nobody_left_is_waited_for_since_the_last_one_said_something() -> None:
    found = waits(*SERVING, after(3, left("e0")), excluded("e1"), later_s=4.0)
    assert (found["on"], found["since_s"]) == ("an engine", 4.0)


def test_an_ambiguous_job_is_a_persons_and_the_commands_are_there() -> None:
    ambiguous = JobAmbiguous(scenario=S, job="j", attempt=1, started_by="t1")
    found = waits(opened(), IN_PLACE, *SERVING[2:], dispatched("j"), started("j"), by("t2", IN_PLACE), ambiguous)
    assert found["on"] == "a person"
    assert found["command"] == f"reef-bus retrain {S} j --why …" and f"reef-bus discard {S} j --why …" in found["next"]
    assert "boot t1 died inside attempt 1" in found["next"] and "Serving goes on" in found["next"]


def test_a_candidate_that_is_not_decided_on_can_be_promoted() -> None:
    found = waits(*SERVING, *trained("c1")[:4])
    assert found["on"] == "the trainer" and "c1" in found["next"]
    assert found["command"] == f"reef-bus promote {S} c1 --why …"


def test_a_trainer_that_is_down_is_the_supervisors_to_start() -> None:
    down = (ComponentStarted(component="trainer", pid=1, starts=1), ComponentLost(component="trainer", exit=-9))
    found = waits(*SERVING, dispatched("j"), *down, later_s=3.0)
    assert (found["on"], found["since_s"]) == ("the supervisor", 3.0) and "which finishes j" in found["next"]


def test_an_attached_trainer_is_nobodys_to_start_whatever_ran_here_before() -> None:
    down = (ComponentStarted(component="trainer", pid=1, starts=1), ComponentLost(component="trainer", exit=-9))
    assert waits(*SERVING, *down, by("t2", ATTACHED), by("t2", dispatched("j")))["on"] == "the trainer"


@pytest.mark.parametrize(
    ("asked", "who"),
    [
        (RollbackRequested(actor="ada", why="worse", head=L(1), scenario=S, release=L(0)), "a publisher"),
        (JobDiscardRequested(actor="ada", why="stuck", head=L(1), scenario=S, job="j"), "the trainer"),
    ],
    ids=["rollback", "discard"],
)
def test_a_request_waits_for_whoever_answers_it(asked: Any, who: str) -> None:
    history = (*SERVING, *trained("c1"), *released(1, "c1", E0, E1), dispatched("j", "c1", 2), asked)
    found = waits(*history, later_s=1.5)
    assert (found["on"], found["since_s"]) == (who, 1.5) and "of ada" in found["next"]


def test_an_engine_whose_memory_a_job_has_is_said_to_have_released_it() -> None:
    world = given(*SERVING, colocated("j"), lent("e0", "j", 8, "weights")).world
    shown = status(world, 0, Policy())["engines"]
    assert (shown["e0"]["state"], shown["e0"]["released"], shown["e0"]["holds"]) == ("released", ["weights"], None)
    assert (shown["e1"]["state"], shown["e1"]["released"]) == ("fenced", [])
