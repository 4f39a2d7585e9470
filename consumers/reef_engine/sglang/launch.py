"""An SGLang server as a process of ours: its flags, its environment, its start, its end.

Knows: the configuration, one process group. Must not know: weights, requests, or the log.
The process stays in the session of the agent's own, so that whoever cleans up after the agent finds it; on Linux the
kernel ends it with the agent.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import aiohttp

from consumers.reef_engine.sglang.client import Client
from reef_bus.config import Inference
from reef_bus.embedded import die_with_parent, exit_status
from reef_bus.errors import Rejected, TransferError, Unavailable
from reef_bus.runner import blocking
from reef_bus.sections import Adapters

log = logging.getLogger(__name__)

SHIMS = Path(__file__).parent / "cpu"
POLL_S = 0.25
LOOK_S, SILENT_S = 10.0, 360.0
"""A server is asked for a sign of life so often, and hangs when it gave none for so long: longer than SGLang itself
waits for a batch (--watchdog-timeout), and than any call of ours, between which its scheduler would answer."""
SAY_S = 10.0
TIDY_S = 0.5  # for Python's own tracker, which gives back the semaphores of processes that were killed
LAST_LINES = 12
UNTEMPERED = ("SGLANG_RETURN_ORIGINAL_LOGPROB", "SGL_RETURN_ORIGINAL_LOGPROB")
"""Whoever has one of these set is given logprobs of temperature 1, whatever the temperature."""


def device(asked: str) -> str:
    """`cpu` or `cuda`; `auto` takes a GPU where there is one."""
    if asked != "auto":
        return asked
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def gpus() -> int:
    """How many this process sees."""
    import torch

    return torch.cuda.device_count()


def environment(device: str, scratch: Path, ranks: int = 1) -> dict[str, str]:
    """Nothing is fetched from anywhere; sockets and the like go to `scratch`; logprobs are of what is sampled from.
    Without a GPU the shims come first on the path, and several ranks share the cores: SGLang itself gives each a NUMA
    node, or refuses. With one they are not on it, though whoever started this process may have needed them."""
    found = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    for name in UNTEMPERED:
        found.pop(name, None)
    found["TMPDIR"] = str(scratch)
    path = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    path = [str(SHIMS)] * (device == "cpu") + [each for each in path if Path(each).resolve() != SHIMS.resolve()]
    found["PYTHONPATH"] = os.pathsep.join(path)
    if device == "cpu":
        found |= {"SGLANG_USE_CPU_ENGINE": "1", "CUDA_VISIBLE_DEVICES": ""}
        if ranks > 1:
            found.setdefault("SGLANG_CPU_OMP_THREADS_BIND", "|".join(_cores(ranks)))
    return found


def _cores(ranks: int) -> list[str]:
    """A list of cores for each rank; where there are fewer cores than ranks, some share one."""
    cores = sorted(os.sched_getaffinity(0))
    shares = [cores[rank * len(cores) // ranks : (rank + 1) * len(cores) // ranks] for rank in range(ranks)]
    return [",".join(str(core) for core in share or cores[:1]) for share in shares]


def model_flags(inference: Inference, folder: Path, device: str) -> list[str]:
    """What decides how weights lie in memory: the same for the server and for whoever works out its sums."""
    found = ["--model-path", str(folder), "--skip-tokenizer-init", "--device", device]
    found += ["--dtype", inference.dtype, "--tp-size", str(inference.tensor_parallel_size)]
    if device == "cpu":
        found += ["--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--grammar-backend", "none"]
        found += ["--disable-cuda-graph", "--mem-fraction-static", "0.8", "--max-total-tokens", "65536"]
    return found + [word for name, value in inference.options.items() for word in _option(name, value)]


def server_flags(
    inference: Inference, port: int, key: str, device: str, *, spans: bool, saver: bool = False, weights: bool = False
) -> list[str]:
    """`spans`: an answer may be made by several versions. The server tells them apart by what it has observed when one
    comes, and with overlapped batches that is a token late; and it must not reuse what another version computed.
    `saver`: its memory can be released. `weights`: it reads the folder's; the version is put over them."""
    found = ["--host", "127.0.0.1", "--port", str(port), "--api-key", key, "--skip-server-warmup"]
    found += ["--load-format", "auto" if weights else "dummy"]
    found += ["--max-running-requests", str(inference.max_batch)]
    found += ["--enable-memory-saver"] if saver else []
    found += ["--sleep-on-idle"] if device == "cpu" else []  # one that waits would keep a core from all others
    found += ["--disable-overlap-schedule"] if spans or device == "cpu" else []
    return found + ([] if inference.prefix_cache else ["--disable-radix-cache"])


