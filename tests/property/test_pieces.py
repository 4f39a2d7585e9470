"""An export is read in pieces of many lines: wherever these are cut, and whatever is wrong with the file, the audit
says the same as of a history that was read line by line.

Knows: exports, and ways to damage one. Must not know: how a piece is read.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from reef_bus import audit
from reef_bus.audit import audit_export, audit_history, read_export, write_export
from reef_bus.envelope import plain_line, plain_lines
from reef_bus.errors import ContractError
from tests.bench.audit import history

A_LINE, WHOLE = 1, 1 << 30  # bytes: every line is a piece, the file is one
HISTORIES = sorted((Path(__file__).parents[1] / "golden" / "histories").glob("*.jsonl"))
SEEDS = range(40)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Some releases, with several answers for each; the sixth of them has letters of three bytes."""
    path = tmp_path_factory.mktemp("pieces") / "history.jsonl"
    write_export(history(150, answers=3), path)
    lines = path.read_bytes().splitlines(keepends=True)
    at = [number for number, line in enumerate(lines) if b'"answer":"7"' in line][5]
    lines[at] = lines[at].replace(b'"answer":"7"', '"answer":"– 7 –"'.encode())
    return b"".join(lines)


def said(path: Path, pieces: int, monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.setattr(audit, "PIECE_BYTES", pieces)
    try:
        return audit_export(path)
    except ContractError as error:
        return str(error), error.seq


def said_line_by_line(path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.setattr(audit, "PIECE_BYTES", A_LINE)
    try:
        return audit_history(read_export(path))
    except ContractError as error:
        return str(error), error.seq


def swap(lines: list[bytes], dice: random.Random) -> bytes:
    one, other = dice.randrange(len(lines)), dice.randrange(len(lines))
    lines[one], lines[other] = lines[other], lines[one]
    return b"".join(lines)


def shuffle(lines: list[bytes], dice: random.Random) -> bytes:
    dice.shuffle(lines)
    return b"".join(lines)


def double(lines: list[bytes], dice: random.Random) -> bytes:
    at = dice.randrange(len(lines))
    return b"".join([*lines[:at], lines[at], *lines[at:]])


def lose(lines: list[bytes], dice: random.Random) -> bytes:
    at = dice.randrange(len(lines))
    return b"".join([*lines[:at], *lines[at + 1 :]])


def join(lines: list[bytes], dice: random.Random) -> bytes:
    at = dice.randrange(len(lines))
    return b"".join([*lines[:at], lines[at].rstrip(), *lines[at + 1 :]])


def split(lines: list[bytes], dice: random.Random) -> bytes:
    at = dice.randrange(len(lines))
    return b"".join([*lines[:at], lines[at].replace(b',"', b',\n"', 1), *lines[at + 1 :]])


def space(lines: list[bytes], dice: random.Random) -> bytes:
    at = dice.randrange(len(lines))
    return b"".join([*lines[:at], dice.choice([b"\n", b" \n", b"\r\n", b"\r"]), *lines[at:]])


def cut(lines: list[bytes], dice: random.Random) -> bytes:
    whole = b"".join(lines)
    return whole[: dice.randrange(len(whole))]


def garble(lines: list[bytes], dice: random.Random) -> bytes:
    whole = bytearray(b"".join(lines))
    whole[dice.randrange(len(whole))] = dice.choice([0, 10, 13, 32, 34, 44, 49, 92, 123, 125, 128, 255])
    return bytes(whole)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("damage", [swap, shuffle, double, lose, join, split, space, cut, garble])
def test_a_damaged_export_is_judged_alike_in_pieces_of_any_size(
    damage: Callable[[list[bytes], random.Random], bytes],
    seed: int,
    exported: bytes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dice, path = random.Random(seed), tmp_path / "history.jsonl"
    path.write_bytes(damage(exported.splitlines(keepends=True), dice))
    expected = said_line_by_line(path, monkeypatch)
    for pieces in (A_LINE, dice.randrange(2, 10_000), WHOLE):
        assert said(path, pieces, monkeypatch) == expected


def test_a_piece_may_end_anywhere(exported: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At each byte of a line with letters of several bytes and of its neighbours, and behind an empty last line."""
    path, at = tmp_path / "history.jsonl", exported.index("–".encode())
    path.write_bytes(exported)
    expected = said_line_by_line(path, monkeypatch)
    path.write_bytes(exported + b"\n")
    number = exported.count(b"\n") + 1
    for size in range(at - 600, at + 600, 5):
        path.write_bytes(exported)
        assert said(path, size, monkeypatch) == expected
        path.write_bytes(exported + b"\n")
        with pytest.raises(ContractError, match=f"line {number}: .*one JSON object"):
            audit_export(path)


def test_objects_that_share_a_line_are_not_made_up_for_by_one_that_spans_two(
    exported: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many objects as lines, and all lines begin alike: it is the first of them that is cut off."""
    lines = [line for line in exported.splitlines(keepends=True) if line.startswith(b'{"stream":"RECORDS",')][:4]
    spanning = lines[1].replace(b'"metadata":{', b'"metadata":{"deep":\n{"stream":"RECORDS","x":1},', 1)
    assert spanning.count(b"\n") == 2
    text = lines[0] + spanning + lines[2].rstrip() + lines[3]
    path = tmp_path / "history.jsonl"
    path.write_bytes(text)
    for pieces in (A_LINE, WHOLE):
        monkeypatch.setattr(audit, "PIECE_BYTES", pieces)
        with pytest.raises(ContractError, match=r"line 2: .*expected one JSON object"):
            audit_export(path)


def test_a_key_that_is_there_twice_moves_no_event_to_the_other_stream(exported: bytes) -> None:
    line = next(line for line in exported.splitlines(keepends=True) if line.startswith(b'{"stream":"RECORDS",'))
    assert plain_lines([line], "RECORDS") == [plain_line(line)]
    assert plain_lines([line.replace(b'{"stream":', b'{"stream":"LOG","stream":')], "LOG") is None
    assert plain_lines([line.replace(b',"specversion"', b',"stream":"LOG","specversion"')], "RECORDS") is None
    assert plain_lines([line.replace(b',"source"', b',"type":"reef.EngineJoined.v1","source"')], "RECORDS") is None


def test_a_subject_that_is_not_the_events_own_spoils_its_piece(exported: bytes) -> None:
    lines = [line for line in exported.splitlines(keepends=True) if line.startswith(b'{"stream":"RECORDS",')][:3]
    other = lines[1].replace(b'"subject":"reef.test.record.', b'"subject":"reef.test.record.other')
    assert plain_lines(lines, "RECORDS") == [plain_line(line) for line in lines]
    assert plain_lines([lines[0], other, lines[2]], "RECORDS") is None


@pytest.mark.parametrize("path", HISTORIES, ids=lambda path: path.stem)
def test_a_golden_history_is_read_alike_line_by_line_and_whole(path: Path) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    each = [plain_line(line) for line in lines]
    assert plain_lines(lines, "LOG") == (None if None in each else each)
