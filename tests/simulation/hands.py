"""The simulated hands: an engine's memory, a trainer, a transport; each as small as it can be and still go wrong.

Knows: the contracts of backends and transports, 32 bytes of weights. Must not know: the log, or what is owed.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import itertools
import random
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

from reef_bus.artifacts import ArtifactStore
from reef_bus.backends import (
    Completion,
    Generation,
    InferenceBackend,
    Piece,
    Pieces,
    Prompt,
    Sample,
    Stop,
    TrainingBackend,
    never,
)
from reef_bus.core.memory import REGIONS
from reef_bus.core.publication import PAUSES
from reef_bus.core.training import Candidate
from reef_bus.errors import ContractError, TransferError
from reef_bus.manifest import Manifest, describe, require_fit
from reef_bus.recipe import Decision, Selector
from reef_bus.shelf import Opened
from reef_bus.transport import STALL_S, Offer, Ticket, Transport
from tests.simulation.faults import TRANSFERS, Nemesis
from tests.simulation.loop import Loop, Process

SIZE = 16
CHUNK = 8


def pieces(content: bytearray | bytes) -> dict[str, Piece]:
    """32 bytes as two tensors of one size: whoever swaps them moves the right number of bytes."""
    view = memoryview(content)
    return {"a": Piece("U8", (SIZE,), view[:SIZE]), "b": Piece("U8", (SIZE,), view[SIZE:])}


# -- engine


class Memory(InferenceBackend):
    """An engine that answers with what it holds, byte by byte; `stages`: it has room for a second copy."""

    pauses = PAUSES

    def __init__(self, chance: random.Random, nemesis: Nemesis, *, stages: bool, lends: bool = False) -> None:
        self.chance, self.nemesis, self.stages = chance, nemesis, stages
        self.releases = REGIONS if lends else ()
        self.out = set[str]()
        self.took: Callable[[], None] = lambda: None
        self.content, self._pieces = self._anything()
        self._beside: tuple[bytearray, dict[str, Piece]] | None = None

    def _anything(self) -> tuple[bytearray, dict[str, Piece]]:
        """Memory as it comes: whatever was there before."""
        content = bytearray(self.chance.randbytes(2 * SIZE))
        return content, pieces(content)

    def start(self) -> None: ...

    def live(self) -> Pieces:
        if "weights" in self.out:
            raise ContractError("there is nothing where weights were")
        return self._pieces

    def release(self, regions: Sequence[str]) -> None:
        """One that fails may have done it all the same."""
        assert regions and not self.out & set(regions), "what is out is released again"
        fails = self.nemesis.befalls(("no_memory",))
        if not fails or self.chance.random() < 0.5:
            self.out |= set(regions)
            self.content, self._pieces = self._anything()
        if fails:
            raise OSError(errno.ENOMEM, "the allocator gives up")

    def resume(self, regions: Sequence[str]) -> None:
        assert regions and self.out >= set(regions), "what is there is taken back"
        self.took()
        fails = self.nemesis.befalls(("no_memory",))
        if not fails or self.chance.random() < 0.5:
            self.out -= set(regions)
        if fails:
            raise OSError(errno.ENOMEM, "the allocator gives up")

    def stage(self) -> Pieces:
        if not self.stages:
            return super().stage()
        if self.nemesis.befalls(("no_room",)):
            raise TransferError("memory", "no room for a second copy")
        self._beside = self._beside or self._anything()
        return self._beside[1]

    def swap(self) -> None:
        if self._beside is None or self.nemesis.befalls(("no_swap",)):
            raise ContractError("the forward pass holds on to the old copy")
        (self.content, self._pieces), self._beside = self._beside, (self.content, self._pieces)

    def unstage(self) -> None:
        self._beside = None

    def generate(self, prompts: Sequence[Prompt]) -> list[Completion]:
        return self.generate_until(prompts, never).completions

    def generate_until(self, prompts: Sequence[Prompt], stop: Stop, kept: Any = None) -> Generation:
        """Told to stop, it has come some way with each: to its end, or not even to its first byte."""
        assert not self.out, f"it generates without {self.out}"
        begun: list[bytes] = kept or [b""] * len(prompts)
        ends = [self.chance.randint(len(each), 2 * SIZE) if stop() else 2 * SIZE for each in begun]
        made = [each + self.content[len(each) : end] for each, end in zip(begun, ends, strict=True)]
        whole = all(len(each) == 2 * SIZE for each in made)
        return Generation([completed(each) for each in made], None if whole else made)

    def close(self) -> None: ...


def completed(made: bytes) -> Completion:
    reason = "length" if len(made) == 2 * SIZE else ""
    return Completion(ids=tuple(made), logprobs=(0.0,) * len(made), finish_reason=reason)


class Shelf(ArtifactStore):
    """An artifact store of a machine that does not always have what others wrote."""

    def __init__(self, root: Path, nemesis: Nemesis, missed: set[str]) -> None:
        """`missed`: the blobs that it did not have as they should be when they were last asked for."""
        super().__init__(root)
        self.nemesis, self.missed = nemesis, missed

    def fetch(self, digest: str) -> Generator[int, None, Opened]:
        how = self.nemesis.spoiled.get(digest, "")
        self.missed.add(digest)
        if how == "away" or self.nemesis.befalls(("no_artifact",)):
            raise FileNotFoundError(errno.ENOENT, "it is away", digest)
        if how == "damaged":
            return self._damaged(digest)
        self.missed.discard(digest)
        return super().fetch(digest)

    def _damaged(self, digest: str) -> Generator[int, None, Opened]:
        """Its last byte is another one."""
        yield from ()
        data, copy = self.path(digest).read_bytes(), Path(f"damaged-{digest}")
        copy.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        return Opened(open(copy, "rb", buffering=0), str(copy))


# -- trainer


class Registry:
    """Every content that was ever made, by manifest digest, and what it was made from: the truth. `incumbent` is the
    memory of a trainer that mutates in place, and outlives its boots: a training service, say."""

    def __init__(self) -> None:
        self.incumbent = b""
        self.contents: dict[str, bytes] = {}
        self.parents: dict[bytes, bytes] = {}

    def enter(self, content: bytes, parent: bytes) -> None:
        self.contents[describe(pieces(content)).digest] = content
        self.parents[content] = parent


class Incumbent:
    """A state of a trainer that mutates in place: whoever keeps it holds what it has become."""

    def __init__(self, content: bytes) -> None:
        self.content = content


class Optimizer(TrainingBackend):
    """A step is a hash of what it starts from and what it learns from; `chance`: as on a GPU, no two are alike.

    `in_place`: a step changes the state that it is given, and begins by spoiling it, so that whoever dies or fails in
    it leaves nothing behind that one could go on from; and so does the incumbent, which only `load` puts right again.
    """

    busy = False  # it has the memory that a step took

    def __init__(
        self, registry: Registry, nemesis: Nemesis, chance: random.Random | None, *, in_place: bool = False
    ) -> None:
        self.registry, self.nemesis, self.chance = registry, nemesis, chance
        self.mutates_in_place, self._holds = in_place, False

    def _state(self, content: bytes) -> Any:
        self._holds = True
        return Incumbent(content) if self.mutates_in_place else content

    def initial(self) -> Any:
        content = hashlib.sha256(b"base").digest()
        self.registry.enter(content, b"")
        return self._state(content)

    def load(self, weights: Path, optimizer: Path | None) -> Any:
        try:
            content = weights.read_bytes()[-2 * SIZE :]
            state = optimizer.read_bytes() if optimizer else content
        except OSError as error:
            raise ContractError(f"cannot load {weights}: {error.strerror}") from error
        if content != state:
            raise ContractError(f"{weights} and {optimizer} are of two states")
        return self._state(content)

    def release(self) -> None:
        self.busy = False

    def train(self, state: Any, batch: Sequence[Sample], seed: int) -> tuple[Any, dict[str, float]]:
        self.busy = True
        start = _content(state) if self._holds else self.registry.incumbent
        if self.mutates_in_place:
            state.content = self.registry.incumbent = hashlib.sha256(b"half a step" + start).digest()
        if self.nemesis.befalls(("drop",)):
            raise ContractError("this batch trains nothing")
        learnt = repr([(sample.record, sample.reward, sample.completion) for sample in batch])
        noise = self.chance.randbytes(8) if self.chance else b""
        content = hashlib.sha256(start + learnt.encode() + seed.to_bytes(8, "big") + noise).digest()
        self.registry.enter(content, start)
        if self.mutates_in_place:
            state.content = self.registry.incumbent = content
            return state, {"loss": 0.5}
        return content, {"loss": 0.5}

    def weights(self, state: Any) -> Pieces:
        return pieces(_content(state))

    def optimizer(self, state: Any) -> bytes:
        return _content(state)


def _content(state: Any) -> bytes:
    return state.content if isinstance(state, Incumbent) else bytes(state)


class Picky(Selector):
    name = "picky"

    def __init__(self, nemesis: Nemesis) -> None:
        self.nemesis = nemesis

    def decide(self, candidate: Candidate, metrics: Mapping[str, float]) -> Decision:
        rejected = self.nemesis.befalls(("reject",))
        return Decision(not rejected, "worse" if rejected else "")


# -- transport


class Door(Offer):
    """One attempt's offer; open until it is closed or its process dies."""

    def __init__(self, ticket: Ticket, process: Process, source: Pieces, attempt: tuple[str, int]) -> None:
        self._ticket, self.process, self.source, self.attempt = ticket, process, source, attempt
        self.closed = False

    @property
    def ticket(self) -> Ticket:
        return self._ticket

    @property
    def sent_bytes(self) -> int:
        return 0

    async def close(self) -> None:
        self.closed = True


