"""The audit: two readings of a history, each by itself, and the comparison of the worlds that they end in.

Knows: the fold, the serving rule, the ledger. Must not know: where a history comes from.
One reading judges answers, and has never heard of an event that is void; the other one keeps the ledger, folds what is
void, too, and goes through snapshots. Equal worlds are at once the proof of invariants 9 and 11. Both take the same
events in turn, a handful at a time, and keep none of them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from itertools import islice, pairwise
from math import fsum, inf
from operator import attrgetter

import msgspec

from reef_bus.core.ids import BASE
from reef_bus.core.invariants.findings import Audit, Final, Findings, Rewards
from reef_bus.core.invariants.holdings import check_answers, head
from reef_bus.core.invariants.ledger import note
from reef_bus.core.invariants.records import Answer, Answers, Batches, every_part, index
from reef_bus.core.invariants.state import Ledger, seed
from reef_bus.core.serving import fenced, holds_head, live, may_continue, may_generate, version
from reef_bus.core.start import Start
from reef_bus.core.void import Tail
from reef_bus.core.world import World, fold, ignored
from reef_bus.errors import ContractError
from reef_bus.events import Recorded

HANDFUL = 1024  # events that both readings take in turn: one by one, each drives the other out of the caches


class Judgement(msgspec.Struct):
    """The first reading: the world that it came to, the events that it passed over, why it had to stop, if it did, and
    at which event. The log begins after `begin`; `waiting` are the answers that are not judged yet, the next one last.
    """

    findings: Findings
    world: World
    begin: int
    waiting: list[Answer]
    folded: int = 0
    voids: list[int] = []
    stopped: str = ""
    stopped_at: int = 0


class Account(msgspec.Struct):
    """The second reading: the world that it came to, and why it had to stop, if it did, and at which event. The next
    `snapshot` is due when that many events are folded."""

    ledger: Ledger
    world: World
    folded: int = 0
    snapshot: int = 1
    stopped: str = ""
    stopped_at: int = 0


def check(
    log: Iterable[Recorded], records: Iterable[Recorded], batches: Batches | None, start: Start | None = None
) -> Audit:
    """Audit a history: LOG and RECORDS from their beginnings, and what its jobs' batches say (None: none at hand).
    `start` is what LOG goes on from; what was before it is audited with its predecessor.

    RECORDS must hold what LOG's jobs consumed, and LOG what RECORDS' answers stood on. Never raises for what it finds.
    """
    return examine(tuple(log), index(records), batches, start)


def examine(log: Iterable[Recorded], answers: Answers, batches: Batches | None, start: Start | None = None) -> Audit:
    """`check` once RECORDS are indexed. `log` must give the same when it is gone through again, and keeps nothing; what
    it raises is raised."""
    findings, begin = answers.findings, start.seq if start else 0
    judged = Judgement(findings, World(start=start), begin, _waiting(answers, start))
    ledger = Ledger(findings=Findings(), answers=answers, batches=batches)
    if start is not None:
        seed(ledger, start)
    told, events = Account(ledger, World(start=start)), 0
    unread = iter(log)
    while handful := tuple(islice(unread, HANDFUL)):
        events += len(handful)
        _judge_some(judged, handful)
        _account_some(told, handful)
    _judge_rest(judged, events)
    _check_drains(ledger)
    _check_mixtures(ledger, told.world, begin)
    check_answers(ledger.holdings, answers, ledger.findings)
    findings.extend(ledger.findings)
    _compare(judged, told, log, start, findings)
    if batches is None and ledger.jobs:
        findings.unchecked.append(f"what {ledger.jobs} jobs consumed (invariant 6): their batches are not at hand")
    return _audit(told.world, ledger, findings, len(judged.voids), events)


# -- the first reading: fold what counts, and judge the answers


def _judge_some(judged: Judgement, handful: Iterable[Recorded]) -> None:
    for recorded in handful:
        if not judged.stopped:
            _judge_next(judged, recorded)


def _judge_next(judged: Judgement, recorded: Recorded) -> None:
    """Fold the event if it is not void, as if nothing else had ever been stored. Answers come in where they say that
    they were given."""
    world, waiting = judged.world, judged.waiting
    if waiting and waiting[-1].as_of < recorded.seq:
        _judge_before(judged, recorded.seq)
    expected = (world.seq or judged.begin) + 1
    if recorded.seq != expected:
        judged.findings.add("gap", f"LOG goes on at {recorded.seq}; expected {expected}", [recorded.seq])
    if ignored(world, recorded):
        judged.voids.append(recorded.seq)
        _pass_over(world, recorded)
    else:
        try:
            fold(world, recorded)
        except ContractError as error:
            judged.findings.add("fold", str(error), [recorded.seq])
            judged.stopped, judged.stopped_at = str(error), recorded.seq
            return
    judged.folded += 1


def _judge_before(judged: Judgement, seq: float) -> None:
    """Judge the answers that were given before event `seq`, each at the very point of the log at which its engine says
    it stood. Nothing happens in between: what is right for one of them is right for its like."""
    world, waiting, right = judged.world, judged.waiting, set[tuple[str, str, str, str]]()
    while waiting and waiting[-1].as_of < seq:
        answer = waiting.pop()
        if not 0 < answer.as_of <= min(world.seq, answer.done_as_of):
            said = f"{_says(answer)}done as of {answer.done_as_of}; the log goes from 1 to {world.seq}"
            judged.findings.add(1, said, (), [answer.seq])
        elif (claim := (answer.engine, answer.boot, answer.scenario, answer.load_id)) not in right:
            if wrong := _wrong(world, answer):
                judged.findings.add(wrong[0], f"{_says(answer)}when {wrong[1]}", [answer.as_of], [answer.seq])
            else:
                right.add(claim)


def _judge_rest(judged: Judgement, events: int) -> None:
    """Answers that stand on the end of the log; or, where the reading had to stop, a notice of what it left."""
    left = events - judged.folded - 1, len(judged.waiting)
    if not judged.stopped:
        _judge_before(judged, inf)
    elif any(left):
        rest = f"{left[0]} events and {left[1]} answers from LOG {judged.stopped_at} on"
        judged.findings.unchecked.append(f"{rest}: every consumer halts at the contradiction there")


def _pass_over(world: World, recorded: Recorded) -> None:
    """The place of an event, and nothing else of it."""
    world.tails.setdefault(recorded.event.chain, Tail()).seq = world.seq = recorded.seq
    world.last_id, world.time, world.void = recorded.id, recorded.time, world.void + 1


def _waiting(given: Answers, start: Start | None) -> list[Answer]:
    """The parts of answers to judge, by where they say that they were given, the first one last. Of what was given
    before this log began, only the release is known."""
    parts = sorted(every_part(given), key=attrgetter("as_of"))
    if start is not None:
        parts = _after_the_start(parts, start, given.findings)
    parts.reverse()
    return parts


def _after_the_start(parts: list[Answer], start: Start, findings: Findings) -> list[Answer]:
    early = [part for part in parts if 0 < part.as_of <= start.seq]
    origins = (adapter.origin for adapter in start.adapters)
    committed = {release.load_id for release in (*start.releases, *origins)}
    for part in early:
        if part.load_id not in committed:
            text = f"record {part.record} names {part.load_id}, which was not committed before LOG {start.seq}"
            findings.add(1, text, [], [part.seq])
    if early:
        text = f"{len(early)} answers as of LOG {start.seq} or before (invariants 1 and 2)"
        findings.unchecked.append(f"{text}: audit the predecessor's archive")
    return [part for part in parts if not 0 < part.as_of <= start.seq]


def _says(answer: Answer) -> str:
    who = f"record {answer.record} by {answer.engine} boot {answer.boot}"
    return f"{who} names {answer.load_id} as of LOG {answer.as_of}, "


def _wrong(world: World, answer: Answer) -> tuple[int, str] | None:
    """Invariants 1 and 2: the serving rule."""
    if answer.scenario in world.publications.adapters:
        return _wrong_adapter(world, answer)
    head = world.publications.head
    if world.publications.release("", answer.load_id) is None:
        return 1, "that was not committed"
    if not may_generate(world, answer.engine, answer.boot) or head is None:
        return 2, f"it must not generate: {_why_not(world, answer)}"
    if answer.load_id != head.load_id:
        return 2, f"it held the head {head.load_id}"
    return None


def _wrong_adapter(world: World, answer: Answer) -> tuple[int, str] | None:
    """The same, of a scenario's adapter. What goes on does so with what it was begun with: that, the ledger judges."""
    if world.publications.release(answer.scenario, answer.load_id) is None:
        return 1, f"that was not committed for {answer.scenario}"
    if not may_generate(world, answer.engine, answer.boot):
        return 2, f"it must not generate: {_why_not(world, answer)}"
    found = version(world, world.membership.engines[answer.engine], answer.scenario)
    if not answer.goes_on and (found is None or found.load_id != answer.load_id):
        return 2, f"it answered {answer.scenario} with {found.load_id if found else 'nothing'}"
    return None


