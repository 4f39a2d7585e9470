"""Which records a job may train on: the fold of RECORDS, eligibility, and what stays consumed.

Knows: the `record` family. Must not know: tokens, blobs' contents, or the LOG; staleness arrives as a function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec

from reef_bus.events import Blob, InferenceRecorded, Recorded, ReportReceived, Span

TRAINED_TEMPERATURE = 1.0  # the update compares logprobs at this temperature only


def whole(answer: InferenceRecorded) -> Span:
    """An answer as if it had been generated in one go."""
    return Span(answer.load_id, 0, answer.answer_tokens, answer.as_of, answer.done_as_of)


def make_up(spans: Sequence[Span], answer: Span) -> bool:
    """They are that answer, part by part: every token in its order, none twice, each part begun when the one before had
    ended; and it is named after the first."""
    ends = [0, *(span.first + span.count for span in spans)]
    times = [time for span in spans for time in (span.as_of, span.done_as_of)]
    in_order = [span.first for span in spans] == ends[:-1] and ends[-1] == answer.count and times == sorted(times)
    named = (spans[0].load_id, times[0], times[-1]) == (answer.load_id, answer.as_of, answer.done_as_of)
    return in_order and named and all(span.count > 0 for span in spans)


class Unit(msgspec.Struct, kw_only=True):
    """One recorded answer that may be trained on, once its report is there."""

    seq: int
    record: str
    scenario: str
    load_id: str
    group: str
    blob: Blob
    row: int
    spans: tuple[Span, ...] = ()
    reward: float | None = None

    def load_ids(self) -> set[str]:
        return {span.load_id for span in self.spans} or {self.load_id}


class Consumed(msgspec.Struct, frozen=True):
    """What is done with of one scenario: up to `floor` its answers are consumed or given up, and `taken` are the
    sequences above it that are consumed. Of others it says nothing: those may wait as long as they like."""

    floor: int = 0
    taken: frozenset[int] = frozenset()


NOTHING = Consumed()


class Book(msgspec.Struct):
    """The answers that are not consumed, by record id, and their groups, by scenario and name; and what is consumed, by
    scenario."""

    consumed: dict[str, Consumed] = {}
    units: dict[str, Unit] = {}
    groups: dict[tuple[str, str], list[str]] = {}


def evolve(book: Book, recorded: Recorded) -> None:
    """Apply one event of RECORDS. Answers that are consumed or not made for training leave nothing behind."""
    match recorded.event:
        case InferenceRecorded() as answer:
            done = book.consumed.get(answer.scenario, NOTHING)
            known = recorded.seq <= done.floor or recorded.seq in done.taken or answer.record in book.units
            if known or answer.temperature != TRAINED_TEMPERATURE:
                return
            group = answer.tags.get("group") or f"{answer.load_id} {answer.prompt}"
            book.units[answer.record] = Unit(
                seq=recorded.seq,
                record=answer.record,
                scenario=answer.scenario,
                load_id=answer.load_id,
                group=group,
                blob=answer.blob,
                row=answer.row,
                spans=answer.spans,
            )
            book.groups.setdefault((answer.scenario, group), []).append(answer.record)
        case ReportReceived() as report:
            for record in report.references:
                if record in book.units and book.units[record].reward is None:
                    _report(book, book.units[record], report)


def _report(book: Book, unit: Unit, report: ReportReceived) -> None:
    training = report.metadata.get("training")
    if isinstance(training, dict) and training.get("eligible") is False:
        remove(book, [unit])
    else:
        unit.reward = report.score


def remove(book: Book, units: Iterable[Unit]) -> None:
    """These answers are of no further interest."""
    for unit in units:
        del book.units[unit.record]
        key = unit.scenario, unit.group
        book.groups[key].remove(unit.record)
        if not book.groups[key]:
            del book.groups[key]


def choose(book: Book, scenario: str, lag: Callable[[str], int | None], groups: int, size: int) -> list[Unit] | None:
    """The scenario's oldest `groups` groups with at least `size` rewarded, fresh answers each, `size` of each; None if
    too few.

    `lag` gives an answer's staleness by its load id, None when it may not be used for the next job. An answer of
    several versions is as stale as its oldest tokens: it is fresh if all of them are.
    """
    chosen: list[list[Unit]] = []
    for (of, _), records in list(book.groups.items()):
        if of != scenario or len(records) < size:
            continue
        units = [book.units[record] for record in records]
        fresh = [u for u in units if u.reward is not None and all(lag(id_) is not None for id_ in u.load_ids())]
        if len(fresh) >= size:
            chosen.append(fresh[:size])
        if len(chosen) == groups:
            return [unit for units in chosen for unit in units]
    return None


def retire(book: Book, hopeless: Callable[[str, str], bool]) -> int:
    """Forget answers with tokens of load ids that no future base of their scenario may use. Returns how many."""
    gone = [unit for unit in book.units.values() if any(hopeless(unit.scenario, id_) for id_ in unit.load_ids())]
    remove(book, gone)
    return len(gone)


def consumed(book: Book, scenario: str, units: Iterable[Unit], last: int) -> Consumed:
    """What is consumed of the scenario once its `units` are, with RECORDS folded up to `last`."""
    spent = {unit.seq for unit in units}
    waiting = [unit.seq for unit in book.units.values() if unit.scenario == scenario and unit.seq not in spent]
    floor = min(waiting, default=last + 1) - 1
    before = book.consumed.get(scenario, NOTHING)
    return Consumed(floor, frozenset(seq for seq in before.taken | spent if seq > floor))
