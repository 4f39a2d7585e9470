"""The proof of the proof: the protocol broken in one place, under a name, and the first seed that catches it.

Knows: the lists of breakages, and the seeds that are kept. Must not know: what is broken, or how that comes to light.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import signal
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from tests.simulation.patching import broken
from tests.simulation.searches import Breakage
from tests.simulation.wrong_adapters import ADAPTERS
from tests.simulation.wrong_conduct import CONDUCT
from tests.simulation.wrong_decisions import DECISIONS
from tests.simulation.wrong_lending import LENDING

BREAKAGES = (*DECISIONS, *CONDUCT, *ADAPTERS, *LENDING)
ROOT = Path(__file__).parents[2]
CATCHES = Path(__file__).with_name("catches.json")
"""By breakage: the first seed that catches it, and what it finds. Written by `--find`."""
WORKERS, SEEDS, SEED_S, WIDE = 2, 400, 10.0, 110


class Catch(NamedTuple):
    seed: int
    violation: str


def attempt(breakage: Breakage, seed: int) -> str:
    """What this seed finds with the protocol broken so."""
    with broken(breakage.edits):
        return breakage.where(seed)


def known() -> dict[str, Catch]:
    return {name: Catch(*catch) for name, catch in json.loads(CATCHES.read_text()).items()}


# -- looking for seeds


class Endless(KeyboardInterrupt):
    """A seed under which the broken protocol spins; no loop and no role takes it for a failure of its own."""


def _spins(*_: object) -> None:
    raise Endless


def find(breakage: Breakage, seeds: Iterable[int]) -> Catch | None:
    """The first seed that catches it, among those that find nothing without it."""
    signal.signal(signal.SIGVTALRM, _spins)
    for seed in seeds:
        signal.setitimer(signal.ITIMER_VIRTUAL, SEED_S)
        try:
            violation = attempt(breakage, seed)
        except Endless:
            continue
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        if violation and not breakage.where(seed):
            return Catch(seed, " ".join(violation.replace(f"{ROOT}/", "").split())[:160])
    return None


def _find(task: tuple[str, int]) -> tuple[str, Catch | None]:
    name, seeds = task
    return name, find(next(each for each in BREAKAGES if each.name == name), range(seeds))


def search(names: list[str], seeds: int) -> dict[str, Catch]:
    """Seeds for these, found anew and kept."""
    kept = known() if CATCHES.exists() else {}
    with multiprocessing.get_context("fork").Pool(WORKERS) as pool:
        for name, catch in pool.imap_unordered(_find, [(name, seeds) for name in names]):
            print(
                f"{name:40} {f'{catch.seed:4} {catch.violation}' if catch else 'not caught'}",
                file=sys.stderr,
                flush=True,
            )
            kept.pop(name, None)
            if catch:
                kept[name] = catch
    ordered = {each.name: kept[each.name] for each in BREAKAGES if each.name in kept}
    CATCHES.write_text(json.dumps(ordered, indent=1, ensure_ascii=False) + "\n")
    return ordered


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.breakages", description=__doc__)
    parser.add_argument("--find", metavar="NAME", action="append", help="look for its first seed anew (`all`: for all)")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="how many seeds to try for each")
    parser.add_argument("--json", action="store_true", help="the table as JSON")
    asked = parser.parse_args()
    names = [each.name for each in BREAKAGES]
    wanted = names if asked.find == ["all"] else asked.find or []
    if unknown := set(wanted) - set(names):
        parser.error(f"no breakage is called {sorted(unknown)}; there are {names}")
    catches = search(wanted, asked.seeds) if wanted else known()
    rows = [(each, catches.get(each.name)) for each in BREAKAGES]
    print(json.dumps(_report(rows)) if asked.json else _table(rows))
    return 1 if any(catch is None and not each.shielded for each, catch in rows) else 0


def _report(rows: list[tuple[Breakage, Catch | None]]) -> list[dict[str, object]]:
    return [
        {
            "name": each.name,
            "breaks": each.breaks,
            "seed": catch and catch.seed,
            "violation": catch and catch.violation,
            "shielded": each.shielded,
        }
        for each, catch in rows
    ]


def _short(violation: str) -> str:
    """Without who says it: the table is about what is said."""
    said = violation.rpartition("contradicts the log: ")[2].partition(". Stop and look")[0]
    return said if len(said) <= WIDE else said[:WIDE].rpartition(" ")[0] + " …"


def _table(rows: list[tuple[Breakage, Catch | None]]) -> str:
    lines = ["| breakage | what is not so any more | seed | what is found |", "|---|---|---|---|"]
    for each, catch in rows:
        found = (str(catch.seed), _short(catch.violation)) if catch else ("–", each.shielded or "NOT CAUGHT")
        lines.append(f"| `{each.name}` | {each.breaks} | {found[0]} | {found[1]} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
