"""A person at the command line: does what only people may, and now and then asks for what nobody needs.

Knows: the log as it is stored, and how a request is put. Must not know: who answers, or whether the answer is yes.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator

from reef_bus.errors import Unavailable
from reef_bus.events import (
    Draft,
    EngineRetireRequested,
    Event,
    JobDiscardRequested,
    JobRestoreRequested,
    PromotionRequested,
    PublicationHaltRequested,
    Recorded,
    RecoveryResumeRequested,
    RollbackRequested,
)
from tests.simulation.boots import Machines
from tests.simulation.broker import Connection, Link
from tests.simulation.loop import Process
from tests.simulation.truth import Truth

LOOKS_S = 1.6
AGAIN_S = 0.4
NOWHERE = "nowhere"

FIELDS: dict[type[Event], str] = {
    RollbackRequested: "release",
    PromotionRequested: "candidate",
    JobDiscardRequested: "job",
    JobRestoreRequested: "job",
    EngineRetireRequested: "boot",
    PublicationHaltRequested: "publication",
    RecoveryResumeRequested: "component",
}
KINDS = {kind.__name__: kind for kind in FIELDS}


class Person(Process):
    """One person with a connection of their own. `asks` are what they want as soon as a certain event is stored."""

    def __init__(self, machines: Machines, truth: Truth, asks: tuple[tuple[str, str], ...]) -> None:
        super().__init__(machines.loop, "person")
        self.machines, self.truth, self.asks = machines, truth, list(asks)
        self.journal = Connection(machines.broker, self, Link(machines.loop))
        self.boots = itertools.count(1)

    def saw(self, recorded: Recorded) -> None:
        """LOG has one more event that counts."""
        for ask in [ask for ask in self.asks if ask[1] == recorded.name]:
            self.asks.remove(ask)
            self.spawn(self._ask(KINDS[ask[0]]))

    async def _ask(self, kind: type[Event]) -> None:
        """Soon, about what is there then; of a head that is not there any more, now and then."""
        chance, world = self.machines.chance, self.truth.world
        await asyncio.sleep(chance.random() ** 3)
        if kind is RollbackRequested and self.machines.config.adapters.scenarios:
            return await self.back()
        known = self._known(kind)
        about = known[-1] if known and chance.random() < 0.7 else chance.choice([*known, NOWHERE])
        head = self.head()
        if chance.random() < 0.2:
            head = chance.choice([*world.publications.releases, ""])
        await self.put(kind, about, head)

    def _known(self, kind: type[Event]) -> list[str]:
        """What such a request could be about, the likeliest last."""
        world = self.truth.world
        job, open_ = world.training.job, world.publications.open
        if kind is RollbackRequested:
            return list(reversed(world.publications.releases))
        if kind is PromotionRequested:
            return [*world.training.candidates, *([job.candidate] if job and job.candidate else [])]
        if kind in (JobDiscardRequested, JobRestoreRequested):
            return [job.id] if job else []
        if kind is EngineRetireRequested:
            return [engine.boot for engine in world.membership.engines.values()]
        if kind is PublicationHaltRequested:
            return [open_.id] if open_ else []
        return list(world.components)

    def head(self) -> str:
        head = self.truth.world.publications.head
        return head.load_id if head else ""

    async def back(self) -> None:
        """An adapter's scenario goes back: mostly to a release of its own, decided on its head."""
        chance, published = self.machines.chance, self.truth.world.publications
        scenario = chance.choice(self.machines.config.adapters.scenarios)
        own = [load_id for load_id, each in published.releases.items() if not each.parent or each.scenario == scenario]
        of = own if chance.random() < 0.8 else list(published.releases)
        head = published.head_of(scenario if chance.random() < 0.9 else "")
        await self.put(RollbackRequested, chance.choice([*of, NOWHERE]), head.load_id if head else "", scenario)

    async def put(self, kind: type[Event], about: str, head: str, scenario: str = "") -> None:
        """Onto the log, however often it takes; at times once more, by the same call or by another."""
        chance = self.machines.chance
        said = {"actor": "ann", "why": "so", "head": head, "scenario": scenario or self.machines.config.scenario}
        said |= {"engine": about.partition(".")[0], FIELDS[kind]: about}
        event = kind(**{field: said[field] for field in kind.__struct_fields__})
        await self._append(event, boot := f"cli-{next(self.boots)}")
        while chance.random() < 0.25:
            await asyncio.sleep(chance.random())
            await self._append(event, chance.choice((boot, f"cli-{next(self.boots)}")))

    async def _append(self, event: Event, boot: str) -> None:
        draft = Draft(event=event, writer=f"person/{event.key}", boot=boot)
        while True:
            try:
                await self.journal.append(draft, 0)
                return
            except Unavailable:
                await asyncio.sleep(AGAIN_S)

    # -- duties

    async def live(self) -> None:
        """Look after what waits for a person, one thing after the other."""
        while True:
            await asyncio.sleep(LOOKS_S * (0.3 + self.machines.chance.random()))
            for kind, about in self._waiting():
                if not self._asked(about):
                    await self.put(kind, about, self.head())

    def _waiting(self) -> Iterator[tuple[type[Event], str]]:
        chance, world, job = self.machines.chance, self.truth.world, self.truth.world.training.job
        if job is not None and job.ambiguous:
            yield (JobRestoreRequested, JobDiscardRequested)[chance.random() < 0.4], job.id
        elif job is not None and job.evaluated and self.machines.config.training.hold:
            promoted = chance.random() < 0.75
            yield (PromotionRequested, job.candidate) if promoted else (JobDiscardRequested, job.id)
        yield from ((RecoveryResumeRequested, name) for name, c in list(world.components.items()) if c.given_up)

    def _asked(self, about: str) -> bool:
        """And it may still be met: whoever asked too soon asks again, answered or not."""
        return any(about == asked.about and not asked.refused for asked in self.truth.world.requests.values())
