"""Training where the engines run, as real processes under traffic: memory goes out and back, whoever is killed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from reef_bus.events import (
    Draft,
    EngineEvent,
    EngineFenced,
    EngineJoined,
    EngineMemoryReleased,
    EngineMemoryRestored,
    JobDiscardRequested,
    JobDispatched,
    JobStarted,
    ReceiverVerified,
    Recorded,
    ReleaseCommitted,
)
from tests.e2e.live import CONFIG, Live, kill_at, live, recovered

pytestmark = [pytest.mark.integration, pytest.mark.long]

COLOCATED = msgspec.structs.replace(CONFIG, training=msgspec.structs.replace(CONFIG.training, colocate=True))
ORDER = ("EngineMemoryReleased", "EngineFenced", "EngineMemoryRestored", "ReceiverVerified")
"""What an engine says of a release for which the weights are all the memory that it lends."""


async def discard_as_it_begins(found: Live) -> int:
    """The trainer dies as its next job begins, and a person gives that job up; the sequence of its `JobDiscarded`."""
    asking: list[asyncio.Task[int]] = []

    def watch(recorded: Recorded) -> None:
        if isinstance(recorded.event, JobStarted) and not asking:
            found.kill("trainer")
            asking.append(asyncio.create_task(_discard(found, recorded.event)))

    found.watchers.append(watch)
    await found.until("a job begins", lambda: bool(asking))
    asked = await asking[0]
    found.watchers.remove(watch)
    await found.until("it is discarded", lambda: discarded(found.events, asked) > 0)
    return discarded(found.events, asked)


async def _discard(found: Live, started: JobStarted) -> int:
    head = found.world.publications.head
    assert head is not None
    asked = JobDiscardRequested(
        actor="ada", why="to see it", head=head.load_id, scenario=started.scenario, job=started.job
    )
    return (await found.running.journal.append(Draft(event=asked, writer="person/ada", boot="test"), 0)).seq


def discarded(events: Sequence[Recorded], asked: int) -> int:
    """Where the request was answered; 0: not yet."""
    return next((r.seq for r in events if r.name == "JobDiscarded" and r.event.request == asked), 0)  # type: ignore[attr-defined]


async def test_engines_lend_their_memory_and_are_back_whoever_is_killed(tmp_path: Path) -> None:
    async with live(tmp_path, COLOCATED) as found:
        await found.until("a release", lambda: found.releases() >= 1)
        out = await kill_at(found, "engine-0", "EngineMemoryReleased")
        await recovered(found, out)
        begun = await kill_at(found, "trainer", "JobStarted")
        await recovered(found, begun)
        given_up = await discard_as_it_begins(found)
        await found.until("the incumbent is back", lambda: found.world.seq > given_up and found.all_serve())
        await found.until("four releases", lambda: found.releases() >= 4)
        await found.client.stop()
        audit = await found.audit()
    assert [v.text for v in audit.violations] == [] and audit.releases >= 4
    events = found.events
    assert all(r.event.releases == ("weights",) for r in events if isinstance(r.event, EngineJoined))
    assert all(r.event.colocated for r in events if isinstance(r.event, JobDispatched))
    _nobody_takes_back_what_a_job_has(events)
    for engine in COLOCATED.inference.engines:
        _the_last_release_came_in_order(events, engine)
        _the_incumbent_came_back(events, engine, given_up)


def _nobody_takes_back_what_a_job_has(events: Sequence[Recorded]) -> None:
    """From a job's first step to its end no engine takes memory back, and none says that it holds anything."""
    busy = False
    for recorded in events:
        if isinstance(recorded.event, JobStarted):
            busy = True
        elif recorded.name in ("CandidateReady", "JobDropped", "JobDiscarded"):
            busy = False
        assert not busy or not isinstance(recorded.event, EngineMemoryRestored | ReceiverVerified), recorded


def _the_last_release_came_in_order(events: Sequence[Recorded], engine: str) -> None:
    """Stopped and released, fenced, weights back, bytes received and proven."""
    last = max(r.seq for r in events if isinstance(r.event, ReleaseCommitted))
    dispatch = max(r.seq for r in events if isinstance(r.event, JobDispatched) and r.seq < last)
    said = [
        r for r in events if dispatch < r.seq < last and isinstance(r.event, EngineEvent) and r.event.engine == engine
    ]
    kinds = (EngineMemoryReleased, EngineFenced, EngineMemoryRestored, ReceiverVerified)
    assert tuple(r.name for r in said if isinstance(r.event, kinds)) == ORDER


def _the_incumbent_came_back(events: Sequence[Recorded], engine: str, given_up: int) -> None:
    """Nothing of it was left in memory: it was loaded from its artifact."""
    head = next(r.event.load_id for r in reversed(events) if isinstance(r.event, ReleaseCommitted) and r.seq < given_up)
    after = [
        r.event for r in events if r.seq > given_up and isinstance(r.event, EngineEvent) and r.event.engine == engine
    ]
    restored, verified = (e for e in after[:2])
    assert isinstance(restored, EngineMemoryRestored) and isinstance(verified, ReceiverVerified), after[:3]
    assert (verified.load_id, verified.method, verified.publication) == (head, "artifact", "")
