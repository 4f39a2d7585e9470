"""Where versions for a server are received: a model folder of which the weights file is mapped, and written in place;
and adapters, each a folder of its own.

Knows: safetensors' layout, what of a model's folder SGLang reads. Must not know: who writes, or who reads the folder
afterwards.
In shared memory, so that the server, and whoever works out its sums, read it without a disk.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from reef_bus import peft_folder
from reef_bus.backends import Layout, Piece, Pieces
from reef_bus.errors import Rejected, TransferError, Unavailable
from reef_bus.events import Lora
from reef_bus.safetensors_file import laid_out

WEIGHTS = "model.safetensors"
READ = (".safetensors", ".bin", ".pt")
"""What of a folder SGLang 0.5.23 reads by itself, but for what is laid out otherwise (`consolidated`)."""
WEIGHTS_OF_OTHERS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx")
CONFIG, GENERATION, OF_ADAPTER = "config.json", "generation_config.json", peft_folder.CONFIG
"""The last, left behind by a merge, say, makes transformers take the whole folder for an adapter's."""
SHARED = Path("/dev/shm")
ADAPTERS = "adapters"
NAMED = 32
"""Characters of an engine's name: a socket's path has 107 at most."""


class Room:
    """One engine's. Its folder has the model's configuration from the beginning, but for what ends an answer; weights,
    once it was made to fit."""

    def __init__(self, model: Path, folder: Path) -> None:
        """`folder` is ours alone, and whatever an earlier boot left there goes. Raises Unavailable where that cannot
        be, and Rejected for a model that cannot be read."""
        self.folder = folder
        shutil.rmtree(folder, ignore_errors=True)
        with self._making(), _reading(model):
            self._furnish(model)
        self._layouts: dict[str, Layout] = {}
        self._pieces: Pieces = {}

    def _furnish(self, model: Path) -> None:
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        self.folder.mkdir(mode=0o700)  # fails for one that another user put there
        self.scratch.mkdir(mode=0o700)
        for file in model.iterdir():
            weights = file.suffix in WEIGHTS_OF_OTHERS or "index" in file.name
            if file.is_file() and not weights and file.name not in (CONFIG, GENERATION, OF_ADAPTER):
                shutil.copy2(file, self.folder / file.name)
        (self.folder / CONFIG).write_bytes(_without_ends((model / CONFIG).read_bytes()))

    @contextlib.contextmanager
    def _making(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise Unavailable(
                f"cannot make {self.folder}: {error}; free some memory there, or remove the folder"
            ) from error

    @contextlib.contextmanager
    def with_weights(self, model: Path) -> Iterator[None]:
        """Of the model's own folder, meanwhile. Raises Rejected where it has none that SGLang reads, or cannot be read,
        and Unavailable where there is no room for links to them."""
        with _reading(model):
            weights = [file for file in model.iterdir() if _read_by_itself(file)]
        if not weights:
            raise Rejected(
                f"inference.update disk: SGLang loads adapters from folders only if it was started with weights, and "
                f"{model} (inference.model-path) has none that it reads ({', '.join(READ)}); put them there, or choose "
                "another inference.update"
            )
        files = [*weights, *model.glob("*.index.json")]
        try:
            with self._making():
                for file in files:
                    (self.folder / file.name).symlink_to(file.absolute())
            yield
        finally:
            for file in files:
                (self.folder / file.name).unlink(missing_ok=True)

    @property
    def scratch(self) -> Path:
        """For what the server's processes need among themselves; its name is short enough for a socket."""
        return self.folder / "tmp"

    @property
    def weights(self) -> Path:
        return self.folder / WEIGHTS

    @property
    def layouts(self) -> Mapping[str, Layout]:
        """Of the tensors for which it was made last."""
        return self._layouts

    def adapter(self, name: str) -> Path:
        """The folder of the adapter of this name, in PEFT's layout."""
        return self.folder / ADAPTERS / name

    def adapters(self) -> set[str]:
        """The names of those that are here."""
        return {folder.name for folder in (self.folder / ADAPTERS).glob("[!.]*")}

    def keep(self, name: str, tensors: Pieces, lora: Lora) -> None:
        """Its files are never changed: a server that has loaded them may have mapped them. Raises Rejected for tensors
        that are no such adapter, Unavailable where there is no room."""
        peft_folder.write_peft_folder(self.adapter(name), tensors, lora, str(self.folder))

    def drop(self, name: str) -> None:
        """At once for whoever looks for it, if it is here. Raises OSError."""
        with contextlib.suppress(FileNotFoundError):
            self.adapter(name).rename(self.folder / ADAPTERS / f".{secrets.token_hex(8)}")
        for left in (self.folder / ADAPTERS).glob(".*"):  # what could not be removed earlier, too
            shutil.rmtree(left, ignore_errors=True)

    def fit(self, layouts: Mapping[str, Layout]) -> Pieces:
        """Writable views for tensors of these layouts: the same ones, as long as they are asked for the same."""
        if dict(layouts) != self._layouts:
            self._make(layouts)
        return self._pieces

    def _make(self, layouts: Mapping[str, Layout]) -> None:
        self._layouts, self._pieces = {}, {}
        file = laid_out(layouts)
        try:
            view = self._mapped(file.head, file.nbytes)
        except OSError as error:
            raise TransferError(
                "memory", f"no room for {file.nbytes} bytes in {self.folder}: {error.strerror}"
            ) from error
        tensors = view[len(file.head) :]
        self._pieces = {
            name: Piece(span.dtype, span.shape, tensors[slice(*span.data_offsets)]) for name, span in file.spans.items()
        }
        self._layouts = dict(layouts)

    def _mapped(self, head: bytes, nbytes: int) -> memoryview:
        self.weights.unlink(missing_ok=True)
        with self.weights.open("w+b") as file:
            os.posix_fallocate(file.fileno(), 0, nbytes)
            file.write(head)
            file.flush()
            return memoryview(mmap.mmap(file.fileno(), nbytes))

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


@contextlib.contextmanager
def _reading(model: Path) -> Iterator[None]:
    """What is in the way there, and not where it is copied to, is for whoever configured it."""
    try:
        yield
    except OSError as error:
        if error.filename is None or not Path(error.filename).is_relative_to(model):
            raise
        raise Rejected(
            f"{model} (inference.model-path) cannot be read: {error}; put it back, or let this user read all of it"
        ) from error
    except msgspec.MsgspecError as error:
        raise Rejected(f"{model / CONFIG} cannot be read: {error}") from error


def _without_ends(config: bytes) -> bytes:
    """What ends an answer comes with each prompt. A server would take the model's own ends for more of that, also such
    as transformers only assumes."""
    said = msgspec.json.decode(config, type=dict[str, Any])
    for part in (said, said.get("text_config")):
        if isinstance(part, dict):
            part["eos_token_id"] = None
    return msgspec.json.encode(said)


def _read_by_itself(file: Path) -> bool:
    """SGLang passes over what a training leaves beside weights."""
    other = file.stem.startswith("consolidated") or file.stem in ("training_args", "optimizer", "scheduler", "scaler")
    return file.suffix in READ and not other and file.is_file()


def place(state_dir: Path, engine: str) -> Path:
    """One folder for each engine of a deployment, in shared memory where the system has it."""
    if not SHARED.is_dir():
        return state_dir / "run" / f"{engine}.room"
    whose = hashlib.sha256(f"{state_dir.resolve()}\n{engine}".encode()).hexdigest()[:16]
    return SHARED / f"reef-{whose}-{engine[:NAMED]}"
