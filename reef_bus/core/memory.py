"""Memory that engines leave to a colocated job: the fence over all of them, and what one boot has given away.

Knows: what raises and ends that fence, the regions, their order. Must not know: how memory is freed, or who may
generate (`serving.py`).
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from msgspec.structs import replace

from reef_bus.errors import ContractError
from reef_bus.events import (
    CandidateRejected,
    CandidateSelected,
    JobAmbiguous,
    JobDiscarded,
    JobDispatched,
    JobDropped,
    PublicationHalted,
    PublicationRefused,
    Recorded,
    ReleaseCommitted,
)

WEIGHTS, KV_CACHE, CUDA_GRAPH = "weights", "kv_cache", "cuda_graph"
REGIONS = (WEIGHTS, KV_CACHE, CUDA_GRAPH)
"""In the order in which they come back: bytes are received before the rest takes its place."""


# -- the deployment's side


class Handover(msgspec.Struct, frozen=True, kw_only=True):
    """The latest colocated job's fence, up since `seq` until `ended` (0: it is up). Engines owe their memory since
    `time` (ns), as long as no `candidate` of the job was selected; then they wait for its publication."""

    job: str
    seq: int
    time: int
    candidate: str = ""
    ended: int = 0


def up(handover: Handover | None) -> bool:
    """The fence is up: it covers every boot, whenever that joined."""
    return handover is not None and not handover.ended


def lending(handover: Handover | None) -> bool:
    """The job is open, so that what engines have is its own, and nobody may take any of it back."""
    return handover is not None and not handover.ended and not handover.candidate


def evolve(handover: Handover | None, recorded: Recorded) -> Handover | None:
    """The fence after an event that is not void. A publication that was open when the job was dispatched ends nothing:
    engines owe their memory from its end on."""
    event = recorded.event
    if isinstance(event, JobDispatched):
        return Handover(job=event.job, seq=recorded.seq, time=recorded.time) if event.colocated else handover
    if handover is None or handover.ended:
        return handover
    if isinstance(event, CandidateSelected):
        return replace(handover, candidate=event.candidate)
    if isinstance(event, ReleaseCommitted | PublicationHalted) and not handover.candidate:
        return replace(handover, time=recorded.time)
    refused = isinstance(event, PublicationRefused) and not event.request and event.candidate == handover.candidate
    return replace(handover, ended=recorded.seq) if refused or isinstance(event, ENDING) else handover


ENDING = (
    *(ReleaseCommitted, PublicationHalted, CandidateRejected),
    *(JobDropped, JobDiscarded, JobAmbiguous),
)


def again(handover: Handover | None, recorded: Recorded, job: str) -> Handover | None:
    """A person has an ambiguous job trained once more, and it needs the memory once more; whoever asks after that asks
    for nothing new."""
    if handover is None or handover.job != job or not handover.ended:
        return handover
    return Handover(job=job, seq=recorded.seq, time=recorded.time)


# -- one boot's side


class Ledger(msgspec.Struct, frozen=True, kw_only=True):
    """What one boot's engine has given away of the `regions` that it can give: those that are `out`. After an operation
    that failed it is `uncertain` what it holds (why): nothing more is asked of it, and nothing of it may be used."""

    regions: tuple[str, ...] = ()
    out: tuple[str, ...] = ()
    uncertain: str = ""

    def whole(self) -> bool:
        return not self.out and not self.uncertain


def to_release(ledger: Ledger, regions: Iterable[str]) -> tuple[str, ...]:
    """Those that are still to be released: what was acknowledged is not asked for again."""
    return tuple(region for region in _known(ledger, regions) if region not in ledger.out)


def to_resume(ledger: Ledger, regions: Iterable[str]) -> tuple[str, ...]:
    """Those that are out: nothing else is resumed."""
    return tuple(region for region in _known(ledger, regions) if region in ledger.out)


def released(ledger: Ledger, regions: Iterable[str]) -> Ledger:
    return replace(ledger, out=ordered({*ledger.out, *regions}))


def resumed(ledger: Ledger, regions: Iterable[str]) -> Ledger:
    return replace(ledger, out=ordered(set(ledger.out) - set(regions)))


def failed(ledger: Ledger, why: str) -> Ledger:
    """Nobody knows what became of the operation; the first failure stays."""
    return replace(ledger, uncertain=ledger.uncertain or why)


def ordered(regions: Iterable[str]) -> tuple[str, ...]:
    found = set(regions)
    return tuple(region for region in REGIONS if region in found)


def _known(ledger: Ledger, regions: Iterable[str]) -> tuple[str, ...]:
    asked = tuple(regions)
    if unknown := [region for region in asked if region not in ledger.regions]:
        raise ContractError(f"found memory region {unknown[0]!r}; this engine gives: {list(ledger.regions)}")
    if ledger.uncertain:
        raise ContractError(f"nothing is asked of an engine whose memory is uncertain: {ledger.uncertain}")
    return ordered(asked)
