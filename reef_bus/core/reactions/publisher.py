"""What publishers owe: targets, attempts, commits, refusals and halts; they decide alike.

Knows: the world, the policy, the time. Must not know: how weights travel, or other publishers.
"""

from __future__ import annotations

import msgspec

from reef_bus.core.effects import (
    Append,
    Deadlines,
    Debt,
    Policy,
)
from reef_bus.core.ids import LoadId, derived
from reef_bus.core.membership import Engine, Report, current
from reef_bus.core.memory import lending
from reef_bus.core.publication import MAX_ATTEMPTS, STAGED, SUPERSEDED, Publication
from reef_bus.core.reactions.common import SECOND, word
from reef_bus.core.reactions.memory import overdue
from reef_bus.core.reactions.operator import halts, refusals, refuse, retirements
from reef_bus.core.requests import Request, wanted
from reef_bus.core.residency import Refused, Residency, make_room, withdrawn
from reef_bus.core.retention import within_reach
from reef_bus.core.serving import live, present
from reef_bus.core.training import Candidate, Sender
from reef_bus.core.world import World, agrees, asked_of, head_for, reaches_head
from reef_bus.events import (
    EngineExcluded,
    Event,
    Evidence,
    Member,
    PublicationHalted,
    PublicationRefused,
    ReleaseCommitted,
    RollbackRequested,
    TargetPersisted,
    TransferAborted,
)


def publisher(world: World, policy: Policy, now: int, silent: frozenset[str] = frozenset()) -> list[Debt]:
    """What publishers owe; they decide alike. `now` in ns since the epoch; `silent` boots whose heartbeats lapsed."""
    if world.publications.head is None:
        return []
    open_, rollback = world.publications.open, wanted(world.requests, RollbackRequested)
    first = [*refusals(world), *retirements(world), *_outcasts(world, open_, silent)]
    if rollback and (refused := _no_rollback(world, rollback, policy)):
        return [*first, refused]
    if open_:
        return first + (halts(world, open_) or _drive(world, open_, policy.deadlines, now))
    if lending(world.handover):  # a target would need the memory that the job has
        return first + overdue(world, policy.deadlines, now)
    return first + (_rollback(world, rollback, policy) if rollback else _next_target(world, policy))


def _members(world: World) -> list[Engine]:
    """The engines that can take part now, by id."""
    engines = world.membership.engines
    return [engines[name] for name in sorted(engines) if present(world, engines[name])]


def _outcasts(world: World, open_: Publication | None, silent: frozenset[str]) -> list[Debt]:
    """Live boots that nobody can count on: silent ones, and those whose process ended while no attempt was theirs. Who
    is out of membership is out altogether: no boot serves on what an attempt had once proven."""
    members = open_.members if open_ else ()
    debts = []
    for engine in world.membership.engines.values():
        gone = not present(world, engine) and Member(engine.id, engine.boot) not in members
        if live(world, engine) and (gone or engine.boot in silent):
            debts.append(_exclude(world, engine, "its process ended" if gone else "its heartbeats stopped", not gone))
    return debts


def _exclude(world: World, found: Engine, reason: str, at_head: bool) -> Debt:
    event = EngineExcluded(scenario=world.training.scenario, engine=found.id, boot=found.boot, reason=reason)
    return Debt(key=f"exclude/{found.joined}", effect=Append(event), cause=found.joined, at_head=at_head)


def _next_target(world: World, policy: Policy) -> list[Debt]:
    if not world.queue:
        return []
    candidate = world.training.candidates[world.queue[0]]
    if not reaches_head(world, candidate.id):
        return [_refuse(world, candidate, "base_lost", "its base was not committed")]
    if policy.publish == "latest" and (newer := _successor(world, candidate.id)):
        return [_refuse(world, candidate, SUPERSEDED, f"by {newer}, which was trained from it")]
    members = _members(world)
    if not members:
        return []
    if candidate.scenario:
        return [_next_adapter(world, candidate, members, policy)]
    transport = _transport(world.training.offers, members, policy)
    if not transport:
        return [_refuse(world, candidate, "transport", _no_transport(world.training.offers, members, policy))]
    if wrong := _unfit(members, policy):
        return [_refuse(world, candidate, *wrong)]
    return [_target(world, candidate, members, msgspec.structs.replace(policy, transport=transport))]


