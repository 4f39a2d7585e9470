"""The void rule, clause by clause (protocol.md, rule 6): what a family alone can tell.

Knows: the rule's text. Must not know: how the tail is kept.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.facts import (
    E0,
    E1,
    REGISTERED,
    SERVING,
    aborted,
    committed,
    dispatched,
    dropped,
    evaluated,
    excluded,
    fenced,
    halted,
    holds,
    joined,
    offered,
    ready,
    registered,
    rejected,
    released,
    selected,
    started,
    target,
    trained,
    trainer_joined,
    verified,
)
from tests.spec import Step, by, chained_to, counts, given, head, serving, void

TARGETED: tuple[Step, ...] = (*SERVING, *trained("c1"), target(1, "c1", E0, E1))
VERIFIED: tuple[Step, ...] = (
    *TARGETED,
    *(fenced("e0", 1), fenced("e1", 1), offered(1, "c1")),
    *(verified("e0", 1, "c1"), verified("e1", 1, "c1")),
)


@pytest.mark.parametrize("prev", [0, 2, 4, 99])
def test_an_event_that_expected_another_last_event_is_void(prev: int) -> None:
    """Clause 1. The train family's last stored event is 3."""
    given(*REGISTERED).when(chained_to(prev, dispatched("j"))).then(void("last stored event is 3"))


def test_the_expectation_is_the_last_stored_event_even_when_that_is_void() -> None:
    """Rule 5: `prev` is the family's last stored event, void or not."""
    history = given(*REGISTERED, chained_to(1, dispatched("j")))  # stored at 4, void
    history.when(chained_to(3, dispatched("j"))).then(void("last stored event is 4"))
    given(*REGISTERED, chained_to(1, dispatched("j"))).when(chained_to(4, dispatched("j"))).then(counts)


def test_a_void_event_is_counted_and_changes_nothing_else() -> None:
    history = given(*SERVING)
    world = history.when(chained_to(1, dispatched("j"))).then(void("prev"), serving("e0", "e1"))
    assert world.void == 1 and world.training.job is None and world.seq == 8


def test_families_are_chained_apart_and_engines_each_by_themselves() -> None:
    history = given(*REGISTERED, joined("e0"), joined("e1"), holds("e0", 0, "base"))
    world = history.when(holds("e1", 0, "base")).then(counts)
    assert [world.tail(f) for f in ("deployment", "train", "engine.e0", "engine.e1", "release")] == [1, 3, 6, 7, 0]


def test_a_boot_whose_successor_has_joined_changes_nothing() -> None:
    """Clause 2, and invariant 11."""
    given(*REGISTERED, by("t2", trainer_joined())).when(by("t1", dispatched("j"))).then(void("t1"))
    replaced = (*SERVING, by("e0.2", joined("e0")))
    given(*replaced).when(by("e0.1", holds("e0", 0, "base"))).then(void(r"e0\.1"), serving("e1"))


def test_the_successor_may_go_on_with_the_job() -> None:
    given(*REGISTERED, dispatched("j"), by("t2", trainer_joined())).when(started("j")).then(counts)


def test_a_boot_joins_once() -> None:
    given(*REGISTERED, by("t2", trainer_joined())).when(by("t1", trainer_joined())).then(void("joined before"))
    given(*SERVING).when(by("e0.1", joined("e0"))).then(void("joined before"), serving("e0", "e1"))


def test_a_boot_that_never_joined_says_nothing() -> None:
    given(*SERVING).when(by("e0.9", fenced("e0", 1))).then(void(r"e0\.9"), serving("e0", "e1"))


@pytest.mark.parametrize(
    ("opened_by", "second"),
    [
        ((*REGISTERED, dispatched("j")), dispatched("k")),
        ((*REGISTERED, dispatched("j"), started("j")), dispatched("k")),
        ((*REGISTERED, dispatched("j"), started("j"), ready("j", "c")), dispatched("k")),
        (TARGETED, target(2, "c1", E0, E1, parent=0)),
    ],
)
def test_nothing_opens_while_another_is_open(opened_by: tuple[Step, ...], second: Any) -> None:
    """Clause 3, first half; invariant 8."""
    given(*opened_by).when(second).then(void("still open"))


