"""The fold: what the eight events of a release leave behind, and what contradicts a log (protocol.md 1.6, 5, 8).

Knows: events and their meaning. Must not know: who owes what next.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from reef_bus.core.world import World, fold, lag
from reef_bus.errors import ContractError
from reef_bus.events import ComponentLost, ComponentStarted, Member, RecoveryHalted
from tests.facts import (
    E0,
    E1,
    REGISTERED,
    SERVING,
    aborted,
    blob,
    committed,
    digest,
    dispatched,
    dropped,
    evaluated,
    excluded,
    fenced,
    halted,
    holds,
    joined,
    m,
    offer_failed,
    offered,
    opened,
    ready,
    refused,
    rejected,
    released,
    restored,
    selected,
    started,
    target,
    trained,
    trainer_joined,
    verified,
)
from tests.spec import T0, Step, by, contradicts, counts, given, head, serving

SELECTED: tuple[Step, ...] = (*SERVING, *trained("c1"))
TARGETED: tuple[Step, ...] = (*SELECTED, target(1, "c1", E0, E1))
VERIFIED: tuple[Step, ...] = (
    *TARGETED,
    *(fenced("e0", 1), fenced("e1", 1), offered(1, "c1")),
    *(verified("e0", 1, "c1"), verified("e1", 1, "c1")),
)


# -- the rows of section 5


def test_registration_makes_the_base_model_release_0() -> None:
    world = given(*REGISTERED).then(head("inc:0"))
    release = world.publications.releases["inc:0"]
    assert (release.candidate, release.manifest, release.weights, release.seq) == (
        "base",
        digest("base"),
        blob("base"),
        3,
    )


def test_row_1_a_dispatch_opens_the_job_over_its_batch() -> None:
    world = given(*REGISTERED).when(dispatched("j")).then(counts)
    job = world.training.job
    assert job and (job.id, job.step, job.base, job.batch, job.seq) == ("j", 1, "base", blob("batch-j"), 4)
    assert (job.attempt, world.training.dispatched, world.training.batches) == (0, 1, {"": blob("batch-j")})


def test_row_2_a_start_names_its_attempt_and_its_boot() -> None:
    world = given(*REGISTERED, dispatched("j")).when(started("j")).then(counts)
    job = world.training.job
    assert job and (job.attempt, job.boot, job.started) == (1, "t1", 5)


def test_row_3_a_candidate_is_known_and_not_selected() -> None:
    world = given(*REGISTERED, dispatched("j"), started("j")).when(ready("j", "c1")).then(counts)
    found = world.training.candidates["c1"]
    assert (found.base, found.step, found.manifest, found.selected, found.rejected) == (
        "base",
        1,
        digest("c1"),
        0,
        False,
    )
    assert world.training.job is not None


def test_row_4_the_decision_closes_the_job() -> None:
    start = (*REGISTERED, dispatched("j"), started("j"), ready("j", "c1"), evaluated("c1"))
    yes = given(*start).when(selected("c1")).then(counts).training
    assert (yes.job, yes.closed, yes.selected, yes.base, yes.candidates["c1"].selected) == (None, 8, ["c1"], "c1", 8)
    no = given(*start).when(rejected("c1")).then(counts).training
    assert (no.job, no.closed, no.selected, no.base, no.candidates["c1"].rejected) == (None, 8, [], "base", True)


def test_row_5_the_target_fixes_the_publication() -> None:
    world = given(*SELECTED).when(target(1, "c1", E0, E1)).then(counts, serving(), head("inc:0"))
    open_ = world.publications.open
    assert open_ and (open_.id, open_.candidate, open_.load_id, open_.parent) == ("pub1", "c1", "inc:1", "inc:0")
    assert (open_.attempt, open_.attempt_seq, open_.attempt_time) == (1, 13, T0 + 13_000_000)
    assert open_.members == (Member("e0", "e0.1"), Member("e1", "e1.1"))


def test_row_6_fences_and_the_offer_are_known_per_attempt() -> None:
    world = given(*TARGETED, fenced("e0", 1)).when(offered(1, "c1")).then(counts)
    assert world.membership.fence("e0.1", "pub1", 1) and not world.membership.fence("e1.1", "pub1", 1)
    assert not world.membership.fence("e0.1", "pub1", 2)
    sender = world.training.sender
    assert sender and (sender.boot, sender.publication, sender.attempt, sender.load_id, sender.manifest) == (
        "t1",
        "pub1",
        1,
        "inc:1",
        digest("c1"),
    )


def test_row_7_a_report_is_a_report_and_no_commit() -> None:
    world = given(*VERIFIED).then(serving(), head("inc:0"))
    report = world.membership.report("e0.1", "pub1", 1)
    assert report and (report.load_id, report.manifest, report.failure) == ("inc:1", digest("c1"), "")


def test_row_8_the_commit_is_the_commit_point() -> None:
    world = given(*VERIFIED).when(committed(1, "c1", E0, E1)).then(counts, serving("e0", "e1"), head("inc:1"))
    found = world.publications
    assert found.open is None and found.ended == {"base": "committed", "c1": "committed"} and found.ended_seq == 19
    assert found.releases["inc:1"].parent == "inc:0"


def test_a_dropped_job_leaves_no_candidate() -> None:
    world = given(*REGISTERED, dispatched("j"), started("j")).when(dropped("j")).then(counts)
    assert world.training.job is None and set(world.training.candidates) == {"base"}


def test_an_aborted_attempt_keeps_the_load_id_and_excludes_the_guilty() -> None:
    """Attempts: next membership, same load id."""
    world = given(*TARGETED).when(aborted(1, 1, E0, excluded=(E1,))).then(counts, serving())
    open_ = world.publications.open
    assert open_ and (open_.load_id, open_.attempt, open_.members, open_.attempt_seq) == ("inc:1", 2, (E0,), 14)
    assert world.publications.excluded == {"e1.1": 14}


def test_a_halt_excludes_the_guilty_too() -> None:
    world = given(*TARGETED).when(halted(1, excluded=(E1,))).then(counts, serving("e0"), head("inc:0"))
    assert world.publications.ended["c1"] == "halted" and "e1.1" in world.publications.excluded


def test_a_halted_load_id_is_never_used_again() -> None:
    """Section 6: the sequence is the last persisted target's plus one."""
    again = (*TARGETED, halted(1), restored("base", 0), *trained("c2", "base", 2))
    given(*again).when(target(1, "c2", E0, E1, parent=0)).then(contradicts("load id inc:1"))
    given(*again).when(target(2, "c2", E0, E1, parent=0)).then(counts)
    given(*again).when(target(3, "c2", E0, E1, parent=0)).then(contradicts("load id inc:3"))


