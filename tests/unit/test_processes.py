"""Processes of ours and what they leave behind: real ones, that fork, ignore SIGTERM, stop, or go their own way.

Knows: `Child` and the supervisor's hands. Must not know: what is owed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from consumers.reef_supervisor import processes, role
from consumers.reef_supervisor.processes import Child
from consumers.reef_supervisor.role import Supervisor
from reef_bus.config import Config
from reef_bus.core.effects import CleanUp, Debt, Me
from reef_bus.embedded import Lock, exit_status
from reef_bus.events import CleanupUnconfirmed, ComponentLost, Event

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="survivors are found in /proc")

DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
FORKS = f"""
import os, time
pid = os.fork()
if pid == 0:
    {DEAF}
    os.write(1, f"{{os.getpid()}}\\n".encode())
    time.sleep(60)
time.sleep(60)
"""
MOVES = FORKS.replace("os.write", "os.setpgid(0, 0); os.write")

Spawn = Callable[[str], tuple[Child, int]]


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    """Start code that prints a pid, as a supervisor starts it; whatever is left of it ends with the test."""
    started: list[Child] = []

    def start(code: str) -> tuple[Child, int]:
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
        started.append(Child(process))
        with process.stdout or contextlib.nullcontext() as out:
            assert out
            return started[-1], int(out.readline())

    yield start
    for child in started:
        child.kill()
        assert child.end(5.0) == ()


def lives(pid: int) -> bool:
    try:
        return state(pid) not in "ZX"
    except FileNotFoundError:
        return False


def state(pid: int) -> str:
    """Of its main thread."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


ALONE = f"import os, time; {DEAF}; print(os.getpid(), flush=True); time.sleep(60)"


def test_a_process_that_ended_is_known_and_its_pid_stays_ours_until_it_was_cleaned_up(spawn: Spawn) -> None:
    child, pid = spawn(ALONE)
    assert (child.poll(), child.left()) == (None, (pid,))
    child.kill()
    assert child.wait(5.0) == -signal.SIGKILL
    assert child.left() == () and Path(f"/proc/{pid}").exists()
    assert child.end(5.0) == () and child.reaped and child.poll() == -signal.SIGKILL
    assert not Path(f"/proc/{pid}").exists()
    assert child.end(5.0) == ()  # safe to repeat


@pytest.mark.parametrize("status", [0, 3])
def test_its_own_status_is_what_is_told(spawn: Spawn, status: int) -> None:
    child, _ = spawn(f"import os; print(os.getpid(), flush=True); raise SystemExit({status})")
    assert child.wait(5.0) == status and child.end(5.0) == () and child.exit == status


@pytest.mark.parametrize("code", [FORKS, MOVES], ids=["same group", "a group of its own"])
def test_what_an_ended_process_left_behind_is_asked_then_killed(
    spawn: Spawn, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "ASK_S", 0.2)
    child, orphan = spawn(code)
    child.kill()
    assert child.wait(5.0) == -signal.SIGKILL and lives(orphan) and child.left() == (orphan,)
    began = time.monotonic()
    assert child.end(5.0) == () and not lives(orphan)
    assert time.monotonic() - began >= 0.2  # it was asked, and it is deaf


def test_one_that_was_to_end_and_went_on_is_killed_at_once_even_when_it_is_stopped(
    spawn: Spawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "ASK_S", 60.0)  # whoever is asked first lives for as long
    child, pid = spawn(ALONE)
    child.send(signal.SIGSTOP)
    assert child.poll() is None
    assert child.end(5.0) == () and child.exit == -signal.SIGKILL and not lives(pid)


