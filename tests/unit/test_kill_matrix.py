"""The kill matrix as a plan: no event without a place, no cell twice, every finding in its cell."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from reef_bus.core.invariants import Violation
from reef_bus.events import CATALOGUE
from tests.e2e import rows
from tests.e2e.cell import SIGNALS, Cell, Line
from tests.e2e.kill_matrix import File, blame, matrix, sample
from tests.e2e.rig import DEADLINES, Gone, Victim


def test_every_event_of_the_catalogue_has_one_place() -> None:
    assert rows.misplaced() == []
    assert {row.event for row in rows.ROWS.values()} | set(rows.NOT_MADE) == set(CATALOGUE)


def test_an_event_without_a_place_ends_the_run_before_anything_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(rows.NOT_MADE, "JobDropped")
    with pytest.raises(SystemExit, match="JobDropped"):
        matrix()


def test_an_event_that_is_made_is_not_also_said_to_be_impossible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(rows.NOT_MADE, "JobStarted", "no reason")
    assert rows.misplaced() == ["JobStarted"]


def test_every_role_is_killed_at_every_event_that_it_can_be_there_for() -> None:
    killed = {(cell.row, cell.role) for cell in matrix() if cell.signal == "kill"}
    assert len(matrix()) == len(set(matrix()))
    for name, row in rows.ROWS.items():
        there = {role for found, role in killed if found == name}
        if name == "LogOpened":
            assert there == {"supervisor", "nats"}
        else:
            assert there - {"leader"} == set(rows.ROLES) and ("leader" in there) != (row.fresh or row.staged)


@pytest.mark.parametrize("seed", range(20))
def test_a_sample_meets_every_role_and_every_signal_on_both_kinds_of_server(seed: int) -> None:
    chosen = sample(matrix(), 15, seed)
    single, cluster = ([c for c in chosen if c.kind == kind] for kind in ("single", "cluster"))
    assert (len(single), len(cluster), len(set(chosen))) == (12, 3, 15)
    assert {c.role for c in single} == set(rows.ROLES) and {c.signal for c in single} == set(SIGNALS)
    assert {c.signal for c in cluster} == set(SIGNALS)


def test_a_stop_is_measured_by_the_deadline_that_applies() -> None:
    assert rows.deadline("engine-1", "TargetPersisted", DEADLINES) == 2.0
    assert rows.deadline("trainer", "EngineFenced", DEADLINES) == 3.0
    assert rows.deadline("trainer", "SenderReady", DEADLINES) == 1.5
    assert rows.deadline("gateway", "JobDispatched", DEADLINES) == 2.0


def test_a_cell_that_was_written_down_is_known_to_the_next_run(tmp_path: Path) -> None:
    File(tmp_path / "new" / "lines").add(Line(event="JobStarted", role="nats", signal="kill", receipts={"rec-1"}))
    again = File(tmp_path / "new" / "lines")
    assert again.cells() == {Cell("JobStarted", "nats", "kill")}
    assert b"rec-1" not in again.path.read_bytes()


def test_a_finding_of_the_audit_goes_to_the_cell_in_which_it_came_about() -> None:
    first = Line(event="JobStarted", role="nats", signal="kill", until=50, until_record=500)
    second = Line(event="JobStarted", role="trainer", signal="kill", until=90, until_record=900)
    blame(Violation(invariant=2, text="a fence covered it", sequences=(50,), records=(600,)), [first, second])
    blame(Violation(invariant=6, text="stored twice", records=(501, 700)), [first, second])
    blame(Violation(invariant="fold", text="a contradiction", sequences=(91,)), [first, second])
    assert (first.wrong, first.twice, second.wrong, second.twice) == (1, 0, 0, 1)
    assert second.failed and second.findings == ["invariant 6: stored twice", "invariant fold: a contradiction"]


def test_only_a_child_of_the_named_process_is_ever_hit() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        with pytest.raises(Gone, match=f"child of {os.getpid()}"):
            Victim(child.pid, 1)
        found = Victim(child.pid, os.getpid())
        child.kill()
        child.wait()
        found.send(9)  # to nobody
        found.close()
        with pytest.raises(Gone):
            Victim(child.pid, os.getpid())
    finally:
        child.kill()
        child.communicate()
