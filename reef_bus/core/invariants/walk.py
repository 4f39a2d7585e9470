"""The audit's passes over a history: fold and judge, judge drains, replay, fold again without the void events.

Knows: the fold, the serving rule, the ledger. Must not know: where a history comes from.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from reef_bus.core.ids import BASE
from reef_bus.core.invariants.findings import Audit, Final, Findings, Rewards
from reef_bus.core.invariants.ledger import Ledger, note, seed
from reef_bus.core.invariants.records import Answer, Batches, index
from reef_bus.core.serving import fenced, holds_head, live, may_generate
from reef_bus.core.start import Start
from reef_bus.core.void import Tail
from reef_bus.core.world import World, fold
from reef_bus.errors import ContractError
from reef_bus.events import InferenceRecorded, Recorded

FINAL = "final"  # the value of the tag `phase` by which a harness marks the answers of its last measurement


class Folded(NamedTuple):
    """The events that could be folded, which of them are void, and the world after them."""

    events: Sequence[Recorded]
    voids: frozenset[int]
    world: World


def check(
    log: Iterable[Recorded], records: Sequence[Recorded], batches: Batches | None, start: Start | None = None
) -> Audit:
    """Audit a history: LOG and RECORDS from their beginnings, and what its jobs' batches say (None: none at hand).
    `start` is what LOG goes on from; what was before it is audited with its predecessor.

    RECORDS must hold what LOG's jobs consumed, and LOG what RECORDS' answers stood on. Never raises for what it finds.
    """
    events, findings = tuple(log), Findings()
    ledger = Ledger(findings=findings, answers=index(records, findings), batches=batches)
    if start is not None:
        seed(ledger, start)
    folded = _fold(events, ledger, start)
    _check_drains(ledger)
    _replay(folded, start, findings)
    _fold_without_voids(folded, start, findings)
    if batches is None and ledger.jobs:
        findings.unchecked.append(f"what {ledger.jobs} jobs consumed (invariant 6): their batches are not at hand")
    return _audit(folded, ledger, len(events))


# -- fold and judge


def _fold(events: Sequence[Recorded], ledger: Ledger, start: Start | None) -> Folded:
    """One pass. Answers come in where they say that they were given; the ledger gets what is not void."""
    world, voids, findings = World(start=start), set[int](), ledger.findings
    waiting, judged = _waiting(ledger), 0
    begin = start.seq if start else 0
    for count, recorded in enumerate(events):
        while judged < len(waiting) and waiting[judged].event.as_of < recorded.seq:
            _judge(world, waiting[judged], findings)
            judged += 1
        expected = (world.seq or begin) + 1
        if recorded.seq != expected:
            findings.add("gap", f"LOG goes on at {recorded.seq}; expected {expected}", [recorded.seq])
        try:
            void = fold(world, recorded)
        except ContractError as error:
            _contradiction(ledger, recorded, str(error), len(events) - count - 1, len(waiting) - judged)
            return Folded(events[:count], frozenset(voids), world)
        if void:
            voids.add(recorded.seq)
        else:
            note(ledger, recorded)
    for answer in waiting[judged:]:
        _judge(world, answer, findings)
    return Folded(events, frozenset(voids), world)


def _waiting(ledger: Ledger) -> list[Answer]:
    """The answers to judge, by where they say that they were given. Of what was given before this log began, only the
    release is known."""
    answers, findings = sorted(ledger.answers.by_id.values(), key=lambda answer: answer.event.as_of), ledger.findings
    begin = ledger.answers.begin
    early = [answer for answer in answers if 0 < answer.event.as_of <= begin]
    for seq, event in early:
        if event.load_id not in ledger.digests:
            text = f"record {event.record} names {event.load_id}, which was not committed before LOG {begin}"
            findings.add(1, text, [], [seq])
    if early:
        text = f"{len(early)} answers as of LOG {begin} or before (invariants 1 and 2): audit the predecessor's archive"
        findings.unchecked.append(text)
    return [answer for answer in answers if not 0 < answer.event.as_of <= begin]


def _contradiction(ledger: Ledger, recorded: Recorded, text: str, events: int, answers: int) -> None:
    """No consumer folds past it, so neither do we; the ledger says which invariant it would have broken."""
    ledger.findings.add("fold", text, [recorded.seq])
    note(ledger, recorded)
    if events or answers:
        rest = f"{events} events and {answers} answers from LOG {recorded.seq} on"
        ledger.findings.unchecked.append(f"{rest}: every consumer halts at the contradiction there")


def _judge(world: World, answer: Answer, findings: Findings) -> None:
    """Invariants 1 and 2: the serving rule, at the very point of the log at which the engine says it stood."""
    seq, event = answer
    text = f"record {event.record} by {event.engine} boot {event.boot} names {event.load_id} as of LOG {event.as_of}, "
    head = world.publications.head
    if not 0 < event.as_of <= min(world.seq, event.done_as_of):
        findings.add(1, f"{text}done as of {event.done_as_of}; the log goes from 1 to {world.seq}", (), [seq])
    elif event.load_id not in world.publications.releases:
        findings.add(1, f"{text}when that was not committed", [event.as_of], [seq])
    elif not may_generate(world, event.engine, event.boot) or head is None:
        findings.add(2, f"{text}when it must not generate: {_why_not(world, event)}", [event.as_of], [seq])
    elif event.load_id != head.load_id:
        findings.add(2, f"{text}when it held the head {head.load_id}", [event.as_of], [seq])


def _why_not(world: World, event: InferenceRecorded) -> str:
    engine = world.membership.engines.get(event.engine)
    if engine is None or engine.boot != event.boot:
        return f"the engine's boot was {engine.boot if engine else 'none yet'}"
    if not live(world, engine):
        return "this boot had left" if engine.left else "this boot was excluded"
    if fenced(world, event.engine, event.boot):
        return "a fence covered it"
    proof = engine.verified
    return f"its last proof since its fence is {f'{proof.load_id} {proof.manifest}' if proof else 'none'}, not the head"


def _check_drains(ledger: Ledger) -> None:
    """Invariant 2: who says that generation has stopped has nothing left to answer."""
    for seq, event in ledger.answers.by_id.values():
        stops = ledger.stops.get(event.boot, ())
        place = bisect_right(stops, event.as_of)
        if place < len(stops) and stops[place] <= event.done_as_of:
            said = f"boot {event.boot} said at LOG {stops[place]} that it had stopped"
            text = f"record {event.record} was generated from LOG {event.as_of} to {event.done_as_of}, but {said}"
            ledger.findings.add(2, text, [stops[place]], [seq])


# -- fold again


def _replay(folded: Folded, start: Start | None, findings: Findings) -> None:
    """Invariant 9: the same events, from the start and half way through a snapshot, give the same world."""
    world, middle = World(start=start), len(folded.events) // 2
    try:
        for count, recorded in enumerate(folded.events):
            if count == middle:
                world = msgspec.msgpack.decode(msgspec.msgpack.encode(world), type=World)
            fold(world, recorded)
    except ContractError as error:
        findings.add(9, f"replayed, an event that was folded contradicts the log: {error}", [error.seq])
        return
    if world != folded.world:
        text = f"replayed to LOG {folded.world.seq}, the world differs in {_difference(world, folded.world)}"
        findings.add(9, text, [folded.world.seq])


def _fold_without_voids(folded: Folded, start: Start | None, findings: Findings) -> None:
    """Invariant 11: had the void events never been stored, nothing but their places would be different."""
    if not folded.voids:
        return
    world = World(start=start)
    try:
        for recorded in folded.events:
            if recorded.seq not in folded.voids:
                world.tails.setdefault(recorded.event.chain, Tail()).seq = recorded.prev
                fold(world, recorded)
    except ContractError as error:
        findings.add(11, f"without the void events, the log contradicts itself: {error}", folded.voids)
        return
    found, expected = _content(folded.world), _content(world)
    if found != expected:
        findings.add(11, f"void events changed the world's {_difference(found, expected)}", folded.voids)


def _content(world: World) -> World:
    """The world without the places of events: equal contents mean the same to everybody."""
    tails = {name: msgspec.structs.replace(tail, seq=0) for name, tail in world.tails.items()}
    kept = {name: tail for name, tail in tails.items() if tail != Tail()}
    return msgspec.structs.replace(world, seq=0, last_id="", time=0, void=0, tails=kept)


def _difference(one: World, other: World) -> str:
    return ", ".join(name for name in World.__struct_fields__ if getattr(one, name) != getattr(other, name))


# -- figures


def _audit(folded: Folded, ledger: Ledger, log_events: int) -> Audit:
    answers, findings = ledger.answers, ledger.findings
    engines = dict.fromkeys(sorted(ledger.engines), 0)
    for answer in answers.by_id.values():
        engines[answer.event.engine] = engines.get(answer.event.engine, 0) + 1
    return Audit(
        violations=tuple(findings.violations),
        void_events=len(folded.voids),
        log_events=log_events,
        records=len(answers.by_id),
        reports=len(answers.reports),
        releases=ledger.commits,
        releases_with_base=ledger.commits + (BASE in ledger.contents),
        receivers_verified=ledger.proofs,
        jobs=ledger.jobs,
        consumed=len(answers.consumed),
        engines=engines,
        rewards=_rewards(ledger),
        final=_final(ledger),
        unchecked=tuple(findings.unchecked),
        open=tuple(_open(folded.world, ledger)),
    )


def _rewards(ledger: Ledger) -> dict[str, Rewards]:
    scores: dict[str, list[float]] = {}
    for record, feedback in ledger.answers.first.items():
        if answer := ledger.answers.by_id.get(record):
            scores.setdefault(answer.event.load_id, []).append(feedback.event.score)
    return {load_id: Rewards(len(found), sum(found) / len(found)) for load_id, found in scores.items()}


def _final(ledger: Ledger) -> Final:
    scores: list[float] = []
    engines: dict[str, int] = {}
    for record, answer in ledger.answers.by_id.items():
        feedback, event = ledger.answers.first.get(record), answer.event
        if feedback and event.load_id == ledger.head and event.tags.get("phase") == FINAL:
            scores.append(feedback.event.score)
            engines[event.engine] = engines.get(event.engine, 0) + 1
    mean = sum(scores) / len(scores) if scores else None
    return Final(load_id=ledger.head, n=len(scores), mean=mean, engines=engines)


def _open(world: World, ledger: Ledger) -> Iterable[str]:
    if ledger.job:
        yield f"job {ledger.job} has no decision yet"
    if ledger.open:
        yield f"publication {ledger.open.target.publication} is at attempt {ledger.open.attempt}"
    for candidate in ledger.selected:
        if candidate not in ledger.ended:
            yield f"candidate {candidate} is selected, and not committed, refused or halted yet"
    for name, engine in sorted(world.membership.engines.items()):
        if live(world, engine) and not holds_head(world, engine):
            yield f"engine {name} boot {engine.boot} does not hold the head {ledger.head} yet"
