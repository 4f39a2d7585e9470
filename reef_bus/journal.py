"""The port to the log: append with an expectation, read, follow; and an in-memory journal for tests and simulation.

Knows: what a broker promises and, above all, what it does not. Must not know: NATS, or what events mean.
The in-memory journal has the retry semantics of both brokers: asked again with the id of an append that went through,
a single server answers that the expectation is stale, a cluster answers with a duplicate acknowledgement.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from typing import Any, Literal, NamedTuple

import msgspec

from reef_bus.core.void import RULES
from reef_bus.envelope import decode, headers, identify, payload
from reef_bus.errors import Conflict, ContractError, Rejected, Unavailable
from reef_bus.events import Draft, Event, LogOpened, Recorded
from reef_bus.topology import FAMILIES, MAX_EVENT_BYTES, MAX_SUBJECT_BYTES, subject

LOG, RECORDS = "LOG", "RECORDS"
Beat = dict[str, Any]


class Stored(NamedTuple):
    """Where an event is; `duplicate` when it had been there before."""

    seq: int
    duplicate: bool


class Journal(ABC):
    """One deployment's streams. Sequences start at 1; "after 0" is the beginning."""

    deployment: str

    @abstractmethod
    async def append(self, draft: Draft, prev: int) -> Stored:
        """Store `draft` if its chain's last stored event is still `prev` (chains that compare nothing: `prev` 0).

        Raises Conflict when it is not, Unavailable when the outcome is unknown: the event may be stored, now or later.
        Neither says that the event counts: only a fold does.
        """

    @abstractmethod
    async def head(self, stream: str) -> int:
        """The stream's last sequence as its leader knows it after this call began. Raises Unavailable."""

    @abstractmethod
    async def read(self, stream: str, seq: int) -> Recorded | None:
        """One event as its leader has it, or None. Raises Unavailable, ContractError."""

    @abstractmethod
    def follow(self, stream: str, after: int = 0, last_id: str = "") -> AsyncIterator[list[Recorded]]:
        """Every event after `after`, in order, without a gap, for ever, in batches; waits out outages.

        `last_id` is the id of the event at `after`. Raises ContractError when the stream is shorter than that, holds
        another event there, or holds one that this version cannot read.
        """

    @abstractmethod
    async def beat(self, role: str, id_: str, beat: Beat) -> None:
        """Publish one heartbeat. Never stored for long, never folded, may be lost without an error."""

    @abstractmethod
    async def beats(self, callback: Callable[[Beat], None]) -> None:
        """Have `callback` called with every heartbeat of the deployment from now on."""

    @abstractmethod
    def connected(self) -> bool:
        """Whether heartbeats of others could be heard at this moment."""

    @abstractmethod
    async def close(self) -> None:
        """Let go of the connection; safe to repeat."""


class _Message(NamedTuple):
    seq: int
    time: int
    subject: str
    header: dict[str, str]
    body: bytes


class MemoryStreams:
    """The broker's side of in-memory journals: what several processes would share. `clock` gives ns since the epoch."""

    def __init__(
        self, semantics: Literal["single", "cluster"] = "single", clock: Callable[[], int] = lambda: 0
    ) -> None:
        self.semantics = semantics
        self.clock = clock
        self.messages: dict[str, list[_Message]] = {LOG: [], RECORDS: []}
        self.tails: dict[str, int] = {}
        self.ids: dict[tuple[str, str], int] = {}
        self.changed = asyncio.Event()
        self.listeners: list[Callable[[Beat], None]] = []

    def store(self, stream: str, chain: str, prev: int | None, message: _Message) -> Stored:
        """One stored message, or Conflict. The order of the two checks is what the brokers differ in."""
        known = self.ids.get((stream, message.header["Nats-Msg-Id"]))
        if known and (self.semantics == "cluster" or prev is None):
            return Stored(known, True)
        if prev is not None and self.tails.get(chain, 0) != prev:
            raise Conflict(chain, prev)
        if known:
            return Stored(known, True)
        messages = self.messages[stream]
        seq = len(messages) + 1
        messages.append(message._replace(seq=seq, time=self.clock()))
        self.tails[chain] = seq
        self.ids[stream, message.header["Nats-Msg-Id"]] = seq
        self.changed.set()
        self.changed = asyncio.Event()
        return Stored(seq, False)


