"""The kill matrix: every role × every event of the log × SIGKILL and SIGSTOP, on a deployment under traffic.

Knows: the cells, their order, what is written about them. Must not know: how an event comes about, or how one is hit.
`make kill-matrix`. Deployments run side by side, on a server each and on a cluster of three, many cells on each.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import random
import shutil
import statistics
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from reef_bus.core.invariants import Violation, check
from reef_bus.runner import blocking
from tests.e2e import cell as cells
from tests.e2e.cell import KILL, SIGNALS, Cell, Line
from tests.e2e.rig import Kind, Rig, rig
from tests.e2e.rows import LEADER, ROLES, ROWS, misplaced

OUT = Path("build/kill-matrix.jsonl")
AUDIT_EACH = 20  # cells: an audit reads everything, and a finding should be near its cell
COLUMNS: Mapping[int | str, str] = {1: "wrong", 2: "wrong", 3: "torn", 7: "torn", 6: "twice"}
"""The column that a violation of an invariant belongs to; `findings` has them all."""

BEFORE_ANYBODY = {
    "LogOpened": ("supervisor", "nats"),
}
"""Rows at which there is nobody else to be hit."""
ONE_STOP = {
    "CandidateEvaluated": "CandidateReady",
    "CandidateSelected": "CandidateReady",
    "ComponentLost": "ReadinessWithdrawn",
    "RestartScheduled": "ReadinessWithdrawn",
    "PublicationHaltRequested": "PublicationHalted",
    "SenderReady/staged": "TargetPersisted/staged",
    "ReceiverVerified/staged": "ReleaseCommitted/staged",
    "TransferAborted/staged": "TransferAborted",
    "ScenarioRegistered": "ReleaseCommitted",
}
"""Rows at which nobody is stopped, and the row that stands for them: both are written within milliseconds, and who is
stopped for a second or more at the one is stopped at the other, too. (At the last two a head is new and
no publication is open; a deployment for each stop at the first would cost minutes.) Killed is everybody at both."""


def left_out(cell: Cell) -> str:
    """Why a cell of the product is not one of the matrix; empty if it is."""
    if cell.row in BEFORE_ANYBODY and cell.role not in BEFORE_ANYBODY[cell.row]:
        return "there is no such process yet"
    if ROWS[cell.row].fresh and cell.role == LEADER:
        return "the stream, and with it the leader, is made in that moment"
    if ROWS[cell.row].staged and cell.role == LEADER:
        return "the log is the same in both modes"
    if cell.signal != KILL and cell.row in ONE_STOP:
        return f"the stop at {ONE_STOP[cell.row]} is the same"
    return ""


def matrix() -> list[Cell]:
    """Every cell; a catalogue with an event that has no place ends the run before anything is started."""
    if wrong := misplaced():
        raise SystemExit(f"kill matrix: not exactly one place in tests/e2e/rows.py for {', '.join(wrong)}")
    product = (Cell(row, role, signal) for row in ROWS for signal in SIGNALS for role in (*ROLES, LEADER))
    return [cell for cell in product if not left_out(cell)]


def sample(found: Sequence[Cell], count: int, seed: int) -> list[Cell]:
    """`count` cells on fenced deployments that are running, a fifth of them (three at least) on the cluster; each part
    meets every signal, and the first every role."""
    running = [cell for cell in found if not ROWS[cell.row].fresh and not ROWS[cell.row].staged]
    random.Random(seed).shuffle(running)
    leader = max(3, count // 5)
    single, cluster = ([c for c in running if c.kind == kind] for kind in ("single", "cluster"))
    parts = ((single, count - leader), (cluster, leader))
    return [cell for part, most in parts for cell in _cover(part, most)]


def _cover(found: Sequence[Cell], most: int) -> list[Cell]:
    """The first cells that bring a new role and signal, then those that bring one of them, then any."""
    chosen: list[Cell] = []
    for new in (2, 1, 0):
        for cell in found:
            roles, signals = {c.role for c in chosen}, {c.signal for c in chosen}
            if cell not in chosen and (cell.role not in roles) + (cell.signal not in signals) >= new:
                chosen.append(cell)
    return chosen[:most]


# -- running them


class Run:
    """The cells of one run, what is known of them, and who hears of it."""

    def __init__(self, folder: Path, scale: float, done: Callable[[Line], None], lanes: int = 1) -> None:
        self.folder = folder
        self.scale = scale
        self.done = done
        self.lanes = lanes
        self.kept: list[Path] = []

    async def all(self, found: Sequence[Cell]) -> None:
        """All at once: `lanes` deployments on a server each, which share their cells, and one on a cluster."""
        at_first = deque(cell for cell in found if ROWS[cell.row].fresh)
        running = [cell for cell in found if cell not in at_first]
        single, staged, cluster = (deque(c for c in running if c.kind == k) for k in ("single", "staged", "cluster"))
        async with asyncio.TaskGroup() as group:
            for number in range(self.lanes):
                group.create_task(self._lane(number, single, at_first))
            group.create_task(self._lane(self.lanes, cluster, staged))

    async def _lane(self, number: int, waiting: deque[Cell], then: deque[Cell]) -> None:
        """A deployment for as many cells as it survives, another for the next; the same for those that come then."""
        for cells_ in (waiting, then):
            for count in itertools.count():
                if not cells_:
                    break
                await self._next(f"{number}-{count}", cells_)

    async def _next(self, name: str, waiting: deque[Cell]) -> None:
        """One of a beginning has a deployment of its own."""
        cell = waiting[0]
        if ROWS[cell.row].fresh:
            await self._deployment(f"{cell.row}-{cell.role}-{cell.signal}", "single", deque([waiting.popleft()]))
        else:
            await self._deployment(f"{cell.kind}-{name}", cell.kind, waiting)

    async def _deployment(self, name: str, kind: Kind, waiting: deque[Cell]) -> None:
        """Cells from `waiting` until there are none, or one fails: what it leaves behind is no place for another."""
        folder, fresh = self.folder / name, ROWS[waiting[0].row].fresh
        shutil.rmtree(folder, ignore_errors=True)
        batch: list[Line] = []
        async with rig(folder, kind, self.scale) as found, contextlib.AsyncExitStack() as stack:
            if not fresh:
                await found.begin(stack)
                await found.until("every engine serves", found.whole)
            seen: set[str] = set()
            while waiting and not any(line.failed for line in batch):
                batch = await self._batch(found, waiting, stack)
                await audit(found, batch, seen)
                for line in batch:
                    self.done(line)
        if any(line.failed for line in batch):
            self.kept.append(folder)
        else:
            shutil.rmtree(folder, ignore_errors=True)

    async def _batch(self, found: Rig, waiting: deque[Cell], stack: contextlib.AsyncExitStack) -> list[Line]:
        batch: list[Line] = []
        while waiting and len(batch) < AUDIT_EACH and not any(line.failed for line in batch):
            batch.append(await cells.run(found, waiting.popleft(), stack))
            await cells.place(found, batch[-1])
            progress(batch[-1])
        return batch


def progress(line: Line) -> None:
    """One line on stderr as soon as a cell has ended."""
    seconds = f"{line.whole_s:.1f} s" if line.whole_s is not None else line.error
    said = f"{line.event:24} {line.role:11} {line.signal:8} late {line.late_ms:4.0f} ms, safe {line.safe_s}"
    print(f"{said}, serving {line.serving_s}, whole {seconds} {line.cost}", file=sys.stderr, flush=True)


async def audit(found: Rig, batch: Sequence[Line], seen: set[str]) -> None:
    """Put what the audit finds in the whole log, and has not found before, down to the cell where it came about."""
    try:
        history = await found.history()
    except Exception as error:
        batch[-1].findings.append(f"no audit: {error}")
        return
    result = await blocking(check, history.log, history.records, history.batches)
    for violation in result.violations:
        if violation.text not in seen:
            seen.add(violation.text)
            blame(violation, batch)
    batch[-1].findings += [text for text in result.unchecked if text not in seen]
    seen.update(result.unchecked)
    recorded = {getattr(each.event, "record", "") for each in history.records}
    for line in batch:
        line.lost = len(line.receipts - recorded)


def blame(violation: Violation, batch: Sequence[Line]) -> None:
    """Enter a violation in the first cell that ends after its last event."""
    log, records = max(violation.sequences, default=0), max(violation.records, default=0)
    line = next((e for e in batch if e.until >= log and (log or e.until_record >= records)), batch[-1])
    if column := COLUMNS.get(violation.invariant):
        setattr(line, column, getattr(line, column) + 1)
    line.findings.append(f"invariant {violation.invariant}: {violation.text}")


# -- writing them down


class File:
    """One JSON object a line; a cell that is there already is not run again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        text = path.read_bytes().splitlines() if path.exists() else []
        self.lines = [msgspec.json.decode(line, type=Line) for line in text]

    def cells(self) -> set[Cell]:
        return {Cell(line.event, line.role, line.signal) for line in self.lines}

    def add(self, line: Line) -> None:
        line.receipts = set()
        self.lines.append(line)
        with self.path.open("ab") as file:
            file.write(msgspec.json.encode(line) + b"\n")
            file.flush()
            os.fsync(file.fileno())


