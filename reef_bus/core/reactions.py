"""Who owes what: (world, me, now) → debts. Start-up, recovery and normal running are this one question.

Knows: the world and the deadlines. Must not know: how an effect is performed, or how a fact is appended.
A debt's key is the sequence that made it owed (and the attempt): asked again, the same debt has the same key.
"""

from __future__ import annotations

import msgspec

from reef_bus.core.effects import (
    Append,
    AssembleBatch,
    Deadlines,
    Debt,
    Decide,
    Effect,
    Evaluate,
    Fence,
    Join,
    Me,
    OfferWeights,
    Policy,
    Receive,
    Register,
    Retire,
    Train,
    VerifyHead,
)
from reef_bus.core.ids import LoadId, derived
from reef_bus.core.membership import Engine, Report, current
from reef_bus.core.publication import MAX_ATTEMPTS, Publication
from reef_bus.core.serving import fenced, live, owes_head, present
from reef_bus.core.training import Candidate, Job, Sender
from reef_bus.core.world import World, agrees, can_still_reach, reaches_head
from reef_bus.events import (
    EngineExcluded,
    Event,
    Evidence,
    JobStarted,
    Member,
    PublicationHalted,
    PublicationRefused,
    ReleaseCommitted,
    TargetPersisted,
    TrainerRestored,
    TransferAborted,
)

SECOND = 1_000_000_000


# -- trainer


def trainer(world: World, me: Me) -> list[Debt]:
    """What the trainer's boot owes."""
    if not world.incarnation:
        return []
    if world.training.boot != me.boot:
        return [_join_or_retire(world, me, "train", world.training.boot)]
    if not world.training.scenario:
        return [Debt(key="register", effect=Register(), cause=world.training.joined)]
    return [*_offer(world, me), *_job(world, me)]


def _join_or_retire(world: World, me: Me, family: str, successor: str) -> Debt:
    tail = world.tails.get(family)
    if tail and me.boot in tail.boots:
        return Debt(key="retire", effect=Retire(f"boot {me.boot} of {me.id} was replaced by {successor}"))
    return Debt(key="join", effect=Join(), cause=1)


def _offer(world: World, me: Me) -> list[Debt]:
    open_ = world.publications.open
    if open_ is None or open_.sender != "trainer":
        return []
    candidate = world.training.candidates[open_.candidate]
    return [
        Debt(
            key=f"offer/{open_.attempt_seq}",
            effect=OfferWeights(msgspec.structs.replace(open_), msgspec.structs.replace(candidate)),
            cause=open_.attempt_seq,
            correlation=open_.id,
        )
    ]


def _job(world: World, me: Me) -> list[Debt]:
    training = world.training
    if training.job is None:
        return [_next_job(world)]
    job = training.job
    if job.candidate:
        return [_decide(world, job)]
    if job.boot != me.boot:
        started = JobStarted(scenario=training.scenario, job=job.id, attempt=job.attempt + 1)
        return [Debt(key=f"start/{job.seq}/{job.attempt}", effect=Append(started), cause=job.seq, correlation=job.id)]
    train = Train(msgspec.structs.replace(job), msgspec.structs.replace(training.candidates[job.base]))
    return [Debt(key=f"train/{job.started}", effect=train, cause=job.started, correlation=job.id)]


def _decide(world: World, job: Job) -> Debt:
    candidate, metrics = msgspec.structs.replace(world.training.candidates[job.candidate]), dict(job.metrics)
    if not job.evaluated:
        effect: Effect = Evaluate(candidate, metrics)
        return Debt(key=f"evaluate/{job.ready}", effect=effect, cause=job.ready, correlation=job.id)
    effect = Decide(candidate, metrics)
    return Debt(key=f"decide/{job.evaluated}", effect=effect, cause=job.evaluated, correlation=job.id)


def _next_job(world: World) -> Debt:
    training, head = world.training, world.publications.head
    assert head is not None  # registration made release 0
    base = next((c for c in reversed(training.selected) if can_still_reach(world, c)), head.candidate)
    since = max(training.closed, training.registered, training.joined)
    if not can_still_reach(world, training.base):
        restored = TrainerRestored(scenario=training.scenario, load_id=head.load_id, candidate=head.candidate)
        return Debt(key=f"restore/{since}/{head.seq}", effect=Append(restored), cause=head.seq)
    effect = AssembleBatch(base, training.dispatched + 1, training.last_batch)
    return Debt(key=f"batch/{since}/{base}", effect=effect, cause=since)


# -- engine


def engine(world: World, me: Me, deadlines: Deadlines, *, spoilt: bool = False) -> list[Debt]:
    """What the agent of one engine owes. `spoilt`: its memory is not known to hold the head, whatever it has said."""
    if not world.incarnation:
        return []
    found = world.membership.engines.get(me.id)
    if found is None or found.boot != me.boot:
        return [_join_or_retire(world, me, f"engine.{me.id}", found.boot if found else "")]
    if not live(world, found):
        return [Debt(key="retire", effect=Retire(f"boot {me.boot} of {me.id} was excluded"))]
    open_ = world.publications.open
    if open_ is not None and fenced(world, me.id, me.boot):
        return _attempt(world, me, open_, deadlines)
    return _head(world, found, spoilt)


