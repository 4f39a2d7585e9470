"""A colocated job, row by row: who covers whom, what each role owes, and in which order memory comes back.

Knows: histories, the ledger of one boot. Must not know: how memory is freed, or how anything is trained.
"""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from reef_bus.core.effects import (
    Append,
    AssembleBatch,
    Fence,
    Receive,
    ReleaseMemory,
    RestoreMemory,
    Retire,
    Train,
    VerifyHead,
)
from reef_bus.core.invariants import check
from reef_bus.core.memory import REGIONS, Ledger, failed, released, resumed, to_release, to_resume
from reef_bus.core.serving import holders
from reef_bus.errors import ContractError
from reef_bus.events import (
    ComponentLost,
    ComponentStarted,
    EngineExcluded,
    Event,
    JobDiscarded,
    ReadinessPublished,
    ReadinessWithdrawn,
    TargetPersisted,
)
from tests.facts import (
    E0,
    E1,
    REGISTERED,
    SERVING,
    ambiguous,
    back,
    colocated,
    committed,
    discard_asked,
    discarded,
    dispatched,
    dropped,
    evaluated,
    excluded,
    fenced,
    halted,
    holds,
    joined,
    left,
    lent,
    offered,
    ready,
    refused,
    rejected,
    restore_asked,
    restored,
    rollback_asked,
    rollback_target,
    selected,
    started,
    target,
    trainer_joined,
    verified,
)
from tests.spec import (
    MILLI,
    SECOND,
    Said,
    Step,
    after,
    by,
    engine_debts,
    facts_of,
    given,
    only,
    publisher_debts,
    serving,
    trainer_debts,
)

FENCE = 8
"""The sequence of the dispatch below."""
DISPATCHED: tuple[Step, ...] = (*SERVING, colocated("j1"))
LENT: tuple[Step, ...] = (*DISPATCHED, lent("e0", "j1", FENCE), lent("e1", "j1", FENCE))
STARTED: tuple[Step, ...] = (*LENT, started("j1"))
EVALUATED: tuple[Step, ...] = (*STARTED, ready("j1", "c1"), evaluated("c1"))
SELECTED: tuple[Step, ...] = (*EVALUATED, selected("c1"))
TARGETED: tuple[Step, ...] = (*SELECTED, target(1, "c1", E0, E1))
FENCED: tuple[Step, ...] = (*TARGETED, fenced("e0", 1), fenced("e1", 1))
OFFERED: tuple[Step, ...] = (*FENCED, offered(1, "c1"))
WEIGHTS_BACK: tuple[Step, ...] = (*OFFERED, back("e0", "j1", "weights"), back("e1", "j1", "weights"))
VERIFIED: tuple[Step, ...] = (*WEIGHTS_BACK, verified("e0", 1, "c1"), verified("e1", 1, "c1"))
REST = ("kv_cache", "cuda_graph")


def owed(*history: Step, engine: str = "e0", boot: str = "", out: tuple[str, ...] = ()) -> object:
    return only(engine_debts(given(*history).world, engine, boot, out=out))


def idle(*history: Step, engine: str = "e0", boot: str = "") -> bool:
    return engine_debts(given(*history).world, engine, boot) == []


def trains(*history: Step, boot: str = "t1") -> list[object]:
    return [debt.effect for debt in trainer_debts(given(*history).world, boot, colocate=True)]


def published(*history: Step, later_s: float = 0.0) -> list[Event]:
    story = given(*history)
    return facts_of(publisher_debts(story.world, story.now + int(later_s * SECOND) + MILLI))


# -- the fence


def test_it_is_up_from_the_dispatch_on_and_covers_every_boot_whenever_it_joined() -> None:
    given(*SERVING, dispatched("j1")).then(serving("e0", "e1"))
    given(*DISPATCHED).then(serving())
    late = (*DISPATCHED, joined("e2"), holds("e2", 0, "base"))
    given(*late).then(serving())


@pytest.mark.parametrize(
    "end",
    [
        (rejected("c1"),),
        (selected("c1"), refused("c1", "base_lost")),
        (selected("c1"), target(1, "c1", E0, E1), halted(1)),
    ],
    ids=["rejected", "refused", "halted"],
)
def test_a_candidate_that_is_not_published_ends_it_and_the_incumbent_comes_back(end: tuple[Step, ...]) -> None:
    """Memory first, all of it; then the head's bytes are owed, from the artifact, for nothing of them is left."""
    assert owed(*EVALUATED, *end) == RestoreMemory("j1", REGIONS)
    restored_ = (*EVALUATED, *end, back("e0", "j1"))
    head = owed(*restored_)
    assert isinstance(head, VerifyHead) and head.load_id == "inc:0"
    given(*restored_).then(serving())
    given(*restored_, holds("e0", 0, "base")).then(serving("e0"))


