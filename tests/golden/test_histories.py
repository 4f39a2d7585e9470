"""Histories captured from real runs with `reef-bus export`: today's code must read them as they were meant then.

Knows: the JSONL of LOG events, and beside it what was counted in it with a JSON reader alone. Never regenerate any to
make a test pass: a legitimate change of outcome is a new file, and a line under "Wire contract" in the CHANGELOG.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from reef_bus.core.effects import Append, Policy
from reef_bus.core.invariants import check
from reef_bus.core.reactions import publisher
from reef_bus.core.serving import serving
from reef_bus.core.world import World, fold
from reef_bus.envelope import event_id, from_json
from reef_bus.events import Recorded, ReleaseEvent

HISTORIES = sorted((Path(__file__).parent / "histories").glob("*.jsonl"))


def read(path: Path) -> list[Recorded]:
    return [from_json(json.loads(line)) for line in path.read_text().splitlines()]


def expected(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.with_suffix(".expected.json").read_text())
    return found


@pytest.fixture(params=HISTORIES, ids=lambda path: path.stem)
def path(request: pytest.FixtureRequest) -> Path:
    found: Path = request.param
    return found


def test_the_history_folds_to_what_was_counted_in_it(path: Path) -> None:
    world, wanted = World(), expected(path)
    for recorded in read(path):
        assert fold(world, recorded) == ""
    head = world.publications.head
    assert head is not None
    assert {
        "events": world.seq,
        "incarnation": world.incarnation,
        "releases": len(world.publications.releases) - 1,
        "head": head.load_id,
        "head_manifest": head.manifest,
        "boots": {name: engine.boot for name, engine in world.membership.engines.items()},
        "trainer": world.training.boot,
        "jobs": world.training.dispatched,
        "void": world.void,
    } == {key: wanted[key] for key in wanted if key not in ("aborted", "lost")}
    assert [engine.id for engine in serving(world)] == sorted(wanted["boots"])


def test_every_prefix_folds_alike_whether_live_or_from_a_snapshot(path: Path) -> None:
    live = World()
    for recorded in read(path):
        copy = msgspec.msgpack.decode(msgspec.msgpack.encode(live), type=World)
        fold(live, recorded)
        fold(copy, recorded)
        assert copy == live


def test_publishers_would_decide_again_as_they_did(path: Path) -> None:
    """At the moment before each event of the release family, that event is what is owed."""
    world, policy, decided = World(), Policy(), 0
    for recorded in read(path):
        if isinstance(recorded.event, ReleaseEvent):
            owed = [d.effect.event for d in publisher(world, policy, recorded.time) if isinstance(d.effect, Append)]
            assert recorded.event in owed, recorded.seq
            decided += 1
        fold(world, recorded)
    assert decided == 2 * expected(path)["releases"] + len(expected(path)["aborted"])


def test_the_ids_are_what_their_content_says(path: Path) -> None:
    """Independent of the writer: family, prev, name, boot and payload give the id that the log holds."""
    for line in map(json.loads, path.read_text().splitlines()):
        r, stored = from_json(line), msgspec.json.encode(line["data"])
        assert r.id == event_id(r.event.chain, r.prev, r.name, r.boot, stored), r.seq


def test_the_audit_is_clean(path: Path) -> None:
    assert [v.text for v in check(read(path), [], None).violations] == []
