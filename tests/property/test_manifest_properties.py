"""Whatever changes in a version changes its digest, and the difference is told by the tensor's name."""

from __future__ import annotations

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from reef_bus.backends import Piece
from reef_bus.manifest import ITEM_BYTES, RESERVED_NAME, Manifest, describe, differences

NAMES = st.text(min_size=1, max_size=12).filter(lambda name: name != RESERVED_NAME)


@st.composite
def tensors(draw: st.DrawFn) -> Piece:
    dtype = draw(st.sampled_from(sorted(ITEM_BYTES)))
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
    size = ITEM_BYTES[dtype]
    for side in shape:
        size *= side
    return Piece(dtype, shape, memoryview(draw(st.binary(min_size=size, max_size=size))))


BRIEFLY = settings(max_examples=60, deadline=None)  # a shared machine stalls now and then; that is no finding
VERSIONS = st.dictionaries(NAMES, tensors(), min_size=1, max_size=5)


def told(before: dict[str, Piece], after: dict[str, Piece], name: str) -> None:
    """Both digests differ, in both directions, and a sentence names the tensor."""
    want, have = describe(before), describe(after)
    assert want.digest != have.digest
    assert any(repr(name) in sentence for sentence in differences(want, have))
    assert any(repr(name) in sentence for sentence in differences(have, want))


@BRIEFLY
@given(VERSIONS)
def test_decode_returns_what_encode_was_given(version: dict[str, Piece]) -> None:
    manifest = describe(version)
    assert Manifest.decode(manifest.encode()) == manifest
    assert manifest.total == sum(piece.data.nbytes for piece in version.values())
    assert differences(manifest, describe(dict(reversed(version.items())))) == []


@BRIEFLY
@given(VERSIONS, st.data())
def test_any_flipped_bit_is_told(version: dict[str, Piece], data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(version)))
    piece = version[name]
    assume(piece.data.nbytes)
    flipped = bytearray(piece.data)
    flipped[data.draw(st.integers(0, len(flipped) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    told(version, {**version, name: piece._replace(data=memoryview(flipped))}, name)


@BRIEFLY
@given(VERSIONS, st.data())
def test_any_swapped_pair_is_told(version: dict[str, Piece], data: st.DataObject) -> None:
    assume(len(version) > 1)
    one, two = data.draw(st.lists(st.sampled_from(sorted(version)), min_size=2, max_size=2, unique=True))
    assume(version[one] != version[two])
    told(version, {**version, one: version[two], two: version[one]}, one)


@BRIEFLY
@given(VERSIONS, st.data())
def test_any_missing_tensor_is_told(version: dict[str, Piece], data: st.DataObject) -> None:
    assume(len(version) > 1)
    name = data.draw(st.sampled_from(sorted(version)))
    told(version, {other: piece for other, piece in version.items() if other != name}, name)


@BRIEFLY
@given(VERSIONS, NAMES, st.data())
def test_any_renamed_tensor_is_told(version: dict[str, Piece], other: str, data: st.DataObject) -> None:
    assume(other not in version)
    name = data.draw(st.sampled_from(sorted(version)))
    told(version, {(other if key == name else key): piece for key, piece in version.items()}, name)


@BRIEFLY
@given(VERSIONS, st.data())
def test_any_other_dtype_of_the_same_bytes_is_told(version: dict[str, Piece], data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(version)))
    piece = version[name]
    size = ITEM_BYTES[piece.dtype]
    others = [dtype for dtype in sorted(ITEM_BYTES) if ITEM_BYTES[dtype] == size and dtype != piece.dtype]
    told(version, {**version, name: piece._replace(dtype=data.draw(st.sampled_from(others)))}, name)
