"""What is consumed of two scenarios, in any order of answers, reports, jobs and restarts: nothing twice, nothing lost.

Knows: the fold of RECORDS, what a batch carries from job to job. Must not know: how a batch is chosen: any rewarded
answers of one scenario may be in one.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from reef_bus.core.records import Book, Consumed, consumed, evolve, remove
from reef_bus.events import Recorded, RecordEvent
from tests.unit.test_records import answer, scored, stored

SCENARIOS = ("math", "code")
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("answer"), st.sampled_from(SCENARIOS)),
        st.tuples(st.just("exchange"), st.sampled_from(SCENARIOS)),
        st.tuples(st.just("report"), st.integers(0, 30), st.sampled_from((True, True, True, False))),
        st.tuples(st.just("job"), st.sampled_from(SCENARIOS), st.integers(1, 7)),
        st.just(("restart",)),
    ),
    min_size=20,
    max_size=60,
)


class Deployment:
    """RECORDS, the trainer's book over it, and what its last batches say; beside them what was done, by name alone."""

    def __init__(self) -> None:
        self.stream: list[Recorded] = []
        self.book = Book()
        self.batches: dict[str, Consumed] = {}
        self.places: dict[str, tuple[str, int]] = {}
        self.rewarded: list[str] = []
        self.done: set[str] = set()

    def put(self, event: RecordEvent) -> None:
        self.stream = stored(*(recorded.event for recorded in self.stream), event)  # type: ignore[arg-type]
        evolve(self.book, self.stream[-1])

    def answer(self, scenario: str) -> None:
        record = f"r{len(self.stream) + 1}"
        self.places[record] = scenario, len(self.stream) + 1
        self.put(replace(answer(record, group=scenario), scenario=scenario))

    def exchange(self, scenario: str) -> None:
        self.answer(scenario)
        self.report(-1, True)

    def report(self, number: int, eligible: bool) -> None:
        open_ = [record for record in self.places if record not in self.done | set(self.rewarded)]
        if open_:
            record = open_[number % len(open_)]
            self.put(scored(record) if eligible else scored(record, eligible=False))
            self.rewarded.extend([record] if eligible else [])
            self.done |= set() if eligible else {record}

    def job(self, scenario: str, mask: int) -> None:
        """It consumes some of those that may be trained on: which, the bits of `mask` say, over and over."""
        ready = [r for r in self.rewarded if r not in self.done and self.places[r][0] == scenario]
        taken = [record for at, record in enumerate(ready) if mask >> at % 3 & 1]
        if taken:
            units = [self.book.units[record] for record in taken]
            self.batches[scenario] = consumed(self.book, scenario, units, len(self.stream))
            self.book.consumed[scenario] = self.batches[scenario]
            remove(self.book, units)
            self.done |= set(taken)

    def restart(self) -> None:
        self.book = Book(consumed=dict(self.batches))
        lowest = min(self.batches[each].floor if each in self.batches else 0 for each in SCENARIOS)
        for recorded in self.stream[lowest:]:
            evolve(self.book, recorded)


@given(steps=STEPS)
def test_what_waits_is_what_was_recorded_and_is_not_done_with(steps: list[tuple[object, ...]]) -> None:
    found = Deployment()
    for name, *how in (*steps, ("restart",)):
        getattr(found, str(name))(*how)
        assert set(found.book.units) == found.places.keys() - found.done
        rewarded = {record for record, unit in found.book.units.items() if unit.reward is not None}
        assert rewarded == set(found.rewarded) - found.done


@given(steps=STEPS)
def test_a_batch_names_what_its_own_scenario_consumed_above_the_first_that_waits_of_it(
    steps: list[tuple[object, ...]],
) -> None:
    found = Deployment()
    for name, *how in steps:
        before = dict(found.batches)
        getattr(found, str(name))(*how)
        for scenario, batch in found.batches.items():
            if batch is not before.get(scenario):
                assert batch == left(found, scenario)


def left(found: Deployment, scenario: str) -> Consumed:
    """By what was done alone."""
    own = {record: seq for record, (of, seq) in found.places.items() if of == scenario}
    floor = min((seq for record, seq in own.items() if record not in found.done), default=len(found.stream) + 1) - 1
    trained = set(found.rewarded) & found.done
    return Consumed(floor, frozenset(seq for record, seq in own.items() if record in trained and seq > floor))
