"""The base chain (protocol.md section 5): what a candidate stands on, whether that leads to the head, what comes next.

Knows: candidates, how each ended, and both ways to publish. Must not know: engines beyond their membership.
"""

from __future__ import annotations

import pytest

from reef_bus.core.effects import AssembleBatch, OfferWeights
from reef_bus.core.invariants import check
from reef_bus.core.world import can_still_reach, lag, reaches_head
from reef_bus.events import Event, PublicationRefused, TargetPersisted, TrainerRestored
from tests.facts import (
    E0,
    E1,
    REGISTERED,
    SERVING,
    L,
    S,
    digest,
    dispatched,
    evaluated,
    halted,
    joined,
    ready,
    refused,
    rejected,
    released,
    restored,
    selected,
    started,
    target,
    trained,
)
from tests.spec import Given, Step, contradicts, counts, fact, given, head, only, publisher_debts, trainer_debts

CHAIN: tuple[Step, ...] = (*SERVING, *trained("c1"), *trained("c2", "c1", 2), *trained("c3", "c2", 3))
"""Three candidates wait, each trained from the one before; base serves."""

OVERTAKEN: tuple[Step, ...] = (*CHAIN, refused("c1", "superseded"), refused("c2", "superseded"))


def owed(*history: Step, publish: str = "latest") -> Event:
    found = given(*history)
    return fact(publisher_debts(found.world, found.now, publish=publish))


def quiet(*history: Step, publish: str = "latest") -> bool:
    found = given(*history)
    return publisher_debts(found.world, found.now, publish=publish) == []


def refusal(event: Event) -> tuple[str, str]:
    assert isinstance(event, PublicationRefused), event
    return event.candidate, event.reason


def next_job(history: Given) -> Event | str:
    """What the trainer owes for its next job: a restore first, or a batch over the base that is returned."""
    (debt,) = [d for d in trainer_debts(history.world) if not isinstance(d.effect, OfferWeights)]
    return debt.effect.bases[0] if isinstance(debt.effect, AssembleBatch) else fact([debt])


# -- every candidate in its turn


def test_every_is_the_default_and_supersedes_nobody() -> None:
    event = owed(*CHAIN, publish="every")
    assert isinstance(event, TargetPersisted) and event.candidate == "c1"


def test_history_a_commit_of_n_while_n_plus_1_based_on_n_is_already_selected() -> None:
    """The trainer's incumbent stays where it is, and N+1 has its turn."""
    overlap = (*SERVING, *trained("c1"), *released(1, "c1", E0, E1)[:-1], *trained("c2", "c1", 2))
    commit = released(1, "c1", E0, E1)[-1]
    for publish in ("every", "latest"):
        event = owed(*overlap, commit, publish=publish)
        assert isinstance(event, TargetPersisted)
        assert (event.candidate, event.load_id, event.parent) == ("c2", L(2), L(1))
    assert next_job(given(*overlap, commit)) == "c2"


def test_a_halted_base_under_overlap_takes_what_stands_on_it_along() -> None:
    """c2 and c3 were trained while c1 was being published."""
    overlap = (*SERVING, *trained("c1"), target(1, "c1", E0, E1), *trained("c2", "c1", 2), *trained("c3", "c2", 3))
    for publish in ("every", "latest"):
        assert refusal(owed(*overlap, halted(1), publish=publish)) == ("c2", "base_lost")
        assert refusal(owed(*overlap, halted(1), refused("c2", "base_lost"), publish=publish)) == ("c3", "base_lost")
    assert next_job(given(*overlap, halted(1))) == TrainerRestored(scenario=S, load_id=L(0), candidate="base")


def test_a_job_over_a_base_that_was_lost_meanwhile_ends_base_lost() -> None:
    begun = (*SERVING, *trained("c1"), target(1, "c1", E0, E1), dispatched("j2", "c1", 2), started("j2"), halted(1))
    assert refusal(owed(*begun, ready("j2", "c2", "c1"), evaluated("c2"), selected("c2"))) == ("c2", "base_lost")


@pytest.mark.parametrize("reason", ["transport", "base_lost"])
def test_a_refusal_breaks_the_chain(reason: str) -> None:
    assert refusal(owed(*CHAIN, refused("c1", reason), publish="every")) == ("c2", "base_lost")
    given(*CHAIN, refused("c1", reason)).when(target(1, "c2", E0, E1)).then(contradicts("does not reach the head"))


def test_a_rejection_is_nobodys_base() -> None:
    history = given(*SERVING, *trained("c1"), *trained("c2", "c1", 2)[:4], rejected("c2"))
    assert next_job(history) == "c1"


# -- the latest


def test_latest_refuses_whom_a_selected_successor_overtook_and_targets_the_last() -> None:
    assert refusal(owed(*CHAIN)) == ("c1", "superseded")
    assert refusal(owed(*CHAIN, refused("c1", "superseded"))) == ("c2", "superseded")
    event = owed(*OVERTAKEN)
    assert isinstance(event, TargetPersisted)
    assert (event.candidate, event.load_id, event.parent, event.manifest) == ("c3", L(1), L(0), digest("c3"))
    given(*OVERTAKEN).when(event).then(counts)


