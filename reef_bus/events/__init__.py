"""The vocabulary: one frozen struct per event, a module per family, and the catalogue of all of them.

Knows: names and fields. Must not know: who reacts to what, how it travels (`envelope.py`), or any broker client.
The meaning of a name never changes; a changed shape is a new version with an upcaster (`upcast.py`).
"""

from __future__ import annotations

from collections.abc import Mapping

from reef_bus.events.deployment import (
    CleanupUnconfirmed,
    ComponentEvent,
    ComponentLost,
    ComponentStarted,
    LogOpened,
    ReadinessPublished,
    ReadinessWithdrawn,
    RecoveryHalted,
    RecoveryResumed,
    RestartScheduled,
)
from reef_bus.events.engine import (
    AdapterLeaked,
    AdapterUnloaded,
    EngineEvent,
    EngineFenced,
    EngineJoined,
    EngineLeft,
    EngineMemoryReleased,
    EngineMemoryRestored,
    EngineStaged,
    ReceiverFailed,
    ReceiverVerified,
)
from reef_bus.events.operator import (
    EngineRetireRequested,
    JobDiscardRequested,
    JobRestoreRequested,
    OperatorEvent,
    PromotionRequested,
    PublicationHaltRequested,
    RecoveryResumeRequested,
    RollbackRequested,
)
from reef_bus.events.record import InferenceRecorded, RecordEvent, ReportReceived
from reef_bus.events.release import (
    EngineExcluded,
    PublicationHalted,
    PublicationRefused,
    ReleaseCommitted,
    ReleaseEvent,
    RequestRefused,
    TargetPersisted,
    TransferAborted,
)
from reef_bus.events.shapes import WHOLE, Blob, Draft, Event, Evidence, Lora, Member, Recorded, Span
from reef_bus.events.train import (
    AdapterRegistered,
    CandidateEvaluated,
    CandidateReady,
    CandidateRejected,
    CandidateSelected,
    JobAmbiguous,
    JobDiscarded,
    JobDispatched,
    JobDropped,
    JobStarted,
    ScenarioRegistered,
    SenderFailed,
    SenderReady,
    TrainerJoined,
    TrainerRestored,
    TrainEvent,
)

CATALOGUE: Mapping[str, type[Event]] = {
    cls.__name__: cls
    for cls in (
        *(LogOpened, ComponentStarted, ComponentLost, RestartScheduled, CleanupUnconfirmed),
        *(ReadinessPublished, ReadinessWithdrawn, RecoveryHalted, RecoveryResumed),
        *(TrainerJoined, ScenarioRegistered, AdapterRegistered),
        *(JobDispatched, JobDropped, JobStarted, JobAmbiguous, JobDiscarded),
        *(CandidateReady, CandidateEvaluated, CandidateSelected, CandidateRejected),
        *(SenderReady, SenderFailed, TrainerRestored),
        *(TargetPersisted, PublicationRefused, TransferAborted, EngineExcluded, ReleaseCommitted, PublicationHalted),
        *(RequestRefused,),
        *(EngineJoined, EngineFenced, EngineStaged, ReceiverVerified, ReceiverFailed, EngineLeft),
        *(AdapterUnloaded, AdapterLeaked),
        *(EngineMemoryReleased, EngineMemoryRestored),
        *(RollbackRequested, PromotionRequested, JobDiscardRequested, JobRestoreRequested),
        *(EngineRetireRequested, PublicationHaltRequested, RecoveryResumeRequested),
        *(InferenceRecorded, ReportReceived),
    )
}
