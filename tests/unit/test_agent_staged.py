"""The agent's hands in staged mode, with the real torch engine: what is staged, swapped in, and never taken on trust.

Knows: agent, endpoint, torch engine, a real artifact store; a transport that stops half way when asked.
Must not know: who decides that anything is staged.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer

from consumers.reef_engine.agent import Agent
from consumers.reef_engine.fault import Fault
from consumers.reef_engine.server import Server
from consumers.reef_engine.torch_backend import TorchEngine
from reef_bus.artifacts import ArtifactStore, load_weights, save_weights
from reef_bus.backends import BOOT_HEADER, Completion, Generated, Pieces, Prompt, places
from reef_bus.config import Config
from reef_bus.core.effects import Debt, Effect, Fence, Join, Me, Stage, VerifyHead
from reef_bus.errors import ContractError, TransferError
from reef_bus.events import (
    Blob,
    EngineFenced,
    EngineJoined,
    EngineStaged,
    Event,
    ReceiverFailed,
    ReceiverVerified,
)
from reef_bus.manifest import Manifest
from reef_bus.policy import PolicyConfig, new_policy, pieces
from reef_bus.transport import Offer, Ticket, Transport
from tests.facts import E0, E1, SERVING, committed, swapped
from tests.spec import Step, given
from tests.unit.test_staged import READY, STAGED

PROMPT = Prompt(ids=(11, 3, 10), max_tokens=8, temperature=0.0)


class Halting(Transport):
    """Reads the artifact, as `files` does; with `gate` closed it spoils four bytes and hangs before it goes on."""

    name = "files"

    def __init__(self, store: ArtifactStore) -> None:
        self.store = store
        self.gate = asyncio.Event()
        self.gate.set()
        self.half = asyncio.Event()
        self.left = 0

    async def offer(self, manifest: Manifest, source: Pieces, *, publication: str, attempt: int) -> Offer:
        raise AssertionError("nobody sends here")

    async def receive(  # type: ignore[override]
        self, ticket: Ticket, manifest: Manifest, target: Pieces, **_: object
    ) -> int:
        try:
            whole = load_weights(self.store, ticket.address, target, manifest)
            if not self.gate.is_set():
                next(iter(target.values())).data[:4] = b"half"
                self.half.set()
                await self.gate.wait()
                return load_weights(self.store, ticket.address, target, manifest)
            return whole
        finally:
            self.left += 1


class Found:
    """An agent with a torch engine that holds and serves the base model, release 0."""

    def __init__(self, folder: Path, engine: TorchEngine | None = None, fault: Fault | None = None) -> None:
        self.store, self.engine = ArtifactStore(folder), engine or TorchEngine()
        self.engine.start()
        self.kept = {name: self._keep(seed) for seed, name in enumerate(("base", "c1", "c2", "c3"))}
        self.agent = Agent(Config(), Me("e0", "e0.1"), "http://e0", self.engine, self.store, fault or Fault())
        self.transport = Halting(self.store)
        self.agent.transports = {"files": self.transport}
        blob, manifest = self.kept["base"]
        load_weights(self.store, blob.digest, self.engine.live(), manifest)
        self.agent.proven = manifest.digest
        self.see(*SERVING)

    def _keep(self, seed: int) -> tuple[Blob, Manifest]:
        return save_weights(self.store, pieces(dict(new_policy(PolicyConfig(), seed).named_parameters())))

    def digest(self, name: str) -> str:
        return self.kept[name][1].digest

    def _named(self, fact: str) -> str:
        return self.digest(fact.removeprefix("digest-of-"))

    def see(self, *history: Step) -> None:
        """Fold a history whose digests are those of the kept weights."""
        world = given(*history).world
        assert world.publications.head is not None
        world.publications.head.manifest = self._named(world.publications.head.manifest)
        for engine in world.membership.engines.values():
            if engine.verified is not None:
                named = self._named(engine.verified.manifest)
                engine.verified = msgspec.structs.replace(engine.verified, manifest=named)
        self.agent.folded(world, ())

    def staging(self, name: str = "c1", sequence: int = 1, attempt: int = 1) -> Stage:
        blob, manifest = self.kept[name]
        return Stage(f"pub{sequence}", attempt, f"inc:{sequence}", manifest.digest, "files", blob.digest, "", 5.0)

    def heading(self, name: str = "c1", sequence: int = 1) -> VerifyHead:
        blob, manifest = self.kept[name]
        return VerifyHead(f"inc:{sequence}", manifest.digest, blob)

    async def say(self, effect: Effect) -> Event:
        async with contextlib.AsyncExitStack() as scope:
            said = await self.agent.perform(Debt(key="k", effect=effect), scope)
        assert said is not None
        return said

    async def verified(self, effect: VerifyHead) -> ReceiverVerified:
        said = await self.say(effect)
        assert isinstance(said, ReceiverVerified), said
        assert said.manifest == effect.manifest == self.agent.proven
        assert self.answer() == self.expected(effect.manifest)
        return said

    def answer(self) -> Completion:
        return self.engine.generate([PROMPT])[0]

    def expected(self, digest: str) -> Completion:
        """What a fresh engine that was loaded with those weights, and nothing else ever, answers."""
        fresh = TorchEngine()
        fresh.start()
        blob, manifest = next(each for each in self.kept.values() if each[1].digest == digest)
        load_weights(self.store, blob.digest, fresh.live(), manifest)
        return fresh.generate([PROMPT])[0]


@contextlib.asynccontextmanager
async def endpoint(found: Found) -> AsyncIterator[Callable[[], asyncio.Future[Generated]]]:
    """The engine's HTTP endpoint at work; call what it yields to ask once."""
    server, app = Server(found.agent, 4), web.Application()
    app.add_routes(server.routes())
    worker = asyncio.create_task(server.work())
    async with TestServer(app) as http, ClientSession(http.make_url("/")) as client:

        async def ask() -> Generated:
            body = msgspec.json.encode(PROMPT)
            async with client.post("/generate", data=body, headers={BOOT_HEADER: "e0.1"}) as reply:
                return msgspec.json.decode(await reply.read(), type=Generated)

        yield lambda: asyncio.ensure_future(ask())
    worker.cancel()
    await asyncio.gather(worker, return_exceptions=True)


