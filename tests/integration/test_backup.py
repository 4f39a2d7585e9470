"""`reef-bus backup` and `restore` on a real nats-server: every byte is compared, nothing is half done, what is restored
goes on under a new incarnation.

Knows: the command line, the streams, a history that was appended by hand. Must not know: the roles.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reef_bus import cli_keep
from reef_bus.artifacts import ArtifactStore, place
from reef_bus.audit import read_export
from reef_bus.core.start import decode_start
from reef_bus.jetstream import JetStreamJournal
from reef_bus.journal import LOG, RECORDS
from tests.facts import E0, dispatched, joined, target, trained
from tests.integration.keep import HISTORY, deployment, digest, with_server, write
from tests.integration.test_roll import Capture, events, interrupted, not_a_new_beginning, said

pytestmark = pytest.mark.integration


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


def backed_up(capsys: Capture, state: Path) -> Path:
    code, _, err = said(capsys, "backup", str(state.parent / "backup"), "--state", str(state))
    assert code == 0, err
    return state.parent / "backup"


def manifest(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "manifest.json").read_bytes())
    return found


def test_a_backup_holds_the_history_and_every_blob_that_it_names(state: Path, capsys: Capture) -> None:
    code, out, err = said(capsys, "backup", str(state.parent / "backup"), "--state", str(state), "--json")
    assert (code, json.loads(out)["last"]) == (0, {"LOG": 19, "RECORDS": 4}), err
    folder = state.parent / "backup"
    inventory = manifest(folder)
    assert (inventory["deployment"], inventory["incarnation"]) == ("reef", "inc")
    made_up = ("sha-of-base", "digest-of-base", "sha-of-c1", "digest-of-c1", "sha-of-optimizer-c1")
    assert {digest(name) for name in made_up} < set(inventory["blobs"])
    assert len(inventory["blobs"]) == len(made_up) + 2  # the job's batch, and the answers' tokens
    for name in inventory["blobs"]:
        assert place(folder / "blobs", name).read_bytes() == place(state / "artifacts", name).read_bytes()
    assert [r.seq for r in read_export(folder / inventory["history"]).log] == list(range(1, 20))
    assert said(capsys, "audit", str(folder / inventory["history"]))[0] == 0


def test_a_second_backup_copies_what_is_new_and_mends_what_is_damaged(state: Path, capsys: Capture) -> None:
    folder = backed_up(capsys, state)
    first = manifest(folder)["history"]
    blob = place(folder / "blobs", digest("sha-of-c1"))
    kept = place(folder / "blobs", digest("sha-of-base"))
    before = kept.stat().st_mtime_ns
    blob.unlink()
    blob.write_bytes(b"other bytes")

    async def go_on(journal: JetStreamJournal, store: ArtifactStore) -> None:
        await write(journal, store, [joined("e9")])

    with_server(state, go_on)
    code, _, err = said(capsys, "backup", str(folder), "--state", str(state))
    assert code == 0 and "7 blobs, 1 of them new" in err
    assert blob.read_bytes() == b"sha-of-c1" and kept.stat().st_mtime_ns == before
    assert manifest(folder)["streams"]["LOG"]["last"] == 20 and manifest(folder)["history"] != first
    assert [path.name for path in folder.glob("history-*")] == [manifest(folder)["history"]]


def test_a_backup_names_the_blob_that_is_damaged_and_keeps_the_last_manifest(state: Path, capsys: Capture) -> None:
    folder = backed_up(capsys, state)
    before = manifest(folder)
    for root in (state / "artifacts", folder / "blobs"):
        place(root, digest("sha-of-c1")).unlink()
    place(state / "artifacts", digest("sha-of-c1")).write_bytes(b"rot")
    code, _, err = said(capsys, "backup", str(folder), "--state", str(state))
    assert code == 2 and f"{digest('sha-of-c1')} is damaged" in err
    assert manifest(folder) == before


def test_blobs_are_copied_where_they_cannot_be_linked(
    state: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def across_disks(*paths: Any) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", across_disks)
    folder = backed_up(capsys, state)
    for name in manifest(folder)["blobs"]:
        copy, original = place(folder / "blobs", name), place(state / "artifacts", name)
        assert copy.stat().st_ino != original.stat().st_ino and copy.read_bytes() == original.read_bytes()


# -- restore


def test_a_restored_deployment_goes_on_under_a_new_incarnation(state: Path, capsys: Capture) -> None:
    folder, new = backed_up(capsys, state), state.parent / "new"
    code, out, err = said(capsys, "restore", str(folder), "--state", str(new), "--json")
    assert code == 0, err
    done = json.loads(out)
    assert done["begins"] == 20 and done["incarnation"] not in ("", "inc")
    [opened] = events(capsys, new)
    assert (opened["sequence"], opened["data"]["incarnation"]) == (20, done["incarnation"])
    assert opened["data"]["predecessor_id"] == read_export(folder / manifest(folder)["history"]).log[-1].id
    code, out, _ = said(capsys, "status", "--state", str(new), "--json")
    assert json.loads(out)["head"] == {"load_id": "inc:1", "candidate": "c1", "manifest": digest("digest-of-c1")}
    code, out, _ = said(capsys, "audit", "--state", str(new), "--json")
    assert (code, json.loads(out)["violations"], json.loads(out)["records"]) == (0, [], 2)
    again = read_export(folder / manifest(folder)["history"]).records

    async def same(journal: JetStreamJournal, store: ArtifactStore) -> None:
        for record in again:
            found = await journal.read(RECORDS, record.seq)
            assert found is not None and (found.id, found.event, found.writer) == (
                record.id,
                record.event,
                record.writer,
            )
        await write(journal, store, [HISTORY[1], joined("e0"), *trained("c2", "c1", 2)])

    with_server(new, same)
    assert json.loads((new / "deployment.json").read_bytes())["state-dir"] == str(new)


def test_what_was_open_in_the_backup_is_over(tmp_path: Path, capsys: Capture) -> None:
    opened = (*HISTORY, *trained("c2", "c1", 2), target(2, "c2", E0), dispatched("j3", "c2", 3))
    state = deployment(tmp_path / "state", opened)
    folder, new = backed_up(capsys, state), tmp_path / "new"
    assert said(capsys, "restore", str(folder), "--state", str(new))[0] == 0
    start = decode_start(ArtifactStore(new / "artifacts").get(events(capsys, new)[0]["data"]["start"]["digest"]))
    assert (start.ended["c2"], start.sequence, start.dispatched, start.head) == ("halted", 2, 3, "inc:1")
    _, out, _ = said(capsys, "status", "--state", str(new), "--json")
    assert (json.loads(out)["open_publication"], json.loads(out)["open_job"]) == (None, None)


DAMAGE: dict[str, Callable[[Path], Path]] = {
    "a blob": lambda folder: place(folder / "blobs", digest("sha-of-c1")),
    "the history": lambda folder: folder / manifest(folder)["history"],
    "the manifest": lambda folder: folder / "manifest.json",
}


@pytest.mark.parametrize("lost", [False, True], ids=["damaged", "missing"])
@pytest.mark.parametrize("what", DAMAGE)
def test_nothing_is_restored_from_a_backup_that_is_not_whole(
    state: Path, capsys: Capture, what: str, lost: bool
) -> None:
    folder, new = backed_up(capsys, state), state.parent / "new"
    path = DAMAGE[what](folder)
    data = path.read_bytes()
    path.unlink()
    if not lost:
        path.write_bytes(data[:-7])
    code, _, err = said(capsys, "restore", str(folder), "--state", str(new))
    assert code == 2 and path.name in err, err
    assert not new.exists()


def test_a_deployment_that_holds_something_is_never_restored_over(state: Path, capsys: Capture) -> None:
    folder = backed_up(capsys, state)
    code, _, err = said(capsys, "restore", str(folder), "--state", str(state))
    assert code == 2 and "LOG of 'reef' holds events 1 to 19" in err
    assert len(events(capsys, state)) == 19
    code, _, err = said(capsys, "restore", str(folder))
    assert code == 2 and "--state NEWDIR, or -c FILE" in err


def test_events_name_their_deployment_and_so_must_the_restored_one(state: Path, capsys: Capture) -> None:
    folder, new = backed_up(capsys, state), state.parent / "new"
    code, _, err = said(capsys, "restore", str(folder), "--state", str(new), "--set", "deployment=other")
    assert code == 2 and "the backup is of deployment 'reef', this one is called 'other'" in err


@pytest.mark.parametrize("done", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("name", ["apply", "put_back", "append"])
def test_an_interrupted_restore_is_completed_by_the_same_command(
    state: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, name: str, done: bool
) -> None:
    folder, new = backed_up(capsys, state), state.parent / "new"
    with monkeypatch.context() as patched:
        interrupted(patched, JetStreamJournal, name, done)
        code, _, err = said(capsys, "restore", str(folder), "--state", str(new))
        assert code == 3 and "interrupted here" in err
    if (name, done) not in (("apply", False), ("append", True)):
        with_server(new, refused)
    assert said(capsys, "restore", str(folder), "--state", str(new))[0] == 0
    assert [each["sequence"] for each in events(capsys, new)] == [20]
    code, out, _ = said(capsys, "audit", "--state", str(new), "--json")
    assert (code, json.loads(out)["records"], json.loads(out)["reports"]) == (0, 2, 2)


async def refused(journal: JetStreamJournal, store: ArtifactStore) -> None:
    """Nobody opens a log of his own in a half restored deployment."""
    begin, last = await journal.extent(LOG)
    assert last < begin == 20
    await not_a_new_beginning(journal, store)


def test_a_backup_of_a_rolled_log_is_restored(state: Path, capsys: Capture) -> None:
    assert said(capsys, "log", "roll", "--state", str(state))[0] == 0
    folder, new = backed_up(capsys, state), state.parent / "new"
    archive = events(capsys, state)[0]["data"]["predecessor"].partition("@")[2]
    assert {archive, digest("sha-of-c1")} < set(manifest(folder)["blobs"])
    assert said(capsys, "restore", str(folder), "--state", str(new))[0] == 0
    [opened] = events(capsys, new)
    assert (opened["sequence"], opened["data"]["predecessor_seq"]) == (21, 20)
    _, out, _ = said(capsys, "status", "--state", str(new), "--json")
    assert json.loads(out)["head"]["load_id"] == "inc:1"
    assert said(capsys, "audit", "--state", str(new))[0] == 0
