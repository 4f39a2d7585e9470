"""The agent's hands: what it says after a fence, a receive, a verification, and that nothing generates meanwhile.

Knows: the agent, a backend of four floats, a real artifact store. Must not know: HTTP, or any framework.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Generator, Sequence
from pathlib import Path

import msgspec
import pytest

from consumers.reef_engine import agent as agent_module
from consumers.reef_engine.agent import Agent
from consumers.reef_engine.fault import Fault
from reef_bus.artifacts import ArtifactStore, save_weights
from reef_bus.backends import Completion, InferenceBackend, Piece, Pieces, Prompt
from reef_bus.config import Config, Inference
from reef_bus.core.effects import Debt, Effect, Fence, Me, Receive, VerifyHead
from reef_bus.errors import Rejected, Unavailable
from reef_bus.events import Blob, EngineFenced, EngineLeft, Event, ReceiverFailed, ReceiverVerified
from reef_bus.journal import MemoryJournal, MemoryStreams
from reef_bus.manifest import Manifest
from reef_bus.shelf import Folder, Opened
from tests.facts import E0, E1, SERVING, blob, fenced, halted, holds, joined, released, target, trained
from tests.loop import put, quiet, until
from tests.spec import Said, Step, given

BASE, NEXT = b"\x00\x00\x80\x3f" * 4, b"\x00\x00\x00\x40" * 4  # four times 1.0, four times 2.0


class Floats(InferenceBackend):
    """An engine whose answers are the bytes that it holds. Prompts of more than four tokens are refused."""

    def __init__(self) -> None:
        self.memory = bytearray(16)
        self.batches: list[int] = []
        self.may_end = threading.Event()
        self.may_end.set()

    def start(self) -> None: ...

    def live(self) -> Pieces:
        return {"w": Piece("F32", (4,), memoryview(self.memory))}

    def generate(self, prompts: Sequence[Prompt]) -> list[Completion]:
        assert self.may_end.wait(10)
        if any(len(prompt.ids) > 4 for prompt in prompts):
            raise Rejected("too long")
        self.batches.append(len(prompts))
        held = tuple(self.memory[:4])
        return [Completion(ids=held, logprobs=(0.0,) * 4, finish_reason="length") for _ in prompts]

    def close(self) -> None: ...


def agent(folder: Path, fault: Fault | None = None) -> Agent:
    store = ArtifactStore(folder)
    return Agent(Config(), Me("e0", "e0.1"), "http://e0", Floats(), store, fault or Fault())


def kept(found: Agent, data: bytes) -> tuple[Blob, Manifest]:
    return save_weights(found.store, {"w": Piece("F32", (4,), memoryview(data))})


def memory(found: Agent) -> bytearray:
    assert isinstance(found.backend, Floats)
    return found.backend.memory


def see(found: Agent, *history: Step) -> None:
    """The agent folds a history in which what its boot said of its memory was true."""
    world = given(*history).world
    engine = world.membership.engines.get("e0")
    if engine and engine.verified:
        found.proven = engine.verified.manifest
    found.folded(world, ())


async def say(found: Agent, effect: Effect) -> Event:
    async with contextlib.AsyncExitStack() as scope:
        said = await found.perform(Debt(key="k", effect=effect), scope)
    assert said is not None
    return said


def receiving(found: Agent, data: bytes, transport: str = "files", sequence: int = 1) -> Receive:
    blob, manifest = kept(found, data)
    return Receive("pub1", 1, f"inc:{sequence}", manifest.digest, transport, blob.digest, "", 5.0)


def verifying(found: Agent, data: bytes) -> VerifyHead:
    blob, manifest = kept(found, data)
    return VerifyHead("inc:0", manifest.digest, blob)


# -- the gate


def test_the_gate_follows_the_serving_rule(tmp_path: Path) -> None:
    found = agent(tmp_path)
    see(found, *SERVING[:5])
    assert not found.open.is_set() and found.serving() == ""
    see(found, *SERVING)
    assert found.open.is_set() and found.serving() == "inc:0"
    see(found, *SERVING, *trained("c1"), target(1, "c1", E0, E1))
    assert not found.open.is_set()


def test_after_a_halt_the_gate_opens_with_the_engines_own_proof_and_not_before(tmp_path: Path) -> None:
    found, history = agent(tmp_path), (*SERVING, *trained("c1"), target(1, "c1", E0, E1), fenced("e0", 1), halted(1))
    see(found, *history)
    assert not found.open.is_set()
    see(found, *history, holds("e0", 0, "base"))
    assert found.open.is_set() and found.serving() == "inc:0"


class CutOff(MemoryJournal):
    """A journal whose leader answers, or does not."""

    answers = True

    async def head(self, stream: str) -> int:
        if not self.answers:
            raise Unavailable("nobody answers")
        return await super().head(stream)


@contextlib.asynccontextmanager
async def leased(folder: Path, lease_s: float) -> AsyncIterator[tuple[Agent, CutOff]]:
    """An agent that serves release 0 of a log which ends with what it has folded."""
    found, journal = agent(folder), CutOff(MemoryStreams())
    found.config = Config(inference=Inference(lease_s=lease_s))
    await put(journal, *(step for step in SERVING if not isinstance(step, Said)))
    see(found, *SERVING)
    renewing = asyncio.create_task(found.renew(journal)) if lease_s else None
    try:
        await until(found.gate)
        yield found, journal
    finally:
        if renewing:
            renewing.cancel()
            await asyncio.gather(renewing, return_exceptions=True)


async def test_who_is_cut_off_stops_when_its_lease_is_over_and_goes_on_when_the_log_is_back(tmp_path: Path) -> None:
    """Row "cut-off engines", with a lease: no answer is better than an older one."""
    async with leased(tmp_path, 0.4) as (found, journal):
        first = found.leased
        await until(lambda: found.leased > first + 0.4)  # it is renewed while the leader answers
        assert found.open.is_set()
        journal.answers = False
        await quiet(0.6)
        assert not found.open.is_set() and found.serving() == ""
        journal.answers = True
        await until(found.open.is_set)


async def test_without_a_lease_who_is_cut_off_goes_on_with_its_committed_version(tmp_path: Path) -> None:
    async with leased(tmp_path, 0.0) as (found, journal):
        journal.answers = False
        await quiet(0.6)
        assert found.gate() and found.serving() == "inc:0"


async def test_a_lease_counts_from_a_head_that_the_fold_has_reached(tmp_path: Path) -> None:
    """A leader that answers is not enough: what it holds beyond the fold may be a fence."""
    async with leased(tmp_path, 0.4) as (found, journal):
        await put(journal, joined("e9"), boot="e9.1")
        await quiet(0.7)
        assert not found.open.is_set()
        see(found, *SERVING, joined("e9"))
        await until(found.open.is_set)


async def test_what_was_written_since_the_proof_closes_the_gate_whatever_the_fold_says(tmp_path: Path) -> None:
    """The serving rule's last clause, which no log can know: nothing generates with memory that was written since."""
    found = agent(tmp_path)
    see(found, *SERVING)
    assert found.open.is_set()
    await say(found, receiving(found, bytes(16)))
    found.folded(found.world, ())
    assert not found.open.is_set() and found.serving() == ""


