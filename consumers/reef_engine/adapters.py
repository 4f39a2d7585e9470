"""An engine's LoRA adapters: read from the store, loaded beside what is served, proven; and unloaded once nobody asks.

Knows: one backend, the store, the requests in hand. Must not know: what is to be loaded, or to go: the log decides.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
from collections.abc import Callable, Iterator

from consumers.reef_engine.reports import cause
from reef_bus.artifacts import ArtifactStore
from reef_bus.backends import InferenceBackend, Pieces, Proof
from reef_bus.core.effects import AwaitArtifact, LoadAdapter, UnloadAdapter
from reef_bus.core.ids import parse_adapter_name
from reef_bus.core.world import World
from reef_bus.errors import ContractError, Misfit, TransferError, Unavailable
from reef_bus.events import AdapterLeaked, AdapterUnloaded, EngineLeft, EngineStaged, Event, ReceiverFailed
from reef_bus.manifest import Manifest
from reef_bus.runner import blocking
from reef_bus.stored import read

log = logging.getLogger(__name__)

UNREAD = (TransferError, ContractError, Unavailable)
"""What the store raises: the artifact is missing, is damaged, or cannot be told from one that is."""


class Adapters:
    """Of one boot. Whoever calls lets one thing happen at a time; prompts are sampled meanwhile. `received` sees what
    was read before it is loaded."""

    def __init__(
        self,
        engine: str,
        backend: InferenceBackend,
        store: ArtifactStore,
        most: int,
        received: Callable[[Pieces, str], None],
    ) -> None:
        self.engine = engine
        self.backend = backend
        self.store = store
        self.lost: frozenset[str] = frozenset()  # what the log says is held, and the engine does not list
        self._loads = set[str]()  # what this boot has loaded; the log may not have been told yet
        self.doubted = False  # since it may be another engine than that which held them
        self.mended: frozenset[int] = frozenset()  # words on artifacts that could not be loaded, and can be read now
        self._most = most
        self._received = received
        self._leases = collections.Counter[str]()
        self._released = asyncio.Event()
        self._looking = asyncio.Lock()  # a store that hangs takes one thread, and not those that generate, too

    def most(self) -> int:
        """How many of them are held at most."""
        bound = self.backend.adapters
        return self._most if bound is None else min(self._most, bound)

    async def resident(self) -> tuple[str, ...]:
        """Those of ours that a boot finds: an engine that somebody else runs may hold others of its own."""
        return tuple(sorted(filter(_ours, await self._listed()))) if self.most() else ()

    def doubt(self) -> None:
        """Nobody is answered with any of them until it was looked which are there."""
        self.doubted = True

    def there(self, name: str) -> bool:
        """For all that is known here: the log may not have been told yet. The base model goes by no name."""
        return not name or not (self.doubted or name in self.lost)

    async def look(self, world: World) -> None:
        """Whether the engine lists all that it was proven to hold: it may have been another one meanwhile."""
        found = world.membership.engines.get(self.engine)
        if found and found.residency and (found.residency.slots or self._loads):
            proven = frozenset(name for name, slot in found.residency.slots.items() if slot.load_ids)
            self.lost = (proven | self._loads) - await self._listed()
        self.doubted = False

    async def _listed(self) -> frozenset[str]:
        try:
            found: frozenset[str] = await blocking(self.backend.resident)
        except TransferError as error:
            raise Unavailable(f"the engine does not say which adapters it holds: {error}") from error
        return found

    @contextlib.contextmanager
    def leased(self, name: str) -> Iterator[None]:
        """A request in hand names it, if it names one: it is not unloaded meanwhile."""
        self._leases[name] += 1
        try:
            yield
        finally:
            self._leases[name] -= 1
            if not self._leases[name]:
                del self._leases[name]
                self._released.set()

    async def load(self, effect: LoadAdapter, world: World) -> Event:
        """First of all, be rid of what an earlier load left that was given up before anybody could say so."""
        known = self._known(world)
        self.lost, self._loads = self.lost & known, self._loads & known  # what the log was told is gone is forgotten
        for name in self._strays(effect, known, await self._listed()):
            if why := await blocking(self._unload, name):
                return AdapterLeaked(engine=self.engine, adapter=name, detail=why)
        return await self._brought(effect)

    def _known(self, world: World) -> frozenset[str]:
        """What the log says that this engine holds, or may hold."""
        found = world.membership.engines.get(self.engine)
        return frozenset(found.residency.slots) if found and found.residency else frozenset()

    def _strays(self, effect: LoadAdapter, known: frozenset[str], listed: frozenset[str]) -> list[str]:
        known = known | {effect.name} if effect.held else known - {effect.name}
        return sorted(name for name in listed if _ours(name) and name not in known)

    async def _brought(self, effect: LoadAdapter) -> Event:
        """Until it is read, the artifact is to blame, and no other boot would do better."""
        began = asyncio.get_running_loop().time()
        try:
            tensors: Pieces = {} if effect.held else await blocking(self._read, effect)
        except UNREAD as error:
            if effect.publication and isinstance(error, Unavailable):
                raise  # whoever decides on it has a deadline for that
            return self._failed(effect, cause(error), str(error))
        return await self._loaded(effect, tensors, began)

    async def _loaded(self, effect: LoadAdapter, tensors: Pieces, began: float) -> Event:
        try:
            proof: Proof = await blocking(self._load, effect, tensors)
        except Misfit as error:
            return self._failed(effect, error.cause, str(error))
        except (TransferError, ContractError) as error:
            return self._at_fault(effect, cause(error), str(error))
        if proof.flaw:
            return self._at_fault(effect, "digest", proof.flaw)
        return EngineStaged(
            engine=self.engine,
            publication=effect.publication,
            attempt=effect.attempt,
            load_id=effect.load_id,
            manifest=effect.manifest,
            tensors=proof.tensors,
            bytes=sum(piece.data.nbytes for piece in tensors.values()),
            ms=round((asyncio.get_running_loop().time() - began) * 1000, 3),
            scenario=effect.scenario,
            adapter=effect.name,
            algorithm=proof.algorithm,
        )

    def _read(self, effect: LoadAdapter | AwaitArtifact) -> Pieces:
        """Hashed on its way."""
        manifest = Manifest.decode(self.store.get(effect.manifest))
        return read(self.store, effect.weights.digest, manifest)

    def _load(self, effect: LoadAdapter, tensors: Pieces) -> Proof:
        """What the engine made of it is the engine's to prove."""
        if not effect.held:
            self.lost -= {effect.name}
            self._loads.add(effect.name)
            self._received(tensors, effect.load_id)
            self.backend.load_adapter(effect.name, tensors, effect.lora)
        return self.backend.adapter_proof(effect.name, effect.manifest, effect.lora)

    def _at_fault(self, effect: LoadAdapter, cause: str, detail: str) -> Event:
        """The engine is: a target that it cannot receive is the publishers' to judge; what is committed needs a better
        boot."""
        if effect.publication:
            return self._failed(effect, cause, detail)
        return EngineLeft(engine=self.engine, reason=f"cannot load adapter {effect.name}: {detail}")

    def _failed(self, effect: LoadAdapter, cause: str, detail: str) -> Event:
        return ReceiverFailed(
            engine=self.engine,
            publication=effect.publication,
            attempt=effect.attempt,
            load_id=effect.load_id,
            cause=cause,
            detail=detail,
            staged=True,
            scenario=effect.scenario,
            adapter=effect.name,
        )

    async def wait(self, effect: AwaitArtifact) -> None:
        """Nothing of the engine is touched, and nobody who has it is waited for."""
        pause = effect.first_s
        while True:
            await asyncio.sleep(pause)
            try:
                async with self._looking:
                    await blocking(self._read, effect)
            except UNREAD:
                pause = min(2 * pause, effect.every_s)
            else:
                break
        self.mended |= {effect.failed}

    async def unload(self, effect: UnloadAdapter) -> Event:
        """New requests do not name it: it is nobody's head."""
        while self._leases[effect.name]:
            self._released.clear()
            await self._released.wait()
        why: str = await blocking(self._unload, effect.name)
        if why:
            log.warning("%s may still be there: %s", effect.name, why)
            return AdapterLeaked(engine=self.engine, adapter=effect.name, detail=why)
        return AdapterUnloaded(engine=self.engine, adapter=effect.name)

    def _unload(self, name: str) -> str:
        """Maybe nobody is left to hear of it, as it is not to go any more: then the log has to be told what is lost."""
        why = self.backend.unload_adapter(name)
        if not why:
            self.lost |= {name}
        return why


def _ours(name: str) -> bool:
    try:
        parse_adapter_name(name)
    except ContractError:
        return False
    return True
