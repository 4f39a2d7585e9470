"""Which LoRA adapters one engine boot holds, which of them may go, and which a request may name.

Knows: scenarios, load ids, digests. Must not know: files, how an engine loads, or who tells what.
A transition is one fact and gives the next state; a decision says what is owed, or why not, and changes nothing. What
was not proven is not used, and what was not confirmed gone takes its place.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from reef_bus.core.ids import adapter_name, parse_load_id
from reef_bus.errors import Rejected

STRAY = -1  # the activation order of what nobody asked for: the first to go
CAPACITY = "capacity"  # everything that would have to go is protected
IN_USE = "in_use"  # what leaked under the name must go first, and is leased or pinned
NOT_RESIDENT = "not_resident"
NOT_CURRENT = "not_current"
NOT_COMMITTED = "not_committed"
TAKEN = "taken"  # the lease is of another adapter


class Slot(msgspec.Struct, frozen=True, kw_only=True):
    """One adapter that the engine holds, or may hold: the bytes `manifest`, of `scenario` (empty: a stray).

    `load_ids` are those that it was proven to hold, its own first, then aliases; without one nobody may use it.
    `awaits` is the load id whose commit will make it current; `order` counts loads and activations.
    """

    scenario: str
    manifest: str
    load_ids: tuple[str, ...] = ()
    awaits: str = ""
    leaked: bool = False
    order: int = 0


class Residency(msgspec.Struct, frozen=True, kw_only=True):
    """What one boot holds. `current`: each scenario's head by load id, be it there or not. `leases`: names by lease id.

    A boot joins with every head and no slot. Leases are the agent's own, not the log's: where a publisher finds room,
    an agent may have to wait for requests that name an older adapter. It loads one adapter at a time.
    """

    capacity: int | None = None
    slots: dict[str, Slot] = {}
    current: dict[str, str] = {}
    leases: dict[str, str] = {}
    pins: frozenset[str] = frozenset()
    activations: int = 0

    def __post_init__(self) -> None:
        if self.capacity is not None and self.capacity < 1:
            raise Rejected(f"adapter capacity {self.capacity}: expected at least 1, or none: nothing bounds it")


class Room(NamedTuple):
    """A load goes in under `name` once `unload` is gone, in that order; `held`: its bytes are there already."""

    name: str
    unload: tuple[str, ...] = ()
    held: bool = False


class Refused(NamedTuple):
    """Why not; nothing has changed. `needed`: the capacity that would do, where that is the reason."""

    reason: str
    detail: str
    needed: int = 0


class Drift(NamedTuple):
    """How an engine's list differs, one fact for each name: `unload` strays (`AdapterUnloaded`, where that fails
    `AdapterLeaked`); strays in use are `leaked` (`AdapterLeaked`); `lost` are no longer there (`AdapterUnloaded`)."""

    unload: tuple[str, ...]
    leaked: tuple[str, ...]
    lost: tuple[str, ...]


# -- what is asked


def protected(state: Residency, name: str, superseding: str | None = None) -> bool:
    """It must not be unloaded: pinned, leased, soon or now current. `superseding` gives up its own current adapter."""
    slot = state.slots[name]
    current = slot.scenario != superseding and _is_current(state, slot)
    return current or bool(slot.awaits) or _in_use(state, name)


def alias(state: Residency, scenario: str, manifest: str) -> str:
    """The scenario's adapter that was proven to hold these bytes, or an empty string."""
    bytes_ = scenario, manifest
    return next((n for n, s in state.slots.items() if s.load_ids and (s.scenario, s.manifest) == bytes_), "")


def served(state: Residency, scenario: str) -> str:
    """The name by which the scenario's head can be asked for, or an empty string."""
    return _proven(state, scenario, state.current.get(scenario, ""))


def reclaim(state: Residency, name: str) -> tuple[str, ...]:
    """What must go before anything is loaded under this name: what leaked under it. An engine loads no name twice."""
    slot = state.slots.get(name)
    return (name,) if slot and slot.leaked else ()


def make_room(
    state: Residency, scenario: str, load_id: str, manifest: str, *, supersede: bool = False
) -> Room | Refused:
    """Where this load goes, and what must be unloaded for it: leaked adapters first, then those activated longest ago;
    the scenario's own current one, if it may be superseded, last. Before its target and after, until it was loaded."""
    name = _place(state, scenario, load_id, manifest)
    if name in state.slots and state.slots[name].load_ids:
        return Room(name, held=True)
    own = reclaim(state, name)
    if own and _in_use(state, name):
        return Refused(IN_USE, f"{name} leaked, and must go first; requests or pins still hold it")
    spare = _spare(state, name, scenario if supersede else None)
    over = _over(state, name)
    return Room(name, (*own, *spare[:over])) if over <= len(spare) else _too_small(state, scenario, name, spare)