async def test_what_was_written_since_the_proof_is_owed_again_until_it_is_proven(tmp_path: Path) -> None:
    """The other half of that clause. A second offer of the same attempt had begun when the first one's report counted:
    the log shows a proof, the memory holds half of something, and nobody else will ever ask."""
    found = agent(tmp_path)
    see(found, *SERVING)
    assert found.react(found.world, 0) == []
    head = found.world.publications.head
    assert head is not None
    await say(found, receiving(found, bytes(16)))
    owed = found.react(found.world, 0)
    assert [debt.effect for debt in owed] == [VerifyHead("inc:0", head.manifest, head.weights)]
    assert found.react(found.world, 0)[0].key == owed[0].key
    found.proven = head.manifest
    assert found.react(found.world, 0) == []


# -- fence


async def test_a_fence_has_the_memory_before_it_is_reported_and_says_what_was_served(tmp_path: Path) -> None:
    found = agent(tmp_path)
    see(found, *SERVING)
    found.served = 7
    async with found.memory:  # a batch is being generated
        saying = asyncio.create_task(say(found, Fence("pub1", 1)))
        await until(found.wanted.is_set)
        since = time.monotonic()
        await asyncio.sleep(0.02)
        assert not saying.done()
        found.served, waited_ms = 8, (time.monotonic() - since) * 1000
    said = await saying
    assert isinstance(said, EngineFenced)
    assert (said.previous, said.served) == ("inc:0", 8) and said.resumed_at > 0
    assert said.stopped_ms >= round(waited_ms, 3) >= 20


async def test_the_second_attempts_fence_does_not_count_the_same_service_again(tmp_path: Path) -> None:
    found = agent(tmp_path)
    see(found, *SERVING)
    await say(found, Fence("pub1", 1))
    said = await say(found, Fence("pub1", 2))
    assert isinstance(said, EngineFenced) and (said.previous, said.resumed_at, said.served) == ("", 0, 0)


# -- receive


async def test_what_was_received_is_hashed_where_it_lies(tmp_path: Path) -> None:
    found = agent(tmp_path)
    effect = receiving(found, NEXT)
    said = await say(found, effect)
    assert bytes(memory(found)) == NEXT
    assert isinstance(said, ReceiverVerified)
    assert (said.load_id, said.manifest, said.method, said.tensors, said.bytes) == (
        "inc:1",
        effect.manifest,
        "received",
        1,
        16,
    )


async def test_a_flipped_bit_is_reported_with_the_tensor_and_what_was_found(tmp_path: Path) -> None:
    found = agent(tmp_path, Fault(at=1))
    effect = receiving(found, NEXT)
    said = await say(found, effect)
    assert isinstance(said, ReceiverFailed) and said.cause == "digest" and "w" in said.detail
    assert said.observed not in ("", effect.manifest)
    again = await say(found, effect)
    assert isinstance(again, ReceiverVerified)  # the switch strikes once


