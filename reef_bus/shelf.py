"""Where an artifact store's blobs lie: the port, and a local folder.

Knows: files, their durability, sha256. Must not know: what a blob holds, or who asks for it.
A shelf raises OSError, as a disk does: FileNotFoundError for what is not there; and Unavailable for a server that gives
no answer.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from reef_bus.events import Blob

SLICE_BYTES = 16 << 20
"""Blobs are read in slices of this size: a reader may be stopped, or report progress, between two of them."""

INCOMING = "incoming"

Part = bytes | memoryview


class Opened(NamedTuple):
    """A blob's bytes in a file of this machine, and how a message names it. Whoever holds it closes the file."""

    file: FileIO
    where: str

    @property
    def size(self) -> int:
        return os.fstat(self.file.fileno()).st_size


class Shelf(ABC):
    """Blobs by the sha256 of their bytes. A blob is there whole, or not there: however many write it, and whoever dies
    while writing. A writer that was killed leaves something under `incoming`, and nothing else."""

    @abstractmethod
    def probe(self) -> None:
        """Raises if nothing can be written here, or removed again."""

    @abstractmethod
    def where(self, digest: str) -> str:
        """How a message names the blob."""

    @abstractmethod
    def has(self, digest: str) -> bool:
        """Whether the blob is there."""

    @abstractmethod
    def write(self, parts: Iterable[Part]) -> Blob:
        """Keep what the parts make together; a blob that is there already stays as it is."""

    @abstractmethod
    def take(self, digest: str, source: Path) -> str:
        """Put the file's bytes in the place of the blob `digest`, if they hash to it. Returns what they hash to."""

    @abstractmethod
    def remove(self, digest: str) -> bool:
        """Whether it was there. Who has it open in a folder reads it to its end; who comes later finds nothing."""

    @abstractmethod
    def head(self, digest: str, nbytes: int) -> bytes:
        """The blob's first bytes, not compared: as many, or all that it has."""

    @abstractmethod
    def open(self, digest: str) -> Generator[int, None, Opened]:
        """Returns the blob's bytes, not compared with their name; yields those that had to be brought here first."""

    @abstractmethod
    def local(self, digest: str) -> AbstractContextManager[Path]:
        """The path of a file with the blob's bytes, for as long as the context lasts."""


class Folder(Shelf):
    """On a local disk, or one that is mounted. What is there survives a power cut."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._incoming = root / INCOMING
        self._incoming.mkdir(parents=True, exist_ok=True)
        self.probe()

    def probe(self) -> None:
        probe = self._incoming / f"probe-{secrets.token_hex(8)}"
        probe.touch(exist_ok=False)
        probe.unlink()

    def path(self, digest: str) -> Path:
        return self.root.joinpath(*spread(digest))

    def where(self, digest: str) -> str:
        return str(self.path(digest))

    def has(self, digest: str) -> bool:
        return self.path(digest).is_file()

    def write(self, parts: Iterable[Part]) -> Blob:
        with self._draft() as draft:
            blob = blob_of(parts, draft.write)
            if not self.has(blob.digest):
                draft.flush()
                os.fsync(draft.fileno())
                self._adopt(Path(draft.name), self.path(blob.digest))
        return blob

    def take(self, digest: str, source: Path) -> str:
        """By a hard link where the disk allows it, else as a copy."""
        draft = self._incoming / secrets.token_hex(16)
        try:
            _link(source, draft)
            found = hash_file(draft)
            if found == digest:
                self._adopt(draft, self.path(digest))
            return found
        finally:
            draft.unlink(missing_ok=True)

    def remove(self, digest: str) -> bool:
        found = self.has(digest)
        self.path(digest).unlink(missing_ok=True)
        return found

    def head(self, digest: str, nbytes: int) -> bytes:
        with open(self.path(digest), "rb") as file:
            return file.read(nbytes)

    def open(self, digest: str) -> Generator[int, None, Opened]:
        yield from ()
        path = self.path(digest)
        return Opened(open(path, "rb", buffering=0), str(path))

    @contextlib.contextmanager
    def local(self, digest: str) -> Iterator[Path]:
        yield self.path(digest)

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
            sync_folder(folder.parent)
        os.replace(draft, final)
        sync_folder(final.parent)


def spread(digest: str) -> tuple[str, str, str]:
    """The folders that a blob lies in, and its name."""
    return digest[:2], digest[2:4], digest


def blob_of(parts: Iterable[Part], write: Callable[[Part], Any] | None = None) -> Blob:
    """The blob that the parts make together; each is written, if there is something to write to."""
    hasher, size = hashlib.sha256(), 0
    for part in parts:
        hasher.update(part)
        size += memoryview(part).nbytes
        if write is not None:
            write(part)
    return Blob(digest=hasher.hexdigest(), size=size)


def hash_file(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def free(where: Path) -> str:
    """Free bytes on the nearest existing parent's disk, as a person reads it."""
    while not where.exists() and where != where.parent:
        where = where.parent
    with contextlib.suppress(OSError):
        return f"{shutil.disk_usage(where).free} bytes free"
    return "free bytes unknown"


def _link(source: Path, target: Path) -> None:
    """Another name for the file, or, on another disk, a durable copy of it."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
        target.chmod(0o444)
        with open(target, "rb") as file:
            os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """The names in it outlive the power from here on."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
