"""`reef-bus log roll` on a real nats-server: a full log is archived, the next one goes on from its state; and it may be
interrupted anywhere.

Knows: the command line, the streams, a history that was appended by hand. Must not know: the roles.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from reef_bus import cli_keep, roll
from reef_bus.artifacts import ArtifactStore
from reef_bus.audit import read_export
from reef_bus.cli import main
from reef_bus.core.start import decode_start, encode_start
from reef_bus.embedded import Lock, NatsServer
from reef_bus.errors import ContractError, Rejected, Unavailable
from reef_bus.events import Draft, LogOpened
from reef_bus.jetstream import JetStreamJournal, connect
from reef_bus.journal import LOG, open_log
from tests.facts import E0, dispatched, joined, target, trained
from tests.integration.keep import HISTORY, deployment, digest, with_server, write

pytestmark = pytest.mark.integration

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_keep, "SILENCE_S", 0.05)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return deployment(tmp_path_factory.mktemp("made") / "state")


@pytest.fixture
def state(made: Path, tmp_path: Path) -> Path:
    """A state folder of one's own: the same history, without writing it again."""
    return Path(shutil.copytree(made, tmp_path / "state"))


def said(capsys: Capture, *words: str) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main(words)
    out, err = capsys.readouterr()
    return code, out, err.replace("\n", " ")


def events(capsys: Capture, state: Path) -> list[dict[str, Any]]:
    code, out, err = said(capsys, "log", "--state", str(state), "--tail", "0", "--json")
    assert code == 0, err
    return [json.loads(line) for line in out.splitlines()]


def test_a_rolled_log_begins_where_the_old_one_ended(state: Path, capsys: Capture) -> None:
    before = events(capsys, state)
    code, out, _ = said(capsys, "log", "roll", "--state", str(state), "--json")
    done = json.loads(out)
    assert (code, done["archived"], done["begins"]) == (0, 19, 20)
    [opened] = events(capsys, state)
    assert (opened["sequence"], opened["type"], opened["prev"]) == (20, "reef.LogOpened.v1", 0)
    found = opened["data"]
    assert (found["incarnation"], found["predecessor_seq"]) == ("inc", 19)
    assert found["predecessor_id"] == before[-1]["id"]
    assert found["predecessor"] == f"REEF_reef_LOG@{roll.sha256(Path(done['archive']))}"
    assert [r.id for r in read_export(done["archive"]).log] == [each["id"] for each in before]
    code, out, _ = said(capsys, "audit", done["archive"], "--json")
    assert (code, json.loads(out)["violations"], json.loads(out)["consumed"]) == (0, [], 1)
    start = decode_start(ArtifactStore(state / "artifacts").get(found["start"]["digest"]))
    assert (start.head, start.sequence, start.base, start.dispatched) == ("inc:1", 1, "c1", 1)
    assert {r.load_id: r.manifest for r in start.releases} == {
        "inc:0": digest("digest-of-base"),
        "inc:1": digest("digest-of-c1"),
    }
    assert (start.floor, start.taken) == (1, ())


def test_status_and_audit_understand_a_rolled_log(state: Path, capsys: Capture) -> None:
    assert said(capsys, "log", "roll", "--state", str(state))[0] == 0
    code, out, _ = said(capsys, "status", "--state", str(state), "--json")
    found = json.loads(out)
    assert (code, found["head"]["load_id"], found["head"]["candidate"], found["releases"]) == (0, "inc:1", "c1", 2)
    assert (found["engines"], found["scenario"]) == ({}, "digit")
    code, out, _ = said(capsys, "audit", "--state", str(state), "--json")
    audit = json.loads(out)
    assert (code, audit["violations"], audit["log_events"], audit["records"]) == (0, [], 1, 2)
    assert audit["unchecked"][0].startswith("2 answers as of LOG 19 or before")
    export = state.parent / "export.jsonl"
    assert said(capsys, "export", "--state", str(state), "-o", str(export))[0] == 0
    assert said(capsys, "audit", str(export))[0] == 0


def test_a_record_that_the_old_log_consumed_is_not_consumed_again(state: Path, capsys: Capture) -> None:
    """The audit of the new log alone finds it: r1 was consumed before, r2 was not."""
    assert said(capsys, "log", "roll", "--state", str(state))[0] == 0

    async def train_on_r1_again(journal: JetStreamJournal, store: ArtifactStore) -> None:
        await write(journal, store, [*REJOINED, dispatched("job-c1", "c1", 2)])

    with_server(state, train_on_r1_again)
    code, out, _ = said(capsys, "audit", "--state", str(state), "--json")
    texts = [each["text"] for each in json.loads(out)["violations"]]
    assert code == 1 and any("r1" in text and "before this log began" in text for text in texts), texts


REJOINED = HISTORY[1:2]  # the trainer, again


