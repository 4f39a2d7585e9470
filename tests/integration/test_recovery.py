"""Recovery for real: an engine that is stopped and not dead, a component that is given up and resumed by a person."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import msgspec
import pytest

from consumers.reef_supervisor.deployment import deployment
from reef_bus.config import dump
from reef_bus.core.effects import Deadlines, Restarts
from reef_bus.events import ComponentEvent, EngineExcluded, Recorded
from tests.e2e.live import CONFIG, Live, live

pytestmark = [pytest.mark.integration, pytest.mark.long]

STOPPED = msgspec.structs.replace(
    CONFIG,
    publication=msgspec.structs.replace(CONFIG.publication, deadlines=Deadlines(fence_s=8.0, heartbeat_s=2.0)),
    supervision=Restarts(max_restarts=3, delay_s=0.1, grace_s=1.0),
)
FRUGAL = msgspec.structs.replace(CONFIG, supervision=Restarts(max_restarts=0))


def about(events: list[Recorded], component: str) -> list[Recorded]:
    return [r for r in events if isinstance(r.event, ComponentEvent) and r.event.component == component]


async def test_a_stopped_engine_is_excluded_ended_and_replaced_and_serves_again(tmp_path: Path) -> None:
    """Its process never ends by itself, and a signal that it could handle would not reach it."""
    async with live(tmp_path, STOPPED) as found:
        os.kill(found.running.supervisor.children["engine-0"].pid, signal.SIGSTOP)
        since = found.world.seq
        await found.until("it is replaced", lambda: found.world.components["engine-0"].starts == 2)
        await found.until("it serves again", found.all_serve)
        await found.client.stop()
        audit = await found.audit()
    events = [r for r in found.events if r.seq > since]
    excluded = next(r for r in events if isinstance(r.event, EngineExcluded) and r.event.engine == "engine-0")
    withdrawn, lost, scheduled, started, published = about(events, "engine-0")
    names = [r.name for r in (withdrawn, lost, scheduled, started, published)]
    assert names == [
        "ReadinessWithdrawn",
        "ComponentLost",
        "RestartScheduled",
        "ComponentStarted",
        "ReadinessPublished",
    ]
    assert withdrawn.time - excluded.time >= 1_000_000_000 and withdrawn.event.reason.startswith("its boot is out")  # type: ignore[attr-defined]
    assert lost.event.exit == -signal.SIGKILL and published.event.boot != excluded.event.boot  # type: ignore[attr-defined]
    assert [v.text for v in audit.violations] == []


async def test_a_person_resumes_what_the_supervisor_gave_up(tmp_path: Path) -> None:
    found = Live()
    async with deployment(msgspec.structs.replace(FRUGAL, state_dir=str(tmp_path)), found.see) as found.running:
        await found.until("the publisher runs", lambda: "publisher" in ready(found))
        await found.until("the head is there, and stays", lambda: found.world.publications.head is not None)
        found.running.kill("publisher")
        await found.until("it is given up", lambda: found.world.components["publisher"].halted)
        status = json.loads(await reef_bus(tmp_path, "status", "--json"))
        assert status["waiting"]["command"] == "reef-bus resume publisher --why …"
        answer = json.loads(
            await reef_bus(tmp_path, "resume", "publisher", "--why", "mended", "--actor", "ada", "--json")
        )
        request = next(r for r in found.events if r.name == "RecoveryResumeRequested")
        assert answer["type"] == "reef.RecoveryResumed.v1" and answer["data"]["request"] == request.seq
        assert (request.event.actor, request.event.why) == ("ada", "mended")  # type: ignore[attr-defined]
        await found.until("it runs again", lambda: "publisher" in ready(found))
    names = [r.name for r in about(found.events, "publisher")]
    assert names[2:7] == [
        "ReadinessWithdrawn",
        "ComponentLost",
        "RecoveryHalted",
        "RecoveryResumed",
        "RestartScheduled",
    ]


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's signal at a parent's death is Linux")
async def test_a_supervisor_after_one_that_was_killed_goes_through_the_same_order(tmp_path: Path) -> None:
    config = msgspec.structs.replace(CONFIG, state_dir=str(tmp_path / "state"))
    (tmp_path / "up.json").write_bytes(dump(config))
    command = [sys.executable, "-m", "reef_bus.cli", "up", "-c", str(tmp_path / "up.json"), "--json"]
    first = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert first.stdout
    async for line in first.stdout:
        if b"ReadinessPublished" in line and b'"component":"publisher"' in line:
            break
    first.kill()
    await first.wait()
    found = Live()
    async with deployment(config, found.see) as found.running:
        await found.until("it runs again", lambda: "publisher" in ready(found) and twice(found, "publisher"))
    ends = about(found.events, "publisher")[2:]
    assert [r.name for r in ends] == [
        *("ReadinessWithdrawn", "ComponentLost", "RestartScheduled", "ComponentStarted", "ReadinessPublished")
    ]
    withdrawn, lost, scheduled, *_ = (msgspec.to_builtins(r.event) for r in ends)
    assert withdrawn["reason"] == lost["detail"] == "its supervisor ended"
    assert (lost["exit"], scheduled["restart"], scheduled["delay_s"]) == (0, 0, 0.0)


def twice(found: Live, name: str) -> bool:
    return found.world.components[name].starts == 2


def ready(found: Live) -> set[str]:
    return {name for name, component in found.world.components.items() if component.published}


async def reef_bus(state: Path, *words: str) -> str:
    """The command line as another process; its standard output."""
    command = [sys.executable, "-m", "reef_bus.cli", *words, "--state", str(state)]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    out, _ = await process.communicate()
    assert process.returncode == 0, out
    return out.decode()
