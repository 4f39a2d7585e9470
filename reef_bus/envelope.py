"""The envelope: how an event is written to and read from a stream, and its form in exports.

Knows: CloudEvents 1.0 in binary mode (headers) and structured mode (JSON), and the event's id. Must not know: what an
event means, or any broker client.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache, reduce
from operator import or_
from typing import Any, Generic, Literal, TypeVar

import msgspec
from msgspec import defstruct

from reef_bus.errors import ContractError
from reef_bus.events import CATALOGUE, WHOLE, Draft, Event, InferenceRecorded, Recorded, ReportReceived
from reef_bus.topology import FAMILIES, parse
from reef_bus.upcast import upcast

SPEC_VERSION = "1.0"
SOURCE = "/reef/"
_TYPE = re.compile(r"reef\.([A-Za-z]+)\.v([1-9][0-9]{0,3})")

_ENCODER = msgspec.json.Encoder(order="deterministic")
_DECODERS = {name: msgspec.json.Decoder(cls) for name, cls in CATALOGUE.items()}
_CURRENT = {f"reef.{name}.v{cls.version}": _DECODERS[name] for name, cls in CATALOGUE.items()}
"""By `ce-type`: what today's writers write, and nearly all that is ever read."""


_KEYS = {
    "seq": "sequence",
    "time": "timens",
    "cause": "causationid",
    "correlation": "correlationid",
    "event": "data",
}
Data = TypeVar("Data")


class Line(msgspec.Struct, Generic[Data], frozen=True, gc=False, kw_only=True, rename=_KEYS):
    """One event of an export as `to_json` gives it, but for its type, beside the name of its stream."""

    stream: Literal["LOG", "RECORDS"]
    specversion: str
    id: str
    source: str
    subject: str
    seq: int
    time: int
    prev: int
    cause: int
    correlation: str
    boot: str
    event: Data


class _AnyLine(Line[msgspec.Raw], frozen=True, gc=False, kw_only=True):
    """A line of whatever type, which the payload is read by once that is known."""

    type: str


def _line_of(name: str, kind: type[Event]) -> type[msgspec.Struct]:
    """A line of that event in today's version. A class of its own, because msgspec tells them apart by their tag; its
    stream is the event's, which also holds for every further key `stream` in the line."""
    fields = [("stream", Literal[FAMILIES[kind.family].stream]), ("event", kind)]
    return defstruct(
        f"{name}Line", fields, bases=(Line,), tag_field="type", tag=f"reef.{name}.v{kind.version}", kw_only=True
    )


_LINE: msgspec.json.Decoder[Line[Event]] = msgspec.json.Decoder(
    reduce(or_, (_line_of(name, kind) for name, kind in CATALOGUE.items()))
)
"""What today's writers write: a line and its payload are read in one go, and nothing is made of its type."""

_ANY_LINE = msgspec.json.Decoder(_AnyLine)


def payload(event: Event) -> bytes:
    """The event's JSON, with keys in a fixed order: equal events give equal bytes."""
    return _ENCODER.encode(event)


def event_id(family: str, prev: int, name: str, boot: str, body: bytes) -> str:
    """The id that makes a repeated append the same append: 32 hex digits over everything that tells facts apart."""
    head = f"{family}\n{prev}\n{name}\n{boot}\n".encode()
    return hashlib.sha256(head + body).hexdigest()[:32]


def identify(draft: Draft, prev: int, body: bytes) -> str:
    """The draft's id: a record has its own, which is the same for every try of its writer; a fact's is derived."""
    match draft.event:
        case InferenceRecorded(record=record):
            return record
        case ReportReceived(report=report):
            return report
    return event_id(draft.event.chain, prev, type(draft.event).__name__, draft.boot, body)


def headers(draft: Draft, id_: str, prev: int, subject: str, now: str) -> dict[str, str]:
    """CloudEvents 1.0 in binary mode; `Nats-Msg-Id` is the event's id. `now` is RFC 3339 and for display only."""
    return {
        "Nats-Msg-Id": id_,
        "ce-specversion": SPEC_VERSION,
        "ce-id": id_,
        "ce-type": type_of(draft.event),
        "ce-source": f"{SOURCE}{draft.writer}",
        "ce-subject": subject,
        "ce-time": now,
        "ce-datacontenttype": "application/json",
        "ce-prev": str(prev),
        "ce-causationid": str(draft.cause),
        "ce-correlationid": draft.correlation,
        "ce-boot": draft.boot,
    }


def type_of(event: Event) -> str:
    return f"reef.{type(event).__name__}.v{event.version}"


def decode(seq: int, time: int, subject: str, header: Mapping[str, str], body: bytes) -> Recorded:
    """Read a stored message. Raises ContractError naming `seq` for anything that this version cannot read whole."""
    event = _decode_event(seq, subject, header.get("ce-type", ""), body)
    _check_subject(seq, subject, event)
    try:
        return Recorded(
            seq=seq,
            time=time,
            subject=subject,
            id=header["ce-id"],
            prev=int(header["ce-prev"]),
            cause=int(header["ce-causationid"]),
            correlation=header["ce-correlationid"],
            writer=header["ce-source"].removeprefix(SOURCE),
            boot=header["ce-boot"],
            event=event,
        )
    except (KeyError, ValueError) as error:
        raise ContractError(f"event {seq} on {subject}: header {error} is missing or malformed", seq) from error


def _check_subject(seq: int, subject: str, event: Event) -> None:
    """Permissions are granted by subject: an event that stands under another one than its own was never permitted."""
    if not _fits(subject, event):
        raise ContractError(f"event {seq} on {subject} is {type_of(event)} of {event.family} {event.key}", seq)


