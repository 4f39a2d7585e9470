"""The published contracts: what is committed, what a change may break, and what was once written.

Knows: contracts.py, `schemas/`, the golden samples, git where there is history. Must not know: a broker.
"""

from __future__ import annotations

import io
import json
import re
import subprocess
import tarfile
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

import jsonschema
import msgspec
import pytest

from reef_bus import contracts, envelope, topology, upcast
from reef_bus.errors import ContractError
from reef_bus.events import CATALOGUE, Draft, Event, Recorded

ROOT = Path(__file__).resolve().parents[2]
SCHEMAS, GOLDEN = ROOT / "schemas", ROOT / "tests" / "golden" / "events"
SAMPLES = sorted(GOLDEN.glob("*.json"))
BACK = {"session": "sess-9", "load_id": "q7:1"}  # of version 1, below


def stem(path: Path) -> str:
    return path.stem


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def plainly(recorded: Recorded) -> Any:
    """What an export of the event holds, as a reader of JSON sees it."""
    return json.loads(json.dumps(envelope.to_json(recorded)))


def defined(fields: list[Any]) -> type[Event]:
    """A made-up event `Sealed`."""
    space: dict[str, Any] = {"family": "train"}
    return cast(
        type[Event], msgspec.defstruct("Sealed", fields, bases=(Event,), namespace=space, kw_only=True, frozen=True)
    )


def published(fields: list[Any]) -> dict[str, Any]:
    return contracts.schema(defined(fields))


# -- what is committed


def test_the_committed_contracts_are_what_the_code_generates_and_every_version_has_a_sample() -> None:
    assert contracts.check(SCHEMAS) == []


@pytest.mark.parametrize("name", CATALOGUE)
def test_an_example_is_valid_by_its_schema_and_reads_back(name: str) -> None:
    file = f"{name}.v{CATALOGUE[name].version}.json"
    schema, example = read(SCHEMAS / "events" / file), read(SCHEMAS / "examples" / file)
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(example["data"], schema, jsonschema.Draft202012Validator)
    assert plainly(envelope.from_json(example)) == example


@pytest.mark.parametrize("name", CATALOGUE)
def test_a_schema_refuses_a_payload_without_a_required_field_and_allows_one_that_it_does_not_know(name: str) -> None:
    schema, data = contracts.schema(CATALOGUE[name]), contracts.example(CATALOGUE[name])["data"]
    validator = jsonschema.Draft202012Validator(schema)
    assert validator.is_valid({**data, "of_a_later_version": 1})
    for field in schema["required"]:
        assert not validator.is_valid({key: value for key, value in data.items() if key != field}), field


def test_a_field_of_another_type_than_the_examples_know_still_gets_an_example() -> None:
    fields: list[Any] = [("scenario", str), ("attempt", str), ("job", int), ("mode", Narrow), ("novel", float)]
    cls = defined([*fields, ("base", str | None), ("members", dict[str, int]), ("why", str, "")])
    data = {key: contracts._value(key, field) for key, field in contracts.schema(cls)["properties"].items()}
    assert msgspec.to_builtins(msgspec.convert(data, cls)) == {
        **{"scenario": "sums", "attempt": "attempt", "job": 1, "mode": "abort", "novel": 0.5},
        **{"base": "cand-11a4c07be2d95f36", "members": {}, "why": "reward 0.75 against 0.5"},
    }


def test_a_schema_names_itself_by_a_urn_and_says_what_the_event_means() -> None:
    schema = contracts.schema(CATALOGUE["EngineExcluded"])
    assert schema["$id"] == "urn:reef-bus:event:EngineExcluded:v1"
    assert schema["title"] == "EngineExcluded"
    assert schema["description"] == "A boot is out: it must not generate, and it must not join again."
    assert list(schema["properties"]) == ["scenario", "engine", "boot", "reason", "request"]


# -- AsyncAPI


def test_channels_have_the_subjects_streams_and_filters_of_the_protocol() -> None:
    found = {
        name: (c["address"], c["x-jetstream"]["stream"], (c["x-jetstream"]["compareAndAppend"] or {}).get("filter"))
        for name, c in contracts.asyncapi()["channels"].items()
    }
    # protocol.md section 2, row by row, for the families that have events
    rows = {
        "train": ("LOG", "train.>"),
        "release": ("LOG", "release.>"),
        "engine": ("LOG", "engine.{id}.>"),
        "deployment": ("LOG", "deployment.>"),
        "record": ("RECORDS", None),
    }
    assert {name: found[name] for name in rows} == {
        name: (
            f"reef.{{deployment}}.{name}.{{id}}.{{event}}",
            f"REEF_{{deployment}}_{stream}",
            tail and f"reef.{{deployment}}.{tail}",
        )
        for name, (stream, tail) in rows.items()
    }


