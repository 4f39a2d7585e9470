"""Failures that others met, by the numbers of docs/failure-modes.md, each brought about here with the real parts.

Knows: the real agent, endpoint, router, book and trainer; an engine of four floats; a log on which the test says what
everybody else would say. Must not know: processes (tests/integration/test_peer_failures.py).
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from reef_bus.artifacts import ArtifactStore, load_weights, save_weights
from reef_bus.backends import Piece
from reef_bus.core.effects import AssembleBatch
from reef_bus.core.invariants import check
from reef_bus.errors import ReefError
from reef_bus.events import Draft, PublicationHalted, TargetPersisted, TransferAborted
from reef_bus.journal import MemoryJournal, MemoryStreams
from reef_bus.views import engine_state
from tests.alone import Alone, alone
from tests.facts import (
    E0,
    E1,
    SERVING,
    L,
    aborted,
    committed,
    fenced,
    halted,
    holds,
    joined,
    left,
    offered,
    released,
    target,
    trained,
    trainer_joined,
    verified,
)
from tests.loop import put, quiet, running, until
from tests.spec import (
    SECOND,
    Step,
    by,
    counts,
    facts_of,
    given,
    head,
    only,
    publisher_debts,
    serving,
    trainer_debts,
)
from tests.unit.test_agent import BASE, NEXT, memory
from tests.unit.test_book import SAMPLE, Shelf, batch, names, nothing, perform, trainer, training, world
from tests.unit.test_gateway import Scripted, at_once

TARGETED: tuple[Step, ...] = (*SERVING, *trained("c1"), target(1, "c1", E0, E1))
READY: tuple[Step, ...] = (*TARGETED, fenced("e0", 1), fenced("e1", 1), offered(1, "c1"))
VERIFIED: tuple[Step, ...] = (*READY, verified("e0", 1, "c1"), verified("e1", 1, "c1"))
RELEASED: tuple[Step, ...] = (*VERIFIED, committed(1, "c1", E0, E1))


# -- receivers that say that all is well


@pytest.mark.parametrize("brings", [b"", BASE], ids=["row_14_nothing", "row_39_the_version_before"])
async def test_row_14_39_an_update_that_reports_success_and_loaded_something_else_is_a_failure(
    tmp_path: Path, brings: bytes
) -> None:
    async with alone(tmp_path) as found:
        found.wire.brings = brings
        await found.aim(1, "c1")
        said = await found.says("ReceiverFailed")
        assert (said.cause, said.observed) == ("digest", found.kept["base"][1])
        assert found.said("ReceiverVerified", publication="pub1") == []


async def test_row_58_an_engine_of_another_shape_says_what_does_not_fit_and_waits_for_nothing(tmp_path: Path) -> None:
    found = Alone(tmp_path, MemoryJournal(MemoryStreams()), 1)
    found.keep("base", bytes(32))
    async with running(found.journal, found.agent):
        await found.register()
        said = await found.says("EngineLeft")
    assert said.reason.startswith("cannot load the head inc:0") and "w" in said.reason
    assert found.agent.serving() == "" and memory(found.agent) == bytes(16)


# -- updates that end half way


async def test_row_45_half_an_update_is_never_served_and_is_replaced_by_the_release_from_its_artifact(
    tmp_path: Path,
) -> None:
    async with alone(tmp_path) as found:
        found.wire.fails = True
        await found.aim(1, "c1")
        await found.says("ReceiverFailed")
        assert bytes(memory(found.agent)) == NEXT[:8] + BASE[8:] and found.agent.serving() == ""
        await put(found.journal, halted(1))
        await found.serves(0)
        assert found.said("ReceiverVerified")[-1].method == "artifact"
        assert await found.answer() == ("inc:0", BASE)


async def test_row_59_nobody_is_answered_from_a_half_written_model(tmp_path: Path) -> None:
    async with alone(tmp_path) as found:
        found.wire.may_end.clear()
        await found.aim(1, "c1")
        await found.wire.half.wait()
        asked = asyncio.create_task(found.answer())
        await quiet()
        assert not asked.done() and found.client.backend.batches == []
        found.wire.may_end.set()
        await found.says("ReceiverVerified", publication="pub1")
        await quiet()
        assert not asked.done(), "verified is not committed"
        await found.commit(1, "c1")
        assert await asked == ("inc:1", NEXT)


async def test_row_63_requests_that_wait_hold_nothing_that_an_update_needs(tmp_path: Path) -> None:
    """While they wait an attempt ends, the next one is fenced and received, and they are answered by its release."""
    async with alone(tmp_path) as found:
        found.wire.may_end.clear()
        await found.aim(1, "c1")
        await found.wire.half.wait()
        asked = [asyncio.create_task(found.answer()) for _ in range(12)]
        await until(lambda: found.client.server.queue.qsize() >= 11)
        found.wire.may_end.set()
        await put(found.journal, aborted(1, 1, E0))
        await found.says("EngineFenced", attempt=2)
        await found.trains(found.real(offered(1, "c1", 2), "c1"))
        await found.says("ReceiverVerified", publication="pub1", attempt=2)
        await found.commit(1, "c1", attempt=2)
        assert set(await asyncio.gather(*asked)) == {("inc:1", NEXT)}


async def test_row_29_after_a_failed_update_the_next_one_is_received_and_nothing_is_reloaded(tmp_path: Path) -> None:
    """How a boot gets the head is asked of its memory each time; no failure leaves a mode behind."""
    async with alone(tmp_path) as found:
        found.wire.fails = True
        await found.aim(1, "c1")
        await found.says("ReceiverFailed")
        await put(found.journal, halted(1))
        await found.serves(0)
        found.wire.fails = False
        await found.release(2, "c2", parent=0)
        moved = [(said.method, said.bytes) for said in found.said("ReceiverVerified")]
        assert moved == [("artifact", 16), ("artifact", 16), ("received", 16)]


# -- what comes back, and when


async def test_row_22_35_69_after_a_restart_of_everything_engines_come_back_alone_and_with_the_head(
    tmp_path: Path,
) -> None:
    """No trainer, publisher or batch is there. Who asked before is answered by the release, not by the base model."""
    async with alone(tmp_path) as found:
        await found.release(1, "c1")
    async with alone(tmp_path, found.journal, start=2) as again:
        assert memory(again.agent) != NEXT
        assert await again.answer() == ("inc:1", NEXT)
        assert [said.load_id for said in again.said("ReceiverVerified")] == ["inc:1"]


def test_row_22_69_after_a_restart_of_everything_the_trainer_waits_for_records_and_for_no_engine() -> None:
    """Its next job starts from the release that was recovered, not from the base model, and is the second one."""
    found = given(*RELEASED, by("t2", trainer_joined())).world
    assert only(trainer_debts(found, "t2")) == AssembleBatch(("c1",), 2, found.training.batches)


async def test_row_35_nothing_is_asked_of_an_engine_that_came_back_until_it_holds_the_recovered_version() -> None:
    """Neither with nothing proven, nor with a proof of the base model, release 0."""
    router, back = Scripted(at_once), (*RELEASED, left("e1"), by("e0.2", joined("e0")))
    given(*back).then(serving())
    given(*back, by("e0.2", holds("e0", 0, "base"))).then(serving())
    router.moved(given(*back, by("e0.2", holds("e0", 0, "base"))).world)
    assert router.able() == []
    given(*back, by("e0.2", holds("e0", 1, "c1"))).then(serving("e0"))


def test_row_71_an_engine_that_recovers_has_a_state_of_its_own_and_no_traffic() -> None:
    router, back = Scripted(at_once), (*SERVING, by("e1.2", joined("e1")))
    found = given(*back).world
    router.moved(found)
    assert engine_state(found, "e1") == "catching-up" and [engine.id for engine in router.able()] == ["e0"]
    found = given(*back, holds("e1", 0, "base")).world
    router.moved(found)
    assert engine_state(found, "e1") == "serving" and [engine.id for engine in router.able()] == ["e0", "e1"]


def test_row_72_an_engine_that_comes_back_elsewhere_is_asked_there() -> None:
    router = Scripted(at_once)
    moved = replace(joined("e1"), url="http://elsewhere")
    router.moved(given(*SERVING, by("e1.2", moved), holds("e1", 0, "base")).world)
    assert [engine.url for engine in router.able()] == ["http://e0", "http://elsewhere"]


def test_row_56_an_engine_that_failed_to_rejoin_is_in_no_list() -> None:
    """Routing and the next membership are read from one log: neither can remember it longer than the other."""
    back, router = (*SERVING, by("e1.2", joined("e1")), by("e1.2", left("e1")), *trained("c1")), Scripted(at_once)
    state = given(*back)
    router.moved(state.world)
    (aimed,) = facts_of(publisher_debts(state.world, state.now))
    assert isinstance(aimed, TargetPersisted) and aimed.members == (E0,)
    assert [engine.id for engine in router.able()] == ["e0"]


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path)


async def test_row_17_a_trainer_that_restarts_admits_exactly_what_it_admitted_before(shelf: Shelf) -> None:
    """Consumed stays consumed, stale stays stale, and what was fresh still is: all of it is read from the log."""
    await shelf.exchange("a", "b", load_id="inc:0", group="old")
    await shelf.exchange("c", "d", load_id="inc:1", group="g")
    await shelf.exchange("e", "f", load_id="inc:1", group="h")
    second = (*RELEASED, *trained("c2", "c1", 2), *released(2, "c2", E0, E1))  # inc:0 is two links behind its head
    async with shelf.boot(world(*second)) as found:
        first = await batch(found, "c2")
        assert names(first) == ["c", "d"]
    async with shelf.boot(world(*second, by("t2", trainer_joined()))) as found:
        second_batch = await batch(found, "c2", first)
        assert names(second_batch) == ["e", "f"] and await nothing(found, "c2", second_batch)


# -- versions


async def test_row_25_an_answer_names_the_release_that_it_was_computed_with(tmp_path: Path) -> None:
    """Another release is committed, in the engine's own fold, while the batch is still being generated."""
    async with alone(tmp_path) as found:
        await put(found.journal, joined("e1"), boot="e1.1")
        found.client.backend.may_end.clear()
        asked = asyncio.create_task(found.answer())
        await until(found.agent.memory.locked)
        await found.aim(1, "c1", E1)
        await put(found.journal, fenced("e1", 1), found.real(verified("e1", 1, "c1"), "c1"), boot="e1.1")
        await found.commit(1, "c1", E1)
        await until(lambda: found.agent.world.publications.releases.get(L(1)) is not None)
        found.client.backend.may_end.set()
        assert await asked == ("inc:0", BASE)


