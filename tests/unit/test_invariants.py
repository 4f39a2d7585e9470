"""Every invariant of protocol.md section 8 has a corrupted twin of a clean history that the audit finds, by its name.

Knows: one clean history with an abort, an exclusion, a new boot, a refusal, a drop and a void event in it.
Must not know: how the audit looks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from reef_bus.core import world as world_module
from reef_bus.core.invariants import Audit, Consumption, Rewards, Trained, Unread, Violation, check, walk
from reef_bus.core.world import World, fold
from reef_bus.errors import ContractError
from reef_bus.events import (
    Evidence,
    InferenceRecorded,
    Member,
    ReceiverVerified,
    Recorded,
    ReleaseCommitted,
    ReportReceived,
)
from tests.facts import (
    E0,
    E1,
    SERVING,
    L,
    S,
    aborted,
    blob,
    digest,
    dispatched,
    dropped,
    excluded,
    failed,
    fenced,
    halted,
    holds,
    joined,
    left,
    m,
    offered,
    opened,
    refused,
    rejected,
    restored,
    target,
    trained,
    verified,
)
from tests.spec import MILLI, T0, Scribe, Step, by, chained_to

E1_AGAIN = m("e1", 2)
NEVER = {"training": {"eligible": False}}


class Play:
    """A history being written: LOG by the scribe, RECORDS and batches beside it."""

    def __init__(self, *steps: Step) -> None:
        self.scribe = Scribe()
        self.records: list[Recorded] = []
        self.batches: dict[str, Consumption | Unread] = {}
        self.say(*steps)

    @property
    def log(self) -> list[Recorded]:
        return self.scribe.log

    def say(self, *steps: Step) -> None:
        for step in steps:
            self.scribe.write(step)

    def record(self, event: InferenceRecorded | ReportReceived) -> None:
        seq = len(self.records) + 1
        id_ = event.record if isinstance(event, InferenceRecorded) else event.report
        subject = f"reef.test.record.{S}.{type(event).__name__}"
        self.records.append(
            Recorded(
                seq=seq,
                time=T0 + seq * MILLI,
                subject=subject,
                id=id_,
                prev=0,
                cause=0,
                correlation=id_,
                writer="gateway/g",
                boot="g.1",
                event=event,
            )
        )

    def answers(self, load: int, *members: Member, count: int = 8, tags: dict[str, str] | None = None) -> list[str]:
        """Reported answers as of now, by the members in turn; the first half scores 1, the rest 0."""
        names = []
        for number in range(count):
            name, member = f"r{len(self.records) + 1}", members[number % len(members)]
            self.record(answer(name, member, load, len(self.log), tags or {}))
            metadata = NEVER if tags else {}
            self.record(report(name, score=float(number < count // 2), metadata=metadata))
            names.append(name)
        return names

    def batch(self, job: str, base: str, step: int, records: list[str]) -> None:
        """What the dispatch of `job` names; before it is dispatched."""
        answers = {
            r.event.record: (r.seq, r.event.load_id) for r in self.records if isinstance(r.event, InferenceRecorded)
        }
        scores = {r.event.references[0]: r.event.score for r in self.records if isinstance(r.event, ReportReceived)}
        self.batches[blob(f"batch-{job}").digest] = Consumption(
            job=job,
            step=step,
            base=base,
            records=tuple((name, answers[name][0]) for name in records),
            samples=tuple(Trained(name, answers[name][1], scores[name]) for name in records),
        )

    def train(self, candidate: str, base: str, step: int, records: list[str]) -> None:
        self.batch(f"job-{candidate}", base, step, records)
        self.say(*trained(candidate, base, step))

    def commit(self, n: int, candidate: str, *members: Member, attempt: int = 1) -> None:
        """With the evidence that a publisher would quote: each member's report on the attempt."""
        evidence = tuple(Evidence(x.engine, x.boot, self.proof(x, n, attempt), digest(candidate)) for x in members)
        self.say(
            ReleaseCommitted(
                scenario=S,
                publication=f"pub{n}",
                attempt=attempt,
                candidate=candidate,
                load_id=L(n),
                parent=L(n - 1),
                manifest=digest(candidate),
                evidence=evidence,
            )
        )

    def proof(self, member: Member, n: int, attempt: int) -> int:
        """The sequence of the member's report on the attempt."""
        for r in self.log:
            event = r.event
            if isinstance(event, ReceiverVerified) and (r.boot, event.attempt) == (member.boot, attempt):
                if event.publication == f"pub{n}":
                    return r.seq
        raise AssertionError(f"{member} never verified attempt {attempt} of {n}")

    def release(self, n: int, candidate: str, *members: Member) -> None:
        self.say(target(n, candidate, *members), *(fenced(x.engine, n) for x in members), offered(n, candidate))
        self.say(*(verified(x.engine, n, candidate) for x in members))
        self.commit(n, candidate, *members)

    # -- what a mutant does

    def find(self, name: str, nth: int = 1) -> int:
        """The LOG sequence of the nth event of that name."""
        return [r.seq for r in self.log if r.name == name][nth - 1]

    def edit(self, name: str, nth: int = 1, **changes: Any) -> int:
        seq = self.find(name, nth)
        found = self.log[seq - 1]
        event = msgspec.structs.replace(found.event, **changes)
        self.log[seq - 1] = msgspec.structs.replace(found, event=event)
        return seq

    def edit_record(self, seq: int, **changes: Any) -> None:
        found = self.records[seq - 1]
        self.records[seq - 1] = msgspec.structs.replace(found, event=msgspec.structs.replace(found.event, **changes))

    def edit_batch(self, job: str, **changes: Any) -> None:
        name = blob(f"batch-{job}").digest
        self.batches[name] = msgspec.structs.replace(self.batches[name], **changes)

    def consumed(self, job: str) -> Consumption:
        found = self.batches[blob(f"batch-{job}").digest]
        assert isinstance(found, Consumption)
        return found

    def audit(self) -> Audit:
        return check(self.log, self.records, self.batches)


