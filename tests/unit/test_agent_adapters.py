"""The agent's hands on adapters: loaded beside what is served, unloaded when nobody asks, looked for when in doubt.

Knows: agent, server and router over a real store, an engine of 32 bytes that holds adapters. Must not know: publishers.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from consumers.reef_engine.agent import Agent
from consumers.reef_engine.continuous import Continuous
from consumers.reef_engine.endpoint import Waiting
from consumers.reef_engine.fault import Fault
from consumers.reef_engine.server import Server
from consumers.reef_gateway.router import Router
from reef_bus.artifacts import ArtifactStore, save_weights
from reef_bus.backends import Answer, ContinuousBackend, Generated, Generation, Pieces, Prompt, Stop
from reef_bus.config import Adapters, Config
from reef_bus.core.effects import AwaitArtifact, Debt, LoadAdapter, Me, UnloadAdapter
from reef_bus.errors import Misfit, Rejected, Unavailable
from reef_bus.events import AdapterLeaked, AdapterUnloaded, EngineLeft, EngineStaged, Event, Lora, ReceiverFailed
from tests.facts import CODE, FROZEN, LORA, MATH, L, adapter_trained, digest, leaked, name
from tests.loop import until
from tests.simulation.adapting import AdapterMemory
from tests.simulation.faults import Faults, Nemesis
from tests.simulation.hands import pieces
from tests.spec import Step, given
from tests.unit.test_adapters import ONE, TWO

M1, OTHER = b"math".ljust(32), b"code".ljust(32)


class Beside:
    """An agent that holds the base model, and its server."""

    def __init__(self, folder: Path, **faults: float) -> None:
        self.store, self.nemesis = ArtifactStore(folder), Nemesis(Faults(**faults), random.Random(1), lambda text: None)
        self.backend = AdapterMemory(random.Random(2), self.nemesis, 3)
        config = Config(adapters=Adapters(scenarios=(MATH, CODE)))
        self.agent = Agent(config, Me("e0", "e0.1"), "http://e0", self.backend, self.store, Fault())
        self.server = Server(self.agent, 4)
        self.agent.proven = digest("base")
        self.see(*FROZEN)

    def see(self, *history: Step) -> None:
        self.agent.folded(given(*history).world, ())

    async def does(self, effect: LoadAdapter | AwaitArtifact | UnloadAdapter) -> Event | None:
        async with contextlib.AsyncExitStack() as scope:
            return await self.agent.perform(Debt(key="k", effect=effect), scope)

    def effect(self, content: bytes = M1, n: int = 1, publication: str = "pub1", held: bool = False) -> LoadAdapter:
        weights, manifest = save_weights(self.store, pieces(content))
        return LoadAdapter(publication, 1, MATH, name(MATH, n), L(n), manifest.digest, weights, LORA, held)

    async def ask(self, scenario: str) -> asyncio.Future[Generated]:
        prompt = Prompt(ids=(1,), max_tokens=32, scenario=scenario)
        done: asyncio.Future[Generated] = asyncio.get_running_loop().create_future()
        self.server.queue.put_nowait(Waiting(prompt, done))
        return done


async def test_what_was_loaded_is_proven_and_said_under_its_name(tmp_path: Path) -> None:
    beside = Beside(tmp_path)
    effect = beside.effect()
    word = await beside.does(effect)
    assert isinstance(word, EngineStaged) and beside.backend.held == {name(MATH, 1): M1}
    assert (word.scenario, word.adapter, word.load_id, word.manifest) == (MATH, name(MATH, 1), L(1), effect.manifest)
    again = await beside.does(replace(effect, load_id=L(2), held=True))
    assert isinstance(again, EngineStaged) and (again.adapter, again.bytes) == (name(MATH, 1), 0)


@pytest.mark.parametrize(
    ("fault", "cause"),
    [("no_load", "memory"), ("late_load", "stalled"), ("another_load", "digest"), ("skip_load", "digest")],
)
async def test_a_load_that_goes_wrong_is_a_failure_of_the_target_and_ends_a_boot_that_needs_a_head(
    tmp_path: Path, fault: str, cause: str
) -> None:
    beside = Beside(tmp_path, **{fault: 1.0})
    word = await beside.does(beside.effect())
    assert isinstance(word, ReceiverFailed) and (word.cause, word.staged, word.scenario) == (cause, True, MATH)
    assert isinstance(await beside.does(beside.effect(publication="")), EngineLeft)


def gone(store: ArtifactStore, digest: str) -> None:
    store.remove(digest)


def damaged(store: ArtifactStore, digest: str) -> None:
    data = store.path(digest).read_bytes()
    store.path(digest).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def unreadable(store: ArtifactStore, digest: str) -> None:
    """Put back by somebody whose files are not everybody's, say; here, a folder: nobody can read that."""
    store.remove(digest)
    store.path(digest).mkdir()


