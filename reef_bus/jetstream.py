"""The journal on NATS JetStream: with `connection`, which it asks everything over, the only module that imports nats.

Knows: the pinned client and server, their error codes and what was measured of them. Must not know: what events mean.
Appends compare over the chain's one filter spelling; batches, `publish_async` and Expected-Last-Msg-Id are never used:
each was measured to hang, to be slow, or to wedge a replicated stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from typing import Any

import msgspec
import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext, api
from nats.js.errors import APIError, BadRequestError, NoStreamResponseError, NotFoundError, ServiceUnavailableError

from reef_bus.connection import TIMEOUT_S, Connection
from reef_bus.envelope import decode, headers, identify, payload
from reef_bus.errors import Conflict, ContractError, Rejected, Unavailable
from reef_bus.events import Draft, Recorded
from reef_bus.journal import LOG, Beat, Journal, Stored, check_position, check_writable
from reef_bus.topology import (
    DUPLICATE_WINDOW_S,
    FAMILIES,
    StreamSpec,
    compare_filter,
    stream_name,
    streams,
    subject,
    telemetry_subject,
)

log = logging.getLogger(__name__)

_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)

WRONG_SEQUENCE = (10071, 10164)  # the second: another write for the same expectation is in flight
SILENCE_S = 1.0  # after this long without an event, ask the leader whether there is one
TRANSIENT = (
    nats.errors.TimeoutError,
    nats.errors.ConnectionClosedError,
    nats.errors.ConnectionReconnectingError,
    nats.errors.NoRespondersError,
    nats.errors.OutboundBufferLimitError,
    nats.errors.StaleConnectionError,
    NoStreamResponseError,
    ServiceUnavailableError,
    OSError,
)


async def connect(url: str, deployment: str, name: str, *, wait_s: float = 10.0) -> JetStreamJournal:
    """A journal on the server at `url`, or on the first that answers of several, comma between them; keeps reconnecting
    for ever. Raises Unavailable if none is up in `wait_s`."""
    connection = Connection(url, name)
    await connection.open(wait_s)
    return JetStreamJournal(connection, deployment)


class JetStreamJournal(Journal):
    """A deployment's streams, over one connection."""

    def __init__(self, connection: Connection, deployment: str) -> None:
        self.deployment = deployment
        self.connection = connection

    @property
    def client(self) -> Client:
        return self.connection.client

    @property
    def js(self) -> JetStreamContext:
        return self.connection.js

    async def append(self, draft: Draft, prev: int) -> Stored:
        where, body = subject(self.deployment, draft.event), payload(draft.event)
        check_writable(where, draft.event, body)
        now = datetime.datetime.now(datetime.UTC).isoformat()
        header = headers(draft, identify(draft, prev, body), prev, where, now)
        header["Nats-Expected-Stream"] = stream_name(self.deployment, FAMILIES[draft.event.family].stream)
        if FAMILIES[draft.event.family].compares:
            header["Nats-Expected-Last-Subject-Sequence"] = str(prev)
            header["Nats-Expected-Last-Subject-Sequence-Subject"] = compare_filter(self.deployment, draft.event)
        try:
            ack = await self.connection.ask(self.js.publish(where, body, timeout=TIMEOUT_S, headers=header))
        except APIError as error:
            raise _append_error(draft, prev, where, error) from error
        except TRANSIENT as error:
            raise Unavailable(f"{where}: no acknowledgement ({type(error).__name__})") from error
        return Stored(ack.seq, bool(ack.duplicate))

    async def head(self, stream: str) -> int:
        begin, last = await self.extent(stream)
        return last if last >= begin else 0

    async def extent(self, stream: str) -> tuple[int, int]:
        """The sequences at which the stream begins and ends: of an empty one, that of its first event to be, and one
        less. Raises as `head`."""
        try:
            info = await self.connection.ask(self.js.stream_info(stream_name(self.deployment, stream)))
        except NotFoundError as error:
            raise ContractError(f"stream {stream} does not exist: `reef-bus streams apply` creates it") from error
        except (*TRANSIENT, APIError) as error:
            raise Unavailable(f"{stream}: its leader does not answer ({type(error).__name__})") from error
        return max(info.state.first_seq, 1), info.state.last_seq

    async def read(self, stream: str, seq: int) -> Recorded | None:
        try:
            message = await self.connection.ask(self.js.get_msg(stream_name(self.deployment, stream), seq=seq))
        except NotFoundError:
            return None
        except (*TRANSIENT, APIError) as error:
            raise Unavailable(f"{stream}: its leader does not answer ({type(error).__name__})") from error
        when = _nanoseconds(message.time)
        return decode(seq, when, message.subject or "", message.headers or {}, message.data or b"")

    async def follow(self, stream: str, after: int = 0, last_id: str = "") -> AsyncIterator[list[Recorded]]:
        while True:
            try:
                if after:
                    check_position(stream, after, last_id, await self.read(stream, after))
                begin = after or (await self.extent(stream))[0] - 1  # a log that goes on from another one begins late
                async with contextlib.aclosing(self._deliver(stream, begin)) as batches:
                    async for batch in batches:
                        after, last_id = batch[-1].seq, batch[-1].id
                        yield batch
            except (Unavailable, APIError, *TRANSIENT) as error:
                log.debug("follow %s: %s", stream, error)
            await asyncio.sleep(0.1)

    async def _deliver(self, stream: str, after: int) -> AsyncGenerator[list[Recorded]]:
        """One subscription's events, until the connection is lost, it has a gap, or it is silent elsewhere than at the
        head."""
        lost = self.connection.lost
        queue: asyncio.Queue[Msg] = asyncio.Queue()
        subscription = await self._subscribe(stream, after, queue)
        try:
            while True:
                messages = await _drain(queue)
                if lost.done() or (not messages and (await self.extent(stream))[1] != after):
                    return  # what is there may be another log, or a shorter one: look before going on
                if not messages:
                    continue
                batch, stop = _contiguous(messages, after)
                if batch:
                    after = batch[-1].seq
                    yield batch
                if isinstance(stop, ContractError):
                    raise stop
                if stop:
                    return
        finally:
            with contextlib.suppress(Exception):
                await subscription.unsubscribe()

    async def _subscribe(self, stream: str, after: int, queue: asyncio.Queue[Msg]) -> JetStreamContext.PushSubscription:
        asked = asyncio.ensure_future(
            self.js.subscribe(
                ">",
                stream=stream_name(self.deployment, stream),
                config=_consumer(after),
                cb=queue.put,
                flow_control=True,
                idle_heartbeat=2.0,
                pending_bytes_limit=256 * 1024 * 1024,
            )
        )
        try:
            return await self.connection.ask(asked)
        except BaseException:
            asked.add_done_callback(self._unwanted)
            raise

    def _unwanted(self, asked: asyncio.Future[JetStreamContext.PushSubscription]) -> None:
        """A subscription that came when nobody waited for it any more."""
        if not asked.cancelled() and not asked.exception():
            self.connection.keep(asyncio.ensure_future(asked.result().unsubscribe()))

    async def beat(self, role: str, id_: str, beat: Beat) -> None:
        with contextlib.suppress(nats.errors.Error, OSError):
            await self.client.publish(telemetry_subject(self.deployment, role, id_), msgspec.json.encode(beat))

    async def beats(self, callback: Callable[[Beat], None]) -> None:
        async def on_beat(message: Msg) -> None:
            with contextlib.suppress(msgspec.DecodeError):
                found = msgspec.json.decode(message.data)
                if isinstance(found, dict):
                    callback(found)

        await self.connection.listen(f"reef.{self.deployment}.tel.>", on_beat)

    def connected(self) -> bool:
        return self.client.is_connected

    async def close(self) -> None:
        await self.connection.close()

    # -- streams

    async def plan(self, replicas: int) -> dict[str, list[str]]:
        """What differs between the streams as they should be and as they are: `["missing"]`, or a line per setting."""
        return {spec.name: await self._drift(spec) for spec in streams(self.deployment, replicas)}

    async def apply(self, replicas: int, begins: Mapping[str, int] | None = None) -> dict[str, str]:
        """Create what is missing; `begins` names streams whose first sequence is not 1. Raises Rejected, having
        changed nothing, when a stream exists and differs; and, unless `begins` is given, when somebody was replacing
        the log: another one in its place would be a new beginning."""
        drift = await self.plan(replicas)
        wrong = {name: lines for name, lines in drift.items() if lines and lines != ["missing"]}
        if wrong:
            text = "; ".join(f"{name}: {', '.join(lines)}" for name, lines in wrong.items())
            raise Rejected(f"streams exist that are not as they must be: {text}. Nothing was changed")
        if begins is None:
            await self._check_log(drift)
        first = {stream_name(self.deployment, stream): seq for stream, seq in (begins or {}).items()}
        for spec in streams(self.deployment, replicas):
            if drift[spec.name]:
                await self._create(spec, first.get(spec.name))
        return {name: "created" if lines else "unchanged" for name, lines in drift.items()}

    async def _create(self, spec: StreamSpec, first: int | None) -> None:
        try:
            await self.js.add_stream(_config(spec, first))
        except (*TRANSIENT, APIError) as error:
            raise Unavailable(f"{spec.name}: it cannot be created ({type(error).__name__}: {error})") from error

    async def _check_log(self, drift: Mapping[str, list[str]]) -> None:
        log = stream_name(self.deployment, LOG)
        left = sorted(name for name, lines in drift.items() if not lines)
        begin, head = await self.extent(LOG) if log in left else (1, 0)
        found = f"begins at {begin} and holds nothing" if head < begin else ""
        if (left and log not in left) or (found and begin > 1):
            found = found if log in left else f"is missing, although there are {', '.join(left)}"
            raise Rejected(
                f"{log} {found}: somebody was replacing it. Nothing was changed; what was interrupted is finished by "
                "running it again: `reef-bus log roll` or `reef-bus restore`, with the same arguments"
            )

    async def drop(self, stream: str) -> None:
        """Delete the stream with all that is in it; nothing happens when there is none. Raises Unavailable."""
        try:
            await self.js.delete_stream(stream_name(self.deployment, stream))
        except NotFoundError:
            return
        except (*TRANSIENT, APIError) as error:
            raise Unavailable(f"{stream}: it is not known whether it was deleted ({type(error).__name__})") from error

    async def put_back(self, stream: str, recorded: Recorded) -> None:
        """Store the event as it had been stored, at its sequence, which is the next one. Raises ContractError when that
        is taken, Unavailable when the outcome is unknown."""
        draft = Draft(
            event=recorded.event,
            writer=recorded.writer,
            boot=recorded.boot,
            cause=recorded.cause,
            correlation=recorded.correlation,
        )
        when = datetime.datetime.fromtimestamp(recorded.time / 1e9, datetime.UTC).isoformat()
        header = headers(draft, recorded.id, recorded.prev, recorded.subject, when)
        header["Nats-Expected-Stream"] = stream_name(self.deployment, stream)
        header["Nats-Expected-Last-Sequence"] = str(recorded.seq - 1)
        try:
            body = payload(recorded.event)
            await self.connection.ask(self.js.publish(recorded.subject, body, timeout=TIMEOUT_S, headers=header))
        except TRANSIENT as error:
            raise Unavailable(f"{recorded.subject}: no acknowledgement ({type(error).__name__})") from error
        except APIError as error:
            raise ContractError(f"{stream} does not take event {recorded.seq}: {error.description}") from error

    async def _drift(self, spec: StreamSpec) -> list[str]:
        try:
            found = (await self.js.stream_info(spec.name)).config
        except NotFoundError:
            return ["missing"]
        except (*TRANSIENT, APIError) as error:
            raise Unavailable(f"{spec.name}: the server does not answer ({type(error).__name__})") from error
        wanted, actual = _comparable(_config(spec)), _comparable(found)
        return [f"{key} is {actual[key]!r}, must be {wanted[key]!r}" for key in wanted if wanted[key] != actual[key]]