def answer(name: str, member: Member, load: int, as_of: int, tags: dict[str, str]) -> InferenceRecorded:
    return InferenceRecorded(
        scenario=S,
        record=name,
        engine=member.engine,
        boot=member.boot,
        load_id=L(load),
        as_of=as_of,
        done_as_of=as_of,
        prompt="7",
        answer="7",
        prompt_tokens=3,
        answer_tokens=1,
        temperature=1.0,
        blob=blob("rows"),
        row=0,
        tags=tags,
    )


def report(*references: str, score: float, metadata: dict[str, Any] | None = None, name: str = "") -> ReportReceived:
    return ReportReceived(
        scenario=S,
        report=name or f"on-{references[0]}",
        references=references,
        score=score,
        feedback="",
        metadata=metadata or {},
    )


def clean() -> Play:
    """Release 1 goes well; 2 loses e1 in its first attempt; e1 comes back as a new boot; a job is dropped, a candidate
    refused; one event is void; four final answers by the head."""
    play = Play(*SERVING)
    play.train("c1", "base", 1, play.answers(0, E0, E1))
    play.release(1, "c1", E0, E1)
    play.train("c2", "c1", 2, play.answers(1, E0, E1))
    play.say(target(2, "c2", E0, E1), fenced("e0", 2), fenced("e1", 2), offered(2, "c2"))
    play.say(verified("e0", 2, "c2"), failed("e1", 2), aborted(2, 1, E0, excluded=(E1,)))
    play.say(fenced("e0", 2, 2), offered(2, "c2", 2), verified("e0", 2, "c2", 2))
    play.commit(2, "c2", E0, attempt=2)
    play.say(chained_to(1, holds("e1", 2, "c2")), by(E1_AGAIN.boot, joined("e1")), holds("e1", 2, "c2"))
    play.batch("job-x", "c2", 3, play.answers(2, E0, E1_AGAIN))
    play.say(dispatched("job-x", "c2", 3), dropped("job-x"))
    play.train("c4", "c2", 4, play.answers(2, E0, E1_AGAIN))
    play.say(refused("c4"), restored("c2", 2))
    play.answers(2, E0, E1_AGAIN, count=4, tags={"phase": "final"})
    return play


