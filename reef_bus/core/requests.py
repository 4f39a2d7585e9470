"""What people asked for: a request is pending until the owner of what it is about has answered it with an event.

Knows: the `operator` family, and which events answer. Must not know: whether a request can be met (`reactions`).
"""

from __future__ import annotations

import msgspec

from reef_bus.events import (
    EngineRetireRequested,
    Event,
    JobDiscardRequested,
    JobRestoreRequested,
    PromotionRequested,
    PublicationHaltRequested,
    Recorded,
    RecoveryResumeRequested,
    RollbackRequested,
)


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One request. `about` is what it names: a release, candidate, job, boot, publication or component. `refused` says
    why it can never be met any more: it was dead when it arrived, or was overtaken."""

    seq: int
    name: str
    actor: str
    why: str
    head: str
    about: str
    scenario: str = ""
    refused: str = ""


def request(recorded: Recorded) -> Request:
    """The request that an event of the `operator` family is."""
    event = recorded.event
    match event:
        case RollbackRequested(release=about):
            pass
        case PromotionRequested(candidate=about):
            pass
        case JobDiscardRequested(job=about) | JobRestoreRequested(job=about):
            pass
        case EngineRetireRequested(boot=about):
            pass
        case PublicationHaltRequested(publication=about):
            pass
        case RecoveryResumeRequested(component=about):
            pass
        case _:
            raise AssertionError(recorded.name)
    return Request(
        seq=recorded.seq,
        name=recorded.name,
        actor=event.actor,
        why=event.why,
        head=event.head,
        about=about,
        scenario=getattr(event, "scenario", ""),
    )


def answered(pending: dict[int, Request], event: Event) -> None:
    """Whatever names a request answers it."""
    pending.pop(getattr(event, "request", 0), None)


def wanted(pending: dict[int, Request], kind: type[Event], about: str | None = None) -> Request | None:
    """The oldest request of a kind (about one thing) that can be met."""
    found = (r for r in pending.values() if r.name == kind.__name__ and not r.refused and about in (None, r.about))
    return next(found, None)
