"""The commands that take a history whole: audit, export.

Knows: what is said of a history. Must not know: what makes one right (`core/invariants.py`), or how it is read.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

import msgspec

from reef_bus.artifacts import ArtifactStore
from reef_bus.audit import History, audit_export, audit_history, read_history, write_export
from reef_bus.cli_log import paint, say, say_json
from reef_bus.core.invariants import Audit
from reef_bus.inspect import artifacts, head, opened
from reef_bus.journal import LOG, RECORDS

OK, NOT_IN_ORDER = 0, 1


async def audit(args: argparse.Namespace) -> int:
    """Exit status 1 on a violation."""
    found = audit_export(Path(args.file)) if args.file else audit_history(await _history(args))
    if args.json:
        say_json(msgspec.to_builtins(found))
    else:
        say("\n".join(_audit_lines(found)))
    return NOT_IN_ORDER if found.violations else OK


async def _history(args: argparse.Namespace) -> History:
    """All that the deployment holds; its batches too, where this machine reaches its artifact store."""
    async with opened(args) as (journal, config):
        root = artifacts(config)
        store = None if root is None else ArtifactStore(root)
        await head(journal, LOG)  # says more about a deployment that is not there
        return await read_history(journal, store)


def _audit_lines(found: Audit) -> Iterable[str]:
    yield f"log      {found.log_events} events, {found.void_events} void"
    yield f"records  {found.records} answers, {found.reports} reports, {found.consumed} consumed by {found.jobs} jobs"
    yield f"proofs   {found.receivers_verified} by engines, for {found.releases} releases after the base model"
    if found.final.n and found.final.mean is not None:
        yield f"reward   {found.final.mean:.3f} over {found.final.n} final answers by {found.final.load_id}"
    for scenario, final in found.finals.items():
        if final.n and final.mean is not None:
            yield f"reward   {final.mean:.3f} over {final.n} final answers to {scenario} by {final.load_id}"
    for notice in found.unchecked:
        yield f"{paint('unchecked')}: {notice}"
    for notice in found.open:
        yield f"open: {notice}"
    for each in found.violations:
        where = [f"{LOG} {_numbers(each.sequences)}"] if each.sequences else []
        where += [f"{RECORDS} {_numbers(each.records)}"] if each.records else []
        yield f"{paint('violation')} of {each.invariant}: {each.text} ({', '.join(where) or 'nowhere in particular'})"
    if found.violations:
        yield f"{len(found.violations)} violations; `reef-bus log show SEQ` shows an event with its causes"
    elif found.log_events:
        yield f"{paint('ok')}: no violation"
    else:
        yield "nothing to audit yet: `reef-bus demo` makes a history"


def _numbers(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))


async def export(args: argparse.Namespace) -> int:
    """The whole history. A file appears under its name only when it is complete."""
    history = await _history(args)
    if not args.output:
        write_export(history, sys.stdout)
        return OK
    path = Path(args.output)
    partial = path.with_name(path.name + ".partial")
    try:
        write_export(history, partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    counts = {"file": str(path), "log": len(history.log), "records": len(history.records)}
    if args.json:
        say_json(counts)
    else:
        text = f"{counts['log']} events, {counts['records']} records"
        say(f"{path}: {text}; `reef-bus audit {path}` checks it anywhere")
    return OK
