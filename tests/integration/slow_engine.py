"""An engine's process like any other, only that every token takes its time: `python -m tests.integration.slow_engine`.

Knows: the role's own way to run. Must not know: what is done with it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from consumers.reef_engine import role
from consumers.reef_engine.torch_backend import TorchEngine
from reef_bus.backends import Generation, InferenceBackend, Prompt, Stop
from reef_bus.config import load

TOKEN_S = 0.1


class Slow(TorchEngine):
    def generate_until(self, prompts: Sequence[Prompt], stop: Stop, kept: Any = None) -> Generation:
        def later() -> bool:
            time.sleep(TOKEN_S)
            return stop()

        return super().generate_until(prompts, later, kept)


def _slow(model: str) -> InferenceBackend:
    engine = Slow()
    engine.start()
    return engine


if __name__ == "__main__":
    role._torch = _slow
    sys.exit(role.run(load(Path(sys.argv[1])), sys.argv[2]))
