"""The agent beside one engine: fences it, receives into it, proves what it holds, and lets it generate by the rule.

Knows: its backend, the transports, its own fold. Must not know: the trainer, or whether a release should happen.
Whoever generates, writes or hashes holds the memory lock; so nothing generates while weights change, and a fence that
has the lock knows that generation has stopped and every older ingress is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence

from reef_bus.artifacts import ArtifactStore, load_weights
from reef_bus.backends import InferenceBackend
from reef_bus.config import Config
from reef_bus.core import reactions
from reef_bus.core.effects import Debt, Fence, Join, Me, Receive, VerifyHead
from reef_bus.core.serving import may_generate
from reef_bus.core.world import World
from reef_bus.errors import ContractError, TransferError
from reef_bus.events import EngineFenced, EngineJoined, EngineLeft, Event, ReceiverFailed, ReceiverVerified, Recorded
from reef_bus.journal import Beat
from reef_bus.manifest import Manifest, describe, differences
from reef_bus.runner import Role, blocking
from reef_bus.transport import Ticket, Transport, transports

log = logging.getLogger(__name__)


class Fault:
    """A switch for demonstrations: after the target with sequence `at` was received, flip one byte, once."""

    def __init__(self, at: int = 0) -> None:
        self.at = at

    def strike(self, engine: InferenceBackend, load_id: str) -> None:
        if self.at and int(load_id.rpartition(":")[2]) >= self.at:
            self.at = 0
            name, piece = sorted(engine.live().items())[-1]
            piece.data[len(piece.data) // 2] ^= 0x01
            log.warning("fault switch: flipped a bit of %s after receiving %s", name, load_id)


class Agent(Role):
    """One boot of an engine and its agent."""

    name = "engine"

    def __init__(
        self,
        config: Config,
        me: Me,
        url: str,
        backend: InferenceBackend,
        store: ArtifactStore,
        fault: Fault,
        *,
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        super().__init__(me)
        self.clock = clock
        self.config = config
        self.url = url
        self.backend = backend
        self.store = store
        self.fault = fault
        self.transports: dict[str, Transport] = transports(store)
        self.memory = asyncio.Lock()
        self.world = World()
        self.open = asyncio.Event()
        self.proven = ""  # the digest that this memory was last found to have; empty while it is being written
        self.resumed_at = 0
        self.served = 0

    # -- serving

    def folded(self, world: World, batch: Sequence[Recorded]) -> None:
        self.world = world
        self._gate()

    def may_generate(self) -> bool:
        """The serving rule in whole: what the fold says, and that nothing was written to the weights since."""
        head = self.world.publications.head
        rule = may_generate(self.world, self.me.id, self.me.boot)
        return rule and head is not None and self.proven == head.manifest

    def _gate(self) -> None:
        if not self.may_generate():
            self.open.clear()
        elif not self.open.is_set():
            self.resumed_at, self.served = self.clock(), 0
            self.open.set()

    def beat(self) -> Beat:
        return {"serving": self.serving(), "served": self.served}

    def serving(self) -> str:
        """The load id that this boot may generate with now, or an empty string."""
        head = self.world.publications.head
        return head.load_id if head and self.may_generate() else ""

    # -- effects

    def react(self, world: World, now: int) -> Sequence[Debt]:
        head = world.publications.head
        spoilt = head is not None and self.proven != head.manifest
        return reactions.engine(world, self.me, self.config.publication.deadlines, spoilt=spoilt)

    async def perform(self, debt: Debt, scope: contextlib.AsyncExitStack) -> Event | None:
        match debt.effect:
            case Join():
                return EngineJoined(
                    engine=self.me.id,
                    url=self.url,
                    backend=self.config.inference.backend,
                    accepts=self.config.inference.accepts,
                )
            case Fence() as effect:
                return await self._fence(effect)
            case Receive() as effect:
                return await self._receive(effect)
            case VerifyHead() as effect:
                return await self._verify(effect)
        raise AssertionError(debt.effect)

    async def _fence(self, effect: Fence) -> Event:
        began, head = _now(), self.world.publications.head
        async with self.memory:
            resumed_at, self.resumed_at = self.resumed_at, 0
            return EngineFenced(
                engine=self.me.id,
                publication=effect.publication,
                attempt=effect.attempt,
                previous=head.load_id if head and resumed_at else "",
                resumed_at=resumed_at,
                served=self.served if resumed_at else 0,
                stopped_ms=_ms(began),
            )

    async def _receive(self, effect: Receive) -> Event:
        began = _now()
        async with self.memory:
            try:
                target = Manifest.decode(await blocking(self.store.get, effect.manifest))
                self._writing()
                moved = await self._move(effect, target)
                self.fault.strike(self.backend, effect.load_id)
                found = await self._hash()
            except (TransferError, ContractError) as error:
                cause = error.cause if isinstance(error, TransferError) else "artifact"
                return self._failed(effect, cause, str(error))
            if found.digest != effect.manifest:
                return self._failed(effect, "digest", differences(target, found)[0], found.digest)
        return self._verified(effect.load_id, found, "received", moved, began, effect.publication, effect.attempt)

    async def _move(self, effect: Receive, target: Manifest) -> int:
        if effect.transport not in self.transports:
            raise TransferError("protocol", f"transport {effect.transport!r} is not one of {sorted(self.transports)}")
        return await self.transports[effect.transport].receive(
            Ticket(effect.transport, effect.address, effect.token),
            target,
            self.backend.live(),
            publication=effect.publication,
            attempt=effect.attempt,
            stall_s=effect.stall_s,
        )

    async def _verify(self, effect: VerifyHead) -> Event:
        """From memory if that hashes to the head, else by loading its artifact and hashing again."""
        began, method, moved = _now(), "memory", 0
        async with self.memory:
            found = await self._hash()
            if found.digest != effect.manifest:
                method = "artifact"
                self._writing()
                try:
                    target = Manifest.decode(await blocking(self.store.get, effect.manifest))
                    moved = await blocking(load_weights, self.store, effect.weights.digest, self.backend.live(), target)
                except (TransferError, ContractError) as error:
                    return EngineLeft(engine=self.me.id, reason=f"cannot load the head {effect.load_id}: {error}")
                found = await self._hash()
                if found.digest != effect.manifest:
                    why = f"the head {effect.load_id} was loaded, but {differences(target, found)[0]}"
                    return EngineLeft(engine=self.me.id, reason=why)
        return self._verified(effect.load_id, found, method, moved, began)

    def _writing(self) -> None:
        self.proven = ""
        self._gate()

    async def _hash(self) -> Manifest:
        """What the forward pass reads, as it is now."""
        found = await blocking(describe, self.backend.live())
        self.proven = found.digest
        self._gate()
        return found

    def _verified(
        self,
        load_id: str,
        found: Manifest,
        method: str,
        moved: int,
        began: float,
        publication: str = "",
        attempt: int = 0,
    ) -> Event:
        return ReceiverVerified(
            engine=self.me.id,
            publication=publication,
            attempt=attempt,
            load_id=load_id,
            manifest=found.digest,
            method=method,
            tensors=len(found.tensors),
            bytes=moved,
            ms=_ms(began),
        )

    def _failed(self, effect: Receive, cause: str, detail: str, observed: str = "") -> Event:
        return ReceiverFailed(
            engine=self.me.id,
            publication=effect.publication,
            attempt=effect.attempt,
            load_id=effect.load_id,
            cause=cause,
            detail=detail,
            observed=observed,
        )


def _now() -> float:
    return asyncio.get_running_loop().time()


def _ms(began: float) -> float:
    return round((_now() - began) * 1000, 3)
