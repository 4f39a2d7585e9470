"""The void rule (protocol.md, rule 6): which stored events count, decided from their own family alone.

Knows: one family's tail. Must not know: any other family, configuration, or time. Frozen: no upgrade may change which
old events count, so a new event gets its clause here and an old clause is never edited.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from reef_bus.events import (
    AdapterRegistered,
    CandidateEvaluated,
    CandidateReady,
    CandidateRejected,
    CandidateSelected,
    EngineJoined,
    Event,
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
    publication, `attempt` its current attempt (0: none), `candidate` the open job's candidate. `time` (ns): since then
    nothing that counts has happened here. `adapters` are the scenarios that train one; `whole`: the whole model was
    trained, which is then never frozen.
    """

    seq: int = 0
    time: int = 0
    boots: list[str] = []
    open: str = ""
    attempt: int = 0
    candidate: str = ""
    registered: bool = False
    adapters: list[str] = []
    whole: bool = False


def why_void(tail: Tail, recorded: Recorded) -> str:
    """Why every reader must ignore this event, or an empty string."""
    kind = type(recorded.event)
    if kind.family == "operator":
        return ""  # requests: compared with nothing, and never facts
    if recorded.prev != tail.seq:
        return f"its prev is {recorded.prev}, the family's last stored event is {tail.seq}"
    if kind.family in ("train", "engine") and (why := _why_boot(tail, recorded)):
        return why
    clause = CLAUSES.get(kind)
    return clause(tail, recorded.event) if clause else ""


def _why_boot(tail: Tail, recorded: Recorded) -> str:
    if type(recorded.event) in JOINS:
        return "its boot had joined before" if recorded.boot in tail.boots else ""
    if not tail.boots or tail.boots[-1] != recorded.boot:
        return f"boot {recorded.boot} is not the family's newest"
    return ""


# -- the clauses by which a family's own state voids an event


def _nothing_is_open(tail: Tail, event: JobDispatched | TargetPersisted) -> str:
    return f"{tail.open} is still open" if tail.open else ""


def _no_scenario_is_registered(tail: Tail, event: ScenarioRegistered) -> str:
    return "a scenario is registered already" if tail.registered else ""


def _adapter_may_be_registered(tail: Tail, event: AdapterRegistered) -> str:
    if not tail.registered or tail.whole:
        return "the whole model is trained here" if tail.whole else "there is no base model yet"
    return f"{event.scenario} is registered already" if event.scenario in tail.adapters else ""


def _job_may_start(tail: Tail, event: JobStarted) -> str:
    ok = tail.open == event.job and not tail.candidate and event.attempt == tail.attempt + 1
    return "" if ok else "no such job to start"


def _job_is_under_way(tail: Tail, event: CandidateReady | JobAmbiguous) -> str:
    ok = tail.open == event.job and not tail.candidate and event.attempt == tail.attempt > 0
    return "" if ok else "no such attempt of a job is open"


def _candidate_is_open(tail: Tail, event: CandidateEvaluated | CandidateSelected | CandidateRejected) -> str:
    return "" if tail.open and tail.candidate == event.candidate else "no such candidate is open"


def _job_is_open(tail: Tail, event: JobDropped | JobDiscarded) -> str:
    return "" if tail.open == event.job else "no such job is open"


def _attempt_is_open(tail: Tail, event: TransferAborted | PublicationHalted | ReleaseCommitted) -> str:
    ok = tail.open == event.publication and tail.attempt == event.attempt
    return "" if ok else "no such attempt is open"


CLAUSES: Mapping[type[Event], Callable[[Tail, Any], str]] = {
    JobDispatched: _nothing_is_open,
    TargetPersisted: _nothing_is_open,
    ScenarioRegistered: _no_scenario_is_registered,
    AdapterRegistered: _adapter_may_be_registered,
    JobStarted: _job_may_start,
    JobAmbiguous: _job_is_under_way,
    CandidateReady: _job_is_under_way,
    CandidateEvaluated: _candidate_is_open,
    CandidateSelected: _candidate_is_open,
    CandidateRejected: _candidate_is_open,
    JobDropped: _job_is_open,
    JobDiscarded: _job_is_open,
    TransferAborted: _attempt_is_open,
    PublicationHalted: _attempt_is_open,
    ReleaseCommitted: _attempt_is_open,
}
"""What must hold in its family for an event to count; an event that is not named here counts in any state.

A table, and not a ladder of cases, because every reader asks this of every event: it is half of what a fold costs.
"""


def advance(tail: Tail, recorded: Recorded, *, void: bool) -> None:
    """Move the tail past a stored event; a void one moves nothing but the sequence."""
    tail.seq = recorded.seq
    if void:
        return
    tail.time = recorded.time
    if move := MOVES.get(type(recorded.event)):
        move(tail, recorded, recorded.event)


def _join(tail: Tail, recorded: Recorded, event: TrainerJoined | EngineJoined) -> None:
    tail.boots.append(recorded.boot)


def _register(tail: Tail, recorded: Recorded, event: ScenarioRegistered) -> None:
    tail.registered = True


def _register_adapter(tail: Tail, recorded: Recorded, event: AdapterRegistered) -> None:
    tail.adapters.append(event.scenario)


def _open_job(tail: Tail, recorded: Recorded, event: JobDispatched) -> None:
    tail.open, tail.attempt, tail.candidate = event.job, 0, ""
    tail.whole = not tail.adapters


def _start(tail: Tail, recorded: Recorded, event: JobStarted) -> None:
    tail.attempt = event.attempt


def _ready(tail: Tail, recorded: Recorded, event: CandidateReady) -> None:
    tail.candidate = event.candidate


def _open_publication(tail: Tail, recorded: Recorded, event: TargetPersisted) -> None:
    tail.open, tail.attempt = event.publication, event.attempt


def _retry(tail: Tail, recorded: Recorded, event: TransferAborted) -> None:
    tail.attempt = event.next_attempt


def _close(tail: Tail, recorded: Recorded, event: Event) -> None:
    tail.open, tail.attempt, tail.candidate = "", 0, ""


MOVES: Mapping[type[Event], Callable[[Tail, Recorded, Any], None]] = {
    TrainerJoined: _join,
    EngineJoined: _join,
    ScenarioRegistered: _register,
    AdapterRegistered: _register_adapter,
    JobDispatched: _open_job,
    JobStarted: _start,
    CandidateReady: _ready,
    CandidateSelected: _close,
    CandidateRejected: _close,
    JobDropped: _close,
    JobDiscarded: _close,
    TargetPersisted: _open_publication,
    TransferAborted: _retry,
    ReleaseCommitted: _close,
    PublicationHalted: _close,
}
"""How an event that counts moves its family's tail, beside its place."""
