"""Whatever two versions hold, a delta gives the second one exactly, from the first one only, and never in part.

Knows: bytes of every dtype, bit patterns that floats find special. Must not know: how a bucket is packed.
"""

from __future__ import annotations

import contextlib
import struct
from typing import NamedTuple

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from reef_bus.backends import Piece
from reef_bus.delta import apply, encode, rebuild
from reef_bus.delta.buckets import zstd
from reef_bus.delta.frames import Form, Header, Record, write_header, write_record
from reef_bus.errors import DeltaError
from reef_bus.manifest import ITEM_BYTES, RESERVED_NAME, describe

BRIEFLY = settings(max_examples=80, deadline=None)  # a shared machine stalls now and then; that is no finding
NAMES = st.text(min_size=1, max_size=8).filter(lambda name: name != RESERVED_NAME)
BUCKETS = st.sampled_from([8, 16, 24, 64, 1 << 12])

# Bit patterns by width: zero, -0.0, infinities, NaNs quiet and signalling with payloads, the ends of integers, 1.0.
SPECIAL = {
    1: [0x00, 0x80, 0x7F, 0xFF, 0x7C, 0x01, 0x38],
    2: [0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFFF, 0x7E00, 0x7D55, 0x3F80, 0x3C00],
    4: [0, 0x80000000, 0x7F800000, 0x7FC00000, 0x7F800001, 0xFFABCDEF, 0xFFFFFFFF, 0x3F800000],
    8: [0, 1 << 63, 0x7FF0000000000000, 0x7FF8000000000001, 0xFFF0DEADBEEFCAFE, (1 << 64) - 1, 0x3FF0000000000000],
}
CODES = {1: "B", 2: "H", 4: "I", 8: "Q"}


class Pair(NamedTuple):
    """Two versions of the same layout."""

    base: dict[str, Piece]
    new: dict[str, Piece]


def numbers(width: int) -> st.SearchStrategy[int]:
    return st.sampled_from(SPECIAL[width]) | st.integers(0, 256**width - 1)


def piece(dtype: str, patterns: list[int]) -> Piece:
    data = struct.pack(f"<{len(patterns)}{CODES[ITEM_BYTES[dtype]]}", *patterns)
    return Piece(dtype, (len(patterns),), memoryview(data))


@st.composite
def later(draw: st.DrawFn, old: list[int], width: int) -> list[int]:
    """What a version makes of these values: the same, a few others, small steps, or all anew."""
    kind = draw(st.sampled_from(["same", "few", "steps", "all"]))
    if kind == "same" or not old:
        return old
    if kind == "all":
        return draw(st.lists(numbers(width), min_size=len(old), max_size=len(old)))
    count = len(old) if kind == "steps" else min(3, len(old))
    touched = draw(st.sets(st.integers(0, len(old) - 1), max_size=count))
    change = st.integers(-2, 2) if kind == "steps" else numbers(width)
    return [(n + draw(change)) % 256**width if at in touched else n for at, n in enumerate(old)]


@st.composite
def pairs(draw: st.DrawFn) -> Pair:
    pair = Pair({}, {})
    for name in draw(st.lists(NAMES, min_size=1, max_size=5, unique=True)):
        dtype = draw(st.sampled_from(sorted(ITEM_BYTES)))
        width = ITEM_BYTES[dtype]
        old = draw(st.lists(numbers(width), max_size=40))
        pair.base[name], pair.new[name] = piece(dtype, old), piece(dtype, draw(later(old, width)))
    return pair


def delta_of(pair: Pair, bucket_bytes: int) -> bytes:
    return b"".join(encode(pair.base, describe(pair.base), pair.new, describe(pair.new), bucket_bytes=bucket_bytes))


def room(like: dict[str, Piece], filler: bytes) -> dict[str, Piece]:
    return {name: p._replace(data=memoryview(bytearray(filler * p.data.nbytes))) for name, p in like.items()}


def contents(pieces: dict[str, Piece]) -> dict[str, bytes]:
    return {name: bytes(p.data) for name, p in pieces.items()}


@BRIEFLY
@given(pairs(), BUCKETS, st.sampled_from([b"\0", b"\xff", b"\x5a"]))
def test_what_is_rebuilt_is_the_new_version_and_the_base_is_as_it_was(pair: Pair, size: int, filler: bytes) -> None:
    base = {name: p._replace(data=memoryview(bytearray(p.data))) for name, p in pair.base.items()}
    staging = room(pair.new, filler)
    rebuild(delta_of(pair, size), base, describe(pair.base), staging, describe(pair.new))
    assert contents(staging) == contents(pair.new)
    assert contents(base) == contents(pair.base)


