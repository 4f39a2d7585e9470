"""Staged mode, row by row: nobody stops for the transfer, and each engine only for its own swap (protocol.md 4, 5, 8).

Knows: what a log in staged mode holds. Must not know: how an engine stages, swaps or hashes.
"""

from __future__ import annotations

import msgspec
import pytest

from reef_bus.config import Config, Publication, check
from reef_bus.core import reactions
from reef_bus.core.effects import Append, Deadlines, Fence, Policy, Retire, Stage, VerifyHead
from reef_bus.errors import Rejected
from reef_bus.events import (
    ComponentLost,
    Event,
    Member,
    PublicationHalted,
    PublicationRefused,
    ReceiverFailed,
    ReleaseCommitted,
    RollbackRequested,
    TargetPersisted,
    TransferAborted,
)
from reef_bus.views import status
from tests.facts import (
    E0,
    E1,
    SERVING,
    L,
    S,
    aborted,
    blob,
    committed,
    digest,
    excluded,
    failed,
    halted,
    holds,
    joined,
    m,
    offer_failed,
    offered,
    staged,
    swapped,
    target,
    trained,
    trainer_joined,
    verified,
)
from tests.spec import SECOND, Said, Step, after, by, contradicts, counts, engine_debts, given, head, only, serving


def beside(n: int, candidate: str, *members: Member, parent: int | None = None) -> TargetPersisted:
    return msgspec.structs.replace(target(n, candidate, *members, parent=parent), mode="staged")


def unstaged(engine: str, n: int, attempt: int = 1) -> ReceiverFailed:
    """A staging that failed."""
    return msgspec.structs.replace(failed(engine, n, attempt), staged=True)


def rollback(release: int, on: int) -> RollbackRequested:
    return RollbackRequested(actor="ada", why="worse", head=L(on), scenario=S, release=L(release))


POLICY = Policy(mode="staged")
SELECTED: tuple[Step, ...] = (*SERVING, *trained("c1"))
TARGETED: tuple[Step, ...] = (*SELECTED, beside(1, "c1", E0, E1))
READY: tuple[Step, ...] = (*TARGETED, offered(1, "c1"))
STAGED: tuple[Step, ...] = (*READY, staged("e0", 1, "c1"), staged("e1", 1, "c1"))
COMMITTED: tuple[Step, ...] = (*STAGED, committed(1, "c1", E0, E1))
SWAPPED: tuple[Step, ...] = (*COMMITTED, swapped("e0", 1, "c1"), swapped("e1", 1, "c1"))
SECOND_READY: tuple[Step, ...] = (*trained("c2", "c1", 2), beside(2, "c2", E0, E1), offered(2, "c2"))
"""The next release, from its job to its ticket."""

HEAD_1 = VerifyHead(L(1), digest("c1"), blob("c1"))


def owed(*history: Step, engine: str = "e0", boot: str = "") -> object:
    return only(engine_debts(given(*history).world, engine, boot))


def nothing(*history: Step, engine: str = "e0", boot: str = "") -> bool:
    return engine_debts(given(*history).world, engine, boot) == []


def owes(*history: Step, after_s: float = 0.0, policy: Policy = POLICY) -> Event | None:
    """The one fact that publishers owe; None for none."""
    found = given(*history)
    debts = reactions.publisher(found.world, policy, found.now + int(after_s * SECOND))
    assert len(debts) <= 1, debts
    if not debts:
        return None
    assert isinstance(debts[0].effect, Append)
    return debts[0].effect.event


def aborts(*history: Step, after_s: float = 0.0) -> TransferAborted:
    event = owes(*history, after_s=after_s)
    assert isinstance(event, TransferAborted), event
    return event


# -- section 4: who may generate


@pytest.mark.parametrize("history", [TARGETED, READY, STAGED, (*STAGED, halted(1))], ids=lambda h: type(h[-1]).__name__)
def test_traffic_notices_nothing_until_the_commit(history: tuple[Step, ...]) -> None:
    given(*history).then(serving("e0", "e1"), head(L(0)))


def test_a_failed_staging_takes_no_trust_in_what_is_served_away() -> None:
    given(*READY).when(unstaged("e0", 1)).then(counts, serving("e0", "e1"))
    given(*READY).when(failed("e0", 1)).then(counts, serving("e1"))  # of the served memory it does


def test_after_the_commit_each_engine_serves_as_soon_as_it_has_swapped_and_not_before() -> None:
    given(*COMMITTED).then(serving(), head(L(1)))
    given(*COMMITTED).when(swapped("e1", 1, "c1")).then(counts, serving("e1"))
    given(*COMMITTED).when(holds("e1", 1, "c1")).then(counts, serving("e1"))  # the swap failed: by the artifact
    given(*SWAPPED).then(serving("e0", "e1"))


