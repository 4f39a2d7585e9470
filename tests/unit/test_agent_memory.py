"""An agent that gives memory away and takes it back: what is asked of the engine, in which order, and when a boot ends.

Knows: the agent, an engine of four floats that lends, the torch engine and trainer. Must not know: HTTP.
"""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from consumers.reef_engine.agent import Agent
from consumers.reef_engine.fault import Fault
from consumers.reef_engine.memory import Memory, Uncertain
from consumers.reef_engine.torch_backend import TorchEngine
from consumers.reef_trainer.book import RecordBook
from consumers.reef_trainer.role import Trainer
from consumers.reef_trainer.torch_backend import TorchTrainer
from reef_bus.artifacts import ArtifactStore, save_weights
from reef_bus.backends import InferenceBackend, Piece, Pieces, Prompt
from reef_bus.config import Config, Training, build
from reef_bus.core.effects import Join, Me, Receive, ReleaseMemory, RestoreMemory, Train
from reef_bus.core.memory import REGIONS
from reef_bus.core.training import Candidate, Job
from reef_bus.errors import ContractError, Rejected
from reef_bus.events import (
    EngineJoined,
    EngineLeft,
    EngineMemoryReleased,
    EngineMemoryRestored,
    ReceiverVerified,
    ScenarioRegistered,
)
from reef_bus.journal import MemoryJournal, MemoryStreams
from reef_bus.manifest import describe
from reef_bus.policy import PolicyConfig, new_policy, pieces
from reef_bus.samples import Batch, encode_batch
from tests.facts import SERVING, colocated, dropped, lent
from tests.loop import until
from tests.unit.test_agent import Floats, memory, say, see

ROOT = Path(__file__).parents[2]
NEXT = b"\x00\x00\x00\x40" * 4
RELEASE = ReleaseMemory("j1", 8, REGIONS)
WEIGHTS = RestoreMemory("j1", ("weights",))


class Lender(Floats):
    """It writes down what is asked of it; `fails`: the name of an operation that does not succeed."""

    releases = REGIONS

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[str, ...]] = []
        self.fails = ""
        self.begun, self.may_go = threading.Event(), threading.Event()
        self.may_go.set()

    def release(self, regions: Sequence[str]) -> None:
        self._do("release", regions)

    def resume(self, regions: Sequence[str]) -> None:
        self._do("resume", regions)

    def _do(self, name: str, regions: Sequence[str]) -> None:
        self.begun.set()
        assert self.may_go.wait(10)
        self.asked.append((name, *regions))
        self.memory[:] = bytes(16)
        if name == self.fails:
            raise RuntimeError("CUDA error: out of memory")


def lending(folder: Path) -> tuple[Agent, Lender]:
    engine = Lender()
    return Agent(Config(), Me("e0", "e0.1"), "http://e0", engine, ArtifactStore(folder), Fault()), engine


async def test_it_joins_as_one_that_can(tmp_path: Path) -> None:
    joined = await say(lending(tmp_path)[0], Join())
    assert isinstance(joined, EngineJoined) and joined.releases == REGIONS


async def test_it_stops_and_says_what_it_gave_away_and_what_had_been_served(tmp_path: Path) -> None:
    found, engine = lending(tmp_path)
    see(found, *SERVING)
    found.served = 5
    said = await say(found, RELEASE)
    assert isinstance(said, EngineMemoryReleased)
    assert (said.job, said.fence, said.regions) == ("j1", 8, REGIONS) and engine.asked == [("release", *REGIONS)]
    assert (said.previous, said.served) == ("inc:0", 5) and said.resumed_at > 0
    assert not found.may_generate() and found.held.away() == REGIONS


async def test_a_request_in_hand_is_answered_before_anything_is_released(tmp_path: Path) -> None:
    found, engine = lending(tmp_path)
    see(found, *SERVING)
    await found.memory.acquire()
    releasing = asyncio.create_task(say(found, RELEASE))
    await until(found.wanted.is_set)
    await asyncio.sleep(0.05)
    assert not engine.begun.is_set() and not found.stop.is_set()
    found.memory.release()
    assert isinstance(await releasing, EngineMemoryReleased)


async def test_nothing_is_generated_without_its_memory_whatever_the_log_says(tmp_path: Path) -> None:
    """The fence ended before its word was stored, and weights were never among the regions."""
    found, _ = lending(tmp_path)
    see(found, *SERVING)
    await say(found, ReleaseMemory("j1", 8, ("kv_cache",)))
    see(found, *SERVING, colocated("j1"), dropped("j1"))
    assert not found.may_generate()
    assert [debt.effect for debt in found.react(found.world, 0)] == [RestoreMemory("j1", ("kv_cache",))]
    restored = await say(found, RestoreMemory("j1", ("kv_cache",)))
    assert isinstance(restored, EngineMemoryRestored) and restored.regions == ("kv_cache",)
    see(found, *SERVING, colocated("j1"), dropped("j1"))
    assert found.may_generate()


