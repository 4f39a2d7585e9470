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

SEEDS = st.integers(0, 7)


@cache
def history(seed: int) -> tuple[Recorded, ...]:
    """A log of a run with crashes, void events, aborted attempts and halts."""
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


def folded(events: tuple[Recorded, ...], world: World | None = None) -> World:
    world = world or World()
    for recorded in events:
        fold(world, recorded)
    return world


def test_the_histories_are_worth_replaying() -> None:
    names = {recorded.name for seed in range(8) for recorded in history(seed)}
    assert {"TransferAborted", "PublicationHalted", "EngineExcluded", "ReceiverFailed", "TrainerRestored"} <= names
    assert sum(folded(history(seed)).void for seed in range(8)) > 8


def test_replaying_equals_live_on_every_prefix() -> None:
    events, live = history(0), World()
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
