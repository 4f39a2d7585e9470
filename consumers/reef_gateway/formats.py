"""What makes token ids of a conversation, once, and text of token ids; and the demo's own, over sixteen tokens.

Knows: a model's tokens and how they read. Must not know: requests, engines, records, or HTTP.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from reef_bus import tokens
from reef_bus.errors import Rejected

HELD = 32
"""Tokens that are read together in search of whole characters. Of a longer run the text comes with its last token."""

Message = Mapping[str, Any]


class ChatFormat(ABC):
    """One model's way to read a conversation and to say an answer. Nothing here ever makes ids of an answer's text."""

    stops: frozenset[int] = frozenset()
    """An answer ends with the first of these."""
    usual: int
    """How many tokens an answer may have where nobody has said."""

    @abstractmethod
    def render(
        self, messages: Sequence[Message], tools: Sequence[Message] = (), variables: Mapping[str, Any] | None = None
    ) -> tuple[int, ...]:
        """The prompt's ids, up to where the answer begins; `variables` are for the template. Raises Rejected for a
        conversation that this model does not read."""

    @abstractmethod
    def room(self, prompt: Sequence[int]) -> int:
        """How many tokens an answer to `prompt` may have at most."""

    @abstractmethod
    def shown(self, ids: Sequence[int]) -> str:
        """All of `ids` for people, control tokens too."""

    @abstractmethod
    def spoken(self, ids: Sequence[int]) -> str:
        """What `ids` say to a client: no control tokens."""

    def pieces(self, ids: Sequence[int]) -> Iterator[str]:
        """What each of `ids` adds to `spoken(ids)`, all of which they make up. A character whose bytes are several
        tokens comes whole, with its last one: a piece is given once it is what the whole text has in that place."""
        whole, given, begin, read = self.spoken(ids), 0, 0, 0
        for end in range(1, len(ids) + 1):
            piece = "" if end < len(ids) else whole[given:]
            if end < len(ids) and end - read <= HELD:
                before, now = self.spoken(ids[begin:read]), self.spoken(ids[begin:end])
                new = now[len(before) :] if now.startswith(before) else ""
                if new and whole.startswith(new, given):
                    piece, begin, read = new, read, end
            given += len(piece)
            yield piece


class Digits(ChatFormat):
    """The demo's: one question of a few digits. Its answers have no end but their length."""

    usual = 4

    def render(
        self, messages: Sequence[Message], tools: Sequence[Message] = (), variables: Mapping[str, Any] | None = None
    ) -> tuple[int, ...]:
        if tools or variables:
            raise Rejected("found tools or chat_template_kwargs; this model reads neither, only one message of digits")
        return tokens.render(messages)

    def room(self, prompt: Sequence[int]) -> int:
        return tokens.room(prompt)

    def shown(self, ids: Sequence[int]) -> str:
        return tokens.decode(ids)

    def spoken(self, ids: Sequence[int]) -> str:
        return tokens.decode(ids)


DIGITS = Digits()
