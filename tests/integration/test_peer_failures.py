"""Failures that others met and that need real processes, by the numbers of docs/failure-modes.md."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import aiohttp
import msgspec
import pytest

from reef_bus.backends import BOOT_HEADER, Generated, Prompt
from reef_bus.core.effects import Deadlines, Restarts
from reef_bus.events import Recorded, ReleaseCommitted, TransferAborted
from tests.e2e.live import CONFIG, Live, live

pytestmark = [pytest.mark.integration, pytest.mark.long]

PROMPT = Prompt(ids=(11, 7, 10), max_tokens=8, seed=1)
IMPATIENT = msgspec.structs.replace(
    CONFIG,
    publication=msgspec.structs.replace(CONFIG.publication, deadlines=Deadlines(fence_s=2.0, heartbeat_s=60.0)),
    supervision=Restarts(max_restarts=3, delay_s=0.1, grace_s=1.0),
)


async def ask(url: str, boot: str) -> Generated | int:
    """One engine, past the gateway: its answer, its refusal's status, or 0 where nobody listens."""
    body, headers = msgspec.json.encode(PROMPT), {BOOT_HEADER: boot}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as session:
        try:
            async with session.post(f"{url}/generate", data=body, headers=headers) as reply:
                found = await reply.read()
                return msgspec.json.decode(found, type=Generated) if reply.status == 200 else reply.status
        except aiohttp.ClientConnectionError:
            return 0


async def test_row_01_02_a_restarted_engine_that_is_asked_in_the_gap_answers_nobody_before_its_proof(
    tmp_path: Path,
) -> None:
    """By its new boot it answers once it has proven the head, with the head; by its old boot and address never."""
    async with live(tmp_path) as found:
        await found.until("a release", lambda: found.releases() >= 1)
        await found.client.stop()
        await found.until("it is quiet", lambda: found.world.publications.open is None and found.all_serve())
        before, peer = (found.world.membership.engines[name] for name in ("engine-0", "engine-1"))
        old_url, old_boot = before.url, before.boot
        in_the_gap = await asked_as_it_joins(found, old_boot)
        by_new_boot, by_old_boot, by_old_address = await asyncio.gather(*in_the_gap, ask(old_url, old_boot))
        assert by_old_boot == 409 and by_old_address in (0, 409)  # another process may listen there by now
        assert isinstance(by_new_boot, Generated) and by_new_boot.boot != old_boot
        same = await ask(peer.url, peer.boot)
        audit = await found.audit()
    proven = next(r.seq for r in found.events if r.name == "ReceiverVerified" and r.boot == by_new_boot.boot)
    assert by_new_boot.as_of >= proven
    assert isinstance(same, Generated) and by_new_boot.load_id == same.load_id
    assert by_new_boot.completion == same.completion and not same.load_id.endswith(":0")
    assert [v.text for v in audit.violations] == []


async def asked_as_it_joins(found: Live, old_boot: str) -> list[asyncio.Task[Generated | int]]:
    """Kill engine-0; the moment its next boot joins, ask that by its own boot and by the old one."""
    asked: list[asyncio.Task[Generated | int]] = []

    def watch(recorded: Recorded) -> None:
        if recorded.name == "EngineJoined" and recorded.boot != old_boot:
            url = recorded.event.url  # type: ignore[attr-defined]
            asked.extend(asyncio.create_task(ask(url, boot)) for boot in (recorded.boot, old_boot))

    found.watchers.append(watch)
    found.kill("engine-0")
    await found.until("its next boot joins", lambda: bool(asked))
    found.watchers.remove(watch)
    return asked


async def test_row_24_70_a_stopped_engine_holds_a_pause_no_longer_than_the_deadline_and_nobody_stays_paused(
    tmp_path: Path,
) -> None:
    """It is stopped before the pause: nobody can know whether it paused, and it answers nobody."""
    async with live(tmp_path, IMPATIENT) as found:
        children, targets = found.running.supervisor.children, list[Recorded]()

        def watch(recorded: Recorded) -> None:
            if recorded.name == "JobStarted" and not targets:
                os.kill(children["engine-1"].pid, signal.SIGSTOP)
            if recorded.name == "TargetPersisted":
                targets.append(recorded)

        found.watchers.append(watch)
        await found.until("a pause begins", lambda: bool(targets))
        began = time.monotonic()
        await found.client.exchange("7", {"phase": "probe"}, train=False)
        answered = time.monotonic() - began
        await found.until("it is replaced", lambda: found.world.components["engine-1"].starts == 2)
        await found.until("everybody serves", found.all_serve)
        await found.client.stop()
        audit = await found.audit()
    aborted = next(r for r in found.events if isinstance(r.event, TransferAborted))
    release = next(r for r in found.events if isinstance(r.event, ReleaseCommitted))
    assert (aborted.event.reason, [m.engine for m in aborted.event.excluded]) == ("fence_deadline", ["engine-1"])  # type: ignore[attr-defined]
    assert [e.engine for e in release.event.evidence] == ["engine-0"]  # type: ignore[attr-defined]
    assert 2.0 <= (aborted.time - targets[0].time) / 1e9 < 6.0 and answered < 20.0
    assert [v.text for v in audit.violations] == []