async def test_the_fault_switch_waits_for_its_target(tmp_path: Path) -> None:
    found = agent(tmp_path, Fault(at=3))
    assert isinstance(await say(found, receiving(found, NEXT, sequence=2)), ReceiverVerified)
    assert isinstance(await say(found, receiving(found, NEXT, sequence=4)), ReceiverFailed)


@pytest.mark.parametrize(
    ("change", "cause"), [({"transport": "pigeon"}, "protocol"), ({"address": "0" * 64}, "refused")]
)
async def test_a_ticket_that_leads_nowhere_is_a_failure_of_this_attempt(
    tmp_path: Path, change: dict[str, str], cause: str
) -> None:
    found = agent(tmp_path)
    said = await say(found, msgspec.structs.replace(receiving(found, NEXT), **change))
    assert isinstance(said, ReceiverFailed) and said.cause == cause and said.observed == ""


async def test_a_manifest_that_is_not_there_is_a_failure_too(tmp_path: Path) -> None:
    found = agent(tmp_path)
    said = await say(found, msgspec.structs.replace(receiving(found, NEXT), manifest="0" * 64))
    assert isinstance(said, ReceiverFailed) and said.cause == "artifact"


# -- verification of the head


async def test_memory_that_holds_the_head_is_proven_without_moving_a_byte(tmp_path: Path) -> None:
    found = agent(tmp_path)
    memory(found)[:] = BASE
    said = await say(found, verifying(found, BASE))
    assert isinstance(said, ReceiverVerified)
    assert (said.method, said.bytes, said.publication, said.attempt) == ("memory", 0, "", 0)


async def test_a_store_that_gives_no_answer_is_asked_again_and_ends_no_boot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing was written: a store that is away for a minute uses up nobody's restarts."""

    def silent(*_: object) -> Generator[int, None, Opened]:
        yield 0
        raise Unavailable("no route to host")

    found = agent(tmp_path)
    effect = verifying(found, NEXT)
    before, manifest = bytes(memory(found)), found.store.get(effect.manifest)
    with monkeypatch.context() as patch:
        patch.setattr(Folder, "open", silent)
        patch.setattr(ArtifactStore, "get", lambda store, digest: manifest)
        with pytest.raises(Unavailable, match=f"cannot read .*{effect.weights.digest}: no route to host"):
            await say(found, effect)
    assert bytes(memory(found)) == before and found.serving() == ""
    said = await say(found, effect)
    assert isinstance(said, ReceiverVerified) and said.method == "artifact" and bytes(memory(found)) == NEXT


async def test_memory_that_holds_anything_else_is_loaded_from_the_artifact(tmp_path: Path) -> None:
    found = agent(tmp_path)
    memory(found)[:] = NEXT
    effect = verifying(found, BASE)
    said = await say(found, effect)
    assert isinstance(said, ReceiverVerified) and (said.method, said.bytes) == ("artifact", 16)
    assert bytes(memory(found)) == BASE and said.manifest == effect.manifest


async def test_a_head_that_cannot_be_loaded_ends_the_boot(tmp_path: Path) -> None:
    found = agent(tmp_path)
    effect = verifying(found, BASE)
    found.store.path(effect.weights.digest).unlink()
    said = await say(found, effect)
    assert isinstance(said, EngineLeft) and "inc:0" in said.reason


async def test_a_load_that_is_cancelled_twice_still_keeps_the_memory_to_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread cannot be stopped: as long as it may write, nobody else may read, hash or generate."""
    entered, may_end = threading.Event(), threading.Event()

    def slow(store: ArtifactStore, digest: str, into: Pieces, manifest: Manifest) -> int:
        entered.set()
        may_end.wait(10)
        return 0

    monkeypatch.setattr(agent_module, "load", slow)
    found = agent(tmp_path)
    saying = asyncio.create_task(say(found, verifying(found, BASE)))
    await asyncio.to_thread(entered.wait, 5)
    for _ in range(3):
        saying.cancel()
        await asyncio.sleep(0.01)
    assert found.memory.locked() and not saying.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await saying
    assert not found.memory.locked()


def test_an_engine_that_wrote_to_its_memory_since_its_proof_proves_the_head_once_more(tmp_path: Path) -> None:
    """Found by simulation: a second ticket of one attempt began a second receive while the report of the first was on
    its way. The report counted, and the gate stayed shut for good although the log said that it may generate."""
    found, after = agent(tmp_path), (*SERVING, *trained("c1"), *released(1, "c1", E0, E1))
    see(found, *after)
    assert found.open.is_set() and found.react(found.world, 0) == []
    found._writing()
    assert not found.open.is_set()
    assert [debt.effect for debt in found.react(found.world, 0)] == [VerifyHead("inc:1", "digest-of-c1", blob("c1"))]