def _next_adapter(world: World, candidate: Candidate, members: list[Engine], policy: Policy) -> Debt:
    """There is room for it before anybody hears of it."""
    if wrong := _no_room(world, candidate, members):
        return _refuse(world, candidate, *wrong)
    return _target(world, candidate, members, policy)


def _no_room(world: World, candidate: Candidate, members: list[Engine]) -> tuple[str, str] | None:
    """Who takes no adapter, or has no place for this one; None if all have."""
    if none := [engine.id for engine in members if engine.residency is None or "files" not in engine.accepts]:
        return "adapters", f"{none} take no adapters from files: see adapters.scenarios and inference.accepts"
    for engine in members:
        found = make_room(_settled(world, engine), candidate.scenario, _next_load_id(world), candidate.manifest)
        if isinstance(found, Refused):
            return f"adapter_{found.reason}", f"{engine.id}: {found.detail} (adapters.capacity)"
    return None


def _settled(world: World, engine: Engine) -> Residency:
    """What it will hold when nothing is being published: committed or halted, the open one leaves a place to others."""
    assert engine.residency is not None
    open_ = world.publications.open
    return withdrawn(engine.residency, open_.scenario, open_.load_id) if open_ else engine.residency


def _transport(offers: tuple[str, ...], members: list[Engine], policy: Policy) -> str:
    """The first that the trainer offers and every member accepts; empty if there is none, or not the one that is
    asked for."""
    allowed = [each for each in offers if policy.transport in ("", each)]
    return next((each for each in allowed if all(each in engine.accepts for engine in members)), "")


def _no_transport(offers: tuple[str, ...], members: list[Engine], policy: Policy) -> str:
    accepted = "; ".join(f"{engine.id} accepts {list(engine.accepts)}" for engine in members)
    asked = f"transport {policy.transport} is asked for: " if policy.transport else ""
    return f"{asked}the trainer offers {list(offers)}; {accepted}"


def _unable(world: World, transport: str) -> list[str]:
    return [engine.id for engine in _members(world) if transport not in engine.accepts]


def _unfit(members: list[Engine], policy: Policy) -> tuple[str, str] | None:
    """What not every engine can do of what the policy asks for, and who cannot; None if all can do all of it."""
    asked = ("mode", policy.mode, "fenced"), ("pause", policy.pause, "drain")
    for key, value, instead in asked:
        able = [e.id for e in members if value in (e.modes if key == "mode" else e.pauses)]
        if unable := [e.id for e in members if e.id not in able]:
            return key, f"{key} {value}: {able} can, refused by {unable}; set publication.{key} to {instead}"
    return None


def _no_rollback(world: World, asked: Request, policy: Policy) -> Debt | None:
    """What an engine cannot take, or nobody can read any more, is refused before anything is halted for it."""
    scenario = asked_of(world, asked)
    if asked.about not in within_reach(world.publications, policy.keep, scenario):
        gone = f"{asked.about} is more than artifacts.keep ({policy.keep}) releases back: its weights may be gone"
        return refuse(world, asked, "not_kept", gone)
    if unable := _unable(world, "files"):
        return refuse(world, asked, "transport", f"a rollback is read from files, refused by {unable}")
    release = world.publications.release(scenario, asked.about)
    wrong = _unfit(_members(world), policy)
    if scenario and release:
        wrong = _no_room(world, world.training.candidates[release.candidate], _members(world))
    return refuse(world, asked, *wrong) if wrong else None


def _rollback(world: World, asked: Request, policy: Policy) -> list[Debt]:
    """It precedes every candidate; with no engine joined it waits, and so do they."""
    release, members = world.publications.release(asked_of(world, asked), asked.about), _members(world)
    if not members or release is None:
        return []
    candidate = world.training.candidates[release.candidate]
    return [_target(world, candidate, members, msgspec.structs.replace(policy, transport="files"), asked)]


