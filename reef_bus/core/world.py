"""The folded state of a deployment and how an event changes it: the one interpretation of the log.

Knows: every family of the LOG stream. Must not know: any other stream, clocks, configuration, or who is reading.
Folding the same events gives equal worlds, on any machine and in any number of steps.
"""

from __future__ import annotations

from typing import NoReturn

import msgspec

from reef_bus.core import membership, publication, training
from reef_bus.core.ids import LoadId
from reef_bus.core.membership import Membership
from reef_bus.core.publication import Publications
from reef_bus.core.start import Start, begin, why_not
from reef_bus.core.training import Training, links
from reef_bus.core.void import RULES, Tail, advance, why_void
from reef_bus.errors import ContractError
from reef_bus.events import (
    CandidateReady,
    ComponentLost,
    ComponentStarted,
    JobDispatched,
    LogOpened,
    Recorded,
    RecoveryHalted,
    ReleaseCommitted,
    ScenarioRegistered,
    TargetPersisted,
    TrainerRestored,
    TransferAborted,
)


class Component(msgspec.Struct, kw_only=True):
    """A process that a supervisor runs. Its last end was recorded at `ended` (sequence) and `ended_time`; `halted` is
    the supervisor boot that gave it up, `lost` the broker times (ns) of its failures since it was last given up."""

    starts: int = 0
    ended: int = 0
    ended_time: int = 0
    running: bool = False
    halted: str = ""
    lost: list[int] = []


class World(msgspec.Struct):
    """The state after the event at `seq`. Mutated by `fold` alone; everybody else only reads, but for `start`: what the
    blob holds that a `LogOpened` names is part of the log, and its reader puts it there before that event."""

    seq: int = 0
    last_id: str = ""
    time: int = 0
    incarnation: str = ""
    void: int = 0
    tails: dict[str, Tail] = {}
    training: Training = msgspec.field(default_factory=Training)
    publications: Publications = msgspec.field(default_factory=Publications)
    membership: Membership = msgspec.field(default_factory=Membership)
    components: dict[str, Component] = {}
    start: Start | None = None

    def tail(self, family: str) -> int:
        """The sequence of the family's last stored event: what the next one names as `prev`."""
        found = self.tails.get(family)
        return found.seq if found else 0


def fold(world: World, recorded: Recorded) -> str:
    """Apply the next event of LOG. Returns why it is void, or an empty string if it counts.

    Raises ContractError for an event that is correctly chained and yet contradicts what the log says already: whoever
    sees that must stop folding. The world is then as it was before.
    """
    family = recorded.event.chain
    tail = world.tails.get(family) or Tail()
    void = why_void(tail, recorded)
    if not void:
        _check(world, recorded)
        _check_start(recorded, world.start)
        _evolve(world, recorded)
    world.tails[family] = tail
    advance(tail, recorded, void=bool(void))
    world.seq, world.last_id, world.time = recorded.seq, recorded.id, recorded.time
    world.void += bool(void)
    return void


def _evolve(world: World, recorded: Recorded) -> None:
    event = recorded.event
    match event.family:
        case "train":
            training.evolve(world.training, recorded)
            if isinstance(event, ScenarioRegistered):
                publication.register(world.publications, world.incarnation, recorded, event)
        case "release":
            if isinstance(event, TargetPersisted):
                membership.forget_attempts(world.membership)
            publication.evolve(world.publications, recorded)
        case "engine":
            membership.evolve(world.membership, recorded)
        case "deployment":
            _deployment(world, recorded)


def _begin(world: World, start: Start) -> None:
    begin(world.training, world.publications, start)
    world.start = None
    if start.scenario:
        world.tails["train"] = Tail(registered=True)


def _deployment(world: World, recorded: Recorded) -> None:
    match recorded.event:
        case LogOpened(incarnation=incarnation):
            world.incarnation = incarnation
            if world.start is not None:
                _begin(world, world.start)
        case ComponentStarted(component=name, starts=starts):
            component = world.components.setdefault(name, Component())
            component.starts, component.running, component.halted = starts, True, ""
        case ComponentLost(component=name, exit=status):
            component = world.components.setdefault(name, Component())
            component.running, component.ended, component.ended_time = False, recorded.seq, recorded.time
            if status:
                component.lost.append(recorded.time)
        case RecoveryHalted(component=name):
            component = world.components.setdefault(name, Component())
            component.halted = recorded.boot
            component.lost.clear()


def _check(world: World, recorded: Recorded) -> None:
    """Only what is monotone is checked, so that no reader ever needs another reader's view to agree."""
    event = recorded.event
    if (not world.incarnation) != isinstance(event, LogOpened):
        _contradiction(recorded, "a log begins with exactly one LogOpened")
    match event:
        case LogOpened(rules=rules) if rules != RULES:
            _contradiction(recorded, f"the log is folded by rules {rules}, this version knows rules {RULES}")
        case JobDispatched(base=base) if base not in world.training.candidates:
            _contradiction(recorded, f"base {base} was never a candidate")
        case TrainerRestored(candidate=candidate) if candidate not in world.training.candidates:
            _contradiction(recorded, f"{candidate} was never a candidate")
        case CandidateReady():
            _check_candidate(world, recorded, event)
        case TargetPersisted():
            _check_target(world, recorded, event)
        case TransferAborted(attempt=attempt, next_attempt=following) if following != attempt + 1:
            _contradiction(recorded, f"attempt {following} does not follow attempt {attempt}")
        case TransferAborted(members=members):
            _check_members(world, recorded, [(m.engine, m.boot) for m in members])
        case ReleaseCommitted():
            _check_commit(world, recorded, event)


