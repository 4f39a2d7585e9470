"""The agent's hands over an engine that is apart: nothing is served that the engine's own sums do not prove.

Knows: agent, a real artifact store, the model of a server with its faults. Must not know: who decides on releases.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import msgspec
import pytest

from consumers.reef_engine.agent import Agent
from consumers.reef_engine.fault import Fault
from reef_bus.artifacts import ArtifactStore, save_weights
from reef_bus.backends import Prompt
from reef_bus.config import Config, Publication
from reef_bus.core.effects import Debt, Effect, Fence, Join, Me, Receive, Stage, VerifyHead
from reef_bus.errors import ContractError, Unavailable
from reef_bus.events import (
    Blob,
    EngineFenced,
    EngineJoined,
    EngineLeft,
    EngineStaged,
    Event,
    ReceiverFailed,
    ReceiverVerified,
)
from reef_bus.manifest import Manifest
from tests.apart import Apart, by_hand, version
from tests.contract.subject import fill
from tests.facts import SERVING, swapped
from tests.spec import Step, given
from tests.unit.test_agent import Floats
from tests.unit.test_agent_staged import Halting
from tests.unit.test_staged import COMMITTED

PROMPT = Prompt(ids=(11, 3, 10), max_tokens=8, seed=7)
NAMES = ("base", "c1", "c2", "c3")
WRONG = {
    "loads nothing": "parameter 'qk'",
    "drops a tensor": "parameter 'qk'",
    "flips a bit": "parameter 'head_t'",
    "forgets the label": "expected 'inc:1'",
}
"""Updates that say that they succeeded, and what gives each of them away."""


class Found:
    """An agent over a server that holds and serves the base model, release 0."""

    def __init__(self, folder: Path, fault: Fault | None = None) -> None:
        self.store, self.backend = ArtifactStore(folder), Apart()
        self.server = self.backend.server
        self.kept: dict[str, tuple[Blob, Manifest]] = {name: save_weights(self.store, version(name)) for name in NAMES}
        self.agent = Agent(Config(), Me("e0", "e0.1"), "http://e0", self.backend, self.store, fault or Fault())
        self.agent.proven = fill(self.backend, version("base"), "inc:0")
        self.see(*SERVING)
        self.server.loads = 0

    def digest(self, name: str) -> str:
        return self.kept[name.removeprefix("digest-of-")][1].digest

    def see(self, *history: Step) -> None:
        """Fold a history whose digests are those of the kept weights."""
        world = given(*history).world
        assert world.publications.head is not None
        world.publications.head.manifest = self.digest(world.publications.head.manifest)
        for engine in world.membership.engines.values():
            if engine.verified is not None:
                named = self.digest(engine.verified.manifest)
                engine.verified = msgspec.structs.replace(engine.verified, manifest=named)
        self.agent.folded(world, ())

    def _ingress(self, kind: type[Receive] | type[Stage], name: str, n: int) -> Receive | Stage:
        blob, manifest = self.kept[name]
        return kind(f"pub{n}", 1, f"inc:{n}", manifest.digest, "files", blob.digest, "", 5.0)

    def receiving(self, name: str = "c1", n: int = 1) -> Receive | Stage:
        return self._ingress(Receive, name, n)

    def staging(self, name: str = "c1", n: int = 1) -> Receive | Stage:
        return self._ingress(Stage, name, n)

    def heading(self, name: str = "c1", n: int = 1, pause: str = "drain") -> VerifyHead:
        blob, manifest = self.kept[name]
        return VerifyHead(f"inc:{n}", manifest.digest, blob, pause)

    async def say(self, effect: Effect) -> Event:
        async with contextlib.AsyncExitStack() as scope:
            said = await self.agent.perform(Debt(key="k", effect=effect), scope)
        assert said is not None
        return said

    async def holds(self, name: str, load_id: str) -> bool:
        """Whether the next answer is that version's, computed from what was published, and names it."""
        answer = await self.backend.answer(PROMPT)
        return (answer.completion, answer.versions) == (by_hand(PROMPT, (name, 8)), ((load_id, 8),))

    def spoil(self) -> None:
        """A transport that delivers four wrong bytes, and says that all went well."""
        self.agent.transports = {"files": Spoiling(self.store)}


