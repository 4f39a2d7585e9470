"""The supervisor: what it owns, and how everything that it owns ends; a role as a process; and the demo's figures.

Knows: processes that only sleep. Must not know: any role's inside, or what a supervisor owes (`test_recovery.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
from msgspec.structs import replace

from consumers.reef_publisher.role import Heartbeats
from consumers.reef_supervisor import role as role_module
from consumers.reef_supervisor.commands import _demo
from consumers.reef_supervisor.demo_config import configured
from consumers.reef_supervisor.deployment import _settle
from consumers.reef_supervisor.harness import TASKS, Scored, score
from consumers.reef_supervisor.processes import Child
from consumers.reef_supervisor.role import Supervisor
from consumers.reef_supervisor.tally import Tally
from reef_bus import process
from reef_bus.config import Artifacts, Config, dump, load
from reef_bus.core.effects import Append, Debt, Me, StartComponent
from reef_bus.embedded import Lock
from reef_bus.errors import Rejected, Unavailable
from reef_bus.events import ComponentStarted, Event, ReadinessPublished
from reef_bus.journal import MemoryJournal, MemoryStreams
from reef_bus.producer import Answer
from reef_bus.runner import Retired
from tests.facts import E0, E1, SERVING, committed, fenced, halted, opened, released, target, trained
from tests.spec import MILLI, T0, Said, Scribe, Step, given

# -- what is owned


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[Supervisor]:
    config = Config(state_dir=str(tmp_path))
    found = Supervisor(config, tmp_path / "deployment.json", Me("supervisor", "s1"))
    yield found
    for child in found.children.values():
        child.kill()
        assert child.end(5.0) == ()


def child(code: str) -> Child:
    command = [sys.executable, "-c", f"{code}\nprint(flush=True)\nimport time; time.sleep(60)"]
    found = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    with found.stdout or contextlib.nullcontext() as out:
        assert out and out.readline()
    return Child(found)


IGNORE = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)"


def test_every_role_is_started_and_the_gateway_last() -> None:
    assert Config().components() == {
        "trainer": "trainer",
        "engine-0": "engine",
        "engine-1": "engine",
        "publisher": "publisher",
        "publisher-2": "publisher",
        "gateway": "gateway",
    }
    assert list(Config().components())[-1] == "gateway"


async def test_stop_asks_and_then_insists_and_nothing_is_owed_any_more(
    owner: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(role_module, "STOP_S", 0.3)
    owner.children = {"polite": child(""), "deaf": child(IGNORE)}
    await owner.stop()
    assert {name: found.exit for name, found in owner.children.items()} == {"polite": -15, "deaf": -9}
    assert owner.pids() == [] and owner.react(given(opened()).world, T0) == ()
    await owner.stop()  # safe to repeat


async def test_a_child_that_cannot_be_started_now_is_tried_again(
    owner: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", full)
    async with contextlib.AsyncExitStack() as scope:
        with pytest.raises(Unavailable, match="cannot start trainer"):
            await owner.perform(Debt(key="start", effect=StartComponent("trainer", 1)), scope)
    assert owner.children == {}


async def test_a_start_that_is_asked_for_twice_is_one_process(
    owner: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fact of a start may take a while to be on the log, and its debt may be seen to be owed again meanwhile."""
    sleeps = [sys.executable, "-c", "import time; time.sleep(60)"]
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda _, **how: popen(sleeps, **how))
    async with contextlib.AsyncExitStack() as scope:
        debt = Debt(key="start", effect=StartComponent("trainer", 1))
        first, second = [await owner.perform(debt, scope) for _ in range(2)]
    assert first == second == ComponentStarted(component="trainer", pid=owner.children["trainer"].pid, starts=1)


def test_a_heartbeat_says_who_a_process_is_only_if_it_is_that_process(owner: Supervisor) -> None:
    """An earlier boot of the same name may be heard last when its successor runs already."""
    owner.children["gateway"] = found = child("")
    world = given(opened(), ComponentStarted(component="gateway", pid=found.pid, starts=1)).world

    def ready() -> list[object]:
        effects = [debt.effect for debt in owner.react(world, T0)]
        return [e.event for e in effects if isinstance(e, Append) and isinstance(e.event, ReadinessPublished)]

    owner.hear({"role": "gateway", "id": "gateway", "boot": "old", "pid": found.pid + 1})
    owner.hear({"role": "trainer", "id": "trainer", "boot": "t1", "pid": 1})
    assert ready() == []
    owner.hear({"role": "gateway", "id": "gateway", "boot": "new", "pid": found.pid})
    assert ready() == [ReadinessPublished(component="gateway", boot="new")]


