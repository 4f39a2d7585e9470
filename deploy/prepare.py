"""Steps 2 to 4 of 4: fills the virtual environment that runs it with torch, the pinned packages and the project.

Knows: pyproject.toml's extras, the pins, PyTorch's public index of CPU builds, how pip words its failures.
Must not know: what the project does. It imports the standard library only, because nothing else is there yet.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROJECT = ROOT / "pyproject.toml"
CONSTRAINTS = ROOT / "deploy" / "constraints.txt"
SGLANG = ROOT / "deploy" / "sglang-cpu.txt"
ENVIRONMENT = Path(sys.prefix)
LOG = ENVIRONMENT / "prepare.log"
CPU_BUILDS = "https://download.pytorch.org/whl/cpu"
CPU_BUILDS_ANSWER_S = 3.0
UCX = ("ucxx-cu12", "libucxx-cu12", "libucx-cu12")

# pip has no error codes, so its words are all there is. The order matters: a full disk also ends in "no version".
DISK_FULL = re.compile(r"No space left on device|Errno 28|Disk quota exceeded|Errno 122")
NO_NETWORK = re.compile(
    r"NewConnectionError|ConnectTimeout|ReadTimeout|Read timed out|Connection (?:refused|reset|aborted)"
    r"|name resolution|Name or service not known|nodename nor servname|Network is unreachable|ProxyError|SSLError"
)
PIP_ERROR = re.compile(r"^\s*((?:\w+Error|ERROR|error): .*)$", re.MULTILINE)
# With a constraint file, pip calls a pin that its index lacks a conflict of the requirement with its own pin.
NO_BUILD = re.compile(r"No matching distribution found for (\S+)|The user requested \(constraint\) (\S+)")


class Stopped(Exception):
    """The one line that a person needs."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("extras", nargs="+", help="extras of pyproject.toml, e.g. demo dev")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--wheel", type=Path, help="install this wheel instead of the checkout")
    kind.add_argument("--sglang", action="store_true", help="with SGLang for a CPU: deploy/sglang-cpu.txt")
    args = parser.parse_args()
    try:
        prepare(args.extras, args.wheel, args.sglang)
    except Stopped as stopped:
        print(f"make: {stopped}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"make: {error}", file=sys.stderr)
        return 1
    return 0


def prepare(extras: list[str], wheel: Path | None, sglang: bool) -> None:
    """Leaves the environment with `extras` installed, or raises. Returns at once where stamps say it has them."""
    stamp = inputs(*([wheel] if wheel else []), *([SGLANG] if sglang else []))
    if all(stamped(extra) == stamp for extra in extras):
        return
    if sglang:
        demand_sglangs_platform()
    with one_at_a_time():
        install_torch()
        if wheel is None:
            install_packages(extras, sglang)
            if "dev" in extras:
                install_ucx()
            install_checkout()
        else:
            install_wheel(wheel, extras)
        for extra in extras:
            stamp_of(extra).write_text(stamp)


def inputs(*more: Path) -> str:
    """Digest of everything that decides what is installed: change one, and the next call installs again."""
    digest = hashlib.sha256()
    for path in (PROJECT, CONSTRAINTS, Path(__file__), *more):
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    digest.update(f"{sys.version} {sys.prefix}".encode())
    return digest.hexdigest()


def stamp_of(extra: str) -> Path:
    return ENVIRONMENT / f"reef-{extra}.stamp"


def stamped(extra: str) -> str | None:
    try:
        return stamp_of(extra).read_text()
    except FileNotFoundError:
        return None


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Two terminals may call make at once; pip may not run twice in one environment."""
    with (ENVIRONMENT / "prepare.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def install_torch() -> None:
    """torch first and alone: it is most of the bytes, and where it comes from depends on the machine."""
    requirement = f"torch=={pinned('torch')}"
    say(2, "torch", "20–60 s")
    index = [f"--extra-index-url={CPU_BUILDS}"] if cpu_builds_answer() else []
    source = "PyTorch's index of CPU builds" if index else "the pin alone, from pip's own index"
    before = installed_mib()
    pip("install", *index, "--constraint", str(CONSTRAINTS), requirement)
    grown = installed_mib() - before
    print(f"  {requirement}: {source}; " + (f"{grown} MiB installed" if grown > 1 else "was there already"))


def install_packages(extras: Iterable[str], sglang: bool) -> None:
    say(3, *(("packages and SGLang (1.9 GB)", "60–120 s") if sglang else ("packages", "10–40 s")))
    builder = tomllib.loads(PROJECT.read_text())["build-system"]["requires"]
    pip("install", "--constraint", str(CONSTRAINTS), *builder, *requirements(extras))
    if sglang:
        pip("install", "--no-deps", "--constraint", str(CONSTRAINTS), "--requirement", str(SGLANG))


def demand_sglangs_platform() -> None:
    """Said before anything is downloaded: pip would name one package after the other that has no build."""
    libc, version = platform.libc_ver()
    here = (sys.platform, platform.machine(), libc)
    if here != ("linux", "x86_64", "glibc") or tuple(map(int, version.split("."))) < (2, 34):
        found = f"{platform.system()} {platform.machine()}, {libc or 'no glibc'} {version}".strip()
        raise Stopped(
            f"SGLang {pinned('sglang', SGLANG)} has no build for {found}: its tests need x86-64 Linux, glibc 2.34"
        )


def install_ucx() -> None:
    """So that its transport is tested for real, on machines without a GPU too. Not as the extra: its 350 MB are
    mostly for GPUs. So without what it declares, which pip can leave out only package by package."""
    if sys.platform == "linux" and platform.libc_ver()[0] == "glibc" and platform.machine() in ("x86_64", "aarch64"):
        pip("install", "--no-deps", *(f"{name}=={pinned(name)}" for name in UCX))
    else:
        print("  without UCX, of which there is no build for this machine: its tests are skipped")


def install_checkout() -> None:
    # The builder came with the packages, pinned like them; a build environment of pip's own would be neither.
    say(4, "project", "2–5 s")
    pip("install", "--no-deps", "--no-build-isolation", "--editable", str(ROOT))


def install_wheel(wheel: Path, extras: Iterable[str]) -> None:
    say(4, "packages and wheel", "10–40 s")
    pip("install", "--constraint", str(CONSTRAINTS), f"{wheel.resolve()}[{','.join(extras)}]")


def requirements(extras: Iterable[str]) -> Iterator[str]:
    """What `pip install .[extras]` would ask for, without the project itself: an extra may name others."""
    project = tomllib.loads(PROJECT.read_text())["project"]
    yield from project["dependencies"]
    own = re.compile(re.escape(project["name"]) + r"\[([^]]+)]")
    todo, seen = list(extras), set[str]()
    while todo:
        extra = todo.pop().strip()
        for line in () if extra in seen else project["optional-dependencies"][extra]:
            if nested := own.fullmatch(line):
                todo += nested[1].split(",")
            else:
                yield line
        seen.add(extra)


def pinned(name: str, where: Path = CONSTRAINTS) -> str:
    found = re.search(rf"^{name}==(\S+)", where.read_text(), re.MULTILINE)
    if found is None:
        raise Stopped(f"{where} pins no {name}; expected a line {name}==…")
    return found[1]


def cpu_builds_answer() -> bool:
    """Asked on Linux only: elsewhere the default build is for CPUs. A thread, because resolvers keep no deadline."""
    if sys.platform != "linux":
        return False
    answers: list[int] = []
    asking = threading.Thread(target=ask, args=(answers,), daemon=True)
    asking.start()
    asking.join(CPU_BUILDS_ANSWER_S)
    return answers == [200]


def ask(answers: list[int]) -> None:
    try:
        with urllib.request.urlopen(f"{CPU_BUILDS}/torch/", timeout=CPU_BUILDS_ANSWER_S) as reply:
            answers.append(reply.status)
    except OSError:
        answers.append(0)


def pip(*arguments: str) -> None:
    """Runs pip quietly; its whole output is kept in LOG, and a failure becomes one line."""
    quiet = ("--no-input", "--disable-pip-version-check", "--progress-bar=off", "--retries=2")
    command = [sys.executable, "-m", "pip", arguments[0], *quiet, *arguments[1:]]
    environment = {"PIP_ROOT_USER_ACTION": "ignore", **os.environ}
    done = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    output = done.stdout.decode(errors="replace")
    kept = keep(" ".join(command) + "\n" + output)
    if done.returncode:
        raise Stopped(f"{explain(output)}; {kept}")


def keep(text: str) -> str:
    """Appends to LOG, and says where that is; a full disk may refuse that too."""
    try:
        with LOG.open("a") as log:
            log.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')}\n{text}\n")
    except OSError:
        return "pip's log found no room either"
    return f"pip's log: {LOG}"


def explain(output: str) -> str:
    """What pip's output means for a person, and what to do next."""
    if DISK_FULL.search(output) or shutil.disk_usage(ENVIRONMENT).free < 16 << 20:
        room = "5 GiB" if "sglang" in ENVIRONMENT.name else "3 GiB"
        return f"the disk is full ({ENVIRONMENT}, or {tempfile.gettempdir()}): free about {room}, then call make again"
    if NO_NETWORK.search(output):
        return "the package index does not answer: check the network or the proxy, then call make again"
    if missing := NO_BUILD.search(output):
        here = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
        return f"pip's index has no {missing[1] or missing[2]} for {here}: try another, e.g. make PYTHON=python3.13"
    lines = PIP_ERROR.findall(output) or output.splitlines() or ["no output"]
    return f"pip failed: {lines[-1].strip()[:200]}"


def installed_mib() -> int:
    """Size of this environment on disk, in MiB."""
    packages = ENVIRONMENT / "lib"
    return sum(file.stat().st_size for file in packages.rglob("*") if file.is_file() and not file.is_symlink()) >> 20


def say(step: int, what: str, usual: str) -> None:
    print(f"step {step} of 4: {what}, usually {usual}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