@pytest.mark.parametrize(
    "event",
    [
        *(started("j"), ready("j", "c"), dropped("j"), evaluated("c"), selected("c"), rejected("c")),
        *(aborted(1, 1, E0), committed(1, "c1", E0, E1), halted(1)),
    ],
    ids=lambda event: type(event).__name__,
)
def test_nothing_goes_on_or_closes_when_nothing_is_open(event: Any) -> None:
    """Clause 3, second half."""
    given(*SERVING).when(event).then(void("no such"), serving("e0", "e1"), head("inc:0"))


@pytest.mark.parametrize(
    "event",
    [started("other"), started("job", 1), started("job", 3), ready("job", "c", attempt=2), ready("other", "c")],
    ids=["another job", "the attempt again", "an attempt skipped", "an attempt not started", "another job's candidate"],
)
def test_an_attempt_that_is_not_the_open_jobs_is_void(event: Any) -> None:
    given(*REGISTERED, dispatched("job"), started("job")).when(event).then(void("no such"))


def test_a_candidate_without_a_start_is_void() -> None:
    given(*REGISTERED, dispatched("j")).when(ready("j", "c", attempt=0)).then(void("no such"))


def test_the_first_candidate_wins() -> None:
    """Row "trainer after 2": attempt n+1, and the first CandidateReady wins."""
    history = (*REGISTERED, dispatched("j"), started("j"), by("t2", trainer_joined()), started("j", 2))
    given(*history).when(by("t1", ready("j", "late"))).then(void("t1"))
    given(*history).when(ready("j", "old", attempt=1)).then(void("no such"))
    given(*history, ready("j", "c", attempt=2)).when(ready("j", "d", attempt=2)).then(void("no such"))


@pytest.mark.parametrize("decide", [selected, rejected])
def test_a_decision_closes_the_job_once(decide: Any) -> None:
    history = (*REGISTERED, dispatched("j"), started("j"), ready("j", "c"))
    given(*history, evaluated("c"), decide("c")).when(selected("c")).then(void("no such"))
    given(*history, evaluated("c"), decide("c")).when(dispatched("k")).then(counts)
    given(*history, evaluated("c")).when(decide("other")).then(void("no such"))


@pytest.mark.parametrize(
    "event",
    [aborted(1, 2, E0), aborted(2, 1, E0), committed(1, "c1", E0, E1, attempt=2), halted(1, 2), halted(2, 1)],
    ids=lambda event: f"{type(event).__name__}-{event.publication}-{event.attempt}",
)
def test_another_attempt_or_publication_than_the_open_one_is_void(event: Any) -> None:
    given(*VERIFIED).when(event).then(void("no such"), serving(), head("inc:0"))


def test_a_dead_attempt_cannot_commit() -> None:
    given(*VERIFIED, aborted(1, 1, E0, E1)).when(committed(1, "c1", E0, E1)).then(void("no such"), head("inc:0"))


def test_the_commit_closes_the_publication() -> None:
    done = (*SERVING, *trained("c1"), *released(1, "c1", E0, E1))
    given(*done).when(halted(1)).then(void("no such"), serving("e0", "e1"), head("inc:1"))
    given(*done).when(committed(1, "c1", E0, E1)).then(void("no such"), head("inc:1"))


def test_a_halt_closes_the_publication() -> None:
    given(*VERIFIED, halted(1)).when(committed(1, "c1", E0, E1)).then(void("no such"), head("inc:0"))


def test_registering_twice_is_void() -> None:
    given(*REGISTERED).when(registered()).then(void("registered"))


def test_publishers_have_no_boots_to_compare() -> None:
    """Any number of publishers: whoever appends next is as good as the last."""
    given(*VERIFIED).when(by("p2", committed(1, "c1", E0, E1))).then(counts, serving("e0", "e1"))
    given(*SERVING).when(by("p7", excluded("e0"))).then(counts, serving("e1"))
