"""A rollback (protocol.md section 5): old content, a new load id, from its artifact, before everything that is queued.

Knows: release 1 (c1), release 2 (c2), and what may come between a request and its commit. Must not know: how artifacts
are read.
"""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from reef_bus.core.effects import AssembleBatch, Policy, Receive
from reef_bus.core.invariants import check
from reef_bus.core.world import lag
from reef_bus.events import (
    Event,
    PublicationHalted,
    PublicationRefused,
    ReleaseCommitted,
    TargetPersisted,
    TrainerRestored,
    TransferAborted,
)
from reef_bus.views import waiting
from tests.facts import (
    E0,
    E1,
    REGISTERED,
    SERVING,
    L,
    aborted,
    blob,
    digest,
    dispatched,
    evaluated,
    excluded,
    failed,
    fenced,
    halted,
    holds,
    joined,
    left,
    m,
    ready,
    refused,
    released,
    restored,
    rollback_asked,
    rollback_target,
    rolled_back,
    selected,
    started,
    target,
    trained,
    verified,
)
from tests.spec import (
    SECOND,
    Given,
    Step,
    by,
    chained_to,
    contradicts,
    counts,
    engine_debts,
    fact,
    facts_of,
    given,
    head,
    only,
    publisher_debts,
    serving,
    trainer_debts,
    void,
)

TWO: tuple[Step, ...] = (
    *(*SERVING, *trained("c1"), *released(1, "c1", E0, E1)),
    *(*trained("c2", "c1", 2), *released(2, "c2", E0, E1)),
)
"""Both engines serve release 2, whose content is c2."""

ASKED: tuple[Step, ...] = (*TWO, rollback_asked(1, on=2))
R = len(ASKED)
TARGETED: tuple[Step, ...] = (*ASKED, rollback_target(3, "c1", R, E0, E1))
FENCED: tuple[Step, ...] = (*TARGETED, fenced("e0", 3), fenced("e1", 3))
BACK: tuple[Step, ...] = (*ASKED, *rolled_back(3, "c1", R, E0, E1))


def owed(history: Given, after_s: float = 0.0) -> Event:
    return fact(publisher_debts(history.world, history.now + int(after_s * SECOND)))


def violated(history: Given) -> set[int | str]:
    """The invariants that the audit finds broken; these tests' builders quote no real sequences as evidence."""
    return {v.invariant for v in check(history.scribe.log, [], None).violations if "is quoted with" not in v.text}


# -- the target


def test_the_old_content_is_published_under_a_new_load_id_whose_parent_is_the_head() -> None:
    event = owed(given(*ASKED))
    assert isinstance(event, TargetPersisted)
    assert (event.load_id, event.parent, event.attempt, event.members) == (L(3), L(2), 1, (E0, E1))
    assert (event.candidate, event.manifest, event.weights) == ("c1", digest("c1"), blob("c1"))
    assert (event.sender, event.transport, event.mode, event.request) == ("artifact", "files", "fenced", R)
    given(*ASKED).when(event).then(counts, serving(), head(L(2)))


def test_release_0_can_be_rolled_back_to() -> None:
    event = owed(given(*TWO, rollback_asked(0, on=2)))
    assert isinstance(event, TargetPersisted)
    assert (event.candidate, event.manifest, event.parent) == ("base", digest("base"), L(2))


def test_it_precedes_queued_candidates() -> None:
    event = owed(given(*TWO, *trained("c3", "c2", 3), rollback_asked(1, on=2)))
    assert isinstance(event, TargetPersisted) and (event.candidate, event.sender) == ("c1", "artifact")


def test_an_open_publication_is_halted_first() -> None:
    """Its candidate is spent, its load id too; nobody is excluded, and the request is not answered by that."""
    open_ = (*TWO, *trained("c3", "c2", 3), target(3, "c3", E0, E1))
    history = given(*open_, rollback_asked(1, on=2))
    event = owed(history)
    assert isinstance(event, PublicationHalted)
    assert (event.publication, event.reason, event.excluded, event.request) == ("pub3", "rollback", (), 0)
    assert event.detail == "ann: it babbles"
    world = history.when(event).then(counts)
    assert world.publications.ended["c3"] == "halted" and list(world.requests) == [len(open_) + 1]
    event = owed(history)
    assert isinstance(event, TargetPersisted) and (event.candidate, event.load_id, event.parent) == ("c1", L(4), L(2))


