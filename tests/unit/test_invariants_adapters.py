"""What the audit finds in histories of adapters: each rule by a corrupted twin of one clean history.

Knows: two scenarios over one base, an alias, a late joiner, a leak, rollbacks. Must not know: how the audit looks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from reef_bus.cli_audit import _audit_lines
from reef_bus.core import reactions
from reef_bus.core.effects import Deadlines, LoadAdapter, Me
from reef_bus.core.invariants import Rewards, check
from reef_bus.core.records import Consumed
from reef_bus.core.start import WITH_ADAPTERS, compact
from reef_bus.events import EngineStaged, Event, Evidence, Lora, Member, Span
from tests.facts import (
    CODE,
    E0,
    E1,
    FROZEN,
    LORA,
    MATH,
    NO_LORA,
    L,
    S,
    aborted,
    adapter_caught_up,
    adapter_committed,
    adapter_damaged,
    adapter_failed,
    adapter_rollback_asked,
    adapter_staged,
    adapter_target,
    adapter_trained,
    blob,
    digest,
    halted,
    holds,
    joined_with,
    leaked,
    m,
    name,
    of,
    opened,
    trainer_joined,
    unloaded,
)
from tests.spec import by, given
from tests.unit.test_invariants import Play, by_name

E1_AGAIN = m("e1", 2)


class AdapterPlay(Play):
    """A history of two scenarios. Answers and batches are of one of them."""

    def asked(self, scenario: str, load: int, *members: Member, tags: dict[str, str] | None = None) -> list[str]:
        first = len(self.records)
        names = self.answers(load, *members, count=4, tags=tags)
        for at in range(first + 1, len(self.records) + 1):
            self.edit_record(at, scenario=scenario)
        return names

    def teach(self, scenario: str, candidate: str, base: str, step: int, records: list[str]) -> None:
        self.batch(f"job-{candidate}", base, step, records)
        first, *rest = adapter_trained(scenario, candidate, base, step)
        self.say(replace(first, records=len(records)), *rest)  # type: ignore[type-var]

    def publish(self, scenario: str, n: int, candidate: str, *members: Member, parent: int) -> None:
        self.say(adapter_target(scenario, n, candidate, *members, parent=parent))
        self.say(*(adapter_staged(each.engine, scenario, n, candidate) for each in members))
        self.committed(scenario, n, candidate, *members, parent=parent)

    def committed(self, scenario: str, n: int, candidate: str, *members: Member, parent: int, attempt: int = 1) -> None:
        words = {r.boot: r.seq for r in self.log if isinstance(r.event, EngineStaged) and r.event.load_id == L(n)}
        evidence = tuple(Evidence(each.engine, each.boot, words[each.boot], digest(candidate)) for each in members)
        commit = adapter_committed(scenario, n, candidate, *members, parent=parent, attempt=attempt)
        self.say(replace(commit, evidence=evidence))


def clean() -> AdapterPlay:
    """1 is math's, 2 is code's, 3 math's again; 4 brings math's 1 back, whose bytes are there still; a
    new boot of e1 catches up; before there is room for 5, code's, an older one must go; 6 brings code back to none."""
    play = AdapterPlay(*FROZEN)
    play.teach(MATH, "m1", NO_LORA[MATH], 1, play.asked(MATH, 0, E0, E1))
    play.publish(MATH, 1, "m1", E0, E1, parent=0)
    play.teach(CODE, "c1", NO_LORA[CODE], 2, play.asked(CODE, 0, E0, E1))
    play.publish(CODE, 2, "c1", E0, E1, parent=0)
    play.teach(MATH, "m2", "m1", 3, play.asked(MATH, 1, E0, E1))
    play.publish(MATH, 3, "m2", E0, E1, parent=1)
    play.asked(CODE, 2, E0, E1, tags={"phase": "final"})
    play.say(adapter_rollback_asked(MATH, 1, 3))
    play.say(adapter_target(MATH, 4, "m1", E0, E1, parent=3, request=play.log[-1].seq))
    play.say(adapter_staged("e0", MATH, 4, "m1", adapter=name(MATH, 1)))
    play.say(adapter_staged("e1", MATH, 4, "m1", adapter=name(MATH, 1)))
    play.committed(MATH, 4, "m1", E0, E1, parent=3)
    play.asked(MATH, 4, E0, E1, tags={"phase": "final"})
    play.say(by(E1_AGAIN.boot, joined_with("e1")), holds("e1", 0, "base"))
    play.say(adapter_caught_up("e1", MATH, 4, "m1"), adapter_caught_up("e1", CODE, 2, "c1"))
    play.teach(CODE, "c2", "c1", 4, play.asked(CODE, 2, E0, E1_AGAIN))
    play.say(adapter_target(CODE, 5, "c2", E0, E1_AGAIN, parent=2))
    play.say(leaked("e0", name(MATH, 3)), unloaded("e0", name(MATH, 3)))
    play.say(adapter_staged("e0", CODE, 5, "c2"), adapter_staged("e1", CODE, 5, "c2"))
    play.committed(CODE, 5, "c2", E0, E1_AGAIN, parent=2)
    play.say(unloaded("e0", name(CODE, 2)), adapter_rollback_asked(CODE, 0, 5))
    origin, asked = NO_LORA[CODE], play.log[-1].seq
    play.say(adapter_target(CODE, 6, origin, E0, E1_AGAIN, parent=5, request=asked), unloaded("e1", name(CODE, 2)))
    play.say(adapter_staged("e0", CODE, 6, origin), adapter_staged("e1", CODE, 6, origin))
    play.committed(CODE, 6, origin, E0, E1_AGAIN, parent=5)
    play.asked(CODE, 6, E0, E1_AGAIN, tags={"phase": "final"})
    return play


