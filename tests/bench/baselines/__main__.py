"""Our deployment and three patterns that others use, killed alike: `make bench-baselines`.

Knows: what is run, where the result goes. Must not know: how a pattern works, or what is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import os
import sys
import tempfile
import time
from pathlib import Path

from tests.bench.baselines.kills import baseline
from tests.bench.baselines.ours import OURS, TITLE, ours
from tests.bench.baselines.outcome import LIMIT_S, Cell, Result, report, table
from tests.bench.baselines.patterns import PATTERNS
from tests.bench.baselines.process import STEP_S

BUILD = Path("build/bench")
NEEDS = {"broadcast": "torch", "actors": "ray", OURS: "torch"}


def show(pattern: str, cell: Cell) -> None:
    whole = "not whole" if cell.whole_s is None else f"whole after {cell.whole_s:.1f} s"
    bad = f"torn {cell.torn} wrong {cell.wrong} stuck {cell.stuck} mixed {int(cell.mixed)} by hand {cell.by_hand}"
    print(f"{pattern:10} {cell.victim:11} {cell.phase:6} {cell.point:17} {whole:18} {bad}", file=sys.stderr, flush=True)


async def run(name: str, cells: int, until: float, seed: int, log: Path) -> Result:
    """One row. What an extra is missing for says so; anything else that fails is a failure of the run."""
    title = PATTERNS[name].title if name in PATTERNS else TITLE
    if (needed := NEEDS.get(name)) and importlib.util.find_spec(needed) is None:
        why = f"{needed} is not installed: pip install 'reef-bus[bench]'"
        return Result(pattern=name, title=title, why=why)
    with tempfile.TemporaryDirectory(prefix="reef-baselines-") as folder:
        if name == OURS:
            return await ours(cells, until, seed, Path(folder), show)
        return await baseline(PATTERNS[name], cells, until, seed, Path(folder), log, show)


def main() -> int:
    parser = argparse.ArgumentParser(prog="make bench-baselines")
    parser.add_argument("--json", action="store_true", help="the whole result instead of a table")
    parser.add_argument("--cells", type=int, default=9, help="kills per pattern; every role in every phase takes 9")
    parser.add_argument("--only", choices=(*PATTERNS, OURS), nargs="+", default=(*PATTERNS, OURS))
    parser.add_argument("--minutes", type=float, default=6, help="shared alike, kills then stop")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    BUILD.mkdir(parents=True, exist_ok=True)
    log = BUILD / "baselines.log"
    log.write_bytes(b"")
    began, load = time.monotonic(), os.getloadavg()[0]
    end, results = began + args.minutes * 60, []
    for left, name in zip(range(len(args.only), 0, -1), args.only, strict=True):
        until = time.monotonic() + (end - time.monotonic()) / left - LIMIT_S
        results.append(asyncio.run(run(name, args.cells, until, args.seed, log)))
    settings = {
        "cells": args.cells,
        "seed": args.seed,
        "step_s": STEP_S,
        "limit_s": LIMIT_S,
        "cores": os.cpu_count(),
        "load": [round(load, 1), round(os.getloadavg()[0], 1)],
        "seconds": round(time.monotonic() - began),
    }
    data = report(results, settings)
    (BUILD / "baselines.json").write_bytes(data)
    print(data.decode() if args.json else f"{settings}\n\n{table(results)}")
    findings = [f"{found.pattern}: {text}" for found in results for text in found.findings]
    print("\n".join(findings), file=sys.stderr)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
