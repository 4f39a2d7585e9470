"""The trainer's book: batches that are eligible, consumed once across restarts, and failures that are heard of.

Knows: an in-memory journal, a real artifact store, worlds. Must not know: optimizers. The trainer's own hands: below.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from consumers.reef_trainer.book import RecordBook
from consumers.reef_trainer.role import KEPT_STATES, Trainer
from consumers.reef_trainer.torch_backend import TorchTrainer
from reef_bus.artifacts import ArtifactStore
from reef_bus.backends import Piece, Pieces, Sample, TrainingBackend
from reef_bus.config import Adapters, Config, Training
from reef_bus.core.effects import AssembleBatch, Debt, Me, Train
from reef_bus.core.records import Consumed
from reef_bus.core.training import Candidate
from reef_bus.core.world import World
from reef_bus.errors import ContractError
from reef_bus.events import (
    Blob,
    CandidateReady,
    Draft,
    InferenceRecorded,
    JobDispatched,
    JobDropped,
    Recorded,
    RecordEvent,
)
from reef_bus.journal import RECORDS, MemoryJournal, MemoryStreams
from reef_bus.samples import Batch, TokenRow, encode_batch, encode_rows
from tests.facts import (
    CODE,
    E0,
    E1,
    FROZEN,
    MATH,
    NO_LORA,
    SERVING,
    adapter_released,
    adapter_trained,
    dispatched,
    released,
    started,
    trained,
)
from tests.loop import until
from tests.spec import Step, given
from tests.unit.test_adapters import ONE
from tests.unit.test_records import answer, scored

CONFIG = Config(training=Training(groups=1, group_size=2, max_staleness=1))
SECOND = (*SERVING, *trained("c1"), *released(1, "c1", E0, E1))
THIRD = (*SECOND, *trained("c2", "c1", 2), *released(2, "c2", E0, E1))


class Shelf:
    """RECORDS with a blob for every answer, and trainers that come and go over it."""

    def __init__(self, folder: Path) -> None:
        self.streams = MemoryStreams()
        self.store = ArtifactStore(folder)
        self.journal = MemoryJournal(self.streams)
        row = TokenRow(prompt=(11, 7, 10), answer=(7, 7), logprobs=(-1.0, -2.0), load_ids=("inc:0",) * 2)
        self.blob = self.store.put(encode_rows([row]))
        self.base = self.store.put(b"weights, which backends of numbers do not read")

    async def put(self, *events: RecordEvent) -> None:
        for event in events:
            if isinstance(event, InferenceRecorded):
                event = msgspec.structs.replace(event, blob=self.blob)
            await self.journal.append(Draft(event=event, writer="gateway/g", boot="g1"), 0)

    async def exchange(self, *records: str, load_id: str = "inc:0", group: str = "g") -> None:
        await self.put(*(answer(record, load_id, group) for record in records), scored(*records))

    @contextlib.asynccontextmanager
    async def boot(self, world: World, journal: MemoryJournal | None = None) -> AsyncIterator[RecordBook]:
        async with contextlib.AsyncExitStack() as stack:
            adapters = Adapters(scenarios=tuple(world.training.adapters))
            config = msgspec.structs.replace(CONFIG, adapters=adapters)
            found = RecordBook(config, journal or self.journal, self.store)
            await found.start(stack)
            found.moved(world)
            yield found


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path)


def world(*history: Step) -> World:
    return given(*history).world


Last = Batch | Mapping[str, Batch] | None
"""The whole model's last batch, or each scenario's."""


def dispatched_before(found: RecordBook, last: Last) -> dict[str, Blob]:
    by_scenario = {"": last} if isinstance(last, Batch) else last or {}
    return {scenario: found.store.put(encode_batch(each)) for scenario, each in by_scenario.items()}


async def batch(found: RecordBook, base: str = "base", last: Last = None) -> Batch:
    async with asyncio.timeout(2):
        _, units, samples, done = await found.batch([base], dispatched_before(found, last))
    return made(base, [(unit.record, unit.seq) for unit in units], done.floor, tuple(sorted(done.taken)), samples)


def made(
    base: str, records: Sequence[tuple[str, int]], floor: int, taken: tuple[int, ...], samples: Sequence[Sample] = ()
) -> Batch:
    return Batch(
        job="j",
        step=1,
        base=base,
        seed=0,
        samples=tuple(samples),
        records=tuple(records),
        floor=floor,
        taken=taken,
    )


def names(found: Batch) -> list[str]:
    return [record for record, _ in found.records]


async def nothing(found: RecordBook, base: str, last: Last = None) -> bool:
    """Whether there is no batch for it in all that is recorded."""
    asked = asyncio.create_task(found.batch([base], dispatched_before(found, last)))
    head = await found.journal.head(RECORDS)
    await until(lambda: asked.done() or head in (found.last, lowest(found)))
    made, waits = await asyncio.wait({asked}, timeout=0.05)
    for each in waits:
        each.cancel()
    return not made


def lowest(found: RecordBook) -> int:
    """What it begins to read after: if nothing is left there, it never reads anything."""
    return min(found.book.consumed.get(scenario, Consumed()).floor for scenario in found.scenarios)


async def test_a_batch_carries_tokens_reward_and_release_of_every_answer(shelf: Shelf) -> None:
    await shelf.exchange("a", "b")
    async with shelf.boot(world(*SERVING)) as found:
        (first, second) = (await batch(found)).samples
    assert (first.record, second.record) == ("a", "b")
    assert (first.prompt, first.completion, first.logprobs) == ((11, 7, 10), (7, 7), (-1.0, -2.0))
    assert (first.group, first.load_id, first.reward) == ("g", "inc:0", 1.0)


async def test_a_batch_is_of_one_scenario_and_of_the_first_in_turn_that_has_one(shelf: Shelf) -> None:
    """Both begin with the base model, whose load id is the same for both."""
    await shelf.put(*(of_scenario(MATH, record) for record in "am"), *(of_scenario(CODE, record) for record in "bcd"))
    await shelf.put(scored("a", "b", "c"))
    async with shelf.boot(world(*FROZEN)) as found:
        async with asyncio.timeout(2):
            base, units, _, done = await found.batch([NO_LORA[MATH], NO_LORA[CODE]], {})
        assert (base, [unit.record for unit in units]) == (NO_LORA[CODE], ["b", "c"])
        assert done == Consumed(4), "d, at 5, waits; what waits of math is none of its business"
        assert await nothing(found, NO_LORA[MATH])
        await shelf.put(scored("m"))
        assert names(await batch(found, NO_LORA[MATH])) == ["a", "m"]


async def test_answers_of_one_scenario_grow_stale_by_its_own_releases(shelf: Shelf) -> None:
    """Two releases of math: what the base model had answered to it is too old, and to code it is not."""
    await shelf.put(*(of_scenario(MATH, record) for record in "ab"), *(of_scenario(CODE, record) for record in "cd"))
    await shelf.put(scored("a", "b", "c", "d"))
    twice = (*ONE, *adapter_trained(MATH, "m2", "m1"), *adapter_released(MATH, 2, "m2", E0, E1, parent=1))
    async with shelf.boot(world(*FROZEN, *twice)) as found:
        assert names(await batch(found, NO_LORA[CODE])) == ["c", "d"]
        assert await nothing(found, "m2") and {unit.record for unit in found.book.units.values()} == {"c", "d"}


async def test_what_a_frozen_base_model_answered_does_not_stay(shelf: Shelf) -> None:
    """Nobody ever trains on it."""
    await shelf.put(answer("base", "inc:0", "g"), *(of_scenario(MATH, record) for record in "ab"))
    await shelf.put(scored("base", "a", "b"))
    async with shelf.boot(world(*FROZEN)) as found:
        first = await batch(found, NO_LORA[MATH])
        assert (names(first), first.floor, first.taken, found.book.units.keys()) == (["a", "b"], 4, (), {"a", "b"})


# -- what is consumed, by scenario


async def test_who_waits_for_a_report_for_ever_makes_no_batch_of_another_scenario_longer(shelf: Shelf) -> None:
    """Code's first answer is at 1; a job of math takes two answers and their report, of three sequences."""
    await shelf.put(of_scenario(CODE, "w"))
    last: dict[str, Batch] = {}
    async with shelf.boot(world(*FROZEN)) as found:
        for job in range(1, 9):
            await shelf.put(of_scenario(MATH, f"a{job}"), of_scenario(MATH, f"b{job}"), scored(f"a{job}", f"b{job}"))
            last[MATH] = await batch(found, NO_LORA[MATH], last)
            assert names(last[MATH]) == [f"a{job}", f"b{job}"]
            assert (last[MATH].floor, last[MATH].taken) == (1 + 3 * job, ())


