"""The `release` family: targets, attempts, commits, refusals, halts.

Knows: what publishers may say. Must not know: who reacts to it.
"""

from __future__ import annotations

from reef_bus.events.shapes import Blob, Event, Evidence, Lora, Member


class ReleaseEvent(Event, frozen=True, kw_only=True):
    """Written by publishers, which decide alike."""

    family = "release"
    id_field = "scenario"
    scenario: str


class TargetPersisted(ReleaseEvent, frozen=True, kw_only=True):
    """Fixes a publication before a byte moves: load id, digest, attempt 1, members. In fenced mode it is the fence.

    `sender` is `trainer`, or `artifact`: then members read the artifact, and nobody sends. So for a rollback, whose
    `request` it answers (old content, a new load id), and for a LoRA adapter, which `lora` describes: it is loaded
    beside what is served, and no engine stops for it.
    """

    publication: str
    candidate: str
    load_id: str
    parent: str
    manifest: str
    weights: Blob
    tensor_bytes: int
    attempt: int
    members: tuple[Member, ...]
    sender: str
    transport: str
    mode: str
    pause: str
    request: int = 0
    lora: Lora | None = None


class PublicationRefused(ReleaseEvent, frozen=True, kw_only=True):
    """The candidate will not be published, and traffic never noticed. With `request` it is that rollback which will
    not, and the fate of its release's candidate is as it was."""

    candidate: str
    reason: str
    detail: str = ""
    request: int = 0


class TransferAborted(ReleaseEvent, frozen=True, kw_only=True):
    """Ends an attempt, excludes the guilty boots, and fixes the next attempt under the same load id."""

    publication: str
    attempt: int
    reason: str
    excluded: tuple[Member, ...]
    next_attempt: int
    members: tuple[Member, ...]
    detail: str = ""


class EngineExcluded(ReleaseEvent, frozen=True, kw_only=True):
    """A boot is out: it must not generate, and it must not join again."""

    engine: str
    boot: str
    reason: str
    request: int = 0


class RequestRefused(ReleaseEvent, frozen=True, kw_only=True):
    """The operator's request at sequence `request` came too late, or asked for what is not there; nothing changed."""

    request: int
    reason: str
    detail: str = ""


class ReleaseCommitted(ReleaseEvent, frozen=True, kw_only=True):
    """The commit point: every member of the attempt proved the target in its own memory. It may serve from here on."""

    publication: str
    attempt: int
    candidate: str
    load_id: str
    parent: str
    manifest: str
    evidence: tuple[Evidence, ...]


class PublicationHalted(ReleaseEvent, frozen=True, kw_only=True):
    """The publication is given up; its load id is never used again, and the incumbent returns by itself."""

    publication: str
    attempt: int
    reason: str
    excluded: tuple[Member, ...]
    detail: str = ""
    request: int = 0
