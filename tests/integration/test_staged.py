"""Staged releases as real processes under traffic: kills, the audit, and how long an engine pauses for a release."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path

import pytest

from reef_bus.artifacts import ArtifactStore
from reef_bus.audit import read_history
from reef_bus.events import (
    EngineFenced,
    InferenceRecorded,
    ReceiverVerified,
    Recorded,
    ReleaseCommitted,
    TargetPersisted,
)
from tests.e2e.live import Live, in_mode, live
from tests.integration.test_demo import reef_bus

pytestmark = [pytest.mark.integration, pytest.mark.long]

MS = 1e6


def pauses_ms(events: Sequence[Recorded]) -> list[float]:
    """Of every engine, for every release that it went over to without losing its process: from the broker's time of
    what stopped it to its being allowed again. Fenced engines say the latter with their next fence."""
    began: dict[str, int] = {}
    found: list[float] = []
    for recorded in events:
        match recorded.event:
            case TargetPersisted(load_id=load_id, mode="fenced"):
                began[load_id] = recorded.time
            case ReleaseCommitted(load_id=load_id):
                began.setdefault(load_id, recorded.time)
            case ReceiverVerified(load_id=load_id, method="swapped"):
                found.append((recorded.time - began[load_id]) / MS)
            case EngineFenced(previous=load_id, resumed_at=at) if at and load_id in began:
                found.append((at - began[load_id]) / MS)
    return found


async def answers_meanwhile(found: Live) -> int:
    """Answers that were begun while a release was under way: after its target, before its commit."""
    history = await read_history(found.running.journal, ArtifactStore(found.running.config.folder("artifacts")))
    targets = {r.event.load_id: r.seq for r in history.log if isinstance(r.event, TargetPersisted)}
    spans = [(targets[r.event.load_id], r.seq) for r in history.log if isinstance(r.event, ReleaseCommitted)]
    points = [r.event.as_of for r in history.records if isinstance(r.event, InferenceRecorded)]
    return sum(began <= point < ended for point in points for began, ended in spans)


async def test_traffic_goes_on_while_a_release_is_staged_and_pauses_for_less_than_a_fence(tmp_path: Path) -> None:
    medians, meanwhile = dict[str, float](), dict[str, int]()
    for mode in ("fenced", "staged"):
        async with live(tmp_path / mode, in_mode(mode), pause_s=0.05) as found:
            await found.until("eight releases", lambda found=found: found.releases() >= 8, 120)  # type: ignore[misc]
            await found.client.stop()
            assert [v.text for v in (await found.audit()).violations] == []
            meanwhile[mode] = await answers_meanwhile(found)
        pauses = pauses_ms(found.events)
        assert len(pauses) >= 12
        medians[mode] = statistics.median(pauses)
        print(json.dumps({"mode": mode, "pauses": len(pauses), "p50_ms": medians[mode], "max_ms": max(pauses)}))
    assert meanwhile["fenced"] == 0 < meanwhile["staged"], meanwhile
    assert medians["staged"] < medians["fenced"], medians


def test_a_byte_that_flips_in_a_staging_is_never_served(tmp_path: Path) -> None:
    """The demo in staged mode: the copy beside is corrupted, named by tensor, and not committed on that word."""
    state = str(tmp_path / "state")
    words = ("demo", "--mode", "staged", "--releases", "3", "--keep", state, "--flip", "engine-1@2", "--json")
    summary = json.loads(reef_bus(*words).splitlines()[-1])
    assert summary["audit_violations"] == 0 and summary["releases"] >= 3 and summary["transfer_bytes"] > 0
    assert summary["fence_ms_p50"] > 0 and summary["publish_to_serving_ms_p50"] > 0
    lines = reef_bus("log", "--state", state, "--type", "ReceiverFailed", "--tail", "0", "--json").splitlines()
    failure = json.loads(lines[0])["data"]
    assert (failure["engine"], failure["cause"], failure["staged"]) == ("engine-1", "digest", True)
    assert "model.norm.weight" in failure["detail"]