def test_a_rolled_log_is_rolled_again(state: Path, capsys: Capture) -> None:
    assert said(capsys, "log", "roll", "--state", str(state))[0] == 0
    code, _, err = said(capsys, "log", "roll", "--state", str(state))
    assert code == 2 and "nothing to roll: the log holds 1 events" in err

    async def go_on(journal: JetStreamJournal, store: ArtifactStore) -> None:
        await write(journal, store, [*REJOINED, joined("e0"), *trained("c2", "c1", 2)])

    with_server(state, go_on)
    code, out, err = said(capsys, "log", "roll", "--state", str(state), "--json")
    assert (code, json.loads(out)["begins"]) == (0, 28), err
    [opened] = events(capsys, state)
    start = decode_start(ArtifactStore(state / "artifacts").get(opened["data"]["start"]["digest"]))
    assert (start.head, start.selected, start.base, start.dispatched) == ("inc:1", ("c1", "c2"), "c2", 2)
    assert start.floor == 3
    code, out, _ = said(capsys, "audit", json.loads(out)["archive"], "--json")
    assert (code, json.loads(out)["log_events"], json.loads(out)["jobs"]) == (0, 8, 1)


def test_a_log_with_an_open_publication_is_not_rolled(state: Path, capsys: Capture) -> None:
    assert said(capsys, "log", "roll", "--state", str(state))[0] == 0

    async def go_on(journal: JetStreamJournal, store: ArtifactStore) -> None:
        await write(journal, store, [*REJOINED, joined("e0"), *trained("c2", "c1", 2), target(2, "c2", E0)])

    with_server(state, go_on)
    code, _, err = said(capsys, "log", "roll", "--state", str(state))
    assert code == 2 and "publication inc:2 is open: e0 and a publisher have to end it" in err
    _, out, _ = said(capsys, "status", "--state", str(state), "--json")
    assert json.loads(out)["open_publication"]["load_id"] == "inc:2"


def test_a_log_with_an_open_job_is_not_rolled(tmp_path: Path, capsys: Capture) -> None:
    state = deployment(tmp_path / "state", (*HISTORY, dispatched("j2", "c1", 2)))
    code, _, err = said(capsys, "log", "roll", "--state", str(state))
    assert code == 2 and "job j2 is open: the trainer has to finish it" in err and "max-jobs=2" in err
    assert len(events(capsys, state)) == 20