def test_a_staging_is_not_what_is_served() -> None:
    """To have the head's bytes beside is not to serve them, whichever way that staging came about."""
    late = (*COMMITTED, staged("e0", 1, "c1"))
    given(*late).then(serving())
    assert owed(*late) == HEAD_1


# -- what a commit stands on


def test_row_8_a_commit_stands_on_stagings() -> None:
    given(*STAGED).when(committed(1, "c1", E0, E1)).then(counts, head(L(1)))


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ((), "reported nothing"),
        ((verified("e1", 1, "c1"),), r"e1 boot e1.1 reported digest .*, not the target's staged digest"),
        ((holds("e1", 0, "base"),), "reported nothing"),
        ((staged("e1", 1, "c1", manifest="other"),), "reported staged digest other"),
        ((unstaged("e1", 1), staged("e1", 1, "c1")), "reported mismatch"),
        ((staged("e1", 1, "c1", attempt=2),), "reported nothing"),
        ((msgspec.structs.replace(staged("e1", 1, "c1"), load_id=L(2)),), "not the target's staged digest"),
    ],
    ids=["silent", "served", "caught up", "digest", "failed first", "attempt", "load id"],
)
def test_a_commit_without_every_members_first_staging_of_the_target_contradicts(
    words: tuple[Step, ...], why: str
) -> None:
    history = (*READY, staged("e0", 1, "c1"), *words)
    given(*history).when(committed(1, "c1", E0, E1)).then(contradicts(why))


def test_a_staging_proves_nothing_about_a_fenced_target() -> None:
    history = (*SELECTED, target(1, "c1", E0), offered(1, "c1"), staged("e0", 1, "c1"))
    given(*history).when(committed(1, "c1", E0)).then(contradicts("reported staged digest .*, not the target's digest"))


def test_a_first_staging_stays_whatever_is_said_later() -> None:
    given(*STAGED, unstaged("e0", 1)).when(committed(1, "c1", E0, E1)).then(counts)


# -- what an engine owes


def test_an_engine_stages_as_soon_as_the_sender_is_ready_and_waits_for_nobody() -> None:
    assert nothing(*TARGETED)
    stage = owed(*READY)
    assert stage == Stage("pub1", 1, L(1), digest("c1"), "tcp", "127.0.0.1:1", "secret", 10.0)
    assert owed(*READY, staged("e1", 1, "c1")) == stage == owed(*READY, engine="e1")


@pytest.mark.parametrize("word", [staged("e0", 1, "c1"), unstaged("e0", 1)], ids=["staged", "failed"])
def test_one_word_per_attempt_and_then_silence(word: Step) -> None:
    assert nothing(*READY, word)


@pytest.mark.parametrize(
    "word",
    [offer_failed(1), offered(2, "c1"), offered(1, "c1", attempt=2), offered(1, "other")],
    ids=lambda w: type(w).__name__,
)
def test_nothing_is_staged_for_another_offer_or_a_failed_one(word: Event) -> None:
    assert nothing(*TARGETED, word)


def test_a_dead_trainers_ticket_is_not_tried() -> None:
    assert nothing(*READY, by("t2", trainer_joined()))
    assert isinstance(owed(*READY, by("t2", trainer_joined()), by("t2", offered(1, "c1"))), Stage)


def test_only_members_stage() -> None:
    assert nothing(*SERVING, joined("e2"), holds("e2", 0, "base"), *READY[len(SERVING) :], engine="e2")


def test_an_aborted_attempts_staging_is_owed_no_more_and_the_next_one_is_another() -> None:
    again = (*READY, unstaged("e0", 1), aborted(1, 1, E0, E1))
    assert nothing(*again)
    first = engine_debts(given(*READY).world, "e0")[0].key
    second = engine_debts(given(*again, offered(1, "c1", 2)).world, "e0")[0].key
    assert first != second
    assert isinstance(owed(*again, offered(1, "c1", 2)), Stage)
    assert isinstance(
        owed(*READY, staged("e1", 1, "c1"), aborted(1, 1, E0, E1), offered(1, "c1", 2), engine="e1"), Stage
    )


def test_a_halt_owes_nothing_to_anybody() -> None:
    """Nothing was paused, nothing is to be brought back; the staging is never swapped in: its load id is dead."""
    assert nothing(*STAGED, halted(1))
    assert nothing(*READY, halted(1), engine="e1")


def test_the_commit_owes_the_swap_under_one_key_whoever_swaps_first() -> None:
    assert owed(*COMMITTED) == HEAD_1
    keys = {engine_debts(given(*COMMITTED, *more).world, "e0")[0].key for more in ((), (swapped("e1", 1, "c1"),))}
    assert len(keys) == 1
    assert nothing(*SWAPPED)


