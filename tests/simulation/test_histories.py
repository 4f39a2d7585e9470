"""The histories that protocol.md says to simulate first, each by a script, under several schedules.

Knows: when to strike, and what the log must show afterwards. Must not know: how any of it is decided.
What concerns adapters waits for them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest

from consumers.reef_engine import agent as agent_module
from reef_bus.events import (
    CandidateReady,
    CandidateSelected,
    CleanupUnconfirmed,
    ComponentStarted,
    EngineExcluded,
    EngineJoined,
    EngineStaged,
    Event,
    InferenceRecorded,
    JobAmbiguous,
    JobDiscarded,
    PublicationHalted,
    PublicationRefused,
    ReceiverFailed,
    ReceiverVerified,
    Recorded,
    RecoveryResumed,
    ReleaseCommitted,
    RollbackRequested,
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
    failed, aborted = run.all(ReceiverFailed), run.all(TransferAborted)[0]
    assert aborted.event.reason == "receiver_failed"  # type: ignore[attr-defined]
    assert [m.boot for m in aborted.event.excluded] == [r.boot for r in failed]  # type: ignore[attr-defined]
    assert ended(run.outcome) == {"committed": 3}


def test_the_next_candidate_is_selected_before_its_base_is_committed_and_both_are_released(seed: int) -> None:
    """Every publication is held up: a member needs long to stop."""

    def script(d: Deployment) -> None:
        for n in range(1, 7):
            d.when("TargetPersisted", lambda: d.pause("engine-0", 1.6), nth=n)

    run = Run(seed, script, Shape(eager=True, jobs=6))
    selected, committed = run.all(CandidateSelected), run.all(ReleaseCommitted)
    assert any(later.seq < release.seq for later, release in zip(selected[1:], committed, strict=False))
    assert ended(run.outcome) == {"committed": 6}


# -- rollbacks


def held_up(d: Deployment, seconds: float = 1.6) -> None:
    """The first publications take so long that the next candidate is selected meanwhile."""
    for n in (1, 2, 3):
        d.when("TargetPersisted", lambda: d.pause("engine-1", seconds), nth=n)


def roll_back(d: Deployment, release: int) -> None:
    incarnation = d.truth.world.incarnation
    d.person.spawn(d.person.put(RollbackRequested, f"{incarnation}:{release}", d.person.head()))


def test_a_rollback_precedes_a_candidate_that_was_trained_before_it_and_ends_it(seed: int) -> None:
    """The first candidate publishes, the second was trained from it and waits: neither may follow."""

    def script(d: Deployment) -> None:
        held_up(d)
        d.when("CandidateSelected", lambda: roll_back(d, 0), nth=2)

    run = Run(seed, script, Shape(mode="staged", eager=True, jobs=4))
    asked, first, second = run.all(RollbackRequested)[0], *run.all(CandidateSelected)[:2]
    target = next(r for r in run.all(TargetPersisted) if r.event.request == asked.seq)  # type: ignore[attr-defined]
    assert [r.event.reason for r in run.all(PublicationHalted)] == ["rollback"]  # type: ignore[attr-defined]
    assert target.event.candidate == "base" and target.event.sender == "artifact"  # type: ignore[attr-defined]
    fates = run.deployment.truth.audit.fates
    assert fates[first.event.candidate] == "halted"  # type: ignore[attr-defined]
    assert fates[second.event.candidate] == "base_lost"  # type: ignore[attr-defined]
    later = [r for r in run.all(CandidateReady) if r.seq > target.seq]
    assert later and later[0].event.base == "base"  # type: ignore[attr-defined]


def test_a_rollback_that_a_commit_overtakes_is_refused_and_changes_nothing(seed: int) -> None:
    """It was decided on the head before the second release, and is stored after it."""

    def script(d: Deployment) -> None:
        base = []
        d.when("ReleaseCommitted", lambda: base.append(d.person.head()))
        late = lambda: d.person.spawn(d.person.put(RollbackRequested, base[0], base[0]))  # noqa: E731
        d.when("ReleaseCommitted", late, nth=2)

    run = Run(seed, script)
    asked = {r.seq for r in run.all(RollbackRequested)}
    refused = [r.event for r in run.all(PublicationRefused)]
    assert {(e.request in asked, e.reason) for e in refused} == {(True, "head_moved")}  # type: ignore[attr-defined]
    assert ended(run.outcome) == {"committed": 3}


# -- staged


def test_a_second_target_before_a_committed_staging_was_swapped_in_waits_for_the_swap(seed: int) -> None:
    """The member is stopped before it hears of the commit; the next target is on the log when it goes on."""

    def script(d: Deployment) -> None:
        d.when("TargetPersisted", lambda: d.pause("engine-1", 1.6))
        d.when("ReleaseCommitted", lambda: d.pause("engine-0", 1.5))

    run = Run(seed, script, Shape(mode="staged", eager=True))
    targets, staged = run.all(TargetPersisted), run.all(EngineStaged, boot="engine-0.1")
    first = targets[0].event.load_id  # type: ignore[attr-defined]
    swapped = next(r for r in run.all(ReceiverVerified, boot="engine-0.1") if r.event.load_id == first)  # type: ignore[attr-defined]
    assert targets[1].seq < swapped.seq < staged[1].seq
    assert swapped.event.method == "swapped"  # type: ignore[attr-defined]
    assert ended(run.outcome) == {"committed": 3}


def test_a_swap_that_fails_costs_its_engine_a_load_and_nobody_else_anything(seed: int) -> None:
    run = Run(seed, lambda d: None, Shape(mode="staged"), no_swap=0.5)
    methods = {r.event.method for r in run.all(ReceiverVerified)}  # type: ignore[attr-defined]
    assert "swapped" in methods and "artifact" in methods
    assert ended(run.outcome) == {"committed": 3} and run.all(TransferAborted) == []


# -- refusals


@pytest.mark.parametrize("why", ["mode", "transport"])
def test_what_an_engine_cannot_take_is_refused_under_overlap_and_pauses_nobody(seed: int, why: str) -> None:
    """While the first release is on its way, and the next is trained from it, an engine comes back that can do less."""

    def script(d: Deployment) -> None:
        held_up(d, 1.9)
        d.when("TargetPersisted", lambda: (poorer(d, why), d.current("engine-0").kill()))

    run = Run(seed, script, Shape(mode="staged", eager=True))
    committed, joined = run.all(ReleaseCommitted)[0], run.all(EngineJoined, boot="engine-0.2")[0]
    refused = [r.event.reason for r in run.all(PublicationRefused)]  # type: ignore[attr-defined]
    assert (
        joined.seq < run.all(PublicationRefused)[0].seq > committed.seq
        and refused[0] == why
        and set(refused) <= {why, "base_lost"}
    )
    assert run.outcome.events["EngineFenced"] == 0 and len(run.all(TargetPersisted)) == 1
    assert ended(run.outcome) == {"committed": 1, "refused": 2}


def poorer(d: Deployment, why: str) -> None:
    """Whatever engine starts from now on has no room for a second copy, or takes no transport but files."""
    if why == "mode":
        d.shape = replace(d.shape, single_copy=d.shape.engines)
    else:
        inference = msgspec.structs.replace(d.config.inference, accepts=("files",))
        d.config = msgspec.structs.replace(d.config, inference=inference)


# -- words


def test_who_names_the_head_with_another_digest_does_not_serve_until_it_has_the_right_one(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lied: list[str] = []

    def lie(engine: str, *said: object) -> Event:
        event = _verified(engine, *said)  # type: ignore[arg-type]
        if engine == "engine-0" and not lied:
            lied.append("0" * 32)
            return msgspec.structs.replace(event, manifest=lied[0])  # type: ignore[type-var]
        return event

    monkeypatch.setattr(agent_module, "verified", lie)
    run = Run(seed, lambda d: None)
    wrong, right = run.all(ReceiverVerified, boot="engine-0.1")[:2]
    assert (wrong.event.manifest, wrong.event.load_id) == (lied[0], right.event.load_id)  # type: ignore[attr-defined]
    assert lied[0] != right.event.manifest  # type: ignore[attr-defined]
    answers = [r.event for r in run.deployment.truth.records if isinstance(r.event, InferenceRecorded)]
    assert all(e.as_of >= right.seq for e in answers if e.boot == "engine-0.1")
    assert ended(run.outcome) == {"committed": 3}


_verified = agent_module.verified


def test_an_engine_that_restarts_between_its_verification_and_the_commit_has_itself_proven_nothing(
    seed: int,
) -> None:
    """The other member is late, so that the new boot joins before the commit: the elder's word counts."""

    def script(d: Deployment) -> None:
        d.when("EngineFenced", lambda: d.pause("engine-1", 1.7), boot="engine-1.1")
        d.when("ReceiverVerified", lambda: d.current("engine-0").kill(), 2, boot="engine-0.1")

    run = Run(seed, script)
    joined, committed = run.all(EngineJoined, boot="engine-0.2")[0], run.all(ReleaseCommitted)[0]
    assert joined.seq < committed.seq and "engine-0.1" in [e.boot for e in committed.event.evidence]  # type: ignore[attr-defined]
    proven = [r for r in run.all(ReceiverVerified, boot="engine-0.2") if r.seq < committed.seq]
    assert {r.event.load_id for r in proven} == {committed.event.parent}  # type: ignore[attr-defined]
    assert ended(run.outcome) == {"committed": 3}


