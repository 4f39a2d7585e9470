"""A deployment with real processes whose log is rolled, and one that is restored from a backup made while it ran: both
train and release on.

Knows: the command line, a live deployment. Must not know: how either is done.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import msgspec
import pytest

from reef_bus import cli_keep
from reef_bus.audit import read_export, read_stream
from reef_bus.cli import main
from reef_bus.config import load
from reef_bus.core.world import World
from reef_bus.events import JobDispatched, LogOpened, ReceiverVerified, Recorded, ReleaseCommitted, TrainerJoined
from reef_bus.journal import RECORDS
from tests.e2e.live import CONFIG, Live, live

pytestmark = [pytest.mark.integration, pytest.mark.long]

QUICK = msgspec.structs.replace(CONFIG, inference=msgspec.structs.replace(CONFIG.inference, engines=("engine-0",)))


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_keep, "SILENCE_S", 1.0)


def quiet(world: World) -> bool:
    pending = [c for c in world.training.selected if c not in world.publications.ended]
    return not (world.training.job or world.publications.open or pending)


async def rest(found: Live) -> None:
    """No traffic any more, and what is on its way arrives."""
    await found.client.stop()
    await found.until("the log is quiet", lambda: quiet(found.world) and found.all_serve())


def named(events: list[Recorded], kind: type) -> list[Recorded]:
    return [recorded for recorded in events if isinstance(recorded.event, kind)]


async def goes_on(found: Live, incarnation: str, head: str, candidate: str) -> None:
    """Engines join anew and prove the head, training goes on from its candidate, and the next release commits."""
    assert found.world.incarnation == incarnation
    first = named(found.events, ReceiverVerified)[0].event
    assert isinstance(first, ReceiverVerified) and (first.load_id, first.publication) == (head, "")
    await found.until("a release on the new log", lambda: bool(named(found.events, ReleaseCommitted)))
    job, release = named(found.events, JobDispatched)[0].event, named(found.events, ReleaseCommitted)[0].event
    assert isinstance(job, JobDispatched) and job.base == candidate
    assert isinstance(release, ReleaseCommitted) and release.parent == head
    assert release.load_id.rpartition(":")[0] == incarnation
    assert len(named(found.events, TrainerJoined)) == 1
    await rest(found)
    audit = await found.audit()
    end = found.events[0].seq + audit.log_events  # more jobs may follow, of what was reported before
    await found.until("all that was audited", lambda: found.world.seq >= end - 1)
    jobs = [recorded.event for recorded in named(found.events, JobDispatched) if recorded.seq < end]
    assert audit.violations == () and audit.jobs == len(jobs) >= 1
    assert audit.consumed == sum(job.records for job in jobs)  # type: ignore[attr-defined]


async def test_a_rolled_log_and_a_restored_one_train_and_release_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state, new, backup = tmp_path / "state", tmp_path / "new", tmp_path / "backup"
    async with live(state, QUICK) as found:
        await found.until("two releases", lambda: found.releases() >= 2)
        assert await in_a_thread("backup", str(backup), "--state", str(state)) == 0  # under traffic
        await rest(found)
        head, last = found.world.publications.head, found.world.seq
        incarnation = found.world.incarnation
        assert head is not None
        releases = found.releases()
    assert await in_a_thread("log", "roll", "--state", str(state)) == 0
    async with live(state, QUICK) as found:
        opened = found.events[0]
        assert isinstance(opened.event, LogOpened) and opened.seq == last + 1
        assert found.releases() == releases
        await goes_on(found, incarnation, head.load_id, head.candidate)
        sourced = await committed(found, releases + 1)
        assert sourced[: releases + 1] == [f"{incarnation}:{n}" for n in range(1, releases + 2)]
    assert await in_a_thread("restore", str(backup), "--state", str(new)) == 0
    old = read_export(backup / json.loads((backup / "manifest.json").read_bytes())["history"])
    commit = named(list(old.log), ReleaseCommitted)[-1].event
    assert isinstance(commit, ReleaseCommitted)
    async with live(new, load(new / "deployment.json")) as found:
        assert found.world.incarnation != incarnation
        assert await found.running.journal.head(RECORDS) >= len(old.records)
        await goes_on(found, found.world.incarnation, commit.load_id, commit.candidate)


async def committed(found: Live, count: int) -> list[str]:
    """What RELEASES says was committed, once it is that many: a source whose upstream was replaced takes a while."""
    journal = found.running.journal
    async with asyncio.timeout(40):
        while True:
            events = await read_stream(journal, "RELEASES", await journal.head("RELEASES"))
            commits = [r.event.load_id for r in events if isinstance(r.event, ReleaseCommitted)]
            if len(commits) >= count:
                return commits
            await asyncio.sleep(0.5)


async def in_a_thread(*words: str) -> int:
    """A command has an event loop of its own."""
    return await asyncio.to_thread(main, words)
