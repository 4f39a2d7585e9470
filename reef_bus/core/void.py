"""The void rule (protocol.md, rule 6): which stored events count, decided from their own family alone.

Knows: one family's tail. Must not know: any other family, configuration, or time. Frozen: no upgrade may change which
old events count, so a new event gets its clause here and an old clause is never edited.
"""

from __future__ import annotations

import msgspec

from reef_bus.events import (
    CandidateEvaluated,
    CandidateReady,
    CandidateRejected,
    CandidateSelected,
    EngineJoined,
    JobAmbiguous,
    JobDiscarded,
    JobDispatched,
    JobDropped,
    JobStarted,
    PublicationHalted,
    Recorded,
    ReleaseCommitted,
    ScenarioRegistered,
    TargetPersisted,
    TrainerJoined,
    TransferAborted,
)

RULES = 1
"""The version of the fold's rules, as `LogOpened` records it."""

JOINS = (TrainerJoined, EngineJoined)


class Tail(msgspec.Struct):
    """What the rule remembers of one family.

    `seq` is the last stored event, void or not; `boots` the joined boots, newest last; `open` the open job or
    publication, `attempt` its current attempt (0: none), `candidate` the open job's candidate.
    """

    seq: int = 0
    boots: list[str] = []
    open: str = ""
    attempt: int = 0
    candidate: str = ""
    registered: bool = False


def why_void(tail: Tail, recorded: Recorded) -> str:
    """Why every reader must ignore this event, or an empty string."""
    if recorded.event.family == "operator":
        return ""  # requests: compared with nothing, and never facts
    if recorded.prev != tail.seq:
        return f"its prev is {recorded.prev}, the family's last stored event is {tail.seq}"
    return _why_boot(tail, recorded) or _why_state(tail, recorded)


def _why_boot(tail: Tail, recorded: Recorded) -> str:
    if recorded.event.family not in ("train", "engine"):
        return ""
    if isinstance(recorded.event, JOINS):
        return "its boot had joined before" if recorded.boot in tail.boots else ""
    if not tail.boots or tail.boots[-1] != recorded.boot:
        return f"boot {recorded.boot} is not the family's newest"
    return ""


def _why_state(tail: Tail, recorded: Recorded) -> str:
    match recorded.event:
        case JobDispatched() | TargetPersisted():
            return f"{tail.open} is still open" if tail.open else ""
        case ScenarioRegistered():
            return "a scenario is registered already" if tail.registered else ""
        case JobStarted(job=job, attempt=attempt):
            ok = tail.open == job and not tail.candidate and attempt == tail.attempt + 1
            return _unless(ok, "no such job to start")
        case CandidateReady(job=job, attempt=attempt):
            ok = tail.open == job and not tail.candidate and attempt == tail.attempt > 0
            return _unless(ok, "no such attempt of a job is open")
        case (
            CandidateEvaluated(candidate=candidate)
            | CandidateSelected(candidate=candidate)
            | CandidateRejected(candidate=candidate)
        ):
            return _unless(bool(tail.open) and tail.candidate == candidate, "no such candidate is open")
        case JobAmbiguous(job=job, attempt=attempt):
            ok = tail.open == job and not tail.candidate and attempt == tail.attempt > 0
            return _unless(ok, "no such attempt of a job is open")
        case JobDropped(job=job) | JobDiscarded(job=job):
            return _unless(tail.open == job, "no such job is open")
        case (
            TransferAborted(publication=publication, attempt=attempt)
            | PublicationHalted(publication=publication, attempt=attempt)
            | ReleaseCommitted(publication=publication, attempt=attempt)
        ):
            return _unless(tail.open == publication and tail.attempt == attempt, "no such attempt is open")
    return ""


def _unless(holds: bool, why: str) -> str:
    return "" if holds else why


def advance(tail: Tail, recorded: Recorded, *, void: bool) -> None:
    """Move the tail past a stored event; a void one moves nothing but the sequence."""
    tail.seq = recorded.seq
    if void:
        return
    match recorded.event:
        case TrainerJoined() | EngineJoined():
            tail.boots.append(recorded.boot)
        case ScenarioRegistered():
            tail.registered = True
        case JobDispatched(job=job):
            tail.open, tail.attempt, tail.candidate = job, 0, ""
        case JobStarted(attempt=attempt):
            tail.attempt = attempt
        case CandidateReady(candidate=candidate):
            tail.candidate = candidate
        case TargetPersisted(publication=publication, attempt=attempt):
            tail.open, tail.attempt = publication, attempt
        case TransferAborted(next_attempt=attempt):
            tail.attempt = attempt
        case CandidateSelected() | CandidateRejected() | JobDropped() | JobDiscarded():
            tail.open, tail.attempt, tail.candidate = "", 0, ""
        case ReleaseCommitted() | PublicationHalted():
            tail.open, tail.attempt, tail.candidate = "", 0, ""
