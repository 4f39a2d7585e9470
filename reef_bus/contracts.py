"""The published contracts: JSON Schemas, an AsyncAPI document and examples, generated from the code, and their check.

Knows: the catalogue, the topology, how schemas are compared, the layout of `schemas/` and of the golden samples. Must
not know: a broker client, or what events mean. Nothing at run time reads what it writes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from reef_bus import envelope, topology, upcast
from reef_bus.events import CATALOGUE, Draft, Event

Json = dict[str, Any]
DIALECT = "https://json-schema.org/draft/2020-12/schema"
FORMAT = "application/schema+json;version=draft-2020-12"
GOLDEN = Path("tests", "golden", "events")
_HEADERS: Mapping[str, Json] = {
    "Nats-Msg-Id": {"description": "The same as ce-id, so that the broker recognises a repeated append."},
    "ce-specversion": {"description": "CloudEvents, binary mode.", "const": envelope.SPEC_VERSION},
    "ce-id": {"description": "A record's own id; otherwise 32 hex digits over chain, prev, name, boot and payload."},
    "ce-type": {"description": "reef.<Name>.v<N>: the only place that carries the payload's version."},
    "ce-source": {"description": "/reef/ and the writer.", "pattern": "^/reef/"},
    "ce-subject": {"description": "The subject of the append.", "pattern": r"^reef\."},
    "ce-time": {"description": "The writer's clock, for display only; the log's order is the sequence."},
    "ce-datacontenttype": {"description": "The payload's form.", "const": "application/json"},
    "ce-prev": {"description": "The chain's last stored sequence when this was written.", "pattern": "^[0-9]+$"},
    "ce-causationid": {"description": "The sequence that this event reacts to; 0: none.", "pattern": "^[0-9]+$"},
    "ce-correlationid": {"description": "A publication, job or record; may be empty."},
    "ce-boot": {"description": "The boot of the writer."},
}

# What the examples show, by field name; other fields show a default or something of their type. Structs must be here.
_MEMBERS = [{"engine": "engine-0", "boot": "b-51c2"}, {"engine": "engine-1", "boot": "b-9e07"}]
_VALUES: Mapping[str, Any] = {
    **{"scenario": "sums", "component": "engine-1", "engine": "engine-1", "boot": "b-9e07", "incarnation": "k3v9"},
    **{"pid": 48213, "starts": 2, "exit": -9, "restarts": 4, "window_s": 300.0, "rules": 1, "attempt": 1, "step": 12},
    **{"backend": "torch", "offers": ["tcp", "files"], "accepts": ["tcp", "files"], "mutates_in_place": False},
    **{"model": "Qwen/Qwen2.5-0.5B", "recipe": "grpo", "evaluator": "holdout", "selector": "better-than-base"},
    **{"weights": {"digest": "3f0a" * 16, "size": 988_097_824}, "tensor_bytes": 988_065_792, "method": "received"},
    **{"optimizer": {"digest": "77d1" * 16, "size": 1_976_195_648}, "tensors": 290, "pause": "drain"},
    **{"batch": {"digest": "08be" * 16, "size": 1_482_240}, "blob": {"digest": "c45e" * 16, "size": 52_480}},
    **{"manifest": "e1b2" * 16, "job": "job-5d2e1f6a90b34c78", "records": 64, "record": "rec-000f31", "row": 3},
    **{"base": "cand-11a4c07be2d95f36", "candidate": "cand-8c20f9d47e6b1a53", "metrics": {"reward": 0.75}},
    **{"publication": "pub-2b7f60c19d8e4a35", "load_id": "k3v9:12", "parent": "k3v9:11", "previous": "k3v9:11"},
    **{"transport": "tcp", "address": "10.0.0.7:40123", "token": "t-4be1", "sender": "trainer", "mode": "fenced"},
    **{"members": _MEMBERS, "excluded": _MEMBERS[1:], "url": "http://10.0.0.8:8000"},
    **{"evidence": [{**_MEMBERS[0], "seq": 118, "manifest": "e1b2" * 16}], "next_attempt": 2},
    **{"resumed_at": 1_767_225_000_000_000_000, "served": 1834, "stopped_ms": 41.5, "bytes": 988_065_792, "ms": 812.5},
    **{"regions": ["weights", "kv_cache"], "fence": 116, "colocated": False},
    **{"cause": "stalled", "reason": "receiver_failed", "detail": "no byte for 10 s", "why": "reward 0.75 against 0.5"},
    **{"as_of": 120, "done_as_of": 120, "prompt": "12+30=", "answer": "42", "prompt_tokens": 6, "answer_tokens": 2},
    **{"tags": {"split": "train"}, "temperature": 1.0, "report": "rep-000a7c", "references": ["rec-000f31"]},
    **{"score": 1.0, "feedback": "exact match", "metadata": {"grader": "exact"}},
    **{"actor": "ada", "head": "k3v9:12", "release": "k3v9:9", "request": 131, "started_by": "b-1f30"},
    **{"restart": 1, "delay_s": 2.0, "pids": [48213]},
    **{"lora": {"rank": 8, "alpha": 16, "targets": ["q_proj", "v_proj"]}, "adapter": "reef-adapter-bWF0aA.k3v9.12"},
}


def schema(cls: type[Event]) -> Json:
    """The JSON Schema of the event's payload. Objects stay open: readers ignore what they do not know."""
    (root,), parts = msgspec.json.schema_components((cls,), ref_template="#/$defs/{name}")
    for part in (part for part in parts.values() if "properties" in part):
        part["additionalProperties"] = True
    own = root["$ref"].rpartition("/")[2]
    shared = {key: parts[key] for key in sorted(parts) if key != own}
    head = {"$schema": DIALECT, "$id": f"urn:reef-bus:event:{cls.__name__}:v{cls.version}"}
    whole = {**head, **parts[own], **({"$defs": shared} if shared else {})}
    return dict(json.loads(json.dumps(whole)))  # a default that is a tuple is a list to whoever reads the file


