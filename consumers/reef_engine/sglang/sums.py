"""What a server's memory must sum up to if it holds a version: worked out from the version's file, in processes beside.

Knows: the processes, one for each tensor-parallel rank, and how their answers compare with the server's.
Must not know: where the file comes from, or what follows from a difference.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from reef_bus.embedded import die_with_parent
from reef_bus.errors import TransferError, Unavailable

WORKER = "consumers.reef_engine.sglang.oracle"


class Sums(msgspec.Struct, frozen=True):
    """Of one rank: by parameter of the server's own layout. `algorithm` ends in the width of a sum in bits."""

    rank: int
    algorithm: str
    sums: dict[str, str]


class _Said(msgspec.Struct, frozen=True):
    sums: Sums | None = None
    error: str = ""


class Oracle:
    """Processes of our own with the installed SGLang's model, its loader and its checksum; no server is asked."""

    def __init__(self, flags: Sequence[str], ranks: int, port: int, environment: Mapping[str, str], out: Path) -> None:
        """Call it in the main thread: the kernel ends the processes when the thread that started them ends."""
        self.out = out
        with out.open("wb") as file:
            self.workers = [
                subprocess.Popen(
                    [sys.executable, "-m", WORKER, str(rank), str(port), *flags],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=file,
                    env=environment,
                    process_group=0,
                    preexec_fn=die_with_parent,
                )
                for rank in range(ranks)
            ]

    def expected(self, weights: Path) -> list[Sums]:
        """By rank. Blocks; the first time until the processes are up. Raises TransferError("mismatch") for a file that
        is not a version of this model, whole."""
        for worker in self.workers:
            assert worker.stdin is not None
            try:
                worker.stdin.write(msgspec.json.encode(str(weights)) + b"\n")
                worker.stdin.flush()
            except OSError as error:
                raise self._gone() from error
        return [self._read(worker) for worker in self.workers]

    def _read(self, worker: subprocess.Popen[bytes]) -> Sums:
        assert worker.stdout is not None
        line = worker.stdout.readline()
        if not line:
            raise self._gone()
        said = msgspec.json.decode(line, type=_Said)
        if said.sums is None:
            raise TransferError("mismatch", said.error)
        return said.sums

    def _gone(self) -> Unavailable:
        return Unavailable(f"the process that works out SGLang's sums has ended; see {self.out}")

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()
        for worker in self.workers:
            worker.communicate()


def flaw(expected: Sequence[Sums], ranks: Sequence[Mapping[str, Any]]) -> str:
    """The first parameter in which a server's answer is not as expected; empty if there is none."""
    found = {place["tp_rank"]: rank["checksums"] for rank in ranks for place in rank["parallelism_info"]}
    if found.keys() != {each.rank for each in expected}:
        return f"the server spoke for ranks {sorted(found)}, expected {len(expected)}"
    for each in expected:
        if said := _differs(each.sums, found[each.rank]):
            return f"rank {each.rank}: {said}"
    return ""


def _differs(expected: Mapping[str, str], found: Mapping[str, str]) -> str:
    if missing := sorted(expected.keys() ^ found.keys()):
        return f"parameter {missing[0]!r} is only in {'the file' if missing[0] in expected else 'the server'}"
    for name, sum_ in expected.items():
        if found[name] != sum_:
            return f"parameter {name!r} sums up to {found[name]}, expected {sum_}"
    return ""
