"""An FTP server as a process of its own, which tests kill, stop and start again: a remote that forgets nothing.

Knows: pyftpdlib. Must not know: what is kept there.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

USER, PASSWORD = "reef", "not-in-the-url"
PERMISSIONS = "elradfmwMT"
SETTING = "FSSPEC_FTP_PASSWORD"


class FtpServer:
    """Serves `folder`. Its port stays the same when it is started again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = 0
        self.start()

    @property
    def url(self) -> str:
        return f"ftp://{USER}@127.0.0.1:{self.port}"

    def start(self) -> None:
        command = [sys.executable, "-W", "ignore", "-m", "tests.ftp_server", str(self.folder), str(self.port)]
        root = Path(__file__).parents[1]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=root)
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)


@contextlib.contextmanager
def ftp_server(folder: Path) -> Iterator[FtpServer]:
    """With the password where fsspec looks for it, in this process and in those that it starts."""
    from fsspec.config import conf

    folder.mkdir(parents=True, exist_ok=True)
    server = FtpServer(folder)
    conf["ftp"], os.environ[SETTING] = {"password": PASSWORD}, PASSWORD
    try:
        yield server
    finally:
        server.kill()
        del conf["ftp"], os.environ[SETTING]


def eventually(holds: object, seconds: float = 5.0) -> None:
    """Wait until the callable says so."""
    assert callable(holds)
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until, "it did not come to hold"
        time.sleep(0.01)


def main(folder: str, port: str) -> None:
    from pyftpdlib.authorizers import DummyAuthorizer
    from pyftpdlib.handlers import FTPHandler
    from pyftpdlib.servers import ThreadedFTPServer

    class Handler(FTPHandler):
        authorizer = DummyAuthorizer()

    Handler.authorizer.add_user(USER, PASSWORD, folder, perm=PERMISSIONS)
    server = ThreadedFTPServer(("127.0.0.1", int(port)), Handler)
    print(server.address[1], flush=True)
    server.serve_forever(handle_exit=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