def _fits(subject: str, event: Event) -> bool:
    """Whether the event stands under its own subject. Every reader asks, of each event: `event.key` would cost more."""
    kind, field, key = _place(subject)
    return type(event) is kind and (getattr(event, field) if field else WHOLE) == key


@lru_cache(maxsize=4096)  # as many as `parse` keeps
def _place(subject: str) -> tuple[type[Event] | None, str, str]:
    """Which events stand under that subject (None: none can), which of their fields holds its id (none: it is `WHOLE`),
    and that id."""
    found = parse(subject)
    kind = CATALOGUE.get(found.name)
    if kind is None or kind.family != found.family:
        return None, "", found.id
    return kind, kind.id_field, found.id


def _decode_event(seq: int, subject: str, type_name: str, body: bytes | msgspec.Raw) -> Event:
    current = _CURRENT.get(type_name)
    try:
        return current.decode(body) if current else _decode_older(seq, subject, type_name, bytes(body))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ContractError(f"event {seq} on {subject} ({type_name}) cannot be read: {error}", seq) from error


def _decode_older(seq: int, subject: str, type_name: str, body: bytes) -> Event:
    """An event of an older version; ContractError for what is foreign or newer."""
    match = _TYPE.fullmatch(type_name)
    if not match or match[1] not in CATALOGUE:
        raise ContractError(
            f"event {seq} on {subject} has type {type_name!r}, which this version does not know: a foreign writer, "
            "or a newer one. Upgrade this consumer, or look at it with `reef-bus log show`",
            seq,
        )
    name, version, current = match[1], int(match[2]), CATALOGUE[match[1]].version
    if version > current:
        raise ContractError(
            f"event {seq} on {subject} is {type_name}; this version reads {name} up to "
            f"v{current}. Upgrade this consumer first",
            seq,
        )
    return _DECODERS[name].decode(upcast(name, version, current, body))


def to_json(recorded: Recorded) -> dict[str, Any]:
    """The structured CloudEvents form, as exports, golden files and `log --json` show it."""
    return {
        "specversion": SPEC_VERSION,
        "id": recorded.id,
        "type": type_of(recorded.event),
        "source": f"{SOURCE}{recorded.writer}",
        "subject": recorded.subject,
        "sequence": recorded.seq,
        "timens": recorded.time,
        "prev": recorded.prev,
        "causationid": recorded.cause,
        "correlationid": recorded.correlation,
        "boot": recorded.boot,
        "data": msgspec.to_builtins(recorded.event),
    }


def plain_line(line: bytes) -> Line[Event] | None:
    """A line as `write_export` of this version gives it, on the stream where it belongs. None for any other line, which
    may yet be one for `decode_line`."""
    try:
        found = _LINE.decode(line if line.isascii() else line.decode())  # what is passed over must be text, too
        return found if _fits(found.subject, found.event) else None
    except (msgspec.MsgspecError, UnicodeError, RecursionError, ContractError):
        return None


def plain_lines(lines: Sequence[bytes], stream: str) -> Sequence[Line[Event]] | None:
    """What `plain_line` makes of each of the lines; None unless every one is plain, and of that stream."""
    try:
        text = lines if all(map(bytes.isascii, lines)) else [line.decode() for line in lines]
        found = list(map(_LINE.decode, text))
        right = all(line.stream == stream and _fits(line.subject, line.event) for line in found)
        return found if right else None
    except (msgspec.MsgspecError, UnicodeError, RecursionError, ContractError):
        return None


def decode_line(line: bytes) -> Line[Event] | None:
    """A line in the form that `write_export` gives it, in any version. None for any other line, which may yet be one
    for `from_json`. Raises ContractError like `decode`."""
    return plain_line(line) or _read_in_two(line)


def recorded_on(line: Line[Event]) -> Recorded:
    """The event of a line as its stream holds it."""
    return Recorded(
        seq=line.seq,
        time=line.time,
        subject=line.subject,
        id=line.id,
        prev=line.prev,
        cause=line.cause,
        correlation=line.correlation,
        writer=line.source.removeprefix(SOURCE),
        boot=line.boot,
        event=line.event,
    )


def _read_in_two(line: bytes) -> Line[Event] | None:
    """The envelope first, so that whoever cannot read the payload can say of which event it is."""
    try:
        found = _ANY_LINE.decode(line.decode())
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
    event = _decode_event(found.seq, found.subject, found.type, found.event)
    _check_subject(found.seq, found.subject, event)
    return Line(**{**{name: getattr(found, name) for name in Line.__struct_fields__}, "event": event})


def from_json(line: Mapping[str, Any]) -> Recorded:
    """The inverse of `to_json`; ContractError names the sequence of what cannot be read."""
    try:
        seq, time, subject = int(line["sequence"]), int(line["timens"]), str(line["subject"])
        header = {
            "ce-id": str(line["id"]),
            "ce-type": str(line["type"]),
            "ce-prev": str(line["prev"]),
            "ce-causationid": str(line["causationid"]),
            "ce-correlationid": str(line["correlationid"]),
            "ce-source": str(line["source"]),
            "ce-boot": str(line["boot"]),
        }
        body = msgspec.json.encode(line["data"])
    except (KeyError, TypeError, ValueError) as error:
        raise ContractError(
            f"a line of the export lacks or garbles {error}; expected the form that `reef-bus export` writes"
        ) from error
    return decode(seq, time, subject, header, body)
