"""Versions in the store as anchors and deltas: what is read is exact, and whatever is damaged is told by its name.

Knows: a real store on a folder. Must not know: the log, engines.
"""

from __future__ import annotations

import errno
import logging
import random
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from reef_bus.artifacts import ArtifactStore, save_weights
from reef_bus.audit import History
from reef_bus.backends import Piece
from reef_bus.backup import _links
from reef_bus.errors import ContractError, TransferError, Unavailable
from reef_bus.manifest import describe
from reef_bus.stored import Base, Saved, as_file, chain_at, load, longer, read, save
from tests.facts import SERVING, dispatched, ready, started
from tests.spec import given

Version = dict[str, Piece]
VALUES = 4000


def version(number: int) -> Version:
    """Numbers without a pattern, of which each version changes one in fifty."""
    chance = random.Random(1)
    words = [chance.getrandbits(16) for _ in range(VALUES)]
    for later in range(1, number + 1):
        for at in range(later % 50, VALUES, 50):
            words[at] = (words[at] + later) % 65536
    data = struct.pack(f"<{VALUES}H", *words)
    return {"w": Piece("BF16", (VALUES,), memoryview(data)), "b": Piece("F32", (1,), memoryview(b"same"))}


def empty() -> Version:
    return {name: piece._replace(data=memoryview(bytearray(piece.data.nbytes))) for name, piece in version(0).items()}


def history(store: ArtifactStore, versions: int, every: int) -> list[Saved]:
    """Version 0 in full, then each told from the one before."""
    kept = [Saved(*save_weights(store, version(0)))]
    for number in range(1, versions):
        base = Base(kept[-1].weights, kept[-1].manifest, version(number - 1))
        kept.append(save(store, version(number), base, every))
    return kept


def links(store: ArtifactStore, saved: Saved) -> int:
    chain = chain_at(store, saved.weights.digest)
    return len(chain.links) if chain else 0


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(tmp_path / "store")


def test_every_version_is_read_exactly_and_every_nth_is_in_full(store: ArtifactStore) -> None:
    kept = history(store, 8, every=3)
    assert [links(store, saved) for saved in kept] == [0, 1, 2, 0, 1, 2, 0, 1]
    for number, saved in enumerate(kept):
        into = empty()
        nbytes = load(store, saved.weights.digest, into, saved.manifest)
        assert describe(into) == saved.manifest == describe(version(number))
        if steps := links(store, saved):
            deltas = [each.delta.size for each in kept[number - steps + 1 : number + 1] if each.delta]
            assert nbytes == kept[number - steps].weights.size + sum(deltas)


def test_a_delta_leads_to_anchors_too_for_those_who_hold_the_version_before(store: ArtifactStore) -> None:
    kept = history(store, 4, every=3)
    assert kept[0].delta is None and all(saved.delta and saved.delta.size < 1000 for saved in kept[1:])
    assert all(saved.delta and store.has(saved.delta.digest) for saved in kept[1:])


def test_one_in_one_is_always_in_full(store: ArtifactStore) -> None:
    assert [links(store, saved) for saved in history(store, 4, every=1)] == [0, 0, 0, 0]


def test_a_smaller_number_of_deltas_applies_to_chains_that_are_longer_already(store: ArtifactStore) -> None:
    kept = history(store, 5, every=5)
    base = Base(kept[-1].weights, kept[-1].manifest, version(4))
    assert links(store, kept[-1]) == 4 and links(store, save(store, version(5), base, 3)) == 0


def test_versions_that_have_nothing_in_common_are_in_full_and_have_no_delta(store: ArtifactStore) -> None:
    first = Saved(*save_weights(store, version(0)))
    noise = version(0)
    noise["w"] = noise["w"]._replace(data=memoryview(random.Random(9).randbytes(2 * VALUES)))
    saved = save(store, noise, Base(first.weights, first.manifest, version(0)), 5)
    assert saved.delta is None and links(store, saved) == 0
    assert describe(read(store, saved.weights.digest, saved.manifest)) == describe(noise)


def test_other_tensors_than_the_base_has_are_kept_in_full(store: ArtifactStore) -> None:
    first = Saved(*save_weights(store, version(0)))
    other = {**version(1), "more": Piece("U8", (1,), memoryview(b"x"))}
    saved = save(store, other, Base(first.weights, first.manifest, version(0)), 5)
    assert saved.delta is None and describe(read(store, saved.weights.digest, saved.manifest)) == describe(other)


def test_without_a_base_it_is_kept_in_full(store: ArtifactStore) -> None:
    saved = save(store, version(1), None, 5)
    assert saved.delta is None and links(store, saved) == 0 and store.has(saved.manifest.digest)