def test_a_component_that_runs_under_another_parent_is_left_alone(owner: Supervisor, tmp_path: Path) -> None:
    lock = Lock(tmp_path / "locks" / "trainer.lock", "component trainer")
    world = given(opened()).world
    owes = {debt.effect.component for debt in owner.react(world, T0) if isinstance(debt.effect, StartComponent)}
    assert owes == {"engine-0", "engine-1", "publisher", "publisher-2", "gateway"}
    lock.release()


PARENT = """
import subprocess, sys, time
from reef_bus.embedded import die_with_parent
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], preexec_fn=die_with_parent)
print(child.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's signal at a parent's death is Linux")
def test_children_end_with_a_supervisor_that_is_killed() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE)
    with parent.stdout or contextlib.nullcontext() as out:
        assert out
        pid = int(out.readline())
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 5
    while _lives(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not _lives(pid)


def _lives(pid: int) -> bool:
    """A process that ended and that nobody has waited for yet does not live."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def test_a_resumed_demo_takes_a_free_port_and_its_own_server(tmp_path: Path) -> None:
    """What the earlier run had may be somebody else's by now."""
    (tmp_path / "run").mkdir()
    kept = load_json(
        tmp_path, '{"gateway": {"port": 4242}, "nats": {"url": "nats://127.0.0.1:1"}, "scenario": "digit"}'
    )
    (tmp_path / "run" / "deployment.json").write_bytes(dump(kept))
    found = configured(_demo().parse_args(["--resume", str(tmp_path)]), None)
    assert (found.gateway.port, found.nats.url, found.state_dir) == (0, "", str(tmp_path))


def test_a_resumed_demo_keeps_what_its_engines_were_told(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    kept = load_json(tmp_path, '{"inference": {"lease-s": 3.5, "max-batch": 7}}')
    (tmp_path / "run" / "deployment.json").write_bytes(dump(kept))
    assert configured(_demo().parse_args(["--resume", str(tmp_path)]), None).inference == kept.inference


def test_a_demo_over_servers_finds_its_model_where_its_folder_was_moved_to(tmp_path: Path) -> None:
    (before, after), words = (tmp_path / "before", tmp_path / "after"), ["--engine", "sglang"]
    made = configured(_demo().parse_args([*words, "--keep", str(before)]), None)
    (before / "run").mkdir()
    (before / "run" / "deployment.json").write_bytes(dump(made))
    before.rename(after)
    found = configured(_demo().parse_args([*words, "--resume", str(after)]), None)
    assert found.inference == replace(made.inference, model_path=str(after / "model"))


@pytest.mark.parametrize(("at", "settled"), [("", ""), ("blobs", "{here}/blobs"), ("s3://reef/a", "s3://reef/a")])
def test_where_artifacts_lie_means_the_same_to_every_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str, settled: str
) -> None:
    monkeypatch.chdir(tmp_path)
    _, path = _settle(Config(state_dir="state", artifacts=Artifacts(at=at)), None)
    assert load(path).artifacts.at == settled.format(here=tmp_path)


def load_json(folder: Path, text: str) -> Config:
    path = folder / "given.json"
    path.write_text(text)
    return load(path)


# -- a role as a process


async def away(*_: object) -> NoReturn:
    """A server that does not answer yet, while somebody asks this process to end."""
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.sleep(60)
    raise AssertionError


def boot(
    monkeypatch: pytest.MonkeyPatch, folder: Path, connect: Callable[..., Any], build: Callable[..., Any] = away
) -> int:
    monkeypatch.setattr(process, "connect", connect)
    return process.run("c", Config(state_dir=str(folder)), build)


def test_a_boot_that_is_asked_to_end_while_it_waits_for_the_server_ends_well(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    began = time.monotonic()
    assert boot(monkeypatch, tmp_path, away) == process.OK
    assert time.monotonic() - began < 5


class Closing(MemoryJournal):
    closed = False

    async def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize(
    ("error", "status"),
    [(Retired("replaced"), process.OVER), (Rejected("no"), process.MISTAKE), (Unavailable("gone"), process.OVER)],
)
def test_why_a_boot_ended_is_its_status_and_what_it_opened_is_closed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception, status: int
) -> None:
    journal: list[Closing] = []

    async def connect(*_: object) -> Closing:
        journal.append(Closing(MemoryStreams()))
        return journal[0]

    async def build(*_: object) -> NoReturn:
        raise error

    assert boot(monkeypatch, tmp_path, connect, build) == status
    assert journal[0].closed
    assert boot(monkeypatch, tmp_path, connect, build) == status  # its lock was let go


# -- the publisher's ear


