"""The folded state of a deployment and how an event changes it: the one interpretation of the log.

Knows: every family of the LOG stream. Must not know: any other stream, clocks, configuration, or who is reading.
Folding the same events gives equal worlds, on any machine and in any number of steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import msgspec

from reef_bus.core import adapters, membership, memory, publication, requests, supervision, training
from reef_bus.core.ids import LoadId
from reef_bus.core.membership import Membership
from reef_bus.core.memory import Handover
from reef_bus.core.publication import STAGED, SUPERSEDED, Publication, Publications, Release
from reef_bus.core.requests import Request
from reef_bus.core.start import Start, begin, why_not
from reef_bus.core.supervision import Component
from reef_bus.core.training import Training, in_step, links
from reef_bus.core.void import RULES, Tail, advance, why_void
from reef_bus.errors import ContractError
from reef_bus.events import (
    AdapterRegistered,
    CandidateReady,
    CandidateSelected,
    EngineExcluded,
    Event,
    JobDispatched,
    LogOpened,
    Member,
    PublicationHalted,
    Recorded,
    ReleaseCommitted,
    ScenarioRegistered,
    TargetPersisted,
    TrainerRestored,
    TransferAborted,
)


class World(msgspec.Struct):
    """The state after the event at `seq`. Mutated by `fold` alone; everybody else only reads, but for `start`: what the
    blob holds that a `LogOpened` names is part of the log, and its reader puts it there before that event.

    `queue`: candidates that are selected and have not ended, in the order of their selection. It follows from the rest;
    it is kept because everybody asks for it all the time, and the rest grows with the log."""

    seq: int = 0
    last_id: str = ""
    time: int = 0
    incarnation: str = ""
    void: int = 0
    tails: dict[str, Tail] = {}
    training: Training = msgspec.field(default_factory=Training)
    publications: Publications = msgspec.field(default_factory=Publications)
    queue: list[str] = []
    membership: Membership = msgspec.field(default_factory=Membership)
    components: dict[str, Component] = {}
    requests: dict[int, Request] = {}
    start: Start | None = None
    handover: Handover | None = None

    def tail(self, family: str) -> int:
        """The sequence of the family's last stored event: what the next one names as `prev`."""
        found = self.tails.get(family)
        return found.seq if found else 0


def ignored(world: World, recorded: Recorded) -> bool:
    """Whether `fold` will find the event void."""
    return bool(why_void(world.tails.get(recorded.event.chain) or Tail(), recorded))


def fold(world: World, recorded: Recorded) -> str:
    """Apply the next event of LOG. Returns why it is void, or an empty string if it counts.

    Raises ContractError for an event that is correctly chained and yet contradicts what the log says already: whoever
    sees that must stop folding. The world is then as it was before.
    """
    family = recorded.event.chain
    tail = world.tails.get(family) or Tail()
    void = why_void(tail, recorded)
    if void:
        world.void += 1
    else:
        _check(world, recorded)
        _evolve(world, recorded)
    world.tails[family] = tail
    advance(tail, recorded, void=void != "")
    world.seq, world.last_id, world.time = recorded.seq, recorded.id, recorded.time
    return void


def _evolve(world: World, recorded: Recorded) -> None:
    event = recorded.event
    match event.family:
        case "train":
            training.evolve(world.training, recorded)
            if type(event) is ScenarioRegistered:
                publication.register(world.publications, world.incarnation, recorded, event)
            elif type(event) is AdapterRegistered:
                publication.register_adapter(world.publications, world.incarnation, recorded, event)
                adapters.registered(world.membership, world.publications, event)
            elif type(event) is CandidateSelected:
                world.queue = waiting(world, [*world.queue, event.candidate])
        case "release":
            if type(event) is TargetPersisted:
                membership.forget_attempts(world.membership)
            before = world.publications.open
            publication.evolve(world.publications, recorded)
            _place(world, before)
            world.queue = waiting(world, world.queue)
            if type(event) in EXCLUDING:
                _cast_out(world, recorded.time)
        case "engine":
            membership.evolve(world.membership, recorded)
            adapters.told(world.membership, world.publications, recorded)
        case "deployment":
            if type(event) is LogOpened:
                world.incarnation = event.incarnation
                if world.start is not None:
                    _begin(world, world.start)
            supervision.evolve(world.components, recorded)
        case "operator":
            asked = requests.request(recorded)
            why = refusal(world, asked) or _moved(world, asked)
            world.requests[recorded.seq] = msgspec.structs.replace(asked, refused=why)
            if not why and asked.name == "JobRestoreRequested":
                world.handover = memory.again(world.handover, recorded, asked.about)
    if world.handover is not None or type(event) is JobDispatched:
        world.handover = memory.evolve(world.handover, recorded)
    if world.requests:
        requests.answered(world.requests, event)
        _overtake(world)