@pytest.mark.parametrize(
    "end", [dropped("j1"), discarded("j1", 0), ambiguous("j1")], ids=lambda end: type(end).__name__
)
def test_a_job_without_a_candidate_ends_it(end: Event) -> None:
    assert owed(*STARTED, end) == RestoreMemory("j1", REGIONS)


def test_a_selected_candidate_does_not_end_it_and_its_commit_does() -> None:
    assert idle(*SELECTED)
    done = (*VERIFIED, back("e0", "j1", *REST), committed(1, "c1", E0, E1))
    given(*done).then(serving("e0"))
    assert owed(*done, engine="e1") == RestoreMemory("j1", REST)
    given(*done, back("e1", "j1", *REST)).then(serving("e0", "e1"))


def test_what_an_engine_gave_away_it_has_not_proven_any_more() -> None:
    gone = given(*STARTED, dropped("j1"), back("e0", "j1")).world
    assert gone.membership.engines["e0"].verified is None
    kept = given(*DISPATCHED, lent("e0", "j1", FENCE, "kv_cache"), dropped("j1"), back("e0", "j1", "kv_cache"))
    kept.then(serving("e0", "e1"))


def test_it_serves_no_sooner_than_all_of_its_memory_is_back() -> None:
    given(*DISPATCHED, lent("e0", "j1", FENCE, "kv_cache"), dropped("j1")).then(serving("e1"))


# -- what engines owe


def test_an_engine_releases_what_it_can_once_and_then_waits() -> None:
    able = replace(joined("e2"), releases=("weights", "kv_cache"))
    assert owed(*DISPATCHED, able, engine="e2") == ReleaseMemory("j1", FENCE, ("weights", "kv_cache"))
    assert idle(*LENT) and idle(*STARTED) and idle(*EVALUATED)


def test_it_owes_no_memory_once_the_job_is_closed() -> None:
    assert idle(*SELECTED, joined("e2"), engine="e2")


def test_memory_comes_back_in_order_weights_bytes_the_rest() -> None:
    assert isinstance(owed(*TARGETED), Fence)
    assert idle(*TARGETED, fenced("e0", 1)) and idle(*FENCED)
    assert owed(*OFFERED) == RestoreMemory("j1", ("weights",))
    assert isinstance(owed(*OFFERED, back("e0", "j1", "weights")), Receive)
    assert owed(*VERIFIED) == RestoreMemory("j1", REST)
    assert idle(*VERIFIED, back("e0", "j1", *REST))


def test_what_is_out_counts_although_its_word_was_lost() -> None:
    """The fence ended before what was done for it could be said."""
    assert owed(*DISPATCHED, discarded("j1", 0), out=("weights",)) == RestoreMemory("j1", ("weights",))
    again = engine_debts(given(*DISPATCHED, discarded("j1", 0)).world, "e0", out=("weights",))[0].key
    assert again != engine_debts(given(*STARTED, dropped("j1")).world, "e0")[0].key


def test_the_next_job_needs_another_word_though_memory_is_out_already() -> None:
    next_ = (*STARTED, dropped("j1"), colocated("j2", step=2))
    assert owed(*next_) == ReleaseMemory("j2", 13, ())
    assert trains(*next_) == []


def test_an_excluded_boot_retires_with_its_memory_out() -> None:
    assert isinstance(owed(*STARTED, excluded("e0")), Retire)


def test_a_rollback_that_meets_a_job_which_has_not_begun_goes_first() -> None:
    """The publisher had not seen the dispatch. Who has given nothing yet takes part; the job begins afterwards."""
    both = (*SERVING, rollback_asked(0, 0), colocated("j1"), rollback_target(1, "base", 8, E0, E1, parent=0))
    assert isinstance(owed(*both), Fence) and trains(*both) == []
    stopped = (*both, fenced("e0", 1), fenced("e1", 1))
    assert isinstance(owed(*stopped), Receive)
    over = (*stopped, verified("e0", 1, "base"), verified("e1", 1, "base"), committed(1, "base", E0, E1, parent=0))
    assert owed(*over) == ReleaseMemory("j1", 9, ()) and trains(*over) == []
    given(*over).then(serving())


