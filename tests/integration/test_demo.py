"""The demo as a newcomer runs it: its JSON, a corrupted byte, resuming, exporting, auditing. All processes are real."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.integration

KEYS = {
    "releases",
    "engines",
    "receivers_verified",
    "reward_first",
    "reward_last",
    "seconds_to_first_answer",
    "seconds",
    "fence_ms_p50",
    "publish_to_serving_ms_p50",
    "transfer_bytes",
    "records",
    "log_events",
    "void_events",
    "audit_violations",
    "kills",
    "resumed",
    "rss_mib_peak",
}


def reef_bus(*words: str, expect: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "reef_bus.cli", *words], capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == expect, (words, done.returncode, done.stdout[-2000:], done.stderr[-4000:])
    return done.stdout


def demo(*words: str) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads(reef_bus("demo", "--json", *words).splitlines()[-1])
    return summary


def events(state: Path, name: str) -> list[dict[str, Any]]:
    out = reef_bus("log", "--state", str(state), "--type", name, "--tail", "1000000", "--json")
    return [json.loads(line) for line in out.splitlines()]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A demo of three releases in which one byte of engine-1's live weights flips after it received release 2."""
    state = tmp_path_factory.mktemp("demo") / "state"
    return state, demo("--releases", "3", "--keep", str(state), "--flip", "engine-1@2")


def test_the_summary_has_every_figure_and_the_audit_is_clean(kept: tuple[Path, dict[str, Any]]) -> None:
    _, summary = kept
    assert set(summary) >= KEYS
    assert summary["audit_violations"] == 0 and summary["resumed"] is False and summary["engines"] == 2
    assert summary["releases"] >= 3 and summary["transfer_bytes"] > 0
    assert 0 <= summary["reward_first"] < 0.2 and summary["rss_mib_peak"] < 2048


def test_a_flipped_byte_is_named_by_tensor_and_never_committed_on_that_engines_word(
    kept: tuple[Path, dict[str, Any]],
) -> None:
    """Section 8, "a receiver lies, bytes are corrupt": never committed; excluded."""
    state, _ = kept
    failures = [event for event in events(state, "ReceiverFailed") if event["data"]["cause"] == "digest"]
    assert len(failures) == 1
    failure = failures[0]
    assert failure["data"]["engine"] == "engine-1" and "model.norm.weight" in failure["data"]["detail"]
    for commit in events(state, "ReleaseCommitted"):
        assert failure["boot"] not in {e["boot"] for e in commit["data"]["evidence"]} or (
            commit["data"]["load_id"] != failure["data"]["load_id"]
        )


def test_a_kept_folder_is_not_overwritten(kept: tuple[Path, dict[str, Any]]) -> None:
    state, _ = kept
    done = subprocess.run(
        [sys.executable, "-m", "reef_bus.cli", "demo", "--keep", str(state)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2 and "--resume" in done.stderr and "Traceback" not in done.stderr


def test_resume_goes_on_from_the_same_log_and_trains_nothing_twice(kept: tuple[Path, dict[str, Any]]) -> None:
    state, before = kept
    incarnation = events(state, "LogOpened")[0]["data"]["incarnation"]
    train_slowly(state / "run" / "deployment.json")
    after = demo("--resume", str(state), "--releases", "2", "--kill", "trainer@JobStarted")
    assert after["resumed"] is True and after["audit_violations"] == 0
    assert after["releases"] >= before["releases"] + 2 and after["records"] > before["records"]
    assert [kill["component"] for kill in after["kills"]] == ["trainer"]
    assert {e["data"]["load_id"].partition(":")[0] for e in events(state, "ReleaseCommitted")} == {incarnation}
    starts = [(e["data"]["job"], e["data"]["attempt"]) for e in events(state, "JobStarted")]
    assert any(attempt == 2 for _, attempt in starts) and len(set(starts)) == len(starts)


def train_slowly(config: Path) -> None:
    """A step for every sample: whoever is killed in a job is in the middle of it, however late the signal comes."""
    said = json.loads(config.read_text())
    said["training"] |= {"minibatches": said["training"]["groups"] * said["training"]["group-size"], "lr": 1e-4}
    config.write_text(json.dumps(said))


def test_an_export_is_audited_elsewhere_and_an_edited_one_is_caught(
    kept: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    state, _ = kept
    export = tmp_path / "history.jsonl"
    reef_bus("export", "--state", str(state), "-o", str(export))
    assert json.loads(reef_bus("audit", str(export), "--json"))["violations"] == []
    lines = export.read_text().splitlines()
    at = next(n for n, line in enumerate(lines) if '"reef.ReleaseCommitted.v1"' in line)
    edited = json.loads(lines[at])
    edited["data"]["manifest"] = "0" * 64
    lines[at] = json.dumps(edited)
    export.write_text("\n".join(lines) + "\n")
    found = json.loads(reef_bus("audit", str(export), "--json", expect=1))
    assert any(edited["sequence"] in violation["sequences"] for violation in found["violations"])