def test_a_refusal_uses_no_load_id() -> None:
    history = (*SELECTED, refused("c1"), restored("base", 0), *trained("c2", "base", 2))
    given(*history).when(target(1, "c2", E0, E1)).then(counts)


def test_restoring_moves_the_base() -> None:
    world = given(*SELECTED, refused("c1")).when(restored("base", 0)).then(counts)
    assert world.training.base == "base"


def test_the_latest_word_of_the_sender_counts() -> None:
    """Row 6: per attempt, by whichever trainer boot lives."""
    world = given(*TARGETED, offered(1, "c1"), by("t2", trainer_joined())).when(offer_failed(1)).then(counts)
    sender = world.training.sender
    assert sender and (sender.boot, sender.failure) == ("t2", "memory: no room")


def test_the_supervisors_words_are_counted() -> None:
    def component(event: Any) -> Any:
        return event(component="engine-0", **({"exit": -9} if event is ComponentLost else {}))

    begin = ComponentStarted(component="engine-0", pid=1, starts=1)
    world = given(opened(), begin, component(ComponentLost)).world
    assert (world.components["engine-0"].running, world.components["engine-0"].lost) == (False, [T0 + 3_000_000])
    halt = RecoveryHalted(component="engine-0", restarts=4, window_s=300.0)
    assert given(opened(), begin, halt).world.components["engine-0"].halted


# -- staleness


def test_staleness_counts_links_of_the_base_chain() -> None:
    """Section 5, Staleness: from the sample's release to the job's base, committed or not."""
    chain = (*SELECTED, *released(1, "c1", E0, E1), *trained("c2", "c1", 2), *trained("c3", "c2", 3))
    world = given(*chain).world
    assert lag(world, "inc:1", "c1", 8) == 0
    assert lag(world, "inc:1", "c3", 8) == 2
    assert lag(world, "inc:0", "c3", 8) == 3
    assert lag(world, "inc:0", "c3", 2) is None
    assert lag(world, "inc:7", "c3", 8) is None


# -- contradictions: correctly chained, and yet against what is monotone


def test_a_log_begins_with_one_log_opened() -> None:
    given().when(trainer_joined()).then(contradicts("exactly one LogOpened"))
    given(opened()).when(opened()).then(contradicts("exactly one LogOpened"))


def test_rules_that_this_version_does_not_know() -> None:
    given().when(opened(rules=2)).then(contradicts("rules 2"))


def test_a_job_from_a_base_that_never_was() -> None:
    given(*REGISTERED).when(dispatched("j", base="c9")).then(contradicts("c9"))


