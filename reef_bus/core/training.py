"""The trainer's side of the state: scenarios, jobs, candidates, the base chains, the sender.

Knows: the `train` family. Must not know: engines, deadlines, or how anything is trained.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from reef_bus.core.ids import BASE, adapter_base
from reef_bus.events import (
    AdapterRegistered,
    Blob,
    CandidateEvaluated,
    CandidateReady,
    CandidateRejected,
    CandidateSelected,
    Event,
    JobAmbiguous,
    JobDiscarded,
    JobDispatched,
    JobDropped,
    JobStarted,
    Lora,
    Recorded,
    ScenarioRegistered,
    SenderFailed,
    SenderReady,
    TrainerJoined,
    TrainerRestored,
)


class Candidate(msgspec.Struct, kw_only=True):
    """One checkpointed update. `base` is the candidate that it was trained from, `delta` tells its weights from that
    one's, if there is one; `selected` and `seq` are sequences. `scenario` is that whose adapter it is; empty: it is the
    whole model."""

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
    delta: Blob | None = None
    scenario: str = ""


class Adapter(msgspec.Struct, kw_only=True):
    """A scenario that trains an adapter over the frozen base model. `base` is what its next job is trained from, if
    that can still be published; `dispatched` the sequence of its latest job."""

    scenario: str
    lora: Lora
    registered: int
    base: str
    dispatched: int = 0


class Job(msgspec.Struct, kw_only=True):
    """The open job. `attempt` 0: not started; `boot` started the current attempt, `in_place` if its backend changes its
    incumbent; `ambiguous` is the sequence since which nobody knows what that did."""

    id: str
    step: int
    base: str
    batch: Blob
    seq: int
    scenario: str = ""
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
    """Everything that the `train` family says. `scenario` and `base` are the whole model's; with `adapters` that is
    trained no more. `batches` are those of the latest jobs, by the scenario whose adapter they train; empty: the whole
    model."""

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
    batches: dict[str, Blob] = {}
    base: str = BASE
    adapters: dict[str, Adapter] = {}
    candidates: dict[str, Candidate] = {}
    selected: list[str] = []
    sender: Sender | None = None

    def scenario_of(self, candidate: str) -> str:
        """That whose adapter the candidate is; empty for the whole model, and for one that is not known yet."""
        found = self.candidates.get(candidate)
        return found.scenario if found else ""

    def based(self, scenario: str) -> str:
        """What the scenario's next job is trained from, if that can still be published."""
        return self.adapters[scenario].base if scenario else self.base


def evolve(training: Training, recorded: Recorded) -> None:
    """Apply one event of the `train` family that is not void."""
    change = CHANGES.get(type(recorded.event))
    if change:
        change(training, recorded, recorded.event)


def _join(training: Training, recorded: Recorded, event: TrainerJoined) -> None:
    training.boot, training.joined = recorded.boot, recorded.seq
    training.backend, training.offers = event.backend, event.offers
    training.mutates_in_place = event.mutates_in_place


def _register(training: Training, recorded: Recorded, event: ScenarioRegistered) -> None:
    training.scenario, training.model, training.registered = event.scenario, event.model, recorded.seq
    training.candidates[BASE] = _origin(BASE, recorded, event, "")


def _register_adapter(training: Training, recorded: Recorded, event: AdapterRegistered) -> None:
    origin = adapter_base(event.scenario)
    training.adapters[event.scenario] = Adapter(
        scenario=event.scenario, lora=event.lora, registered=recorded.seq, base=origin
    )
    training.candidates[origin] = _origin(origin, recorded, event, event.scenario)


def _origin(id_: str, recorded: Recorded, event: ScenarioRegistered | AdapterRegistered, scenario: str) -> Candidate:
    """What a chain begins with: it was trained from nothing, and nobody has to select it."""
    return Candidate(
        id=id_,
        base="",
        step=0,
        weights=event.weights,
        optimizer=event.optimizer,
        manifest=event.manifest,
        tensor_bytes=event.tensor_bytes,
        seq=recorded.seq,
        selected=recorded.seq,
        scenario=scenario,
    )


