"""One engine boot with adapters, its agent, and a book of its own: an engine that refuses, stalls, loses and lies.

Knows: what an engine may do, and what must hold whatever it does. Must not know: how anything is decided.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Concatenate, Literal, NamedTuple, ParamSpec, get_args

import msgspec

from reef_bus.core.ids import adapter_name, parse_adapter_name
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

    def load(self, name: str, manifest: str, conduct: Load) -> bool:
        self.folders[name] = manifest
        if name in self.held or conduct == "refuse":  # it loads no name twice
            return False
        self.held[name] = f"half of {manifest}" if conduct == "half" else manifest
        return conduct != "late"

    def unload(self, name: str, conduct: Unload) -> bool:
        """True is a confirmation; that it knows no such name is one, too."""
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
    has last seen in the engine's memory with its own eyes, and their `order`; the open target's `place`; leases, pins.
    """

    def __init__(self, capacity: int | None) -> None:
        self.engine = Engine()
        self.state = Residency(capacity=capacity)
        self.number = 0
        self.checks = 0
        self.manifests: dict[str, str] = {}
        self.committed: set[tuple[str, str]] = set()
        self.heads: dict[str, str] = {}
        self.open: Target | None = None
        self.place = ""
        self.word: Callable[[], None] | None = None
        self.met: Counter[str] = Counter()
        self._forget()

    def _forget(self) -> None:
        self.names: dict[str, str] = {}
        self.proven: dict[str, str] = {}
        self.order: dict[str, int] = {}
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
        found = _decide(msgspec.structs.replace(self.state, leases={}), wanted)
        self.met["refused" if isinstance(found, Refused) else "alias" if found.held else "room"] += 1
        if isinstance(found, Room):
            self._mint(wanted)
            self.open, self.place = wanted, found.name
            self.fact(tentative, scenario, wanted.load_id, manifest)

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
            self.open, self.place = None, ""

    def commit(self) -> None:
        """Once it was staged; that it was lost meanwhile, nobody knows."""
        if self.open and self.open.load_id in self.names:
            self._commit(self.open)
            self.open, self.place = None, ""

    def commit_elsewhere(self, scenario: str, manifest: str) -> None:
        """A release that this boot was no member of."""
        if not self.open:
            wanted = Target(scenario, f"inc:{self.number + 1}", manifest)
            self._mint(wanted)
            self._commit(wanted)

    def _commit(self, wanted: Target) -> None:
        self.committed.add((wanted.scenario, wanted.load_id))
        self.heads[wanted.scenario] = wanted.load_id
        self._advance(self.names.get(wanted.load_id, ""))
        self.fact(activated, wanted.scenario, wanted.load_id)

    def _advance(self, name: str) -> None:
        self.order[name] = max(self.order.values(), default=0) + 1

    def delete(self, scenario: str) -> None:
        if not (self.open and self.open.scenario == scenario):
            self.heads.pop(scenario, None)
            self.fact(release_scenario, scenario)

    def reboot(self) -> None:
        folders = self.engine.folders
        self.engine, self.state = Engine(), Residency(capacity=self.state.capacity, current=self.state.current)
        self.engine.folders = folders
        self.open, self.place, self.word = None, "", None
        self._forget()

    # -- the agent

    def work(self, catch_up: str, load: Load, unload: Unload, late: bool) -> None:
        """One step towards the target, or else towards a head that is not there. It does one thing at a time."""
        wanted = self._wanted(catch_up)
        if not wanted or self.word:
            return
        found = _decide(self.state, wanted)
        if isinstance(found, Refused):
            self.met["waits"] += 1
        elif found.unload:
            self._make_room(wanted, found.unload[0], unload)
        else:
            self._load(wanted, found, load)
            if not late:
                self.say()

    def _load(self, wanted: Target, found: Room, conduct: Load) -> None:
        twice = found.name in self.engine.held.keys() - self.engine.unsaid
        assert found.held or not twice, f"{found.name} is loaded over itself"
        said = found.held or self.engine.load(found.name, wanted.manifest, conduct)
        self.met["proves"] += found.held
        self.word = lambda: self._report(wanted, found.name, said)

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

    def _report(self, wanted: Target, name: str, said: bool) -> None:
        """The agent hashes what is there. What should have been there and is not, was lost."""
        scenario, load_id, manifest, _ = wanted
        waited_for = wanted == self.open or self.heads.get(scenario) == load_id
        self.met["too late"] += not waited_for
        if name in self.proven and name not in self.engine.held:
            self._distrust(name)
            self.fact(unloaded, name)
        elif not (said and self.engine.held.get(name) == manifest):
            self.fact(load_failed, scenario, load_id)
        else:
            if waited_for:
                self.names[load_id], self.proven[name] = name, manifest
                self._advance(name)
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
        assert self.proven.keys() <= self.engine.held.keys(), "it still counts on what the engine has lost"
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
        self._probe(SCENARIOS[self.checks % len(SCENARIOS)], (*MANIFESTS, "m0")[self.checks % 4])
        self.checks += 1

    def _probe(self, scenario: str, manifest: str) -> None:
        """What would be decided now: for one scenario at a time, since this is asked after every step."""
        self._check_routes(scenario)
        for supersede in (False, True):
            self._check_room(Target(scenario, f"inc:{self.number + 1}", manifest, supersede))
        if wanted := self._wanted(scenario):
            self._check_room(wanted)

    def _check_routes(self, scenario: str) -> None:
        """Of every request that there could be now."""
        for number in {0, *range(max(0, self.number - 5), self.number + 1)}:
            load_id = f"inc:{number}"
            name = self.names.get(load_id, "") if (scenario, load_id) in self.committed else ""
            current = self.names.get(self.heads.get(scenario, ""), "")
            found = route(self.state, scenario, load_id)
            usable = bool(name) and (name == current or name in self.leases.values())
            assert isinstance(found, Refused) == (not usable and found is not None), (found, name, current)
            if found is None:
                assert number == 0 and scenario not in self.heads, "it fell back to the base model"
            elif isinstance(found, str):
                assert self._really_holds(found) == self.manifests[load_id]
                self.met["draining" if found != current else "routed"] += 1
            probe = lease(self.state, "probe", scenario, load_id)
            assert isinstance(probe, Residency) == (bool(name) and name == current), probe

    def _really_holds(self, name: str) -> str:
        """What a request for it is answered with: what was lost is loaded again, and nobody has seen it be lost."""
        assert name in self.proven, f"nobody saw {name} in the engine's memory"
        return self.engine.held.get(name) or self.engine.folders[name]

    def _check_room(self, wanted: Target) -> None:
        """There is room if the bytes are there, or if the adapters that may not go leave a place. Those that go are the
        first by the rules; and the capacity that a refusal asks for would do."""
        state, found = self.state, _decide(self.state, wanted)
        own = self.place if wanted == self.open else adapter_name(wanted.scenario, wanted.load_id)
        bound = self._bound(wanted) - {own}
        if isinstance(found, Refused):
            self.met[found.reason] += 1
        if isinstance(found, Room) and found.held:
            assert self.proven[found.name] == wanted.manifest and parse_adapter_name(found.name)[0] == wanted.scenario
        elif isinstance(found, Refused) and found.reason == "in_use":
            assert own in state.slots.keys() - self.proven.keys() and own in {*self.pins, *self.leases.values()}
        else:
            assert isinstance(found, Room) == (state.capacity is None or len(bound) < state.capacity), (found, bound)
            assert wanted.manifest not in self._bytes(wanted.scenario), f"{wanted} is resident"
            self._check_victims(wanted, found, bound | {own})
        self._check_size(wanted, found)

    def _bytes(self, scenario: str) -> set[str]:
        return {manifest for name, manifest in self.proven.items() if parse_adapter_name(name)[0] == scenario}

    def _bound(self, wanted: Target) -> set[str]:
        """The adapters that may not go."""
        current = {
            self.names.get(head, "")
            for scenario, head in self.heads.items()
            if not (wanted.supersede and scenario == wanted.scenario)
        }
        return {self.place, *current, *self.pins, *self.leases.values()} & self.state.slots.keys()

    def _check_victims(self, wanted: Target, found: Room | Refused, bound: set[str]) -> None:
        """What leaked, then what was activated longest ago, and the own current adapter last of all."""

        def rank(name: str) -> tuple[bool, bool, int]:
            current = name == self.names.get(self.heads.get(wanted.scenario, ""))
            return name in self.proven, current, self.order[name] if name in self.proven else 0

        if isinstance(found, Room):
            going = [name for name in found.unload if name != found.name]
            ranks = sorted(rank(name) for name in self.state.slots.keys() - bound)
            assert [rank(name) for name in going] == ranks[: len(going)]

    def _check_size(self, wanted: Target, found: Room | Refused) -> None:
        """The sizing rule: a place for each scenario and one more always do, but for pins, leases and open targets."""
        capacity = self.state.capacity
        if not isinstance(found, Refused) or found.reason != "capacity" or capacity is None:
            return
        assert self.open or self.pins or self.leases or capacity <= len({*self.heads, wanted.scenario})
        assert found.needed > max(capacity, len({*self.heads, wanted.scenario}))
        assert isinstance(_decide(msgspec.structs.replace(self.state, capacity=found.needed), wanted), Room)


def _decide(state: Residency, wanted: Target) -> Room | Refused:
    scenario, load_id, manifest, supersede = wanted
    return make_room(state, scenario, load_id, manifest, supersede=supersede)