async def test_weights_come_back_for_the_bytes_and_the_rest_before_the_proof(tmp_path: Path) -> None:
    found, engine = lending(tmp_path)
    await say(found, RELEASE)
    assert isinstance(await say(found, WEIGHTS), EngineMemoryRestored)
    blob, manifest = save_weights(found.store, {"w": Piece("F32", (4,), memoryview(NEXT))})
    receive = Receive("pub1", 1, "inc:1", manifest.digest, "files", blob.digest, "", 5.0)
    engine.resume = _keeping(engine)  # type: ignore[method-assign]
    said = await say(found, receive)
    assert isinstance(said, ReceiverVerified) and said.manifest == manifest.digest
    assert engine.asked == [("release", *REGIONS), ("resume", "weights"), ("resume", "kv_cache", "cuda_graph")]
    assert found.held.whole() and memory(found) == NEXT
    assert isinstance(await say(found, RestoreMemory("j1", ("kv_cache", "cuda_graph"))), EngineMemoryRestored)
    assert len(engine.asked) == 3, "what is there is not asked for again"


def _keeping(engine: Lender) -> Any:
    """What is not weights comes back and leaves them as they are."""

    def resume(regions: Sequence[str]) -> None:
        assert engine.memory == NEXT, "the bytes are there"
        engine.asked.append(("resume", *regions))

    return resume


@pytest.mark.parametrize("operation", ["release", "resume"])
async def test_after_a_failure_the_boot_ends_and_nothing_more_is_asked(tmp_path: Path, operation: str) -> None:
    found, engine = lending(tmp_path)
    engine.fails = operation
    said = await say(found, RELEASE)
    said = said if operation == "release" else await say(found, WEIGHTS)
    assert isinstance(said, EngineLeft)
    assert f"its memory is uncertain: {operation} of weights" in said.reason and "out of memory" in said.reason
    asked, engine.fails = list(engine.asked), ""
    for effect in (RELEASE, WEIGHTS):
        again = await say(found, effect)
        assert isinstance(again, EngineLeft) and again.reason == said.reason
    assert engine.asked == asked and found.held.away() == REGIONS and not found.may_generate()


async def test_whoever_stops_waiting_loses_nothing(tmp_path: Path) -> None:
    """The debt is gone while the engine works on it."""
    found, engine = lending(tmp_path)
    engine.may_go.clear()
    releasing = asyncio.create_task(say(found, RELEASE))
    await until(engine.begun.is_set)
    releasing.cancel()
    await asyncio.sleep(0.05)
    assert not releasing.done()
    engine.may_go.set()
    await asyncio.gather(releasing, return_exceptions=True)
    assert releasing.cancelled() and found.held.away() == REGIONS
    see(found, *SERVING, colocated("j1"), dropped("j1"))
    assert [debt.effect for debt in found.react(found.world, 0)] == [RestoreMemory("j1", REGIONS)]


def test_what_the_log_shows_as_lent_is_taken_back_too(tmp_path: Path) -> None:
    found, _ = lending(tmp_path)
    see(found, *SERVING, colocated("j1"), lent("e0", "j1", 8, "weights"), dropped("j1"))
    assert [debt.effect for debt in found.react(found.world, 0)] == [RestoreMemory("j1", ("weights",))]


def test_an_engine_that_keeps_its_memory_is_asked_for_none() -> None:
    held = Memory(Floats())
    assert held.whole() and held.away() == ()
    held.resume_all()
    with pytest.raises(ContractError, match=r"found memory region 'weights'; this engine gives: \[\]"):
        held.release(("weights",))
    for operation in (InferenceBackend.release, InferenceBackend.resume):
        with pytest.raises(ContractError, match="Floats keeps its memory"):
            operation(Floats(), ("weights",))


def test_who_is_uncertain_says_why_to_everybody() -> None:
    engine = Lender()
    engine.fails = "release"
    held = Memory(engine)
    for _ in range(2):
        with pytest.raises(Uncertain, match=r"release of weights failed: RuntimeError.*out of memory"):
            held.release(("weights",))
    assert engine.asked == [("release", "weights")]


# -- torch


