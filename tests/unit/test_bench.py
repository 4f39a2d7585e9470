"""What the figures make of what was measured: medians, ratios run by run, and whether a target is met."""

from __future__ import annotations

import json

import pytest

from reef_bus.events import ReceiverVerified, Recorded
from tests import facts
from tests.bench.weights.growth import BEGIN, EACH, History
from tests.bench.weights.machine import Rates
from tests.bench.weights.product import Release, hops, received_s
from tests.bench.weights.serving import _budget
from tests.bench.weights.table import Row, as_json, ratios, spread, text
from tests.spec import MILLI, Scribe


def row(value: float, sense: str = "", target: float = 0.0) -> Row:
    return Row(measure="m", value=value, unit="ms", count=3, sense=sense, target=target)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sense", "value", "met"), [("≥", 1.0, True), ("≥", 0.99, False), ("≤", 1.0, True), ("≤", 1.01, False)]
)
def test_a_target_is_met_from_its_own_value_on(sense: str, value: float, met: bool) -> None:
    assert row(value, sense, 1.0).met is met


def test_a_row_without_a_target_is_neither_met_nor_missed() -> None:
    assert row(5.0).met is None and as_json(row(5.0))["met"] is None


def test_no_number_meets_nothing() -> None:
    assert [row(float("nan"), sense, 1.0).met for sense in ("≥", "≤")] == [False, False]


def test_a_miss_is_shown_in_the_table_and_in_the_file() -> None:
    assert text([row(12.0, "≤", 10.0)]).splitlines()[2] == "| m | 12 ms | ≤ 10 | NO | 3 |  |"
    assert json.loads(json.dumps(as_json(row(12.0, "≤", 10.0))))["met"] is False


def test_ratios_are_of_the_same_run() -> None:
    assert ratios([2.0, 9.0], [1.0, 3.0]) == [2.0, 3.0]


def test_the_spread_is_the_quartiles_and_of_one_run_itself() -> None:
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0]) == [2.0, 4.0]
    assert spread([7.0]) == [7.0, 7.0]


def test_the_durable_rows_budget_counts_eight_appends_in_turn_and_the_members_together() -> None:
    rates = Rates(sequential=[0.001], parallel=[0.002])
    assert _budget(4, 5.0, rates) == {"verified": 5.0, "synced appends": pytest.approx(8 * 1 + 9 * 2), "slack": 10.0}


def released() -> tuple[list[Recorded], Release]:
    """The log of two releases, a millisecond per event, and the second as if it had been called for at its first."""
    scribe, one = Scribe(), facts.m("e0")
    for event in (*facts.REGISTERED, facts.joined("e0"), facts.holds("e0", 0, "base")):
        scribe.write(event)
    for number, base in ((1, "base"), (2, "c1")):
        for event in (*facts.trained(f"c{number}", base), *facts.released(number, f"c{number}", one)):
            scribe.write(event)
    called = scribe.log[15].time - MILLI
    return scribe.log, Release(facts.L(2), 0.0, called, [1.0], [3.5])


def test_hops_are_those_of_the_release_itself() -> None:
    log, release = released()
    (found,) = hops(log, [release])
    assert {name: round(seconds * 1e3) for name, seconds in found.items()} == {
        "JobDispatched": 1,
        "CandidateSelected": 5,
        "TargetPersisted": 6,
        "SenderReady": 8,
        "ReceiverVerified": 9,
        "ReleaseCommitted": 10,
    }


def test_a_release_serves_with_its_last_engine_and_each_engine_has_its_own_pause() -> None:
    found = Release("inc:1", 10.0, 0, closed=[11.0, 11.5], opened=[12.0, 13.0])
    assert (found.serving_s, found.pauses()) == (3.0, [1.0, 1.5])


def test_what_members_say_that_they_moved_leaves_catch_ups_out() -> None:
    log, _ = released()
    assert received_s(log) == {facts.L(1): [0.001], facts.L(2): [0.001]}
    assert any(isinstance(r.event, ReceiverVerified) and not r.event.publication for r in log)


def test_the_generated_history_counts_in_whole_and_every_release_is_committed() -> None:
    from reef_bus.core.world import World, fold
    from reef_bus.events import Blob
    from reef_bus.manifest import Manifest

    history, world = History(Blob("w", 8), Manifest(tensors=(), total=8), Blob("b", 1)), World()
    for _ in range(BEGIN + 3 * EACH):
        assert fold(world, history.next()) == ""
    assert history.whole() and world.queue == [] and world.publications.open is None
    assert [release.candidate for release in world.publications.releases.values()] == ["base", "c1", "c2", "c3"]