@pytest.mark.parametrize("spoil", [gone, damaged, unreadable])
@pytest.mark.parametrize("which", ["weights", "manifest"])
async def test_an_artifact_that_cannot_be_read_is_said_ends_no_boot_and_is_waited_for(
    tmp_path: Path, spoil: Callable[[ArtifactStore, str], None], which: str
) -> None:
    beside = Beside(tmp_path)
    effect = beside.effect(publication="")
    digest_ = effect.manifest if which == "manifest" else effect.weights.digest
    spoil(beside.store, digest_)
    word = await beside.does(replace(effect, attempt=0))
    assert isinstance(word, ReceiverFailed) and str(beside.store.path(digest_)) in word.detail
    assert (word.publication, word.attempt, word.load_id, word.scenario) == ("", 0, L(1), MATH)
    assert (word.adapter, word.staged, beside.backend.held) == (name(MATH, 1), True, {})
    look = AwaitArtifact(17, effect.manifest, effect.weights, 0.01, 0.02)
    waiting = asyncio.create_task(beside.does(look))
    await asyncio.sleep(0.1)
    assert not waiting.done() and beside.agent.adapters.mended == frozenset()
    if spoil is unreadable:
        beside.store.path(digest_).rmdir()
    gone(beside.store, digest_)
    save_weights(beside.store, pieces(M1))
    assert await waiting is None and beside.agent.adapters.mended == {17}
    assert isinstance(await beside.does(effect), EngineStaged) and beside.backend.held == {name(MATH, 1): M1}


async def test_a_store_that_gives_no_answer_is_the_publishers_to_judge_where_it_is_a_target(tmp_path: Path) -> None:
    """They have a deadline for it; it may give one in a moment."""
    beside = Beside(tmp_path)
    effect = beside.effect()
    unreadable(beside.store, effect.weights.digest)
    with pytest.raises(Unavailable, match="cannot read"):
        await beside.does(effect)


class Narrow(AdapterMemory):
    """It takes adapters of another shape."""

    def load_adapter(self, name: str, tensors: Pieces, lora: Lora) -> None:
        raise Misfit("mismatch", "rank 8, expected 4")


async def test_an_adapter_that_does_not_fit_the_model_ends_no_boot(tmp_path: Path) -> None:
    beside = Beside(tmp_path)
    beside.agent.adapters.backend = Narrow(random.Random(2), beside.nemesis, 3)
    word = await beside.does(beside.effect(publication=""))
    assert isinstance(word, ReceiverFailed) and (word.publication, word.cause) == ("", "mismatch")
    assert "rank 8, expected 4" in word.detail


async def test_what_is_there_is_proven_whatever_became_of_its_artifact(tmp_path: Path) -> None:
    beside = Beside(tmp_path)
    effect = beside.effect(publication="", held=True)
    beside.backend.held[name(MATH, 1)] = M1
    for digest_ in (effect.manifest, effect.weights.digest):
        gone(beside.store, digest_)
    word = await beside.does(effect)
    assert isinstance(word, EngineStaged) and (word.tensors, word.bytes) == (2, 0)