async def _drain(queue: asyncio.Queue[Msg]) -> list[Msg]:
    """Everything that is there, else the first that comes; empty after a silence."""
    messages = []
    if queue.empty():
        try:
            async with asyncio.timeout(SILENCE_S):  # wait_for can lose the item that arrives with its deadline
                messages.append(await queue.get())
        except TimeoutError:
            return []
    while not queue.empty() and len(messages) < 1000:
        messages.append(queue.get_nowait())
    return messages


def _contiguous(messages: list[Msg], after: int) -> tuple[list[Recorded], ContractError | bool]:
    """The events that follow `after` without a gap, and what stopped: an unreadable event, a gap (True), or nothing."""
    batch: list[Recorded] = []
    last = after
    for message in messages:
        seq, when = _stored(message)
        if seq <= last:
            continue
        if seq > last + 1:
            return batch, True
        try:
            batch.append(decode(seq, when, message.subject, message.headers or {}, message.data))
        except ContractError as error:
            return batch, error
        last = seq
    return batch, False


def _consumer(after: int) -> api.ConsumerConfig:
    """One delivery of each event after `after`, in order; gone by itself half a minute after its subscriber.

    Not the client's `ordered_consumer`: that one, when it loses its consumer before the first event, asks for the whole
    log again, and at a gap it subscribes anew by itself, while we look at the log first.
    """
    return api.ConsumerConfig(
        deliver_policy=api.DeliverPolicy.BY_START_SEQUENCE,
        opt_start_seq=after + 1,
        ack_policy=api.AckPolicy.NONE,
        max_deliver=1,
        num_replicas=1,
        mem_storage=True,
        inactive_threshold=30.0,
    )


