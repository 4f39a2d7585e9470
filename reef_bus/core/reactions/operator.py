"""What publishers owe to people: answers to their requests, whoever would have met them.

Knows: the world and its pending requests. Must not know: how a request was made.
A request about something that is over can never be met any more, so whoever folded that may say so.
"""

from __future__ import annotations

from reef_bus.core.effects import Append, Debt
from reef_bus.core.publication import Publication
from reef_bus.core.requests import Request, wanted
from reef_bus.core.world import World, asked_of
from reef_bus.events import (
    EngineExcluded,
    EngineRetireRequested,
    Event,
    PublicationHalted,
    PublicationHaltRequested,
    PublicationRefused,
    RequestRefused,
    RollbackRequested,
)


def refusals(world: World) -> list[Debt]:
    """Requests that were dead when they arrived, or that were overtaken."""
    return [refuse(world, asked, asked.refused) for asked in world.requests.values() if asked.refused]


def refuse(world: World, asked: Request, why: str, detail: str = "") -> Debt:
    scenario = asked_of(world, asked) or world.training.scenario
    head = world.publications.head_of(scenario)
    text = detail or f"{asked.name} of {asked.about} on {asked.head}; the head is {head.load_id if head else 'none'}"
    event: Event = RequestRefused(scenario=scenario, request=asked.seq, reason=why, detail=text)
    if asked.name == RollbackRequested.__name__:
        release = world.publications.release(asked_of(world, asked), asked.about)
        candidate = release.candidate if release else ""
        event = PublicationRefused(scenario=scenario, candidate=candidate, reason=why, detail=text, request=asked.seq)
    return Debt(key=f"answer/{asked.seq}", effect=Append(event), cause=asked.seq)


def retirements(world: World) -> list[Debt]:
    asked = wanted(world.requests, EngineRetireRequested)
    engines = world.membership.engines.values()
    found = next((engine for engine in engines if asked and engine.boot == asked.about), None)
    if asked is None or found is None:
        return []
    event = EngineExcluded(
        scenario=world.training.scenario,
        engine=found.id,
        boot=found.boot,
        reason=f"retired by {asked.actor}: {asked.why}",
        request=asked.seq,
    )
    return [Debt(key=f"answer/{asked.seq}", effect=Append(event), cause=asked.seq)]


def halts(world: World, open_: Publication) -> list[Debt]:
    """A person wants the open publication given up, or a rollback must come first."""
    asked = wanted(world.requests, PublicationHaltRequested, open_.id)
    rollback = wanted(world.requests, RollbackRequested)
    if rollback and (open_.request or asked_of(world, rollback) != (open_.scenario if open_.lora else "")):
        rollback = None  # it waits for another one, or for another scenario's release
    if asked is None and rollback is None:
        return []
    by = asked or rollback
    assert by is not None
    event = PublicationHalted(
        scenario=open_.scenario,
        publication=open_.id,
        attempt=open_.attempt,
        reason="operator" if asked else "rollback",
        excluded=(),
        detail=f"{by.actor}: {by.why}",
        request=asked.seq if asked else 0,
    )
    return [Debt(key=f"halt/{by.seq}/{open_.seq}", effect=Append(event), cause=by.seq, correlation=open_.id)]