@pytest.mark.parametrize("name", CATALOGUE)
def test_an_address_with_its_parameters_filled_in_is_the_subject_that_the_event_is_appended_to(name: str) -> None:
    example = contracts.example(CATALOGUE[name])
    channel = contracts.asyncapi()["channels"][CATALOGUE[name].family]
    address = channel["address"].format(deployment="demo", id=example["subject"].split(".")[3], event=name)
    assert address == example["subject"]
    assert name in channel["parameters"]["event"]["enum"]


def test_every_reference_of_the_document_leads_somewhere() -> None:
    document = contracts.asyncapi()
    for reference in re.findall(r'"\$ref": "([^"]+)"', json.dumps(document)):
        inside, _, pointer = reference.partition("#/")
        node = document if not inside else read(SCHEMAS / inside)
        for step in filter(None, pointer.split("/")):
            node = node[step]


def test_only_the_role_of_a_family_appends_to_it() -> None:
    operations = contracts.asyncapi()["operations"]
    assert {key: o["channel"]["$ref"].rpartition("/")[2] for key, o in operations.items()}.items() >= {
        "trainer-appends-train": "train",
        "publisher-appends-release": "release",
        "engine-appends-engine": "engine",
        "supervisor-appends-deployment": "deployment",
        "gateway-appends-record": "record",
    }.items()
    assert "reef.{deployment}.train.>" in operations["trainer-appends-train"]["x-permissions"]


def test_the_headers_are_those_that_the_envelope_writes_and_each_is_explained() -> None:
    headers = contracts.asyncapi()["components"]["schemas"]["Headers"]
    assert all("description" in header for header in headers["properties"].values())
    example = contracts.example(CATALOGUE["JobStarted"])
    event = msgspec.convert(example["data"], CATALOGUE["JobStarted"])
    draft = Draft(event=event, writer="trainer-0", boot="b", cause=3)
    written = envelope.headers(draft, "0" * 32, 7, topology.subject("demo", event), "2026-01-01T00:00:00Z")
    jsonschema.validate(written, headers)
    assert set(headers["required"]) == set(written)


# -- what a change breaks

SCORE: list[Any] = [("job", str), ("score", float, 0.0)]
Narrow, Wide = Literal["drain", "abort"], Literal["drain", "abort", "keep"]
Pair = msgspec.defstruct("Pair", [("left", int), ("right", int, 0)])
PairNeeds = msgspec.defstruct("Pair", [("left", int), ("right", int)])
PairGrown = msgspec.defstruct("Pair", [("left", int), ("right", int, 0), ("middle", int, 0)])


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        (SCORE, [("job", str)], "`score` is removed: found nothing, expected"),
        (SCORE, [("job", str), ("points", float, 0.0)], "`score` is removed"),
        (SCORE, [("job", int), ("score", float, 0.0)], '`job` is retyped: found {"type": "integer"}, expected'),
        ([("job", str)], [("job", str | None)], "`job` is retyped"),
        ([("ids", list[str])], [("ids", list[int])], "`ids` is retyped"),
        ([("tags", dict[str, float])], [("tags", dict[str, str])], "`tags` is retyped"),
        ([("pause", str)], [("pause", Narrow)], "`pause` is retyped"),
        (SCORE, [("job", str), ("score", float)], "`score` is newly required: found no default, expected 0.0"),
        (SCORE, [*SCORE, ("step", int)], "`step` is new and required: found no default, expected one"),
        (SCORE, [("job", str), ("score", float, 1.0)], "`score` changes its default: found 1.0, expected 0.0"),
        ([("pause", Wide)], [("pause", Narrow)], "`pause` has its enum narrowed"),
    ],
)
def test_a_breaking_change_is_named_with_what_to_do(before: list[Any], after: list[Any], says: str) -> None:
    (message,) = contracts.compare(published(before), published(after))
    assert message.startswith(f"Sealed.v1: {says}")
    assert "make it v2 with an upcaster in reef_bus/upcast.py and a golden sample in tests/golden/events" in message


def test_a_change_within_an_inner_struct_is_named_with_the_struct() -> None:
    (message,) = contracts.compare(published([("pair", Pair)]), published([("pair", PairNeeds)]))
    assert message.startswith("Sealed.v1: `Pair.right` is newly required: found no default, expected 0; ")


