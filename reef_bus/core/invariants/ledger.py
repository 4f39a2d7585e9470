"""The ledger: invariants 3, 4, 5, 7, 8 and 10 from raw events, so that the fold's own checks are not their own judge.

Knows: events that count, one after the other. Must not know: the world, or the code that decides on a release.

A `ReceiverVerified` of another digest is an observation and legal; to count it as a proof is not. So digests are
compared where something is made of them: in targets, in commits, in the reports that commits name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from reef_bus.core.ids import BASE, LoadId, parse_load_id
from reef_bus.core.invariants import lending
from reef_bus.core.invariants.findings import Findings
from reef_bus.core.invariants.lending import Lending
from reef_bus.core.invariants.records import Answers, Batches, consume
from reef_bus.core.start import Start
from reef_bus.errors import ContractError
from reef_bus.events import (
    Blob,
    CandidateReady,
    CandidateRejected,
    CandidateSelected,
    EngineFenced,
    EngineJoined,
    EngineMemoryReleased,
    EngineMemoryRestored,
    EngineStaged,
    Event,
    Evidence,
    JobDiscarded,
    JobDispatched,
    JobDropped,
    LogOpened,
    Member,
    PublicationHalted,
    PublicationRefused,
    ReceiverFailed,
    ReceiverVerified,
    Recorded,
    ReleaseCommitted,
    RollbackRequested,
    ScenarioRegistered,
    TargetPersisted,
    TransferAborted,
)

SUPERSEDED = "superseded"  # the one refusal that a base chain may pass through


class Content(msgspec.Struct, frozen=True, gc=False):
    """What a candidate was trained from, and what it must hash to."""

    base: str
    manifest: str
    weights: Blob


class Said(msgspec.Struct, frozen=True, gc=False):
    """A member's first report on an attempt."""

    seq: int
    event: EngineStaged | ReceiverVerified | ReceiverFailed


class Open(msgspec.Struct, frozen=True, gc=False):
    """The open publication, its current attempt and that attempt's membership."""

    target: TargetPersisted
    attempt: int
    members: tuple[Member, ...]


Word = tuple[str, str, int]
"""(boot, publication, attempt): whose word, and on what."""

Wrong = Iterator[tuple[int | str, str]]
"""Invariants with what was found instead."""


class Ledger(msgspec.Struct, kw_only=True):
    """What the events said so far. `ended` says how a candidate ended; `held` is what each boot last proved since its
    last fence; `stops` are, by boot, the proofs of what it had not held, for which nothing may be in hand, and the
    fences raised for the attempt that was then open: a stale one, stored late, proves no drain."""

    findings: Findings
    answers: Answers
    batches: Batches | None
    incarnation: str = ""
    sequence: int = 0
    head: str = ""
    head_candidate: str = ""
    digests: dict[str, str] = {}
    contents: dict[str, Content] = {}
    selected: dict[str, int] = {}
    ended: dict[str, str] = {}
    refused: dict[str, int] = {}
    targeted: dict[str, int] = {}
    releases: dict[str, str] = {}
    rollbacks: dict[int, RollbackRequested] = {}
    publications: dict[str, str] = {}
    open: Open | None = None
    job: str = ""
    reports: dict[Word, Said] = {}
    fences: dict[Word, int] = {}
    held: dict[str, tuple[str, str]] = {}
    stops: dict[str, list[int]] = {}
    engines: set[str] = set()
    jobs: int = 0
    commits: int = 0
    proofs: int = 0
    lending: Lending = msgspec.field(default_factory=Lending)


def seed(ledger: Ledger, start: Start) -> None:
    """Take up what the predecessor's log had shown, which is audited with that log."""
    ledger.sequence, ledger.head, ledger.ended = start.sequence, start.head, dict(start.ended)
    ledger.selected = dict.fromkeys((BASE, *start.selected), start.seq) if start.scenario else {}
    for candidate in start.candidates:
        ledger.contents[candidate.id] = Content(candidate.base, candidate.manifest, candidate.weights)
    for release in start.releases:
        ledger.digests[release.load_id] = release.manifest
        if release.load_id == start.head:
            ledger.head_candidate = release.candidate
    ledger.answers.begin, ledger.answers.floor, ledger.answers.taken = start.seq, start.floor, frozenset(start.taken)


def note(ledger: Ledger, recorded: Recorded) -> None:
    """Enter one event that is not void."""
    entry = ENTRIES.get(type(recorded.event))
    if entry:
        entry(ledger, recorded, recorded.event)
    lending.note(ledger.lending, recorded, ledger.findings)


