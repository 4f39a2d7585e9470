"""A foreign event on the log of a live deployment: every consumer halts there and says so; engines go on serving."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.live import Live, live

pytestmark = [pytest.mark.integration, pytest.mark.long]


def said(found: Live, component: str) -> str:
    return (Path(found.running.config.state_dir) / "logs" / f"{component}.log").read_text()


async def test_consumers_halt_at_a_foreign_event_and_what_serves_goes_on(tmp_path: Path) -> None:
    async with live(tmp_path, traffic=False) as found:
        ack = await found.running.journal.js.publish(
            "reef.live.train.digit.WeightsBlessed", b"{}", headers={"ce-type": "acme.WeightsBlessed.v1"}
        )
        everyone = list(found.running.supervisor.children)
        await found.until(
            "every consumer says where it halted",
            lambda: all(f"event {ack.seq} on reef.live.train" in said(found, component) for component in everyone),
            20.0,
        )
        scored = await found.client.exchange("7", {})
        assert scored.answer.load_id.endswith(":0")
        assert all(child.poll() is None for child in found.running.supervisor.children.values())
        done = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-m", "reef_bus.cli", "status", "--state", str(tmp_path)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 2 and f"event {ack.seq}" in done.stderr and "acme.WeightsBlessed.v1" in done.stderr
