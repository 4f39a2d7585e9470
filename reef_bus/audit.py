"""Histories for the audit: read from a live deployment or from an export, and written as one.

Knows: both streams, the batches beside them, JSON lines. Must not know: what any of it must look like
(`core/invariants`).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

import msgspec

from reef_bus.artifacts import ArtifactStore
from reef_bus.core.invariants import Batches, Consumption, Trained, Unread
from reef_bus.core.start import Start
from reef_bus.envelope import from_json, to_json
from reef_bus.errors import ContractError, Rejected, Unavailable
from reef_bus.events import JobDispatched, Recorded
from reef_bus.journal import LOG, RECORDS, Journal
from reef_bus.origin import nowhere, start_of
from reef_bus.runner import blocking
from reef_bus.samples import Batch, decode_batch
from reef_bus.topology import FAMILIES

BATCH, START = "BATCH", "START"
CUT_TRIES = 100  # a head costs a round trip, and LOG moves a few times a second


class History(msgspec.Struct, frozen=True):
    """What `core.invariants.check` takes: both streams from their beginnings, the batches of LOG's jobs by digest
    (None: there was no store to read them from), and the start that LOG goes on from, if it names one."""

    log: tuple[Recorded, ...]
    records: tuple[Recorded, ...]
    batches: Batches | None
    start: Start | None = None


# -- live


async def read_history(journal: Journal, store: ArtifactStore | None = None) -> History:
    """Everything up to one moment at which neither stream lacks what the other one refers to.

    Raises ContractError at an event that cannot be read; Unavailable when a leader does not answer, or LOG never rests.
    """
    heads = await _moment(journal)
    log = await read_stream(journal, LOG, heads[0])
    records = await read_stream(journal, RECORDS, heads[1])
    start = start_of(log[0], store.get if store else nowhere) if log else None
    return History(log, records, await blocking(_batches, store, log) if store else None, start)


async def _moment(journal: Journal) -> tuple[int, int]:
    """Heads of LOG and RECORDS. LOG is asked before and after: while it rests, what its jobs consumed is in RECORDS
    already, and no answer in RECORDS stands on an event beyond it."""
    log = await journal.head(LOG)
    for _ in range(CUT_TRIES):
        records, before = await journal.head(RECORDS), log
        log = await journal.head(LOG)
        if log == before:
            return log, records
    raise Unavailable(f"LOG moved between any two of {CUT_TRIES} looks at it; audit again, or audit an export")


async def read_stream(journal: Journal, stream: str, head: int) -> tuple[Recorded, ...]:
    """Every event of the stream up to `head`."""
    found: list[Recorded] = []
    batches = journal.follow(stream)
    try:
        while head and (not found or found[-1].seq < head):
            found += await anext(batches)
    finally:
        if isinstance(batches, AsyncGenerator):
            await batches.aclose()
    return tuple(recorded for recorded in found if recorded.seq <= head)


def _batches(store: ArtifactStore, log: Iterable[Recorded]) -> Batches:
    digests = {recorded.event.batch.digest for recorded in log if isinstance(recorded.event, JobDispatched)}
    return {digest: _batch(store, digest) for digest in sorted(digests)}


def _batch(store: ArtifactStore, digest: str) -> Consumption | Unread:
    """The store compares a blob with its name, so what is read is what the log's digest names."""
    try:
        return consumption(decode_batch(store.get(digest)))
    except (ContractError, Unavailable) as error:
        return Unread(str(error))


def consumption(batch: Batch) -> Consumption:
    """What the audit needs of a batch: everything but the tokens."""
    return Consumption(
        job=batch.job,
        step=batch.step,
        base=batch.base,
        records=batch.records,
        samples=tuple(Trained(sample.record, sample.load_id, sample.reward) for sample in batch.samples),
    )


# -- exports: one JSON object a line, told apart by its key `stream`


