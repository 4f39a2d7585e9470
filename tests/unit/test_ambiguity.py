"""A trainer that mutates in place and dies inside its step (protocol.md section 8, row "trainer after 2").

Knows: what such a trainer leaves on the log, and what people may then ask. Must not know: how it trains.
"""

from __future__ import annotations

import msgspec
import pytest

from reef_bus.core.effects import AssembleBatch, OfferWeights, Policy, Train
from reef_bus.core.training import Job
from reef_bus.core.world import World
from reef_bus.events import Event, JobAmbiguous, JobDiscarded, JobStarted, RequestRefused, TargetPersisted
from reef_bus.views import waiting
from tests.facts import (
    E0,
    E1,
    SERVING,
    S,
    ambiguous,
    blob,
    discard_asked,
    discarded,
    dispatched,
    evaluated,
    opened,
    promotion_asked,
    ready,
    registered,
    restore_asked,
    selected,
    started,
    target,
    trained,
    trainer_joined,
)
from tests.spec import (
    Said,
    Step,
    by,
    counts,
    fact,
    facts_of,
    given,
    only,
    publisher_debts,
    serving,
    trainer_debts,
    void,
)

IN_PLACE: tuple[Step, ...] = (opened(), trainer_joined(in_place=True), registered(), *SERVING[3:])
STEPPING: tuple[Step, ...] = (*IN_PLACE, dispatched("j"), started("j"))
DEAD: tuple[Step, ...] = (*STEPPING, by("t2", trainer_joined(in_place=True)))
AMBIGUOUS: tuple[Step, ...] = (*DEAD, ambiguous("j"))
ASKED = len(AMBIGUOUS) + 1


def again(boot: str) -> Said:
    return by(boot, trainer_joined(in_place=True))


def job(*history: Step) -> Job:
    found = given(*history).world.training.job
    assert found is not None
    return found


def test_row_trainer_after_2_the_next_boot_says_that_nobody_knows() -> None:
    event = fact(trainer_debts(given(*DEAD).world, "t2"))
    assert event == JobAmbiguous(scenario=S, job="j", attempt=1, started_by="t1")
    given(*DEAD).when(event).then(counts, serving("e0", "e1"))


def test_the_boot_that_lives_goes_on_with_its_step() -> None:
    assert isinstance(only(trainer_debts(given(*STEPPING).world)), Train)


def test_immutable_incumbents_are_never_ambiguous() -> None:
    history = given(*SERVING, dispatched("j"), started("j"), by("t2", trainer_joined()))
    assert fact(trainer_debts(history.world, "t2")) == JobStarted(scenario=S, job="j", attempt=2)


def test_before_the_first_step_nothing_was_changed() -> None:
    """Row "trainer after 1": the stored payload is trained."""
    history = given(*IN_PLACE, dispatched("j"), again("t2"))
    assert fact(trainer_debts(history.world, "t2")) == JobStarted(scenario=S, job="j", attempt=1)


def test_after_the_candidate_is_durable_its_trainer_may_die() -> None:
    """Row "trainer after 3": evaluate, decide."""
    history = given(*STEPPING, ready("j", "c1"), evaluated("c1"), again("t2"))
    assert not any(isinstance(event, JobAmbiguous) for event in facts_of(trainer_debts(history.world, "t2")))
    history.when(selected("c1")).then(counts)


def test_training_stops_until_a_person_decides() -> None:
    assert trainer_debts(given(*AMBIGUOUS).world, "t2") == []


def test_it_is_said_once_however_many_boots_come() -> None:
    assert trainer_debts(given(*AMBIGUOUS, again("t3")).world, "t3") == []


def test_a_trainer_of_another_kind_does_not_know_either() -> None:
    """The job was begun in place; that its successor would not do so helps nobody."""
    history = given(*STEPPING, by("t2", trainer_joined()))
    assert isinstance(fact(trainer_debts(history.world, "t2")), JobAmbiguous)


def test_serving_and_publishing_go_on() -> None:
    queued = (*IN_PLACE, *trained("c1"), dispatched("j2", "c1", 2), started("j2"), again("t2"), ambiguous("j2"))
    history = given(*queued)
    history.then(serving("e0", "e1"))
    assert isinstance(fact(publisher_debts(history.world, history.now)), TargetPersisted)
    history.when(target(1, "c1", E0, E1)).then(counts)
    assert isinstance(only(trainer_debts(history.world, "t2")), OfferWeights)


def test_the_old_boots_candidate_comes_too_late() -> None:
    given(*DEAD).when(by("t1", ready("j", "c1"))).then(void("t1"))
    given(*AMBIGUOUS).when(by("t1", ready("j", "c1"))).then(void("t1"))


@pytest.mark.parametrize(
    ("history", "event"),
    [
        (IN_PLACE, ambiguous("j")),
        ((*IN_PLACE, dispatched("j")), ambiguous("j")),
        ((*IN_PLACE, dispatched("j")), ambiguous("j", 0)),
        (DEAD, ambiguous("k")),
        (DEAD, ambiguous("j", 2)),
        ((*STEPPING, ready("j", "c1")), ambiguous("j")),
        (DEAD, by("t1", ambiguous("j"))),
        ((*AMBIGUOUS, discarded("j", 0)), ambiguous("j")),
    ],
    ids=["no job", "not started", "attempt 0", "another job", "another attempt", "a candidate", "old boot", "closed"],
)
def test_nothing_else_is_ambiguous(history: tuple[Step, ...], event: Step) -> None:
    given(*history).when(event).then(void("no such attempt|is not the family's newest"))


