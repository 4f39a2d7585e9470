"""Checkpoints of several files: read by views of their pages, written as the library and Hugging Face lay them out."""

from __future__ import annotations

import json
import os
import stat
import struct
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy
import pytest
import safetensors
import safetensors.numpy

from reef_bus import checkpoint
from reef_bus.artifacts import ArtifactStore, save_weights
from reef_bus.backends import Piece, Pieces
from reef_bus.checkpoint import INDEX, open_checkpoint, write_checkpoint
from reef_bus.errors import Rejected, Unavailable
from reef_bus.manifest import describe
from reef_bus.safetensors_file import mapped
from reef_bus.stored import read
from reef_bus.tensors import copied

ARRAYS: dict[str, Any] = {
    "embed.weight": numpy.arange(24, dtype="float32").reshape(4, 6),
    "layers.0.weight": numpy.arange(10, dtype="int64"),
    "layers.1.weight": numpy.arange(5, dtype="float16"),
    "norm.scale": numpy.array(2.5, dtype="float64"),
    "nothing": numpy.zeros((0, 3), dtype="float32"),
}
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
NAMES = {"float32": "F32", "int64": "I64", "float16": "F16", "float64": "F64"}


def given(arrays: dict[str, Any] = ARRAYS) -> dict[str, Piece]:
    return {
        name: Piece(NAMES[str(array.dtype)], array.shape, memoryview(array.tobytes())) for name, array in arrays.items()
    }


def sharded(folder: Path, **changes: str) -> Path:
    """As transformers' `save_pretrained` leaves it, written by the library. `changes` of the index: tensor → file."""
    where = dict.fromkeys(["embed.weight", "nothing"], FIRST) | dict.fromkeys(
        ["layers.0.weight", "layers.1.weight", "norm.scale"], SECOND
    )
    for file in (FIRST, SECOND):
        part = {name: ARRAYS[name] for name in where if where[name] == file}
        safetensors.numpy.save_file(part, folder / file, metadata={"format": "pt"})
    index = {"metadata": {"total_size": 194}, "weight_map": {k: v for k, v in {**where, **changes}.items() if v}}
    (folder / INDEX).write_text(json.dumps(index))
    return folder


def read_by_the_library(files: list[Path]) -> Pieces:
    arrays: dict[str, Any] = {}
    for file in files:
        arrays |= safetensors.numpy.load_file(file)
    return given(arrays)


def pages(path: Path) -> int:
    """How many times the file is mapped into this process."""
    return Path("/proc/self/maps").read_text().count(str(path))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc is Linux's")
def test_a_file_that_the_library_wrote_is_read_as_views_of_its_pages(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file(ARRAYS, path, metadata={"format": "pt"})
    for found in (mapped(path), open_checkpoint(path), open_checkpoint(tmp_path)):
        assert describe(found) == describe(given())
        assert all(piece.data.readonly for piece in found.values()) and pages(path) >= 1
    del found
    assert pages(path) == 0


def test_the_shards_that_an_index_names_are_one_checkpoint(tmp_path: Path) -> None:
    found = open_checkpoint(sharded(tmp_path))
    assert describe(found) == describe(given()) == describe(open_checkpoint(tmp_path / INDEX))


def test_a_checkpoint_becomes_an_artifact_and_the_artifact_a_checkpoint(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path / "store")
    blob, manifest = save_weights(store, open_checkpoint(sharded(tmp_path)))
    assert describe(read(store, blob.digest, manifest)) == describe(given())
    with store.local(blob.digest) as path:
        files = write_checkpoint(tmp_path / "out", mapped(path), shard_bytes=100)
    assert read_by_the_library(files[:-1]) == given() and files[-1].name == INDEX
    assert describe(open_checkpoint(tmp_path / "out")) == manifest


def test_shards_are_filled_in_order_and_found_by_an_index_of_the_usual_form(tmp_path: Path) -> None:
    """96, 80, 10, 8 and 0 bytes into files of 100."""
    files = write_checkpoint(tmp_path, given(), shard_bytes=100)
    assert [path.name for path in files] == [FIRST, SECOND, INDEX]
    assert json.loads((tmp_path / INDEX).read_text()) == {
        "metadata": {"total_size": 194},
        "weight_map": {name: FIRST if name == "embed.weight" else SECOND for name in ARRAYS},
    }
    with safetensors.safe_open(tmp_path / FIRST, "numpy") as file:  # type: ignore[no-untyped-call]
        assert (file.metadata(), list(file.keys())) == ({"format": "pt"}, ["embed.weight"])
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([FIRST, SECOND, INDEX])


def test_what_fits_into_one_file_needs_no_index(tmp_path: Path) -> None:
    assert write_checkpoint(tmp_path, given()) == [tmp_path / "model.safetensors"]
    assert read_by_the_library([tmp_path / "model.safetensors"]) == given()


def test_a_tensor_larger_than_a_shard_has_one_to_itself(tmp_path: Path) -> None:
    files = write_checkpoint(tmp_path, given(), shard_bytes=1)
    assert [list(mapped(path)) for path in files[:-1]] == [[name] for name in ARRAYS]


def test_a_checkpoint_is_never_written_over(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, given())
    with pytest.raises(Rejected, match=r"model\.safetensors is there already"):
        write_checkpoint(tmp_path, given(), shard_bytes=1)
    assert describe(open_checkpoint(tmp_path)) == describe(given())


def test_a_disk_that_refuses_leaves_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint.os, "fsync", refuse)
    with pytest.raises(Unavailable, match=r"cannot write a checkpoint to .*: No space left on device \(\d+ bytes free"):
        write_checkpoint(tmp_path, given())
    assert list(tmp_path.iterdir()) == []


