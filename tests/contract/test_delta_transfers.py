"""Deltas over the transports that tell them: who holds the base gets the delta; whatever is in doubt, the full bytes of
the same offer are there, within the deadline, and nothing is left behind.

Knows: the transports' contract, a real store, sockets. Must not know: agents, the log.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from collections.abc import AsyncIterator, Callable, Generator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import xxhash

from reef_bus.artifacts import ArtifactStore, save_weights
from reef_bus.backends import Piece, Pieces
from reef_bus.delta import encode, rebuild
from reef_bus.errors import TransferError
from reef_bus.manifest import Manifest, describe
from reef_bus.shelf import Opened
from reef_bus.stored import Base, Saved, save
from reef_bus.transport import Delta, Offer, Ticket, Transport, transports
from reef_bus.transport.door import Answer, Hello
from reef_bus.transport.files import FilesTransport
from tests.contract.peer import peer
from tests.transfers import BIG, PUBLICATION, fails, hear, message, offered, pieces, receive, run, strange_sender

BASE = pieces(7, BIG)
NEW = {**BASE, "b": pieces(9)["b"]}  # two values of ten million have changed
BASE_MANIFEST, MANIFEST = describe(BASE), describe(NEW)
DELTA = Delta(BASE_MANIFEST.digest, b"".join(encode(BASE, BASE_MANIFEST, NEW, MANIFEST)))
STALL_S = 1.0


@pytest.fixture
def tcp(tmp_path: Path) -> Transport:
    return transports(ArtifactStore(tmp_path / "store"), stall_s=STALL_S)["tcp"]


@contextlib.asynccontextmanager
async def telling(transport: Transport, delta: Delta = DELTA, source: Pieces = NEW) -> AsyncIterator[Offer]:
    async with offered(transport, source) as offer:
        offer.tell(delta)
        yield offer


async def ask(
    transport: Transport,
    ticket: Ticket,
    base: str = BASE_MANIFEST.digest,
    manifest: Manifest = MANIFEST,
    **other: Any,
) -> Any:
    usual: dict[str, Any] = {"publication": PUBLICATION, "attempt": 1, "stall_s": STALL_S}
    return await transport.delta(ticket, manifest, base, **{**usual, **other})


def empty(like: Pieces = NEW) -> dict[str, Any]:
    return {name: piece._replace(data=memoryview(bytearray(piece.data.nbytes))) for name, piece in like.items()}


async def comes_in_full(transport: Transport, ticket: Ticket) -> None:
    target = empty()
    assert await receive(transport, ticket, MANIFEST, target) == MANIFEST.total
    assert describe(target) == MANIFEST


# -- tcp


def test_who_holds_the_base_gets_the_delta_and_the_version_is_what_it_gives(tcp: Transport) -> None:
    async def story() -> None:
        async with telling(tcp) as offer:
            delta, target = await ask(tcp, offer.ticket), empty()
            assert offer.sent_bytes == len(delta) == len(DELTA.data) < 1000
        rebuild(delta, BASE, BASE_MANIFEST, target, MANIFEST)
        assert describe(target) == MANIFEST

    run(story())


@pytest.mark.parametrize("base", [MANIFEST.digest, "0" * 64, "nonsense"])
def test_who_holds_anything_else_is_told_that_there_is_none(tcp: Transport, base: str) -> None:
    async def story() -> None:
        async with telling(tcp) as offer:
            assert await ask(tcp, offer.ticket, base) is None
            assert offer.sent_bytes == 0
            await comes_in_full(tcp, offer.ticket)

    run(story())


def test_an_offer_without_a_delta_says_so(tcp: Transport) -> None:
    async def story() -> None:
        async with offered(tcp, NEW) as offer:
            assert await ask(tcp, offer.ticket) is None
            await comes_in_full(tcp, offer.ticket)

    run(story())


def test_a_delta_that_is_no_smaller_than_the_version_is_not_told(tcp: Transport) -> None:
    async def story() -> None:
        source = pieces(7)
        manifest = describe(source)
        for size, told in ((manifest.total - 1, True), (manifest.total, False)):
            async with telling(tcp, Delta("base", bytes(size)), source) as offer:
                assert (await ask(tcp, offer.ticket, "base", manifest) is not None) is told

    run(story())


def test_many_ask_at_once_some_for_the_delta_and_some_for_all(tcp: Transport) -> None:
    """Those who got the delta are no part of the chain of those who take all."""

    async def story() -> None:
        async with telling(tcp) as offer:
            wanted = [ask(tcp, offer.ticket) for _ in range(8)]
            await asyncio.gather(*(comes_in_full(tcp, offer.ticket) for _ in range(3)), *wanted)
            assert offer.sent_bytes == 8 * len(DELTA.data) + MANIFEST.total

    run(story())


@pytest.mark.parametrize("wrong", [{"publication": "p2"}, {"attempt": 2}])
def test_a_delta_is_of_one_attempt_as_its_bytes_are(tcp: Transport, wrong: dict[str, Any]) -> None:
    async def story() -> None:
        async with telling(tcp) as offer:
            await fails("refused", ask(tcp, offer.ticket, **wrong))
            strange = msgspec.structs.replace(offer.ticket, token="another")
            await fails("refused", ask(tcp, strange))
        await fails("refused", ask(tcp, offer.ticket))

    run(story())


def answers(*parts: bytes, then: Callable[[asyncio.StreamReader], Any] | None = None) -> Any:
    """A sender that says this much, and then closes, or does as `then` says."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await hear(reader)
        writer.write(b"".join(parts))
        await writer.drain()
        if then:
            await then(reader)

    return talk


