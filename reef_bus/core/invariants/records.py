"""RECORDS by id, and invariant 6: a record is consumed once, and trained on as it was recorded.

Knows: answers, reports, what a batch says of itself. Must not know: tokens, engines, or how a batch is stored.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from sys import intern

import msgspec
from msgspec.structs import replace

from reef_bus.core.invariants.findings import MAX_SEQUENCES, Findings
from reef_bus.core.records import Consumed, make_up, whole
from reef_bus.events import Event, InferenceRecorded, JobDispatched, Recorded, ReportReceived, Span

FINAL = "final"  # the value of the tag `phase` by which a harness marks the answers of its last measurement


class Trained(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One sample of a batch without its tokens: which record, by which load id, at which reward."""

    record: str
    load_id: str
    reward: float


class Consumption(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """What a job's batch says: its commit context, the records (id, RECORDS sequence), the samples made of them; by
    record, the spans of those that several versions made; and whose adapter it trains, if it says so."""

    job: str
    step: int
    base: str
    records: tuple[tuple[str, int], ...]
    samples: tuple[Trained, ...]
    spans: dict[str, tuple[Span, ...]] = {}
    scenario: str = ""


class Unread(msgspec.Struct, frozen=True):
    """A batch that could not be read, and why."""

    why: str


Batches = Mapping[str, Consumption | Unread]
"""By the digest that `JobDispatched` names."""


class Feedback(msgspec.Struct, frozen=True, gc=False):
    """A report and where it is in RECORDS."""

    seq: int
    event: ReportReceived


class Answer(msgspec.Struct, gc=False):
    """What the audit keeps of an answer: its place in RECORDS, what it says of its generation, whether it is tagged
    `phase: final`; its first report, which is the one that counts, and the LOG sequence of the job that took it. Not
    its text, which is most of it: to keep that takes longer than to read it. A part that `goes_on` is not its first."""

    seq: int
    record: str
    engine: str
    boot: str
    load_id: str
    as_of: int
    done_as_of: int
    final: bool
    spans: tuple[Span, ...] = ()
    scenario: str = ""
    goes_on: bool = False
    report: Feedback | None = None
    consumed: int = 0


class Answers(msgspec.Struct):
    """RECORDS by id, up to `last`; `consumed` of them by jobs. `early` are the first reports on records that are not
    there yet, `lost` what jobs consumed that was never there, and by which one. `before` is what jobs of the log's
    predecessor, up to LOG `begin`, had consumed or given up: by scenario; empty: of the whole model."""

    findings: Findings
    last: int = 0
    by_id: dict[str, Answer] = {}
    reports: dict[str, Feedback] = {}
    early: dict[str, Feedback] = {}
    consumed: int = 0
    lost: dict[str, int] = {}
    begin: int = 0
    before: dict[str, Consumed] = {}


def every_part(answers: Answers) -> Iterator[Answer]:
    """Of all answers what was generated in one go, each as an answer of its own."""
    for answer in answers.by_id.values():
        if not answer.spans:
            yield answer
        for number, span in enumerate(answer.spans):
            times = {"as_of": span.as_of, "done_as_of": span.done_as_of}
            yield replace(answer, load_id=span.load_id, goes_on=number > 0, **times)


def index(records: Iterable[Recorded]) -> Answers:
    """Read RECORDS once, from its beginning."""
    answers = Answers(Findings())
    for recorded in records:
        enter(answers, recorded.seq, recorded.event)
    return answers


def enter(answers: Answers, seq: int, event: Event) -> None:
    """Take up the next event of RECORDS."""
    if seq != answers.last + 1:
        answers.findings.add("gap", f"RECORDS goes on at {seq}; expected {answers.last + 1}", records=[seq])
    answers.last = seq
    if type(event) is InferenceRecorded:
        _answer(answers, seq, event)
    elif type(event) is ReportReceived:
        _report(answers, Feedback(seq, event))


def _answer(answers: Answers, seq: int, event: InferenceRecorded) -> None:
    """Twice stored is twice eligible: a trainer that has consumed the first copy takes the second for a new one."""
    if event.spans and not make_up(event.spans, whole(event)):
        text = f"record {event.record} does not name each of its {event.answer_tokens} tokens' versions"
        answers.findings.add(1, f"{text}, one after the other: {event.spans}", records=[seq])
    answer = Answer(
        seq,
        event.record,
        intern(event.engine),
        intern(event.boot),
        intern(event.load_id),
        event.as_of,
        event.done_as_of,
        event.tags.get("phase") == FINAL,
        event.spans,
        intern(event.scenario),
    )
    before = answers.by_id.setdefault(event.record, answer)
    if before is not answer:
        text = f"record {event.record} is stored at {before.seq} and again at {seq}; expected once"
        answers.findings.add(6, text, records=[before.seq, seq])
    elif answers.early:
        answer.report = answers.early.pop(event.record, None)


def _report(answers: Answers, feedback: Feedback) -> None:
    seq, report = feedback.seq, feedback.event
    before = answers.reports.setdefault(report.report, feedback)
    if before is not feedback and before.event != report:
        text = f"report {report.report} says something else at {seq} than at {before.seq}; a report is never changed"
        answers.findings.add("report", text, records=[before.seq, seq])
    for record in report.references:
        answer = answers.by_id.get(record)
        if answer is None:
            text = f"report {report.report} at {seq} names record {record}; expected one recorded before it"
            answers.findings.add("report", text, records=[seq])
            answers.early.setdefault(record, feedback)
        elif answer.report is None:
            answer.report = feedback


def consume(answers: Answers, batches: Batches, seq: int, event: JobDispatched, findings: Findings) -> None:
    """Enter what the job dispatched at LOG `seq` consumes."""
    batch = batches.get(event.batch.digest, Unread("it is not there"))
    if isinstance(batch, Unread):
        text = f"what job {event.job} (LOG {seq}) consumed: batch {event.batch.digest}: {batch.why}"
        findings.unchecked.append(text)
        return
    said = (event.job, event.step, event.base, event.records, event.scenario)
    found = (batch.job, batch.step, batch.base, len(batch.records), batch.scenario or event.scenario)
    if said != found:
        text = f"LOG {seq} dispatches (job, step, base, records, scenario) {said}, its batch says {found}"
        findings.add(6, text, [seq])
    for record, at in batch.records:
        for why in _spend(answers, seq, event.scenario, record, at):
            findings.add(6, f"job {event.job} consumes record {record} at {at}, {why}", [seq], [at])
    _check_samples(answers, seq, batch, findings)


def _spend(answers: Answers, seq: int, scenario: str, record: str, at: int) -> list[str]:
    """Enter that the job at LOG `seq` consumes the record; returns what is wrong with that."""
    answer = answers.by_id.get(record)
    wrong: list[str] = []
    before = answer.consumed if answer else answers.lost.get(record)
    if before:
        wrong.append("named twice in its batch" if before == seq else f"which the job at LOG {before} had consumed")
    elif _was_taken(answers, scenario, at):
        wrong.append(f"which a job up to LOG {answers.begin}, before this log began, had consumed or given up")
    if answer:
        answers.consumed += not before
        answer.consumed = seq
        _check_fitness(answer, seq, scenario, at, wrong)
    else:
        answers.lost[record] = seq
        wrong.append("which was never recorded")
    return wrong


def _was_taken(answers: Answers, scenario: str, at: int) -> bool:
    """A start speaks of the whole model, or of each adapter's scenario that had a job."""
    before = answers.before.get(scenario) or answers.before.get("")
    return before is not None and (at <= before.floor or at in before.taken)


def _check_fitness(answer: Answer, seq: int, scenario: str, at: int, wrong: list[str]) -> None:
    if answer.scenario != scenario:
        wrong.append(f"which answers {answer.scenario}, not {scenario}")
    if answer.seq != at:
        wrong.append(f"which is recorded at {answer.seq}")
    if answer.done_as_of >= seq:
        wrong.append(f"which was still generated at LOG {answer.done_as_of}, not before its consumption at {seq}")
    if answer.report is None:
        wrong.append("which nobody reported on")
    elif _excused(answer.report.event):
        wrong.append(f"which report {answer.report.event.report} keeps from training")


def _excused(report: ReportReceived) -> bool:
    training = report.metadata.get("training")
    return isinstance(training, dict) and training.get("eligible") is False


def _check_samples(answers: Answers, seq: int, batch: Consumption, findings: Findings) -> None:
    named, used = [record for record, _ in batch.records], [sample.record for sample in batch.samples]
    if named != used and sorted(named) != sorted(used):
        less, more = Counter(named), Counter(used)
        wrong = ", ".join(sorted({*(less - more), *(more - less)})[:MAX_SEQUENCES])
        findings.add(6, f"job {batch.job} does not train on exactly what it consumes, each once: {wrong}", [seq])
    for sample in batch.samples:
        answer = answers.by_id.get(sample.record)
        if answer is None or answer.report is None:
            continue
        if sample.load_id != answer.load_id or sample.reward != answer.report.event.score:
            said, found = (sample.load_id, sample.reward), (answer.load_id, answer.report.event.score)
            text = f"job {batch.job} trains on {sample.record} as (load id, reward) {said}, recorded as {found}"
            findings.add("reward", text, [seq], [answer.seq, answer.report.seq])
        if (spans := batch.spans.get(sample.record, ())) != answer.spans:
            text = f"job {batch.job} trains on {sample.record} with spans {spans}, recorded as {answer.spans}"
            findings.add(6, text, [seq], [answer.seq])
