"""Versions of several ranks: differences name rank and tensor; a rank reads and verifies its own bytes only."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from reef_bus.artifacts import ArtifactStore, save_weights
from reef_bus.backends import Piece
from reef_bus.errors import ContractError, Rejected, TransferError
from reef_bus.manifest import describe
from reef_bus.ranks import (
    Ranks,
    describe_ranks,
    keep_ranks,
    load_rank,
    rank_differences,
    rank_manifest,
    ranked,
    save_ranks,
    verify_rank,
)

Shard = dict[str, Piece]


def piece(data: bytes) -> Piece:
    return Piece("U8", (len(data),), memoryview(bytearray(data)))


def three() -> list[Shard]:
    """Each rank's half of "w", and "norm", which all have alike."""
    return [{"w": piece(bytes([n]) * 4), "norm": piece(b"norm")} for n in range(1, 4)]


def differing(found: list[Shard]) -> list[str]:
    manifests = {rank: describe(shard) for rank, shard in enumerate(found)}
    return rank_differences(describe_ranks(three())[1], manifests)


def test_the_digest_is_the_sha256_of_the_digests_of_all_ranks_in_order() -> None:
    ranks, manifests = describe_ranks(three())
    spelled = {
        "format": "reef-ranks.v1",
        "ranks": [{"manifest": describe(shard).digest, "total": 8} for shard in three()],
        "total": 24,
    }
    assert ranks.digest == hashlib.sha256(json.dumps(spelled, separators=(",", ":")).encode()).hexdigest()
    assert ranked(manifests) == ranks == Ranks.decode(ranks.encode())
    assert list(manifests) == [describe(shard) for shard in three()]


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (three(), []),
        (three()[:2], ["rank 2 is missing: found 2 ranks, expected 3"]),
        ([*three(), three()[0]], ["rank 3 is unexpected: the version has 3 ranks"]),
        ([three()[1], three()[0], three()[2]], ["ranks 0 and 1 are swapped", "ranks 1 and 0 are swapped"]),
        ([three()[0], three()[0], three()[2]], ["rank 1 holds what is rank 0's"]),
        ([three()[0], {"w": three()[1]["w"]}, three()[2]], ["rank 1: tensor 'norm' is missing"]),
    ],
)
def test_each_kind_of_difference_names_its_rank(found: list[Shard], says: list[str]) -> None:
    assert differing(found) == says


def test_a_tensor_of_another_rank_is_told_as_that() -> None:
    found = three()
    found[0]["w"], found[0]["extra"] = found[2]["w"], piece(b"beef")
    first, second, third = differing(found)
    assert first == "rank 0: tensor 'extra' is unexpected: the manifest does not name it"
    assert second.startswith("rank 0: tensor 'w': bytes differ, found xxh3 ")
    assert third == "rank 0: tensor 'w' holds the bytes of rank 2's 'w'"


def test_a_rank_whose_tensors_cannot_be_described_is_named() -> None:
    with pytest.raises(Rejected, match="no ranks were given"):
        describe_ranks([])
    with pytest.raises(Rejected, match="rank 1: no tensors were given"):
        describe_ranks([three()[0], {}])
    nan = Piece("F32", (1,), memoryview(b"\0\0\xc0\x7f"))
    with pytest.raises(Rejected, match="rank 1: tensor 'w' holds an infinity or a NaN"):
        describe_ranks([three()[0], {"w": nan}], check_finite=True)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: data + b" ",
        lambda data: data[:-1],
        lambda data: b"[" * 100_000,
        lambda data: data.replace(b'"total":24', b'"total":23'),
        lambda data: data.replace(b"reef-ranks.v1", b"reef-ranks.v2"),
        lambda data: data.replace(b'"manifest":"', b'"manifest":"Z'),
        lambda data: b'{"format":"reef-ranks.v1","ranks":[],"total":0}',
    ],
)
def test_anything_but_the_canonical_spelling_is_a_contract_error(spoil: object) -> None:
    assert callable(spoil)
    with pytest.raises(ContractError):
        Ranks.decode(spoil(describe_ranks(three())[0].encode()))


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(tmp_path)


def empty() -> Shard:
    return {"w": piece(bytes(4)), "norm": piece(bytes(4))}


def test_every_rank_comes_back_as_it_was_saved(store: ArtifactStore) -> None:
    ranks, blobs = save_ranks(store, three())
    for rank, shard in enumerate(three()):
        target = empty()
        assert load_rank(store, ranks.digest, rank, blobs[rank].digest, target) == 8
        assert target == shard and verify_rank(store, ranks.digest, rank, target) == describe(shard)


def test_a_rank_reads_nothing_of_another_one(store: ArtifactStore) -> None:
    """What the others are made of is not even there."""
    ranks, blobs = save_ranks(store, three())
    for other in (0, 2):
        store.path(blobs[other].digest).unlink()
        store.path(ranks.ranks[other].manifest).unlink()
    target = empty()
    assert load_rank(store, ranks.digest, 1, blobs[1].digest, target) == 8 and target == three()[1]


def test_another_ranks_weights_are_refused_before_a_byte_changes(store: ArtifactStore) -> None:
    ranks, blobs = save_ranks(store, three())
    target = empty()
    with pytest.raises(TransferError, match=r"^mismatch: rank 1: .*tensor 'w': bytes differ"):
        load_rank(store, ranks.digest, 1, blobs[2].digest, target)
    assert target == empty()
    with pytest.raises(TransferError, match=r"^mismatch: rank 1: tensor 'w': bytes differ"):
        verify_rank(store, ranks.digest, 1, three()[2])
    with pytest.raises(Rejected, match="there is no rank 3: the version has ranks 0 to 2"):
        rank_manifest(store, ranks.digest, 3)


def test_ranks_that_save_apart_are_one_version_when_all_have(store: ArtifactStore) -> None:
    manifests = [save_weights(store, shard)[1] for shard in three()[:2]] + [describe(three()[2])]
    with pytest.raises(ContractError, match=r"the manifest of rank 2, .* is not in the store"):
        keep_ranks(store, manifests)
    assert not store.has(ranked(manifests).digest)
    save_weights(store, three()[2])
    assert keep_ranks(store, manifests) == describe_ranks(three())[0] and store.has(ranked(manifests).digest)
