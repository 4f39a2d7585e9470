"""Whatever changes in any rank changes the version's digest, and the difference names the rank."""

from __future__ import annotations

from hypothesis import assume, given
from hypothesis import strategies as st

from reef_bus.backends import Piece
from reef_bus.ranks import Ranks, describe_ranks, rank_differences
from tests.property.test_manifest_properties import BRIEFLY, VERSIONS

Shards = list[dict[str, Piece]]
SHARDS = st.lists(VERSIONS, min_size=1, max_size=4)


def told(before: Shards, after: Shards, rank: int) -> None:
    """Both digests differ, in both directions, and a sentence names the rank."""
    (want, wanted), (have, had) = describe_ranks(before), describe_ranks(after)
    assert want.digest != have.digest
    for expected, found in ((wanted, had), (had, wanted)):
        said = rank_differences(expected, dict(enumerate(found)))
        assert any(f"rank {rank}" in text or f"ranks {rank} and" in text for text in said)


def chosen(shards: Shards, data: st.DataObject) -> tuple[int, str]:
    rank = data.draw(st.integers(0, len(shards) - 1))
    return rank, data.draw(st.sampled_from(sorted(shards[rank])))


def changed(shards: Shards, rank: int, shard: dict[str, Piece]) -> Shards:
    return [*shards[:rank], shard, *shards[rank + 1 :]]


@BRIEFLY
@given(SHARDS)
def test_decode_returns_what_encode_was_given_and_nothing_differs_from_itself(shards: Shards) -> None:
    ranks, manifests = describe_ranks(shards)
    assert Ranks.decode(ranks.encode()) == ranks
    assert rank_differences(manifests, dict(enumerate(manifests))) == []
    assert ranks.total == sum(piece.data.nbytes for shard in shards for piece in shard.values())


@BRIEFLY
@given(SHARDS, st.data())
def test_any_flipped_bit_is_told(shards: Shards, data: st.DataObject) -> None:
    rank, name = chosen(shards, data)
    piece = shards[rank][name]
    assume(piece.data.nbytes)
    flipped = bytearray(piece.data)
    flipped[data.draw(st.integers(0, len(flipped) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    told(shards, changed(shards, rank, {**shards[rank], name: piece._replace(data=memoryview(flipped))}), rank)


@BRIEFLY
@given(SHARDS, st.data())
def test_any_swapped_pair_of_ranks_is_told(shards: Shards, data: st.DataObject) -> None:
    assume(len(shards) > 1)
    one, two = data.draw(st.lists(st.integers(0, len(shards) - 1), min_size=2, max_size=2, unique=True))
    assume(shards[one] != shards[two])
    told(shards, changed(changed(shards, one, shards[two]), two, shards[one]), one)


@BRIEFLY
@given(SHARDS, st.data())
def test_any_pair_of_tensors_swapped_between_ranks_is_told(shards: Shards, data: st.DataObject) -> None:
    (one, name), (two, other) = chosen(shards, data), chosen(shards, data)
    assume(one != two and shards[one][name] != shards[two][other])
    first, second = {**shards[one], name: shards[two][other]}, {**shards[two], other: shards[one][name]}
    told(shards, changed(changed(shards, one, first), two, second), one)


@BRIEFLY
@given(SHARDS, st.data())
def test_any_missing_tensor_is_told(shards: Shards, data: st.DataObject) -> None:
    rank, name = chosen(shards, data)
    assume(len(shards[rank]) > 1)
    told(shards, changed(shards, rank, {n: p for n, p in shards[rank].items() if n != name}), rank)


@BRIEFLY
@given(SHARDS, st.data())
def test_any_missing_rank_is_told(shards: Shards, data: st.DataObject) -> None:
    """Those after it move up; what is named is the number that nobody has."""
    assume(len(shards) > 1)
    rank = data.draw(st.integers(0, len(shards) - 1))
    told(shards, shards[:rank] + shards[rank + 1 :], len(shards) - 1)
