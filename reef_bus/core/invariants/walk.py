"""The audit: two readings of a history, each by itself, and the comparison of the worlds that they end in.

Knows: the fold, the serving rule, the ledger. Must not know: where a history comes from.
One reading judges answers, and has never heard of an event that is void; the other one keeps the ledger, folds what is
void, too, and goes through a snapshot half way. Equal worlds are at once the proof of invariants 9 and 11.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from reef_bus.core.ids import BASE
from reef_bus.core.invariants.findings import Audit, Final, Findings, Rewards
from reef_bus.core.invariants.ledger import Ledger, note, seed
from reef_bus.core.invariants.records import Batches, Part, every_part, index
from reef_bus.core.serving import fenced, holds_head, live, may_generate
from reef_bus.core.start import Start
from reef_bus.core.void import Tail
from reef_bus.core.world import World, fold, ignored
from reef_bus.errors import ContractError
from reef_bus.events import InferenceRecorded, Recorded

FINAL = "final"  # the value of the tag `phase` by which a harness marks the answers of its last measurement


class Judgement(NamedTuple):
    """How far the first reading came, the world there, the events that it passed over, and whether it had to stop."""

    folded: int
    world: World
    voids: list[int]
    stopped: bool


class Account(NamedTuple):
    """How far the second reading came, the world there, and why it stopped there if it did."""

    folded: int
    world: World
    stopped: str


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
    parts = every_part(ledger.answers)
    judged = _judgement(events, parts, start, findings)
    told = _account(events, ledger, start, judged.folded // 2)
    _check_drains(ledger, parts)
    _compare(judged, told, events, start, findings)
    if batches is None and ledger.jobs:
        findings.unchecked.append(f"what {ledger.jobs} jobs consumed (invariant 6): their batches are not at hand")
    return _audit(told.world, ledger, len(judged.voids), len(events))


# -- the first reading: fold what counts, and judge the answers


def _judgement(log: Sequence[Recorded], parts: list[Part], start: Start | None, findings: Findings) -> Judgement:
    """Fold what is not void, as if nothing else had ever been stored. Answers come in where they say that they were
    given."""
    world, voids = World(start=start), list[int]()
    waiting, judged = _waiting(parts, start, findings), 0
    for count, recorded in enumerate(log):
        while judged < len(waiting) and waiting[judged].span.as_of < recorded.seq:
            _judge(world, waiting[judged], findings)
            judged += 1
        expected = (world.seq or (start.seq if start else 0)) + 1
        if recorded.seq != expected:
            findings.add("gap", f"LOG goes on at {recorded.seq}; expected {expected}", [recorded.seq])
        if ignored(world, recorded):
            voids.append(recorded.seq)
            _pass_over(world, recorded)
            continue
        try:
            fold(world, recorded)
        except ContractError as error:
            findings.add("fold", str(error), [recorded.seq])
            if count + 1 < len(log) or judged < len(waiting):
                rest = f"{len(log) - count - 1} events and {len(waiting) - judged} answers from LOG {recorded.seq} on"
                findings.unchecked.append(f"{rest}: every consumer halts at the contradiction there")
            return Judgement(count, world, voids, stopped=True)
    for part in waiting[judged:]:
        _judge(world, part, findings)
    return Judgement(len(log), world, voids, stopped=False)


def _pass_over(world: World, recorded: Recorded) -> None:
    """The place of an event, and nothing else of it."""
    world.tails.setdefault(recorded.event.chain, Tail()).seq = world.seq = recorded.seq
    world.last_id, world.time, world.void = recorded.id, recorded.time, world.void + 1


def _waiting(parts: list[Part], start: Start | None, findings: Findings) -> list[Part]:
    """What is to judge of the answers, by where they say that it was given. Of what was given before this log began,
    only the release is known."""
    if start is None:
        return parts
    early = [part for part in parts if 0 < part.span.as_of <= start.seq]
    committed = {release.load_id for release in start.releases}
    for seq, event, span in early:
        if span.load_id not in committed:
            text = f"record {event.record} names {span.load_id}, which was not committed before LOG {start.seq}"
            findings.add(1, text, [], [seq])
    if early:
        text = f"{len(early)} answers as of LOG {start.seq} or before (invariants 1 and 2)"
        findings.unchecked.append(f"{text}: audit the predecessor's archive")
    return [part for part in parts if not 0 < part.span.as_of <= start.seq]


def _judge(world: World, part: Part, findings: Findings) -> None:
    """Invariants 1 and 2: the serving rule, at the very point of the log at which the engine says it stood."""
    seq, event, span = part
    text = f"record {event.record} by {event.engine} boot {event.boot} names {span.load_id} as of LOG {span.as_of}, "
    head = world.publications.head
    if not 0 < span.as_of <= min(world.seq, span.done_as_of):
        findings.add(1, f"{text}done as of {span.done_as_of}; the log goes from 1 to {world.seq}", (), [seq])
    elif span.load_id not in world.publications.releases:
        findings.add(1, f"{text}when that was not committed", [span.as_of], [seq])
    elif not may_generate(world, event.engine, event.boot) or head is None:
        findings.add(2, f"{text}when it must not generate: {_why_not(world, event)}", [span.as_of], [seq])
    elif span.load_id != head.load_id:
        findings.add(2, f"{text}when it held the head {head.load_id}", [span.as_of], [seq])


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


# -- the second reading: fold everything, keep the ledger


def _account(log: Sequence[Recorded], ledger: Ledger, start: Start | None, middle: int) -> Account:
    """Fold everything, with a snapshot at `middle`: half way to where the other reading came, a contradiction may be
    near; the ledger gets what is not void."""
    world = World(start=start)
    for count, recorded in enumerate(log):
        if count == middle:
            world = msgspec.msgpack.decode(msgspec.msgpack.encode(world), type=World)
        try:
            void = fold(world, recorded)
        except ContractError as error:  # no consumer folds past it, so neither do we
            note(ledger, recorded)  # which invariant it would have broken
            return Account(count, world, str(error))
        if not void:
            note(ledger, recorded)
    return Account(len(log), world, "")


def _check_drains(ledger: Ledger, parts: list[Part]) -> None:
    """Invariant 2: who says that generation has stopped has nothing left to answer."""
    for seq, event, span in parts:
        stops = ledger.stops.get(event.boot, ())
        place = bisect_right(stops, span.as_of)
        if place < len(stops) and stops[place] <= span.done_as_of:
            said = f"boot {event.boot} said at LOG {stops[place]} that it had stopped"
            text = f"record {event.record} was generated from LOG {span.as_of} to {span.done_as_of}, but {said}"
            ledger.findings.add(2, text, [stops[place]], [seq])


# -- the comparison


def _compare(
    judged: Judgement, told: Account, log: Sequence[Recorded], start: Start | None, findings: Findings
) -> None:
    """Invariant 9: the same events, from the start and half way through a snapshot, give the same world. Invariant 11:
    had the void events never been stored, nothing but their places would be different."""
    if told.stopped and not judged.stopped:
        text = f"replayed, an event that was folded contradicts the log: {told.stopped}"
        findings.add(9, text, [log[told.folded].seq])
        return
    if (judged.folded, judged.world) == (told.folded, told.world):
        return
    difference = _difference(judged.world, told.world)
    if judged.voids and _refold(log[: told.folded], start) == told.world:
        findings.add(11, f"void events changed the world's {difference}", judged.voids)
    else:
        text = f"replayed to LOG {told.world.seq}, the world differs in {difference}"
        findings.add(9, text, [told.world.seq])


def _refold(log: Iterable[Recorded], start: Start | None) -> World | None:
    """All events, void or not, without a snapshot; None if that ends in a contradiction."""
    world = World(start=start)
    try:
        for recorded in log:
            fold(world, recorded)
    except ContractError:
        return None
    return world


def _difference(one: World, other: World) -> str:
    return ", ".join(name for name in World.__struct_fields__ if getattr(one, name) != getattr(other, name))


# -- figures


def _audit(world: World, ledger: Ledger, void_events: int, log_events: int) -> Audit:
    answers, findings = ledger.answers, ledger.findings
    engines = dict.fromkeys(sorted(ledger.engines), 0)
    for answer in answers.by_id.values():
        engines[answer.event.engine] = engines.get(answer.event.engine, 0) + 1
    return Audit(
        violations=tuple(findings.violations),
        void_events=void_events,
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
        open=tuple(_open(world, ledger)),
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
