"""Filling the second copy from what is served and a delta, where the sender has one. Nothing of it is taken on trust.

Knows: one transport, one ticket, the delta's codec. Must not know: the log, or what happens when there is no delta.
What is served is only read; it does not change meanwhile, because whoever changes it holds the ingress lock.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

from reef_bus.backends import Pieces
from reef_bus.core.effects import Stage
from reef_bus.errors import ContractError, TransferError
from reef_bus.manifest import Manifest
from reef_bus.runner import blocking
from reef_bus.transport import Ticket, Transport

log = logging.getLogger(__name__)

Bytes = bytes | bytearray


class Live(NamedTuple):
    """What is served, and what it was proven to be."""

    pieces: Pieces
    manifest: Manifest


class Rebased(NamedTuple):
    """Bytes that moved, and the base from which the copy was filled; empty: it was not."""

    moved: int = 0
    base: str = ""


async def rebase(transport: Transport, effect: Stage, target: Manifest, live: Live, into: Pieces) -> Rebased:
    """Fill `into` by a delta from `live`, if one is to be had. Whatever is wrong with it, the full bytes are the
    answer; so half of the time without progress is kept for them. What was filled has not been hashed."""
    moved = 0
    try:
        delta = await _ask(transport, effect, target, live.manifest.digest)
        if delta is None:
            return Rebased()
        moved = len(delta)
        await _apply(delta, live, into, target)
    except (TransferError, ContractError, MemoryError) as error:
        log.warning("%s comes in full: %r", effect.load_id, error)
        return Rebased(moved)
    return Rebased(moved, live.manifest.digest)


async def _ask(transport: Transport, effect: Stage, target: Manifest, base: str) -> Bytes | None:
    return await transport.delta(
        Ticket(effect.transport, effect.address, effect.token),
        target,
        base,
        publication=effect.publication,
        attempt=effect.attempt,
        stall_s=effect.stall_s / 2,
    )


async def _apply(delta: Bytes, live: Live, into: Pieces, target: Manifest) -> None:
    """Bucket by bucket: whoever cancels waits for one at most, and after that nothing writes into the copy."""
    from reef_bus.delta import apply  # an extra (numpy, zstd), for who is configured to receive deltas

    steps = await blocking(apply, delta, live.pieces, live.manifest, into, target)
    while await blocking(next, steps, 0):
        pass
