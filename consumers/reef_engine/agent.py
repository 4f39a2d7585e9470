"""The agent beside one engine: fences it, receives into it, proves what it holds, and lets it generate by the rule.

Knows: its backend, the transports, its own fold. Must not know: the trainer, or whether a release should happen.
Whoever lets bytes in or hashes holds the ingress lock; whoever generates, or touches what is served, the memory lock;
in this order. So nothing generates while weights change, one ingress is open at a time, and a fence that has both locks
knows that generation has stopped and every older ingress is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from consumers.reef_engine.adapters import Adapters
from consumers.reef_engine.beside import Beside
from consumers.reef_engine.fault import Fault
from consumers.reef_engine.held import Found, Staging, arrived, held
from consumers.reef_engine.memory import Memory, Uncertain
from consumers.reef_engine.reports import cause, failed, verified
from reef_bus.artifacts import ArtifactStore
from reef_bus.backends import InferenceBackend, Pieces, places
from reef_bus.config import Config
from reef_bus.core import reactions
from reef_bus.core.effects import (
    AwaitArtifact,
    Debt,
    Fence,
    Ingress,
    Join,
    LoadAdapter,
    Me,
    Receive,
    ReleaseMemory,
    RestoreMemory,
    Stage,
    UnloadAdapter,
    VerifyHead,
)
from reef_bus.core.publication import DRAIN, FENCED, STAGED, Release
from reef_bus.core.serving import Version, may_generate, version
from reef_bus.core.world import World
from reef_bus.errors import ContractError, TransferError, Unavailable
from reef_bus.events import (
    EngineFenced,
    EngineJoined,
    EngineLeft,
    EngineMemoryReleased,
    EngineMemoryRestored,
    EngineStaged,
    Event,
    Recorded,
)
from reef_bus.journal import LOG, Beat, Journal
from reef_bus.manifest import Manifest
from reef_bus.runner import Role, blocking
from reef_bus.stored import load
from reef_bus.transport import Ticket, Transport, transports

log = logging.getLogger(__name__)

RENEW_S = 0.02  # how often a lease looks whether the fold has reached the head


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
        self.held = Memory(backend)
        self.store = store
        self.fault = fault
        self.transports: dict[str, Transport] = transports(
            store, use=config.inference.accepts, torch_device=config.publication.torch_device
        )
        self.beside = Beside(backend, store, fault, delta=config.publication.delta)
        self.ingress = asyncio.Lock()
        self.memory = asyncio.Lock()
        self.adapters = Adapters(me.id, backend, store, config.adapters.most(), fault.strike)
        self.wanted = asyncio.Event()  # whoever has the memory to generate is to give it up, as `pause` says
        self.stop = threading.Event()  # the same for threads, where that is at the next token
        self.pause = DRAIN
        self.staged: Staging | None = None
        self.world = World()
        self.open = asyncio.Event()
        self.proven = ""  # the digest that this memory was last found to have; empty while it is being written
        self.resumed_at = 0
        self.served = 0
        self.leased = 0.0  # until when (the loop's time) the lease holds, where there is one

    # -- serving

    def folded(self, world: World, batch: Sequence[Recorded]) -> None:
        self.world = world
        self.gate()

    def may_generate(self) -> bool:
        """The serving rule in whole: what the fold says, and that nothing was written to the weights since."""
        head = self.world.publications.head
        rule = may_generate(self.world, self.me.id, self.me.boot)
        proven = rule and head is not None and self.proven == head.manifest and self._in_touch()
        return proven and self.held.whole()

    def _in_touch(self) -> bool:
        """Without a lease, always: who is cut off goes on serving its committed version."""
        return not self.config.inference.lease_s or asyncio.get_running_loop().time() < self.leased

    async def renew(self, journal: Journal) -> None:
        """Keep the lease: it counts from when the log's leader was asked for a head that the fold then reached."""
        loop, lease_s = asyncio.get_running_loop(), self.config.inference.lease_s
        while True:
            asked = loop.time()
            with contextlib.suppress(Unavailable, ContractError):
                head = await journal.head(LOG)
                while self.world.seq < head:  # noqa: ASYNC110 - a fold that falls behind for long lets the lease lapse
                    await asyncio.sleep(RENEW_S)
                self.leased = asked + lease_s
                loop.call_at(self.leased, self.gate)
                self.gate()
            await asyncio.sleep(lease_s / 4)

    def gate(self) -> bool:
        """Open or close generation by the rule, as it is now; whether it is open."""
        if not self.may_generate():
            self.open.clear()
        elif not self.open.is_set():
            self.resumed_at, self.served = self.clock(), 0
            self.open.set()
        return self.open.is_set()

    def beat(self) -> Beat:
        return {"serving": self.serving(), "served": self.served}

    def version(self, scenario: str) -> Version | None:
        """What a request of that scenario is answered with now, when the gate is open; None: nothing here can."""
        engine = self.world.membership.engines.get(self.me.id)
        found = version(self.world, engine, scenario) if engine else None
        return found if found and self.adapters.there(found.adapter) else None

    def serving(self) -> str:
        """The load id that this boot may generate with now, or an empty string."""
        head = self.world.publications.head
        return head.load_id if head and self.may_generate() else ""

    # -- effects

    def react(self, world: World, now: int) -> Sequence[Debt]:
        head = world.publications.head
        written = head is not None and (self.proven != head.manifest or self.adapters.doubted)
        return reactions.engine(
            world,
            self.me,
            self.config.publication.deadlines,
            written=written,
            lost=self.adapters.lost,
            mended=self.adapters.mended,
            out=self.held.away(),
        )

    async def perform(self, debt: Debt, scope: contextlib.AsyncExitStack) -> Event | None:
        try:
            return await self._perform(debt)
        except Uncertain as error:
            return EngineLeft(engine=self.me.id, reason=f"its memory is uncertain: {error}")

    async def _perform(self, debt: Debt) -> Event | None:
        match debt.effect:
            case Join():
                return await self._join()
            case Fence() as effect:
                return await self._fence(effect)
            case Receive() as effect:
                return await self._receive(effect)
            case Stage() as effect:
                return await self._stage(effect)
            case VerifyHead() as effect:
                return await self._verify(effect)
            case LoadAdapter() as effect:
                async with self.ingress:
                    return await self.adapters.load(effect, self.world)
            case AwaitArtifact() as effect:
                await self.adapters.wait(effect)
                return None
            case UnloadAdapter() as effect:
                async with self.ingress:
                    return await self.adapters.unload(effect)
            case ReleaseMemory() as effect:
                return await self._release(effect)
            case RestoreMemory() as effect:
                return await self._restore(effect)
        raise AssertionError(debt.effect)

    async def _join(self) -> Event:
        return EngineJoined(
            engine=self.me.id,
            url=self.url,
            backend=self.config.inference.backend,
            accepts=self.config.inference.accepts,
            modes=(FENCED, STAGED) if self.backend.stages else (FENCED,),
            pauses=self.backend.pauses,
            releases=self.backend.releases,
            adapters=self.adapters.most(),
            resident=await self.adapters.resident(),
        )

    @contextlib.asynccontextmanager
    async def _stopped(self, pause: str) -> AsyncIterator[None]:
        """The memory, once generation has stopped: after the batch in hand, or between two of its tokens."""
        try:
            self.pause = pause
            self.wanted.set()
            if pause != DRAIN:
                self.stop.set()
            async with self.memory:
                self._unwanted()
                yield
        finally:
            self._unwanted()

    def _unwanted(self) -> None:
        self.wanted.clear()
        self.stop.clear()

    async def _fence(self, effect: Fence) -> Event:
        began, head = _now(), self.world.publications.head
        async with self.ingress, self._stopped(effect.pause):
            await self._drop_copy()
            return EngineFenced(
                engine=self.me.id,
                publication=effect.publication,
                attempt=effect.attempt,
                **self._until_now(head),
                stopped_ms=_ms(began),
            )

    def _until_now(self, head: Release | None) -> dict[str, Any]:
        """What was served until generation stopped."""
        resumed_at, self.resumed_at = self.resumed_at, 0
        served = self.served if resumed_at else 0
        return {"previous": head.load_id if head and resumed_at else "", "resumed_at": resumed_at, "served": served}

    async def _drop_copy(self) -> None:
        self.staged = None
        await blocking(self.backend.unstage)

    async def _release(self, effect: ReleaseMemory) -> Event:
        """Drained: what is in hand has its answer, for nothing of it would be left to go on from."""
        began, head = _now(), self.world.publications.head
        async with self.ingress, self._stopped(DRAIN):
            await self._drop_copy()
            stopped_ms = _ms(began)
            self._writing()
            await blocking(self.held.release, effect.regions)
            return EngineMemoryReleased(
                engine=self.me.id,
                job=effect.job,
                fence=effect.fence,
                regions=effect.regions,
                **self._until_now(head),
                stopped_ms=stopped_ms,
                ms=_ms(began),
            )

    async def _restore(self, effect: RestoreMemory) -> Event:
        began = _now()
        async with self.ingress, self.memory:
            await blocking(self.held.resume, effect.regions)
        return EngineMemoryRestored(engine=self.me.id, job=effect.job, regions=effect.regions, ms=_ms(began))

    async def _receive(self, effect: Receive) -> Event:
        began = _now()
        async with self.ingress, self.memory:
            try:
                target = Manifest.decode(await blocking(self.store.get, effect.manifest))
                self._writing()
                room = await self._room(target)
                moved = await self._move(effect, target, room)
                found = await self._take(effect, target, room)
            except (TransferError, ContractError) as error:
                return failed(self.me.id, effect, cause(error), str(error))
            if found.digest != effect.manifest:
                return failed(self.me.id, effect, "digest", found.differs(target), found.digest)
        of = effect.publication, effect.attempt
        return verified(self.me.id, effect.load_id, found, "received", moved, _ms(began), *of)

    async def _room(self, target: Manifest) -> Pieces:
        """Where a version is received while nothing generates."""
        return await blocking(self.backend.room, target.layouts()) if self.backend.apart else self.backend.live()

    async def _take(self, effect: Receive, target: Manifest, room: Pieces) -> Found:
        """What the forward pass reads, after it was given what was received: where it is apart, only the target."""
        if not self.backend.apart:
            self.fault.strike(room, effect.load_id)
            return await self._hash(effect.manifest, effect.load_id)
        found = await blocking(arrived, self.backend, room, target)
        if found.digest != effect.manifest:
            return found
        self.fault.strike(room, effect.load_id)
        await blocking(self.backend.take, effect.load_id)
        return await self._hash(effect.manifest, effect.load_id)

    async def _stage(self, effect: Stage) -> Event:
        """Beside what is served, while generation goes on: the memory lock is nobody's business here."""
        began = _now()
        async with self.ingress:
            self.staged = None
            try:
                target = Manifest.decode(await blocking(self.store.get, effect.manifest))
                beside = await blocking(self.beside.room, target)
                transport, proven = self.transports.get(effect.transport), self.proven
                found, moved, base = await self.beside.fill(effect, target, beside, proven, transport, self._move)
            except (TransferError, ContractError) as error:
                return failed(self.me.id, effect, cause(error), str(error))
            if found.digest != effect.manifest:
                return failed(self.me.id, effect, "digest", found.differs(target), found.digest)
            self.staged = Staging(effect.load_id, found, places(beside))
        return EngineStaged(
            engine=self.me.id,
            publication=effect.publication,
            attempt=effect.attempt,
            load_id=effect.load_id,
            manifest=found.digest,
            tensors=found.tensors,
            bytes=moved,
            ms=_ms(began),
            base_manifest=base,
        )

    async def _move(self, effect: Ingress, target: Manifest, into: Pieces) -> int:
        if effect.transport not in self.transports:
            raise TransferError("protocol", f"transport {effect.transport!r} is not one of {sorted(self.transports)}")
        return await self.transports[effect.transport].receive(
            Ticket(effect.transport, effect.address, effect.token),
            target,
            into,
            publication=effect.publication,
            attempt=effect.attempt,
            stall_s=effect.stall_s,
        )

    async def _verify(self, effect: VerifyHead) -> Event:
        """By swapping in what was staged for it; from memory if that hashes to it; else by loading its artifact."""
        began, method, moved = _now(), "swapped", 0
        async with self.ingress, self._stopped(effect.pause):
            found = await self._swap(effect)
            if found is None:
                found, method = await self._hash(effect.manifest, effect.load_id), "memory"
            if found.digest != effect.manifest:
                method = "artifact"
                self._writing()
                try:
                    target = Manifest.decode(await blocking(self.store.get, effect.manifest))
                    moved = await self._load(effect, target)
                except (TransferError, ContractError) as error:
                    self._require_head(effect, error)
                    return EngineLeft(engine=self.me.id, reason=f"cannot load the head {effect.load_id}: {error}")
                found = await self._hash(effect.manifest, effect.load_id)
                if found.digest != effect.manifest:
                    why = f"the head {effect.load_id} was loaded, but {found.differs(target)}"
                    return EngineLeft(engine=self.me.id, reason=why)
            await self.adapters.look(self.world)
        return verified(self.me.id, effect.load_id, found, method, moved, _ms(began))

    async def _load(self, effect: VerifyHead, target: Manifest) -> int:
        """The artifact, whose every tensor is hashed on its way; returns the bytes that were read."""
        moved = await blocking(load, self.store, effect.weights.digest, await self._room(target), target)
        if self.backend.apart:
            await blocking(self.backend.expect, effect.manifest)
            await blocking(self.backend.take, effect.load_id)
        return moved

    def _require_head(self, effect: VerifyHead, error: TransferError | ContractError) -> None:
        """Who was too slow for the head that it loads, and finds its artifact removed, owes another one by now."""
        head = self.world.publications.head
        if head is not None and head.load_id != effect.load_id:
            raise Unavailable(f"{effect.load_id} is the head no more, {head.load_id} is: {error}") from error

    async def _swap(self, effect: VerifyHead) -> Found | None:
        """What is served now, if the staging of this head was swapped in; in every other case the staging is dropped,
        and whoever goes on has to hash."""
        staged, self.staged = self.staged, None
        if staged is None or (staged.load_id, staged.found.digest) != (effect.load_id, effect.manifest):
            return None
        self._writing()
        try:
            found = await (self._swap_apart(effect) if self.backend.apart else blocking(self.beside.swap, staged))
        except (TransferError, ContractError) as error:
            log.warning("cannot swap %s in: %s", effect.load_id, error)
            return None
        self.proven = found.digest
        self.gate()
        return found

    async def _swap_apart(self, effect: VerifyHead) -> Found:
        """Whatever the engine then holds; it may be another version, or none."""
        await blocking(self.backend.take, effect.load_id)
        found = await self._hash(effect.manifest, effect.load_id)
        if found.flaw:
            log.warning("cannot swap %s in: %s", effect.load_id, found.flaw)
        return found

    def doubt(self) -> None:
        """What was proven is not what answers: it may be another's doing. Prove it again, or load it."""
        self.adapters.doubt()
        self._writing()

    def _writing(self) -> None:
        self.proven = ""
        self.gate()

    async def _hash(self, manifest: str, load_id: str) -> Found:
        """What the forward pass reads, as it is now; of one that is apart, whether it is that."""
        if not self.held.whole():  # what the forward pass needs beside the weights comes before the proof
            await blocking(self.held.resume_all)
        found = await blocking(held, self.backend, manifest, load_id)
        self.proven = found.digest
        self.gate()
        return found


def _now() -> float:
    return asyncio.get_running_loop().time()


def _ms(began: float) -> float:
    return round((_now() - began) * 1000, 3)
