"""Builders of events, one per name, with every value that no test cares about; and histories that tests begin with.

Knows: names and fields. Must not know: what any of it does to a world.
"""

from __future__ import annotations

from msgspec.structs import replace

from reef_bus.core.ids import adapter_base, adapter_name
from reef_bus.events import (
    AdapterLeaked,
    AdapterRegistered,
    AdapterUnloaded,
    Blob,
    CandidateEvaluated,
    CandidateReady,
    CandidateRejected,
    CandidateSelected,
    EngineExcluded,
    EngineFenced,
    EngineJoined,
    EngineLeft,
    EngineMemoryReleased,
    EngineMemoryRestored,
    EngineRetireRequested,
    EngineStaged,
    Evidence,
    JobAmbiguous,
    JobDiscarded,
    JobDiscardRequested,
    JobDispatched,
    JobDropped,
    JobRestoreRequested,
    JobStarted,
    LogOpened,
    Lora,
    Member,
    PromotionRequested,
    PublicationHalted,
    PublicationHaltRequested,
    PublicationRefused,
    ReceiverFailed,
    ReceiverVerified,
    RecoveryResumeRequested,
    ReleaseCommitted,
    RequestRefused,
    RollbackRequested,
    ScenarioRegistered,
    SenderFailed,
    SenderReady,
    TargetPersisted,
    TrainerJoined,
    TrainerRestored,
    TransferAborted,
)
from tests.spec import T0, Step

S = "digit"


def L(sequence: int) -> str:
    return f"inc:{sequence}"


def digest(candidate: str) -> str:
    return f"digest-of-{candidate}"


def blob(name: str) -> Blob:
    return Blob(f"sha-of-{name}", 10)


def m(engine: str, start: int = 1) -> Member:
    return Member(engine, f"{engine}.{start}")


def opened(rules: int = 1) -> LogOpened:
    return LogOpened(incarnation="inc", rules=rules)


def trainer_joined(offers: tuple[str, ...] = ("tcp", "files"), in_place: bool = False) -> TrainerJoined:
    return TrainerJoined(scenario=S, backend="torch", offers=offers, mutates_in_place=in_place)


def registered() -> ScenarioRegistered:
    return ScenarioRegistered(
        scenario=S,
        model="tiny",
        recipe="r",
        weights=blob("base"),
        optimizer=None,
        manifest=digest("base"),
        tensor_bytes=8,
    )


def joined(
    engine: str, accepts: tuple[str, ...] = ("tcp", "files"), modes: tuple[str, ...] = ("fenced", "staged")
) -> EngineJoined:
    return EngineJoined(engine=engine, url=f"http://{engine}", backend="torch", accepts=accepts, modes=modes)


def dispatched(job: str, base: str = "base", step: int = 1) -> JobDispatched:
    return JobDispatched(scenario=S, job=job, step=step, base=base, batch=blob(f"batch-{job}"), records=8)


def colocated(job: str, base: str = "base", step: int = 1) -> JobDispatched:
    """A job that needs the memory of the engines."""
    return replace(dispatched(job, base, step), colocated=True)


def started(job: str, attempt: int = 1, request: int = 0) -> JobStarted:
    return JobStarted(scenario=S, job=job, attempt=attempt, request=request)


def ambiguous(job: str, attempt: int = 1, by: str = "t1") -> JobAmbiguous:
    return JobAmbiguous(scenario=S, job=job, attempt=attempt, started_by=by)


def discarded(job: str, request: int) -> JobDiscarded:
    return JobDiscarded(scenario=S, job=job, request=request)


def ready(job: str, candidate: str, base: str = "base", attempt: int = 1) -> CandidateReady:
    return CandidateReady(
        scenario=S,
        job=job,
        attempt=attempt,
        candidate=candidate,
        base=base,
        weights=blob(candidate),
        optimizer=blob(f"optimizer-{candidate}"),
        manifest=digest(candidate),
        tensor_bytes=8,
        metrics={"loss": 0.5},
    )


def dropped(job: str) -> JobDropped:
    return JobDropped(scenario=S, job=job, reason="not_finite")


def evaluated(candidate: str) -> CandidateEvaluated:
    return CandidateEvaluated(scenario=S, candidate=candidate, evaluator="none", metrics={"reward": 1.0})


def selected(candidate: str, request: int = 0) -> CandidateSelected:
    return CandidateSelected(scenario=S, candidate=candidate, selector="all", request=request)


def rejected(candidate: str) -> CandidateRejected:
    return CandidateRejected(scenario=S, candidate=candidate, selector="all", why="worse")


def restored(candidate: str, sequence: int) -> TrainerRestored:
    return TrainerRestored(scenario=S, load_id=L(sequence), candidate=candidate)


