"""What may be removed of old candidates, and what never: by the fold, in the store, and for backups.

Knows: histories, a real store. Must not know: who trains, transports.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from reef_bus import backup
from reef_bus.artifacts import ArtifactStore
from reef_bus.audit import History
from reef_bus.config import Artifacts, Config, build
from reef_bus.core import reactions
from reef_bus.core.effects import Policy
from reef_bus.core.retention import Retention, retention, within_reach
from reef_bus.core.training import Candidate
from reef_bus.core.world import World
from reef_bus.errors import Rejected, TransferError
from reef_bus.events import Blob, Event, PublicationHalted, PublicationRefused, TargetPersisted
from reef_bus.manifest import describe
from reef_bus.stored import read
from reef_bus.sweep import nothing_is_removed, removable, sweep
from tests.facts import (
    E0,
    E1,
    SERVING,
    L,
    dispatched,
    evaluated,
    halted,
    ready,
    rejected,
    released,
    rollback_asked,
    rolled_back,
    started,
    target,
    trained,
)
from tests.spec import Step, fact, given
from tests.unit.test_stored import history, version


def releases(count: int) -> tuple[Step, ...]:
    """Releases 1 to `count`, whose contents are c1, c2 …, each trained from the one before."""
    steps: list[Step] = [*SERVING]
    for n in range(1, count + 1):
        steps += [*trained(f"c{n}", f"c{n - 1}" if n > 1 else "base", n), *released(n, f"c{n}", E0, E1)]
    return tuple(steps)


def needed(keep: int, *steps: Step) -> set[str]:
    found = retention(given(*steps).world, keep)
    assert not {each.id for each in found.needed} & {each.id for each in found.spare}
    return {each.id for each in found.needed}


FIVE = releases(5)


# -- by the fold


def test_without_a_window_everything_is_needed() -> None:
    assert needed(0, *FIVE) == {"base", "c1", "c2", "c3", "c4", "c5"}


@pytest.mark.parametrize(("keep", "kept"), [(1, {"c5", "c4"}), (3, {"c5", "c4", "c3", "c2"}), (9, needed(0, *FIVE))])
def test_the_head_and_the_window_before_it_are_needed(keep: int, kept: set[str]) -> None:
    assert needed(keep, *FIVE) == kept


def test_what_is_trained_and_what_it_is_trained_from_is_needed() -> None:
    for last in range(2, 5):
        job = (dispatched("j6", "c5", 6), started("j6"), ready("j6", "c6", "c5"), evaluated("c6"))[:last]
        assert needed(1, *FIVE, *job) == {"c5", "c4"} | ({"c6"} if last > 2 else set())


def test_a_candidate_that_waits_is_needed_however_old_and_so_is_the_one_that_is_published() -> None:
    waiting = (*FIVE, *trained("c6", "c5", 6), *trained("c7", "c6", 7))
    assert needed(1, *waiting) == {"c4", "c5", "c6", "c7"}
    assert needed(1, *waiting, target(6, "c6", E0, E1)) == {"c4", "c5", "c6", "c7"}


def test_what_was_rejected_or_halted_is_not_needed_unless_training_goes_on_from_it() -> None:
    job = (dispatched("j6", "c5", 6), started("j6"), ready("j6", "c6", "c5"), evaluated("c6"), rejected("c6"))
    assert needed(1, *FIVE, *job) == {"c4", "c5"}
    stopped = (*FIVE, *trained("c6", "c5", 6), target(6, "c6", E0, E1), halted(6))
    assert needed(1, *stopped) == {"c4", "c5", "c6"}, "the trainer has not been restored yet"


def test_after_a_rollback_the_old_content_is_in_the_window_again() -> None:
    asked = (*FIVE, rollback_asked(4, on=5))
    back = (*asked, *rolled_back(6, "c4", len(asked), E0, E1))
    assert needed(1, *back) == {"c4", "c5"}
    assert within_reach(given(*back).world.publications, 1) == {L(5), L(6)}


def test_nothing_that_was_spare_is_ever_needed_again() -> None:
    asked = (*FIVE, rollback_asked(4, on=5))
    steps = (*asked, *rolled_back(6, "c4", len(asked), E0, E1), *trained("c7", "c4", 7), *trained("c8", "c7", 8))
    for keep in (1, 2, 3):
        spare: set[str] = set()
        for length in range(len(SERVING), len(steps) + 1):
            found = retention(given(*steps[:length]).world, keep)
            assert not spare & {each.id for each in found.needed}, length
            spare |= {each.id for each in found.spare}
        assert spare


# -- a rollback


def rollback(to: int, keep: int, *more: Step) -> Event:
    found = given(*FIVE, *more, rollback_asked(to, on=5))
    return fact(reactions.publisher(found.world, Policy(keep=keep), found.now))


def test_a_rollback_within_the_window_is_met_and_one_beyond_it_is_refused_before_anything_is_halted() -> None:
    assert isinstance(rollback(4, 1), TargetPersisted) and isinstance(rollback(0, 0), TargetPersisted)
    for more in ((), (*trained("c6", "c5", 6), target(6, "c6", E0, E1))):
        said = rollback(3, 1, *more)
        assert isinstance(said, PublicationRefused)
        assert (said.reason, said.candidate) == ("not_kept", "c3") and said.request == len(FIVE) + len(more) + 1
        assert "inc:3 is more than artifacts.keep (1) releases back" in said.detail
    assert isinstance(rollback(4, 1, *trained("c6", "c5", 6), target(6, "c6", E0, E1)), PublicationHalted)


# -- in the store


def stored(folder: Path, every: int = 4) -> tuple[ArtifactStore, list[Candidate]]:
    """Six candidates of which one in four is in full, each with an optimizer state."""
    store = ArtifactStore(folder / "artifacts")
    return store, [
        Candidate(
            id=f"c{number}",
            base=f"c{number - 1}",
            step=number,
            weights=saved.weights,
            optimizer=store.put(random.Random(number).randbytes(64)),
            manifest=saved.manifest.digest,
            tensor_bytes=saved.manifest.total,
            seq=number,
            delta=saved.delta,
        )
        for number, saved in enumerate(history(store, 6, every))
    ]


def split(candidates: list[Candidate], *numbers: int) -> Retention:
    kept = tuple(each for number, each in enumerate(candidates) if number in numbers)
    return Retention(kept, tuple(each for each in candidates if each not in kept))


def config(folder: Path, keep: int = 1) -> Config:
    return Config(state_dir=str(folder), artifacts=Artifacts(keep=keep))


def whole(store: ArtifactStore, number: int, candidate: Candidate) -> bool:
    found = read(store, candidate.weights.digest, describe(version(number)))
    assert candidate.optimizer is not None
    return describe(found) == describe(version(number)) and store.has(candidate.optimizer.digest)


def test_a_sweep_leaves_what_the_needed_ones_stand_on_and_nothing_else_of_the_others(tmp_path: Path) -> None:
    """c3 stands on the anchor c0 and the deltas of c1, c2 and c3; c5 on the anchor c4."""
    for kept, anchors in (((3,), {0}), ((5,), {4}), ((2, 4), {0, 4})):
        store, candidates = stored(tmp_path / str(kept))
        sweep(store, config(tmp_path / str(kept)), split(candidates, *kept), set())
        for number, each in enumerate(candidates):
            if number in kept:
                assert whole(store, number, each)
            else:
                assert each.optimizer is not None and not store.has(each.optimizer.digest)
                assert store.has(each.weights.digest) == (number in anchors)
        assert all(store.has(each.manifest) for each in candidates), "manifests stay: a history is judged by them"


def test_a_second_sweep_finds_nothing_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, candidates = stored(tmp_path)
    gone: set[str] = set()
    sweep(store, config(tmp_path), split(candidates, 5), gone)
    assert gone

    def never(digest: str) -> bool:
        raise AssertionError(digest)

    monkeypatch.setattr(store, "remove", never)
    sweep(store, config(tmp_path), split(candidates, 5), gone)


def test_one_sweep_asks_for_so_many_blobs_and_begins_with_what_became_spare_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A boot knows nothing of what earlier ones removed, and its first job does not wait until it has asked for all."""
    store, candidates = stored(tmp_path)
    found, gone, asked = split(candidates, 5), set[str](), list[str]()
    going, remove = removable(store, found), store.remove
    monkeypatch.setattr("reef_bus.sweep.LIMIT", 4)
    monkeypatch.setattr(store, "remove", lambda digest: asked.append(digest) or remove(digest))
    sweep(store, config(tmp_path), found, gone)
    assert len(asked) == 4
    newest = _names(candidates[4]) & going
    assert len(newest) == 2 and set(asked[:2]) == newest and set(asked[2:]) <= _names(candidates[3])
    for _ in range(len(going) // 4 + 1):
        sweep(store, config(tmp_path), found, gone)
    assert set(asked) == going and len(asked) == len(going) and whole(store, 5, candidates[5])


@pytest.mark.parametrize("harm", ["damaged", "gone"])
def test_nothing_is_removed_while_it_is_uncertain_what_is_needed(tmp_path: Path, harm: str) -> None:
    store, candidates = stored(tmp_path)
    path = store.path(candidates[5].weights.digest)
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:-9] + b"x" * 9) if harm == "damaged" else path.unlink()
    with pytest.raises(TransferError):
        removable(store, split(candidates, 5))
    gone: set[str] = set()
    sweep(store, config(tmp_path), split(candidates, 5), gone)
    assert not gone and all(store.has(each.weights.digest) for each in candidates[:5])