@pytest.mark.parametrize(
    ("history", "event", "why"),
    [
        (SERVING, target(1, "c1", E0, E1), "not selected"),
        ((*SERVING, *trained("c1")[:-1]), target(1, "c1", E0, E1), "not selected"),
        ((*SERVING, *trained("c1")[:-1], rejected("c1")), target(1, "c1", E0, E1), "not selected"),
        (SELECTED, target(1, "c1"), "empty"),
        (SELECTED, target(1, "c1", E0, m("e1", 2)), r"e1\.2 never joined"),
        (SELECTED, target(1, "c1", m("e7")), "e7"),
        (SELECTED, target(1, "c1", E0, parent=3), "reach the head"),
        (SELECTED, target(1, "c1", E0, manifest="other"), "other"),
        ((*SELECTED, *trained("c2", "c1", 2)), target(1, "c2", E0), "reach the head"),
        (SELECTED, msgspec.structs.replace(target(1, "c1", E0), load_id="other:1"), "load id"),
        (SELECTED, msgspec.structs.replace(target(1, "c1", E0), load_id="garbage"), "load id"),
        (SELECTED, msgspec.structs.replace(target(1, "c1", E0), load_id="inc:01"), "load id"),
    ],
)
def test_a_target_that_contradicts(history: tuple[Step, ...], event: Any, why: str) -> None:
    """Rule 6: candidate selected; base chain; each member had joined; membership not empty; one load id each."""
    given(*history).when(event).then(contradicts(why), serving("e0", "e1"))


def test_an_empty_membership_never_commits() -> None:
    """Section 8, first history: neither as a target, nor as a next attempt, nor as a commit."""
    given(*SELECTED).when(target(1, "c1")).then(contradicts("empty"))
    given(*TARGETED).when(aborted(1, 1, excluded=(E0, E1))).then(contradicts("empty"))
    given(*VERIFIED).when(committed(1, "c1")).then(contradicts("membership"))


@pytest.mark.parametrize(
    ("history", "event", "why"),
    [
        (VERIFIED[:-1], committed(1, "c1", E0, E1), "e1 .*nothing"),
        (VERIFIED, committed(1, "c1", E0), "membership"),
        (VERIFIED, committed(1, "c1", E0, E1, m("e2")), "membership"),
        (VERIFIED, committed(1, "c1", E0, m("e1", 2)), "membership"),
        (VERIFIED, committed(1, "c1", E0, E1, manifest="other"), "other"),
        (VERIFIED, committed(1, "c1", E0, E1, parent=4), "target"),
        (VERIFIED, msgspec.structs.replace(committed(1, "c1", E0, E1), load_id="inc:2"), "inc:2"),
        ((*VERIFIED[:-1], verified("e1", 1, "c1", manifest="lie")), committed(1, "c1", E0, E1), "e1 .*lie"),
        ((*VERIFIED[:-1], verified("e1", 2, "c1")), committed(1, "c1", E0, E1), "e1"),
    ],
)
def test_a_commit_that_contradicts(history: tuple[Step, ...], event: Any, why: str) -> None:
    """Invariants 3 and 7: exactly the attempt's membership, and the target's load id and digest."""
    given(*history).when(event).then(contradicts(why), head("inc:0"), serving())


def test_a_members_first_word_counts() -> None:
    """Rule 6: a liar that changes its mind has still lied, and one that fails later has still verified."""
    lied = (*VERIFIED[:-1], verified("e1", 1, "c1", manifest="lie"), verified("e1", 1, "c1"))
    given(*lied).when(committed(1, "c1", E0, E1)).then(contradicts("e1"))
    from tests.facts import failed

    given(*VERIFIED, failed("e1", 1)).when(committed(1, "c1", E0, E1)).then(counts, serving("e0"))


def test_observations_grant_nothing_to_another_attempt() -> None:
    """Rule 6: matched by (boot, publication, attempt)."""
    again = (*VERIFIED, aborted(1, 1, E0, E1))
    given(*again).when(committed(1, "c1", E0, E1, attempt=2)).then(contradicts("nothing"))
    replaced = (*VERIFIED[:-1], by("e1.2", joined("e1")), by("e1.2", verified("e1", 1, "c1")))
    given(*replaced).when(committed(1, "c1", E0, E1)).then(contradicts(r"e1\.1"))


def test_a_candidate_id_names_one_candidate() -> None:
    """The base chain is monotone: no later event may bend it, least of all into a circle."""
    start = (*SELECTED, dispatched("j2", "c1", 2), started("j2"))
    given(*start).when(ready("j2", "c1", "c1")).then(contradicts("c1"))
    given(*start).when(ready("j2", "base", "c1")).then(contradicts("base"))
    given(*start).when(ready("j2", "c2", "base")).then(contradicts("base"))


