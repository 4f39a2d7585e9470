"""How fast a history is audited: `python -m tests.bench.audit [--json] [--events N] [--answers N] [--keep FILE]`, and
with `--live` one that a server holds.

Knows: a long clean history in the shape of real ones, and a stopwatch. Must not know: how the audit works.
Figures are medians in events a second, LOG and RECORDS together (the fold: of LOG alone), by the clock and by
processor time, without a server's. A machine is told by its load, and by one pass of `json.loads` over the same file
in the same run (live: by the client's own receiving): ratios to that can be compared between machines, events a second
cannot.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from reef_bus.audit import History, audit_export, audit_history, read_export, read_history, write_export
from reef_bus.core.ids import derived
from reef_bus.core.invariants import Consumption, Trained
from reef_bus.core.world import World, fold
from reef_bus.events import (
    ComponentLost,
    ComponentStarted,
    Evidence,
    InferenceRecorded,
    Member,
    Recorded,
    ReportReceived,
)
from tests.bench.live import receive_alone, served
from tests.facts import (
    E0,
    E1,
    SERVING,
    L,
    S,
    aborted,
    blob,
    committed,
    digest,
    dispatched,
    dropped,
    failed,
    fenced,
    holds,
    joined,
    m,
    offered,
    refused,
    restored,
    started,
    target,
    trained,
    verified,
)
from tests.spec import MILLI, T0, Scribe, Step, by, chained_to

RUNS = 5
FAULT_EVERY, DROP_EVERY, REFUSE_EVERY = 16, 4, 4  # releases between two faults of a kind


class Chronicle:
    """A deployment's history: every job consumes so many `answers`; now and then e1 fails and comes back as a new boot,
    a job is dropped, a candidate refused, and what a dead attempt's member still has to say is void."""

    def __init__(self, answers: int) -> None:
        self.log, self.records, self.answers = Scribe(), list[Recorded](), answers
        self.batches: dict[str, Consumption] = {}
        self.engine, self.starts, self.releases, self.base = E1, 1, 0, "base"
        self.say(*SERVING)

    def say(self, *steps: Step) -> list[int]:
        """Their sequences."""
        return [self.log.write(step).seq for step in steps]

    def turn(self) -> None:
        """From one release to the next."""
        n, candidate = self.releases + 1, derived("cand", self.releases + 1)
        if n % DROP_EVERY == 0:
            self.drop(derived("job", n))
        if n % REFUSE_EVERY == 2:
            self.refuse(derived("cand", n, "refused"))
        self.train(candidate, n)
        if n % FAULT_EVERY == 2:
            self.release_in_two_attempts(n, candidate)
        else:
            self.release(n, candidate, 1, E0, self.engine)
        self.releases, self.base = n, candidate

    def train(self, candidate: str, step: int) -> None:
        dispatch, *rest = trained(candidate, self.base, step)
        assert not isinstance(dispatch, tuple)
        self.consume(f"job-{candidate}", step)
        self.say(msgspec.structs.replace(dispatch, records=self.answers), *rest)

    def drop(self, job: str) -> None:
        self.consume(job, 1)
        dispatch = msgspec.structs.replace(dispatched(job, self.base), records=self.answers)
        self.say(dispatch, started(job), dropped(job))

    def refuse(self, candidate: str) -> None:
        self.train(candidate, 1)
        self.say(refused(candidate), restored(self.base, self.releases))

    def release(self, n: int, candidate: str, attempt: int, *members: Member) -> None:
        if attempt == 1:
            self.say(target(n, candidate, *members))
        self.say(*(fenced(each.engine, n, attempt) for each in members), offered(n, candidate, attempt))
        proofs = self.say(*(verified(each.engine, n, candidate, attempt) for each in members))
        evidence = tuple(
            Evidence(each.engine, each.boot, seq, digest(candidate)) for each, seq in zip(members, proofs, strict=True)
        )
        commit = committed(n, candidate, *members, attempt=attempt)
        self.say(msgspec.structs.replace(commit, evidence=evidence))

    def release_in_two_attempts(self, n: int, candidate: str) -> None:
        self.say(target(n, candidate, E0, self.engine), fenced("e0", n), fenced("e1", n), offered(n, candidate))
        self.say(verified("e0", n, candidate), failed("e1", n), aborted(n, 1, E0, excluded=(self.engine,)))
        self.say(chained_to(1, failed("e1", n)))  # a late word, which is void
        self.release(n, candidate, 2, E0)
        self.starts += 1
        self.engine = m("e1", self.starts)
        self.say(ComponentLost(component="e1", exit=-9), ComponentStarted(component="e1", pid=7, starts=self.starts))
        self.say(by(self.engine.boot, joined("e1")), holds("e1", n, candidate))

    def consume(self, job: str, step: int) -> None:
        """Answers by the head, their reports, and the batch of the job that is about to be dispatched."""
        taken = [self.answer(step + number) for number in range(self.answers)]
        self.batches[blob(f"batch-{job}").digest] = Consumption(
            job=job,
            step=step,
            base=self.base,
            records=tuple(taken),
            samples=tuple(Trained(record, L(self.releases), 0.5) for record, _ in taken),
        )

    def answer(self, number: int) -> tuple[str, int]:
        record, member = derived("rec", len(self.records)), (E0, self.engine)[number % 2]
        at = self.record(record, answer(record, member, self.releases, len(self.log.log)))
        self.record(f"on-{record}", report(record))
        return record, at

    def record(self, id_: str, event: InferenceRecorded | ReportReceived) -> int:
        seq = len(self.records) + 1
        self.records.append(
            Recorded(
                seq=seq,
                time=T0 + seq * MILLI,
                subject=f"reef.test.record.{S}.{type(event).__name__}",
                id=id_,
                prev=0,
                cause=0,
                correlation=id_,
                writer="gateway/g",
                boot="g.1",
                event=event,
            )
        )
        return seq