class Ingress:
    """What may write into a receiver's memory. Destroyed, it lets nothing through any more, however late it comes."""

    def __init__(self, target: Pieces) -> None:
        self.target, self.open = target, True

    def write(self, name: str, start: int, data: bytes) -> None:
        if self.open:
            self.target[name].data[start : start + len(data)] = data


class Network:
    """What senders and receivers share: open doors by token. `ingress` is what receivers let bytes in by."""

    def __init__(self, loop: Loop, chance: random.Random, nemesis: Nemesis) -> None:
        self.loop, self.chance, self.nemesis = loop, chance, nemesis
        self.doors: dict[str, Door] = {}
        self.numbers = itertools.count(1)
        self.ingress: Callable[[Pieces], Ingress] = Ingress


class Wire(Transport):
    """Chunk by chunk, each after a delay, as long as the sender's process runs."""

    name = "tcp"

    def __init__(self, network: Network, process: Process) -> None:
        self.network, self.process = network, process

    async def offer(self, manifest: Manifest, source: Pieces, *, publication: str, attempt: int) -> Offer:
        require_fit(manifest, source)
        if self.network.nemesis.befalls(("no_room",)):
            raise TransferError("memory", "no room for the export")
        token = f"door-{next(self.network.numbers)}"
        door = Door(Ticket(self.name, self.process.name, token), self.process, source, (publication, attempt))
        self.network.doors[token] = door
        return door

    async def receive(
        self,
        ticket: Ticket,
        manifest: Manifest,
        target: Pieces,
        *,
        publication: str,
        attempt: int,
        stall_s: float = STALL_S,
        progress: Callable[[int], None] | None = None,
    ) -> int:
        require_fit(manifest, target, writable=True)
        door = self.network.doors[ticket.token]
        if door.attempt != (publication, attempt):
            raise TransferError("refused", "this is another attempt's door")
        fate = self.network.nemesis.falls_upon("receive", TRANSFERS)
        if fate == "skip":
            return manifest.total
        ingress = self.network.ingress(target)
        try:
            async with asyncio.timeout(stall_s) as deadline:
                await self._fill(door, ingress, fate, deadline, stall_s)
        except TimeoutError as error:
            raise TransferError("stalled", "no progress within the deadline") from error
        finally:
            ingress.open = False
        return manifest.total

    async def _fill(self, door: Door, ingress: Ingress, fate: str, deadline: asyncio.Timeout, stall_s: float) -> None:
        chance, bad = self.network.chance, self.network.chance.randrange(2 * SIZE // CHUNK)
        for number, (name, start) in enumerate(itertools.product(door.source, range(0, SIZE, CHUNK))):
            await asyncio.sleep(chance.random() * (stall_s if fate == "slow" else 0.01))
            if fate == "stuck" and number == bad:
                await asyncio.Event().wait()
            await self._reach(door)
            data = bytes(door.source[name].data[start : start + CHUNK])
            if fate == "corrupt" and number == bad:
                data = bytes([data[0] ^ 1]) + data[1:]
            if fate == "swap":
                name = {"a": "b", "b": "a"}[name]
            if fate == "late_bytes":
                self._later(ingress, name, start, data)
            ingress.write(name, start, data)
            deadline.reschedule(asyncio.get_running_loop().time() + stall_s)

    async def _reach(self, door: Door) -> None:
        """Wait out a sender that is stopped; raise if it is gone."""
        while door.process.stopped and not door.process.dead:  # noqa: ASYNC110 - a process is no event
            await asyncio.sleep(0.2)
        if door.closed or door.process.dead:
            raise TransferError("closed", "the sender is gone")

    def _later(self, ingress: Ingress, name: str, start: int, data: bytes) -> None:
        """The network card has the chunk in its queue once more: it comes again, or it comes when all is over."""
        self.network.loop.call_later(self.network.chance.random() * 3, ingress.write, name, start, data)