def _check_start(recorded: Recorded, start: Start | None) -> None:
    """A log that goes on from another one does so from exactly its last event, in numbers too."""
    event = recorded.event
    named = event.start if isinstance(event, LogOpened) else None
    if (named is None) != (start is None):
        _contradiction(recorded, f"its start is blob {named.digest if named else 'none'}, which was not read along")
    if start is None or not isinstance(event, LogOpened):
        return
    if (start.seq, start.id) != (event.predecessor_seq, event.predecessor_id):
        found = f"event {event.predecessor_seq} {event.predecessor_id}"
        _contradiction(recorded, f"it follows {found}, its start is the state after {start.seq} {start.id}")
    if recorded.seq != start.seq + 1:
        _contradiction(recorded, f"its predecessor ends at {start.seq}")
    if why := why_not(start):
        _contradiction(recorded, f"its start contradicts itself: {why}")


def _check_candidate(world: World, recorded: Recorded, event: CandidateReady) -> None:
    """The base chain is never bent: a second candidate of one name could turn it into a circle."""
    job = world.training.job
    if event.candidate in world.training.candidates:
        _contradiction(recorded, f"candidate {event.candidate} is known already")
    if job is not None and event.base != job.base:
        _contradiction(recorded, f"it names base {event.base}, its job trains from {job.base}")


def _check_target(world: World, recorded: Recorded, event: TargetPersisted) -> None:
    candidate, head = world.training.candidates.get(event.candidate), world.publications.head
    if candidate is None or not candidate.selected or head is None:
        _contradiction(recorded, f"candidate {event.candidate} was not selected")
    elif event.parent != head.load_id or not reaches_head(world, event.candidate):
        _contradiction(recorded, f"candidate {event.candidate} does not reach the head {head.load_id}")
    elif (event.manifest, event.weights) != (candidate.manifest, candidate.weights):
        found = f"manifest {event.manifest} in blob {event.weights.digest}"
        _contradiction(recorded, f"it names {found}, its candidate {candidate.manifest} in {candidate.weights.digest}")
    if world.publications.ended.get(event.candidate) in ("halted", "refused"):
        _contradiction(recorded, f"candidate {event.candidate} was {world.publications.ended[event.candidate]}")
    if event.attempt != 1:
        _contradiction(recorded, f"its first attempt is number {event.attempt}")
    if event.load_id != str(LoadId(world.incarnation, world.publications.sequence + 1)):
        _contradiction(recorded, f"load id {event.load_id} does not follow sequence {world.publications.sequence}")
    _check_members(world, recorded, [(m.engine, m.boot) for m in event.members])


def _check_members(world: World, recorded: Recorded, members: list[tuple[str, str]]) -> None:
    if not members:
        _contradiction(recorded, "its membership is empty")
    for engine, boot in members:
        tail = world.tails.get(f"engine.{engine}")
        if tail is None or boot not in tail.boots:
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
            said = (report.failure or report.manifest) if report else "nothing"
            _contradiction(recorded, f"{member.engine} boot {member.boot} reported {said}, not the target's digest")


def agrees(report: membership.Report, target: publication.Publication) -> bool:
    """The report is a proof of the target: load id and digest, without a failure."""
    return not report.failure and (report.load_id, report.manifest) == (target.load_id, target.manifest)


def reaches_head(world: World, candidate: str) -> bool:
    """The candidate's base is the head's content."""
    head, found = world.publications.head, world.training.candidates.get(candidate)
    return head is not None and found is not None and found.base == head.candidate


def can_still_reach(world: World, candidate: str) -> bool:
    """The candidate is the head's content, or would follow it once its undecided bases are committed in turn."""
    head, ended = world.publications.head, world.publications.ended
    while head is not None and candidate != head.candidate:
        found = world.training.candidates.get(candidate)
        if found is None or not found.base or candidate in ended or not found.selected:
            return False
        candidate = found.base
    return head is not None


def lag(world: World, load_id: str, base: str, limit: int) -> int | None:
    """Staleness: links in the base chain from the release `load_id` to `base`; None when unknown or over `limit`."""
    release = world.publications.releases.get(load_id)
    return links(world.training, base, release.candidate, limit) if release else None


def _contradiction(recorded: Recorded, why: str) -> NoReturn:
    raise ContractError(
        f"event {recorded.seq} {recorded.name} by {recorded.writer} contradicts the log: {why}. "
        "Stop and look: `reef-bus log show` and `reef-bus audit`",
        recorded.seq,
    )