class Clock:
    """How long the rest will take, from the cells that were measured."""

    def __init__(self, plan: Sequence[Cell], known: Sequence[Line], lanes: int) -> None:
        self.lanes = lanes
        self.began = time.monotonic()
        self.left = set(plan)
        self.seconds: dict[tuple[Kind, str], list[float]] = defaultdict(list)
        for line in known:
            self.see(line)

    def see(self, line: Line) -> None:
        cell = Cell(line.event, line.role, line.signal)
        self.left.discard(cell)
        self.seconds[cell.kind, cell.signal].append(line.whole_s or 60.0)

    def rest_s(self) -> float:
        """Lanes run at once: the longest counts. A cell waits for its event, too."""
        seconds = dict.fromkeys(("single", "staged", "cluster"), 0.0)
        for cell in self.left:
            known = self.seconds.get((cell.kind, cell.signal))
            seconds[cell.kind] += 1.5 + (statistics.fmean(known) if known else 6.0)
        return max(seconds["cluster"] + seconds["staged"], seconds["single"] / self.lanes)

    def __str__(self) -> str:
        passed = time.monotonic() - self.began
        return f"{len(self.left)} cells to go, {passed:.0f} s passed, about {self.rest_s() / 60:.0f} min left"


def table(lines: Iterable[Line]) -> str:
    """Seconds to whole: rows events, columns roles, one table per signal."""
    by_cell = {Cell(line.event, line.role, line.signal): line for line in lines}
    text = []
    for signal in SIGNALS:
        rows = [row for row in ROWS if any((c.row, c.signal) == (row, signal) for c in by_cell)]
        columns = [role for role in (*ROLES, LEADER) if any((c.role, c.signal) == (role, signal) for c in by_cell)]
        text += [f"\n{signal}: seconds until all is whole, with a later release on every engine\n"] if rows else []
        text += [f"| event | {' | '.join(columns)} |", "|---|" + "---|" * len(columns)] if rows else []
        for row in rows:
            found = [by_cell.get(Cell(row, role, signal)) for role in columns]
            text.append(f"| {row} | {' | '.join(_shown(line) for line in found)} |")
    return "\n".join(text)


