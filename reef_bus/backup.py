"""Backups: the whole history and every blob that it names, in a folder; and a log that goes on from one.

Knows: what a history names, how a backup is laid out, in which order it is written and read. Must not know: terminals.
A backup is complete when its manifest is there. A restored log is there when its first event is.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from reef_bus.artifacts import ArtifactStore, place
from reef_bus.audit import History, read_export, read_history, write_export
from reef_bus.config import Config
from reef_bus.core.retention import blobs as blobs_of
from reef_bus.core.retention import retention
from reef_bus.core.start import Start, encode_start, last_batches
from reef_bus.core.void import RULES
from reef_bus.errors import ContractError, Rejected, TransferError
from reef_bus.events import AdapterRegistered, Blob, CandidateReady, LogOpened, Recorded, ScenarioRegistered
from reef_bus.jetstream import JetStreamJournal
from reef_bus.journal import LOG, RECORDS
from reef_bus.roll import folded, open_from, sha256, start_after, sync
from reef_bus.runner import blocking
from reef_bus.stored import chain_at
from reef_bus.sweep import nothing_is_removed
from reef_bus.topology import stream_name

FORMAT = 1
MANIFEST, BLOBS = "manifest.json", "blobs"
REPORT_S = 1.0

Say = Callable[[str], None]


class Extent(msgspec.Struct, frozen=True, kw_only=True):
    """What a backup holds of one stream: its first and last sequence (0: nothing), and its last event's id."""

    first: int
    last: int
    id: str


class Inventory(msgspec.Struct, frozen=True, kw_only=True):
    """The manifest of a backup. `files` are digests by name, `blobs` the names of what lies under `blobs`."""

    format: int
    deployment: str
    incarnation: str
    config: dict[str, Any]
    streams: dict[str, Extent]
    history: str
    files: dict[str, str]
    blobs: tuple[str, ...]


class Backup(NamedTuple):
    """A backup that was read and checked."""

    folder: Path
    inventory: Inventory
    history: History

    def where(self, digest: str) -> str:
        return str(place(self.folder / BLOBS, digest))

    def local(self, digest: str) -> AbstractContextManager[Path]:
        """A blob of it, as `ArtifactStore.local`: the folder need not be writable."""
        return nullcontext(place(self.folder / BLOBS, digest))


# -- what a history names


def named(history: History) -> set[str]:
    """The digests of all blobs that a history stands on."""
    found = {digest for recorded in history.log + history.records for digest in _blobs(recorded)}
    return found | set(_of_start(history.start)) if history.start else found


def _blobs(recorded: Recorded) -> Iterator[str]:
    event = recorded.event
    values = [getattr(event, field) for field in event.__struct_fields__]
    yield from (value.digest for value in values if isinstance(value, Blob))
    if isinstance(event, ScenarioRegistered | AdapterRegistered | CandidateReady):  # others may speak of other bytes
        yield event.manifest


def _of_start(start: Start) -> Iterator[str]:
    for release in (*start.releases, *(adapter.origin for adapter in start.adapters)):
        yield from (release.weights.digest, release.manifest)
    for candidate in start.candidates:
        yield from (candidate.weights.digest, candidate.manifest)
        yield from [candidate.optimizer.digest] if candidate.optimizer else []
    yield from (last.batch.digest for last in last_batches(start).values())


# -- backup


async def backup(journal: JetStreamJournal, config: Config, store: ArtifactStore, folder: Path, say: Say) -> Inventory:
    """Bring `folder` to what the deployment holds now; it may run meanwhile. Blobs that are there already are checked,
    not copied.

    Raises ContractError, naming it, for a blob that is missing or damaged: the manifest of the last backup stays then.
    """
    async with nothing_is_removed(config):
        history = await read_history(journal, store)
        if not history.log:
            raise Rejected("there is nothing to back up: the log holds no event")
        blobs = await blocking(_to_keep, history, config, store)
        new = await blocking(_keep, blobs, store, ArtifactStore(folder / BLOBS), say)
        say(f"{len(blobs)} blobs, {new} of them new")
        return await blocking(_write, folder, config, history, blobs)


def _to_keep(history: History, config: Config, store: ArtifactStore) -> list[str]:
    """All that the history stands on, but for what was removed because no release within reach needs it."""
    spare = _spare(history, config.artifacts.keep)
    removed = {digest for digest in spare if not store.has(digest)}
    return sorted((named(history) - removed) | _links(history, spare, store) | _archives(history, store))


def _spare(history: History, keep: int) -> frozenset[str]:
    if not keep:
        return frozenset()
    found = retention(folded(history), keep)
    return blobs_of(found.spare) - blobs_of(found.needed)


