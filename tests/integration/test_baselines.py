"""The baselines work when nobody disturbs them, and their harness sees a kill: what the comparison stands on."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import pytest

from tests.bench.baselines.kills import baseline
from tests.bench.baselines.outcome import LIMIT_S, Cell, Result
from tests.bench.baselines.patterns import PATTERNS

pytestmark = [pytest.mark.integration, pytest.mark.long]

NO_RAY = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed (extra bench)")


async def run(name: str, cells: int, folder: Path) -> Result:
    """The seed is that of `make bench-baselines`."""
    state = folder / "state"
    state.mkdir()
    return await baseline(PATTERNS[name], cells, math.inf, 1, state, folder / "log", lambda pattern, cell: None)


@pytest.mark.parametrize("name", ["broadcast", "disk", pytest.param("actors", marks=NO_RAY)])
async def test_an_undisturbed_update_reaches_both_receivers_and_loses_no_record(name: str, tmp_path: Path) -> None:
    """Two updates, the second of which takes in what was queued; the harness raises when a receiver does not serve."""
    found = await run(name, 0, tmp_path)
    assert found.updates == 2
    assert found.answers > 0
    assert (found.lost, found.twice) == (0, 0)


async def test_a_killed_trainer_of_the_disk_pattern_comes_back_and_its_update_arrives(tmp_path: Path) -> None:
    """The first cell kills it with the batch in hand, which that pattern keeps on disk."""
    found = await run("disk", 1, tmp_path)
    (cell,) = found.cells
    assert (cell.victim, cell.phase, cell.point) == ("trainer", "before", "batch")
    assert cell.whole_s is not None and 0 < cell.whole_s < LIMIT_S
    seen = Cell(victim="trainer", phase="before", point="batch", serving_s=cell.serving_s, whole_s=cell.whole_s)
    seen.delivered = True
    assert cell == seen  # every other column as it is when nothing bad was seen
    assert (found.lost, found.twice) == (0, 0)
