"""What a log begins from: the blob's form, how a fold takes it up, what contradicts it, where it is fetched.

Knows: facts, the fold. Must not know: who rolls a log (tests/integration/test_roll.py), or that nothing which
matters is lost (tests/property/test_roll.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest

from reef_bus.artifacts import ArtifactStore
from reef_bus.audit import History, read_export, write_export
from reef_bus.backup import named
from reef_bus.core.invariants import Audit, check
from reef_bus.core.records import Consumed
from reef_bus.core.start import FORMAT, PER_SCENARIO, LastBatch, Start, compact, decode_start, encode_start, unrest
from reef_bus.core.world import World, fold
from reef_bus.errors import ContractError
from reef_bus.events import Blob, LogOpened, Recorded
from reef_bus.journal import MemoryJournal, MemoryStreams
from reef_bus.origin import blobs_in, nowhere, start_of
from reef_bus.roll import start_after
from reef_bus.runner import Runner
from reef_bus.samples import Batch, encode_batch
from tests.facts import (
    CODE,
    E0,
    E1,
    FROZEN,
    MATH,
    NO_LORA,
    REGISTERED,
    SERVING,
    S,
    adapter_trained,
    blob,
    dispatched,
    dropped,
    holds,
    joined,
    of,
    opened,
    registered,
    rejected,
    released,
    rollback_asked,
    selected,
    started,
    target,
    trained,
    trainer_joined,
)
from tests.loop import Scripted, once
from tests.spec import Scribe, Step, by

RELEASED: tuple[Step, ...] = (*SERVING, *trained("c1"), *released(1, "c1", E0, E1))


def told(*steps: Step) -> tuple[World, Scribe]:
    world, scribe = World(), Scribe()
    for step in steps:
        assert fold(world, scribe.write(step)) == ""
    return world, scribe


def start_of_log(*steps: Step, consumed: Mapping[str, Consumed] = {}) -> Start:
    world, _ = told(*steps)
    return compact(world.seq, world.last_id, world.training, world.publications, consumed)


def first(origin: Start, incarnation: str = "inc", **other: object) -> LogOpened:
    named = {"predecessor": "REEF_test_LOG", "predecessor_seq": origin.seq, "predecessor_id": origin.id}
    event = LogOpened(incarnation=incarnation, rules=1, start=Blob("sha-of-start", 1), **named)
    return msgspec.structs.replace(event, **other)


def continued(start: Start, *steps: Step, seq: int = 0) -> list[Recorded]:
    """A log that goes on from `start`: numbered on, its families begin anew."""
    scribe = Scribe()
    log = [scribe.write(step) for step in steps]
    shift = (seq or start.seq + 1) - 1
    return [msgspec.structs.replace(r, seq=r.seq + shift, prev=r.prev + shift if r.prev else 0) for r in log]


def audited(start: Start, *steps: Step) -> Audit:
    return check(continued(start, *steps), (), None, start)


# -- the blob


def test_a_start_is_the_state_without_boots() -> None:
    start = start_of_log(*RELEASED)
    assert (start.seq, start.scenario, start.model, start.head, start.sequence) == (19, S, "tiny", "inc:1", 1)
    assert [(r.load_id, r.candidate, r.parent) for r in start.releases] == [
        ("inc:0", "base", ""),
        ("inc:1", "c1", "inc:0"),
    ]
    assert [c.id for c in start.candidates] == ["base", "c1"] and start.selected == ("c1",)
    assert start.ended == {"base": "committed", "c1": "committed"}
    assert start.last_batch == Blob("sha-of-batch-job-c1", 10)
    assert b"e0.1" not in encode_start(start) and b"t1" not in encode_start(start)


def test_a_start_comes_back_from_its_bytes_and_other_bytes_do_not_pass_for_one() -> None:
    start = start_of_log(*RELEASED, consumed={"": Consumed(4, frozenset({9, 6}))})
    assert decode_start(encode_start(start)) == start and start.format == FORMAT
    assert (start.floor, start.taken, start.batches) == (4, (6, 9), {})
    with pytest.raises(ContractError, match="does not hold the start of a log"):
        decode_start(b"\x81\xa1a\x01")
    with pytest.raises(ContractError, match="format 4, this version reads 1 to 3: upgrade"):
        decode_start(encode_start(msgspec.structs.replace(start, format=4)))


def test_a_start_with_adapters_says_of_each_scenario_what_its_last_batch_left() -> None:
    twice = (*adapter_trained(MATH, "m1"), *adapter_trained(CODE, "c1"), *adapter_trained(MATH, "m2", "m1", 2))
    consumed = {MATH: Consumed(8), CODE: Consumed(2, frozenset({7, 5}))}
    start = start_of_log(*FROZEN, *twice, consumed=consumed)
    assert decode_start(encode_start(start)) == start and start.format == PER_SCENARIO
    assert start.batches == {
        MATH: LastBatch(batch=blob("batch-job-m2"), floor=8, taken=()),
        CODE: LastBatch(batch=blob("batch-job-c1"), floor=2, taken=(5, 7)),
    }
    assert (start.last_batch, start.floor, start.taken) == (None, 0, ())
    world = World(start=start)
    assert fold(world, continued(start, first(start))[0]) == ""
    assert world.training.batches == {MATH: blob("batch-job-m2"), CODE: blob("batch-job-c1")}


def test_a_roll_reads_the_last_batch_of_each_scenario_and_a_backup_keeps_them(tmp_path: Path) -> None:
    store, batches = ArtifactStore(tmp_path), dict[str, Blob]()
    steps: list[Step] = []
    for scenario, floor, taken in ((MATH, 8, ()), (CODE, 2, (5, 7))):
        batch = Batch(job="j", step=1, base="b", seed=0, samples=(), records=(), floor=floor, taken=taken)
        batches[scenario] = store.put(encode_batch(batch))
        job = msgspec.structs.replace(dispatched("j", NO_LORA[scenario]), batch=batches[scenario])
        steps += of(scenario, job, dropped("j"))
    start = start_after(told(*FROZEN, *steps)[0], store)
    found = {scenario: (each.floor, each.taken) for scenario, each in start.batches.items()}
    assert found == {MATH: (8, ()), CODE: (2, (5, 7))}
    assert {blob.digest for blob in batches.values()} <= named(History((), (), None, start))


def test_a_scenario_without_a_job_is_in_no_start() -> None:
    start = start_of_log(*FROZEN, *adapter_trained(MATH, "m1"), consumed={MATH: Consumed(8)})
    assert start.batches.keys() == {MATH}
    assert start_of_log(*FROZEN).batches == {}


def test_what_was_rejected_is_not_carried_on_and_what_waits_is() -> None:
    lost = (dispatched("j2", "c1", 2), started("j2"))
    tried = (*trained("c2", "c1", 2)[:-1], rejected("c2"), *trained("c3", "c1", 3))
    start = start_of_log(*RELEASED, *tried, *lost)
    assert [c.id for c in start.candidates] == ["base", "c1", "c3"]
    assert (start.selected, start.base, start.dispatched) == (("c1", "c3"), "c3", 4)
    assert selected("c3").candidate not in start.ended


def test_a_log_is_quiet_when_nobody_has_to_end_anything() -> None:
    for steps, found in (
        ((), ""),
        (trained("c2", "c1", 2), ""),
        ((dispatched("j2", "c1", 2),), "job j2 is open: the trainer"),
        ((*trained("c2", "c1", 2), target(2, "c2", E0, E1)), "publication inc:2 is open: e0, e1 and a publisher"),
    ):
        world, _ = told(*RELEASED, *steps)
        assert unrest(world.training, world.publications, world.requests, world.components)[: len(found)] == found
        assert bool(unrest(world.training, world.publications, world.requests, world.components)) == bool(found)


# -- the fold


def test_a_fold_goes_on_from_the_start() -> None:
    start = start_of_log(*RELEASED)
    world = World(start=start)
    for recorded in continued(start, first(start), by("t2", trainer_joined()), joined("e0"), holds("e0", 1, "c1")):
        assert fold(world, recorded) == ""
    head = world.publications.head
    assert head is not None and (head.load_id, head.candidate, world.seq) == ("inc:1", "c1", 23)
    assert list(world.membership.engines) == ["e0"] and world.start is None


def test_a_scenario_is_registered_once_whatever_the_log() -> None:
    start = start_of_log(*REGISTERED)
    world = World(start=start)
    log = continued(start, first(start), trainer_joined(), registered())
    assert [fold(world, recorded) for recorded in log] == ["", "", "a scenario is registered already"]


def test_a_log_may_be_rolled_before_its_scenario_is_registered() -> None:
    start = start_of_log(opened(), trainer_joined())
    world = World(start=start)
    assert [fold(world, r) for r in continued(start, first(start), trainer_joined(), registered())] == ["", "", ""]
    assert world.publications.head is not None and world.publications.head.load_id == "inc:0"


def test_a_new_incarnation_mints_new_load_ids_and_the_head_keeps_its_own() -> None:
    start = start_of_log(*RELEASED, *trained("c2", "c1", 2))
    world = World(start=start)
    steps = (first(start, incarnation="again"), trainer_joined(), joined("e0"), target(2, "c2", E0))
    *before, wrong = continued(start, *steps)
    for recorded in before:
        fold(world, recorded)
    with pytest.raises(ContractError, match="load id inc:2 does not follow"):
        fold(world, wrong)
    event = msgspec.structs.replace(wrong.event, load_id="again:2")
    assert fold(world, msgspec.structs.replace(wrong, event=event)) == ""


def contradiction(start: Start, event: LogOpened, given: Start | None, seq: int = 0) -> str:
    world = World(start=given)
    with pytest.raises(ContractError) as caught:
        fold(world, continued(start, event, seq=seq)[0])
    assert (world.seq, world.incarnation) == (0, "")
    return str(caught.value)


def test_a_start_that_does_not_fit_halts_whoever_reads_it() -> None:
    start = start_of_log(*RELEASED)
    said = contradiction(start, first(start), None)
    assert "its start is blob sha-of-start, which was not read along" in said
    assert "blob none" in contradiction(start, opened(), start)
    said = contradiction(start, first(start, predecessor_id="other"), start)
    assert "it follows event 19 other, its start is the state after 19" in said
    assert "its predecessor ends at 19" in contradiction(start, first(start), start, seq=25)
    broken = msgspec.structs.replace(start, candidates=start.candidates[:1])
    assert "candidates that it does not hold: ['c1']" in contradiction(start, first(start), broken)
    headless = msgspec.structs.replace(start, head="inc:7")
    assert "contradicts itself: scenario 'digit' with head 'inc:7'" in contradiction(start, first(start), headless)


# -- fetched


def test_a_start_is_fetched_by_its_digest_and_missed_by_name(tmp_path: Path) -> None:
    start, store = start_of_log(*RELEASED), ArtifactStore(tmp_path)
    stored = store.put(encode_start(start))
    recorded = continued(start, first(start, start=stored))[0]
    assert start_of(recorded, blobs_in(tmp_path)) == start
    assert start_of(continued(start, opened())[0], nowhere) is None
    with pytest.raises(ContractError, match="name the deployment by -c FILE or --state DIR") as caught:
        start_of(recorded, nowhere)
    assert caught.value.seq == 20
    store.path(stored.digest).unlink()
    with pytest.raises(ContractError, match=f"no blob at .*{stored.digest}: copy it there"):
        start_of(recorded, blobs_in(tmp_path))


async def test_a_runner_fetches_the_start_or_halts(tmp_path: Path) -> None:
    start, store = start_of_log(*RELEASED), ArtifactStore(tmp_path)
    recorded = continued(start, first(start, start=store.put(encode_start(start))))[0]
    runner = Runner(MemoryJournal(MemoryStreams()), Scripted(once), fetch=blobs_in(tmp_path))
    runner._fold([recorded])
    assert runner.world.publications.releases.keys() == {"inc:0", "inc:1"}
    with pytest.raises(ContractError, match="no artifact folder"):
        Runner(MemoryJournal(MemoryStreams()), Scripted(once))._fold([recorded])


# -- audited


def test_a_log_that_goes_on_is_audited_from_its_start(tmp_path: Path) -> None:
    start = start_of_log(*RELEASED)
    rest = (first(start), trainer_joined(), joined("e0"), holds("e0", 1, "c1"), *trained("c2", "c1", 2))
    audit = audited(start, *rest)
    assert (audit.violations, audit.log_events, audit.final.load_id) == ((), 9, "inc:1")
    log = tuple(continued(start, *rest))
    write_export(History(log, (), None, start), tmp_path / "export")
    assert read_export(tmp_path / "export") == History(log, (), None, start)
    write_export(History(log, (), None, msgspec.structs.replace(start, format=4)), tmp_path / "export")
    with pytest.raises(ContractError, match="line 1: the log's start has format 4, this version reads 1 to 3"):
        read_export(tmp_path / "export")


def test_the_audit_remembers_what_the_start_knows() -> None:
    """By itself, not by the fold: a target on another parent, on another content, under a number that was taken."""
    start = start_of_log(*RELEASED, *trained("c2", "c1", 2))
    begun = (first(start), trainer_joined(), joined("e0"))
    for wrong, invariant in (
        (target(2, "c2", E0, parent=0), 5),
        (target(2, "c2", E0, manifest="other"), 3),
        (msgspec.structs.replace(target(2, "c2", E0), load_id="inc:1", manifest="other"), 4),
        (target(2, "c1", E0), 5),
    ):
        found = {violation.invariant for violation in audited(start, *begun, wrong).violations}
        assert {"fold", invariant} <= found, (wrong, found)
    assert audited(start, *begun, target(2, "c2", E0)).violations == ()


def test_a_gap_behind_the_start_is_found() -> None:
    start = start_of_log(*RELEASED)
    found = check(continued(start, first(start), seq=25), (), None, start)
    assert [violation.invariant for violation in found.violations] == ["gap", "fold"]


def test_a_rollback_to_what_the_predecessor_had_released_is_no_violation() -> None:
    start = start_of_log(*RELEASED)
    begun = (first(start), trainer_joined(), joined("e0"), holds("e0", 1, "c1"))
    back = msgspec.structs.replace(target(2, "base", E0), sender="artifact", request=start.seq + len(begun) + 1)
    assert audited(start, *begun, rollback_asked(0, 1), back).violations == ()