def _place(world: World, before: Publication | None) -> None:
    """What the publication of an adapter, open until now or from now on, means for those who hold it."""
    open_ = world.publications.open
    if open_ is not None and open_.lora:
        adapters.targeted(world.membership, open_)
    elif open_ is None and before is not None and before.lora:
        head = world.publications.head_of(before.scenario)
        took_place = head is not None and head.load_id == before.load_id
        (adapters.committed if took_place else adapters.halted)(world.membership, before)


EXCLUDING = frozenset((EngineExcluded, TransferAborted, PublicationHalted))


def _begin(world: World, start: Start) -> None:
    begin(world.training, world.publications, start)
    world.queue = waiting(world, world.training.selected)
    world.start = None
    if start.scenario:
        adapters_ = [adapter.scenario for adapter in start.adapters]
        world.tails["train"] = Tail(registered=True, adapters=adapters_, whole=start.dispatched > 0 and not adapters_)


def waiting(world: World, candidates: list[str]) -> list[str]:
    """Those of them that have not ended."""
    return [candidate for candidate in candidates if candidate not in world.publications.ended]


def _overtake(world: World) -> None:
    """A request that cannot be met at some point of the log is dead from there on, whatever becomes possible later: so
    only one of those who could answer it ever does, and nobody acts on what was decided in another situation."""
    for seq, asked in world.requests.items():
        if not asked.refused and (why := refusal(world, asked)):
            world.requests[seq] = msgspec.structs.replace(asked, refused=why)


def _cast_out(world: World, time: int) -> None:
    """Boots that are excluded, and were not before."""
    for engine in world.membership.engines.values():
        if not engine.out and engine.boot in world.publications.excluded:
            engine.out = time


def _check(world: World, recorded: Recorded) -> None:
    """Only what is monotone is checked, so that no reader ever needs another reader's view to agree."""
    event = recorded.event
    if (not world.incarnation) != (type(event) is LogOpened):
        _contradiction(recorded, "a log begins with exactly one LogOpened")
    check = CHECKS.get(type(event))
    if check:
        check(world, recorded, event)


def _check_opening(world: World, recorded: Recorded, event: LogOpened) -> None:
    """A log that goes on from another one does so from exactly its last event, in numbers too."""
    start = world.start
    if event.rules != RULES:
        _contradiction(recorded, f"the log is folded by rules {event.rules}, this version knows rules {RULES}")
    if (event.start is None) != (start is None):
        named = event.start.digest if event.start else "none"
        _contradiction(recorded, f"its start is blob {named}, which was not read along")
    if start is None:
        return
    if (start.seq, start.id) != (event.predecessor_seq, event.predecessor_id):
        found = f"event {event.predecessor_seq} {event.predecessor_id}"
        _contradiction(recorded, f"it follows {found}, its start is the state after {start.seq} {start.id}")
    if recorded.seq != start.seq + 1:
        _contradiction(recorded, f"its predecessor ends at {start.seq}")
    if why := why_not(start):
        _contradiction(recorded, f"its start contradicts itself: {why}")


def _check_adapter(world: World, recorded: Recorded, event: AdapterRegistered) -> None:
    head = world.publications.head
    if event.scenario == world.training.scenario:
        _contradiction(recorded, f"{event.scenario} is the base model's scenario")
    if head is None or event.base_manifest != head.manifest:
        _contradiction(recorded, f"its base is {event.base_manifest}, which the base model is not")


def _check_base(world: World, recorded: Recorded, event: JobDispatched) -> None:
    base = world.training.candidates.get(event.base)
    if base is None:
        _contradiction(recorded, f"base {event.base} was never a candidate")
    if base.scenario != (event.scenario if world.training.adapters else ""):
        _contradiction(
            recorded, f"{event.scenario} is not trained from {event.base} of {base.scenario or 'the base model'}"
        )
    if event.colocated and base.scenario:
        _contradiction(recorded, f"it is colocated, and trains {base.scenario}'s adapter: engines would lose those")


def _check_restored(world: World, recorded: Recorded, event: TrainerRestored) -> None:
    if event.candidate not in world.training.candidates:
        _contradiction(recorded, f"{event.candidate} was never a candidate")


def _check_candidate(world: World, recorded: Recorded, event: CandidateReady) -> None:
    """The base chain is never bent: a second candidate of one name could turn it into a circle."""
    job = world.training.job
    if event.candidate in world.training.candidates:
        _contradiction(recorded, f"candidate {event.candidate} is known already")
    if job is not None and event.base != job.base:
        _contradiction(recorded, f"it names base {event.base}, its job trains from {job.base}")