def offered(n: int, candidate: str, attempt: int = 1) -> SenderReady:
    return SenderReady(
        scenario=S,
        publication=f"pub{n}",
        attempt=attempt,
        load_id=L(n),
        manifest=digest(candidate),
        transport="tcp",
        address="127.0.0.1:1",
        token="secret",
    )


def offer_failed(n: int, attempt: int = 1) -> SenderFailed:
    return SenderFailed(scenario=S, publication=f"pub{n}", attempt=attempt, cause="memory", detail="no room")


def target(n: int, candidate: str, *members: Member, parent: int | None = None, manifest: str = "") -> TargetPersisted:
    return TargetPersisted(
        scenario=S,
        publication=f"pub{n}",
        candidate=candidate,
        load_id=L(n),
        parent=L(n - 1 if parent is None else parent),
        manifest=manifest or digest(candidate),
        weights=blob(candidate),
        tensor_bytes=8,
        attempt=1,
        members=members,
        sender="trainer",
        transport="tcp",
        mode="fenced",
        pause="drain",
    )


def rollback_target(
    n: int, candidate: str, request: int, *members: Member, parent: int | None = None
) -> TargetPersisted:
    """Old content under the next load id, as the rollback that was asked for at sequence `request`."""
    return replace(target(n, candidate, *members, parent=parent), sender="artifact", transport="files", request=request)


def refused(candidate: str, reason: str = "transport", request: int = 0) -> PublicationRefused:
    return PublicationRefused(scenario=S, candidate=candidate, reason=reason, request=request)


def request_refused(request: int, reason: str = "not_open") -> RequestRefused:
    return RequestRefused(scenario=S, request=request, reason=reason)


def aborted(n: int, attempt: int, *members: Member, excluded: tuple[Member, ...] = ()) -> TransferAborted:
    return TransferAborted(
        scenario=S,
        publication=f"pub{n}",
        attempt=attempt,
        reason="fence_deadline",
        excluded=excluded,
        next_attempt=attempt + 1,
        members=members,
    )


def halted(
    n: int, attempt: int = 1, excluded: tuple[Member, ...] = (), reason: str = "sender_deadline", request: int = 0
) -> PublicationHalted:
    return PublicationHalted(
        scenario=S, publication=f"pub{n}", attempt=attempt, reason=reason, excluded=excluded, request=request
    )


def excluded(engine: str, start: int = 1, request: int = 0) -> EngineExcluded:
    boot = f"{engine}.{start}"
    return EngineExcluded(scenario=S, engine=engine, boot=boot, reason="its heartbeats stopped", request=request)


def committed(
    n: int, candidate: str, *members: Member, attempt: int = 1, parent: int | None = None, manifest: str = ""
) -> ReleaseCommitted:
    return ReleaseCommitted(
        scenario=S,
        publication=f"pub{n}",
        attempt=attempt,
        candidate=candidate,
        load_id=L(n),
        parent=L(n - 1 if parent is None else parent),
        manifest=manifest or digest(candidate),
        evidence=tuple(Evidence(each.engine, each.boot, 1, digest(candidate)) for each in members),
    )


def fenced(engine: str, n: int, attempt: int = 1) -> EngineFenced:
    return EngineFenced(
        engine=engine,
        publication=f"pub{n}",
        attempt=attempt,
        previous=L(n - 1),
        resumed_at=T0,
        served=3,
        stopped_ms=1.5,
    )


def verified(engine: str, n: int, candidate: str, attempt: int = 1, manifest: str = "") -> ReceiverVerified:
    """A member's word on an attempt: what its memory hashes to."""
    return ReceiverVerified(
        engine=engine,
        publication=f"pub{n}",
        attempt=attempt,
        load_id=L(n),
        manifest=manifest or digest(candidate),
        method="received",
        tensors=2,
        bytes=8,
        ms=1.0,
    )


def holds(engine: str, n: int, candidate: str, manifest: str = "") -> ReceiverVerified:
    """A catch-up's word: the engine proved the head outside of any publication."""
    return ReceiverVerified(
        engine=engine,
        publication="",
        attempt=0,
        load_id=L(n),
        manifest=manifest or digest(candidate),
        method="artifact",
        tensors=2,
        bytes=8,
        ms=1.0,
    )


def staged(engine: str, n: int, candidate: str, attempt: int = 1, manifest: str = "") -> EngineStaged:
    """A member's word on an attempt: what the copy beside the served one hashes to."""
    return EngineStaged(
        engine=engine,
        publication=f"pub{n}",
        attempt=attempt,
        load_id=L(n),
        manifest=manifest or digest(candidate),
        tensors=2,
        bytes=8,
        ms=1.0,
    )


