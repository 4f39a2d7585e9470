"""Memory that is lent to a colocated job, from raw events: a job has begun only with all of it, and keeps it.

Knows: who was there when the job's fence was raised, and what each boot said since. Must not know: the world.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from reef_bus.core.invariants.findings import Findings
from reef_bus.events import (
    CandidateRejected,
    CandidateSelected,
    ComponentLost,
    EngineExcluded,
    EngineJoined,
    EngineLeft,
    EngineMemoryReleased,
    EngineMemoryRestored,
    Event,
    JobAmbiguous,
    JobDiscarded,
    JobDispatched,
    JobDropped,
    JobRestoreRequested,
    JobStarted,
    PublicationHalted,
    ReadinessWithdrawn,
    Recorded,
    TransferAborted,
)

COLOCATED = "colocated"


class Lending(msgspec.Struct, kw_only=True):
    """`here`: by engine, the boot that is there, and since when. `job` is open and colocated; its fence is up since
    `fence` (0: it is ambiguous), and these boots have `given` their memory for it."""

    here: dict[str, tuple[str, int]] = {}
    job: str = ""
    fence: int = 0
    given: set[str] = set()


def note(lending: Lending, recorded: Recorded, findings: Findings) -> None:
    """Enter one event that is not void."""
    entry = ENTRIES.get(type(recorded.event))
    if entry:
        entry(lending, recorded, recorded.event, findings)


def _join(lending: Lending, recorded: Recorded, event: EngineJoined, findings: Findings) -> None:
    lending.here[event.engine] = recorded.boot, recorded.seq


def _gone(
    lending: Lending,
    recorded: Recorded,
    event: EngineLeft | EngineExcluded | ReadinessWithdrawn | ComponentLost | TransferAborted | PublicationHalted,
    findings: Findings,
) -> None:
    if isinstance(event, EngineLeft | EngineExcluded):
        lending.here.pop(event.engine, None)
    elif isinstance(event, ReadinessWithdrawn | ComponentLost):
        lending.here.pop(event.component, None)
    else:
        for member in event.excluded:
            lending.here.pop(member.engine, None)


def _dispatch(lending: Lending, recorded: Recorded, event: JobDispatched, findings: Findings) -> None:
    lending.job, lending.fence, lending.given = event.job if event.colocated else "", recorded.seq, set()


def _again(lending: Lending, recorded: Recorded, event: JobRestoreRequested, findings: Findings) -> None:
    if event.job == lending.job and not lending.fence:
        lending.fence, lending.given = recorded.seq, set()


def _doubt(lending: Lending, recorded: Recorded, event: JobAmbiguous, findings: Findings) -> None:
    lending.fence, lending.given = 0, set()


def _close(lending: Lending, recorded: Recorded, event: Event, findings: Findings) -> None:
    lending.job, lending.fence, lending.given = "", 0, set()


def _give(lending: Lending, recorded: Recorded, event: EngineMemoryReleased, findings: Findings) -> None:
    if lending.job and event.fence == lending.fence:
        lending.given.add(recorded.boot)


def _take(lending: Lending, recorded: Recorded, event: EngineMemoryRestored, findings: Findings) -> None:
    if recorded.boot in lending.given:
        text = f"{event.engine} boot {recorded.boot} takes {list(event.regions)} back at {recorded.seq}, while job"
        findings.add(COLOCATED, f"{text} {lending.job} has that memory", [recorded.seq])


def _start(lending: Lending, recorded: Recorded, event: JobStarted, findings: Findings) -> None:
    if event.job != lending.job:
        return
    kept = [boot for boot, since in lending.here.values() if since < lending.fence and boot not in lending.given]
    if kept or not lending.fence:
        text = f"job {event.job} starts at {recorded.seq}, with its fence up since {lending.fence}, and boots"
        findings.add(COLOCATED, f"{text} {sorted(kept)} have not released their memory", [recorded.seq])


ENTRIES: Mapping[type[Event], Callable[[Lending, Recorded, Any, Findings], None]] = {
    EngineJoined: _join,
    **dict.fromkeys((EngineLeft, EngineExcluded, ReadinessWithdrawn, ComponentLost), _gone),
    **dict.fromkeys((TransferAborted, PublicationHalted), _gone),
    JobDispatched: _dispatch,
    JobRestoreRequested: _again,
    JobAmbiguous: _doubt,
    **dict.fromkeys((CandidateSelected, CandidateRejected, JobDropped, JobDiscarded), _close),
    EngineMemoryReleased: _give,
    EngineMemoryRestored: _take,
    JobStarted: _start,
}