def _check_target(world: World, recorded: Recorded, event: TargetPersisted) -> None:
    adapter = world.training.adapters.get(event.scenario)
    if event.lora != (adapter.lora if adapter else None):
        _contradiction(recorded, f"it names adapter {event.lora}, {event.scenario} has {adapter and adapter.lora}")
    if event.request or (event.sender == "artifact" and not event.lora):
        _check_rollback(world, recorded, event)
    else:
        _check_update(world, recorded, event)


def _check_update(world: World, recorded: Recorded, event: TargetPersisted) -> None:
    candidate, head = world.training.candidates.get(event.candidate), world.publications.head_of(event.scenario)
    if candidate is None or not candidate.selected or head is None:
        _contradiction(recorded, f"candidate {event.candidate} was not selected")
    elif candidate.scenario != head.scenario:
        _contradiction(recorded, f"candidate {event.candidate} is of {candidate.scenario or 'the base model'}")
    elif event.parent != head.load_id or not reaches_head(world, event.candidate):
        _contradiction(recorded, f"candidate {event.candidate} does not reach the head {head.load_id}")
    elif (event.manifest, event.weights) != (candidate.manifest, candidate.weights):
        found = f"manifest {event.manifest} in blob {event.weights.digest}"
        _contradiction(recorded, f"it names {found}, its candidate {candidate.manifest} in {candidate.weights.digest}")
    if event.candidate in world.publications.ended:
        _contradiction(recorded, f"candidate {event.candidate} was {world.publications.ended[event.candidate]}")
    _check_attempt(world, recorded, event)


def _check_rollback(world: World, recorded: Recorded, event: TargetPersisted) -> None:
    """Old content under a new load id: what was committed before, and what somebody asked for."""
    head, asked = world.publications.head_of(event.scenario), world.requests.get(event.request)
    release = None
    if asked and asked.name == "RollbackRequested" and asked_of(world, asked) == (head.scenario if head else ""):
        release = world.publications.release(asked_of(world, asked), asked.about)
    if asked is None or release is None or event.sender != "artifact":
        _contradiction(recorded, f"no rollback was asked for at {event.request}, or it was answered before")
    if head is None or event.parent != head.load_id or asked.head != head.load_id:
        _contradiction(recorded, f"the rollback at {event.request} was decided on {asked.head}, which is not the head")
    if (event.candidate, event.manifest, event.weights) != (release.candidate, release.manifest, release.weights):
        _contradiction(recorded, f"it names {event.candidate} {event.manifest}, release {release.load_id} is another")
    _check_attempt(world, recorded, event)


def _check_attempt(world: World, recorded: Recorded, event: TargetPersisted) -> None:
    if event.attempt != 1:
        _contradiction(recorded, f"its first attempt is number {event.attempt}")
    if event.load_id != str(LoadId(world.incarnation, world.publications.sequence + 1)):
        _contradiction(recorded, f"load id {event.load_id} does not follow sequence {world.publications.sequence}")
    _check_members(world, recorded, event.members)


def _check_next(world: World, recorded: Recorded, event: TransferAborted) -> None:
    if event.next_attempt != event.attempt + 1:
        _contradiction(recorded, f"attempt {event.next_attempt} does not follow attempt {event.attempt}")
    _check_members(world, recorded, event.members)


def _check_members(world: World, recorded: Recorded, members: tuple[Member, ...]) -> None:
    if not members:
        _contradiction(recorded, "its membership is empty")
    for member in members:
        engine, boot = member.engine, member.boot
        tail = world.tails.get(f"engine.{engine}")
        if tail is None or boot not in reversed(tail.boots):  # it is nearly always the newest
            _contradiction(recorded, f"member {engine} boot {boot} never joined")
        if boot in world.publications.excluded:
            _contradiction(recorded, f"member {engine} boot {boot} was excluded")


def _check_commit(world: World, recorded: Recorded, event: ReleaseCommitted) -> None:
    open_ = world.publications.open
    if open_ is None:
        _contradiction(recorded, "no publication is open")
    if (event.load_id, event.manifest, event.parent) != (open_.load_id, open_.manifest, open_.parent):
        found = f"{event.load_id} {event.manifest}"
        _contradiction(recorded, f"it names {found}, the target {open_.load_id} {open_.manifest}")
    if event.candidate != open_.candidate:
        _contradiction(recorded, f"it names candidate {event.candidate}, the target {open_.candidate}")
    if {(e.engine, e.boot) for e in event.evidence} != {(m.engine, m.boot) for m in open_.members}:
        _contradiction(recorded, "its evidence is not the attempt's membership")
    for member in open_.members:
        report = world.membership.report(member.boot, open_.id, open_.attempt)
        if report is None or not agrees(report, open_):
            said = "nothing" if report is None else report.failure or f"{_kind(report.staged)} {report.manifest}"
            wanted = _kind(open_.mode == STAGED)
            _contradiction(recorded, f"{member.engine} boot {member.boot} reported {said}, not the target's {wanted}")


