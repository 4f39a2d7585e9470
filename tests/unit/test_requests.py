"""What people ask for: each request ends in exactly one event that names it, and changes nothing by itself.

Knows: for each kind, a world that can meet it, one that cannot, and one that no longer can.
Must not know: how a request is made, or what a supervisor answers.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import pytest

from reef_bus.core.reactions.operator import refusals
from reef_bus.core.world import World
from reef_bus.events import (
    CandidateSelected,
    EngineExcluded,
    Event,
    JobDiscarded,
    JobStarted,
    PublicationHalted,
    PublicationRefused,
    ReleaseCommitted,
    RequestRefused,
    TargetPersisted,
)
from reef_bus.recipe import HoldForReview
from tests.facts import (
    E0,
    E1,
    SERVING,
    L,
    S,
    ambiguous,
    discard_asked,
    discarded,
    dispatched,
    dropped,
    evaluated,
    excluded,
    fenced,
    halt_asked,
    halted,
    joined,
    offered,
    opened,
    promotion_asked,
    ready,
    registered,
    rejected,
    released,
    restore_asked,
    retire_asked,
    rollback_asked,
    rollback_target,
    selected,
    started,
    target,
    trained,
    trainer_joined,
    verified,
)
from tests.spec import Given, Step, by, chained_to, counts, facts_of, given, publisher_debts, serving, trainer_debts

SELECTED: tuple[Step, ...] = (*SERVING, *trained("c1"))
TARGETED: tuple[Step, ...] = (*SELECTED, target(1, "c1", E0, E1))
RELEASED: tuple[Step, ...] = (*SELECTED, *released(1, "c1", E0, E1))
HELD: tuple[Step, ...] = (*SERVING, dispatched("j"), started("j"), ready("j", "c1"), evaluated("c1"))
AMBIGUOUS: tuple[Step, ...] = (
    *(opened(), trainer_joined(in_place=True), registered(), *SERVING[3:], dispatched("j"), started("j")),
    *(by("t2", trainer_joined(in_place=True)), ambiguous("j")),
)


class Kind(NamedTuple):
    """One kind of request: a world that can meet it, and what answers; what overtakes it there, and why it is dead."""

    able: tuple[Step, ...]
    request: Event
    answer: type[Event]
    overtaken_by: tuple[Step, ...]
    reason: str
    unknown: Event


KINDS = {
    "rollback": Kind(
        RELEASED,
        rollback_asked(0, on=1),
        TargetPersisted,
        (*trained("c2", "c1", 2), *released(2, "c2", E0, E1)),
        "head_moved",
        rollback_asked(7, on=0),
    ),
    "promotion": Kind(
        HELD, promotion_asked("c1"), CandidateSelected, (rejected("c1"),), "not_held", promotion_asked("c9")
    ),
    "discard": Kind(HELD, discard_asked("j"), JobDiscarded, (selected("c1"),), "not_open", discard_asked("k")),
    "restore": Kind(AMBIGUOUS, restore_asked("j"), JobStarted, (started("j", 2),), "not_ambiguous", restore_asked("k")),
    "retire": Kind(
        SERVING, retire_asked("e1"), EngineExcluded, (by("e1.2", joined("e1")),), "not_there", retire_asked("e7")
    ),
    "halt": Kind(TARGETED, halt_asked(1), PublicationHalted, (halted(1),), "not_open", halt_asked(4, on=0)),
}
EVERY = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def answers(history: Given, request: int) -> list[Event]:
    """What the owners would append now that names the request: trainer and publisher, from the same fold."""
    debts = [*trainer_debts(history.world, history.world.training.boot), *publisher_debts(history.world, history.now)]
    return [event for event in facts_of(debts) if getattr(event, "request", 0) == request]


def refuses(history: Given, request: int) -> tuple[str, str]:
    """The one answer, which is a refusal: its name and its reason."""
    (found,) = answers(history, request)
    assert isinstance(found, RequestRefused | PublicationRefused)
    return type(found).__name__, found.reason


def content(world: World) -> World:
    """The world without places: what anybody acts on, but for what was asked."""
    return msgspec.structs.replace(world, seq=0, last_id="", time=0, tails={}, requests={})


@EVERY
def test_a_request_in_order_is_met_by_exactly_one_event_of_its_owner(kind: Kind) -> None:
    history, asked = given(*kind.able, kind.request), len(kind.able) + 1
    (found,) = answers(history, asked)
    assert type(found) is kind.answer
    assert history.when(found).then(counts).requests == {}


@EVERY
def test_a_request_changes_nothing_by_itself(kind: Kind) -> None:
    before, after = given(*kind.able).world, given(*kind.able, kind.request).world
    assert content(before) == content(after)
    assert [asked.refused for asked in after.requests.values()] == [""]


@EVERY
def test_a_request_about_something_unknown_is_dead_when_it_arrives(kind: Kind) -> None:
    history, asked = given(*SERVING, kind.unknown), len(SERVING) + 1
    reason = "unknown_release" if kind.answer is TargetPersisted else kind.reason
    name = "PublicationRefused" if kind.answer is TargetPersisted else "RequestRefused"
    assert refuses(history, asked) == (name, reason)
    (found,) = answers(history, asked)
    assert history.when(found).then(counts, serving("e0", "e1")).requests == {}


@EVERY
def test_a_request_about_something_else_than_what_is_there_is_dead_too(kind: Kind) -> None:
    """Where one of its kind could be met: another candidate is held, another job or publication is open."""
    reason = "unknown_release" if kind.answer is TargetPersisted else kind.reason
    other = msgspec.structs.replace(kind.unknown, head=kind.request.head)
    assert refuses(given(*kind.able, other), len(kind.able) + 1)[1] == reason


def test_a_refusal_says_what_was_asked_and_what_is() -> None:
    (found,) = answers(given(*SERVING, retire_asked("e7", on=42)), len(SERVING) + 1)
    assert isinstance(found, RequestRefused)
    assert found.detail == f"EngineRetireRequested of e7.1 on {L(42)}; the head is {L(0)}"


@EVERY
def test_a_request_that_was_decided_on_another_head_is_refused(kind: Kind) -> None:
    """Section 3: a request for a head that has moved is refused, whatever it is about."""
    stale = msgspec.structs.replace(kind.request, head=L(42))
    history = given(*kind.able, stale)
    assert refuses(history, len(kind.able) + 1)[1] == "head_moved"


@EVERY
def test_a_request_that_is_overtaken_before_anybody_answers_is_refused(kind: Kind) -> None:
    asked = len(kind.able) + 1
    history = given(*kind.able, kind.request, *kind.overtaken_by)
    assert refuses(history, asked)[1] == kind.reason


@EVERY
def test_of_a_repeated_request_one_is_met_and_the_other_refused(kind: Kind) -> None:
    again = msgspec.structs.replace(kind.request, actor="bob")
    history, first = given(*kind.able, kind.request, again), len(kind.able) + 1
    (met,) = answers(history, first)
    assert answers(history, first + 1) == []  # nobody answers both at once
    history.when(met).then(counts)
    if kind.answer is TargetPersisted:
        assert answers(history, first + 1) == []  # its head has not moved yet: it waits for the first one's end
        return
    assert refuses(history, first + 1)[1] == kind.reason


@EVERY
def test_a_pending_request_survives_a_snapshot(kind: Kind) -> None:
    world = given(*kind.able, kind.request).world
    assert world.requests
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(world), type=World) == world


@EVERY
def test_a_request_is_never_void_whatever_it_expected(kind: Kind) -> None:
    """Requests are compared with nothing: an operator's client knows no `prev`."""
    for prev in (0, 3, 99):
        world = given(*kind.able).when(chained_to(prev, kind.request)).then(counts)
        assert list(world.requests) == [len(kind.able) + 1]