async def test_a_restart_finds_of_each_scenario_what_its_own_last_batch_left(shelf: Shelf) -> None:
    """Math is far ahead, code has left its first answer out; and it may be that code had no job at all."""
    await shelf.put(of_scenario(CODE, "w"), *(of_scenario(CODE, record) for record in "ab"), scored("a", "b"))
    await shelf.put(*(of_scenario(MATH, record) for record in "mn"), scored("m", "n"))
    async with shelf.boot(world(*FROZEN)) as found:
        code = await batch(found, NO_LORA[CODE])
        math = await batch(found, NO_LORA[MATH], {CODE: code})
    assert (names(code), code.floor, code.taken) == (["a", "b"], 0, (2, 3))
    assert (names(math), math.floor, math.taken) == (["m", "n"], 7, ())
    async with shelf.boot(world(*FROZEN)) as found:
        last = {CODE: code, MATH: math}
        assert await nothing(found, NO_LORA[MATH], last) and await nothing(found, NO_LORA[CODE], last)
        await shelf.put(of_scenario(CODE, "x"), scored("w", "x"))
        assert names(await batch(found, NO_LORA[CODE], last)) == ["w", "x"]
    async with shelf.boot(world(*FROZEN)) as found:
        assert names(await batch(found, NO_LORA[CODE], {MATH: math})) == ["w", "a"]