def test_a_process_has_ended_when_it_can_be_waited_for_whatever_is_seen_of_it(
    spawn: Spawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The main thread of a dying process is a zombie before the others are gone: its status is not there yet."""
    child, pid = spawn(ALONE)
    with monkeypatch.context() as patch:
        patch.setattr(os, "killpg", lambda *_: None)
        patch.setattr(processes, "_session", lambda _: [])
        assert child.end(0.1) == (pid,) and not child.reaped
    assert child.end(5.0) == () and child.exit == -signal.SIGKILL


LINGERS = """
import os, threading, time, ctypes
threading.Thread(target=time.sleep, args=(60,)).start()
print(os.getpid(), flush=True)
ctypes.CDLL(None).pthread_exit(None)
"""


def test_a_process_whose_main_thread_has_ended_lives_as_long_as_another_does(spawn: Spawn) -> None:
    leader, _ = spawn(f"import os; os.write(1, b'1\\n'); os.fork() and os._exit(0)\n{LINGERS.replace('print', '#')}")
    assert leader.wait(5.0) == 0
    (pid,) = leader.left()
    while state(pid) != "Z":
        time.sleep(0.01)
    assert leader.left() == (pid,)
    assert leader.end(5.0) == () and leader.left() == ()


def test_what_does_not_end_is_named_and_the_process_stays_unreaped(
    spawn: Spawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in uninterruptible sleep: here the signals are what does not arrive."""
    child, orphan = spawn(FORKS)
    child.kill()
    assert child.wait(5.0) == -signal.SIGKILL
    with monkeypatch.context() as patch:
        patch.setattr(os, "killpg", lambda *_: None)
        assert child.end(0.1) == (orphan,) and not child.reaped
    assert child.end(5.0) == () and child.reaped


def test_no_signal_goes_to_a_session_that_is_not_ours(spawn: Spawn) -> None:
    stranger, pid = spawn(ALONE)
    child, _ = spawn(FORKS)
    child.kill()
    assert child.end(5.0) == () and stranger.wait(0.1) is None
    processes._signal_stray(pid, child.pid, signal.SIGKILL)  # as if it had been seen in our session before
    assert stranger.wait(0.3) is None and lives(pid)


def test_nothing_is_signalled_any_more_once_it_was_reaped(spawn: Spawn, monkeypatch: pytest.MonkeyPatch) -> None:
    child, _ = spawn(ALONE)
    child.kill()
    assert child.end(5.0) == ()

    def never(*_: int) -> None:
        raise AssertionError("a signal to a pid that may be anybody's by now")

    with monkeypatch.context() as patch:
        patch.setattr(os, "kill", never)
        patch.setattr(os, "killpg", never)
        child.kill()
        assert child.end(5.0) == () and child.left() == ()


# -- the supervisor's hands


@pytest.fixture
def owner(tmp_path: Path) -> Supervisor:
    return Supervisor(Config(state_dir=str(tmp_path)), tmp_path / "deployment.json", Me("supervisor", "s1"))


async def cleaned(owner: Supervisor, name: str = "trainer") -> Event | None:
    async with contextlib.AsyncExitStack() as scope:
        return await owner.perform(Debt(key="clean-up", effect=CleanUp(name)), scope)


async def test_a_grandchild_that_ignores_sigterm_is_gone_before_its_component_is_lost(
    owner: Supervisor, spawn: Spawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "ASK_S", 0.2)
    owner.children["trainer"], orphan = spawn(FORKS)
    owner.kill("trainer")
    assert owner.children["trainer"].wait(5.0) == -9 and lives(orphan)
    assert await cleaned(owner) == ComponentLost(component="trainer", exit=-9)
    assert not lives(orphan)


async def test_what_cannot_be_ended_is_a_fact_of_its_own(
    owner: Supervisor, spawn: Spawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(role, "CLEAN_UP_S", 0.1)
    owner.children["trainer"], orphan = spawn(FORKS)
    owner.kill("trainer")
    assert owner.children["trainer"].wait(5.0) == -9
    with monkeypatch.context() as patch:
        patch.setattr(os, "killpg", lambda *_: None)
        event = await cleaned(owner)
    assert isinstance(event, CleanupUnconfirmed) and event.pids == (orphan,)


async def test_an_earlier_supervisors_process_is_waited_for_and_never_signalled(
    owner: Supervisor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(role, "CLEAN_UP_S", 0.1)
    assert await cleaned(owner) == ComponentLost(component="trainer", exit=0, detail="its supervisor ended")
    lock = Lock(tmp_path / "locks" / "trainer.lock", "component trainer")
    event = await cleaned(owner)
    assert isinstance(event, CleanupUnconfirmed) and event.pids == (os.getpid(),) and "did not start" in event.detail
    lock.release()
    assert isinstance(await cleaned(owner), ComponentLost)


REAPED = """
import signal, subprocess, sys, time
from reef_bus.embedded import exit_status
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
process = subprocess.Popen([sys.executable, "-c", ""])
while exit_status(process) is None:
    time.sleep(0.01)
print("ended")
"""


def test_the_end_of_a_child_that_the_system_has_reaped_is_seen() -> None:
    """As where SIGCHLD is ignored, which a process inherits: then nobody can say how it ended."""
    assert subprocess.run([sys.executable, "-c", REAPED], capture_output=True, timeout=30).stdout == b"ended\n"


@pytest.mark.parametrize(("code", "status"), [("raise SystemExit(3)", 3), ("import os; os.abort()", -signal.SIGABRT)])
def test_a_status_is_told_as_often_as_it_is_asked_for_and_the_process_stays_unreaped(code: str, status: int) -> None:
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    while exit_status(process) is None:
        time.sleep(0.01)
    assert [exit_status(process), process.returncode, exit_status(process)] == [status, None, status]
    assert process.wait() == status == exit_status(process)