def test_even_a_publication_that_could_commit_is_halted() -> None:
    open_ = (*TWO, *trained("c3", "c2", 3), *released(3, "c3", E0, E1)[:-1])
    assert isinstance(owed(given(*open_)), ReleaseCommitted)
    assert isinstance(owed(given(*open_, rollback_asked(1, on=2))), PublicationHalted)


def test_a_commit_that_comes_first_moves_the_head_and_the_rollback_is_refused() -> None:
    """It was decided on what served then; the person looks again."""
    *most, commit = (*TWO, *trained("c3", "c2", 3), *released(3, "c3", E0, E1))
    event = owed(given(*most, rollback_asked(1, on=2), commit))
    assert isinstance(event, PublicationRefused)
    assert (event.reason, event.request, event.candidate) == ("head_moved", len(most) + 1, "c1")


def test_a_refused_rollback_leaves_the_candidates_fate_alone() -> None:
    history = given(*TWO, rollback_asked(1, on=1))
    event = owed(history)
    assert isinstance(event, PublicationRefused) and event.reason == "head_moved" and event.request == len(TWO) + 1
    world = history.when(event).then(counts, serving("e0", "e1"), head(L(2)))
    assert world.publications.ended["c1"] == "committed" and world.requests == {}


def test_with_no_engine_joined_it_waits_and_so_do_the_candidates() -> None:
    gone = (*TWO, *trained("c3", "c2", 3), left("e0"), left("e1"), rollback_asked(1, on=2))
    history = given(*gone)
    assert publisher_debts(history.world, history.now + 999 * SECOND) == []
    history.when(by("e0.2", joined("e0"))).then(counts)
    event = owed(history)
    assert isinstance(event, TargetPersisted) and (event.candidate, event.members) == ("c1", (m("e0", 2),))


def test_an_engine_that_reads_no_files_refuses_it_before_any_pause() -> None:
    history = given(*TWO, joined("e2", ("tcp",)), rollback_asked(1, on=2))
    event = owed(history)
    assert isinstance(event, PublicationRefused) and event.reason == "transport" and "e2" in event.detail
    history.when(event).then(counts, serving("e0", "e1"))


def test_a_rollback_that_cannot_be_had_halts_nothing() -> None:
    """Capacity is decided before any pause: a candidate is not burned for nothing."""
    open_ = (*TWO, *trained("c3", "c2", 3), target(3, "c3", E0, E1), joined("e2", ("tcp",)))
    history = given(*open_, rollback_asked(1, on=2))
    event = owed(history)
    assert isinstance(event, PublicationRefused) and event.request == len(open_) + 1
    world = history.when(event).then(counts)
    assert world.publications.open is not None and world.publications.open.id == "pub3"
    assert publisher_debts(world, history.now) == []


def test_two_rollbacks_do_not_halt_each_other() -> None:
    """The second waits; if the first commits, the head has moved, and if not, it has its turn."""
    both = (*ASKED, rollback_asked(0, on=2, actor="bob"), rollback_target(3, "c1", R, E0, E1))
    assert publisher_debts(given(*both).world, given(*both).now) == []
    done = owed(given(*both, *rolled_back(3, "c1", R, E0, E1)[1:]))
    assert isinstance(done, PublicationRefused) and (done.request, done.reason) == (R + 1, "head_moved")
    event = owed(given(*both, halted(3)))
    assert isinstance(event, TargetPersisted) and (event.candidate, event.request, event.load_id) == (
        "base",
        R + 1,
        L(4),
    )


# -- its attempts


def test_members_read_the_artifact_without_a_sender() -> None:
    history = given(*TARGETED, fenced("e0", 3))
    assert engine_debts(history.world, "e0") == []  # e1 may still generate
    history.when(fenced("e1", 3)).then(counts)
    receive = only(engine_debts(history.world, "e0"))
    assert isinstance(receive, Receive)
    assert (receive.transport, receive.address, receive.token) == ("files", "sha-of-c1", "")
    assert (receive.load_id, receive.manifest, receive.attempt) == (L(3), digest("c1"), 1)