async def test_nothing_is_removed_while_a_backup_is_under_way(tmp_path: Path) -> None:
    store, candidates = stored(tmp_path)
    gone: set[str] = set()
    async with nothing_is_removed(config(tmp_path)):
        sweep(store, config(tmp_path), split(candidates, 5), gone)
        assert not gone
        second = asyncio.create_task(_hold(config(tmp_path)))
        await asyncio.sleep(0.05)
        assert not second.done(), "who comes second waits"
    await asyncio.wait_for(second, 5)
    sweep(store, config(tmp_path), split(candidates, 5), gone)
    assert gone


async def _hold(settings: Config) -> None:
    async with nothing_is_removed(settings):
        pass


# -- backups


def backed_up(monkeypatch: pytest.MonkeyPatch, candidates: list[Candidate]) -> tuple[History, frozenset[str]]:
    """A history that names these candidates, of which the last alone is needed; and all that it names."""
    world = World()
    monkeypatch.setattr(backup, "folded", lambda _: world)
    monkeypatch.setattr(backup, "retention", lambda found, keep: split(candidates, 5))
    everything = frozenset().union(*(_names(each) for each in candidates))
    monkeypatch.setattr(backup, "named", lambda _: set(everything))
    monkeypatch.setattr(backup, "_archives", lambda *_: set())
    monkeypatch.setattr(backup, "_weights", lambda _: {each.weights.digest for each in candidates})
    return History((), (), {}), everything


