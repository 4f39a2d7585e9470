"""The trainer's view of RECORDS: follows the stream, hands out batches.

Knows: the stream, the token blobs, the configured batch size. Must not know: what makes an answer eligible
(`core/records.py`), or what is done with a batch.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence

from reef_bus.artifacts import ArtifactStore
from reef_bus.backends import Sample
from reef_bus.config import Config
from reef_bus.core.records import NOTHING, Book, Consumed, Unit, choose, consumed, evolve, remove, retire
from reef_bus.core.world import World, lag
from reef_bus.events import Blob
from reef_bus.journal import RECORDS, Journal
from reef_bus.runner import blocking
from reef_bus.samples import Batch, TokenRow, decode_batch, decode_rows

Chosen = tuple[str, list[Unit], list[Sample], Consumed]
"""The base, what is trained on from there, and what is consumed of its scenario with it."""


class RecordBook:
    """Follows RECORDS from where the last dispatched batches left off, one of each scenario; one batch is asked for at
    a time."""

    def __init__(self, config: Config, journal: Journal, store: ArtifactStore) -> None:
        self.config = config
        self.journal = journal
        self.store = store
        self.world = World()
        self.book = Book()
        self.last = 0
        self.scenarios = config.adapters.scenarios or (config.scenario,)
        self._taken_up: dict[str, Blob] = {}
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

    async def batch(self, bases: Sequence[str], dispatched: Mapping[str, Blob]) -> Chosen:
        """Wait until there is an eligible batch for a job from one of the bases, the first that has one; `dispatched`
        is the last one of each scenario; empty: of the whole model. Raises what RECORDS could not be followed for:
        ContractError, so that whoever asked halts.
        """
        await self._begin(dispatched)
        while True:
            self._changed.clear()
            if self._following and self._following.done():
                self._following.result()
            retire(self.book, self._hopeless)
            for base in bases:
                if units := self._choose(base):
                    samples: list[Sample] = await blocking(self._samples, units)
                    return base, units, samples, consumed(self.book, units[0].scenario, units, self.last)
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

    async def _begin(self, dispatched: Mapping[str, Blob]) -> None:
        """Take up what the last dispatched batches left, each for its own scenario: all of them at a boot's beginning,
        from then on the one that is new."""
        for scenario, blob in dispatched.items():
            if self._taken_up.get(scenario) != blob:
                batch = decode_batch(await blocking(self.store.get, blob.digest))
                self._take_up(scenario or self.config.scenario, batch)
                self._taken_up[scenario] = blob
        self._begun.set()

    def _take_up(self, scenario: str, batch: Batch) -> None:
        """Its records are consumed, whatever became of its job."""
        self.book.consumed[scenario] = Consumed(batch.floor, frozenset(batch.taken))
        spent = {record for record, _ in batch.records}
        remove(self.book, [unit for unit in self.book.units.values() if unit.record in spent])

    def _lag(self, load_id: str, base: str) -> int | None:
        return lag(self.world, load_id, base, self.config.training.max_staleness)

    def _hopeless(self, scenario: str, load_id: str) -> bool:
        """Of a scenario that is not trained here, a frozen base model's above all: nobody would ever take such answers
        away. Or known, and already too far behind the head: every future base is the head or descends from it. A
        rollback may bring older weights back; answers that were forgotten stay so."""
        if scenario not in self.scenarios:
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
        floor = min(self.book.consumed.get(scenario, NOTHING).floor for scenario in self.scenarios)
        async for batch in self.journal.follow(RECORDS, floor):
            for recorded in batch:
                evolve(self.book, recorded)
            self.last = batch[-1].seq
            self._changed.set()
