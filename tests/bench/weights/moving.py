"""How fast bytes move: shm against memcpy, tcp against gloo's broadcast, CPU per GiB, and the chain.

Knows: one sender, which is this process; receivers in others. Must not know: the log, or when anybody may serve.
Every run takes each side in its turn, so that what disturbs one disturbs the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy

from reef_bus.artifacts import ArtifactStore
from reef_bus.backends import Pieces
from reef_bus.manifest import describe
from reef_bus.transport import Transport, transports
from tests.bench.transports import GIB, copied, memory, sizes
from tests.bench.weights.receivers import Did, Receivers, receivers
from tests.bench.weights.table import AT_LEAST, AT_MOST, Row, median, ratios, spread

MIB = 1 << 20
FLAT = 1.5
"""How much more the sender may need for sixteen receivers than for one, for it to count as flat: each still asks it
where to take the bytes from."""


class Moved(NamedTuple):
    """One transfer to everybody: seconds of the sender's own part and until the last receiver was done, CPU seconds of
    the sender, and what the receivers say."""

    offer_s: float
    total_s: float
    cpu_s: float
    did: list[Did]

    @property
    def slowest_s(self) -> float:
        """Of the receivers' own parts."""
        return max(each.moved_s + each.digest_s for each in self.did)

    def digest_s(self) -> float:
        return max(each.digest_s for each in self.did)


class Sender:
    """This process: a version in memory, and the ways by which it gets to `them`."""

    def __init__(self, source: Pieces, them: Receivers, folder: Path) -> None:
        self.source, self.them = source, them
        self.manifest, self.version = describe(source), 0
        self.transports = transports(ArtifactStore(folder))
        self.loop = asyncio.new_event_loop()
        self.group: Any = None

    def touch(self) -> None:
        """Another version than any before: what receivers hold must not be right already."""
        self.version += 1
        for piece in self.source.values():
            piece.data[-8:] = self.version.to_bytes(8, "little")

    def move(self, name: str, how: str = "receive", *more: Any, only: int | None = None) -> Moved:
        """A version that was described before the clock runs."""
        self.touch()
        self.manifest = describe(self.source)
        return self.send(name, how, *more, only=only)

    def send(self, name: str, how: str, *more: Any, only: int | None = None) -> Moved:
        return self.loop.run_until_complete(self._move(self.transports[name], how, more, only))

    async def _move(self, transport: Transport, how: str, more: tuple[Any, ...], only: int | None) -> Moved:
        told = self.manifest.encode()
        cpu, began = time.process_time(), time.monotonic()
        offer = await transport.offer(self.manifest, self.source, publication="bench", attempt=1)
        offered = time.monotonic()
        try:
            self.them.tell(how, msgspec.json.encode(offer.ticket), told, *more, only=only)
            did = await asyncio.to_thread(self.them.answers, only)
            used = time.process_time() - cpu
        finally:
            await offer.close()
        check(did)
        return Moved(offered - began, max(each.at for each in did) - began, used, did)

    def join(self, count: int) -> None:
        """A gloo group with the first `count` receivers."""
        from tests.bench.baselines import broadcast

        self.group = None
        self.them.ask("load_torch", only=count)
        with socket.socket() as probe:
            probe.bind((broadcast.HOST, 0))
            port = probe.getsockname()[1]
        for rank, pipe in enumerate(self.them.pipes[:count], 1):
            pipe.send(("join", port, count + 1, rank))
        self.group = broadcast.join(port, 0, count + 1)
        self.them.answers(count)

    def broadcast(self, only: int) -> Moved:
        from tests.bench.baselines import broadcast

        cpu, began = time.process_time(), time.monotonic()
        self.them.tell("broadcast", only=only)
        for name in sorted(self.source):
            broadcast.broadcast(self.group, numpy.frombuffer(self.source[name].data, numpy.uint8))
        did, used = self.them.answers(only), time.process_time() - cpu
        return Moved(0.0, max(each.at for each in did) - began, used, did)


def check(did: list[Did]) -> None:
    """A figure of bytes that did not arrive is none."""
    if any(each.right is False for each in did):
        raise RuntimeError("a receiver holds other bytes than were sent")


@contextlib.contextmanager
def sending(lengths: list[int], count: int, folder: Path) -> Iterator[Sender]:
    with receivers(count, lengths, folder) as them:
        yield Sender(memory(lengths, fill=True), them, folder)
    gc.collect()


def in_turn(runs: int, sides: dict[str, Callable[[], Any]]) -> dict[str, list[Any]]:
    """What each side comes to, run by run; the first run touches what is kept, and does not count."""
    found: dict[str, list[Any]] = defaultdict(list)
    names = list(sides)
    for turn in range(runs + 1):
        random.Random(turn).shuffle(names)
        for name in names:
            value = sides[name]()
            found[name] += [value] if turn else []
    return found


def shm(runs: int, folder: Path) -> Iterator[Row]:
    lengths = sizes("even")
    for count in (1, 4):
        other = memory(lengths, fill=False)
        with sending(lengths, count, folder) as sender:
            sides = {
                "memcpy": lambda sender=sender, other=other: copied(sender.source, other),
                "map": lambda sender=sender: sender.move("shm", "map"),
                "copy": lambda sender=sender: sender.move("shm", "receive", True),
            }
            found = in_turn(runs, sides)  # type: ignore[arg-type]
        yield from _shm_rows(count, found)


