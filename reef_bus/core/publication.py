"""The publisher's side of the state: releases, the head, the open publication, who was excluded.

Knows: the `release` family. Must not know: how weights travel, or what an engine holds.
"""

from __future__ import annotations

import msgspec

from reef_bus.core.ids import BASE, LoadId, parse_load_id
from reef_bus.events import (
    Blob,
    EngineExcluded,
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
SUPERSEDED = "superseded"  # the one refusal through which a base chain may still reach the head


class Release(msgspec.Struct, kw_only=True):
    """One committed release. `seq` and `time` are those of its commit (release 0: of its registration)."""

    load_id: str
    candidate: str
    parent: str
    manifest: str
    weights: Blob
    seq: int
    time: int


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
    match recorded.event:
        case TargetPersisted() as target:
            _target(publications, recorded, target)
        case TransferAborted() as aborted if publications.open:
            _exclude(publications, recorded.seq, aborted.excluded)
            publications.open.attempt, publications.open.members = aborted.next_attempt, aborted.members
            publications.open.attempt_seq, publications.open.attempt_time = recorded.seq, recorded.time
        case ReleaseCommitted() if publications.open:
            _commit(publications, recorded, publications.open)
        case PublicationHalted(excluded=excluded) if publications.open:
            _exclude(publications, recorded.seq, excluded)
            _end(publications, recorded.seq, publications.open, "halted")
        case PublicationRefused(candidate=candidate, reason=reason, request=0):
            publications.ended[candidate] = SUPERSEDED if reason == SUPERSEDED else "refused"
        case EngineExcluded(engine=engine, boot=boot):
            _exclude(publications, recorded.seq, (Member(engine, boot),))


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


def _commit(publications: Publications, recorded: Recorded, publication: Publication) -> None:
    publications.head = Release(
        load_id=publication.load_id,
        candidate=publication.candidate,
        parent=publication.parent,
        manifest=publication.manifest,
        weights=publication.weights,
        seq=recorded.seq,
        time=recorded.time,
    )
    publications.releases[publication.load_id] = publications.head
    _end(publications, recorded.seq, publication, "committed")


def _end(publications: Publications, seq: int, publication: Publication, how: str) -> None:
    """A rollback decides nothing about the candidate whose content it brings back."""
    if not publication.request:
        publications.ended[publication.candidate] = how
    publications.open, publications.ended_seq = None, seq


def _exclude(publications: Publications, seq: int, members: tuple[Member, ...]) -> None:
    for member in members:
        publications.excluded.setdefault(member.boot, seq)