# -- the clean history


def test_a_clean_history_of_adapters_has_no_violation_and_names_its_scenarios() -> None:
    audit = clean().audit()
    assert audit.violations == () and audit.unchecked == () and audit.open == ()
    assert (audit.releases, audit.receivers_verified, audit.jobs, audit.consumed) == (6, 12, 4, 16)
    assert (audit.final.load_id, audit.final.n) == (L(0), 0)
    assert {of: (found.load_id, found.n, found.mean) for of, found in audit.finals.items()} == {
        MATH: (L(4), 4, 0.5),
        CODE: (L(6), 4, 0.5),
    }
    assert audit.rewards[L(0)] == Rewards(8, 0.5)


def test_the_command_says_the_rewards_of_each_scenario() -> None:
    said = [line for line in _audit_lines(clean().audit()) if line.startswith("reward")]
    assert said == [
        f"reward   0.500 over 4 final answers to {MATH} by {L(4)}",
        f"reward   0.500 over 4 final answers to {CODE} by {L(6)}",
    ]


def test_an_audit_of_the_whole_model_names_no_scenarios() -> None:
    assert Play(*FROZEN[:3]).audit().finals == {}


def test_every_prefix_is_clean_with_the_answers_that_stood_on_it() -> None:
    play = clean()
    for head in range(1, len(play.log) + 1):
        kept = [r for r in play.records if getattr(r.event, "done_as_of", 0) <= head]
        ids = {r.id for r in kept}
        told = [r for r in kept if r.id in ids and (r.id.removeprefix("on-") in ids)]
        found = type(play)()
        found.scribe.log, found.records, found.batches = play.log[:head], told, play.batches
        assert found.audit().violations == (), head


def test_a_boot_that_lacks_a_head_is_a_notice() -> None:
    play = clean()
    play.say(by("e1.3", joined_with("e1")), holds("e1", 0, "base"), adapter_caught_up("e1", MATH, 4, "m1"))
    assert [notice.split(" does ")[1] for notice in play.audit().open] == [f"not hold {CODE}'s head {L(6)} yet"]


def damaged() -> AdapterPlay:
    """A third boot of e1 cannot load math's 4."""
    play = clean()
    play.say(by("e1.3", joined_with("e1")), holds("e1", 0, "base"))
    play.say(adapter_damaged("e1", MATH, 4), adapter_caught_up("e1", CODE, 6, NO_LORA[CODE]))
    return play