class Spoiling(Halting):
    async def receive(self, *args: object, **_: object) -> int:  # type: ignore[override]
        moved = await super().receive(*args)  # type: ignore[arg-type]
        args[2]["q"].data[:4] = b"half"  # type: ignore[index]
        return moved


# -- fenced


async def test_what_was_received_is_taken_and_proven_by_the_engines_own_sums(tmp_path: Path) -> None:
    found = Found(tmp_path)
    said = await found.say(found.receiving())
    assert isinstance(said, ReceiverVerified)
    assert (said.load_id, said.manifest, said.method) == ("inc:1", found.digest("c1"), "received")
    assert (said.algorithm, said.tensors, said.bytes) == ("sha256-64", 2, 47), "two parameters made of three tensors"
    assert found.agent.proven == found.digest("c1") and await found.holds("c1", "inc:1")


async def test_wrong_bytes_in_the_room_are_named_and_never_taken(tmp_path: Path) -> None:
    found = Found(tmp_path)
    found.spoil()
    said = await found.say(found.receiving())
    assert isinstance(said, ReceiverFailed) and not said.staged
    assert said.cause == "digest" and "tensor 'q'" in said.detail and said.observed not in ("", found.digest("c1"))
    assert found.server.loads == 0 and await found.holds("base", "inc:0")
    assert found.agent.proven == "" and found.agent.serving() == ""


@pytest.mark.parametrize("fate", WRONG)
async def test_an_update_that_says_that_it_succeeded_is_not_believed(tmp_path: Path, fate: str) -> None:
    found = Found(tmp_path)
    found.server.updates.append(fate)  # type: ignore[arg-type]
    said = await found.say(found.receiving())
    assert isinstance(said, ReceiverFailed) and said.cause == "digest" and WRONG[fate] in said.detail
    assert found.agent.proven == "" and not found.agent.gate()
    assert isinstance(await found.say(found.receiving()), ReceiverVerified), "the next one is right"
    assert await found.holds("c1", "inc:1")


async def test_an_update_that_is_refused_is_a_failure_of_this_attempt(tmp_path: Path) -> None:
    found = Found(tmp_path)
    found.server.updates.append("refuses")
    said = await found.say(found.receiving())
    assert isinstance(said, ReceiverFailed) and said.cause == "refused" and "400 not now" in said.detail
    assert found.agent.proven == "" and await found.holds("base", "inc:0")


@pytest.mark.parametrize("fate", ["lost", "unheard"])
async def test_an_update_of_which_nobody_heard_is_tried_again(tmp_path: Path, fate: str) -> None:
    """Whether it was made is unknown, so nothing is said of it; and nothing is served meanwhile."""
    found = Found(tmp_path)
    found.server.updates.append(fate)  # type: ignore[arg-type]
    with pytest.raises(Unavailable):
        await found.say(found.receiving())
    assert found.agent.proven == "" and not found.agent.gate() and not found.agent.memory.locked()
    assert isinstance(await found.say(found.receiving()), ReceiverVerified) and await found.holds("c1", "inc:1")


async def test_tensors_that_are_no_version_of_the_model_are_refused_before_they_are_taken(tmp_path: Path) -> None:
    found = Found(tmp_path)
    found.kept["c1"] = save_weights(found.store, {"q": version("c1")["q"]})
    said = await found.say(found.receiving())
    assert isinstance(said, ReceiverFailed) and said.cause == "mismatch" and found.server.loads == 0


async def test_an_engine_that_refuses_to_say_what_it_holds_has_proven_nothing(tmp_path: Path) -> None:
    found = Found(tmp_path)
    found.server.mute = True
    said = await found.say(found.receiving())
    assert isinstance(said, ReceiverFailed) and said.cause == "digest" and "500 not now" in said.detail
    found.see(*COMMITTED)
    left = await found.say(found.heading())
    assert isinstance(left, EngineLeft) and "500 not now" in left.reason and not found.agent.gate()


