"""A shelf behind an fsspec URL: an object store, or a server of files.

Knows: fsspec, one connection per thread, temporary keys. Must not know: what a blob holds, or who asks for it.

A blob is written under `incoming/`, and appears under its name by one move, after its size there was compared. Relied
upon is that a move shows the whole blob under its new name, or nothing.

  s3, gs, abfs, …     a copy made by the server, which shows an object once it is complete; durable when acknowledged. A
                      writer that is killed leaves parts, which a rule of the bucket should remove
  sftp, ftp, webhdfs  a rename by the server; what it acknowledged may be lost with its power, so that server's disk is
                      to be one that does not lose it (a blob is compared with its name whenever it is read)

Weights are read by way of a temporary file, so TMPDIR has to have room for one version.
`file://` is the local folder, with all of its promises; `memory://` and chains of protocols are refused.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import secrets
import tempfile
import threading
import urllib.parse
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from reef_bus.errors import Rejected, Unavailable
from reef_bus.events import Blob
from reef_bus.shelf import INCOMING, SLICE_BYTES, Opened, Part, Shelf, blob_of, free, spread

T = TypeVar("T")

OBJECTS = {"abfs", "abfss", "adl", "az", "gcs", "gs", "oci", "oss", "s3", "s3a"}
"""Stores without folders: there, what fsspec would make for a missing one is a bucket."""

UPLOAD_BYTES = 64 << 20  # a part of an upload: object stores take 10,000 of them, so a blob of 640 GB


class Remote(Shelf):
    """Blobs under a URL; nobody is asked before the first call. Nothing is held open between two calls but a connection
    per thread; one that was lost is made anew, once per call, before the call fails."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._kind = _filesystem(urllib.parse.urlsplit(url).scheme)
        self._root = str(self._kind._strip_protocol(self.url)).rstrip("/")
        self._objects = urllib.parse.urlsplit(url).scheme in OBJECTS
        self._own = threading.local()

    def probe(self) -> None:
        """By the way of a blob, the move included."""
        probe = self.write([secrets.token_bytes(16)])
        self._call(lambda fs: fs.rm_file(self._key(probe.digest)))

    def where(self, digest: str) -> str:
        return "/".join((self.url, *spread(digest)))

    def has(self, digest: str) -> bool:
        return self._size(self._key(digest)) is not None

    def write(self, parts: Iterable[Part]) -> Blob:
        with self._draft(parts) as (draft, blob):
            if self._size(self._key(blob.digest)) != blob.size:
                self._adopt(draft, blob)
        return blob

    def take(self, digest: str, source: Path) -> str:
        with open(source, "rb") as file, self._draft(iter(lambda: file.read(SLICE_BYTES), b"")) as (draft, blob):
            if blob.digest == digest:
                self._adopt(draft, blob)
        return blob.digest

    def remove(self, digest: str) -> bool:
        key = self._key(digest)
        if self._size(key) is None:
            return False
        try:
            self._call(lambda fs: fs.rm_file(key))
        except (Unavailable, FileNotFoundError):  # another one did; or an answer was lost
            if self._size(key) is not None:
                raise
        return True

    def head(self, digest: str, nbytes: int) -> bytes:
        size = self._known(digest)
        return self._range(digest, 0, min(nbytes, size))

    def open(self, digest: str) -> Generator[int, None, Opened]:
        """By way of a temporary file that has no name: the weights cross the network once, and are never whole in
        memory."""
        with _room_here():
            file = tempfile.TemporaryFile(buffering=0)
        try:
            for data in self._slices(digest):
                with _room_here():
                    file.write(data)
                yield len(data)
            file.seek(0)
        except BaseException:
            file.close()
            raise
        return Opened(file, self.where(digest))

    @contextlib.contextmanager
    def local(self, digest: str) -> Iterator[Path]:
        with tempfile.NamedTemporaryFile(prefix="reef-") as file:
            for data in self._slices(digest):
                with _room_here():
                    file.write(data)
                    file.flush()
            yield Path(file.name)

    # -- reading

    def _slices(self, digest: str) -> Iterator[bytes]:
        size = self._known(digest)
        for begin in range(0, size, SLICE_BYTES):
            yield self._range(digest, begin, min(begin + SLICE_BYTES, size))

    def _range(self, digest: str, begin: int, end: int) -> bytes:
        data: bytes = self._call(functools.partial(_range, self._key(digest), begin, end)) if begin < end else b""
        if len(data) != end - begin:
            raise Unavailable(f"found {len(data)} bytes at {begin}, expected {end - begin}")
        return data

    def _known(self, digest: str) -> int:
        """The size of a blob that has to be there."""
        size = self._size(self._key(digest))
        if size is None:
            raise FileNotFoundError(errno.ENOENT, "nothing is there", self.where(digest))
        return size

    def _size(self, key: str) -> int | None:
        """None for what is not there. Never from a listing that was kept: others write here, too."""

        def look(fs: Any) -> int | None:
            fs.invalidate_cache()
            with contextlib.suppress(FileNotFoundError):
                info = fs.info(key)
                return int(info["size"]) if info["type"] == "file" else None
            return None

        return self._call(look)

    # -- writing

    @contextlib.contextmanager
    def _draft(self, parts: Iterable[Part]) -> Iterator[tuple[str, Blob]]:
        """A key of our own with the parts, which is gone afterwards."""
        draft = f"{self._root}/{INCOMING}/{secrets.token_hex(16)}"
        self._folder(draft)
        try:
            blob = self._upload(draft, parts)
            if (size := self._size(draft)) != blob.size:
                raise Unavailable(f"it keeps {size} bytes of {blob.size}")
            yield draft, blob
        finally:
            with contextlib.suppress(Unavailable, FileNotFoundError):
                if self._size(draft) is not None:
                    self._call(lambda fs: fs.rm_file(draft))

    def _upload(self, draft: str, parts: Iterable[Part]) -> Blob:
        """What the parts themselves raise is none of ours."""
        with _answered(self.url):
            file = self._fs().open(draft, "wb", block_size=UPLOAD_BYTES)

        def keep(part: Part) -> None:
            with _answered(self.url):
                file.write(part)

        try:
            return blob_of(_small(parts), keep)
        finally:
            with _answered(self.url):
                file.close()

    def _folder(self, key: str) -> None:
        """Have the folder that the key is in, on a connection that works: an upload is not tried twice."""
        folder = key.rpartition("/")[0]
        if self._objects:
            self._size(key)
        else:
            self._call(lambda fs: fs.makedirs(folder, exist_ok=True))

    def _adopt(self, draft: str, blob: Blob) -> None:
        """Others may do the same at this moment: whoever is told that it is there already has what it wanted."""
        key = self._key(blob.digest)
        with contextlib.suppress(Unavailable):  # another one made it at this moment; if not, the move tells
            self._folder(key)
        try:
            with _answered(self.url):
                self._fs().mv(draft, key)
        except (Unavailable, FileNotFoundError):
            if self._size(key) != blob.size:
                raise
        if (size := self._size(key)) != blob.size:
            raise Unavailable(f"{key} has {size} bytes after the move, expected {blob.size}")

    # -- connections

    def _key(self, digest: str) -> str:
        return "/".join((self._root, *spread(digest)))

    def _fs(self) -> Any:
        """This thread's: many protocols keep one connection, on which two threads would talk at once."""
        if not hasattr(self._own, "fs"):
            with _answered(self.url):
                self._own.fs = self._kind(**self._kind._get_kwargs_from_urls(self.url), skip_instance_cache=True)
        return self._own.fs

    def _call(self, ask: Callable[[Any], T]) -> T:
        """Servers drop who was quiet for minutes, so what fails is tried once more, on another connection. `ask` may
        be repeated."""
        with contextlib.suppress(Unavailable), _answered(self.url):
            return ask(self._fs())
        self._own.__dict__.pop("fs", None)
        with _answered(self.url):
            return ask(self._fs())