def _open_log(ledger: Ledger, recorded: Recorded, event: LogOpened) -> None:
    ledger.incarnation = event.incarnation


def _ask(ledger: Ledger, recorded: Recorded, event: RollbackRequested) -> None:
    ledger.rollbacks[recorded.seq] = event


# -- what engines say


def _join(ledger: Ledger, recorded: Recorded, event: EngineJoined) -> None:
    ledger.engines.add(event.engine)


def _report(ledger: Ledger, recorded: Recorded, event: EngineStaged | ReceiverVerified | ReceiverFailed) -> None:
    word = (recorded.boot, event.publication, event.attempt)
    ledger.reports.setdefault(word, Said(recorded.seq, event))
    if type(event) is ReceiverVerified:
        _prove(ledger, recorded, event)
    elif type(event) is ReceiverFailed and not event.staged:
        ledger.held.pop(recorded.boot, None)


def _prove(ledger: Ledger, recorded: Recorded, event: ReceiverVerified) -> None:
    """Whoever proves again what it holds may generate before that is stored: its gate asks its own memory."""
    proven = event.load_id, event.manifest
    if event.method == "swapped" or ledger.held.get(recorded.boot) != proven:
        ledger.stops.setdefault(recorded.boot, []).append(recorded.seq)
    ledger.held[recorded.boot] = proven


def _fence(ledger: Ledger, recorded: Recorded, event: EngineFenced) -> None:
    """Invariant 10: whoever stops, stops for a target; and a candidate that is refused has none."""
    seq, boot, candidate = recorded.seq, recorded.boot, ledger.publications.get(event.publication)
    if candidate is None:
        text = f"{event.engine} boot {boot} stopped for publication {event.publication}; expected one with a target"
        ledger.findings.add(10, text, [seq])
    elif candidate in ledger.refused:
        refused = ledger.refused[candidate]
        text = f"{event.engine} boot {boot} stopped for candidate {candidate}, which was refused at {refused}"
        ledger.findings.add(10, text, [refused, seq])
    ledger.fences.setdefault((boot, event.publication, event.attempt), seq)
    ledger.held.pop(boot, None)
    if ledger.open and (ledger.open.target.publication, ledger.open.attempt) == (event.publication, event.attempt):
        ledger.stops.setdefault(boot, []).append(seq)


def _memory(ledger: Ledger, recorded: Recorded, event: EngineMemoryReleased | EngineMemoryRestored) -> None:
    """Weights that were away are proven anew, and whoever gave memory away had stopped."""
    if "weights" in event.regions:
        ledger.held.pop(recorded.boot, None)
    if type(event) is EngineMemoryReleased and event.fence == ledger.lending.fence:
        ledger.stops.setdefault(recorded.boot, []).append(recorded.seq)


# -- what the trainer says


def _register(ledger: Ledger, recorded: Recorded, event: ScenarioRegistered) -> None:
    ledger.head, ledger.head_candidate = str(LoadId(ledger.incarnation, 0)), BASE
    ledger.contents[BASE] = Content("", event.manifest, event.weights)
    ledger.releases[ledger.head] = BASE
    ledger.digests[ledger.head] = event.manifest
    ledger.selected[BASE], ledger.ended[BASE] = recorded.seq, "committed"


def _dispatch(ledger: Ledger, recorded: Recorded, event: JobDispatched) -> None:
    if ledger.job:
        text = f"job {event.job} is dispatched while {ledger.job} is open; expected at most one open job"
        ledger.findings.add(8, text, [recorded.seq])
    ledger.job, ledger.jobs = event.job, ledger.jobs + 1
    if ledger.batches is not None:
        consume(ledger.answers, ledger.batches, recorded.seq, event, ledger.findings)


def _ready(ledger: Ledger, recorded: Recorded, event: CandidateReady) -> None:
    ledger.contents.setdefault(event.candidate, Content(event.base, event.manifest, event.weights))


def _select(ledger: Ledger, recorded: Recorded, event: CandidateSelected) -> None:
    ledger.job, ledger.selected[event.candidate] = "", recorded.seq


def _close_job(ledger: Ledger, recorded: Recorded, event: CandidateRejected | JobDropped | JobDiscarded) -> None:
    ledger.job = ""


# -- what publishers say, beside targets and commits


