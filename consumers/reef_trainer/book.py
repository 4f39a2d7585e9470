"""The trainer's view of RECORDS: follows the stream, hands out batches.

Knows: the stream, the token blobs, the configured batch size. Must not know: what makes an answer eligible
(`core/records.py`), or what is done with a batch.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from reef_bus.artifacts import ArtifactStore
from reef_bus.backends import Sample
from reef_bus.config import Config
from reef_bus.core.records import Book, Unit, choose, consumed, evolve, remove, retire
from reef_bus.core.world import World, lag
from reef_bus.journal import RECORDS, Journal
from reef_bus.runner import blocking
from reef_bus.samples import Batch, TokenRow, decode_rows

Chosen = tuple[str, list[Unit], list[Sample], int, tuple[int, ...]]
"""The base, what is trained on from there, and what is consumed with it: floor, and taken above it."""


class RecordBook:
    """Follows RECORDS from where the last dispatched batch left off; one batch is asked for at a time."""

    def __init__(self, config: Config, journal: Journal, store: ArtifactStore) -> None:
        self.config = config
        self.journal = journal
        self.store = store
        self.world = World()
        self.book = Book()
        self.last = 0
        self._begun = asyncio.Event()
        self._changed = asyncio.Event()
        self._following: asyncio.Task[None] | None = None

    async def start(self, stack: contextlib.AsyncExitStack) -> None:
        self._following = asyncio.create_task(self._follow())
        self._following.add_done_callback(lambda _: self._changed.set())
        stack.callback(self._following.cancel)

    def moved(self, world: World) -> None:
        """The LOG fold has moved: what was too new may be known now."""
        self.world = world
        self._changed.set()

    async def batch(self, bases: Sequence[str], last: Batch | None) -> Chosen:
        """Wait until there is an eligible batch for a job from one of the bases, the first that has one; `last` is the
        last dispatched one. Raises what RECORDS could not be followed for: ContractError, so that whoever asked halts.
        """
        self._begin(last)
        while True:
            self._changed.clear()
            if self._following and self._following.done():
                self._following.result()
            retire(self.book, self._hopeless)
            for base in bases:
                if units := self._choose(base):
                    samples: list[Sample] = await blocking(self._samples, units)
                    return base, units, samples, *consumed(self.book, units, self.last)
            await self._changed.wait()

    def _choose(self, base: str) -> list[Unit] | None:
        training, scenario = self.config.training, self.world.training.scenario_of(base)
        return choose(
            self.book,
            scenario or self.config.scenario,
            lambda load_id: self._lag(load_id, base),
            training.groups,
            training.group_size,
        )

    def _begin(self, last: Batch | None) -> None:
        """Take up the state that the last dispatched batch left; its records are consumed whatever became of it."""
        self.book.floor = last.floor if last else 0
        self.book.taken = set(last.taken) if last else set()
        if last:
            spent = {record for record, _ in last.records}
            remove(self.book, [unit for unit in self.book.units.values() if unit.record in spent])
        self._begun.set()

    def _lag(self, load_id: str, base: str) -> int | None:
        return lag(self.world, load_id, base, self.config.training.max_staleness)

    def _hopeless(self, scenario: str, load_id: str) -> bool:
        """Of a scenario that is not trained here, a frozen base model's above all: kept, such answers would hold back
        for ever what is known to be consumed. Or known, and already too far behind the head: every future base is the
        head or descends from it. A rollback may bring older weights back; answers that were forgotten stay so."""
        if scenario not in (self.config.adapters.scenarios or (self.config.scenario,)):
            return True
        published = self.world.publications
        head = published.head_of(scenario)
        return (
            head is not None
            and published.release(head.scenario, load_id) is not None
            and self._lag(load_id, head.candidate) is None
        )

    def _samples(self, units: list[Unit]) -> list[Sample]:
        blobs: dict[str, list[TokenRow]] = {}
        samples = []
        for unit in units:
            if unit.blob.digest not in blobs:
                blobs[unit.blob.digest] = decode_rows(self.store.get(unit.blob.digest))
            row = blobs[unit.blob.digest][unit.row]
            assert unit.reward is not None
            samples.append(
                Sample(
                    record=unit.record,
                    group=unit.group,
                    prompt=row.prompt,
                    completion=row.answer,
                    logprobs=row.logprobs,
                    load_id=unit.load_id,
                    reward=unit.reward,
                    spans=unit.spans,
                )
            )
        return samples

    async def _follow(self) -> None:
        await self._begun.wait()
        async for batch in self.journal.follow(RECORDS, self.book.floor):
            for recorded in batch:
                evolve(self.book, recorded)
            self.last = batch[-1].seq
            self._changed.set()
