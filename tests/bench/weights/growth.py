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
BEGIN, EACH = 5, 10  # events before the first release, and of every one
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
        yield from (facts.opened(), facts.trainer_joined(), self._same(facts.registered()))
        yield from (facts.joined(ENGINE), facts.holds(ENGINE, 0, "base", digest))  # type: ignore[arg-type]
        base, number = "base", 0
        while True:
            number += 1
            candidate = f"c{number}"
            for event in (*facts.trained(candidate, base, number), *facts.released(number, candidate, facts.m(ENGINE))):
                yield self._same(event)
            base = candidate

    def _same(self, event: Event) -> Event:
        return replace(event, **{name: value for name, value in self.same.items() if hasattr(event, name)})

    def whole(self) -> bool:
        """Whether the last release is committed."""
        return (self.seq - BEGIN) % EACH == 0

    def release(self) -> list[Recorded]:
        """The next one; call it only between two."""
        return [self.next() for _ in range(EACH)]


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

    async def grow(self, size: int, where: Path) -> None:
        """Write on until there are about so many events, between two releases, and copy the store."""
        self.server.start()
        journal = await connect(self.server.url, "bench", "bench")
        if not self.history.seq:
            await journal.apply(1)
        while self.history.seq < size or not self.history.whole():
            await self._send(journal, self.history.next())
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
        while await journal.head(LOG) < self.history.seq:  # noqa: ASYNC110 - nobody says when it has all
            await asyncio.sleep(0.01)


def written(folder: Path) -> History:
    """A history whose blobs are in a store in the folder."""
    store = ArtifactStore(folder / "artifacts")
    batch = Batch(job="j", step=0, base="base", seed=0, samples=(), records=(), floor=0, taken=())
    return History(*save_weights(store, copied(tensors(LENGTHS))), store.put(encode_batch(batch)))


def decisions(runs: int, folder: Path) -> Iterator[Row]:
    found: dict[int, list[float]] = {}
    world, history = World(), written(folder)
    for size in SIZES:
        while history.seq < size or not history.whole():
            fold(world, history.next())
        found[size] = [decided_ms(world, history.release()) for _ in range(runs)]
    yield _row("publish cost, fold and decisions of all roles, one release", found)


def growth(runs: int, events: int, folder: Path) -> Iterator[Row]:
    found: dict[int, list[float]] = {}
    with tempfile.TemporaryDirectory(dir=SHM, prefix="reef-bench-") as fast:
        writer = Writer(Path(fast), written(Path(fast)))
        for size in [each for each in SIZES if each <= events]:
            with tempfile.TemporaryDirectory(dir=folder) as own:
                began = time.monotonic()
                asyncio.run(writer.grow(size, Path(own)))
                grown = time.monotonic() - began
                found[size] = through(Path(own), Path(fast), runs)
                took = time.monotonic() - began
            print(f"   {size} events: written in {grown:.0f} s, all in {took:.0f} s", file=sys.stderr, flush=True)
        writer.server.stop()
    yield _row("publish cost, publish → serving through a server that holds the log, 1 MiB, 1 engine", found)


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