def _attempt(world: World, me: Me, open_: Publication, deadlines: Deadlines) -> list[Debt]:
    if world.membership.fence(me.boot, open_.id, open_.attempt) is None:
        fence = Fence(open_.id, open_.attempt)
        return [Debt(key=f"fence/{open_.attempt_seq}", effect=fence, cause=open_.attempt_seq, correlation=open_.id)]
    sender = _word(world, open_)
    if world.membership.report(me.boot, open_.id, open_.attempt) or sender is None or not _all_fenced(world, open_):
        return []
    if sender.failure:
        return []
    receive = Receive(
        open_.id,
        open_.attempt,
        open_.load_id,
        open_.manifest,
        sender.transport,
        sender.address,
        sender.token,
        deadlines.stall_s,
    )
    return [Debt(key=f"receive/{sender.seq}", effect=receive, cause=sender.seq, correlation=open_.id)]


def _word(world: World, open_: Publication) -> Sender | None:
    """What the living trainer boot says about this attempt: a failure, or a ticket that echoes the target.

    A replaced boot's ticket leads nowhere, and its failure is not its successor's.
    """
    sender = world.training.sender
    if sender is None or sender.boot != world.training.boot:
        return None
    if (sender.publication, sender.attempt) != (open_.id, open_.attempt):
        return None
    echoes = (sender.load_id, sender.manifest) == (open_.load_id, open_.manifest)
    return sender if sender.failure or echoes else None


def _all_fenced(world: World, open_: Publication) -> bool:
    return all(world.membership.fence(m.boot, open_.id, open_.attempt) for m in open_.members)


def _head(world: World, found: Engine, spoilt: bool) -> list[Debt]:
    """A report may count although its boot has begun to write again: for another ticket of the same attempt."""
    since, head = owes_head(world, found), world.publications.head
    if head is not None and not since and spoilt:
        since = max(found.reported, head.seq)
    if not since or head is None:
        return []
    verify = VerifyHead(head.load_id, head.manifest, head.weights)
    return [Debt(key=f"head/{since}", effect=verify, cause=since)]


# -- publisher


def publisher(world: World, policy: Policy, now: int, silent: frozenset[str] = frozenset()) -> list[Debt]:
    """What publishers owe; they decide alike. `now` in ns since the epoch; `silent` boots whose heartbeats lapsed."""
    if world.publications.head is None:
        return []
    open_ = world.publications.open
    outcasts = _outcasts(world, open_, silent)
    return outcasts + (_drive(world, open_, policy.deadlines, now) if open_ else _next_target(world, policy))


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
    pending = next((c for c in world.training.selected if c not in world.publications.ended), None)
    if pending is None:
        return []
    candidate = world.training.candidates[pending]
    if not reaches_head(world, candidate.id):
        return [_refuse(world, candidate, "base_lost", "its base was not committed")]
    members = _members(world)
    if not members:
        return []
    offers = world.training.offers
    unable = [e.id for e in members if policy.transport not in e.accepts]
    if unable or policy.transport not in offers:
        detail = f"transport {policy.transport}: the trainer offers {list(offers)}, refused by {unable}"
        return [_refuse(world, candidate, "transport", detail)]
    return [_target(world, candidate, members, policy)]


def _refuse(world: World, candidate: Candidate, reason: str, detail: str) -> Debt:
    event = PublicationRefused(scenario=world.training.scenario, candidate=candidate.id, reason=reason, detail=detail)
    return Debt(key=f"refuse/{candidate.selected}", effect=Append(event), cause=candidate.selected)


def _target(world: World, candidate: Candidate, members: list[Engine], policy: Policy) -> Debt:
    head = world.publications.head
    assert head is not None
    load_id = str(LoadId(world.incarnation, world.publications.sequence + 1))
    publication = derived("pub", load_id, candidate.id)
    event = TargetPersisted(
        scenario=world.training.scenario,
        publication=publication,
        candidate=candidate.id,
        load_id=load_id,
        parent=head.load_id,
        manifest=candidate.manifest,
        weights=candidate.weights,
        tensor_bytes=candidate.tensor_bytes,
        attempt=1,
        members=tuple(Member(e.id, e.boot) for e in members),
        sender="trainer",
        transport=policy.transport,
        mode="fenced",
        pause=policy.pause,
    )
    since = max(candidate.selected, world.publications.ended_seq)
    return Debt(key=f"target/{since}", effect=Append(event), cause=since, correlation=publication)


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
    unfenced = [m for m in members if world.membership.fence(m.boot, open_.id, open_.attempt) is None]
    if unfenced and now > open_.attempt_time + deadlines.fence_s * SECOND:
        return "fence_deadline", f"{_names(unfenced)} did not stop within {deadlines.fence_s:g} s", unfenced, True
    sender = _word(world, open_)
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
    able = tuple(m for m in (Member(e.id, e.boot) for e in _members(world)) if m not in guilty)
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


def _since_anybody(world: World, open_: Publication) -> int:
    """When the attempt began, or the last process of its members ended."""
    ends = [world.components[m.engine].ended_time for m in open_.members if m.engine in world.components]
    return max(open_.attempt_time, *ends, 0)
