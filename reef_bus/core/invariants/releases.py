"""Targets and commits: invariants 3, 4, 5, 7, 8 and 10 of each, by the ledger.

Knows: what was said before. Must not know: the world, or the code that decides on a release.

A `ReceiverVerified` of another digest is an observation and legal; to count it as a proof is not. So digests are
compared where something is made of them: in targets, in commits, in the reports that commits name.
"""

from __future__ import annotations

from collections.abc import Iterator

from reef_bus.core.ids import BASE, parse_load_id
from reef_bus.core.invariants import holdings
from reef_bus.core.invariants.state import Ledger, Open
from reef_bus.errors import ContractError
from reef_bus.events import EngineStaged, Evidence, ReceiverFailed, Recorded, ReleaseCommitted, TargetPersisted

SUPERSEDED = "superseded"  # the one refusal that a base chain may pass through

Wrong = Iterator[tuple[int | str, str]]
"""Invariants with what was found instead."""


# -- a target


def target(ledger: Ledger, recorded: Recorded, event: TargetPersisted) -> None:
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
    if event.lora:
        yield from holdings.target(ledger.holdings, event)
    elif ledger.tips:
        yield "frozen", f"of {event.scenario}; the base model of adapters is frozen"
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
    head, tip = _head(ledger, event)
    if event.parent != head:
        yield 5, f"with parent {event.parent}; the head is {head}"
    if event.request:
        yield from _wrong_rollback(ledger, event, head)
        return
    content = ledger.contents.get(event.candidate)
    if content is None or event.candidate not in ledger.selected:
        yield "decision", "which no trainer had selected"
        return
    if event.candidate in ledger.ended and event.candidate not in ledger.refused:
        yield "decision", f"which was {ledger.ended[event.candidate]} before, and no rollback asked for it"
    if content.scenario != (event.scenario if event.lora else ""):
        yield 5, f"as one of {event.scenario}; it is of {content.scenario or BASE}"
    base = content.base
    while base != tip and ledger.ended.get(base) == SUPERSEDED:
        base = ledger.contents[base].base
    if base != tip:
        yield 5, f"whose base chain ends at {base}; the head {head} is {tip}"


def _head(ledger: Ledger, event: TargetPersisted) -> tuple[str, str]:
    """The load id that it follows, and that one's content: of its scenario, if it is an adapter."""
    if event.lora and event.scenario in ledger.tips:
        return holdings.head(ledger.holdings, event.scenario), ledger.tips[event.scenario]
    return ledger.head, ledger.head_candidate


def _content(ledger: Ledger, event: TargetPersisted, load_id: str) -> str | None:
    """What the release is, if it is one of the same scenario's."""
    if not event.lora:
        return ledger.releases.get(load_id)
    origin, content = ledger.origins.get(event.scenario, ("", ""))
    found = content if load_id == origin else ledger.releases.get(load_id)
    return found if found and ledger.contents[found].scenario == event.scenario else None


def _wrong_rollback(ledger: Ledger, event: TargetPersisted, head: str) -> Wrong:
    """What a person asked for, on the head that it meets: content that was committed before."""
    asked = ledger.rollbacks.pop(event.request, None)
    if asked is None:
        yield 11, f"as the rollback asked for at {event.request}; nobody did, or it was answered before"
    elif asked.head != head:
        yield 11, f"as a rollback that was decided on {asked.head}; the head is {head}"
    elif event.lora and asked.scenario != event.scenario:
        yield 5, f"of {event.scenario}, as a rollback of {asked.scenario}"
    elif _content(ledger, event, asked.release) != event.candidate:
        yield 5, f"as the rollback to {asked.release}, which is {_content(ledger, event, asked.release)}"


# -- a commit


def commit(ledger: Ledger, recorded: Recorded, event: ReleaseCommitted) -> None:
    for invariant, text in _wrong_commit(ledger, event):
        ledger.findings.add(invariant, f"LOG {recorded.seq} commits {event.load_id}, {text}", [recorded.seq])
    ledger.commits, ledger.proofs = ledger.commits + 1, ledger.proofs + len(event.evidence)
    if ledger.open and ledger.open.target.lora:
        ledger.tips[ledger.open.target.scenario] = event.candidate
        ledger.holdings.heads[ledger.open.target.scenario].append((recorded.seq, event.load_id))
    else:
        ledger.head, ledger.head_candidate = event.load_id, event.candidate
    ledger.releases[event.load_id], ledger.open = event.candidate, None
    ledger.ended[event.candidate] = "committed"


def _wrong_commit(ledger: Ledger, event: ReleaseCommitted) -> Wrong:
    if ledger.open is None:
        yield 7, "and no publication is open"
        return
    aim, attempt, members = ledger.open.target, ledger.open.attempt, ledger.open.members
    head, _ = _head(ledger, aim)
    if event.parent != head:
        yield 5, f"with parent {event.parent}; the head is {head}"
    if event.manifest != ledger.digests.get(event.load_id):
        yield 3, f"with manifest {event.manifest}; that load id names {ledger.digests.get(event.load_id)}"
    said = (event.publication, event.attempt, event.candidate, event.load_id)
    expected = (aim.publication, attempt, aim.candidate, aim.load_id)
    if aim.lora and event.scenario != aim.scenario:
        yield 7, f"of {event.scenario}; the open attempt is of {aim.scenario}"
    if said != expected:
        yield 7, f"as (publication, attempt, candidate, load id) {said}; the open attempt is {expected}"
    named, expected_of = [(e.engine, e.boot) for e in event.evidence], [(m.engine, m.boot) for m in members]
    if not members or (named != expected_of and sorted(named) != sorted(expected_of)):
        boots = sorted(member.boot for member in members)
        yield 7, f"on the word of {sorted(e.boot for e in event.evidence)}; the attempt's members are {boots}"
    for evidence in event.evidence:
        if why := _wrong_proof(ledger, ledger.open, evidence):
            yield 7, f"but {evidence.engine} boot {evidence.boot} {why}"
    if aim.mode == "fenced" and (why := _wrong_order(ledger, ledger.open)):
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
    if isinstance(word, EngineStaged) and (why := _wrong_staging(ledger, evidence.boot, word, target)):
        return why
    if (evidence.engine, evidence.seq, evidence.manifest) != (word.engine, seq, word.manifest):
        return f"is quoted with {evidence.manifest} at {evidence.seq}; it reported at {seq}"
    return ""


def _wrong_staging(ledger: Ledger, boot: str, word: EngineStaged, target: TargetPersisted) -> str:
    if bool(word.adapter) != bool(target.lora):
        return f"staged adapter {word.adapter!r}; not {target.lora}"
    return ledger.misproved.get((boot, target.publication, word.attempt), "")


def _wrong_order(ledger: Ledger, open_: Open) -> str:
    """Invariant 2: no member's memory is written while another one may still generate."""
    words = [(member.boot, open_.target.publication, open_.attempt) for member in open_.members]
    first = min([ledger.reports[word].seq for word in words if word in ledger.reports], default=0)
    late = [word[0] for word in words if ledger.fences.get(word, first) >= first]
    return f"but boots {late} had not stopped when the first member reported at {first}" if first and late else ""
