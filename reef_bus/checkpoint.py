"""Checkpoints of several safetensors files, as Hugging Face lays them out: shards, and an index that names them.

Knows: the index, files. Must not know: stores, digests, or what a model is. No tensor is copied on the way in or out.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from reef_bus.backends import Piece, Pieces
from reef_bus.errors import Rejected, Unavailable
from reef_bus.manifest import describe
from reef_bus.safetensors_file import encoded, mapped
from reef_bus.shelf import free, sync_folder

INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"
SHARD_BYTES = 5_000_000_000  # Hugging Face's own default
METADATA = {"format": "pt"}  # transformers refuses files that do not say so


class Index(msgspec.Struct, kw_only=True):
    """The file of every tensor; `metadata` is of no consequence for reading."""

    metadata: dict[str, Any] = {}
    weight_map: dict[str, str]


def open_checkpoint(path: Path) -> Pieces:
    """The tensors of a safetensors file, or of a folder with one or several, as read-only views of their pages: nothing
    is read before it is used, and the files must not change meanwhile.

    Raises Rejected, naming file and tensor, for what is missing, cut, in two files, or not what the index says."""
    if path.is_file():
        return _index(path) if path.name.endswith(".index.json") else mapped(path)
    if (path / INDEX).is_file():
        return _index(path / INDEX)
    if (path / WHOLE).is_file():
        return mapped(path / WHOLE)
    raise Rejected(f"no checkpoint at {path}: expected a safetensors file, or a folder with {INDEX} or {WHOLE}")


def write_checkpoint(folder: Path, pieces: Pieces, shard_bytes: int = SHARD_BYTES) -> list[Path]:
    """Write `pieces` in their order, in files of at most `shard_bytes` where no tensor is larger, as transformers reads
    them. The last file written is the one by which the checkpoint is found. Returns the files.

    Raises Rejected for what safetensors cannot store and for a folder that holds a checkpoint, Unavailable for a disk
    that takes no more."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if taken := next((name for name in (INDEX, WHOLE) if (folder / name).exists()), None):
            raise Rejected(f"{folder / taken} is there already: write a checkpoint into a folder of its own")
        shards = list(_shards(pieces, shard_bytes))
        names = [WHOLE] if len(shards) == 1 else [_name(n, len(shards)) for n in range(1, len(shards) + 1)]
        for name, shard in zip(names, shards, strict=True):
            write_whole(folder / name, _of(shard))
        if len(shards) > 1:
            write_whole(folder / INDEX, _naming(dict(zip(names, shards, strict=True))))
            names.append(INDEX)
    return [folder / name for name in names]


def _index(path: Path) -> Pieces:
    try:
        index = msgspec.json.decode(path.read_bytes(), type=Index)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise Rejected(f"{path} is no index of a checkpoint: {error}") from error
    files = dict.fromkeys(index.weight_map.values())
    foreign = next((name for name in files if not _beside(name)), None)
    if foreign is not None:
        raise Rejected(f"{path} names the file {foreign!r}: expected one beside it")
    shards = {name: mapped(path.parent / name) for name in files}
    if flaw := next(_flaws(index.weight_map, shards), None):
        raise Rejected(f"{path}: {flaw}")
    return {name: shards[file][name] for name, file in index.weight_map.items()}


def _beside(name: str) -> bool:
    """Whether it can only be a file of the index's own folder."""
    return name not in ("", "..") and Path(name).name == name and "\0" not in name


def _flaws(where: Mapping[str, str], shards: Mapping[str, Pieces]) -> Iterator[str]:
    if not where:
        yield "it names no tensor"
    for name, file in where.items():
        if name not in shards[file]:
            yield f"tensor {name!r} is missing: it is not in {file}"
    for file, pieces in shards.items():
        for name in pieces:
            if name not in where:
                yield f"tensor {name!r} of {file} is unexpected: the index does not name it"
            elif where[name] != file:
                yield f"tensor {name!r} is in {file}, too; the index names {where[name]}"


def _shards(pieces: Pieces, shard_bytes: int) -> Iterator[dict[str, Piece]]:
    """Greedily, in order, as everybody does."""
    shard: dict[str, Piece] = {}
    for name, piece in pieces.items():
        if shard and sum(each.data.nbytes for each in shard.values()) + piece.data.nbytes > shard_bytes:
            yield shard
            shard = {}
        shard[name] = piece
    yield shard


def _name(number: int, count: int) -> str:
    return f"model-{number:05}-of-{count:05}.safetensors"


def _of(shard: Pieces) -> Callable[[BinaryIO], None]:
    return lambda file: file.writelines(encoded(describe(shard), shard, METADATA))


def _naming(shards: Mapping[str, Pieces]) -> Callable[[BinaryIO], None]:
    where = {name: file for file, shard in shards.items() for name in shard}
    total = sum(piece.data.nbytes for shard in shards.values() for piece in shard.values())
    text = msgspec.json.format(msgspec.json.encode(Index(metadata={"total_size": total}, weight_map=where)), indent=2)
    return lambda file: file.writelines([text, b"\n"])


def write_whole(path: Path, write: Callable[[BinaryIO], None]) -> None:
    """Whole or not at all, and durable."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with open(draft, "xb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
        sync_folder(path.parent)
    finally:
        draft.unlink(missing_ok=True)


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """What the disk refuses is Unavailable."""
    try:
        yield
    except OSError as error:
        raise Unavailable(f"cannot write a checkpoint to {folder}: {error.strerror} ({free(folder)})") from error
