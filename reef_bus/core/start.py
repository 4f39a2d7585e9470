"""What a log begins with when it does not begin with nothing: the state that its predecessor had, without its boots.

Knows: the trainer's and the publishers' side of the state. Must not know: where a start is kept, or who rolls a log.
Its shape is a wire format of its own: the world may be rebuilt, a start that was written stays readable.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from reef_bus.core.ids import BASE
from reef_bus.core.publication import Publications, Release
from reef_bus.core.records import NOTHING, Consumed
from reef_bus.core.requests import Request
from reef_bus.core.supervision import Component
from reef_bus.core.training import Adapter, Candidate, Training
from reef_bus.errors import ContractError
from reef_bus.events import Blob, Lora

FORMAT, WITH_ADAPTERS, PER_SCENARIO = 1, 2, 3
"""Whoever reads only the first would take adapters for whole models; whoever reads only the second, what is consumed of
one scenario for what is consumed of all. It is read, and written no more."""


class KnownCandidate(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A candidate that is a release's content, may become one, or lies in the base chain of such a one."""

    id: str
    base: str
    step: int
    weights: Blob
    optimizer: Blob | None
    manifest: str
    tensor_bytes: int
    seq: int
    selected: int
    scenario: str = ""


class KnownRelease(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A committed release: its load id names this digest for ever."""

    load_id: str
    candidate: str
    parent: str
    manifest: str
    weights: Blob
    seq: int
    time: int
    scenario: str = ""


class KnownAdapter(msgspec.Struct, frozen=True, kw_only=True):
    """A scenario that trains an adapter; `origin` is its release 0, `head` its head's load id."""

    scenario: str
    lora: Lora
    registered: int
    base: str
    dispatched: int
    origin: KnownRelease
    head: str


class LastBatch(msgspec.Struct, frozen=True, kw_only=True):
    """A scenario's last batch, and what was consumed of the scenario with it, as `Consumed`: that is for the audit
    alone."""

    batch: Blob
    floor: int
    taken: tuple[int, ...]


class Start(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The predecessor's state after its event `seq`, `id`. No boot, job or publication is in it: engines and trainer
    join anew. `ended` says how candidates ended; `sequence` is the last persisted target's. Other sequences are of the
    predecessor, and smaller than every one of the log that begins here. `last_batches` reads `last_batch`, `floor` and
    `taken`, which are the whole model's, and in format 2 all adapters'; and `batches`, which are the adapters'."""

    format: int
    seq: int
    id: str
    scenario: str
    model: str
    registered: int
    closed: int
    dispatched: int
    last_batch: Blob | None
    floor: int
    taken: tuple[int, ...]
    base: str
    candidates: tuple[KnownCandidate, ...]
    selected: tuple[str, ...]
    head: str
    releases: tuple[KnownRelease, ...]
    sequence: int
    ended: dict[str, str]
    ended_seq: int
    adapters: tuple[KnownAdapter, ...] = ()
    batches: dict[str, LastBatch] = {}


def last_batches(start: Start) -> dict[str, LastBatch]:
    """By scenario; empty: the whole model. Before format 3 one batch spoke of all adapters' records at once: of those
    whose jobs were earlier, and of those that had none, whose answers up to its floor were given up."""
    if start.last_batch is None:
        return start.batches
    last = LastBatch(batch=start.last_batch, floor=start.floor, taken=start.taken)
    return dict.fromkeys([each.scenario for each in start.adapters] or [""], last)


def encode_start(start: Start) -> bytes:
    """The blob: equal starts give equal bytes."""
    return msgspec.msgpack.encode(start, order="deterministic")


def decode_start(data: bytes) -> Start:
    """Raises ContractError for what this version cannot read whole."""
    try:
        found = msgspec.msgpack.decode(data, type=Start)
    except msgspec.DecodeError as error:
        raise ContractError(f"a blob of {len(data)} bytes does not hold the start of a log: {error}") from error
    return readable(found)


def readable(start: Start) -> Start:
    """The same. Raises ContractError for a format that this version does not know."""
    if not FORMAT <= start.format <= PER_SCENARIO:
        raise ContractError(
            f"the log's start has format {start.format}, this version reads {FORMAT} to {PER_SCENARIO}: upgrade this "
            "consumer first"
        )
    return start


def unrest(
    training: Training, publications: Publications, requests: Mapping[int, Request], components: Mapping[str, Component]
) -> str:
    """What is open, and who ends it; empty when the log is quiet."""
    if training.job:
        return f"job {training.job.id} is open: the trainer has to finish it"
    if publications.open:
        members = ", ".join(member.engine for member in publications.open.members)
        return f"publication {publications.open.load_id} is open: {members} and a publisher have to end it"
    for asked in requests.values():
        return f"request {asked.seq} ({asked.name} of {asked.actor}) has no answer yet: its owner has to give one"
    for name, component in components.items():
        if component.state == "unconfirmed":
            return f"the clean-up of {name} is unconfirmed: end what it left, then `reef-bus resume {name} --why …`"
    return ""


def compact(
    seq: int,
    id_: str,
    training: Training,
    publications: Publications,
    consumed: Mapping[str, Consumed] = {},
) -> Start:
    """The state after event `seq` as a start; `consumed` is what the last dispatched batches say, by scenario.

    An open job is over: its records stay consumed, no candidate comes of it. An open publication is halted: its load id
    is never used again, its candidate is not published.
    """
    ended = dict(publications.ended)
    if publications.open and not publications.open.request:
        ended[publications.open.candidate] = "halted"
    kept = _kept(training, publications, ended)
    head = publications.head
    batches = {of: _batch(blob, consumed.get(of, NOTHING)) for of, blob in training.batches.items()}
    whole = batches.pop("", None)
    return Start(
        format=PER_SCENARIO if training.adapters else FORMAT,
        seq=seq,
        id=id_,
        scenario=training.scenario,
        model=training.model,
        registered=training.registered,
        closed=seq if training.job else training.closed,
        dispatched=training.dispatched,
        last_batch=whole.batch if whole else None,
        floor=whole.floor if whole else 0,
        taken=whole.taken if whole else (),
        base=training.base,
        candidates=tuple(_candidate(found) for found in training.candidates.values() if found.id in kept),
        selected=tuple(id_ for id_ in training.selected if id_ in kept),
        head=head.load_id if head else "",
        releases=tuple(map(_release, publications.releases.values())),
        sequence=publications.sequence,
        ended={id_: how for id_, how in ended.items() if id_ in kept},
        ended_seq=seq if publications.open else publications.ended_seq,
        adapters=tuple(_adapter(found, publications) for found in training.adapters.values()),
        batches=batches,
    )


def _batch(blob: Blob, consumed: Consumed) -> LastBatch:
    return LastBatch(batch=blob, floor=consumed.floor, taken=tuple(sorted(consumed.taken)))


def _kept(training: Training, publications: Publications, ended: dict[str, str]) -> set[str]:
    """Contents of releases, candidates whose turn may come, the trainer's base, and whatever those were trained from.
    What was rejected, refused or halted decides nothing any more."""
    waiting = {id_ for id_ in training.selected if id_ not in ended}
    kept: set[str] = set()
    releases = (*publications.releases.values(), *publications.origins.values())
    bases = {training.base, *(adapter.base for adapter in training.adapters.values())}
    for candidate in {release.candidate for release in releases} | waiting | bases:
        while candidate in training.candidates and candidate not in kept:
            kept.add(candidate)
            candidate = training.candidates[candidate].base
    return kept


def _candidate(found: Candidate) -> KnownCandidate:
    return KnownCandidate(
        id=found.id,
        base=found.base,
        step=found.step,
        weights=found.weights,
        optimizer=found.optimizer,
        manifest=found.manifest,
        tensor_bytes=found.tensor_bytes,
        seq=found.seq,
        selected=found.selected,
        scenario=found.scenario,
    )


def _adapter(found: Adapter, publications: Publications) -> KnownAdapter:
    return KnownAdapter(
        scenario=found.scenario,
        lora=found.lora,
        registered=found.registered,
        base=found.base,
        dispatched=found.dispatched,
        origin=_release(publications.origins[found.scenario]),
        head=publications.adapters[found.scenario].load_id,
    )


def _release(found: Release) -> KnownRelease:
    return KnownRelease(
        load_id=found.load_id,
        candidate=found.candidate,
        parent=found.parent,
        manifest=found.manifest,
        weights=found.weights,
        seq=found.seq,
        time=found.time,
        scenario=found.scenario,
    )


def begin(training: Training, publications: Publications, start: Start) -> None:
    """Fill the state of a log that holds nothing yet."""
    training.scenario, training.model, training.registered = start.scenario, start.model, start.registered
    training.closed, training.dispatched = start.closed, start.dispatched
    training.batches = {scenario: last.batch for scenario, last in last_batches(start).items()}
    training.base, training.selected = start.base, list(start.selected)
    for candidate in start.candidates:
        training.candidates[candidate.id] = Candidate(**msgspec.structs.asdict(candidate))
    for release in start.releases:
        publications.releases[release.load_id] = Release(**msgspec.structs.asdict(release))
    publications.head = publications.releases.get(start.head)
    for adapter in start.adapters:
        _begin_adapter(training, publications, adapter)
    publications.sequence, publications.ended_seq = start.sequence, start.ended_seq
    publications.ended = dict(start.ended)


def _begin_adapter(training: Training, publications: Publications, known: KnownAdapter) -> None:
    training.adapters[known.scenario] = Adapter(
        scenario=known.scenario,
        lora=known.lora,
        registered=known.registered,
        base=known.base,
        dispatched=known.dispatched,
    )
    origin = Release(**msgspec.structs.asdict(known.origin))
    publications.origins[known.scenario] = origin
    head = publications.release(known.scenario, known.head)
    assert head is not None  # `why_not` has looked
    publications.adapters[known.scenario] = head


def why_not(start: Start) -> str:
    """What in it contradicts itself, or an empty string: who began with that would fail much later."""
    known, loads = {each.id for each in start.candidates}, {each.load_id for each in start.releases}
    named = {each.candidate for each in start.releases} | set(start.selected) | set(start.ended)
    if bool(start.scenario) != (BASE in known) or bool(start.scenario) != (start.head in loads):
        return f"scenario {start.scenario!r} with head {start.head!r} and {len(known)} candidates"
    for each in start.adapters:
        named |= {each.base, each.origin.candidate}
        if each.head not in loads | {each.origin.load_id}:
            return f"the head {each.head} of {each.scenario} is no release that it holds"
    missing = sorted(named - known)
    return f"it names candidates that it does not hold: {missing[:4]}" if missing else ""
