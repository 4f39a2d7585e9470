"""A long answer in hand while a release commits: real processes, a real server, every pause in both modes.

Knows: a deployment whose one engine is slow, a training loop that publishes. Must not know: how an engine stops.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import pytest

from consumers.reef_supervisor.deployment import Deployment, deployment
from consumers.reef_supervisor.role import Supervisor
from reef_bus.artifacts import ArtifactStore
from reef_bus.attach import Bus, Committed, attach
from reef_bus.audit import History, audit_history, read_history
from reef_bus.backends import Completion, Prompt
from reef_bus.config import Config, Inference, Publication, Training
from reef_bus.core.serving import serving
from reef_bus.embedded import die_with_parent
from reef_bus.events import EngineFenced, InferenceRecorded, ReceiverVerified, ReleaseCommitted
from reef_bus.producer import Answer, connect
from reef_bus.samples import decode_rows
from tests.integration.slow_engine import TOKEN_S
from tests.loop import until
from tests.unit.test_pauses import by_hand, policy, same

pytestmark = [pytest.mark.integration, pytest.mark.long]

QUESTION = Prompt(ids=(11, 7, 10), max_tokens=29, temperature=1.0, seed=5)  # "7", and what the model has room for
BEFORE_S = 0.5  # of its 2.9 s: then the release is published
SLACK_MS = 500.0


class Seen(NamedTuple):
    """One answer, its record and its tokens, and what the engine said of its pause."""

    answer: Answer
    record: InferenceRecorded
    made: Completion
    load_ids: tuple[str, ...]
    commit: int
    paused_ms: float


def spawn_slowly(self: Supervisor, name: str) -> subprocess.Popen[bytes]:
    """As the supervisor does, but for the engine."""
    command = [sys.executable, "-m", "reef_bus.cli", "run", self.roles[name], "-c", str(self.path), "--id", name]
    if self.roles[name] == "engine":
        command = [sys.executable, "-m", "tests.integration.slow_engine", str(self.path), name]
    with (self.config.folder("logs") / f"{name}.log").open("ab") as out:
        return subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=die_with_parent
        )


@contextlib.asynccontextmanager
async def running(folder: Path, mode: str, pause: str) -> AsyncIterator[tuple[Deployment, Bus]]:
    config = Config(
        deployment="pauses",
        state_dir=str(folder),
        inference=Inference(engines=("engine-0",)),
        training=Training(backend="attached"),
        publication=Publication(publishers=1, mode=mode, pause=pause),
    )
    async with deployment(config) as found, attach(found.config) as bus:
        assert isinstance(await bus.publish(dict(policy("base").named_parameters()), step=0), Committed)
        await until(lambda: bool(serving(found.world)), seconds=60)
        yield found, bus


async def asked_over_a_release(found: Deployment, bus: Bus) -> Seen:
    async with connect(found.url, found.config.model) as client:
        asking = asyncio.create_task(client.ask("7", max_tokens=QUESTION.max_tokens, seed=QUESTION.seed))
        await asyncio.sleep(BEFORE_S)
        release = await bus.publish(dict(policy("c1").named_parameters()), step=1)
        assert isinstance(release, Committed)
        answer = await asking
    return seen(found, answer, await read_history(found.journal, ArtifactStore(found.config.folder("artifacts"))))


def seen(found: Deployment, answer: Answer, history: History) -> Seen:
    (record,) = [r.event for r in history.records if isinstance(r.event, InferenceRecorded)]
    row = decode_rows(ArtifactStore(found.config.folder("artifacts")).get(record.blob.digest))[record.row]
    stops = [r.event.stopped_ms for r in history.log if isinstance(r.event, EngineFenced)]
    swaps = [r.event.ms for r in history.log if isinstance(r.event, ReceiverVerified) and r.event.method == "swapped"]
    (commit,) = [r.seq for r in history.log if isinstance(r.event, ReleaseCommitted)]
    audit = audit_history(history)
    assert audit.violations == () and audit.unchecked == () and audit.records == 1
    made = Completion(ids=row.answer, logprobs=row.logprobs, finish_reason="length")
    return Seen(answer, record, made, row.load_ids, commit, (stops or swaps)[-1])


@pytest.mark.parametrize("mode", ["staged", "fenced"])
@pytest.mark.parametrize("pause", ["drain", "retract", "in_place"])
async def test_a_long_answer_is_of_the_old_release_the_new_one_or_both_as_the_pause_says(
    tmp_path: Path, mode: str, pause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Supervisor, "_spawn", spawn_slowly)
    async with running(tmp_path, mode, pause) as (found, bus):
        it = await asked_over_a_release(found, bus)
    old, new = (f"{it.record.load_id.partition(':')[0]}:{n}" for n in (0, 1))
    print(json.dumps({"mode": mode, "pause": pause, "paused_ms": it.paused_ms, "spans": it.answer.spans}))
    match pause:
        case "drain":
            assert it.record.as_of < it.commit and it.load_ids == (old,) * 29
            assert same(it.made, by_hand(QUESTION, ("base", 29)))
            assert it.paused_ms > SLACK_MS, "the pause was over before the answer: nothing was tested"
        case "retract":
            assert it.record.as_of >= it.commit and it.load_ids == (new,) * 29
            assert same(it.made, by_hand(QUESTION, ("c1", 29)))
        case "in_place":
            first, second = it.record.spans
            assert it.load_ids == (old,) * first.count + (new,) * second.count and min(first.count, second.count) > 0
            assert first.as_of < it.commit <= second.as_of
            assert it.answer.spans == ((old, first.count), (new, second.count))
            assert same(it.made, by_hand(QUESTION, ("base", first.count), ("c1", second.count)))
    assert it.answer.load_id == (new if pause == "retract" else old)
    assert pause == "drain" or it.paused_ms < SLACK_MS, f"a token takes {TOKEN_S} s, and the answer 29 of them"


async def test_an_engine_that_is_asked_to_end_does_so_at_the_next_token_and_another_boot_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for what nobody would get: not the process that was asked to end, and not the client for ever."""
    monkeypatch.setattr(Supervisor, "_spawn", spawn_slowly)
    async with running(tmp_path, "staged", "in_place") as (found, _), connect(found.url, found.config.model) as client:
        asking = asyncio.create_task(client.ask("7", max_tokens=QUESTION.max_tokens, seed=QUESTION.seed))
        await asyncio.sleep(BEFORE_S)
        (engine,) = serving(found.world)
        asked = datetime.now()
        found.supervisor.children[engine.id].send(signal.SIGTERM)
        answer = await asking
        history = await read_history(found.journal, ArtifactStore(found.config.folder("artifacts")))
    (record,) = [r.event for r in history.records if isinstance(r.event, InferenceRecorded)]
    assert answer.spans == () and record.boot != engine.boot and audit_history(history).violations == ()
    took = ended(tmp_path / "logs" / "engine-0.log", engine.boot) - asked
    assert took.total_seconds() < QUESTION.max_tokens * TOKEN_S - 2 * BEFORE_S


def ended(file: Path, boot: str) -> datetime:
    """When that boot had closed everything; how long its process then takes to die is the machine's affair."""
    (line,) = [line for line in file.read_text().splitlines() if line.endswith(f"boot {boot} ends, as asked")]
    return datetime.strptime(line[:23], "%Y-%m-%d %H:%M:%S,%f")
