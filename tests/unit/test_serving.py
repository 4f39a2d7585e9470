"""The serving rule (protocol.md section 4): who may generate, and who owes a proof of the head.

Knows: the rule's text. Must not know: how an engine stops, loads or hashes.
"""

from __future__ import annotations

import pytest

from reef_bus.core.effects import Fence, Retire, VerifyHead
from reef_bus.core.serving import may_generate, owes_head
from tests.facts import (
    E0,
    E1,
    REGISTERED,
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
    offered,
    released,
    selected,
    target,
    trained,
    trainer_joined,
    verified,
)
from tests.spec import Step, by, engine_debts, given, head, only, serving

TARGETED: tuple[Step, ...] = (*SERVING, *trained("c1"), target(1, "c1", E0, E1))
HALF: tuple[Step, ...] = (*TARGETED, fenced("e0", 1), fenced("e1", 1), offered(1, "c1"), verified("e0", 1, "c1"))


def test_cold_start_every_engine_proves_release_0_first() -> None:
    """Section 4: the first thing that engines do is to verify the base, and no publication is needed to begin."""
    world = given(*REGISTERED, joined("e0")).then(serving(), head("inc:0"))
    assert only(engine_debts(world, "e0")) == VerifyHead("inc:0", digest("base"), blob("base"))
    given(*REGISTERED, joined("e0")).when(holds("e0", 0, "base")).then(serving("e0"))


def test_an_engine_that_joined_before_registration_waits_and_then_owes_the_base() -> None:
    from tests.facts import opened, registered

    world = given(opened(), joined("e0")).then(serving())
    assert engine_debts(world, "e0") == []
    world = given(opened(), joined("e0"), trainer_joined(), registered()).then(serving())
    assert only(engine_debts(world, "e0")) == VerifyHead("inc:0", digest("base"), blob("base"))


@pytest.mark.parametrize(
    "proof",
    [holds("e0", 0, "base", manifest="other"), holds("e0", 5, "base"), failed("e0", 0, observed=digest("base"))],
    ids=["the right load id, another digest", "another load id, the right digest", "a failure"],
)
def test_only_load_id_and_digest_together_are_a_proof(proof: object) -> None:
    """Section 8: a head named with another digest."""
    world = given(*REGISTERED, joined("e0"), proof).then(serving())  # type: ignore[arg-type]
    assert isinstance(only(engine_debts(world, "e0")), VerifyHead)


def test_the_target_is_the_fence_and_the_commit_ends_it() -> None:
    """Events 5 and 8."""
    given(*SERVING, *trained("c1")).then(serving("e0", "e1"))
    given(*TARGETED).then(serving())
    given(*HALF, verified("e1", 1, "c1")).then(serving())
    given(*HALF, verified("e1", 1, "c1")).when(committed(1, "c1", E0, E1)).then(serving("e0", "e1"), head("inc:1"))


def test_after_a_halt_the_incumbent_returns_by_its_own_proof() -> None:
    """Attempts: serving is never held hostage. An engine that had not fenced yet still holds the incumbent."""
    given(*TARGETED, fenced("e0", 1)).when(halted(1)).then(serving("e1"), head("inc:0"))
    given(*TARGETED, fenced("e0", 1), halted(1)).when(holds("e0", 0, "base")).then(serving("e0", "e1"))


def test_a_fence_outlives_the_halt_until_the_engine_proves_what_it_holds() -> None:
    """Invariant 2."""
    world = given(*HALF, halted(1)).then(serving(), head("inc:0"))
    for engine in ("e0", "e1"):
        assert only(engine_debts(world, engine)) == VerifyHead("inc:0", digest("base"), blob("base"))


def test_a_proof_of_the_target_before_its_commit_serves_nothing() -> None:
    given(*HALF).then(serving())
    given(*HALF, aborted(1, 1, E0, E1)).then(serving())


