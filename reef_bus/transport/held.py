"""Memory that fills from its beginning, while others may already take from it what is there.

Knows: byte positions in the canonical stream. Must not know: where the bytes come from, or who takes them.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

from reef_bus.errors import TransferError

SLICE_BYTES = 64 << 20
"""Counted as sent when all of it is."""


class Held:
    """The tensors' memory, one behind the other; the first `have` of its `total` bytes are there."""

    def __init__(self, views: Sequence[memoryview], *, full: bool = False, have: int = 0) -> None:
        self._views = [view for view in views if view.nbytes]
        self._ends = list(accumulate(view.nbytes for view in self._views))
        self.total = self._ends[-1] if self._ends else 0
        self.have = self.total if full else have
        self._over = full
        self._moved = asyncio.Event()

    def grow(self, count: int) -> None:
        self.have += count
        self._wake()

    def end(self) -> None:
        """No more will come."""
        self._over = True
        self._wake()

    def _wake(self) -> None:
        self._moved.set()
        self._moved = asyncio.Event()

    async def beyond(self, place: int) -> None:
        """Wait until there are more than `place` bytes. Raises TransferError if there never will."""
        while self.have <= place:
            if self._over:
                raise TransferError("closed", f"here it ends after {self.have} of {self.total} bytes")
            await self._moved.wait()

    def parts(self, start: int, stop: int) -> Iterator[memoryview]:
        """The memory between two places, in slices."""
        number = bisect_right(self._ends, start)
        while start < stop:
            view, end = self._views[number], self._ends[number]
            first = start - (end - view.nbytes)
            part = view[first : min(first + SLICE_BYTES, first + stop - start)]
            start += part.nbytes
            number += start == end
            yield part