def by_name(audit: Audit) -> dict[int | str, Violation]:
    return {violation.invariant: violation for violation in reversed(audit.violations)}


# -- the clean history


def test_a_clean_history_has_no_violation_and_its_figures_are_what_was_written() -> None:
    audit = clean().audit()
    assert audit.violations == ()
    assert audit.unchecked == () and audit.open == ()
    assert (audit.log_events, audit.void_events) == (47, 1)
    assert (audit.records, audit.reports) == (36, 36)
    assert (audit.releases, audit.releases_with_base, audit.receivers_verified) == (2, 3, 3)
    assert (audit.jobs, audit.consumed) == (4, 32)
    assert audit.engines == {"e0": 18, "e1": 18}


def test_rewards_are_means_by_load_id_and_the_final_ones_name_the_head() -> None:
    audit = clean().audit()
    assert audit.rewards == {L(0): Rewards(8, 0.5), L(1): Rewards(8, 0.5), L(2): Rewards(20, 0.5)}
    assert (audit.final.load_id, audit.final.n, audit.final.mean) == (L(2), 4, 0.5)
    assert audit.final.engines == {"e0": 2, "e1": 2}


def test_final_answers_of_an_older_release_do_not_count() -> None:
    play = Play(*SERVING)
    play.answers(0, E0, count=4, tags={"phase": "final"})
    play.say(*trained("c1"))
    play.release(1, "c1", E0, E1)
    final = play.audit().final
    assert (final.load_id, final.n, final.mean, final.engines) == (L(1), 0, None, {})


def test_an_empty_history_is_clean() -> None:
    audit = check((), (), None)
    assert (audit.violations, audit.log_events, audit.releases_with_base) == ((), 0, 0)


def test_every_prefix_of_the_log_is_clean_with_the_answers_that_stood_on_it() -> None:
    play = clean()
    for head in range(1, len(play.log) + 1):
        ids = {r.id for r in play.records if isinstance(r.event, InferenceRecorded) and r.event.done_as_of <= head}
        told = [r for r in play.records if r.id in ids or r.id.removeprefix("on-") in ids]
        assert check(play.log[:head], told, play.batches).violations == (), head


def test_what_a_history_ends_in_the_middle_of_is_a_notice() -> None:
    play = Play(*SERVING, *trained("c1"), target(1, "c1", E0, E1), fenced("e0", 1), dispatched("job-c2", "c1", 2))
    audit = play.audit()
    assert audit.violations == ()
    assert [notice.split()[0:2] for notice in audit.open] == [
        ["job", "job-c2"],
        ["publication", "pub1"],
        ["candidate", "c1"],
        ["engine", "e0"],
    ]


def test_a_batch_that_is_not_at_hand_is_said_to_be_unchecked() -> None:
    play = clean()
    assert "4 jobs" in check(play.log, play.records, None).unchecked[0]
    play.batches[blob("batch-job-c1").digest] = Unread("its bytes hash to something else")
    del play.batches[blob("batch-job-x").digest]
    audit = play.audit()
    assert audit.violations == ()
    assert "job-c1" in audit.unchecked[0] and "something else" in audit.unchecked[0]
    assert "job-x" in audit.unchecked[1] and "not there" in audit.unchecked[1]


# -- corrupted twins: (what is done to the clean history, exactly the invariants by which it is found)


def names_a_load_id_that_never_was(play: Play) -> None:
    play.edit_record(1, load_id=L(9))


def names_a_release_before_its_commit(play: Play) -> None:
    play.edit_record(1, load_id=L(1), as_of=play.find("TargetPersisted"), done_as_of=play.find("TargetPersisted"))
    play.edit_batch("job-c1", records=(), samples=())
    play.edit("JobDispatched", records=0)