async def test_batches_that_spoke_of_all_scenarios_at_once_are_true_of_their_own(shelf: Shelf) -> None:
    """As they were written before each spoke of its own alone: w at 1 held both back, and the second names what the
    first had consumed. With the next batch, what is not of its scenario is gone from it."""
    await shelf.put(of_scenario(CODE, "w"), *(of_scenario(CODE, record) for record in "ab"), scored("a", "b"))
    await shelf.put(*(of_scenario(MATH, record) for record in "mn"), scored("m", "n"))
    last = {
        CODE: made(NO_LORA[CODE], [("a", 2), ("b", 3)], 0, (2, 3)),
        MATH: made(NO_LORA[MATH], [("m", 5), ("n", 6)], 0, (2, 3, 5, 6)),
    }
    async with shelf.boot(world(*FROZEN)) as found:
        assert await nothing(found, NO_LORA[MATH], last) and await nothing(found, NO_LORA[CODE], last)
        await shelf.put(*(of_scenario(MATH, record) for record in "op"), of_scenario(CODE, "x"))
        await shelf.put(scored("o", "p", "w", "x"))
        math = await batch(found, NO_LORA[MATH], last)
        assert (names(math), math.floor, math.taken) == (["o", "p"], 11, ())
        code = await batch(found, NO_LORA[CODE], {**last, MATH: math})
        assert (names(code), code.floor, code.taken) == (["w", "x"], 11, ())


async def test_one_batch_that_spoke_of_all_scenarios_is_true_of_each(shelf: Shelf) -> None:
    """As a log begins that goes on from one that carried nothing else: w at 1 waited, all else was consumed."""
    await shelf.put(of_scenario(CODE, "w"), *(of_scenario(CODE, record) for record in "ab"), scored("a", "b"))
    await shelf.put(*(of_scenario(MATH, record) for record in "mn"), scored("m", "n"))
    one = made(NO_LORA[MATH], [("m", 5), ("n", 6)], 0, (2, 3, 5, 6))
    async with shelf.boot(world(*FROZEN)) as found:
        last = {CODE: one, MATH: one}
        assert await nothing(found, NO_LORA[MATH], last) and await nothing(found, NO_LORA[CODE], last)
        await shelf.put(of_scenario(CODE, "x"), scored("w", "x"))
        assert names(await batch(found, NO_LORA[CODE], last)) == ["w", "x"]


async def test_a_batch_says_whose_records_it_speaks_of_and_that_of_a_whole_model_is_spelled_as_ever(
    shelf: Shelf,
) -> None:
    """Who reads only batches that speak of all, must not take one for such: it cannot read it."""
    await shelf.exchange("a", "b")
    await shelf.put(*(of_scenario(MATH, record) for record in "mn"), scored("m", "n"))
    for history, base, scenario in ((SERVING, "base", None), (FROZEN, NO_LORA[MATH], MATH)):
        async with shelf.boot(world(*history)) as found:
            role = trainer(shelf, found)
            role.world = found.world
            said = await role.assemble(AssembleBatch((base,), 1, {}))
        assert isinstance(said, JobDispatched) and said.scenario == (scenario or "digit")
        stored = msgspec.msgpack.decode(shelf.store.get(said.batch.digest))
        assert stored.get("scenario") == scenario and stored["taken"] == []


