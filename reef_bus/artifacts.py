"""The artifact store: content-addressed blobs on a local folder, and weights in them as safetensors.

Knows: files, sha256, the safetensors layout, manifests.
Must not know: the log, sockets, or any framework; a blob's name is the only thing it trusts.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Generator, Iterable, Iterator
from io import FileIO
from pathlib import Path
from typing import BinaryIO

import msgspec
import xxhash

from reef_bus.backends import Piece, Pieces
from reef_bus.errors import ContractError, TransferError, Unavailable
from reef_bus.events import Blob
from reef_bus.manifest import (
    ITEM_BYTES,
    RESERVED_NAME,
    Layout,
    Manifest,
    TensorEntry,
    describe,
    layout_differences,
    require_fit,
)

SLICE_BYTES = 16 << 20
"""Files are read in slices of this size: a reader may be stopped, or report progress, between two of them."""

_HEADER_LIMIT = 100 << 20  # safetensors' own limit: a longer header is damage, not a model
_DIGEST = re.compile(r"[0-9a-f]{64}")

Part = bytes | memoryview


class _Span(msgspec.Struct):
    """One tensor in a safetensors header: `data_offsets` count from the first byte after the header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class ArtifactStore:
    """Blobs under `root`, named by what they hold. A blob that `has` reports is whole, and survives a power cut.

    Any number of processes may share a root. A process that is killed while it writes leaves a file in
    `root/incoming` and nothing else. Raises Unavailable when the folder cannot be written."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._incoming = root / "incoming"
        with self._writing(root):
            self._incoming.mkdir(parents=True, exist_ok=True)
            probe = self._incoming / f"probe-{secrets.token_hex(8)}"
            probe.touch(exist_ok=False)
            probe.unlink()

    def path(self, digest: str) -> Path:
        """Where the blob of that name lies, whether or not it is there."""
        return place(self.root, digest)

    def has(self, digest: str) -> bool:
        """Whether the blob is there."""
        return self.path(digest).is_file()

    def put(self, data: Part) -> Blob:
        """Keep `data`. On return it survives a power cut; to put it again changes nothing."""
        return self.put_parts([data])

    def put_parts(self, parts: Iterable[Part]) -> Blob:
        """As `put`, for one blob that lies in several pieces of memory: nothing is joined or copied."""
        with self._writing(self.root), self._draft() as draft:
            blob = _write(draft, parts)
            if not self.has(blob.digest):
                os.fsync(draft.fileno())
                self._adopt(Path(draft.name), self.path(blob.digest))
        return blob

    def put_file(self, path: Path) -> Blob:
        """Keep a copy of the file's bytes as they are read, under the digest of exactly those."""
        with open(path, "rb", buffering=0) as file:
            return self.put_parts(_slices(file, 0, os.fstat(file.fileno()).st_size))

    def keep(self, digest: str, source: Path) -> bool:
        """Have the blob of that name, from the file `source` if it is not there whole: by a hard link where the disk
        allows it, else as a copy. Returns whether it was not there. Raises ContractError, naming the file, when
        `source` is missing or holds other bytes."""
        if self.has(digest) and _hash_file(self.path(digest)) == digest:
            return False
        if not source.is_file():
            raise ContractError(f"no blob at {source}: copy it there from the machine that wrote it")
        draft = self._incoming / secrets.token_hex(16)
        with self._writing(self.root):
            try:
                _link(source, draft)
                found = _hash_file(draft)
                if found != digest:
                    raise ContractError(f"{source} is damaged: its bytes hash to {found}; copy it there again")
                self._adopt(draft, self.path(digest))
            finally:
                draft.unlink(missing_ok=True)
        return True

    def get(self, digest: str) -> bytes:
        """The blob, its hash checked. Raises ContractError when it is missing or when other bytes lie in its place."""
        path = self.path(digest)
        try:
            data = path.read_bytes()
        except FileNotFoundError as error:
            raise ContractError(f"no blob at {path}: copy it there from the machine that wrote it") from error
        except OSError as error:
            raise Unavailable(f"cannot read {path}: {error.strerror}") from error
        found = hashlib.sha256(data).hexdigest()
        if found != digest:
            raise ContractError(f"{path} is damaged: its bytes hash to {found}; remove it and copy it there again")
        return data

    def remove(self, digest: str) -> bool:
        """Whether it was there. Who has it open reads it to its end; who comes later finds nothing."""
        path = self.path(digest)
        with self._writing(path):
            found = path.is_file()
            path.unlink(missing_ok=True)
        return found

    @contextlib.contextmanager
    def _draft(self) -> Iterator[BinaryIO]:
        """A private file that is gone afterwards, unless it was adopted. Blobs are read-only from birth."""
        path = self._incoming / secrets.token_hex(16)
        try:
            with open(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o444)) as file:
                yield file
        finally:
            path.unlink(missing_ok=True)

    def _adopt(self, draft: Path, final: Path) -> None:
        """Rename is the moment at which the blob exists; each folder is synced so that the name outlives the power."""
        for folder in (final.parent.parent, final.parent):
            folder.mkdir(exist_ok=True)
            _sync_folder(folder.parent)
        os.replace(draft, final)
        _sync_folder(final.parent)

    @contextlib.contextmanager
    def _writing(self, where: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise Unavailable(
                f"cannot write artifacts under {where}: {error.strerror} ({_free(where)}); "
                "make room or give write access there, or configure another artifact folder"
            ) from error


def place(root: Path, digest: str) -> Path:
    """Where a store at `root` has the blob of that name; the store need not be open, or writable."""
    if not _DIGEST.fullmatch(digest):
        raise ContractError(f"{digest!r} names no blob: expected 64 hex digits of sha256")
    return root.joinpath(digest[:2], digest[2:4], digest)


def save_weights(store: ArtifactStore, pieces: Pieces) -> tuple[Blob, Manifest]:
    """Keep `pieces` as one safetensors blob, and their manifest as the blob named by its digest.

    The pieces must not change meanwhile. Raises Rejected for what no manifest can describe, Unavailable for a disk
    that takes no more."""
    manifest = describe(pieces)
    blob = store.put_parts(_safetensors(manifest, pieces))
    store.put(manifest.encode())
    return blob, manifest


def weights_blob(manifest: Manifest, pieces: Pieces) -> Blob:
    """The blob that `save_weights` makes of `pieces`, without writing it: its bytes follow from them alone."""
    return _write(None, _safetensors(manifest, pieces))


def load_weights(store: ArtifactStore, blob_digest: str, into: Pieces, manifest: Manifest) -> int:
    """Copy the stored weights into `into`'s memory; returns bytes. Nothing is written before all of it was verified.

    Raises TransferError: "mismatch" naming the tensor (target or artifact do not fit the manifest), "refused" if
    the blob is not there, "protocol" if it is no safetensors file, "closed" for a failing disk."""
    require_fit(manifest, into, writable=True)
    with _reading(store.path(blob_digest)):
        for _ in verify_weights(store, blob_digest, manifest):
            pass
        return sum(copy_weights(store, blob_digest, into))


def read_weights(store: ArtifactStore, blob_digest: str, manifest: Manifest) -> Pieces:
    """The stored weights in memory of their own. Raises as `load_weights`."""
    memory = {e.name: Piece(e.dtype, e.shape, memoryview(bytearray(e.nbytes))) for e in manifest.tensors}
    load_weights(store, blob_digest, memory, manifest)
    return memory


def verify_weights(store: ArtifactStore, blob_digest: str, manifest: Manifest) -> Generator[int, None, None]:
    """Compare the artifact with the manifest (layout, then every tensor's hash) and with its own name, yielding bytes
    per step. Tensors come first, so that damage is told by a tensor's name; sha256 covers what lies between them."""
    path = store.path(blob_digest)
    with open(path, "rb", buffering=0) as file:
        spans, start = _header(file)
        said = layout_differences(manifest, {name: _layout(span) for name, span in spans.items()})
        if said:
            raise TransferError("mismatch", f"{path}: {said[0]}")
        for entry in manifest.tensors:
            yield from _verify_tensor(file, entry, start + spans[entry.name].data_offsets[0])
        yield from _verify_name(file, blob_digest)


def copy_weights(store: ArtifactStore, blob_digest: str, into: Pieces) -> Generator[int, None, None]:
    """Read a verified artifact straight into `into`'s memory, yielding bytes per step. Abandon it between two steps and
    nothing is written any more."""
    with open(store.path(blob_digest), "rb", buffering=0) as file:
        spans, start = _header(file)
        for name, piece in into.items():
            file.seek(start + spans[name].data_offsets[0])
            rest = piece.data
            while rest:
                count = _read(file, rest[:SLICE_BYTES])
                rest = rest[count:]
                yield count


def _write(draft: BinaryIO | None, parts: Iterable[Part]) -> Blob:
    hasher, size = hashlib.sha256(), 0
    for part in parts:
        hasher.update(part)
        size += memoryview(part).nbytes
        if draft is not None:
            draft.write(part)
    if draft is not None:
        draft.flush()
    return Blob(digest=hasher.hexdigest(), size=size)


def _safetensors(manifest: Manifest, pieces: Pieces) -> Iterator[Part]:
    """The file in parts, without copying a tensor. The library's own writer takes raw pointers since 0.8, and copies
    before; so the layout is written here, and the tests hold it against the library. Wide dtypes come first, as
    there, so that every tensor is aligned for readers that map the file."""
    order = sorted(manifest.tensors, key=lambda entry: (-ITEM_BYTES[entry.dtype], entry.name))
    spans: dict[str, _Span] = {}
    offset = 0
    for entry in order:
        spans[entry.name] = _Span(entry.dtype, entry.shape, (offset, offset + entry.nbytes))
        offset += entry.nbytes
    header = msgspec.json.encode(spans)
    header += b" " * (-len(header) % 8)
    yield len(header).to_bytes(8, "little") + header
    for entry in order:
        yield pieces[entry.name].data


def _header(file: FileIO) -> tuple[dict[str, _Span], int]:
    """Where each tensor lies, and the offset of the first byte after the header."""
    size = int.from_bytes(file.read(8), "little")
    if size > _HEADER_LIMIT:
        raise TransferError("protocol", f"{file.name} is no safetensors file: a header of {size} bytes")
    try:
        raw = msgspec.json.decode(file.read(size), type=dict[str, msgspec.Raw])
        raw.pop(RESERVED_NAME, None)
        return {name: msgspec.json.decode(span, type=_Span) for name, span in raw.items()}, 8 + size
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise TransferError("protocol", f"{file.name} is no safetensors file: {error}") from error


def _layout(span: _Span) -> Layout:
    return span.dtype, span.shape, span.data_offsets[1] - span.data_offsets[0]


def _slices(file: FileIO, offset: int, nbytes: int) -> Iterator[memoryview]:
    """That range in one reused buffer: each slice is gone when the next is asked for."""
    buffer = memoryview(bytearray(min(nbytes, SLICE_BYTES)))
    file.seek(offset)
    while nbytes:
        count = _read(file, buffer[:nbytes])
        nbytes -= count
        yield buffer[:count]


def _read(file: FileIO, view: memoryview) -> int:
    """At least one byte, straight into the view; a file that ends early is damage."""
    count = file.readinto(view)
    if not count:
        raise TransferError("mismatch", f"{file.name} ends {len(view)} or more bytes early")
    return count


def _verify_tensor(file: FileIO, entry: TensorEntry, offset: int) -> Iterator[int]:
    about = f"{file.name}: tensor {entry.name!r}"
    if offset + entry.nbytes > os.fstat(file.fileno()).st_size:
        raise TransferError("mismatch", f"{about} is cut: the file ends before byte {offset + entry.nbytes}")
    hasher = xxhash.xxh3_128()
    for part in _slices(file, offset, entry.nbytes):
        hasher.update(part)
        yield len(part)
    found = hasher.hexdigest()
    if found != entry.xxh3:
        raise TransferError("mismatch", f"{about}: bytes differ, found xxh3 {found}, expected {entry.xxh3}")


def _verify_name(file: FileIO, blob_digest: str) -> Iterator[int]:
    hasher = hashlib.sha256()
    for part in _slices(file, 0, os.fstat(file.fileno()).st_size):
        hasher.update(part)
        yield len(part)
    found = hasher.hexdigest()
    if found != blob_digest:
        raise TransferError("mismatch", f"{file.name} is damaged outside its tensors: its sha256 is {found}")


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise TransferError("refused", f"no artifact at {path}: copy it there from where it was written") from error
    except OSError as error:
        raise TransferError("closed", f"cannot read {path}: {error.strerror}") from error


def _link(source: Path, target: Path) -> None:
    """Another name for the file, or, on another disk, a durable copy of it."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
        target.chmod(0o444)
        with open(target, "rb") as file:
            os.fsync(file.fileno())


def _hash_file(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _free(where: Path) -> str:
    """Free bytes on the nearest existing parent's disk, as a person reads it."""
    while not where.exists() and where != where.parent:
        where = where.parent
    with contextlib.suppress(OSError):
        return f"{shutil.disk_usage(where).free} bytes free"
    return "free bytes unknown"