def said(**answer: Any) -> bytes:
    return message(msgspec.json.encode(Answer(**answer)))


async def forever(reader: asyncio.StreamReader) -> None:
    await reader.read()


@pytest.mark.parametrize(
    ("talk", "cause"),
    [
        (answers(said(delta=1000), bytes(500)), "closed"),
        (answers(said(delta=1000), bytes(500), then=forever), "stalled"),
        (answers(then=forever), "stalled"),
        (answers(b"\0\0\0\x05never"), "protocol"),
        (answers(message(b'{"delta": -1}')), "protocol"),
        (answers(said(cause="refused", message="not here")), "refused"),
    ],
)
def test_a_delta_that_does_not_come_is_over_within_the_deadline(tcp: Transport, talk: Any, cause: str) -> None:
    async def story() -> None:
        async with strange_sender("tcp", talk) as ticket:
            await fails(cause, ask(tcp, ticket))

    run(story())


def test_a_sender_that_would_send_more_than_the_version_is_not_listened_to(tcp: Transport) -> None:
    async def story() -> None:
        async with strange_sender("tcp", answers(said(delta=1 << 60), then=forever)) as ticket:
            assert await ask(tcp, ticket) is None

    run(story())


def test_who_asks_for_a_delta_and_takes_none_of_it_delays_nobody_and_is_dropped(tcp: Transport) -> None:
    async def story() -> None:
        async with telling(tcp, Delta(BASE_MANIFEST.digest, bytes(MANIFEST.total - 1))) as offer:
            host, port = offer.ticket.address.split(":")
            reader, writer = await asyncio.open_connection(host, int(port), limit=1)
            hello = Hello(offer.ticket.token, PUBLICATION, 1, MANIFEST.digest, base=BASE_MANIFEST.digest)
            writer.write(message(msgspec.json.encode(hello)))
            await comes_in_full(tcp, offer.ticket)
            await asyncio.sleep(2 * STALL_S)
            with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
                await reader.readexactly(MANIFEST.total)
            writer.close()

    run(story())


@pytest.mark.parametrize("strike", ["killed", "stopped"])
def test_a_sender_that_is_struck_before_it_answers_is_given_up(tcp: Transport, tmp_path: Path, strike: str) -> None:
    async def story() -> None:
        with peer("send", tmp_path / "store", "tcp") as sender:
            ticket = msgspec.json.decode(await sender.said(), type=Ticket)
            sender.kill() if strike == "killed" else sender.stop()
            await fails("refused" if strike == "killed" else "stalled", ask(tcp, ticket))

    run(story())


def test_two_hundred_that_break_off_leave_nothing_behind_and_the_next_one_is_served(tmp_path: Path) -> None:
    async def story() -> None:
        tcp = transports(ArtifactStore(tmp_path / "store"), stall_s=5.0)["tcp"]
        async with telling(tcp, Delta(BASE_MANIFEST.digest, bytes(8 << 20))) as offer:
            await asyncio.sleep(0.05)
            before, tasks = len(os.listdir("/proc/self/fd")), len(asyncio.all_tasks())
            for _ in range(200):
                asking = asyncio.create_task(ask(tcp, offer.ticket))
                await asyncio.sleep(0.002)
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
            await asyncio.sleep(0.5)
            assert len(os.listdir("/proc/self/fd")) <= before and len(asyncio.all_tasks()) <= tasks
            assert len(await ask(tcp, offer.ticket, stall_s=5.0)) == 8 << 20

    run(story())


