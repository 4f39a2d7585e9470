"""Replaying equals live, on every prefix, from any snapshot (protocol.md, rule 1 and invariant 9).

Knows: histories that faults have been through. Must not know: what they mean.
"""

from __future__ import annotations

import random
from functools import cache

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from reef_bus.core.world import World, fold
from reef_bus.envelope import decode, from_json, headers, payload, to_json
from reef_bus.events import Draft, Recorded
from tests.fleet import FAULTS, Fleet
from tests.simulation.deployment import Deployment, Shape, simulate
from tests.simulation.faults import Faults

SEEDS = st.integers(0, 9)
WHOLE = 8  # seeds from here on are of deployments that train adapters


@cache
def history(seed: int) -> tuple[Recorded, ...]:
    """A log of a run with crashes, void events, aborted attempts and halts."""
    if seed >= WHOLE:
        return adapters(seed - WHOLE)
    chance, fleet = random.Random(seed), Fleet("cluster" if seed % 2 else "single")
    while len(fleet.log) < 150:
        actor = chance.choice(fleet.actors)
        fleet.catch_up(actor, chance.choice([2, 99]))
        fleet.act(actor, chance.choice(FAULTS) if chance.random() < 0.4 else "none")
        if chance.random() < 0.03:
            fleet.crash(chance.choice(fleet.actors))
        if chance.random() < 0.1:
            fleet.land()
        if chance.random() < 0.03:
            fleet.wait(31)
    return tuple(fleet.log)


def adapters(seed: int) -> tuple[Recorded, ...]:
    """The log of a simulated deployment of adapters in which every kind of fault befalls these."""
    kept: list[Deployment] = []
    faults = Faults(no_load=0.1, late_load=0.1, another_load=0.1, leak=0.3, lose=0.5, crash=0.3, late=0.1)
    shape = Shape(adapters=("math", "code"), jobs=9, eager=True, asks=(("RollbackRequested", "ReleaseCommitted"),) * 3)
    simulate(seed, faults, shape, kept.append)
    return tuple(kept[0].truth.log)


def folded(events: tuple[Recorded, ...], world: World | None = None) -> World:
    world = world or World()
    for recorded in events:
        fold(world, recorded)
    return world


def test_the_histories_are_worth_replaying() -> None:
    names = {recorded.name for seed in range(8) for recorded in history(seed)}
    assert {"TransferAborted", "PublicationHalted", "EngineExcluded", "ReceiverFailed", "TrainerRestored"} <= names
    assert sum(folded(history(seed)).void for seed in range(8)) > 8
    of_adapters = {recorded.name for seed in (8, 9) for recorded in history(seed)}
    assert {"AdapterRegistered", "EngineStaged", "AdapterUnloaded", "AdapterLeaked", "ReleaseCommitted"} <= of_adapters
    assert min(len(history(seed)) for seed in (8, 9)) >= 150


def test_replaying_equals_live_on_every_prefix() -> None:
    for events in (history(0), history(WHOLE)):
        live = World()
        for length, recorded in enumerate(events, 1):
            fold(live, recorded)
            assert folded(events[:length]) == live, f"after event {length}"


@settings(max_examples=60)
@given(seed=SEEDS, at=st.integers(0, 150))
def test_a_snapshot_goes_on_as_if_nothing_had_happened(seed: int, at: int) -> None:
    """Decoded from its bytes at any point, the world folds on to the same bytes."""
    events = history(seed)
    snapshot = msgspec.json.encode(folded(events[:at]))
    again = msgspec.json.decode(snapshot, type=World)
    assert msgspec.json.encode(again) == snapshot
    live = folded(events)
    assert folded(events[at:], again) == live
    packed = msgspec.msgpack.decode(msgspec.msgpack.encode(folded(events[:at])), type=World)
    assert folded(events[at:], packed) == live


@settings(max_examples=30)
@given(seed=SEEDS, at=st.integers(1, 150))
def test_the_wire_and_the_export_change_nothing(seed: int, at: int) -> None:
    events = history(seed)
    recorded = events[at - 1]
    draft = Draft(event=recorded.event, writer=recorded.writer, boot=recorded.boot, cause=recorded.cause)
    draft = msgspec.structs.replace(draft, correlation=recorded.correlation)
    header = headers(draft, recorded.id, recorded.prev, recorded.subject, "")
    assert decode(recorded.seq, recorded.time, recorded.subject, header, payload(recorded.event)) == recorded
    assert from_json(msgspec.json.decode(msgspec.json.encode(to_json(recorded)))) == recorded


@settings(max_examples=30)
@given(seed=SEEDS, at=st.integers(0, 149))
def test_folding_shares_nothing_between_worlds(seed: int, at: int) -> None:
    """One world goes on, the other stays: what it holds may not move."""
    events = history(seed)
    early = folded(events[:at])
    before = msgspec.json.encode(early)
    folded(events)
    assert msgspec.json.encode(early) == before
