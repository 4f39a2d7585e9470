"""What the ledger keeps: raw facts as they came, beside the fold, so that its own checks are not their own judge.

Knows: the shapes of what was said. Must not know: the world, or what is right.
"""

from __future__ import annotations

import msgspec

from reef_bus.core.ids import BASE
from reef_bus.core.invariants.findings import Findings
from reef_bus.core.invariants.holdings import Holdings
from reef_bus.core.invariants.lending import Lending
from reef_bus.core.invariants.records import Answers, Batches
from reef_bus.core.records import Consumed
from reef_bus.core.start import KnownAdapter, Start, last_batches
from reef_bus.events import (
    Blob,
    EngineStaged,
    Member,
    ReceiverFailed,
    ReceiverVerified,
    RollbackRequested,
    TargetPersisted,
)


class Content(msgspec.Struct, frozen=True, gc=False):
    """What a candidate was trained from, and what it must hash to; of whose adapter it is, if it is none of the base
    model."""

    base: str
    manifest: str
    weights: Blob
    scenario: str = ""


class Said(msgspec.Struct, frozen=True, gc=False):
    """A member's first report on an attempt."""

    seq: int
    event: EngineStaged | ReceiverVerified | ReceiverFailed


class Open(msgspec.Struct, frozen=True, gc=False):
    """The open publication, its current attempt and that attempt's membership."""

    target: TargetPersisted
    attempt: int
    members: tuple[Member, ...]


Word = tuple[str, str, int]
"""(boot, publication, attempt): whose word, and on what."""


class Ledger(msgspec.Struct, kw_only=True):
    """What the events said so far. `ended` says how a candidate ended; `held` is what each boot last proved since its
    last fence; `stops` are, by boot, the proofs of what it had not held, for which nothing may be in hand, and the
    fences raised for the attempt that was then open: a stale one, stored late, proves no drain. `head` is the base
    model's, `tips` are the contents of adapters' heads by scenario, `origins` their releases 0: load id and content."""

    findings: Findings
    answers: Answers
    batches: Batches | None
    incarnation: str = ""
    sequence: int = 0
    head: str = ""
    head_candidate: str = ""
    tips: dict[str, str] = {}
    origins: dict[str, tuple[str, str]] = {}
    holdings: Holdings = msgspec.field(default_factory=Holdings)
    digests: dict[str, str] = {}
    contents: dict[str, Content] = {}
    selected: dict[str, int] = {}
    ended: dict[str, str] = {}
    refused: dict[str, int] = {}
    targeted: dict[str, int] = {}
    releases: dict[str, str] = {}
    rollbacks: dict[int, RollbackRequested] = {}
    publications: dict[str, str] = {}
    open: Open | None = None
    job: str = ""
    reports: dict[Word, Said] = {}
    misproved: dict[Word, str] = {}
    fences: dict[Word, int] = {}
    held: dict[str, tuple[str, str]] = {}
    stops: dict[str, list[int]] = {}
    engines: set[str] = set()
    jobs: int = 0
    commits: int = 0
    proofs: int = 0
    lending: Lending = msgspec.field(default_factory=Lending)


def seed(ledger: Ledger, start: Start) -> None:
    """Take up what the predecessor's log had shown, which is audited with that log."""
    ledger.sequence, ledger.head, ledger.ended = start.sequence, start.head, dict(start.ended)
    ledger.selected = dict.fromkeys((BASE, *start.selected), start.seq) if start.scenario else {}
    for candidate in start.candidates:
        of = candidate.scenario
        ledger.contents[candidate.id] = Content(candidate.base, candidate.manifest, candidate.weights, of)
    for release in start.releases:
        ledger.digests[release.load_id], ledger.releases[release.load_id] = release.manifest, release.candidate
        if release.scenario:
            ledger.holdings.targets[release.load_id] = release.scenario, release.manifest
        if release.load_id == start.head:
            ledger.head_candidate = release.candidate
    for adapter in start.adapters:
        _seed_adapter(ledger, start, adapter)
    ledger.answers.begin = start.seq
    ledger.answers.before = {
        scenario: Consumed(last.floor, frozenset(last.taken)) for scenario, last in last_batches(start).items()
    }


def _seed_adapter(ledger: Ledger, start: Start, known: KnownAdapter) -> None:
    scenario, origin = known.scenario, known.origin.candidate
    ledger.origins[scenario], ledger.selected[origin] = (known.origin.load_id, origin), start.seq
    ledger.tips[scenario] = origin if known.head == known.origin.load_id else ledger.releases[known.head]
    ledger.holdings.loras[scenario], ledger.holdings.heads[scenario] = known.lora, [(start.seq, known.head)]