def example(cls: type[Event]) -> Json:
    """One plausible instance as a whole recorded event, in the structured CloudEvents form."""
    event = msgspec.convert({name: _value(name, field) for name, field in schema(cls)["properties"].items()}, cls)
    row, body = topology.FAMILIES[cls.family], envelope.payload(event)
    prev, subject = (119 if row.compares else 0), topology.subject("demo", event)
    draft = Draft(event=event, writer=f"{row.writer}-0", boot="b-27d4", cause=prev)
    header = envelope.headers(draft, envelope.identify(draft, prev, body), prev, subject, now="")
    whole = envelope.to_json(envelope.decode(121, 1_767_225_600_000_000_000, subject, header, body))
    return dict(json.loads(json.dumps(whole)))


def _value(name: str, field: Json) -> Any:
    kinds = {"string": name, "integer": 1, "number": 0.5, "boolean": False, "array": [], "object": {}}
    kind = kinds.get(field.get("type", ""), field.get("enum", [None])[0])
    value = _VALUES.get(name, field.get("default", kind))
    return kind if "enum" in field or (kind is not None and type(value) is not type(kind)) else value


def asyncapi() -> Json:
    """The AsyncAPI 3.0 document: who appends which events where, and what the broker compares."""
    held = {name: [c for c in CATALOGUE.values() if c.family == name] for name in topology.FAMILIES}
    rows = [row for row in topology.FAMILIES.values() if held[row.name]]
    return {
        "asyncapi": "3.0.0",
        "id": "urn:reef-bus:log",
        "info": {"title": "reef-bus", "version": "1", "description": "Generated from reef_bus/: run `make schemas`."},
        "defaultContentType": "application/json",
        "channels": {row.name: _channel(row, held[row.name]) for row in rows},
        "operations": {
            f"{row.writer}-appends-{row.name}": {
                "action": "send",
                "channel": {"$ref": f"#/channels/{row.name}"},
                "summary": f"Only the {row.writer} appends to `{row.name}`.",
                "x-permissions": list(topology.permissions("{deployment}", row.writer)),
            }
            for row in rows
        },
        "components": {
            "schemas": {"Headers": _headers()},
            "messages": {f"{name}.v{cls.version}": _message(cls) for name, cls in CATALOGUE.items()},
        },
        "x-jetstream": {"streams": [msgspec.to_builtins(s) for s in topology.streams("{deployment}")]},
    }


