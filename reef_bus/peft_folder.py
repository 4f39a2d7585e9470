"""A LoRA adapter as a folder in PEFT's layout, which PEFT and inference servers open.

Knows: PEFT's configuration and names. Must not know: the base model, stores, any framework.
No tensor is copied on the way in or out.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from reef_bus.backends import Pieces
from reef_bus.checkpoint import METADATA, write_whole, writing
from reef_bus.errors import Rejected
from reef_bus.events import Lora
from reef_bus.manifest import describe
from reef_bus.peft_names import layer_of, meant
from reef_bus.safetensors_file import encoded, mapped
from reef_bus.shelf import sync_folder

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
DTYPES = ("F32", "BF16", "F16")

# Of all that PEFT's configuration may say, what does not change what an adapter of these tensors computes. Whatever
# else is set there does, or may: such an adapter is not ours to serve.
_HARMLESS = {"auto_mapping", "inference_mode", "lora_dropout", "megatron_core", "peft_version", "qalora_group_size"}
_HARMLESS |= {"revision"}
_ONLY: dict[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian"),  # the others change the base model's weights, too
    "task_type": ("CAUSAL_LM", None),
}


def write_peft_folder(folder: Path, tensors: Pieces, lora: Lora, base: str) -> None:
    """Write an adapter into a `folder` that is not there yet: it appears whole, or not at all. `base` says for whom to
    read which model it stands beside, such as `reef-manifest:<digest>`.

    Raises Rejected for tensors that are no such adapter and a folder that is there, Unavailable for a disk that takes
    no more."""
    if flaw := next(_flaws(tensors, lora), None):
        raise Rejected(f"cannot write {folder}: {flaw}")
    if folder.exists():
        raise Rejected(f"{folder} is there already: write an adapter into a folder of its own")
    draft = folder.with_name(f".{folder.name[:100]}.{secrets.token_hex(8)}")
    try:
        with writing(folder):
            draft.mkdir(parents=True)
            write_whole(draft / TENSORS, lambda file: file.writelines(encoded(describe(tensors), tensors, METADATA)))
            write_whole(draft / CONFIG, lambda file: _write_config(file, lora, base))
            os.rename(draft, folder)
            sync_folder(folder.parent)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def peft_config(lora: Lora, base: str) -> dict[str, Any]:
    """What adapter_config.json says; all that is left out is as PEFT assumes it."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": list(lora.targets),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "modules_to_save": None,
        "use_dora": False,
        "use_rslora": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }


def read_peft_folder(folder: Path) -> tuple[Pieces, Lora, str]:
    """The adapter's tensors, as read-only views of the file's pages, what it is beside them, and how it names its base
    model, empty if it does not. The file must not change while they are in use.

    Raises Rejected, naming file and tensor or key, for what is missing, cut, or computes anything else than
    W x + alpha / rank · B A x with exactly these tensors."""
    said = _read_config(folder / CONFIG)
    tensors, lora = mapped(folder / TENSORS), Lora(said.r, said.lora_alpha, said.target_modules)
    if flaw := next(_flaws(tensors, lora), None):
        raise Rejected(f"{folder / TENSORS}: {flaw}")
    return tensors, lora, said.base_model_name_or_path or ""


class _Config(msgspec.Struct, frozen=True):
    peft_type: str
    r: int
    lora_alpha: int
    target_modules: tuple[str, ...]
    base_model_name_or_path: str | None = None


def _write_config(file: BinaryIO, lora: Lora, base: str) -> None:
    file.write(msgspec.json.format(msgspec.json.encode(peft_config(lora, base)), indent=2) + b"\n")


def _read_config(path: Path) -> _Config:
    try:
        text = path.read_bytes()
        said, config = msgspec.json.decode(text, type=dict[str, Any]), msgspec.json.decode(text, type=_Config)
    except (OSError, UnicodeError, RecursionError, msgspec.MsgspecError) as error:
        raise Rejected(f"{path}: found no LoRA adapter that can be served: {error}") from error
    if config.peft_type != "LORA":
        raise Rejected(f"{path}: peft_type is {config.peft_type!r}, expected 'LORA'")
    for key, value in said.items():
        if key in _ONLY and value not in _ONLY[key]:
            raise Rejected(f"{path}: {key} is {value!r}, expected {' or '.join(map(repr, _ONLY[key]))}")
        if value and key not in _HARMLESS | _ONLY.keys() | set(_Config.__struct_fields__):
            raise Rejected(f"{path}: {key} is {value!r}, expected none: it changes what the adapter computes")
    return config


def _flaws(tensors: Pieces, lora: Lora) -> Iterator[str]:
    """Why these tensors are no adapter of this rank with these targets."""
    if lora.rank < 1 or lora.alpha < 1:
        yield f"rank {lora.rank}, alpha {lora.alpha}; expected both to be 1 or more"
    if not lora.targets or len(set(lora.targets)) < len(lora.targets):
        yield f"targets {list(lora.targets)}; expected at least one, each once"
    layers: dict[str, set[str]] = {}
    for name, piece in tensors.items():
        layer, which = layer_of(name)
        layers.setdefault(layer, set()).add(which)
        yield from _misfit(name, piece.dtype, tuple(piece.shape), which, lora.rank)
        if not any(meant(layer, target) for target in lora.targets):
            yield f"tensor {name!r} stands beside no target: found targets {', '.join(lora.targets)}"
    yield from (f"layer {layer!r} has only its {has.pop()}" for layer, has in layers.items() if len(has) == 1)
    for target in lora.targets:
        if not any(meant(layer, target) for layer in layers):
            yield f"target {target!r} has no tensors"


def _misfit(name: str, dtype: str, shape: tuple[int, ...], which: str, rank: int) -> Iterator[str]:
    if not which:
        yield f"tensor {name!r} is unknown: expected base_model.model.<layer>.lora_A.weight, or lora_B"
    elif dtype not in DTYPES:
        yield f"tensor {name!r} is of dtype {dtype}; expected one of {', '.join(DTYPES)}"
    elif len(shape) != 2 or shape[0 if which == "A" else 1] != rank or 0 in shape:
        expected = f"[{rank}, inputs]" if which == "A" else f"[outputs, {rank}]"
        yield f"tensor {name!r} is of shape {list(shape)}; expected {expected} for rank {rank}"
