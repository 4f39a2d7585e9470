"""Releases told from the version before, as real processes: less moves, what is kept suffices, kills change nothing.

The demo's own policy in fp32: each of its deltas is about 0.7 of the full bytes (docs/verified.md).
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import msgspec
import pytest

from reef_bus.artifacts import ArtifactStore
from reef_bus.backup import backup, read_backup
from reef_bus.config import Artifacts
from reef_bus.core.publication import Release
from reef_bus.events import (
    CandidateReady,
    Draft,
    EngineStaged,
    Event,
    PublicationRefused,
    ReceiverVerified,
    RollbackRequested,
    TargetPersisted,
)
from reef_bus.manifest import Manifest, describe
from reef_bus.stored import Chain, chain_at, read
from tests.e2e.live import Live, in_mode, kill_at, live, recovered

pytestmark = [pytest.mark.integration, pytest.mark.long]

EVERY = 4
STAGED = in_mode("staged")
CONFIG = msgspec.structs.replace(
    STAGED,
    publication=msgspec.structs.replace(STAGED.publication, delta=True),
    artifacts=Artifacts(anchor_every=EVERY),
)


def idle(found: Live) -> bool:
    published, training = found.world.publications, found.world.training
    return not (training.job or published.open or [c for c in training.selected if c not in published.ended])


async def ask_back(found: Live, release: Release) -> Event:
    """The publisher's answer."""
    head = found.world.publications.head
    assert head is not None
    scenario, began = found.world.training.scenario, len(found.events)
    asked = RollbackRequested(actor="ada", why="a test", head=head.load_id, scenario=scenario, release=release.load_id)
    seq = await found.running.journal.append(Draft(event=asked, writer="operator/ada", boot="ada"), 0)

    def answers() -> list[Event]:
        return [r.event for r in found.events[began:] if getattr(r.event, "request", 0) == seq.seq]

    await found.until("an answer", lambda: bool(answers()))
    return answers()[0]


async def roll_back(found: Live) -> None:
    """To the first release, while nothing else is under way: staged from its artifact, and swapped in."""
    first = list(found.world.publications.releases.values())[1]
    target = await ask_back(found, first)
    assert isinstance(target, TargetPersisted) and target.candidate == first.candidate

    def back() -> bool:
        now = found.world.publications.head
        return now is not None and now.load_id == target.load_id and found.all_serve()

    await found.until("the first release's content serves again", back)
    swaps = [
        r.event for r in found.events if isinstance(r.event, ReceiverVerified) and r.event.load_id == target.load_id
    ]
    assert {(swap.engine, swap.method, swap.manifest) for swap in swaps} == {
        (engine, "swapped", first.manifest) for engine in found.world.membership.engines
    }


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
    """Section 8 in staged mode: kills before and after the commit point, and while sending. Nobody was ever fenced."""
    async with live(tmp_path, CONFIG) as found:
        await found.until("five releases", lambda: found.releases() >= 5, 120)
        for component, event in (
            ("engine-1", "EngineStaged"),
            ("engine-1", "ReleaseCommitted"),
            ("trainer", "SenderReady"),
        ):
            await recovered(found, await kill_at(found, component, event))
        await found.client.stop()
        await found.until("nothing is under way", lambda: idle(found))
        await roll_back(found)
        load, chain = await loaded_by_a_killed_engine(found)
        audit = await found.audit()
    assert [v.text for v in audit.violations] == [] and audit.records > 0
    assert "EngineFenced" not in {recorded.name for recorded in found.events}
    assert len(chain.links) == 1 and load.bytes == chain.nbytes > candidates(found)[0].tensor_bytes
    moved_less(found)
    assert set(kept_as(found)) == set(range(EVERY)), "anchors, and everything between them"


def moved_less(found: Live) -> None:
    """What moved as a delta was less than all bytes; what did not was all of them."""
    total = candidates(found)[0].tensor_bytes
    told = [event.bytes / total for event in staged(found) if event.base_manifest]
    full = [event.bytes / total for event in staged(found) if not event.base_manifest]
    print(json.dumps({"as_deltas": len(told), "in_full": len(full), "share": statistics.median(told)}))
    assert len(told) >= 8 and 0 < min(told) <= max(told) < 0.9 and all(share >= 1 for share in full)


async def loaded_by_a_killed_engine(found: Live) -> tuple[ReceiverVerified, Chain]:
    """The head, which is the first release's content again: one delta after the anchor."""
    head = found.world.publications.head
    assert head is not None
    found.kill("engine-1")
    began = len(found.events)
    await found.until("it is back", lambda: found.all_serve() and found.whole())
    after = [recorded.event for recorded in found.events[began:]]
    load = next(event for event in after if isinstance(event, ReceiverVerified) and event.engine == "engine-1")
    chain = chain_at(ArtifactStore(found.running.config.folder("artifacts")), head.weights.digest)
    assert (load.method, load.manifest) == ("artifact", head.manifest) and chain is not None
    return load, chain


# -- retention

KEEP = 2


async def test_what_nobody_needs_is_removed_while_engines_come_late_and_backups_are_made(tmp_path: Path) -> None:
    config = msgspec.structs.replace(CONFIG, artifacts=Artifacts(anchor_every=EVERY, keep=KEEP))
    folder, said = tmp_path / "backup", list[str]()
    async with live(tmp_path / "state", config) as found:
        store = ArtifactStore(found.running.config.folder("artifacts"))
        await found.until("six releases", lambda: found.releases() >= 6, 120)
        await recovered(found, await kill_at(found, "engine-1", "ReleaseCommitted"))
        await backup(found.running.journal, found.running.config, store, folder, said.append)
        await found.until("eight releases", lambda: found.releases() >= 8, 120)
        await found.client.stop()
        await found.until("nothing is under way", lambda: idle(found))
        releases = list(found.world.publications.releases.values())
        refused = await ask_back(found, releases[-KEEP - 2])
        assert isinstance(refused, PublicationRefused) and refused.reason == "not_kept"
        met = await ask_back(found, releases[-KEEP - 1])
        assert isinstance(met, TargetPersisted) and met.candidate == releases[-KEEP - 1].candidate
        await found.until("it serves", lambda: found.releases() > len(releases) - 1 and found.all_serve())
        await backup(found.running.journal, found.running.config, store, folder, said.append)
        audit = await found.audit()
    assert [v.text for v in audit.violations] == []
    removed = [each for each in candidates(found) if each.optimizer and not store.has(each.optimizer.digest)]
    within = {release.candidate for release in releases[-KEEP - 1 :]}
    assert len(removed) >= 3 and within.isdisjoint(each.candidate for each in removed)
    for each in removed:  # an anchor may be what others stand on; a chain is nobody's but its own
        assert not store.has(each.weights.digest) or chain_at(store, each.weights.digest) is None
    for release in releases[-KEEP - 1 :]:
        manifest = Manifest.decode(store.get(release.manifest))
        assert describe(read(store, release.weights.digest, manifest)) == manifest
    assert read_backup(folder, said.append).inventory.config["artifacts"]["keep"] == KEEP