def of_scenario(scenario: str, record: str) -> InferenceRecorded:
    return msgspec.structs.replace(answer(record, "inc:0", scenario), scenario=scenario)


async def test_the_next_batch_holds_none_of_the_last(shelf: Shelf) -> None:
    await shelf.exchange("a", "b", "c")
    async with shelf.boot(world(*SERVING)) as found:
        first = await batch(found)
        assert names(first) == ["a", "b"] and await nothing(found, "base", first)
        await shelf.exchange("d")
        assert names(await batch(found, last=first)) == ["c", "d"]


async def test_a_batch_whose_dispatch_never_counted_is_chosen_again(shelf: Shelf) -> None:
    await shelf.exchange("a", "b")
    async with shelf.boot(world(*SERVING)) as found:
        assert names(await batch(found)) == names(await batch(found)) == ["a", "b"]


async def test_a_restart_consumes_nothing_twice_and_loses_nothing(shelf: Shelf) -> None:
    """Groups that complete out of order leave holes above the floor; the next boot knows them from the batch."""
    await shelf.put(answer("a", group="g"))
    await shelf.exchange("b", "c", group="h")
    await shelf.exchange("d", group="k")
    async with shelf.boot(world(*SERVING)) as found:
        first = await batch(found)
    assert names(first) == ["b", "c"] and (first.floor, first.taken) == (0, (2, 3))
    async with shelf.boot(world(*SERVING)) as found:
        assert await nothing(found, "base", first)
        await shelf.exchange("e", group="k")
        second = await batch(found, last=first)
        assert names(second) == ["d", "e"] and second.floor == 0 and set(second.taken) >= {2, 3}
    async with shelf.boot(world(*SERVING)) as found:
        await shelf.put(scored("a"), answer("f", group="g"), scored("f"))
        assert names(await batch(found, last=second)) == ["a", "f"]


async def test_an_answer_newer_than_this_fold_waits_for_it(shelf: Shelf) -> None:
    await shelf.exchange("a", "b", load_id="inc:1")
    async with shelf.boot(world(*SERVING)) as found:
        asked = asyncio.create_task(batch(found, "c1"))
        await asyncio.sleep(0.02)
        assert not asked.done()
        found.moved(world(*SECOND))
        assert names(await asked) == ["a", "b"]


async def test_staleness_is_counted_to_the_base_of_the_job(shelf: Shelf) -> None:
    await shelf.exchange("a", "b", load_id="inc:0")
    async with shelf.boot(world(*SECOND, *trained("c2", "c1", 2))) as found:
        assert await nothing(found, "c2")  # two links, one is allowed
        assert found.book.units  # the head is c1: a job from it could still use them
        assert names(await batch(found, "c1")) == ["a", "b"]


async def test_what_no_base_may_use_any_more_is_forgotten(shelf: Shelf) -> None:
    await shelf.exchange("a", "b", load_id="inc:0")
    await shelf.exchange("c", "d", load_id="inc:2", group="h")
    async with shelf.boot(world(*THIRD)) as found:
        assert names(await batch(found, "c2")) == ["c", "d"]
        assert list(found.book.units) == ["c", "d"]


class Unreadable(MemoryJournal):
    async def follow(self, stream: str, after: int = 0, last_id: str = "") -> AsyncIterator[list[Recorded]]:
        await asyncio.sleep(0.01)
        raise ContractError("RECORDS holds nothing at 9", 9)
        yield []


async def test_records_that_cannot_be_followed_halt_who_asks_for_a_batch_instead_of_leaving_it_waiting(
    shelf: Shelf,
) -> None:
    async with shelf.boot(world(*SERVING), Unreadable(shelf.streams)) as found:
        for _ in range(2):
            with pytest.raises(ContractError, match="holds nothing"):
                await batch(found)


# -- the trainer over it


class Numbers(TrainingBackend):
    """States are numbers; training adds one."""

    def __init__(self) -> None:
        self.damaged = False

    def initial(self) -> Any:
        return 1

    def load(self, weights: Path, optimizer: Path | None) -> Any:
        if self.damaged:
            raise ContractError(f"{weights}: not a readable file")
        return 1

    def train(self, state: Any, batch: Sequence[Sample], seed: int) -> tuple[Any, dict[str, float]]:
        if not batch:
            raise ContractError("found an empty batch")
        return state + 1, {"loss": 0.5}

    def weights(self, state: Any) -> Pieces:
        return {"w": Piece("F32", (1,), memoryview(bytes([state, 0, 0, 0])))}

    def optimizer(self, state: Any) -> bytes:
        return bytes([state])


