"""A training loop of one's own: what becomes of a step, and that none is lost or doubled, whenever its process ends.

Knows: the bus, real publishers and agents over an in-memory journal, real transports. Must not know: any framework.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
import threading
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import safetensors.numpy

from consumers.reef_trainer.book import RecordBook
from consumers.reef_trainer.role import Trainer, _build
from reef_bus import attach as attach_module
from reef_bus import attached as attached_module
from reef_bus import runner as runner_module
from reef_bus.artifacts import save_weights
from reef_bus.attach import Boot, Committed, Halted, Handle, Outcome, Refused, attach, attach_blocking
from reef_bus.attached import KEPT_COPIES, Attached, Place
from reef_bus.checkpoint import open_checkpoint
from reef_bus.config import Config, Inference, Training, build, check
from reef_bus.core.effects import Me
from reef_bus.core.training import Candidate
from reef_bus.embedded import Lock
from reef_bus.errors import ContractError, Rejected
from reef_bus.events import CandidateReady, Draft, JobDispatched, JobDropped, TrainerJoined
from reef_bus.journal import MemoryJournal, Stored
from reef_bus.recipe import Decision, Selector
from reef_bus.runner import Runner
from reef_bus.samples import Batch, decode_batch, encode_batch
from reef_bus.tensors import copied
from tests.box import CONFIG, Box, box
from tests.facts import discard_asked, halt_asked, opened, promotion_asked, rollback_asked, started
from tests.loop import names, quiet, until


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "RETRY_S", 0.01)
    monkeypatch.setattr(attach_module, "WATCH_S", 0.01)


def floats(*values: float) -> dict[str, Any]:
    return {"w": np.array(values, dtype="float32")}


def step(number: int) -> dict[str, Any]:
    """What a deterministic loop has after that many steps."""
    return floats(*(number + place / 4 for place in range(4)))


def held(number: int) -> bytes:
    """What an engine then has in its memory."""
    return struct.pack("<4f", *(number + place / 4 for place in range(4)))


class Mortal(MemoryJournal):
    """A process that is dead, as for the log, once the event `last` is there, whoever wrote it."""

    last = ""

    async def append(self, draft: Draft, prev: int) -> Stored:
        if self.last and self.last in names(self.streams):
            await asyncio.Event().wait()
        return await super().append(draft, prev)


class Loop:
    """A training loop's process: one boot, which ends at the event `last`."""

    def __init__(self, deployment: Box, last: str = "") -> None:
        self.role = Attached(deployment.config, Me("trainer", f"t.{next(deployment.boots)}"), deployment.store)
        self.journal = Mortal(deployment.streams)
        self.journal.last = last
        self.boot = Boot(self.role, Runner(self.journal, self.role, clock=lambda: 1, tick_s=60))  # time makes no debts

    async def publish(self, tensors: Mapping[str, Any], *, step: int) -> Outcome:
        await self.boot.room()
        async with asyncio.timeout(10):
            return await self.boot.publish(step, copied(tensors))

    def begin(self, number: int) -> asyncio.Task[Outcome]:
        return asyncio.create_task(self.publish(step(number), step=number))

    async def sees(self, name: str, count: int) -> None:
        """Wait until this process has read that many events of the name: a log has them before its readers do."""
        streams = self.journal.streams
        await until(lambda: names(streams)[: self.role.world.seq].count(name) == count)


@contextlib.asynccontextmanager
async def loop(deployment: Box, last: str = "") -> AsyncIterator[Loop]:
    found = Loop(deployment, last)
    try:
        if not last:
            async with asyncio.timeout(10):
                await found.boot.ready()
        yield found
    finally:
        await found.boot.close()


# -- committed


async def test_the_first_tensors_are_release_0(tmp_path: Path) -> None:
    async with box(tmp_path) as deployment, loop(deployment) as ours:
        assert ours.role.place == Place(-1, None)
        assert await ours.publish(step(0), step=0) == Committed(0, "base", "inc:0", ())
        assert (ours.role.place.step, ours.role.place.head) == (0, ("inc:0", "base", 0))
        await until(lambda: deployment.memories == {"e0": held(0), "e1": held(0)})
        joined = next(event for event in await deployment.log() if isinstance(event, TrainerJoined))
    assert (joined.backend, joined.mutates_in_place) == ("attached", False)


