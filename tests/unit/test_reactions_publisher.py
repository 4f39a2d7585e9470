"""What publishers owe, row by row: targets, commits, attempts, guilt, halts (protocol.md sections 5, 6 and 8).

Knows: the publisher's rows and the default deadlines. Must not know: how facts are appended.
"""

from __future__ import annotations

import pytest

from reef_bus.core.effects import Append, Debt
from reef_bus.core.world import World
from reef_bus.events import (
    ComponentLost,
    EngineExcluded,
    Event,
    PublicationHalted,
    PublicationRefused,
    ReleaseCommitted,
    TargetPersisted,
    TransferAborted,
)
from tests.facts import (
    E0,
    E1,
    REGISTERED,
    SERVING,
    L,
    aborted,
    blob,
    committed,
    digest,
    excluded,
    failed,
    fenced,
    halted,
    holds,
    joined,
    left,
    m,
    offer_failed,
    offered,
    opened,
    refused,
    rejected,
    released,
    restored,
    started,
    target,
    trained,
    trainer_joined,
    verified,
)
from tests.spec import SECOND, Given, Step, after, by, given, publisher_debts

SELECTED: tuple[Step, ...] = (*SERVING, *trained("c1"))
TARGETED: tuple[Step, ...] = (*SELECTED, target(1, "c1", E0, E1))
FENCED: tuple[Step, ...] = (*TARGETED, fenced("e0", 1), fenced("e1", 1))
READY: tuple[Step, ...] = (*FENCED, offered(1, "c1"))
VERIFIED: tuple[Step, ...] = (*READY, verified("e0", 1, "c1"), verified("e1", 1, "c1"))


def attempt(number: int, *members: object) -> tuple[Step, ...]:
    """Up to the given attempt, which nobody has answered yet; nobody was guilty."""
    return (*TARGETED, *(aborted(1, n, E0, E1) for n in range(1, number)))


def debts(history: Given, after_s: float = 0.0, silent: tuple[str, ...] = ()) -> list[Debt]:
    return publisher_debts(history.world, history.now + int(after_s * SECOND), silent)


def owes(*history: Step, after_s: float = 0.0, silent: tuple[str, ...] = ()) -> Event | None:
    """The one fact that is owed; None for none."""
    found = debts(given(*history), after_s, silent)
    assert len(found) <= 1, found
    if not found:
        return None
    assert isinstance(found[0].effect, Append)
    return found[0].effect.event


def aborts(*history: Step, after_s: float = 0.0) -> TransferAborted:
    event = owes(*history, after_s=after_s)
    assert isinstance(event, TransferAborted), event
    return event


# -- row 5: a target


def test_nothing_before_registration() -> None:
    assert publisher_debts(World(), 0) == []
    assert owes(opened(), joined("e0")) is None


def test_row_5_a_selected_candidate_owes_a_target() -> None:
    event = owes(*SELECTED)
    assert isinstance(event, TargetPersisted)
    assert (event.candidate, event.load_id, event.parent, event.manifest) == ("c1", L(1), L(0), digest("c1"))
    assert (event.weights, event.attempt, event.members, event.mode) == (blob("c1"), 1, (E0, E1), "fenced")
    assert (event.sender, event.transport, event.pause) == ("trainer", "tcp", "drain")


@pytest.mark.parametrize("last", [3, 4], ids=["ready", "evaluated"])
def test_never_publish_undecided(last: int) -> None:
    """Row "trainer after 3"."""
    assert owes(*SERVING, *trained("c1")[:last]) is None


def test_a_rejected_candidate_is_nobodys_business() -> None:
    assert owes(*SERVING, *trained("c1")[:4], rejected("c1")) is None


def test_no_second_target_while_a_publication_is_open() -> None:
    assert owes(*TARGETED, *trained("c2", "c1", 2)) is None


