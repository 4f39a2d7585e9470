"""What a publication costs as the log grows: in the fold and the decisions alone, and through a server that holds it.

Knows: a history of releases that went well, how it gets onto a server fast. Must not know: what makes anything slow.
The history is written on a tmpfs, where a sync costs nothing, and copied to where a deployment then goes on from it.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from msgspec.structs import replace

from reef_bus.artifacts import ArtifactStore, save_weights
from reef_bus.core import reactions
from reef_bus.core.effects import Deadlines, Me, Policy
from reef_bus.core.world import World, fold
from reef_bus.embedded import NatsServer
from reef_bus.envelope import headers, identify, payload
from reef_bus.events import Blob, Draft, Event, Recorded
from reef_bus.jetstream import JetStreamJournal, connect
from reef_bus.journal import LOG
from reef_bus.manifest import Manifest
from reef_bus.samples import Batch, encode_batch
from reef_bus.tensors import copied
from reef_bus.topology import subject
from tests import facts
from tests.bench.weights.patterns import tensors
from tests.bench.weights.product import product
from tests.bench.weights.table import AT_MOST, Row, median, spread

SIZES = (1_000, 10_000, 100_000, 1_000_000)
FLAT = 1.5
LENGTHS = [1 << 16] * 16
ENGINE = "engine-0"
TICK = "0001-01-01T00:00:00Z"  # for display only
WINDOW = 2_000
SHM = Path("/dev/shm")


class History:
    """Releases that one engine took, one after the other, all of the same bytes; numbered and chained as a log is."""

    def __init__(self, weights: Blob, manifest: Manifest, batch: Blob) -> None:
        self.same = {"batch": batch, "weights": weights, "manifest": manifest.digest, "tensor_bytes": manifest.total}
        self.seq, self.tails = 0, dict[str, int]()
        self._events = self._told()

    def next(self) -> Recorded:
        event = next(self._events)
        self.seq += 1
        prev = self.tails.get(event.chain, 0)
        self.tails[event.chain] = self.seq
        boot = {"train": "t1", "engine": f"{ENGINE}.1"}.get(event.family, "s1")
        draft = Draft(event=event, writer="bench", boot=boot)
        return Recorded(
            seq=self.seq,
            time=self.seq,
            subject=subject("bench", event),
            id=identify(draft, prev, payload(event)),
            prev=prev,
            cause=0,
            correlation="",
            writer="bench",
            boot=boot,
            event=event,
        )

    def _told(self) -> Iterator[Event]:
        digest = self.same["manifest"]
        yield from (facts.opened(), facts.trainer_joined(), replace(facts.registered(), **self.same))
        yield from (facts.joined(ENGINE), facts.holds(ENGINE, 0, "base", digest))  # type: ignore[arg-type]
        base, number = "base", 0
        while True:
            number += 1
            candidate = f"c{number}"
            for event in (*facts.trained(candidate, base, number), *facts.released(number, candidate, facts.m(ENGINE))):
                yield replace(event, **{k: v for k, v in self.same.items() if hasattr(event, k)})  # type: ignore[type-var]
            base = candidate

    def release(self) -> list[Recorded]:
        """The next one in whole; call it only between two."""
        return [self.next() for _ in range(10)]


def draft_of(recorded: Recorded) -> Draft:
    return Draft(event=recorded.event, writer=recorded.writer, boot=recorded.boot)


# -- the fold and the decisions alone


def decided_ms(world: World, release: list[Recorded]) -> float:
    """One release's events, each folded, after each everybody's question, as the loop asks it."""
    trainer, engine, policy = Me("trainer", "t1"), Me(ENGINE, f"{ENGINE}.1"), Policy()
    began = time.perf_counter()
    for recorded in release:
        fold(world, recorded)
        reactions.trainer(world, trainer)
        reactions.publisher(world, policy, recorded.time)
        reactions.engine(world, engine, Deadlines())
    return (time.perf_counter() - began) * 1e3


# -- a server that holds it


class Writer:
    """A server on a tmpfs, and the history so far on it."""

    def __init__(self, folder: Path, history: History) -> None:
        self.server, self.history = NatsServer(folder / "nats"), history
        self.world = World()
        self.aside: list[Recorded] = []  # folded, and not sent yet

    async def grow(self, size: int, where: Path) -> None:
        """Write on until there are about so many events, between two releases, and copy the store."""
        self.server.start()
        journal = await connect(self.server.url, "bench", "bench")
        if not self.history.seq:
            await journal.apply(1)
        for recorded in self.aside:
            await self._send(journal, recorded)
        while self.history.seq < size or (self.history.seq - 5) % 10:
            recorded = self.history.next()
            fold(self.world, recorded)
            await self._send(journal, recorded)
            if not self.history.seq % WINDOW:
                await self._stored(journal)
        await self._stored(journal)
        await journal.close()
        assert self.server.process is not None
        self.server.process.terminate()
        self.server.process.wait()
        shutil.copytree(self.server.folder / "store", where / "nats" / "store")

    async def _send(self, journal: JetStreamJournal, recorded: Recorded) -> None:
        header = headers(draft_of(recorded), recorded.id, recorded.prev, recorded.subject, TICK)
        del header["Nats-Msg-Id"]  # nothing is sent twice here, and the server need not look
        await journal.client.publish(recorded.subject, payload(recorded.event), headers=header)

    async def _stored(self, journal: JetStreamJournal) -> None:
        await journal.client.flush()
        while await journal.head(LOG) < self.history.seq:
            await asyncio.sleep(0.01)


def growth(runs: int, events: int, folder: Path) -> Iterator[Row]:
    decided: dict[int, list[float]] = {}
    published: dict[int, list[float]] = {}
    with tempfile.TemporaryDirectory(dir=SHM, prefix="reef-bench-") as fast:
        store = ArtifactStore(Path(fast, "artifacts"))
        batch = store.put(
            encode_batch(Batch(job="j", step=0, base="base", seed=0, samples=(), records=(), floor=0, taken=()))
        )
        writer = Writer(Path(fast), History(*save_weights(store, copied(tensors(LENGTHS))), batch))
        for size in [each for each in SIZES if each <= events]:
            with tempfile.TemporaryDirectory(dir=folder) as own:
                began = time.monotonic()
                asyncio.run(writer.grow(size, Path(own)))
                written = time.monotonic() - began
                published[size] = through(Path(own), Path(fast), runs)
                took = time.monotonic() - began
            decided[size] = aside(writer, runs)
            print(f"   {size} events: written in {written:.0f} s, all in {took:.0f} s", file=sys.stderr, flush=True)
        writer.server.stop()
    yield _row("publish cost, fold and decisions of all roles, one release", decided)
    yield _row("publish cost, publish → serving through a server that holds the log, 1 MiB, 1 engine", published)


def aside(writer: Writer, runs: int) -> list[float]:
    """On the world as it is, with the events that follow; the server gets them when it grows."""
    releases = [writer.history.release() for _ in range(runs)]
    writer.aside = [recorded for release in releases for recorded in release]
    return [decided_ms(writer.world, release) for release in releases]


def through(folder: Path, artifacts: Path, runs: int) -> list[float]:
    shutil.copytree(artifacts / "artifacts", folder / "state" / "artifacts")
    with product(folder, LENGTHS, 1) as running:
        running.grow(1)
        return [running.release().serving_s * 1e3 for _ in range(runs + 1)][1:]


def _row(measure: str, found: dict[int, list[float]]) -> Row:
    sizes = sorted(found)
    ms = {size: median(found[size]) for size in sizes}
    detail = {f"{size} events ms": ms[size] for size in sizes}
    return Row(
        measure=f"{measure}: {sizes[-1]} events against {sizes[0]}",
        value=ms[sizes[-1]] / ms[sizes[0]],
        unit="×",
        count=len(found[sizes[0]]),
        sense=AT_MOST,
        target=FLAT,
        detail={**detail, "quartiles at the end": spread(found[sizes[-1]])},
    )
