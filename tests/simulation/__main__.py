"""`python -m tests.simulation --seeds N`: many seeds and the table of what was tried; `--seed S`: one, as a story.

Knows: outcomes. Must not know: what makes one good.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from tests.simulation.deployment import Outcome, adapted, simulate
from tests.simulation.faults import ADAPTERS, ADAPTING, EVENTS, KINDS
from tests.simulation.table import missing, table

ONE: Mapping[str, Callable[[int], Outcome]] = {
    "": simulate,
    "adapters": adapted,
    "colocated": partial(simulate, colocated=True),
}
"""The kinds of deployments that seeds are drawn of."""
WORKERS = 2
LIVES = 15
"""Handfuls of seeds after which a worker makes room for another one: it has grown to some 150 MB by then."""
ENOUGH = 2000
"""Seeds after which a cell of the table that was never hit is a failure."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, help="how many seeds to run")
    parser.add_argument("--from", type=int, default=0, dest="first", help="the first of them")
    parser.add_argument("--seed", type=int, help="run one seed and tell its story")
    kind = parser.add_mutually_exclusive_group()
    for name, what in (("adapters", "deployments that train adapters"), ("colocated", "training where engines are")):
        kind.add_argument(f"--{name}", dest="kind", action="store_const", const=name, default="", help=what)
    parser.add_argument("--json", action="store_true", help="the result as JSON")
    asked = parser.parse_args(argv)
    if asked.seed is not None:
        return _story(ONE[asked.kind](asked.seed))
    return _many(range(asked.first, asked.first + asked.seeds), asked.json, asked.kind)


def _story(outcome: Outcome) -> int:
    print("\n".join(f"{when:10.4f}  {line}" for when, line in outcome.story))
    print(f"seed {outcome.seed}: {outcome.violation or 'nothing happened that must not'} ({outcome.steps} steps)")
    return 1 if outcome.violation else 0


def _many(seeds: range, as_json: bool, kind: str) -> int:
    began = time.monotonic()
    hits, events, ended = Counter[tuple[str, str]](), Counter[str](), Counter[str]()
    failed: dict[int, str] = {}
    slowest = (0.0, 0)
    for outcome in _run(seeds, kind):
        hits += outcome.hits
        events += outcome.events
        ended += outcome.ended
        slowest = max(slowest, (outcome.settled_s, outcome.seed))
        if outcome.violation:
            failed[outcome.seed] = outcome.violation
            again = f"{f'--{kind} ' if kind else ''}--seed {outcome.seed}"
            print(f"seed {outcome.seed}: {outcome.violation}\n    python -m tests.simulation {again}")
    adapters = kind == "adapters"
    judged = len(seeds) >= ENOUGH and kind != "colocated"  # which see no staged release, and nobody holds a candidate
    wanting = missing(hits, adapters) if judged else []
    idle = judged and ended["committed"] <= len(seeds)
    seconds = time.monotonic() - began
    if as_json:
        print(json.dumps(_report(seeds, seconds, failed, wanting, hits, events, ended)))
    else:
        print(table(hits, events, adapters))
        print(f"{len(seeds)} seeds in {seconds:.1f} s ({len(seeds) / seconds:.1f}/s), candidates: {dict(ended)}")
        print(f"settled at the latest {slowest[0]:.1f} s after the faults stopped (seed {slowest[1]})")
        cells = f"{len(wanting)} cells were never hit {wanting or ''}" if judged else f"cells: from {ENOUGH} seeds on"
        print(f"{len(failed)} failed; {cells}")
    if idle:
        print(f"only {ended['committed']} releases: such seeds test next to nothing", file=sys.stderr)
    return 1 if failed or wanting or idle else 0


def _run(seeds: range, kind: str) -> Iterable[Outcome]:
    """In order of the seeds: the same output on every run."""
    with multiprocessing.get_context("fork").Pool(WORKERS, _quietly, maxtasksperchild=LIVES) as pool:
        yield from pool.imap(partial(_without_story, kind), seeds, chunksize=8)


def _quietly() -> None:
    """A worker says nothing, and collects nothing: its garbage goes with it."""
    logging.disable()
    gc.disable()


def _without_story(kind: str, seed: int) -> Outcome:
    return ONE[kind](seed).without_story()


def _report(
    seeds: range,
    seconds: float,
    failed: dict[int, str],
    wanting: list[str],
    hits: Counter[tuple[str, str]],
    events: Counter[str],
    ended: Counter[str],
) -> dict[str, object]:
    return {
        "from": seeds.start,
        "seeds": len(seeds),
        "seconds": round(seconds, 1),
        "failed": failed,
        "never_hit": wanting,
        "events": events,
        "candidates": ended,
        "hits": {
            kind: {event: hits[kind, event] for event in (*EVENTS, *ADAPTERS)} for kind in (*KINDS, *ADAPTING, "spoil")
        },
    }


if __name__ == "__main__":
    sys.exit(main())