def test_a_late_engine_outside_the_fence_is_brought_up_on_the_incumbent() -> None:
    """Not a member: it verifies the head and serves it, while the members are fenced; the commit makes it owe again."""
    late = (*TARGETED, joined("e2"))
    assert only(engine_debts(given(*late).world, "e2")) == VerifyHead("inc:0", digest("base"), blob("base"))
    given(*late).when(holds("e2", 0, "base")).then(serving("e2"))
    full = (*HALF, verified("e1", 1, "c1"), joined("e2"), holds("e2", 0, "base"))
    world = given(*full).when(committed(1, "c1", E0, E1)).then(serving("e0", "e1"))
    assert only(engine_debts(world, "e2")) == VerifyHead("inc:1", digest("c1"), blob("c1"))


def test_the_next_attempt_covers_an_engine_that_joined_meanwhile() -> None:
    """Attempts: the next membership is all joined boots now; in fenced mode that ends their catch-up."""
    late = (*TARGETED, joined("e2"), holds("e2", 0, "base"), aborted(1, 1, E0, E1, m("e2")))
    assert only(engine_debts(given(*late).then(serving()), "e2")) == Fence("pub1", 2)


def test_an_excluded_boot_is_over_and_its_successor_begins_anew() -> None:
    world = given(*SERVING, excluded("e0")).then(serving("e1"))
    assert isinstance(only(engine_debts(world, "e0")), Retire)
    again = (*SERVING, excluded("e0"), by("e0.2", joined("e0")))
    assert isinstance(only(engine_debts(given(*again).then(serving("e1")), "e0", "e0.2")), VerifyHead)
    given(*again).when(holds("e0", 0, "base")).then(serving("e0", "e1"))


def test_an_excluded_boot_that_proves_the_head_stays_out() -> None:
    given(*SERVING, excluded("e0")).when(holds("e0", 0, "base")).then(serving("e1"))


def test_who_left_serves_nothing() -> None:
    given(*SERVING).when(left("e0")).then(serving("e1"))


def test_a_new_boot_inherits_nothing() -> None:
    """Row "engine after 8": a new boot joins and verifies the head."""
    done = (*SERVING, *trained("c1"), *released(1, "c1", E0, E1))
    world = given(*done).when(by("e0.2", joined("e0"))).then(serving("e1"))
    assert not may_generate(world, "e0", "e0.1") and not may_generate(world, "e0", "e0.2")
    assert only(engine_debts(world, "e0", "e0.2")) == VerifyHead("inc:1", digest("c1"), blob("c1"))
    given(*done, by("e0.2", joined("e0"))).when(holds("e0", 1, "c1")).then(serving("e0", "e1"))


def test_a_stale_observation_may_take_trust_away() -> None:
    """Invariant 11."""
    world = given(*SERVING).when(failed("e0", 9)).then(serving("e1"))
    assert isinstance(only(engine_debts(world, "e0")), VerifyHead)


def test_a_refusal_pauses_nobody() -> None:
    """Invariant 10."""
    from tests.facts import refused

    given(*SERVING, *trained("c1")).when(refused("c1")).then(serving("e0", "e1"), head("inc:0"))


def test_the_debt_has_one_key_per_reason_and_a_new_one_after_a_failed_try() -> None:
    """Section 4: its key is the latest event that made it owed, or that ended an earlier try."""
    start = (*REGISTERED, joined("e0"))
    key = [debt.key for debt in engine_debts(given(*start).world, "e0")]
    assert key == [debt.key for debt in engine_debts(given(*start, joined("e1"), *trained("c1")).world, "e0")]
    assert key != [debt.key for debt in engine_debts(given(*start, failed("e0", 0)).world, "e0")]


def test_selection_alone_changes_nothing_that_serves() -> None:
    given(*SERVING, *trained("c1")[:-1]).when(selected("c1")).then(serving("e0", "e1"), head("inc:0"))


def test_under_a_fence_no_proof_of_the_head_is_owed() -> None:
    def owes(*history: Step) -> int:
        world = given(*history).world
        return owes_head(world, world.membership.engines["e0"])

    assert owes(*TARGETED, fenced("e0", 1)) == 0
    assert owes(*TARGETED, fenced("e0", 1), halted(1)) == len(TARGETED) + 2
