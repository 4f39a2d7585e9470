"""Real kills under traffic, one deployment per role: three SIGKILLs each, and the audit of what was left."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.live import kill_at, live, recovered

pytestmark = [pytest.mark.integration, pytest.mark.long]

ORDERS = {
    "trainer": ("JobStarted", "CandidateReady", "SenderReady"),
    "publisher": ("CandidateSelected", "EngineFenced", "ReceiverVerified"),
    "engine-0": ("TargetPersisted", "EngineFenced", "ReceiverVerified"),
    "engine-1": ("SenderReady", "ReleaseCommitted", "EngineFenced"),
    "gateway": ("TargetPersisted", "JobDispatched", "ReleaseCommitted"),
    "nats": ("CandidateReady", "EngineFenced", "ReceiverVerified"),
}


@pytest.mark.parametrize("component", ORDERS)
async def test_three_kills_and_the_deployment_goes_on(component: str, tmp_path: Path) -> None:
    """Section 8, every row of First light: nothing uncommitted served, nothing trained twice, nothing stuck."""
    async with live(tmp_path) as found:
        for event in ORDERS[component]:
            await recovered(found, await kill_at(found, component, event))
        await found.client.stop()
        audit = await found.audit()
    assert [v.text for v in audit.violations] == []
    assert found.releases() >= 3