def test_the_trainer_offers_nothing_for_it() -> None:
    assert all(isinstance(debt.effect, AssembleBatch) for debt in trainer_debts(given(*TARGETED).world))


def test_no_deadline_waits_for_a_sender() -> None:
    """30 s after both have stopped: it is the receivers' time that is up."""
    event = owed(given(*FENCED), after_s=30.1)
    assert isinstance(event, TransferAborted) and (event.reason, event.excluded) == ("verify_deadline", ())


def test_a_status_waits_for_the_members_and_for_no_sender() -> None:
    history = given(*FENCED, verified("e0", 3, "c1"))
    assert waiting(history.world, history.now, Policy())["on"] == "e1"


def test_its_attempts_go_on_like_any_others() -> None:
    event = owed(given(*FENCED, verified("e0", 3, "c1"), failed("e1", 3)))
    assert isinstance(event, TransferAborted) and (event.excluded, event.members) == ((E1,), (E0,))
    history = given(*FENCED, verified("e0", 3, "c1"), failed("e1", 3), aborted(3, 1, E0, excluded=(E1,)))
    history.when(fenced("e0", 3, 2)).then(counts)
    receive = only(engine_debts(history.world, "e0"))
    assert isinstance(receive, Receive) and receive.attempt == 2


def test_its_commit_is_a_release_like_any_other() -> None:
    event = owed(given(*FENCED, verified("e0", 3, "c1"), verified("e1", 3, "c1")))
    assert isinstance(event, ReleaseCommitted)
    assert (event.load_id, event.parent, event.candidate, event.manifest) == (L(3), L(2), "c1", digest("c1"))
    world = given(*BACK).then(head(L(3)), serving("e0", "e1"))
    assert world.publications.releases[L(1)].manifest == world.publications.releases[L(3)].manifest == digest("c1")


def test_its_halt_leaves_its_candidates_fate_alone_and_it_is_never_retried_by_itself() -> None:
    history = given(*TARGETED, halted(3))
    world = history.then(head(L(2)))
    assert (world.publications.ended["c1"], world.requests) == ("committed", {})
    assert publisher_debts(world, history.now + 999 * SECOND) == []


def test_a_late_engine_proves_the_new_load_id_not_the_old_one() -> None:
    """The content is the same, the release is not: whoever verified release 1 is not thereby serving release 3."""
    late = (*BACK, joined("e2"))
    given(*late).when(holds("e2", 1, "c1")).then(counts, serving("e0", "e1"))
    given(*late).when(holds("e2", 3, "c1")).then(counts, serving("e0", "e1", "e2"))


def test_nothing_serves_while_its_fence_is_up() -> None:
    given(*TARGETED).then(serving())
    given(*FENCED).when(verified("e0", 3, "c1")).then(counts, serving())
    given(*TARGETED).when(halted(3)).then(counts, serving("e0", "e1"))  # nobody had stopped: proofs are as they were


def test_the_audit_finds_nothing_in_it() -> None:
    done = (*BACK, restored("c1", 3), *trained("c3", "c1", 3), target(4, "c3", E0, E1), halted(4))
    assert violated(given(*done)) == set()


# -- the trainer after it


def test_the_trainer_owes_a_restore_of_the_head_and_trains_from_it() -> None:
    history = given(*BACK)
    event = fact(trainer_debts(history.world))
    assert event == TrainerRestored(scenario="digit", load_id=L(3), candidate="c1")
    history.when(event).then(counts)
    batch = only(trainer_debts(history.world))
    assert isinstance(batch, AssembleBatch) and batch.bases == ("c1",)


def test_a_restore_that_names_an_older_head_pays_nothing() -> None:
    history = given(*BACK, restored("c2", 2))
    assert isinstance(fact(trainer_debts(history.world)), TrainerRestored)


def test_a_rollback_that_brings_back_what_the_trainer_stands_on_owes_no_restore() -> None:
    """Release 2 again: what the trainer made of c2 still descends from what serves."""
    same = (*TWO, rollback_asked(2, on=2), *rolled_back(3, "c2", len(TWO) + 1, E0, E1))
    batch = only(trainer_debts(given(*same).world))
    assert isinstance(batch, AssembleBatch) and batch.bases == ("c2",)


