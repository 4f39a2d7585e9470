"""The inference engine that all three patterns drive: weights in memory, a label, a pause, and answers.

Knows: what it holds. Must not know: how weights come to it. Whoever writes does so while it is paused; nothing else
keeps an answer from being computed with half of a version, as in the engines that it stands for.
"""

from __future__ import annotations

import threading
import uuid
from typing import Any

from tests.bench.baselines.weights import BASE, Array, content, fingerprint


class Engine:
    """An answer says which version it claims and the fingerprints of the tensors that it was computed with."""

    def __init__(self) -> None:
        self.tensors: list[Array] = content(BASE)
        self.label = BASE
        self.paused = False
        self._generating = threading.Lock()

    def answer(self) -> dict[str, Any] | None:
        """None while it is paused: whoever asks, waits."""
        with self._generating:
            if self.paused:
                return None
            return {"record": uuid.uuid4().hex, "label": self.label, "found": fingerprint(self.tensors)}

    def pause(self) -> None:
        """On return no answer is being computed."""
        with self._generating:
            self.paused = True

    def resume(self) -> None:
        self.paused = False

    def write(self, index: int, tensor: Array) -> None:
        """In place, as engines load: the forward pass keeps its addresses."""
        self.tensors[index][:] = tensor
