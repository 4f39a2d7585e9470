"""Our own deployment under the same kills, with the same columns.

Knows: the live deployment, its client, its audit, and the policy that answers were sampled from. Must not know: the
other patterns. Answers are judged by content here too: whoever claims a release must have used the probabilities that
this release's weights give, as computed here from its artifact.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from consumers.reef_supervisor.harness import Scored
from reef_bus.artifacts import ArtifactStore
from reef_bus.audit import History, read_history
from reef_bus.core.effects import Deadlines
from reef_bus.core.invariants import Consumption, Unread, check
from reef_bus.core.serving import serving
from reef_bus.events import InferenceRecorded, TargetPersisted
from reef_bus.producer import Producer, connect
from tests.bench.baselines.fleet import ended
from tests.bench.baselines.kills import Show, in_turn
from tests.bench.baselines.outcome import LIMIT_S, Cell, Result
from tests.bench.baselines.probabilities import judged
from tests.bench.baselines.process import STEP_S
from tests.bench.baselines.traffic import ASK_S, PAUSE_S, RIGHT, TORN
from tests.e2e.live import CONFIG, Live, kill_at, live

OURS, TITLE = "reef-bus", "reef-bus (fenced)"
ROLES = ("trainer", "engine", "publisher")
EVENTS = {
    "before": ("JobDispatched", "JobStarted", "CandidateReady", "CandidateSelected"),
    "during": ("TargetPersisted", "SenderReady", "EngineFenced", "ReceiverVerified"),
    "after": ("ReleaseCommitted",),
}
EQUAL = Deadlines(fence_s=STEP_S, sender_s=STEP_S, stall_s=STEP_S, verify_s=STEP_S, heartbeat_s=STEP_S)
SETTINGS = msgspec.structs.replace(CONFIG, publication=msgspec.structs.replace(CONFIG.publication, deadlines=EQUAL))


class Asked(NamedTuple):
    """An answer with a receipt: when it was asked for, when it came."""

    asked: float
    got: float
    record: str


async def ours(cells: int, until: float, seed: int, folder: Path, show: Show) -> Result:
    """A release per cell at least; one deployment for all of them, as for the other patterns."""
    result = Result(pattern=OURS, title=TITLE)
    async with live(folder, SETTINGS) as found, probes(found) as answers:
        struck: list[Struck] = []
        for role, phase in itertools.islice(itertools.cycle(in_turn(ROLES)), cells):
            if time.monotonic() > until:
                break
            began, cell = time.monotonic(), draw(role, phase, seed, len(struck))
            killed = await strike(found, cell)
            struck.append(Struck(cell, began, killed))
            await settle(found, cell, killed)
            show(OURS, cell)
            result.cells.append(cell)
        await found.client.stop()
        await _judge(result, found, answers, struck)
    return result


def draw(role: str, phase: str, seed: int, number: int) -> Cell:
    chance = random.Random(f"{seed}:{OURS}:{number}")
    victim = chance.choice(SETTINGS.inference.engines) if role == "engine" else role
    return Cell(victim=victim, phase=phase, point=chance.choice(EVENTS[phase]))


class Struck(NamedTuple):
    """A cell, when it began, and when the victim was killed."""

    cell: Cell
    began: float
    killed: float


@contextlib.asynccontextmanager
async def probes(found: Live) -> AsyncIterator[list[Asked]]:
    """Two clients beside the traffic that is trained on, as many as the other patterns have."""
    answers: list[Asked] = []
    async with connect(found.running.url, SETTINGS.model) as producer:
        tasks = [asyncio.create_task(_probe(producer, answers)) for _ in range(2)]
        try:
            yield answers
        finally:
            for task in tasks:
                await ended(task)


async def _probe(producer: Producer, answers: list[Asked]) -> None:
    while True:
        asked = time.monotonic()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ASK_S):
                found = await producer.ask("7")
            answers.append(Asked(asked, time.monotonic(), found.receipt))
        await asyncio.sleep(PAUSE_S)


async def strike(found: Live, cell: Cell) -> float:
    await kill_at(found, cell.victim, cell.point)
    return time.monotonic()


async def settle(found: Live, cell: Cell, killed: float) -> None:
    """Until every process is back, and a release that was committed after the kill is what every engine may generate
    with. A trainer or publisher has shown that it is back by a release whose target came after the kill."""
    struck = found.world.seq

    def delivered() -> bool:
        head = found.world.publications.head
        return head is not None and head.seq > struck

    def whole() -> bool:
        shown = cell.victim in SETTINGS.inference.engines or _target_of_head(found) > struck
        return delivered() and shown and found.all_serve() and found.whole()

    with contextlib.suppress(AssertionError):  # `until` says that it took too long
        await found.until("whole", whole, LIMIT_S)
        cell.whole_s = time.monotonic() - killed
    cell.delivered = delivered() and found.all_serve()
    if cell.whole_s is None:
        cell.stuck = len(SETTINGS.inference.engines) - len(serving(found.world))
        await found.until("a fleet that nobody mends", lambda: found.all_serve() and found.whole(), 4 * LIMIT_S)


def _target_of_head(found: Live) -> int:
    """The sequence of the target that became the head; 0 for the base model."""
    head = found.world.publications.head
    targets = (each for each in reversed(found.events) if isinstance(each.event, TargetPersisted))
    return next((each.seq for each in targets if head and each.event.load_id == head.load_id), 0)


# -- afterwards, from the log and the records


async def _judge(result: Result, found: Live, answers: Sequence[Asked], struck: Sequence[Struck]) -> None:
    answers = list(answers)  # the probes go on asking; what comes from here on is in no history
    store = ArtifactStore(found.running.config.folder("artifacts"))
    history = await read_history(found.running.journal, store)
    audit = check(history.log, history.records, history.batches)
    recorded = {each.event.record: each.event for each in history.records if isinstance(each.event, InferenceRecorded)}
    verdicts = await asyncio.to_thread(judged, list(recorded.values()), _versions(found, history), store)
    consumed = [record for batch in (history.batches or {}).values() for record in _records(batch)]
    result.findings = [violation.text for violation in audit.violations]
    not_right = sum(verdict != RIGHT for verdict in verdicts.values())
    if not_right:
        result.findings.append(f"{not_right} recorded answers have not the probabilities of the release that they name")
    result.answers, result.updates = len(recorded), audit.releases
    receipts = [each.record for each in answers] + [each.answer.receipt for each in _drained(found)]
    result.lost = sum(record not in recorded for record in receipts)
    result.twice = len(consumed) - len(set(consumed))
    for each in struck:
        _count(each, answers, recorded, verdicts)


def _drained(found: Live) -> Iterator[Scored]:
    """What the harness was given; it has stopped."""
    while not found.client.answers.empty():
        yield found.client.answers.get_nowait()


def _versions(found: Live, history: History) -> dict[str, str]:
    """Everything that was ever a target, committed or not."""
    targets = (each.event for each in history.log if isinstance(each.event, TargetPersisted))
    committed = {release.load_id: release.weights.digest for release in found.world.publications.releases.values()}
    return committed | {target.load_id: target.weights.digest for target in targets}


def _records(batch: Consumption | Unread) -> Iterator[str]:
    if isinstance(batch, Unread):
        raise RuntimeError(batch.why)
    yield from (record for record, _ in batch.records)


def _count(
    struck: Struck, answers: Sequence[Asked], recorded: dict[str, InferenceRecorded], verdicts: dict[str, str]
) -> None:
    """An answer without a record is counted as lost, and can be judged by nobody."""
    cell, ended = struck.cell, struck.killed + (struck.cell.whole_s or LIMIT_S)
    seen = [each for each in answers if struck.began <= each.got <= ended and each.record in recorded]
    bad = [each for each in seen if verdicts[each.record] != RIGHT]
    cell.wrong = len(bad)
    cell.torn = len({recorded[each.record].engine for each in bad if verdicts[each.record] == TORN})
    right = (each for each in answers if each.asked > struck.killed and verdicts.get(each.record) == RIGHT)
    cell.serving_s = min((s for each in right if (s := each.got - struck.killed) <= LIMIT_S), default=None)
    cell.safe_s = max((each.got - struck.killed for each in bad), default=0.0)
