"""The manifest: what it promises about bytes, and the sentences it says about differences."""

from __future__ import annotations

import hashlib
import json
import struct

import msgspec
import pytest
import xxhash

from reef_bus.backends import Piece
from reef_bus.errors import ContractError, Rejected, TransferError
from reef_bus.manifest import Manifest, describe, differences, finite, require_fit


def piece(dtype: str, shape: tuple[int, ...], data: bytes) -> Piece:
    return Piece(dtype, shape, memoryview(bytearray(data)))


def two() -> dict[str, Piece]:
    return {"w": piece("F32", (2, 2), bytes(range(16))), "b": piece("BF16", (3,), b"abcdef")}


def respelled(manifest: Manifest, **changes: object) -> bytes:
    return json.dumps({**json.loads(manifest.encode()), **changes}, separators=(",", ":")).encode()


def test_tensors_are_sorted_by_name_with_their_ranges_back_to_back() -> None:
    b, w = describe(two()).tensors
    assert (b.name, b.offset, b.nbytes, b.dtype, b.shape) == ("b", 0, 6, "BF16", (3,))
    assert (w.name, w.offset, w.nbytes) == ("w", 6, 16)
    assert b.xxh3 == xxhash.xxh3_128(b"abcdef").hexdigest()


def test_the_digest_is_the_sha256_of_the_encoded_manifest_whatever_the_order_of_the_pieces() -> None:
    manifest = describe(two())
    assert manifest.digest == hashlib.sha256(manifest.encode()).hexdigest()
    assert describe(dict(reversed(two().items()))).digest == manifest.digest


def test_scalars_and_empty_tensors_are_tensors() -> None:
    manifest = describe({"scalar": piece("F64", (), bytes(8)), "none": piece("F32", (0, 4), b"")})
    assert manifest.total == 8
    assert Manifest.decode(manifest.encode()) == manifest


@pytest.mark.parametrize(
    ("spans", "said"),
    [
        ({"a": (0, 8), "b": (8, 16)}, ""),
        ({"a": (0, 8), "none": (4, 4), "b": (8, 16)}, ""),
        ({"a": (0, 8), "b": (0, 8)}, "'a' and 'b' share memory"),
        ({"a": (0, 8), "b": (7, 16)}, "'a' and 'b' share memory"),
        ({"whole": (0, 32), "a": (0, 4), "b": (8, 16)}, "'a' and 'whole' share memory"),
        ({"whole": (0, 32), "b": (8, 16)}, "'whole' and 'b' share memory"),
    ],
)
def test_a_target_of_which_one_tensor_would_overwrite_another_is_refused(
    spans: dict[str, tuple[int, int]], said: str
) -> None:
    memory = memoryview(bytearray(32))
    target = {name: Piece("U8", (stop - start,), memory[start:stop]) for name, (start, stop) in spans.items()}
    manifest = describe(target)
    require_fit(manifest, target)
    if not said:
        require_fit(manifest, target, writable=True)
    else:
        with pytest.raises(TransferError, match=f"mismatch: tensors {said}"):
            require_fit(manifest, target, writable=True)


@pytest.mark.parametrize(
    ("pieces", "says"),
    [
        ({}, "no tensors"),
        ({"w": piece("F32", (3,), bytes(8))}, "'w' holds 8 bytes"),
        ({"w": piece("F31", (2,), bytes(8))}, "F31"),
        ({"w": piece("F32", (-2, -1), bytes(8))}, "'w' holds 8 bytes"),
        ({"": piece("F32", (2,), bytes(8))}, "named ''"),
        ({"__metadata__": piece("F32", (2,), bytes(8))}, "__metadata__"),
        ({"w": Piece("F32", (2,), memoryview(bytearray(8)).cast("I"))}, "flat view"),
        ({"w": Piece("U8", (2,), memoryview(bytearray(4))[::2])}, "flat view"),
    ],
)
def test_what_no_version_can_consist_of_is_refused_and_named(pieces: dict[str, Piece], says: str) -> None:
    with pytest.raises(Rejected, match=says):
        describe(pieces)


@pytest.mark.parametrize(
    ("dtype", "bad", "good"),
    [
        ("F64", struct.pack("<d", float("nan")), struct.pack("<d", 1.7e308)),
        ("F32", struct.pack("<f", float("-inf")), struct.pack("<f", -3.4e38)),
        ("F16", struct.pack("<e", float("inf")), struct.pack("<e", 65504.0)),
        ("BF16", struct.pack("<f", float("nan"))[2:], struct.pack("<f", 3.3e38)[2:]),
        ("F8_E5M2", b"\x7c", b"\x7b"),
        ("F8_E4M3", b"\xff", b"\xfe"),
    ],
)
def test_one_value_that_is_not_finite_is_found_and_the_largest_finite_one_is_not(
    dtype: str, bad: bytes, good: bytes
) -> None:
    count = (1 << 20) // len(good) + 7  # more than one chunk
    assert finite(piece(dtype, (count,), good * count))
    spoiled = piece(dtype, (count,), good * (count - 1) + bad)
    assert not finite(spoiled)
    with pytest.raises(Rejected, match="'w' holds an infinity or a NaN"):
        describe({"w": spoiled}, check_finite=True)


