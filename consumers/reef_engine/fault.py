"""A fault on purpose, for demonstrations: one flipped bit of what was received.

Knows: tensors, load ids. Must not know: the log, or that anybody hashes.
"""

from __future__ import annotations

import logging

from reef_bus.backends import Pieces

log = logging.getLogger(__name__)


class Fault:
    """After the target with sequence `at` was received, flip one bit, once; 0: never."""

    def __init__(self, at: int = 0) -> None:
        self.at = at

    def strike(self, received: Pieces, load_id: str) -> None:
        if self.at and int(load_id.rpartition(":")[2]) >= self.at:
            self.at = 0
            name, piece = sorted(received.items())[-1]
            piece.data[len(piece.data) // 2] ^= 0x01
            log.warning("fault switch: flipped a bit of %s after receiving %s", name, load_id)