def _shown(line: Line | None) -> str:
    if line is None:
        return ""
    return f"{line.whole_s:.1f}{' !' if line.failed else ''}" if line.whole_s is not None else "!"


def summary(lines: Sequence[Line]) -> str:
    """Median and maximum per role, and the sums of the columns that must be 0."""
    text = ["\n| role | cells | safe, median / max | serving again | whole |\n|---|---|---|---|---|"]
    for role in (*ROLES, LEADER):
        found = [line for line in lines if line.role == role]
        if found:
            figures = [_spread([getattr(line, name) for line in found]) for name in ("safe_s", "serving_s", "whole_s")]
            text.append(f"| {role} | {len(found)} | {' | '.join(figures)} |")
    for name in ("torn", "wrong", "stuck", "lost", "twice", "operator"):
        text.append(f"{name}: {sum(getattr(line, name) for line in lines)}")
    text.append(f"findings of the audit: {sum(len(line.findings) for line in lines)}")
    return "\n".join(text)


def _spread(values: Iterable[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.median(known):.2f} / {max(known):.2f}" if known else "never"


# -- the command


def main() -> int:
    args = arguments().parse_args()
    wanted = [c for c in matrix() if _wanted(c, args)]
    chosen = sample(wanted, args.sample, args.seed) if args.sample else wanted
    file = File(args.out)
    plan = [cell for cell in chosen if cell not in file.cells()]
    clock = Clock(plan, file.lines, args.lanes)
    print(f"{len(chosen) - len(plan)} cells are in {args.out} already; {clock}", file=sys.stderr)

    def done(line: Line) -> None:
        file.add(line)
        clock.see(line)
        if args.json:
            print(msgspec.json.encode(line).decode(), flush=True)
        print(clock, file=sys.stderr, flush=True)

    run = Run(args.out.with_suffix(""), args.scale, done, args.lanes)
    asyncio.run(run.all(plan))
    shown = [line for line in file.lines if Cell(line.event, line.role, line.signal) in set(chosen)]
    print("" if args.json else table(shown) + "\n" + summary(shown))
    failed = [line for line in shown if line.failed]
    for line in failed:
        print(f"{line.event} {line.role} {line.signal}: {line.error} {' '.join(line.findings)}", file=sys.stderr)
    kept = ", ".join(map(str, run.kept)) or "nothing"
    print(f"{len(shown)} cells, {len(failed)} failed; kept: {kept}", file=sys.stderr)
    return 1 if failed else 0


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="make kill-matrix")
    parser.add_argument("--only-event", metavar="E", nargs="+", choices=tuple(ROWS), default=tuple(ROWS))
    parser.add_argument("--only-role", metavar="R", nargs="+", choices=(*ROLES, LEADER), default=(*ROLES, LEADER))
    parser.add_argument("--only-signal", metavar="S", nargs="+", choices=SIGNALS, default=SIGNALS)
    parser.add_argument("--sample", metavar="N", type=int, default=0, help="so many cells, chosen by --seed")
    parser.add_argument("--seed", metavar="S", type=int, default=0)
    parser.add_argument("--out", metavar="FILE", type=Path, default=OUT, help=f"cells in it are not run again ({OUT})")
    parser.add_argument("--scale", metavar="F", type=float, default=1.0, help="of all deadlines, for a loaded machine")
    parser.add_argument("--lanes", metavar="N", type=int, default=2, help="deployments at once, beside the cluster (2)")
    parser.add_argument("--json", action="store_true", help="the lines on stdout instead of the tables")
    return parser


def _wanted(cell: Cell, args: argparse.Namespace) -> bool:
    return cell.row in args.only_event and cell.role in args.only_role and cell.signal in args.only_signal


if __name__ == "__main__":
    sys.exit(main())
