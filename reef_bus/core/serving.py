"""The serving rule (protocol.md section 4), evaluated by engines and gateways alike.

Knows: the world. Must not know: processes, addresses' health, or time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from reef_bus.core import residency
from reef_bus.core.membership import Engine
from reef_bus.core.memory import lending, up
from reef_bus.core.publication import FENCED, IN_PLACE, Release
from reef_bus.core.world import World
from reef_bus.events import Member


def live(world: World, engine: Engine) -> bool:
    """The engine's current boot is neither excluded nor left."""
    return not engine.left and engine.boot not in world.publications.excluded


def present(world: World, engine: Engine) -> bool:
    """Live, and since it joined a supervisor has neither withdrawn its readiness nor recorded its end."""
    component = world.components.get(engine.id)
    return live(world, engine) and (component is None or component.ended < engine.joined)


def fenced(world: World, engine: str, boot: str) -> bool:
    """A fence is up and covers this boot: a publication's, or that of a colocated job, which covers every boot."""
    return up(world.handover) or targeted(world, engine, boot)


def targeted(world: World, engine: str, boot: str) -> bool:
    """A publication's fence is up and covers this boot."""
    open_ = world.publications.open
    return open_ is not None and open_.mode == FENCED and Member(engine, boot) in open_.members


def holds_head(world: World, engine: Engine) -> bool:
    """The boot's last proof since its last fence names the head's load id and digest."""
    head, proof = world.publications.head, engine.verified
    return head is not None and proof is not None and (proof.load_id, proof.manifest) == (head.load_id, head.manifest)


def may_generate(world: World, engine: str, boot: str) -> bool:
    """The rule. True if and only if this boot may generate, with the head's weights."""
    found = world.membership.engines.get(engine)
    return (
        found is not None
        and found.boot == boot
        and live(world, found)
        and not fenced(world, engine, boot)
        and not found.released
        and holds_head(world, found)
    )


def owes_head(world: World, engine: Engine) -> int:
    """The sequence since which the live, uncovered boot owes a proof of the head; 0 if it owes none."""
    head = world.publications.head
    if head is None or not live(world, engine) or fenced(world, engine.id, engine.boot) or holds_head(world, engine):
        return 0
    since = engine.joined, engine.fenced, engine.reported, engine.memory, head.seq, world.publications.ended_seq
    return max(since)


def may_continue(releases: Mapping[str, Release], begun: str, load_id: str) -> bool:
    """Whether tokens by the committed release `load_id` may follow tokens by `begun` in one answer: generation stops in
    place for every release after `begun` up to `load_id`. One that drains or retracts leaves nothing half done."""
    while load_id != begun:
        release = releases.get(load_id)
        if release is None or release.pause != IN_PLACE:
            return False
        load_id = release.parent
    return True


def serving(world: World) -> list[Engine]:
    """The engines that may generate now, by id."""
    engines = world.membership.engines
    return [engines[name] for name in sorted(engines) if may_generate(world, name, engines[name].boot)]


class Version(NamedTuple):
    """What answers a request: the load id that is recorded, and the name of the adapter (empty: the base model)."""

    load_id: str
    adapter: str = ""


def version(world: World, engine: Engine, scenario: str) -> Version | None:
    """What an engine that may generate answers requests of the scenario (empty: the base model's) with: its head, and
    nothing else; None where that is an adapter which this boot was not proven to hold."""
    head = world.publications.head_of(scenario)
    if head is None or scenario not in ("", world.training.scenario, *world.training.adapters):
        return None
    if not head.scenario or not head.parent:
        return Version(head.load_id)
    name = residency.served(engine.residency, scenario) if engine.residency else ""
    return Version(head.load_id, name) if name else None


def hindrance(world: World, scenario: str) -> str:
    """Why nobody answers the scenario though engines serve, where that is its adapter's artifact; else empty."""
    found = serving(world)
    if any(version(world, engine, scenario) for engine in found):
        return ""
    said = ((engine.id, engine.failing[scenario]) for engine in found if scenario in engine.failing)
    return next((f"{id_} cannot load {scenario}'s adapter {failed.load_id}: {failed.why}" for id_, failed in said), "")


def holders(world: World) -> list[Engine]:
    """Boots whose memory the open colocated job may not count on yet, by id: those that have not said, since its fence
    was raised, that it is released. Who is out counts until its supervisor knows that nothing of it lives."""
    handover, engines = world.handover, world.membership.engines
    if handover is None or not lending(handover):
        return []
    found = (engines[name] for name in sorted(engines) if engines[name].lent != handover.seq)
    return [engine for engine in found if present(world, engine) or _remains(world, engine)]


def _remains(world: World, engine: Engine) -> bool:
    component = world.components.get(engine.id)
    if component is None:
        return False
    running = component.published == engine.boot
    return running or (component.ended > engine.joined and component.state in ("withdrawn", "unconfirmed"))
