"""What a trainer's boot owes, row by row (protocol.md sections 5 and 8).

Knows: the trainer's rows. Must not know: how anything is trained.
"""

from __future__ import annotations

import pytest

from reef_bus.core.effects import Append, AssembleBatch, Decide, Evaluate, Join, OfferWeights, Register, Retire, Train
from reef_bus.core.reactions import trainer
from reef_bus.core.world import World
from tests.facts import (
    E0,
    E1,
    REGISTERED,
    SERVING,
    aborted,
    blob,
    committed,
    digest,
    dispatched,
    dropped,
    evaluated,
    fenced,
    halted,
    offer_failed,
    offered,
    opened,
    ready,
    refused,
    rejected,
    released,
    restored,
    selected,
    started,
    target,
    trained,
    trainer_joined,
    verified,
)
from tests.spec import Step, by, given, only, trainer_debts

TARGETED: tuple[Step, ...] = (*SERVING, *trained("c1"), target(1, "c1", E0, E1))


def owes(*history: Step, boot: str = "t1") -> dict[str, object]:
    return {debt.key: debt.effect for debt in trainer_debts(given(*history).world, boot)}


def jobs(*history: Step, boot: str = "t1") -> object:
    """What is owed beside the offer of an open publication."""
    debts = [d for d in trainer_debts(given(*history).world, boot) if not isinstance(d.effect, OfferWeights)]
    return only(debts)


def test_nothing_before_the_log_is_open() -> None:
    assert trainer_debts(World()) == []


def test_a_new_boot_joins_once_and_a_replaced_one_retires() -> None:
    assert isinstance(jobs(opened()), Join)
    assert isinstance(jobs(*REGISTERED, boot="t2"), Join)
    assert isinstance(jobs(*REGISTERED, by("t2", trainer_joined()), boot="t1"), Retire)


def test_the_first_boot_registers_the_base_model_and_no_later_one_does() -> None:
    assert isinstance(jobs(opened(), trainer_joined()), Register)
    assert isinstance(jobs(*REGISTERED, by("t2", trainer_joined()), boot="t2"), AssembleBatch)


def test_row_1_no_job_is_open_so_a_batch_is_owed() -> None:
    assert jobs(*REGISTERED) == AssembleBatch(("base",), 1, {})
    assert jobs(*REGISTERED, *trained("c1")) == AssembleBatch(("c1",), 2, {"": blob("batch-job-c1")})


def test_row_2_the_start_is_a_fact_before_the_first_step() -> None:
    assert jobs(*REGISTERED, dispatched("j")) == Append(started("j"))


def test_row_2_the_boot_that_started_trains_from_the_jobs_base() -> None:
    effect = jobs(*REGISTERED, *trained("c1"), dispatched("j", "c1", 2), started("j"))
    assert isinstance(effect, Train)
    assert (effect.job.id, effect.job.attempt, effect.job.batch) == ("j", 1, blob("batch-j"))
    assert (effect.base.id, effect.base.weights, effect.base.optimizer) == ("c1", blob("c1"), blob("optimizer-c1"))


def test_row_3_the_candidate_is_evaluated_and_then_decided() -> None:
    begun = (*REGISTERED, dispatched("j"), started("j"), ready("j", "c1"))
    effect = jobs(*begun)
    assert isinstance(effect, Evaluate) and effect.candidate.id == "c1"
    effect = jobs(*begun, evaluated("c1"))
    assert isinstance(effect, Decide) and effect.candidate.id == "c1" and effect.metrics == {"reward": 1.0}


def test_row_4_after_the_decision_the_next_batch_is_owed() -> None:
    begun = (*REGISTERED, dispatched("j"), started("j"), ready("j", "c1"), evaluated("c1"))
    assert jobs(*begun, selected("c1")) == AssembleBatch(("c1",), 2, {"": blob("batch-j")})
    assert jobs(*begun, rejected("c1")) == AssembleBatch(("base",), 2, {"": blob("batch-j")})
    assert jobs(*REGISTERED, dispatched("j"), dropped("j")) == AssembleBatch(("base",), 2, {"": blob("batch-j")})


# -- section 8: the trainer stops


def test_stopped_after_1_the_stored_payload_is_trained() -> None:
    again = (*REGISTERED, dispatched("j"), by("t2", trainer_joined()))
    assert jobs(*again, boot="t2") == Append(started("j"))
    effect = jobs(*again, started("j"), boot="t2")
    assert isinstance(effect, Train) and effect.job.batch == blob("batch-j")


def test_stopped_after_2_the_next_attempt_is_the_next_boots() -> None:
    again = (*REGISTERED, dispatched("j"), started("j"), by("t2", trainer_joined()))
    assert jobs(*again, boot="t2") == Append(started("j", 2))
    effect = jobs(*again, started("j", 2), boot="t2")
    assert isinstance(effect, Train) and effect.job.attempt == 2


@pytest.mark.parametrize("done", [0, 1], ids=["after ready", "after evaluated"])
def test_stopped_after_3_evaluate_decide_and_never_train_again(done: int) -> None:
    history = (*REGISTERED, dispatched("j"), started("j"), ready("j", "c1"), *([evaluated("c1")] * done))
    effect = jobs(*history, by("t2", trainer_joined()), boot="t2")
    assert isinstance(effect, Decide if done else Evaluate)


def test_stopped_between_jobs_a_new_boot_goes_on_from_the_same_base() -> None:
    assert jobs(*REGISTERED, *trained("c1"), by("t2", trainer_joined()), boot="t2") == AssembleBatch(
        ("c1",), 2, {"": blob("batch-job-c1")}
    )