def _dispatch(training: Training, recorded: Recorded, event: JobDispatched) -> None:
    training.job = Job(
        id=event.job,
        scenario=event.scenario,
        step=event.step,
        base=event.base,
        batch=event.batch,
        seq=recorded.seq,
    )
    training.batches[event.scenario if event.scenario in training.adapters else ""] = event.batch
    training.dispatched += 1
    if adapter := training.adapters.get(event.scenario):
        adapter.dispatched = recorded.seq


def _start(training: Training, recorded: Recorded, event: JobStarted) -> None:
    if job := training.job:
        job.attempt, job.boot, job.started = event.attempt, recorded.boot, recorded.seq
        job.in_place, job.ambiguous = training.mutates_in_place, 0


def _doubt(training: Training, recorded: Recorded, event: JobAmbiguous) -> None:
    if job := training.job:
        job.ambiguous = recorded.seq


def _ready(training: Training, recorded: Recorded, event: CandidateReady) -> None:
    if not (job := training.job):
        return
    job.candidate, job.ready, job.metrics = event.candidate, recorded.seq, event.metrics
    training.candidates[event.candidate] = Candidate(
        id=event.candidate,
        base=event.base,
        step=job.step,
        weights=event.weights,
        optimizer=event.optimizer,
        manifest=event.manifest,
        tensor_bytes=event.tensor_bytes,
        seq=recorded.seq,
        delta=event.delta,
        scenario=job.scenario if job.scenario in training.adapters else "",
    )


def _evaluate(training: Training, recorded: Recorded, event: CandidateEvaluated) -> None:
    if job := training.job:
        job.evaluated, job.metrics = recorded.seq, event.metrics


def _select(training: Training, recorded: Recorded, event: CandidateSelected) -> None:
    training.candidates[event.candidate].selected = recorded.seq
    training.selected.append(event.candidate)
    _move(training, event.candidate)
    training.job, training.closed = None, recorded.seq


def _reject(training: Training, recorded: Recorded, event: CandidateRejected) -> None:
    training.candidates[event.candidate].rejected = True
    training.job, training.closed = None, recorded.seq


def _drop(training: Training, recorded: Recorded, event: JobDropped | JobDiscarded) -> None:
    training.job, training.closed = None, recorded.seq


def _restore(training: Training, recorded: Recorded, event: TrainerRestored) -> None:
    _move(training, event.candidate)


def _move(training: Training, candidate: str) -> None:
    """The next job of its scenario is trained from it."""
    if scenario := training.candidates[candidate].scenario:
        training.adapters[scenario].base = candidate
    else:
        training.base = candidate


def _offer(training: Training, recorded: Recorded, event: SenderReady) -> None:
    training.sender = Sender(
        boot=recorded.boot,
        publication=event.publication,
        attempt=event.attempt,
        seq=recorded.seq,
        time=recorded.time,
        load_id=event.load_id,
        manifest=event.manifest,
        transport=event.transport,
        address=event.address,
        token=event.token,
    )


def _fail(training: Training, recorded: Recorded, event: SenderFailed) -> None:
    training.sender = Sender(
        boot=recorded.boot,
        publication=event.publication,
        attempt=event.attempt,
        seq=recorded.seq,
        time=recorded.time,
        failure=f"{event.cause}: {event.detail}",
    )


CHANGES: Mapping[type[Event], Callable[[Training, Recorded, Any], None]] = {
    TrainerJoined: _join,
    ScenarioRegistered: _register,
    AdapterRegistered: _register_adapter,
    JobDispatched: _dispatch,
    JobStarted: _start,
    JobAmbiguous: _doubt,
    CandidateReady: _ready,
    CandidateEvaluated: _evaluate,
    CandidateSelected: _select,
    CandidateRejected: _reject,
    JobDropped: _drop,
    JobDiscarded: _drop,
    TrainerRestored: _restore,
    SenderReady: _offer,
    SenderFailed: _fail,
}


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