def _why_not(world: World, answer: Answer) -> str:
    engine = world.membership.engines.get(answer.engine)
    if engine is None or engine.boot != answer.boot:
        return f"the engine's boot was {engine.boot if engine else 'none yet'}"
    if not live(world, engine):
        return "this boot had left" if engine.left else "this boot was excluded"
    if fenced(world, answer.engine, answer.boot):
        return "a fence covered it"
    proof = engine.verified
    return f"its last proof since its fence is {f'{proof.load_id} {proof.manifest}' if proof else 'none'}, not the head"


# -- the second reading: fold everything, keep the ledger


def _account_some(told: Account, handful: Iterable[Recorded]) -> None:
    for recorded in handful:
        if not told.stopped:
            _account_next(told, recorded)


def _account_next(told: Account, recorded: Recorded) -> None:
    """Fold the event, from a snapshot each time that the log is four times as long: a contradiction may be anywhere.
    The ledger gets what is not void."""
    if told.folded == told.snapshot:
        told.world = msgspec.msgpack.decode(msgspec.msgpack.encode(told.world), type=World)
        told.snapshot *= 4
    try:
        void = fold(told.world, recorded)
    except ContractError as error:  # no consumer folds past it, so neither do we
        note(told.ledger, recorded)  # which invariant it would have broken
        told.stopped, told.stopped_at = str(error), recorded.seq
        return
    told.folded += 1
    if not void:
        note(told.ledger, recorded)


