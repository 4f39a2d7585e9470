"""A switch for demonstrations: an engine whose memory is not what it received.

Knows: what was received. Must not know: who finds out.
"""

from __future__ import annotations

import logging

from reef_bus.backends import Pieces

log = logging.getLogger(__name__)


class Fault:
    """A switch for demonstrations: after the target with sequence `at` was received, flip one byte, once."""

    def __init__(self, at: int = 0) -> None:
        self.at = at

    def strike(self, received: Pieces, load_id: str) -> None:
        if self.at and int(load_id.rpartition(":")[2]) >= self.at:
            self.at = 0
            name, piece = sorted(received.items())[-1]
            piece.data[len(piece.data) // 2] ^= 0x01
            log.warning("fault switch: flipped a bit of %s after receiving %s", name, load_id)