# -- staging


async def test_generation_goes_on_while_a_release_is_staged_and_is_served_after_the_swap(tmp_path: Path) -> None:
    found = Found(tmp_path)
    found.transport.gate.clear()
    async with endpoint(found) as ask:
        staging = asyncio.create_task(found.say(found.staging()))
        await found.transport.half.wait()
        during = [await ask() for _ in range(5)]
        assert not staging.done() and found.agent.served == 5
        found.transport.gate.set()
        said = await staging
        assert isinstance(said, EngineStaged) and said.manifest == found.digest("c1")
        assert (said.publication, said.attempt, said.load_id, said.bytes) == ("pub1", 1, "inc:1", 304_384)
        found.see(*STAGED)
        before = await ask()
        found.see(*STAGED, committed(1, "c1", E0, E1))
        waiting = ask()
        await asyncio.sleep(0.02)
        assert not waiting.done() and found.agent.serving() == ""
        assert (await found.verified(found.heading())).method == "swapped"
        assert not waiting.done(), "proven, and not yet on the log"
        found.see(*STAGED, committed(1, "c1", E0, E1), swapped("e0", 1, "c1"))
        after = await waiting
    assert {answer.load_id for answer in (*during, before)} == {"inc:0"} and after.load_id == "inc:1"
    assert {answer.completion for answer in (*during, before)} == {found.expected(found.digest("base"))}
    assert after.completion == found.expected(found.digest("c1"))
    assert found.expected(found.digest("base")) != found.expected(found.digest("c1"))