class MemoryJournal(Journal):
    """One client of `MemoryStreams`. Events pass through their wire form, so that nothing survives by reference.

    `lose_ack` is asked per append and makes a stored append's outcome unknown to the writer.
    """

    def __init__(
        self, streams: MemoryStreams, deployment: str = "test", lose_ack: Callable[[Draft], bool] = lambda draft: False
    ) -> None:
        self.deployment = deployment
        self.streams = streams
        self.lose_ack = lose_ack

    async def append(self, draft: Draft, prev: int) -> Stored:
        await asyncio.sleep(0)
        stored = self.store(draft, prev, compared=FAMILIES[draft.event.family].compares)
        if self.lose_ack(draft):
            raise Unavailable(f"no acknowledgement for {subject(self.deployment, draft.event)}")
        return stored

    def store(self, draft: Draft, prev: int, *, compared: bool) -> Stored:
        """What happens at the broker when the append arrives there; `compared` as its subject and filter say."""
        event, where, body = draft.event, subject(self.deployment, draft.event), payload(draft.event)
        check_writable(where, event, body)
        message = _Message(0, 0, where, headers(draft, identify(draft, prev, body), prev, where, ""), body)
        return self.streams.store(FAMILIES[event.family].stream, event.chain, prev if compared else None, message)

    async def head(self, stream: str) -> int:
        await asyncio.sleep(0)
        return len(self.streams.messages[stream])

    async def read(self, stream: str, seq: int) -> Recorded | None:
        await asyncio.sleep(0)
        messages = self.streams.messages[stream]
        return decode(*messages[seq - 1]) if 0 < seq <= len(messages) else None

    async def follow(self, stream: str, after: int = 0, last_id: str = "") -> AsyncIterator[list[Recorded]]:
        messages = self.streams.messages[stream]
        check_position(stream, after, last_id, await self.read(stream, after) if after else None)
        while True:
            changed = self.streams.changed
            if len(messages) > after:
                batch = _readable(messages[after:])
                after = batch[-1].seq
                yield batch
            else:
                await changed.wait()

    async def beat(self, role: str, id_: str, beat: Beat) -> None:
        for listener in self.streams.listeners:
            listener(beat)

    async def beats(self, callback: Callable[[Beat], None]) -> None:
        self.streams.listeners.append(callback)

    def connected(self) -> bool:
        return True

    async def close(self) -> None:
        return None


def _readable(messages: list[_Message]) -> list[Recorded]:
    """As many as can be read. What cannot is raised when it is the first: the events before it still count."""
    batch: list[Recorded] = []
    for message in messages:
        try:
            batch.append(decode(*message))
        except ContractError:
            if not batch:
                raise
            break
    return batch


async def open_log(journal: Journal, incarnation: str, writer: str) -> None:
    """Write the first event of an empty LOG; does nothing when there is one. Raises Unavailable."""
    if await journal.head(LOG):
        return
    event = LogOpened(incarnation=incarnation, rules=RULES)
    with contextlib.suppress(Conflict):  # somebody else opened it meanwhile: then it is open
        await journal.append(Draft(event=event, writer=writer, boot=incarnation), 0)


def check_position(stream: str, after: int, last_id: str, found: Recorded | None) -> None:
    """What was applied before must still be there: another log in its place is never followed."""
    if not after or (found is not None and last_id in ("", found.id)):
        return
    there = f"event {found.id}" if found else "nothing"
    raise ContractError(
        f"{stream} holds {there} at {after}, but event {last_id or after} was applied from there: this is another log, "
        "or it was cut. Stop, restore the right log, then start again",
        after,
    )


def check_writable(where: str, event: Event, body: bytes) -> None:
    """What cannot be read back is never written: it would halt every reader. Heavy things go beside the log."""
    if len(where) > MAX_SUBJECT_BYTES:
        raise Rejected(f"{where[:60]}…: a subject of {len(where)} bytes; at most {MAX_SUBJECT_BYTES} fit", 413)
    if len(body) > MAX_EVENT_BYTES:
        raise Rejected(f"{where}: an event of {len(body)} bytes; at most {MAX_EVENT_BYTES} fit", 413)
    try:
        msgspec.json.decode(body, type=type(event))
    except msgspec.DecodeError as error:
        raise Rejected(f"{where}: what would be written cannot be read back: {error}") from error