def test_what_a_boot_cannot_load_is_a_notice_until_it_was_loaded() -> None:
    play = damaged()
    assert [notice.split(" does ")[1] for notice in play.audit().open] == [f"not hold {MATH}'s head {L(4)} yet"]
    play.say(adapter_damaged("e1", MATH, 4), adapter_caught_up("e1", MATH, 4, "m1"))
    play.asked(MATH, 4, m("e1", 3))
    audit = play.audit()
    assert audit.violations == () and audit.open == ()


def test_what_a_boot_cannot_load_takes_no_room() -> None:
    """There is room for three; code's head and two later releases of math take all of it."""
    play, both = damaged(), (E0, m("e1", 3))
    for n, base, goes in ((7, "m1", name(CODE, 5)), (8, "m7", name(MATH, 1))):
        play.teach(MATH, f"m{n}", base, n, play.asked(MATH, 4 if n == 7 else 7, E0, E0))
        play.say(unloaded("e0", goes))
        play.publish(MATH, n, f"m{n}", *both, parent=4 if n == 7 else 7)
    assert play.audit().violations == ()


def test_who_had_no_room_for_a_release_may_prove_what_it_holds_by_another_load_id() -> None:
    """Nothing is loaded for that, so no room is made: neither for it, nor of the place that the failure counts for."""
    play = clean()
    play.teach(MATH, "m3", "m1", 5, play.asked(MATH, 4, E0, E0))
    play.say(adapter_target(MATH, 7, "m3", E0, parent=4), leaked("e0", name(CODE, 5)))
    play.say(replace(adapter_failed("e0", MATH, 7), cause="eviction"), *of(MATH, halted(7)))
    play.say(adapter_rollback_asked(MATH, 4, 4))
    play.say(adapter_target(MATH, 8, "m1", E0, parent=4, request=play.log[-1].seq))
    play.say(adapter_staged("e0", MATH, 8, "m1", adapter=name(MATH, 1)))
    play.committed(MATH, 8, "m1", E0, parent=4)
    assert play.audit().violations == ()


def test_bytes_that_were_lost_may_come_back_under_the_name_that_they_had() -> None:
    """Between the target of a rollback to them and the word on it: the place is kept under that name."""
    play = clean()
    play.say(adapter_rollback_asked(MATH, 4, 4))
    play.say(adapter_target(MATH, 7, "m1", E0, parent=4, request=play.log[-1].seq))
    play.say(unloaded("e0", name(MATH, 1), "the engine does not list it"))
    (debt,) = reactions.engine(given(*(by(r.boot, r.event) for r in play.log)).world, Me("e0", "e0.1"), Deadlines())
    assert isinstance(debt.effect, LoadAdapter) and (debt.effect.name, debt.effect.held) == (name(MATH, 1), False)
    play.say(adapter_staged("e0", MATH, 7, "m1", adapter=name(MATH, 1)))
    play.committed(MATH, 7, "m1", E0, parent=4)
    play.asked(MATH, 7, E0)
    assert play.audit().violations == ()


@pytest.mark.parametrize("gone", [leaked, unloaded], ids=["leaked", "lost"])
def test_so_they_may_after_a_load_that_failed_and_where_an_unload_did(gone: Callable[[str, str], Event]) -> None:
    """However often what goes under that name was unloaded since they were proven."""
    play, held = AdapterPlay(*FROZEN), name(MATH, 1)
    for n, base in ((1, NO_LORA[MATH]), (2, "m1")):
        play.teach(MATH, f"m{n}", base, n, play.asked(MATH, n - 1, E0, E0))
        play.publish(MATH, n, f"m{n}", E0, parent=n - 1)
    play.say(adapter_rollback_asked(MATH, 1, 2))
    play.say(adapter_target(MATH, 3, "m1", E0, parent=2, request=play.log[-1].seq), gone("e0", held))
    if gone is unloaded:
        play.say(adapter_failed("e0", MATH, 3, adapter=held), *of(MATH, aborted(3, 1, E0)))
    play.say(unloaded("e0", held))
    (debt,) = reactions.engine(given(*(by(r.boot, r.event) for r in play.log)).world, Me("e0", "e0.1"), Deadlines())
    assert isinstance(debt.effect, LoadAdapter) and (debt.effect.name, debt.effect.held) == (held, False)
    attempt = debt.effect.attempt
    play.say(replace(adapter_staged("e0", MATH, 3, "m1", adapter=held), attempt=attempt))
    play.committed(MATH, 3, "m1", E0, parent=2, attempt=attempt)
    assert play.audit().violations == ()


