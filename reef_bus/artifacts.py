"""The artifact store: content-addressed blobs in a folder or behind a URL, and weights in them as safetensors.

Knows: sha256, the safetensors layout, manifests. Must not know: the log, sockets, any framework, or how bytes are kept
(`shelf.py`); a blob's name is the only thing it trusts.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import re
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import xxhash

from reef_bus.backends import Pieces
from reef_bus.errors import ContractError, TransferError, Unavailable
from reef_bus.events import Blob
from reef_bus.manifest import Manifest, TensorEntry, describe, layout_differences, require_fit
from reef_bus.safetensors_file import encoded, header
from reef_bus.shelf import SLICE_BYTES, Folder, Opened, Part, Shelf, blob_of, free, hash_file, spread

T = TypeVar("T")

_DIGEST = re.compile(r"[0-9a-f]{64}")


class ArtifactStore:
    """Blobs under `root`, named by what they hold. A blob that `has` reports is whole.

    `root` is a folder, where a blob also survives a power cut, or the URL of one that fsspec reaches (`remote.py` says
    what each protocol promises). Any number of processes may share it. Raises Unavailable for a folder that cannot be
    written, Rejected when an extra is missing; a URL is tried by `probe`, and by whatever is done first."""

    def __init__(self, root: Path | str) -> None:
        self.root = folder_of(root) or str(root)
        with self._writing():
            self._shelf = _shelf(root)

    def probe(self) -> None:
        """Raises Unavailable if nothing can be written here."""
        with self._writing():
            self._shelf.probe()

    def where(self, digest: str) -> str:
        """Where the blob of that name lies, whether or not it is there: for messages."""
        return self._shelf.where(checked(digest))

    def path(self, digest: str) -> Path:
        """As `where`, of a folder. Raises ContractError for a store behind a URL: ask `local` for a file of it."""
        if not isinstance(self._shelf, Folder):
            raise ContractError(f"{self.where(digest)} is no file of this machine")
        return self._shelf.path(checked(digest))

    @contextlib.contextmanager
    def local(self, digest: str) -> Iterator[Path]:
        """A file with the blob's bytes, not compared, while the context lasts: its own, which may be missing, or a copy
        that was brought here. Raises ContractError where there is nothing to bring, Unavailable where that fails."""
        with contextlib.ExitStack() as stack:
            with self._reading(digest):
                path = stack.enter_context(self._shelf.local(checked(digest)))
            yield path

    def has(self, digest: str) -> bool:
        """Whether the blob is there."""
        with self._reading(checked(digest)):
            return self._shelf.has(digest)

    def sound(self, digest: str) -> bool:
        """Whether the blob is there, and its bytes are those that it is named by."""
        if not self.has(digest):
            return False
        with self.local(digest) as path:
            return hash_file(path) == digest

    def put(self, data: Part) -> Blob:
        """Keep `data`. On return it is durable; to put it again changes nothing."""
        return self.put_parts([data])

    def put_parts(self, parts: Iterable[Part]) -> Blob:
        """As `put`, for one blob that lies in several pieces of memory: nothing is joined or copied."""
        with self._writing():
            return self._shelf.write(parts)

    def put_file(self, path: Path) -> Blob:
        """Keep a copy of the file's bytes as they are read, under the digest of exactly those."""
        with open(path, "rb", buffering=0) as file:
            opened = Opened(file, str(path))
            return self.put_parts(_slices(opened, 0, opened.size))

    def keep(self, digest: str, source: Path, named: str = "") -> bool:
        """Have the blob of that name, from the file `source` if it is not there whole: by a hard link where the disk
        allows it, else as a copy. Returns whether it was not there. Raises ContractError, naming the file, or what it
        is a copy of, when `source` is missing or holds other bytes."""
        if self.sound(digest):
            return False
        if not source.is_file():
            raise ContractError(f"no blob at {named or source}: copy it there from the machine that wrote it")
        with self._writing():
            found = self._shelf.take(digest, source)
        if found != digest:
            raise ContractError(f"{named or source} is damaged: its bytes hash to {found}; copy it there again")
        return True

    def get(self, digest: str) -> bytes:
        """The blob, its hash checked. Raises ContractError when it is missing or when other bytes lie in its place."""
        return exhausted(self.arriving(digest))

    def arriving(self, digest: str) -> Generator[int, None, bytes]:
        """As `get`, yielding bytes as they come, and as they are compared."""
        data, hasher = io.BytesIO(), hashlib.sha256()
        with self._reading(checked(digest)):
            opened = yield from self.fetch(digest)
            with opened.file:
                for part in _slices(opened, 0, opened.size):
                    hasher.update(part)
                    data.write(part)
                    yield len(part)
        if (found := hasher.hexdigest()) != digest:
            where = self.where(digest)
            raise ContractError(f"{where} is damaged: its bytes hash to {found}; remove it and copy it there again")
        return data.getvalue()

    def head(self, digest: str, nbytes: int) -> bytes:
        """Its first bytes, by which kinds of blobs are told apart; nothing is compared. Raises as `get`."""
        with self._reading(checked(digest)):
            return self._shelf.head(digest, nbytes)

    def remove(self, digest: str) -> bool:
        """Whether it was there. Who is reading it may not get to its end; who comes later finds nothing."""
        with self._writing():
            return self._shelf.remove(checked(digest))

    def fetch(self, digest: str) -> Generator[int, None, Opened]:
        """Returns the blob's bytes, not compared, yielding how many as they arrive here; a folder's are here. Raises as
        its shelf."""
        return self._shelf.open(checked(digest))

    @contextlib.contextmanager
    def _reading(self, digest: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            where = self.where(digest)
            raise ContractError(f"no blob at {where}: copy it there from the machine that wrote it") from error
        except (OSError, Unavailable) as error:
            raise Unavailable(f"cannot read {self.where(digest)}: {_why(error)}") from error

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except (OSError, Unavailable) as error:
            raise Unavailable(
                f"cannot write artifacts under {self.root}: {_why(error)} ({_room(self.root)}); "
                "make room or give write access there, or configure another artifact folder"
            ) from error


def _shelf(root: Path | str) -> Shelf:
    """A folder, unless a URL says otherwise; fsspec is imported only then."""
    folder = folder_of(root)
    if folder is not None:
        return Folder(folder)
    from reef_bus.remote import Remote

    return Remote(str(root))


def folder_of(root: Path | str) -> Path | None:
    """The folder of this machine that a root names; None for one behind a URL."""
    scheme, sign, path = str(root).partition("://")
    if not sign:
        return Path(root)
    return Path(path) if scheme == "file" else None


def _why(error: OSError | Unavailable) -> str:
    return (error.strerror or "") if isinstance(error, OSError) else str(error)


def _room(root: Path | str) -> str:
    folder = folder_of(root)
    return free(folder) if folder else "what is free there is unknown"


def checked(digest: str) -> str:
    if not _DIGEST.fullmatch(digest):
        raise ContractError(f"{digest!r} names no blob: expected 64 hex digits of sha256")
    return digest


def place(root: Path, digest: str) -> Path:
    """Where a store at `root` has the blob of that name; the store need not be open, or writable."""
    return root.joinpath(*spread(checked(digest)))


def save_weights(store: ArtifactStore, pieces: Pieces) -> tuple[Blob, Manifest]:
    """Keep `pieces` as one safetensors blob, and their manifest as the blob named by its digest.

    The pieces must not change meanwhile. Raises Rejected for what no manifest can describe, Unavailable for a disk
    that takes no more."""
    manifest = describe(pieces)
    blob = store.put_parts(encoded(manifest, pieces))
    store.put(manifest.encode())
    return blob, manifest


def weights_blob(manifest: Manifest, pieces: Pieces) -> Blob:
    """The blob that `save_weights` makes of `pieces`, without writing it: its bytes follow from them alone."""
    return blob_of(encoded(manifest, pieces))


def load_weights(store: ArtifactStore, blob_digest: str, into: Pieces, manifest: Manifest) -> int:
    """Copy the stored weights into `into`'s memory; returns bytes. Nothing is written before all of it was verified.

    Raises TransferError: "mismatch" naming the tensor (target or artifact do not fit the manifest), "refused" if
    the blob is not there, "protocol" if it is no safetensors file, "closed" for a failing disk. Raises Unavailable for
    a server that gives no answer: nothing was written, so that the same call may be tried again."""
    require_fit(manifest, into, writable=True)
    with _transferring(store.where(blob_digest)):
        opened = exhausted(verify_weights(store, blob_digest, manifest))
        with opened.file:
            return sum(copy_weights(opened, into))


def verify_weights(store: ArtifactStore, blob_digest: str, manifest: Manifest) -> Generator[int, None, Opened]:
    """Fetch the artifact and compare it with the manifest (layout, then every tensor's hash) and with its own name,
    yielding bytes per step; returns it, open. Tensors come first, so that damage is told by a tensor's name; sha256
    covers what lies between them."""
    opened = yield from store.fetch(blob_digest)
    try:
        yield from _compare(opened, blob_digest, manifest)
    except BaseException:
        opened.file.close()
        raise
    return opened


def _compare(opened: Opened, blob_digest: str, manifest: Manifest) -> Iterator[int]:
    spans, start = header(opened)
    said = layout_differences(manifest, {name: span.layout for name, span in spans.items()})
    if said:
        raise TransferError("mismatch", f"{opened.where}: {said[0]}")
    for entry in manifest.tensors:
        yield from _verify_tensor(opened, entry, start + spans[entry.name].data_offsets[0])
    yield from _verify_name(opened, blob_digest)


def copy_weights(opened: Opened, into: Pieces) -> Generator[int, None, None]:
    """Read a verified artifact straight into `into`'s memory, yielding bytes per step. Abandon it between two steps and
    nothing is written any more."""
    opened.file.seek(0)
    spans, start = header(opened)
    for name, piece in into.items():
        opened.file.seek(start + spans[name].data_offsets[0])
        rest = piece.data
        while rest:
            count = _read(opened, rest[:SLICE_BYTES])
            rest = rest[count:]
            yield count


def exhausted(steps: Generator[int, None, T]) -> T:
    """What the generator returns; nobody looks at its steps."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            found: T = end.value
            return found


def _slices(opened: Opened, offset: int, nbytes: int) -> Iterator[memoryview]:
    """That range in one reused buffer: each slice is gone when the next is asked for."""
    buffer = memoryview(bytearray(min(nbytes, SLICE_BYTES)))
    opened.file.seek(offset)
    while nbytes:
        count = _read(opened, buffer[:nbytes])
        nbytes -= count
        yield buffer[:count]


def _read(opened: Opened, view: memoryview) -> int:
    """At least one byte, straight into the view; a file that ends early is damage."""
    count = opened.file.readinto(view)
    if not count:
        raise TransferError("mismatch", f"{opened.where} ends {len(view)} or more bytes early")
    return count


def _verify_tensor(opened: Opened, entry: TensorEntry, offset: int) -> Iterator[int]:
    about = f"{opened.where}: tensor {entry.name!r}"
    if offset + entry.nbytes > opened.size:
        raise TransferError("mismatch", f"{about} is cut: the file ends before byte {offset + entry.nbytes}")
    hasher = xxhash.xxh3_128()
    for part in _slices(opened, offset, entry.nbytes):
        hasher.update(part)
        yield len(part)
    found = hasher.hexdigest()
    if found != entry.xxh3:
        raise TransferError("mismatch", f"{about}: bytes differ, found xxh3 {found}, expected {entry.xxh3}")


def _verify_name(opened: Opened, blob_digest: str) -> Iterator[int]:
    hasher = hashlib.sha256()
    for part in _slices(opened, 0, opened.size):
        hasher.update(part)
        yield len(part)
    found = hasher.hexdigest()
    if found != blob_digest:
        raise TransferError("mismatch", f"{opened.where} is damaged outside its tensors: its sha256 is {found}")


@contextlib.contextmanager
def _transferring(where: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise TransferError("refused", f"no artifact at {where}: copy it there from where it was written") from error
    except OSError as error:
        raise TransferError("closed", f"cannot read {where}: {error.strerror}") from error
    except Unavailable as error:
        raise Unavailable(f"cannot read {where}: {error}") from error
