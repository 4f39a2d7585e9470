"""The command line against a real nats-server: streams, status, log, audit, export, doctor, and what is in the way.

Knows: `main`, a server of its own, a history that was appended by hand. Must not know: the roles.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from reef_bus.cli import main
from reef_bus.config import Config, Gateway, Inference, Nats, dump
from reef_bus.embedded import Lock, NatsServer
from reef_bus.events import Draft, Event, Evidence, InferenceRecorded, ReportReceived
from reef_bus.jetstream import JetStreamJournal, connect
from tests.facts import E0, E1, SERVING, S, committed, joined, released, target, trained
from tests.spec import Said, Step

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]
STREAMS = ["REEF_reef_LOG", "REEF_reef_RECORDS", "REEF_reef_RELEASES", "REEF_reef_TELEMETRY"]
PROOFS = tuple(Evidence(member.engine, member.boot, seq, "digest-of-c1") for member, seq in ((E0, 17), (E1, 18)))
COMMITTED = msgspec.structs.replace(committed(1, "c1", E0, E1), evidence=PROOFS)
HISTORY: tuple[Step, ...] = (*SERVING, *trained("c1"), *released(1, "c1", E0, E1)[:-1], COMMITTED)
"""19 events: 7 until both engines serve release 0, 5 of a job, 7 of the release that came of it."""


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "reef-state"


@pytest.fixture
def server(state: Path) -> Iterator[NatsServer]:
    """A state folder as a running `up` has it: server, lock, configuration."""
    found = NatsServer(state / "nats")
    try:
        found.start()
        (state / "run").mkdir()
        config = Config(state_dir=str(state), nats=Nats(url=found.url))
        (state / "run" / "deployment.json").write_bytes(dump(config))
        yield found
    finally:
        found.stop()


def with_journal(url: str, what: Callable[[JetStreamJournal], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        journal = await connect(url, "reef", "test")
        try:
            return await what(journal)
        finally:
            await journal.close()

    return asyncio.run(run())


async def write(journal: JetStreamJournal, *steps: Step) -> None:
    """Append as the writers would: chained, by the boots that tests/facts.py has in mind, each caused by the last."""
    tails: dict[str, int] = {}
    cause = 0
    for step in steps:
        event = step.event if isinstance(step, Said) else step
        boot = {"train": "t1", "release": "p1", "engine": f"{event.key}.1"}.get(event.family, "s1")
        correlation = getattr(event, "publication", "")
        draft = Draft(event=event, writer=f"{event.family}/x", boot=boot, cause=cause, correlation=correlation)
        cause = tails[event.chain] = (await journal.append(draft, tails.get(event.chain, 0))).seq


async def record(journal: JetStreamJournal) -> None:
    text = {"scenario": S, "record": "r1", "prompt": "7", "answer": "7", "tags": {"phase": "final"}}
    by = {"engine": "e0", "boot": "e0.1", "load_id": "inc:1", "as_of": len(HISTORY), "done_as_of": len(HISTORY)}
    figures = {"prompt_tokens": 3, "answer_tokens": 1, "temperature": 1.0, "row": 0, "blob": {"digest": "d", "size": 1}}
    answer = msgspec.convert(text | by | figures, InferenceRecorded)
    report = ReportReceived(scenario=S, report="f1", references=("r1",), score=1.0, feedback="", metadata={})
    events: tuple[Event, ...] = (answer, report)
    for event in events:
        await journal.append(Draft(event=event, writer="gateway/g", boot="g1"), 0)


async def foreign(journal: JetStreamJournal) -> None:
    await journal.js.publish("reef.reef.train.digit.Surprise", b'{"made": "elsewhere"}')


@pytest.fixture
def history(server: NatsServer) -> NatsServer:
    async def fill(journal: JetStreamJournal) -> None:
        await journal.apply(1)
        await write(journal, *HISTORY)
        await record(journal)

    with_journal(server.url, fill)
    return server


Say = Callable[..., tuple[int, str, str]]


@pytest.fixture
def say(state: Path, capsys: pytest.CaptureFixture[str]) -> Say:
    """A command about the state folder: exit status, output, complaint; a complaint has no stack trace."""

    def run(*words: str, at: tuple[str, ...] = ()) -> tuple[int, str, str]:
        code = main([*words, *(at or ("--state", str(state)))])
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return code, out, err

    return run


def lines(out: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.splitlines()]


# -- streams


def test_streams_are_planned_created_and_then_as_they_must_be(server: NatsServer, say: Say) -> None:
    at = ("--url", server.url)
    assert lines(say("streams", "plan", "--json", at=at)[1]) == [{"streams": {name: ["missing"] for name in STREAMS}}]
    assert "`reef-bus streams apply` creates" in say("streams", "plan", at=at)[1]
    assert lines(say("streams", "apply", "--json", at=at)[1]) == [{"streams": dict.fromkeys(STREAMS, "created")}]
    assert lines(say("streams", "plan", "--json", at=at)[1]) == [{"streams": {name: [] for name in STREAMS}}]
    code, out, _ = say("streams", "apply", at=at)
    assert (code, out.count("unchanged")) == (0, 4)


def test_a_stream_that_differs_is_refused_and_nothing_is_changed(server: NatsServer, say: Say) -> None:
    async def wrong(journal: JetStreamJournal) -> None:
        await journal.js.add_stream(name="REEF_reef_RECORDS", subjects=["reef.reef.record.>"], max_msgs=5)

    async def names(journal: JetStreamJournal) -> list[str | None]:
        return [info.config.name for info in await journal.js.streams_info()]

    with_journal(server.url, wrong)
    code, out, _ = say("streams", "plan")
    assert code == 1 and "max_msgs is 5, must be -1" in out and "apply refuses" in out
    code, _, err = say("streams", "apply")
    assert code == 2 and err.startswith("reef-bus: streams exist that are not as they must be: REEF_reef_RECORDS: ")
    assert len(err.splitlines()) == 1
    assert with_journal(server.url, names) == ["REEF_reef_RECORDS"]


def test_a_log_that_does_not_exist_says_what_creates_it(server: NatsServer, say: Say) -> None:
    code, _, err = say("status")
    assert code == 2 and "`reef-bus streams apply` creates it" in err


def test_apply_opens_the_log_once(server: NatsServer, say: Say) -> None:
    say("streams", "apply")
    say("streams", "apply")
    assert [json.loads(line)["type"] for line in say("log", "--json")[1].splitlines()] == ["reef.LogOpened.v1"]


def test_an_empty_log_says_what_to_run_next(server: NatsServer, say: Say) -> None:
    with_journal(server.url, lambda journal: journal.apply(1))
    assert say("log")[:2] == (0, "no event on LOG yet; `reef-bus demo` makes some\n")
    assert "no event yet; `reef-bus demo`" in say("status")[1]
    assert "nothing to audit yet" in say("audit")[1]
    assert say("log", "--json")[:2] == (0, "")


# -- status, log


def test_status_for_people_and_for_programs(history: NatsServer, say: Say) -> None:
    code, out, _ = say("status")
    assert code == 0
    title, down, head, *_ = out.splitlines()
    assert title == "reef · digit · tiny   (19 events, 0 void)"
    assert down == "down         nobody runs it here: what follows is what its log said last"
    assert head == "head         inc:1, candidate c1"
    assert "engine       e1           serving, holds inc:1" in out
    assert "waiting      on the harness, since" in out
    assert out.rstrip().splitlines()[-1].lstrip().startswith("19  ")
    (found,) = lines(say("status", "--json")[1])
    assert found["head"]["load_id"] == "inc:1" and found["url"] == history.url
    assert [event["sequence"] for event in found["last"]] == [*range(12, 20)]


def test_status_of_a_deployment_that_runs_does_not_call_it_down(history: NatsServer, state: Path, say: Say) -> None:
    supervisor = Lock(state / "lock", "state folder")
    assert lines(say("status", "--json")[1])[0]["runs"] is True
    supervisor.release()
    assert lines(say("status", "--json")[1])[0]["runs"] is False
    assert lines(say("status", "--json", at=("--url", history.url))[1])[0]["runs"] is None


@pytest.mark.parametrize("command", ["status", "log", "audit", "export"])
def test_another_deployment_of_the_server_is_named(history: NatsServer, say: Say, command: str) -> None:
    code, out, err = say(command, at=("--url", history.url, "--deployment", "blue"))
    assert code == 2 and "no deployment 'blue' on this server, which has: reef" in err and not out


def test_log_tails_and_filters(history: NatsServer, say: Say) -> None:
    def seqs(*words: str) -> list[int]:
        return [event["sequence"] for event in lines(say("log", "--json", *words)[1])]

    assert seqs() == [*range(1, 20)]
    assert seqs("--tail", "3") == [17, 18, 19]
    assert seqs("--from", "17") == [17, 18, 19]
    assert seqs("--type", "EngineJoined") == [4, 5]
    assert seqs("--family", "engine", "--tail", "2") == [17, 18]
    assert seqs("--correlation", "pub1") == [13, 14, 15, 16, 17, 18, 19]
    assert seqs("--correlation", "c1", "--family", "train") == [10, 11, 12]
    assert seqs("--correlation", "e1.1") == [5, 7, 15, 18]
    assert seqs("--correlation", "nobody") == []
    assert seqs("--records") == [1, 2]
    assert seqs("--type", "ReportReceived") == [2]
    assert say("log", "--correlation", "nobody")[1].startswith("none of the 19 events on LOG matches")


def test_log_is_a_line_an_event_and_marks_what_is_void(history: NatsServer, say: Say) -> None:
    async def intrude(journal: JetStreamJournal) -> None:
        again = Draft(event=joined("e0"), writer="engine/e0", boot="e0.1")
        await journal.append(again, 17)

    with_journal(history.url, intrude)
    out = say("log", "--tail", "2")[1].splitlines()
    assert out[0].split()[0] == "19" and "ReleaseCommitted" in out[0] and "load_id=inc:1" in out[0]
    assert out[1].endswith("[void: its boot had joined before]")
    assert lines(say("log", "--tail", "1", "--json")[1])[0]["void"] == "void: its boot had joined before"


def test_log_show_has_envelope_payload_causes_and_effects(history: NatsServer, say: Say) -> None:
    code, out, _ = say("log", "show", "3")
    assert code == 0
    assert "type           reef.ScenarioRegistered.v1" in out and '"model": "tiny"' in out
    assert [line.split()[0] for line in out.partition("because of\n")[2].splitlines()] == ["2", "1", "led", "4"]
    (found,) = lines(say("log", "show", "3", "--json")[1])
    assert [event["sequence"] for event in found["causes"]] == [2, 1]
    assert [event["sequence"] for event in found["effects"]] == [4]
    assert '"answer": "7"' in say("log", "show", "1", "--records")[1]
    assert "LOG has no event 99; its last is 19" in say("log", "show", "99")[2]


def test_a_foreign_message_is_named_and_what_stands_before_it_is_shown(history: NatsServer, say: Say) -> None:
    with_journal(history.url, foreign)
    code, out, err = say("log", "--tail", "2")
    assert code == 2 and err.startswith("reef-bus: event 20 on reef.reef.train.digit.Surprise has type ''")
    assert [line.split()[0] for line in out.splitlines()] == ["18", "19"]
    code, out, err = say("status")
    assert code == 2 and "event 20" in err and "head         inc:1" in out
    assert "event 20" in say("audit")[2]
    code, out, err = say("log", "show", "20", "--json")
    assert code == 2 and lines(out)[0]["text"] == '{"made": "elsewhere"}'
    assert say("log", "show", "19")[0] == 0


def test_a_contradiction_is_named_and_the_log_still_shows_it(history: NatsServer, say: Say) -> None:
    async def lie(journal: JetStreamJournal) -> None:
        draft = Draft(event=target(2, "never-selected", E0), writer="publisher/p", boot="p1")
        await journal.append(draft, 19)

    with_journal(history.url, lie)
    code, out, err = say("status")
    assert code == 2 and "event 20 TargetPersisted" in err and "19 events" in out
    assert say("log", "--tail", "1")[1].rstrip().endswith("[contradiction]")
    code, out, _ = say("audit")
    assert code == 1 and "violation of fold" in out and "LOG 20" in out


# -- audit, export


def test_an_export_is_audited_like_the_log_it_came_from(history: NatsServer, say: Say, tmp_path: Path) -> None:
    file = tmp_path / "history.jsonl"
    assert "19 events, 2 records" in say("export", "-o", str(file))[1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["history.jsonl", "reef-state"]
    assert say("export")[1] == file.read_text()
    (live,) = lines(say("audit", "--json")[1])
    (apart,) = lines(say("audit", str(file), "--json")[1])
    assert live == apart
    assert say("audit")[0] == 0 and live["violations"] == []
    assert (live["log_events"], live["releases"], live["receivers_verified"]) == (19, 1, 2)
    assert live["final"] == {"load_id": "inc:1", "n": 1, "mean": 1.0, "engines": {"e0": 1}}


def test_a_forged_export_is_exit_1(history: NatsServer, say: Say, tmp_path: Path) -> None:
    file = tmp_path / "history.jsonl"
    text = say("export")[1]
    file.write_text(text.replace('"record":"r1","engine":"e0"', '"record":"r1","engine":"e1"'))
    assert file.read_text() != text
    code, out, _ = say("audit", str(file))
    assert code == 1
    assert [line.partition(":")[0] for line in out.splitlines() if line.startswith("violation")] == ["violation of 2"]
    assert "(LOG 19, RECORDS 1)" in out
    assert "reef-bus log show SEQ" in out


# -- finding a deployment


def test_a_deployment_that_is_down_lends_its_server_for_one_command(
    history: NatsServer, state: Path, say: Say, tmp_path: Path
) -> None:
    history.stop()
    (state / "nats" / "lock").write_text("999999\n")  # a stale pid: who held the lock is long gone
    moved = tmp_path / "moved"
    shutil.move(state, moved)
    for _ in range(2):
        code, out, err = say("status", "--json", at=("--state", str(moved)))
        assert (code, lines(out)[0]["log_events"]) == (0, 19)
        assert err == f"reef-bus: nothing runs in {moved}; its nats-server is up for this command only\n"
    Lock(moved / "nats" / "lock", "the folder").release()


def test_a_held_lock_without_a_server_is_one_clear_line(state: Path, say: Say) -> None:
    server = NatsServer(state / "nats")
    try:
        (state / "nats" / "nats.conf").touch()
        (state / "run").mkdir()
        config = Config(nats=Nats(url="nats://127.0.0.1:9"))
        (state / "run" / "deployment.json").write_bytes(dump(config))
        code, out, err = say("status")
        assert (code, out, len(err.splitlines())) == (3, "", 1)
        assert f"is in use by process {os.getpid()}" in err and "nats-server is not up" in err
    finally:
        server.stop()


def test_a_component_that_runs_already_is_one_clear_line(server: NatsServer, state: Path) -> None:
    held = Lock(state / "locks" / "publisher.lock", "component publisher")
    try:
        words = ["run", "publisher", "-c", str(state / "run" / "deployment.json")]
        done = subprocess.run(
            [sys.executable, "-m", "reef_bus.cli", *words], cwd=ROOT, capture_output=True, text=True, timeout=30
        )
        assert done.returncode == 2
        assert done.stderr.startswith("reef-bus: component publisher") and len(done.stderr.splitlines()) == 1
        assert f"in use by process {os.getpid()}" in done.stderr
    finally:
        held.release()


def test_something_that_is_no_nats_server_is_told_apart() -> None:
    code = """