def _links(history: History, spare: frozenset[str], store: ArtifactStore) -> set[str]:
    """What the weights that are kept as chains stand on; of spare ones, what is still there: a sweep that was
    interrupted may have left the chain, and nothing under it."""
    found: set[str] = set()
    for digest in sorted(_weights(history)):
        try:
            chain = chain_at(store, digest)
        except TransferError as error:
            raise ContractError(f"a chain of deltas is damaged: {error}") from error
        stands = chain.blobs if chain else frozenset()
        found |= {each for each in stands if digest not in spare or store.has(each)}
    return found


def _weights(history: History) -> set[str]:
    made = (r.event.weights.digest for r in history.log if isinstance(r.event, CandidateReady))
    started = (candidate.weights.digest for candidate in history.start.candidates) if history.start else ()
    return {*made, *started}


def _archives(history: History, store: ArtifactStore) -> set[str]:
    """The log's predecessor, if its archive is in the store: nothing stands on it, and nothing of it shall be lost."""
    opened = history.log[0].event
    digest = opened.predecessor.partition("@")[2] if isinstance(opened, LogOpened) else ""
    return {digest} if digest and store.has(digest) else set()


def _keep(digests: Iterable[str], source: ArtifactStore | Backup, target: ArtifactStore, say: Say) -> int:
    """Have every blob in `target`, each compared with its name. Returns how many were not there."""
    count, new, said = 0, 0, time.monotonic()
    for digest in digests:
        if not target.sound(digest):
            with source.local(digest) as path:
                new += target.keep(digest, path, source.where(digest))
        count += 1
        if time.monotonic() > said + REPORT_S:
            said = time.monotonic()
            say(f"{count} blobs are in place")
    return new


def _write(folder: Path, config: Config, history: History, blobs: list[str]) -> Inventory:
    """The history under a name of its own, then the manifest in one step, then away with the history before."""
    draft = folder / "history.partial"
    write_export(history, draft)
    digest = sha256(draft)
    name = f"history-{digest[:16]}.jsonl"
    os.replace(draft, folder / name)
    opened = history.log[0].event
    inventory = Inventory(
        format=FORMAT,
        deployment=config.deployment,
        incarnation=opened.incarnation if isinstance(opened, LogOpened) else "",
        config=msgspec.to_builtins(config),
        streams={LOG: _extent(history.log), RECORDS: _extent(history.records)},
        history=name,
        files={name: digest},
        blobs=tuple(blobs),
    )
    partial = folder / (MANIFEST + ".partial")
    partial.write_bytes(msgspec.json.format(msgspec.json.encode(inventory), indent=1))
    for path in (folder / name, partial, folder):
        sync(path)
    os.replace(partial, folder / MANIFEST)
    sync(folder)
    for old in folder.glob("history-*.jsonl"):
        if old.name != name:
            old.unlink()
    return inventory


def _extent(events: tuple[Recorded, ...]) -> Extent:
    return (
        Extent(first=events[0].seq, last=events[-1].seq, id=events[-1].id) if events else Extent(first=1, last=0, id="")
    )


# -- restore


def read_backup(folder: Path, say: Say) -> Backup:
    """The backup, every file and blob of it compared with its digest, its log folded. Raises Rejected when there is
    none; ContractError, naming the first bad file, when it is not whole."""
    path = folder / MANIFEST
    try:
        inventory = msgspec.json.decode(path.read_bytes(), type=Inventory)
    except FileNotFoundError as error:
        raise Rejected(
            f"there is no backup in {folder}: no {MANIFEST}; `reef-bus backup {folder}` makes one"
        ) from error
    except msgspec.DecodeError as error:
        raise ContractError(f"{path} is damaged: {error}") from error
    if inventory.format != FORMAT:
        raise ContractError(f"{path} has format {inventory.format}, this version reads {FORMAT}: use a newer one")
    for name, digest in inventory.files.items():
        _check(folder / name, digest)
    said = time.monotonic()
    for count, digest in enumerate(inventory.blobs, 1):
        _check(place(folder / BLOBS, digest), digest)
        if time.monotonic() > said + REPORT_S:
            said = time.monotonic()
            say(f"{count} of {len(inventory.blobs)} blobs are as they must be")
    history = read_export(folder / inventory.history)
    _check_history(folder, inventory, history)
    return Backup(folder, inventory, history)


def _check(path: Path, digest: str) -> None:
    if not path.is_file():
        raise ContractError(f"{path} is missing: this backup is not whole; nothing was restored")
    if (found := sha256(path)) != digest:
        raise ContractError(f"{path} is damaged: its bytes hash to {found}, expected {digest}; nothing was restored")


