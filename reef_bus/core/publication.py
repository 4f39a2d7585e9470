"""The publisher's side of the state: releases, the head, the open publication, who was excluded.

Knows: the `release` family. Must not know: how weights travel, or what an engine holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from reef_bus.core.ids import BASE, LoadId, adapter_base, parse_load_id
from reef_bus.events import (
    AdapterRegistered,
    Blob,
    EngineExcluded,
    Event,
    Lora,
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
    whoever generates with an older one stops for it. `scenario` is that whose adapter it is, or empty."""

    load_id: str
    candidate: str
    parent: str
    manifest: str
    weights: Blob
    seq: int
    time: int
    pause: str = DRAIN
    scenario: str = ""


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
    lora: Lora | None = None


class Publications(msgspec.Struct):
    """Everything that the `release` family says. `ended`: by candidate, committed, halted, refused or superseded.

    `head` is the whole model's; with adapters it stays release 0, which is theirs, too: `adapters` are the heads of
    their scenarios, `origins` their releases 0, whose weights are the adapter that changes nothing. `releases` are all
    others by their load ids."""

    open: Publication | None = None
    head: Release | None = None
    adapters: dict[str, Release] = {}
    origins: dict[str, Release] = {}
    releases: dict[str, Release] = {}
    sequence: int = 0
    ended: dict[str, str] = {}
    ended_seq: int = 0
    excluded: dict[str, int] = {}

    def head_of(self, scenario: str) -> Release | None:
        """The head of an adapter's scenario; for every other name, that of the whole model."""
        return self.adapters.get(scenario, self.head)

    def release(self, scenario: str, load_id: str) -> Release | None:
        """The release of that load id, if it is one of an adapter's scenario (empty: of the whole model)."""
        origin = self.origins.get(scenario)
        if origin and origin.load_id == load_id:
            return origin
        found = self.releases.get(load_id)
        return found if found and found.scenario == scenario else None


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


def register_adapter(
    publications: Publications, incarnation: str, recorded: Recorded, event: AdapterRegistered
) -> None:
    """The base model is release 0 of the scenario, too."""
    origin = Release(
        load_id=str(LoadId(incarnation, 0)),
        candidate=adapter_base(event.scenario),
        parent="",
        manifest=event.manifest,
        weights=event.weights,
        seq=recorded.seq,
        time=recorded.time,
        scenario=event.scenario,
    )
    publications.origins[event.scenario] = publications.adapters[event.scenario] = origin
    publications.ended[origin.candidate] = "committed"


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
        lora=event.lora,
    )


def _abort(publications: Publications, recorded: Recorded, event: TransferAborted) -> None:
    if open_ := publications.open:
        _exclude(publications, recorded.seq, event.excluded)
        open_.attempt, open_.members = event.next_attempt, event.members
        open_.attempt_seq, open_.attempt_time = recorded.seq, recorded.time


def _commit(publications: Publications, recorded: Recorded, event: ReleaseCommitted) -> None:
    if not (open_ := publications.open):
        return
    head = Release(
        load_id=open_.load_id,
        candidate=open_.candidate,
        parent=open_.parent,
        manifest=open_.manifest,
        weights=open_.weights,
        seq=recorded.seq,
        time=recorded.time,
        pause=open_.pause,
        scenario=open_.scenario if open_.lora else "",
    )
    publications.releases[open_.load_id] = head
    if head.scenario:
        publications.adapters[head.scenario] = head
    else:
        publications.head = head
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