def test_history_a_second_target_while_a_committed_staging_is_not_yet_swapped() -> None:
    """Section 8. The new ingress would write over what is still to be swapped in: the swap comes first."""
    late = (*COMMITTED, swapped("e1", 1, "c1"), *SECOND_READY)
    assert owed(*late) == HEAD_1
    assert isinstance(owed(*late, engine="e1"), Stage)
    assert isinstance(owed(*late, swapped("e0", 1, "c1")), Stage)
    assert isinstance(owed(*late, holds("e0", 1, "c1")), Stage)  # dropped, and loaded from the artifact instead


def test_a_fenced_target_while_a_committed_staging_is_not_yet_swapped_owes_a_fence() -> None:
    late = (*COMMITTED, *trained("c2", "c1", 2), target(2, "c2", E0, E1))
    assert owed(*late) == Fence("pub2", 1)


def test_a_cold_member_proves_the_head_before_it_stages() -> None:
    cold = (*SERVING, joined("e2"), *trained("c1"), beside(1, "c1", E0, E1, m("e2")), offered(1, "c1"))
    assert owed(*cold, engine="e2") == VerifyHead(L(0), digest("base"), blob("base"))
    assert isinstance(owed(*cold, holds("e2", 0, "base"), engine="e2"), Stage)


def test_an_engine_that_dies_after_the_commit_is_brought_up_from_the_artifact() -> None:
    """Row "engine after 8": the staging died with its boot."""
    assert owed(*COMMITTED, by("e0.2", joined("e0")), boot="e0.2") == HEAD_1


def test_an_engine_that_dies_before_the_commit_is_no_member_until_an_attempt_names_it() -> None:
    again = (*READY, by("e0.2", joined("e0")))
    assert owed(*again, boot="e0.2") == VerifyHead(L(0), digest("base"), blob("base"))
    held = (*again, by("e0.2", holds("e0", 0, "base")))
    assert nothing(*held, boot="e0.2")
    named = (*held, aborted(1, 1, m("e0", 2), E1, excluded=(E0,)), offered(1, "c1", 2))
    assert isinstance(owed(*named, boot="e0.2"), Stage)


def test_an_engine_excluded_while_it_stages_retires() -> None:
    assert isinstance(owed(*READY, excluded("e0")), Retire)


# -- what publishers owe


def test_the_configuration_names_the_mode() -> None:
    assert check(Config(publication=Publication(mode="staged"))).policy().mode == "staged"
    assert Config().policy().mode == "fenced"
    with pytest.raises(Rejected, match=r"publication\.mode is 'half'; expected fenced or staged"):
        check(Config(publication=Publication(mode="half")))


def test_row_5_the_policy_decides_the_mode() -> None:
    event = owes(*SELECTED)
    assert isinstance(event, TargetPersisted) and event.mode == "staged"
    event = owes(*SELECTED, policy=Policy())
    assert isinstance(event, TargetPersisted) and event.mode == "fenced"


def test_a_mode_that_an_engine_cannot_take_is_refused_before_anybody_is_paused() -> None:
    """Invariant 10: traffic never notices; the refusal names who can and who cannot."""
    history = (*SERVING, joined("e2", modes=("fenced",)), holds("e2", 0, "base"), *trained("c1"))
    event = owes(*history)
    assert isinstance(event, PublicationRefused) and event.reason == "mode"
    assert event.detail.startswith("mode staged: ['e0', 'e1'] can, refused by ['e2']")
    given(*history).when(event).then(counts, serving("e0", "e1", "e2"))


def test_what_joined_before_there_were_modes_can_be_fenced_and_no_more() -> None:
    old = msgspec.json.decode(b'{"engine":"e0","url":"u","backend":"torch","accepts":["tcp"]}', type=type(joined("e0")))
    history = (*SERVING[:3], old, holds("e0", 0, "base"), *trained("c1"))
    event = owes(*history)
    assert isinstance(event, PublicationRefused) and event.reason == "mode"
    assert isinstance(owes(*history, policy=Policy()), TargetPersisted)


def test_row_8_the_publisher_commits_when_the_staged_set_is_the_membership() -> None:
    assert owes(*READY, staged("e0", 1, "c1")) is None
    event = owes(*STAGED)
    assert isinstance(event, ReleaseCommitted)
    seqs = [r.seq for r in given(*STAGED).scribe.log if r.name == "EngineStaged"]
    assert [(e.engine, e.boot, e.seq, e.manifest) for e in event.evidence] == [
        ("e0", "e0.1", seqs[0], digest("c1")),
        ("e1", "e1.1", seqs[1], digest("c1")),
    ]


def test_nobody_has_to_stop_so_nobody_is_guilty_of_not_stopping() -> None:
    patient = Policy(mode="staged", deadlines=Deadlines(sender_s=100.0))
    assert owes(*TARGETED, after_s=31, policy=patient) is None


