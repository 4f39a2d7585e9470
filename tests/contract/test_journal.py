"""What a journal promises, asked alike of four: in memory with either broker's semantics, a server, a cluster.

Knows: the port. Must not know: which of the four it is asking, beyond the one answer in which they differ.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import msgspec
import pytest

from reef_bus import runner as runner_module
from reef_bus.core.effects import Append, Debt
from reef_bus.core.world import World
from reef_bus.errors import Conflict, ContractError, Rejected, Unavailable
from reef_bus.events import ComponentStarted, Draft, ReportReceived
from reef_bus.journal import LOG, RECORDS, Journal, Stored, open_log
from tests.contract.brokers import Broker, draft, everything, out_of_chain, verdicts
from tests.facts import failed, joined, opened, trainer_joined
from tests.loop import Scripted, running, until

WRITERS = 8


def began(component: str, starts: int = 1) -> ComponentStarted:
    return ComponentStarted(component=component, pid=1, starts=starts)


def report(id_: str = "rep-1", score: float = 1.0) -> ReportReceived:
    return ReportReceived(scenario="s", report=id_, references=("r",), score=score, feedback="", metadata={})


def counting(component: str, upto: int) -> Callable[[World, int], Sequence[Debt]]:
    """Owes the component's starts, one after the other: whoever asks twice owes the same."""

    def owed(world: World, now: int) -> list[Debt]:
        found = world.components.get(component)
        following = (found.starts if found else 0) + 1
        event = began(component, following)
        ready = world.incarnation and following <= upto
        return [Debt(key=f"{component}.{following}", effect=Append(event=event), cause=1)] if ready else []

    return owed


def lose_acks(journal: Journal, lost: Callable[[Draft], bool]) -> None:
    """Have the acknowledgement of these appends not arrive, although they are stored."""
    real = journal.append

    async def append(draft: Draft, prev: int) -> Stored:
        stored = await real(draft, prev)
        if lost(draft):
            raise Unavailable("no acknowledgement")
        return stored

    journal.append = append  # type: ignore[method-assign]


def started(world: World) -> dict[str, int]:
    return {name: component.starts for name, component in world.components.items()}


# -- append


async def test_an_append_states_what_it_expects(broker: Broker) -> None:
    journal = await broker.open()
    assert await journal.append(draft(opened()), 0) == (1, False)
    assert await journal.append(draft(began("c")), 1) == (2, False)
    with pytest.raises(Conflict) as caught:
        await journal.append(draft(began("d")), 1)
    assert (caught.value.family, caught.value.expected) == ("deployment", 1)
    assert await journal.head(LOG) == 2


async def test_of_writers_that_expect_the_same_exactly_one_is_stored(broker: Broker) -> None:
    journals = [await broker.open() for _ in range(4)]
    await journals[0].append(draft(opened()), 0)
    for prev in range(1, 11):
        drafts = [draft(began(f"c{n}", prev)) for n in range(WRITERS)]
        racing = [journals[n % 4].append(drafts[n], prev) for n in range(WRITERS)]
        outcomes = await asyncio.gather(*racing, return_exceptions=True)
        assert [o for o in outcomes if isinstance(o, Stored)] == [(prev + 1, False)], outcomes
        assert all(isinstance(o, Stored | Conflict | Unavailable) for o in outcomes)
        assert await journals[0].head(LOG) == prev + 1
    log = await everything(journals[0])
    assert out_of_chain(log) == [] and verdicts(log) == [""] * 11


async def test_chains_do_not_disturb_each_other(broker: Broker) -> None:
    journal = await broker.open()
    await journal.append(draft(opened()), 0)
    others = [journal.append(draft(event), 0) for event in (trainer_joined(), joined("e0"), joined("e1"))]
    assert sorted(stored.seq for stored in await asyncio.gather(*others)) == [2, 3, 4]
    with pytest.raises(Conflict, match=r"engine\.e0"):
        await journal.append(draft(joined("e0"), "other"), 0)


