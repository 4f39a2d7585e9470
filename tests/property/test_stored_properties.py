"""However versions follow each other, what the store keeps of them gives each one exactly, and from few blobs.

`tests.chains` says, of releases in order, what is kept and what a reader has to read: `stored` is held against it.
"""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reef_bus.artifacts import ArtifactStore, save_weights
from reef_bus.backends import Piece
from reef_bus.errors import TransferError
from reef_bus.manifest import describe
from reef_bus.stored import Base, Chain, Saved, chain_at, load, read, save
from tests.chains import Reader, Release, anchors, publishes, route

Version = dict[str, Piece]
SIZE = 600
BRIEFLY = settings(max_examples=30, deadline=None)  # a shared machine stalls now and then; that is no finding


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    """A thousand stores that nobody needs after a power cut."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


@st.composite
def histories(draw: st.DrawFn) -> list[Version]:
    """Each version changes a few bytes of the one before, all of them, or none: then its digest comes back."""
    data, found = bytearray(draw(st.binary(min_size=SIZE, max_size=SIZE))), list[Version]()
    for _ in range(draw(st.integers(2, 6))):
        found.append({"a": Piece("U8", (SIZE // 2,), memoryview(bytes(data[: SIZE // 2])))})
        found[-1]["b"] = Piece("BF16", (SIZE // 4,), memoryview(bytes(data[SIZE // 2 :])))
        if draw(st.booleans()):
            data = bytearray(draw(st.binary(min_size=SIZE, max_size=SIZE)))
        for at in draw(st.sets(st.integers(0, SIZE - 1), max_size=5)):
            data[at] ^= 0xFF
    return found


def kept(store: ArtifactStore, versions: list[Version], every: int) -> list[Saved]:
    found = [Saved(*save_weights(store, versions[0]))]
    for before, version in itertools.pairwise(versions):
        found.append(save(store, version, Base(found[-1].weights, found[-1].manifest, before), every))
    return found


def chain_of(store: ArtifactStore, saved: Saved) -> Chain:
    return chain_at(store, saved.weights.digest) or Chain(saved.weights, saved.manifest.digest)


@BRIEFLY
@given(histories(), st.integers(1, 4))
def test_what_is_kept_of_a_history_gives_each_version_and_is_what_the_rule_of_chains_says(
    versions: list[Version], every: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = ArtifactStore(Path(folder))
        found = kept(store, versions, every)
        chains = [chain_of(store, saved) for saved in found]
        for version, saved in zip(versions, found, strict=True):
            assert describe(read(store, saved.weights.digest, saved.manifest)) == describe(version)
    releases = [Release(s.manifest.digest, s.manifest.total, s.delta.size if s.delta else None) for s in found]
    assert {number for number, chain in enumerate(chains) if not chain.links} == anchors(releases, every)
    for number, chain in enumerate(chains):
        reading = route(releases, publishes(releases, every), every, Reader(number))
        assert reading is not None
        assert chain.nbytes - chain.anchor.size + SIZE >= reading.nbytes, "the rule finds a way at least as short"
        assert len(chain.links) < every


@BRIEFLY
@given(histories(), st.data())
def test_whatever_bit_of_a_chain_flips_nothing_but_the_version_is_ever_given(
    versions: list[Version], data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = ArtifactStore(Path(folder))
        last = kept(store, versions, 5)[-1]
        path = store.path(data.draw(st.sampled_from(sorted(chain_of(store, last).blobs | {last.weights.digest}))))
        spoiled = bytearray(path.read_bytes())
        spoiled[data.draw(st.integers(0, len(spoiled) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        path.chmod(0o644)
        path.write_bytes(spoiled)
        into = {name: piece._replace(data=memoryview(bytearray(SIZE // 2))) for name, piece in versions[0].items()}
        before = describe(into)
        chained = chain_of(store, last).links if path.name != last.weights.digest else True
        if chained or path.name == last.weights.digest:
            with pytest.raises(TransferError):
                load(store, last.weights.digest, into, last.manifest)
            assert describe(into) == before
        else:  # in full: its own manifest's blob is not read
            load(store, last.weights.digest, into, last.manifest)
            assert describe(into) == last.manifest