def _channel(row: topology.Family, classes: list[type[Event]]) -> Json:
    keyed = next(cls for cls in classes if cls.id_field)
    event = msgspec.convert({**example(keyed)["data"], keyed.id_field: "{id}"}, keyed)
    ids = " or ".join(sorted({cls.id_field or "`_` for the whole deployment" for cls in classes}))
    names = [f"{cls.__name__}.v{cls.version}" for cls in classes]
    filters = {"filter": topology.chain_filter("{deployment}", row, "{id}"), "expects": "ce-prev"}
    return {
        "address": ".".join((*topology.subject("{deployment}", event).split(".")[:3], "{id}", "{event}")),
        "parameters": {
            "deployment": {"description": "The name of the deployment."},
            "id": {"description": f"{ids}; base64url behind `b64-` where it is no token."},
            "event": {"description": "The event, without its version.", "enum": [cls.__name__ for cls in classes]},
        },
        "messages": {name: {"$ref": f"#/components/messages/{name}"} for name in names},
        "x-jetstream": {
            "stream": topology.stream_name("{deployment}", row.stream),
            "compareAndAppend": filters if row.compares else None,
            "maxEventBytes": topology.MAX_EVENT_BYTES,
        },
    }


def _message(cls: type[Event]) -> Json:
    name = f"{cls.__name__}.v{cls.version}"
    typed = {"properties": {"ce-type": {"const": f"reef.{name}"}}}
    return {
        "name": cls.__name__,
        "summary": schema(cls).get("description", "").partition("\n")[0],
        "headers": {"allOf": [{"$ref": "#/components/schemas/Headers"}, typed]},
        "payload": {"schemaFormat": FORMAT, "schema": {"$ref": f"events/{name}.json"}},
        "x-example": f"examples/{name}.json",
    }


def _headers() -> Json:
    cls = next(iter(CATALOGUE.values()))
    draft = Draft(event=msgspec.convert(example(cls)["data"], cls), writer="", boot="")
    known = {name: {"type": "string", **_HEADERS.get(name, {})} for name in envelope.headers(draft, "", 0, "", "")}
    return {"type": "object", "properties": known, "required": list(known)}


def _documents() -> dict[str, str]:
    documents: dict[str, Json] = {"asyncapi.json": asyncapi()}
    for name, cls in CATALOGUE.items():
        documents[f"events/{name}.v{cls.version}.json"] = schema(cls)
        documents[f"examples/{name}.v{cls.version}.json"] = example(cls)
    return {path: json.dumps(document, indent=2, ensure_ascii=False) + "\n" for path, document in documents.items()}


def generate(folder: Path) -> list[Path]:
    """Write every current contract. Files of older versions are left as they are: they are frozen."""
    documents = _documents()
    for path, text in documents.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")
    return [folder / path for path in documents]


def compare(old: Json, new: Json) -> list[str]:
    """What in `new` breaks readers or logs of `old`, two schemas of one version. Inner structs pair up by name."""
    _, _, _, name, version = old["$id"].split(":")
    v = int(version.removeprefix("v"))
    remedy = f"leave v{v} as it is and make it v{v + 1} with an upcaster in reef_bus/upcast.py and a golden sample in"
    before, after = ({"": side, **side.get("$defs", {})} for side in (old, new))
    changes = [f"`{at}{change}" for at in before if at in after for change in _fields(at, before[at], after[at])]
    return [f"{name}.v{v}: {change}; {remedy} {GOLDEN.as_posix()}" for change in changes]


def _fields(at: str, old: Json, new: Json) -> Iterator[str]:
    before, after = old.get("properties", {"": old}), new.get("properties", {"": new})  # a shared enum has no fields
    needed, needs = set(old.get("required", ())), set(new.get("required", ()))
    for name, field in before.items():
        mark = f"{'.' if at and name else ''}{name}`"
        if name not in after:
            yield f"{mark} is removed: found nothing, expected {_shape(field)}"
        elif name in needs - needed:
            yield f"{mark} is newly required: found no default, expected {field.get('default')!r}"
        elif change := _change(field, after[name], name in needed):
            yield f"{mark} {change}"
    added = (name for name in after if name in needs - before.keys())
    yield from (f"{'.' if at else ''}{name}` is new and required: found no default, expected one" for name in added)


def _change(old: Json, new: Json, needed: bool) -> str:
    if _shape(old) != _shape(new):
        return f"is retyped: found {_shape(new)}, expected {_shape(old)}"
    if not needed and old.get("default") != new.get("default"):
        return f"changes its default: found {new.get('default')!r}, expected {old.get('default')!r}"
    # More members are like a new event: readers that know less stop at one, so they are upgraded first.
    gone = [member for member in old.get("enum", ()) if member not in new.get("enum", ())]
    return f"has its enum narrowed: found {new.get('enum')}, expected {gone} to stay" if gone else ""


def _shape(field: Json) -> str:
    """The type with its limits, without what is judged by itself or only read by people."""
    kept = {key: field[key] for key in field if key not in {"title", "description", "examples", "default", "enum"}}
    return json.dumps(kept, sort_keys=True) if kept else "an enum" if "enum" in field else "anything"


