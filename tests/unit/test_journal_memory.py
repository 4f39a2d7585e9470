"""The in-memory journal: the port's promises, and what two brokers answer to the same retry.

Knows: the port and the brokers' semantics. Must not know: what events mean.
"""

from __future__ import annotations

import asyncio
from typing import Literal

import pytest

from reef_bus.errors import Conflict, ContractError, Rejected, Unavailable
from reef_bus.events import Draft, Event, ReportReceived
from reef_bus.journal import LOG, RECORDS, MemoryJournal, MemoryStreams, check_position
from tests.facts import dispatched, dropped, failed, joined, opened, registered

BOTH = pytest.mark.parametrize("semantics", ["single", "cluster"])


def draft(event: Event, boot: str = "b") -> Draft:
    return Draft(event=event, writer="w/1", boot=boot)


def report(id_: str = "rep-1", score: float = 1.0) -> ReportReceived:
    return ReportReceived(scenario="s", report=id_, references=("r",), score=score, feedback="", metadata={})


@BOTH
async def test_an_append_states_what_it_expects(semantics: Literal["single", "cluster"]) -> None:
    journal = MemoryJournal(MemoryStreams(semantics))
    assert (await journal.append(draft(registered()), 0)).seq == 1
    assert (await journal.append(draft(dispatched("j")), 1)).seq == 2
    with pytest.raises(Conflict) as caught:
        await journal.append(draft(dropped("j")), 1)
    assert (caught.value.family, caught.value.expected) == ("train", 1)
    assert await journal.head(LOG) == 2


async def test_families_do_not_disturb_each_other_and_engines_neither() -> None:
    journal = MemoryJournal(MemoryStreams())
    await journal.append(draft(opened()), 0)
    await journal.append(draft(registered()), 0)
    await journal.append(draft(joined("e0")), 0)
    await journal.append(draft(joined("e1")), 0)
    with pytest.raises(Conflict, match=r"engine\.e0"):
        await journal.append(draft(joined("e0"), "other"), 0)


@pytest.mark.parametrize(("semantics", "answer"), [("single", "conflict"), ("cluster", "duplicate")])
async def test_what_a_broker_answers_to_a_retry(semantics: Literal["single", "cluster"], answer: str) -> None:
    """The decision of architecture.md: a single server and a cluster answer a retry differently."""
    streams = MemoryStreams(semantics)
    journal = MemoryJournal(streams, lose_ack=lambda _: len(streams.messages[LOG]) == 1)
    with pytest.raises(Unavailable):
        await journal.append(draft(opened()), 0)
    journal.lose_ack = lambda _: False
    if answer == "conflict":
        with pytest.raises(Conflict):
            await journal.append(draft(opened()), 0)
    else:
        assert await journal.append(draft(opened()), 0) == (1, True)
    assert await journal.head(LOG) == 1


@BOTH
async def test_records_are_told_apart_by_their_id(semantics: Literal["single", "cluster"]) -> None:
    journal = MemoryJournal(MemoryStreams(semantics))
    assert await journal.append(draft(report()), 0) == (1, False)
    assert await journal.append(draft(report()), 0) == (1, True)
    assert await journal.append(draft(report("rep-2")), 0) == (2, False)
    assert (await journal.head(RECORDS), await journal.head(LOG)) == (2, 0)


async def test_what_is_read_is_what_was_written() -> None:
    journal = MemoryJournal(MemoryStreams(clock=lambda: 77))
    event = failed("e0", 1)
    await journal.append(Draft(event=event, writer="engine/e0", boot="e0.1", cause=3, correlation="pub1"), 0)
    found = await journal.read(LOG, 1)
    assert found and found.event == event and found.event is not event
    assert (found.seq, found.time, found.prev, found.cause, found.correlation) == (1, 77, 0, 3, "pub1")
    assert (found.writer, found.boot, found.subject) == ("engine/e0", "e0.1", "reef.test.engine.e0.ReceiverFailed")
    assert await journal.read(LOG, 0) is None and await journal.read(LOG, 2) is None


async def test_following_brings_everything_in_order_and_what_comes_later() -> None:
    streams = MemoryStreams()
    journal = MemoryJournal(streams)
    await journal.append(draft(opened()), 0)
    seen: list[int] = []

    async def follow() -> None:
        async for batch in MemoryJournal(streams).follow(LOG):
            seen.extend(recorded.seq for recorded in batch)

    task = asyncio.create_task(follow())
    for engine in ("e0", "e1", "e2"):
        await asyncio.sleep(0.005)
        await journal.append(draft(joined(engine)), 0)
    await asyncio.sleep(0.01)
    task.cancel()
    assert seen == [1, 2, 3, 4]


async def test_following_goes_on_from_a_position_that_is_still_there() -> None:
    journal = MemoryJournal(MemoryStreams())
    for event in (opened(), joined("e0"), joined("e1")):
        await journal.append(draft(event), 0)
    second = await journal.read(LOG, 2)
    assert second
    assert [r.seq for r in await anext(journal.follow(LOG, 2, second.id))] == [3]
    with pytest.raises(ContractError, match="another log") as caught:
        await anext(journal.follow(LOG, 2, "another id"))
    assert caught.value.seq == 2
    with pytest.raises(ContractError, match="nothing at 9") as caught:
        await anext(journal.follow(LOG, 9, "an id"))
    assert caught.value.seq == 9


async def test_what_precedes_an_unreadable_event_is_delivered_first() -> None:
    """Whoever folds in one batch and whoever folds one by one stop at the same event."""
    streams = MemoryStreams()
    journal = MemoryJournal(streams)
    for event in (opened(), joined("e0"), joined("e1")):
        await journal.append(draft(event), 0)
    last = streams.messages[LOG][2]
    streams.messages[LOG][2] = last._replace(body=b"garbage")
    follower = journal.follow(LOG)
    assert [r.seq for r in await anext(follower)] == [1, 2]
    with pytest.raises(ContractError) as caught:
        await anext(follower)
    assert caught.value.seq == 3


async def test_heavy_things_go_beside_the_log() -> None:
    """Section 2: messages stay under 64 KiB."""
    import msgspec

    journal = MemoryJournal(MemoryStreams())
    heavy = msgspec.structs.replace(failed("e0", 1), detail="x" * 70_000)
    with pytest.raises(Rejected, match="70") as caught:
        await journal.append(draft(heavy), 0)
    assert caught.value.status == 413 and await journal.head(LOG) == 0


async def test_what_could_not_be_read_back_is_never_written() -> None:
    """JSON has no NaN: stored as null it would halt every reader for good."""
    journal = MemoryJournal(MemoryStreams())
    with pytest.raises(Rejected, match="score"):
        await journal.append(draft(report(score=float("nan"))), 0)
    assert await journal.head(RECORDS) == 0


def test_a_position_at_the_beginning_needs_no_proof() -> None:
    check_position(LOG, 0, "", None)


async def test_heartbeats_reach_everybody_and_are_not_kept() -> None:
    streams = MemoryStreams()
    heard: list[dict[str, object]] = []
    await MemoryJournal(streams).beats(heard.append)
    await MemoryJournal(streams).beat("engine", "e0", {"seq": 3})
    assert heard == [{"seq": 3}] and await MemoryJournal(streams).head(LOG) == 0
