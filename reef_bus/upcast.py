"""How older versions of the vocabulary are read: one pure step per version, on plain dicts, before the typed decode.

Knows: shapes that were once written. Must not know: what the events mean.
A test walks the table: every version below the current one has its step and a golden sample.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

Step = Callable[[dict[str, Any]], dict[str, Any]]

STEPS: Mapping[tuple[str, int], Step] = {}
"""(event name, version n) -> the step that turns a payload of version n into one of version n + 1."""


def upcast(name: str, version: int, current: int, body: bytes) -> bytes:
    """The payload in the current version's shape; the same bytes when it already is."""
    if version == current:
        return body
    data = msgspec.json.decode(body)
    for step in range(version, current):
        data = STEPS[name, step](data)
    return msgspec.json.encode(data)