def _successor(world: World, candidate: str) -> str:
    """A selected candidate that was trained from this one, or an empty string."""
    known = world.training.candidates
    return next((c for c in world.training.selected if known[c].base == candidate), "")


def _refuse(world: World, candidate: Candidate, reason: str, detail: str) -> Debt:
    scenario = candidate.scenario or world.training.scenario
    event = PublicationRefused(scenario=scenario, candidate=candidate.id, reason=reason, detail=detail)
    return Debt(key=f"refuse/{candidate.selected}", effect=Append(event), cause=candidate.selected)


def _target(
    world: World, candidate: Candidate, members: list[Engine], policy: Policy, asked: Request | None = None
) -> Debt:
    head, adapter = head_for(world, candidate.id), world.training.adapters.get(candidate.scenario)
    assert head is not None
    load_id = _next_load_id(world)
    publication = derived("pub", load_id, candidate.id)
    event = TargetPersisted(
        scenario=candidate.scenario or world.training.scenario,
        publication=publication,
        candidate=candidate.id,
        load_id=load_id,
        parent=head.load_id,
        manifest=candidate.manifest,
        weights=candidate.weights,
        tensor_bytes=candidate.tensor_bytes,
        attempt=1,
        members=tuple(Member(e.id, e.boot) for e in members),
        sender="artifact" if asked or adapter else "trainer",
        transport="files" if adapter else policy.transport,
        mode=STAGED if adapter else policy.mode,
        pause=policy.pause,
        request=asked.seq if asked else 0,
        lora=adapter.lora if adapter else None,
    )
    since = max(asked.seq if asked else candidate.selected, world.publications.ended_seq)
    return Debt(key=f"target/{since}", effect=Append(event), cause=since, correlation=publication)


def _next_load_id(world: World) -> str:
    return str(LoadId(world.incarnation, world.publications.sequence + 1))


def _drive(world: World, open_: Publication, deadlines: Deadlines, now: int) -> list[Debt]:
    reports = {m: world.membership.report(m.boot, open_.id, open_.attempt) for m in open_.members}
    verified = [m for m, report in reports.items() if report and agrees(report, open_)]
    if len(verified) == len(open_.members):
        return [_commit(world, open_)]
    verdict = _verdict(world, open_, verified, deadlines, now)
    return _abort(world, open_, deadlines, now, *verdict) if verdict else []


def _commit(world: World, open_: Publication) -> Debt:
    evidence = []
    for member in open_.members:
        report = world.membership.report(member.boot, open_.id, open_.attempt)
        assert report is not None
        evidence.append(Evidence(member.engine, member.boot, report.seq, report.manifest))
    event = ReleaseCommitted(
        scenario=open_.scenario,
        publication=open_.id,
        attempt=open_.attempt,
        candidate=open_.candidate,
        load_id=open_.load_id,
        parent=open_.parent,
        manifest=open_.manifest,
        evidence=tuple(evidence),
    )
    cause = max(e.seq for e in evidence)
    return Debt(key=f"commit/{open_.attempt_seq}", effect=Append(event), cause=cause, correlation=open_.id)


Verdict = tuple[str, str, list[Member], bool]
"""reason, detail, the guilty, whether it is a judgement about time"""


def _verdict(
    world: World, open_: Publication, verified: list[Member], deadlines: Deadlines, now: int
) -> Verdict | None:
    """Why the attempt cannot succeed any more, and by whose fault; None while it still can."""
    members = open_.members
    lost = [m for m in members if m not in verified and not _alive(world, m)]
    if lost:
        return "member_lost", f"{_names(lost)} replaced, excluded or gone", lost, False
    unfenced = _unfenced(world, open_)
    if unfenced and now > open_.attempt_time + deadlines.fence_s * SECOND:
        return "fence_deadline", f"{_names(unfenced)} did not stop within {deadlines.fence_s:g} s", unfenced, True
    sender = word(world, open_)
    if sender is not None and sender.failure:
        return "sender_failed", sender.failure, _unverified(members, verified), False
    if sender is None and now > open_.attempt_time + deadlines.sender_s * SECOND:
        return "sender_deadline", f"no offer within {deadlines.sender_s:g} s", _unverified(members, verified), True
    if sender is None or unfenced:
        return None
    return _receivers(world, open_, sender, verified, deadlines, now)


