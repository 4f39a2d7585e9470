"""What became of a candidate, for whoever made it: committed, refused or halted, by whose evidence or for which cause.

Knows: the world, and those words of the log that the world does not keep. Must not know: who asks.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from reef_bus.core.ids import derived
from reef_bus.core.world import World
from reef_bus.events import (
    CandidateRejected,
    Event,
    Evidence,
    JobDiscarded,
    JobDropped,
    PublicationHalted,
    PublicationRefused,
    ReleaseCommitted,
    TargetPersisted,
)


class Committed(NamedTuple):
    """It may serve, as release `load_id`. `evidence`: what each engine proved; empty for release 0, and for what was
    committed before the log was rolled."""

    step: int
    candidate: str
    load_id: str
    evidence: tuple[Evidence, ...]


class Refused(NamedTuple):
    """It will not be published, and nothing was paused for it. `cause`: rejected, discarded, superseded, base_lost,
    transport, mode, pause."""

    step: int
    candidate: str
    cause: str
    detail: str


class Halted(NamedTuple):
    """Its publication was given up, and what served before serves on. `cause`: rollback, operator, or why its last
    attempt ended."""

    step: int
    candidate: str
    cause: str
    detail: str


Outcome = Committed | Refused | Halted


class Endings(msgspec.Struct):
    """Evidence by load id, causes by candidate or job, candidates by publication, the first release by candidate. Of a
    rollback nothing is taken down but its evidence: its candidate had been released before, if not on this log."""

    evidence: dict[str, tuple[Evidence, ...]] = {}
    causes: dict[str, tuple[str, str]] = {}
    targets: dict[str, str] = {}
    released: dict[str, str] = {}


def note(endings: Endings, event: Event) -> None:
    """Take down what an event says of an end. Void or not: whether there was an end is asked of the world."""
    match event:
        case ReleaseCommitted(publication=publication, load_id=load_id, candidate=candidate, evidence=evidence):
            endings.evidence.setdefault(load_id, evidence)
            if publication in endings.targets:
                endings.released.setdefault(candidate, load_id)
        case TargetPersisted(publication=publication, candidate=candidate, request=0):
            endings.targets.setdefault(publication, candidate)
        case PublicationHalted(publication=publication) if publication in endings.targets:
            endings.causes.setdefault(endings.targets[publication], (event.reason, event.detail))
        case PublicationRefused(candidate=candidate, request=0):  # a rollback may name none
            endings.causes.setdefault(candidate, (event.reason, event.detail))
        case CandidateRejected(candidate=candidate):
            endings.causes.setdefault(candidate, ("rejected", f"by {event.selector}: {event.why}"))
        case JobDiscarded(job=job):
            _end_job(endings, job, "discarded", f"as asked for at {event.request}")
        case JobDropped(job=job):
            _end_job(endings, job, event.reason, event.detail)


def _end_job(endings: Endings, job: str, cause: str, detail: str) -> None:
    for name in (job, derived("cand", job)):
        endings.causes.setdefault(name, (cause, detail))


def outcome(world: World, endings: Endings, candidate: str) -> Outcome | None:
    """What became of a candidate that the world knows; None while that is open."""
    found, job = world.training.candidates[candidate], world.training.job
    ended = world.publications.ended.get(candidate, "")
    if ended == "committed":
        load_id = _load_id(world, endings, candidate)
        return Committed(found.step, candidate, load_id, endings.evidence.get(load_id, ()))
    cause, detail = endings.causes.get(candidate, (ended, ""))
    if ended == "halted":
        return Halted(found.step, candidate, cause, detail)
    undecided = job is not None and job.candidate == candidate
    if ended or not (found.selected or undecided):
        return Refused(found.step, candidate, cause, detail)
    return None


def _load_id(world: World, endings: Endings, candidate: str) -> str:
    """The first release of a candidate that was committed: as noted, or found among all of them where that word was
    void, or said before this log began."""
    releases, noted = world.publications.releases, endings.released.get(candidate, "")
    if noted in releases and releases[noted].candidate == candidate:
        return noted
    return next(release.load_id for release in releases.values() if release.candidate == candidate)