def test_nobody_may_run(state: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = Lock(state / "lock", "the state folder")
    code, _, err = said(capsys, "log", "roll", "--state", str(state))
    assert code == 2 and "in use by process" in err
    lock.release()
    listened = JetStreamJournal.beats

    async def hear(journal: JetStreamJournal, callback: Callable[[dict[str, Any]], None]) -> None:
        await listened(journal, callback)
        await journal.client.flush()
        await journal.beat("engine", "e7", {"id": "e7"})

    monkeypatch.setattr(JetStreamJournal, "beats", hear)
    code, _, err = said(capsys, "log", "roll", "--state", str(state))
    assert code == 2 and "the deployment runs: e7 heard; stop it first" in err
    assert len(events(capsys, state)) == 19


def test_a_roll_needs_the_state_folder(capsys: Capture) -> None:
    code, _, err = said(capsys, "log", "roll", "--url", "nats://127.0.0.1:1")
    assert code == 2 and "name it by -c FILE or --state DIR" in err
    code, _, err = said(capsys, "log", "--archive", "x", "show", "3")
    assert code == 2 and "--archive belongs to" in err


# -- interrupted

STEPS = [(roll, "_archive"), (roll, "_write_plan"), *((JetStreamJournal, each) for each in ("drop", "apply", "append"))]


def interrupted(monkeypatch: pytest.MonkeyPatch, where: Any, name: str, done: bool) -> None:
    """That step fails once, with or without having done its work."""
    original, armed = getattr(where, name), [True]

    def fail() -> None:
        if armed.pop():
            armed.append(False)
            raise Unavailable("interrupted here")
        armed.append(False)

    async def later(*args: Any) -> Any:
        found = await original(*args) if done else None
        fail()
        return found if done else await original(*args)

    def at_once(*args: Any) -> Any:
        found = original(*args) if done else None
        fail()
        return found if done else original(*args)

    monkeypatch.setattr(where, name, later if asyncio.iscoroutinefunction(original) else at_once)


@pytest.mark.parametrize("done", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("where", "name"), STEPS, ids=[name for _, name in STEPS])
def test_an_interrupted_roll_is_completed_by_the_same_command(
    state: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, where: Any, name: str, done: bool
) -> None:
    before = events(capsys, state)
    with monkeypatch.context() as patched:
        interrupted(patched, where, name, done)
        code, _, err = said(capsys, "log", "roll", "--state", str(state))
        assert code == 3 and "interrupted here" in err
    with_server(state, not_a_new_beginning)
    code, out, err = said(capsys, "log", "roll", "--state", str(state), "--json")
    assert code == 0, err
    [opened] = events(capsys, state)
    data = opened["data"]
    assert (opened["sequence"], data["incarnation"], data["predecessor_id"]) == (20, "inc", before[-1]["id"])
    assert [r.id for r in read_export(json.loads(out)["archive"]).log] == [each["id"] for each in before]
    assert not (state / "run" / "roll.json").exists()
    assert said(capsys, "audit", "--state", str(state))[0] == 0


async def not_a_new_beginning(journal: JetStreamJournal, store: ArtifactStore) -> None:
    """Whoever comes up meanwhile finds a whole log, or is told what to run; it never opens another one."""
    try:
        await journal.apply(1)
        await open_log(journal, "another", "supervisor")
    except Rejected as error:
        assert "running it again: `reef-bus log roll`" in str(error)
        return
    begin, _ = await journal.extent(LOG)
    first = await journal.read(LOG, begin)
    assert first is not None and isinstance(first.event, LogOpened) and first.event.incarnation == "inc"


def test_what_was_written_between_two_tries_is_rolled_too(
    state: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        interrupted(patched, JetStreamJournal, "drop", False)
        assert said(capsys, "log", "roll", "--state", str(state))[0] == 3

    async def one_more(journal: JetStreamJournal, store: ArtifactStore) -> None:
        await journal.append(Draft(event=joined("e9"), writer="engine/e9", boot="e9.1"), 0)

    with_server(state, one_more)
    assert said(capsys, "log", "roll", "--state", str(state))[0] == 0
    assert events(capsys, state)[0]["data"]["predecessor_seq"] == 20


def test_a_plan_that_was_left_behind_is_no_roll(state: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted after everything was done, and then the new log went on: the next roll is a roll."""
    with monkeypatch.context() as patched:
        interrupted(patched, JetStreamJournal, "append", True)
        assert said(capsys, "log", "roll", "--state", str(state))[0] == 3

    async def go_on(journal: JetStreamJournal, store: ArtifactStore) -> None:
        await write(journal, store, [*REJOINED])

    with_server(state, go_on)
    code, out, err = said(capsys, "log", "roll", "--state", str(state), "--json")
    assert (code, json.loads(out)["begins"]) == (0, 22), err


def test_a_damaged_archive_deletes_nothing(state: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        interrupted(patched, JetStreamJournal, "drop", False)
        assert said(capsys, "log", "roll", "--state", str(state), "--archive", str(state / "kept"))[0] == 3
    [archive] = (state / "kept").iterdir()
    archive.write_bytes(archive.read_bytes()[:-20])
    code, _, err = said(capsys, "log", "roll", "--state", str(state))
    assert code == 2 and f"{archive} is not the archive that was written" in err
    assert len(events(capsys, state)) == 19


def test_a_roll_that_another_version_began_is_begun_anew(
    state: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        interrupted(patched, JetStreamJournal, "drop", False)
        assert said(capsys, "log", "roll", "--state", str(state))[0] == 3
    path, store = state / "run" / "roll.json", ArtifactStore(state / "artifacts")
    plan = msgspec.json.decode(path.read_bytes(), type=roll.Plan)
    assert plan.opened.start is not None
    other = store.put(encode_start(msgspec.structs.replace(decode_start(store.get(plan.opened.start.digest)), floor=0)))
    opened = msgspec.structs.replace(plan.opened, start=other)
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(plan, opened=opened)))
    code, _, err = said(capsys, "log", "roll", "--state", str(state))
    assert code == 2 and "another one wrote it" in err and "remove roll.json, and roll again" in err
    assert len(events(capsys, state)) == 19
    path.unlink()
    assert said(capsys, "log", "roll", "--state", str(state))[0] == 0
    assert len(events(capsys, state)) == 1


def test_a_lost_start_is_named(state: Path, capsys: Capture) -> None:
    assert said(capsys, "log", "roll", "--state", str(state))[0] == 0
    store = ArtifactStore(state / "artifacts")
    blob = store.path(events(capsys, state)[0]["data"]["start"]["digest"])
    blob.unlink()
    code, _, err = said(capsys, "status", "--state", str(state))
    assert code == 2 and f"no blob at {blob}: copy it there" in err


# -- who still runs, and who begins


async def test_a_consumer_of_the_old_log_stops_and_a_new_one_begins(tmp_path: Path) -> None:
    server = NatsServer(tmp_path / "nats")
    server.start()
    journal = await connect(server.url, "reef", "live")
    store = ArtifactStore(tmp_path / "artifacts")
    try:
        await journal.apply(1)
        await write(journal, store, HISTORY)
        old, new = journal.follow(LOG), journal.follow(LOG)
        while (await anext(old))[-1].seq != 19:  # however many batches that takes
            pass
        await roll.roll(journal, store, tmp_path, 1)
        assert [each.seq for each in await asyncio.wait_for(anext(new), 5)] == [20]
        with pytest.raises(ContractError, match="this is another log, or it was cut"):
            await asyncio.wait_for(anext(old), 15)
    finally:
        await journal.close()
        server.stop()