@EVERY
def test_before_registration_a_request_is_answered_as_soon_as_there_is_a_scenario(kind: Kind) -> None:
    history = given(opened(), trainer_joined(), kind.request)
    assert publisher_debts(history.world, history.now) == []
    history.when(registered()).then(counts)
    assert refuses(history, 3)[1] in ("head_moved", "unknown_release", kind.reason)


def test_an_answer_to_one_request_answers_no_other() -> None:
    history = given(*HELD, retire_asked("e1"), discard_asked("j"))
    first = len(HELD) + 1
    assert list(history.when(excluded("e1", request=first)).then(counts).requests) == [first + 1]
    assert history.when(discarded("j", first + 1)).then(counts).requests == {}


def test_what_a_dead_request_asked_for_is_never_done() -> None:
    """The trainer reads it and goes on: only the publisher answers it."""
    stale = (*HELD, promotion_asked("c1", on=5), discard_asked("j", on=5))
    assert facts_of(trainer_debts(given(*stale).world)) == []
    stale = (*AMBIGUOUS, restore_asked("j", on=5))
    assert trainer_debts(given(*stale).world, "t2") == []
    stale = (*TARGETED, halt_asked(1, on=5), rollback_asked(0, on=5), retire_asked("e0", on=5))
    history = given(*stale)
    named = [event.reason for event in facts_of(publisher_debts(history.world, history.now))]  # type: ignore[attr-defined]
    assert named == ["head_moved"] * 3


def test_a_request_that_was_overtaken_stays_dead_when_it_could_be_met_again() -> None:
    """Ann and Bob both have the job restored; the second attempt dies too. Bob had decided on the first death."""
    asked = (*AMBIGUOUS, restore_asked("j"), restore_asked("j", actor="bob"), started("j", 2, len(AMBIGUOUS) + 1))
    again = given(*asked, by("t3", trainer_joined(in_place=True)), ambiguous("j", 2, "t2"))
    assert trainer_debts(again.world, "t3") == []
    assert refuses(again, len(AMBIGUOUS) + 2) == ("RequestRefused", "not_ambiguous")


# -- held candidates


def test_a_hold_rejects_what_is_not_finite_and_leaves_the_rest_to_a_person() -> None:
    candidate = given(*HELD).world.training.candidates["c1"]
    assert HoldForReview().decide(candidate, {"loss": 0.5}).select is None
    assert HoldForReview().decide(candidate, {"loss": float("nan")}).select is False