def trainer(shelf: Shelf, book: RecordBook | None = None) -> Trainer:
    book = book or RecordBook(CONFIG, shelf.journal, shelf.store)
    return Trainer(CONFIG, Me("trainer", "t1"), Numbers(), shelf.store, book)


def training(shelf: Shelf, *samples: Sample) -> Train:
    kept = shelf.store.put(
        encode_batch(Batch(job="j1", step=1, base="base", seed=0, samples=samples, records=(), floor=0, taken=()))
    )
    found = world(*SERVING, msgspec.structs.replace(dispatched("j1"), batch=kept), started("j1")).training
    assert found.job is not None
    base = msgspec.structs.replace(found.candidates["base"], weights=shelf.base)
    return Train(found.job, base)


SAMPLE = Sample(record="a", group="g", prompt=(11,), completion=(7,), logprobs=(-1.0,), load_id="inc:0", reward=1.0)


async def perform(found: Trainer, effect: Train) -> Any:
    async with contextlib.AsyncExitStack() as scope:
        return await found.perform(Debt(key="train", effect=effect), scope)


async def test_a_job_ends_in_a_candidate_whose_manifest_can_be_read_back(shelf: Shelf) -> None:
    said = await perform(trainer(shelf), training(shelf, SAMPLE))
    assert isinstance(said, CandidateReady) and (said.job, said.attempt, said.base) == ("j1", 1, "base")
    assert shelf.store.has(said.weights.digest) and shelf.store.has(said.manifest)


async def test_a_batch_that_cannot_be_trained_on_is_dropped(shelf: Shelf) -> None:
    said = await perform(trainer(shelf), training(shelf))
    assert isinstance(said, JobDropped) and said.reason == "not_trainable"


@pytest.mark.parametrize("reward", [1e308, -1e200])
def test_a_score_whose_square_is_no_number_makes_its_batch_untrainable_and_ends_no_trainer(reward: float) -> None:
    state = TorchTrainer().initial()
    with pytest.raises(ContractError, match="record a: found a reward"):
        TorchTrainer().train(state, [msgspec.structs.replace(SAMPLE, reward=reward)] * 2, 0)


async def test_a_base_that_cannot_be_read_halts_instead_of_dropping_one_batch_after_another(shelf: Shelf) -> None:
    found = trainer(shelf)
    assert isinstance(found.backend, Numbers)
    found.backend.damaged = True
    with pytest.raises(ContractError, match="not a readable file"):
        await perform(found, training(shelf, SAMPLE))


class InPlace(Numbers):
    """One state, in a box that training changes; it dies in the middle of a step when it is told to."""

    mutates_in_place = True

    def __init__(self) -> None:
        super().__init__()
        self.loads, self.dies = 0, False

    def load(self, weights: Path, optimizer: Path | None) -> Any:
        self.loads += 1
        return [1]

    def train(self, state: Any, batch: Sequence[Sample], seed: int) -> tuple[Any, dict[str, float]]:
        state[0] += 1
        if self.dies:
            raise ContractError("the step failed half way")
        return state, {"loss": 0.5}

    def weights(self, state: Any) -> Pieces:
        return super().weights(state[0])

    def optimizer(self, state: Any) -> bytes:
        return bytes(state)


async def test_what_an_in_place_backend_has_changed_is_nobodys_base_any_more(shelf: Shelf) -> None:
    """The next job from the same base begins with the base, as it is stored, and not with what was made of it."""
    found, backend = trainer(shelf), InPlace()
    found.backend = backend
    first = await perform(found, training(shelf, SAMPLE))
    backend.dies = True
    assert isinstance(await perform(found, training(shelf, SAMPLE)), JobDropped)
    backend.dies = False
    again = await perform(found, training(shelf, SAMPLE))
    assert backend.loads == 3 and again.manifest == first.manifest


@pytest.fixture
def eager() -> Iterator[None]:
    """Threads change places as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_states_are_kept_by_a_job_and_an_offer_at_the_same_time(shelf: Shelf, eager: None) -> None:
    """Two threads remember and forget; neither may find the other half way."""
    found, failed = trainer(shelf), list[BaseException]()

    def work(name: str) -> None:
        try:
            for number in range(3000):
                candidate = Candidate(
                    id=f"{name}{number % 5}",
                    base="",
                    weights=shelf.base,
                    optimizer=None,
                    manifest="",
                    tensor_bytes=4,
                    step=1,
                    seq=1,
                )
                found._state(candidate)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == [] and len(found._states) == KEPT_STATES
