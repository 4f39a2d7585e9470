"""One suite over the places that artifacts may lie in: a folder, its file:// URL, and an FTP server as a real process.

What is damaged or looked at behind the store's back is a file in every one of them.
"""

from __future__ import annotations

import asyncio
import hashlib
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from reef_bus import artifacts, remote
from reef_bus.artifacts import ArtifactStore, load_weights, save_weights
from reef_bus.backends import Piece
from reef_bus.config import build
from reef_bus.errors import ContractError, Rejected, TransferError, Unavailable
from reef_bus.events import Blob
from reef_bus.manifest import describe
from reef_bus.shelf import SLICE_BYTES
from reef_bus.stored import read
from reef_bus.transport import Ticket
from reef_bus.transport.files import FilesTransport
from tests.ftp_server import FtpServer, eventually, ftp_server
from tests.transfers import BIG, fails, pieces, receive, run, still

ROOT = Path(__file__).parents[2]
MISSING = "0" * 64


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FtpServer]:
    with ftp_server(tmp_path_factory.mktemp("served")) as server:
        yield server


class Place:
    """A store, where others find it, and the files behind it."""

    def __init__(self, root: Path | str, folder: Path) -> None:
        self.root, self.folder, self.store = root, folder, ArtifactStore(root)

    def file(self, blob: Blob) -> Path:
        return self.folder / blob.digest[:2] / blob.digest[2:4] / blob.digest

    def damage(self, blob: Blob, at: int) -> None:
        data = bytearray(self.file(blob).read_bytes())
        data[at] ^= 1
        self.file(blob).chmod(0o644)
        self.file(blob).write_bytes(data)

    def files(self) -> list[Path]:
        return [path for path in self.folder.rglob("*") if path.is_file()]