async def test_the_fault_switch_strikes_between_the_room_and_the_engine(tmp_path: Path) -> None:
    """What arrived was right, and what the engine took was not: only its own sums can tell."""
    found = Found(tmp_path, Fault(at=1))
    said = await found.say(found.receiving())
    assert isinstance(said, ReceiverFailed) and said.cause == "digest" and "parameter 'qk'" in said.detail
    assert found.server.loads == 1
    assert isinstance(await found.say(found.receiving()), ReceiverVerified), "it strikes once"


# -- staged


async def test_a_release_is_staged_in_the_room_while_the_engine_serves(tmp_path: Path) -> None:
    found = Found(tmp_path)
    said = await found.say(found.staging())
    assert isinstance(said, EngineStaged) and (said.manifest, said.bytes) == (found.digest("c1"), 47)
    assert found.agent.serving() == "inc:0" and found.server.loads == 0 and await found.holds("base", "inc:0")


async def test_a_swap_takes_what_was_staged_and_proves_it(tmp_path: Path) -> None:
    found = Found(tmp_path)
    await found.say(found.staging())
    found.see(*COMMITTED)
    assert found.agent.serving() == ""
    said = await found.say(found.heading())
    assert isinstance(said, ReceiverVerified)
    assert (said.method, said.bytes, said.algorithm, said.tensors) == ("swapped", 0, "sha256-64", 2)
    assert found.server.loads == 1 and await found.holds("c1", "inc:1")
    found.see(*COMMITTED, swapped("e0", 1, "c1"))
    assert found.agent.serving() == "inc:1"


@pytest.mark.parametrize("fate", [*WRONG, "refuses"])
async def test_a_swap_that_is_not_proven_is_loaded_from_the_artifact(tmp_path: Path, fate: str) -> None:
    found = Found(tmp_path)
    await found.say(found.staging())
    found.server.updates.append(fate)  # type: ignore[arg-type]
    said = await found.say(found.heading())
    assert isinstance(said, ReceiverVerified) and (said.method, said.bytes) == ("artifact", 47)
    assert found.server.loads == (1 if fate == "refuses" else 2) and await found.holds("c1", "inc:1")


@pytest.mark.parametrize("fate", [*WRONG, "refuses"])
async def test_an_engine_that_cannot_be_loaded_either_leaves(tmp_path: Path, fate: str) -> None:
    found = Found(tmp_path)
    await found.say(found.staging())
    found.see(*COMMITTED)
    found.server.updates.extend([fate, fate])  # type: ignore[list-item]
    said = await found.say(found.heading())
    assert isinstance(said, EngineLeft) and "inc:1" in said.reason and WRONG.get(fate, "400 not now") in said.reason
    assert found.agent.proven == "" and not found.agent.gate()


async def test_wrong_bytes_beside_are_named_and_leave_what_is_served_alone(tmp_path: Path) -> None:
    found = Found(tmp_path)
    found.spoil()
    said = await found.say(found.staging())
    assert isinstance(said, ReceiverFailed) and said.staged and said.cause == "digest" and "tensor 'q'" in said.detail
    assert found.agent.staged is None and found.agent.serving() == "inc:0" and await found.holds("base", "inc:0")


async def test_a_corrupted_staging_is_found_before_it_is_taken(tmp_path: Path) -> None:
    found = Found(tmp_path, Fault(at=1))
    said = await found.say(found.staging())
    assert isinstance(said, ReceiverFailed) and said.staged and said.cause == "digest" and "tensor 'q'" in said.detail
    assert found.server.loads == 0 and found.agent.serving() == "inc:0"


async def test_a_staging_that_is_overwritten_is_never_taken(tmp_path: Path) -> None:
    """The room is one: who began to receive another version has nothing staged any more, also if that broke off."""
    found = Found(tmp_path)
    await found.say(found.staging())
    halting = Halting(found.store)
    halting.gate.clear()
    found.agent.transports = {"files": halting}
    late = asyncio.create_task(found.say(found.staging("c2", 2)))
    await halting.half.wait()
    late.cancel()
    await asyncio.gather(late, return_exceptions=True)
    said = await found.say(found.heading())
    assert isinstance(said, ReceiverVerified) and said.method == "artifact" and await found.holds("c1", "inc:1")
    assert found.server.loads == 1


