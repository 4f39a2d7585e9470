"""The manifest: which tensors a version consists of, byte for byte.

Knows: names, dtypes, shapes, byte ranges, xxh3-128 per tensor, one sha256 over all of it.
Must not know: files, sockets, the log, or any framework; it reads memory views and nothing else.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Mapping

import msgspec
import xxhash

from reef_bus.backends import Layout, Piece, Pieces, places
from reef_bus.errors import ContractError, Rejected, TransferError

ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
"""Bytes per value of every dtype that a manifest can carry, in safetensors' spelling."""

RESERVED_NAME = "__metadata__"
"""safetensors keeps this key of its header for itself; a tensor of that name could not be stored."""

_FIVE_BIT_EXPONENT = bytes([*range(0x7C, 0x80), *range(0xFC, 0x100)])
# dtype -> bytes per value, high bytes that an infinity or NaN may have, least next byte that makes it one. All of
# safetensors is little-endian.
_NON_FINITE = {
    "F64": (8, b"\x7f\xff", 0xF0),
    "F32": (4, b"\x7f\xff", 0x80),
    "BF16": (2, b"\x7f\xff", 0x80),
    "F16": (2, _FIVE_BIT_EXPONENT, 0),
    "F8_E5M2": (1, _FIVE_BIT_EXPONENT, 0),
    "F8_E4M3": (1, b"\x7f\xff", 0),
}
_SCAN_BYTES = 1 << 20  # a multiple of every value's size, small enough to stay in a core's cache
_XXH3 = re.compile(r"[0-9a-f]{32}")


class TensorEntry(msgspec.Struct, frozen=True):
    """One tensor: `offset` and `nbytes` are its range in the canonical byte stream, `xxh3` is xxh3-128 in hex."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    xxh3: str


class Manifest(msgspec.Struct, frozen=True, tag_field="format", tag="reef-manifest.v1"):
    """All tensors of a version, sorted by name, their ranges back to back; `total` is the sum of their bytes."""

    tensors: tuple[TensorEntry, ...]
    total: int

    def encode(self) -> bytes:
        """The one spelling of this manifest: equal manifests encode to equal bytes."""
        return msgspec.json.encode(self)

    @property
    def digest(self) -> str:
        """sha256 of `encode()` in hex: the name under which the log, and the artifact store, know this manifest."""
        return hashlib.sha256(self.encode()).hexdigest()

    def layouts(self) -> dict[str, Layout]:
        return {entry.name: (entry.dtype, entry.shape, entry.nbytes) for entry in self.tensors}

    @classmethod
    def decode(cls, data: bytes) -> Manifest:
        """What `encode` wrote, and nothing else: other spellings, orders, ranges or dtypes raise ContractError."""
        try:
            manifest = msgspec.json.decode(data, type=cls)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise ContractError(f"these {len(data)} bytes are no manifest: {error}") from error
        flaw = next(_flaws(manifest, data), None)
        if flaw is not None:
            raise ContractError(f"the manifest contradicts itself: {flaw}")
        return manifest


def describe(pieces: Pieces, *, check_finite: bool = False) -> Manifest:
    """Hash every piece where it lies. Raises Rejected for nothing at all, for a piece whose bytes do not fit its
    dtype and shape, and with `check_finite` for the first tensor that holds an infinity or a NaN."""
    if not pieces:
        raise Rejected("no tensors were given: a version consists of at least one")
    entries: list[TensorEntry] = []
    offset = 0
    for name in sorted(pieces):
        entries.append(_entry(name, pieces[name], offset, check_finite))
        offset += entries[-1].nbytes
    return Manifest(tensors=tuple(entries), total=offset)


def differences(expected: Manifest, found: Manifest) -> list[str]:
    """One sentence per tensor that differs, each naming it; empty exactly when both have the same digest."""
    wanted = {entry.name: entry for entry in expected.tensors}
    given = {entry.name: entry for entry in found.tensors}
    said = [_missing(entry, wanted, given) for name, entry in wanted.items() if name not in given]
    said += [f"tensor {name!r} is unexpected: the manifest does not name it" for name in given if name not in wanted]
    if not said and list(wanted) != list(given):
        here, there = next((a, b) for a, b in zip(wanted, given, strict=True) if a != b)
        said.append(f"tensors are reordered: found {there!r} in the place of {here!r}")
    for name, entry in wanted.items():
        said += _changes(entry, given[name], wanted) if name in given else []
    if not said and expected != found:
        said.append("the same tensors lie at other byte ranges; encode the manifest anew with describe()")
    return said


def layout_differences(expected: Manifest, found: Mapping[str, Layout]) -> list[str]:
    """As `differences`, without reading a byte of any tensor: contents are taken to agree."""
    hashes = {entry.name: entry.xxh3 for entry in expected.tensors}
    entries: list[TensorEntry] = []
    offset = 0
    for name in sorted(found):
        dtype, shape, nbytes = found[name]
        entries.append(TensorEntry(name, dtype, shape, offset, nbytes, hashes.get(name, "")))
        offset += nbytes
    return differences(expected, Manifest(tensors=tuple(entries), total=offset))


def require_fit(manifest: Manifest, pieces: Pieces, *, writable: bool = False) -> None:
    """Raises TransferError("mismatch") naming the first tensor of `pieces` that could not hold the manifest's bytes."""
    layouts = {name: (piece.dtype, tuple(piece.shape), piece.data.nbytes) for name, piece in pieces.items()}
    said = layout_differences(manifest, layouts)
    said += [f"tensor {name!r} is not a flat view of bytes" for name, piece in pieces.items() if not _flat(piece.data)]
    if writable and not said:
        said += [f"tensor {name!r} cannot be written" for name, piece in pieces.items() if piece.data.readonly]
        said += said or _aliases(pieces)
    if said:
        raise TransferError("mismatch", said[0])