def test_every_breach_is_named_and_not_the_first_alone() -> None:
    messages = contracts.compare(published(SCORE), published([("score", int, 1), ("step", int)]))
    assert [message.split("`")[1] for message in messages] == ["job", "score", "step"]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (published(SCORE), published(SCORE)),
        (published(SCORE), published([*SCORE, ("why", str, ""), ("best", str | None, None)])),
        (published([("job", str)]), published([("job", str, "")])),
        (published([("pause", Narrow)]), published([("pause", Wide)])),
        (published([("pair", Pair)]), published([("pair", PairGrown)])),
        (published(SCORE), published(SCORE[::-1])),
    ],
    ids=["nothing", "fields with defaults", "a default", "a wider enum", "an inner field with a default", "the order"],
)
def test_what_readers_and_old_logs_do_not_notice_is_fine(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert contracts.compare(before, after) == []


# -- the check


def test_the_check_names_files_that_differ_are_missing_or_left_over(tmp_path: Path) -> None:
    folder = tmp_path / "schemas"
    assert len(contracts.generate(folder)) == 1 + 2 * len(CATALOGUE)
    assert contracts.check(folder, folder, GOLDEN) == []
    (folder / "events" / "JobStarted.v1.json").write_text("{}\n")
    (folder / "asyncapi.json").unlink()
    (folder / "events" / "JobBlessed.v1.json").write_text("{}\n")
    first, second, third = contracts.check(folder, golden=GOLDEN)
    assert first.endswith("asyncapi.json: found nothing, expected what reef_bus/ generates; run `make schemas`")
    assert "JobStarted.v1.json: found other text" in second
    assert "JobBlessed.v1.json: found no such event" in third


def test_the_check_compares_with_what_was_published(tmp_path: Path) -> None:
    contracts.generate(tmp_path / "schemas")
    contracts.generate(tmp_path / "base")
    older = read(tmp_path / "base" / "events" / "JobStarted.v1.json")
    older["properties"]["worker"] = {"type": "string"}
    (tmp_path / "base" / "events" / "JobStarted.v1.json").write_text(json.dumps(older))
    (tmp_path / "base" / "events" / "JobBlessed.v1.json").write_text("{}")
    gone, removed = contracts.check(tmp_path / "schemas", tmp_path / "base", GOLDEN)
    assert "JobBlessed.v1.json: found no file, expected the published schema to stay" in gone
    assert removed.startswith("JobStarted.v1: `worker` is removed")


def test_a_base_that_is_not_there_is_no_agreement(tmp_path: Path) -> None:
    assert "found no folder" in contracts.check(SCHEMAS, tmp_path / "nothing")[0]


def test_the_command_says_what_it_found_and_its_status_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "schemas"
    assert contracts.main(["generate", str(folder)]) == 0
    assert "files written" in capsys.readouterr().out
    assert contracts.main(["check", str(folder), "--json"]) == 1  # no golden samples beside this folder
    said = json.loads(capsys.readouterr().out)
    assert len(said["problems"]) == len(CATALOGUE) and said["written"] == []
    assert contracts.main(["check", str(SCHEMAS)]) == 0
    assert capsys.readouterr().out == "no problems\n"


# -- what was once written


@pytest.mark.parametrize("path", SAMPLES, ids=stem)
def test_a_golden_sample_decodes_to_the_current_class_and_loses_nothing(path: Path) -> None:
    line = read(path)
    recorded = envelope.from_json(line)
    assert type(recorded.event) is CATALOGUE[path.stem.partition(".")[0]]
    if line["type"] != envelope.type_of(recorded.event):
        return  # an older version: its step has its own test
    again = plainly(recorded)
    assert {key: again["data"][key] for key in line["data"]} == line["data"]  # fields that came later have defaults
    assert {**again, "data": None} == {**line, "data": None}


@pytest.mark.parametrize("path", SAMPLES, ids=stem)
def test_a_golden_sample_lies_on_its_subject_under_the_id_that_its_bytes_give(path: Path) -> None:
    line = read(path)
    event, address = envelope.from_json(line).event, topology.parse(line["subject"])
    assert (address.family, address.id, address.name) == (event.family, event.key, type(event).__name__)
    body = json.dumps(line["data"], ensure_ascii=False, separators=(",", ":")).encode()
    derived = envelope.event_id(event.chain, line["prev"], address.name, line["boot"], body)
    own = line["data"].get("record") or line["data"].get("report")
    assert line["id"] == (own if event.family == "record" else derived)


class SessionMoved(Event, frozen=True, kw_only=True):
    """A session went to another release."""

    family: ClassVar[str] = "train"
    id_field: ClassVar[str] = "scenario"
    version: ClassVar[int] = 3
    scenario: str
    session: str
    release: str
    hops: int


def to_v2(data: dict[str, Any]) -> dict[str, Any]:
    return {**{key: value for key, value in data.items() if key != "load_id"}, "release": data["load_id"]}


def to_v3(data: dict[str, Any]) -> dict[str, Any]:
    return {**data, "scenario": "default", "hops": 1}


@pytest.fixture
def grown(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A vocabulary in which SessionMoved has reached version 3."""
    monkeypatch.setitem(CATALOGUE, "SessionMoved", SessionMoved)
    monkeypatch.setitem(envelope._DECODERS, "SessionMoved", msgspec.json.Decoder(SessionMoved))
    monkeypatch.setattr(upcast, "STEPS", {("SessionMoved", 1): to_v2, ("SessionMoved", 2): to_v3})
    return monkeypatch


def line_of(version: int, data: dict[str, Any]) -> dict[str, Any]:
    line = {"type": f"reef.SessionMoved.v{version}", "subject": "reef.field.train.default.SessionMoved", "data": data}
    return {**read(GOLDEN / "JobStarted.v1.json"), **line}


@pytest.mark.parametrize(
    ("version", "data"),
    [
        (1, BACK),
        (2, {"session": "sess-9", "release": "q7:1"}),
        (3, {"scenario": "default", "session": "sess-9", "release": "q7:1", "hops": 1}),
    ],
)
def test_every_older_version_is_read_through_its_steps(
    grown: pytest.MonkeyPatch, version: int, data: dict[str, Any]
) -> None:
    expected = SessionMoved(scenario="default", session="sess-9", release="q7:1", hops=1)
    assert envelope.from_json(line_of(version, data)).event == expected


def test_a_version_from_the_future_halts_its_reader(grown: pytest.MonkeyPatch) -> None:
    with pytest.raises(ContractError, match="up to v3"):
        envelope.from_json(line_of(4, {}))


def test_a_new_version_needs_the_frozen_schema_a_step_and_a_sample(grown: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder, golden = tmp_path / "schemas", tmp_path / "golden"
    contracts.generate(folder)
    golden.mkdir()
    for sample in SAMPLES:
        (golden / sample.name).write_bytes(sample.read_bytes())
    (golden / "SessionMoved.v1.json").write_text(json.dumps(line_of(1, BACK)))
    (golden / "SessionMoved.v2.json").write_text(json.dumps(line_of(2, {"session": "sess-9"})))
    grown.setattr(upcast, "STEPS", {("SessionMoved", 2): to_v3})
    frozen = [f"{folder / 'events' / f'SessionMoved.v{v}.json'}: found no file, expected the frozen" for v in (1, 2)]
    expected = [
        frozen[0],
        "SessionMoved.v1: found no step to v2",
        frozen[1],
        f"{golden / 'SessionMoved.v2.json'}: found ContractError",
        f"{golden / 'SessionMoved.v3.json'}: found no golden sample",
    ]
    problems = contracts.check(folder, golden=golden)
    assert [p[: len(e)] for p, e in zip(problems, expected, strict=True)] == expected


def test_generating_again_leaves_the_files_of_older_versions(grown: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "events").mkdir()
    (tmp_path / "events" / "SessionMoved.v1.json").write_text("as published\n")
    contracts.generate(tmp_path)
    assert (tmp_path / "events" / "SessionMoved.v1.json").read_text() == "as published\n"
    assert (tmp_path / "events" / "SessionMoved.v3.json").exists()


# -- against git


def git(*arguments: str) -> bytes:
    """What git answers; nothing where it has no answer, or is not there."""
    try:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=True, timeout=30).stdout
    except (OSError, subprocess.CalledProcessError):
        return b""


def test_the_contracts_are_compatible_with_what_git_has_published(tmp_path: Path) -> None:
    asked = (("rev-parse", "-q", "--verify", "HEAD"), ("rev-parse", "-q", "--verify", "HEAD^1"))
    found = {git(*question).strip().decode() for question in (*asked, ("merge-base", "HEAD", "origin/main"))}
    archives = {commit: git("archive", commit, "schemas") for commit in sorted(found - {""})}
    if not any(archives.values()):
        print("nothing to compare with: git has no history of schemas/ here")
        return
    for commit, archive in archives.items():
        if archive:
            with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
                tar.extractall(tmp_path / commit, filter="data")
            assert contracts.check(SCHEMAS, tmp_path / commit / "schemas") == []
