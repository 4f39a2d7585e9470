"""SGLang's sum of a tensor that lies on a GPU, worked out without one: there its checksum is another than on a CPU.

Knows: SGLang 0.5.23's `gpu_tensor_hash`, word by word. Must not know: models, or what a sum is compared with.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np

Words = np.ndarray[Any, np.dtype[np.uint32]]

TILE = 8192
"""Words that are summed up before their place in the whole is forgotten."""
AT_ONCE = 64
SEEDS = (0x243F6A88, (0x243F6A88 * 0x9E3779B1 ^ 0xDEADBEEF) & 0xFFFFFFFF)
PLACES = ((0x27D4EB2D, 15), (0x165667B1, 13))
MASK = (1 << 64) - 1


def gpu_sum(data: np.ndarray[Any, np.dtype[np.uint8]]) -> int:
    """Of a tensor's bytes, as they lie; by as many threads as there are cores."""
    words = np.pad(data, (0, -data.size % 4)).view(np.uint32) if data.size % 4 else data.view(np.uint32)
    starts = range(0, words.size, TILE * AT_ONCE)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return _splitmix(sum(pool.map(partial(_tiles, words), starts))) if words.size else 0


def _tiles(words: Words, start: int) -> int:
    some = words[start : start + TILE * AT_ONCE]
    place = np.arange(start, start + some.size, dtype=np.uint64).astype(np.uint32)
    high, low = (_mixed(some, place, rank, words.size) for rank in (0, 1))
    return int(((high.astype(np.uint64) << np.uint64(32)) | low).sum(dtype=np.uint64))


def _mixed(some: Words, place: Words, rank: int, size: int) -> Words:
    """One half of the sum of each tile."""
    factor, turn = PLACES[rank]
    at = (place * np.uint32(factor) + np.uint32(SEEDS[rank])) ^ (
        (place << np.uint32(turn)) | (place >> np.uint32(32 - turn))
    )
    mixed = _mix(some ^ at)
    sums = np.add.reduceat(mixed, np.arange(0, some.size, TILE), dtype=np.uint32)
    return _mix(sums ^ np.uint32(size * 4 & 0xFFFFFFFF))


def _mix(words: Words) -> Words:
    """murmur3's last step."""
    words = (words ^ (words >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    words = (words ^ (words >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return words ^ (words >> np.uint32(16))


def _splitmix(total: int) -> int:
    total &= MASK
    total = (total ^ (total >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    total = (total ^ (total >> 27)) * 0x94D049BB133111EB & MASK
    return total ^ (total >> 31)
