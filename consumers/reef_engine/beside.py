"""The second copy: where it is, and how a target comes into it, by a delta or in full.

Knows: the backend, the transports, what is served as far as it was proven. Must not know: the log, or who may generate.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from consumers.reef_engine.fault import Fault
from consumers.reef_engine.held import Found, Staging, arrived
from consumers.reef_engine.rebase import Live, Rebased, rebase
from reef_bus.artifacts import ArtifactStore
from reef_bus.backends import InferenceBackend, Pieces, places
from reef_bus.core.effects import Stage
from reef_bus.errors import ContractError, Unavailable
from reef_bus.manifest import Manifest
from reef_bus.runner import blocking
from reef_bus.transport import Transport

log = logging.getLogger(__name__)

Move = Callable[[Stage, Manifest, Pieces], Awaitable[int]]


class Beside:
    """One engine's. `delta`: ask for one."""

    def __init__(self, backend: InferenceBackend, store: ArtifactStore, fault: Fault, *, delta: bool) -> None:
        self.backend, self.store, self.fault = backend, store, fault
        self.delta = delta and not backend.apart

    def room(self, target: Manifest) -> Pieces:
        """The second copy, once it is certain that to write it is not to write what is served."""
        beside = self.backend.room(target.layouts()) if self.backend.apart else self.backend.stage()
        if shared := set(places(beside).values()) & set(places(self.backend.live()).values()):
            raise ContractError(
                f"the second copy is no copy: {len(shared)} of its tensors lie where the served ones do"
            )
        return beside

    def swap(self, staged: Staging) -> Found:
        """No byte moves: what is served lies where it was hashed, and nobody has touched it since."""
        self.backend.swap()
        if places(self.backend.live()) != staged.places:
            raise ContractError("what is served now does not lie where it was hashed")
        return staged.found

    async def fill(
        self, effect: Stage, target: Manifest, beside: Pieces, proven: str, transport: Transport | None, move: Move
    ) -> tuple[Found, int, str]:
        """By a delta on what is served, which was `proven`, if there is one and the result is the target; else in full.
        Returns what was found, the bytes that moved for it, and the delta's base (an empty string: in full)."""
        told = await self._rebase(effect, target, beside, proven, transport)
        if told.base:
            self.fault.strike(beside, effect.load_id)
            found = await blocking(arrived, self.backend, beside, target)
            if found.digest == effect.manifest:
                log.info("staged %s by a delta: %d bytes moved of %d", effect.load_id, told.moved, target.total)
                return found, told.moved, told.base
            log.warning("%s comes in full: by the delta, %s", effect.load_id, found.differs(target))
        moved = await move(effect, target, beside)
        self.fault.strike(beside, effect.load_id)
        return await blocking(arrived, self.backend, beside, target), told.moved + moved, ""

    async def _rebase(
        self, effect: Stage, target: Manifest, beside: Pieces, proven: str, transport: Transport | None
    ) -> Rebased:
        """Only of what was proven, and only in the first attempt: those after a failure are in full."""
        if not (self.delta and effect.attempt == 1 and proven and transport):
            return Rebased()
        try:
            known = Manifest.decode(await blocking(self.store.get, proven))
        except (ContractError, Unavailable):  # what this memory holds is no release that the store can show
            return Rebased()
        return await rebase(transport, effect, target, Live(self.backend.live(), known), beside)
