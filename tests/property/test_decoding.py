"""One event, one meaning: however its line or its headers are read, what comes out is the same.

Knows: the general readers of exports and of headers, and the quick ones beside them. Must not know: how either works.
"""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from nats.aio.client import Client

from reef_bus.audit import write_export
from reef_bus.connection import QuickClient
from reef_bus.envelope import decode_line, from_json, recorded_on
from reef_bus.events import CATALOGUE
from tests.bench.audit import history

GOLDEN = Path(__file__).parents[1] / "golden"
SAMPLES = sorted((GOLDEN / "events").glob("*.json"))
HISTORIES = sorted((GOLDEN / "histories").glob("*.jsonl"))


def slowly(line: bytes) -> object:
    return from_json(json.loads(line))


def quickly(line: bytes) -> object:
    found = decode_line(line)
    return (found.stream, recorded_on(found)) if found else None


@pytest.mark.parametrize("path", HISTORIES, ids=lambda path: path.stem)
def test_every_line_of_a_golden_history_is_read_alike_in_both_ways(path: Path) -> None:
    for line in path.read_bytes().splitlines(keepends=True):
        assert quickly(line) == ("LOG", slowly(line))


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.stem)
def test_every_golden_sample_is_read_alike_in_both_ways(path: Path) -> None:
    sample = json.loads(path.read_bytes())
    stream = "RECORDS" if CATALOGUE[path.stem.partition(".")[0]].family == "record" else "LOG"
    line = json.dumps({"stream": stream, **sample}, ensure_ascii=False).encode()
    assert quickly(line) == (stream, slowly(line))


def test_every_line_of_a_history_with_faults_is_read_alike_in_both_ways(tmp_path: Path) -> None:
    write_export(history(300), tmp_path / "history.jsonl")
    lines = (tmp_path / "history.jsonl").read_bytes().splitlines(keepends=True)
    events = [line for line in lines if b'"stream":"BATCH"' not in line]
    assert [quickly(line) for line in events] == [(json.loads(line)["stream"], slowly(line)) for line in events]


@pytest.mark.parametrize(
    "change",
    [
        {"stream": "SITES"},
        {"stream": None},
        {"sequence": "7"},
        {"prev": None},
        {"timens": 1.5},
        {"boot": 3},
        {"specversion": None},
        {"specversion": "\udcff"},
    ],
    ids=str,
)
def test_an_unusual_line_is_left_to_the_general_reader(change: dict[str, object]) -> None:
    line = msgspec.json.decode(HISTORIES[0].read_bytes().splitlines()[0])
    text = json.dumps({**line, **change}, ensure_ascii=False)
    assert quickly(text.encode("utf-8", "surrogateescape")) is None


@given(st.lists(st.one_of(st.sampled_from([b"ce-id: 7", b"ce-id:8", b"a b: c", b":x", b"no colon"]), st.binary())))
@example([b"Nats-Msg-Id: \xff", b"\xc3\xbc: 1", b"a\x1cb: 1", b"a\x85b: 1", b" ce-boot :\t b1 "])
def test_headers_are_parsed_as_the_client_parses_them(lines: list[bytes]) -> None:
    raw = b"\r\n".join(lines)
    assert QuickClient._parse_header_lines(raw) == Client._parse_header_lines(raw)


async def test_the_client_parses_headers_by_the_method_that_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The method is the client's own affair: a version that parses elsewhere must be noticed here."""
    monkeypatch.setattr(QuickClient, "_parse_header_lines", staticmethod(lambda raw: {"parsed": raw.decode()}))
    assert await QuickClient()._process_headers(b"NATS/1.0\r\na: b\r\n\r\n") == {"parsed": "a: b\r\n\r\n"}