def test_with_no_engine_joined_candidates_wait() -> None:
    assert owes(*REGISTERED, *trained("c1")) is None
    assert owes(*REGISTERED, joined("e0"), excluded("e0"), *trained("c1")) is None
    assert owes(*REGISTERED, joined("e0"), left("e0"), *trained("c1")) is None


def test_members_are_all_joined_boots_that_are_not_excluded() -> None:
    """Whether they have verified the head yet is of no concern: the target ends their catch-up."""
    event = owes(*SELECTED, joined("e2"), excluded("e0"), by("e1.2", joined("e1")))
    assert isinstance(event, TargetPersisted) and event.members == (m("e1", 2), m("e2"))


def test_candidates_are_published_in_order() -> None:
    event = owes(*SELECTED, *trained("c2", "c1", 2))
    assert isinstance(event, TargetPersisted) and event.candidate == "c1"
    after = (*SELECTED, *trained("c2", "c1", 2), *released(1, "c1", E0, E1))
    event = owes(*after)
    assert isinstance(event, TargetPersisted)
    assert (event.candidate, event.load_id, event.parent) == ("c2", L(2), L(1))


def test_a_hundred_candidates_wait_in_order() -> None:
    """Section 5, row 5: they wait for an engine, however many; none is refused for having waited."""
    queue: list[Step] = []
    for number in range(1, 101):
        queue += trained(f"c{number}", f"c{number - 1}" if number > 1 else "base", number)
    event = owes(*SERVING, *queue)
    assert isinstance(event, TargetPersisted) and event.candidate == "c1"


def test_a_lost_base_is_refused() -> None:
    """Base chain: c2 stands on c1, c1 was halted."""
    event = owes(*TARGETED, *trained("c2", "c1", 2), halted(1))
    assert isinstance(event, PublicationRefused) and (event.candidate, event.reason) == ("c2", "base_lost")


@pytest.mark.parametrize("end", ["refused", "halted"])
def test_history_the_candidates_after_a_lost_one_get_their_turn(end: str) -> None:
    over = (*SELECTED, refused("c1")) if end == "refused" else (*TARGETED, halted(1))
    event = owes(*over, restored("base", 0), *trained("c2", "base", 2))
    assert isinstance(event, TargetPersisted)
    assert (event.candidate, event.load_id) == ("c2", L(1) if end == "refused" else L(2))


def negotiated(offers: tuple[str, ...], *accepts: tuple[str, ...], asked: str = "") -> Event:
    engines = [joined(f"e{number}", each) for number, each in enumerate(accepts)]
    history = given(opened(), trainer_joined(offers), REGISTERED[2], *engines, *trained("c1"))
    (debt,) = publisher_debts(history.world, history.now, transport=asked)
    assert isinstance(debt.effect, Append)
    return debt.effect.event


@pytest.mark.parametrize(
    ("offers", "accepts", "asked", "chosen"),
    [
        (("shm", "tcp"), [("tcp", "shm")], "", "shm"),
        (("shm", "tcp"), [("tcp", "shm"), ("files", "tcp")], "", "tcp"),
        (("files", "tcp"), [("tcp", "files")] * 3, "", "files"),
        (("files", "tcp"), [("tcp", "files")], "tcp", "tcp"),
    ],
)
def test_the_trainers_first_offer_that_every_engine_accepts_is_taken(
    offers: tuple[str, ...], accepts: list[tuple[str, ...]], asked: str, chosen: str
) -> None:
    event = negotiated(offers, *accepts, asked=asked)
    assert isinstance(event, TargetPersisted) and event.transport == chosen


