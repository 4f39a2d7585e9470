"""SGLang's router as a process of ours: its settings, its start, its end.

Knows: the configuration, one process group. Must not know: engines, requests, or the log.
The process stays in the session of its role, so that whoever cleans up after the role finds it; on Linux the kernel
ends it with the role.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

from reef_bus.config import Config
from reef_bus.embedded import die_with_parent

POLL_S = 0.05
LAST_LINES = 8
RETRY_MS = 200
REGISTER_S = 5
"""For how long the router tries to register a worker. One that may generate answers at once; any other shall not be
registered late."""


def settings(config: Config, key: str) -> dict[str, Any]:
    """Who is a worker is decided by the log alone: so no health checks, no circuit breaker, and nobody without the key
    adds one. A request for which there is no worker, as while a fence is up, is tried again until it would be late."""
    seconds = max(1, int(config.gateway.timeout_s))
    return {
        "host": config.gateway.host,
        "port": config.inference.router_port,
        "policy": "round_robin",  # whoever is asked again is asked elsewhere
        "log_level": "error",  # it warns of every worker that it is told of
        "max_payload_size": config.gateway.max_body_bytes,
        "request_timeout_secs": seconds,
        "retry_max_retries": seconds * 1000 // RETRY_MS,
        "retry_max_backoff_ms": RETRY_MS,
        "worker_startup_timeout_secs": REGISTER_S,
        "worker_startup_check_interval": 1,
        "disable_health_check": True,
        "disable_circuit_breaker": True,
        "control_plane_api_keys": [("reef", "reef", key, "admin")],
    }


class Process:
    """One router, started and not yet asked anything."""

    def __init__(self, settings: dict[str, Any], out: Path) -> None:
        """Call it in the main thread: the kernel ends the process when the thread that started it ends."""
        self.out = out
        with out.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "consumers.reef_router.server"],
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=subprocess.STDOUT,
                process_group=0,
                preexec_fn=die_with_parent,
            )
        assert self.process.stdin is not None
        with (
            contextlib.suppress(BrokenPipeError),
            self.process.stdin as stdin,
        ):  # whoever waits for it learns of its end
            stdin.write(msgspec.json.encode(settings))

    async def ended(self) -> str:
        """Wait until it has ended by itself; says how."""
        while (status := self.process.poll()) is None:  # noqa: ASYNC110 - nobody else would set an event
            await asyncio.sleep(POLL_S)
        return f"SGLang's router ended with status {status}:{self.last_words()}"

    def last_words(self) -> str:
        with contextlib.suppress(OSError):
            lines = self.out.read_text(errors="replace").strip().splitlines()[-LAST_LINES:]
            return "\n".join(["", *lines, f"(the whole of it: {self.out})"])
        return f" (its log {self.out} cannot be read)"

    def end(self) -> None:
        """It has nothing that could be lost. Safe to repeat."""
        if self.process.poll() is None:  # else its number may be another's by now
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
