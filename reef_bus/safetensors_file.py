"""safetensors files: their header, the bytes of one that is to be written, and one that is there as views of it.

Knows: the layout. Must not know: stores, digests, or any framework.
No tensor is copied: a file is mapped, and what is written are the tensors' own bytes.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from reef_bus.backends import Layout, Piece, Pieces
from reef_bus.errors import Rejected, TransferError
from reef_bus.manifest import ITEM_BYTES, RESERVED_NAME, Manifest
from reef_bus.shelf import Opened, Part

_HEADER_LIMIT = 100 << 20  # safetensors' own limit: a longer header is damage, not a model


class Span(msgspec.Struct):
    """One tensor in a safetensors header: `data_offsets` count from the first byte after the header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]

    @property
    def layout(self) -> Layout:
        return self.dtype, self.shape, self.data_offsets[1] - self.data_offsets[0]


class LaidOut(NamedTuple):
    """A file before its tensors: its first bytes, and where each tensor lies after them."""

    head: bytes
    spans: dict[str, Span]

    @property
    def nbytes(self) -> int:
        return len(self.head) + sum(span.layout[2] for span in self.spans.values())


def laid_out(layouts: Mapping[str, Layout], metadata: Mapping[str, str] | None = None) -> LaidOut:
    """The library's own writer takes raw pointers since 0.8, and copies before; so the layout is written here, and the
    tests hold it against the library. Wide dtypes come first, as there, so that every tensor is aligned for readers
    that map the file."""
    spans: dict[str, Span] = {}
    offset = 0
    for name in sorted(layouts, key=lambda name: (-ITEM_BYTES[layouts[name][0]], name)):
        dtype, shape, nbytes = layouts[name]
        spans[name] = Span(dtype, shape, (offset, offset + nbytes))
        offset += nbytes
    head = msgspec.json.encode({RESERVED_NAME: metadata, **spans} if metadata else spans)
    head += b" " * (-len(head) % 8)
    return LaidOut(len(head).to_bytes(8, "little") + head, spans)


def encoded(manifest: Manifest, pieces: Pieces, metadata: Mapping[str, str] | None = None) -> Iterator[Part]:
    """The file in parts, without copying a tensor."""
    head, spans = laid_out(manifest.layouts(), metadata)
    yield head
    for name in spans:
        yield pieces[name].data


def header(opened: Opened) -> tuple[dict[str, Span], int]:
    """Where each tensor lies, and the offset of the first byte after the header."""
    size = int.from_bytes(opened.file.read(8), "little")
    if size > _HEADER_LIMIT:
        raise TransferError("protocol", f"{opened.where} is no safetensors file: a header of {size} bytes")
    try:
        raw = msgspec.json.decode(opened.file.read(size), type=dict[str, msgspec.Raw])
        raw.pop(RESERVED_NAME, None)
        return {name: msgspec.json.decode(span, type=Span) for name, span in raw.items()}, 8 + size
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise TransferError("protocol", f"{opened.where} is no safetensors file: {error}") from error


def mapped(path: Path) -> Pieces:
    """The file's tensors as read-only views of its pages: nothing is read before it is used. The file must not change
    while they are in use. Raises Rejected, naming the tensor, for a file that is not one."""
    try:
        with open(path, "rb", buffering=0) as file:
            spans, start = header(Opened(file, str(path)))
            view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))[start:]
    except TransferError as error:
        raise Rejected(str(error)) from error
    except OSError as error:
        raise Rejected(f"cannot read {path}: {error.strerror}") from error
    if flaw := next(_flaws(spans, view.nbytes), None):
        raise Rejected(f"{path}: {flaw}")
    return {name: Piece(span.dtype, span.shape, view[slice(*span.data_offsets)]) for name, span in spans.items()}


def _flaws(spans: Mapping[str, Span], nbytes: int) -> Iterator[str]:
    """Why no model can be read by such a header. As the library, which refuses holes, too."""
    end, owner = 0, ""
    for name, span in sorted(spans.items(), key=lambda item: item[1].data_offsets):
        begin, stop = span.data_offsets
        if span.dtype not in ITEM_BYTES:
            yield f"tensor {name!r} is of dtype {span.dtype}; expected one of {', '.join(ITEM_BYTES)}"
        elif any(side < 0 for side in span.shape) or stop - begin != ITEM_BYTES[span.dtype] * math.prod(span.shape):
            yield f"tensor {name!r} has {stop - begin} bytes, which is not {span.dtype} of shape {list(span.shape)}"
        elif begin < end:
            yield f"tensors {owner!r} and {name!r} share bytes {begin} to {end}"
        elif begin > end:
            yield f"bytes {end} to {begin} belong to no tensor"
        elif stop > nbytes:
            yield f"tensor {name!r} is cut: the file ends {stop - nbytes} bytes before its end"
        end, owner = stop, name
    if end < nbytes:
        yield f"{nbytes - end} bytes after the last tensor belong to none"
