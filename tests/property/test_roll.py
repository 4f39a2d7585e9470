"""Rolling a quiet log changes no decision: a log that goes on from a start owes what the whole log would owe.

Knows: histories that faults have been through, and what a roll does to sequences and chains. Must not know: what a
start holds, or which of it matters: that is what is asked.
"""

from __future__ import annotations

import copy
import random
from functools import cache
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reef_bus.core import reactions
from reef_bus.core.effects import Me, Policy
from reef_bus.core.serving import may_generate
from reef_bus.core.start import compact, decode_start, encode_start, unrest
from reef_bus.core.world import World, fold, lag
from reef_bus.events import Blob, ComponentStarted, Draft, LogOpened, Recorded
from tests.fleet import FAULTS, Fleet
from tests.property.test_replay import folded, history

SEEDS = st.integers(0, 7)
JOINS = ("TrainerJoined", "EngineJoined")


@cache
def quiet(seed: int) -> tuple[int, ...]:
    """The sequences of that history after which nothing is open."""
    world, found = World(), []
    for recorded in history(seed):
        fold(world, recorded)
        if not unrest(world.training, world.publications, world.requests, world.components):
            found.append(recorded.seq)
    return tuple(found)


def grown(seed: int, at: int) -> Fleet:
    """The history up to `at`, everything stopped there, everything joined anew, and on through more faults."""
    chance, fleet = random.Random(seed), Fleet("cluster" if seed % 2 else "single")
    for recorded in history(seed)[1:at]:
        fleet.scribe.now = recorded.time - 1_000_000
        fleet._store(_draft(recorded), recorded.prev)
    fleet.jobs = 1000  # their names stay new
    began = ComponentStarted(component="c", pid=1, starts=1)
    fleet._store(Draft(event=began, writer="s", boot="s"), fleet.scribe.tails["deployment"])
    for actor in fleet.actors:
        actor.starts = 1000
        fleet.crash(actor)
    for actor in (fleet.trainer, *fleet.engines):
        fleet.catch_up(actor)
        fleet.act(actor)
    for _ in range(120):
        actor = chance.choice(fleet.actors)
        fleet.catch_up(actor, chance.choice([2, 99]))
        fleet.act(actor, chance.choice(FAULTS) if chance.random() < 0.3 else "none")
        if chance.random() < 0.03:
            fleet.crash(chance.choice(fleet.actors))
        if chance.random() < 0.03:
            fleet.wait(31)
    return fleet


def _draft(recorded: Recorded) -> Draft:
    known = {name: getattr(recorded, name) for name in ("event", "writer", "boot", "cause", "correlation")}
    return Draft(**known)


def opening(world: World, at: Recorded) -> tuple[LogOpened, World]:
    """The first event of the log that goes on after `world`, and the empty world that its reader begins with."""
    data = encode_start(compact(world.seq, world.last_id, world.training, world.publications))
    event = LogOpened(
        incarnation="inc",
        rules=1,
        start=Blob("sha-of-start", len(data)),
        predecessor="REEF_test_LOG",
        predecessor_seq=world.seq,
        predecessor_id=world.last_id,
    )
    return event, World(start=decode_start(data))


def rolled(fleet: Fleet, at: int) -> tuple[World, list[Recorded]]:
    """The same events on a log of their own: the broker numbers them on, and its families begin anew."""
    log = fleet.log
    event, world = opening(folded(tuple(log[:at])), log[at - 1])
    first = msgspec.structs.replace(log[at], event=event, prev=0)
    return world, [first, *(msgspec.structs.replace(r, prev=r.prev if r.prev > at else 0) for r in log[at + 1 :])]


