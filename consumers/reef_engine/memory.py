"""One engine's memory as its agent gives it away and takes it back: what was acknowledged, and what nobody knows.

Knows: one backend, its regions. Must not know: the log, or who needs the memory.
An operation runs in one call of a thread, and its outcome is noted there: whoever stops waiting for it loses nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from reef_bus.backends import InferenceBackend
from reef_bus.core import memory
from reef_bus.core.memory import Ledger, ordered


class Uncertain(Exception):
    """Nobody knows what memory this engine has: its boot ends."""


class Memory:
    """One boot's. All calls but `whole` and `away` block."""

    def __init__(self, backend: InferenceBackend) -> None:
        self.backend = backend
        self.ledger = Ledger(regions=ordered(backend.releases))

    def whole(self) -> bool:
        """Whether the engine has all of its memory."""
        return self.ledger.whole()

    def away(self) -> tuple[str, ...]:
        """What it may not have."""
        return self.ledger.regions if self.ledger.uncertain else self.ledger.out

    def release(self, regions: Iterable[str]) -> None:
        """Raises Uncertain if that fails, or anything had failed before."""
        self._require_certain()
        self._do("release", self.backend.release, memory.to_release(self.ledger, regions), memory.released)

    def resume(self, regions: Iterable[str]) -> None:
        """Of these, what is out. Raises as `release`."""
        self._require_certain()
        self._do("resume", self.backend.resume, memory.to_resume(self.ledger, regions), memory.resumed)

    def resume_all(self) -> None:
        self.resume(self.ledger.regions)

    def _do(
        self,
        name: str,
        operation: Callable[[Sequence[str]], None],
        regions: tuple[str, ...],
        done: Callable[[Ledger, Iterable[str]], Ledger],
    ) -> None:
        if not regions:
            return
        try:
            operation(regions)
        except Exception as error:
            why = f"{name} of {', '.join(regions)} failed: {error!r}"
            self.ledger = memory.failed(self.ledger, why)
            raise Uncertain(why) from error
        self.ledger = done(self.ledger, regions)

    def _require_certain(self) -> None:
        if self.ledger.uncertain:
            raise Uncertain(self.ledger.uncertain)