def test_a_transport_that_tells_none_moves_everything_whatever_it_was_given(tmp_path: Path) -> None:
    async def story() -> None:
        shm = transports(ArtifactStore(tmp_path / "store"), stall_s=5.0)["shm"]
        async with telling(shm) as offer:
            assert await ask(shm, offer.ticket) is None
            await comes_in_full(shm, offer.ticket)

    run(story())


# -- files


FIRST = pieces(7, 1 << 20)
SECOND, THIRD = {**FIRST, "b": pieces(9)["b"]}, {**FIRST, "b": pieces(11)["b"]}


class Kept:
    """The first in full, and the two others as deltas."""

    def __init__(self, folder: Path) -> None:
        self.store = ArtifactStore(folder / "store")
        self.files = transports(self.store, stall_s=STALL_S)["files"]
        first = Saved(*save_weights(self.store, FIRST))
        second = save(self.store, SECOND, Base(first.weights, first.manifest, FIRST), 5)
        third = save(self.store, THIRD, Base(second.weights, second.manifest, SECOND), 5)
        self.saved = [first, second, third]

    def ticket(self, number: int) -> Ticket:
        return Ticket("files", self.saved[number].weights.digest, "")

    async def receive(self, number: int, target: Pieces) -> int:
        return await receive(self.files, self.ticket(number), self.saved[number].manifest, target)