@pytest.mark.parametrize(
    ("offers", "accepts", "asked", "why"),
    [
        (("tcp",), [("files",)], "", "the trainer offers ['tcp']; e0 accepts ['files']"),
        (("tcp", "shm"), [("tcp",), ("shm",)], "", "offers ['tcp', 'shm']; e0 accepts ['tcp']; e1 accepts ['shm']"),
        (("tcp",), [("tcp",)], "shm", "transport shm is asked for: the trainer offers ['tcp']; e0 accepts ['tcp']"),
        ((), [("tcp",)], "", "the trainer offers []"),
    ],
)
def test_without_a_common_transport_it_is_refused_with_both_lists_before_any_pause(
    offers: tuple[str, ...], accepts: list[tuple[str, ...]], asked: str, why: str
) -> None:
    """Row 5, invariant 10: traffic never noticed."""
    event = negotiated(offers, *accepts, asked=asked)
    assert isinstance(event, PublicationRefused) and event.reason == "transport" and why in event.detail


def test_the_next_attempt_names_nobody_who_does_not_accept_its_transport() -> None:
    """It would fail, and be excluded for that; left out, it loads what was committed from its artifact."""
    event = aborts(*TARGETED, joined("e2", accepts=("files",)), offer_failed(1))
    assert (event.members, event.excluded) == ((E0, E1), ())


def test_one_fact_two_publishers_one_key() -> None:
    """No leader: they decide alike."""
    history = given(*SELECTED)
    assert publisher_debts(history.world, history.now) == publisher_debts(history.world, history.now + 9 * SECOND)


# -- row 8: the commit


def test_row_8_the_commit_carries_the_evidence() -> None:
    history = given(*VERIFIED)
    event = owes(*VERIFIED)
    assert isinstance(event, ReleaseCommitted)
    assert (event.publication, event.load_id, event.parent, event.manifest) == ("pub1", L(1), L(0), digest("c1"))
    seqs = {r.event.key: r.seq for r in history.scribe.log if r.name == "ReceiverVerified"}
    assert [(e.engine, e.boot, e.seq, e.manifest) for e in event.evidence] == [
        ("e0", "e0.1", seqs["e0"], digest("c1")),
        ("e1", "e1.1", seqs["e1"], digest("c1")),
    ]


def test_no_commit_on_a_part_of_the_membership() -> None:
    assert owes(*READY, verified("e0", 1, "c1")) is None


def test_what_was_verified_in_a_dead_attempt_counts_for_nothing() -> None:
    assert owes(*VERIFIED, aborted(1, 1, E0, E1)) is None


def test_a_commit_beats_any_deadline() -> None:
    assert isinstance(owes(*VERIFIED, after_s=999), ReleaseCommitted)


def test_history_a_verification_whose_engine_restarts_before_the_commit() -> None:
    assert isinstance(owes(*VERIFIED, by("e1.2", joined("e1"))), ReleaseCommitted)


# -- attempts and guilt


def test_an_engine_at_6_is_excluded_after_the_fence_deadline() -> None:
    """Row "an engine at 6": 30 s from the event that raised the fence."""
    history = (*TARGETED, fenced("e0", 1), offered(1, "c1"))
    assert owes(*history, after_s=29.9) is None
    event = aborts(*history, after_s=30.1)
    assert (event.attempt, event.next_attempt, event.excluded, event.members) == (1, 2, (E1,), (E0,))
    assert (event.publication, event.reason) == ("pub1", "fence_deadline")


def test_the_fence_deadline_counts_from_the_attempt() -> None:
    history = given(*TARGETED)
    history.scribe.now += 25 * SECOND
    from reef_bus.core.world import fold

    fold(history.world, history.scribe.write(aborted(1, 1, E0, E1)))
    assert debts(history, 29.9) == []
    assert len(debts(history, 30.1)) == 1


def test_a_judgement_about_time_is_for_the_head_only() -> None:
    """Rule 7; "a publisher two events behind that judges a deadline"."""
    assert [d.at_head for d in debts(given(*TARGETED), 30.1)] == [True]
    assert [d.at_head for d in debts(given(*FENCED), 30.1)] == [True]
    assert [d.at_head for d in debts(given(*READY), 30.1)] == [True]
    assert [d.at_head for d in debts(given(*SERVING), silent=("e0.1",))] == [True]
    assert [d.at_head for d in debts(given(*VERIFIED))] == [False]


