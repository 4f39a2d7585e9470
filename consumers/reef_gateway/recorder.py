"""Writes RECORDS: answers with their token blobs, and reports, each exactly once; and knows every receipt.

Knows: RECORDS and the artifact store. Must not know: engines, chat formats, or HTTP.
Answers that finish together share one blob and one fsync. An answer is recorded before its client sees it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging

from reef_bus.artifacts import ArtifactStore
from reef_bus.core.ids import derived
from reef_bus.envelope import payload
from reef_bus.errors import Rejected, Unavailable
from reef_bus.events import Blob, Draft, InferenceRecorded, Recorded, RecordEvent, ReportReceived
from reef_bus.journal import RECORDS, Journal
from reef_bus.runner import blocking
from reef_bus.samples import TokenRow, encode_rows

log = logging.getLogger(__name__)

RETRY_S = 0.2


class Recorder:
    """One gateway's writer and index. The index holds about 200 bytes per answer and is rebuilt from the stream."""

    def __init__(self, journal: Journal, store: ArtifactStore, writer: str, boot: str) -> None:
        self.journal = journal
        self.store = store
        self.writer = writer
        self.boot = boot
        self.answers: dict[str, str] = {}
        self.reports: dict[str, bytes] = {}
        self.seq = 0
        self._moved = asyncio.Event()
        self._replayed = False
        self._following: asyncio.Task[None] | None = None
        self._rows: list[tuple[TokenRow, asyncio.Future[tuple[Blob, int]]]] = []
        self._some = asyncio.Event()

    async def start(self, stack: contextlib.AsyncExitStack) -> None:
        self._following = asyncio.create_task(self._follow())
        self._following.add_done_callback(self._stopped)
        stack.callback(self._following.cancel)
        stack.callback(asyncio.create_task(self._store_rows()).cancel)

    async def row(self, row: TokenRow) -> tuple[Blob, int]:
        """Make one answer's tokens durable; returns the blob and the row in it."""
        done: asyncio.Future[tuple[Blob, int]] = asyncio.get_running_loop().create_future()
        self._rows.append((row, done))
        self._some.set()
        return await done

    async def _store_rows(self) -> None:
        while True:
            await self._some.wait()
            self._some.clear()
            rows, self._rows = self._rows, []
            try:
                blob = await blocking(self.store.put, encode_rows([row for row, _ in rows]))
            except Exception as error:  # whatever it is, who waits must hear of it, and the next rows may do better
                for _, done in rows:
                    if not done.done():
                        done.set_exception(error)
                continue
            for index, (_, done) in enumerate(rows):
                if not done.done():
                    done.set_result((blob, index))

    async def answer(self, event: InferenceRecorded) -> None:
        """Record an answer. Raises Unavailable when the log cannot be reached before the caller gives up."""
        await self._append(event, event.record)
        self.answers[event.record] = event.scenario

    async def report(
        self,
        scenario: str,
        report: str | None,
        references: tuple[str, ...],
        score: float,
        feedback: str,
        metadata: dict[str, object],
    ) -> tuple[str, bool]:
        """Record a report; returns its id and whether it had been there. The same id with other content is refused."""
        if self._following and self._following.done():
            raise Unavailable("no report can be judged: this gateway halted on RECORDS, and its own log says where")
        await self._replay()
        await self._check_references(scenario, references)
        id_ = report or derived("rep", scenario, *references)
        if id_ in self.answers:
            raise Rejected(f"{id_!r} is a receipt; a report has an id of its own, or none, and names receipts", 409)
        event = ReportReceived(
            scenario=scenario, report=id_, references=references, score=score, feedback=feedback, metadata=metadata
        )
        known = self.reports.get(id_)
        duplicate = known is not None or await self._append(event, id_)
        if duplicate and await self._stored(id_) != _hash(event):
            raise Rejected(f"report {id_} is recorded with other content; a report is never changed", 409)
        self.reports[id_] = _hash(event)
        return id_, duplicate

    async def _append(self, event: RecordEvent, correlation: str) -> bool:
        """Append until it is acknowledged; whether it had been there. Its id is the same on every try."""
        draft = Draft(event=event, writer=self.writer, boot=self.boot, correlation=correlation)
        while True:
            try:
                return (await self.journal.append(draft, 0)).duplicate
            except Unavailable as error:
                log.warning("%s; trying again", error)
                await asyncio.sleep(RETRY_S)

    async def _check_references(self, scenario: str, references: tuple[str, ...]) -> None:
        if any(reference not in self.answers for reference in references):
            await self._caught_up()
        for reference in references:
            if self.answers.get(reference) != scenario:
                raise Rejected(f"receipt {reference!r} is not known in scenario {scenario!r}", 404)

    async def _stored(self, report: str) -> bytes:
        if report not in self.reports:
            await self._caught_up()
        if report not in self.reports:
            raise Rejected(f"report id {report!r} is taken by another record", 409)
        return self.reports[report]

    async def _replay(self) -> None:
        """Once: the broker knows a repeated report for some minutes only, the index knows those before this boot."""
        if not self._replayed:
            await self._caught_up()
            self._replayed = True

    async def _caught_up(self) -> None:
        """Another gateway may have recorded it: judge on everything that is there now."""
        head = await self.journal.head(RECORDS)
        while self.seq < head:
            if self._following and self._following.done():
                self._following.result()
            await self._moved.wait()

    async def _follow(self) -> None:
        async for batch in self.journal.follow(RECORDS):
            for recorded in batch:
                self._index(recorded)
            self.seq = batch[-1].seq
            self._wake()

    def _wake(self) -> None:
        self._moved.set()
        self._moved.clear()

    def _stopped(self, following: asyncio.Task[None]) -> None:
        """Answers go on; what needs the index fails with what ended it, instead of waiting for ever."""
        if not following.cancelled() and (error := following.exception()):
            log.error("RECORDS is not followed any more: %s", error)
        self._wake()

    def _index(self, recorded: Recorded) -> None:
        match recorded.event:
            case InferenceRecorded(record=record, scenario=scenario):
                self.answers[record] = scenario
            case ReportReceived() as report:
                self.reports.setdefault(report.report, _hash(report))


def _hash(event: ReportReceived) -> bytes:
    return hashlib.sha256(payload(event)).digest()[:16]