def test_a_candidate_that_was_trained_before_it_ends_base_lost() -> None:
    """ "A rollback overtaken by a candidate trained before it": it never is."""
    queued = (*TWO, *trained("c3", "c2", 3), rollback_asked(1, on=2))
    history = given(*queued, *rolled_back(3, "c1", len(queued), E0, E1))
    event = owed(history)
    assert isinstance(event, PublicationRefused)
    assert (event.candidate, event.reason, event.request) == ("c3", "base_lost", 0)
    given(*queued, *rolled_back(3, "c1", len(queued), E0, E1)).when(target(4, "c3", E0, E1)).then(
        contradicts("does not reach the head inc:3")
    )


def test_a_job_that_was_open_across_it_ends_the_same_way() -> None:
    """Training goes on over the old base; what comes out is decided on, refused, and the trainer restored."""
    begun = (*TWO, dispatched("j3", "c2", 3), started("j3"), rollback_asked(1, on=2))
    across = (*begun, *rolled_back(3, "c1", len(begun), E0, E1))
    done = given(*across, ready("j3", "c3", "c2"), evaluated("c3"), selected("c3"))
    event = owed(done)
    assert isinstance(event, PublicationRefused) and (event.candidate, event.reason) == ("c3", "base_lost")
    assert fact(trainer_debts(done.world)) == TrainerRestored(scenario="digit", load_id=L(3), candidate="c1")


def test_a_queued_candidate_that_descends_from_the_content_is_published() -> None:
    """c3 stands on c2; before anybody refused it, a second rollback brings c2 back."""
    queued = (*TWO, *trained("c3", "c2", 3), rollback_asked(1, on=2))
    once = (*queued, *rolled_back(3, "c1", len(queued), E0, E1), rollback_asked(2, on=3))
    history = given(*once, *rolled_back(4, "c2", len(once), E0, E1))
    event = owed(history)
    assert isinstance(event, TargetPersisted)
    assert (event.candidate, event.parent, event.sender) == ("c3", L(4), "trainer")
    history.when(event).then(counts)


def test_the_new_release_is_the_base_of_what_follows() -> None:
    history = given(*BACK, restored("c1", 3), *trained("c3", "c1", 3))
    event = owed(history)
    assert isinstance(event, TargetPersisted) and (event.candidate, event.load_id, event.parent) == ("c3", L(4), L(3))
    history.when(event).then(counts)


def test_staleness_counts_from_the_content_that_answered() -> None:
    """The samples of releases 1 and 3 are of the same weights; those of release 2 are of none that c1 descends from."""
    world = given(*BACK, restored("c1", 3)).world
    assert [lag(world, L(n), "c1", 2) for n in (0, 1, 2, 3)] == [1, 0, None, 0]


# -- what readers check


@pytest.mark.parametrize(
    ("history", "event", "pattern"),
    [
        (TWO, rollback_target(3, "c1", R, E0, E1), "no rollback was asked for at"),
        (TWO, rollback_target(3, "c1", 0, E0, E1), "no rollback was asked for at 0"),
        ((*TARGETED, halted(3)), replace(rollback_target(4, "c1", R, E0, E1), parent=L(2)), "answered before"),
        ((*ASKED, refused("c1", "transport", R)), rollback_target(3, "c1", R, E0, E1), "answered before"),
        (ASKED, rollback_target(3, "base", R, E0, E1), "release inc:1 is another"),
        (ASKED, replace(rollback_target(3, "c1", R, E0, E1), manifest=digest("x")), "release inc:1 is another"),
        (ASKED, replace(rollback_target(3, "c1", R, E0, E1), weights=blob("x")), "release inc:1 is another"),
        (ASKED, replace(rollback_target(3, "c1", R, E0, E1), parent=L(1)), "not the head"),
        (ASKED, replace(rollback_target(3, "c1", R, E0, E1), sender="trainer"), "no rollback was asked for at"),
        (ASKED, replace(rollback_target(3, "c1", R, E0, E1), attempt=2), "first attempt is number 2"),
        (ASKED, replace(rollback_target(3, "c1", R, E0, E1), load_id=L(1)), "does not follow"),
        (ASKED, rollback_target(3, "c1", R), "membership is empty"),
        (ASKED, rollback_target(3, "c1", R, m("e9")), "never joined"),
        ((*ASKED, excluded("e1")), rollback_target(3, "c1", R, E0, E1), "was excluded"),
        ((*TWO, rollback_asked(1, on=1)), rollback_target(3, "c1", R, E0, E1), "decided on inc:1"),
        ((*TWO, rollback_asked(8, on=2)), rollback_target(3, "c1", R, E0, E1), "no rollback was asked for at"),
    ],
)
def test_a_target_that_nobody_asked_for_like_this_is_a_contradiction(
    history: tuple[Step, ...], event: Event, pattern: str
) -> None:
    given(*history).when(event).then(contradicts(pattern))