def _check_drains(ledger: Ledger) -> None:
    """Invariant 2: who says that generation has stopped has nothing left to answer."""
    for part in every_part(ledger.answers):
        if part.as_of >= part.done_as_of:
            continue
        stops = ledger.stops.get(part.boot, ())
        place = bisect_right(stops, part.as_of)
        if place < len(stops) and stops[place] <= part.done_as_of:
            said = f"boot {part.boot} said at LOG {stops[place]} that it had stopped"
            text = f"record {part.record} was generated from LOG {part.as_of} to {part.done_as_of}, but {said}"
            ledger.findings.add(2, text, [stops[place]], [part.seq])


def _check_mixtures(ledger: Ledger, world: World, begin: int) -> None:
    """Invariant 2: one answer has tokens of two releases only where generation stops in place from one to the other. Of
    what was given before this log began, nobody knows how it stopped."""
    releases = world.publications.releases
    for answer in ledger.answers.by_id.values():
        for one, other in pairwise(answer.spans):
            known = other.as_of > begin and one.load_id in releases and other.load_id in releases
            if known and not may_continue(releases, one.load_id, other.load_id):
                text = f"record {answer.record} by {answer.engine} boot {answer.boot} goes on with {other.load_id}"
                why = f"where it had stopped with {one.load_id}; in between, a release drains or retracts"
                ledger.findings.add(2, f"{text} {why}", [other.as_of], [answer.seq])


# -- the comparison


def _compare(
    judged: Judgement, told: Account, log: Iterable[Recorded], start: Start | None, findings: Findings
) -> None:
    """Invariant 9: the same events, from the start and half way through a snapshot, give the same world. Invariant 11:
    had the void events never been stored, nothing but their places would be different."""
    if told.stopped and not judged.stopped:
        text = f"replayed, an event that was folded contradicts the log: {told.stopped}"
        findings.add(9, text, [told.stopped_at])
        return
    if (judged.folded, judged.world) == (told.folded, told.world):
        return
    difference = _difference(judged.world, told.world)
    if judged.voids and _refold(islice(log, told.folded), start) == told.world:
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


def _audit(world: World, ledger: Ledger, findings: Findings, void_events: int, log_events: int) -> Audit:
    answers = ledger.answers
    engines = dict.fromkeys(sorted(ledger.engines), 0)
    for answer in answers.by_id.values():
        engines[answer.engine] = engines.get(answer.engine, 0) + 1
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
        consumed=answers.consumed + len(answers.lost),
        engines=engines,
        rewards=_rewards(ledger),
        final=_final(ledger, "", ledger.head),
        finals={name: _final(ledger, name, head(ledger.holdings, name)) for name in ledger.holdings.heads},
        unchecked=tuple(findings.unchecked),
        open=tuple(_open(world, ledger)),
    )


def _rewards(ledger: Ledger) -> dict[str, Rewards]:
    scores: dict[str, list[float]] = {}
    for answer in ledger.answers.by_id.values():
        if answer.report:
            scores.setdefault(answer.load_id, []).append(answer.report.event.score)
    return {load_id: Rewards(len(found), fsum(found) / len(found)) for load_id, found in scores.items()}


def _final(ledger: Ledger, scenario: str, load_id: str) -> Final:
    """Of an adapter's scenario; of none: all that name the base model's head."""
    scores: list[float] = []
    engines: dict[str, int] = {}
    for answer in ledger.answers.by_id.values():
        of = answer.load_id == load_id and scenario in ("", answer.scenario)
        if of and answer.final and answer.report:
            scores.append(answer.report.event.score)
            engines[answer.engine] = engines.get(answer.engine, 0) + 1
    mean = fsum(scores) / len(scores) if scores else None
    return Final(load_id=load_id, n=len(scores), mean=mean, engines=engines)


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
        for scenario in ledger.holdings.heads:
            if live(world, engine) and version(world, engine, scenario) is None:
                missing = head(ledger.holdings, scenario)
                yield f"engine {name} boot {engine.boot} does not hold {scenario}'s head {missing} yet"