def test_a_base_that_is_not_what_it_is_said_to_be_is_noticed_before_anything_is_said(
    store: ArtifactStore, caplog: pytest.LogCaptureFixture
) -> None:
    """In memory lies version 3, and in the store, under that name, version 2: a delta between them leads nowhere."""
    kept = history(store, 3, every=5)
    with caplog.at_level(logging.WARNING):
        saved = save(store, version(4), Base(kept[2].weights, kept[2].manifest, version(3)), 5)
    assert saved.delta is None and links(store, saved) == 0 and "only its full bytes" in caplog.text
    assert describe(read(store, saved.weights.digest, saved.manifest)) == describe(version(4))


# -- damage


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)


def missing(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("harm", [damage, missing])
@pytest.mark.parametrize("part", ["anchor", "first delta", "last delta", "manifest between", "chain"])
def test_what_is_damaged_or_missing_is_named_and_nothing_is_written(
    store: ArtifactStore, part: str, harm: Callable[[Path], None]
) -> None:
    kept = history(store, 4, every=5)
    last = kept[-1]
    chain = chain_at(store, last.weights.digest)
    assert chain is not None and len(chain.links) == 3
    digest = {
        "anchor": chain.anchor.digest,
        "first delta": chain.links[0].delta.digest,
        "last delta": chain.links[-1].delta.digest,
        "manifest between": chain.links[1].manifest,
        "chain": last.weights.digest,
    }[part]
    harm(store.path(digest))
    into = empty()
    with pytest.raises(TransferError) as caught:
        load(store, last.weights.digest, into, last.manifest)
    assert str(store.path(digest)) in str(caught.value)
    assert caught.value.cause == ("refused" if harm is missing else "mismatch")
    assert describe(into) == describe(empty())


def test_a_damaged_tensor_of_the_anchor_is_named(store: ArtifactStore) -> None:
    kept = history(store, 3, every=5)
    damage(store.path(kept[0].weights.digest))
    with pytest.raises(TransferError, match="tensor 'w': bytes differ"):
        read(store, kept[2].weights.digest, kept[2].manifest)


def test_a_new_version_does_not_stand_on_a_chain_that_is_damaged(store: ArtifactStore) -> None:
    kept = history(store, 3, every=5)
    damage(store.path(kept[1].delta.digest if kept[1].delta else ""))
    assert longer(store, version(3), describe(version(3)), Base(kept[2].weights, kept[2].manifest, version(2))) is None


def test_a_chain_that_leads_elsewhere_is_refused(store: ArtifactStore) -> None:
    kept = history(store, 3, every=5)
    with pytest.raises(TransferError, match=f"the chain leads to {kept[2].manifest.digest}, expected"):
        read(store, kept[2].weights.digest, kept[1].manifest)


# -- for those who need a file, and for backups


def test_a_chain_as_a_file_is_the_file_that_would_have_been_kept_and_is_gone_afterwards(
    store: ArtifactStore, tmp_path: Path
) -> None:
    kept, scratch = history(store, 3, every=5), tmp_path / "scratch"
    scratch.mkdir()
    full, manifest = save_weights(ArtifactStore(tmp_path / "other"), version(2))
    with as_file(store, kept[2].weights.digest, manifest.digest, scratch) as path:
        assert path.read_bytes() == ArtifactStore(tmp_path / "other").path(full.digest).read_bytes()
    assert list(scratch.iterdir()) == []


def test_what_is_kept_in_full_is_its_own_file(store: ArtifactStore, tmp_path: Path) -> None:
    kept = history(store, 1, every=5)
    with as_file(store, kept[0].weights.digest, kept[0].manifest.digest, tmp_path) as path:
        assert path == store.path(kept[0].weights.digest)


def test_a_backup_takes_what_a_chain_stands_on(store: ArtifactStore, tmp_path: Path) -> None:
    last, other = history(store, 4, every=5)[-1], ArtifactStore(tmp_path / "backup")
    log = given(*SERVING, dispatched("j"), started("j"), replace(ready("j", "c"), weights=last.weights)).scribe.log
    taken = _links(History(tuple(log), (), {}), frozenset(), store)
    for digest in taken | {last.weights.digest}:
        other.keep(digest, store.path(digest))
    assert describe(read(other, last.weights.digest, last.manifest)) == describe(version(3))
    damage(store.path(last.weights.digest))
    with pytest.raises(ContractError, match=f"{last.weights.digest} is damaged"):
        _links(History(tuple(log), (), {}), frozenset(), store)


def test_a_store_that_gives_no_answer_leaves_open_whether_it_is_a_chain(
    store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who took it for no chain would remove what it stands on."""
    last = history(store, 2, every=5)[-1]

    def failing(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("builtins.open", failing)
    with pytest.raises(Unavailable, match=r"cannot read .*Input/output error"):
        chain_at(store, last.weights.digest)