@pytest.fixture(params=["folder", "file", "ftp"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param != "ftp":
        folder = tmp_path / "artifacts"
        return Place(folder if request.param == "folder" else f"file://{folder}", folder)
    server: FtpServer = request.getfixturevalue("served")
    return Place(f"{server.url}/{tmp_path.name}", server.folder / tmp_path.name)


@pytest.fixture
def far(served: FtpServer, tmp_path: Path) -> Place:
    return Place(f"{served.url}/{tmp_path.name}", served.folder / tmp_path.name)


# What a store promises, wherever it lies.


@pytest.mark.parametrize("data", [b"reef", b"", bytes(range(256)) * 70_000], ids=["small", "empty", "two slices"])
def test_a_blob_is_named_by_its_sha256_and_comes_back(place: Place, data: bytes) -> None:
    blob = place.store.put(data)
    assert blob == Blob(digest=hashlib.sha256(data).hexdigest(), size=len(data))
    assert place.store.has(blob.digest) and place.store.get(blob.digest) == data
    assert place.files() == [place.file(blob)] and place.file(blob).read_bytes() == data
    with place.store.local(blob.digest) as path:
        assert path.read_bytes() == data


def test_to_put_the_same_again_changes_nothing(place: Place) -> None:
    before = place.file(place.store.put(b"reef")).stat()
    after = place.file(ArtifactStore(place.root).put(b"reef")).stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    assert len(place.files()) == 1


def test_several_writers_of_the_same_blob_are_harmless(place: Place) -> None:
    data, failed = bytes(3 << 20), list[BaseException]()

    def write() -> None:
        try:
            ArtifactStore(place.root).put(data)
        except BaseException as error:
            failed.append(error)

    writers = [threading.Thread(target=write) for _ in range(6)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert failed == [] and len(place.files()) == 1
    assert place.store.get(hashlib.sha256(data).hexdigest()) == data


def test_a_writer_that_is_killed_leaves_no_blob(place: Place) -> None:
    """It has written 80 MiB of a blob, in a process of its own."""
    script = (
        "import sys; from reef_bus.artifacts import ArtifactStore\n"
        "def parts():\n"
        "    for n in range(6):\n"
        "        yield bytes([n]) * (16 << 20)\n"
        "    print('in the middle', flush=True); sys.stdin.read()\n"
        "ArtifactStore(sys.argv[1]).put_parts(parts())\n"
    )
    command = [sys.executable, "-c", script, str(place.root)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None and writer.stdout.readline() == b"in the middle\n"
        writer.kill()
    assert place.files() and all(path.parent.name == "incoming" for path in place.files())
    whole = b"".join(bytes([n]) * (16 << 20) for n in range(6))
    assert not place.store.has(hashlib.sha256(whole).hexdigest())
    assert place.store.get(place.store.put(whole).digest) == whole


def test_a_writer_that_changes_its_mind_is_heard_and_leaves_nothing(place: Place) -> None:
    def parts() -> Iterator[bytes]:
        yield bytes(20 << 20)
        raise TransferError("mismatch", "the source ends early")

    with pytest.raises(TransferError, match="the source ends early"):
        place.store.put_parts(parts())
    assert place.files() == []


def test_what_is_missing_is_named_by_where_it_would_be(place: Place) -> None:
    where = f"{str(place.root).removeprefix('file://')}/00/00/{MISSING}"
    with pytest.raises(ContractError, match=f"no blob at {where}: copy it there"):
        place.store.get(MISSING)
    with pytest.raises(TransferError, match=f"no artifact at {where}") as caught:
        load_weights(place.store, MISSING, pieces(0), describe(pieces(1)))
    assert caught.value.cause == "refused" and not place.store.has(MISSING)


def test_a_damaged_blob_is_never_returned(place: Place) -> None:
    blob = place.store.put(b"reef")
    assert place.store.sound(blob.digest)
    place.damage(blob, 2)
    assert place.store.has(blob.digest) and not place.store.sound(blob.digest)
    with pytest.raises(ContractError, match=f"{blob.digest} is damaged: its bytes hash to"):
        place.store.get(blob.digest)


def test_a_blob_is_mended_from_a_file_and_other_bytes_are_never_taken(place: Place, tmp_path: Path) -> None:
    blob, source = place.store.put(b"reef"), tmp_path / "source"
    source.write_bytes(b"reef")
    assert place.store.keep(blob.digest, source) is False
    place.damage(blob, 0)
    assert place.store.keep(blob.digest, source) is True and place.store.get(blob.digest) == b"reef"
    source = tmp_path / "rot"
    source.write_bytes(b"rot!")
    with pytest.raises(ContractError, match=f"{source} is damaged: its bytes hash to"):
        place.store.keep(MISSING, source)
    assert place.files() == [place.file(blob)]


def test_the_first_bytes_are_had_without_the_others(place: Place) -> None:
    blob, empty = place.store.put(b"reef" * (8 << 20)), place.store.put(b"")
    assert [place.store.head(blob.digest, n) for n in (0, 6)] == [b"", b"reefre"]
    assert place.store.head(place.store.put(b"reef").digest, 6) == b"reef" and place.store.head(empty.digest, 6) == b""
    with pytest.raises(ContractError, match=f"no blob at .*{MISSING}"):
        place.store.head(MISSING, 6)


def test_what_is_removed_is_gone_for_everybody(place: Place) -> None:
    blob, other = place.store.put(b"reef"), ArtifactStore(place.root)
    assert other.remove(blob.digest) is True and not place.store.has(blob.digest)
    assert other.remove(blob.digest) is False and place.files() == []
    assert place.store.get(place.store.put(b"reef").digest) == b"reef"


def test_weights_come_back_byte_for_byte(place: Place) -> None:
    blob, manifest = save_weights(place.store, pieces(7, BIG))
    assert describe(read(ArtifactStore(place.root), blob.digest, manifest)) == manifest
    with pytest.raises(TransferError, match="'b': bytes differ"):
        load_weights(place.store, blob.digest, pieces(0, BIG), describe(pieces(8, BIG)))


def test_damage_is_told_by_the_tensor_before_a_byte_of_the_target_changes(place: Place) -> None:
    blob, manifest = save_weights(place.store, pieces(7))
    place.damage(blob, -1)
    target = pieces(0)
    with pytest.raises(TransferError, match="tensor 'w': bytes differ") as caught:
        load_weights(place.store, blob.digest, target, manifest)
    assert caught.value.cause == "mismatch" and describe(target) == describe(pieces(0))


def test_a_transfer_reports_progress_and_arrives(place: Place) -> None:
    blob, manifest = save_weights(place.store, pieces(7, BIG))
    seen, target = list[int](), pieces(0, BIG)
    run_receive(place, blob, target, progress=seen.append)
    assert describe(target) == manifest and seen == sorted(seen) and seen[-1] == BIG + 8
    assert len(seen) >= BIG // SLICE_BYTES


def run_receive(place: Place, blob: Blob, target: dict[str, Piece], **more: object) -> None:
    ticket, manifest = Ticket("files", blob.digest, ""), describe(pieces(7, BIG))
    asyncio.run(receive(FilesTransport(place.store), ticket, manifest, target, **more))


# What can happen to a server.


def test_weights_are_verified_without_holding_them(far: Place) -> None:
    """Of six slices, about three were in memory at any time; the target was there before."""
    blob, manifest = save_weights(far.store, pieces(7, 6 * SLICE_BYTES))
    target = pieces(0, 6 * SLICE_BYTES)
    tracemalloc.start()
    load_weights(far.store, blob.digest, target, manifest)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert describe(target) == manifest and peak < 3.5 * SLICE_BYTES


def test_a_store_finds_its_server_again_after_that_was_down(far: Place, served: FtpServer) -> None:
    blob = far.store.put(b"reef")
    ticket = Ticket("files", blob.digest, "")
    served.kill()
    try:
        with pytest.raises(Unavailable, match=r"^cannot read ftp://.*: Connection refused$"):
            far.store.get(blob.digest)
        with pytest.raises(Unavailable, match=r"^cannot write artifacts under ftp://.*: Connection refused"):
            far.store.put(b"more")
        with pytest.raises(Unavailable, match=r"^cannot write artifacts under ftp://.*: Connection refused"):
            ArtifactStore(far.root).probe()
        with pytest.raises(Unavailable, match=r"^cannot read ftp://.*: Connection refused$"):  # and not a failed load
            load_weights(far.store, blob.digest, pieces(0), describe(pieces(1)))
        asyncio.run(fails("closed", receive(FilesTransport(far.store), ticket, describe(pieces(1)), pieces(0))))
    finally:
        served.start()
    assert far.store.get(blob.digest) == b"reef" and far.store.has(far.store.put(b"more").digest)
    far.store.probe()
    assert len(far.files()) == 2


def test_a_server_that_was_started_again_between_two_calls_is_no_failure(far: Place, served: FtpServer) -> None:
    """As one that drops who was quiet for long."""
    blob = far.store.put(b"reef")
    for use in (lambda: far.store.get(blob.digest), lambda: far.store.put(bytes(1 << 20))):
        served.kill()
        served.start()
        use()


def test_a_server_that_stops_is_found_by_the_deadline_and_the_next_transfer_works(
    far: Place, served: FtpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    blob, manifest = save_weights(far.store, pieces(7, BIG))
    ticket, target = Ticket("files", blob.digest, ""), pieces(0, BIG)
    fetched = threading.Event()
    original = remote._range

    def stopping(key: str, begin: int, end: int, fs: object) -> object:
        data = original(key, begin, end, fs)
        if not fetched.is_set():
            served.stop()
            fetched.set()
        return data

    monkeypatch.setattr(remote, "_range", stopping)

    async def story() -> None:
        try:
            await fails(
                "stalled", receive(FilesTransport(far.store), ticket, manifest, target, stall_s=2.0), within_s=8
            )
            assert fetched.is_set()
            await still(target)
            assert describe(target) == describe(pieces(0, BIG))
        finally:
            served.resume()  # the thread that was left behind reads on, or the loop would wait for it
        await receive(FilesTransport(far.store), ticket, manifest, target)
        assert describe(target) == manifest

    run(story())


def test_a_transfer_that_is_given_up_stops_reading(far: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    blob, manifest = save_weights(far.store, pieces(7, 5 * SLICE_BYTES))
    asked, may_end = list[int](), threading.Event()
    original = remote._range

    def slow(key: str, begin: int, end: int, fs: object) -> object:
        asked.append(begin)
        assert may_end.wait(10)
        return original(key, begin, end, fs)

    monkeypatch.setattr(remote, "_range", slow)

    async def story() -> None:
        target = pieces(0, 5 * SLICE_BYTES)
        transfer = asyncio.create_task(
            receive(FilesTransport(far.store), Ticket("files", blob.digest, ""), manifest, target)
        )
        await asyncio.to_thread(eventually, lambda: bool(asked))
        transfer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await transfer
        may_end.set()
        await still(target)

    run(story())
    assert len(asked) == 1


def test_a_disk_without_room_for_the_copy_is_told_by_name(far: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    blob, manifest = save_weights(far.store, pieces(7))
    monkeypatch.setattr(remote.tempfile, "TemporaryFile", lambda **_: open("/dev/full", "wb", buffering=0))
    with pytest.raises(TransferError, match=r"No space left on device in .* where blobs are copied to; TMPDIR names"):
        load_weights(far.store, blob.digest, pieces(0), manifest)


# What a configuration may say.


def test_an_extra_that_is_missing_is_one_line_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Rejected, match="fsspec knows no such protocol"):
        ArtifactStore("pigeon://loft/reef")
    with pytest.raises(Rejected, match=r"^artifacts at s3:// need another package: Install s3fs to access S3$"):
        monkeypatch.setitem(sys.modules, "s3fs", None)
        ArtifactStore("s3://bucket/reef")
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(Rejected, match=r"^artifacts at s3:// need an extra: pip install 'reef-bus\[remote\]'$"):
        ArtifactStore("s3://bucket/reef")


@pytest.mark.parametrize(
    ("where", "says"),
    [
        ("memory://reef", "every process reaches by itself"),
        ("simplecache::s3://reef", "expected a folder, or one protocol"),
        ("file://reef/artifacts", "expected file:///FOLDER"),
        ("file://localhost/mnt/reef", "expected file:///FOLDER"),
        ("ftp://ada:secret@host/reef", r"'ftp://host/reef' with a password.*set FSSPEC_FTP_PASSWORD"),
    ],
)
def test_a_url_that_would_not_do_is_refused_without_showing_its_password(where: str, says: str) -> None:
    with pytest.raises(Rejected, match=says) as caught:
        build("here", {"artifacts": {"at": where}})
    assert "secret" not in str(caught.value)


def test_artifacts_lie_in_the_state_folder_unless_something_else_is_configured() -> None:
    assert build("here", {"state-dir": "/s"}).artifact_root() == Path("/s/artifacts")
    assert build("here", {"state-dir": "/s", "artifacts": {"at": "/mnt/reef"}}).artifact_root() == Path("/mnt/reef")
    assert build("here", {"artifacts": {"at": "s3://reef/a"}}).artifact_root() == "s3://reef/a"
    assert artifacts.folder_of("file:///mnt/reef") == Path("/mnt/reef")
