"""From the call of publish to the last engine that may generate: ours with and without proof and log, and others.

Knows: the clock, every pattern, what a target is made of. Must not know: how any of them works.
"unverified" and "verified" are our transport and digests with a pipe in place of the log: stop, receive, (hash,) say
so, go. "product" is a deployment as it is; on a tmpfs, where nothing waits for a disk, and on a disk, durable.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from reef_bus.manifest import describe
from tests.bench.transports import memory
from tests.bench.weights.machine import Rates
from tests.bench.weights.moving import MIB, Sender, in_turn
from tests.bench.weights.patterns import Update, actors, http, ray_node, tensors
from tests.bench.weights.product import HOPS, Product, Release, hops, product, received_s
from tests.bench.weights.receivers import receivers
from tests.bench.weights.table import AT_MOST, Row, median, ratios, spread

COUNTS = (1, 2, 4, 8)
SLACK_MS = 10.0
SHM = Path("/dev/shm")


def by_pipe(sender: Sender, count: int, verify: bool, transport: str = "tcp") -> float:
    """Seconds. The manifest is part of the proof: who verifies nothing knows the layout beforehand."""
    sender.touch()
    began = time.monotonic()
    if verify:
        sender.manifest = describe(sender.source)
    sender.send(transport, "receive", verify, only=count)
    return max(sender.them.ask("open", only=count)) - began


def by_gloo(sender: Sender, count: int) -> float:
    began = time.monotonic()
    sender.broadcast(count)
    return max(sender.them.ask("open", only=count)) - began


def piped(lengths: list[int], counts: tuple[int, ...], runs: int, folder: Path) -> dict[int, dict[str, list[float]]]:
    """By receivers and pattern: seconds."""
    found = {}
    with receivers(max(counts), lengths, folder) as them:
        sender = Sender(memory(lengths, fill=True), them, folder)
        for count in counts:
            sender.join(count)
            sides = {
                "unverified": lambda n=count: by_pipe(sender, n, verify=False),
                "verified": lambda n=count: by_pipe(sender, n, verify=True),
                "verified, shm": lambda n=count: by_pipe(sender, n, verify=True, transport="shm"),
                "gloo + pipe": lambda n=count: by_gloo(sender, n),
            }
            found[count] = in_turn(runs, sides)  # type: ignore[arg-type]
    return found


def updated(update: Update, lengths: list[int], runs: int) -> list[float]:
    """Seconds; the first update touches what is kept, and does not count."""
    version, found = tensors(lengths), []
    for turn in range(runs + 1):
        for tensor in version.values():
            tensor[:8] = turn
        began = time.monotonic()
        done = update(version)
        found += [done - began] if turn else []
    return found


def others(lengths: list[int], runs: int, folder: Path) -> dict[str, dict[int, list[float]]]:
    """By pattern and receivers; a pattern whose package is missing is not there."""
    found: dict[str, dict[int, list[float]]] = {"http": {}, "ray": {}}
    with contextlib.suppress(ModuleNotFoundError):
        import uvicorn  # noqa: F401 - before a process is started for it

        for count in COUNTS:
            with http(count, lengths, folder) as update:
                found["http"][count] = updated(update, lengths, runs)
    with contextlib.suppress(ModuleNotFoundError), ray_node(folder):
        for count in COUNTS:
            with actors(count, lengths) as update:
                found["ray"][count] = updated(update, lengths, runs)
    return {name: by_count for name, by_count in found.items() if by_count}


def deployed(where: Path, lengths: list[int], runs: int) -> dict[int, list[tuple[Release, dict[str, float]]]]:
    """By engines: each release, and when its events were stored."""
    found = {}
    with tempfile.TemporaryDirectory(dir=where, prefix="reef-bench-") as folder:
        with product(Path(folder), lengths, max(COUNTS)) as running:
            for count in COUNTS:
                running.grow(count)
                found[count] = released(running, runs)
    return found


def released(running: Product, runs: int) -> list[tuple[Release, dict[str, float]]]:
    releases = [running.release() for _ in range(runs + 1)][1:]
    return list(zip(releases, hops(running.log(), releases), strict=True))


def small(runs: int, folder: Path, rates: Rates) -> Iterator[Row]:
    """1 MiB, every count, every pattern."""
    lengths = [MIB // 16] * 16
    pipes = piped(lengths, COUNTS, runs, folder)
    rest = others(lengths, runs, folder)
    volatile, durable = deployed(SHM, lengths, runs), deployed(folder, lengths, runs)
    for count in COUNTS:
        ms = {name: median(seconds) * 1e3 for name, seconds in pipes[count].items()}
        ms |= {name: median(by_count[count]) * 1e3 for name, by_count in rest.items()}
        yield from _compared(count, ms, pipes[count], rest, runs)
        yield _product(count, "on a tmpfs", volatile[count], {})
        yield _product(count, "durable", durable[count], _budget(count, ms["verified"], rates))


def _compared(count: int, ms: dict[str, float], pipes: Any, rest: Any, runs: int) -> Iterator[Row]:
    best = min((ms[name] for name in ("http", "ray") if name in ms), default=0.0)
    for name in ms:
        seconds = pipes[name] if name in pipes else rest[name][count]
        row = Row(
            measure=f"publish → serving, 1 MiB, {_engines(count)}: {name}",
            value=ms[name],
            unit="ms",
            count=runs,
            detail={"quartiles": [s * 1e3 for s in spread(seconds)]},
        )
        judged = name == "verified" and best
        yield msgspec.structs.replace(row, sense=AT_MOST, target=best) if judged else row


def _budget(count: int, verified_ms: float, rates: Rates) -> dict[str, float]:
    """What the durable row may take: of the appends on the path, the trainer's and the publisher's eight follow one
    another, and the engines' and the sender's are under way together."""
    one, many = 7, 2 * count + 1
    synced = (one + 1) * rates.one_ms + many * rates.many_ms
    return {"verified": verified_ms, "synced appends": synced, "slack": SLACK_MS}


def _product(count: int, how: str, found: list[tuple[Release, dict[str, float]]], budget: dict[str, float]) -> Row:
    ms = [release.serving_s * 1e3 for release, _ in found]
    row = Row(
        measure=f"publish → serving, 1 MiB, {_engines(count)}: product, {how}",
        value=median(ms),
        unit="ms",
        count=len(ms),
        detail={**budget, **_until([stored for _, stored in found]), "quartiles": spread(ms)},
    )
    return msgspec.structs.replace(row, sense=AT_MOST, target=sum(budget.values())) if budget else row


def _until(stored: list[dict[str, float]]) -> dict[str, float]:
    """Where the time goes: when each of these was on the log."""
    return {name: median([each[name] for each in stored]) * 1e3 for name in HOPS if all(name in s for s in stored)}


def _engines(count: int) -> str:
    return f"{count} receiver{'s' * (count > 1)}"


def large(runs: int, folder: Path) -> Iterator[Row]:
    """64 MiB to eight."""
    seconds = piped([4 * MIB] * 16, (8,), runs, folder)[8]
    for how, name in (("tcp", "verified"), ("shm", "verified, shm")):
        ratio = ratios(seconds[name], seconds["gloo + pipe"])
        yield Row(
            measure=f"publish → serving, 64 MiB, 8 receivers: verified over {how}, against gloo + pipe",
            value=median(ratio),
            unit="× gloo + pipe",
            count=runs,
            sense=AT_MOST,
            target=1.2,
            detail={**{f"{name} ms": median(s) * 1e3 for name, s in seconds.items()}, "quartiles": spread(ratio)},
        )


# -- pauses


def staged(runs: int, folder: Path) -> Iterator[Row]:
    """Two idle engines: how long each of them may not generate. One GiB takes seconds to be made durable."""
    found = {}
    for title, size in (("64 MiB", 4 * MIB), ("1 GiB", 64 * MIB)):
        releases = paused(folder, size, runs, "staged")[0]
        ms = [pause * 1e3 for release in releases for pause in release.pauses()]
        found[title] = median(ms)
        yield Row(
            measure=f"staged: local pause, {title}, 2 idle engines",
            value=median(ms),
            unit="ms",
            count=len(ms),
            sense=AT_MOST,
            target=10.0,
            detail={"quartiles": spread(ms), "publish → serving ms": median([r.serving_s for r in releases]) * 1e3},
        )
    yield Row(
        measure="staged: local pause, 1 GiB against 64 MiB",
        value=found["1 GiB"] / found["64 MiB"],
        unit="×",
        count=runs,
        sense=AT_MOST,
        target=1.5,
        detail={},
    )


def fenced(runs: int, folder: Path) -> Iterator[Row]:
    """What the pause has beside the transfer and the hash of the slowest member."""
    releases, moved = paused(folder, 4 * MIB, runs, "fenced")
    over = [(max(release.pauses()) - max(moved[release.load_id])) * 1e3 for release in releases]
    detail = {
        "pause": median([max(release.pauses()) for release in releases]) * 1e3,
        "transfer + digest": median([max(moved[release.load_id]) for release in releases]) * 1e3,
        "quartiles": spread(over),
    }
    yield Row(
        measure="fenced: pause beside transfer + digest, 64 MiB, 2 idle engines",
        value=median(over),
        unit="ms",
        count=len(over),
        sense=AT_MOST,
        target=20.0,
        detail=detail,
    )


def paused(folder: Path, size: int, runs: int, mode: str) -> tuple[list[Release], dict[str, list[float]]]:
    with tempfile.TemporaryDirectory(dir=folder) as own, product(Path(own), [size] * 16, 2, mode) as running:
        running.grow(2)
        releases = [running.release() for _ in range(runs + 2)][2:]  # both copies were touched
        return releases, received_s(running.log())