def _shm_rows(count: int, found: dict[str, list[Any]]) -> Iterator[Row]:
    targets = {1: {"map": 0.65, "copy": 0.45}, 4: {"map": 0.45, "copy": 1.0}}[count]
    best = median(found["memcpy"])
    for how in ("map", "copy"):
        moves: list[Moved] = found[how]
        share, what = (count if count > 1 and how == "copy" else 1), f"{how} + digest"
        unit = "× memcpy" + (", aggregate" if share > 1 else "")
        detail = {
            "GB/s": share * GIB / median([m.slowest_s for m in moves]) / 1e9,
            "memcpy GB/s": GIB / best / 1e9,
            "digest s": median([m.digest_s() for m in moves]),
        }
        after = [share * ratio for ratio in ratios(found["memcpy"], [m.slowest_s for m in moves])]
        who = f"shm, 1 GiB, {count} receiver{'s' * (count > 1)}"
        yield Row(
            measure=f"{who}: {what}",
            value=median(after),
            unit=unit,
            count=len(moves),
            sense=AT_LEAST,
            target=targets[how],
            detail={**detail, "quartiles": spread(after)},
        )
        whole = [share * ratio for ratio in ratios(found["memcpy"], [m.total_s for m in moves])]
        detail = {"sender's copy s": median([m.offer_s for m in moves]), "quartiles": spread(whole)}
        yield Row(
            measure=f"{who}: {what}, and the sender's copy before it",
            value=median(whole),
            unit=unit,
            count=len(moves),
            detail=detail,
        )


def tcp(runs: int, folder: Path) -> Iterator[Row]:
    for shape, title, target in (("even", "16 × 64 MiB", 1.0), ("mixed", "300 mixed tensors", 1.3)):
        lengths = sizes(shape)
        other = memory(lengths, fill=False)
        with sending(lengths, 1, folder) as sender:
            sender.join(1)
            sides: dict[str, Callable[[], Any]] = {
                "memcpy": lambda sender=sender, other=other: copied(sender.source, other),  # type: ignore[misc]
                "tcp": lambda sender=sender: sender.move("tcp", "receive", True),  # type: ignore[misc]
                "gloo": lambda sender=sender: sender.broadcast(1),  # type: ignore[misc]
                "digest": lambda sender=sender: timed_cpu(sender.source),  # type: ignore[misc]
            }
            found = in_turn(runs, sides)
        yield from _tcp_rows(title, target, found)


def timed_cpu(source: Pieces) -> float:
    cpu = time.process_time()
    describe(source)
    return time.process_time() - cpu


def _tcp_rows(title: str, target: float, found: dict[str, list[Any]]) -> Iterator[Row]:
    ours: list[Moved] = found["tcp"]
    theirs: list[Moved] = found["gloo"]
    faster = ratios([m.total_s for m in theirs], [m.total_s for m in ours])
    detail = {
        "tcp + digest GB/s": GIB / median([m.total_s for m in ours]) / 1e9,
        "gloo GB/s": GIB / median([m.total_s for m in theirs]) / 1e9,
        "memcpy GB/s": GIB / median(found["memcpy"]) / 1e9,
        "digest s": median([m.digest_s() for m in ours]),
        "quartiles": spread(faster),
    }
    yield Row(
        measure=f"tcp, 1 GiB, digest included, against gloo's broadcast without: {title}",
        value=median(faster),
        unit="× gloo",
        count=len(ours),
        sense=AT_LEAST,
        target=target,
        detail=detail,
    )
    sent, made = [m.cpu_s for m in ours], found["digest"]
    got = [m.did[0].cpu_s for m in ours]
    spent = [sum(three) for three in zip(sent, made, got, strict=True)]
    detail = {
        "sender": median(sent),
        "its manifest": median(made),
        "receiver": median(got),
        "gloo": median([m.cpu_s + m.did[0].cpu_s for m in theirs]),
        "quartiles": spread(spent),
    }
    yield Row(
        measure=f"CPU seconds per GiB, tcp, both sides, digest included: {title}",
        value=median(spent),
        unit="s",
        count=len(ours),
        sense=AT_MOST,
        target=0.5,
        detail=detail,
    )


def chain(runs: int, folder: Path) -> Iterator[Row]:
    """Each receiver takes 64 MiB; the sender gives them to the first alone."""
    counts = (1, 2, 4, 8, 16)
    with sending([4 * MIB] * 16, counts[-1], folder) as sender:
        sides = {
            str(n): (lambda n=n, sender=sender: sender.move("tcp", "receive", True, only=n))  # type: ignore[misc]
            for n in counts
        }
        found: dict[str, list[Moved]] = in_turn(runs, sides)  # type: ignore[arg-type]
    spent = {n: median([m.cpu_s for m in found[str(n)]]) for n in counts}
    detail = {f"×{n} ms": spent[n] * 1e3 for n in counts}
    detail |= {f"×{n} all done ms": median([m.total_s for m in found[str(n)]]) * 1e3 for n in (1, 16)}
    yield Row(
        measure="tcp, 64 MiB, receivers 1 → 16: the sender's CPU, sixteen against one",
        value=spent[16] / spent[1],
        unit="×",
        count=runs,
        sense=AT_MOST,
        target=FLAT,
        detail=detail,
    )