# -- corrupted twins


def first_of(play: AdapterPlay, scenario: str, load: int) -> int:
    """Where the first answer of that scenario by that load is."""
    found = (r for r in play.records if getattr(r.event, "load_id", "") == L(load))
    return next(r.seq for r in found if r.event.scenario == scenario)  # type: ignore[attr-defined]


def answers_with_another_scenarios_adapter(play: AdapterPlay) -> None:
    play.edit_record(first_of(play, MATH, 4), load_id=L(2))


def answers_with_what_is_only_staged(play: AdapterPlay) -> None:
    at = play.find("ReleaseCommitted", 4) - 1
    play.edit_record(first_of(play, MATH, 4), as_of=at, done_as_of=at)


def answers_with_the_head_before(play: AdapterPlay) -> None:
    play.edit_record(first_of(play, MATH, 4), load_id=L(3))


def answers_with_the_base_model_though_there_is_an_adapter(play: AdapterPlay) -> None:
    play.edit_record(first_of(play, CODE, 6), load_id=L(0))


def answers_before_it_caught_up(play: AdapterPlay) -> None:
    at = play.find("ReceiverVerified", 3)
    seq = first_of(play, MATH, 4)
    play.edit_record(seq, engine="e1", boot="e1.2", as_of=at, done_as_of=at)


def answers_before_its_scenario_is_there(play: AdapterPlay) -> None:
    play.edit_record(first_of(play, MATH, 0), as_of=3, done_as_of=3)


def unloads_while_a_request_is_in_hand(play: AdapterPlay) -> None:
    play.edit_record(first_of(play, CODE, 2) + 16, done_as_of=play.find("AdapterUnloaded", 2))


def goes_on_with_another_adapter(play: AdapterPlay) -> None:
    seq = first_of(play, MATH, 4)
    before, after = play.find("ReleaseCommitted", 4) - 1, play.find("ReleaseCommitted", 4)
    spans = (Span(L(3), 0, 1, before, before), Span(L(4), 1, 1, after, after))
    play.edit_record(seq, load_id=L(3), as_of=before, done_as_of=after, answer_tokens=2, spans=spans)


def trains_on_another_scenarios_record(play: AdapterPlay) -> None:
    play.edit_record(first_of(play, MATH, 0), scenario=CODE)


def trains_the_base_model(play: AdapterPlay) -> None:
    play.edit("JobDispatched", scenario=S, base="base")


def trains_from_another_scenarios_candidate(play: AdapterPlay) -> None:
    play.edit("JobDispatched", 2, base="m1")
    play.edit_batch("job-c1", base="m1")


def lends_the_engines_memory_to_an_adapters_job(play: AdapterPlay) -> None:
    play.edit("JobDispatched", colocated=True)


def targets_the_base_model(play: AdapterPlay) -> None:
    play.edit("TargetPersisted", 1, scenario=S, lora=None, sender="trainer", mode="fenced")


def targets_onto_another_scenarios_head(play: AdapterPlay) -> None:
    play.edit("TargetPersisted", 3, parent=L(2))


def targets_another_kind_of_adapter(play: AdapterPlay) -> None:
    play.edit("TargetPersisted", lora=Lora(LORA.rank + 1, LORA.alpha, LORA.targets))


def stops_engines_for_an_adapter(play: AdapterPlay) -> None:
    play.edit("TargetPersisted", mode="fenced")


def targets_more_than_there_is_room_for(play: AdapterPlay) -> None:
    play.edit("EngineJoined", 1, adapters=2)


