"""The artifact store: whole or absent, verified when read; weights as files that safetensors itself can read."""

from __future__ import annotations

import errno
import hashlib
import os
import struct
import sys
from pathlib import Path

import numpy
import pytest
import safetensors
import safetensors.numpy

from reef_bus.artifacts import ArtifactStore, Blob, load_weights, save_weights, weights_blob
from reef_bus.backends import Piece
from reef_bus.errors import ContractError, TransferError, Unavailable
from reef_bus.manifest import Manifest, describe

NUMPY_NAMES = {"F32": "float32", "F16": "float16", "U8": "uint8", "I64": "int64"}


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(tmp_path / "artifacts")


def pieces(fill: int = 1) -> dict[str, Piece]:
    """Dtypes out of the order of their names, an odd size, a scalar and an empty tensor."""
    layout = [("a", "U8", (3,)), ("b", "F32", (2, 5)), ("c", "I64", ()), ("d", "F16", (4,)), ("e", "F32", (0,))]
    sizes = {"U8": 1, "F32": 4, "I64": 8, "F16": 2}
    return {
        name: Piece(dtype, shape, memoryview(bytearray([fill]) * (sizes[dtype] * int(numpy.prod(shape)))))
        for name, dtype, shape in layout
    }


def files_under(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_file()]


def damage(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)


def test_a_blob_is_named_by_its_sha256_and_comes_back(store: ArtifactStore) -> None:
    blob = store.put(b"reef")
    assert blob == Blob(digest=hashlib.sha256(b"reef").hexdigest(), size=4)
    assert store.get(blob.digest) == b"reef" and store.has(blob.digest)
    assert store.path(blob.digest).relative_to(store.root).parts == (blob.digest[:2], blob.digest[2:4], blob.digest)


def test_to_put_the_same_again_changes_nothing(store: ArtifactStore) -> None:
    before = store.path(store.put(b"reef").digest).stat()
    assert store.put(memoryview(b"reef")).size == 4
    after = store.path(store.put(b"reef").digest).stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    assert len(files_under(store.root)) == 1


def test_a_file_is_kept_under_the_digest_of_what_was_read(store: ArtifactStore, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"x" * 100_000)
    assert store.get(store.put_file(source).digest) == source.read_bytes()
    source.write_bytes(b"")
    assert store.put_file(source) == Blob(hashlib.sha256(b"").hexdigest(), 0)


def test_a_damaged_blob_is_never_returned(store: ArtifactStore) -> None:
    blob = store.put(b"reef")
    damage(store.path(blob.digest), 2)
    with pytest.raises(ContractError, match="damaged"):
        store.get(blob.digest)


def test_a_missing_blob_is_named_by_its_path(store: ArtifactStore) -> None:
    digest = "0" * 64
    with pytest.raises(ContractError, match=str(store.path(digest))):
        store.get(digest)


@pytest.mark.parametrize("digest", ["", "../../etc/passwd", "A" * 64, "0" * 63, "0" * 64 + "\n"])
def test_only_digests_name_blobs(store: ArtifactStore, digest: str) -> None:
    with pytest.raises(ContractError):
        store.path(digest)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES])
@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_disk_that_refuses_is_one_line_and_leaves_no_half_file(
    store: ArtifactStore, monkeypatch: pytest.MonkeyPatch, code: int, call: str
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, call, refuse)
    with pytest.raises(Unavailable, match=r"cannot write artifacts under .* bytes free\)") as caught:
        store.put(b"reef")
    assert os.strerror(code) in str(caught.value) and "\n" not in str(caught.value)
    monkeypatch.undo()
    assert files_under(store.root) == []
    assert store.get(store.put(b"reef").digest) == b"reef"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="uses Linux's resource limit on file size")
def test_a_file_that_really_cannot_grow_leaves_nothing(store: ArtifactStore) -> None:
    import resource
    import signal

    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
        with pytest.raises(Unavailable):
            store.put(bytes(1 << 20))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert files_under(store.root) == []


def test_a_folder_that_cannot_be_one_is_told_at_construction(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(Unavailable, match="taken"):
        ArtifactStore(tmp_path / "taken")


def test_a_folder_that_refuses_writes_is_told_at_construction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "touch", refuse)
    with pytest.raises(Unavailable, match="Read-only"):
        ArtifactStore(tmp_path)


def test_saved_weights_are_the_very_file_that_safetensors_writes(store: ArtifactStore) -> None:
    source = pieces()
    arrays = {
        name: numpy.frombuffer(bytes(p.data), dtype=NUMPY_NAMES[p.dtype]).reshape(p.shape) for name, p in source.items()
    }
    blob, manifest = save_weights(store, source)
    assert store.get(blob.digest) == safetensors.numpy.save(arrays)
    assert blob.size == store.path(blob.digest).stat().st_size
    assert weights_blob(manifest, source) == blob
    found = dict(safetensors.deserialize(store.get(blob.digest)))  # type: ignore[no-untyped-call]
    assert {name: bytes(spec["data"]) for name, spec in found.items()} == {n: bytes(p.data) for n, p in source.items()}