def stands_beyond_the_log(play: Play) -> None:
    play.edit_record(65, as_of=500, done_as_of=500)


def ends_before_it_began(play: Play) -> None:
    play.edit_record(65, done_as_of=3)


def generates_under_a_fence(play: Play) -> None:
    at = play.find("TargetPersisted")
    play.edit_record(17, load_id=L(0), as_of=at, done_as_of=at)
    play.edit_batch("job-c2", samples=(Trained("r17", L(0), 1.0), *play.consumed("job-c2").samples[1:]))


def generates_after_its_exclusion(play: Play) -> None:
    at = play.find("TransferAborted")
    play.edit_record(33, engine="e1", boot="e1.1", load_id=L(1), as_of=at, done_as_of=at)
    play.edit_batch("job-x", samples=(Trained("r33", L(1), 1.0), *play.consumed("job-x").samples[1:]))


def generates_as_a_replaced_boot(play: Play) -> None:
    play.edit_record(67, boot="e1.1")


def generates_before_it_proved_the_head(play: Play) -> None:
    at = play.find("EngineJoined", 3)
    play.edit_record(67, as_of=at, done_as_of=at)


def names_the_release_before_the_head(play: Play) -> None:
    play.edit_record(65, load_id=L(1))


def answers_after_it_had_stopped(play: Play) -> None:
    play.edit_record(17, done_as_of=play.find("EngineFenced", 3))


def targets_other_weights(play: Play) -> None:
    play.edit("TargetPersisted", weights=blob("other"))


def targets_another_digest(play: Play) -> None:
    play.edit("TargetPersisted", manifest=digest("other"))


def commits_another_digest(play: Play) -> None:
    play.edit("ReleaseCommitted", manifest=digest("other"))


def uses_a_load_id_again(play: Play) -> None:
    play.edit("TargetPersisted", 2, load_id=L(1))


def leaves_the_incarnation(play: Play) -> None:
    play.edit("TargetPersisted", load_id="other:1")


def targets_under_no_load_id(play: Play) -> None:
    play.edit("TargetPersisted", load_id="one")


def commits_onto_another_parent(play: Play) -> None:
    play.edit("ReleaseCommitted", 2, parent=L(0))


def targets_onto_another_parent(play: Play) -> None:
    play.edit("TargetPersisted", 2, parent=L(0))


def bends_the_base_chain(play: Play) -> None:
    play.edit("JobDispatched", 2, base="base")
    play.edit("CandidateReady", 2, base="base")
    play.edit_batch("job-c2", base="base")


def publishes_a_rejected_candidate(play: Play) -> None:
    seq = play.find("CandidateSelected")
    play.log[seq - 1] = msgspec.structs.replace(play.log[seq - 1], event=rejected("c1"))


def consumes_a_record_twice(play: Play) -> None:
    first, second = play.consumed("job-c1"), play.consumed("job-c2")
    play.edit_batch(
        "job-c2",
        records=(first.records[0], *second.records[1:]),
        samples=(first.samples[0], *second.samples[1:]),
    )


def names_a_record_twice_in_one_batch(play: Play) -> None:
    batch = play.consumed("job-c1")
    play.edit_batch(
        "job-c1",
        records=(batch.records[1], *batch.records[1:]),
        samples=(batch.samples[1], *batch.samples[1:]),
    )


def trains_twice_on_one_record(play: Play) -> None:
    batch = play.consumed("job-c1")
    play.edit_batch("job-c1", samples=(*batch.samples, batch.samples[0]))


def trains_on_what_it_does_not_consume(play: Play) -> None:
    batch = play.consumed("job-c1")
    play.edit_batch("job-c1", samples=(*batch.samples[:-1], Trained("r65", L(2), 1.0)))


def consumes_what_was_never_recorded(play: Play) -> None:
    batch = play.consumed("job-c1")
    play.edit_batch(
        "job-c1", records=(*batch.records[1:], ("ghost", 1)), samples=(*batch.samples[1:], Trained("ghost", L(0), 1.0))
    )


