"""What every event is made of: the base struct, small values, and what surrounds an event.

Knows: names and fields. Must not know: any event, or how it travels (`envelope.py`).
No `gc`: what is frozen and came from JSON is part of no cycle, and whoever reads a log holds a great many of these.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

WHOLE = "_"
"""The subject id of an event that concerns the whole deployment."""


class Blob(msgspec.Struct, frozen=True, gc=False):
    """A content-addressed file beside the log: sha256 (hex) and size in bytes."""

    digest: str
    size: int


class Member(msgspec.Struct, frozen=True, gc=False):
    """One boot of one engine. An address may come back; a boot never does."""

    engine: str
    boot: str


class Evidence(msgspec.Struct, frozen=True, gc=False):
    """What one member had reported when its release was committed: the sequence of the report and its digest."""

    engine: str
    boot: str
    seq: int
    manifest: str


class Span(msgspec.Struct, frozen=True, gc=False):
    """The `count` tokens of an answer from token `first` on, generated in one go by `load_id`: from when the engine had
    folded LOG up to `as_of` until it had folded up to `done_as_of`."""

    load_id: str
    first: int
    count: int
    as_of: int
    done_as_of: int


class Lora(msgspec.Struct, frozen=True, gc=False):
    """What an adapter is beside its tensors: to the weights of each of the `targets` it adds `alpha` / `rank` × B A, A
    having `rank` rows. `targets` are names of linear layers, as PEFT's `target_modules`."""

    rank: int
    alpha: int
    targets: tuple[str, ...]


class Event(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A fact. `family` is the subject family that holds it, `id_field` the field that is the subject's id, and
    `own_chain` says whether each id is chained by itself."""

    family: ClassVar[str] = ""
    id_field: ClassVar[str] = ""
    own_chain: ClassVar[bool] = False
    version: ClassVar[int] = 1

    @property
    def key(self) -> str:
        """The id part of the subject, before encoding."""
        found: str = getattr(self, self.id_field) if self.id_field else WHOLE
        return found

    @property
    def chain(self) -> str:
        """What `prev` chains: the family, or this id of it."""
        return f"{self.family}.{getattr(self, self.id_field)}" if self.own_chain else self.family


class Draft(msgspec.Struct, frozen=True, kw_only=True):
    """A fact on its way. `cause` is the sequence it reacts to; `correlation` a publication, job or record."""

    event: Event
    writer: str
    boot: str
    cause: int = 0
    correlation: str = ""


class Recorded(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A fact as the log holds it. `time` is the broker's timestamp in ns since the epoch; `prev` the sequence that was
    its family's last stored event when it was written (0 for records, which have no such expectation)."""

    seq: int
    time: int
    subject: str
    id: str
    prev: int
    cause: int
    correlation: str
    writer: str
    boot: str
    event: Event

    @property
    def name(self) -> str:
        return type(self.event).__name__
