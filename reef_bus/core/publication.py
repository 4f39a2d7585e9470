"""The publisher's side of the state: releases, the head, the open publication, who was excluded.

Knows: the `release` family. Must not know: how weights travel, or what an engine holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from reef_bus.core.ids import BASE, LoadId, parse_load_id
from reef_bus.events import (
    Blob,
    EngineExcluded,
    Event,
    Member,
    PublicationHalted,
    PublicationRefused,
    Recorded,
    ReleaseCommitted,
    ScenarioRegistered,
    TargetPersisted,
    TransferAborted,
)

MAX_ATTEMPTS = 3
FENCED, STAGED = "fenced", "staged"  # how a release is received: into stopped memory, or beside what is served
DRAIN, RETRACT, IN_PLACE = "drain", "retract", "in_place"
"""What becomes of the requests in hand when generation stops for a release: they are answered first; they start over
afterwards; or they stop between two tokens, keep their KV cache, and go on afterwards."""
PAUSES = (DRAIN, RETRACT, IN_PLACE)
SUPERSEDED = "superseded"  # the one refusal through which a base chain may still reach the head


class Release(msgspec.Struct, kw_only=True):
    """One committed release. `seq` and `time` are those of its commit (release 0: of its registration); `pause` is how
    whoever generates with an older one stops for it."""

    load_id: str
    candidate: str
    parent: str
    manifest: str
    weights: Blob
    seq: int
    time: int
    pause: str = DRAIN


class Publication(msgspec.Struct, kw_only=True):
    """The open publication and its current attempt, which began at `attempt_seq`, `attempt_time`."""

    id: str
    scenario: str
    candidate: str
    load_id: str
    parent: str
    manifest: str
    weights: Blob
    seq: int
    time: int
    attempt: int
    attempt_seq: int
    attempt_time: int
    members: tuple[Member, ...]
    sender: str
    transport: str
    mode: str
    pause: str
    request: int = 0


class Publications(msgspec.Struct):
    """Everything that the `release` family says. `ended`: by candidate, committed, halted, refused or superseded."""

    open: Publication | None = None
    head: Release | None = None
    releases: dict[str, Release] = {}
    sequence: int = 0
    ended: dict[str, str] = {}
    ended_seq: int = 0
    excluded: dict[str, int] = {}


def register(publications: Publications, incarnation: str, recorded: Recorded, event: ScenarioRegistered) -> None:
    """The base model becomes release 0."""
    load_id = str(LoadId(incarnation, 0))
    publications.head = Release(
        load_id=load_id,
        candidate=BASE,
        parent="",
        manifest=event.manifest,
        weights=event.weights,
        seq=recorded.seq,
        time=recorded.time,
    )
    publications.releases[load_id] = publications.head
    publications.ended[BASE] = "committed"


def evolve(publications: Publications, recorded: Recorded) -> None:
    """Apply one event of the `release` family that is not void and contradicts nothing."""
    change = CHANGES.get(type(recorded.event))
    if change:
        change(publications, recorded, recorded.event)


def _target(publications: Publications, recorded: Recorded, event: TargetPersisted) -> None:
    publications.sequence = parse_load_id(event.load_id).sequence
    publications.open = Publication(
        id=event.publication,
        scenario=event.scenario,
        candidate=event.candidate,
        load_id=event.load_id,
        parent=event.parent,
        manifest=event.manifest,
        weights=event.weights,
        seq=recorded.seq,
        time=recorded.time,
        attempt=event.attempt,
        attempt_seq=recorded.seq,
        attempt_time=recorded.time,
        members=event.members,
        sender=event.sender,
        transport=event.transport,
        mode=event.mode,
        pause=event.pause,
        request=event.request,
    )


def _abort(publications: Publications, recorded: Recorded, event: TransferAborted) -> None:
    if open_ := publications.open:
        _exclude(publications, recorded.seq, event.excluded)
        open_.attempt, open_.members = event.next_attempt, event.members
        open_.attempt_seq, open_.attempt_time = recorded.seq, recorded.time


def _commit(publications: Publications, recorded: Recorded, event: ReleaseCommitted) -> None:
    if not (open_ := publications.open):
        return
    publications.head = Release(
        load_id=open_.load_id,
        candidate=open_.candidate,
        parent=open_.parent,
        manifest=open_.manifest,
        weights=open_.weights,
        seq=recorded.seq,
        time=recorded.time,
        pause=open_.pause,
    )
    publications.releases[open_.load_id] = publications.head
    _end(publications, recorded.seq, open_, "committed")


def _halt(publications: Publications, recorded: Recorded, event: PublicationHalted) -> None:
    if open_ := publications.open:
        _exclude(publications, recorded.seq, event.excluded)
        _end(publications, recorded.seq, open_, "halted")


def _refuse(publications: Publications, recorded: Recorded, event: PublicationRefused) -> None:
    if not event.request:
        publications.ended[event.candidate] = SUPERSEDED if event.reason == SUPERSEDED else "refused"


def _exclude_one(publications: Publications, recorded: Recorded, event: EngineExcluded) -> None:
    _exclude(publications, recorded.seq, (Member(event.engine, event.boot),))


CHANGES: Mapping[type[Event], Callable[[Publications, Recorded, Any], None]] = {
    TargetPersisted: _target,
    TransferAborted: _abort,
    ReleaseCommitted: _commit,
    PublicationHalted: _halt,
    PublicationRefused: _refuse,
    EngineExcluded: _exclude_one,
}


def _end(publications: Publications, seq: int, publication: Publication, how: str) -> None:
    """A rollback decides nothing about the candidate whose content it brings back."""
    if not publication.request:
        publications.ended[publication.candidate] = how
    publications.open, publications.ended_seq = None, seq


def _exclude(publications: Publications, seq: int, members: tuple[Member, ...]) -> None:
    for member in members:
        publications.excluded.setdefault(member.boot, seq)