def route(state: Residency, scenario: str, load_id: str) -> str | Refused | None:
    """The name by which a request that has frozen this load id is answered; None: the base model, by no name.

    A name is current or leased; who wants it to stay takes a lease first. Nobody falls back to the base model.
    """
    head = state.current.get(scenario)
    if parse_load_id(load_id).sequence == 0:
        return None if head in (None, load_id) else _not_current(state, scenario, load_id)
    name = _proven(state, scenario, load_id)
    if not name:
        return Refused(NOT_RESIDENT, f"{scenario}: {load_id} is not there, or not proven; {_head(state, scenario)}")
    if load_id == state.slots[name].awaits:
        return Refused(NOT_COMMITTED, f"{scenario}: {load_id} is not committed; {_head(state, scenario)}")
    usable = name == served(state, scenario) or name in state.leases.values()
    return name if usable else _not_current(state, scenario, load_id)


def reconcile(state: Residency, listed: Iterable[str]) -> Drift:
    """What the engine lists, against the state. A place that is taken for a load that did not happen yet is no loss."""
    found = frozenset(listed)
    strays = sorted(found - state.slots.keys())
    lost = (n for n, s in state.slots.items() if n not in found and (s.load_ids or s.leaked))
    return Drift(
        unload=tuple(n for n in strays if not _in_use(state, n)),
        leaked=tuple(n for n in strays if _in_use(state, n)),
        lost=tuple(lost),
    )


# -- facts about a load


def tentative(state: Residency, scenario: str, load_id: str, manifest: str) -> Residency:
    """`TargetPersisted`, and this boot receives: the place is taken from here to the commit or halt, and not yet used.
    Where the scenario's bytes are resident, it is theirs: an alias."""
    name = _place(state, scenario, load_id, manifest)
    slot = state.slots.get(name) or Slot(scenario=scenario, manifest=manifest)
    return _put(state, name, replace(slot, scenario=scenario, manifest=manifest, awaits=load_id))


def loaded(state: Residency, scenario: str, load_id: str, manifest: str) -> Residency:
    """`EngineStaged`, or the proof of a catch-up: the engine holds it. A leaked slot that is wanted is reclaimed thus.
    What nobody waits for any more is leaked; so is a slot that holds other bytes than it is known by."""
    name = _place(state, scenario, load_id, manifest)
    slot = state.slots.get(name) or Slot(scenario=scenario, manifest=manifest)
    if slot.manifest not in ("", manifest):
        return _leak(state, name, slot)
    if load_id not in (slot.awaits, state.current.get(scenario), *slot.load_ids):
        return state if slot.load_ids else _leak(state, name, slot)
    ids = tuple(dict.fromkeys((*slot.load_ids, load_id)))
    order = state.activations + 1
    kept = replace(slot, scenario=scenario, manifest=manifest, load_ids=ids, leaked=False, order=order)
    return replace(_put(state, name, kept), activations=order)


def load_failed(state: Residency, scenario: str, load_id: str) -> Residency:
    """`ReceiverFailed`: the engine may hold it all the same, or half of it: leaked, until an unload is confirmed.
    Bytes that were resident before, under another load id, are as they were."""
    name = _holder(state, scenario, load_id) or adapter_name(scenario, load_id)
    return _put(state, name, _without(state.slots.get(name) or Slot(scenario=scenario, manifest=""), load_id))


def withdrawn(state: Residency, scenario: str, load_id: str) -> Residency:
    """`PublicationHalted`: its place here, if it has one, is no longer kept for it."""
    name = _holder(state, scenario, load_id)
    if not name or state.slots[name].awaits != load_id:
        return state
    return _put(state, name, replace(_without(state.slots[name], load_id), awaits=""))


def activated(state: Residency, scenario: str, load_id: str) -> Residency:
    """`ReleaseCommitted`, on every boot: the scenario's head, be it there or not. The one before drains by leases."""
    if state.current.get(scenario) == load_id:
        return state
    order = state.activations + 1
    state = replace(state, current={**state.current, scenario: load_id}, activations=order)
    name = _holder(state, scenario, load_id)
    return _put(state, name, replace(state.slots[name], awaits="", order=order)) if name else state


# -- facts about an unload


def unloaded(state: Residency, name: str) -> Residency:
    """`AdapterUnloaded`: the engine confirmed that it is gone. A target's place stays taken."""
    slot = state.slots.get(name)
    if slot and slot.awaits:
        return _put(state, name, replace(slot, load_ids=(), leaked=False, order=0))
    return replace(state, slots={each: s for each, s in state.slots.items() if each != name})