def names_another_place_of_a_record(play: Play) -> None:
    batch = play.consumed("job-c1")
    play.edit_batch("job-c1", records=(("r1", 2), *batch.records[1:]))


def consumes_what_nobody_reported(play: Play) -> None:
    play.edit_record(2, references=())


def consumes_what_its_report_excused(play: Play) -> None:
    play.edit_record(2, metadata=NEVER)


def consumes_before_it_was_generated(play: Play) -> None:
    play.edit_record(1, done_as_of=play.find("JobDispatched"))


def dispatches_another_step_than_its_batch(play: Play) -> None:
    play.edit_batch("job-c1", step=7)


def dispatches_another_count_than_its_batch(play: Play) -> None:
    play.edit("JobDispatched", records=7)


def stores_a_record_twice(play: Play) -> None:
    last = play.records[-2].event
    assert isinstance(last, InferenceRecorded)
    play.record(last)


def trains_on_another_reward(play: Play) -> None:
    play.edit_record(2, score=0.25)


def trains_on_another_load_id(play: Play) -> None:
    batch = play.consumed("job-c2")
    play.edit_batch("job-c2", samples=(Trained("r17", L(0), 1.0), *batch.samples[1:]))


def reports_twice_and_the_later_one_is_trained_on(play: Play) -> None:
    play.record(report("r1", score=0.0, name="second"))
    batch = play.consumed("job-c1")
    play.edit_batch("job-c1", samples=(Trained("r1", L(0), 0.0), *batch.samples[1:]))


def reports_on_what_was_never_recorded(play: Play) -> None:
    play.record(report("ghost", score=1.0))


def reports_on_a_later_record(play: Play) -> None:
    play.edit_record(2, references=("r1", "r3"))


def changes_a_report(play: Play) -> None:
    play.record(report("r1", score=0.0))


def commits_without_a_member(play: Play) -> None:
    seq = play.find("ReleaseCommitted")
    event = play.log[seq - 1].event
    assert isinstance(event, ReleaseCommitted)
    play.edit("ReleaseCommitted", evidence=event.evidence[:1])


def commits_on_one_member_twice(play: Play) -> None:
    event = play.log[play.find("ReleaseCommitted") - 1].event
    assert isinstance(event, ReleaseCommitted)
    play.edit("ReleaseCommitted", evidence=(*event.evidence, event.evidence[0]))


def commits_for_nobody(play: Play) -> None:
    play.edit("TargetPersisted", members=())


def commits_on_a_wrong_digest(play: Play) -> None:
    play.edit("ReceiverVerified", 4, manifest=digest("other"))


def commits_on_a_failure(play: Play) -> None:
    seq = play.find("ReceiverVerified", 4)
    play.log[seq - 1] = msgspec.structs.replace(play.log[seq - 1], event=failed("e1", 1))


def commits_on_a_report_of_another_attempt(play: Play) -> None:
    play.edit("ReceiverVerified", 6, attempt=1)


def quotes_another_report(play: Play) -> None:
    event = play.log[play.find("ReleaseCommitted") - 1].event
    assert isinstance(event, ReleaseCommitted)
    play.edit("ReleaseCommitted", evidence=(msgspec.structs.replace(event.evidence[0], seq=6), event.evidence[1]))


def commits_another_candidate(play: Play) -> None:
    play.edit("ReleaseCommitted", 2, candidate="c1")


def stops_for_what_has_no_target(play: Play) -> None:
    play.say(fenced("e0", 3))


def refuses_what_it_had_targeted(play: Play) -> None:
    play.say(refused("c2"))


def stops_for_what_was_refused(play: Play) -> None:
    play.say(refused("c2"), fenced("e0", 2, 2))


def targets_what_it_had_refused(play: Play) -> None:
    play.say(target(3, "c4", E0, E1_AGAIN))


def generates_after_it_left(play: Play) -> None:
    play.say(left("e0"))
    play.edit_record(65, as_of=len(play.log), done_as_of=len(play.log))


