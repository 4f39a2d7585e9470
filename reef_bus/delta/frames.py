"""A delta as bytes: a header, then one record per bucket. Written here, and read back with every doubt told apart.

Knows: magic, lengths, checksums, the order of records.
Must not know: tensors, what a payload means, or where the bytes came from.
"""

from __future__ import annotations

import enum
import struct
from typing import NamedTuple

import msgspec
import xxhash

from reef_bus.errors import DeltaError

MAGIC = b"REEFDLTA"
HEADER_LIMIT = 1024
"""Bytes of a header: two digests and three numbers take about 250."""
BUCKET_LIMIT = 64 << 20
"""Bytes of a bucket. It bounds what a reader allocates, whatever a delta declares."""
BUCKET_UNIT = 8
"""A bucket is a multiple of the widest value, so that no cut goes through one."""

_LENGTH = struct.Struct("<I")
_HEAD = struct.Struct("<IBBIQ")  # index, form, bytes per gap, changed values, length of the payload
_CHECK_BYTES = 16  # xxh3-128

Part = bytes | bytearray | memoryview


class Form(enum.IntEnum):
    """What a bucket's payload holds."""

    UNCHANGED = 0  # nothing
    SPARSE = 1  # where values changed, and by how much: one zstd frame
    DENSE = 2  # by how much each value changed: one zstd frame
    FULL = 3  # the bytes themselves


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="format", tag="reef-delta.v1"):
    """From which version to which: `base` and `target` are manifests' digests, `total` the bytes of either."""

    base: str
    target: str
    total: int
    bucket_bytes: int
    buckets: int


class Record(NamedTuple):
    """One bucket. `changed` counts values, `gap_bytes` is the width of the distances between them; both 0 where the
    form has no use for them."""

    form: Form
    payload: Part = b""
    changed: int = 0
    gap_bytes: int = 0


def write_header(header: Header) -> bytes:
    body = msgspec.json.encode(header)
    return MAGIC + _LENGTH.pack(len(body)) + body + _seal(header)


def write_record(header: Header, index: int, record: Record) -> bytes:
    """The checksum covers the header too: a record of another delta is damage, however whole it is."""
    payload = memoryview(record.payload)
    head = _HEAD.pack(index, record.form, record.gap_bytes, record.changed, payload.nbytes)
    return b"".join((head, _check(_seal(header), head, payload), payload))


def read(delta: Part) -> tuple[Header, list[Record]]:
    """All of it, or DeltaError: foreign, truncated, damaged, reordered, trailing, oversized. Allocates nothing that the
    delta's own length does not bound; payloads are views of it."""
    view = memoryview(delta).toreadonly().cast("B")
    header, at = _read_header(view)
    seal, records = _seal(header), list[Record]()
    for index in range(header.buckets):
        record, at = _read_record(view, at, index, seal)
        records.append(record)
    if at != view.nbytes:
        raise DeltaError("trailing", f"{view.nbytes - at} bytes follow the end of the delta; fetch it again")
    return header, records


def _read_header(view: memoryview) -> tuple[Header, int]:
    magic = bytes(view[: len(MAGIC)])
    if not MAGIC.startswith(magic):
        raise DeltaError("foreign", f"found {magic!r} where a delta begins with {MAGIC!r}")
    (length,) = _LENGTH.unpack(_take(view, len(MAGIC), _LENGTH.size, "its header"))
    if length > HEADER_LIMIT:
        raise DeltaError("oversized", f"a header of {length} bytes; expected {HEADER_LIMIT} at most")
    start = len(MAGIC) + _LENGTH.size
    body = bytes(_take(view, start, length, "its header"))
    if _take(view, start + length, _CHECK_BYTES, "its header") != xxhash.xxh3_128_digest(body):
        raise DeltaError("damaged", "the delta's header does not hash to its checksum; fetch it again")
    return _decode_header(body), start + length + _CHECK_BYTES


def _decode_header(body: bytes) -> Header:
    try:
        header = msgspec.json.decode(body, type=Header)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise DeltaError("foreign", f"the header is not one of format reef-delta.v1: {error}") from error
    if msgspec.json.encode(header) != body:
        raise DeltaError("foreign", "the header is not in the one spelling of format reef-delta.v1")
    require_bounds(header.bucket_bytes)
    return header


def require_bounds(bucket_bytes: int) -> None:
    if bucket_bytes % BUCKET_UNIT or not BUCKET_UNIT <= bucket_bytes <= BUCKET_LIMIT:
        expected = f"expected a multiple of {BUCKET_UNIT} up to {BUCKET_LIMIT}"
        raise DeltaError("oversized", f"buckets of {bucket_bytes} bytes; {expected}")


def _read_record(view: memoryview, at: int, index: int, seal: bytes) -> tuple[Record, int]:
    about = f"bucket {index}"
    head = _take(view, at, _HEAD.size, about)
    check = _take(view, at + _HEAD.size, _CHECK_BYTES, about)
    found, form, gap_bytes, changed, length = _HEAD.unpack(head)
    start = at + _HEAD.size + _CHECK_BYTES
    payload = _take(view, start, length, about)
    if check != _check(seal, head, payload):
        raise DeltaError("damaged", f"{about} does not hash to its checksum; fetch the delta again")
    if found != index:
        raise DeltaError("reordered", f"found bucket {found} in the place of bucket {index}; fetch the delta again")
    if form not in Form.__members__.values():
        raise DeltaError("foreign", f"{about} is of form {form}, which format reef-delta.v1 does not have")
    return Record(Form(form), payload, changed, gap_bytes), start + length


def _take(view: memoryview, at: int, count: int, about: str) -> memoryview:
    if view.nbytes - at < count:
        raise DeltaError("truncated", f"the delta ends at byte {view.nbytes}, within {about}; fetch it again")
    return view[at : at + count]


def _seal(header: Header) -> bytes:
    return xxhash.xxh3_128_digest(msgspec.json.encode(header))


def _check(seal: bytes, head: Part, payload: Part) -> bytes:
    hasher = xxhash.xxh3_128(seal)
    hasher.update(head)
    hasher.update(payload)
    return hasher.digest()
