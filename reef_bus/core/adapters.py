"""How the log moves what each boot holds of LoRA adapters: which event is which fact of its residency.

Knows: the three families that speak of adapters, and residencies. Must not know: how any of them decides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from reef_bus.core import residency
from reef_bus.core.membership import Engine, Failing, Membership
from reef_bus.core.publication import Publication, Publications
from reef_bus.core.residency import Residency
from reef_bus.events import (
    AdapterLeaked,
    AdapterRegistered,
    AdapterUnloaded,
    EngineJoined,
    EngineStaged,
    Event,
    Member,
    ReceiverFailed,
    Recorded,
)

# -- what engines say, once it is folded


def told(membership: Membership, publications: Publications, recorded: Recorded) -> None:
    """Apply one event of an `engine` family that is not void."""
    change = CHANGES.get(type(recorded.event))
    if change:
        change(membership.engines[recorded.event.key], publications, recorded, recorded.event)


def _join(engine: Engine, publications: Publications, recorded: Recorded, event: EngineJoined) -> None:
    """With every head to come, and nothing of which anything is known. It is a member of nothing yet."""
    if event.adapters is not None and event.adapters < 1:
        return
    heads = {scenario: head.load_id for scenario, head in publications.adapters.items()}
    state = Residency(capacity=event.adapters, current=heads)
    for name in event.resident:
        state = residency.unload_failed(state, name)
    engine.residency = state


def _stage(engine: Engine, publications: Publications, recorded: Recorded, event: EngineStaged) -> None:
    """A proof of what the load id names, under the name where that goes. A word on anything else is of something that
    nobody may use; but one that comes too late takes nothing away from what is held by that name, if it says the same
    of it."""
    if not event.adapter or engine.residency is None:
        return
    state, engine.adapted = engine.residency, recorded.seq
    if _manifest(publications, event) == event.manifest:
        proven = residency.loaded(state, event.scenario, event.load_id, event.manifest)
        if event.adapter in proven.slots and event.load_id in proven.slots[event.adapter].load_ids:
            engine.residency = proven
            if residency.served(proven, event.scenario):
                engine.failing.pop(event.scenario, None)
            return
    slot = state.slots.get(event.adapter)
    known = slot is not None and slot.load_ids and (slot.scenario, slot.manifest) == (event.scenario, event.manifest)
    if not known:
        engine.residency = residency.unload_failed(state, event.adapter)


def _manifest(publications: Publications, event: EngineStaged) -> str:
    """What the load id names, as far as the log knows by now."""
    open_ = publications.open
    if open_ and open_.lora and (open_.scenario, open_.load_id) == (event.scenario, event.load_id):
        return open_.manifest
    release = publications.release(event.scenario, event.load_id)
    return release.manifest if release else ""


def _fail(engine: Engine, publications: Publications, recorded: Recorded, event: ReceiverFailed) -> None:
    if event.adapter and engine.residency is not None:
        engine.adapted = recorded.seq
        if event.publication:
            engine.residency = residency.load_failed(engine.residency, event.scenario, event.load_id)
        else:
            _miss(engine, engine.residency, recorded, event)


def _miss(engine: Engine, state: Residency, recorded: Recorded, event: ReceiverFailed) -> None:
    """The artifact of a head is to blame, and the engine was given nothing of it: what it holds is as it was."""
    if state.current.get(event.scenario) != event.load_id or residency.served(state, event.scenario):
        return
    before = engine.failing.get(event.scenario)
    engine.failing[event.scenario] = Failing(
        load_id=event.load_id,
        seq=recorded.seq,
        tries=before.tries + 1 if before else 1,
        since=before.since if before else recorded.time,
        why=event.detail,
    )


def _unload(engine: Engine, publications: Publications, recorded: Recorded, event: AdapterUnloaded) -> None:
    if engine.residency is not None:
        engine.adapted = recorded.seq
        engine.residency = residency.unloaded(engine.residency, event.adapter)


def _leak(engine: Engine, publications: Publications, recorded: Recorded, event: AdapterLeaked) -> None:
    if engine.residency is not None:
        engine.adapted = engine.leaks[event.adapter] = recorded.seq
        engine.residency = residency.unload_failed(engine.residency, event.adapter)


CHANGES: Mapping[type[Event], Callable[[Engine, Publications, Recorded, Any], None]] = {
    EngineJoined: _join,
    EngineStaged: _stage,
    ReceiverFailed: _fail,
    AdapterUnloaded: _unload,
    AdapterLeaked: _leak,
}


# -- what the trainer and publishers say


def registered(membership: Membership, publications: Publications, event: AdapterRegistered) -> None:
    head = publications.adapters[event.scenario]
    for engine in _holders(membership):
        engine.residency = residency.activated(_state(engine), event.scenario, head.load_id)


def targeted(membership: Membership, open_: Publication) -> None:
    """A target, or its next attempt: each member keeps a place for it, from here to the commit or halt."""
    for engine in _holders(membership):
        if open_.lora and Member(engine.id, engine.boot) in open_.members:
            _expect(engine, open_)


def committed(membership: Membership, open_: Publication) -> None:
    for engine in _holders(membership):
        engine.residency = residency.activated(_state(engine), open_.scenario, open_.load_id)
        engine.failing.pop(open_.scenario, None)


def halted(membership: Membership, open_: Publication) -> None:
    for engine in _holders(membership):
        engine.residency = residency.withdrawn(_state(engine), open_.scenario, open_.load_id)


def _expect(engine: Engine, open_: Publication) -> None:
    engine.residency = residency.tentative(_state(engine), open_.scenario, open_.load_id, open_.manifest)


def _holders(membership: Membership) -> list[Engine]:
    return [engine for engine in membership.engines.values() if engine.residency is not None]


def _state(engine: Engine) -> Residency:
    assert engine.residency is not None
    return engine.residency
