"""Rolls a full log: archive it, read the archive back, then one that goes on from its state takes its place.

Knows: the order of the steps, and how far an interrupted roll had come. Must not know: terminals, or whether anybody
still runs: its caller has made sure that nobody does.
What is done at any moment can be read from the streams and the plan, so the same call, repeated, completes a roll.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Literal

import msgspec

from reef_bus.artifacts import ArtifactStore, folder_of
from reef_bus.audit import History, read_export, read_history, write_export
from reef_bus.core.records import Consumed
from reef_bus.core.start import Start, compact, encode_start, unrest
from reef_bus.core.void import RULES
from reef_bus.core.world import World, fold
from reef_bus.errors import Conflict, ContractError, Rejected
from reef_bus.events import Blob, Draft, LogOpened
from reef_bus.jetstream import JetStreamJournal
from reef_bus.journal import LOG
from reef_bus.runner import blocking
from reef_bus.samples import decode_batch
from reef_bus.topology import stream_name

PLAN_FILE = "roll.json"


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What a roll will write, and the file that the old log is in. Durable before anything is deleted."""

    opened: LogOpened
    archive: str


Stage = Literal["other", "old", "gone", "empty", "opened"]
"""Where LOG stands against a plan: another log than it is about; the old one; none; the new one, without and with its
first event."""


async def roll(
    journal: JetStreamJournal, store: ArtifactStore, folder: Path, replicas: int, archive: Path | None = None
) -> Plan:
    """Roll the log, or finish a roll whose plan is in `folder`. The archive goes into `archive`, else into the store.

    Raises Rejected for a log that is not quiet, ContractError for one that cannot be folded, or whose archive cannot be
    read back; Unavailable, and the same call again goes on from there.
    """
    path = folder / PLAN_FILE
    plan = _read_plan(path)
    if plan is None or await _stage(journal, plan, replicas) == "other":
        plan = await _prepare(journal, store, replicas, archive)
        await blocking(_write_plan, path, plan)
    await _perform(journal, store, plan, replicas)
    path.unlink()
    return plan


async def _perform(journal: JetStreamJournal, store: ArtifactStore, plan: Plan, replicas: int) -> None:
    stage = await _stage(journal, plan, replicas)
    if stage == "old":
        await blocking(_verify, store, plan)
        await journal.drop(LOG)
    if stage in ("old", "gone"):
        await journal.apply(replicas, {LOG: plan.opened.predecessor_seq + 1})
    if stage != "opened":
        await open_from(journal, plan.opened)


async def _stage(journal: JetStreamJournal, plan: Plan, replicas: int) -> Stage:
    drift = await journal.plan(replicas)
    name = stream_name(journal.deployment, LOG)
    wrong = sorted(other for other, lines in drift.items() if other != name and lines not in ([], ["missing"]))
    if wrong:
        raise Rejected(f"{', '.join(wrong)}: not as they must be, see `reef-bus streams plan`. Nothing was changed")
    if drift[name] == ["missing"]:
        return "gone"
    last = plan.opened.predecessor_seq
    begin, head = await journal.extent(LOG)
    if begin == last + 1 and head < begin:
        return "empty"
    found = await journal.read(LOG, max(begin, last))
    if found is not None and begin == last + 1 and found.event == plan.opened:
        return "opened" if head == begin else "other"  # it has gone on since: whoever asks now wants the next roll
    return "old" if head == last and found is not None and found.id == plan.opened.predecessor_id else "other"


async def open_from(journal: JetStreamJournal, opened: LogOpened) -> None:
    """Write the first event of an empty log that goes on from another one, and see it there."""
    with contextlib.suppress(Conflict):  # an earlier try had arrived, as is seen below
        await journal.append(Draft(event=opened, writer="cli", boot=opened.incarnation), 0)
    found = await journal.read(LOG, opened.predecessor_seq + 1)
    if found is None or found.event != opened:
        raise ContractError(f"{LOG} begins with {found.name if found else 'nothing'}, expected the LogOpened written")


# -- before anything is deleted


