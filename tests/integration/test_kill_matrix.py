"""A sample of the kill matrix, another one for another seed; `make kill-matrix` runs the whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.cell import SIGNALS, Cell, Line
from tests.e2e.kill_matrix import Run, matrix, sample
from tests.e2e.rows import ROLES

pytestmark = pytest.mark.integration

SEED = 7
CHOSEN = sample(matrix(), 15, SEED)


async def outcome(folder: Path, chosen: list[Cell]) -> list[Line]:
    lines: list[Line] = []
    await Run(folder, 1.0, lines.append).all(chosen)
    return lines


def check(lines: list[Line], chosen: list[Cell]) -> None:
    assert [Cell(line.event, line.role, line.signal) for line in lines] == chosen
    assert [(str(cell), line.error) for cell, line in zip(chosen, lines, strict=True) if line.error] == []
    assert [text for line in lines for text in line.findings] == []
    columns = ("torn", "wrong", "stuck", "lost", "twice", "operator")
    assert {name: sum(getattr(line, name) for line in lines) for name in columns} == dict.fromkeys(columns, 0)
    assert all(line.serving_s is not None and line.whole_s is not None for line in lines)


async def test_every_role_is_killed_or_stopped_on_one_server_and_nothing_is_lost_torn_or_stuck(tmp_path: Path) -> None:
    chosen = [cell for cell in CHOSEN if cell.kind == "single"]
    assert len(chosen) >= 12 and {c.role for c in chosen} == set(ROLES) and {c.signal for c in chosen} == set(SIGNALS)
    check(await outcome(tmp_path, chosen), chosen)


async def test_the_leader_of_a_cluster_is_killed_and_stopped_and_nothing_is_lost_torn_or_stuck(tmp_path: Path) -> None:
    chosen = [cell for cell in CHOSEN if cell.kind == "cluster"]
    assert len(chosen) >= 3 and {c.signal for c in chosen} == set(SIGNALS)
    check(await outcome(tmp_path, chosen), chosen)