async def test_a_corrupted_staging_is_named_and_leaves_what_is_served_alone(tmp_path: Path) -> None:
    found = Found(tmp_path, fault=Fault(at=1))
    said = await found.say(found.staging())
    assert isinstance(said, ReceiverFailed) and said.staged and said.cause == "digest"
    assert "model.norm.weight" in said.detail and said.observed not in ("", found.digest("c1"))
    assert found.agent.open.is_set() and found.answer() == found.expected(found.digest("base"))
    assert (await found.verified(found.heading())).method == "artifact"


@pytest.mark.parametrize("change", [{"transport": "pigeon"}, {"address": "0" * 64}, {"manifest": "0" * 64}])
async def test_a_staging_that_leads_nowhere_is_a_failure_beside(tmp_path: Path, change: dict[str, str]) -> None:
    found = Found(tmp_path)
    said = await found.say(msgspec.structs.replace(found.staging(), **change))
    assert isinstance(said, ReceiverFailed) and said.staged and said.observed == ""
    assert found.agent.serving() == "inc:0" and found.agent.staged is None


class NoRoom(TorchEngine):
    def stage(self) -> Pieces:
        raise TransferError("memory", "no room for a second copy: 304384 bytes")


async def test_no_room_for_a_second_copy_is_a_failure_and_not_the_end(tmp_path: Path) -> None:
    found = Found(tmp_path, NoRoom())
    said = await found.say(found.staging())
    assert isinstance(said, ReceiverFailed) and (said.cause, said.staged) == ("memory", True)


class OneCopy(TorchEngine):
    """Says that its served memory is a second copy."""

    def stage(self) -> Pieces:
        return self.live()


async def test_a_second_copy_that_is_the_served_one_is_refused_before_a_byte_moves(tmp_path: Path) -> None:
    found = Found(tmp_path, OneCopy())
    said = await found.say(found.staging())
    assert isinstance(said, ReceiverFailed) and "lie where the served ones do" in said.detail
    assert found.transport.left == 0 and found.answer() == found.expected(found.digest("base"))


async def test_an_ingress_is_gone_before_the_next_one_opens_or_a_fence_is_reported(tmp_path: Path) -> None:
    """Section 5: in both modes. The first attempt hangs with half of its bytes; nothing of it lands later."""
    found = Found(tmp_path)
    found.transport.gate.clear()
    first = asyncio.create_task(found.say(found.staging()))
    await found.transport.half.wait()
    second = asyncio.create_task(found.say(found.staging(attempt=2)))
    fence = asyncio.create_task(found.say(Fence("pub2", 1)))
    await asyncio.sleep(0.02)
    assert found.transport.left == 0 and not second.done() and not fence.done()
    first.cancel()
    found.transport.gate.set()
    said = await second
    assert first.cancelled() and isinstance(said, EngineStaged) and said.attempt == 2
    assert isinstance(await fence, EngineFenced)
    assert found.agent.staged is None and found.engine._beside is None, "a fenced target needs no second copy"
    assert (await found.verified(found.heading())).method == "artifact"


# -- swapping


async def test_a_swap_moves_no_byte_and_keeps_the_incumbents_memory_for_the_next_staging(tmp_path: Path) -> None:
    found = Found(tmp_path)
    old = places(found.engine.live())
    await found.say(found.staging())
    new = places(found.engine.stage())
    said = await found.verified(found.heading())
    assert (said.method, said.bytes, said.publication, said.attempt) == ("swapped", 0, "", 0)
    assert places(found.engine.live()) == new and places(found.engine.stage()) == old
    await found.say(found.staging("c2", 2))
    assert (await found.verified(found.heading("c2", 2))).method == "swapped"
    assert places(found.engine.live()) == old


