"""Processes that a supervisor started: whether one runs, what is left of it, and how that is ended.

Knows: sessions, process groups, signals. Must not know: components, or why anything is ended.
A process is started as the leader of its own session, and is not reaped before everything in that session has ended: as
long as its pid is taken, the session's and the group's id are nobody else's, and no signal can reach a stranger.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from reef_bus.embedded import exit_status

ASK_S = 1.0  # what a process left behind gets to end by itself
POLL_S = 0.01
PROC = Path("/proc")


class Child:
    """One process of ours. `boot` and `halted` are what its last heartbeat said."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        """`process` leads a session of its own, and nobody else waits for it."""
        self.process = process
        self.pid = process.pid
        self.exit: int | None = None
        self.reaped = False
        self._looking = threading.Lock()
        self.boot, self.halted = "", False

    def poll(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs."""
        with self._looking:  # from the loop, and from a thread that cleans up and reaps
            if self.exit is None:
                self.exit = exit_status(self.process)
            return self.exit

    def send(self, number: int) -> None:
        """Signal the process itself, if it runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send(signal.SIGKILL)

    def wait(self, seconds: float) -> int | None:
        """Its exit status; None when it still runs after `seconds`."""
        until = time.monotonic() + seconds
        while self.poll() is None and time.monotonic() < until:
            time.sleep(POLL_S)
        return self.exit

    def left(self) -> tuple[int, ...]:
        """What lives of its session, itself included, which has ended when it can be waited for and not before: its
        main thread is seen as ended while others are still dying."""
        if self.reaped:
            return ()
        others = {found.pid for found in _session(self.pid)} - {self.pid}
        return (*([self.pid] if self.poll() is None else []), *sorted(others))

    def end(self, seconds: float) -> tuple[int, ...]:
        """End what lives of its session; returns what still lives after `seconds`. If nothing does, it is reaped.

        A process that was to end, and went on, is killed; what an ended one left behind is asked first.
        """
        began = time.monotonic()
        patience = 0.0 if self.poll() is None else ASK_S
        asked = False
        while left := self.left():
            waited = time.monotonic() - began
            if waited >= seconds:
                return left
            if waited >= patience or not asked:
                self._signal(signal.SIGKILL if waited >= patience else signal.SIGTERM)
                asked = True
            time.sleep(POLL_S)
        self._reap()
        return ()

    def _signal(self, number: int) -> None:
        """To the group that it leads, and to whatever left that group and is still in its session."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # gone meanwhile, or another user's by now
            os.killpg(self.pid, number)
        for found in _session(self.pid):
            if found.group != self.pid:
                _signal_stray(found.pid, self.pid, number)

    def _reap(self) -> None:
        self.process.wait()
        self.reaped = True


class Found(NamedTuple):
    pid: int
    group: int
    session: int


def _session(leader: int) -> list[Found]:
    """What lives in the session or the group that `leader` leads; without /proc, only whether the group does."""
    if sys.platform == "linux":
        return [found for found in _processes() if leader in (found.group, found.session)]
    try:
        os.killpg(leader, 0)
    except OSError:
        return []
    return [Found(leader, leader, leader)]


def _processes() -> Iterator[Found]:
    for entry in PROC.iterdir():
        if entry.name.isdigit() and (found := _read(int(entry.name))):
            yield found


def _read(pid: int) -> Found | None:
    """One process, unless it is gone, or ended and only waits to be reaped."""
    try:
        fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
        state, group, session, threads = fields[0], int(fields[2]), int(fields[3]), int(fields[17])
    except (OSError, ValueError, IndexError):
        return None
    return None if state in "ZX" and threads <= 1 else Found(pid, group, session)


def _signal_stray(pid: int, session: int, number: int) -> None:
    """Signal one process of the session by a handle, so that a pid that passed on to another process is not hit."""
    with contextlib.suppress(OSError):
        handle = os.pidfd_open(pid)
        try:
            found = _read(pid)
            if found and found.session == session:
                signal.pidfd_send_signal(handle, number)
        finally:
            os.close(handle)