async def test_an_append_asked_again_is_never_stored_twice(broker: Broker) -> None:
    """A single server compares first and says that the expectation is stale; a cluster knows the id and says so."""
    journal = await broker.open()
    await journal.append(draft(opened()), 0)
    await journal.append(draft(began("c")), 1)
    for _ in range(3):
        if broker.retry == "conflict":
            with pytest.raises(Conflict):
                await journal.append(draft(began("c")), 1)
        else:
            assert await journal.append(draft(began("c")), 1) == (2, True)
    assert await journal.head(LOG) == 2


async def test_a_fact_whose_acknowledgement_was_lost_is_found_by_its_id(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rule 5: look for the own event id, fold, ask again. Every second acknowledgement does not arrive."""
    monkeypatch.setattr(runner_module, "RETRY_S", 0.01)
    journal, calls = await broker.open(), []
    await open_log(journal, "inc", "w")
    lose_acks(journal, lambda _: calls.append(1) or len(calls) % 2 == 0)
    async with running(journal, Scripted(counting("c", 6))) as found:
        await until(lambda: started(found.world) == {"c": 6}, 20.0)
    log = await everything(journal)
    assert [getattr(recorded.event, "starts", 0) for recorded in log] == [0, 1, 2, 3, 4, 5, 6]
    assert len(calls) == 6  # each was appended once: what was looked for was found


async def test_writers_of_one_family_that_collide_all_the_time_lose_nothing(broker: Broker) -> None:
    """Three runners of one family, each with its own facts, and every append of each races the others'."""
    journals = [await broker.open() for _ in range(3)]
    await open_log(journals[0], "inc", "w")
    names = ("a", "b", "c")
    async with (
        running(journals[0], Scripted(counting("a", 5))) as found,
        running(journals[1], Scripted(counting("b", 5))),
        running(journals[2], Scripted(counting("c", 5))),
    ):
        await until(lambda: started(found.world) == dict.fromkeys(names, 5), 30.0)
    log = await everything(journals[0])
    facts = sorted((r.event.component, r.event.starts) for r in log if isinstance(r.event, ComponentStarted))
    assert facts == [(name, n) for name in names for n in range(1, 6)]
    assert out_of_chain(log) == [] and [r.seq for r in log] == list(range(1, 17))


async def test_records_are_told_apart_by_their_id(broker: Broker) -> None:
    journal = await broker.open()
    assert await journal.append(draft(report()), 0) == (1, False)
    assert await journal.append(draft(report()), 0) == (1, True)
    assert await journal.append(draft(report("rep-2")), 0) == (2, False)
    assert (await journal.head(RECORDS), await journal.head(LOG)) == (2, 0)


async def test_what_could_not_be_read_back_is_never_written(broker: Broker) -> None:
    """JSON has no NaN, and messages stay under 64 KiB (section 2): either would halt every reader for good."""
    journal = await broker.open()
    with pytest.raises(Rejected, match="score"):
        await journal.append(draft(report(score=float("nan"))), 0)
    with pytest.raises(Rejected, match="an event of 70") as caught:
        await journal.append(draft(msgspec.structs.replace(failed("e0", 1), detail="x" * 70_000)), 0)
    assert caught.value.status == 413
    with pytest.raises(Rejected, match="a subject of 5") as caught:  # a server would close the connection for good
        await journal.append(draft(joined("e" * 5_000)), 0)
    assert caught.value.status == 413
    assert (await journal.head(RECORDS), await journal.head(LOG)) == (0, 0)


# -- a write past the comparison


async def test_a_write_past_the_comparison_is_void_and_moves_the_chain(broker: Broker) -> None:
    journal = await broker.open()
    await journal.append(draft(opened()), 0)
    await journal.append(draft(began("c")), 1)
    assert await broker.slip(draft(began("intruder"), "x"), 1) == 3
    with pytest.raises(Conflict):
        await journal.append(draft(began("d")), 2)
    assert await journal.append(draft(began("d")), 3) == (4, False)
    log = await everything(journal)
    assert [bool(why) for why in verdicts(log)] == [False, False, True, False]
    assert verdicts(log)[2] == "its prev is 1, the family's last stored event is 2"


# -- read


async def test_what_is_read_is_what_was_written(broker: Broker) -> None:
    journal, event = await broker.open(), failed("e0", 1)
    await journal.append(Draft(event=event, writer="engine/e0", boot="e0.1", cause=3, correlation="pub1"), 0)
    found = await journal.read(LOG, 1)
    assert found and found.event == event and found.event is not event
    assert (found.seq, found.prev, found.cause, found.correlation) == (1, 0, 3, "pub1")
    assert (found.writer, found.boot) == ("engine/e0", "e0.1")
    assert found.subject == f"reef.{broker.deployment}.engine.e0.ReceiverFailed"
    assert await journal.read(LOG, 2) is None
    assert await everything(journal) == [found]


# -- follow


async def test_following_brings_everything_in_order_and_what_comes_later(broker: Broker) -> None:
    writer, reader = await broker.open(), await broker.open()
    await writer.append(draft(opened()), 0)
    seen: list[int] = []

    async def follow() -> None:
        async for batch in reader.follow(LOG):
            seen.extend(recorded.seq for recorded in batch)

    task = asyncio.create_task(follow())
    await until(lambda: seen == [1], 15.0)
    for n in range(40):
        await writer.append(draft(joined(f"e{n}")), 0)
    await until(lambda: len(seen) == 41, 15.0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert seen == list(range(1, 42))


async def test_following_goes_on_from_a_position_that_is_still_there(broker: Broker) -> None:
    journal = await broker.open()
    for event in (opened(), joined("e0"), joined("e1")):
        await journal.append(draft(event), 0)
    second = await journal.read(LOG, 2)
    assert second
    assert [r.seq for r in await anext(journal.follow(LOG, 2, second.id))] == [3]


@pytest.mark.parametrize(
    ("seq", "id_", "says"), [(2, "another-id", "event another-id"), (9, "some-id", "holds nothing at 9")]
)
async def test_another_or_a_shorter_log_is_never_followed(broker: Broker, seq: int, id_: str, says: str) -> None:
    """Section 6: a shorter log, or another id there, is a contradiction."""
    journal = await broker.open()
    for event in (opened(), joined("e0"), joined("e1")):
        await journal.append(draft(event), 0)
    with pytest.raises(ContractError, match=says) as caught:
        await anext(journal.follow(LOG, seq, id_))
    assert caught.value.seq == seq


async def test_what_precedes_an_unreadable_event_is_delivered_first(broker: Broker) -> None:
    """Whoever folds in one batch and whoever folds one by one stop at the same event."""
    journal = await broker.open()
    for event in (opened(), joined("e0")):
        await journal.append(draft(event), 0)
    where = f"reef.{broker.deployment}.train.digit.WeightsBlessed"
    assert await broker.publish(where, {"Nats-Msg-Id": "foreign", "ce-type": "acme.WeightsBlessed.v1"}, b"{}") == 3
    await journal.append(draft(joined("e1")), 0)
    follower, seen = journal.follow(LOG), []
    with pytest.raises(ContractError, match=r"acme\.WeightsBlessed\.v1") as caught:
        while True:
            seen += [recorded.seq for recorded in await anext(follower)]
    assert caught.value.seq == 3 and seen == [1, 2]


# -- heartbeats


async def test_heartbeats_reach_everybody_and_are_no_events(broker: Broker) -> None:
    speaker, listener = await broker.open(), await broker.open()
    heard: list[dict[str, object]] = []
    await listener.beats(heard.append)
    async with asyncio.timeout(5):
        while not heard:
            await speaker.beat("engine", "e0", {"seq": 3})
            await asyncio.sleep(0.02)
    assert heard[0] == {"seq": 3} and await speaker.head(LOG) == 0