def test_what_a_job_has_been_given_no_publication_takes() -> None:
    asked = (*SERVING, rollback_asked(0, 0), colocated("j1"), lent("e0", "j1", 9), lent("e1", "j1", 9), started("j1"))
    late = (*asked, rollback_target(1, "base", 8, E0, E1, parent=0), fenced("e0", 1), fenced("e1", 1))
    assert idle(*late)
    closed = (*late, ready("j1", "c1"), evaluated("c1"), selected("c1"))
    assert owed(*closed) == RestoreMemory("j1", ("weights",))


# -- what the trainer owes


def test_a_job_starts_when_every_engine_has_released() -> None:
    assert trains(*DISPATCHED) == [] and trains(*DISPATCHED, lent("e0", "j1", FENCE)) == []
    assert trains(*LENT) == [Append(started("j1"))]
    assert isinstance(only(trainer_debts(given(*STARTED).world)), Train)


def test_an_older_word_starts_nothing() -> None:
    assert trains(*DISPATCHED, lent("e0", "j0", 5), lent("e1", "j1", FENCE)) == []


def test_without_engines_there_is_nobody_to_wait_for() -> None:
    assert trains(*REGISTERED, colocated("j1")) == [Append(started("j1"))]
    assert trains(*DISPATCHED, lent("e0", "j1", FENCE), left("e1")) == [Append(started("j1"))]


def test_a_boot_that_is_out_holds_its_memory_until_its_supervisor_says_that_it_is_gone() -> None:
    run = ComponentStarted(component="e1", pid=7, starts=1)
    up = (*SERVING, run, ReadinessPublished(component="e1", boot="e1.1"), colocated("j1"), lent("e0", "j1", 10))
    out = (*up, excluded("e1"))
    assert trains(*out) == []
    ended = (*out, ReadinessWithdrawn(component="e1", reason="it ended"))
    assert trains(*ended) == []
    gone = (*ended, ComponentLost(component="e1", exit=-9, detail=""))
    assert trains(*gone) == [Append(started("j1"))]


def test_the_next_attempt_waits_for_a_boot_that_joined_meanwhile() -> None:
    again = (*STARTED, by("e0.2", joined("e0")), by("t2", trainer_joined()))
    assert trains(*again, boot="t2") == []
    assert trains(*again, by("e0.2", lent("e0", "j1", FENCE)), boot="t2") == [Append(started("j1", 2))]


def test_jobs_and_publications_take_turns() -> None:
    assert trains(*SELECTED) == [] and not any(isinstance(each, AssembleBatch) for each in trains(*TARGETED))
    done = (*VERIFIED, committed(1, "c1", E0, E1))
    assert trains(*done) == [AssembleBatch(("c1",), 2, given(*done).world.training.batches)]
    assert trains(*SERVING, rollback_asked(0, 0)) == []
    assert any(isinstance(debt.effect, AssembleBatch) for debt in trainer_debts(given(*SELECTED).world))


def test_a_lost_base_is_restored_all_the_same() -> None:
    lost = (*SELECTED, refused("c1", "transport"))
    assert trains(*lost) == [Append(restored("base", 0))]


def test_a_person_discards_a_job_when_its_step_is_over() -> None:
    """Its own end would end the fence, and the step has the memory."""
    asked = (*STARTED, discard_asked("j1"))
    assert isinstance(only(trainer_debts(given(*asked).world)), Train)
    assert trains(*asked, by("t2", trainer_joined()), boot="t2") == [Append(discarded("j1", 12))]
    [done] = facts_of(trainer_debts(given(*STARTED, ready("j1", "c1"), discard_asked("j1")).world))
    assert isinstance(done, JobDiscarded)


def test_an_ambiguous_job_that_a_person_has_trained_again_needs_the_memory_again() -> None:
    doubt = (*LENT, started("j1"), by("t2", trainer_joined(in_place=True)), by("t2", ambiguous("j1")))
    asked = (*doubt, back("e0", "j1"), back("e1", "j1"), restore_asked("j1"))
    fence = len(asked)
    assert owed(*asked) == ReleaseMemory("j1", fence, ()) and trains(*asked, boot="t2") == []
    words = (*asked, lent("e0", "j1", fence), lent("e1", "j1", fence), restore_asked("j1"))
    assert trains(*words, boot="t2") == [Append(started("j1", 2, request=fence))]