def unload_failed(state: Residency, name: str) -> Residency:
    """`AdapterLeaked`: it keeps its place, and nobody may use it, until a later unload is confirmed."""
    return _leak(state, name, state.slots.get(name) or Slot(scenario="", manifest="", order=STRAY))


# -- requests in hand, and what a person asks


def lease(state: Residency, lease_id: str, scenario: str, load_id: str) -> Residency | Refused:
    """Protect the scenario's current adapter for one attempt at one request; a repeat changes nothing."""
    found = route(state, scenario, load_id)
    if isinstance(found, Refused):
        return found
    if found is None:
        return Refused(NOT_RESIDENT, f"{scenario}: {load_id} is the base model, which needs no lease")
    if found != served(state, scenario):  # what drains gets no new leases, or it never would
        return _not_current(state, scenario, load_id)
    if state.leases.get(lease_id, found) != found:
        return Refused(TAKEN, f"lease {lease_id} is of {state.leases[lease_id]}, not of {found}")
    return replace(state, leases={**state.leases, lease_id: found})


def release(state: Residency, lease_id: str) -> Residency:
    """The attempt has ended; a repeat changes nothing."""
    return replace(state, leases={each: name for each, name in state.leases.items() if each != lease_id})


def pin(state: Residency, name: str) -> Residency | Refused:
    """Protect it until it is unpinned."""
    if name not in state.slots or not state.slots[name].load_ids:
        return Refused(NOT_RESIDENT, f"{name} is not there, or not proven")
    return replace(state, pins=state.pins | {name})


def unpin(state: Residency, name: str) -> Residency:
    return replace(state, pins=state.pins - {name})


def release_scenario(state: Residency, scenario: str) -> Residency:
    """Forget its head: its adapters may go, but for those that are pinned or leased."""
    return replace(state, current={each: head for each, head in state.current.items() if each != scenario})


# -- names and slots


def _put(state: Residency, name: str, slot: Slot) -> Residency:
    return replace(state, slots={**state.slots, name: slot})


def _without(slot: Slot, load_id: str) -> Slot:
    ids = tuple(each for each in slot.load_ids if each != load_id)
    return replace(slot, load_ids=ids, leaked=not ids)


def _leak(state: Residency, name: str, slot: Slot) -> Residency:
    return _put(state, name, replace(slot, load_ids=(), leaked=True))


def _holder(state: Residency, scenario: str, load_id: str) -> str:
    """The name of the slot that holds this load id, or waits for its commit."""
    found = (n for n, s in state.slots.items() if s.scenario == scenario and load_id in (*s.load_ids, s.awaits))
    return next(found, "")


def _proven(state: Residency, scenario: str, load_id: str) -> str:
    name = _holder(state, scenario, load_id)
    return name if name and load_id in state.slots[name].load_ids else ""


def _place(state: Residency, scenario: str, load_id: str, manifest: str) -> str:
    """The name under which this load is, or goes: what holds it, what holds its bytes, or its own."""
    return _holder(state, scenario, load_id) or alias(state, scenario, manifest) or adapter_name(scenario, load_id)


def _is_current(state: Residency, slot: Slot) -> bool:
    return state.current.get(slot.scenario) in slot.load_ids


def _in_use(state: Residency, name: str) -> bool:
    return name in state.pins or name in state.leases.values()


# -- capacity


def _over(state: Residency, name: str) -> int:
    """How many others must go before there is a place for this name."""
    others = len(state.slots.keys() - {name})
    return 0 if state.capacity is None else max(0, others + 1 - state.capacity)


def _spare(state: Residency, name: str, superseding: str | None) -> list[str]:
    """The others that may go, in the order in which they go."""

    def rank(each: str) -> tuple[bool, bool, int, str]:
        slot = state.slots[each]
        return not slot.leaked, _is_current(state, slot), slot.order, each

    others = state.slots.keys() - {name}
    return sorted((each for each in others if not protected(state, each, superseding)), key=rank)


def _too_small(state: Residency, scenario: str, name: str, spare: list[str]) -> Refused:
    """A place for each scenario that shares the engine and one for the next; more, if pins and leases hold more."""
    bound = sorted(state.slots.keys() - {name, *spare})
    sharing = len({*state.current, scenario})
    needed = max(sharing, len(bound)) + 1
    why = f"the engine holds {state.capacity} adapters at most, and may not unload {', '.join(bound)}"
    return Refused(CAPACITY, f"{why}; scenarios that share it: {sharing}; give it room for {needed}", needed)


def _not_current(state: Residency, scenario: str, load_id: str) -> Refused:
    return Refused(NOT_CURRENT, f"{scenario}: {load_id} is not current; {_head(state, scenario)}")


def _head(state: Residency, scenario: str) -> str:
    return f"the head is {state.current[scenario]}" if scenario in state.current else "it has no head"
