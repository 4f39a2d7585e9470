"""What a server's memory must sum up to if it holds a version: worked out from the version's file, in processes beside.

Knows: the processes, one for each tensor-parallel rank, and how their answers compare with the server's.
Must not know: where the file comes from, or what follows from a difference.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, TypedDict

import msgspec

from reef_bus.embedded import die_with_parent
from reef_bus.errors import TransferError, Unavailable

WORKER = "consumers.reef_engine.sglang.oracle"
EXPECT_S = 300.0


class Sums(msgspec.Struct, frozen=True):
    """Of one rank: by parameter of the server's own layout. `algorithm` ends in the width of a sum in bits."""

    rank: int
    algorithm: str
    sums: dict[str, str]


class Said(msgspec.Struct, frozen=True):
    """One rank's answer. `unread`: tensors of the file of which it made nothing."""

    sums: Sums | None = None
    error: str = ""
    unread: tuple[str, ...] = ()


class Place(TypedDict):
    tp_rank: int


class Rank(TypedDict):
    """What a server says of one of its ranks."""

    checksums: dict[str, str]
    parallelism_info: list[Place]


class Checked(msgspec.Struct, frozen=True):
    """What we read of its /weights_checker."""

    ranks: list[Rank]


class Oracle:
    """Processes of our own with the installed SGLang's model, its loader and its checksum; no server is asked."""

    def __init__(self, flags: Sequence[str], ranks: int, port: int, environment: Mapping[str, str], out: Path) -> None:
        """Call it in the main thread: the kernel ends the processes when the thread that started them ends."""
        argv = [sys.executable, "-m", WORKER]
        with out.open("wb") as file:
            self.workers = [Worker([*argv, str(rank), str(port)], flags, environment, file) for rank in range(ranks)]

    def expected(self, weights: Path, limit_s: float = EXPECT_S) -> list[Sums]:
        """By rank. Blocks; the first time until the processes are up. Raises TransferError("mismatch") for a file that
        is not a version of this model, whole, and nothing but that; and Unavailable when no answer comes, after which
        the processes are of no use."""
        until = time.monotonic() + limit_s
        for worker in self.workers:
            worker.ask(str(weights))
        said = [msgspec.json.decode(worker.answer(until), type=Said) for worker in self.workers]
        # of all: what is left would answer the next question
        if errors := [each.error for each in said if each.sums is None]:
            raise TransferError("mismatch", errors[0])
        if unread := set.intersection(*(set(each.unread) for each in said)):
            raise TransferError("mismatch", f"SGLang's model makes nothing of tensor {min(unread)!r}: leave it out")
        return [each.sums for each in said if each.sums is not None]

    def close(self) -> None:
        for worker in self.workers:
            worker.process.kill()
        for worker in self.workers:
            worker.close()


class Worker:
    """One process; its answers come by a pipe of their own, for it prints what it likes."""

    def __init__(
        self,
        argv: Sequence[str],
        flags: Sequence[str],
        environment: Mapping[str, str],
        out: IO[bytes],
    ) -> None:
        self.out = out.name
        self.answers, theirs = os.pipe()
        try:
            self.process = subprocess.Popen(
                [*argv, str(theirs), *flags],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=out,
                env=environment,
                pass_fds=[theirs],
                process_group=0,
                preexec_fn=die_with_parent,
            )
        finally:
            os.close(theirs)

    def ask(self, question: Any) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(msgspec.json.encode(question) + b"\n")
            self.process.stdin.flush()
        except OSError as error:
            raise self._gone("has ended") from error

    def answer(self, until: float) -> bytes:
        line, poll = bytearray(), select.poll()
        poll.register(self.answers, select.POLLIN)
        while not line.endswith(b"\n"):
            if not poll.poll(max(0.0, until - time.monotonic()) * 1000):
                raise self._gone("gives no answer")
            some = os.read(self.answers, 1 << 20)
            if not some:
                raise self._gone("has ended")
            line += some
        return bytes(line)

    def _gone(self, what: str) -> Unavailable:
        return Unavailable(f"the process that works out what SGLang should say {what}; see {self.out}")

    def close(self) -> None:
        self.process.kill()
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        self.process.wait()
        os.close(self.answers)


def flaw(expected: Sequence[Sums], ranks: Sequence[Rank]) -> str:
    """The first parameter in which a server's answer is not as expected; empty if there is none."""
    found = {place["tp_rank"]: rank["checksums"] for rank in ranks for place in rank["parallelism_info"]}
    spoke = sorted(place["tp_rank"] for rank in ranks for place in rank["parallelism_info"])
    if spoke != sorted(each.rank for each in expected):  # a rank twice: another copy, of which we know nothing
        return f"the server spoke for ranks {spoke}, expected {len(expected)}"
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