def test_no_offer_by_the_deadline_is_the_senders_fault() -> None:
    """Row "sender at 6-7": where none verified, the sender is guilty, and nobody is excluded."""
    assert owes(*FENCED, after_s=29.9) is None
    event = aborts(*FENCED, after_s=30.1)
    assert (event.reason, event.excluded, event.members) == ("sender_deadline", (), (E0, E1))


def test_a_failed_offer_is_the_senders_fault_at_once() -> None:
    event = aborts(*TARGETED, offer_failed(1))
    assert (event.reason, event.excluded, event.members) == ("sender_failed", (), (E0, E1))
    assert "no room" in event.detail


def test_a_replaced_trainers_failure_is_not_its_successors() -> None:
    assert owes(*TARGETED, offer_failed(1), by("t2", trainer_joined())) is None
    event = owes(*FENCED, offer_failed(1), by("t2", trainer_joined()), offered(1, "c1"))
    assert event is None


def test_a_receiver_at_7_that_stays_silent_is_guilty_where_another_verified() -> None:
    """Row "a receiver at 7": 30 s to verify; survivors verify again for the new attempt."""
    history = (*READY, verified("e0", 1, "c1"))
    assert owes(*history, after_s=29.9) is None
    event = aborts(*history, after_s=30.1)
    assert (event.reason, event.excluded, event.members) == ("verify_deadline", (E1,), (E0,))


def test_where_none_verified_nobody_is_excluded() -> None:
    event = aborts(*READY, after_s=30.1)
    assert (event.reason, event.excluded, event.members) == ("verify_deadline", (), (E0, E1))
    assert event.detail == "e0 (e0.1), e1 (e1.1) did not verify within 30 s"
    event = aborts(*READY, failed("e0", 1), failed("e1", 1))
    assert (event.reason, event.excluded, event.members) == ("receiver_failed", (), (E0, E1))


def test_one_failed_receiver_is_guilty_when_the_other_verified() -> None:
    event = aborts(*READY, failed("e0", 1), verified("e1", 1, "c1"))
    assert (event.reason, event.excluded, event.members) == ("receiver_failed", (E0,), (E1,))
    assert "head.weight" in event.detail  # the log names the tensor


@pytest.mark.parametrize(
    "lie",
    [verified("e0", 1, "c1", manifest="lie"), failed("e0", 1, observed="corrupt")],
    ids=["a receiver lies", "bytes are corrupt"],
)
def test_a_wrong_digest_is_never_committed_and_its_engine_is_excluded(lie: Step) -> None:
    """Row "a receiver lies, bytes are corrupt"."""
    event = aborts(*READY, lie, verified("e1", 1, "c1"))
    assert event.excluded == (E0,) and event.members == (E1,)
    event = aborts(*READY, verified("e1", 1, "c1"), lie)
    assert event.excluded == (E0,) and event.members == (E1,)


def test_a_liar_that_corrects_itself_has_lied() -> None:
    history = (*READY, verified("e0", 1, "c1", manifest="lie"), verified("e1", 1, "c1"), verified("e0", 1, "c1"))
    assert aborts(*history).excluded == (E0,)


def test_a_member_that_is_gone_ends_the_attempt_at_once() -> None:
    """Nobody waits for a boot that cannot come back; its successor is a member of the next attempt."""
    event = aborts(*TARGETED, by("e1.2", joined("e1")))
    assert (event.reason, event.excluded, event.members) == ("member_lost", (E1,), (E0, m("e1", 2)))
    assert aborts(*READY, excluded("e1")).members == (E0,)
    assert aborts(*READY, left("e1")).members == (E0,)