def test_attempts_are_numbered_without_gaps_or_repeats() -> None:
    """A repeated number would let the words on a dead attempt count for the next one."""
    given(*VERIFIED).when(msgspec.structs.replace(aborted(1, 1, E0, E1), next_attempt=1)).then(contradicts("attempt"))
    given(*SELECTED).when(msgspec.structs.replace(target(1, "c1", E0), attempt=2)).then(contradicts("attempt"))


def test_a_contradiction_leaves_the_world_as_it_was() -> None:
    history = given(*VERIFIED[:-1])
    before = msgspec.json.encode(history.world)
    history.when(committed(1, "c1", E0, E1)).then(contradicts("e1"))
    assert msgspec.json.encode(history.world) == before


def test_engines_go_on_serving_what_they_serve_when_the_log_contradicts() -> None:
    """Row "log contradicts": stop, say so; section 1.6: engines go on serving."""
    given(*SELECTED).when(target(1, "c1")).then(contradicts("empty"), serving("e0", "e1"))


def test_the_fold_does_not_depend_on_objects_that_others_hold() -> None:
    recorded = given(*SELECTED).scribe.log
    worlds = World(), World()
    for each in recorded:
        fold(worlds[0], each)
    worlds[0].training.candidates.clear()
    for each in recorded:
        fold(worlds[1], each)
    assert set(worlds[1].training.candidates) == {"base", "c1"}


def test_sequences_and_ids_of_the_last_event_are_remembered() -> None:
    """Section 6: consumers remember (sequence, event id) of the last event they applied."""
    history = given(*SERVING)
    last = history.scribe.log[-1]
    assert (history.world.seq, history.world.last_id, history.world.time) == (7, last.id, T0 + 7_000_000)


# -- histories of section 8


def test_history_a_verification_whose_engine_restarts_before_the_commit() -> None:
    """The word of the old boot commits the release; the new boot serves nothing until it proved the head itself."""
    history = (*VERIFIED, by("e1.2", joined("e1")))
    given(*history).when(committed(1, "c1", E0, E1)).then(counts, serving("e0"), head("inc:1"))
    given(*history, committed(1, "c1", E0, E1)).when(holds("e1", 1, "c1")).then(serving("e0", "e1"))


def test_history_an_excluded_engine_finishes_and_then_sees_the_commit() -> None:
    """Excluded in attempt 1, it verifies the target, loads the incumbent, and sees the commit: it never generates."""
    history = (
        *(*TARGETED, fenced("e0", 1), aborted(1, 1, E0, excluded=(E1,))),
        *(fenced("e1", 1), verified("e1", 1, "c1"), holds("e1", 0, "base"), fenced("e0", 1, 2), offered(1, "c1", 2)),
        *(verified("e0", 1, "c1", 2), holds("e1", 1, "c1")),
    )
    given(*history).when(committed(1, "c1", E0, attempt=2)).then(counts, serving("e0"))


def test_history_a_member_dies_right_after_the_commit() -> None:
    history = (*VERIFIED, committed(1, "c1", E0, E1), excluded("e1"))
    given(*history).then(serving("e0"), head("inc:1"))
    given(*history, by("e1.2", joined("e1"))).when(holds("e1", 1, "c1")).then(serving("e0", "e1"))


def test_history_an_accepted_but_void_append_and_its_writers_next_move() -> None:
    """A target stored by another spelling of the filter is void; the next one chains to it and counts."""
    from tests.spec import chained_to

    history = given(*SELECTED, chained_to(5, target(1, "c1", E0)))  # stored at 13, though release's last is none
    history.when(target(1, "c1", E0, E1)).then(counts, serving())


def test_history_the_commit_of_n_while_n_plus_1_is_already_selected() -> None:
    history = (*VERIFIED, *trained("c2", "c1", 2), committed(1, "c1", E0, E1))
    given(*history).when(target(2, "c2", E0, E1)).then(counts)


def test_an_error_names_its_sequence() -> None:
    history = given(*SELECTED)
    recorded = history.scribe.write(target(1, "c1"))
    with pytest.raises(ContractError) as caught:
        fold(history.world, recorded)
    assert caught.value.seq == recorded.seq == 13


def test_a_target_forgets_what_was_said_about_older_publications() -> None:
    first = (*SERVING, *trained("c1"), *released(1, "c1", E0, E1))
    said = given(*first).world.membership
    assert len(said.reports) == len(said.fences) == 2
    forgotten = given(*first, *trained("c2", "c1", 2), target(2, "c2", E0, E1)).world.membership
    assert (forgotten.reports, forgotten.fences) == ({}, {})