def test_integers_are_finite_whatever_their_bytes() -> None:
    assert finite(piece("I32", (2,), b"\xff" * 8))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[" * 100_000,
        b"[]",
        b"{}",
        respelled(describe(two()), format="reef-manifest.v2"),
        respelled(describe(two()), tensors=[]),
        respelled(describe(two()), total=23),
        respelled(describe(two()), extra=1),
        respelled(describe(two()), tensors=list(reversed(json.loads(describe(two()).encode())["tensors"]))),
        describe(two()).encode() + b" ",
        describe(two()).encode().replace(b'"xxh3":"', b'"xxh3":"Z'),
        describe(two()).encode().replace(b'"offset":6', b'"offset":7'),
        describe(two()).encode().replace(b'"F32"', b'"F64"'),
        describe(two()).encode().replace(b'"nbytes":16', b'"nbytes":16.0'),
    ],
)
def test_anything_but_the_canonical_spelling_is_a_contract_error(data: bytes) -> None:
    with pytest.raises(ContractError):
        Manifest.decode(data)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"w": two()["w"]}, ["tensor 'b' is missing"]),
        ({**two(), "x": two()["b"]}, ["tensor 'x' is unexpected: the manifest does not name it"]),
        ({**two(), "w": piece("I32", (2, 2), bytes(range(16)))}, ["tensor 'w' is retyped: found I32, expected F32"]),
        ({**two(), "w": piece("F32", (4,), bytes(range(16)))}, ["tensor 'w' is reshaped: found [4], expected [2, 2]"]),
        (
            {"v": two()["w"], "b": two()["b"]},
            ["tensor 'w' is missing: renamed to 'v'", "tensor 'v' is unexpected: the manifest does not name it"],
        ),
        (two(), []),
    ],
)
def test_each_kind_of_difference_is_told_apart(changed: dict[str, Piece], says: list[str]) -> None:
    assert differences(describe(two()), describe(changed)) == says


def test_other_bytes_are_told_with_both_hashes() -> None:
    want, have = xxhash.xxh3_128(b"abcdef").hexdigest(), xxhash.xxh3_128(b"abcdeg").hexdigest()
    changed = describe({**two(), "b": piece("BF16", (3,), b"abcdeg")})
    assert differences(describe(two()), changed) == [f"tensor 'b': bytes differ, found xxh3 {have}, expected {want}"]


def test_swapped_contents_say_whose_bytes_they_are() -> None:
    straight = {"a": piece("U8", (1,), b"a"), "b": piece("U8", (1,), b"b")}
    first, second = differences(describe(straight), describe({"a": straight["b"], "b": straight["a"]}))
    assert "'a': bytes differ" in first and "the bytes of 'b'" in first
    assert "'b': bytes differ" in second and "the bytes of 'a'" in second


def test_reordered_tensors_and_other_ranges_are_differences_too() -> None:
    manifest = describe(two())
    swapped = Manifest(tensors=tuple(reversed(manifest.tensors)), total=manifest.total)
    assert differences(manifest, swapped) == ["tensors are reordered: found 'w' in the place of 'b'"]
    moved = msgspec.structs.replace(manifest, total=99)
    assert len(differences(manifest, moved)) == 1


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ({"w": two()["w"]}, "'b' is missing"),
        ({**two(), "w": piece("F32", (2, 2), bytes(12))}, "'w' is cut: found 12 bytes, expected 16"),
        ({**two(), "w": Piece("F32", (2, 2), memoryview(bytes(16)))}, "'w' cannot be written"),
        ({**two(), "w": Piece("F32", (2, 2), memoryview(bytearray(16)).cast("I"))}, "'w' is not a flat view"),
    ],
)
def test_a_target_that_could_not_hold_the_bytes_is_a_mismatch(target: dict[str, Piece], says: str) -> None:
    with pytest.raises(TransferError, match=says) as caught:
        require_fit(describe(two()), target, writable=True)
    assert caught.value.cause == "mismatch"


def test_a_source_may_be_read_only() -> None:
    require_fit(describe(two()), {**two(), "w": Piece("F32", (2, 2), memoryview(bytes(16)))})