def test_a_sender_that_offers_nothing_is_guilty_alone() -> None:
    assert owes(*TARGETED, after_s=29) is None
    event = aborts(*TARGETED, after_s=31)
    assert (event.reason, event.excluded, event.members) == ("sender_deadline", (), (E0, E1))


def test_the_deadline_of_staging_counts_from_the_senders_word() -> None:
    late = (*TARGETED, after(20, offered(1, "c1")), staged("e0", 1, "c1"))
    assert owes(*late, after_s=29) is None
    event = aborts(*late, after_s=31)
    assert (event.reason, event.excluded, event.members) == ("verify_deadline", (E1,), (E0,))


def test_where_some_member_staged_those_that_failed_are_guilty_and_else_nobody_is() -> None:
    assert owes(*READY, unstaged("e0", 1)) is None
    one = aborts(*READY, unstaged("e0", 1), staged("e1", 1, "c1"))
    assert (one.reason, one.excluded, one.members) == ("receiver_failed", (E0,), (E1,))
    none = aborts(*READY, unstaged("e0", 1), unstaged("e1", 1))
    assert (none.excluded, none.members) == ((), (E0, E1))
    given(*READY, unstaged("e0", 1), unstaged("e1", 1)).when(none).then(counts, serving("e0", "e1"))


def test_a_member_whose_process_ended_is_replaced_at_once() -> None:
    event = aborts(*READY, staged("e0", 1, "c1"), ComponentLost(component="e1", exit=-9))
    assert (event.reason, event.excluded, event.members) == ("member_lost", (E1,), (E0,))


def test_a_member_that_staged_and_died_has_staged() -> None:
    """Section 8, "a verification whose engine restarts before the commit": its new boot owes the head, as ever."""
    died = (*STAGED, by("e1.2", joined("e1")))
    assert isinstance(owes(*died), ReleaseCommitted)
    done = (*died, committed(1, "c1", E0, E1))
    given(*done).then(counts, serving())
    assert owed(*done, engine="e1", boot="e1.2") == HEAD_1


def test_the_next_attempt_names_nobody_who_cannot_stage() -> None:
    history = (*READY, joined("e2", modes=("fenced",)), unstaged("e0", 1), unstaged("e1", 1))
    assert aborts(*history).members == (E0, E1)


def test_a_hopeless_staging_is_halted_and_nobody_was_paused() -> None:
    third = (*READY, aborted(1, 1, E0, E1), aborted(1, 2, E0, E1), offered(1, "c1", 3))
    history = (*third, unstaged("e0", 1, 3), unstaged("e1", 1, 3))
    event = owes(*history)
    assert isinstance(event, PublicationHalted)
    given(*history).when(event).then(counts, serving("e0", "e1"), head(L(0)))


def test_a_rollback_is_staged_from_the_artifact() -> None:
    asked = (*SWAPPED, rollback(0, on=1))
    event = owes(*asked)
    assert isinstance(event, TargetPersisted)
    assert (event.mode, event.sender, event.transport, event.manifest) == (
        "staged",
        "artifact",
        "files",
        digest("base"),
    )
    targeted = (*asked, msgspec.structs.replace(event, publication="pub2"))
    assert owed(*targeted) == Stage("pub2", 1, L(2), digest("base"), "files", blob("base").digest, "", 10.0)
    words = tuple(msgspec.structs.replace(staged(e, 2, "base"), manifest=digest("base")) for e in ("e0", "e1"))
    assert isinstance(owes(*targeted, *words), ReleaseCommitted)
    given(*targeted, *words).then(serving("e0", "e1"), head(L(1)))


def test_a_rollback_in_a_mode_that_an_engine_cannot_take_is_refused() -> None:
    event = owes(*SWAPPED, joined("e2", modes=("fenced",)), rollback(0, on=1))
    assert isinstance(event, PublicationRefused)
    assert event.reason == "mode" and event.request > 0 and "refused by ['e2']" in event.detail


# -- what people see


def test_status_waits_for_the_stagings_and_for_no_fence() -> None:
    def on(*history: Step) -> object:
        found = given(*history)
        return status(found.world, found.now, Policy(mode="staged"))["waiting"]["on"]

    assert on(*TARGETED) == "the trainer"
    assert on(*READY, staged("e0", 1, "c1")) == "e1"
    assert on(*STAGED) == "a publisher"
    assert on(*COMMITTED, swapped("e0", 1, "c1")) == "e1"


def test_a_stale_boots_staging_is_void() -> None:
    found = given(*READY, by("e0.2", joined("e0"))).when(Said(staged("e0", 1, "c1"), "e0.1"))
    assert "not the family's newest" in found.outcome.why
