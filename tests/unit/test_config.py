"""Configurations whose parts do not fit together: refused before anything starts, with the key to change.

Knows: the text of a configuration. Must not know: roles. What belongs to one subject alone stands with its tests.
"""

from __future__ import annotations

from typing import Any

import pytest

from reef_bus.config import build
from reef_bus.errors import Rejected

TWO = {"scenarios": ["maths", "prose"]}


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"schema-version": 2}, "schema-version is 2, this version reads 1"),
        ({"inference": {"engines": []}}, "expected at least one, no name twice"),
        ({"inference": {"engines": ["a", "a"]}}, "expected at least one, no name twice"),
        ({"inference": {"engines": ["gateway"]}}, "'gateway' is the name of another component"),
        ({"gateway": {"timeout-s": 0}}, "gateway.timeout-s is 0: expected at most"),
        ({"gateway": {"timeout-s": 1e9}}, "gateway.timeout-s is 1e.09: expected at most"),
        ({"inference": {"lease-s": -1}}, "inference.lease-s is -1: expected 0"),
        ({"training": {"offers": ["carrier pigeon"]}}, "training.offers names 'carrier pigeon'; this version has"),
        ({"inference": {"accepts": ["tcp", "ftp"]}}, "inference.accepts names 'ftp'; this version has"),
        ({"training": {"offers": ["shm"]}}, "publication.transport is 'any'; the trainer offers"),
        ({"publication": {"transport": "shm"}}, "publication.transport is 'shm'; the trainer offers"),
        ({"publication": {"publish": "some"}}, "publication.publish is 'some'; expected every or latest"),
        ({"publication": {"mode": "live"}}, "publication.mode is 'live'; expected fenced or staged"),
        ({"publication": {"delta": True}}, "publication.delta needs publication.mode staged"),
        ({"publication": {"publishers": 0}}, "publication.publishers is 0: expected 1 to"),
        ({"publication": {"pause": "abort"}}, "publication.pause is 'abort'; expected one of drain, retract, in_place"),
        ({"artifacts": {"anchor-every": 0}}, "artifacts.anchor-every is 0"),
        ({"training": {"backend": "jax"}}, "training.backend is 'jax'; this version has: torch, attached"),
        ({"inference": {"router-port": 8000}, "gateway": {"port": 8000}}, "are both 8000: choose another one"),
        ({"inference": {"router-port": -1}}, "inference.router-port is -1"),
        ({"adapters": {"scenarios": ["a", "a"]}}, "expected no name twice, and not 'digit', which is the base model's"),
        ({"scenario": "base", "adapters": {"scenarios": ["base"]}}, "and not 'base', which is the base model's"),
        ({"adapters": TWO, "training": {"backend": "attached"}}, "adapters.scenarios needs a trainer that is a role"),
        ({"adapters": TWO, "inference": {"accepts": ["tcp"]}}, r"adapters travel as files; .* is \['tcp'\]: add files"),
        ({"adapters": {**TWO, "rank": 0}}, "adapters.rank and adapters.alpha are at least 1"),
        ({"adapters": {**TWO, "alpha": 0}}, "adapters.rank and adapters.alpha are at least 1"),
        ({"adapters": {**TWO, "targets": []}}, "adapters.targets names at least one layer"),
        ({"adapters": {**TWO, "capacity": 2}}, "adapters.capacity is 2: 2 scenarios need room for 3"),
        ({"adapters": {**TWO, "capacity": -1}}, "adapters.capacity is -1"),
    ],
)
def test_what_does_not_fit_together_is_refused_with_its_key(data: dict[str, Any], said: str) -> None:
    with pytest.raises(Rejected, match=said):
        build("test", data)


def test_an_engine_has_room_for_every_scenario_and_the_next_release_unless_it_is_given_more() -> None:
    assert build("test", {"adapters": TWO}).adapters.most() == 3
    assert build("test", {"adapters": {**TWO, "capacity": 7}}).adapters.most() == 7
    assert build("test", {}).adapters.most() == 0