def test_every_file_outlives_the_power_before_the_next_one_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file's bytes first, then its name: an index is never there without its shards."""
    done, fsync, move = list[str](), os.fsync, os.replace

    def sync(descriptor: int) -> None:
        done.append("names" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "bytes")
        fsync(descriptor)

    def rename(source: Path, target: Path) -> None:
        done.append(target.name)
        move(source, target)

    monkeypatch.setattr(checkpoint.os, "fsync", sync)
    monkeypatch.setattr(checkpoint.os, "replace", rename)
    files = [path.name for path in write_checkpoint(tmp_path, given(), 130)]
    assert len(files) > 2 and files[-1] == INDEX
    assert done == [step for name in files for step in ("bytes", name, "names")]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"norm.scale": FIRST}, f"'norm.scale' is missing: it is not in {FIRST}"),
        ({"other": SECOND}, f"'other' is missing: it is not in {SECOND}"),
        ({"norm.scale": ""}, f"'norm.scale' of {SECOND} is unexpected: the index does not name it"),
        ({"norm.scale": "gone.safetensors"}, "cannot read .*gone.safetensors: No such file"),
        ({"norm.scale": "../model.safetensors"}, "names the file '../model.safetensors': expected one beside it"),
        ({"norm.scale": ".."}, "names the file '..': expected one beside it"),
        ({"norm.scale": "a\0b"}, r"names the file 'a\\x00b': expected one beside it"),
    ],
)
def test_an_index_that_does_not_fit_its_shards_is_told(tmp_path: Path, changes: dict[str, str], says: str) -> None:
    with pytest.raises(Rejected, match=says):
        open_checkpoint(sharded(tmp_path, **changes))


def test_a_tensor_in_two_shards_is_told(tmp_path: Path) -> None:
    sharded(tmp_path)
    safetensors.numpy.save_file(
        {name: ARRAYS[name] for name in ("embed.weight", "nothing", "norm.scale")}, tmp_path / FIRST
    )
    with pytest.raises(Rejected, match=f"'norm.scale' is in {FIRST}, too; the index names {SECOND}"):
        open_checkpoint(tmp_path)


def raw(path: Path, header: object, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def span(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("header", "data", "says"),
    [
        ({"a": span("F32", [2], 0, 8)}, bytes(7), "'a' is cut: the file ends 1 bytes before its end"),
        ({"a": span("F32", [3], 0, 8)}, bytes(8), r"'a' has 8 bytes, which is not F32 of shape \[3\]"),
        ({"a": span("F31", [2], 0, 8)}, bytes(8), "'a' is of dtype F31"),
        ({"a": span("U8", [8], 0, 8), "b": span("U8", [8], 0, 8)}, bytes(8), "'a' and 'b' share bytes 0 to 8"),
        ({"a": span("U8", [4], 0, 4), "b": span("U8", [4], 3, 7)}, bytes(7), "'a' and 'b' share bytes 3 to 4"),
        ({"a": span("U8", [4], 2, 6)}, bytes(6), "bytes 0 to 2 belong to no tensor"),
        ({"a": span("U8", [4], 0, 4)}, bytes(6), "2 bytes after the last tensor belong to none"),
        ({"a": span("U8", [4], -4, 0)}, bytes(4), "share bytes"),
        (b"{", b"", "no safetensors file"),
        (b'{"a":' * 100_000, b"", "no safetensors file"),
        ({"a": {"dtype": "U8"}}, b"", "no safetensors file"),
    ],
)
def test_a_file_that_is_cut_aliased_or_retyped_is_told_apart(
    tmp_path: Path, header: object, data: bytes, says: str
) -> None:
    with pytest.raises(Rejected, match=says):
        mapped(raw(tmp_path / "x.safetensors", header, data))


@pytest.mark.parametrize("data", [b"", b"\0" * 7, b"\xff" * 8])
def test_what_is_shorter_than_a_header_is_no_file_of_tensors(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x.safetensors").write_bytes(data)
    with pytest.raises(Rejected, match="no safetensors file"):
        mapped(tmp_path / "x.safetensors")


def test_a_folder_without_a_checkpoint_says_what_was_expected(tmp_path: Path) -> None:
    with pytest.raises(
        Rejected, match=r"expected a safetensors file, or a folder with model\.safetensors\.index\.json or"
    ):
        open_checkpoint(tmp_path)


def test_a_checkpoint_may_be_published_as_it_is_and_overwritten_afterwards(tmp_path: Path) -> None:
    """`attach` takes a copy: what it keeps is no view of the file."""
    found = copied(open_checkpoint(sharded(tmp_path)))
    with open(tmp_path / FIRST, "r+b") as file:
        file.seek(-8, 2)
        file.write(b"\xff" * 8)
    assert describe(found) == describe(given())


def test_no_tensor_is_copied_on_the_way_from_a_checkpoint_to_the_store_and_back_to_files(tmp_path: Path) -> None:
    """32 MiB in two tensors; what Python allocates meanwhile is the files' headers, and hashes."""
    arrays = {name: numpy.full(16 << 20, 7, dtype="uint8") for name in ("a", "b")}
    safetensors.numpy.save_file(arrays, tmp_path / "model.safetensors")
    store = ArtifactStore(tmp_path / "store")
    tracemalloc.start()
    _, manifest = save_weights(store, open_checkpoint(tmp_path))
    files = write_checkpoint(tmp_path / "out", open_checkpoint(tmp_path), shard_bytes=16 << 20)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert describe(open_checkpoint(tmp_path / "out")) == manifest and len(files) == 3
    assert peak < 1 << 20