def _abort(ledger: Ledger, recorded: Recorded, event: TransferAborted) -> None:
    if ledger.open:
        ledger.open = Open(ledger.open.target, event.next_attempt, event.members)


def _halt(ledger: Ledger, recorded: Recorded, event: PublicationHalted) -> None:
    if ledger.open:
        if not ledger.open.target.request:
            ledger.ended[ledger.open.target.candidate] = "halted"
        ledger.open = None


def _refuse(ledger: Ledger, recorded: Recorded, event: PublicationRefused) -> None:
    seq = recorded.seq
    if event.request:
        ledger.rollbacks.pop(event.request, None)
        return
    if event.candidate in ledger.targeted:
        text = f"candidate {event.candidate} is refused at {seq}, after its target had raised a fence"
        ledger.findings.add(10, text, [ledger.targeted[event.candidate], seq])
    ledger.ended[event.candidate], ledger.refused[event.candidate] = event.reason, seq


# -- a target


def _target(ledger: Ledger, recorded: Recorded, event: TargetPersisted) -> None:
    seq = recorded.seq
    for invariant, text in _wrong_target(ledger, event):
        ledger.findings.add(invariant, f"LOG {seq} targets candidate {event.candidate} {text}", [seq])
    ledger.digests.setdefault(event.load_id, event.manifest)
    ledger.open = Open(event, event.attempt, event.members)
    ledger.targeted[event.candidate], ledger.publications[event.publication] = seq, event.candidate


def _wrong_target(ledger: Ledger, event: TargetPersisted) -> Wrong:
    if ledger.open:
        yield 8, f"while {ledger.open.target.publication} is open; expected at most one open publication"
    if event.candidate in ledger.refused:
        yield 10, f"which was refused at {ledger.refused[event.candidate]}"
    if not event.members:
        yield 7, "for no member at all"
    yield from _wrong_number(ledger, event.load_id)
    yield from _wrong_content(ledger, event)
    yield from _wrong_ancestry(ledger, event)


def _wrong_number(ledger: Ledger, load_id: str) -> Wrong:
    try:
        found = parse_load_id(load_id)
    except ContractError as error:
        yield 4, f"under no load id: {error}"
        return
    if found.incarnation != ledger.incarnation:
        yield 4, f"under load id {load_id}; the log's incarnation is {ledger.incarnation}"
    if found.sequence <= ledger.sequence:
        yield 4, f"under load id {load_id}; expected a sequence above {ledger.sequence}"
    ledger.sequence = max(ledger.sequence, found.sequence)


def _wrong_content(ledger: Ledger, event: TargetPersisted) -> Wrong:
    named, content = ledger.digests.get(event.load_id, event.manifest), ledger.contents.get(event.candidate)
    if named != event.manifest:
        yield 3, f"under load id {event.load_id} with manifest {event.manifest}; that load id names {named}"
    if content and (content.manifest, content.weights) != (event.manifest, event.weights):
        found = f"{event.manifest} and weights {event.weights.digest}"
        yield 3, f"with manifest {found}; it is {content.manifest} and {content.weights.digest}"


def _wrong_ancestry(ledger: Ledger, event: TargetPersisted) -> Wrong:
    """Invariant 5: the parent is the head, and the base chain reaches it through superseded candidates only."""
    if event.parent != ledger.head:
        yield 5, f"with parent {event.parent}; the head is {ledger.head}"
    if event.request:
        yield from _wrong_rollback(ledger, event)
        return
    content = ledger.contents.get(event.candidate)
    if content is None or event.candidate not in ledger.selected:
        yield "decision", "which no trainer had selected"
        return
    if event.candidate in ledger.ended and event.candidate not in ledger.refused:
        yield "decision", f"which was {ledger.ended[event.candidate]} before, and no rollback asked for it"
    base = content.base
    while base != ledger.head_candidate and ledger.ended.get(base) == SUPERSEDED:
        base = ledger.contents[base].base
    if base != ledger.head_candidate:
        yield 5, f"whose base chain ends at {base}; the head {ledger.head} is {ledger.head_candidate}"


def _wrong_rollback(ledger: Ledger, event: TargetPersisted) -> Wrong:
    """What a person asked for, on the head that it meets: content that was committed before."""
    asked = ledger.rollbacks.pop(event.request, None)
    if asked is None:
        yield 11, f"as the rollback asked for at {event.request}; nobody did, or it was answered before"
    elif asked.head != ledger.head:
        yield 11, f"as a rollback that was decided on {asked.head}; the head is {ledger.head}"
    elif ledger.releases.get(asked.release) != event.candidate:
        yield 5, f"as the rollback to {asked.release}, which is {ledger.releases.get(asked.release)}"


