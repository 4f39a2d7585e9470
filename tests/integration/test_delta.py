"""Releases told from the version before, as real processes: less moves, what is kept suffices, kills change nothing.

The demo's own policy in fp32: each of its deltas is about 0.7 of the full bytes (docs/verified.md).
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from reef_bus.artifacts import ArtifactStore
from reef_bus.config import Artifacts
from reef_bus.events import CandidateReady, EngineStaged, ReceiverVerified, TargetPersisted
from reef_bus.stored import chain_at
from tests.e2e.live import Live, in_mode, kill_at, live, recovered
from tests.integration.test_staged import idle, roll_back

pytestmark = pytest.mark.integration

EVERY = 4
STAGED = in_mode("staged")
CONFIG = msgspec.structs.replace(
    STAGED,
    publication=msgspec.structs.replace(STAGED.publication, delta=True),
    artifacts=Artifacts(anchor_every=EVERY),
)


def candidates(found: Live) -> list[CandidateReady]:
    return [recorded.event for recorded in found.events if isinstance(recorded.event, CandidateReady)]


def staged(found: Live) -> list[EngineStaged]:
    return [recorded.event for recorded in found.events if isinstance(recorded.event, EngineStaged)]


def kept_as(found: Live) -> list[int]:
    """By candidate: how many deltas lead from its anchor to it."""
    store = ArtifactStore(found.running.config.folder("artifacts"))
    chains = [chain_at(store, each.weights.digest) for each in candidates(found)]
    return [len(chain.links) if chain else 0 for chain in chains]


async def test_releases_move_as_deltas_and_a_killed_engine_comes_back_through_anchor_and_deltas(tmp_path: Path) -> None:
    async with live(tmp_path, CONFIG) as found:
        await found.until("six releases", lambda: found.releases() >= 6, 120)
        await recovered(found, await kill_at(found, "engine-1", "ReleaseCommitted"))
        await recovered(found, await kill_at(found, "trainer", "SenderReady"))
        await recovered(found, await kill_at(found, "engine-0", "EngineStaged"))
        await found.client.stop()
        await found.until("nothing is under way", lambda: idle(found))
        await roll_back(found)
        audit = await found.audit()
    assert [v.text for v in audit.violations] == [] and audit.records > 0
    total = candidates(found)[0].tensor_bytes
    told = [event for event in staged(found) if event.base_manifest]
    print(len(told), "of", len(staged(found)), [event.bytes / total for event in told], kept_as(found))
    assert len(told) >= 8 and all(0 < event.bytes < 0.9 * total for event in told)
    assert all(event.bytes >= total for event in staged(found) if not event.base_manifest)
    assert set(kept_as(found)) == set(range(EVERY)), "anchors, and everything between them"
    loads = [r.event for r in found.events if isinstance(r.event, ReceiverVerified) and r.event.method == "artifact"]
    assert any(load.bytes > total for load in loads), "an engine read an anchor and deltas"
    assert any(isinstance(r.event, TargetPersisted) and r.event.sender == "artifact" for r in found.events)
