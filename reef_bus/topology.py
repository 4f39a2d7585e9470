"""Subjects, families, authorities, compare-and-append filters and streams: one table, as data.

Knows: which family lives where and who alone may write it. Must not know: a broker client, or what events mean.
Subject, filter and permission come from the same row, so that one family is never spelled in two ways: on a replicated
stream two spellings of a filter are not serialised against each other.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import msgspec

from reef_bus.core.ids import TOKEN, plain, token
from reef_bus.errors import ContractError, Rejected
from reef_bus.events import Event

DUPLICATE_WINDOW_S = 600
MAX_EVENT_BYTES = 64 * 1024
MAX_SUBJECT_BYTES = 512  # a server closes the connection for good at a command line of 4096


class Family(NamedTuple):
    """One row: the role that alone writes the family, its stream, and whether each id is a family of its own."""

    name: str
    writer: str
    stream: str
    per_id: bool
    compares: bool


FAMILIES = {
    row.name: row
    for row in (
        Family("train", "trainer", "LOG", per_id=False, compares=True),
        Family("release", "publisher", "LOG", per_id=False, compares=True),
        Family("engine", "engine", "LOG", per_id=True, compares=True),
        Family("deployment", "supervisor", "LOG", per_id=False, compares=True),
        Family("operator", "person", "LOG", per_id=True, compares=False),
        Family("record", "gateway", "RECORDS", per_id=True, compares=False),
        Family("site", "relay", "SITES", per_id=True, compares=True),
    )
}


class Address(NamedTuple):
    """A subject taken apart; `id` is decoded."""

    deployment: str
    family: str
    id: str
    name: str


class StreamSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a stream must look like. `source` names the stream whose `source_filter` messages it copies."""

    name: str
    subjects: tuple[str, ...] = ()
    memory: bool = False
    keeps: bool = True
    max_age_s: int = 0
    max_msg_size: int = MAX_EVENT_BYTES + 4096
    replicas: int = 1
    source: str = ""
    source_filter: str = ""


def check_name(kind: str, name: str) -> str:
    """`name` if it can stand in subjects and file names as it is, else Rejected."""
    if not TOKEN.fullmatch(name) or len(name) > 64:
        raise Rejected(f"{kind} {name!r}: expected 1 to 64 of A-Z a-z 0-9 _ -")
    return name


def subject(deployment: str, event: Event) -> str:
    return f"reef.{deployment}.{event.family}.{token(event.key)}.{type(event).__name__}"


def compare_filter(deployment: str, event: Event) -> str:
    """The one spelling of the compare-and-append filter of the event's chain."""
    return chain_filter(deployment, FAMILIES[event.family], token(event.key))


def chain_filter(deployment: str, family: Family, id_token: str) -> str:
    """The filter over a whole family, or over one id of it where each id is a chain."""
    return f"reef.{deployment}.{family.name}.{id_token}.>" if family.per_id else f"reef.{deployment}.{family.name}.>"


@lru_cache(maxsize=4096)  # a log has few subjects: some thirty names, times engines
def parse(text: str) -> Address:
    """Take a subject apart; ContractError for one that is not ours."""
    parts = text.split(".")
    ours = len(parts) == 5 and parts[0] == "reef" and parts[2] in FAMILIES and all(map(TOKEN.fullmatch, parts))
    try:
        if ours:
            return Address(parts[1], parts[2], plain(parts[3]), parts[4])
    except ValueError:  # not base64url, or not UTF-8 within
        pass
    raise ContractError(f"subject {text!r} is not of the form reef.<deployment>.<family>.<id>.<EventName>")


def stream_name(deployment: str, stream: str) -> str:
    return f"REEF_{deployment}_{stream}"


def telemetry_subject(deployment: str, role: str, id_: str) -> str:
    return f"reef.{deployment}.tel.{role}.{token(id_)}"


def streams(deployment: str, replicas: int = 1) -> tuple[StreamSpec, ...]:
    """The streams of a deployment, in the order in which they can be created."""

    def own(stream: str) -> tuple[str, ...]:
        return tuple(f"reef.{deployment}.{f.name}.>" for f in FAMILIES.values() if f.stream == stream)

    log = stream_name(deployment, "LOG")
    return (
        StreamSpec(name=log, subjects=own("LOG"), replicas=replicas),
        StreamSpec(name=stream_name(deployment, "RECORDS"), subjects=own("RECORDS"), replicas=replicas),
        StreamSpec(
            name=stream_name(deployment, "RELEASES"),
            source=log,
            source_filter=f"reef.{deployment}.release.>",
            replicas=replicas,
        ),
        StreamSpec(
            name=stream_name(deployment, "TELEMETRY"),
            subjects=(f"reef.{deployment}.tel.>",),
            memory=True,
            keeps=False,
            max_age_s=600,
        ),
    )


def permissions(deployment: str, role: str, id_: str = "") -> tuple[str, ...]:
    """The subjects that a role may publish to, for a server's authorisation table."""
    rows = [f for f in FAMILIES.values() if f.writer == role]
    names = [f"{f.name}.{token(id_)}" if f.per_id and id_ else f.name for f in rows]
    return (*(f"reef.{deployment}.{name}.>" for name in names), f"reef.{deployment}.tel.{role}.>")