def _kind(staged: bool) -> str:
    return "staged digest" if staged else "digest"


CHECKS: Mapping[type[Event], Callable[[World, Recorded, Any], None]] = {
    LogOpened: _check_opening,
    AdapterRegistered: _check_adapter,
    JobDispatched: _check_base,
    TrainerRestored: _check_restored,
    CandidateReady: _check_candidate,
    TargetPersisted: _check_target,
    TransferAborted: _check_next,
    ReleaseCommitted: _check_commit,
}


def agrees(report: membership.Report, target: publication.Publication) -> bool:
    """The report is a proof of the target: load id and digest, of the copy that its mode writes, without a failure."""
    found = report.load_id, report.manifest, report.staged
    return not report.failure and found == (target.load_id, target.manifest, target.mode == STAGED)


def reaches_head(world: World, candidate: str) -> bool:
    """The candidate's base chain leads to its head's content, through superseded candidates only."""
    known = world.training.candidates
    head, base = head_for(world, candidate), known[candidate].base if candidate in known else ""
    while head is not None and base != head.candidate and world.publications.ended.get(base) == SUPERSEDED:
        base = known[base].base
    return head is not None and base == head.candidate


def head_for(world: World, candidate: str) -> Release | None:
    """The head of the chain that the candidate is of."""
    return world.publications.head_of(world.training.scenario_of(candidate))


def can_still_reach(world: World, candidate: str) -> bool:
    """The candidate is its head's content, or would follow it once its undecided bases are committed in turn."""
    head, ended = head_for(world, candidate), world.publications.ended
    while head is not None and candidate != head.candidate:
        found = world.training.candidates.get(candidate)
        if found is None or not found.base or not found.selected or ended.get(candidate, SUPERSEDED) != SUPERSEDED:
            return False
        candidate = found.base
    return head is not None


def refusal(world: World, asked: Request) -> str:
    """Why the request cannot be met by the world as it is; empty while it can."""
    training_, published, about = world.training, world.publications, asked.about
    job = training_.job
    match asked.name:
        case "RollbackRequested":
            return _moved(world, asked) or _no_release(world, asked)
        case "PromotionRequested":
            held = job is not None and job.candidate == about and job.evaluated
            return "" if held else "not_held"
        case "JobDiscardRequested":
            return ("in_step" if in_step(job) else "") if job is not None and job.id == about else "not_open"
        case "JobRestoreRequested":
            return "" if job is not None and job.id == about and job.ambiguous else "not_ambiguous"
        case "EngineRetireRequested":
            there = any(e.boot == about and not e.left for e in world.membership.engines.values())
            return "" if there and about not in published.excluded else "not_there"
        case "PublicationHaltRequested":
            return "" if published.open and published.open.id == about else "not_open"
        case "RecoveryResumeRequested":
            return "" if about in world.components and world.components[about].given_up else "not_given_up"
    raise AssertionError(asked.name)


def asked_of(world: World, asked: Request) -> str:
    """The adapter's scenario that it is about, or empty: the whole model."""
    return asked.scenario if asked.scenario in world.training.adapters else ""


def _no_release(world: World, asked: Request) -> str:
    scenario = asked_of(world, asked)
    if not scenario and asked.scenario not in ("", world.training.scenario):
        return "unknown_scenario"
    if world.training.adapters and not scenario:
        return "frozen"
    return "" if world.publications.release(scenario, asked.about) else "unknown_release"


def _moved(world: World, asked: Request) -> str:
    head = world.publications.head_of(asked_of(world, asked))
    return "" if asked.head == (head.load_id if head else "") else "head_moved"


def lag(world: World, load_id: str, base: str, limit: int) -> int | None:
    """Staleness: links in the base chain from the release `load_id` to `base`; None when unknown or over `limit`."""
    release = world.publications.release(world.training.scenario_of(base), load_id)
    return links(world.training, base, release.candidate, limit) if release else None


def _contradiction(recorded: Recorded, why: str) -> NoReturn:
    raise ContractError(
        f"event {recorded.seq} {recorded.name} by {recorded.writer} contradicts the log: {why}. "
        "Stop and look: `reef-bus log show` and `reef-bus audit`",
        recorded.seq,
    )