def test_what_was_committed_is_published_again_by_a_rollback_alone() -> None:
    """After a rollback to c1, c2 would reach the head once more; its turn is over all the same."""
    again = target(4, "c2", E0, E1)
    given(*BACK).when(again).then(contradicts("candidate c2 was committed"))


def test_another_publishers_late_target_is_void_not_a_contradiction() -> None:
    """Two publishers answer one request: one append wins, and the reader of the loser halts for nothing."""
    prev = given(*ASKED).world.tail("release")
    given(*TARGETED).when(chained_to(prev, rollback_target(3, "c1", R, E0, E1))).then(void("prev"))


@pytest.mark.parametrize(
    ("wrong", "invariant"),
    [
        (rollback_target(3, "c1", R + 7, E0, E1), 11),
        (rollback_target(3, "base", R, E0, E1), 5),
        (replace(rollback_target(3, "c1", R, E0, E1), parent=L(1)), 5),
    ],
)
def test_the_audit_names_what_is_wrong_with_a_rollback(wrong: Event, invariant: int) -> None:
    history = given(*ASKED)
    history.scribe.write(wrong)
    found = violated(history)
    assert found == {invariant, "fold"}


def test_the_audit_knows_a_request_that_was_refused_before() -> None:
    history = given(*ASKED, refused("c1", "transport", R))
    history.scribe.write(rollback_target(3, "c1", R, E0, E1))
    found = violated(history)
    assert found == {11, "fold"}


def test_the_audit_knows_a_candidate_that_was_committed_before() -> None:
    history = given(*BACK)
    history.scribe.write(target(4, "c2", E0, E1))
    found = violated(history)
    assert found == {"decision", "fold"}


def test_a_restart_anywhere_sees_the_same_debts() -> None:
    """Row "publisher anywhere": what the log owes next, event by event of the release family."""
    open_ = (*TWO, *trained("c3", "c2", 3), target(3, "c3", E0, E1), rollback_asked(1, on=2))
    script = (*open_, halted(3, reason="rollback"), *rolled_back(4, "c1", len(open_), E0, E1, parent=2))
    names = []
    for length in range(len(TWO), len(script)):
        history = given(*script[:length])
        names += [type(event).__name__ for event in facts_of(publisher_debts(history.world, history.now))]
    assert names == ["TargetPersisted", "PublicationHalted", "TargetPersisted", "ReleaseCommitted"]


def test_committed_is_what_a_rollback_may_name() -> None:
    """A halted candidate's load id was never a release."""
    history = given(*TWO, *trained("c3", "c2", 3), target(3, "c3", E0, E1), halted(3), rollback_asked(3, on=2))
    event = owed(history)
    assert isinstance(event, PublicationRefused) and (event.reason, event.candidate) == ("unknown_release", "")


def test_a_rollback_before_anything_was_released_republishes_the_base() -> None:
    asked = (*REGISTERED, joined("e0"), rollback_asked(0, on=0))
    event = owed(given(*asked))
    assert isinstance(event, TargetPersisted) and (event.candidate, event.load_id, event.parent) == ("base", L(1), L(0))
    given(*asked, *rolled_back(1, "base", len(asked), E0)).then(head(L(1)), serving("e0"))
