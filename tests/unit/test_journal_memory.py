"""What only the in-memory journal offers: a clock of the test's, and acknowledgements that do not arrive.

Knows: its two semantics. Must not know: what the port promises; tests/contract/test_journal.py asks that of all four.
"""

from __future__ import annotations

from typing import Literal

import pytest

from reef_bus.errors import Conflict, Unavailable
from reef_bus.events import Draft, Event
from reef_bus.journal import LOG, MemoryJournal, MemoryStreams, check_position
from tests.facts import failed, opened


def draft(event: Event, boot: str = "b") -> Draft:
    return Draft(event=event, writer="w/1", boot=boot)


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


async def test_what_is_read_is_what_was_written() -> None:
    journal = MemoryJournal(MemoryStreams(clock=lambda: 77))
    event = failed("e0", 1)
    await journal.append(Draft(event=event, writer="engine/e0", boot="e0.1", cause=3, correlation="pub1"), 0)
    found = await journal.read(LOG, 1)
    assert found and found.event == event and found.event is not event
    assert (found.seq, found.time, found.prev, found.cause, found.correlation) == (1, 77, 0, 3, "pub1")
    assert (found.writer, found.boot, found.subject) == ("engine/e0", "e0.1", "reef.test.engine.e0.ReceiverFailed")
    assert await journal.read(LOG, 0) is None and await journal.read(LOG, 2) is None


def test_a_position_at_the_beginning_needs_no_proof() -> None:
    check_position(LOG, 0, "", None)
