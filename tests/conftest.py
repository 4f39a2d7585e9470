"""What every test shares: two cores, no luck.

Knows: pytest's and hypothesis' settings. Must not know: any module of the project.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

# Read when torch is first imported: the machine has two cores, and several processes of a test share them.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# No deadline, because a shared machine stalls; derandomized, because a run that failed must fail again.
settings.register_profile("reef", deadline=None, derandomize=True)
settings.load_profile("reef")

UNCOVERED = ("simulation", "integration")
"""Whole deployments: what they run in other processes is not measured anyway, and measuring costs as much again."""
LONG = (
    "simulation/test_simulation.py",
    "integration/test_kill_matrix.py",
    "integration/test_kills.py",
    "integration/test_recovery.py",
)
"""Files of more than a minute. Begun last, one of them would keep one core busy at the end, and the other idle."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name in UNCOVERED:
            item.add_marker(pytest.mark.no_cover)
    items.sort(key=_turn)


def _turn(item: pytest.Item) -> int:
    """Stable: within a file, and among equals, everything stays in its order."""
    name = f"{item.path.parent.name}/{item.path.name}"
    if name in LONG:
        return LONG.index(name)
    return len(LONG) + (item.path.parent.name not in UNCOVERED)