def _aliases(pieces: Pieces) -> Iterator[str]:
    """Tensors of which one would overwrite the other: tied weights have one name, or are two copies."""
    end, owner = 0, ""
    for (start, nbytes), name in sorted((place, name) for name, place in places(pieces).items()):
        if start < end and nbytes:
            yield f"tensors {owner!r} and {name!r} share memory"
        end, owner = max((end, owner), (start + nbytes, name))


def finite(piece: Piece) -> bool:
    """Whether no value of a float tensor is an infinity or a NaN; other dtypes hold neither.

    Looks at high bytes only, at the speed of a byte search: full exponents are so rare that few chunks need more."""
    if piece.dtype not in _NON_FINITE:
        return True
    size, highs, least = _NON_FINITE[piece.dtype]
    for start in range(0, piece.data.nbytes, _SCAN_BYTES):
        chunk = bytes(piece.data[start : start + _SCAN_BYTES])
        high = chunk[size - 1 :: size]
        if any(byte in high for byte in highs):
            low = chunk[max(size - 2, 0) :: size]
            if any(h in highs and n >= least for h, n in zip(high, low, strict=True)):
                return False
    return True


def _entry(name: str, piece: Piece, offset: int, check_finite: bool) -> TensorEntry:
    shape, nbytes = tuple(piece.shape), piece.data.nbytes
    if not name or name == RESERVED_NAME:
        raise Rejected(f"a tensor cannot be named {name!r}: safetensors could not store it")
    if not _flat(piece.data):
        raise Rejected(f"tensor {name!r} is not a flat view of bytes; cast it to format 'B'")
    if _nbytes(piece.dtype, shape) != nbytes:
        raise Rejected(f"tensor {name!r} holds {nbytes} bytes, which is not {piece.dtype} of shape {list(shape)}")
    if check_finite and not finite(piece):
        raise Rejected(f"tensor {name!r} holds an infinity or a NaN: it must not be published")
    return TensorEntry(name, piece.dtype, shape, offset, nbytes, xxhash.xxh3_128_hexdigest(piece.data))


def _flat(view: memoryview) -> bool:
    return view.format == "B" and view.ndim == 1 and view.c_contiguous


def _nbytes(dtype: str, shape: tuple[int, ...]) -> int | None:
    """None for a dtype or a shape that no manifest can carry."""
    if dtype not in ITEM_BYTES or any(side < 0 for side in shape):
        return None
    return ITEM_BYTES[dtype] * math.prod(shape)


def _flaws(manifest: Manifest, data: bytes) -> Iterator[str]:
    """Why a manifest that parsed is still not one: each line is a promise of `Manifest` or `TensorEntry`."""
    names = [entry.name for entry in manifest.tensors]
    if not names:
        yield "it names no tensor"
    if names != sorted(set(names)):
        yield "its tensors are not in ascending order of name, each once"
    offset = 0
    for entry in manifest.tensors:
        if not entry.name or entry.name == RESERVED_NAME or not _XXH3.fullmatch(entry.xxh3):
            yield f"tensor {entry.name!r} has no usable name, or no xxh3-128 in hex"
        if entry.offset != offset or entry.nbytes != _nbytes(entry.dtype, entry.shape):
            yield f"tensor {entry.name!r}: bytes {entry.offset}+{entry.nbytes} of {entry.dtype} {list(entry.shape)}"
        offset += entry.nbytes
    if manifest.total != offset:
        yield f"its total is {manifest.total}, its tensors add up to {offset}"
    if manifest.encode() != data:
        yield "it is not in the canonical spelling"


def _missing(entry: TensorEntry, wanted: Mapping[str, TensorEntry], given: Mapping[str, TensorEntry]) -> str:
    """A rename leaves the bytes under a name that nobody asked for: then say which."""
    same = [e.name for e in given.values() if e.name not in wanted and _alike(e, entry)]
    return f"tensor {entry.name!r} is missing" + (f": renamed to {same[0]!r}" if same else "")


def _alike(a: TensorEntry, b: TensorEntry) -> bool:
    return (a.dtype, a.shape, a.nbytes, a.xxh3) == (b.dtype, b.shape, b.nbytes, b.xxh3)


def _changes(want: TensorEntry, have: TensorEntry, wanted: Mapping[str, TensorEntry]) -> list[str]:
    """The gravest difference only: bytes of another dtype, shape or length are not worth comparing."""
    about = f"tensor {want.name!r}"
    if want.dtype != have.dtype:
        return [f"{about} is retyped: found {have.dtype}, expected {want.dtype}"]
    if want.shape != have.shape:
        return [f"{about} is reshaped: found {list(have.shape)}, expected {list(want.shape)}"]
    if want.nbytes != have.nbytes:
        return [f"{about} is cut: found {have.nbytes} bytes, expected {want.nbytes}"]
    if want.xxh3 == have.xxh3:
        return []
    owners = [e.name for e in wanted.values() if e.xxh3 == have.xxh3]
    whose = f", the bytes of {owners[0]!r}" if owners else ""
    return [f"{about}: bytes differ, found xxh3 {have.xxh3}{whose}, expected {want.xxh3}"]
