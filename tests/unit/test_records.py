"""The fold of RECORDS: which answers may be trained on, in which order, and what stays consumed after a restart.

Knows: the `record` family. Must not know: tokens, or the trainer that asks.
"""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from reef_bus.core.records import NOTHING, Book, Consumed, choose, consumed, evolve, remove, retire
from reef_bus.events import Blob, InferenceRecorded, Recorded, RecordEvent, ReportReceived


def answer(record: str, load_id: str = "inc:0", group: str = "g", temperature: float = 1.0) -> InferenceRecorded:
    return InferenceRecorded(
        scenario="digit",
        record=record,
        engine="e0",
        boot="e0.1",
        load_id=load_id,
        as_of=7,
        done_as_of=7,
        prompt="7",
        answer="77",
        prompt_tokens=3,
        answer_tokens=2,
        temperature=temperature,
        blob=Blob("sha", 1),
        row=0,
        tags={"group": group} if group else {},
    )


def scored(*records: str, score: float = 1.0, **training: Any) -> ReportReceived:
    metadata = {"training": training} if training else {}
    return ReportReceived(
        scenario="digit",
        report="rep-" + "-".join(records),
        references=records,
        score=score,
        feedback="",
        metadata=metadata,
    )


def stored(*events: RecordEvent) -> list[Recorded]:
    """As the stream holds them: numbered from 1."""
    return [
        Recorded(seq=seq, time=0, subject="", id="", prev=0, cause=0, correlation="", writer="", boot="", event=event)
        for seq, event in enumerate(events, 1)
    ]


def book(*events: RecordEvent, done: Consumed = NOTHING) -> Book:
    found = Book(consumed={"digit": done})
    for recorded in stored(*events):
        evolve(found, recorded)
    return found


def fresh(load_id: str) -> int | None:
    return 0


def chosen(found: Book, groups: int = 1, size: int = 2, lag: Any = fresh) -> list[str] | None:
    units = choose(found, "digit", lag, groups, size)
    return units and [unit.record for unit in units]


def test_an_answer_counts_once_it_is_reported() -> None:
    history = (answer("a"), answer("b"), scored("a"))
    assert chosen(book(*history)) is None
    assert chosen(book(*history, scored("b"))) == ["a", "b"]


def test_one_report_may_speak_of_several_answers() -> None:
    found = book(answer("a"), answer("b"), scored("a", "b", score=0.5))
    assert [unit.reward for unit in found.units.values()] == [0.5, 0.5]


def test_the_first_report_counts() -> None:
    found = book(answer("a"), scored("a", score=0.25), scored("a", score=1.0), scored("a", eligible=False))
    assert found.units["a"].reward == 0.25


def test_an_answer_kept_from_training_leaves_nothing_behind_and_no_later_report_brings_it_back() -> None:
    found = book(answer("a"), scored("a", eligible=False), scored("a", score=1.0))
    assert found.units == {} and found.groups == {}


def test_only_a_plain_false_keeps_from_training() -> None:
    for metadata in ({"training": "no"}, {"training": {"eligible": None}}, {"training": {"eligible": 0.0}}):
        found = book(answer("a"))
        event = ReportReceived(
            scenario="digit", report="r", references=("a",), score=1.0, feedback="", metadata=dict(metadata)
        )
        evolve(found, stored(event)[0])
        assert found.units["a"].reward == 1.0


def test_an_answer_at_another_temperature_is_not_trained_on() -> None:
    assert book(answer("a", temperature=0.5), scored("a")).units == {}


def test_a_report_on_an_unknown_answer_changes_nothing() -> None:
    assert book(scored("x")).units == {}


def test_untagged_answers_to_one_question_by_one_release_are_a_group() -> None:
    found = book(answer("a", group=""), answer("b", load_id="inc:1", group=""), answer("c", group=""))
    assert sorted(len(records) for records in found.groups.values()) == [1, 2]


def test_the_oldest_complete_groups_come_first_and_a_group_gives_no_more_than_its_size() -> None:
    history = [answer(f"{g}{i}", group=g) for i in range(3) for g in ("g", "h", "k")]
    found = book(*history, scored(*(f"{g}{i}" for i in range(3) for g in ("h", "g"))), scored("k0"))
    assert chosen(found, groups=2) == ["g0", "g1", "h0", "h1"]
    assert chosen(found, groups=3) is None


def test_stale_and_unknown_releases_are_passed_over() -> None:
    found = book(answer("a", "inc:0"), answer("b", "inc:1"), answer("c", "inc:1"), scored("a", "b", "c"))
    assert chosen(found, lag={"inc:1": 1}.get) == ["b", "c"]


def test_hopeless_answers_are_forgotten() -> None:
    found = book(answer("a", "inc:0"), answer("b", "inc:1"))
    assert retire(found, lambda scenario, load_id: (scenario, load_id) == ("digit", "inc:0")) == 1
    assert list(found.units) == ["b"] and found.groups == {("digit", "g"): ["b"]}


# -- what is consumed


HISTORY = (answer("a"), answer("b"), answer("c"), scored("b"), scored("c"), answer("d"), scored("a"), scored("d"))
"""a, b, c, d at 1, 2, 3, 6."""


@pytest.mark.parametrize(
    ("taken", "floor", "above"),
    [
        ("abcd", 8, ()),  # nothing waits: all that was folded is done with
        ("ab", 2, ()),
        ("bc", 0, (2, 3)),
        ("bd", 0, (2, 6)),
        ("acd", 1, (3, 6)),
    ],
)
def test_the_floor_is_below_the_first_that_waits_and_what_is_consumed_above_it_is_named(
    taken: str, floor: int, above: tuple[int, ...]
) -> None:
    found = book(*HISTORY)
    done = consumed(found, "digit", [found.units[record] for record in taken], 8)
    assert (done.floor, done.taken) == (floor, set(above))


@pytest.mark.parametrize("taken", ["ab", "bc", "bd", "acd", "abcd", "c"])
def test_a_restart_finds_exactly_what_was_left(taken: str) -> None:
    found = book(*HISTORY)
    units = [found.units[record] for record in taken]
    done = consumed(found, "digit", units, 8)
    again = Book(consumed={"digit": done})
    for recorded in stored(*HISTORY)[done.floor :]:
        evolve(again, recorded)
    remove(found, units)
    assert again.units == found.units and again.groups == found.groups


def test_what_was_consumed_before_stays_consumed_after_the_next_batch() -> None:
    found = book(*HISTORY, done=Consumed(0, frozenset({2, 3})))
    assert set(found.units) == {"a", "d"}
    assert consumed(found, "digit", [found.units["d"]], 8) == Consumed(0, frozenset({2, 3, 6}))


def of(scenario: str, record: str) -> InferenceRecorded:
    return replace(answer(record, group=scenario), scenario=scenario)


TWO = (of("code", "w"), of("math", "a"), of("math", "b"), of("code", "x"), scored("a", "b", "x"))
"""w, a, b, x at 1 to 4; nobody reports on w."""


def test_what_waits_of_one_scenario_holds_back_no_other() -> None:
    found = book(*TWO)
    assert consumed(found, "math", [found.units["a"], found.units["b"]], 5) == Consumed(5)
    assert consumed(found, "code", [found.units["x"]], 5) == Consumed(0, frozenset({4}))


def test_what_is_consumed_of_one_scenario_is_not_consumed_of_another() -> None:
    found = Book(consumed={"math": Consumed(5), "code": Consumed(0, frozenset({4}))})
    for recorded in stored(*TWO):
        evolve(found, recorded)
    assert set(found.units) == {"w"}