def _receivers(
    world: World, open_: Publication, sender: Sender, verified: list[Member], deadlines: Deadlines, now: int
) -> Verdict | None:
    reports = {m: world.membership.report(m.boot, open_.id, open_.attempt) for m in open_.members}
    guilty = _unverified(open_.members, verified)
    if all(reports.values()):
        return "receiver_failed", _failures(reports, open_), guilty, False
    fences = [world.membership.fence(m.boot, open_.id, open_.attempt) for m in open_.members]
    began = max([f.time for f in fences if f] + [sender.time])
    if now > began + deadlines.verify_s * SECOND:
        missing = [m for m, report in reports.items() if report is None]
        detail = f"{_names(missing)} did not verify within {deadlines.verify_s:g} s"
        return "verify_deadline", detail, guilty, True
    return None


def _unfenced(world: World, open_: Publication) -> list[Member]:
    """Members that have not stopped yet; a staged release stops nobody, and waits for nobody to stop."""
    if open_.mode == STAGED:
        return []
    return [m for m in open_.members if world.membership.fence(m.boot, open_.id, open_.attempt) is None]


def _alive(world: World, member: Member) -> bool:
    return current(world.membership, member) and present(world, world.membership.engines[member.engine])


def _unverified(members: tuple[Member, ...], verified: list[Member]) -> list[Member]:
    """Where some member verified, those that did not are guilty; where none did, the sender is, and nobody is out."""
    return [m for m in members if m not in verified] if verified else []


def _failures(reports: dict[Member, Report | None], open_: Publication) -> str:
    wrong = {m: r for m, r in reports.items() if r and not agrees(r, open_)}
    return "; ".join(
        f"{m.engine}: {r.failure or f'digest {r.manifest}, expected {open_.manifest}'}" for m, r in wrong.items()
    )


def _names(members: list[Member]) -> str:
    return ", ".join(f"{m.engine} ({m.boot})" for m in members)


def _abort(
    world: World,
    open_: Publication,
    deadlines: Deadlines,
    now: int,
    reason: str,
    detail: str,
    guilty: list[Member],
    at_head: bool,
) -> list[Debt]:
    """End the attempt: another one, or a halt. With nobody left, a new boot is waited for as long as for a fence."""
    fit = [e for e in _members(world) if _fits(e, open_)]
    joined = [Member(e.id, e.boot) for e in fit if open_.transport in e.accepts]
    able = tuple(m for m in joined if m not in guilty)
    again = open_.attempt < MAX_ATTEMPTS
    if again and not able and now <= _since_anybody(world, open_) + deadlines.fence_s * SECOND:
        return []
    excluded = tuple(guilty) + tuple(m for m in open_.members if m not in able and m not in guilty)
    event: Event = TransferAborted(
        scenario=open_.scenario,
        publication=open_.id,
        attempt=open_.attempt,
        reason=reason,
        excluded=excluded,
        next_attempt=open_.attempt + 1,
        members=able,
        detail=detail,
    )
    if not again or not able:
        event = PublicationHalted(
            scenario=open_.scenario,
            publication=open_.id,
            attempt=open_.attempt,
            reason=reason if able else f"{reason}, and no engine is left",
            excluded=excluded,
            detail=detail,
        )
    judged = at_head or not able
    key = f"abort/{open_.attempt_seq}"
    return [Debt(key=key, effect=Append(event), cause=open_.attempt_seq, correlation=open_.id, at_head=judged)]


def _fits(engine: Engine, open_: Publication) -> bool:
    """It can receive as the open publication demands. For an adapter nobody stops."""
    if open_.lora:
        return engine.residency is not None
    return open_.mode in engine.modes and open_.pause in engine.pauses


def _since_anybody(world: World, open_: Publication) -> int:
    """When the attempt began, or the last process of its members ended."""
    ends = [world.components[m.engine].ended_time for m in open_.members if m.engine in world.components]
    return max(open_.attempt_time, *ends, 0)