def opens_the_log_again(play: Play) -> None:
    play.say(opened())


def loses_an_event(play: Play) -> None:
    del play.log[play.find("PublicationRefused") - 1]


def loses_a_record(play: Play) -> None:
    del play.records[-2:]
    play.records[-1] = msgspec.structs.replace(play.records[-1], seq=90)


Mutant = Callable[[Play], None]

MUTANTS: tuple[tuple[Mutant, set[int | str]], ...] = (
    (names_a_load_id_that_never_was, {1, "reward"}),
    (names_a_release_before_its_commit, {1}),
    (stands_beyond_the_log, {1}),
    (ends_before_it_began, {1}),
    (generates_under_a_fence, {2}),
    (generates_after_its_exclusion, {2}),
    (generates_as_a_replaced_boot, {2}),
    (generates_before_it_proved_the_head, {2}),
    (names_the_release_before_the_head, {2}),
    (answers_after_it_had_stopped, {2, 6}),
    (targets_other_weights, {3, "fold"}),
    (targets_another_digest, {3, "fold"}),
    (commits_another_digest, {3, "fold"}),
    (uses_a_load_id_again, {3, 4, "fold"}),
    (leaves_the_incarnation, {4, "fold"}),
    (targets_under_no_load_id, {4, "fold"}),
    (commits_onto_another_parent, {5, "fold"}),
    (targets_onto_another_parent, {5, "fold"}),
    (bends_the_base_chain, {5, "fold"}),
    (publishes_a_rejected_candidate, {"decision", "fold"}),
    (consumes_a_record_twice, {6}),
    (names_a_record_twice_in_one_batch, {6}),
    (trains_twice_on_one_record, {6}),
    (trains_on_what_it_does_not_consume, {6}),
    (consumes_what_was_never_recorded, {6}),
    (names_another_place_of_a_record, {6}),
    (consumes_what_nobody_reported, {6}),
    (consumes_what_its_report_excused, {6}),
    (consumes_before_it_was_generated, {6}),
    (dispatches_another_step_than_its_batch, {6}),
    (dispatches_another_count_than_its_batch, {6}),
    (stores_a_record_twice, {6}),
    (trains_on_another_reward, {"reward"}),
    (trains_on_another_load_id, {"reward"}),
    (reports_twice_and_the_later_one_is_trained_on, {"reward"}),
    (reports_on_what_was_never_recorded, {"report"}),
    (reports_on_a_later_record, {"report"}),
    (changes_a_report, {"report"}),
    (commits_without_a_member, {7, "fold"}),
    (commits_on_one_member_twice, {7}),
    (commits_for_nobody, {7, "fold"}),
    (commits_on_a_wrong_digest, {7, "fold"}),
    (commits_on_a_failure, {7, "fold"}),
    (commits_on_a_report_of_another_attempt, {7, "fold"}),
    (quotes_another_report, {7}),
    (commits_another_candidate, {7, "fold"}),
    (stops_for_what_has_no_target, {10}),
    (refuses_what_it_had_targeted, {10}),
    (stops_for_what_was_refused, {10}),
    (targets_what_it_had_refused, {10, "fold"}),
    (generates_after_it_left, {2}),
    (opens_the_log_again, {"fold"}),
    (loses_an_event, {"gap"}),
    (loses_a_record, {"gap"}),
)


@pytest.mark.parametrize(("mutant", "expected"), MUTANTS, ids=[mutant.__name__ for mutant, _ in MUTANTS])
def test_a_corrupted_twin_is_found_by_its_invariant(mutant: Mutant, expected: set[int | str]) -> None:
    play = clean()
    mutant(play)
    audit = play.audit()
    assert {violation.invariant for violation in audit.violations} == expected, audit.violations
    assert all(violation.sequences or violation.records for violation in audit.violations)