def targets_an_engine_that_takes_no_adapters(play: AdapterPlay) -> None:
    play.edit("EngineJoined", 1, adapters=0)


def commits_on_a_word_of_another_digest(play: AdapterPlay) -> None:
    play.edit("EngineStaged", 1, manifest=digest("other"))


def commits_on_a_word_under_another_name(play: AdapterPlay) -> None:
    play.edit("EngineStaged", 1, adapter=name(CODE, 1))


def commits_on_the_word_of_too_few(play: AdapterPlay) -> None:
    event = play.log[play.find("ReleaseCommitted") - 1].event
    play.edit("ReleaseCommitted", evidence=event.evidence[:1])  # type: ignore[attr-defined]


def commits_for_another_scenario(play: AdapterPlay) -> None:
    play.edit("ReleaseCommitted", scenario=CODE)


def rolls_another_scenario_back(play: AdapterPlay) -> None:
    play.edit("RollbackRequested", scenario=CODE)


def rolls_back_to_another_scenarios_release(play: AdapterPlay) -> None:
    play.edit("RollbackRequested", release=L(2))


def commits_on_a_word_of_a_second_copy(play: AdapterPlay) -> None:
    play.edit("EngineStaged", 1, adapter="")


def loads_more_than_it_has_room_for(play: AdapterPlay) -> None:
    """What it unloads instead, it does not hold."""
    play.edit("AdapterUnloaded", 1, adapter=name(MATH, 99))


def parts_with_a_head(play: AdapterPlay) -> None:
    play.edit("AdapterUnloaded", 1, adapter=name(MATH, 1))


def cannot_load_what_it_holds(play: AdapterPlay) -> None:
    play.say(adapter_damaged("e0", CODE, 6))


def cannot_load_what_was_never_committed(play: AdapterPlay) -> None:
    play.say(adapter_damaged("e0", MATH, 2))


Corruption = Callable[[AdapterPlay], None]

TWINS: dict[Corruption, set[int | str]] = {
    answers_with_another_scenarios_adapter: {1},
    answers_with_what_is_only_staged: {1},
    answers_with_the_head_before: {2},
    answers_with_the_base_model_though_there_is_an_adapter: {2},
    answers_before_it_caught_up: {1, 2},
    answers_before_its_scenario_is_there: {1, 2},
    unloads_while_a_request_is_in_hand: {2},
    goes_on_with_another_adapter: {2},
    trains_on_another_scenarios_record: {6},
    trains_the_base_model: {"frozen", "fold"},
    trains_from_another_scenarios_candidate: {5, "fold"},
    lends_the_engines_memory_to_an_adapters_job: {"colocated", "fold"},
    targets_the_base_model: {"frozen", "fold"},
    targets_onto_another_scenarios_head: {5, "fold"},
    targets_another_kind_of_adapter: {3, "fold"},
    stops_engines_for_an_adapter: {"adapter", 7, "fold"},
    targets_more_than_there_is_room_for: {10},
    targets_an_engine_that_takes_no_adapters: {10, 7},
    commits_on_a_word_of_another_digest: {7, "fold"},
    commits_on_a_word_under_another_name: {7},
    commits_on_the_word_of_too_few: {7, "fold"},
    commits_for_another_scenario: {7},
    rolls_another_scenario_back: {5, "fold"},
    rolls_back_to_another_scenarios_release: {5, "fold"},
    commits_on_a_word_of_a_second_copy: {7},
    loads_more_than_it_has_room_for: {10},
    parts_with_a_head: {"adapter"},
    cannot_load_what_it_holds: {"adapter"},
    cannot_load_what_was_never_committed: {"adapter"},
}


