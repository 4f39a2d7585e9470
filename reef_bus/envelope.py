"""The envelope: how an event is written to and read from a stream, and its form in exports.

Knows: CloudEvents 1.0 in binary mode (headers) and structured mode (JSON), and the event's id. Must not know: what an
event means, or any broker client.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from functools import lru_cache
from types import GenericAlias
from typing import Any, Generic, Literal, TypeVar

import msgspec

from reef_bus.errors import ContractError
from reef_bus.events import CATALOGUE, WHOLE, Draft, Event, InferenceRecorded, Recorded, ReportReceived
from reef_bus.topology import parse
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
Kind = TypeVar("Kind")
Data = TypeVar("Data")


class Line(msgspec.Struct, Generic[Kind, Data], frozen=True, gc=False, rename=_KEYS):
    """One event of an export as `to_json` gives it, beside the name of its stream."""

    stream: Literal["LOG", "RECORDS"]
    specversion: str
    id: str
    type: Kind
    source: str
    subject: str
    seq: int
    time: int
    prev: int
    cause: int
    correlation: str
    boot: str
    event: Data


_TYPE_KEY = b'"type":"'
_LINES = {
    name.encode(): msgspec.json.Decoder(GenericAlias(Line, (Literal[name], CATALOGUE[name.split(".")[1]])))
    for name in _CURRENT
}
"""By the type that stands in a line: where that is known beforehand, a line and its payload are read in one go."""

_ANY_LINE = msgspec.json.Decoder(Line[str, msgspec.Raw])


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
    field, key = _key_there(subject, type(event))
    if (getattr(event, field) if field else WHOLE) != key:  # `event.key`, of which every reader of a log asks so often
        raise ContractError(f"event {seq} on {subject} is {type_of(event)} of {event.family} {event.key}", seq)


@lru_cache(maxsize=4096)  # as many as `parse` keeps
def _key_there(subject: str, kind: type[Event]) -> tuple[str, str | None]:
    """The field that is the subject's id, and what an event of that kind holds there; None if none can stand there."""
    found = parse(subject)
    fits = (found.name, found.family) == (kind.__name__, kind.family)
    return kind.id_field, found.id if fits else None


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


def decode_line(line: bytes) -> Line[str, Event] | None:
    """An export's line in the form that `write_export` gives it. None for any other line, which may yet be one for
    `from_json`. Raises ContractError like `decode`."""
    try:
        text = line if line.isascii() else line.decode()  # what is passed over must be text, too
        found = _read_whole(line, text) or _read_in_two(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
    _check_subject(found.seq, found.subject, found.event)
    return found


def recorded_on(line: Line[str, Event]) -> Recorded:
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


def _read_whole(line: bytes, text: bytes | str) -> Line[str, Event] | None:
    """A line that holds what today's writers write; or None."""
    begin = line.find(_TYPE_KEY) + len(_TYPE_KEY)
    known = _LINES.get(line[begin : line.find(b'"', begin)])
    try:
        return known.decode(text) if known else None
    except (msgspec.MsgspecError, RecursionError):
        return None


def _read_in_two(text: bytes | str) -> Line[str, Event]:
    """The envelope first, so that whoever cannot read the payload can say of which event it is."""
    found = _ANY_LINE.decode(text)
    event = _decode_event(found.seq, found.subject, found.type, found.event)
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
