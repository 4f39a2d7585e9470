"""Artifacts behind a URL, on an FTP server as a real process: the commands that keep a history, and a deployment."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from consumers.reef_supervisor.deployment import deployment as started
from reef_bus import cli_keep
from reef_bus.artifacts import ArtifactStore, place
from reef_bus.audit import read_export
from reef_bus.config import Artifacts, Inference
from reef_bus.errors import Rejected
from reef_bus.events import ReceiverVerified, ReleaseCommitted, TargetPersisted
from tests.e2e.live import CONFIG, Live, kill_at, live, recovered
from tests.ftp_server import FtpServer, ftp_server
from tests.integration.keep import deployment, digest
from tests.integration.test_backup import manifest
from tests.integration.test_roll import Capture, events, said

AWAY_S = 5.0

pytestmark = [pytest.mark.integration, pytest.mark.long]


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_keep, "SILENCE_S", 0.05)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[FtpServer]:
    with ftp_server(tmp_path / "served") as server:
        yield server


@pytest.fixture
def state(tmp_path: Path, served: FtpServer) -> Path:
    """A deployment that is down, and whose state folder holds no blob."""
    made = deployment(tmp_path / "state", artifacts=f"{served.url}/reef")
    assert not (made / "artifacts").exists()
    return made


def test_the_archive_of_a_rolled_log_lies_there_and_is_read_back(state: Path, capsys: Capture) -> None:
    before = events(capsys, state)
    code, out, err = said(capsys, "log", "roll", "--state", str(state), "--json")
    assert code == 0, err
    name = events(capsys, state)[0]["data"]["predecessor"].partition("@")[2]
    where = json.loads(out)["archive"]
    assert where.startswith("ftp://") and where.endswith(f"/reef/{name[:2]}/{name[2:4]}/{name}")
    archive = place(state.parent / "served" / "reef", name)
    assert [r.id for r in read_export(archive).log] == [each["id"] for each in before]
    code, out, _ = said(capsys, "audit", "--state", str(state), "--json")
    assert (code, json.loads(out)["violations"]) == (0, [])


def test_a_backup_and_a_restore_move_every_blob_and_name_a_damaged_one(
    state: Path, served: FtpServer, capsys: Capture
) -> None:
    kept, folder = served.folder / "reef", state.parent / "backup"
    code, _, err = said(capsys, "backup", str(folder), "--state", str(state))
    assert code == 0 and "7 blobs, 7 of them new" in err
    for name in manifest(folder)["blobs"]:
        assert place(folder / "blobs", name).read_bytes() == place(kept, name).read_bytes()
    shutil.rmtree(kept)  # what a backup is for
    new = state.parent / "new"
    code, _, err = said(capsys, "restore", str(folder), "--state", str(new))
    assert code == 0 and "7 blobs, 7 of them new" in err and not (new / "artifacts").exists()
    for name in manifest(folder)["blobs"]:
        assert place(folder / "blobs", name).read_bytes() == place(kept, name).read_bytes()
    spoiled = place(kept, digest("sha-of-c1"))
    spoiled.chmod(0o644)
    spoiled.write_bytes(b"rot")
    code, _, err = said(capsys, "backup", str(state.parent / "again"), "--state", str(new))
    assert code == 2 and f"{digest('sha-of-c1')} is damaged" in err
    assert not (state.parent / "again" / "manifest.json").exists()


def test_a_restore_may_name_another_place_for_the_blobs(state: Path, served: FtpServer, capsys: Capture) -> None:
    folder, new = state.parent / "backup", state.parent / "new"
    assert said(capsys, "backup", str(folder), "--state", str(state))[0] == 0
    to = ["--set", f"artifacts.at={served.url}/other"]
    code, _, err = said(capsys, "restore", str(folder), "--state", str(new), *to)
    assert code == 0, err
    assert place(served.folder / "other", digest("sha-of-c1")).read_bytes() == b"sha-of-c1"
    [opened] = events(capsys, new)
    assert (opened["sequence"], ArtifactStore(f"{served.url}/other").has(opened["data"]["start"]["digest"])) == (
        20,
        True,
    )


def test_the_doctor_says_whether_artifacts_can_be_kept(state: Path, served: FtpServer, capsys: Capture) -> None:
    def finding() -> dict[str, str]:
        _, out, _ = said(capsys, "doctor", "--state", str(state), "--json")
        return next(each for each in json.loads(out)["findings"] if each["name"] == "artifacts")

    assert finding()["state"] == "ok" and finding()["found"].startswith(f"{served.url}/reef can be written")
    served.kill()
    try:
        assert finding()["state"] == "failed" and "Connection refused" in finding()["found"]
    finally:
        served.start()


async def outlived(found: Live, served: FtpServer) -> None:
    """The server is away for a while, and an engine that is killed meanwhile cannot load the head: nobody is given up
    for it, and what waited goes on."""
    seq = found.world.seq
    served.kill()
    found.kill("engine-1")
    await found.until("engine-1 is there again, and serves nothing", found.whole)
    await asyncio.sleep(AWAY_S)
    assert not found.all_serve()
    served.start()
    await recovered(found, seq)
    assert not [r.name for r in found.events if r.name == "RecoveryHalted"]


async def test_a_deployment_whose_weights_move_through_it_survives_a_kill_of_each_side(
    tmp_path: Path, served: FtpServer
) -> None:
    """Trainer, engines and publisher as processes, which share nothing but the log and that server."""
    config = msgspec.structs.replace(
        CONFIG,
        artifacts=Artifacts(at=f"{served.url}/live"),
        inference=Inference(accepts=("files",)),
        training=msgspec.structs.replace(CONFIG.training, offers=("files",)),
    )
    async with live(tmp_path / "state", config) as found:
        for component, event in (("engine-1", "EngineFenced"), ("trainer", "SenderReady")):
            await recovered(found, await kill_at(found, component, event))
        await outlived(found, served)
        await found.client.stop()
        audit = await found.audit()
        committed = [r.event for r in found.events if isinstance(r.event, ReleaseCommitted)]
        methods = {r.event.method for r in found.events if isinstance(r.event, ReceiverVerified)}
        used = {r.event.transport for r in found.events if isinstance(r.event, TargetPersisted)}
    assert len(committed) >= 2 and {"received", "artifact"} <= methods and used == {"files"}
    assert [v.text for v in audit.violations] == [] and audit.records > 0
    assert not (tmp_path / "state" / "artifacts").exists()
    kept = ArtifactStore(f"{served.url}/live")
    assert all(kept.sound(each.manifest) for each in committed)


async def test_a_url_that_does_not_do_is_told_before_anything_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    config = msgspec.structs.replace(CONFIG, state_dir=str(tmp_path), artifacts=Artifacts(at="s3://bucket/reef"))
    with pytest.raises(Rejected, match="artifacts at s3:// need another package: Install s3fs"):
        async with started(config):
            raise AssertionError("it came up")
    assert not list(tmp_path.glob("logs/*"))