def answer(record: str, member: Member, load: int, as_of: int) -> InferenceRecorded:
    return InferenceRecorded(
        scenario=S,
        record=record,
        engine=member.engine,
        boot=member.boot,
        load_id=L(load),
        as_of=as_of,
        done_as_of=as_of,
        prompt="what is 3 + 4?",
        answer="7",
        prompt_tokens=8,
        answer_tokens=1,
        temperature=1.0,
        blob=blob("rows"),
        row=0,
        tags={"group": "g-1"},
    )


def report(record: str) -> ReportReceived:
    return ReportReceived(
        scenario=S, report=f"on-{record}", references=(record,), score=0.5, feedback="", metadata={"by": "harness"}
    )


def history(events: int, answers: int = 1) -> History:
    """At least that many events, ending between two releases."""
    chronicle = Chronicle(answers)
    while len(chronicle.log.log) + len(chronicle.records) < events:
        chronicle.turn()
    return History(tuple(chronicle.log.log), tuple(chronicle.records), chronicle.batches)


# -- what is measured


def parse_alone(path: Path) -> None:
    with path.open("rb") as file:
        for line in file:
            json.loads(line)


def fold_alone(log: Iterable[Recorded]) -> None:
    world = World()
    for recorded in log:
        fold(world, recorded)


def audit(path: Path) -> None:
    """What `reef-bus audit FILE` does; it must find nothing, or the history is not the one that is meant here."""
    result = audit_export(path)
    assert result.void_events and not result.violations and not result.unchecked, result


class Spent(NamedTuple):
    """Seconds: by the clock, and of this process's processor time."""

    wall: float
    cpu: float


def _since(wall: float, cpu: float) -> Spent:
    return Spent(time.perf_counter() - wall, time.process_time() - cpu)


def spent(work: Callable[[], object]) -> Spent:
    gc.collect()
    begin = time.perf_counter(), time.process_time()
    work()
    return _since(*begin)


async def spent_waiting(work: Callable[[], Awaitable[object]]) -> Spent:
    gc.collect()
    begin = time.perf_counter(), time.process_time()
    await work()
    return _since(*begin)


def measure(path: Path) -> dict[str, Any]:
    """Rounds, not blocks: whatever else the machine does meanwhile meets every measurement alike."""
    held = read_export(path)
    works: dict[str, Callable[[], object]] = {
        "json.loads": lambda: parse_alone(path),
        "decode": lambda: read_export(path),
        "fold": lambda: fold_alone(held.log),
        "check": lambda: audit_history(held),
        "audit": lambda: audit(path),
    }
    rounds = [{name: spent(work) for name, work in works.items()} for _ in range(RUNS)]
    return {"bytes": path.stat().st_size, **table(held, rounds)}


async def measure_live(written: History) -> dict[str, Any]:
    """The same of what a server holds: received and not looked at, read, audited once it is read."""
    async with served(written) as journal:
        held = await read_history(journal)

        async def audit_all() -> None:
            assert not audit_history(await read_history(journal)).violations

        works: dict[str, Callable[[], Awaitable[object]]] = {
            "receive": lambda: receive_alone(journal),
            "read": lambda: read_history(journal),
            "audit": audit_all,
        }
        rounds = [{name: await spent_waiting(work) for name, work in works.items()} for _ in range(RUNS)]
    return table(held, rounds)


def table(held: History, rounds: list[dict[str, Spent]]) -> dict[str, Any]:
    """Medians; ratios of time by the clock to the first work's."""
    walls = {name: statistics.median(each[name].wall for each in rounds) for name in rounds[0]}
    cpus = {name: statistics.median(each[name].cpu for each in rounds) for name in rounds[0]}
    events = {**dict.fromkeys(walls, len(held.log) + len(held.records)), "fold": len(held.log)}
    first = next(iter(walls))
    return {
        "log_events": len(held.log),
        "records": len(held.records),
        "batches": len(held.batches or {}),
        "load": [round(each, 2) for each in os.getloadavg()],
        "events_per_s": {name: round(events[name] / wall) for name, wall in walls.items()},
        "events_per_cpu_s": {name: round(events[name] / cpu) for name, cpu in cpus.items()},
        "ratio": {name: round(walls[first] / wall, 2) for name, wall in walls.items()},
        "cores": os.cpu_count(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="how fast an export, or a live log, is audited")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--events", type=int, default=250_000, help="of the history, LOG and RECORDS")
    parser.add_argument("--answers", type=int, default=1, help="for every job; real jobs have a few dozen")
    parser.add_argument("--keep", type=Path, help="also keep the export here")
    parser.add_argument("--live", action="store_true", help="from a server on loopback, instead of from an export")
    args = parser.parse_args()
    written = history(args.events, args.answers)
    if args.live:
        found = asyncio.run(measure_live(written))
    else:
        with tempfile.TemporaryDirectory() as folder:
            path = args.keep or Path(folder, "history.jsonl")
            write_export(written, path)
            del written
            found = measure(path)
    show(found, as_json=args.json)


def show(found: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(found))
        return
    print(f"{found['log_events']} LOG events, {found['records']} records, {found['batches']} batches", end="; ")
    print(f"load {found['load']}; medians of {RUNS}")
    first = next(iter(found["ratio"]))
    for name, rate in found["events_per_s"].items():
        of_cpu = found["events_per_cpu_s"][name]
        print(f"{name:<11} {rate:>8} events/s {of_cpu:>8} by processor time {found['ratio'][name]:>6.2f} x {first}")


if __name__ == "__main__":
    main()
