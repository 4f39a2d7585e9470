"""Histories for the audit: read from a live deployment or from an export, written as one, and audited.

Knows: both streams, the batches beside them, JSON lines. Must not know: what any of it must look like
(`core/invariants`).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

import msgspec

from reef_bus.artifacts import ArtifactStore
from reef_bus.collector import without_collector
from reef_bus.core.invariants import (
    Answers,
    Audit,
    Batches,
    Consumption,
    Findings,
    Trained,
    Unread,
    check,
    enter,
    examine,
)
from reef_bus.core.start import Start, readable
from reef_bus.envelope import decode_line, from_json, plain_lines, recorded_on, to_json
from reef_bus.errors import ContractError, Rejected, Unavailable
from reef_bus.events import CATALOGUE, JobDispatched, Recorded
from reef_bus.journal import LOG, RECORDS, Journal
from reef_bus.origin import nowhere, start_of
from reef_bus.runner import blocking
from reef_bus.samples import Batch, decode_batch
from reef_bus.topology import FAMILIES

BATCH, START = "BATCH", "START"
LOG_LINE, BATCH_LINE = b'{"stream":"LOG",', b'{"stream":"BATCH",'  # as `write_export` begins one
HOMES = {event: FAMILIES[event.family].stream for event in CATALOGUE.values()}
PIECE_BYTES = 1 << 14  # some two dozen lines, read in one go: what is made of them must fit into the caches
CUT_TRIES = 100  # a head costs a round trip, and LOG moves a few times a second


class _Digest(msgspec.Struct):
    digest: str


_DIGEST, _CONSUMPTION = msgspec.json.Decoder(_Digest), msgspec.json.Decoder(Consumption)


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
    with without_collector():
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
        spans={sample.record: sample.spans for sample in batch.samples if sample.spans},
        scenario=batch.scenario,
    )


# -- the audit


def audit_export(path: Path | str) -> Audit:
    """`check` of an export. Raises as `read_export` does."""
    with without_collector():
        found = _sift(path)
        return examine(found.log, found.answers, found.batches or None, found.start)


def audit_history(history: History) -> Audit:
    """`check` of what is in memory."""
    with without_collector():
        return check(history.log, history.records, history.batches, history.start)


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
    for number, line in _numbered(path):
        stream, found = _read(path, number, line)
        if isinstance(found, Recorded):
            streams[stream].append(found)
        elif isinstance(found, Start):
            start = found
        else:
            batches[stream] = found
    return History(tuple(streams[LOG]), tuple(streams[RECORDS]), batches or None, start)


class Piece(msgspec.Struct, frozen=True, gc=False):
    """Some lines of an export, and the number of the first one."""

    number: int
    lines: list[bytes]

    def numbered(self) -> Iterator[tuple[int, bytes]]:
        return enumerate(self.lines, self.number)


class _Log(msgspec.Struct):
    """LOG of an export, still as text, in pieces: an event is read where it is judged, and forgotten there. To keep all
    of them would take longer than to read them."""

    path: Path | str
    pieces: list[Piece] = []

    def __iter__(self) -> Iterator[Recorded]:
        for piece in self.pieces:
            plain = plain_lines(piece.lines, LOG)
            if plain is None:
                yield from (self._read(number, line) for number, line in piece.numbered())
            else:
                yield from map(recorded_on, plain)

    def _read(self, number: int, line: bytes) -> Recorded:
        stream, found = _read(self.path, number, line)
        if stream != LOG or not isinstance(found, Recorded):
            raise ContractError(f"{self.path}, line {number}: it names more than one stream")
        return found


class _Sifted(msgspec.Struct):
    """An export as `examine` takes it: of RECORDS nothing but what the audit needs."""

    log: _Log
    answers: Answers
    batches: dict[str, Consumption | Unread] = {}
    start: Start | None = None


def _sift(path: Path | str) -> _Sifted:
    answers = Answers(Findings())
    sifted = _Sifted(_Log(path), answers)
    try:
        for piece in _pieces(path):
            if all(line.startswith(LOG_LINE) for line in piece.lines):
                sifted.log.pieces.append(piece)
            elif plain := plain_lines(piece.lines, RECORDS):
                for line in plain:
                    enter(answers, line.seq, line.event)
            else:
                _put_all(sifted, piece)
    except (ContractError, Rejected):
        for _ in sifted.log:  # what is wrong further up is named first
            pass
        raise
    return sifted


def _put_all(sifted: _Sifted, piece: Piece) -> None:
    """Lines of several kinds, or one that is not as `write_export` writes an event."""
    for number, line in piece.numbered():
        if line.startswith(LOG_LINE):
            sifted.log.pieces.append(Piece(number, [line]))
        else:
            _put(sifted, number, line)


def _put(sifted: _Sifted, number: int, line: bytes) -> None:
    """A line of any kind or form; raises what is wrong with it."""
    stream, found = _read(sifted.log.path, number, line)
    if isinstance(found, Recorded):
        if stream == RECORDS:
            enter(sifted.answers, found.seq, found.event)
        else:
            sifted.log.pieces.append(Piece(number, [line]))  # in another form than `write_export` gives it
    elif isinstance(found, Start):
        sifted.start = found
    else:
        sifted.batches[stream] = found


def _numbered(path: Path | str) -> Iterator[tuple[int, bytes]]:
    for piece in _pieces(path):
        yield from piece.numbered()


def _pieces(path: Path | str) -> Iterator[Piece]:
    """The file, some lines at a time."""
    number = 1
    try:
        with open(path, "rb") as file:
            while lines := file.readlines(PIECE_BYTES):
                yield Piece(number, lines)
                number += len(lines)
    except OSError as error:
        raise Rejected(f"cannot read {path}: {error.strerror}; `reef-bus export -o FILE` writes one", 404) from error


def _read(path: Path | str, number: int, line: bytes) -> tuple[str, Recorded | Consumption | Unread | Start]:
    """What a line holds: its stream and the event there, a batch under its digest, the start; or what is wrong."""
    try:
        stream, found = _batch_line(line) or _event_line(line) or _read_line(line)
        if isinstance(found, Recorded) and HOMES[type(found.event)] != stream:
            raise ContractError(f"{found.name} is on {stream}; it belongs on {HOMES[type(found.event)]}", found.seq)
        return stream, found
    except ContractError as error:
        raise ContractError(f"{path}, line {number}: {error}", error.seq) from error


def _event_line(line: bytes) -> tuple[str, Recorded] | None:
    found = decode_line(line)
    return (found.stream, recorded_on(found)) if found else None


def _batch_line(line: bytes) -> tuple[str, Consumption] | None:
    """A batch in the form that `write_export` gives it. None for any other line, which may yet be one."""
    if not line.startswith(BATCH_LINE):
        return None
    try:
        return _DIGEST.decode(line).digest, _CONSUMPTION.decode(line)
    except (msgspec.MsgspecError, UnicodeError):
        return None


def _read_line(line: bytes) -> tuple[str, Recorded | Consumption | Unread | Start]:
    """A line of any form, or what is wrong with it."""
    value = _object(line)
    stream = value.get("stream")
    if stream == BATCH:
        return _digest(value), _consumption(value)
    if stream == START:
        return START, _start(value)
    if stream not in (LOG, RECORDS):
        raise ContractError(f"stream is {stream!r}; expected one of {[LOG, RECORDS, BATCH, START]}")
    return stream, from_json(value)


def _start(value: Mapping[str, Any]) -> Start:
    try:
        return readable(msgspec.convert(value.get("start"), Start))
    except msgspec.ValidationError as error:
        raise ContractError(f"this is no start of a log: {error}") from error


def _object(line: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(line, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        if not line.endswith(b"\n"):
            raise ContractError("the last line is cut off; export again, or remove it") from error
        raise ContractError(f"{error}; expected one JSON object, as `reef-bus export` writes it") from error


def _digest(value: Mapping[str, Any]) -> str:
    digest = value.get("digest")
    if not isinstance(digest, str):
        raise ContractError(f"a batch without a digest, found {digest!r}")
    return digest


def _consumption(value: Mapping[str, Any]) -> Consumption | Unread:
    if "unread" in value:
        return Unread(str(value["unread"]))
    try:
        return msgspec.convert(value, Consumption)
    except msgspec.ValidationError as error:
        raise ContractError(f"this is no batch: {error}") from error