def test_a_drain_that_lied_is_found_where_it_lied() -> None:
    play = clean()
    answers_after_it_had_stopped(play)
    found = by_name(play.audit())[2]
    assert (found.sequences, found.records) == ((play.find("EngineFenced", 3),), (17,))
    assert "r17" in found.text and "e0.1" in found.text


def test_a_stale_fence_that_is_stored_late_proves_no_drain() -> None:
    play = Play(*SERVING, *trained("c1"))
    play.release(1, "c1", E0, E1)
    play.record(answer("r1", E0, 1, len(play.log), {}))
    play.say(fenced("e0", 1))
    play.edit_record(1, done_as_of=len(play.log))
    assert play.audit().violations == ()


def test_receiving_before_everyone_has_stopped_breaks_invariant_2() -> None:
    play = Play(*SERVING, *trained("c1"), target(1, "c1", E0, E1), fenced("e0", 1), offered(1, "c1"))
    play.say(verified("e0", 1, "c1"), fenced("e1", 1), verified("e1", 1, "c1"))
    play.commit(1, "c1", E0, E1)
    found = play.audit().violations
    assert [violation.invariant for violation in found] == [2]
    assert "e1.1" in found[0].text and "e0.1" not in found[0].text


def test_a_halted_publication_gives_the_incumbent_back_and_breaks_nothing() -> None:
    play = Play(*SERVING, *trained("c1"), target(1, "c1", E0, E1), fenced("e0", 1), halted(1, excluded=(E1,)))
    play.say(holds("e0", 0, "base"))
    play.answers(0, E0, count=2)
    play.say(*trained("c2"), target(2, "c2", E0, parent=0))
    audit = play.audit()
    assert audit.violations == ()
    assert not any("c1" in notice for notice in audit.open)


def test_after_a_contradiction_the_audit_says_what_it_left() -> None:
    play = clean()
    seq = play.edit("TargetPersisted", manifest=digest("other"))
    audit = play.audit()
    assert by_name(audit)["fold"].sequences == (seq,)
    assert audit.unchecked == (
        f"{47 - seq} events and 28 answers from LOG {seq} on: every consumer halts at the contradiction there",
    )


def test_a_base_chain_may_pass_through_superseded_candidates_only() -> None:
    for reason, expected in (("superseded", set()), ("transport", {5, "fold"})):
        play = Play(*SERVING, *trained("c1"), *trained("c2", "c1", 2), refused("c1", reason), target(1, "c2", E0, E1))
        assert {violation.invariant for violation in play.audit().violations} == expected


# -- invariants that only a broken fold can break: the code is the mutant


def test_a_void_rule_that_lets_a_second_job_in_breaks_invariant_8(monkeypatch: pytest.MonkeyPatch) -> None:
    play = Play(*SERVING, dispatched("j1"), dispatched("j2"))
    assert (play.audit().violations, play.audit().void_events) == ((), 1)
    monkeypatch.setattr(world_module, "why_void", lambda tail, recorded: "")
    assert [violation.invariant for violation in play.audit().violations] == [8]


def test_a_void_rule_that_lets_a_second_publication_in_breaks_invariant_8(monkeypatch: pytest.MonkeyPatch) -> None:
    play = Play(*SERVING, *trained("c1"), target(1, "c1", E0, E1), target(2, "c1", E0, E1, parent=0))
    assert (play.audit().violations, play.audit().void_events) == ((), 1)
    monkeypatch.setattr(world_module, "why_void", lambda tail, recorded: "")
    assert [violation.invariant for violation in play.audit().violations] == [8]