def swapped(engine: str, n: int, candidate: str) -> ReceiverVerified:
    """After the commit: what was staged is what is served."""
    return ReceiverVerified(
        engine=engine,
        publication="",
        attempt=0,
        load_id=L(n),
        manifest=digest(candidate),
        method="swapped",
        tensors=2,
        bytes=0,
        ms=1.0,
    )


def failed(engine: str, n: int, attempt: int = 1, observed: str = "") -> ReceiverFailed:
    return ReceiverFailed(
        engine=engine,
        publication=f"pub{n}",
        attempt=attempt,
        load_id=L(n),
        cause="mismatch",
        detail="tensor head.weight",
        observed=observed,
    )


def lent(engine: str, job: str, fence: int, *regions: str) -> EngineMemoryReleased:
    return EngineMemoryReleased(
        engine=engine,
        job=job,
        fence=fence,
        regions=regions or ("weights", "kv_cache", "cuda_graph"),
        previous=L(0),
        resumed_at=T0,
        served=3,
        stopped_ms=1.5,
        ms=2.5,
    )


def back(engine: str, job: str, *regions: str) -> EngineMemoryRestored:
    return EngineMemoryRestored(
        engine=engine, job=job, regions=regions or ("weights", "kv_cache", "cuda_graph"), ms=1.0
    )


def left(engine: str) -> EngineLeft:
    return EngineLeft(engine=engine, reason="asked to")


# -- what people ask for: each about one thing, decided on the head `on`


def rollback_asked(to: int, on: int, actor: str = "ann") -> RollbackRequested:
    return RollbackRequested(actor=actor, why="it babbles", head=L(on), scenario=S, release=L(to))


def promotion_asked(candidate: str, on: int = 0, actor: str = "ann") -> PromotionRequested:
    return PromotionRequested(actor=actor, why="reads well", head=L(on), scenario=S, candidate=candidate)


def discard_asked(job: str, on: int = 0, actor: str = "ann") -> JobDiscardRequested:
    return JobDiscardRequested(actor=actor, why="reads badly", head=L(on), scenario=S, job=job)


def restore_asked(job: str, on: int = 0, actor: str = "ann") -> JobRestoreRequested:
    return JobRestoreRequested(actor=actor, why="try again", head=L(on), scenario=S, job=job)


def retire_asked(engine: str, start: int = 1, on: int = 0, actor: str = "ann") -> EngineRetireRequested:
    boot = f"{engine}.{start}"
    return EngineRetireRequested(actor=actor, why="hot", head=L(on), scenario=S, engine=engine, boot=boot)


def halt_asked(n: int, on: int | None = None, actor: str = "ann") -> PublicationHaltRequested:
    decided_on = L(n - 1 if on is None else on)
    return PublicationHaltRequested(actor=actor, why="too slow", head=decided_on, scenario=S, publication=f"pub{n}")


def resume_asked(component: str, on: int = 0, actor: str = "ann") -> RecoveryResumeRequested:
    return RecoveryResumeRequested(actor=actor, why="new disk", head=L(on), component=component)


# -- histories that many tests begin with

E0, E1 = m("e0"), m("e1")

REGISTERED: tuple[Step, ...] = (opened(), trainer_joined(), registered())
"""Sequences 1 to 3."""

SERVING: tuple[Step, ...] = (*REGISTERED, joined("e0"), joined("e1"), holds("e0", 0, "base"), holds("e1", 0, "base"))
"""Sequences 1 to 7: both engines serve release 0."""


def trained(candidate: str, base: str = "base", step: int = 1) -> tuple[Step, ...]:
    """Five events: one job from dispatch to selection."""
    job = f"job-{candidate}"
    return (
        dispatched(job, base, step),
        started(job),
        ready(job, candidate, base),
        evaluated(candidate),
        selected(candidate),
    )


def rolled_back(n: int, candidate: str, request: int, *members: Member, parent: int | None = None) -> tuple[Step, ...]:
    """A rollback that goes well, from its target to its commit; no sender."""
    return (
        rollback_target(n, candidate, request, *members, parent=parent),
        *(fenced(each.engine, n) for each in members),
        *(verified(each.engine, n, candidate) for each in members),
        committed(n, candidate, *members, parent=parent),
    )


def paused(pause: str, *history: Step) -> tuple[Step, ...]:
    """The same, with targets for which generation stops in this way."""
    return tuple(replace(step, pause=pause) if isinstance(step, TargetPersisted) else step for step in history)


def released(n: int, candidate: str, *members: Member) -> tuple[Step, ...]:
    """A publication that goes well, from its target to its commit."""
    return (
        target(n, candidate, *members),
        *(fenced(each.engine, n) for each in members),
        offered(n, candidate),
        *(verified(each.engine, n, candidate) for each in members),
        committed(n, candidate, *members),
    )