async def test_a_step_is_committed_when_every_engine_has_proven_to_hold_it(tmp_path: Path) -> None:
    async with box(tmp_path) as deployment, loop(deployment) as ours:
        await ours.publish(step(0), step=0)
        await until(lambda: deployment.count("EngineJoined") == 2)
        found = await ours.publish(step(5), step=5)
        assert isinstance(found, Committed) and (found.step, found.load_id) == (5, "inc:1")
        assert sorted(evidence.engine for evidence in found.evidence) == ["e0", "e1"]
        assert ours.role.place == (5, ("inc:1", found.candidate, 5))
        await until(lambda: deployment.memories == {"e0": held(5), "e1": held(5)})
        assert await deployment.violations() == []


def sharded(folder: Path, number: int) -> Path:
    """A checkpoint with an index, of that step."""
    folder.mkdir()
    safetensors.numpy.save_file(step(number), folder / "model-00001-of-00001.safetensors")
    where = {"metadata": {}, "weight_map": {"w": "model-00001-of-00001.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(where))
    return folder


async def test_a_sharded_checkpoint_is_the_start_and_a_step_as_any_tensors_are(tmp_path: Path) -> None:
    async with box(tmp_path) as deployment, loop(deployment) as ours:
        start = await ours.publish(open_checkpoint(sharded(tmp_path / "0", 0)), step=0)
        assert start == Committed(0, "base", "inc:0", ()) == await ours.publish(step(0), step=0)
        await until(lambda: deployment.count("EngineJoined") == 2)
        found = await ours.publish(open_checkpoint(sharded(tmp_path / "7", 7)), step=7)
        assert isinstance(found, Committed) and found.load_id == "inc:1"
        await until(lambda: deployment.memories == {"e0": held(7), "e1": held(7)})


async def test_a_job_of_a_loop_has_a_batch_that_names_step_base_and_weights_and_no_records(tmp_path: Path) -> None:
    async with box(tmp_path) as deployment, loop(deployment) as ours:
        await ours.publish(step(0), step=0)
        await ours.publish(step(1), step=1)
        (job,) = (event for event in await deployment.log() if isinstance(event, JobDispatched))
        (made,) = (event for event in await deployment.log() if isinstance(event, CandidateReady))
        batch = decode_batch(deployment.store.get(job.batch.digest))
    assert (job.step, job.base, job.records) == (batch.step, batch.base, 0) == (1, "base", 0)
    assert (batch.records, batch.samples) == ((), ()) and batch.given
    assert (made.weights, made.manifest, made.optimizer) == (batch.given.weights, batch.given.manifest, None)


async def test_a_batch_that_was_trained_on_is_spelled_as_it_was_before_there_were_loops(tmp_path: Path) -> None:
    plain = Batch(job="j", step=1, base="base", seed=0, samples=(), records=(), floor=3, taken=(5,))
    assert set(msgspec.msgpack.decode(encode_batch(plain))) == {
        *("job", "step", "base", "seed", "samples", "records", "floor", "taken")
    }


async def test_several_steps_are_published_in_the_order_in_which_they_came(tmp_path: Path) -> None:
    async with box(tmp_path) as deployment, loop(deployment) as ours:
        outcomes = await asyncio.gather(*(ours.begin(number) for number in range(5)))
        assert [(found.step, getattr(found, "load_id", "")) for found in outcomes] == [
            *((number, f"inc:{number}") for number in range(5))
        ]
        assert ours.role.copies == {} and ours.role.handed == []
        assert await deployment.violations() == []


async def test_copies_that_nobody_sends_yet_are_read_from_the_store_when_their_turn_comes(tmp_path: Path) -> None:
    async with box(tmp_path, start=False) as deployment:
        await deployment.put(opened())
        await deployment.publisher()
        async with loop(deployment) as ours:
            await ours.publish(step(0), step=0)
            waiting = [ours.begin(number) for number in range(1, 5)]
            await until(lambda: deployment.count("CandidateSelected") == 4)
            assert len(ours.role.copies) == KEPT_COPIES
            deployment.engines()
            assert [getattr(found, "load_id", "") for found in await asyncio.gather(*waiting)] == [
                *("inc:1", "inc:2", "inc:3", "inc:4")
            ]
        await until(lambda: deployment.memories == {"e0": held(4), "e1": held(4)})


# -- published again


async def test_a_step_that_is_published_again_changes_nothing(tmp_path: Path) -> None:
    async with box(tmp_path) as deployment:
        async with loop(deployment) as ours:
            first = [await ours.publish(step(number), step=number) for number in (0, 3)]
            before = deployment.names()
            assert [await ours.publish(step(number), step=number) for number in (0, 3)] == first
            assert deployment.names() == before
        async with loop(deployment) as ours:
            assert ours.role.place.step == 3
            assert [await ours.publish(step(number), step=number) for number in (0, 3)] == first
        assert deployment.names() == [*before, "TrainerJoined"]


async def test_a_step_that_is_under_way_is_published_once_and_both_are_told(tmp_path: Path) -> None:
    async with box(tmp_path) as deployment, loop(deployment) as ours:
        await ours.publish(step(0), step=0)
        first, second = await asyncio.gather(ours.begin(1), ours.begin(1))
        assert first == second and deployment.count("JobDispatched") == 1


ENDS = (
    *("TrainerJoined", "ScenarioRegistered", "JobDispatched", "JobStarted", "CandidateReady", "CandidateEvaluated"),
    *("CandidateSelected", "TargetPersisted", "EngineFenced", "SenderReady", "ReceiverVerified", "ReleaseCommitted"),
)


@pytest.mark.parametrize("event", ENDS)
@pytest.mark.parametrize("again", [True, False], ids=["and publishes again", "and publishes the next step"])
async def test_a_loop_that_ends_at_any_event_goes_on_without_losing_or_doubling_a_release(
    event: str, again: bool, tmp_path: Path
) -> None:
    """Whether it repeats what it was doing or not: what was handed in and dispatched becomes a release."""
    async with box(tmp_path) as deployment:
        async with loop(deployment, event) as ours:
            tasks = [ours.begin(0), ours.begin(1)]
            await until(lambda: event in deployment.names())
            await quiet(0.05)
        await asyncio.gather(*tasks, return_exceptions=True)
        left = deployment.count("ScenarioRegistered") + deployment.count("JobDispatched") - 1
        async with loop(deployment) as ours:
            assert ours.role.place.step == left
            begin = 0 if again else ours.role.place.step + 1
            for number in range(begin, 3):
                assert isinstance(await ours.publish(step(number), step=number), Committed)
            assert ours.role.place.step == 2
        made = [e.step for e in await deployment.log() if isinstance(e, JobDispatched)]
        assert made == [1, 2] and deployment.count("ReleaseCommitted") == 2
        await until(lambda: deployment.memories == {"e0": held(2), "e1": held(2)})
        assert await deployment.violations() == []


async def test_a_lost_acknowledgement_doubles_nothing(tmp_path: Path) -> None:
    async with box(tmp_path) as deployment:
        lost: list[str] = []

        def lose(draft: Any) -> bool:
            first = draft.writer.startswith("trainer") and draft.event.__class__.__name__ not in lost
            lost.append(draft.event.__class__.__name__)
            return bool(first)

        async with loop(deployment) as ours:
            ours.journal.lose_ack = lose
            for number in range(3):
                assert isinstance(await ours.publish(step(number), step=number), Committed)
        assert deployment.count("JobDispatched") == deployment.count("ReleaseCommitted") == 2
        assert await deployment.violations() == []


# -- refused, halted


class Never(Selector):
    name = "never"

    def decide(self, candidate: Candidate, metrics: Mapping[str, float]) -> Decision:
        return Decision(False, "not today")


async def test_a_rejected_step_is_refused_and_its_number_is_free(tmp_path: Path) -> None:
    async with box(tmp_path) as deployment, loop(deployment) as ours:
        await ours.publish(step(0), step=0)
        selector, ours.role.selector = ours.role.selector, Never()
        found = await ours.publish(step(1), step=1)
        assert isinstance(found, Refused) and (found.cause, found.detail) == ("rejected", "by never: not today")
        assert ours.role.place.step == 0
        ours.role.selector = selector
        assert await ours.publish(step(1), step=1) == found
        assert isinstance(await ours.publish(step(7), step=1), Committed)
        assert await deployment.violations() == []


async def test_a_transport_that_an_engine_refuses_is_a_refusal(tmp_path: Path) -> None:
    inference = Inference(engines=("e0", "e1"), accepts=("files",))
    training = msgspec.structs.replace(CONFIG.training, offers=("tcp",))
    config = msgspec.structs.replace(CONFIG, inference=inference, training=training)
    async with box(tmp_path, config) as deployment:
        async with loop(deployment) as ours:
            await ours.publish(step(0), step=0)
            await until(lambda: deployment.count("EngineJoined") == 2)
            found = await ours.publish(step(1), step=1)
    assert isinstance(found, Refused) and found.cause == "transport"
    assert found.detail == "the trainer offers ['tcp']; e0 accepts ['files']; e1 accepts ['files']"


async def test_an_overtaken_step_is_refused_as_superseded(tmp_path: Path) -> None:
    latest = msgspec.structs.replace(CONFIG.publication, publish="latest")
    config = msgspec.structs.replace(CONFIG, publication=latest)
    async with box(tmp_path, config, start=False) as deployment:
        await deployment.put(opened())
        async with loop(deployment) as ours:
            await ours.publish(step(0), step=0)
            tasks = [ours.begin(1), ours.begin(2)]
            await until(lambda: deployment.count("CandidateSelected") == 2)
            await deployment.publisher()
            deployment.engines()
            first, second = await asyncio.gather(*tasks)
    assert isinstance(first, Refused) and (first.step, first.cause) == (1, "superseded")
    assert isinstance(second, Committed) and (second.step, second.load_id) == (2, "inc:1")


async def test_a_publication_that_a_person_halts_is_told_with_the_cause_and_the_next_goes_on(tmp_path: Path) -> None:
    """No transfer succeeds at first: the sender's door leads nowhere."""
    async with box(tmp_path) as deployment, loop(deployment) as ours:
        await ours.publish(step(0), step=0)
        await until(lambda: deployment.memories == {"e0": held(0), "e1": held(0)})
        tcp = ours.role.transports.pop("tcp")
        ours.role.transports["tcp"] = Stuck()
        task = ours.begin(1)
        await ours.sees("EngineFenced", 2)
        world = ours.role.world
        assert world.publications.open
        asked = msgspec.structs.replace(halt_asked(1), publication=world.publications.open.id)
        await deployment.put(asked)
        found = await task
        assert isinstance(found, Halted) and (found.step, found.cause, found.detail) == (1, "operator", "ann: too slow")
        assert ours.role.place == (1, ("inc:0", "base", 0))
        ours.role.transports["tcp"] = tcp
        again = await ours.publish(step(1), step=1)
        assert again == found
        assert isinstance(await ours.publish(step(2), step=2), Committed)
        assert await deployment.violations() == []


class Stuck:
    """A transport that never opens its door."""

    def stored(self, weights: str) -> None:
        return None

    async def offer(self, *args: Any, **kwargs: Any) -> Any:
        await asyncio.Event().wait()


async def test_a_rollback_changes_nothing_about_what_became_of_a_step(tmp_path: Path) -> None:
    """One that is met, one that is refused, and one to a release that never was."""
    async with box(tmp_path) as deployment, loop(deployment) as ours:
        first = [await ours.publish(step(number), step=number) for number in range(3)]
        await deployment.put(rollback_asked(1, on=2))
        await ours.sees("ReleaseCommitted", 3)
        assert ours.role.place == (2, ("inc:3", first[1].candidate, 1))
        await deployment.put(rollback_asked(99, on=3), rollback_asked(1, on=2))
        await until(lambda: deployment.count("PublicationRefused") == 2)
        assert [await ours.publish(step(number), step=number) for number in range(3)] == first
        found = await ours.publish(step(3), step=3)
        assert isinstance(found, Committed) and found.load_id == "inc:4"
        (job,) = [e for e in await deployment.log() if isinstance(e, JobDispatched) and e.step == 3]
        assert job.base == first[1].candidate and deployment.count("TrainerRestored") == 1
        assert await deployment.violations() == []


HOLD = msgspec.structs.replace(CONFIG, training=Training(backend="attached", hold=True))


async def test_a_held_step_waits_for_a_person(tmp_path: Path) -> None:
    async with box(tmp_path, HOLD) as deployment, loop(deployment) as ours:
        await ours.publish(step(0), step=0)
        task = ours.begin(1)
        await ours.sees("CandidateEvaluated", 1)
        job = ours.role.world.training.job
        assert job and not task.done()
        await deployment.put(promotion_asked(job.candidate))
        assert isinstance(await task, Committed)


@pytest.mark.parametrize("restart", [False, True])
async def test_a_discarded_step_is_refused_also_by_the_next_boot(restart: bool, tmp_path: Path) -> None:
    async with box(tmp_path, HOLD) as deployment, contextlib.AsyncExitStack() as stack:
        ours = await stack.enter_async_context(loop(deployment))
        await ours.publish(step(0), step=0)
        task = ours.begin(1)
        await ours.sees("CandidateEvaluated", 1)
        if restart:
            await stack.aclose()
            await asyncio.gather(task, return_exceptions=True)
            ours = await stack.enter_async_context(loop(deployment))
            assert ours.role.place.step == 0
            task = ours.begin(1)
        job = ours.role.world.training.job
        assert job
        await deployment.put(discard_asked(job.id))
        found = await task
        assert isinstance(found, Refused) and found.cause == "discarded"
        assert await ours.publish(step(1), step=1) == found


async def test_a_job_that_was_discarded_before_it_had_a_candidate_is_not_dispatched_again(tmp_path: Path) -> None:
    async with box(tmp_path) as deployment:
        async with loop(deployment, "JobDispatched") as ours:
            await ours.publish(step(0), step=0)
            task = ours.begin(1)
            await until(lambda: deployment.count("JobDispatched") == 1)
        await asyncio.gather(task, return_exceptions=True)
        dispatched = next(e for e in await deployment.log() if isinstance(e, JobDispatched))
        await deployment.put(discard_asked(dispatched.job))
        async with loop(deployment) as ours:
            found = await ours.publish(step(1), step=1)
            assert isinstance(found, Refused) and (found.candidate, found.cause) == ("", "discarded")
            assert isinstance(await ours.publish(step(2), step=1), Committed)
        assert deployment.count("JobDispatched") == 2


# -- what does not go on from the log


async def test_the_first_step_has_to_be_the_model_as_it_starts(tmp_path: Path) -> None:
    async with box(tmp_path) as deployment, loop(deployment) as ours:
        with pytest.raises(Rejected, match=r"step 3: nothing is registered yet; .* as step 0"):
            await ours.publish(step(3), step=3)
        assert deployment.count("ScenarioRegistered") == 0


async def test_the_same_step_with_other_content_is_refused(tmp_path: Path) -> None:
    async with box(tmp_path) as deployment, loop(deployment) as ours:
        for number in (0, 2, 4):
            await ours.publish(step(number), step=number)
        before = deployment.names()
        for number in (0, 2, 4):
            with pytest.raises(Rejected, match=rf"step {number} was published with other content; .* from step 4"):
                await ours.publish(step(9), step=number)
        with pytest.raises(Rejected, match=r"step 3 comes before step 4"):
            await ours.publish(step(3), step=3)
        assert deployment.names() == before


async def test_a_step_that_waits_is_not_overtaken_by_an_older_one(tmp_path: Path) -> None:
    async with box(tmp_path, start=False) as deployment:
        await deployment.put(opened())
        async with loop(deployment) as ours:
            await ours.publish(step(0), step=0)
            task = ours.begin(5)
            await until(lambda: deployment.count("CandidateSelected") == 1)
            with pytest.raises(Rejected, match=r"step 4 comes before step 5"):
                await ours.publish(step(4), step=4)
            task.cancel()


OTHER = {
    "renamed": ({"v": np.zeros(4, "float32")}, "tensor 'w' is missing; tensor 'v' is unexpected"),
    "one more": ({**step(1), "v": np.zeros(4, "float32")}, "tensor 'v' is unexpected"),
    "reshaped": ({"w": np.zeros((2, 2), "float32")}, r"tensor 'w' is reshaped: found \[2, 2\], expected \[4\]"),
    "retyped": ({"w": np.zeros(4, "float16")}, "tensor 'w' is retyped: found F16, expected F32"),
}


@pytest.mark.parametrize("kind", OTHER)
async def test_tensors_of_another_model_are_refused_by_name(kind: str, tmp_path: Path) -> None:
    tensors, said = OTHER[kind]
    async with box(tmp_path, start=False) as deployment:
        await deployment.put(opened())
        async with loop(deployment) as ours:
            await ours.publish(step(0), step=0)
            with pytest.raises(Rejected, match=f"step 1 is not of the model that was registered: {said}"):
                await ours.publish(tensors, step=1)


async def test_weights_that_are_not_finite_are_refused_by_name(tmp_path: Path) -> None:
    async with box(tmp_path, start=False) as deployment:
        await deployment.put(opened())
        async with loop(deployment) as ours:
            with pytest.raises(Rejected, match=r"tensor 'w' holds an infinity or a NaN"):
                await ours.publish(floats(0, 1, float("nan"), 3), step=0)
            assert isinstance(await ours.publish(step(0), step=0), Committed)


# -- who else there is


async def test_a_loop_that_was_replaced_is_told_so_and_its_step_is_the_successors(tmp_path: Path) -> None:
    async with box(tmp_path, start=False) as deployment:
        await deployment.put(opened())
        async with loop(deployment) as older:
            await older.publish(step(0), step=0)
            task = older.begin(1)
            await until(lambda: deployment.count("CandidateSelected") == 1)
            async with loop(deployment) as newer:
                with pytest.raises(Rejected, match=r"was replaced by t\.2: only one loop may publish"):
                    await task
                with pytest.raises(Rejected, match=r"was replaced"):
                    await older.publish(step(2), step=2)
                await deployment.publisher()
                deployment.engines()
                assert isinstance(await newer.publish(step(1), step=1), Committed)
                assert await deployment.violations() == []


async def test_a_log_that_contradicts_itself_ends_a_wait(tmp_path: Path) -> None:
    async with box(tmp_path, start=False) as deployment:
        await deployment.put(opened())
        async with loop(deployment) as ours:
            await ours.publish(step(0), step=0)
            task = ours.begin(1)
            await until(lambda: deployment.count("CandidateSelected") == 1)
            await deployment.put(opened())
            with pytest.raises(ContractError, match="exactly one LogOpened"):
                await task


async def test_weights_that_are_gone_from_the_store_halt_the_next_boot_by_name(tmp_path: Path) -> None:
    async with box(tmp_path) as deployment:
        async with loop(deployment, "JobDispatched") as ours:
            await ours.publish(step(0), step=0)
            task = ours.begin(1)
            await until(lambda: deployment.count("JobDispatched") == 1)
        await asyncio.gather(task, return_exceptions=True)
        job = next(e for e in await deployment.log() if isinstance(e, JobDispatched))
        given = decode_batch(deployment.store.get(job.batch.digest)).given
        assert given
        deployment.store.path(given.weights.digest).unlink()
        with pytest.raises(ContractError, match=f"the weights of job {job.job}, {given.weights.digest}, are not in"):
            async with loop(deployment):
                raise AssertionError("it is no trainer")
        assert deployment.count("CandidateReady") == 0


async def test_a_job_of_a_trainer_that_did_train_is_dropped_and_what_it_consumed_stays_consumed(
    tmp_path: Path,
) -> None:
    async with box(tmp_path) as deployment:
        async with loop(deployment) as ours:
            await ours.publish(step(0), step=0)
        batch = Batch(
            job="j", step=1, base="base", seed=0, samples=(), records=(("r", 6), ("s", 9)), floor=6, taken=(9,)
        )
        blob = deployment.store.put(encode_batch(batch))
        await deployment.put(
            TrainerJoined(scenario="digit", backend="torch", offers=("tcp",), mutates_in_place=False), boot="torch"
        )
        job = JobDispatched(scenario="digit", job="j", step=1, base="base", batch=blob, records=2)
        await deployment.put(job, started("j"), boot="torch")
        async with loop(deployment) as ours:
            assert isinstance(await ours.publish(step(2), step=2), Committed)
        log = await deployment.log()
        (dropped,) = (event for event in log if isinstance(event, JobDropped))
        last = decode_batch(deployment.store.get([e for e in log if isinstance(e, JobDispatched)][-1].batch.digest))
    assert (dropped.job, dropped.reason) == ("j", "attached") and "2 records" in dropped.detail
    assert (last.floor, last.taken, last.records) == (6, (9,), ())


async def test_a_trainer_that_trains_finishes_what_a_loop_had_handed_in(tmp_path: Path) -> None:
    """The deployment's `training.backend` was changed over a kept log."""
    from consumers.reef_trainer.torch_backend import TorchTrainer

    async with box(tmp_path) as deployment:
        async with loop(deployment, "JobDispatched") as ours:
            await ours.publish(step(0), step=0)
            task = ours.begin(1)
            await until(lambda: deployment.count("JobDispatched") == 1)
        await asyncio.gather(task, return_exceptions=True)
        config = msgspec.structs.replace(deployment.config, training=Training())
        journal = deployment.journal()
        async with contextlib.AsyncExitStack() as stack:
            records = RecordBook(config, journal, deployment.store)
            await records.start(stack)
            trainer = Trainer(config, Me("trainer", "torch"), TorchTrainer(), deployment.store, records)
            trainer.weights = ours.role.weights  # type: ignore[method-assign]  # four floats are no policy
            deployment.begin(deployment.run(trainer))
            await until(lambda: deployment.count("ReleaseCommitted") == 1)
        await until(lambda: deployment.memories == {"e0": held(1), "e1": held(1)})
        assert deployment.count("JobDropped") == 0 and deployment.count("CandidateReady") == 1


# -- both kinds of bus, in a thread of their own


@pytest.fixture
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Box:
    """A deployment that lives in the bus's own event loop, as its server otherwise would elsewhere."""
    deployment = Box(tmp_path)
    deployment.config = msgspec.structs.replace(
        deployment.config, nats=msgspec.structs.replace(deployment.config.nats, url="memory")
    )

    async def connect(url: str, name: str, client: str) -> Any:
        await deployment.start()
        return deployment.journal()

    monkeypatch.setattr(attach_module, "connect", connect)
    return deployment


def test_a_plain_function_publishes(beside: Box) -> None:
    with attach_blocking(beside.config) as bus:
        assert (bus.step, bus.head) == (-1, None)
        assert bus.publish(step(0), step=0) == Committed(0, "base", "inc:0", ())
        found = bus.publish(step(1), step=1)
        assert isinstance(found, Committed) and bus.step == 1 and bus.head == ("inc:1", found.candidate, 1)
    with pytest.raises(Rejected, match="this bus is closed"):
        bus.publish(step(2), step=2)


async def test_a_blocking_bus_works_where_an_event_loop_runs_already(beside: Box) -> None:
    with attach_blocking(beside.config) as bus:
        assert isinstance(bus.publish(step(0), step=0), Committed)


async def test_a_coroutine_publishes_and_its_own_computing_delays_nobody(beside: Box) -> None:
    async with attach(beside.config) as bus:
        await bus.publish(step(0), step=0)
        handle = await bus.publish(step(1), step=1, wait=False)
        until = time.monotonic() + 10
        while not handle.done():  # this loop's own step; fences and doors are the bus's, in its thread
            assert time.monotonic() < until
            time.sleep(0.01)  # noqa: ASYNC251 - it gives way to nobody
        found = await handle
        assert isinstance(found, Committed) and handle.result() == found


def test_without_waiting_the_loop_may_write_as_soon_as_the_copy_is_taken(beside: Box) -> None:
    with attach_blocking(beside.config) as bus:
        bus.publish(step(0), step=0)
        tensors = step(1)
        handle = bus.publish(tensors, step=1, wait=False)
        tensors["w"][:] = -1
        assert isinstance(handle, Handle) and isinstance(handle.result(10), Committed)
    assert beside.memories == {"e0": held(1), "e1": held(1)}


def test_the_end_of_the_block_waits_for_what_was_handed_in(beside: Box) -> None:
    with attach_blocking(beside.config) as bus:
        handles = [bus.publish(step(number), step=number, wait=False) for number in range(4)]
    assert [handle.done() for handle in handles] == [True] * 4
    assert beside.memories == {"e0": held(3), "e1": held(3)}


async def test_the_end_of_a_coroutines_block_waits_as_well(beside: Box) -> None:
    async with attach(beside.config) as bus:
        handles = [await bus.publish(step(number), step=number, wait=False) for number in range(3)]
    assert [handle.result(0).step for handle in handles] == [0, 1, 2]


def test_a_block_that_raises_ends_at_once_and_leaves_the_rest_to_the_next_boot(beside: Box) -> None:
    with pytest.raises(ZeroDivisionError), attach_blocking(beside.config) as bus:
        bus.publish(step(0), step=0)
        bus.publish(step(1), step=1, wait=False)
        raise ZeroDivisionError
    Lock(Path(beside.config.state_dir, "locks", "trainer.lock"), "nobody holds it any more").release()


async def test_who_stops_waiting_withdraws_nothing(beside: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_save = threading.Event(), threading.Event()

    def slow(store: Any, pieces: Any) -> Any:
        begun.set()
        assert may_save.wait(10)
        return save_weights(store, pieces)

    async with attach(beside.config) as bus:
        await bus.publish(step(0), step=0)
        monkeypatch.setattr(attached_module, "save_weights", slow)
        waiting = asyncio.create_task(bus.publish(step(1), step=1))
        await until(begun.is_set)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        may_save.set()
        await until(lambda: beside.count("ReleaseCommitted") == 1)
        assert isinstance(await bus.publish(step(1), step=1), Committed)
    assert beside.count("JobDispatched") == 1


async def test_who_stops_waiting_for_room_takes_none(beside: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is slow: two copies are on their way, and others wait for their turn, but not for long."""
    may_save = threading.Event()

    def slow(store: Any, pieces: Any) -> Any:
        assert may_save.wait(10)
        return save_weights(store, pieces)

    async with attach(beside.config) as bus:
        await bus.publish(step(0), step=0)
        monkeypatch.setattr(attached_module, "save_weights", slow)
        handles = [await bus.publish(step(number), step=number, wait=False) for number in (1, 2)]
        for _ in range(4):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(bus.publish(step(3), step=3, wait=False), 0.05)
        may_save.set()
        async with asyncio.timeout(10):
            handles += [await bus.publish(step(number), step=number, wait=False) for number in (3, 4, 5, 6)]
            found = [await handle for handle in handles]
    assert [(each.step, type(each)) for each in found] == [(number, Committed) for number in range(1, 7)]


def test_errors_come_before_anything_is_copied_or_stored(beside: Box) -> None:
    with attach_blocking(beside.config) as bus:
        for _ in range(attach_module.COPIES + 1):  # each gives its room back
            with pytest.raises(Rejected, match="expected a mapping"):
                bus.publish({}, step=0)
            with pytest.raises(Rejected, match="step -1: expected 0"):
                bus.publish(step(0), step=-1, wait=False)
        assert isinstance(bus.publish(step(0), step=0), Committed)


def test_a_deployment_with_a_trainer_of_its_own_is_no_place_to_attach(beside: Box) -> None:
    config = msgspec.structs.replace(beside.config, training=Training())
    with pytest.raises(Rejected, match=r"training.backend is torch: .*`reef-bus up --set training.backend=attached`"):
        attach_blocking(config).__enter__()


def test_a_second_loop_of_the_same_machine_is_refused_while_the_first_lives(beside: Box) -> None:
    with attach_blocking(beside.config), pytest.raises(Rejected, match=r"the trainer of .* is in use by process"):
        attach_blocking(beside.config).__enter__()


def test_a_configuration_without_a_server_says_where_to_find_one(tmp_path: Path) -> None:
    config = msgspec.structs.replace(CONFIG, state_dir=str(tmp_path))
    with pytest.raises(Rejected, match=r"no nats.url; .* run/deployment.json"):
        attach_blocking(config).__enter__()


# -- a deployment without a trainer of its own


def test_an_attached_trainer_is_no_component_and_its_port_is_the_last(tmp_path: Path) -> None:
    config = build("test", {"training": {"backend": "attached"}, "metrics": {"port": 9000}})
    assert list(config.components().values()) == ["engine", "engine", "publisher", "publisher", "gateway"]
    assert (config.metrics_port("supervisor"), config.metrics_port("trainer")) == (9005, 9006)


async def test_the_trainers_role_says_that_there_is_none_to_run(tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        with pytest.raises(Rejected, match="the trainer is a loop of your own"):
            await _build(CONFIG, Box(tmp_path).journal(), Me("trainer", "t"), stack)


def test_a_backend_that_is_neither_is_refused() -> None:
    with pytest.raises(Rejected, match=r"training.backend is 'tinker'; this version has: torch, attached"):
        check(Config(training=Training(backend="tinker")))
