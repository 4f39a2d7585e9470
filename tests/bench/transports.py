"""How fast weights move between processes of one host: `python -m tests.bench.transports [--receivers N] [--runs N]`.

Knows: 1 GiB in two shapes, a memcpy, a stopwatch. Must not know: how a transport works.
Figures are medians in GB/s, and in brackets their share of a memcpy between two ordinary arrays, taken in the same run
while nothing else here moves. `offer` is the sender's part; `copy` is `receive` into memory that was in use before;
`digest` is every tensor's xxh3, as an engine hashes what it received; `map` is that digest straight from the mapping
of the segment (shm), which no engine does.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from collections import defaultdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import numpy

from reef_bus.artifacts import ArtifactStore, save_weights
from reef_bus.backends import Piece, Pieces
from reef_bus.manifest import Manifest, describe
from reef_bus.transport import Ticket, Transport, transports

GIB = 1 << 30
ASK = {"publication": "bench", "attempt": 1, "stall_s": 60.0}

Figures = dict[str, list[float]]


def sizes(shape: str) -> list[int]:
    """16 x 64 MiB, or 300 tensors of 4 KiB to 32 MiB in random order."""
    if shape == "even":
        return [GIB // 16] * 16
    chance = random.Random(0)
    wild = [2 ** chance.uniform(12, 25) for _ in range(300)]
    found = [int(size * GIB / sum(wild)) // 64 * 64 for size in wild]
    return [*found[1:], GIB - sum(found[1:])]


def memory(lengths: list[int], fill: bool) -> dict[str, Piece]:
    """Touched, so that nothing of it is faulted in while the clock runs."""
    found = {}
    for n, size in enumerate(lengths):
        array = numpy.full(size, n % 251, numpy.uint8)
        if fill:
            array[:] = numpy.frombuffer(random.Random(n).randbytes(4096), numpy.uint8).repeat(size // 4096 + 1)[:size]
        found[f"t{n:03}"] = Piece("U8", (size,), array.data)
    return found


def receiver(pipe: Connection, name: str, folder: str, lengths: list[int]) -> None:
    """A process: for every ticket, three times in seconds: copy, digest, map (0 where there is none)."""
    transport, target = transports(ArtifactStore(Path(folder)))[name], memory(lengths, fill=False)
    manifest = Manifest.decode(pipe.recv_bytes())
    while ticket := pipe.recv_bytes():
        pipe.send(asyncio.run(_timed(transport, msgspec.json.decode(ticket, type=Ticket), manifest, target)))


async def _timed(transport: Transport, ticket: Ticket, manifest: Manifest, target: Pieces) -> tuple[float, ...]:
    times = [time.perf_counter()]
    await transport.receive(ticket, manifest, target, **ASK)  # type: ignore[arg-type]
    times.append(time.perf_counter())
    assert describe(target) == manifest
    times.append(time.perf_counter())
    mapped: Any = getattr(transport, "_mapped", None)
    if mapped is not None:
        whole = memoryview(mapped.memory)
        views = {e.name: whole[e.offset : e.offset + e.nbytes] for e in manifest.tensors}
        assert describe({n: p._replace(data=views[n]) for n, p in target.items()}) == manifest
    times.append(time.perf_counter())
    return tuple(after - before for before, after in itertools.pairwise(times))


def copied(source: Pieces, target: Pieces) -> float:
    began = time.perf_counter()
    for name, piece in source.items():
        numpy.copyto(numpy.frombuffer(target[name].data, numpy.uint8), numpy.frombuffer(piece.data, numpy.uint8))
    return time.perf_counter() - began


async def bench(name: str, shape: str, receivers: int, runs: int, folder: str) -> Figures:
    lengths, store = sizes(shape), ArtifactStore(Path(folder))
    source, other, context = (
        memory(lengths, fill=True),
        memory(lengths, fill=False),
        multiprocessing.get_context("spawn"),
    )
    manifest, transport = (
        save_weights(store, source)[1] if name == "files" else describe(source),
        transports(store)[name],
    )
    pipes, seconds = [], defaultdict(list)
    for _ in range(receivers):
        ours, theirs = context.Pipe()
        context.Process(target=receiver, args=(theirs, name, folder, lengths), daemon=True).start()
        ours.send_bytes(manifest.encode())
        pipes.append(ours)
    for turn in range(runs + 1):  # the first one touches what is kept, and does not count
        found = {"memcpy": [copied(source, other)], **await _round(transport, manifest, source, pipes)}
        for key, values in found.items():
            seconds[key] += values if turn else []
    for pipe in pipes:
        pipe.send_bytes(b"")
    return dict(seconds)


async def _round(transport: Transport, manifest: Manifest, source: Pieces, pipes: list[Any]) -> Figures:
    began = time.perf_counter()
    offer = await transport.offer(manifest, source, publication="bench", attempt=1)
    offered = time.perf_counter() - began
    try:
        for pipe in pipes:
            pipe.send_bytes(msgspec.json.encode(offer.ticket))
        told = await asyncio.gather(*(asyncio.to_thread(pipe.recv) for pipe in pipes))
    finally:
        await offer.close()
    copy, digest, mapped = (list(column) for column in zip(*told, strict=True))
    both = [a + b for a, b in zip(copy, digest, strict=True)]
    return {"offer": [offered], "copy": copy, "digest": digest, "copy+digest": both, "map": mapped}


def line(seconds: Figures) -> str:
    best = statistics.median(seconds["memcpy"])
    told = [f"memcpy {GIB / best / 1e9:.1f}"]
    for key in ("offer", "copy", "digest", "copy+digest", "map"):
        median = statistics.median(seconds[key])
        if median > 1e-2:  # else it moved nothing
            told.append(f"{key} {GIB / median / 1e9:.2f} ({best / median:.2f})")
    return ", ".join(told)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", nargs="+", default=["shm", "tcp"])
    parser.add_argument("--shapes", nargs="+", default=["even", "mixed"])
    parser.add_argument("--receivers", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    for name in args.names:
        for shape in args.shapes:
            for receivers in args.receivers:
                with tempfile.TemporaryDirectory() as folder:
                    seconds = asyncio.run(bench(name, shape, receivers, args.runs, folder))
                print(f"{name} {shape} x{receivers}, load {os.getloadavg()[0]:.1f}: {line(seconds)}", flush=True)


if __name__ == "__main__":
    main()