import sys
from reef_bus import inspect
from reef_bus.cli import main
inspect.HANDSHAKE_S = -0.7  # a second less than that is what a person waits
sys.exit(main(["status", "--url", sys.argv[1]]))
"""
    with socket.create_server(("127.0.0.1", 0)) as other:
        command = [sys.executable, "-c", code, f"nats://127.0.0.1:{other.getsockname()[1]}"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert done.returncode == 3 and len(done.stderr.splitlines()) == 1
    assert "is it a NATS server" in done.stderr or "no NATS server" in done.stderr


# -- doctor


def doctor(say: Say, *words: str, at: tuple[str, ...] = ()) -> tuple[int, dict[str, tuple[str, str]]]:
    code, out, _ = say("doctor", "--json", *words, at=at)
    return code, {row["name"]: (row["state"], row["found"]) for row in lines(out)[0]["findings"]}


def test_doctor_looks_at_a_running_deployment(history: NatsServer, say: Say) -> None:
    code, found = doctor(say)
    assert code == 0
    assert found["server"] == ("ok", f"answers at {history.url}")
    assert [found[f"stream {name}"] for name in STREAMS] == [("ok", "as it must be")] * 4
    assert found["lock nats/lock"] == ("ok", f"held by process {os.getpid()}: it is running")
    human = say("doctor")[1]
    assert "ok       stream REEF_reef_LOG" in human


def test_doctor_finds_missing_streams_and_a_taken_port(server: NatsServer, state: Path, say: Say) -> None:
    config = Config(state_dir=str(state), nats=Nats(url=server.url), gateway=Gateway(port=server.port))
    (state / "run" / "deployment.json").write_bytes(dump(config))
    code, found = doctor(say)
    assert code == 1
    assert found["ports"] == ("failed", f"gateway.port {server.port} on 127.0.0.1: Address already in use")
    assert found["stream REEF_reef_LOG"] == ("failed", "missing")
    server.stop()
    code, found = doctor(say)
    assert found["ports"][0] == found["server"][0] == "ok"
    assert found["server"][1].startswith("not running")


def test_doctor_finds_the_routers_port_taken(server: NatsServer, state: Path, say: Say) -> None:
    inference = Inference(router_port=server.port)
    config = Config(state_dir=str(state), nats=Nats(url=server.url), inference=inference)
    (state / "run" / "deployment.json").write_bytes(dump(config))
    found = doctor(say)[1]
    assert found["ports"] == ("failed", f"inference.router-port {server.port} on 127.0.0.1: Address already in use")


def test_doctor_names_a_server_that_does_not_answer(say: Say) -> None:
    code, found = doctor(say, at=("--url", "nats://127.0.0.1:9"))
    assert code == 1 and found["server"][0] == "failed" and "Connection refused" in found["server"][1]


# -- until Ctrl-C


def started(*words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "reef_bus.cli", *words]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_log_follow_shows_what_comes_and_ends_on_ctrl_c(history: NatsServer) -> None:
    child = started("log", "--follow", "--json", "--tail", "1", "--url", history.url)
    assert child.stdout is not None
    assert json.loads(child.stdout.readline())["sequence"] == 19

    async def more(journal: JetStreamJournal) -> None:
        await journal.append(Draft(event=joined("e0"), writer="engine/e0", boot="e0.2"), 17)

    with_journal(history.url, more)
    assert json.loads(child.stdout.readline())["data"]["engine"] == "e0"
    child.send_signal(signal.SIGINT)
    assert child.communicate(timeout=10) == ("", "")
    assert child.returncode == 130


def test_status_watch_looks_again(history: NatsServer) -> None:
    child = started("status", "--watch", "--json", "--url", history.url)
    assert child.stdout is not None
    assert json.loads(child.stdout.readline())["log_events"] == 19

    async def more(journal: JetStreamJournal) -> None:
        await journal.append(Draft(event=joined("e0"), writer="engine/e0", boot="e0.2"), 17)

    with_journal(history.url, more)
    deadline = time.monotonic() + 10
    while (seen := json.loads(child.stdout.readline()))["log_events"] != 20:
        assert time.monotonic() < deadline
    assert seen["engines"]["e0"]["state"] == "catching-up"
    child.send_signal(signal.SIGINT)
    child.communicate(timeout=10)
    assert child.returncode == 130


def test_a_reader_that_has_read_enough_is_no_error(history: NatsServer) -> None:
    child = started("log", "--follow", "--url", history.url)
    assert child.stdout is not None and child.stderr is not None
    child.stdout.readline()
    child.stdout.close()

    async def more(journal: JetStreamJournal) -> None:
        await journal.append(Draft(event=joined("e0"), writer="engine/e0", boot="e0.2"), 17)

    with_journal(history.url, more)
    assert child.wait(10) == 0
    assert child.stderr.read() == ""
    child.stderr.close()
