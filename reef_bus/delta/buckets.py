"""A bucket's content: how a version is cut into buckets, and how each is told from the one that it is based on.

Knows: arrays of unsigned integers, zstd. Values are bit patterns: NaN, -0.0 and integers are all alike.
Must not know: checksums, digests, or where a delta's bytes lie.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from reef_bus.delta.frames import Form, Record
from reef_bus.errors import DeltaError
from reef_bus.manifest import ITEM_BYTES, Manifest, TensorEntry

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

LEVEL = 1
"""Of zstd. Level 3 made deltas of bf16 training 3 to 7% larger, and took three times as long."""
DENSE_SHARE = 0.25
"""Changed values from which on the dense form is tried too. Of bf16, it was larger by half where 13% of the values had
changed, and smaller by 2% where 57% had."""

_UNSIGNED: dict[int, str] = {1: "<u1", 2: "<u2", 4: "<u4", 8: "<u8"}

Array = npt.NDArray[Any]
Arrays = Sequence[Array]
"""A bucket's values in order, slice by slice: each a view of one tensor's memory."""


class Slice(NamedTuple):
    """Bytes `start` to `stop` of a tensor."""

    tensor: str
    start: int
    stop: int


class Bucket(NamedTuple):
    """Slices of tensors whose values are all `width` bytes wide."""

    width: int
    slices: tuple[Slice, ...]

    @property
    def nbytes(self) -> int:
        return sum(stop - start for _, start, stop in self.slices)


def cut(manifest: Manifest, bucket_bytes: int) -> Iterator[Bucket]:
    """All bytes of a version, each once: by width of values, then by name. Every bucket but a width's last is full."""
    for width in _UNSIGNED:
        yield from _fill([e for e in manifest.tensors if ITEM_BYTES[e.dtype] == width], width, bucket_bytes)


def _fill(entries: Iterable[TensorEntry], width: int, bucket_bytes: int) -> Iterator[Bucket]:
    slices, room = list[Slice](), bucket_bytes
    for entry in entries:
        start = 0
        while start < entry.nbytes:
            stop = min(entry.nbytes, start + room)
            slices.append(Slice(entry.name, start, stop))
            start, room = stop, room - (stop - start)
            if not room:
                yield Bucket(width, tuple(slices))
                slices, room = [], bucket_bytes
    if slices:
        yield Bucket(width, tuple(slices))


def values(view: memoryview, width: int) -> Array:
    """The same memory as unsigned integers."""
    return np.frombuffer(view, dtype=_UNSIGNED[width])


# From two versions to a record.


def pack(old: Arrays, new: Arrays) -> Record:
    """The bucket in the smallest of its forms. A sparse or dense payload is never larger, unpacked, than the bucket."""
    masks = [a != b for a, b in zip(old, new, strict=True)]
    changed = sum(int(np.count_nonzero(mask)) for mask in masks)
    if not changed:
        return Record(Form.UNCHANGED)
    forms = list(_sparse(old, new, masks, changed))
    if not forms or changed >= DENSE_SHARE * _count(new):
        steps = np.concatenate([_steps(a, b) for a, b in zip(old, new, strict=True)])
        forms.append(Record(Form.DENSE, zstd.compress(_planes(steps).data, LEVEL)))
    best = min(forms, key=lambda record: len(record.payload))
    if len(best.payload) < _bytes(new):
        return best
    return Record(Form.FULL, b"".join(array.data.cast("B") for array in new))


