"""The vocabulary: one frozen struct per event, what surrounds it, and the catalogue of all of them.

Knows: names and fields. Must not know: who reacts to what, how it travels (`envelope.py`), or any broker client.
The meaning of a name never changes; a changed shape is a new version with an upcaster (`upcast.py`).

No `gc`: what is frozen and came from JSON is part of no cycle, and whoever reads a log holds a great many of these.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

WHOLE = "_"
"""The subject id of an event that concerns the whole deployment."""


class Blob(msgspec.Struct, frozen=True, gc=False):
    """A content-addressed file beside the log: sha256 (hex) and size in bytes."""

    digest: str
    size: int


class Member(msgspec.Struct, frozen=True, gc=False):
    """One boot of one engine. An address may come back; a boot never does."""

    engine: str
    boot: str


class Evidence(msgspec.Struct, frozen=True, gc=False):
    """What one member had reported when its release was committed: the sequence of the report and its digest."""

    engine: str
    boot: str
    seq: int
    manifest: str


class Event(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A fact. `family` is the subject family that holds it, `id_field` the field that is the subject's id, and
    `own_chain` says whether each id is chained by itself."""

    family: ClassVar[str] = ""
    id_field: ClassVar[str] = ""
    own_chain: ClassVar[bool] = False
    version: ClassVar[int] = 1

    @property
    def key(self) -> str:
        """The id part of the subject, before encoding."""
        found: str = getattr(self, self.id_field) if self.id_field else WHOLE
        return found

    @property
    def chain(self) -> str:
        """What `prev` chains: the family, or this id of it."""
        return f"{self.family}.{getattr(self, self.id_field)}" if self.own_chain else self.family


class LogOpened(Event, frozen=True, kw_only=True):
    """The first event of a log: mints the incarnation and fixes the rules by which the log is folded."""

    family = "deployment"
    incarnation: str
    rules: int
    start: Blob | None = None
    predecessor: str = ""
    predecessor_seq: int = 0
    predecessor_id: str = ""


class ComponentEvent(Event, frozen=True, kw_only=True):
    """Written by the supervisor, about one component."""

    family = "deployment"
    id_field = "component"
    component: str


class ComponentStarted(ComponentEvent, frozen=True, kw_only=True):
    """The supervisor started an operating-system process for a component."""

    pid: int
    starts: int


class ComponentLost(ComponentEvent, frozen=True, kw_only=True):
    """A component's process ended without having been asked to. `exit` is its status, negative for a signal."""

    exit: int
    detail: str = ""


class RecoveryHalted(ComponentEvent, frozen=True, kw_only=True):
    """A component ended too often within the window; it stays down until a supervisor is started again."""

    restarts: int
    window_s: float
    detail: str = ""


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


class JobDispatched(TrainEvent, frozen=True, kw_only=True):
    """One optimizer job over a durable batch. It consumes the records that the batch names, for good."""

    job: str
    step: int
    base: str
    batch: Blob
    records: int


class JobDropped(TrainEvent, frozen=True, kw_only=True):
    """The job ended without a candidate; its records stay consumed."""

    job: str
    reason: str
    detail: str = ""


class JobStarted(TrainEvent, frozen=True, kw_only=True):
    """This boot is about to take the job's first optimizer step, as the given attempt (1, 2, …)."""

    job: str
    attempt: int


class CandidateReady(TrainEvent, frozen=True, kw_only=True):
    """A candidate's weights, optimizer state and manifest are durable, and the manifest digest was re-read."""

    job: str
    attempt: int
    candidate: str
    base: str
    weights: Blob
    optimizer: Blob | None
    manifest: str
    tensor_bytes: int
    metrics: dict[str, float]


class CandidateEvaluated(TrainEvent, frozen=True, kw_only=True):
    """What an evaluator measured on the candidate, before anyone decides on it."""

    candidate: str
    evaluator: str
    metrics: dict[str, float]


class CandidateSelected(TrainEvent, frozen=True, kw_only=True):
    """The candidate shall be published. Closes the job."""

    candidate: str
    selector: str
    why: str = ""


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


class ReleaseEvent(Event, frozen=True, kw_only=True):
    """Written by publishers, which decide alike."""

    family = "release"
    id_field = "scenario"
    scenario: str


class TargetPersisted(ReleaseEvent, frozen=True, kw_only=True):
    """Fixes a publication before a byte moves: load id, digest, attempt 1, members. In fenced mode it is the fence."""

    publication: str
    candidate: str
    load_id: str
    parent: str
    manifest: str
    weights: Blob
    tensor_bytes: int
    attempt: int
    members: tuple[Member, ...]
    sender: str
    transport: str
    mode: str
    pause: str


class PublicationRefused(ReleaseEvent, frozen=True, kw_only=True):
    """The candidate will not be published, and traffic never noticed."""

    candidate: str
    reason: str
    detail: str = ""


class TransferAborted(ReleaseEvent, frozen=True, kw_only=True):
    """Ends an attempt, excludes the guilty boots, and fixes the next attempt under the same load id."""

    publication: str
    attempt: int
    reason: str
    excluded: tuple[Member, ...]
    next_attempt: int
    members: tuple[Member, ...]
    detail: str = ""


