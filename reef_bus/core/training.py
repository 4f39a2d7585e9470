"""The trainer's side of the state: scenario, jobs, candidates, the base chain, the sender.

Knows: the `train` family. Must not know: engines, deadlines, or how anything is trained.
"""

from __future__ import annotations

import msgspec

from reef_bus.core.ids import BASE
from reef_bus.events import (
    Blob,
    CandidateEvaluated,
    CandidateReady,
    CandidateRejected,
    CandidateSelected,
    JobAmbiguous,
    JobDiscarded,
    JobDispatched,
    JobDropped,
    JobStarted,
    Recorded,
    ScenarioRegistered,
    SenderFailed,
    SenderReady,
    TrainerJoined,
    TrainerRestored,
)


class Candidate(msgspec.Struct, kw_only=True):
    """One checkpointed update. `base` is the candidate that it was trained from; `selected` and `seq` are sequences."""

    id: str
    base: str
    step: int
    weights: Blob
    optimizer: Blob | None
    manifest: str
    tensor_bytes: int
    seq: int
    selected: int = 0
    rejected: bool = False


class Job(msgspec.Struct, kw_only=True):
    """The open job. `attempt` 0: not started; `boot` started the current attempt, `in_place` if its backend changes its
    incumbent; `ambiguous` is the sequence since which nobody knows what that did."""

    id: str
    step: int
    base: str
    batch: Blob
    seq: int
    attempt: int = 0
    boot: str = ""
    started: int = 0
    in_place: bool = False
    ambiguous: int = 0
    candidate: str = ""
    ready: int = 0
    evaluated: int = 0
    metrics: dict[str, float] = {}


class Sender(msgspec.Struct, kw_only=True):
    """The latest word of a trainer boot on one attempt: a ticket, or a failure."""

    boot: str
    publication: str
    attempt: int
    seq: int
    time: int
    load_id: str = ""
    manifest: str = ""
    transport: str = ""
    address: str = ""
    token: str = ""
    failure: str = ""


class Training(msgspec.Struct):
    """Everything that the `train` family says."""

    boot: str = ""
    joined: int = 0
    backend: str = ""
    offers: tuple[str, ...] = ()
    mutates_in_place: bool = False
    scenario: str = ""
    model: str = ""
    registered: int = 0
    job: Job | None = None
    closed: int = 0
    dispatched: int = 0
    last_batch: Blob | None = None
    base: str = BASE
    candidates: dict[str, Candidate] = {}
    selected: list[str] = []
    sender: Sender | None = None


def evolve(training: Training, recorded: Recorded) -> None:
    """Apply one event of the `train` family that is not void."""
    match recorded.event:
        case TrainerJoined() as joined:
            training.boot, training.joined = recorded.boot, recorded.seq
            training.backend, training.offers = joined.backend, joined.offers
            training.mutates_in_place = joined.mutates_in_place
        case ScenarioRegistered() as registered:
            _register(training, recorded.seq, registered)
        case JobDispatched() as dispatched:
            _dispatch(training, recorded.seq, dispatched)
        case JobStarted(attempt=attempt) if training.job:
            training.job.attempt, training.job.boot, training.job.started = attempt, recorded.boot, recorded.seq
            training.job.in_place, training.job.ambiguous = training.mutates_in_place, 0
        case JobAmbiguous() if training.job:
            training.job.ambiguous = recorded.seq
        case CandidateReady() as ready if training.job:
            _ready(training, training.job, recorded.seq, ready)
        case CandidateEvaluated(metrics=metrics) if training.job:
            training.job.evaluated, training.job.metrics = recorded.seq, metrics
        case CandidateSelected(candidate=candidate):
            training.candidates[candidate].selected = recorded.seq
            training.selected.append(candidate)
            training.base = candidate
            _close(training, recorded.seq)
        case CandidateRejected(candidate=candidate):
            training.candidates[candidate].rejected = True
            _close(training, recorded.seq)
        case JobDropped() | JobDiscarded():
            _close(training, recorded.seq)
        case TrainerRestored(candidate=candidate):
            training.base = candidate
        case SenderReady() | SenderFailed():
            training.sender = _sender(recorded)


def _register(training: Training, seq: int, event: ScenarioRegistered) -> None:
    training.scenario, training.model, training.registered = event.scenario, event.model, seq
    training.candidates[BASE] = Candidate(
        id=BASE,
        base="",
        step=0,
        weights=event.weights,
        optimizer=event.optimizer,
        manifest=event.manifest,
        tensor_bytes=event.tensor_bytes,
        seq=seq,
        selected=seq,
    )


def _dispatch(training: Training, seq: int, event: JobDispatched) -> None:
    training.job = Job(id=event.job, step=event.step, base=event.base, batch=event.batch, seq=seq)
    training.last_batch = event.batch
    training.dispatched += 1


def _ready(training: Training, job: Job, seq: int, event: CandidateReady) -> None:
    job.candidate, job.ready, job.metrics = event.candidate, seq, event.metrics
    training.candidates[event.candidate] = Candidate(
        id=event.candidate,
        base=event.base,
        step=job.step,
        weights=event.weights,
        optimizer=event.optimizer,
        manifest=event.manifest,
        tensor_bytes=event.tensor_bytes,
        seq=seq,
    )


def _close(training: Training, seq: int) -> None:
    training.job, training.closed = None, seq


def _sender(recorded: Recorded) -> Sender:
    match recorded.event:
        case SenderReady() as ready:
            return Sender(
                boot=recorded.boot,
                publication=ready.publication,
                attempt=ready.attempt,
                seq=recorded.seq,
                time=recorded.time,
                load_id=ready.load_id,
                manifest=ready.manifest,
                transport=ready.transport,
                address=ready.address,
                token=ready.token,
            )
        case SenderFailed() as failed:
            return Sender(
                boot=recorded.boot,
                publication=failed.publication,
                attempt=failed.attempt,
                seq=recorded.seq,
                time=recorded.time,
                failure=f"{failed.cause}: {failed.detail}",
            )
    raise AssertionError(recorded.name)


def in_step(job: Job) -> bool:
    """Some boot may be changing its incumbent for the job just now: what it would leave behind, nobody knows."""
    return job.in_place and not job.ambiguous and not job.candidate


def links(training: Training, candidate: str, ancestor: str, limit: int) -> int | None:
    """Links in the base chain from `candidate` back to `ancestor`: 0 for itself, None if not within `limit`."""
    for count in range(limit + 1):
        if candidate == ancestor:
            return count
        found = training.candidates.get(candidate)
        if found is None or not found.base:
            return None
        candidate = found.base
    return None