def adapter_flags(adapters: Adapters, device: str) -> list[str]:
    """Room for all that it may hold, and the base model, in one batch. Nothing bounds how many it holds (SGLang's
    --max-loaded-loras): it would make room by itself, and what goes is decided on the log."""
    if not adapters.most():
        return []
    found = ["--enable-lora", "--max-lora-rank", str(adapters.rank), "--lora-target-modules", *adapters.targets]
    found += ["--max-loras-per-batch", str(adapters.most() + 1)]
    return found + (["--lora-backend", "torch_native"] if device == "cpu" else [])


def _option(name: str, value: str | int | float | bool) -> list[str]:
    if isinstance(value, bool):
        return [f"--{name}"] if value else []
    return [f"--{name}", str(value)]


def require_installed() -> None:
    if importlib.util.find_spec("sglang") is None:
        raise Rejected(
            "inference.backend sglang: SGLang is not installed here; pip install 'reef-bus[sglang]' where there is a "
            "GPU, else see docs/sglang.md"
        )


class Process:
    """One server, started and not yet asked anything."""

    def __init__(self, argv: list[str], environment: dict[str, str], out: Path) -> None:
        """Call it in the main thread: the kernel ends the process when the thread that started it ends."""
        self.out = out
        with out.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, *argv],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment,
                process_group=0,
                preexec_fn=die_with_parent,
            )

    def last_words(self) -> str:
        with contextlib.suppress(OSError):
            lines = self.out.read_text(errors="replace").strip().splitlines()[-LAST_LINES:]
            return "\n".join(["", *lines, f"(the whole of it: {self.out})"])
        return f" (its log {self.out} cannot be read)"

    async def ready(self, client: Client, limit_s: float) -> None:
        """Wait until it generates. Raises Unavailable with the end of its log when it ends, or takes longer."""
        began = said = time.monotonic()
        while await blocking(unhealthy, client):
            now = time.monotonic()
            if (status := exit_status(self.process)) is not None:
                raise Unavailable(f"SGLang ended with status {status}:{self.last_words()}")
            if now - began > limit_s:
                raise Unavailable(
                    f"SGLang did not come up within {limit_s:g} s (inference.start-s):{self.last_words()}"
                )
            if now - said > SAY_S:
                said = now
                log.info("SGLang has been starting for %.0f s; 20 to 60 are usual, see %s", now - began, self.out)
            await asyncio.sleep(POLL_S)
        log.info("SGLang generates after %.1f s", time.monotonic() - began)

    async def ended(self) -> str:
        """Wait until it has ended by itself; says how."""
        while (status := exit_status(self.process)) is None:  # noqa: ASYNC110 - nobody else would set an event
            await asyncio.sleep(POLL_S)
        return f"SGLang ended with status {status}:{self.last_words()}"

    def end(self) -> None:
        """End it, if it has not ended by itself, and then whatever it started: it has nothing that could be lost. Safe
        to repeat."""
        if exit_status(self.process) is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGKILL)  # Popen's own would wait for it first, and free its number
            time.sleep(TIDY_S)
        if self.process.returncode is None:  # else it was waited for, and its number may be another's by now
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def unhealthy(client: Client) -> str:
    """Why it does not generate, if it is not paused: one that is may say either."""
    try:
        client.get("health", timeout_s=5.0)
    except (TransferError, Unavailable) as error:
        return str(error)
    return ""


async def silent(client: Client, route: str, look_s: float = LOOK_S, silent_s: float = SILENT_S) -> str:
    """Wait until it has not answered there for a while; says so. Each look waits as long as that, for what is asked
    anew each time might never come between two batches; and it takes no thread of those that do the work. A proxy's
    page in the place of an answer is no sign of life."""
    patience = aiohttp.ClientTimeout(total=silent_s)
    heard = time.monotonic()
    async with aiohttp.ClientSession(headers=client.headers, timeout=patience) as session:
        while time.monotonic() - heard < silent_s:
            await asyncio.sleep(look_s)
            with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
                async with session.get(f"{client.url}/{route}", allow_redirects=False) as reply:
                    said = await reply.read()
                    heard = time.monotonic() if reply.status == 200 and said.startswith(b"{") else heard
    return f"the server at {client.url} has given no sign of life for {silent_s:g} s"


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
