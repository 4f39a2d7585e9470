"""Runtime load ids and the other names that are derived, never drawn.

Knows: how ids are spelled. Must not know: randomness; what must be random arrives as data.
"""

from __future__ import annotations

import hashlib

import msgspec

from reef_bus.errors import ContractError

BASE = "base"
"""The candidate id of release 0, the model that a scenario was registered with."""


class LoadId(msgspec.Struct, frozen=True, gc=False):
    """`<incarnation>:<sequence>`: names one load of one content, forever."""

    incarnation: str
    sequence: int

    def __str__(self) -> str:
        return f"{self.incarnation}:{self.sequence}"


def parse_load_id(text: str) -> LoadId:
    """Take a load id apart at its last colon; ContractError unless it is spelled canonically."""
    incarnation, _, digits = text.rpartition(":")
    if incarnation and digits.isascii() and digits.isdecimal():
        found = LoadId(incarnation, int(digits))
        if str(found) == text:
            return found
    raise ContractError(f"load id {text!r} is not <incarnation>:<sequence>")


def derived(prefix: str, *parts: object) -> str:
    """An id that is the same whenever its parts are: `prefix-` and 16 hex digits."""
    text = "\n".join(str(part) for part in parts)
    return f"{prefix}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