async def test_a_swap_waits_for_the_batch_that_is_being_generated(tmp_path: Path) -> None:
    found = Found(tmp_path)
    await found.say(found.staging())
    async with found.agent.memory:
        saying = asyncio.create_task(found.say(found.heading()))
        await asyncio.sleep(0.02)
        assert not saying.done() and found.answer() == found.expected(found.digest("base"))
    assert isinstance(await saying, ReceiverVerified)


async def test_a_swap_that_was_made_and_never_reported_is_proven_from_memory(tmp_path: Path) -> None:
    """A lost append: the debt is owed again under another key, and the staging is not there any more."""
    found = Found(tmp_path)
    await found.say(found.staging())
    assert (await found.verified(found.heading())).method == "swapped"
    assert (await found.verified(found.heading())).method == "memory"


class Lazy(TorchEngine):
    """Says that it swapped, and did not."""

    def swap(self) -> None: ...


class Partial(TorchEngine):
    """Swaps, but one layer goes on reading the old memory."""

    def swap(self) -> None:
        old = self._started().lm_head
        super().swap()
        self._started().lm_head = old
        self._live = pieces(dict(self._started().named_parameters()), writable=True)


class Honest(TorchEngine):
    """Cannot prove its swap, and says so."""

    def swap(self) -> None:
        raise ContractError("a captured graph still reads the old addresses")


@pytest.mark.parametrize("engine", [Lazy, Partial, Honest])
async def test_a_swap_that_cannot_be_proven_is_loaded_from_the_artifact_alone(
    tmp_path: Path, engine: type[TorchEngine]
) -> None:
    found = Found(tmp_path, engine())
    await found.say(found.staging())
    said = await found.verified(found.heading())
    assert (said.method, said.bytes) == ("artifact", 304_384)


async def test_a_staging_of_another_release_is_dropped_though_its_bytes_may_be_the_same(tmp_path: Path) -> None:
    """A halted load id is dead for good; the head is proven on its own."""
    found = Found(tmp_path)
    await found.say(found.staging("c1", 1))
    assert (await found.verified(found.heading("c1", 2))).method == "artifact"
    assert found.agent.staged is None


async def test_a_staging_that_was_written_since_is_never_swapped_in(tmp_path: Path) -> None:
    """Another ingress was opened and broke off: the copy may hold anything, though it once hashed to the head."""
    found = Found(tmp_path)
    await found.say(found.staging())
    found.transport.gate.clear()
    late = asyncio.create_task(found.say(found.staging(attempt=2)))
    await found.transport.half.wait()
    late.cancel()
    await asyncio.gather(late, return_exceptions=True)
    assert (await found.verified(found.heading())).method == "artifact"


async def test_staging_leaves_the_proof_of_what_is_served(tmp_path: Path) -> None:
    found = Found(tmp_path)
    found.see(*READY)
    await found.say(found.staging())
    assert found.agent.proven == found.digest("base") and found.agent.serving() == "inc:0"


async def test_an_engine_says_when_it_joins_whether_it_can_stage(tmp_path: Path) -> None:
    found = Found(tmp_path)
    said = await found.say(Join())
    assert isinstance(said, EngineJoined) and said.modes == ("fenced", "staged")
    found.engine.stages = False
    said = await found.say(Join())
    assert isinstance(said, EngineJoined) and said.modes == ("fenced",)


# -- the torch engine itself


def test_a_swap_of_nothing_is_refused_and_freeing_is_safe_to_repeat() -> None:
    engine = TorchEngine()
    with pytest.raises(ContractError, match="start"):
        engine.stage()
    engine.start()
    with pytest.raises(ContractError, match="nothing is staged"):
        engine.swap()
    assert engine.stage() is engine.stage()
    engine.unstage()
    engine.unstage()
    with pytest.raises(ContractError, match="nothing is staged"):
        engine.swap()


def test_the_second_copy_is_worthless_until_it_was_filled() -> None:
    engine = TorchEngine()
    engine.start()
    engine.stage()
    engine.swap()
    with pytest.raises(ContractError, match="not finite"):
        engine.generate([PROMPT])
