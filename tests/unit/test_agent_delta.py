"""The agent's hands with deltas: whatever base it holds, and whatever comes as a delta, it ends with the same version.

Knows: agent, rebasing, a real artifact store, an engine of a few floats, transports that tell what a test gives them.
Must not know: who decides that anything is staged.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import reef_bus.delta
from consumers.reef_engine.agent import Agent
from consumers.reef_engine.fault import Fault
from reef_bus.artifacts import ArtifactStore, save_weights
from reef_bus.backends import Completion, InferenceBackend, Piece, Pieces, Prompt
from reef_bus.config import Config, Publication
from reef_bus.core.effects import Debt, Me, Stage, VerifyHead
from reef_bus.core.publication import Release
from reef_bus.delta import encode
from reef_bus.delta.frames import Header, read, write_header, write_record
from reef_bus.errors import TransferError, Unavailable
from reef_bus.events import Blob, EngineLeft, EngineStaged, Event, ReceiverFailed, ReceiverVerified
from reef_bus.manifest import Manifest, describe
from reef_bus.stored import Base, Saved, save
from reef_bus.transport import Offer, Ticket, Transport

SIZE = 4096
ON = Config(publication=Publication(mode="staged", delta=True))
OFF = Config(publication=Publication(mode="staged"))


def version(number: int) -> dict[str, Piece]:
    """Each changes sixteen bytes of the one before."""
    data = bytearray(bytes(range(256)) * (SIZE // 256))
    for later in range(1, number + 1):
        for at in range(later, SIZE, 256):
            data[at] ^= later
    return {"w": Piece("U8", (SIZE,), memoryview(data))}


def delta(base: Pieces, new: Pieces) -> bytes:
    return b"".join(encode(base, describe(base), new, describe(new)))


class Two(InferenceBackend):
    """An engine's two copies."""

    stages = True

    def __init__(self) -> None:
        self.copies = [version(0), {"w": Piece("U8", (SIZE,), memoryview(bytearray(b"\xff" * SIZE)))}]

    def start(self) -> None: ...

    def live(self) -> Pieces:
        return self.copies[0]

    def stage(self) -> Pieces:
        return self.copies[1]

    def swap(self) -> None:
        self.copies.reverse()

    def generate(self, prompts: Sequence[Prompt]) -> list[Completion]:
        raise AssertionError("nobody asks")

    def close(self) -> None: ...


class Telling(Transport):
    """Gives the full bytes of `new`, or fails with `breaks`; and as a delta whatever `told` makes of the base."""

    name = "tcp"

    def __init__(self, new: Pieces, told: Callable[[str], bytes | None]) -> None:
        self.new, self.told = new, told
        self.asked: list[str] = []
        self.full = 0

    async def offer(self, manifest: Manifest, source: Pieces, *, publication: str, attempt: int) -> Offer:
        raise AssertionError("nobody sends here")

    async def delta(self, ticket: Ticket, manifest: Manifest, base: str, **_: Any) -> bytes | None:  # type: ignore[override]
        self.asked.append(base)
        return self.told(base)

    async def receive(self, ticket: Ticket, manifest: Manifest, target: Pieces, **_: Any) -> int:  # type: ignore[override]
        self.full += 1
        for name, piece in target.items():
            piece.data[:] = self.new[name].data
        return manifest.total


class Found:
    """An agent that serves version 0, and a transport that offers version 1."""

    def __init__(self, folder: Path, told: Callable[[str], bytes | None], config: Config = ON) -> None:
        self.store = ArtifactStore(folder)
        self.manifests = [save_weights(self.store, version(number))[1] for number in range(2)]
        self.engine = Two()
        self.agent = Agent(config, Me("e0", "e0.1"), "http://e0", self.engine, self.store, Fault())
        self.tcp = Telling(version(1), told)
        self.agent.transports = {"tcp": self.tcp}
        self.agent.proven = self.manifests[0].digest

    async def say(self, effect: Stage | VerifyHead) -> Event:
        async with contextlib.AsyncExitStack() as scope:
            said = await self.agent.perform(Debt(key="k", effect=effect), scope)
        assert said is not None
        return said

    async def stage(self, attempt: int = 1) -> EngineStaged:
        """What is said of version 1; what is served was never touched."""
        said = await self.say(Stage("pub1", attempt, "inc:1", self.manifests[1].digest, "tcp", "a:1", "t", 1.0))
        assert isinstance(said, EngineStaged), said
        assert said.manifest == self.manifests[1].digest
        assert describe(self.engine.stage()) == self.manifests[1]
        assert describe(self.engine.live()) == self.manifests[0]
        return said


GOOD = delta(version(0), version(1))


