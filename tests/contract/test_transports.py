"""One failure suite over the transports: each failure ends in a TransferError with its cause, within the deadline,
leaves nothing behind, and the next transfer works. One machine only; peers that die or stop are processes.

What cannot fail on a transport stands in OUTCOMES with its reason: there the transfer has to arrive.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
import time
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from reef_bus.artifacts import ArtifactStore, save_weights
from reef_bus.backends import Pieces
from reef_bus.config import TRANSPORTS, build
from reef_bus.errors import Rejected, TransferError
from reef_bus.manifest import describe
from reef_bus.transport import Ticket, Transport, files, transports
from reef_bus.transport.door import Answer, Hello
from tests.contract.peer import VERSION, Ended, Peer, peer
from tests.loop import until
from tests.transfers import (
    BIG,
    DOORS,
    NAMES,
    PUBLICATION,
    dead,
    fails,
    hear,
    loaded,
    message,
    offered,
    params,
    pieces,
    receive,
    run,
    segments,
    still,
    strange_sender,
    stranger,
    works,
)

STALL_S = 1.0
SMALL, LARGE, LATER, MEBI = pieces(VERSION), pieces(VERSION, BIG), pieces(9, BIG), pieces(VERSION, 1 << 20)
LONG = pieces(VERSION, 64 << 20)  # copied with several turns of the loop between
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="shm and /proc are Linux's"),
]


class Arrives(str):
    """The transfer succeeds all the same; the text says why."""


NOBODY = Arrives("nobody sends: receivers read the artifact themselves, and it outlives whoever wrote it")
ANYBODY = Arrives("an artifact is nobody's attempt: whoever knows its digest may read it")
DONE = Arrives("a segment that was handed over needs its sender no more")

OUTCOMES: dict[str, dict[str, str]] = {
    "sender killed in the middle": {
        "tcp": "closed",
        "torch": "closed",
        "ucx": "closed",
        "shm": "closed",
        "files": NOBODY,
    },
    "sender stopped in the middle": {
        "tcp": "stalled",
        "torch": "stalled",
        "ucx": "stalled",
        "shm": DONE,
        "files": NOBODY,
    },
    "sender stopped before it answers": {
        "tcp": "stalled",
        "torch": "stalled",
        "ucx": "stalled",
        "shm": "stalled",
        "files": NOBODY,
    },
    "sender retracts in the middle": {
        "tcp": "closed",
        "torch": "closed",
        "ucx": "closed",
        "shm": "closed",
        "files": NOBODY,
    },
    "receiver stopped while the sender retracts": {
        "tcp": "closed",
        "torch": "closed",
        "ucx": "closed",
        "shm": "closed",
        "files": NOBODY,
    },
    "half, then silence": {
        "tcp": "stalled",
        "torch": "stalled",
        "ucx": "stalled",
        "shm": "stalled",
        "files": "stalled",
    },
    "half, then the end": {"tcp": "closed", "torch": "closed", "ucx": "closed", "shm": "closed", "files": "mismatch"},
    "wrong token": {"tcp": "refused", "torch": "refused", "ucx": "refused", "shm": "refused", "files": ANYBODY},
    "wrong attempt": {"tcp": "refused", "torch": "refused", "ucx": "refused", "shm": "refused", "files": ANYBODY},
    "wrong publication": {"tcp": "refused", "torch": "refused", "ucx": "refused", "shm": "refused", "files": ANYBODY},
}


@pytest.fixture(params=params(NAMES))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> ArtifactStore:
    """With every version that the tests offer: "files" offers nothing else. Nobody damages this one."""
    store = ArtifactStore(tmp_path_factory.mktemp("store"))
    for version in (SMALL, LARGE, LATER, LONG, MEBI):
        save_weights(store, version)
    return store


@pytest.fixture
def transport(name: str, store: ArtifactStore) -> Transport:
    loaded(name)
    return transports(store, stall_s=stall_s(name))[name]


def stall_s(name: str) -> float:
    """To make a process group, or a worker of UCX, takes a while on a machine that is busy with other tests."""
    return 1.5 if name in ("torch", "ucx") else STALL_S


async def ends(outcome: str, transfer: Awaitable[int], target: Pieces, source: Pieces, within_s: float = 5.0) -> str:
    """As OUTCOMES says; afterwards nothing writes into the target any more."""
    if isinstance(outcome, Arrives):
        await transfer
        assert describe(target) == describe(source)
        return ""
    said = await fails(outcome, transfer, within_s)
    await still(target)
    assert describe(target) != describe(source)
    return said


def test_every_transport_of_this_build_is_tested_and_can_be_configured(store: ArtifactStore) -> None:
    assert set(NAMES) == set(TRANSPORTS) == set(transports(store))
    assert all(set(row) == set(NAMES) for row in OUTCOMES.values())


def test_the_configuration_refuses_a_transport_that_nobody_has() -> None:
    everywhere = {"training": {"offers": ["shm", "files"]}, "inference": {"accepts": ["shm", "files"]}}
    assert build("here", {"publication": {"transport": "shm"}, **everywhere}).policy().transport == "shm"
    with pytest.raises(
        Rejected, match=r"inference\.accepts names 'pigeon'; this version has: tcp, torch, ucx, shm, files"
    ):
        build("here", {"inference": {"accepts": ["tcp", "pigeon"]}})


# What works.


def test_bytes_arrive_where_the_target_already_lives(transport: Transport) -> None:
    run(works(transport))


def test_a_source_larger_than_every_buffer_arrives_whole(transport: Transport) -> None:
    run(works(transport, LARGE))


def test_progress_grows_to_the_total(transport: Transport) -> None:
    async def story() -> None:
        seen: list[int] = []
        async with offered(transport, SMALL) as offer:
            await receive(transport, offer.ticket, describe(SMALL), pieces(0), progress=seen.append)
        assert seen == sorted(seen) and seen[-1] == 3008

    run(story())


def test_many_receivers_share_one_offer(transport: Transport) -> None:
    async def story() -> None:
        targets = [pieces(0) for _ in range(16)]
        manifest = describe(SMALL)
        async with offered(transport, SMALL) as offer:
            await asyncio.gather(*(receive(transport, offer.ticket, manifest, target) for target in targets))
            assert offer.sent_bytes == (0 if transport.name == "files" else 16 * 3008)
        assert all(describe(target) == manifest for target in targets)

    run(story())


# The sender dies, stops, or changes its mind.


async def ticket_of(sender: Peer) -> Ticket:
    return msgspec.json.decode(await sender.said(), type=Ticket)


@pytest.mark.parametrize("strike", ["killed", "stopped"])
def test_sender_struck_in_the_middle(transport: Transport, store: ArtifactStore, strike: str) -> None:
    async def story() -> None:
        source, target = LARGE, pieces(0, BIG)
        with peer("send", store.root, transport.name) as sender:
            ticket = await ticket_of(sender)
            blows = iter([sender.kill if strike == "killed" else sender.stop])
            transfer = receive(
                transport,
                ticket,
                describe(source),
                target,
                stall_s=stall_s(transport.name),
                progress=lambda _: next(blows, lambda: None)(),
            )
            await ends(OUTCOMES[f"sender {strike} in the middle"][transport.name], transfer, target, source)
        await works(transport)

    run(story())


def test_sender_stopped_before_it_answers(transport: Transport, store: ArtifactStore) -> None:
    async def story() -> None:
        source, target = LARGE, pieces(0, BIG)
        with peer("send", store.root, transport.name) as sender:
            ticket = await ticket_of(sender)
            sender.stop()
            transfer = receive(transport, ticket, describe(source), target, stall_s=stall_s(transport.name))
            await ends(OUTCOMES["sender stopped before it answers"][transport.name], transfer, target, source)
            sender.kill()
            if transport.name != "files":
                await fails("refused", receive(transport, ticket, describe(source), target))
        await works(transport)

    run(story())


def test_sender_closes_its_offer_in_the_middle(transport: Transport) -> None:
    async def story() -> None:
        source, target, middle = LONG, pieces(0, 64 << 20), asyncio.Event()
        outcome = OUTCOMES["sender retracts in the middle"][transport.name]
        async with offered(transport, source) as offer:
            transfer = asyncio.create_task(
                receive(transport, offer.ticket, describe(source), target, progress=lambda _: middle.set())
            )
            await middle.wait()
            await offer.close()
            await ends(outcome, transfer, target, source)
            if not isinstance(outcome, Arrives):
                await fails("refused", receive(transport, offer.ticket, describe(source), target))
        await works(transport)

    run(story())


def test_nothing_is_there(transport: Transport) -> None:
    async def story() -> None:
        await fails("refused", receive(transport, dead(transport.name), describe(SMALL), pieces(0)))
        await works(transport)

    run(story())


@contextlib.asynccontextmanager
async def half(name: str, ending: str, store: ArtifactStore, patch: pytest.MonkeyPatch) -> Any:
    """A ticket to something that begins well. On shm a half is an answer without a segment: there is no half of one."""
    first = message(msgspec.json.encode(Answer())) + (b"four" if name == "tcp" else b"")

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await hear(reader)
        writer.write(first)
        if ending == "silence":
            await reader.read()  # returns when the receiver has given up

    if name == "files":
        moved: list[float] = []
        yield _half_of_an_artifact(ending, store, patch, moved)
        assert len(moved) == (2 if ending == "silence" else 0), "slow is not stopped"
        return
    async with strange_sender(name, talk) as ticket:
        yield ticket


def _half_of_an_artifact(ending: str, store: ArtifactStore, patch: pytest.MonkeyPatch, moved: list[float]) -> Ticket:
    blob, _ = save_weights(store, pieces(VERSION))
    path = store.path(blob.digest)
    if ending == "the end":
        path.chmod(0o600)
        os.truncate(path, blob.size // 2)
        return Ticket("files", blob.digest, "")

    def hanging(*_: object) -> Iterator[int]:
        for pause in (0.6, 0.6, 2.0):  # two of these pass the deadline together, the third one alone
            time.sleep(pause)
            moved.append(pause)
            yield 1

    patch.setattr(files, "verify_weights", hanging)
    return Ticket("files", blob.digest, "")


@pytest.mark.parametrize("ending", ["silence", "the end"])
def test_half_and_then(name: str, ending: str, tmp_path: Path) -> None:
    async def story() -> None:
        store = ArtifactStore(tmp_path)
        save_weights(store, LARGE)
        transport, source, target = transports(store)[name], SMALL, pieces(0)
        with pytest.MonkeyPatch.context() as patch:
            async with half(name, ending, store, patch) as ticket:
                transfer = receive(transport, ticket, describe(source), target, stall_s=stall_s(transport.name))
                await ends(OUTCOMES[f"half, then {ending}"][name], transfer, target, source)
        await works(transport, LARGE)

    run(story())


# The receiver dies, stops, has no room, or gives up.


def test_receiver_killed_in_the_middle(transport: Transport, store: ArtifactStore) -> None:
    async def story() -> None:
        source = LARGE
        async with offered(transport, source) as offer:
            ticket = msgspec.json.encode(offer.ticket).decode()
            with peer("receive", store.root, transport.name, ticket) as receiver:
                assert await receiver.said() == "begun"
                receiver.kill()
                target = pieces(0, BIG)
                await receive(transport, offer.ticket, describe(source), target)
                assert describe(target) == describe(source)
        await works(transport)

    run(story())


def test_receiver_stopped_in_the_middle_holds_up_nobody_and_never_sees_the_next_version(
    transport: Transport, store: ArtifactStore
) -> None:
    async def story() -> None:
        source, patient = LARGE, transports(store, stall_s=60.0)[transport.name]
        async with offered(patient, source) as offer:
            ticket = msgspec.json.encode(offer.ticket).decode()
            with peer("receive", store.root, transport.name, ticket) as receiver:
                assert await receiver.said() == "begun"
                receiver.stop()
                target = pieces(0, BIG)
                await receive(transport, offer.ticket, describe(source), target)
                await asyncio.wait_for(offer.close(), 5.0)  # it waits for nobody
                await works(transport, LATER)
                receiver.resume()
                receiver.go_on()
                ended = msgspec.json.decode(await receiver.said(), type=Ended)
        outcome = OUTCOMES["receiver stopped while the sender retracts"][transport.name]
        assert ended == Ended("" if isinstance(outcome, Arrives) else outcome, right=True)

    run(story())


@pytest.mark.parametrize("name", params(DOORS), indirect=True)
def test_receivers_that_are_let_in_and_go_no_further_hold_up_nobody(transport: Transport) -> None:
    async def story() -> None:
        manifest = describe(SMALL)
        async with offered(transport, SMALL) as offer, contextlib.AsyncExitStack() as stopped:
            hello = msgspec.json.encode(Hello(offer.ticket.token, PUBLICATION, 1, manifest.digest))
            for _ in range(3):
                reader, writer = await stranger(offer.ticket)
                stopped.callback(writer.close)
                writer.write(message(hello))
                assert msgspec.json.decode(await hear(reader), type=Answer).cause == ""
            assert await receive(transport, offer.ticket, manifest, pieces(0), stall_s=1.5) == manifest.total

    run(story())


def test_receiver_out_of_memory(transport: Transport) -> None:
    def full(_: int) -> None:
        raise MemoryError

    async def story() -> None:
        source, target = LARGE, pieces(0, BIG)
        async with offered(transport, source) as offer:
            await ends(
                "memory", receive(transport, offer.ticket, describe(source), target, progress=full), target, source
            )
        await works(transport)

    run(story())


def test_cancel_in_the_middle_ends_every_write(transport: Transport) -> None:
    async def story() -> None:
        source, target, middle = LARGE, pieces(0, BIG), asyncio.Event()
        async with offered(transport, source) as offer:
            transfer = asyncio.create_task(
                receive(transport, offer.ticket, describe(source), target, progress=lambda _: middle.set())
            )
            await middle.wait()
            transfer.cancel()
            with pytest.raises(asyncio.CancelledError):
                await transfer
            await still(target)
            assert describe(target) != describe(source)
        await works(transport)

    run(story())


# What does not belong together.


def wrong(what: str, transport: Transport, says: str, token: str = "", **other: Any) -> None:
    async def story() -> None:
        source, target, outcome = SMALL, pieces(0), OUTCOMES[f"wrong {what}"][transport.name]
        async with offered(transport, source) as offer:
            ticket = msgspec.structs.replace(offer.ticket, token=token or offer.ticket.token)
            said = await ends(outcome, receive(transport, ticket, describe(source), target, **other), target, source)
            if not isinstance(outcome, Arrives):
                assert says in said and offer.ticket.token not in said
                assert offer.sent_bytes == 0 and not any(target["w"].data)
            await receive(transport, offer.ticket, describe(source), pieces(0))  # the door is still open
        await works(transport)

    run(story())


def test_wrong_token(transport: Transport) -> None:
    wrong("token", transport, "the token is not this attempt's", token="guess")


def test_wrong_attempt(transport: Transport) -> None:
    wrong("attempt", transport, "attempt 2 of p1 is not open here, attempt 1 of p1 is", attempt=2)


def test_wrong_publication(transport: Transport) -> None:
    wrong("publication", transport, "attempt 1 of p0 is not open here, attempt 1 of p1 is", publication="p0")


def test_wrong_manifest(transport: Transport) -> None:
    async def story() -> None:
        target = pieces(0)
        async with offered(transport, SMALL) as offer:
            await fails("mismatch", receive(transport, offer.ticket, describe(pieces(8)), target))
        assert not any(target["w"].data)
        await works(transport)

    run(story())


@pytest.mark.parametrize("change", ["missing", "retyped", "cut", "read-only"])
def test_target_not_fitting(transport: Transport, change: str) -> None:
    async def story() -> None:
        target = pieces(0)
        if change == "missing":
            del target["b"]
        else:
            replaced = {
                "retyped": target["b"]._replace(dtype="I32"),
                "cut": target["b"]._replace(data=memoryview(bytearray(4))),
                "read-only": target["b"]._replace(data=memoryview(bytes(8))),
            }
            target["b"] = replaced[change]
        async with offered(transport, SMALL) as offer:
            said = await fails("mismatch", receive(transport, offer.ticket, describe(SMALL), target))
            assert "'b'" in said
            assert offer.sent_bytes == 0
        assert not any(target["w"].data)
        await works(transport)

    run(story())


@pytest.mark.parametrize("address", ["", "127.0.0.1", "127.0.0.1:99999", "127.0.0.1:x", "../../etc", "reef-bus"])
def test_a_ticket_that_is_none(transport: Transport, address: str) -> None:
    async def story() -> None:
        for kind in (*NAMES, "pigeon"):
            ticket = Ticket(kind, address, "")
            await fails("protocol", receive(transport, ticket, describe(SMALL), pieces(0)))

    run(story())


def test_a_source_that_is_not_what_the_manifest_says_is_not_offered(transport: Transport) -> None:
    async def story() -> None:
        source = pieces(7)
        del source["b"]
        with pytest.raises(TransferError, match="'b' is missing"):
            await transport.offer(describe(SMALL), source, publication=PUBLICATION, attempt=1)

    run(story())


# What is left behind: nothing.


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_two_hundred_aborted_transfers_leak_nothing(transport: Transport) -> None:
    source, manifest, target = MEBI, describe(MEBI), pieces(0, 1 << 20)

    async def abort(how: int) -> None:
        async with offered(transport, source) as offer:
            ticket = msgspec.structs.replace(offer.ticket, token="guess") if how == 1 else offer.ticket
            expected = describe(pieces(8)) if how == 2 else manifest
            transfer = asyncio.create_task(receive(transport, ticket, expected, target))
            for _ in range(how):
                await asyncio.sleep(0)
            if how % 2:
                await offer.close()
            transfer.cancel()
            await asyncio.gather(transfer, return_exceptions=True)

    async def story() -> None:
        tasks = asyncio.all_tasks()
        await asyncio.gather(*(abort(how) for how in range(8)))
        await works(transport, source)  # what is kept from one transfer to the next is there now
        await until(lambda: asyncio.all_tasks() == tasks)
        before, resident = len(os.listdir("/proc/self/fd")), resident_bytes()
        for how in range(200):
            await abort(how % 8)
        await until(lambda: asyncio.all_tasks() == tasks)
        await asyncio.sleep(0.05)
        assert len(os.listdir("/proc/self/fd")) <= before
        assert len(segments()) <= 2  # the sender's spare one, and the one that this process maps as a receiver
        assert threading.active_count() < 20  # the loop keeps a few for blocking calls
        assert resident_bytes() - resident < 32 << 20  # one left mebibyte per transfer would be six times as much
        await works(transport, source)

    run(story())