def _sparse(old: Arrays, new: Arrays, masks: Arrays, changed: int) -> Iterator[Record]:
    room = _bytes(new) // changed - new[0].itemsize  # bytes that each gap may take
    if room < 1:
        return
    places = [np.flatnonzero(mask) for mask in masks]
    gaps = np.diff(_joined(places, new), prepend=-1) - 1
    gap_bytes = max(1, (int(gaps.max()).bit_length() + 7) // 8)
    if gap_bytes <= room:
        steps = np.concatenate([_steps(a[at], b[at]) for a, b, at in zip(old, new, places, strict=True)])
        raw = np.concatenate([_planes(gaps.astype("<u4"))[: gap_bytes * changed], _planes(steps)])
        yield Record(Form.SPARSE, zstd.compress(raw.data, LEVEL), changed, gap_bytes)


def _joined(places: Arrays, arrays: Arrays) -> Array:
    """Positions within slices as positions within the bucket."""
    starts = np.cumsum([0, *(array.size for array in arrays[:-1])])
    return np.concatenate([at + start for at, start in zip(places, starts, strict=True)])


def _steps(old: Array, new: Array) -> Array:
    """By how much each bit pattern grew, around the type's end if need be: 0, -1, 1, -2 … as 0, 1, 2, 3 … An optimizer
    moves most values by one: this took 6 to 13% less room than XOR, whose carries look like chance."""
    step = (new - old).view(f"<i{new.itemsize}")
    folded: Array = ((step << 1) ^ (step >> (8 * step.itemsize - 1))).view(new.dtype)
    return folded


def _planes(array: Array) -> Array:
    """All lowest bytes, then all of the next place …: what is alike lies together."""
    return np.ascontiguousarray(array.view(np.uint8).reshape(-1, array.itemsize).T).reshape(-1)


# From a record to the new version.


def check(record: Record, nbytes: int, width: int, index: int) -> None:
    """Raises DeltaError unless what the record declares is what a bucket of so many bytes can hold, and what its
    payload will give: to be asked of all records before the first is unpacked."""
    about, expected = f"bucket {index}", _unpacked(record, nbytes, width)
    if not _meaningful(record):
        gaps = f"{record.changed} gaps of {record.gap_bytes} bytes"
        raise DeltaError("damaged", f"{about} is {record.form.name} with {gaps}")
    if expected > nbytes:
        raise DeltaError("oversized", f"{about} declares {expected} bytes unpacked; it has {nbytes}")
    if record.form in (Form.UNCHANGED, Form.FULL):
        found = len(record.payload)
    else:
        found = _frame_size(record, about)
    if found != expected:
        flaw = "oversized" if found > expected else "damaged"
        raise DeltaError(flaw, f"{about} would give {found} bytes; its head says {expected}")


def _meaningful(record: Record) -> bool:
    if record.form is Form.SPARSE:
        return record.changed > 0 and 1 <= record.gap_bytes <= 4
    return record.changed == record.gap_bytes == 0


def _unpacked(record: Record, nbytes: int, width: int) -> int:
    if record.form is Form.SPARSE:
        return record.changed * (record.gap_bytes + width)
    return 0 if record.form is Form.UNCHANGED else nbytes


def _frame_size(record: Record, about: str) -> int:
    try:
        size = zstd.get_frame_info(record.payload).decompressed_size
    except zstd.ZstdError as error:
        raise DeltaError("damaged", f"{about} holds no zstd frame: {error}") from error
    if size is None:
        raise DeltaError("oversized", f"{about} does not say how much it unpacks to")
    return size


def unpack(record: Record, old: Arrays, new: Arrays, index: int) -> None:
    """Write every byte of `new`. The record has passed `check`."""
    if record.form is Form.FULL:
        return _copy(record.payload, new)
    if record.form is Form.DENSE:
        return _walk(_inflate(record, _bytes(new), index), old, new)
    for a, b in zip(old, new, strict=True):
        np.copyto(b, a)
    if record.form is Form.SPARSE:
        _scatter(record, new, index)


def _copy(payload: Any, new: Arrays) -> None:
    start = 0
    for array in new:
        array[:] = np.frombuffer(payload, array.dtype, array.size, start)
        start += array.nbytes


def _walk(raw: Array, old: Arrays, new: Arrays) -> None:
    steps, start = _unplaned(raw, new[0].itemsize, new[0].dtype), 0
    for a, b in zip(old, new, strict=True):
        np.add(a, _unfolded(steps[start : start + a.size]), out=b)
        start += a.size


def _scatter(record: Record, new: Arrays, index: int) -> None:
    """`new` holds the old values: add the steps where there are any."""
    width, cut_at = new[0].itemsize, record.changed * record.gap_bytes
    raw = _inflate(record, cut_at + record.changed * width, index)
    places = np.cumsum(_unplaned(raw[:cut_at], record.gap_bytes, np.int64) + 1) - 1
    if places[-1] >= _count(new):
        raise DeltaError("damaged", f"bucket {index} changes value {places[-1]}; it has {_count(new)}")
    steps = _unfolded(_unplaned(raw[cut_at:], width, new[0].dtype))
    first = start = 0
    for array in new:
        last = int(np.searchsorted(places, start + array.size))
        array[places[first:last] - start] += steps[first:last]
        first, start = last, start + array.size


def _inflate(record: Record, size: int, index: int) -> Array:
    """Exactly `size` bytes, whatever the frame would give. Nor does its window take more: zstd bounds that by the
    frame's own content size, which `check` has compared."""
    unpacker = zstd.ZstdDecompressor()
    try:
        raw = unpacker.decompress(record.payload, max_length=size)
        if not unpacker.eof:
            raw += unpacker.decompress(b"", max_length=1)  # the frame's end may take a call of its own
    except zstd.ZstdError as error:
        raise DeltaError("damaged", f"bucket {index} holds no whole zstd frame: {error}") from error
    if len(raw) != size or not unpacker.eof or unpacker.unused_data:
        raise DeltaError("damaged", f"bucket {index} is not one zstd frame of {size} bytes")
    return np.frombuffer(raw, np.uint8)


def _unplaned(planes: Array, width: int, dtype: npt.DTypeLike) -> Array:
    """The inverse of `_planes`, also for the lowest planes alone. By shifts: numpy's transposed copy took ten times as
    long in this direction."""
    joined = np.zeros(planes.size // width, dtype)
    for plane in planes.reshape(width, -1)[::-1]:
        joined <<= 8
        joined |= plane
    return joined


def _unfolded(folded: Array) -> Array:
    one = folded.dtype.type(1)
    steps: Array = (folded >> one) ^ np.negative(folded & one)
    return steps


def _count(arrays: Arrays) -> int:
    return sum(array.size for array in arrays)


def _bytes(arrays: Arrays) -> int:
    return sum(array.nbytes for array in arrays)
