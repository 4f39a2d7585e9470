"""The histories that protocol.md says to simulate first, each by a script, under several schedules.

Knows: when to strike, and what the log must show afterwards. Must not know: how any of it is decided.
What concerns rollback, staged mode and adapters waits for them.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from reef_bus.events import (
    CandidateSelected,
    EngineExcluded,
    Event,
    PublicationHalted,
    ReceiverVerified,
    Recorded,
    ReleaseCommitted,
    TargetPersisted,
    TransferAborted,
)
from tests.simulation.deployment import Deployment, Outcome, Prepare, Shape, simulate
from tests.simulation.faults import Faults

SEEDS = range(4)

pytestmark = pytest.mark.parametrize("seed", SEEDS)


class Run:
    """A scripted deployment that ran to its end, in which nothing happened that must not."""

    def __init__(self, seed: int, script: Callable[[Deployment], object], shape: Shape | None = None, **rates: float):
        self.deployment: Deployment
        self.outcome = simulate(seed, Faults(**rates), shape or Shape(), self._keep(script))
        assert self.outcome.violation == "", self.told()

    def _keep(self, script: Callable[[Deployment], object]) -> Prepare:
        def prepare(deployment: Deployment) -> None:
            self.deployment = deployment
            script(deployment)

        return prepare

    def all(self, kind: type[Event], boot: str = "") -> list[Recorded]:
        """The events that count, by that boot if one is given."""
        return [r for r in self.deployment.truth.log if isinstance(r.event, kind) and boot in ("", r.boot)]

    def told(self) -> str:
        return "\n".join([self.outcome.violation, *(f"{when:9.4f} {line}" for when, line in self.outcome.story)])


def ended(outcome: Outcome) -> dict[str, int]:
    return dict(outcome.ended)


# -- memberships


def test_when_the_only_engine_dies_with_its_supervisor_nothing_is_committed_without_a_member(seed: int) -> None:
    """Only a publisher that somebody started by hand lives on."""

    def script(d: Deployment) -> None:
        d.when("ScenarioRegistered", lambda: d.start("publisher"))
        d.when("TargetPersisted", lambda: d.current("supervisor").kill())

    run = Run(seed, script, Shape(engines=1, jobs=2))
    assert next(r.event.reason for r in run.all(PublicationHalted)).endswith("and no engine is left")  # type: ignore[attr-defined]
    assert all(r.event.members for r in run.all(TargetPersisted))  # type: ignore[attr-defined]
    assert all(r.event.evidence for r in run.all(ReleaseCommitted))  # type: ignore[attr-defined]


def test_an_excluded_engine_that_finishes_after_all_counts_for_nothing_and_serves_only_as_another_boot(
    seed: int,
) -> None:
    """It is stopped as its transfer begins, and goes on when the release is committed without it."""
    run = Run(seed, lambda d: d.when("SenderReady", lambda: d.pause("engine-1", 6.0)))
    aborted, committed = run.all(TransferAborted)[0], run.all(ReleaseCommitted)[0]
    assert [m.boot for m in aborted.event.excluded] == ["engine-1.1"]  # type: ignore[attr-defined]
    assert [e.boot for e in committed.event.evidence] == ["engine-0.1"]  # type: ignore[attr-defined]
    assert run.all(ReceiverVerified, boot="engine-1.2") and ended(run.outcome) == {"committed": 3}


def test_a_member_that_dies_right_after_the_commit_comes_back_with_the_new_release(seed: int) -> None:
    run = Run(seed, lambda d: d.when("ReleaseCommitted", lambda: d.current("engine-0").kill()))
    first = run.all(ReleaseCommitted)[0]
    back = run.all(ReceiverVerified, boot="engine-0.2")
    assert back and all(r.seq > first.seq for r in back)
    assert ended(run.outcome) == {"committed": 3}


def test_a_member_that_dies_between_its_verification_and_the_commit_never_serves_what_it_verified(seed: int) -> None:
    """Its word still counts: the release may be committed by the memory of a boot that is gone; its successor loads."""
    run = Run(seed, lambda d: d.when("ReceiverVerified", lambda: d.current("engine-0").kill(), 2, boot="engine-0.1"))
    assert run.all(ReceiverVerified, boot="engine-0.2")
    assert ended(run.outcome) == {"committed": 3}


def test_one_dead_engine_costs_one_attempt_and_not_every_candidate(seed: int) -> None:
    """It stops for a minute, and neither answers nor ends."""

    run = Run(seed, lambda d: d.when("TargetPersisted", lambda: d.pause("engine-1", 60.0)))
    assert ended(run.outcome) == {"committed": 3}
    assert len(run.all(TransferAborted)) == 1


# -- appends


@pytest.mark.parametrize("event", ["TargetPersisted", "ReleaseCommitted", "EngineFenced", "SenderReady", "JobStarted"])
def test_after_an_append_that_is_stored_and_void_its_writer_goes_on(seed: int, event: str) -> None:
    """It arrives late and is compared with nothing, as by another spelling of the filter."""
    run = Run(seed, lambda d: d.nemesis.orders.append((event, "misspelt")), Shape(semantics="cluster"))
    assert ended(run.outcome)["committed"] == 3


@pytest.mark.parametrize("fate", ["lost", "lost_ack", "late", "duplicate"])
def test_a_verification_lost_at_a_cold_start_is_said_again(seed: int, fate: str) -> None:
    run = Run(seed, lambda d: d.nemesis.orders.extend([("ReceiverVerified", fate)] * 3))
    assert ended(run.outcome) == {"committed": 3}
    at_start = [r.boot for r in run.all(ReceiverVerified) if not r.event.publication]  # type: ignore[attr-defined]
    assert at_start and len(at_start) == len(set(at_start)) and set(at_start) <= {"engine-0.1", "engine-1.1"}


@pytest.mark.parametrize("at", ["CandidateSelected", "TargetPersisted", "EngineFenced", "SenderReady"])
def test_a_publisher_that_is_behind_targets_aborts_and_judges_nothing_wrongly(seed: int, at: str) -> None:
    """One publisher sees everything three seconds late: later than every deadline."""

    def script(d: Deployment) -> None:
        d.when(at, lambda: setattr(d.current("publisher").link, "lag", 3.0))

    run = Run(seed, script)
    assert ended(run.outcome) == {"committed": 3}
    assert run.all(TransferAborted) == [] and run.all(EngineExcluded) == []


# -- senders, receivers


def test_a_sender_that_dies_after_one_receiver_failed_is_replaced_and_the_release_is_made(seed: int) -> None:
    run = Run(
        seed,
        lambda d: (
            d.nemesis.orders.append(("receive", "corrupt")),
            d.when("ReceiverFailed", lambda: d.current("trainer").kill()),
        ),
    )
    assert run.outcome.events["ReceiverFailed"] >= 1 and run.outcome.events["TrainerJoined"] == 2
    assert ended(run.outcome) == {"committed": 3}


@pytest.mark.parametrize("lie", ["skip", "swap", "corrupt"])
def test_a_receiver_that_holds_something_else_is_never_counted_whatever_it_says(seed: int, lie: str) -> None:
    """It acknowledges without loading, loads one tensor as the other, or holds a wrong byte."""
    run = Run(seed, lambda d: d.nemesis.orders.append(("receive", lie)))
    assert run.outcome.events["ReceiverFailed"] == 1
    assert run.all(TransferAborted)[0].event.reason == "receiver_failed"  # type: ignore[attr-defined]
    assert ended(run.outcome) == {"committed": 3}


def test_the_next_candidate_is_selected_before_its_base_is_committed_and_both_are_released(seed: int) -> None:
    """Every publication is held up: a member needs long to stop."""

    def script(d: Deployment) -> None:
        for n in (1, 2, 3):
            d.when("TargetPersisted", lambda: d.pause("engine-0", 1.6), nth=n)

    run = Run(seed, script, Shape(eager=True))
    selected, committed = run.all(CandidateSelected), run.all(ReleaseCommitted)
    assert any(later.seq < release.seq for later, release in zip(selected[1:], committed, strict=False))
    assert ended(run.outcome) == {"committed": 3}
