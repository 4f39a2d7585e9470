"""Adapter residency under every interleaving that hypothesis can think of, and what names of adapters promise.

Knows: what may happen to an engine and its agent. Must not know: what must hold then (`tests/adapters.py`).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from reef_bus.core.ids import LoadId, adapter_name, parse_adapter_name
from reef_bus.core.residency import served
from reef_bus.errors import ContractError
from tests.adapters import LOADS, MANIFESTS, SCENARIOS, UNLOADS, Boot, Load, Unload

CAPACITIES = (1, 2, 3, 4, 6, None)
LEASES = st.sampled_from(["r1", "r2"])


class Machine(RuleBasedStateMachine):
    boot: Boot

    @initialize(capacity=st.sampled_from(CAPACITIES))
    def begin(self, capacity: int | None) -> None:
        self.boot = Boot(capacity)

    @rule(scenario=st.sampled_from(SCENARIOS), manifest=st.sampled_from(MANIFESTS), supersede=st.booleans())
    def target(self, scenario: str, manifest: str, supersede: bool) -> None:
        self.boot.target(scenario, manifest, supersede)

    @rule(
        scenario=st.sampled_from(SCENARIOS),
        manifest=st.sampled_from(MANIFESTS),
        supersede=st.booleans(),
        end=st.booleans(),
    )
    def release_one(self, scenario: str, manifest: str, supersede: bool, end: bool) -> None:
        """Without faults, up to its commit or just before: so that there is something to lose."""
        self.boot.target(scenario, manifest, supersede)
        for _ in range(8):
            self.boot.work(scenario, "well", "well", False)
        if end:
            self.boot.commit()

    @rule(
        catch_up=st.sampled_from(SCENARIOS),
        load=st.sampled_from(LOADS),
        unload=st.sampled_from(UNLOADS),
        late=st.booleans(),
    )
    def work(self, catch_up: str, load: Load, unload: Unload, late: bool) -> None:
        self.boot.work(catch_up, load, unload, late)

    @rule()
    def say(self) -> None:
        self.boot.say()

    @rule()
    def retry(self) -> None:
        self.boot.retry()

    @rule()
    def halt(self) -> None:
        self.boot.halt()

    @rule()
    def commit(self) -> None:
        self.boot.commit()

    @rule(scenario=st.sampled_from(SCENARIOS), manifest=st.sampled_from(MANIFESTS))
    def commit_elsewhere(self, scenario: str, manifest: str) -> None:
        self.boot.commit_elsewhere(scenario, manifest)

    @rule(conduct=st.sampled_from(UNLOADS))
    def reconcile(self, conduct: Unload) -> None:
        self.boot.reconcile(conduct)

    @rule(which=st.integers(0, 9), back=st.booleans())
    def err(self, which: int, back: bool) -> None:
        """By itself the engine drops an adapter, or loads one that it had before."""
        names = sorted(self.boot.engine.folders)
        if names:
            (self.boot.revive if back else self.boot.lose)(names[which % len(names)])

    @rule(lease_id=LEASES, scenario=st.sampled_from(SCENARIOS), back=st.integers(0, 2), head=st.booleans())
    def lease(self, lease_id: str, scenario: str, back: int, head: bool) -> None:
        load_id = f"inc:{max(0, self.boot.number - back)}"
        self.boot.lease(lease_id, scenario, self.boot.heads.get(scenario, load_id) if head else load_id)

    @rule(lease_id=LEASES)
    def release(self, lease_id: str) -> None:
        self.boot.release(lease_id)

    @rule(which=st.integers(0, 9), on=st.booleans())
    def pin(self, which: int, on: bool) -> None:
        names = sorted(self.boot.engine.folders)
        if names:
            (self.boot.pin if on else self.boot.unpin)(names[which % len(names)])

    @rule(scenario=st.sampled_from(SCENARIOS))
    def delete(self, scenario: str) -> None:
        self.boot.delete(scenario)

    @rule()
    def reboot(self) -> None:
        self.boot.reboot()

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "boot"):
            self.boot.check()


TestMachine = Machine.TestCase
TestMachine.settings = settings(
    max_examples=200, stateful_step_count=40, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)


def wander(seed: int, steps: int = 1500) -> Boot:
    """Long runs of what the machine does in short ones."""
    chance = random.Random(seed)
    boot = Boot(CAPACITIES[seed % len(CAPACITIES)])
    for _ in range(steps):
        step(boot, chance)
        boot.check()
    return boot


def step(boot: Boot, chance: random.Random) -> None:
    scenario, manifest = chance.choice(SCENARIOS), chance.choice(MANIFESTS)
    name = chance.choice(sorted(boot.engine.folders) or [adapter_name("a", "inc:1")])
    lease_id, load_id = chance.choice(["r1", "r2"]), f"inc:{max(0, boot.number - chance.randrange(4))}"
    load, unload = (chance.choice(each) if chance.random() < 0.4 else "well" for each in (LOADS, UNLOADS))
    steps: list[tuple[float, Callable[[], None]]] = [
        (4, lambda: boot.target(scenario, manifest, chance.random() < 0.3)),
        (12, lambda: boot.work(scenario, load, unload, chance.random() < 0.2)),
        (4, boot.say),
        (4, boot.commit),
        (1, boot.halt),
        (1, boot.retry),
        (0.5, lambda: boot.commit_elsewhere(scenario, manifest)),
        (1, lambda: boot.reconcile(unload)),
        (0.5, lambda: boot.lose(name)),
        (0.5, lambda: boot.revive(name)),
        (0.5, lambda: boot.lose(served(boot.state, scenario))),
        (3, lambda: boot.lease(lease_id, scenario, boot.heads.get(scenario, load_id))),
        (1, lambda: boot.lease(lease_id, scenario, load_id)),
        (3, lambda: boot.release(lease_id)),
        (0.3, lambda: boot.pin(name)),
        (0.6, lambda: boot.unpin(name)),
        (0.1, lambda: boot.delete(scenario)),
        (0.05, boot.reboot),
    ]
    weights, moves = zip(*steps, strict=True)
    chance.choices(moves, weights)[0]()


MET = {
    *("room", "alias", "refused", "waits", "proves", "superseded", "too late", "routed", "draining", "leased"),
    *("unload well", "unload leak", "unload late", "unload lie", "strays", "strays in use", "lost", "revived"),
    *("capacity", "in_use", "not_resident", "not_current", "not_committed", "taken"),
}


def test_long_runs_keep_every_rule_and_meet_everything() -> None:
    """What no run ever meets is not tested by any."""
    met: Counter[str] = Counter()
    for seed in range(12):
        met += wander(seed).met
    assert MET - met.keys() == set()


# -- names

TEXT = st.text(max_size=40)
LOAD_IDS = st.builds(LoadId, st.text(min_size=1, max_size=20), st.integers(0, 10**12)).map(str)


@given(TEXT, LOAD_IDS)
def test_a_name_gives_back_its_scenario_and_load_id_and_stands_in_urls_and_folders(scenario: str, load_id: str) -> None:
    name = adapter_name(scenario, load_id)
    assert parse_adapter_name(name) == (scenario, load_id)
    assert set(name) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.")
    assert len(name) <= 255


PIECES = ["reef-adapter-", ".", "cw", "k3v9", "b64-", "YTpi", "12", "012", "-", "=", ":", "/", "é", " "]
NAMES = st.one_of(st.text(max_size=60), st.lists(st.sampled_from(PIECES), max_size=8).map("".join))


@given(NAMES)
def test_what_is_parsed_is_spelled_in_this_way_alone(text: str) -> None:
    """So no two names mean one adapter, and every other text is refused."""
    try:
        scenario, load_id = parse_adapter_name(text)
    except ContractError:
        return
    assert adapter_name(scenario, load_id) == text


@given(st.lists(st.tuples(TEXT, LOAD_IDS), max_size=20, unique=True))
def test_no_two_adapters_have_one_name(adapters: list[tuple[str, str]]) -> None:
    assert len({adapter_name(*each) for each in adapters}) == len(adapters)