def test_a_backup_does_without_what_was_removed_and_without_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, candidates = stored(tmp_path)
    empty, everything = backed_up(monkeypatch, candidates)
    sweep(store, config(tmp_path), split(candidates, 5), set())
    kept = set(backup._to_keep(empty, config(tmp_path), store))
    assert kept >= _names(candidates[5]) and all(store.has(digest) for digest in kept)
    assert set(backup._to_keep(empty, config(tmp_path, keep=0), store)) >= everything, "it would be missed"
    anchor = candidates[4].weights.digest
    store.path(anchor).unlink()
    assert anchor in backup._to_keep(empty, config(tmp_path), store), "a needed one stands on it: it is missed"


def test_a_backup_takes_what_a_sweep_has_left_wherever_that_was_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of c3, say, the chain is still there, and the delta under it is not."""
    store, candidates = stored(tmp_path)
    empty, _ = backed_up(monkeypatch, candidates)
    going = removable(store, split(candidates, 5))
    assert len(going) >= 10
    for digest in going:
        data = store.get(digest)
        store.remove(digest)
        assert {each for each in backup._to_keep(empty, config(tmp_path), store) if not store.has(each)} == set()
        store.put(data)
    anchor = candidates[4].weights.digest
    store.remove(anchor)
    assert anchor in backup._to_keep(empty, config(tmp_path), store), "a needed one stands on it: it is missed"


def _names(candidate: Candidate) -> frozenset[str]:
    blobs: list[Blob | None] = [candidate.weights, candidate.optimizer, candidate.delta]
    return frozenset(each.digest for each in blobs if each) | {candidate.manifest}


# -- the configuration


def test_nothing_is_removed_unless_asked_for() -> None:
    assert Config().artifacts.keep == 0 and Config().policy().keep == 0
    assert build("here", {"artifacts": {"keep": 3}}).policy().keep == 3


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ({"artifacts": {"keep": -1}}, "artifacts.keep is -1: expected 0 .everything. or a number of releases"),
        ({"artifacts": {"keep": 2}, "training": {"backend": "attached"}}, "handed in is never removed"),
    ],
)
def test_a_window_that_cannot_be_is_refused(text: dict[str, Any], says: str) -> None:
    with pytest.raises(Rejected, match=says):
        build("here", text)