def test_silence_is_not_counted_while_this_process_was_stopped() -> None:
    """After SIGSTOP and SIGCONT, every engine would be excluded for beats that lie unread in the socket."""
    now = 100.0
    ear = Heartbeats(MemoryJournal(MemoryStreams()), lapse_s=5.0, clock=lambda: now)
    ear.hear({"boot": "e0.1"})
    assert ear.silent(["e0.1", "e1.1"]) == frozenset()
    now += 60.0
    assert ear.silent(["e0.1", "e1.1"]) == frozenset()
    for _ in range(6):
        now += 1.0
        ear.hear({"boot": "e0.1"})
        found = ear.silent(["e0.1", "e1.1"])
    assert found == frozenset({"e1.1"})


def test_silence_of_everybody_is_the_servers_and_excludes_nobody() -> None:
    """A server that stands still keeps its connections; the first to be heard of it again must not be the only ones."""
    now = 100.0
    ear = Heartbeats(MemoryJournal(MemoryStreams()), lapse_s=5.0, clock=lambda: now)
    for second in range(20):  # from the fourth second on nothing comes through, not even what this process says
        now += 1.0
        if second < 4:
            ear.hear({"boot": "e0.1"})
            ear.hear({"boot": "me"})
        assert ear.silent(["e0.1", "e1.1"]) == frozenset()
    heard = []
    for _ in range(7):  # it goes on, and with it all but one
        now += 1.0
        ear.hear({"boot": "e0.1"})
        heard.append(ear.silent(["e0.1", "e1.1"]))
    assert heard[:5] == [frozenset()] * 5 and heard[5:] == [frozenset({"e1.1"})] * 2


def test_the_silence_of_every_engine_counts_while_this_process_hears_itself() -> None:
    now = 100.0
    ear = Heartbeats(MemoryJournal(MemoryStreams()), lapse_s=5.0, clock=lambda: now)
    for _ in range(7):
        now += 1.0
        ear.hear({"boot": "me"})
        found = ear.silent(["e0.1", "e1.1"])
    assert found == frozenset({"e0.1", "e1.1"})


# -- the demo's figures


def tally(*history: Step, since: int = 0) -> Tally:
    found, scribe = Tally(since), Scribe()
    for step in history:
        found.see(scribe.write(step))
    return found


def resumed(engine: str, n: int, at: int, during: int) -> Event:
    """Fenced for publication `during`: release `n` had been resumed at `at`."""
    event = fenced(engine, during)
    return type(event)(
        engine=engine,
        publication=event.publication,
        attempt=1,
        previous=f"inc:{n}",
        resumed_at=at,
        served=1,
        stopped_ms=1.0,
    )


HISTORY = (*SERVING, *trained("c1"), *released(1, "c1", E0, E1), *trained("c2", "c1", 2), target(2, "c2", E0, E1))
"""The first target is event 13, at T0 + 13 ms; its candidate was selected a millisecond before."""
TARGET = T0 + 13 * MILLI


def test_a_fence_lasts_from_the_target_to_the_last_engine_that_resumed() -> None:
    found = tally(*HISTORY, resumed("e0", 1, TARGET + 40 * MILLI, 2), resumed("e1", 1, TARGET + 60 * MILLI, 2))
    assert (found.fence_ms(), found.serving_ms()) == (60.0, 61.0)


def test_a_return_after_a_halt_is_no_releases_time() -> None:
    first = (resumed("e0", 1, TARGET + 40 * MILLI, 2), halted(2))
    found = tally(*HISTORY, *first, resumed("e0", 1, TARGET + 9000 * MILLI, 3))
    assert found.fence_ms() == 40.0


def test_commits_of_an_earlier_run_are_not_this_runs_releases() -> None:
    commit = Said(committed(2, "c2", E0, E1))
    assert tally(*HISTORY, commit, since=T0 + 20 * MILLI).committed == ["inc:2"]
    assert tally(*HISTORY, commit).committed == ["inc:1", "inc:2"]


def test_transfers_and_proofs_are_added_up() -> None:
    found = tally(*HISTORY)
    assert (found.verified, found.bytes) == (2, 32)  # two at the start, two of the release, eight bytes each


def test_rewards_are_means_per_release_over_enough_answers() -> None:
    found = Tally(0)
    for reward in (0.25, 0.75):
        found.score(Scored(Answer("", "", "inc:1", "e0"), reward))
    assert (found.reward("inc:1"), found.reward("inc:1", 3), found.reward("inc:2")) == (0.5, None, None)
    assert "inc:2" not in found.rewards


@pytest.mark.parametrize(("text", "reward"), [("7777", 1.0), ("7a7b", 0.5), ("", 0.0), ("1234", 0.0)])
def test_the_verifier_gives_the_fraction_that_repeats_the_question(text: str, reward: float) -> None:
    assert score("7", text) == reward


@pytest.mark.parametrize(("digit", "text", "reward"), [("6", "7a7b", 0.5), ("9", "0000", 1.0), ("7", "7777", 0.0)])
def test_another_task_wants_the_digit_after_it(digit: str, text: str, reward: float) -> None:
    assert TASKS["successor"](digit, text) == reward
