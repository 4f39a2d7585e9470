"""What a server must answer with an adapter: worked out from the files, in a process beside, by code of others.

Knows: the process, what it is asked. Must not know: where the files come from, or what follows from a difference.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from consumers.reef_engine.sglang.sums import EXPECT_S, Worker
from reef_bus.errors import TransferError

WORKER = "consumers.reef_engine.sglang.reference"


class Probe(msgspec.Struct, frozen=True):
    """The tokens `ids` for the model of folder `base`, into which an adapter is merged, `scale` times B A."""

    base: str
    adapter: str
    scale: float
    ids: tuple[int, ...]


class Thought(msgspec.Struct, frozen=True):
    """The logprob of each token but the first, at temperature 1 (natural log)."""

    logprobs: tuple[float, ...] = ()
    error: str = ""


class Reference:
    """A process of our own with the installed transformers' model. It imports nothing of SGLang, and must not: with
    SGLang 0.5.23 imported, transformers 5.19 answers the same question differently each time."""

    def __init__(self, environment: Mapping[str, str], out: Path) -> None:
        """Call it in the main thread: the kernel ends the process when the thread that started it ends."""
        with out.open("wb") as file:
            self.worker = Worker([sys.executable, "-m", WORKER], [], environment, file)

    def logprobs(self, probe: Probe, limit_s: float = EXPECT_S) -> tuple[float, ...]:
        """Blocks. Raises TransferError("mismatch") where no model comes of the files, and Unavailable when no answer
        comes, after which the process is of no use."""
        self.worker.ask(probe)
        said = msgspec.json.decode(self.worker.answer(time.monotonic() + limit_s), type=Thought)
        if said.error:
            raise TransferError("mismatch", said.error)
        return said.logprobs

    def close(self) -> None:
        self.worker.close()