def test_row_34_no_version_moves_before_every_member_has_proven_it() -> None:
    for length in range(len(READY), len(VERIFIED) + 1):
        given(*VERIFIED[:length]).then(head(L(0)), serving())
    given(*RELEASED).then(head(L(1)), serving("e0", "e1"))
    given(*READY, verified("e0", 1, "c1"), halted(1, excluded=(E1,))).then(head(L(0)), serving())


# -- steps that never end


SILENCES = (*(VERIFIED[:length] for length in range(len(TARGETED), len(VERIFIED))), (*TARGETED, offered(1, "c1")))
"""At each step of a publication, and where the sender was faster than the engines."""


@pytest.mark.parametrize("history", SILENCES)
def test_row_23_24_33_whoever_goes_silent_at_whatever_step_a_publication_ends(history: tuple[Step, ...]) -> None:
    """Nobody says anything any more: it ends after three attempts at most, each of at most 31 s, and moves nothing."""
    found = given(*history)
    for _ in range(3):
        (owed,) = facts_of(publisher_debts(found.world, found.now + 31 * SECOND))
        assert isinstance(owed, TransferAborted | PublicationHalted)
        found.when(owed).then(counts)
        if isinstance(owed, PublicationHalted):
            break
    assert found.world.publications.open is None
    found.then(head(L(0)))


