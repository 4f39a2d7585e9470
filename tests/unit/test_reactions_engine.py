"""What the agent of one engine owes, row by row (protocol.md sections 4, 5 and 8).

Knows: the engine's rows. Must not know: how an engine stops, receives or hashes.
"""

from __future__ import annotations

import pytest

from reef_bus.core.effects import Fence, Join, Receive, Retire, VerifyHead
from reef_bus.core.world import World
from tests.facts import (
    E0,
    E1,
    SERVING,
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
    target,
    trained,
    trainer_joined,
    verified,
)
from tests.spec import Step, by, engine_debts, given, only

TARGETED: tuple[Step, ...] = (*SERVING, *trained("c1"), target(1, "c1", E0, E1))
FENCED: tuple[Step, ...] = (*TARGETED, fenced("e0", 1), fenced("e1", 1))
READY: tuple[Step, ...] = (*FENCED, offered(1, "c1"))


def owed(*history: Step, engine: str = "e0", boot: str = "") -> object:
    return only(engine_debts(given(*history).world, engine, boot))


def nothing(*history: Step, engine: str = "e0", boot: str = "") -> bool:
    return engine_debts(given(*history).world, engine, boot) == []


def test_nothing_before_the_log_is_open() -> None:
    assert engine_debts(World(), "e0") == []


def test_a_new_boot_joins_and_every_older_one_retires() -> None:
    assert isinstance(owed(opened()), Join)
    assert isinstance(owed(*SERVING, boot="e0.2"), Join)
    assert isinstance(owed(*SERVING, by("e0.2", joined("e0"))), Retire)
    assert isinstance(owed(*SERVING, excluded("e0")), Retire)
    assert isinstance(owed(*SERVING, left("e0")), Retire)


def test_a_boot_excluded_before_it_joined_is_not_revived() -> None:
    """A boot joins once; excluded, it exits."""
    assert isinstance(owed(*SERVING, excluded("e0"), by("e0.2", joined("e0"))), Retire)


def test_row_6_the_target_owes_a_fence() -> None:
    assert owed(*TARGETED) == Fence("pub1", 1)
    assert owed(*TARGETED, fenced("e1", 1)) == Fence("pub1", 1)
    assert nothing(*TARGETED, fenced("e0", 1))


def test_row_6_each_attempt_owes_its_own_fence() -> None:
    assert owed(*READY, verified("e0", 1, "c1"), aborted(1, 1, E0, E1)) == Fence("pub1", 2)
    first = engine_debts(given(*TARGETED).world, "e0")[0].key
    second = engine_debts(given(*FENCED, aborted(1, 1, E0, E1)).world, "e0")[0].key
    assert first != second


def test_row_7_a_receiver_begins_when_every_member_is_fenced_and_the_sender_is_ready() -> None:
    assert nothing(*TARGETED, fenced("e0", 1), offered(1, "c1"))
    assert nothing(*FENCED)
    effect = owed(*READY)
    assert isinstance(effect, Receive)
    assert (effect.publication, effect.attempt, effect.load_id, effect.manifest) == ("pub1", 1, "inc:1", digest("c1"))
    assert (effect.transport, effect.address, effect.token, effect.stall_s) == ("tcp", "127.0.0.1:1", "secret", 10.0)
    assert owed(*READY, engine="e1") == effect


def test_row_7_the_order_of_the_offer_and_the_fences_does_not_matter() -> None:
    assert owed(*TARGETED, offered(1, "c1"), fenced("e0", 1), fenced("e1", 1)) == owed(*READY)


@pytest.mark.parametrize(
    "word", [offered(1, "c1", attempt=2), offered(2, "c1"), offer_failed(1)], ids=["attempt", "publication", "failed"]
)
def test_an_offer_of_something_else_starts_nothing(word: Step) -> None:
    assert nothing(*FENCED, word)


@pytest.mark.parametrize("field", [{"load_id": "inc:7"}, {"manifest": "other"}])
def test_an_offer_must_echo_the_target(field: dict[str, str]) -> None:
    """Row 6: SenderReady echoes load id and digest; another content is never let into fenced memory."""
    import msgspec

    assert nothing(*FENCED, msgspec.structs.replace(offered(1, "c1"), **field))


@pytest.mark.parametrize("word", [verified("e0", 1, "c1"), failed("e0", 1)], ids=["verified", "failed"])
def test_row_7_one_report_per_attempt_and_then_silence(word: Step) -> None:
    assert nothing(*READY, word)


def test_row_7_an_offer_of_the_next_attempt_starts_the_next_receive() -> None:
    again = (*READY, failed("e0", 1), aborted(1, 1, E0, E1), fenced("e0", 1, 2), fenced("e1", 1, 2))
    assert nothing(*again)
    effect = owed(*again, offered(1, "c1", 2))
    assert isinstance(effect, Receive) and effect.attempt == 2
    assert engine_debts(given(*READY).world, "e0")[0].key != (
        engine_debts(given(*again, offered(1, "c1", 2)).world, "e0")[0].key
    )