@pytest.mark.parametrize(("corrupt", "expected"), TWINS.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_each_corruption_is_found_by_its_invariant(corrupt: Corruption, expected: set[int | str]) -> None:
    play = clean()
    corrupt(play)
    found = by_name(play.audit())
    assert expected <= found.keys(), {key: violation.text for key, violation in found.items()}


def test_a_log_that_goes_on_from_one_of_adapters_is_audited_from_its_heads() -> None:
    """Answers, a catch-up and a rollback to what the predecessor had released; and one that names another head."""
    before = given(*(by(r.boot, r.event) for r in clean().log)).world
    start = compact(before.seq, before.last_id, before.training, before.publications)
    opening = replace(opened(), predecessor="LOG", predecessor_seq=start.seq, predecessor_id=start.id, start=blob("s"))
    play, first = AdapterPlay(opening, by("t2", trainer_joined()), by("e0.3", joined_with("e0"))), start.seq
    play.say(holds("e0", 0, "base"), adapter_caught_up("e0", MATH, 4, "m1"))
    play.say(adapter_caught_up("e0", CODE, 6, NO_LORA[CODE]), adapter_rollback_asked(MATH, 3, 4))
    asked = first + len(play.log)
    play.say(adapter_target(MATH, 7, "m2", m("e0", 3), parent=4, request=asked))
    play.say(adapter_staged("e0", MATH, 7, "m2"))
    commit = adapter_committed(MATH, 7, "m2", m("e0", 3), parent=4)
    play.say(replace(commit, evidence=(Evidence("e0", "e0.3", first + len(play.log), digest("m2")),)))
    play.log[:] = [replace(r, seq=first + r.seq, prev=first + r.prev if r.prev else 0) for r in play.log]
    named = play.asked(CODE, 6, m("e0", 3))
    for seq in range(1, 2 * len(named), 2):
        play.edit_record(seq, as_of=first + len(play.log), done_as_of=first + len(play.log))
    found = check(play.log, play.records, {}, start)
    assert found.violations == () and found.finals[MATH].load_id == L(7)
    play.edit_record(1, load_id=L(5))
    assert {violation.invariant for violation in check(play.log, play.records, {}, start).violations} == {1, 2}


EACH = {MATH: Consumed(16), CODE: Consumed(0, frozenset({9}))}
"""Math's answers are at 1, 3, 5, 7, code's at 9, 11, 13, 15: of math all is done with, of code the first is."""
ALL = {"format": WITH_ADAPTERS, "last_batch": blob("batch-job-c1"), "floor": 8, "taken": (9,), "batches": {}}
"""The same in one number for all scenarios, as it was said before."""


@pytest.mark.parametrize("said", [{}, ALL], ids=["of each scenario", "of all at once"])
@pytest.mark.parametrize(
    ("scenario", "base", "records", "again"),
    [
        (CODE, "c1", ["r11", "r13"], []),
        (CODE, "c1", ["r9", "r11"], [9]),
        (MATH, "m1", ["r3"], [3]),
        (MATH, "m1", ["r7"], [7]),
    ],
)
def test_what_the_predecessor_had_consumed_of_a_scenario_is_not_consumed_again(
    said: dict[str, Any], scenario: str, base: str, records: list[str], again: list[int]
) -> None:
    before = given(*FROZEN, *adapter_trained(MATH, "m1"), *adapter_trained(CODE, "c1")).world
    start = replace(compact(before.seq, before.last_id, before.training, before.publications, EACH), **said)
    opening = replace(opened(), predecessor="LOG", predecessor_seq=start.seq, predecessor_id=start.id, start=blob("s"))
    play = AdapterPlay(opening, trainer_joined())
    play.asked(MATH, 0, E0)
    play.asked(CODE, 0, E0)
    play.teach(scenario, "x", base, 3, records)
    play.log[:] = [replace(r, seq=start.seq + r.seq, prev=start.seq + r.prev if r.prev else 0) for r in play.log]
    found = check(play.log, play.records, play.batches, start).violations
    assert [violation.records for violation in found] == [(at,) for at in again]
    assert all("before this log began, had consumed or given up" in violation.text for violation in found)


def test_a_batch_that_speaks_of_another_scenario_than_its_job_is_found() -> None:
    play = clean()
    digest_of = blob("batch-job-c1").digest
    for scenario, found in ((CODE, set()), (MATH, {6})):
        play.batches[digest_of] = replace(play.batches[digest_of], scenario=scenario)
        assert by_name(play.audit()).keys() == found