async def _prepare(journal: JetStreamJournal, store: ArtifactStore, replicas: int, archive: Path | None) -> Plan:
    history = await _read(journal, store, replicas)
    world = folded(history)
    if why := unrest(world.training, world.publications, world.requests, world.components):
        jobs = world.training.dispatched
        raise Rejected(
            f"the log is not quiet: {why}. Bring the deployment up with `--set training.max-jobs={jobs}`, so that no "
            "new job begins, wait until `reef-bus status` shows neither job nor publication, stop it, and roll again"
        )
    start = await blocking(start_after, world, store)
    place, digest = await blocking(_archive, history, store, archive, stream_name(journal.deployment, LOG))
    opened = LogOpened(
        incarnation=world.incarnation,
        rules=RULES,
        start=await blocking(store.put, encode_start(start)),
        predecessor=f"{stream_name(journal.deployment, LOG)}@{digest}",
        predecessor_seq=world.seq,
        predecessor_id=world.last_id,
    )
    return Plan(opened=opened, archive=place)


async def _read(journal: JetStreamJournal, store: ArtifactStore, replicas: int) -> History:
    if (await journal.plan(replicas))[stream_name(journal.deployment, LOG)] == ["missing"]:
        raise Rejected("there is no log to roll; a lost one comes back with `reef-bus restore`")
    history = await read_history(journal, store)
    if len(history.log) < 2:
        raise Rejected(f"there is nothing to roll: the log holds {len(history.log)} events")
    return history


def folded(history: History) -> World:
    """The state after the history. Raises ContractError where every consumer halts."""
    world = World(start=history.start)
    for recorded in history.log:
        fold(world, recorded)
    return world


def start_after(world: World, store: ArtifactStore) -> Start:
    """What a log that goes on from `world` begins with; `store` holds the batch of each scenario's last job."""
    consumed = {scenario: _consumed(store, blob) for scenario, blob in world.training.batches.items()}
    return compact(world.seq, world.last_id, world.training, world.publications, consumed)


def _consumed(store: ArtifactStore, blob: Blob) -> Consumed:
    batch = decode_batch(store.get(blob.digest))
    return Consumed(batch.floor, frozenset(batch.taken))


# -- the archive


def _archive(history: History, store: ArtifactStore, folder: Path | None, stream: str) -> tuple[str, str]:
    """Write the archive, an export of that moment: it can be audited alone. Returns where it is, and its digest."""
    name = f"{stream}-{history.log[0].seq}-{history.log[-1].seq}.jsonl"
    if folder is None:
        home = folder_of(store.root)
        with tempfile.TemporaryDirectory(prefix="reef-roll-", dir=home) as drafts:
            write_export(history, Path(drafts, name))
            digest = store.put_file(Path(drafts, name)).digest
        return str(store.path(digest).resolve()) if home else store.where(digest), digest
    folder.mkdir(parents=True, exist_ok=True)
    path = folder.resolve() / name
    write_export(history, path)
    sync(path)
    sync(folder)
    return str(path), sha256(path)


def _verify(store: ArtifactStore, plan: Plan) -> None:
    """The last look before the only other copy is deleted: the archive, read back, folds to the plan's start."""
    opened, assured = plan.opened, plan.opened.start
    with _readable(store, plan) as path:
        if not path.is_file() or sha256(path) != _digest(plan):
            raise ContractError(
                f"{plan.archive} is not the archive that was written; remove {PLAN_FILE}, and roll again"
            )
        world = folded(read_export(path))
    start = encode_start(start_after(world, store))
    found, wanted = (world.seq, world.last_id), (opened.predecessor_seq, opened.predecessor_id)
    if found != wanted:
        raise ContractError(f"{plan.archive} folds to {found}, the log to {wanted}; nothing was deleted")
    if assured is None or start != store.get(assured.digest):
        raise ContractError(
            f"the start in {PLAN_FILE} is not what this version makes of the log: another one wrote it, or it is "
            f"damaged. Nothing was deleted; remove {PLAN_FILE}, and roll again"
        )


def _readable(store: ArtifactStore, plan: Plan) -> AbstractContextManager[Path]:
    """The archive as a file of this machine, in whichever place the plan says that it is."""
    if plan.archive == store.where(_digest(plan)):
        return store.local(_digest(plan))
    return contextlib.nullcontext(Path(plan.archive))


def _digest(plan: Plan) -> str:
    return plan.opened.predecessor.partition("@")[2]


def sha256(path: Path) -> str:
    """The digest of the file as it is on the disk now."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# -- the plan


def _read_plan(path: Path) -> Plan | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Plan)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise ContractError(f"{path} is no plan of a roll: {error}; remove it if the log is there") from error


def _write_plan(path: Path, plan: Plan) -> None:
    draft = path.with_name(path.name + ".partial")
    draft.write_bytes(msgspec.json.encode(plan))
    sync(draft)
    os.replace(draft, path)
    sync(path.parent)


def sync(path: Path) -> None:
    """The file, or the folder's names, survive a power cut from here on."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
