"""What a prompt to a server may be.

Knows: a model's configuration, a prompt. Must not know: the server, or who asks.
"""

from __future__ import annotations

import math
from pathlib import Path

import msgspec

from reef_bus.backends import Prompt
from reef_bus.errors import Rejected

RESERVED, PROMPT_RESERVED = 2, 7
"""Positions that the server gives to nobody: an answer is cut there, and nothing said; a longer prompt is refused."""


class Limits(msgspec.Struct, frozen=True):
    """What of a model's configuration bounds a prompt: the server's process ends on an id beyond the vocabulary."""

    vocab_size: int
    max_position_embeddings: int

    @classmethod
    def of(cls, model: Path) -> Limits:
        try:
            return msgspec.json.decode((model / "config.json").read_bytes(), type=cls)
        except (OSError, msgspec.MsgspecError) as error:
            raise Rejected(f"{model / 'config.json'} does not say what a prompt may be: {error}") from error

    def longest(self) -> int:
        """Tokens that a prompt may have."""
        return self.max_position_embeddings - PROMPT_RESERVED

    def check(self, prompt: Prompt) -> None:
        if not prompt.ids or not all(0 <= token < self.vocab_size for token in prompt.ids):
            raise Rejected(
                f"found prompt ids {prompt.ids}; expected at least one, each from 0 to {self.vocab_size - 1}"
            )
        if len(prompt.ids) > (most := self.longest()):
            raise Rejected(f"found a prompt of {len(prompt.ids)} tokens; expected {most} at most")
        room = self.max_position_embeddings - RESERVED - len(prompt.ids)
        if not 1 <= prompt.max_tokens <= room:
            raise Rejected(
                f"found max_tokens {prompt.max_tokens}; after {len(prompt.ids)} prompt tokens 1 to {room} fit"
            )
        if not (math.isfinite(prompt.temperature) and prompt.temperature >= 0):
            raise Rejected(f"found temperature {prompt.temperature}; expected 0 (greedy) or a positive number")