def test_promotion_selects_in_the_persons_name() -> None:
    (found,) = answers(given(*HELD, promotion_asked("c1")), len(HELD) + 1)
    assert isinstance(found, CandidateSelected)
    assert (found.candidate, found.selector, found.why) == ("c1", "ann", "reads well")


def test_a_candidate_is_promoted_only_after_it_was_evaluated() -> None:
    history = given(*HELD[:-1], promotion_asked("c1"))
    assert refuses(history, len(HELD)) == ("RequestRefused", "not_held")


def test_who_discards_wins_over_who_promotes() -> None:
    """Nothing that one person doubts begins to serve on another's word; the other is told."""
    history, first = given(*HELD, promotion_asked("c1"), discard_asked("j", actor="bob")), len(HELD) + 1
    assert answers(history, first) == []
    (found,) = answers(history, first + 1)
    assert found == JobDiscarded(scenario=S, job="j", request=first + 1)
    history.when(found).then(counts)
    assert refuses(history, first) == ("RequestRefused", "not_held")


def test_a_discarded_candidate_is_never_published_and_nothing_trains_from_it() -> None:
    history = given(*HELD, discard_asked("j"), discarded("j", len(HELD) + 1))
    assert publisher_debts(history.world, history.now) == []
    assert history.world.training.base == "base" and history.world.training.job is None
    history.when(selected("c1")).then(lambda outcome: None)
    assert history.world.void == 1


@pytest.mark.parametrize("steps", [1, 2, 3], ids=["dispatched", "started", "ready"])
def test_a_job_that_kills_every_trainer_can_be_discarded_at_any_step(steps: int) -> None:
    begun = HELD[: len(SERVING) + steps]
    (found,) = answers(given(*begun, discard_asked("j")), len(begun) + 1)
    assert isinstance(found, JobDiscarded)


def test_a_dropped_jobs_discard_is_refused() -> None:
    begun = (*SERVING, dispatched("j"), discard_asked("j"), dropped("j"))
    assert refuses(given(*begun), len(SERVING) + 2) == ("RequestRefused", "not_open")


# -- engines


def test_a_retired_boot_is_out_and_its_successor_may_come() -> None:
    (found,) = answers(given(*SERVING, retire_asked("e1")), len(SERVING) + 1)
    assert isinstance(found, EngineExcluded)
    assert (found.engine, found.boot, found.reason) == ("e1", "e1.1", "retired by ann: hot")
    given(*SERVING, retire_asked("e1")).when(found).then(counts, serving("e0"))


def test_a_retired_member_leaves_the_open_attempt_too() -> None:
    history = given(*TARGETED, retire_asked("e1"))
    (found,) = answers(history, len(TARGETED) + 1)
    history.when(found).then(counts)
    (aborted,) = facts_of(publisher_debts(history.world, history.now))
    assert (aborted.excluded, aborted.members) == ((E1,), (E0,))  # type: ignore[attr-defined]


def test_two_retirements_are_both_met() -> None:
    history, first = given(*SERVING, retire_asked("e0"), retire_asked("e1")), len(SERVING) + 1
    for asked in (first, first + 1):
        (found,) = answers(history, asked)
        history.when(found).then(counts)
    assert history.world.requests == {} and set(history.world.publications.excluded) == {"e0.1", "e1.1"}


# -- open publications


def test_a_halt_by_a_person_excludes_nobody_and_comes_before_the_commit() -> None:
    verified_ = (*TARGETED, fenced("e0", 1), fenced("e1", 1), offered(1, "c1"))
    done = (*verified_, verified("e0", 1, "c1"), verified("e1", 1, "c1"))
    history = given(*done, halt_asked(1))
    (found,) = facts_of(publisher_debts(history.world, history.now))
    assert isinstance(found, PublicationHalted)
    assert (found.reason, found.excluded, found.detail) == ("operator", (), "ann: too slow")
    assert history.when(found).then(counts).publications.ended["c1"] == "halted"


def test_a_halt_that_the_commit_overtook_is_refused() -> None:
    (*most, commit) = RELEASED
    assert isinstance(commit, ReleaseCommitted)
    history = given(*most, halt_asked(1), commit)
    assert refuses(history, len(RELEASED)) == ("RequestRefused", "not_open")


def test_a_rollbacks_own_publication_can_be_halted_by_a_person() -> None:
    asked = len(RELEASED) + 1
    history = given(*RELEASED, rollback_asked(0, on=1), rollback_target(2, "base", asked, E0, E1), halt_asked(2))
    (found,) = answers(history, asked + 2)
    world = history.when(found).then(counts)
    assert world.publications.ended["base"] == "committed" and world.requests == {}


def test_the_publisher_alone_refuses() -> None:
    """Two answerers are one too many: what is dead is nobody's debt but the publishers', who append with one filter."""
    history = given(*HELD, discard_asked("j"), selected("c1"))
    assert [debt.key for debt in refusals(history.world)] == [f"answer/{len(HELD) + 1}"]
    assert not [e for e in facts_of(trainer_debts(history.world)) if getattr(e, "request", 0)]
