"""What one kill led to, and what a pattern's kills led to together: the columns of the table.

Knows: arithmetic. Must not know: how anything was measured.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import msgspec

LIMIT_S = 30.0
"""The length of a cell at most: two attempts of an update with steps that run into their timeouts, and the restart of a
whole driver, or of a process that imports torch, on a loaded machine."""


class Cell(msgspec.Struct, kw_only=True):
    """One update and one kill. Seconds count from the kill; None is "not within LIMIT_S".

    `torn`: receivers that answered with a mix of versions, or hold one at the end. `wrong`: answers whose content is
    not their label's, the torn ones included. `stuck`: receivers that do not answer at the end. `mixed`: at the end,
    receivers answer with different versions. `safe_s`: the last wrong answer. `serving_s`: the first right answer to a
    question asked after the kill. `whole_s`: every process is back and idle, and every receiver answers rightly and
    with the same version. `delivered`: that version is the one that the cell was to bring.
    `by_hand`: what an operator had to restart afterwards, when the next update alone did not heal the fleet.
    """

    victim: str
    phase: str
    point: str
    torn: int = 0
    wrong: int = 0
    stuck: int = 0
    mixed: bool = False
    delivered: bool = False
    safe_s: float | None = 0.0
    serving_s: float | None = None
    whole_s: float | None = None
    by_hand: int = 0


class Result(msgspec.Struct, kw_only=True):
    """One row of the table. `why` says why there are no cells."""

    pattern: str
    title: str
    cells: list[Cell] = []
    lost: int = 0
    twice: int = 0
    answers: int = 0
    updates: int = 0
    findings: list[str] = []
    why: str = ""


def row(result: Result) -> list[str]:
    cells = result.cells
    return [
        str(len(cells)),
        str(sum(cell.torn for cell in cells)),
        str(sum(cell.wrong for cell in cells)),
        str(sum(cell.stuck for cell in cells)),
        str(sum(cell.mixed for cell in cells)),
        str(result.lost),
        str(result.twice),
        _times([cell.safe_s for cell in cells]),
        _times([cell.serving_s for cell in cells]),
        _times([cell.whole_s for cell in cells]),
        f"{sum(cell.delivered for cell in cells)}",
        str(sum(cell.by_hand for cell in cells)),
    ]


COLUMNS = (
    "kills",
    "torn receivers",
    "wrong-version answers",
    "stuck paused",
    "mixed fleets",
    "records lost",
    "trained twice",
    "s to safe",
    "s to serving",
    "s to whole",
    "delivered",
    "by hand",
)


def _times(found: Sequence[float | None]) -> str:
    """Median and maximum; what did not happen within the cell is longer than any, and counted."""
    if not found:
        return "–"
    late = sum(each is None for each in found)
    times = [LIMIT_S if each is None else each for each in found]
    maximum = f">{LIMIT_S:g} ({late}×)" if late else f"{max(times):.1f}"
    return f"{statistics.median(times):.1f} / {maximum}"


def table(results: Sequence[Result]) -> str:
    lines = ["| pattern | " + " | ".join(COLUMNS) + " |", "|---|" + "---:|" * len(COLUMNS)]
    for found in results:
        cells = row(found) if not found.why else [f"not run here, because {found.why}", *[""] * (len(COLUMNS) - 1)]
        lines.append(f"| {found.title} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def report(results: Sequence[Result], settings: dict[str, Any]) -> bytes:
    return msgspec.json.format(msgspec.json.encode({"settings": settings, "results": results}), indent=1)
