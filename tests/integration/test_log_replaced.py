"""A log that is not the one that was applied: a store restored from an older copy under a consumer that lives on."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from reef_bus.embedded import NatsServer
from reef_bus.errors import ContractError
from reef_bus.events import ComponentStarted, Draft
from reef_bus.jetstream import JetStreamJournal, connect
from reef_bus.journal import LOG, open_log

pytestmark = pytest.mark.integration


async def put(journal: JetStreamJournal, prev: int, count: int, component: str) -> int:
    for n in range(count):
        event = ComponentStarted(component=component, pid=n, starts=n)
        prev = (await journal.append(Draft(event=event, writer="w", boot="b"), prev)).seq
    return prev


async def follow(journal: JetStreamJournal, seen: list[int]) -> None:
    async for batch in journal.follow(LOG):
        seen.extend(recorded.seq for recorded in batch)


@pytest.mark.parametrize("grown_by", [0, 7], ids=["shorter", "grown-on-since"])
async def test_a_store_restored_under_a_live_consumer_stops_it(tmp_path: Path, grown_by: int) -> None:
    """Section 6: a shorter log, or another id there, is a contradiction. Stop, say so, wait for a person."""
    server = NatsServer(tmp_path)
    server.start()
    journal = await connect(server.url, "t", "live")
    try:
        await journal.apply(1)
        await open_log(journal, "inc", "w")
        prev = await put(journal, 1, 2, "c")
        server.kill()
        shutil.copytree(tmp_path / "store", tmp_path / "copy")
        server.start()
        await asyncio.sleep(0.5)
        seen: list[int] = []
        following = asyncio.create_task(follow(journal, seen))
        assert await put(journal, prev, 5, "c") == 8
        while len(seen) < 8:  # noqa: ASYNC110 - what another task counts is no event
            await asyncio.sleep(0.02)
        server.kill()
        shutil.rmtree(tmp_path / "store")
        shutil.copytree(tmp_path / "copy", tmp_path / "store")
        server.start()
        if grown_by:
            other = await connect(server.url, "t", "other")
            await put(other, await other.head(LOG), grown_by, "other")
            await other.close()
        with pytest.raises(ContractError, match="this is another log, or it was cut"):
            await asyncio.wait_for(following, 15)
        assert seen == list(range(1, 9))
    finally:
        await journal.close()
        server.stop()