@pytest.mark.parametrize("fate", ["lost", "unheard"])
async def test_a_swap_of_which_nobody_heard_leaves_nothing_proven(tmp_path: Path, fate: str) -> None:
    found = Found(tmp_path)
    await found.say(found.staging())
    found.see(*COMMITTED)
    found.server.updates.append(fate)  # type: ignore[arg-type]
    with pytest.raises(Unavailable):
        await found.say(found.heading())
    assert found.agent.proven == "" and found.agent.staged is None
    said = await found.say(found.heading())
    assert isinstance(said, ReceiverVerified) and said.method == ("memory" if fate == "lost" else "artifact")
    assert await found.holds("c1", "inc:1")


class Differing(Halting):
    async def delta(self, *_: object, **__: object) -> bytes | None:
        raise AssertionError("there is no memory here that a delta could be applied to")


async def test_no_delta_is_asked_for_where_what_is_served_cannot_be_read(tmp_path: Path) -> None:
    found = Found(tmp_path)
    found.agent.config = Config(publication=Publication(delta=True))
    found.agent.transports = {"files": Differing(found.store)}
    said = await found.say(found.staging())
    assert isinstance(said, EngineStaged) and said.base_manifest == ""


async def test_a_fence_drops_what_was_staged(tmp_path: Path) -> None:
    found = Found(tmp_path)
    await found.say(found.staging())
    assert isinstance(await found.say(Fence("pub2", 1)), EngineFenced)
    said = await found.say(found.heading())
    assert isinstance(said, ReceiverVerified) and said.method == "artifact"


# -- catching up


async def test_the_head_is_proven_from_memory_if_label_and_sums_are_its_own(tmp_path: Path) -> None:
    found = Found(tmp_path)
    said = await found.say(found.heading("base", 0))
    assert isinstance(said, ReceiverVerified)
    assert (said.method, said.bytes, said.algorithm) == ("memory", 0, "sha256-64") and found.server.loads == 0


async def test_the_same_content_under_another_name_is_loaded_again(tmp_path: Path) -> None:
    """A rollback: each answer names what sampled it, so the engine has to know the new name."""
    found = Found(tmp_path)
    said = await found.say(found.heading("base", 2))
    assert isinstance(said, ReceiverVerified) and said.method == "artifact" and await found.holds("base", "inc:2")


async def test_the_right_name_over_other_content_is_loaded_again(tmp_path: Path) -> None:
    found = Found(tmp_path)
    found.server.label = "inc:1"
    said = await found.say(found.heading())
    assert isinstance(said, ReceiverVerified) and said.method == "artifact" and await found.holds("c1", "inc:1")


async def test_memory_that_changed_behind_the_agents_back_is_loaded_again(tmp_path: Path) -> None:
    found = Found(tmp_path)
    found.server.parameters["qk"][3] ^= 1
    said = await found.say(found.heading("base", 0))
    assert isinstance(said, ReceiverVerified) and said.method == "artifact" and await found.holds("base", "inc:0")


async def test_a_head_whose_artifact_is_gone_ends_the_boot(tmp_path: Path) -> None:
    found = Found(tmp_path)
    found.see(*COMMITTED)
    found.store.path(found.kept["c1"][0].digest).unlink()
    said = await found.say(found.heading())
    assert isinstance(said, EngineLeft) and "inc:1" in said.reason and found.server.loads == 0


# -- what it says of itself


async def test_an_engine_that_is_apart_says_that_it_stages_and_how_it_pauses(tmp_path: Path) -> None:
    said = await Found(tmp_path).say(Join())
    assert isinstance(said, EngineJoined)
    assert (said.modes, said.pauses) == (("fenced", "staged"), ("drain", "retract", "in_place"))


def test_an_engine_that_is_not_apart_has_no_room_to_take_from() -> None:
    engine = Floats()
    for call in (
        lambda: engine.room({}),
        lambda: engine.expect("m"),
        lambda: engine.take("inc:0"),
        lambda: engine.proof("m", "inc:0"),
    ):
        with pytest.raises(ContractError, match="Floats is not apart"):
            call()