def _check_history(folder: Path, inventory: Inventory, history: History) -> None:
    found = {LOG: _extent(history.log), RECORDS: _extent(history.records)}
    if found != inventory.streams:
        raise ContractError(f"{folder / inventory.history} holds {found}, its manifest says {inventory.streams}")
    if missing := named(history) - set(inventory.blobs) - _spare(history, _kept(inventory)):
        raise ContractError(f"{folder / MANIFEST} lacks blobs that its history names: {sorted(missing)[:4]}")
    folded(history)


def _kept(inventory: Inventory) -> int:
    """`artifacts.keep`, as it was; backups from before it kept everything."""
    keep = inventory.config.get("artifacts", {}).get("keep", 0)
    return keep if isinstance(keep, int) else 0


async def restore(
    journal: JetStreamJournal, config: Config, store: ArtifactStore, found: Backup, incarnation: str, say: Say
) -> LogOpened:
    """Have an empty deployment go on from the backup, under a new incarnation; or finish an interrupted restore.

    Raises Rejected when the deployment is not empty. Nobody may run meanwhile.
    """
    if config.deployment != found.inventory.deployment:
        was = f"the backup is of deployment {found.inventory.deployment!r}, this one is called {config.deployment!r}"
        raise Rejected(f"{was}; every event names its deployment, so restore under the same name")
    if done := await _done(journal, config, found.inventory.streams[LOG]):
        return done
    await _make_room(journal, config, found)
    new = await blocking(_keep, found.inventory.blobs, found, store, say)
    say(f"{len(found.inventory.blobs)} blobs, {new} of them new")
    opened = await blocking(_opening, journal.deployment, store, found, incarnation)
    streams = found.inventory.streams
    begins = {LOG: opened.predecessor_seq + 1, RECORDS: streams[RECORDS].first}
    await journal.apply(config.nats.replicas, begins)
    await _put_back(journal, found.history.records, say)
    await open_from(journal, opened)
    return opened


async def _done(journal: JetStreamJournal, config: Config, log: Extent) -> LogOpened | None:
    """The first and only event of a log that goes on from this backup: an earlier call had come to its end."""
    if (await journal.plan(config.nats.replicas))[stream_name(journal.deployment, LOG)] == ["missing"]:
        return None
    stored = await journal.read(LOG, log.last + 1) if await journal.head(LOG) == log.last + 1 else None
    event = stored.event if stored else None
    return event if isinstance(event, LogOpened) and event.predecessor_id == log.id else None


async def _make_room(journal: JetStreamJournal, config: Config, found: Backup) -> None:
    """The log must hold nothing; RECORDS nothing but what an interrupted restore of this backup had put there. Empty
    streams that begin elsewhere are in the way, and nothing is lost with them."""
    drift = await journal.plan(config.nats.replicas)
    begins = {LOG: found.inventory.streams[LOG].last + 1, RECORDS: found.inventory.streams[RECORDS].first}
    for stream in (LOG, RECORDS):
        if drift[stream_name(journal.deployment, stream)] == ["missing"]:
            continue
        begin, last = await journal.extent(stream)
        if last < begin:
            if begin != begins[stream]:
                await journal.drop(stream)
        elif stream == LOG or not await _ours(journal, last, found.history.records):
            raise Rejected(
                f"{stream} of {journal.deployment!r} holds events {begin} to {last}: a backup is restored into an "
                "empty deployment only; choose another folder with --state, or another server"
            )


async def _ours(journal: JetStreamJournal, last: int, records: tuple[Recorded, ...]) -> bool:
    stored = await journal.read(RECORDS, last)
    return stored is not None and any(each.seq == last and each.id == stored.id for each in records)


def _opening(deployment: str, store: ArtifactStore, found: Backup, incarnation: str) -> LogOpened:
    world = folded(found.history)
    archive = store.put_file(found.folder / found.inventory.history)
    return LogOpened(
        incarnation=incarnation,
        rules=RULES,
        start=store.put(encode_start(start_after(world, store))),
        predecessor=f"{stream_name(deployment, LOG)}@{archive.digest}",
        predecessor_seq=world.seq,
        predecessor_id=world.last_id,
    )


async def _put_back(journal: JetStreamJournal, records: tuple[Recorded, ...], say: Say) -> None:
    done, said = (await journal.extent(RECORDS))[1], time.monotonic()
    for recorded in records:
        if recorded.seq <= done:
            continue
        await journal.put_back(RECORDS, recorded)
        if time.monotonic() > said + REPORT_S:
            said = time.monotonic()
            say(f"record {recorded.seq} of {records[-1].seq} is back")