def test_the_manifest_is_a_blob_under_its_own_digest(store: ArtifactStore) -> None:
    _, manifest = save_weights(store, pieces())
    assert Manifest.decode(store.get(manifest.digest)) == manifest == describe(pieces())


def test_loaded_weights_are_the_saved_bytes(store: ArtifactStore) -> None:
    blob, manifest = save_weights(store, pieces(7))
    target = pieces(0)
    assert load_weights(store, blob.digest, target, manifest) == manifest.total == 3 + 40 + 8 + 8
    assert describe(target) == manifest


def test_a_file_of_another_writer_with_metadata_loads_too(store: ArtifactStore) -> None:
    data = safetensors.numpy.save({"w": numpy.arange(6, dtype="float32")}, metadata={"format": "np"})
    target = {"w": Piece("F32", (6,), memoryview(bytearray(24)))}
    manifest = describe({"w": Piece("F32", (6,), memoryview(struct.pack("<6f", *range(6))))})
    assert load_weights(store, store.put(data).digest, target, manifest) == 24
    assert describe(target) == manifest


@pytest.mark.parametrize(
    ("at", "cause", "says"),
    [
        (-1, "mismatch", "'a': bytes differ"),
        (7, "protocol", "no safetensors file"),
        (10, "mismatch", "tensor 'c' is missing"),
    ],
)
def test_a_damaged_artifact_is_told_before_a_byte_of_the_target_changes(
    store: ArtifactStore, at: int, cause: str, says: str
) -> None:
    blob, manifest = save_weights(store, pieces(7))
    damage(store.path(blob.digest), at)
    target = pieces(0)
    with pytest.raises(TransferError, match=says) as caught:
        load_weights(store, blob.digest, target, manifest)
    assert caught.value.cause == cause
    assert describe(target) == describe(pieces(0))


def test_damage_outside_the_tensors_is_found_by_the_blobs_own_name(store: ArtifactStore) -> None:
    blob, manifest = save_weights(store, pieces(7))
    data = store.get(blob.digest)
    length = int.from_bytes(data[:8], "little")
    path = store.path(blob.digest)
    path.chmod(0o644)
    path.write_bytes((length + 8).to_bytes(8, "little") + data[8 : 8 + length] + b" " * 8 + data[8 + length :])
    with pytest.raises(TransferError, match="damaged outside its tensors"):
        load_weights(store, blob.digest, pieces(0), manifest)


def test_another_versions_artifact_and_a_cut_one_are_mismatches_that_name_the_tensor(store: ArtifactStore) -> None:
    blob, _ = save_weights(store, pieces(7))
    with pytest.raises(TransferError, match="'a': bytes differ"):
        load_weights(store, blob.digest, pieces(0), describe(pieces(8)))
    path = store.path(blob.digest)
    path.chmod(0o644)
    os.truncate(path, blob.size - 2)
    with pytest.raises(TransferError, match="tensor 'a' is cut"):
        load_weights(store, blob.digest, pieces(0), describe(pieces(7)))


def test_a_missing_artifact_is_refused_with_its_path(store: ArtifactStore) -> None:
    with pytest.raises(TransferError, match=str(store.path("0" * 64))) as caught:
        load_weights(store, "0" * 64, pieces(), describe(pieces()))
    assert caught.value.cause == "refused"


def test_a_blob_is_kept_from_another_store_once_and_mended(store: ArtifactStore, tmp_path: Path) -> None:
    """By a link on the same disk; a damaged one is replaced, a damaged source never taken."""
    other = ArtifactStore(tmp_path / "other")
    blob = other.put(b"reef")
    assert store.keep(blob.digest, other.path(blob.digest)) is True
    assert store.keep(blob.digest, other.path(blob.digest)) is False
    assert store.path(blob.digest).stat().st_ino == other.path(blob.digest).stat().st_ino
    store.path(blob.digest).unlink()
    store.path(blob.digest).write_bytes(b"rot!")
    assert store.keep(blob.digest, other.path(blob.digest)) is True and store.get(blob.digest) == b"reef"
    for path in (store.path(blob.digest), other.path(blob.digest)):
        path.unlink()
    with pytest.raises(ContractError, match=f"no blob at {other.path(blob.digest)}"):
        store.keep(blob.digest, other.path(blob.digest))
    other.path(blob.digest).write_bytes(b"rot!")
    with pytest.raises(ContractError, match=f"{other.path(blob.digest)} is damaged: its bytes hash to"):
        store.keep(blob.digest, other.path(blob.digest))
    assert files_under(store.root) == []