def test_a_fold_that_remembers_more_than_its_world_breaks_invariant_9(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set[int]()

    def forgetful(world: World, recorded: Recorded) -> str:
        void = fold(world, recorded)
        if recorded.name == "EngineExcluded" and recorded.seq in seen:
            world.publications.excluded.clear()
        seen.add(recorded.seq)
        return void

    monkeypatch.setattr(walk, "fold", forgetful)
    found = Play(*SERVING, excluded("e1")).audit().violations
    assert [violation.invariant for violation in found] == [9] and "publications" in found[0].text


def test_a_void_rule_that_lets_a_lost_commit_in_breaks_invariant_7(monkeypatch: pytest.MonkeyPatch) -> None:
    play = clean()
    play.say(play.log[play.find("ReleaseCommitted", 2) - 1].event)
    assert (play.audit().violations, play.audit().void_events) == ((), 2)
    monkeypatch.setattr(world_module, "why_void", lambda tail, recorded: "")
    assert {7, "fold"} <= {violation.invariant for violation in play.audit().violations}


def test_a_fold_that_contradicts_itself_only_when_it_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    times: list[int] = []

    def moody(world: World, recorded: Recorded) -> str:
        if recorded.seq == 4:
            times.append(4)
            if len(times) == 2:
                raise ContractError("not today", 4)
        return fold(world, recorded)

    monkeypatch.setattr(walk, "fold", moody)
    found = Play(*SERVING, chained_to(1, holds("e1", 0, "base"))).audit().violations
    assert [violation.invariant for violation in found] == [9] and "not today" in found[0].text


def test_a_snapshot_that_loses_something_is_found_also_before_an_early_contradiction(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun: list[World] = []

    def attached(world: World, recorded: Recorded) -> str:
        if recorded.seq == 1:
            begun.append(world)
        elif not any(world is each for each in begun):
            world.training.dispatched += 1
        return fold(world, recorded)

    monkeypatch.setattr(walk, "fold", attached)
    found = Play(*SERVING, target(1, "c9", E0, E1), *(joined(f"e{n}") for n in range(2, 30))).audit().violations
    assert {"fold", 9} <= {violation.invariant for violation in found}


def test_a_fold_that_needs_a_void_event_breaks_invariant_11(monkeypatch: pytest.MonkeyPatch) -> None:
    def needy(world: World, recorded: Recorded) -> str:
        if recorded.seq == 9 and "e9" not in world.membership.engines:
            raise ContractError("where is e9?", 9)
        void = fold(world, recorded)
        if void:
            world.membership.engines["e9"] = world.membership.engines["e1"]
        return void

    monkeypatch.setattr(walk, "fold", needy)
    found = Play(*SERVING, chained_to(1, holds("e1", 0, "base")), dispatched("j1")).audit().violations
    assert [violation.invariant for violation in found] == ["fold", 11]


def test_a_fold_that_a_void_event_moves_breaks_invariant_11(monkeypatch: pytest.MonkeyPatch) -> None:
    def gullible(world: World, recorded: Recorded) -> str:
        void = fold(world, recorded)
        if void:
            world.membership.engines["e1"].left = True
        return void

    monkeypatch.setattr(walk, "fold", gullible)
    found = Play(*SERVING, chained_to(1, holds("e1", 0, "base"))).audit().violations
    assert [(violation.invariant, violation.sequences) for violation in found] == [(11, (8,))]
    assert "membership" in found[0].text


def test_a_record_that_is_consumed_twice_is_named_with_both_places() -> None:
    play = clean()
    own, other = play.consumed("job-c2").records, play.consumed("job-c1").records
    play.edit_batch("job-c2", records=(own[0], own[0], other[0], *own[3:]))
    found = " ".join(violation.text for violation in play.audit().violations)
    assert f"consumes record {own[0][0]} at {own[0][1]}, named twice in its batch" in found
    first = play.find("JobDispatched")
    assert f"{other[0][0]} at {other[0][1]}, which the job at LOG {first} had consumed" in found


def test_an_answer_that_is_missing_from_records_is_named_by_what_follows_it() -> None:
    play = clean()
    del play.records[1]
    assert "RECORDS goes on at 3; expected 2" in [violation.text for violation in play.audit().violations]


def test_an_answer_of_a_replaced_boot_is_told_whose_turn_it_was() -> None:
    play = clean()
    generates_as_a_replaced_boot(play)
    texts = [violation.text for violation in play.audit().violations]
    assert any("boot e1.1" in text and text.endswith("the engine's boot was e1.2") for text in texts), texts
