"""Starts of logs, as earlier versions have written them: today's code must read them as they were meant then.

Knows: the blobs of two logs, and what is in them. Must not know: how one is written today. Never regenerate any to make
a test pass: a start is all that is left of the log before it.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from reef_bus.core.start import Start, begin, decode_start, last_batches, why_not
from reef_bus.core.world import World
from reef_bus.events import Blob

STARTS = Path(__file__).parent / "starts"
DONE = {"floor": 4, "taken": [6, 9]}
"""What the last batch had left in either, of all scenarios that there are."""


def read(name: str) -> Start:
    data = (STARTS / f"{name}.msgpack").read_bytes()
    plain = msgspec.msgpack.decode(data)
    assert {key: plain[key] for key in DONE} == DONE and plain["format"] == int(name[0])
    return decode_start(data)


@pytest.mark.parametrize(
    ("name", "batches"),
    [
        ("1-whole-model", {"": "sha-of-batch-job-c1"}),
        ("2-adapters", dict.fromkeys(("math", "code"), "sha-of-batch-job-c1")),
    ],
)
def test_what_was_consumed_of_every_scenario_is_known(name: str, batches: dict[str, str]) -> None:
    start, world = read(name), World()
    assert why_not(start) == ""
    begin(world.training, world.publications, start)
    assert world.training.batches == {scenario: Blob(digest, 10) for scenario, digest in batches.items()}
    found = last_batches(start)
    assert {scenario: (last.floor, last.taken) for scenario, last in found.items()} == dict.fromkeys(
        batches, (4, (6, 9))
    )


def test_heads_and_chains_are_those_of_then() -> None:
    world = World()
    begin(world.training, world.publications, read("2-adapters"))
    heads = {scenario: head.load_id for scenario, head in world.publications.adapters.items()}
    bases = {scenario: adapter.base for scenario, adapter in world.training.adapters.items()}
    assert (heads, bases) == ({"math": "inc:1", "code": "inc:2"}, {"math": "m1", "code": "c1"})