def check(folder: Path, base: Path | None = None, golden: Path | None = None) -> list[str]:
    """What is wrong with the contracts in `folder`, also against `base`, an older such folder; empty: nothing."""
    if base and not base.is_dir():
        return [f"{base}: found no folder, expected the published schemas; extract them from git first"]
    return [*_drift(folder), *_past(folder, golden or folder.parent / GOLDEN), *(_broken(base, folder) if base else ())]


def _drift(folder: Path) -> Iterator[str]:
    for path, text in _documents().items():
        found = (folder / path).read_text(encoding="utf-8") if (folder / path).exists() else ""
        if found != text:
            state = "other text" if found else "nothing"
            yield f"{folder / path}: found {state}, expected what reef_bus/ generates; run `make schemas`"
    for file in sorted(folder.glob("events/*.json")):
        name, version = _named(file)
        if name not in CATALOGUE or version > CATALOGUE[name].version:
            yield f"{file}: found no such event in reef_bus/events.py, expected one: logs hold it for good; restore it"


def _past(folder: Path, golden: Path) -> Iterator[str]:
    """Every version has its sample, and every older one its schema and its step."""
    for name, version in ((name, v) for name, cls in CATALOGUE.items() for v in range(1, cls.version + 1)):
        frozen = folder / "events" / f"{name}.v{version}.json"
        if version < CATALOGUE[name].version and not frozen.exists():
            yield f"{frozen}: found no file, expected the frozen schema; restore it from git"
        steps = [(name, v) for v in range(version, CATALOGUE[name].version)]
        if steps and steps[0] not in upcast.STEPS:
            yield f"{name}.v{version}: found no step to v{version + 1}, expected one; add it to reef_bus/upcast.py"
        if all(step in upcast.STEPS for step in steps):
            yield from _unread(golden / frozen.name, f"reef.{name}.v{version}")


def _unread(sample: Path, type_name: str) -> Iterator[str]:
    if not sample.exists():
        yield f"{sample}: found no golden sample, expected one; begin with schemas/examples/{sample.name}"
        return
    try:
        line = json.loads(sample.read_text(encoding="utf-8"))
        envelope.from_json(line)
        if line["type"] != type_name:
            yield f"{sample}: found {line['type']}, expected {type_name}; name the file after what it holds"
    except Exception as error:  # an upcaster fails in any way it likes, and all that fail are to be named
        yield f"{sample}: found {error!r}, expected to decode; correct the upcaster, never the sample"


def _broken(base: Path, folder: Path) -> Iterator[str]:
    """What a reader of the contracts in `base` would trip over."""
    for file in sorted(base.glob("events/*.json")):
        name, version = _named(file)
        mine, text = folder / "events" / file.name, file.read_text(encoding="utf-8")
        if not mine.exists():
            yield f"{mine}: found no file, expected the published schema to stay; restore it from git"
        elif name in CATALOGUE and version == CATALOGUE[name].version:
            yield from compare(json.loads(text), schema(CATALOGUE[name]))
        elif mine.read_text(encoding="utf-8") != text:
            yield f"{mine}: found other text than published, expected older versions to be frozen; restore it from git"


def _named(file: Path) -> tuple[str, int]:
    name, _, version = file.stem.rpartition(".v")
    return name, int(version) if version.isdecimal() else 0


def main(arguments: list[str] | None = None) -> int:
    """`python -m reef_bus.contracts generate|check`; 1 when the check found something."""
    parser = argparse.ArgumentParser(prog="python -m reef_bus.contracts", description="Write or check schemas/.")
    parser.add_argument("command", choices=("generate", "check"))
    parser.add_argument("folder", nargs="?", type=Path, default=Path("schemas"))
    parser.add_argument("--base", type=Path, help="an older schemas/ that must stay readable")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args(arguments)
    checks = asked.command == "check"
    # What is overwritten may be published: the developer hears of a breach before the commit, not after.
    problems = check(asked.folder, asked.base) if checks else list(_broken(asked.base or asked.folder, asked.folder))
    written = [] if checks else [str(path) for path in generate(asked.folder)]
    lines = problems or [f"{asked.folder}: {len(written)} files written" if written else "no problems"]
    print(json.dumps({"problems": problems, "written": written}, indent=2) if asked.json else "\n".join(lines))
    return int(checks and bool(problems))


if __name__ == "__main__":
    sys.exit(main())