FREES = """
import psutil
from consumers.reef_engine.torch_backend import TorchEngine
from reef_bus.policy import PolicyConfig

def filled(pieces):
    for piece in pieces.values():
        piece.data[:] = bytes(piece.data.nbytes)
    return sum(piece.data.nbytes for piece in pieces.values())

rss = lambda: psutil.Process().memory_info().rss
engine = TorchEngine(PolicyConfig(hidden=1024, layers=2, heads=8, kv_heads=8, ffn=3072))
engine.start()
size = filled(engine.live())
filled(engine.stage())
both = rss()
engine.release(("weights",))
none = rss()
engine.resume(("weights",))
filled(engine.live())
print(size, both - none, rss() - none)
"""


def test_a_torch_engine_really_frees_its_parameters_and_both_copies() -> None:
    """About 109 MB each, in a process of its own, where nothing else comes and goes."""
    found = subprocess.run([sys.executable, "-c", FREES], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    size, freed, taken = map(int, found.split())
    assert size > 100_000_000 and freed > 1.9 * size and 0.9 * size < taken < 1.2 * size


def test_what_a_torch_engine_released_is_nobodys() -> None:
    engine = TorchEngine()
    engine.start()
    engine.release(("weights",))
    for use in (engine.live, engine.stage, engine.swap):
        with pytest.raises(ContractError, match=r"resume|nothing is staged"):
            use()


def test_a_torch_engine_that_has_its_memory_again_is_loaded_and_answers_as_before() -> None:
    engine, prompt = TorchEngine(), Prompt(ids=(1, 2), max_tokens=3, temperature=0.0)
    engine.start()
    for name, piece in pieces(dict(new_policy(PolicyConfig(), 1).named_parameters())).items():
        engine.live()[name].data[:] = piece.data
    before, held, answer = describe(engine.live()), _copy(engine.live()), engine.generate([prompt])
    engine.release(("weights",))
    with pytest.raises(ContractError, match="resume"):
        engine.generate([prompt])
    engine.resume(("weights",))
    assert describe(engine.live()) != before, "nothing of it was kept"
    for name, piece in engine.live().items():
        piece.data[:] = held[name]
    assert describe(engine.live()) == before and engine.generate([prompt]) == answer


def _copy(found: Pieces) -> dict[str, bytes]:
    return {name: bytes(piece.data) for name, piece in found.items()}


async def test_a_trainer_keeps_nothing_of_a_colocated_step(tmp_path: Path) -> None:
    """When it says `CandidateReady` no tensor of it is left, and its backend was told so."""
    backend, told = TorchTrainer(), list[int]()
    backend.release = lambda: told.append(_tensors())  # type: ignore[method-assign]
    config = Config(state_dir=str(tmp_path), training=Training(colocate=True))
    store, journal = ArtifactStore(tmp_path / "artifacts"), MemoryJournal(MemoryStreams())
    trainer = Trainer(config, Me("trainer", "t1"), backend, store, RecordBook(config, journal, store))
    before = _tensors()
    event = trainer.register()
    assert isinstance(event, ScenarioRegistered) and _tensors() == before
    base = Candidate(
        id="base",
        base="",
        step=0,
        weights=event.weights,
        optimizer=event.optimizer,
        manifest=event.manifest,
        tensor_bytes=event.tensor_bytes,
        seq=1,
    )
    batch = Batch(job="j1", step=1, base="base", seed=1, samples=(), records=(), floor=0, taken=())
    backend.train = lambda state, samples, seed: (backend.initial(), {"loss": 0.5})  # type: ignore[method-assign]
    kept = store.put(encode_batch(batch))
    job = Job(id="j1", step=1, base="base", batch=kept, seq=2, attempt=1, boot="t1", started=3)
    said = trainer._train(Train(job, base))
    assert said.__class__.__name__ == "CandidateReady" and told == [before] and trainer._states == {}


def _tensors() -> int:
    gc.collect()
    return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())


# -- configuration


@pytest.mark.parametrize(
    ("with_", "said"),
    [
        ({"training": {"backend": "attached"}}, "training.backend attached: a loop of your own keeps its memory"),
        ({"training": {"hold": True}}, "training.hold: no engine would serve while a candidate waits for a person"),
        ({"adapters": {"scenarios": ["a"]}}, "adapters.scenarios: adapters would be lost"),
        ({"publication": {"mode": "staged"}}, "publication.mode staged: there is no room for a second copy"),
        ({"publication": {"pause": "in_place"}}, "publication.pause in_place: what requests in hand need is released"),
        ({"inference": {"urls": {"engine-0": "http://127.0.0.1:1"}}}, "inference.urls: a borrowed server"),
    ],
)
def test_what_cannot_be_combined_with_it_is_refused_with_the_reason(with_: dict[str, Any], said: str) -> None:
    data = {**with_, "training": {**with_.get("training", {}), "colocate": True}}
    with pytest.raises(Rejected, match=f"training.colocate cannot be combined with {said}"):
        build("test", data)