def _stored(message: Msg) -> tuple[int, int]:
    """Where the event is, and its broker's time in ns, cut to the microsecond as `read` gets it. The client's own
    `metadata` has the time from a float, off by one now and then, and costs a sixth of what reading a log does."""
    fields = message.reply.split(".")
    place, when = (Msg.Ack.StreamSeq, Msg.Ack.Timestamp) if len(fields) > 9 else (5, 7)
    return int(fields[place]), int(fields[when]) // 1000 * 1000


def _nanoseconds(when: datetime.datetime | None) -> int:
    return (when - _EPOCH) // datetime.timedelta(microseconds=1) * 1000 if when else 0


def _append_error(draft: Draft, prev: int, where: str, error: APIError) -> Exception:
    if error.err_code in WRONG_SEQUENCE:
        return Conflict(draft.event.chain, prev)
    if isinstance(error, (BadRequestError, NotFoundError)):
        return ContractError(f"{where}: the server refuses it: {error.description} ({error.err_code})")
    return Unavailable(f"{where}: {error.description} ({error.err_code}); is the stream or its disk full?")


def _config(spec: StreamSpec, first: int | None = None) -> api.StreamConfig:
    return api.StreamConfig(
        name=spec.name,
        subjects=list(spec.subjects) or None,
        storage=api.StorageType.MEMORY if spec.memory else api.StorageType.FILE,
        num_replicas=spec.replicas,
        retention=api.RetentionPolicy.LIMITS,
        discard=api.DiscardPolicy.NEW if spec.keeps else api.DiscardPolicy.OLD,
        deny_delete=spec.keeps,
        deny_purge=spec.keeps,
        max_age=spec.max_age_s,
        max_msg_size=spec.max_msg_size,
        allow_direct=True,
        duplicate_window=DUPLICATE_WINDOW_S,
        first_seq=first,
        sources=[api.StreamSource(name=spec.source, filter_subject=spec.source_filter)] if spec.source else None,
    )


def _comparable(config: api.StreamConfig) -> dict[str, Any]:
    """The settings that the protocol stands on."""
    return {
        "subjects": sorted(config.subjects or []),
        "storage": str(getattr(config.storage, "value", config.storage)),
        "replicas": config.num_replicas,
        "discard": str(getattr(config.discard, "value", config.discard)),
        "deny_delete": bool(config.deny_delete),
        "deny_purge": bool(config.deny_purge),
        "retention": str(getattr(config.retention, "value", config.retention)),
        "duplicate_window_s": int(config.duplicate_window or 0),
        "max_msg_size": config.max_msg_size,
        "max_msgs_per_subject": max(config.max_msgs_per_subject or -1, -1),
        "max_age_s": int(config.max_age or 0),
        "max_msgs": max(config.max_msgs or -1, -1) if config.max_msgs not in (0, None) else -1,
        "max_bytes": max(config.max_bytes or -1, -1) if config.max_bytes not in (0, None) else -1,
        "sources": sorted(f"{s.name} {s.filter_subject}" for s in config.sources or []),
    }