# -- what publishers owe


def test_no_target_while_a_job_has_the_memory() -> None:
    """A rollback that is asked for meanwhile waits for the job, and then precedes its candidate."""
    assert published(*STARTED, rollback_asked(0, 0)) == []
    [first] = published(*STARTED, rollback_asked(0, 0), ready("j1", "c1"), evaluated("c1"), selected("c1"))
    assert isinstance(first, TargetPersisted) and first.request == 12
    [first] = published(*SELECTED)
    assert isinstance(first, TargetPersisted) and first.candidate == "c1" and len(first.members) == 2


def test_who_does_not_release_in_time_is_out() -> None:
    late = (*DISPATCHED, lent("e0", "j1", FENCE))
    assert published(*late, later_s=29.9) == []
    [out] = published(*late, later_s=30.1)
    assert isinstance(out, EngineExcluded)
    assert (out.engine, out.boot, out.reason) == ("e1", "e1.1", "it did not release its memory within 30 s")
    assert published(*late, Said(joined("e1"), "e1.2", after_s=25.0), later_s=10.0) == []
    assert published(*LENT, later_s=60.0) == []


def test_the_time_counts_from_the_end_of_a_publication_that_came_between() -> None:
    both = (*SERVING, rollback_asked(0, 0), colocated("j1"), rollback_target(1, "base", 8, E0, E1, parent=0))
    assert published(*both, after(40.0, halted(1, reason="operator")), later_s=20.0) == []
    assert len(published(*both, after(40.0, halted(1, reason="operator")), later_s=30.1)) == 2


def test_whom_a_job_waits_for_is_known() -> None:
    assert [each.id for each in holders(given(*DISPATCHED).world)] == ["e0", "e1"]
    assert holders(given(*SERVING, dispatched("j1")).world) == [] == holders(given(*SELECTED).world)


# -- the audit, from raw events


def colocation(*history: Step) -> list[str]:
    log = given(*history).scribe.log
    return [found.text for found in check(log, [], None).violations if found.invariant == "colocated"]


def test_the_audit_finds_a_job_that_began_without_the_memory() -> None:
    assert colocation(*VERIFIED, committed(1, "c1", E0, E1)) == []
    [found] = colocation(*DISPATCHED, lent("e0", "j1", FENCE), started("j1"))
    assert "job j1 starts at 10" in found and "['e1.1'] have not released" in found
    assert colocation(*DISPATCHED, lent("e0", "j1", FENCE), excluded("e1"), started("j1")) == []
    assert colocation(*LENT, joined("e2"), started("j1")) == []


def test_the_audit_finds_an_engine_that_takes_back_what_a_job_has() -> None:
    [found] = colocation(*STARTED, back("e1", "j1"))
    assert "e1 boot e1.1 takes" in found
    assert colocation(*STARTED, dropped("j1"), back("e1", "j1")) == []


def test_the_audit_finds_a_restored_job_that_began_without_the_memory() -> None:
    doubt = (*STARTED, by("t2", trainer_joined(in_place=True)), by("t2", ambiguous("j1")), restore_asked("j1"))
    assert len(colocation(*doubt, started("j1", 2, request=len(doubt)))) == 1


# -- one boot's ledger


def test_what_was_acknowledged_is_not_asked_for_again_and_only_what_is_out_comes_back() -> None:
    ledger = Ledger(regions=REGIONS)
    assert ledger.whole() and to_resume(ledger, REGIONS) == ()
    assert to_release(ledger, ("kv_cache", "weights")) == ("weights", "kv_cache")
    ledger = released(ledger, ("weights",))
    assert not ledger.whole() and to_release(ledger, REGIONS) == REST and to_resume(ledger, REGIONS) == ("weights",)
    assert resumed(ledger, ("weights",)).whole()


def test_a_region_that_the_engine_does_not_have_is_an_error() -> None:
    ledger = Ledger(regions=("weights",))
    for ask in (to_release, to_resume):
        with pytest.raises(ContractError, match=r"found memory region 'kv_cache'; this engine gives: \['weights'\]"):
            ask(ledger, ("kv_cache",))


def test_after_a_failure_nothing_more_is_asked() -> None:
    ledger = failed(failed(Ledger(regions=REGIONS), "the first"), "the second")
    assert not ledger.whole() and ledger.uncertain == "the first"
    for ask in (to_release, to_resume):
        with pytest.raises(ContractError, match="the first"):
            ask(ledger, ("weights",))