def _filesystem(protocol: str) -> Any:
    """fsspec's class. Raises Rejected for what is not installed, with the command that installs it."""
    try:
        import fsspec
    except ImportError as error:
        raise Rejected(f"artifacts at {protocol}:// need an extra: pip install 'reef-bus[remote]'") from error
    try:
        kind = fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        raise Rejected(f"artifacts at {protocol}:// need another package: {error}") from error
    except ValueError as error:
        raise Rejected(f"artifacts at {protocol}://: fsspec knows no such protocol") from error
    return kind


def _range(key: str, begin: int, end: int, fs: Any) -> Any:
    return fs.cat_file(key, start=begin, end=end)


@contextlib.contextmanager
def _answered(where: str) -> Iterator[None]:
    """Every protocol has errors of its own. What is not there is an answer; everything else is none."""
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(errno.ENOENT, "nothing is there", where) from error
    except Exception as error:
        raise Unavailable(_line(error)) from error


def _line(error: BaseException) -> str:
    first = (getattr(error, "strerror", None) or str(error)).strip().partition("\n")[0]
    return first if isinstance(error, OSError) and error.strerror else f"{type(error).__name__}: {first}"


@contextlib.contextmanager
def _room_here() -> Iterator[None]:
    """For the copy on this machine, whose disk is not the one that is being read."""
    try:
        yield
    except OSError as error:
        folder = tempfile.gettempdir()
        text = f"{error.strerror} in {folder} ({free(Path(folder))}), where blobs are copied to; TMPDIR names another"
        raise OSError(error.errno, text, folder) from error


def _small(parts: Iterable[Part]) -> Iterator[Part]:
    """No part larger than a slice: what is written is copied into the upload's buffer."""
    for part in parts:
        view = memoryview(part)
        for start in range(0, view.nbytes, SLICE_BYTES):
            yield view[start : start + SLICE_BYTES]
