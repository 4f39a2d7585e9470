"""A release comes to a real server: what each way of stopping makes of a long answer on its way, and what the server is
asked when it has lent its memory to a job.

Knows: real agent, endpoint and publisher over an in-memory log, one real server. Must not know: gateways, processes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from consumers.reef_engine.agent import Agent, Fault
from consumers.reef_engine.continuous import Continuous
from consumers.reef_engine.sglang.requests import Body
from reef_bus.attach import Committed
from reef_bus.attached import Attached
from reef_bus.backends import Generated, Prompt
from reef_bus.config import Config, Inference, Publication
from reef_bus.core.effects import AssembleBatch, Me
from reef_bus.core.memory import REGIONS
from reef_bus.core.publication import PAUSES
from reef_bus.events import (
    EngineFenced,
    EngineMemoryReleased,
    EngineMemoryRestored,
    EngineStaged,
    Event,
    JobDispatched,
    JobStarted,
    ReceiverVerified,
    ReleaseCommitted,
    Span,
)
from tests.box import CONFIG, Box
from tests.sglang.subject import CLOSE, Subject, greedy, logprobs, replaced, under_way
from tests.unit.test_attach import loop

pytestmark = pytest.mark.asyncio(loop_scope="session")

SHORT = Prompt(ids=(11, 7, 10), max_tokens=16, temperature=0.0)
LONG = Prompt(ids=(11, 7, 10), max_tokens=900)
REST = ("kv_cache", "cuda_graph")


class Served(Box):
    """One engine: the server, behind its agent."""

    def __init__(self, folder: Path, config: Config, subject: Subject) -> None:
        super().__init__(folder, config)
        agent = Agent(self.config, Me("e0", "e0.1"), "http://e0", subject.engine, self.store, Fault())
        self.agent, self.endpoint = agent, Continuous(agent, subject.engine, 16)

    def engines(self) -> None:
        self.begin(self.run(self.agent))
        self.begin(self.endpoint.work())

    def ask(self, prompt: Prompt) -> asyncio.Future[Generated]:
        return self.endpoint._enter(prompt)


@contextlib.asynccontextmanager
async def served(folder: Path, subject: Subject, mode: str, pause: str) -> AsyncIterator[Served]:
    deadlines = replace(CONFIG.publication.deadlines, fence_s=30.0, verify_s=30.0, sender_s=30.0)
    config = replace(
        CONFIG,
        inference=Inference(engines=("e0",)),
        publication=Publication(publishers=1, mode=mode, pause=pause, deadlines=deadlines),
    )
    found = Served(folder, config, subject)
    try:
        await found.start()
        yield found
    finally:
        await found.stop()


async def test_weights_that_somebody_else_has_loaded_never_answer(subject: Subject, tmp_path: Path) -> None:
    """As on a server that is borrowed: the engine proves what it holds again, and loads its own version."""
    async with served(tmp_path, subject, "fenced", "drain") as box, loop(box) as bus:
        async with asyncio.timeout(120):
            first = await bus.publish(dict(subject.policy(1).named_parameters()), step=0)
            assert isinstance(first, Committed)
            await box.ask(SHORT)
            await subject.receive(subject.version(2))
            await asyncio.to_thread(subject.engine.take, "somebody:1")
            found = await box.ask(SHORT)
            said = [event for event in await box.log() if isinstance(event, ReceiverVerified)]
    assert found.load_id == first.load_id and found.completion.ids == greedy(subject.policy(1), SHORT)
    assert said[-1].method == "artifact"


@pytest.mark.parametrize("pause", PAUSES)
@pytest.mark.parametrize("mode", ["fenced", "staged"])
async def test_an_answer_on_its_way_while_a_release_comes(
    subject: Subject, tmp_path: Path, mode: str, pause: str
) -> None:
    async with served(tmp_path, subject, mode, pause) as box, loop(box) as bus:
        async with asyncio.timeout(120):
            first = await bus.publish(dict(subject.policy(1).named_parameters()), step=0)
            answer = box.ask(LONG)
            await under_way(subject, answer, LONG)
            second = await bus.publish(dict(subject.policy(2).named_parameters()), step=1)
            found = await answer
            log = await box.log()
            assert await box.violations() == []
    assert isinstance(first, Committed) and isinstance(second, Committed)
    expected = {"drain": [first.load_id], "retract": [second.load_id], "in_place": [first.load_id, second.load_id]}
    assert [span.load_id for span in found.spans] == (expected[pause] if pause == "in_place" else [])
    assert found.load_id == expected[pause][0] and len(found.completion.ids) == 900
    parts = found.spans or (Span(found.load_id, 0, 900, found.as_of, found.done_as_of),)
    assert sum(part.count for part in parts) == 900
    stops = [place for place, event in enumerate(log, 1) if isinstance(event, EngineFenced)]
    assert not [stop for stop in stops for part in parts if part.as_of < stop <= part.done_as_of]
    verified = [event for event in log if isinstance(event, ReceiverVerified)]
    assert {event.algorithm for event in verified} == {"sglang-0.5.23-sha256-64"}
    staged = [event for event in log if isinstance(event, EngineStaged)]
    assert (mode, bool(staged)) in (("fenced", False), ("staged", True))
    if pause != "in_place":  # there the second version goes on from what the first one has computed
        expected_logprobs = logprobs(subject.policy(1 if pause == "drain" else 2), LONG, found.completion)
        assert torch.tensor(found.completion.logprobs).sub(expected_logprobs).abs().max() < CLOSE


async def test_a_server_that_lends_its_memory_to_a_job_has_it_back_in_order_and_answers_as_what_came_of_it(
    subject: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GPU it keeps everything, and says yes: what is shown is what it is asked, and when. Weights come back
    for the bytes, and the rest before the proof."""
    monkeypatch.setattr(subject.engine, "releases", REGIONS)
    async with served(tmp_path, subject, "fenced", "drain") as box, loop(box) as bus:
        async with asyncio.timeout(120):
            await bus.publish(dict(subject.policy(1).named_parameters()), step=0)
            before = await box.ask(SHORT)
            _colocate(bus.role, monkeypatch)
            asked: list[tuple[str, ...]] = []
            with replaced(subject, "post", partial(_noted, asked)):
                second = await bus.publish(dict(subject.policy(2).named_parameters()), step=1)
            after = await box.ask(SHORT)
            log = await box.log()
            assert await box.violations() == []
    assert isinstance(second, Committed) and second.load_id == after.load_id != before.load_id
    for seed, found in ((1, before), (2, after)):
        assert found.completion.ids == greedy(subject.policy(seed), SHORT)
    dispatched = next(place for place, event in enumerate(log) if isinstance(event, JobDispatched))
    kinds = (EngineMemoryReleased, JobStarted, EngineFenced, EngineMemoryRestored, ReceiverVerified, ReleaseCommitted)
    said = [event for event in log[dispatched:] if isinstance(event, kinds)]
    names = [type(event).__name__ for event in said]
    order = ["EngineMemoryReleased", "JobStarted", "EngineFenced", "EngineMemoryRestored", "ReceiverVerified"]
    assert names[:5] == order and sorted(names[5:]) == ["EngineMemoryRestored", "ReleaseCommitted"]
    regions = [event.regions for event in said if isinstance(event, EngineMemoryReleased | EngineMemoryRestored)]
    assert regions == [REGIONS, ("weights",), REST]
    assert asked == [
        ("flush_cache",),
        ("release_memory_occupation", *REGIONS),
        ("resume_memory_occupation", "weights"),
        ("flush_cache",),
        ("update_weights_from_distributed",),
        ("resume_memory_occupation", *REST),
        ("weights_checker",),
    ]


def _colocate(role: Attached, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop of one's own keeps its memory: this one does as if its next job needed the engines'."""
    honest = role.assemble

    async def assemble(effect: AssembleBatch) -> Event:
        return replace(await honest(effect), colocated=True)

    monkeypatch.setattr(role, "assemble", assemble)


def _noted(asked: list[tuple[str, ...]], honest: Callable[..., Any], route: str, body: Body, *args: Any) -> Any:
    name = route.partition("?")[0]
    if name in ("flush_cache", "weights_checker") or name.startswith(("release", "resume", "update_weights_from")):
        asked.append((name, *body.get("tags", ())))
    return honest(route, body, *args)