class EngineExcluded(ReleaseEvent, frozen=True, kw_only=True):
    """A boot is out: it must not generate, and it must not join again."""

    engine: str
    boot: str
    reason: str


class ReleaseCommitted(ReleaseEvent, frozen=True, kw_only=True):
    """The commit point: every member of the attempt proved the target in its own memory. It may serve from here on."""

    publication: str
    attempt: int
    candidate: str
    load_id: str
    parent: str
    manifest: str
    evidence: tuple[Evidence, ...]


class PublicationHalted(ReleaseEvent, frozen=True, kw_only=True):
    """The publication is given up; its load id is never used again, and the incumbent returns by itself."""

    publication: str
    attempt: int
    reason: str
    excluded: tuple[Member, ...]
    detail: str = ""


class EngineEvent(Event, frozen=True, kw_only=True):
    """Written by that engine's agent alone."""

    family = "engine"
    id_field = "engine"
    own_chain = True
    engine: str


class EngineJoined(EngineEvent, frozen=True, kw_only=True):
    """A boot of the engine is up, holds nothing that may serve yet, and replaces every older boot of it."""

    url: str
    backend: str
    accepts: tuple[str, ...]


class EngineFenced(EngineEvent, frozen=True, kw_only=True):
    """Generation has really stopped and every older ingress is destroyed, for this attempt.

    `previous` is the load id that served until now, since `resumed_at` (ns since the epoch, 0: it never served), with
    `served` requests; `stopped_ms` is the time from seeing the fence to having stopped.
    """

    publication: str
    attempt: int
    previous: str
    resumed_at: int
    served: int
    stopped_ms: float


class ReceiverVerified(EngineEvent, frozen=True, kw_only=True):
    """What the engine's own memory hashes to. `publication` is empty and `attempt` 0 for a catch-up to the head.

    `method` is `received`, `memory` or `artifact`; `bytes` moved for it.
    """

    publication: str
    attempt: int
    load_id: str
    manifest: str
    method: str
    tensors: int
    bytes: int
    ms: float


class ReceiverFailed(EngineEvent, frozen=True, kw_only=True):
    """The engine could not receive or prove the target; `detail` names the tensor where one is to blame."""

    publication: str
    attempt: int
    load_id: str
    cause: str
    detail: str
    observed: str = ""


class EngineLeft(EngineEvent, frozen=True, kw_only=True):
    """The boot ends: asked to, or unable to go on."""

    reason: str


class RecordEvent(Event, frozen=True, kw_only=True):
    """Written by gateways and harnesses; told apart by its id, never compared."""

    family = "record"
    id_field = "scenario"
    own_chain = True
    scenario: str


class InferenceRecorded(RecordEvent, frozen=True, kw_only=True):
    """One served answer. Token ids and logprobs are row `row` of `blob`.

    `load_id` produced every token. `as_of` and `done_as_of` are the LOG sequences that the engine had folded when it
    began and ended the generation, so that anyone can evaluate the serving rule again at that very point.
    """

    record: str
    engine: str
    boot: str
    load_id: str
    as_of: int
    done_as_of: int
    prompt: str
    answer: str
    prompt_tokens: int
    answer_tokens: int
    temperature: float
    blob: Blob
    row: int
    tags: dict[str, str]


class ReportReceived(RecordEvent, frozen=True, kw_only=True):
    """Feedback on one or more records. The report's id repeats with the same content only."""

    report: str
    references: tuple[str, ...]
    score: float
    feedback: str
    metadata: dict[str, Any]


CATALOGUE: Mapping[str, type[Event]] = {
    cls.__name__: cls
    for cls in (
        *(LogOpened, ComponentStarted, ComponentLost, RecoveryHalted),
        *(TrainerJoined, ScenarioRegistered, JobDispatched, JobDropped, JobStarted, CandidateReady),
        *(CandidateEvaluated, CandidateSelected, CandidateRejected, SenderReady, SenderFailed, TrainerRestored),
        *(TargetPersisted, PublicationRefused, TransferAborted, EngineExcluded, ReleaseCommitted, PublicationHalted),
        *(EngineJoined, EngineFenced, ReceiverVerified, ReceiverFailed, EngineLeft),
        *(InferenceRecorded, ReportReceived),
    )
}


class Draft(msgspec.Struct, frozen=True, kw_only=True):
    """A fact on its way. `cause` is the sequence it reacts to; `correlation` a publication, job or record."""

    event: Event
    writer: str
    boot: str
    cause: int = 0
    correlation: str = ""


class Recorded(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A fact as the log holds it. `time` is the broker's timestamp in ns since the epoch; `prev` the sequence that was
    its family's last stored event when it was written (0 for records, which have no such expectation)."""

    seq: int
    time: int
    subject: str
    id: str
    prev: int
    cause: int
    correlation: str
    writer: str
    boot: str
    event: Event

    @property
    def name(self) -> str:
        return type(self.event).__name__