def test_a_successor_counts_only_once_it_is_selected() -> None:
    for steps in range(5):
        event = owed(*SERVING, *trained("c1"), *trained("c2", "c1", 2)[:steps])
        assert isinstance(event, TargetPersisted) and event.candidate == "c1"
    event = owed(*SERVING, *trained("c1"), *trained("c2", "c1", 2)[:4], rejected("c2"))
    assert isinstance(event, TargetPersisted) and event.candidate == "c1"


def test_who_is_being_published_is_not_overtaken() -> None:
    open_ = (*SERVING, *trained("c1"), target(1, "c1", E0, E1), *trained("c2", "c1", 2), *trained("c3", "c2", 3))
    assert quiet(*open_)
    *_, commit = released(1, "c1", E0, E1)
    done = (*open_, *released(1, "c1", E0, E1)[1:-1], commit)
    assert refusal(owed(*done)) == ("c2", "superseded")


def test_candidates_that_wait_for_an_engine_are_overtaken_meanwhile() -> None:
    waiting = (*REGISTERED, *trained("c1"), *trained("c2", "c1", 2))
    assert refusal(owed(*waiting)) == ("c1", "superseded")
    assert quiet(*waiting, refused("c1", "superseded"))
    event = owed(*waiting, refused("c1", "superseded"), joined("e0"))
    assert isinstance(event, TargetPersisted) and event.candidate == "c2"


def test_who_was_superseded_is_never_published() -> None:
    given(*OVERTAKEN).when(target(1, "c1", E0, E1)).then(contradicts("candidate c1 was superseded"))


def test_a_chain_leads_to_the_head_through_superseded_candidates_only() -> None:
    given(*OVERTAKEN).when(target(1, "c3", E0, E1)).then(counts)
    given(*CHAIN, refused("c1", "superseded")).when(target(1, "c3", E0, E1)).then(contradicts("does not reach"))
    halfway = (*CHAIN, refused("c1", "transport"), refused("c2", "superseded"))
    given(*halfway).when(target(1, "c3", E0, E1)).then(contradicts("does not reach"))


def test_an_undecided_base_can_still_lead_to_the_head_but_does_not_yet() -> None:
    world = given(*CHAIN).world
    assert [reaches_head(world, c) for c in ("c1", "c2", "c3")] == [True, False, False]
    assert [can_still_reach(world, c) for c in ("c1", "c2", "c3")] == [True, True, True]
    world = given(*OVERTAKEN).world
    assert [reaches_head(world, c) for c in ("c2", "c3")] == [True, True]
    world = given(*CHAIN, refused("c1")).world
    assert [can_still_reach(world, c) for c in ("c1", "c2", "c3")] == [False, False, False]


def test_a_jumped_release_is_audited_as_well_as_folded() -> None:
    history = given(*OVERTAKEN, *released(1, "c3", E0, E1), *trained("c4", "c3", 4), *released(2, "c4", E0, E1))
    history.then(head(L(2)))
    found = check(history.scribe.log, [], None)
    assert [v.text for v in found.violations if "is quoted with" not in v.text] == []
    assert found.releases == 2


def test_staleness_counts_superseded_links_too() -> None:
    """Section 5: links in the base chain, committed or not."""
    world = given(*OVERTAKEN, *released(1, "c3", E0, E1)).world
    assert [lag(world, L(0), base, 3) for base in ("base", "c1", "c2", "c3")] == [0, 1, 2, 3]
    assert lag(world, L(0), "c3", 2) is None and lag(world, L(1), "c3", 0) == 0


# -- whom the trainer trains from


def test_the_next_base_is_the_latest_that_is_selected_whoever_was_overtaken() -> None:
    assert next_job(given(*CHAIN)) == next_job(given(*OVERTAKEN)) == "c3"
    assert next_job(given(*OVERTAKEN, *released(1, "c3", E0, E1))) == "c3"


def test_after_a_restore_training_goes_on_from_the_release_that_it_names() -> None:
    """c3 was lost; c2, which it had overtaken, will never serve, so nothing starts from there."""
    lost = (*OVERTAKEN, target(1, "c3", E0, E1), halted(1))
    history = given(*lost)
    owed_ = next_job(history)
    assert owed_ == TrainerRestored(scenario=S, load_id=L(0), candidate="base")
    assert isinstance(owed_, TrainerRestored)
    history.when(owed_).then(counts)
    assert next_job(history) == "base"


def test_a_restore_is_owed_once() -> None:
    lost = (*SERVING, *trained("c1"), target(1, "c1", E0, E1), halted(1), restored("base", 0))
    assert isinstance(only(trainer_debts(given(*lost).world)), AssembleBatch)