def test_the_next_membership_is_all_joined_boots_now() -> None:
    event = aborts(*TARGETED, joined("e2"), offer_failed(1))
    assert event.members == (E0, E1, m("e2"))


def test_at_most_three_attempts_and_then_a_halt() -> None:
    for number in (1, 2):
        event = owes(*attempt(number), offer_failed(1, number))
        assert isinstance(event, TransferAborted) and event.next_attempt == number + 1
    event = owes(*attempt(3), offer_failed(1, 3))
    assert isinstance(event, PublicationHalted)
    assert (event.publication, event.attempt, event.excluded) == ("pub1", 3, ())
    assert "sender_failed" in event.reason


def test_a_halt_excludes_the_guilty_too() -> None:
    """So that one dead engine does not burn every candidate."""
    event = owes(*attempt(3), fenced("e0", 1, 3), after_s=30.1)
    assert isinstance(event, PublicationHalted) and event.excluded == (E1,)


def test_nobody_left_is_a_halt() -> None:
    event = owes(*TARGETED, after_s=30.1)
    assert isinstance(event, PublicationHalted) and set(event.excluded) == {E0, E1} and event.attempt == 1
    event = owes(*TARGETED, excluded("e0"), excluded("e1"), after_s=30.1)
    assert isinstance(event, PublicationHalted)


def test_with_nobody_left_a_new_boot_may_come_until_the_deadline() -> None:
    """A deployment of one engine whose process ends keeps its candidate: the next boot is the next attempt's member."""
    gone: tuple[Step, ...] = (*TARGETED, excluded("e0"), excluded("e1"))
    assert owes(*gone, after_s=29.9) is None
    assert aborts(*gone, by("e0.2", joined("e0"))).members == (m("e0", 2),)


def test_that_nobody_came_is_judged_at_the_head_whatever_ended_the_attempt() -> None:
    (halt,) = debts(given(*TARGETED, excluded("e0"), excluded("e1")), after_s=30.1)
    assert halt.at_head


def test_after_the_last_attempt_nobody_is_waited_for() -> None:
    assert isinstance(owes(*attempt(3), excluded("e0"), excluded("e1")), PublicationHalted)


def test_a_process_that_ended_is_no_member_any_more_and_nobody_waits_for_its_restart() -> None:
    lost = ComponentLost(component="e1", exit=-9)
    event = aborts(*TARGETED, lost)
    assert (event.reason, event.excluded, event.members) == ("member_lost", (E1,), (E0,))
    out, aimed = (debt.effect for debt in debts(given(*SELECTED, lost)))
    assert isinstance(out, Append) and isinstance(out.event, EngineExcluded)
    assert (out.event.boot, out.event.reason) == (E1.boot, "its process ended")
    assert isinstance(aimed, Append) and isinstance(aimed.event, TargetPersisted) and aimed.event.members == (E0,)
    event = owes(*SELECTED, lost, by("e1.2", joined("e1")))
    assert isinstance(event, TargetPersisted) and event.members == (E0, m("e1", 2))


def test_who_leaves_an_attempt_leaves_the_deployment() -> None:
    """Else a boot that had verified in the dead attempt could load the incumbent and serve it under the new name."""
    one_verified: tuple[Step, ...] = (*READY, verified("e0", 1, "c1"), ComponentLost(component="e0", exit=0))
    event = aborts(*one_verified, by("e1.2", joined("e1")))
    assert set(event.excluded) == {E0, E1} and event.members == (m("e1", 2),)


def test_with_nobody_left_the_wait_counts_from_the_last_end_of_a_process() -> None:
    ended: tuple[Step, ...] = (
        *TARGETED,
        after(29, ComponentLost(component="e0", exit=-9)),
        ComponentLost(component="e1", exit=-9),
    )
    assert owes(*ended, after_s=29.9) is None
    assert isinstance(owes(*ended, after_s=30.1), PublicationHalted)