@BRIEFLY
@given(pairs(), BUCKETS)
def test_a_delta_is_never_larger_than_the_bytes_and_their_heads(pair: Pair, size: int) -> None:
    total = sum(p.data.nbytes for p in pair.new.values())
    widths = len({ITEM_BYTES[p.dtype] for p in pair.new.values()})
    assert len(delta_of(pair, size)) <= total + 400 + 34 * (total // size + widths)


@BRIEFLY
@given(pairs(), BUCKETS)
def test_the_same_two_versions_give_the_same_delta(pair: Pair, size: int) -> None:
    assert delta_of(pair, size) == delta_of(Pair(dict(reversed(pair.base.items())), pair.new), size)


@BRIEFLY
@given(pairs(), BUCKETS, st.data())
def test_any_flipped_bit_is_caught_before_a_byte_is_written(pair: Pair, size: int, data: st.DataObject) -> None:
    flipped = bytearray(delta_of(pair, size))
    flipped[data.draw(st.integers(0, len(flipped) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    staging = room(pair.new, b"\x5a")
    with pytest.raises(DeltaError):
        apply(bytes(flipped), pair.base, describe(pair.base), staging, describe(pair.new))
    assert contents(staging) == contents(room(pair.new, b"\x5a"))


@BRIEFLY
@given(pairs(), BUCKETS, st.data())
def test_any_cut_or_addition_is_caught(pair: Pair, size: int, data: st.DataObject) -> None:
    delta = delta_of(pair, size)
    cut = delta[: data.draw(st.integers(0, len(delta) - 1))]
    longer = delta + data.draw(st.binary(min_size=1, max_size=40))
    for flaw, other in (("truncated", cut), ("trailing", longer)):
        with pytest.raises(DeltaError) as caught:
            apply(other, pair.base, describe(pair.base), room(pair.new, b"\x5a"), describe(pair.new))
        assert caught.value.flaw == flaw


@BRIEFLY
@given(pairs(), BUCKETS, st.data())
def test_any_other_base_is_refused_before_a_byte_is_written(pair: Pair, size: int, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(pair.base)))
    width = ITEM_BYTES[pair.base[name].dtype]
    count = pair.base[name].shape[0]
    other = piece(pair.base[name].dtype, data.draw(st.lists(numbers(width), min_size=count, max_size=count)))
    assume(bytes(other.data) != bytes(pair.base[name].data))
    wrong = {**pair.base, name: other}
    staging = room(pair.new, b"\x5a")
    with pytest.raises(DeltaError) as caught:
        apply(delta_of(pair, size), wrong, describe(wrong), staging, describe(pair.new))
    assert caught.value.flaw == "base"
    assert contents(staging) == contents(room(pair.new, b"\x5a"))


@BRIEFLY
@given(pairs(), BUCKETS, st.data())
def test_a_base_that_is_not_what_it_is_said_to_be_is_caught_by_the_result(
    pair: Pair, size: int, data: st.DataObject
) -> None:
    """Unless what differs does not matter: then the result is right, whatever it was made from."""
    name = data.draw(st.sampled_from(sorted(pair.base)))
    lying = bytearray(pair.base[name].data)
    assume(lying)
    lying[data.draw(st.integers(0, len(lying) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    base = {**pair.base, name: pair.base[name]._replace(data=memoryview(lying))}
    staging = room(pair.new, b"\x5a")
    try:
        rebuild(delta_of(pair, size), base, describe(pair.base), staging, describe(pair.new))
    except DeltaError as error:
        assert error.flaw == "result"
        assert contents(staging) != contents(pair.new)
    else:
        assert contents(staging) == contents(pair.new)


@BRIEFLY
@given(st.lists(st.binary(max_size=30), min_size=1, max_size=6), st.data())
def test_bytes_that_are_no_delta_raise_nothing_else(parts: list[bytes], data: st.DataObject) -> None:
    """Also when they begin like one."""
    held = {"w": Piece("U8", (4,), memoryview(b"1234"))}
    delta = b"".join(encode(held, describe(held), held, describe(held)))
    junk = delta[: data.draw(st.integers(0, len(delta) - 1))] + b"\xff".join(parts) + b"\xff"
    with pytest.raises(DeltaError):
        apply(junk, held, describe(held), room(held, b"\0"), describe(held))


@st.composite
def records(draw: st.DrawFn) -> Record:
    """Whole ones, whatever they say; about half of the frames are of a size that a bucket of 8 bytes might have."""
    payload = draw(st.binary(max_size=24))
    if draw(st.booleans()):
        payload = zstd.compress(draw(st.binary(max_size=10)))
    form = draw(st.sampled_from(Form))
    return Record(form, payload, draw(st.integers(0, 5)), draw(st.integers(0, 5)))


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(["U8", "BF16", "F32", "F64"]), records())
def test_whatever_a_whole_record_says_it_is_applied_or_refused(dtype: str, record: Record) -> None:
    around = bytearray(b"\x5a" * 24)
    held = {"w": Piece(dtype, (8 // ITEM_BYTES[dtype],), memoryview(bytes(8)))}
    into = {"w": held["w"]._replace(data=memoryview(around)[8:16])}
    header = Header(describe(held).digest, describe(held).digest, 8, 8, 1)
    delta = write_header(header) + write_record(header, 0, record)
    with contextlib.suppress(DeltaError):
        list(apply(delta, held, describe(held), into, describe(held)))
    assert around[:8] == around[16:] == b"\x5a" * 8