# -- adapters: two scenarios over one base model that is frozen; loads of both are numbered in one row

MATH, CODE = "math", "code"
LORA = Lora(8, 16, ("q_proj", "v_proj"))
NO_LORA: dict[str, str] = {MATH: adapter_base(MATH), CODE: adapter_base(CODE)}
"""By scenario: the candidate that changes nothing."""


def name(scenario: str, n: int) -> str:
    """What an engine calls this load."""
    return adapter_name(scenario, L(n))


def adapter_registered(scenario: str, base_manifest: str = digest("base")) -> AdapterRegistered:
    origin = NO_LORA.get(scenario, adapter_base(scenario))
    return AdapterRegistered(
        scenario=scenario,
        base_manifest=base_manifest,
        lora=LORA,
        weights=blob(origin),
        optimizer=None,
        manifest=digest(origin),
        tensor_bytes=4,
    )


def joined_with(engine: str, adapters: int | None = 3, resident: tuple[str, ...] = ()) -> EngineJoined:
    """An engine with room for so many adapters."""
    return replace(joined(engine), adapters=adapters, resident=resident)


def of(scenario: str, *steps: Step) -> tuple[Step, ...]:
    """The same, said of another scenario."""
    return tuple(replace(step, scenario=scenario) for step in steps)  # type: ignore[call-overload]


def adapter_trained(scenario: str, candidate: str, base: str = "", step: int = 1) -> tuple[Step, ...]:
    return of(scenario, *trained(candidate, base or NO_LORA[scenario], step))


def adapter_target(
    scenario: str, n: int, candidate: str, *members: Member, parent: int = 0, request: int = 0
) -> TargetPersisted:
    return replace(
        target(n, candidate, *members, parent=parent),
        scenario=scenario,
        sender="artifact",
        transport="files",
        mode="staged",
        request=request,
        lora=LORA,
    )


def adapter_staged(
    engine: str, scenario: str, n: int, candidate: str, attempt: int = 1, adapter: str = "", manifest: str = ""
) -> EngineStaged:
    """A member's word on an attempt: it holds the adapter, and under which name."""
    word = staged(engine, n, candidate, attempt, manifest)
    return replace(word, scenario=scenario, adapter=adapter or name(scenario, n))


def adapter_caught_up(engine: str, scenario: str, n: int, candidate: str, adapter: str = "") -> EngineStaged:
    """Outside of any publication: it holds what is committed."""
    word = adapter_staged(engine, scenario, n, candidate, adapter=adapter)
    return replace(word, publication="", attempt=0)


def adapter_failed(engine: str, scenario: str, n: int, attempt: int = 1, adapter: str = "") -> ReceiverFailed:
    word = failed(engine, n, attempt)
    return replace(word, staged=True, scenario=scenario, adapter=adapter or name(scenario, n))


def adapter_damaged(engine: str, scenario: str, n: int, why: str = "no blob at /store/aa") -> ReceiverFailed:
    """Outside of any publication: what is committed cannot be read."""
    return replace(adapter_failed(engine, scenario, n), publication="", attempt=0, cause="artifact", detail=why)


def unloaded(engine: str, adapter: str, detail: str = "") -> AdapterUnloaded:
    return AdapterUnloaded(engine=engine, adapter=adapter, detail=detail)


def leaked(engine: str, adapter: str) -> AdapterLeaked:
    return AdapterLeaked(engine=engine, adapter=adapter, detail="it is listed still")


def adapter_rollback_asked(scenario: str, to: int, on: int) -> RollbackRequested:
    return replace(rollback_asked(to, on), scenario=scenario)


def adapter_committed(
    scenario: str, n: int, candidate: str, *members: Member, attempt: int = 1, parent: int = 0
) -> ReleaseCommitted:
    return replace(committed(n, candidate, *members, attempt=attempt, parent=parent), scenario=scenario)


def adapter_released(
    scenario: str, n: int, candidate: str, *members: Member, parent: int = 0, request: int = 0
) -> tuple[Step, ...]:
    """A publication that goes well, from its target to its commit: nobody stops, and nobody sends."""
    return (
        adapter_target(scenario, n, candidate, *members, parent=parent, request=request),
        *(adapter_staged(each.engine, scenario, n, candidate) for each in members),
        adapter_committed(scenario, n, candidate, *members, parent=parent),
    )


FROZEN: tuple[Step, ...] = (
    *REGISTERED,
    adapter_registered(MATH),
    adapter_registered(CODE),
    joined_with("e0"),
    joined_with("e1"),
    holds("e0", 0, "base"),
    holds("e1", 0, "base"),
)
"""Sequences 1 to 9: both engines hold the base model, and answer both scenarios with it."""