# -- row 6: the sender


def test_row_6_an_open_publication_owes_an_offer_per_attempt() -> None:
    first, second = owes(*TARGETED), owes(*TARGETED, aborted(1, 1, E0, E1))
    (key,) = [k for k, effect in first.items() if isinstance(effect, OfferWeights)]
    (again,) = [k for k, effect in second.items() if isinstance(effect, OfferWeights)]
    assert key != again
    offer = first[key]
    assert isinstance(offer, OfferWeights)
    assert (offer.publication.load_id, offer.publication.manifest, offer.publication.attempt) == (
        "inc:1",
        digest("c1"),
        1,
    )


def test_the_offer_stays_open_as_long_as_its_attempt() -> None:
    """Its scope is the ticket's life: the debt may not vanish with the fact."""
    key = next(k for k, effect in owes(*TARGETED).items() if isinstance(effect, OfferWeights))
    assert key in owes(*TARGETED, fenced("e0", 1), offered(1, "c1"))
    assert key in owes(*TARGETED, offered(1, "c1"), fenced("e0", 1), fenced("e1", 1), verified("e0", 1, "c1"))
    assert key in owes(*TARGETED, offer_failed(1))
    assert key not in owes(*TARGETED, halted(1))


def test_whichever_trainer_boot_lives_offers() -> None:
    """Row "sender at 6-7": a new boot owes the same attempt's offer."""
    again = owes(*TARGETED, offered(1, "c1"), by("t2", trainer_joined()), boot="t2")
    assert any(isinstance(effect, OfferWeights) for effect in again.values())


# -- base chain and overlap


def test_overlap_a_job_may_start_from_n_while_n_publishes() -> None:
    assert jobs(*TARGETED) == AssembleBatch(("c1",), 2, {"": blob("batch-job-c1")})


def test_the_wait_for_a_batch_survives_what_happens_beside_it() -> None:
    """Rule 3: asked again, the same debt has the same key, else a batch would be assembled twice."""

    def key(*history: Step) -> str:
        return next(k for k, effect in owes(*history).items() if isinstance(effect, AssembleBatch))

    full = (*SERVING, *trained("c1"), *released(1, "c1", E0, E1))
    keys = {key(*full[:length]) for length in range(12, len(full) + 1)}
    assert len(keys) == 1


@pytest.mark.parametrize("end", [refused("c1"), halted(1)], ids=["refused", "halted"])
def test_a_base_that_cannot_reach_the_head_owes_a_restore_first(end: Step) -> None:
    """Base chain: it owes TrainerRestored{head} before its next dispatch."""
    history = (*SERVING, *trained("c1")) if end == refused("c1") else TARGETED
    assert jobs(*history, end) == Append(restored("base", 0))
    assert jobs(*history, end, restored("base", 0)) == AssembleBatch(("base",), 2, {"": blob("batch-job-c1")})


def test_a_rejection_leaves_the_base_where_it_was() -> None:
    history = (*REGISTERED, *trained("c1"), dispatched("j2", "c1", 2), started("j2"), ready("j2", "c2", "c1"))
    assert jobs(*history, evaluated("c2"), rejected("c2")) == AssembleBatch(("c1",), 3, {"": blob("batch-j2")})


def test_a_restore_that_names_an_older_head_pays_nothing() -> None:
    """Base chain, last sentence."""
    lost = (
        *(*SERVING, *trained("c1"), *released(1, "c1", E0, E1)),
        *(*trained("c2", "c1", 2), refused("c2")),
    )
    assert jobs(*lost) == Append(restored("c1", 1))
    assert jobs(*lost, restored("base", 0)) == Append(restored("c1", 1))
    assert jobs(*lost, restored("c1", 1)) == AssembleBatch(("c1",), 3, {"": blob("batch-job-c2")})


def test_a_halt_takes_the_candidates_on_top_with_it() -> None:
    """c2 is based on c1: once c1 is halted, neither can reach the head."""
    history = (*TARGETED, *trained("c2", "c1", 2), halted(1))
    assert jobs(*history) == Append(restored("base", 0))


def test_history_a_commit_of_n_while_n_plus_1_is_selected_moves_no_base() -> None:
    """A commit moves the incumbent only if its base can no longer reach the head."""
    members = (fenced("e0", 1), fenced("e1", 1), offered(1, "c1"), verified("e0", 1, "c1"), verified("e1", 1, "c1"))
    history = (*TARGETED, *trained("c2", "c1", 2), *members, committed(1, "c1", E0, E1))
    assert jobs(*history) == AssembleBatch(("c2",), 3, {"": blob("batch-job-c2")})


def test_history_a_refusal_under_overlap() -> None:
    """c2 started from c1 while c1 waited; c1 is refused; c2 still closes, and then a restore is owed."""
    running = (*SERVING, *trained("c1"), dispatched("j2", "c1", 2), started("j2"), refused("c1"))
    assert isinstance(jobs(*running), Train)
    assert jobs(*running, ready("j2", "c2", "c1"), evaluated("c2"), selected("c2")) == Append(restored("base", 0))


def test_the_trainer_asks_nothing_of_engines() -> None:
    """With no engine at all the trainer goes on; candidates wait."""
    assert len(trainer(given(*REGISTERED, *trained("c1")).world, _me())) == 1


def _me() -> object:
    from reef_bus.core.effects import Me

    return Me("trainer", "t1")