def decided(world: World, now: int, fleet: Fleet) -> dict[str, Any]:
    """Everything that anybody would do now, keys included, and who may generate."""
    silent = frozenset(e.boot for e in world.membership.engines.values() if e.boot not in _boots(fleet))
    by_key = sorted(reactions.publisher(world, Policy(), now, silent), key=lambda debt: debt.key)
    owed: dict[str, Any] = {"publisher": by_key}  # who joined first is who is excluded first: no decision
    owed["trainer"] = reactions.trainer(world, Me("t", world.training.boot))
    for engine in fleet.engines:
        found = world.membership.engines[engine.name]
        owed[engine.name] = reactions.engine(world, Me(engine.name, found.boot), Policy().deadlines)
        owed[f"{engine.name} serves"] = may_generate(world, engine.name, found.boot)
    base = world.training.base
    owed["lags"] = {load_id: lag(world, load_id, base, 2) for load_id in world.publications.releases}
    return copy.deepcopy(owed)


def _boots(fleet: Fleet) -> set[str]:
    return {engine.boot for engine in fleet.engines}


@settings(max_examples=40)
@given(seed=SEEDS, data=st.data())
def test_a_rolled_log_decides_as_the_whole_one(seed: int, data: st.DataObject) -> None:
    at = data.draw(st.sampled_from(quiet(seed)))
    fleet = grown(seed, at)
    whole, (world, log) = folded(tuple(fleet.log[:at])), rolled(fleet, at)
    joined = len(fleet.engines) + 1
    for recorded, again in zip(fleet.log[at:], log, strict=True):
        assert fold(whole, recorded) == fold(world, again), f"{recorded.seq} {recorded.name}"
        assert world.queue == whole.queue, f"{recorded.seq} {recorded.name}"
        joined -= recorded.name in JOINS
        if joined <= 0:
            assert decided(world, recorded.time, fleet) == decided(whole, recorded.time, fleet), recorded.seq
    assert joined <= 0, "nobody joined: the run tests nothing"
    assert (world.seq, world.publications.head) == (whole.seq, whole.publications.head)


@settings(max_examples=40)
@given(seed=SEEDS, data=st.data())
def test_to_roll_a_rolled_log_gives_the_same_start_again(seed: int, data: st.DataObject) -> None:
    """Nothing is lost from roll to roll, and nothing that had been dropped comes back."""
    at = data.draw(st.sampled_from(quiet(seed)))
    log = history(seed)
    before = folded(log[:at])
    event, world = opening(before, log[at - 1])
    fold(world, msgspec.structs.replace(log[at - 1], seq=at + 1, id="opened", prev=0, event=event, subject="s"))
    first = compact(at, before.last_id, before.training, before.publications)
    second = compact(at + 1, "opened", world.training, world.publications)
    assert msgspec.structs.replace(second, seq=first.seq, id=first.id) == first


def test_the_histories_have_what_a_start_must_not_lose() -> None:
    starts = [
        compact(at, "", world.training, world.publications)
        for seed in range(8)
        for at in quiet(seed)
        for world in [folded(history(seed)[:at])]
    ]
    assert any(len(start.releases) > 3 for start in starts)
    assert any(set(start.selected) - set(start.ended) for start in starts), "no roll meets a candidate that waits"
    assert any("halted" in start.ended.values() or "refused" in start.ended.values() for start in starts)


@pytest.mark.parametrize("seed", range(8))
def test_a_restored_log_ends_what_was_open(seed: int) -> None:
    """Every prefix can be restored: what was open is over, and whoever waits for it does not."""
    world = World()
    for recorded in history(seed):
        fold(world, recorded)
        start = compact(world.seq, world.last_id, world.training, world.publications)
        event, again = opening(world, recorded)
        opened = msgspec.structs.replace(recorded, seq=world.seq + 1, id="opened", prev=0, event=event, subject="s")
        assert fold(again, opened) == ""
        assert (again.training.job, again.publications.open, again.tails["deployment"].open) == (None, None, "")
        assert again.training.batches == world.training.batches
        waiting = [c for c in again.training.selected if c not in again.publications.ended]
        assert again.queue == waiting
        if world.publications.open:
            candidate = world.publications.open.candidate
            assert again.publications.ended.get(candidate, "halted") == "halted"
            assert candidate not in waiting and again.publications.sequence == world.publications.sequence
        assert start.head == (world.publications.head.load_id if world.publications.head else "")
