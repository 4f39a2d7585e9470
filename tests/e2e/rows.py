"""The rows of the kill matrix: for each event of the catalogue how a run comes to see it, or why it cannot.

Knows: what provokes an event, which deadline a process that stops there runs into. Must not know: signals, or results.
Whoever adds an event to the catalogue gives it a place here: `misplaced` names what has none.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple

from reef_bus.core.effects import Deadlines
from reef_bus.events import (
    CATALOGUE,
    ComponentEvent,
    EngineEvent,
    EngineRetireRequested,
    PublicationHaltRequested,
    Recorded,
    RollbackRequested,
    TargetPersisted,
)
from tests.e2e.rig import Gone, Rig

ROLES = ("trainer", "publisher", "publisher-2", "engine-0", "engine-1", "gateway", "supervisor", "nats")
LEADER = "leader"

NOT_MADE = {
    "JobDropped": "needs a batch that cannot be trained on, which no harness can record; unit tests",
    "CandidateRejected": "needs figures that are not finite: for others, the recipe's selector rejects nothing",
    "JobAmbiguous": "needs a backend that mutates in place, and the torch backend does not",
    "JobDiscarded": "answers a request about a held or an ambiguous job, and this deployment holds nothing",
    "PromotionRequested": "needs a candidate that is held for review, and this deployment holds nothing",
    "JobDiscardRequested": "as PromotionRequested",
    "JobRestoreRequested": "needs an ambiguous job, as JobAmbiguous does",
    "SenderFailed": "needs an artifact that was damaged on the disk; unit tests",
    "ReceiverFailed": "needs a transfer that breaks off in the milliseconds that it takes, or the fault switch, which "
    "strikes at every start of an engine; tests/integration/test_demo.py",
    "EngineLeft": "needs an artifact that was damaged on the disk; unit tests",
    "CleanupUnconfirmed": "needs a process that outlives SIGKILL for ten seconds; unit tests",
    "RecoveryHalted": "needs the restart budget, which this run raises",
    "RecoveryResumed": "needs a component that was given up, as RecoveryHalted does",
    "RecoveryResumeRequested": "as RecoveryResumed",
    "AdapterRegistered": "needs adapters.scenarios, and this deployment trains the whole model. A matrix of adapters "
    "is a third kind of deployment beside fenced and staged: two scenarios over one base, a row for this event (fresh) "
    "for targets, stagings, commits and rollbacks of adapters, and for unloads; tests/simulation has all of these",
    "AdapterUnloaded": "as AdapterRegistered; with adapters.capacity 3, nearly every release then has one",
    "AdapterLeaked": "as AdapterRegistered, and needs an engine that keeps what it was told to unload; unit tests",
    "EngineMemoryReleased": "needs a colocated deployment; tests/integration/test_colocate.py",
    "EngineMemoryRestored": "as EngineMemoryReleased",
    "InferenceRecorded": "is not on LOG",
    "ReportReceived": "is not on LOG",
}

Provoke = Callable[[Rig, str], Awaitable[object]]
Match = Callable[[Recorded, str], bool]


class Row(NamedTuple):
    """`provoke` makes the event happen, over and over until it is cancelled (None: it happens by itself); `match` says
    which of the events of that name is meant, given the role that is hit. `fresh`: a log holds it once, at first.
    `staged`: of a deployment in staged mode."""

    event: str
    provoke: Provoke | None = None
    match: Match = lambda recorded, role: True
    fresh: bool = False
    staged: bool = False


# -- which one is meant


def _own(recorded: Recorded, role: str) -> bool:
    """An engine is hit at an event of its own; anybody else at the first that comes."""
    return not isinstance(recorded.event, EngineEvent) or role not in ENGINES or recorded.event.engine == role


def _restarted(recorded: Recorded, role: str) -> bool:
    return isinstance(recorded.event, ComponentEvent) and recorded.event.component == _itself(role)


def _ended(recorded: Recorded, role: str) -> bool:
    return isinstance(recorded.event, ComponentEvent) and recorded.event.component == _another(role)


def _update(recorded: Recorded, role: str) -> bool:
    return isinstance(recorded.event, TargetPersisted) and not recorded.event.request


def _rollback(recorded: Recorded, role: str) -> bool:
    return isinstance(recorded.event, TargetPersisted) and recorded.event.request > 0


# -- what makes it happen

ENGINES = ("engine-0", "engine-1")


def _itself(role: str) -> str:
    """Who is started again: the one that is then hit, where it is one that a supervisor starts."""
    return role if role not in ("supervisor", "nats", LEADER) else "publisher-2"


def _another(role: str) -> str:
    """Whose end is recorded while `role` is hit: one that is quick to start."""
    return "publisher-2" if role != "publisher-2" else "publisher"


def _engine(role: str) -> str:
    """An engine that is not hit."""
    return ENGINES[1] if role != ENGINES[1] else ENGINES[0]


def _end(who: Callable[[str], str]) -> Provoke:
    async def provoke(rig: Rig, role: str) -> None:
        await rig.kill(who(role))

    return provoke


async def _abort(rig: Rig, role: str) -> None:
    """An engine dies after the candidate is there: mostly, the target still names it."""
    while True:
        await rig.next("CandidateReady")
        await rig.kill(_engine(role))
        await rig.until("all is well", rig.whole)


async def _halt(rig: Rig, role: str) -> None:
    """A person gives up a publication that an engine holds up by standing still."""
    while True:
        await rig.next("CandidateReady")
        try:
            with rig.stopped(_engine(role)):
                target = (await rig.next("TargetPersisted")).event
                assert isinstance(target, TargetPersisted)
                asked = {"actor": "matrix", "why": "to see it", "head": target.parent, "scenario": target.scenario}
                await rig.ask(PublicationHaltRequested(publication=target.publication, **asked))
                await rig.next("PublicationHalted", "ReleaseCommitted")
        except Gone:
            continue
        await rig.next("TrainerRestored", "JobDispatched")


async def _silence(rig: Rig, role: str) -> None:
    """An engine stands still until its heartbeats have lapsed."""
    while True:
        try:
            with rig.stopped(_engine(role)):
                await rig.next("EngineExcluded", "TransferAborted")
        except Gone:
            continue
        await rig.until("all is well", rig.whole)


async def _retire(rig: Rig, role: str) -> None:
    engine = rig.world.membership.engines[_engine(role)]
    await rig.ask(EngineRetireRequested(**_asked(rig), engine=engine.id, boot=engine.boot))


async def _back(rig: Rig, role: str) -> None:
    """A rollback to the release before; a head that moves meanwhile refuses it."""
    while True:
        head = rig.world.publications.head
        assert head is not None
        await rig.ask(RollbackRequested(**_asked(rig), release=head.parent or head.load_id))
        answer = await rig.next("TargetPersisted", "PublicationRefused")
        if isinstance(answer.event, TargetPersisted) and answer.event.request:
            return


async def _overtaken(rig: Rig, role: str) -> None:
    """A rollback that was decided on a head which is none any more."""
    asked = {**_asked(rig), "head": "overtaken"}
    await rig.ask(RollbackRequested(**asked, release=f"{rig.world.incarnation}:0"))


async def _pointless(rig: Rig, role: str) -> None:
    await rig.ask(PublicationHaltRequested(**_asked(rig), publication="none-of-that-name"))


def _asked(rig: Rig) -> dict[str, str]:
    head = rig.world.publications.head
    said = {"actor": "matrix", "why": "to see it", "head": head.load_id if head else ""}
    return {**said, "scenario": rig.world.training.scenario}


ROWS: Mapping[str, Row] = {
    "LogOpened": Row("LogOpened", fresh=True),
    "ScenarioRegistered": Row("ScenarioRegistered", fresh=True),
    "JobDispatched": Row("JobDispatched"),
    "JobStarted": Row("JobStarted"),
    "CandidateReady": Row("CandidateReady"),
    "CandidateEvaluated": Row("CandidateEvaluated"),
    "CandidateSelected": Row("CandidateSelected"),
    "TargetPersisted": Row("TargetPersisted", match=_update),
    "SenderReady": Row("SenderReady"),
    "EngineFenced": Row("EngineFenced", match=_own),
    "ReceiverVerified": Row("ReceiverVerified", match=_own),
    "ReleaseCommitted": Row("ReleaseCommitted"),
    "TransferAborted": Row("TransferAborted", _abort),
    "PublicationHaltRequested": Row("PublicationHaltRequested", _halt),
    "PublicationHalted": Row("PublicationHalted", _halt),
    "TrainerRestored": Row("TrainerRestored", _halt),
    "RollbackRequested": Row("RollbackRequested", _back),
    "TargetPersisted/rollback": Row("TargetPersisted", _back, _rollback),
    "PublicationRefused": Row("PublicationRefused", _overtaken),
    "RequestRefused": Row("RequestRefused", _pointless),
    "EngineRetireRequested": Row("EngineRetireRequested", _retire),
    "EngineExcluded": Row("EngineExcluded", _silence),
    "TrainerJoined": Row("TrainerJoined", _end(lambda role: "trainer")),
    "EngineJoined": Row("EngineJoined", _end(lambda role: role if role in ENGINES else ENGINES[1])),
    "ComponentStarted": Row("ComponentStarted", _end(_itself), _restarted),
    "ReadinessPublished": Row("ReadinessPublished", _end(_itself), _restarted),
    "ReadinessWithdrawn": Row("ReadinessWithdrawn", _end(_another), _ended),
    "ComponentLost": Row("ComponentLost", _end(_another), _ended),
    "RestartScheduled": Row("RestartScheduled", _end(_another), _ended),
    "TargetPersisted/staged": Row("TargetPersisted", staged=True),
    "SenderReady/staged": Row("SenderReady", staged=True),
    "EngineStaged": Row("EngineStaged", match=_own, staged=True),
    "ReleaseCommitted/staged": Row("ReleaseCommitted", staged=True),
    "ReceiverVerified/staged": Row("ReceiverVerified", match=_own, staged=True),
    "TransferAborted/staged": Row("TransferAborted", _abort, staged=True),
}


def misplaced() -> list[str]:
    """Events of the catalogue without a place here, names here without an event, and events with two places."""
    made = {row.event for row in ROWS.values()}
    return sorted(set(CATALOGUE) ^ (made | set(NOT_MADE)) | made & set(NOT_MADE))


# -- deadlines

WAITED_FOR: Mapping[tuple[str, str], tuple[str, str]] = {
    ("engine", "TargetPersisted"): ("fence_s", "the publication waits for it to fence"),
    ("engine", "TargetPersisted/rollback"): ("fence_s", "the publication waits for it to fence"),
    ("engine", "TransferAborted"): ("fence_s", "the next attempt waits for it to fence"),
    ("engine", "TargetPersisted/staged"): ("verify_s", "the attempt waits for it to stage"),
    ("engine", "SenderReady"): ("verify_s", "the attempt waits for it to receive and verify"),
    ("engine", "EngineFenced"): ("verify_s", "the attempt waits for it to receive and verify"),
    ("trainer", "TargetPersisted"): ("sender_s", "the attempt waits for its offer"),
    ("trainer", "TargetPersisted/staged"): ("sender_s", "the attempt waits for its offer"),
    ("trainer", "EngineFenced"): ("sender_s", "the attempt waits for its offer"),
    ("trainer", "TransferAborted"): ("sender_s", "the next attempt waits for its offer"),
    ("trainer", "SenderReady"): ("stall_s", "the receivers wait for its bytes"),
}
"""Role and row: the deadline that a process runs into when it stops there, and who waits. Whoever is not named is
waited for by nobody but those who listen for heartbeats."""


def deadline(role: str, row: str, deadlines: Deadlines) -> float:
    """How long, in seconds, `role` is waited for when it stops at `row`."""
    name, _ = WAITED_FOR.get((role.partition("-")[0], row), ("heartbeat_s", ""))
    return float(getattr(deadlines, name))
