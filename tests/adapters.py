"""One engine boot with adapters, its agent, and a book of its own: an engine that refuses, stalls, loses and lies.

Knows: what an engine may do, and what must hold whatever it does. Must not know: how anything is decided.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Concatenate, Literal, NamedTuple, ParamSpec, get_args

import msgspec

from reef_bus.core.ids import parse_adapter_name
from reef_bus.core.residency import (
    Refused,
    Residency,
    Room,
    activated,
    lease,
    load_failed,
    loaded,
    make_room,
    pin,
    reconcile,
    release,
    release_scenario,
    route,
    served,
    tentative,
    unload_failed,
    unloaded,
    unpin,
    withdrawn,
)

P = ParamSpec("P")
Load = Literal["well", "refuse", "late", "half"]
Unload = Literal["well", "leak", "late", "lie"]
LOADS: tuple[Load, ...] = get_args(Load)
"""It does as it was asked; says no; says no after it has loaded; loads something else."""
UNLOADS: tuple[Unload, ...] = get_args(Unload)
"""It does as it was asked; says no; says no after it has unloaded; says yes and keeps it."""
SCENARIOS = ("a", "b", "c")
MANIFESTS = ("m1", "m2", "m3")
"""Few, so that bytes come back."""


class Engine:
    """What it really holds, by name. `unsaid` are the names that it holds against its word."""

    def __init__(self) -> None:
        self.held: dict[str, str] = {}
        self.folders: dict[str, str] = {}
        self.unsaid: set[str] = set()
        self.calls = 0

    def load(self, name: str, manifest: str, conduct: Load) -> bool:
        self.calls += 1
        self.folders[name] = manifest
        if name in self.held or conduct == "refuse":  # it loads no name twice
            return False
        self.held[name] = f"half of {manifest}" if conduct == "half" else manifest
        return conduct != "late"

    def unload(self, name: str, conduct: Unload) -> bool:
        """True is a confirmation; that it knows no such name is one, too."""
        self.calls += 1
        if name not in self.held:
            return True
        if conduct == "lie":
            self.unsaid.add(name)
        elif conduct != "leak":
            self.lose(name)
        return conduct in ("well", "lie")

    def lose(self, name: str) -> None:
        self.held.pop(name, None)
        self.unsaid.discard(name)

    def answer(self, name: str) -> str:
        """A request is no check: it loads what was unloaded, or lost, again from its folder."""
        if name not in self.held:
            self.held[name] = self.folders[name]
            self.unsaid.add(name)
        return self.held[name]


class Target(NamedTuple):
    scenario: str
    load_id: str
    manifest: str
    supersede: bool = False


class Boot:
    """One boot of an engine, its agent, and the facts of the log that concern it.

    The book: `manifests` by load id, `committed`, `heads`; `names` by load id and `proven` by name, for what the agent
    has last seen in the engine's memory with its own eyes; `leases`, `pins`.
    """

    def __init__(self, capacity: int | None) -> None:
        self.engine = Engine()
        self.state = Residency(capacity=capacity)
        self.number = 0
        self.manifests: dict[str, str] = {}
        self.committed: set[tuple[str, str]] = set()
        self.heads: dict[str, str] = {}
        self.open: Target | None = None
        self.word: Callable[[], None] | None = None
        self.met: Counter[str] = Counter()
        self._forget()

    def _forget(self) -> None:
        self.names: dict[str, str] = {}
        self.proven: dict[str, str] = {}
        self.leases: dict[str, str] = {}
        self.pins: set[str] = set()

    def fact(
        self, change: Callable[Concatenate[Residency, P], Residency | Refused], *args: P.args, **kwargs: P.kwargs
    ) -> Refused | None:
        """Every change goes through here: states are values, and a refusal is none."""
        before = msgspec.json.encode(self.state)
        found = change(self.state, *args, **kwargs)
        assert msgspec.json.encode(self.state) == before, f"{change.__name__} changed its argument"
        if isinstance(found, Refused):
            self.met[found.reason] += 1
            return found
        self.state = found
        return None

    # -- the log

    def target(self, scenario: str, manifest: str, supersede: bool) -> None:
        """A publisher decides, and it knows of no lease."""
        if self.open:
            return
        wanted = Target(scenario, f"inc:{self.number + 1}", manifest, supersede)
        known = msgspec.structs.replace(self.state, leases={})
        calls = self.engine.calls
        found = self._decide(known, wanted)
        self._check_decision(known, wanted, found)
        assert self.engine.calls == calls, "a decision moved something"
        if isinstance(found, Room):
            self._mint(wanted)
            self.open = wanted
            self.fact(tentative, scenario, wanted.load_id, manifest)

    def _decide(self, state: Residency, wanted: Target) -> Room | Refused:
        scenario, load_id, manifest, supersede = wanted
        found = make_room(state, scenario, load_id, manifest, supersede=supersede)
        if isinstance(found, Refused):
            self.met[found.reason] += 1
        if isinstance(found, Refused) and found.reason == "capacity":
            assert state.capacity is not None and found.needed > state.capacity
            enough = msgspec.structs.replace(state, capacity=found.needed)
            assert isinstance(make_room(enough, scenario, load_id, manifest, supersede=supersede), Room), found
        return found

    def _check_decision(self, state: Residency, wanted: Target, found: Room | Refused) -> None:
        """There is room if the bytes are there, or the adapters that may not go leave a place."""
        there = any(
            self.proven.get(name) == wanted.manifest and parse_adapter_name(name)[0] == wanted.scenario
            for name in self.names.values()
        )
        bound = self.pins & state.slots.keys()
        for scenario, head in self.heads.items():
            if head in self.names and not (wanted.supersede and scenario == wanted.scenario):
                bound.add(self.names[head])
        fits = state.capacity is None or len(bound) < state.capacity
        assert isinstance(found, Room) == (there or fits), (found, bound)
        self.met["refused" if isinstance(found, Refused) else "alias" if found.held else "room"] += 1

    def _mint(self, wanted: Target) -> None:
        self.number += 1
        self.manifests[wanted.load_id] = wanted.manifest

    def retry(self) -> None:
        if self.open:
            self.fact(tentative, self.open.scenario, self.open.load_id, self.open.manifest)

    def halt(self) -> None:
        if self.open:
            self._disprove(self.open.load_id)
            self.fact(withdrawn, self.open.scenario, self.open.load_id)
            self.open = None

    def commit(self) -> None:
        """Once it was staged; that it was lost meanwhile, nobody knows."""
        if self.open and self.open.load_id in self.names:
            self._commit(self.open)
            self.open = None

    def commit_elsewhere(self, scenario: str, manifest: str) -> None:
        """A release that this boot was no member of."""
        if not self.open:
            wanted = Target(scenario, f"inc:{self.number + 1}", manifest)
            self._mint(wanted)
            self._commit(wanted)

    def _commit(self, wanted: Target) -> None:
        self.committed.add((wanted.scenario, wanted.load_id))
        self.heads[wanted.scenario] = wanted.load_id
        self.fact(activated, wanted.scenario, wanted.load_id)

    def delete(self, scenario: str) -> None:
        if not (self.open and self.open.scenario == scenario):
            self.heads.pop(scenario, None)
            self.fact(release_scenario, scenario)

    def reboot(self) -> None:
        folders = self.engine.folders
        self.engine, self.state = Engine(), Residency(capacity=self.state.capacity, current=self.state.current)
        self.engine.folders = folders
        self.open = self.word = None
        self._forget()

    # -- the agent

    def work(self, catch_up: str, load: Load, unload: Unload, late: bool) -> None:
        """One step towards the target, or else towards a head that is not there. It does one thing at a time."""
        wanted = self._wanted(catch_up)
        if not wanted or self.word:
            return
        found = self._decide(self.state, wanted)
        if isinstance(found, Refused):
            self.met["waits"] += 1
        elif found.held:
            self._prove(wanted, found.name)
        elif found.unload:
            self._make_room(wanted, found.unload[0], unload)
        else:
            said = self.engine.load(found.name, wanted.manifest, load)
            self.word = lambda: self._report(wanted, found.name, said)
            if not late:
                self.say()

    def _wanted(self, catch_up: str) -> Target | None:
        if self.open and self.open.load_id not in self.names:
            return self.open
        head = self.heads.get(catch_up, "")
        return Target(catch_up, head, self.manifests[head]) if head and head not in self.names else None

    def say(self) -> None:
        """What the agent has seen comes onto the log, which may have gone on meanwhile."""
        if word := self.word:
            self.word = None
            word()

    def _prove(self, wanted: Target, name: str) -> None:
        """The bytes should be there already: the agent hashes them again."""
        self.met["proves"] += 1
        if name not in self.engine.held:
            self._distrust(name)
            self.fact(unloaded, name)
        else:
            self._report(wanted, name, True)

    def _report(self, wanted: Target, name: str, said: bool) -> None:
        scenario, load_id, manifest, _ = wanted
        waited_for = wanted == self.open or self.heads.get(scenario) == load_id
        if not (said and self.engine.held.get(name) == manifest):
            self.fact(load_failed, scenario, load_id)
            return
        if waited_for:
            self.names[load_id], self.proven[name] = name, manifest
        self.met["too late"] += not waited_for
        self.fact(loaded, scenario, load_id, manifest)

    def _make_room(self, wanted: Target, name: str, conduct: Unload) -> None:
        """A target for which no room could be made after all has failed; it may be tried again."""
        if not self.unload(name, conduct, wanted) and wanted == self.open:
            self.fact(load_failed, wanted.scenario, wanted.load_id)

    def unload(self, name: str, conduct: Unload, wanted: Target | None = None) -> bool:
        self._check_victim(name, wanted)
        said = self.engine.unload(name, conduct)
        self._distrust(name)
        self.fact(unloaded if said else unload_failed, name)
        self.met[f"unload {conduct}"] += 1
        return said

    def _check_victim(self, name: str, wanted: Target | None) -> None:
        assert name not in self.leases.values(), f"{name} is leased"
        assert name not in self.pins, f"{name} is pinned"
        current = [scenario for scenario, head in self.heads.items() if self.names.get(head) == name]
        superseded = [wanted.scenario] if wanted and wanted.supersede else []
        assert not current or current == superseded, f"{name} is the current adapter of {current}"
        assert not (self.open and self.names.get(self.open.load_id) == name), f"{name} awaits its commit"
        self.met["superseded"] += bool(current)

    def _distrust(self, name: str) -> None:
        self.proven.pop(name, None)
        self.names = {load_id: each for load_id, each in self.names.items() if each != name}

    def _disprove(self, load_id: str) -> None:
        name = self.names.pop(load_id, "")
        if name not in self.names.values():
            self.proven.pop(name, None)

    def reconcile(self, conduct: Unload) -> None:
        """Afterwards whatever it holds is known, be it as something that nobody may use."""
        if self.word:
            return
        drift = reconcile(self.state, self.engine.held)
        for name in drift.lost:
            self._distrust(name)
            self.fact(unloaded, name)
        for name in drift.leaked:
            self.fact(unload_failed, name)
        for name in drift.unload:
            self.unload(name, conduct)
        self.met["strays"] += len(drift.unload)
        self.met["strays in use"] += len(drift.leaked)
        self.met["lost"] += len(drift.lost)
        self._check_known(lied=drift.unload if conduct == "lie" else ())

    def _check_known(self, lied: tuple[str, ...]) -> None:
        for name in self.engine.held.keys() - set(lied):
            slot = self.state.slots[name]
            assert slot.leaked or slot.awaits or name in self.proven, f"{name} is held, and neither proven nor leaked"
            assert bool(slot.load_ids) == (name in self.proven)

    # -- the engine by itself

    def lose(self, name: str) -> None:
        if not self.word:
            self.engine.lose(name)

    def revive(self, name: str) -> None:
        """Somebody else's request names what was unloaded."""
        if name in self.engine.folders:
            self.met["revived"] += name not in self.engine.held
            self.engine.answer(name)

    # -- requests

    def lease(self, lease_id: str, scenario: str, load_id: str) -> None:
        current = self.names.get(self.heads.get(scenario, ""), "")
        has_it = bool(current) and self.names.get(load_id) == current and (scenario, load_id) in self.committed
        refused = self.fact(lease, lease_id, scenario, load_id)
        assert (refused is None) == (has_it and self.leases.get(lease_id, current) == current), refused
        if refused is None:
            self.leases[lease_id] = current
            self.met["leased"] += 1

    def release(self, lease_id: str) -> None:
        self.leases.pop(lease_id, None)
        self.fact(release, lease_id)

    def ask(self, scenario: str) -> None:
        """For the base model, and for everything that there was lately."""
        for number in {0, *range(max(0, self.number - 20), self.number + 1)}:
            self._ask(scenario, f"inc:{number}")

    def _ask(self, scenario: str, load_id: str) -> None:
        found = route(self.state, scenario, load_id)
        if found is None:
            assert load_id == "inc:0" and scenario not in self.heads, "it fell back to the base model"
        elif isinstance(found, str):
            assert (scenario, load_id) in self.committed, f"{load_id} was never committed"
            current = self.names.get(self.heads.get(scenario, ""))
            assert found == current or found in self.leases.values(), f"{found} is neither current nor leased"
            assert found in self.proven, f"nobody saw {found} in the engine's memory"
            assert self.engine.answer(found) == self.manifests[load_id]
            self.met["draining" if found != current else "answered"] += 1

    def pin(self, name: str) -> None:
        if self.fact(pin, name) is None:
            self.pins.add(name)

    def unpin(self, name: str) -> None:
        self.pins.discard(name)
        self.fact(unpin, name)

    # -- what must hold after every step

    def check(self) -> None:
        state, engine = self.state, self.engine
        honest = engine.held.keys() - engine.unsaid
        assert state.capacity is None or len(honest) <= state.capacity, "the engine holds more than it can"
        assert self.word or honest <= state.slots.keys(), "the engine holds what nobody knows of"
        assert (state.current, state.leases, state.pins) == (self.heads, self.leases, self.pins)
        assert {name for name, slot in state.slots.items() if slot.load_ids} == self.proven.keys()
        for scenario in SCENARIOS:
            assert served(state, scenario) == self.names.get(self.heads.get(scenario, ""), "")
            self._check_size(scenario)

    def _check_size(self, scenario: str) -> None:
        """The sizing rule: a place for each scenario and one more always do, but for pins, leases and open targets."""
        enough = self.state.capacity is None or self.state.capacity > len({*self.heads, scenario})
        if enough and not (self.open or self.pins or self.leases):
            assert isinstance(make_room(self.state, scenario, f"inc:{self.number + 1}", "m0"), Room)