def test_an_end_of_an_earlier_process_is_not_this_boots() -> None:
    event = owes(opened(), ComponentLost(component="e0", exit=1), *SELECTED[1:])
    assert isinstance(event, TargetPersisted) and event.members == (E0, E1)


def test_after_a_halt_the_publisher_leaves_the_incumbent_alone() -> None:
    assert owes(*TARGETED, halted(1)) is None
    assert owes(*SELECTED, *released(1, "c1", E0, E1)) is None


def test_history_a_sender_that_dies_after_one_receiver_failed() -> None:
    """None verified: nobody is excluded, whoever reported first."""
    event = aborts(*READY, failed("e0", 1), offer_failed(1))
    assert (event.reason, event.excluded) == ("sender_failed", ())
    event = aborts(*READY, failed("e0", 1), after_s=30.1)
    assert event.excluded == ()


def test_history_one_dead_engine_and_many_candidates() -> None:
    """It costs one attempt of one candidate: the next target does not name it."""
    dead = (*TARGETED, fenced("e0", 1), aborted(1, 1, E0, excluded=(E1,)), fenced("e0", 1, 2), offered(1, "c1", 2))
    done = (*dead, verified("e0", 1, "c1", 2), committed(1, "c1", E0, attempt=2), *trained("c2", "c1", 2))
    event = owes(*done)
    assert isinstance(event, TargetPersisted) and event.members == (E0,)


def test_history_a_member_dies_right_after_the_commit() -> None:
    done = (*VERIFIED, committed(1, "c1", E0, E1), *trained("c2", "c1", 2))
    event = owes(*done, by("e1.2", joined("e1")))
    assert isinstance(event, TargetPersisted) and event.members == (E0, m("e1", 2))


# -- heartbeats


def test_a_silent_boot_is_excluded_once() -> None:
    """Section 6: the publisher that misses the heartbeats writes EngineExcluded."""
    event = owes(*SERVING, silent=("e1.1",))
    assert isinstance(event, EngineExcluded) and (event.engine, event.boot) == ("e1", "e1.1")
    assert event.reason == "its heartbeats stopped"
    assert owes(*SERVING, excluded("e1"), silent=("e1.1",)) is None
    assert owes(*SERVING, by("e1.2", joined("e1")), silent=("e1.1",)) is None


def test_publisher_anywhere_the_log_says_what_is_owed() -> None:
    """Row "publisher anywhere": whoever starts at any point of the log owes what comes next of its family."""
    script = (*VERIFIED, committed(1, "c1", E0, E1), *trained("c2", "c1", 2))
    found = [owes(*script[:length]) for length in range(3, len(script) + 1)]
    names = [type(event).__name__ for event in found if event]
    assert names == ["TargetPersisted", "ReleaseCommitted", "TargetPersisted"]


def test_what_is_owed_counts_when_it_is_folded() -> None:
    """The publisher's own facts are neither void nor contradictions."""
    from tests.spec import counts

    for history, after_s in (
        (SELECTED, 0.0),
        (VERIFIED, 0.0),
        (TARGETED, 30.1),
        (FENCED, 30.1),
        ((*attempt(3), offer_failed(1, 3)), 0.0),
        ((*TARGETED, *trained("c2", "c1", 2), halted(1)), 0.0),
    ):
        event = owes(*history, after_s=after_s)
        assert event is not None
        given(*history).when(event).then(counts)


def test_unused_words_change_nothing() -> None:
    assert owes(*SERVING, holds("e0", 0, "base")) is None
    assert owes(*TARGETED[:8], started("job-c1")) is None


def test_each_target_has_a_key_of_its_own() -> None:
    """Rule 3: the sequence that made it owed, be that the selection or the end of what came before."""
    queued = (*SELECTED, *trained("c2", "c1", 2))
    first, second = debts(given(*queued)), debts(given(*queued, *released(1, "c1", E0, E1)))
    assert first[0].key != second[0].key
