"""The table: which fault struck while which event was the log's last; and the cells that cannot be, with the reason.

Knows: counts. Must not know: how a fault strikes.
"""

from __future__ import annotations

from collections import Counter

from tests.simulation.faults import EVENTS, KINDS

Cell = tuple[str, str]

IMPOSSIBLE: dict[Cell, str] = {}
"""Cells that no run can hit, and why."""


def missing(hits: Counter[Cell]) -> list[str]:
    """Possible cells that were never hit, and impossible ones that were: then the reason is wrong."""
    never = [f"{kind} at {event}" for kind in KINDS for event in EVENTS if not hits[kind, event]]
    never = [cell for cell in never if tuple(cell.split(" at ")) not in IMPOSSIBLE]
    return never + [
        f"{kind} at {event}, which is said to be impossible" for kind, event in IMPOSSIBLE if hits[kind, event]
    ]


def table(hits: Counter[Cell], events: Counter[str]) -> str:
    """One row per event, one column per fault."""
    lines = [" " * 30 + " ".join(f"{kind[:9]:>9}" for kind in KINDS)]
    for event in EVENTS:
        cells = [str(hits[kind, event]) if (kind, event) not in IMPOSSIBLE else "-" for kind in KINDS]
        lines.append(f"{event:20} {events[event]:8} " + " ".join(f"{cell:>9}" for cell in cells))
    return "\n".join(lines)
