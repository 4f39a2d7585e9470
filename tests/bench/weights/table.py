"""Rows of the figures: a measured value, what it must be, and whether it is.

Knows: arithmetic and how a table looks. Must not know: how anything is measured.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import msgspec

AT_LEAST, AT_MOST = "≥", "≤"


class Row(msgspec.Struct, kw_only=True):
    """`sense` and `target` say what `value` must be; a row without them is there to be compared with. `count`: runs of
    which the value is the median. `detail`: what the value was made of, and how far it spread."""

    measure: str
    value: float
    unit: str
    count: int
    sense: Literal["≥", "≤", ""] = ""
    target: float = 0.0
    detail: dict[str, Any] = {}

    @property
    def met(self) -> bool | None:
        """None where nothing is asked for. A value that is no number meets nothing."""
        if not self.sense:
            return None
        return self.value >= self.target if self.sense == AT_LEAST else self.value <= self.target


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def spread(values: Sequence[float]) -> list[float]:
    """The quartiles around a median; of less than two values, those."""
    if len(values) < 2:
        return [*values] * 2
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return [low, high]


def ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Run by run: what was measured side by side was disturbed alike."""
    return [a / b for a, b in zip(above, below, strict=True)]


def as_json(row: Row) -> dict[str, Any]:
    """One row of the file."""
    return {**msgspec.to_builtins(row), "met": row.met}


def text(rows: Iterable[Row]) -> str:
    """Markdown, so that it can be pasted where it is needed."""
    lines = [("measure", "value", "target", "met", "runs", "of which")]
    lines += [_cells(row) for row in rows]
    lines.insert(1, ("---",) * len(lines[0]))
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _cells(row: Row) -> tuple[str, ...]:
    met = {True: "yes", False: "NO", None: ""}[row.met]
    target = f"{row.sense} {number(row.target)}" if row.sense else ""
    detail = ", ".join(f"{key} {_shown(value)}" for key, value in row.detail.items())
    return row.measure, f"{number(row.value)} {row.unit}".strip(), target, met, str(row.count), detail


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return "–".join(map(_shown, value))
    return number(value) if isinstance(value, float) else str(value)


def number(value: float) -> str:
    """Three digits are more than any of this repeats to."""
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
