"""Removing what nobody reads any more from the store: the one place that ever does.

Knows: the store, chains, the lock that parts sweeps from backups. Must not know: which candidates are needed
(`core/retention.py`). What is doubtful stays.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

from reef_bus.artifacts import ArtifactStore
from reef_bus.config import Config
from reef_bus.core.retention import Retention, blobs
from reef_bus.embedded import Lock
from reef_bus.errors import ContractError, Rejected, TransferError, Unavailable
from reef_bus.stored import chain_at

WAIT_S = 0.1
LIMIT = 200
"""Blobs that one sweep asks for. After a boot nobody knows what is gone already, of a log of any length; a far store
takes a round trip for each, and the job waits."""

log = logging.getLogger(__name__)


def removable(store: ArtifactStore, found: Retention) -> frozenset[str]:
    """The blobs of spare candidates that no needed one stands on. Raises TransferError where it is not certain what a
    needed one stands on."""
    stand = set(blobs(found.needed))
    for candidate in found.needed:
        if not store.has(candidate.weights.digest):
            raise TransferError("refused", f"the weights of candidate {candidate.id} are not in the store")
        if chain := chain_at(store, candidate.weights.digest):
            stand |= chain.blobs
    return blobs(found.spare) - stand


def sweep(store: ArtifactStore, config: Config, found: Retention, gone: set[str]) -> None:
    """Remove what is removable, newest first, and what is beyond the limit the next time; nothing, while a backup is
    under way. `gone` remembers what need not be looked for."""
    try:
        lock = _lock(config)
    except Rejected:
        log.info("a backup is under way: nothing is removed before the next job")
        return
    try:
        for digest in _in_turn(found, removable(store, found) - gone)[:LIMIT]:
            if store.remove(digest):
                log.info("removed blob %s: no release within reach needs it", digest)
            gone.add(digest)
    except (TransferError, ContractError, Unavailable) as error:
        log.warning("nothing more is removed: %s", error)
    finally:
        lock.release()


def _in_turn(found: Retention, going: frozenset[str]) -> list[str]:
    """What became spare last comes first: it is there for certain, and what is older may be gone."""
    named = (digest for each in reversed(found.spare) for digest in sorted(blobs((each,))))
    return [digest for digest in dict.fromkeys(named) if digest in going]


@contextlib.asynccontextmanager
async def nothing_is_removed(config: Config) -> AsyncIterator[None]:
    """For a backup: no sweep begins meanwhile; one that is under way is waited for."""
    while True:
        try:
            lock = _lock(config)
            break
        except Rejected:
            await asyncio.sleep(WAIT_S)
    try:
        yield
    finally:
        lock.release()


def _lock(config: Config) -> Lock:
    return Lock(config.folder("locks") / "artifacts.lock", f"the artifact store of {config.state_dir}")
