"""Every row of the figures in one run: `make bench`.

Knows: which rows there are, where the result goes. Must not know: how a row is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import msgspec

from tests.bench.weights import growth, machine, moving, serving
from tests.bench.weights.table import Row, as_json, number, text

BUILD = Path("build/bench")


def rows(runs: int, events: int, folder: Path, rates: machine.Rates) -> dict[str, Callable[[], Iterator[Row]]]:
    return {
        "shm": partial(moving.shm, runs, folder),
        "tcp": partial(moving.tcp, runs, folder),
        "chain": partial(moving.chain, runs, folder),
        "serving": partial(serving.small, runs, folder, rates),
        "large": partial(serving.large, runs, folder),
        "fenced": partial(serving.fenced, runs, folder),
        "staged": partial(serving.staged, runs, folder),
        "decisions": partial(growth.decisions, runs, folder),
        "growth": partial(growth.growth, runs, events, folder),
    }


NAMES = tuple(rows(1, 1, Path(), machine.Rates([1.0], [1.0])))


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def measured(only: list[str], runs: int, events: int, folder: Path) -> list[Row]:
    """The machine first; then each row, told as it comes."""
    rates = asyncio.run(machine.append_rates(folder / "nats"))
    found = [machine.copy_rate(max(3, runs // 3)), *rates.rows()]
    for row in found:
        tell(row)
    for name, measure in rows(runs, events, folder, rates).items():
        if name not in only:
            continue
        began = time.monotonic()
        for row in measure():
            row.detail["load"] = machine.load()
            tell(row)
            found.append(row)
        say(f"-- {name}: {time.monotonic() - began:.0f} s")
    return found


def tell(row: Row) -> None:
    met = {True: "", False: "  MISSED", None: ""}[row.met]
    target = f"  (target {row.sense} {number(row.target)})" if row.sense else ""
    say(f"{row.measure}: {number(row.value)} {row.unit}{target}{met}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="make bench", description="every row of the figures; a miss is no failure")
    parser.add_argument(
        "--only", choices=NAMES, nargs="+", default=list(NAMES), help="rows to measure; all else is left out"
    )
    parser.add_argument("--runs", type=int, default=30, help="of each row")
    parser.add_argument(
        "--events", type=int, default=1_000_000, help="up to which a server's log grows; 100000 saves two minutes"
    )
    parser.add_argument("--json", action="store_true", help="the whole result instead of a table")
    args = parser.parse_args()
    BUILD.mkdir(parents=True, exist_ok=True)
    began, load = time.monotonic(), machine.load()
    with tempfile.TemporaryDirectory(dir=BUILD, prefix="weights-") as folder:
        found = measured(args.only, args.runs, args.events, Path(folder))
    about = {
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "load": [load, machine.load()],
        "seconds": round(time.monotonic() - began),
        "runs": args.runs,
    }
    data = msgspec.json.format(msgspec.json.encode({"about": about, "rows": [as_json(row) for row in found]}))
    (BUILD / "weights.json").write_bytes(data + b"\n")
    print(data.decode() if args.json else f"{about}\n\n{text(found)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