async def test_it_is_looked_for_less_and_less_often_and_never_less_often_than_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside, pauses = Beside(tmp_path), list[float]()
    effect = beside.effect(publication="")
    gone(beside.store, effect.weights.digest)

    async def passes(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 6:
            save_weights(beside.store, pieces(M1))

    monkeypatch.setattr(asyncio, "sleep", passes)
    assert await beside.does(AwaitArtifact(17, effect.manifest, effect.weights, 0.5, 3.0)) is None
    assert pauses == [0.5, 1.0, 2.0, 3.0, 3.0, 3.0]


async def test_looking_for_an_artifact_keeps_nothing_else_of_the_engine_waiting(tmp_path: Path) -> None:
    beside = Beside(tmp_path)
    effect = beside.effect(publication="")
    gone(beside.store, effect.weights.digest)
    look = AwaitArtifact(17, effect.manifest, effect.weights, 0.0, 0.01)
    waiting = asyncio.create_task(beside.does(look))
    other = beside.effect(OTHER, 2, publication="")
    async with asyncio.timeout(5):
        assert isinstance(await beside.does(other), EngineStaged)
    waiting.cancel()


async def test_one_artifact_is_looked_for_at_a_time_however_many_are_damaged(tmp_path: Path) -> None:
    """A store that hangs would else take every thread, and nothing would generate any more. A look that was given up is
    in its thread still."""
    beside, reads, most, total = Beside(tmp_path), [0], [0], [0]
    effect = beside.effect(publication="")

    def hang(digest: str) -> bytes:
        reads[0] += 1
        total[0] += 1
        most[0] = max(most[0], reads[0])
        time.sleep(0.1)
        reads[0] -= 1
        raise Unavailable(f"cannot read {digest}")

    beside.store.get = hang  # type: ignore[method-assign]
    looks = (AwaitArtifact(seq, effect.manifest, effect.weights, 0.0, 0.01) for seq in range(1, 6))
    first, *others = (asyncio.create_task(beside.does(look)) for look in looks)
    await until(lambda: reads[0] > 0, 5)
    first.cancel()
    assert reads == [1], "it is in its thread still"
    await until(lambda: total[0] > 3)
    for task in others:
        task.cancel()
    await asyncio.gather(first, *others, return_exceptions=True)
    assert most == [1]


async def test_an_unload_waits_for_requests_that_name_the_adapter_and_for_no_others(tmp_path: Path) -> None:
    beside = Beside(tmp_path)
    await beside.does(beside.effect())
    with beside.agent.adapters.leased(name(CODE, 1)), beside.agent.adapters.leased(name(MATH, 1)):
        waiting = asyncio.create_task(beside.does(UnloadAdapter(name(MATH, 1))))
        await asyncio.sleep(0.05)
        assert not waiting.done() and name(MATH, 1) in beside.backend.held
    assert await waiting == AdapterUnloaded(engine="e0", adapter=name(MATH, 1)) and beside.backend.held == {}


async def test_an_unload_that_is_not_confirmed_is_a_leak(tmp_path: Path) -> None:
    beside = Beside(tmp_path, leak=1.0)
    await beside.does(beside.effect())
    word = await beside.does(UnloadAdapter(name(MATH, 1)))
    assert isinstance(word, AdapterLeaked) and word.adapter == name(MATH, 1)


async def test_what_an_unload_took_is_told_though_nobody_waits_for_it_any_more(tmp_path: Path) -> None:
    beside = Beside(tmp_path)
    beside.see(*FROZEN, *ONE)
    beside.backend.held[name(MATH, 1)] = M1
    given_up = asyncio.create_task(beside.does(UnloadAdapter(name(MATH, 1))))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    given_up.cancel()
    await asyncio.wait([given_up])
    assert beside.backend.held == {} and given_up.cancelled()
    (debt,) = beside.agent.react(beside.agent.world, 0)
    assert debt.effect.event.adapter == name(MATH, 1)  # type: ignore[attr-defined]
    assert beside.agent.version(MATH) is None


async def test_what_was_lost_and_loaded_again_is_there(tmp_path: Path) -> None:
    beside = Beside(tmp_path)
    beside.agent.adapters.lost = frozenset({name(MATH, 1)})
    assert not beside.agent.adapters.there(name(MATH, 1))
    await beside.does(beside.effect())
    assert beside.agent.adapters.there(name(MATH, 1))


async def test_what_the_log_knows_to_be_gone_is_remembered_no_longer(tmp_path: Path) -> None:
    """One name for each release, and each fold would look at all of them."""
    beside = Beside(tmp_path)
    beside.see(*FROZEN, *ONE)
    beside.agent.adapters.lost = frozenset({name(MATH, 1), name(CODE, 7)})
    await beside.does(beside.effect(n=2))
    assert beside.agent.adapters.lost == {name(MATH, 1)}
    for n in (7, 8, 9):
        await beside.does(beside.effect(n=n))
    await beside.agent.adapters.look(beside.agent.world)
    assert beside.agent.adapters.lost == {name(MATH, 1)}, "it was not loaded by this boot; the others are gone"


async def test_in_doubt_nobody_is_answered_with_an_adapter_until_it_was_looked_which_are_there(tmp_path: Path) -> None:
    beside = Beside(tmp_path)
    beside.see(*FROZEN, *TWO)
    beside.backend.held[name(MATH, 1)] = M1
    assert beside.agent.version(MATH) and beside.agent.version(CODE)
    beside.agent.doubt()
    assert beside.agent.version(MATH) is None
    assert type(beside.agent.react(beside.agent.world, 0)[0].effect).__name__ == "VerifyHead"
    await beside.agent.adapters.look(beside.agent.world)
    assert beside.agent.version(MATH) and beside.agent.version(CODE) is None


async def test_what_a_load_left_that_was_given_up_goes_before_the_next_one(tmp_path: Path) -> None:
    beside = Beside(tmp_path)
    beside.backend.held |= {name(MATH, 1): OTHER, name(CODE, 7): OTHER, "somebody-elses": OTHER}
    assert isinstance(await beside.does(beside.effect()), EngineStaged)
    assert beside.backend.held == {name(MATH, 1): M1, "somebody-elses": OTHER}


# -- requests


async def test_each_request_is_answered_and_named_by_its_own_scenarios_head(tmp_path: Path) -> None:
    beside = Beside(tmp_path)
    beside.see(*FROZEN, *ONE)
    beside.backend.held[name(MATH, 1)] = M1
    base = bytes(beside.backend.content)
    asked = [await beside.ask(scenario) for scenario in (MATH, CODE, "")]
    worker = asyncio.create_task(beside.server.work())
    found = await asyncio.gather(*asked)
    worker.cancel()
    assert [(each.load_id, bytes(each.completion.ids)) for each in found] == [(L(1), M1), (L(0), base), (L(0), base)]
    assert beside.agent.adapters._leases == {}


class Picky(AdapterMemory):
    """It refuses prompts that come together, and is in doubt from then on."""

    beside: Beside

    def generate_until(self, prompts: Sequence[Prompt], stop: Stop, kept: Any = None) -> Generation:
        if len(prompts) > 1:
            self.beside.agent.proven = ""
            raise Rejected("one at a time")
        return super().generate_until(prompts, stop, kept)


async def test_requests_that_wait_for_the_gate_one_by_one_keep_no_adapter_from_going(tmp_path: Path) -> None:
    """An unload has the lock that whoever opens the gate needs: neither would ever come to its end."""
    beside = Beside(tmp_path)
    backend = Picky(random.Random(2), beside.nemesis, 3)
    backend.beside = beside
    beside.backend = beside.agent.backend = beside.agent.adapters.backend = backend
    beside.see(*FROZEN, *ONE)
    backend.held[name(MATH, 1)] = M1
    for _ in range(2):
        await beside.ask(MATH)
    worker = asyncio.create_task(beside.server.work())
    while beside.agent.proven:  # noqa: ASYNC110 - a fake of numbers has no event to wait for
        await asyncio.sleep(0.01)
    async with asyncio.timeout(2):
        await beside.does(UnloadAdapter(name(MATH, 1)))
    worker.cancel()
    assert backend.held == {}


class Batching(AdapterMemory, ContinuousBackend):
    """It batches by itself: what is in hand is answered when it is told to."""

    def __init__(self, beside: Beside) -> None:
        AdapterMemory.__init__(self, random.Random(2), beside.nemesis, 3)
        self.asked: list[Prompt] = []
        self.both, self.go = asyncio.Event(), asyncio.Event()

    async def answer(self, prompt: Prompt) -> Answer:
        self.asked.append(prompt)
        if len(self.asked) == 2:
            self.both.set()
        await self.go.wait()
        return Answer(self.generate([prompt])[0], ((L(0), 32),))

    async def abort(self) -> None: ...

    async def halt(self) -> None: ...

    async def go_on(self) -> None: ...


async def test_who_batches_by_itself_names_each_request_and_holds_its_adapter_until_it_is_answered(
    tmp_path: Path,
) -> None:
    beside = Beside(tmp_path)
    backend = beside.agent.backend = beside.agent.adapters.backend = Batching(beside)
    beside.see(*FROZEN, *ONE)
    backend.held[name(MATH, 1)] = M1
    server = Continuous(beside.agent, backend, 4)
    asked = [server._enter(Prompt(ids=(1,), max_tokens=32, scenario=each)) for each in (MATH, CODE)]
    worker = asyncio.create_task(server.work())
    await asyncio.wait_for(backend.both.wait(), 5)
    unload = asyncio.create_task(beside.does(UnloadAdapter(name(MATH, 1))))
    await asyncio.sleep(0.05)
    assert [prompt.adapter for prompt in backend.asked] == [name(MATH, 1), ""] and not unload.done()
    backend.go.set()
    assert [each.load_id for each in await asyncio.gather(*asked)] == [L(1), L(0)]
    assert isinstance(await unload, AdapterUnloaded)
    worker.cancel()


async def test_a_request_of_a_scenario_whose_head_is_not_there_is_asked_elsewhere(tmp_path: Path) -> None:
    beside = Beside(tmp_path)
    beside.see(*FROZEN, *ONE)
    beside.agent.adapters.lost = frozenset({name(MATH, 1)})
    asked, base = await beside.ask(MATH), await beside.ask(CODE)
    worker = asyncio.create_task(beside.server.work())
    assert (await base).load_id == L(0)
    worker.cancel()
    with pytest.raises(Exception, match="does not hold the adapter of 'math'"):
        await asked


def test_a_router_knows_only_engines_that_hold_what_the_scenario_is_answered_with() -> None:
    router = Router(None)  # type: ignore[arg-type]
    begun = (*FROZEN, *ONE, *adapter_trained(CODE, "c1"))
    router.moved(given(*begun).world)
    assert {each: [e.id for e in router.able(each)] for each in (MATH, CODE, "", "poetry")} == {
        MATH: ["e0", "e1"],
        CODE: ["e0", "e1"],
        "": ["e0", "e1"],
        "poetry": [],
    }
    router.moved(given(*begun, leaked("e1", name(MATH, 1))).world)
    assert [e.id for e in router.able(MATH)] == ["e0"] and [e.id for e in router.able(CODE)] == ["e0", "e1"]
