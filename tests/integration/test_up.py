"""`reef-bus up` and `reef-bus run` as an operator uses them: a file, Ctrl-C, SIGTERM, exit statuses, no leftovers."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.integration, pytest.mark.long]

YAML = """
deployment: ours
state-dir: {state}
gateway:
  port: {port}
inference:
  engines: [engine-a]
training:
  groups: 2
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def command(*words: str) -> Iterator[subprocess.Popen[str]]:
    """`reef-bus …` in the background; whatever happens, it is not left behind."""
    process = subprocess.Popen(
        [sys.executable, "-m", "reef_bus.cli", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def free_row(count: int) -> int:
    """The first of `count` free ports in a row, below those that the system hands out."""
    for first in range(20_000, 32_000, count):
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + count):
                stack.enter_context(contextlib.closing(socket.socket())).bind(("127.0.0.1", port))
            return first
    raise AssertionError("no free ports")


def scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as reply:
        return str(reply.read(), "utf-8")


def answers(url: str, process: subprocess.Popen[str]) -> int:
    """Wait for the first 200 of a chat request."""
    body = json.dumps({"model": "reef-digit", "messages": [{"role": "user", "content": "3"}]}).encode()
    for _ in range(600):
        assert process.poll() is None, process.communicate()
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(url + "/v1/chat/completions", body, timeout=20) as reply,
        ):
            return int(reply.status)
        time.sleep(0.1)
    raise AssertionError("no answer within a minute")


def test_up_serves_from_a_yaml_file_and_ends_in_order_on_ctrl_c(tmp_path: Path) -> None:
    port, state = free_port(), tmp_path / "state"
    file = tmp_path / "deployment.yaml"
    file.write_text(YAML.format(state=state, port=port))
    metrics = free_row(6)
    with command("up", "-c", str(file), "--set", "training.group-size=4", "--set", f"metrics.port={metrics}") as up:
        assert answers(f"http://127.0.0.1:{port}", up) == 200
        for role in range(metrics, metrics + 6):  # trainer, engine-a, two publishers, gateway, supervisor
            text = scrape(role)
            assert "reef_up 1.0" in text and "reef_release_sequence 0.0" in text and "reef_halted 0.0" in text
        children = psutil.Process(up.pid).children(recursive=True)
        assert len(children) == 6  # nats-server, trainer, engine-a, two publishers, gateway
        second = subprocess.run(
            [sys.executable, "-m", "reef_bus.cli", "up", "-c", str(file)], capture_output=True, text=True, check=False
        )
        assert second.returncode == 2 and f"in use by process {up.pid}" in second.stderr
        assert len(second.stderr.strip().splitlines()) == 1
        up.send_signal(signal.SIGINT)
        out, err = up.communicate(timeout=30)
    assert up.returncode == 0, err
    assert "Traceback" not in err and "EngineJoined" in out
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    for component in ("trainer", "engine-a", "publisher", "publisher-2", "gateway"):
        assert "ends, as asked" in (state / "logs" / f"{component}.log").read_text()


def test_up_on_a_taken_port_is_one_clear_line(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        file = tmp_path / "deployment.json"
        file.write_text(json.dumps({"state-dir": str(tmp_path / "state"), "gateway": {"port": port}}))
        done = subprocess.run(
            [sys.executable, "-m", "reef_bus.cli", "up", "-c", str(file)], capture_output=True, text=True, check=False
        )
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1].startswith("reef-bus: gateway.port") and "Traceback" not in done.stderr


def test_a_role_alone_ends_with_0_on_sigterm_and_its_log_goes_to_stderr(tmp_path: Path) -> None:
    port = free_port()
    file = tmp_path / "deployment.json"
    file.write_text(json.dumps({"state-dir": str(tmp_path / "state"), "gateway": {"port": port}}))
    with command("up", "-c", str(file)) as up:
        assert answers(f"http://127.0.0.1:{port}", up) == 200
        running = tmp_path / "state" / "run" / "deployment.json"
        with command("run", "publisher", "-c", str(running), "--id", "publisher-3", "--json") as second:
            assert second.stderr is not None
            said = next(line for line in second.stderr if "is up" in line)
            second.terminate()
            out, err = second.communicate(timeout=20)
        up.terminate()
        up.communicate(timeout=30)
    assert (second.returncode, out) == (0, ""), err
    first, *_, last = (json.loads(line)["message"] for line in (said, *err.splitlines()))
    assert "is up" in first and "ends, as asked" in last
    assert up.returncode == 0
    assert os.path.exists(running)