# -- what only a person may do


def test_a_trainer_that_mutates_in_place_and_dies_in_its_step_stops_training_until_a_person_decides(seed: int) -> None:
    run = Run(seed, lambda d: d.when("JobStarted", lambda: d.current("trainer").kill()), Shape(in_place=True))
    doubt = run.all(JobAmbiguous)[0]
    after = next(r for r in run.all(Event) if r.seq > doubt.seq and r.name in ("JobStarted", "JobDiscarded"))
    assert after.event.request > doubt.seq  # type: ignore[attr-defined]
    assert sum(ended(run.outcome).values()) == 3 - len(run.all(JobDiscarded))


def test_what_a_step_in_place_has_changed_is_never_taken_for_the_base_again(seed: int) -> None:
    """Some steps fail half-way, some candidates are rejected: the next is trained from the stored base."""
    run = Run(seed, lambda d: None, Shape(in_place=True, jobs=9, eager=seed % 2 == 0), reject=0.45, drop=0.45)
    assert run.outcome.events["JobDropped"] + run.outcome.events["CandidateRejected"] >= 1
    assert len(run.all(CandidateReady)) >= 2


def test_a_held_candidate_is_published_only_when_a_person_has_promoted_it(seed: int) -> None:
    run = Run(seed, lambda d: None, Shape(hold=True))
    selected = run.all(CandidateSelected)
    assert all(r.event.request and r.event.selector == "ann" for r in selected)  # type: ignore[attr-defined]
    assert len(selected) + len(run.all(JobDiscarded)) == 3
    assert ended(run.outcome).get("committed", 0) == len(selected)


