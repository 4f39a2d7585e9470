"""What a scrape sees: the same world that everything else decides by.

Knows: histories, and Prometheus' own parser. Must not know: how the figures are written down.
"""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from reef_bus.config import Config, Inference, Metrics, Publication
from reef_bus.core.world import World
from reef_bus.errors import Rejected
from reef_bus.events import ComponentStarted
from reef_bus.metrics import Figures, exposition
from tests.facts import (
    E0,
    E1,
    FROZEN,
    MATH,
    SERVING,
    adapter_released,
    adapter_trained,
    colocated,
    fenced,
    lent,
    released,
    started,
    target,
    trained,
)
from tests.spec import SECOND, Step, chained_to, given


def scraped(*steps: Step, head: int | None = None, later_s: float = 0.0, halted: bool = False) -> dict[str, float]:
    story = given(*steps)
    now = story.now + int(later_s * SECOND)
    text = exposition(Figures(story.world, head, now, halted)).decode()
    samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    return {s.name + "".join(f"/{value}" for value in s.labels.values()): s.value for s in samples}


def test_a_release_has_a_number_and_an_age_that_counts_from_its_commit() -> None:
    found = scraped(*SERVING, *trained("c1"), *released(1, "c1", E0, E1), later_s=12.5)
    assert found["reef_release_sequence"] == 1
    assert found["reef_release_age_seconds"] == pytest.approx(12.5)
    assert (found["reef_fence_seconds"], found["reef_engines_serving"]) == (0, 2)


def test_each_scenarios_adapter_has_a_number_and_an_age() -> None:
    released_once = adapter_released(MATH, 1, "m1", E0, E1)
    found = scraped(*FROZEN, *adapter_trained(MATH, "m1"), *released_once, later_s=12.5)
    assert (found["reef_release_sequence"], found["reef_adapter_release_sequence/math"]) == (0, 1)
    assert found["reef_adapter_release_sequence/code"] == 0
    assert found["reef_adapter_release_age_seconds/math"] == pytest.approx(12.5)


def test_a_fence_is_as_old_as_its_target_and_nobody_serves_under_it() -> None:
    found = scraped(*SERVING, *trained("c1"), target(1, "c1", E0, E1), fenced("e0", 1), later_s=3.0)
    assert found["reef_fence_seconds"] == pytest.approx(3.001)  # the fence, and a millisecond per event since
    assert (found["reef_engines_serving"], found["reef_release_sequence"]) == (0, 0)


def test_a_colocated_jobs_fence_is_as_old_as_its_dispatch_and_who_lends_is_counted() -> None:
    found = scraped(*SERVING, colocated("j"), lent("e0", "j", 8), started("j"), later_s=3.0)
    assert found["reef_fence_seconds"] == pytest.approx(3.002)
    assert (found["reef_engines_released"], found["reef_engines_serving"]) == (1, 0)
    assert scraped(*SERVING)["reef_engines_released"] == 0


def test_the_lag_is_what_the_stream_holds_and_the_fold_does_not() -> None:
    found = scraped(*SERVING, head=len(SERVING) + 4)
    assert (found["reef_log_sequence"], found["reef_log_lag_events"], found["reef_up"]) == (len(SERVING), 4, 1)


def test_a_leader_that_does_not_answer_leaves_the_lag_unknown_not_zero() -> None:
    found = scraped(*SERVING, head=None)
    assert found["reef_up"] == 0 and "reef_log_lag_events" not in found


def test_void_events_restarts_and_a_halt_are_counted() -> None:
    starts = [ComponentStarted(component="trainer", pid=n, starts=n) for n in (1, 2, 3)]
    found = scraped(*SERVING, *starts, chained_to(1, starts[0]), halted=True)
    assert found["reef_void_events_total"] == 1
    assert found["reef_component_restarts_total/trainer"] == 2
    assert found["reef_halted"] == 1


def test_before_the_log_is_open_there_is_no_release_to_speak_of() -> None:
    text = exposition(Figures(World(), 0, 0)).decode()
    assert "reef_log_sequence 0.0" in text and "reef_release_sequence" not in text


def test_every_component_has_a_port_of_its_own_in_the_order_of_its_start() -> None:
    config = Config(
        metrics=Metrics(port=9464), inference=Inference(engines=("a", "b")), publication=Publication(publishers=2)
    )
    components = ("trainer", "a", "b", "publisher", "publisher-2", "gateway", "supervisor")
    assert [config.metrics_port(name) for name in components] == list(range(9464, 9471))
    with pytest.raises(Rejected, match="'c' has no metrics port"):
        config.metrics_port("c")