def test_row_8_after_the_commit_a_member_owes_nothing() -> None:
    done = (*READY, verified("e0", 1, "c1"), verified("e1", 1, "c1"))
    assert nothing(*done)
    assert nothing(*done, committed(1, "c1", E0, E1))


def test_a_member_whose_memory_was_written_again_since_its_report_owes_the_head_after_the_commit() -> None:
    """Section 4: it "has written nothing to its weights since". A second ticket of the same attempt (of a new trainer
    boot, say) starts a second receive while the first one's report is on its way; the report counts all the same."""
    done = (*READY, verified("e0", 1, "c1"), verified("e1", 1, "c1"))
    assert engine_debts(given(*done).world, "e0", written=True) == []
    after = given(*done, committed(1, "c1", E0, E1)).world
    assert only(engine_debts(after, "e0", written=True)) == VerifyHead("inc:1", digest("c1"), blob("c1"))


def test_a_halt_owes_the_incumbent_to_whoever_fenced() -> None:
    """Attempts: by section 4 the incumbent is back without anyone's help."""
    halt = (*TARGETED, fenced("e0", 1), halted(1))
    assert owed(*halt) == VerifyHead("inc:0", digest("base"), blob("base"))
    assert nothing(*halt, engine="e1")


def test_an_engine_guilty_at_a_halt_retires() -> None:
    assert isinstance(owed(*TARGETED, halted(1, excluded=(E0,))), Retire)


def test_a_target_ends_its_members_catch_up() -> None:
    """Row 5: in fenced mode it ends its members' catch-up."""
    cold = (*SERVING, joined("e2"), *trained("c1"))
    assert isinstance(owed(*cold, engine="e2"), VerifyHead)
    assert owed(*cold, target(1, "c1", E0, E1, m("e2")), engine="e2") == Fence("pub1", 1)


def test_an_engine_outside_the_membership_catches_up_while_others_are_fenced() -> None:
    assert isinstance(owed(*TARGETED, joined("e2"), engine="e2"), VerifyHead)
    assert nothing(*TARGETED, joined("e2"), holds("e2", 0, "base"), engine="e2")


def test_stopped_after_8_a_new_boot_verifies_the_head() -> None:
    """Row "engine after 8"."""
    done = (*READY, verified("e0", 1, "c1"), verified("e1", 1, "c1"), committed(1, "c1", E0, E1))
    assert owed(*done, by("e0.2", joined("e0")), boot="e0.2") == VerifyHead("inc:1", digest("c1"), blob("c1"))


def test_stopped_at_6_or_7_a_new_boot_catches_up_outside_the_fence() -> None:
    """The old boot was the member; the new one is none until an attempt names it."""
    assert owed(*READY, by("e0.2", joined("e0")), boot="e0.2") == VerifyHead("inc:0", digest("base"), blob("base"))
    again = (*READY, by("e0.2", joined("e0")), aborted(1, 1, m("e0", 2), E1, excluded=(E0,)))
    assert owed(*again, boot="e0.2") == Fence("pub1", 2)


def test_history_a_lost_verification_at_cold_start_keeps_its_key() -> None:
    """The effect ran, its append's outcome is unknown: whatever others write, the debt's key stays."""
    cold = (*SERVING, joined("e2"))
    key = engine_debts(given(*cold).world, "e2")[0].key
    noise = (*trained("c1"), by("t2", trainer_joined()), joined("e3"), excluded("e0"))
    assert engine_debts(given(*cold, *noise).world, "e2")[0].key == key
    assert engine_debts(given(*cold, holds("e2", 0, "base")).world, "e2") == []


def test_a_stalled_boot_of_a_dead_attempt_owes_nothing_for_it() -> None:
    """Section 8: bytes of a dead attempt. The debt of attempt 1 is gone the moment attempt 2 is on the log."""
    keys = {d.key for d in engine_debts(given(*READY).world, "e0")}
    assert keys.isdisjoint(d.key for d in engine_debts(given(*READY, aborted(1, 1, E0, E1)).world, "e0"))
    assert keys.isdisjoint(d.key for d in engine_debts(given(*READY, halted(1)).world, "e0"))


def test_a_dead_trainers_ticket_is_not_tried() -> None:
    """Row 6: by whichever trainer boot lives. The ticket of a replaced boot leads nowhere."""
    late = (*TARGETED, fenced("e0", 1), offered(1, "c1"), by("t2", trainer_joined()), fenced("e1", 1))
    assert nothing(*late)
    assert isinstance(owed(*late, by("t2", offered(1, "c1"))), Receive)


def test_a_join_reacts_to_the_event_that_opened_the_log() -> None:
    assert [debt.cause for debt in engine_debts(given(opened()).world, "e0")] == [1]
