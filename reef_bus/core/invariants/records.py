"""RECORDS by id, and invariant 6: a record is consumed once, and trained on as it was recorded.

Knows: answers, reports, what a batch says of itself. Must not know: tokens, engines, or how a batch is stored.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from reef_bus.core.invariants.findings import MAX_SEQUENCES, Findings
from reef_bus.core.records import make_up, whole
from reef_bus.events import InferenceRecorded, JobDispatched, Recorded, ReportReceived, Span


class Trained(msgspec.Struct, frozen=True, array_like=True):
    """One sample of a batch without its tokens: which record, by which load id, at which reward."""

    record: str
    load_id: str
    reward: float


class Consumption(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a job's batch says: its commit context, the records (id, RECORDS sequence), the samples made of them; and,
    by record, the spans of those that several versions made."""

    job: str
    step: int
    base: str
    records: tuple[tuple[str, int], ...]
    samples: tuple[Trained, ...]
    spans: dict[str, tuple[Span, ...]] = {}


class Unread(msgspec.Struct, frozen=True):
    """A batch that could not be read, and why."""

    why: str


Batches = Mapping[str, Consumption | Unread]
"""By the digest that `JobDispatched` names."""


class Answer(NamedTuple):
    """An answer and where it is in RECORDS."""

    seq: int
    event: InferenceRecorded


class Part(NamedTuple):
    """What one version generated of an answer in one go, and where the answer is in RECORDS."""

    seq: int
    event: InferenceRecorded
    span: Span


class Feedback(NamedTuple):
    """A report and where it is in RECORDS."""

    seq: int
    event: ReportReceived


class Answers(msgspec.Struct):
    """RECORDS by id. `first` is each record's first report, the one that counts; `consumed` the LOG sequence of the
    job that took each record. Up to LOG `begin`, jobs of the log's predecessor had taken RECORDS up to `floor`, or
    given them up, and `taken` above it."""

    by_id: dict[str, Answer] = {}
    reports: dict[str, Feedback] = {}
    first: dict[str, Feedback] = {}
    consumed: dict[str, int] = {}
    begin: int = 0
    floor: int = 0
    taken: frozenset[int] = frozenset()


def every_part(answers: Answers) -> list[Part]:
    """Of all answers, by where they say that they were generated."""
    found = [Part(seq, event, span) for seq, event in answers.by_id.values() for span in event.spans or (whole(event),)]
    return sorted(found, key=lambda part: part.span.as_of)


def index(records: Sequence[Recorded], findings: Findings) -> Answers:
    """Read RECORDS once, from its beginning."""
    answers, last = Answers(), 0
    for recorded in records:
        if recorded.seq != last + 1:
            findings.add("gap", f"RECORDS goes on at {recorded.seq}; expected {last + 1}", records=[recorded.seq])
        last, event = recorded.seq, recorded.event
        if isinstance(event, InferenceRecorded):
            _answer(answers, Answer(last, event), findings)
        elif isinstance(event, ReportReceived):
            _report(answers, Feedback(last, event), findings)
    return answers


def _answer(answers: Answers, answer: Answer, findings: Findings) -> None:
    """Twice stored is twice eligible: a trainer that has consumed the first copy takes the second for a new one."""
    before = answers.by_id.setdefault(answer.event.record, answer)
    if before is not answer:
        text = f"record {answer.event.record} is stored at {before.seq} and again at {answer.seq}; expected once"
        findings.add(6, text, records=[before.seq, answer.seq])
    if answer.event.spans and not make_up(answer.event.spans, whole(answer.event)):
        text = f"record {answer.event.record} does not name each of its {answer.event.answer_tokens} tokens' versions"
        findings.add(1, f"{text}, one after the other: {answer.event.spans}", records=[answer.seq])


def _report(answers: Answers, feedback: Feedback, findings: Findings) -> None:
    seq, report = feedback
    before = answers.reports.setdefault(report.report, feedback)
    if before is not feedback and before.event != report:
        text = f"report {report.report} says something else at {seq} than at {before.seq}; a report is never changed"
        findings.add("report", text, records=[before.seq, seq])
    for record in report.references:
        if record not in answers.by_id:
            text = f"report {report.report} at {seq} names record {record}; expected one recorded before it"
            findings.add("report", text, records=[seq])
        answers.first.setdefault(record, feedback)


def consume(answers: Answers, batches: Batches, seq: int, event: JobDispatched, findings: Findings) -> None:
    """Enter what the job dispatched at LOG `seq` consumes."""
    batch = batches.get(event.batch.digest, Unread("it is not there"))
    if isinstance(batch, Unread):
        text = f"what job {event.job} (LOG {seq}) consumed: batch {event.batch.digest}: {batch.why}"
        findings.unchecked.append(text)
        return
    said = (event.job, event.step, event.base, event.records)
    found = (batch.job, batch.step, batch.base, len(batch.records))
    if said != found:
        findings.add(6, f"LOG {seq} dispatches (job, step, base, records) {said}, its batch says {found}", [seq])
    for record, at in batch.records:
        for why in _spend(answers, seq, record, at):
            findings.add(6, f"job {event.job} consumes record {record} at {at}, {why}", [seq], [at])
    _check_samples(answers, seq, batch, findings)


def _spend(answers: Answers, seq: int, record: str, at: int) -> Iterator[str]:
    answer, feedback, before = answers.by_id.get(record), answers.first.get(record), answers.consumed.get(record)
    if before:
        yield "named twice in its batch" if before == seq else f"which the job at LOG {before} had consumed"
    elif at <= answers.floor or at in answers.taken:
        yield f"which a job up to LOG {answers.begin}, before this log began, had consumed or given up"
    answers.consumed[record] = seq
    if answer is None:
        yield "which was never recorded"
        return
    if answer.seq != at:
        yield f"which is recorded at {answer.seq}"
    if answer.event.done_as_of >= seq:
        yield f"which was still generated at LOG {answer.event.done_as_of}, not before its consumption at {seq}"
    if feedback is None:
        yield "which nobody reported on"
    elif _excused(feedback.event):
        yield f"which report {feedback.event.report} keeps from training"


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
        answer, feedback = answers.by_id.get(sample.record), answers.first.get(sample.record)
        if not answer or not feedback:
            continue
        said, found = (sample.load_id, sample.reward), (answer.event.load_id, feedback.event.score)
        if said != found:
            text = f"job {batch.job} trains on {sample.record} as (load id, reward) {said}, recorded as {found}"
            findings.add("reward", text, [seq], [answer.seq, feedback.seq])
        if (spans := batch.spans.get(sample.record, ())) != answer.event.spans:
            text = f"job {batch.job} trains on {sample.record} with spans {spans}, recorded as {answer.event.spans}"
            findings.add(6, text, [seq], [answer.seq])