async def test_row_32_who_waits_for_bytes_is_freed_when_somebody_elses_failure_ends_the_attempt(
    tmp_path: Path,
) -> None:
    async with alone(tmp_path) as found:
        found.wire.may_end.clear()
        await found.aim(1, "c1")
        await found.wire.half.wait()
        await put(found.journal, aborted(1, 1, E0))
        await found.says("EngineFenced", attempt=2)
        assert found.said("ReceiverVerified", publication="pub1") == []


# -- what is lost on the way


@pytest.mark.parametrize("semantics", ["single", "cluster"])
async def test_row_70_when_no_first_acknowledgement_ever_arrives_nobody_stays_paused(
    tmp_path: Path, semantics: Any
) -> None:
    """The engine does not know whether its fence, its proof or its return was stored: it looks, and says each once."""
    lost = set[str]()

    def lose(draft: Draft) -> bool:
        again = f"{draft.event}" in lost
        lost.add(f"{draft.event}")
        return draft.writer.startswith("engine") and not again

    journal = MemoryJournal(MemoryStreams(semantics), lose_ack=lose)
    async with alone(tmp_path, journal) as found:
        await found.register()
        await found.serves(0)
        await found.aim(1, "c1")
        await found.says("EngineFenced")
        await found.says("ReceiverVerified", publication="pub1")
        await put(journal, halted(1))
        await found.serves(0)
        assert await found.answer() == ("inc:0", BASE)
    counted = [r.name for r in found.log() if r.boot == "e0.1"]
    assert counted == ["EngineJoined", "ReceiverVerified", "EngineFenced", "ReceiverVerified", "ReceiverVerified"]
    assert [v.text for v in check(found.log(), [], None).violations] == []


# -- what is kept


def test_row_48_two_models_kept_in_one_folder_overwrite_nothing(tmp_path: Path) -> None:
    store, content = ArtifactStore(tmp_path), {"one": BASE, "two": NEXT}
    kept = {name: save_weights(store, {"w": Piece("F32", (4,), memoryview(data))}) for name, data in content.items()}
    for name, (weights, manifest) in kept.items():
        found = bytearray(16)
        load_weights(store, weights.digest, {"w": Piece("F32", (4,), memoryview(found))}, manifest)
        assert bytes(found) == content[name]


async def test_row_67_what_was_not_really_kept_is_no_candidate(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk takes everything and keeps nothing: what is named on the log is read back first."""
    found, effect = trainer(shelf), training(shelf, SAMPLE)
    monkeypatch.setattr(shelf.store._shelf, "_adopt", lambda draft, final: None)
    with pytest.raises(ReefError, match="no blob at"):
        await perform(found, effect)


# -- the page


def test_every_test_that_the_page_names_is_there() -> None:
    root = Path(__file__).parents[2]
    there = "".join(path.read_text() for path in (root / "tests").rglob("test_*.py"))
    named = re.findall(r"`(test_\w+[a-z0-9])`", (root / "docs" / "failure-modes.md").read_text())
    assert named and [name for name in named if f"def {name}(" not in there] == []
