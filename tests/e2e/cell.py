"""One cell of the kill matrix: wait for an event, hit a process, wait until a later release is served; and its figures.

Knows: signals and clocks. Must not know: which cells there are, or what an audit finds in what they leave behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from pathlib import Path
from typing import NamedTuple

import msgspec

from reef_bus.core.reactions.common import all_fenced
from reef_bus.core.serving import serving
from reef_bus.core.world import World
from reef_bus.events import ReceiverFailed, Recorded
from reef_bus.journal import RECORDS
from tests.e2e.rig import Gone, Kind, Rig, Victim
from tests.e2e.rows import LEADER, ROWS, deadline

KILL = "kill"
SIGNALS = (KILL, "stop-0.5", "stop-2")  # the number: of the deadline that applies
PROBES = 4
COSTS = ("TransferAborted", "PublicationHalted", "PublicationRefused", "EngineExcluded", "ComponentLost")


class Cell(NamedTuple):
    """`role` is hit by `signal` at the event of row `row`."""

    row: str
    role: str
    signal: str

    @property
    def kind(self) -> Kind:
        """The deployment that it takes."""
        if self.role == LEADER:
            return "cluster"
        return "staged" if ROWS[self.row].staged else "single"

    def __str__(self) -> str:
        return f"{self.row} {self.role} {self.signal}"


class Line(msgspec.Struct, kw_only=True):
    """What is known of one cell. Seconds count from the signal; None: it did not come to that.

    `safe`: from here on nobody is between two versions. In the driver's fold no fenced publication is open, or every
    member of its current attempt has fenced for that attempt; whoever is dead has not, so that an attempt which waits
    for a dead boot is not safe before it is aborted without it. Until then engines generate, if at all, with the
    incumbent. (A staged one is safe by itself: what is not committed is beside what is served.)
    `serving`: the first answer to a request that was asked after the signal, so that one engine at least serves.
    `whole`: every process runs and is ready, every engine serves a release that was committed after the event, and an
    answer names such a release.
    `late_ms`: between the broker's time of the event and the signal: what is hit may have gone on for as long. `where`:
    the deployment, whose sequences are meant.
    The five columns that must be 0: `torn` receivers (memory that was not the target's digest, when it was reported or
    counted), `wrong` answers (against the serving rule where the engine stood), `stuck` engines (not serving in the
    end), `lost` records (receipts that the harness holds and RECORDS lacks), `twice` (records trained on twice).
    `operator`: what a person would have had to do. `findings`: all that the audit says. `cost`: how often each of
    `COSTS` was written after the signal, the price of getting over it.
    """

    event: str
    role: str
    signal: str
    where: str = ""
    seq: int = 0
    late_ms: float = 0.0
    stopped_s: float = 0.0
    safe_s: float | None = None
    serving_s: float | None = None
    whole_s: float | None = None
    torn: int = 0
    wrong: int = 0
    stuck: int = 0
    lost: int = 0
    twice: int = 0
    operator: int = 0
    findings: list[str] = []
    cost: dict[str, int] = {}
    error: str = ""
    until: int = 0
    until_record: int = 0
    receipts: set[str] = set()

    @property
    def bad(self) -> bool:
        return bool(self.torn or self.wrong or self.stuck or self.lost or self.twice or self.operator)

    @property
    def failed(self) -> bool:
        return self.bad or bool(self.findings or self.error)


class Hit:
    """Waits in the fold for the event and signals at once, before anything else is folded; then keeps the time."""

    def __init__(self, rig: Rig, cell: Cell, name: str, line: Line) -> None:
        self.rig, self.cell, self.name, self.line = rig, cell, name, line
        self.row = ROWS[cell.row]
        self.began = rig.world.seq
        self.done = asyncio.Event()
        self.victim: Victim | None = None
        self.at = 0.0

    def see(self, recorded: Recorded) -> None:
        if self.done.is_set():
            self._note(recorded)
        elif recorded.name == self.row.event and self.row.match(recorded, self.cell.role):
            self._strike(recorded)

    def _strike(self, recorded: Recorded) -> None:
        try:
            self.victim = self.rig.victim(self.name)
        except Gone:  # between two of its lives: the next one
            return
        self.victim.send(signal.SIGKILL if self.cell.signal == KILL else signal.SIGSTOP)
        self.at, self.line.seq = time.monotonic(), recorded.seq
        self.line.late_ms = round((time.time_ns() - recorded.time) / 1e6, 1)
        self.done.set()
        self._note(recorded)

    def _note(self, recorded: Recorded) -> None:
        if self.line.safe_s is None and safe(self.rig.world):
            self.line.safe_s = self.elapsed()
        if isinstance(recorded.event, ReceiverFailed) and recorded.event.cause == "digest":
            self.line.torn += 1
        if recorded.name in COSTS and recorded.seq > self.line.seq:
            self.line.cost[recorded.name] = self.line.cost.get(recorded.name, 0) + 1

    def elapsed(self) -> float:
        return round(time.monotonic() - self.at, 3)


def safe(world: World) -> bool:
    open_ = world.publications.open
    return open_ is None or open_.mode != "fenced" or all_fenced(world, open_)


async def run(rig: Rig, cell: Cell, stack: contextlib.AsyncExitStack) -> Line:
    """Run one cell on a deployment that is whole, or, for a row of its beginning, that is not started yet (`stack`
    holds it then). Never raises for what the deployment does: that is in the line."""
    line = Line(event=cell.row, role=cell.role, signal=cell.signal, where=Path(rig.config.state_dir).parent.name)
    operator = rig.operator_actions
    try:
        await _run(rig, cell, line, stack)
    except Exception as error:
        line.error = f"{type(error).__name__}: {error}"
        line.stuck = len(rig.engines) - len(serving(rig.world))
    line.operator = rig.operator_actions - operator
    line.receipts = {scored.answer.receipt for scored in rig.answers()}
    line.until = rig.world.seq
    return line


async def _run(rig: Rig, cell: Cell, line: Line, stack: contextlib.AsyncExitStack) -> None:
    name = await rig.leader() if cell.role == LEADER else cell.role
    hit = Hit(rig, cell, name, line)
    rig.watchers.append(hit.see)
    try:
        if ROWS[cell.row].fresh:
            await rig.begin(stack)
        await _hit(rig, cell, hit)
        await _recover(rig, cell, hit, line)
    finally:
        rig.watchers.remove(hit.see)
        if hit.victim:
            hit.victim.send(signal.SIGCONT)
            hit.victim.close()


async def _hit(rig: Rig, cell: Cell, hit: Hit) -> None:
    provoke = ROWS[cell.row].provoke
    if provoke is None:
        return await rig.until(f"{cell.row} appears", hit.done.is_set)
    task = asyncio.create_task(_forever(provoke(rig, cell.role)))
    try:
        await rig.until(f"{cell.row} appears", lambda: hit.done.is_set() or task.done())
        if not hit.done.is_set():
            task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _forever(provoked: object) -> None:
    """A provocation that is over waits to be cancelled; one that fails ends."""
    await provoked  # type: ignore[misc]
    await asyncio.Event().wait()


async def _recover(rig: Rig, cell: Cell, hit: Hit, line: Line) -> None:
    starts, victim = rig.starts(), hit.victim
    assert victim is not None
    async with asyncio.TaskGroup() as group:
        first = group.create_task(_first(rig, hit, line))
        if cell.signal != KILL:
            factor = float(cell.signal.partition("-")[2])
            line.stopped_s = factor * deadline(cell.role, cell.row, rig.config.publication.deadlines)
            await asyncio.sleep(max(0.0, line.stopped_s - hit.elapsed()))
            victim.send(signal.SIGCONT)
        replaced = [cell.role] if cell.signal == KILL and cell.role in starts else []

        def again() -> bool:
            head, known = rig.world.publications.head, rig.world.components
            later = head is not None and head.seq > line.seq
            return later and all(known[n].starts > starts[n] for n in replaced) and rig.whole()

        await rig.until(f"a release after {line.seq}, served by every engine, with every process up", again)
        await _named(rig, line.seq)
        line.whole_s = hit.elapsed()
        await first


async def _first(rig: Rig, hit: Hit, line: Line) -> None:
    """Several requests, so that one of them meets an engine that nobody has hit."""
    asked = [asyncio.create_task(_probe(rig)) for _ in range(PROBES)]
    try:
        await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        line.serving_s = hit.elapsed()
        await asyncio.gather(*asked)
    finally:
        for task in asked:
            task.cancel()


async def _probe(rig: Rig) -> str:
    scored = await rig.client.exchange("7", {"phase": "probe"}, train=False)
    rig.client.answers.put_nowait(scored)
    return scored.answer.load_id


async def _named(rig: Rig, seq: int) -> None:
    """Ask until an answer names a release that was committed after `seq`."""
    releases = rig.world.publications.releases
    load_id = ""
    while load_id not in releases or releases[load_id].seq <= seq:
        load_id = await _probe(rig)


async def place(rig: Rig, line: Line) -> None:
    """Where the cell's records end, for whoever looks for the cell of a finding."""
    line.until_record = await rig.journal.head(RECORDS)
