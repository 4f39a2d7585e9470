"""Cut-off engines for real: the log's server is stopped, the engines are asked directly."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import aiohttp
import msgspec
import pytest

from reef_bus.backends import BOOT_HEADER, Prompt
from tests.e2e.live import CONFIG, Live, live

pytestmark = [pytest.mark.integration, pytest.mark.long]

LEASE_S = 1.5


async def asked(found: Live, within_s: float) -> int:
    """The status of one request to engine-0, past the gateway, which cannot record now; 0: no answer in time."""
    engine = found.world.membership.engines["engine-0"]
    body = msgspec.json.encode(Prompt(ids=(1, 2), max_tokens=2))
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=within_s)) as session:
        try:
            async with session.post(f"{engine.url}/generate", data=body, headers={BOOT_HEADER: engine.boot}) as reply:
                return reply.status
        except TimeoutError:
            return 0


@pytest.mark.parametrize(("lease_s", "expected"), [(LEASE_S, 0), (0.0, 200)], ids=["lease", "no lease"])
async def test_an_engine_without_its_log_serves_as_its_lease_says(
    tmp_path: Path, lease_s: float, expected: int
) -> None:
    config = msgspec.structs.replace(CONFIG, inference=msgspec.structs.replace(CONFIG.inference, lease_s=lease_s))
    async with live(tmp_path, config, traffic=False) as found:
        assert await asked(found, 5.0) == 200
        assert found.running.server and found.running.server.process
        found.running.server.process.send_signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(2 * LEASE_S)
            assert await asked(found, 1.0 if lease_s else 20.0) == expected
        finally:
            found.running.server.process.send_signal(signal.SIGCONT)
        assert await asked(found, 20.0) == 200
        audit = await found.audit()
    assert [v.text for v in audit.violations] == []
