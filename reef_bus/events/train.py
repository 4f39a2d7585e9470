"""The `train` family: scenario, jobs, candidates, the sender.

Knows: what the trainer alone may say. Must not know: who reacts to it.
"""

from __future__ import annotations

from reef_bus.events.shapes import Blob, Event, Lora


class TrainEvent(Event, frozen=True, kw_only=True):
    """Written by the trainer alone."""

    family = "train"
    id_field = "scenario"
    scenario: str


class TrainerJoined(TrainEvent, frozen=True, kw_only=True):
    """A trainer boot became the scenario's authority; every older trainer boot is over."""

    backend: str
    offers: tuple[str, ...]
    mutates_in_place: bool


class ScenarioRegistered(TrainEvent, frozen=True, kw_only=True):
    """The base model is release 0 of the scenario; its artifact is durable and its manifest digest was re-read."""

    model: str
    recipe: str
    weights: Blob
    optimizer: Blob | None
    manifest: str
    tensor_bytes: int


class AdapterRegistered(TrainEvent, frozen=True, kw_only=True):
    """Beside the base model, which is frozen from here on, the scenario trains a LoRA adapter of its own. Its release 0
    is the base model; `weights` hold the adapter that changes nothing, from which it is trained. They are durable, and
    the manifest digest was re-read. `base_manifest` is the base model's."""

    base_manifest: str
    lora: Lora
    weights: Blob
    optimizer: Blob | None
    manifest: str
    tensor_bytes: int


class JobDispatched(TrainEvent, frozen=True, kw_only=True):
    """One optimizer job over a durable batch. It consumes the records that the batch names, for good.

    `colocated`: it needs the memory of the engines, and is a fence over all of them, whenever they joined, until its
    candidate was published, halted, refused or rejected, or the job ended without one. `CandidateReady` and
    `JobDropped` then also say that the trainer has given back the memory that its step took.
    """

    job: str
    step: int
    base: str
    batch: Blob
    records: int
    colocated: bool = False


class JobDropped(TrainEvent, frozen=True, kw_only=True):
    """The job ended without a candidate; its records stay consumed."""

    job: str
    reason: str
    detail: str = ""


class JobStarted(TrainEvent, frozen=True, kw_only=True):
    """This boot is about to take the job's first optimizer step, as the given attempt (1, 2, …). `request` is the
    sequence of the request by which a person had an ambiguous job restored."""

    job: str
    attempt: int
    request: int = 0


class JobAmbiguous(TrainEvent, frozen=True, kw_only=True):
    """Boot `started_by` died inside the job's step, and its backend mutates in place: nobody knows what the optimizer
    did. Training stops, serving goes on; a person discards the job, or has it restored from the stored base."""

    job: str
    attempt: int
    started_by: str


class JobDiscarded(TrainEvent, frozen=True, kw_only=True):
    """A person gave the job up; its records stay consumed."""

    job: str
    request: int


class CandidateReady(TrainEvent, frozen=True, kw_only=True):
    """A candidate's weights, optimizer state and manifest are durable, and the manifest digest was re-read.

    `weights` holds them in full (safetensors), or names an anchor and the deltas that lead from it to them (a chain);
    `delta` tells them from the weights of `base`. Either was read back, and the result hashed."""

    job: str
    attempt: int
    candidate: str
    base: str
    weights: Blob
    optimizer: Blob | None
    manifest: str
    tensor_bytes: int
    metrics: dict[str, float]
    delta: Blob | None = None


class CandidateEvaluated(TrainEvent, frozen=True, kw_only=True):
    """What an evaluator measured on the candidate, before anyone decides on it."""

    candidate: str
    evaluator: str
    metrics: dict[str, float]


class CandidateSelected(TrainEvent, frozen=True, kw_only=True):
    """The candidate shall be published. Closes the job. `request` is the promotion that decided, if a person did."""

    candidate: str
    selector: str
    why: str = ""
    request: int = 0


class CandidateRejected(TrainEvent, frozen=True, kw_only=True):
    """The candidate shall never serve. Closes the job; nothing was ever paused for it."""

    candidate: str
    selector: str
    why: str


class SenderReady(TrainEvent, frozen=True, kw_only=True):
    """The living trainer boot offers the target's bytes for one attempt; `address` and `token` are the ticket."""

    publication: str
    attempt: int
    load_id: str
    manifest: str
    transport: str
    address: str
    token: str


class SenderFailed(TrainEvent, frozen=True, kw_only=True):
    """The trainer could not offer the target's bytes for this attempt."""

    publication: str
    attempt: int
    cause: str
    detail: str = ""


class TrainerRestored(TrainEvent, frozen=True, kw_only=True):
    """The trainer's next base is the release named here, because its former base can no longer reach the head."""

    load_id: str
    candidate: str
