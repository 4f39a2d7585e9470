"""The example of a training loop of one's own against a real deployment, killed again and again.

Knows: the example as it stands, a real server, publishers, engines, gateway. Must not know: how a loop is attached.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from consumers.reef_supervisor.deployment import deployment
from reef_bus.attach import Committed, attach
from reef_bus.config import Training
from reef_bus.events import Recorded
from reef_bus.policy import PolicyConfig, new_policy
from tests.e2e.live import CONFIG, Live, live

pytestmark = [pytest.mark.integration, pytest.mark.long]

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "deploy" / "examples" / "attach_torch.py"
PATIENT = msgspec.structs.replace(CONFIG.publication.deadlines, sender_s=60.0)
"""Of the three attempts of a release none is over because torch takes long to import, with each new process, on a busy
machine."""
ATTACHED = msgspec.structs.replace(
    CONFIG,
    training=Training(backend="attached"),
    publication=msgspec.structs.replace(CONFIG.publication, deadlines=PATIENT),
)
KILLS = ("JobDispatched", "CandidateReady", "TargetPersisted", "SenderReady", "ReleaseCommitted")


class Script:
    """The example's process, which can be killed and started again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.out = folder / "example.out"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, found: Live) -> None:
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        with self.out.open("ab") as out:
            command = [sys.executable, str(EXAMPLE), str(self.folder)]
            self.process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=env)

    def kill(self) -> None:
        if self.process:
            self.process.kill()
            self.process.wait()

    def ended(self) -> bool:
        return self.process is not None and self.process.poll() is not None

    def last_line(self) -> str:
        return self.out.read_text().splitlines()[-1]


@contextlib.contextmanager
def example(folder: Path) -> Iterator[Script]:
    script = Script(folder)
    try:
        yield script
    finally:
        script.kill()


async def kill_at(found: Live, script: Script, event: str) -> None:
    """SIGKILL the example when the event appears next."""
    hit: list[int] = []

    def watch(recorded: Recorded) -> None:
        if not hit and recorded.name == event:
            hit.append(recorded.seq)
            script.kill()

    found.watchers.append(watch)
    await found.until(f"{event} appears", lambda: bool(hit) or script.ended())
    found.watchers.remove(watch)
    assert hit, f"the example ended before {event}"


def steps(found: Live) -> list[int]:
    """The steps of all releases, in the order in which they were committed."""
    known = found.world.training.candidates
    return [known[release.candidate].step for release in found.world.publications.releases.values()]


async def test_the_example_is_killed_at_six_points_and_loses_and_doubles_no_release(tmp_path: Path) -> None:
    """The first time at the registration, before any engine can serve; no record is consumed, whatever is recorded."""
    with example(tmp_path) as script:

        def before(found: Live) -> None:
            script.start(found)
            found.watchers.append(lambda recorded: registered(found, recorded))

        def registered(found: Live, recorded: Recorded) -> None:
            if recorded.name == "ScenarioRegistered":
                script.kill()
                script.start(found)

        async with live(tmp_path, ATTACHED, pause_s=2.0, before=before) as found:
            for event in KILLS:
                await kill_at(found, script, event)
                script.start(found)
            await found.until("the example ends", script.ended, 90)
            assert script.process and script.process.returncode == 0, script.out.read_text()
            await found.until("every engine serves the last release", found.all_serve)
            answer = await found.client.producer.ask("7", {"phase": "probe"}, temperature=0)
            await found.client.stop()
            audit = await found.audit()
            assert steps(found) == [0, 10, 20, 30, 40, 50, 60]
            joins = [recorded for recorded in found.events if recorded.name == "TrainerJoined"]
            jobs = [recorded.event.step for recorded in found.events if recorded.name == "JobDispatched"]  # type: ignore[attr-defined]
    assert len(joins) <= len(KILLS) + 2  # one that is killed before it has joined leaves nothing behind
    assert jobs == [10, 20, 30, 40, 50, 60]
    assert script.last_line().startswith("Committed(step=60,") and answer.load_id in script.last_line()
    assert answer.text == "7" * len(answer.text)  # it serves what was trained, and not only something
    assert [v.text for v in audit.violations] == [] and audit.unchecked == ()
    assert audit.records > 0 and audit.consumed == 0


async def test_a_coroutine_attaches_to_a_deployment_as_well(tmp_path: Path) -> None:
    """In this test's own event loop, which runs the supervisor as well."""
    policies = [new_policy(PolicyConfig(), seed) for seed in range(3)]
    config = msgspec.structs.replace(ATTACHED, state_dir=str(tmp_path))
    async with deployment(config) as running, attach(running.config) as bus:
        for step, policy in enumerate(policies):
            release = await bus.publish(dict(policy.named_parameters()), step=step)
            assert isinstance(release, Committed) and release.step == step
        assert bus.step == 2 and bus.head and bus.head.load_id == release.load_id
        assert running.world.training.backend == "attached" and "trainer" not in running.supervisor.children