# -- a commit


def _commit(ledger: Ledger, recorded: Recorded, event: ReleaseCommitted) -> None:
    for invariant, text in _wrong_commit(ledger, event):
        ledger.findings.add(invariant, f"LOG {recorded.seq} commits {event.load_id}, {text}", [recorded.seq])
    ledger.commits, ledger.proofs = ledger.commits + 1, ledger.proofs + len(event.evidence)
    ledger.head, ledger.head_candidate, ledger.open = event.load_id, event.candidate, None
    ledger.releases[event.load_id] = event.candidate
    ledger.ended[event.candidate] = "committed"


def _wrong_commit(ledger: Ledger, event: ReleaseCommitted) -> Wrong:
    if ledger.open is None:
        yield 7, "and no publication is open"
        return
    target, attempt, members = ledger.open.target, ledger.open.attempt, ledger.open.members
    if event.parent != ledger.head:
        yield 5, f"with parent {event.parent}; the head is {ledger.head}"
    if event.manifest != ledger.digests.get(event.load_id):
        yield 3, f"with manifest {event.manifest}; that load id names {ledger.digests.get(event.load_id)}"
    said = (event.publication, event.attempt, event.candidate, event.load_id)
    expected = (target.publication, attempt, target.candidate, target.load_id)
    if said != expected:
        yield 7, f"as (publication, attempt, candidate, load id) {said}; the open attempt is {expected}"
    named, expected_of = [(e.engine, e.boot) for e in event.evidence], [(m.engine, m.boot) for m in members]
    if not members or (named != expected_of and sorted(named) != sorted(expected_of)):
        boots = sorted(member.boot for member in members)
        yield 7, f"on the word of {sorted(e.boot for e in event.evidence)}; the attempt's members are {boots}"
    for evidence in event.evidence:
        if why := _wrong_proof(ledger, ledger.open, evidence):
            yield 7, f"but {evidence.engine} boot {evidence.boot} {why}"
    if target.mode == "fenced" and (why := _wrong_order(ledger, ledger.open)):
        yield 2, why


def _wrong_proof(ledger: Ledger, open_: Open, evidence: Evidence) -> str:
    target = open_.target
    said = ledger.reports.get((evidence.boot, target.publication, open_.attempt))
    if said is None:
        return f"never reported on attempt {open_.attempt}"
    word, seq = said.event, said.seq
    if isinstance(word, ReceiverFailed):
        return f"first reported a failure at {seq}: {word.cause}"
    if (type(word) is EngineStaged) != (target.mode == "staged"):
        return f"first said {type(word).__name__} at {seq}, which proves nothing in mode {target.mode}"
    if (word.load_id, word.manifest) != (target.load_id, target.manifest):
        return f"verified {word.load_id} {word.manifest} at {seq}; not {target.manifest}"
    if (evidence.engine, evidence.seq, evidence.manifest) != (word.engine, seq, word.manifest):
        return f"is quoted with {evidence.manifest} at {evidence.seq}; it reported at {seq}"
    return ""


def _wrong_order(ledger: Ledger, open_: Open) -> str:
    """Invariant 2: no member's memory is written while another one may still generate."""
    words = [(member.boot, open_.target.publication, open_.attempt) for member in open_.members]
    first = min([ledger.reports[word].seq for word in words if word in ledger.reports], default=0)
    late = [word[0] for word in words if ledger.fences.get(word, first) >= first]
    return f"but boots {late} had not stopped when the first member reported at {first}" if first and late else ""


ENTRIES: Mapping[type[Event], Callable[[Ledger, Recorded, Any], None]] = {
    LogOpened: _open_log,
    RollbackRequested: _ask,
    EngineJoined: _join,
    EngineFenced: _fence,
    EngineMemoryReleased: _memory,
    EngineMemoryRestored: _memory,
    EngineStaged: _report,
    ReceiverVerified: _report,
    ReceiverFailed: _report,
    ScenarioRegistered: _register,
    JobDispatched: _dispatch,
    CandidateReady: _ready,
    CandidateSelected: _select,
    CandidateRejected: _close_job,
    JobDropped: _close_job,
    JobDiscarded: _close_job,
    TargetPersisted: _target,
    TransferAborted: _abort,
    ReleaseCommitted: _commit,
    PublicationHalted: _halt,
    PublicationRefused: _refuse,
}