def write_export(history: History, target: Path | str | TextIO) -> None:
    """Write start, LOG, RECORDS and batches as JSON lines. Raises Unavailable when the file cannot be written whole."""
    if not isinstance(target, Path | str):
        target.writelines(_lines(history))
        return
    try:
        with open(target, "w", encoding="utf-8") as file:
            file.writelines(_lines(history))
    except OSError as error:
        raise Unavailable(f"cannot write {target}: {error.strerror}; the export is not whole") from error


def _lines(history: History) -> Iterator[str]:
    if history.start:
        yield _line({"stream": START, "start": msgspec.to_builtins(history.start)})
    for stream, events in ((LOG, history.log), (RECORDS, history.records)):
        for recorded in events:
            yield _line({"stream": stream, **to_json(recorded)})
    for digest, batch in (history.batches or {}).items():
        said = {"unread": batch.why} if isinstance(batch, Unread) else msgspec.to_builtins(batch)
        yield _line({"stream": BATCH, "digest": digest, **said})


def _line(value: Mapping[str, Any]) -> str:
    return msgspec.json.encode(value).decode() + "\n"


def read_export(path: Path | str) -> History:
    """The inverse of `write_export`; also reads a part of one. Raises Rejected when there is no such file, and
    ContractError, naming the line, for a line that is cut off or cannot be read."""
    streams: dict[str, list[Recorded]] = {LOG: [], RECORDS: []}
    batches: dict[str, Consumption | Unread] = {}
    start: Start | None = None
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                where, value = f"{path}, line {number}", _object(f"{path}, line {number}", line)
                if value.get("stream") == START:
                    start = _start(where, value)
                else:
                    _take(where, value, streams, batches)
    except OSError as error:
        raise Rejected(f"cannot read {path}: {error.strerror}; `reef-bus export -o FILE` writes one", 404) from error
    return History(tuple(streams[LOG]), tuple(streams[RECORDS]), batches or None, start)


def _take(
    where: str,
    value: Mapping[str, Any],
    streams: dict[str, list[Recorded]],
    batches: dict[str, Consumption | Unread],
) -> None:
    stream = value.get("stream")
    if stream == BATCH:
        digest = _digest(where, value)
        batches[digest] = _consumption(where, value)
    elif isinstance(stream, str) and stream in streams:
        streams[stream].append(_recorded(where, stream, value))
    else:
        raise ContractError(f"{where}: stream is {stream!r}; expected one of {[*streams, BATCH, START]}")


def _start(where: str, value: Mapping[str, Any]) -> Start:
    try:
        return msgspec.convert(value.get("start"), Start)
    except msgspec.ValidationError as error:
        raise ContractError(f"{where}: this is no start of a log: {error}") from error


def _object(where: str, line: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(line, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeError) as error:
        if not line.endswith(b"\n"):
            raise ContractError(f"{where}: the last line is cut off; export again, or remove it") from error
        raise ContractError(f"{where}: {error}; expected one JSON object, as `reef-bus export` writes it") from error


def _recorded(where: str, stream: str, value: Mapping[str, Any]) -> Recorded:
    try:
        found = from_json(value)
    except ContractError as error:
        raise ContractError(f"{where}: {error}", error.seq) from error
    home = FAMILIES[found.event.family].stream
    if home != stream:
        raise ContractError(f"{where}: {found.name} is on {stream}; it belongs on {home}", found.seq)
    return found


def _digest(where: str, value: Mapping[str, Any]) -> str:
    digest = value.get("digest")
    if not isinstance(digest, str):
        raise ContractError(f"{where}: a batch without a digest, found {digest!r}")
    return digest


def _consumption(where: str, value: Mapping[str, Any]) -> Consumption | Unread:
    if "unread" in value:
        return Unread(str(value["unread"]))
    try:
        return msgspec.convert(value, Consumption)
    except msgspec.ValidationError as error:
        raise ContractError(f"{where}: this is no batch: {error}") from error