async def test_what_is_proven_is_told_to_the_sender_and_its_delta_gives_the_version(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = Found(tmp_path, lambda base: GOOD)
    with caplog.at_level(logging.INFO):
        said = await found.stage()
    assert found.tcp.asked == [found.manifests[0].digest] and found.tcp.full == 0
    assert (said.base_manifest, said.bytes) == (found.manifests[0].digest, len(GOOD))
    assert f"staged inc:1 by a delta: {len(GOOD)} bytes moved of {SIZE}" in caplog.text
    swapped = await found.say(VerifyHead("inc:1", found.manifests[1].digest, save_weights(found.store, version(1))[0]))
    assert isinstance(swapped, ReceiverVerified) and swapped.method == "swapped"
    assert describe(found.engine.live()) == found.manifests[1] and found.agent.proven == found.manifests[1].digest


async def test_without_the_setting_nobody_asks_for_a_delta(tmp_path: Path) -> None:
    found = Found(tmp_path, lambda base: GOOD, OFF)
    said = await found.stage()
    assert (found.tcp.asked, said.base_manifest, said.bytes) == ([], "", SIZE)


async def test_an_attempt_after_a_failed_one_is_in_full(tmp_path: Path) -> None:
    found = Found(tmp_path, lambda base: GOOD)
    assert (await found.stage(attempt=2)).bytes == SIZE and found.tcp.asked == []


async def test_an_engine_that_has_proven_nothing_asks_for_everything(tmp_path: Path) -> None:
    found = Found(tmp_path, lambda base: GOOD)
    found.agent.proven = ""
    assert (await found.stage()).bytes == SIZE and found.tcp.asked == []


async def test_memory_that_is_no_release_of_the_store_is_no_base(tmp_path: Path) -> None:
    found = Found(tmp_path, lambda base: GOOD)
    found.agent.proven = describe(version(5)).digest
    assert (await found.stage()).bytes == SIZE and found.tcp.asked == []


def another_target() -> bytes:
    """A delta that is whole, is for this base, says that it leads to version 1, and leads to version 2."""
    header, records = read(delta(version(0), version(2)))
    lying = msgspec.structs.replace(header, target=describe(version(1)).digest)
    return _written(lying, records)


def another_base() -> bytes:
    header, records = read(delta(version(3), version(1)))
    return _written(msgspec.structs.replace(header, base=describe(version(0)).digest), records)


def _written(header: Header, records: Sequence[Any]) -> bytes:
    return write_header(header) + b"".join(write_record(header, *each) for each in enumerate(records))


DOUBTS = {
    "a delta from another base": delta(version(2), version(1)),
    "a delta to another version": delta(version(0), version(2)),
    "a delta that lies about its target": another_target(),
    "a delta that lies about its base": another_base(),
    "half of a delta": GOOD[: len(GOOD) // 2],
    "a delta and more": GOOD + b"x",
    "nothing": b"",
    "something else": bytes(500),
    "a flipped bit": GOOD[:-3] + bytes([GOOD[-3] ^ 4]) + GOOD[-2:],
}


@pytest.mark.parametrize("told", DOUBTS.values(), ids=DOUBTS.keys())
async def test_whatever_else_comes_as_a_delta_the_full_bytes_follow_in_the_same_attempt(
    tmp_path: Path, told: bytes
) -> None:
    found = Found(tmp_path, lambda base: told)
    said = await found.stage()
    assert found.tcp.full == 1
    assert (said.base_manifest, said.bytes) == ("", SIZE + len(told)), "what moved in vain has moved"


@pytest.mark.parametrize("cause", ["closed", "stalled", "protocol", "refused", "memory"])
async def test_a_delta_that_does_not_arrive_is_followed_by_the_full_bytes(tmp_path: Path, cause: str) -> None:
    def breaks(base: str) -> bytes:
        raise TransferError(cause, "no delta came")

    found = Found(tmp_path, breaks)
    assert (await found.stage()).bytes == SIZE and found.tcp.full == 1


async def test_a_byte_that_flips_after_a_delta_is_noticed_and_repaired_by_the_full_bytes(tmp_path: Path) -> None:
    found = Found(tmp_path, lambda base: GOOD)
    found.agent.fault.at = 1
    said = await found.stage()
    assert (said.base_manifest, said.bytes) == ("", SIZE + len(GOOD))


async def test_no_memory_for_a_delta_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(*_: object) -> Iterator[int]:
        raise MemoryError

    monkeypatch.setattr(reef_bus.delta, "apply", exhausted)
    found = Found(tmp_path, lambda base: GOOD)
    assert (await found.stage()).base_manifest == ""


async def test_who_is_cancelled_while_a_delta_is_applied_writes_nothing_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, real = asyncio.Event(), reef_bus.delta.apply
    loop = asyncio.get_running_loop()

    def slowly(*arguments: Any) -> Iterator[int]:
        for count in itertools.chain(real(*arguments), [1] * 100):
            loop.call_soon_threadsafe(began.set)
            found.engine.stage()["w"].data[0] ^= 1
            yield count

    monkeypatch.setattr(reef_bus.delta, "apply", slowly)
    found = Found(tmp_path, lambda base: GOOD)
    staging = asyncio.create_task(found.stage())
    await began.wait()
    staging.cancel()
    with pytest.raises(asyncio.CancelledError):
        await staging
    held = bytes(found.engine.stage()["w"].data)
    await asyncio.sleep(0.05)
    assert bytes(found.engine.stage()["w"].data) == held and not found.agent.ingress.locked()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(base=st.integers(0, 3), cut=st.integers(0, len(GOOD)), flips=st.sets(st.integers(0, len(GOOD) - 1), max_size=2))
def test_from_any_base_and_by_any_delta_the_engine_ends_with_the_same_version_as_in_full(
    tmp_path: Path, base: int, cut: int, flips: set[int]
) -> None:
    told = bytearray(delta(version(base), version(1)))
    for at in flips:
        told[at % len(told)] ^= 1
    found = Found(tmp_path, lambda _: bytes(told[: len(told) - cut]))
    found.engine.copies[0] = version(base)
    found.agent.proven = describe(version(base)).digest
    save_weights(found.store, version(base))
    said = asyncio.run(found.say(Stage("pub1", 1, "inc:1", found.manifests[1].digest, "tcp", "a:1", "t", 1.0)))
    assert isinstance(said, EngineStaged) and said.manifest == found.manifests[1].digest
    assert bytes(found.engine.stage()["w"].data) == bytes(version(1)["w"].data)
    assert bytes(found.engine.live()["w"].data) == bytes(version(base)["w"].data)
    assert bool(said.base_manifest) == (not flips and not cut)


# -- what is kept as a chain


def chained(found: Found) -> tuple[VerifyHead, Saved]:
    """Version 2 as a head that is kept as an anchor and two deltas."""
    first = Saved(*save_weights(found.store, version(0)))
    second = save(found.store, version(1), Base(first.weights, first.manifest, version(0)), 5)
    third = save(found.store, version(2), Base(second.weights, second.manifest, version(1)), 5)
    return VerifyHead("inc:2", third.manifest.digest, third.weights), third


async def test_a_head_that_is_kept_as_a_chain_is_loaded_and_proven(tmp_path: Path) -> None:
    found = Found(tmp_path, lambda base: None)
    effect, kept = chained(found)
    said = await found.say(effect)
    assert isinstance(said, ReceiverVerified) and (said.method, said.manifest) == ("artifact", kept.manifest.digest)
    assert bytes(found.engine.live()["w"].data) == bytes(version(2)["w"].data)


async def test_a_chain_that_is_damaged_ends_the_boot_and_names_the_blob(tmp_path: Path) -> None:
    found = Found(tmp_path, lambda base: None)
    effect, kept = chained(found)
    assert kept.delta is not None
    found.store.path(kept.delta.digest).unlink()
    said = await found.say(effect)
    assert isinstance(said, EngineLeft) and kept.delta.digest in said.reason and not found.agent.proven


async def test_a_chain_that_is_damaged_fails_a_transfer_from_the_store_and_what_is_served_stays(tmp_path: Path) -> None:
    from reef_bus.transport.files import FilesTransport

    found = Found(tmp_path, lambda base: None)
    effect, kept = chained(found)
    found.agent.transports = {"files": FilesTransport(found.store)}
    assert kept.delta is not None
    found.store.path(kept.delta.digest).unlink()
    staging = Stage("pub2", 1, "inc:2", effect.manifest, "files", effect.weights.digest, "", 1.0)
    said = await found.say(staging)
    assert isinstance(said, ReceiverFailed) and said.cause == "refused" and kept.delta.digest in said.detail
    assert describe(found.engine.live()) == found.manifests[0]


async def test_who_was_too_slow_for_a_head_that_was_removed_tries_the_one_that_followed(tmp_path: Path) -> None:
    """The load fails before anything is written, and is not the end of the boot: another head is owed by now."""
    found = Found(tmp_path, lambda base: None)
    effect, kept = chained(found)
    found.engine.copies[0] = version(5)
    assert kept.delta is not None
    found.store.path(kept.delta.digest).unlink()
    found.agent.world.publications.head = release("inc:3", found.manifests[1].digest, kept.weights)
    with pytest.raises(Unavailable, match="inc:2 is the head no more, inc:3 is: "):
        await found.say(effect)
    assert describe(found.engine.live()) == describe(version(5)) and not found.agent.memory.locked()
    found.agent.world.publications.head = release("inc:2", effect.manifest, kept.weights)
    assert isinstance(await found.say(effect), EngineLeft)


def release(load_id: str, manifest: str, weights: Blob) -> Release:
    return Release(load_id=load_id, candidate="c", parent="", manifest=manifest, weights=weights, seq=9, time=9)
