"""The envelope: what an event looks like on a stream and in an export, and what is not let in.

Knows: CloudEvents 1.0 in both modes. Must not know: what an event means.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import msgspec
import pytest

from reef_bus.envelope import decode, event_id, from_json, headers, identify, payload, to_json
from reef_bus.errors import ContractError
from reef_bus.events import CATALOGUE, Blob, ComponentStarted, Draft, Event, InferenceRecorded, Recorded, ReportReceived
from tests.facts import E0, E1, SERVING, failed, holds, joined, released, trained
from tests.spec import given

HISTORY = given(*SERVING, *trained("c1"), *released(1, "c1", E0, E1)).scribe.log


def record(answer: str = "3") -> InferenceRecorded:
    return InferenceRecorded(
        scenario="digit",
        record="rec-1",
        engine="e0",
        boot="e0.1",
        load_id="inc:0",
        as_of=7,
        done_as_of=9,
        prompt="7",
        answer=answer,
        prompt_tokens=3,
        answer_tokens=2,
        blob=Blob("sha", 10),
        row=0,
        temperature=1.0,
        tags={"harness": "test"},
    )


def stored(recorded: Recorded) -> tuple[dict[str, str], bytes]:
    draft = Draft(
        event=recorded.event,
        writer=recorded.writer,
        boot=recorded.boot,
        cause=recorded.cause,
        correlation=recorded.correlation,
    )
    return headers(draft, recorded.id, recorded.prev, recorded.subject, "2026-01-01T00:00:00Z"), payload(recorded.event)


def test_the_headers_are_cloudevents_in_binary_mode() -> None:
    event = ComponentStarted(component="engine-0", pid=7, starts=1)
    draft = Draft(event=event, writer="supervisor/s", boot="b1", cause=4, correlation="pub-1")
    assert headers(draft, "id-1", 9, "reef.d.deployment.engine-0.ComponentStarted", "2026-01-01T00:00:00Z") == {
        "Nats-Msg-Id": "id-1",
        "ce-specversion": "1.0",
        "ce-id": "id-1",
        "ce-type": "reef.ComponentStarted.v1",
        "ce-source": "/reef/supervisor/s",
        "ce-subject": "reef.d.deployment.engine-0.ComponentStarted",
        "ce-time": "2026-01-01T00:00:00Z",
        "ce-datacontenttype": "application/json",
        "ce-prev": "9",
        "ce-causationid": "4",
        "ce-correlationid": "pub-1",
        "ce-boot": "b1",
    }
    assert json.loads(payload(event)) == {"component": "engine-0", "pid": 7, "starts": 1}


def test_the_id_is_a_hash_of_what_tells_facts_apart() -> None:
    """Rule 5: (family, prev, name, boot, payload)."""
    want = hashlib.sha256(b"train\n3\nJobStarted\nt1\n{}").hexdigest()[:32]
    assert event_id("train", 3, "JobStarted", "t1", b"{}") == want
    others = [
        event_id("release", 3, "JobStarted", "t1", b"{}"),
        event_id("train", 4, "JobStarted", "t1", b"{}"),
        event_id("train", 3, "JobDropped", "t1", b"{}"),
        event_id("train", 3, "JobStarted", "t2", b"{}"),
        event_id("train", 3, "JobStarted", "t1", b"{ }"),
    ]
    assert want not in others and len(set(others)) == 5


def test_engines_are_chained_by_themselves_so_their_ids_differ() -> None:
    a, b = (Draft(event=joined(engine), writer="w", boot="same") for engine in ("e0", "e1"))
    assert identify(a, 0, b"{}") != identify(b, 0, b"{}")


def test_a_record_keeps_the_id_of_its_writer() -> None:
    report = ReportReceived(scenario="s", report="rep-1", references=("rec-1",), score=1.0, feedback="", metadata={})
    for event, want in ((record(), "rec-1"), (record("other"), "rec-1"), (report, "rep-1")):
        assert identify(Draft(event=event, writer="w", boot="b"), 0, payload(event)) == want


def test_equal_events_give_equal_bytes() -> None:
    left, right = record(), msgspec.structs.replace(record(), tags={})
    left.tags.update(b="2", a="1")
    right.tags.update(a="1", harness="test", b="2")
    assert payload(left) == payload(right)


@pytest.mark.parametrize("recorded", HISTORY, ids=lambda r: f"{r.seq}-{r.name}")
def test_an_event_comes_back_from_the_stream_and_from_an_export(recorded: Recorded) -> None:
    header, body = stored(recorded)
    assert decode(recorded.seq, recorded.time, recorded.subject, header, body) == recorded
    line = json.loads(json.dumps(to_json(recorded)))
    assert line["specversion"] == "1.0" and line["data"] == json.loads(body)
    assert from_json(line) == recorded


def test_every_name_of_the_catalogue_has_its_family() -> None:
    assert {cls.family for cls in CATALOGUE.values()} == {
        "deployment",
        "train",
        "release",
        "engine",
        "operator",
        "record",
    }
    assert all(issubclass(cls, Event) and cls.__name__ == name for name, cls in CATALOGUE.items())


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"ce-type": "reef.Unheard.v1"}, "Unheard"),
        ({"ce-type": "reef.EngineJoined.v9"}, "v9"),
        ({"ce-type": "reef.EngineJoined.v0"}, "v0"),
        ({"ce-type": "other.EngineJoined.v1"}, "other"),
        ({"ce-type": "reef.EngineJoined"}, "reef.EngineJoined"),
        ({"ce-type": None}, "type"),
        ({"ce-prev": None}, "ce-prev"),
        ({"ce-prev": "x"}, "x"),
        ({"ce-id": None}, "ce-id"),
        ({"ce-boot": None}, "ce-boot"),
        ({"ce-causationid": "1.5"}, "1.5"),
    ],
)
def test_what_this_version_cannot_read_names_its_sequence(change: dict[str, str | None], what: str) -> None:
    """Bad input: a foreign or newer event on the stream."""
    header, body = stored(HISTORY[3])
    changed = {key: value for key, value in {**header, **change}.items() if value is not None}
    with pytest.raises(ContractError, match=what) as caught:
        decode(4, 0, HISTORY[3].subject, changed, body)
    assert caught.value.seq == 4


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'{"engine":"e0"}', b'{"engine":7}', b"\xff"])
def test_a_payload_that_is_not_the_events_names_its_sequence(body: bytes) -> None:
    header, _ = stored(HISTORY[3])
    with pytest.raises(ContractError, match="cannot be read") as caught:
        decode(4, 0, HISTORY[3].subject, header, body)
    assert caught.value.seq == 4


def test_fields_that_are_new_to_this_version_are_passed_over() -> None:
    """Additive changes keep the version."""
    header, body = stored(HISTORY[3])
    wider = json.dumps({**json.loads(body), "news": [1]}).encode()
    assert decode(4, HISTORY[3].time, HISTORY[3].subject, header, wider) == HISTORY[3]


@pytest.mark.parametrize(
    "line", [{}, {"sequence": "x"}, {**to_json(HISTORY[0]), "prev": None}, {**to_json(HISTORY[0]), "data": 3}]
)
def test_a_garbled_line_of_an_export_is_a_contract_error(line: dict[str, Any]) -> None:
    with pytest.raises(ContractError):
        from_json(line)


@pytest.mark.parametrize("text", ["", "ü\n\0", "\u2028", "a" * 3000, "\U0001f41a"])
def test_text_of_any_kind_survives(text: str) -> None:
    event = msgspec.structs.replace(failed("e0", 1), detail=text)
    header, body = stored(msgspec.structs.replace(HISTORY[3], event=event))
    header = {**header, "ce-type": "reef.ReceiverFailed.v1"}
    assert decode(4, 0, HISTORY[3].subject.replace("EngineJoined", "ReceiverFailed"), header, body).event == event


def test_numbers_keep_their_value() -> None:
    event = msgspec.structs.replace(holds("e0", 0, "base"), bytes=2**60, ms=0.1 + 0.2)
    header, body = stored(msgspec.structs.replace(HISTORY[3], event=event))
    header = {**header, "ce-type": "reef.ReceiverVerified.v1"}
    assert decode(4, 0, HISTORY[3].subject.replace("EngineJoined", "ReceiverVerified"), header, body).event == event
