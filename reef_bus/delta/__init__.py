"""A version told from another one that the receiver has proven to hold: exact, bucket by bucket.

Knows: two versions' pieces and manifests. What is written is never the base, and what comes out is hashed.
Must not know: the log, transports, or files. Whoever meets a DeltaError takes the full bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from reef_bus.backends import Pieces
from reef_bus.delta.buckets import Array, Bucket, check, cut, pack, unpack, values
from reef_bus.delta.frames import Header, Part, Record, read, require_bounds, write_header, write_record
from reef_bus.errors import ContractError, DeltaError
from reef_bus.manifest import Manifest, describe, differences, layout_differences, require_fit

BUCKET_BYTES = 32 << 20
"""Bytes of a version that are told at once: both sides need a few times as much memory beside the versions."""


def encode(
    base: Pieces, base_manifest: Manifest, new: Pieces, new_manifest: Manifest, *, bucket_bytes: int = BUCKET_BYTES
) -> Iterator[bytes]:
    """The delta in parts, made as they are asked for; neither version may change meanwhile. Nothing here hashes them:
    both manifests must be what `describe` found. Raises DeltaError("layout") where the two versions do not consist of
    the same tensors, TransferError("mismatch") where pieces do not fit their manifest."""
    require_bounds(bucket_bytes)
    require_fit(base_manifest, base)
    require_fit(new_manifest, new)
    _require_alike(base_manifest, new_manifest)
    plan = list(cut(new_manifest, bucket_bytes))
    header = Header(base_manifest.digest, new_manifest.digest, new_manifest.total, bucket_bytes, len(plan))
    return _parts(header, plan, base, new)


def _parts(header: Header, plan: list[Bucket], base: Pieces, new: Pieces) -> Iterator[bytes]:
    yield write_header(header)
    for index, bucket in enumerate(plan):
        yield write_record(header, index, pack(_arrays(bucket, base), _arrays(bucket, new)))


def apply(delta: Part, base: Pieces, base_manifest: Manifest, into: Pieces, manifest: Manifest) -> Iterator[int]:
    """Write the version that `manifest` describes into `into`, yielding bytes per bucket: abandon it between two and
    nothing is written any more. `base_manifest` must be what the base's memory was last found to hold.

    All that can be known of the delta is checked before this returns, and before the first byte is written: DeltaError
    tells what was found. One that comes later (a record that is whole but makes no sense), like an abandoned
    iteration, leaves `into` worthless. Nobody has hashed it in either case: see `rebuild`. Raises ContractError where
    `into` shares memory with the base."""
    header, records = read(delta)
    _require_same(header, base_manifest, manifest)
    _require_alike(base_manifest, manifest)
    require_fit(base_manifest, base)
    require_fit(manifest, into, writable=True)
    _require_apart(base, into)
    plan = list(itertools.islice(cut(manifest, header.bucket_bytes), len(records) + 1))  # a header may ask for crumbs
    if len(plan) != len(records):
        more = "more" if len(plan) > len(records) else len(plan)
        raise DeltaError("target", f"the delta has {len(records)} buckets; cut as it says, the target has {more}")
    for index, (bucket, record) in enumerate(zip(plan, records, strict=True)):
        check(record, bucket.nbytes, bucket.width, index)
    sealed = {name: piece._replace(data=piece.data.toreadonly()) for name, piece in base.items()}
    return _written(plan, records, sealed, into)


def _written(plan: list[Bucket], records: list[Record], base: Pieces, into: Pieces) -> Iterator[int]:
    for index, (bucket, record) in enumerate(zip(plan, records, strict=True)):
        unpack(record, _arrays(bucket, base), _arrays(bucket, into), index)
        yield bucket.nbytes


def base_of(delta: Part) -> str:
    """The digest of the base that it is for. Raises DeltaError as `apply` does, for what the delta itself shows."""
    return read(delta)[0].base


def rebuild(delta: Part, base: Pieces, base_manifest: Manifest, into: Pieces, manifest: Manifest) -> None:
    """Apply all of it and hash what `into` then holds. Returns only if that is the version which `manifest` describes.
    Every doubt about the delta is a DeltaError: `into` is then worth nothing, and the full bytes are to be taken."""
    for _ in apply(delta, base, base_manifest, into, manifest):
        pass
    said = differences(manifest, describe(into))
    if said:
        raise DeltaError("result", f"the delta gave other bytes than its target has: {said[0]}; take the full bytes")


def _arrays(bucket: Bucket, pieces: Pieces) -> list[Array]:
    return [values(pieces[name].data[start:stop], bucket.width) for name, start, stop in bucket.slices]


def _require_same(header: Header, base: Manifest, target: Manifest) -> None:
    if header.base != base.digest:
        raise DeltaError("base", f"the delta is for base {header.base}; this memory holds {base.digest}")
    if header.target != target.digest:
        raise DeltaError("target", f"the delta leads to {header.target}; expected {target.digest}")
    if header.total != target.total:
        raise DeltaError("target", f"the delta is of {header.total} bytes; its target has {target.total}")


def _require_alike(base: Manifest, new: Manifest) -> None:
    said = layout_differences(new, base.layouts())
    if said:
        raise DeltaError("layout", f"the base has other tensors: {said[0]}; take the full bytes")


def _require_apart(base: Pieces, into: Pieces) -> None:
    """Two spans of memory overlap exactly if the one that begins later begins before the other one ends."""
    spans = sorted([*_spans(base, False), *_spans(into, True)])
    reach = {False: 0, True: 0}
    for start, end, target, name in spans:
        if start < reach[not target]:
            raise ContractError(f"tensor {name!r} shares memory with the other version; stage beside the base")
        reach[target] = max(reach[target], end)


def _spans(pieces: Pieces, target: bool) -> Iterator[tuple[int, int, bool, str]]:
    for name, piece in pieces.items():
        if piece.data.nbytes:
            start: int = np.frombuffer(piece.data, np.uint8).ctypes.data
            yield start, start + piece.data.nbytes, target, name
