"""Every role killed at every event, once: `make kill-all`. One live deployment, a release or more per cell;
`ARGS="--mode staged"` does it to staged releases.

Knows: which events a healthy deployment writes by itself, how to provoke some others, and which need faults that are
not made here. A new event without a place below fails the run, before anything is killed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from consumers.reef_supervisor.role import components
from reef_bus.config import Config
from reef_bus.events import CATALOGUE, Recorded
from tests.e2e.live import CONFIG, Live, in_mode, kill_at, live, recovered

ROLES = (*components(CONFIG), "nats")
RELEASE = (
    "JobDispatched",
    "JobStarted",
    "CandidateReady",
    "CandidateEvaluated",
    "CandidateSelected",
    "TargetPersisted",
    "SenderReady",
    "EngineFenced",
    "ReceiverVerified",
    "ReleaseCommitted",
)
STAGED_RELEASE = tuple("EngineStaged" if event == "EngineFenced" else event for event in RELEASE)
AT_START = ("ScenarioRegistered",)
NOT_MADE = {
    "LogOpened": "written before any role runs",
    "JobDropped": "a batch that cannot be trained on; unit tests",
    "CandidateRejected": "a selector that rejects; unit tests",
    "PublicationRefused": "a lost base or an impossible transport; unit tests",
    "SenderFailed": "an artifact that cannot be offered; unit tests",
    "ReceiverFailed": "the fault switch makes it; tests/integration/test_demo.py",
    "EngineExcluded": "heartbeats that stop, as SIGSTOP makes them; tests/integration/test_recovery.py",
    "EngineLeft": "an artifact that cannot be loaded; unit tests",
    "RecoveryHalted": "the restart budget, which this run raises",
    "JobAmbiguous": "a backend that mutates in place",
    "JobDiscarded": "a person's answer; unit tests",
    "RequestRefused": "a person's request that came too late; unit tests",
    **dict.fromkeys((n for n, e in CATALOGUE.items() if e.family == "operator"), "written by people"),
    "CleanupUnconfirmed": "a process that no signal ends; unit tests",
    "RecoveryResumed": "a person's answer; tests/integration/test_recovery.py",
    "InferenceRecorded": "not on LOG",
    "ReportReceived": "not on LOG",
}


Provocation = Callable[[Live], Awaitable[object]]


def _now(name: str) -> Provocation:
    """Kill `name`."""

    async def provoke(found: Live) -> None:
        found.running.kill(name)

    return provoke


def _at(event: str, *names: str) -> Provocation:
    """Kill `names` when `event` appears next."""

    async def provoke(found: Live) -> None:
        await kill_at(found, names[0], event)
        for name in names[1:]:
            found.running.kill(name)

    return provoke


async def _exhaust(found: Live) -> None:
    """Kill both engines whenever an attempt begins, until the publication is halted."""
    halted = asyncio.Event()

    def watch(recorded: Recorded) -> None:
        if recorded.name in ("TargetPersisted", "TransferAborted"):
            for engine in found.running.config.inference.engines:
                found.running.kill(engine)
        elif recorded.name == "PublicationHalted":
            found.watchers.remove(watch)
            halted.set()

    found.watchers.append(watch)
    await halted.wait()


PROVOKED: dict[str, Provocation] = {
    "TrainerJoined": _now("trainer"),
    "EngineJoined": _now("engine-1"),
    "ComponentStarted": _now("publisher"),
    "ReadinessWithdrawn": _now("publisher"),
    "ComponentLost": _now("publisher"),
    "RestartScheduled": _now("publisher"),
    "ReadinessPublished": _now("publisher"),
    "TransferAborted": _at("TargetPersisted", "engine-1"),
    "PublicationHalted": _exhaust,
    "TrainerRestored": _exhaust,
}


async def cell(found: Live, role: str, event: str) -> float:
    """Kill once; returns the seconds until a later release is served by every engine."""
    tasks: list[Awaitable[object]] = [kill_at(found, role, event)]
    if event in PROVOKED:
        tasks.append(PROVOKED[event](found))
    seq, *_ = await asyncio.gather(*tasks)
    assert isinstance(seq, int)
    return await recovered(found, seq)


async def everything(mode: str, events: Sequence[str], show: Callable[[str, str, float], None]) -> list[str]:
    """All cells of these events. Returns the audits' findings."""
    config = in_mode(mode)
    with tempfile.TemporaryDirectory(prefix="reef-kill-") as folder:
        async with live(Path(folder), config) as found:
            for event in (event for event in (*release(mode), *PROVOKED) if event in events):
                for role in ROLES:
                    show(event, role, await cell(found, role, event))
            await found.client.stop()
            findings = [violation.text for violation in (await found.audit()).violations]
    for event in (event for event in AT_START if event in events):
        for role in ROLES:
            with tempfile.TemporaryDirectory(prefix="reef-kill-") as folder:
                seconds, texts = await at_start(Path(folder), config, role, event)
                show(event, role, seconds)
                findings += texts
    return findings


def release(mode: str) -> tuple[str, ...]:
    return STAGED_RELEASE if mode == "staged" else RELEASE


async def at_start(folder: Path, config: Config, role: str, event: str) -> tuple[float, list[str]]:
    """A fresh deployment whose `role` is killed at an event that a log holds once."""
    killed: list[int] = []

    def strike(found: Live) -> None:
        def watch(recorded: Recorded) -> None:
            if not killed and recorded.name == event:
                killed.append(1)
                found.running.kill(role)

        found.watchers.append(watch)

    began = time.monotonic()
    async with live(folder, config, before=strike) as found:
        await found.until("a release", lambda: found.releases() >= 1 and found.all_serve())
        assert killed, f"{event} never appeared"
        await found.client.stop()
        audit = await found.audit()
    return time.monotonic() - began, [violation.text for violation in audit.violations]


def main() -> int:
    parser = argparse.ArgumentParser(prog="make kill-all")
    parser.add_argument("--json", action="store_true", help="one JSON line per cell instead of a table")
    parser.add_argument("--mode", choices=("fenced", "staged"), default="fenced", help="of the releases")
    parser.add_argument("--only", metavar="EVENT", nargs="+", help="rows")
    args = parser.parse_args()
    rows = args.only or (*release(args.mode), *PROVOKED, *AT_START)
    placed = {*RELEASE, *STAGED_RELEASE, *PROVOKED, *AT_START, *NOT_MADE}
    if placed != set(CATALOGUE):
        print(f"events without a place in this file: {sorted(set(CATALOGUE) ^ placed)}", file=sys.stderr)
        return 2
    cells: dict[tuple[str, str], float] = {}

    def show(event: str, role: str, seconds: float) -> None:
        cells[event, role] = seconds
        line = {"event": event, "role": role, "seconds": round(seconds, 2)}
        print(json.dumps(line) if args.json else f"{event:20} {role:10} {seconds:5.1f} s", flush=True)

    findings = asyncio.run(everything(args.mode, rows, show))
    if not args.json:
        _table(cells, rows)
    print(f"{len(cells)} cells, {len(findings)} findings of the audit", file=sys.stderr)
    for finding in findings:
        print(finding, file=sys.stderr)
    return 1 if findings else 0


def _table(cells: dict[tuple[str, str], float], events: Sequence[str]) -> None:
    print("\nseconds from the kill to a later release served by every engine\n")
    print("| event | " + " | ".join(ROLES) + " |\n|---|" + "---|" * len(ROLES))
    for event in events:
        print(f"| {event} | " + " | ".join(f"{cells[event, role]:.1f}" for role in ROLES) + " |")


if __name__ == "__main__":
    sys.exit(main())