def test_what_cannot_be_ended_keeps_its_component_down_until_a_person_asks_for_it(seed: int) -> None:
    def script(d: Deployment) -> None:
        d.when("ScenarioRegistered", lambda: d._remain(d.current("engine-0")))

    run = Run(seed, script)
    unsure = run.all(CleanupUnconfirmed)
    starts = [r for r in run.all(ComponentStarted) if r.event.component == "engine-0"]  # type: ignore[attr-defined]
    resumed = run.all(RecoveryResumed)
    assert len(starts) == 2 and len(unsure) == len(resumed) >= 1
    assert resumed[-1].seq < starts[1].seq
    assert ended(run.outcome) == {"committed": 3}


def test_an_engine_that_is_cut_off_stops_when_its_lease_is_over_and_without_a_lease_goes_on(seed: int) -> None:
    """It is cut off as it serves the first release; whether it may generate later is asked of the agent itself."""
    for lease_s, serves in ((2.0, False), (0.0, True)):
        seen: list[bool] = []

        def script(d: Deployment, seen: list[bool] = seen) -> None:
            def cut() -> None:
                boot = d.current("engine-0")
                boot.link.cut()
                d._after(2.2, lambda: seen.append(boot.agent.may_generate()))  # type: ignore[union-attr]
                d._after(5.0, boot.link.mend)

            d.when("ReleaseCommitted", lambda: d._after(0.1, cut))

        run = Run(seed, script, Shape(lease_s=lease_s, jobs=2))
        assert seen == [serves] and ended(run.outcome) == {"committed": 2}


# -- pauses


def parts(run: Run) -> list[list[str]]:
    """Of every recorded answer that was interrupted: the release of each of its parts."""
    answers = [r.event for r in run.deployment.truth.records if isinstance(r.event, InferenceRecorded)]
    return [[span.load_id for span in answer.spans] for answer in answers if answer.spans]


@pytest.mark.parametrize("mode", ["fenced", "staged"])
def test_answers_in_hand_go_on_in_place_over_a_release_and_name_it_from_there_on(seed: int, mode: str) -> None:
    run = Run(seed, lambda d: None, Shape(mode=mode, pause="in_place", generate_s=0.2, eager=True))
    assert any(len(set(load_ids)) > 1 for load_ids in parts(run)), parts(run)
    assert all(load_ids == sorted(load_ids) for load_ids in parts(run)) and ended(run.outcome) == {"committed": 3}


@pytest.mark.parametrize("pause", ["drain", "retract"])
def test_an_answer_that_is_drained_or_retracted_is_of_one_release(seed: int, pause: str) -> None:
    run = Run(seed, lambda d: None, Shape(pause=pause, generate_s=0.2, eager=True))
    assert parts(run) == [] and ended(run.outcome) == {"committed": 3}


@pytest.mark.parametrize("pause", ["retract", "in_place"])
def test_what_waits_through_a_fence_that_ends_in_a_halt_goes_on_with_the_incumbent(seed: int, pause: str) -> None:
    """Three attempts hang. In place, both parts name the same release; in one go it would contradict the fence."""

    def script(d: Deployment) -> None:
        d.nemesis.orders += [("receive", "stuck")] * 3

    run = Run(seed, script, Shape(engines=1, jobs=2, pause=pause, generate_s=0.2, eager=True))
    assert ended(run.outcome) == {"halted": 1, "committed": 1}
    base = run.all(TargetPersisted)[0].event.parent  # type: ignore[attr-defined]
    assert ([base, base] in parts(run)) == (pause == "in_place")


@pytest.mark.parametrize("pause", ["retract", "in_place"])
def test_an_engine_that_dies_with_requests_in_hand_in_a_pause_costs_none_of_them(seed: int, pause: str) -> None:
    run = Run(
        seed,
        lambda d: d.when("EngineFenced", lambda: d.current("engine-0").kill(), boot="engine-0.1"),
        Shape(pause=pause, generate_s=0.2, eager=True),
    )
    assert run.all(EngineJoined, boot="engine-0.2") and ended(run.outcome) == {"committed": 3}