def test_an_anchor_and_its_deltas_are_received_as_the_version_and_the_bytes_are_those_that_were_read(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        kept, target = Kept(tmp_path), empty(FIRST)
        moved = await kept.receive(2, target)
        assert describe(target) == describe(THIRD)
        deltas = [saved.delta.size for saved in kept.saved if saved.delta]
        assert moved == kept.saved[0].weights.size + sum(deltas)

    run(story())


def test_who_holds_the_version_before_reads_one_delta_and_others_the_chain(tmp_path: Path) -> None:
    async def story() -> None:
        kept, target = Kept(tmp_path), empty(FIRST)
        manifest, before = kept.saved[2].manifest, kept.saved[1].manifest
        usual: dict[str, Any] = {"publication": PUBLICATION, "attempt": 1, "stall_s": STALL_S}
        delta = await kept.files.delta(kept.ticket(2), manifest, before.digest, **usual)
        assert delta is not None and kept.saved[2].delta and len(delta) == kept.saved[2].delta.size
        rebuild(delta, SECOND, before, target, manifest)
        assert await kept.files.delta(kept.ticket(2), manifest, kept.saved[0].manifest.digest, **usual) is None
        assert await kept.files.delta(kept.ticket(0), kept.saved[0].manifest, before.digest, **usual) is None

    run(story())


def test_a_chain_is_offered_by_name_and_what_is_in_full_by_its_tensors(tmp_path: Path) -> None:
    async def story() -> None:
        kept = Kept(tmp_path)
        found = kept.files.stored(kept.saved[2].weights.digest)
        assert found is not None and found.ticket == kept.ticket(2)
        assert kept.files.stored(kept.saved[0].weights.digest) is None

    run(story())


@pytest.mark.parametrize("harm", ["damaged", "gone"])
@pytest.mark.parametrize("part", ["anchor", "delta"])
def test_a_chain_that_is_not_whole_is_no_transfer_and_nothing_was_written(tmp_path: Path, part: str, harm: str) -> None:
    async def story() -> None:
        kept, target = Kept(tmp_path), empty(FIRST)
        blob = kept.saved[0].weights if part == "anchor" else kept.saved[1].delta
        assert blob is not None
        path = kept.store.path(blob.digest)
        if harm == "gone":
            path.unlink()
        else:
            path.chmod(0o644)
            path.write_bytes(path.read_bytes()[:-1] + b"\0")
        text = await fails("refused" if harm == "gone" else "mismatch", kept.receive(2, target), 4.0)
        assert str(path) in text
        assert describe(target) == describe(empty(FIRST))

    run(story())


def test_a_failed_read_of_a_delta_is_a_transfer_error(tmp_path: Path) -> None:
    async def story() -> None:
        kept = Kept(tmp_path)
        delta = kept.saved[2].delta
        assert delta is not None
        kept.store.path(delta.digest).unlink()
        with pytest.raises(TransferError):
            await kept.files.delta(
                kept.ticket(2), MANIFEST, kept.saved[1].manifest.digest, publication="p", attempt=1, stall_s=STALL_S
            )

    run(story())


# -- a store that is slow, and goes on


SLOWLY_S = 0.1
PATIENCE_S = 0.4


def slowly(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A delta comes from the store in slices of a hundred bytes, each late, and none later than a deadline allows."""
    found = list[int]()

    def late(self: ArtifactStore, digest: str) -> Generator[int, None, Opened]:
        opened = yield from fetch(self, digest)
        with contextlib.ExitStack() as stack:
            stack.callback(opened.file.close)
            for begin in range(0, opened.size, 100) if 1000 < opened.size < 2000 else ():
                time.sleep(SLOWLY_S)
                found.append(begin)
                yield 100
            stack.pop_all()
        return opened

    fetch = ArtifactStore.fetch
    monkeypatch.setattr(ArtifactStore, "fetch", late)
    return found


def patchy(number: int) -> Pieces:
    """A version of one tensor, whose delta from the one before takes more than a thousand bytes."""
    data = bytearray(random.Random(1).randbytes(20_000))
    for later in range(1, number + 1):
        for at in range(0, 20_000, 20):
            data[at] ^= random.Random(later * 20_000 + at).randrange(1, 256)
    return {"w": Piece("U8", (20_000,), memoryview(bytes(data)))}


def patched(folder: Path) -> tuple[ArtifactStore, Saved, Saved]:
    store = ArtifactStore(folder)
    first = Saved(*save_weights(store, patchy(0)))
    second = save(store, patchy(1), Base(first.weights, first.manifest, patchy(0)), 5)
    assert second.delta is not None and 1000 < second.delta.size < 2000
    return store, first, second


def test_a_delta_that_takes_longer_than_the_deadline_arrives_as_long_as_it_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        store, first, second = patched(tmp_path)
        files, ticket = FilesTransport(store), Ticket("files", second.weights.digest, "")
        assert second.delta is not None
        wanted = store.get(second.delta.digest)
        slowly(monkeypatch)
        usual: dict[str, Any] = {"publication": PUBLICATION, "attempt": 1, "stall_s": PATIENCE_S}
        began = time.monotonic()
        assert await files.delta(ticket, second.manifest, first.manifest.digest, **usual) == wanted
        assert time.monotonic() > began + 2 * PATIENCE_S
        target = empty(patchy(0))
        await receive(files, ticket, second.manifest, target, stall_s=PATIENCE_S)
        assert describe(target) == describe(patchy(1))

    run(story())


def test_who_gives_up_on_a_delta_leaves_nobody_reading_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        store, first, second = patched(tmp_path)
        files, ticket = FilesTransport(store), Ticket("files", second.weights.digest, "")
        read = slowly(monkeypatch)
        usual: dict[str, Any] = {"publication": PUBLICATION, "attempt": 1, "stall_s": 5.0}
        asking = asyncio.create_task(files.delta(ticket, second.manifest, first.manifest.digest, **usual))
        while len(read) < 5:  # noqa: ASYNC110 - a thread counts
            await asyncio.sleep(SLOWLY_S / 10)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await asyncio.sleep(SLOWLY_S * 2)
        before = len(read)
        await asyncio.sleep(SLOWLY_S * 4)
        assert len(read) == before

    run(story())


def test_a_version_whose_tensors_take_longer_than_the_deadline_together_is_still_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twelve tensors, of which each is hashed in a third of the time without progress."""
    rows = {f"t{n:02}": Piece("U8", (64,), memoryview(bytes([n]) * 64)) for n in range(12)}
    store = ArtifactStore(tmp_path)
    first = Saved(*save_weights(store, rows))
    new = {**rows, "t03": Piece("U8", (64,), memoryview(bytes(63) + b"x"))}
    second = save(store, new, Base(first.weights, first.manifest, rows), 5)
    assert second.delta is not None
    real = xxhash.xxh3_128_hexdigest

    def late(data: Any) -> str:
        time.sleep(PATIENCE_S / 3)
        return real(data)

    async def story() -> None:
        target = empty(new)
        monkeypatch.setattr(xxhash, "xxh3_128_hexdigest", late)
        files, ticket = FilesTransport(store), Ticket("files", second.weights.digest, "")
        await receive(files, ticket, second.manifest, target, stall_s=PATIENCE_S)
        monkeypatch.undo()
        assert describe(target) == describe(new)

    run(story())