def test_said_twice_it_is_as_ambiguous_as_before() -> None:
    """A lost acknowledgement, a boot that looks again: the second one moves no more than the place."""
    world = given(*AMBIGUOUS).when(ambiguous("j")).then(counts)
    assert world.training.job is not None and world.training.job.attempt == 1
    assert trainer_debts(world, "t2") == []


# -- what people may then ask


def test_a_discard_ends_the_job_and_its_records_stay_consumed() -> None:
    event = fact(trainer_debts(given(*AMBIGUOUS, discard_asked("j")).world, "t2"))
    assert event == JobDiscarded(scenario=S, job="j", request=ASKED)
    world = given(*AMBIGUOUS, discard_asked("j")).when(event).then(counts, serving("e0", "e1"))
    assert (world.training.job, world.training.dispatched, world.training.batches) == (None, 1, {"": blob("batch-j")})
    batch = only(trainer_debts(world, "t2"))
    assert isinstance(batch, AssembleBatch) and batch.batches == {"": blob("batch-j")}


def test_a_restore_trains_the_stored_batch_again_from_the_stored_base() -> None:
    history = given(*AMBIGUOUS, restore_asked("j"))
    event = fact(trainer_debts(history.world, "t2"))
    assert event == JobStarted(scenario=S, job="j", attempt=2, request=ASKED)
    history.when(event).then(counts)
    train = only(trainer_debts(history.world, "t2"))
    assert isinstance(train, Train)
    assert (train.job.batch, train.job.attempt, train.base.id) == (blob("batch-j"), 2, "base")
    history.when(ready("j", "c1", attempt=2)).then(counts)


def test_a_second_death_needs_a_second_decision() -> None:
    history = given(*AMBIGUOUS, restore_asked("j"), started("j", 2, ASKED), again("t3"))
    event = fact(trainer_debts(history.world, "t3"))
    assert event == JobAmbiguous(scenario=S, job="j", attempt=2, started_by="t2")
    history.when(event).then(counts)
    assert trainer_debts(history.world, "t3") == []


def test_a_restore_may_be_asked_of_a_later_boot() -> None:
    history = given(*AMBIGUOUS, restore_asked("j"), again("t3"))
    assert fact(trainer_debts(history.world, "t3")) == JobStarted(scenario=S, job="j", attempt=2, request=ASKED)


def test_who_discards_wins_over_who_restores() -> None:
    history = given(*AMBIGUOUS, restore_asked("j"), discard_asked("j", actor="bob"))
    assert fact(trainer_debts(history.world, "t2")) == JobDiscarded(scenario=S, job="j", request=ASKED + 1)


@pytest.mark.parametrize("asked", [discard_asked("j"), restore_asked("j")], ids=["discard", "restore"])
def test_inside_a_step_there_is_nothing_to_decide(asked: Event) -> None:
    """The step of a living boot cannot be taken back: its memory would be left half changed, under the next job."""
    history = given(*STEPPING, asked)
    assert isinstance(only(trainer_debts(history.world)), Train)
    event = fact(publisher_debts(history.world, history.now))
    assert isinstance(event, RequestRefused)
    assert event.reason == ("in_step" if isinstance(asked, type(discard_asked("j"))) else "not_ambiguous")


def test_a_discard_that_the_step_overtook_is_refused_and_stays_so() -> None:
    begun = (*IN_PLACE, dispatched("j"), discard_asked("j"), started("j"))
    history = given(*begun, ready("j", "c1"), evaluated("c1"))
    assert not [event for event in facts_of(trainer_debts(history.world)) if isinstance(event, JobDiscarded)]
    event = fact(publisher_debts(history.world, history.now))
    assert isinstance(event, RequestRefused) and (event.request, event.reason) == (len(IN_PLACE) + 2, "in_step")


def test_an_ambiguous_job_cannot_be_promoted() -> None:
    history = given(*AMBIGUOUS, promotion_asked("c1"))
    event = fact(publisher_debts(history.world, history.now))
    assert isinstance(event, RequestRefused) and event.reason == "not_held"


def test_a_discard_beats_a_selection_by_an_older_fold() -> None:
    """Both are the trainer's: the second of them finds the job closed."""
    held = (*STEPPING, ready("j", "c1"), evaluated("c1"), discard_asked("j"))
    history = given(*held, discarded("j", len(held)))
    world = history.when(selected("c1")).then(void("no such candidate is open"))
    assert world.training.selected == [] and world.training.base == "base"


def test_what_is_ambiguous_survives_a_snapshot() -> None:
    for history in (STEPPING, DEAD, AMBIGUOUS):
        world = given(*history).world
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(world), type=World) == world
    assert (job(*STEPPING).in_place, job(*STEPPING).ambiguous, job(*AMBIGUOUS).ambiguous) == (True, 0, len(AMBIGUOUS))


def test_a_status_says_that_a_person_is_needed_and_how() -> None:
    history = given(*AMBIGUOUS)
    found = waiting(history.world, history.now, Policy())
    assert (found["on"], found["command"]) == ("a person", "reef-bus retrain digit j --why …")
    history = given(*STEPPING, ready("j", "c1"), evaluated("c1"))
    found = waiting(history.world, history.now, Policy())
    assert found["command"] == "reef-bus promote digit c1 --why …"
