"""Weights whose content tells their version: tensors drawn from a seed per version, and fingerprints to know them by.

Knows: how a version looks in memory and as a checkpoint. Must not know: processes, or how weights travel.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

TENSORS = 16
ELEMENTS = 128 * 1024  # float32: 512 KiB a tensor, 8 MiB a version
BASE = 0  # the version that an engine has before anybody sent it one

Array = NDArray[np.float32]
Fingerprint = tuple[str, ...]


def content(version: int) -> list[Array]:
    """The tensors of `version`, the same wherever they are made."""
    return [np.random.default_rng((version, index)).random(ELEMENTS, dtype=np.float32) for index in range(TENSORS)]


def fingerprint(tensors: Sequence[Array]) -> Fingerprint:
    """One hash per tensor, so that a mix of versions can be told apart."""
    return tuple(xxhash.xxh3_64_hexdigest(tensor) for tensor in tensors)


@lru_cache
def expected(version: int) -> Fingerprint:
    return fingerprint(content(version))


# -- checkpoints: one folder per version, under its name only when it is complete


def save(
    folder: Path, version: int, records: Sequence[str], tensors: Sequence[Array], reached: Callable[[str], None]
) -> None:
    """Weights and the records that made them. `reached` hears of "writing", in the middle of it."""
    draft = folder / f".step-{version}"
    draft.mkdir(parents=True, exist_ok=True)
    save_file({f"t{index:02}": tensor for index, tensor in enumerate(tensors)}, draft / "weights.safetensors")
    reached("writing")
    (draft / "records.json").write_text(json.dumps(list(records)))
    draft.rename(folder / f"step-{version}")


def load(folder: Path, version: int) -> Iterator[Array]:
    """The tensors of a checkpoint; of the base, which has none, as they were initialised."""
    if version == BASE:
        yield from content(BASE)
    else:
        found = load_file(folder / f"step-{version}" / "weights.safetensors")
        yield from (found[name] for name in sorted(found))


def newest(folder: Path) -> int:
    return max((int(path.name.removeprefix("step-")) for path in folder.glob("step-*")), default=BASE)


def trained(folder: Path) -> list[str]:
    """Every record of every checkpoint; one that was trained twice is there twice."""
    return [record for path in folder.glob("step-*") for record in json.loads((path / "records.json").read_text())]
