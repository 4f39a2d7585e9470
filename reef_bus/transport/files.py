"""Weights from the artifact store: always works; for late joiners, rollback and sites, where no sender lives.

Knows: the artifact store, manifests, the progress deadline.
Must not know: sockets, the log, or who else reads the artifact. Artifacts are immutable, so attempts share them.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Generator

from reef_bus.artifacts import ArtifactStore, copy_weights, verify_weights, weights_blob
from reef_bus.backends import Pieces
from reef_bus.errors import ContractError, TransferError, Unavailable
from reef_bus.manifest import Manifest, describe, differences, require_fit
from reef_bus.shelf import Opened
from reef_bus.transport import STALL_S, Offer, Ticket, Transport, transfer_errors


class FilesTransport(Transport):
    """Receivers read the artifact themselves: a ticket needs only its blob digest, and anyone may make one."""

    name = "files"

    def __init__(self, store: ArtifactStore) -> None:
        self._store = store

    async def offer(self, manifest: Manifest, source: Pieces, *, publication: str, attempt: int) -> Offer:
        """As the contract; also raises TransferError("refused") when `source` was not saved in this store before, and
        Unavailable when the store's server does not say so."""
        require_fit(manifest, source)
        said = differences(manifest, await asyncio.to_thread(describe, source))
        if said:
            raise TransferError("mismatch", said[0])
        blob = await asyncio.to_thread(weights_blob, manifest, source)
        if not await asyncio.to_thread(self._store.has, blob.digest):
            where = self._store.where(blob.digest)
            raise TransferError("refused", f"no artifact at {where}: call save_weights before offering it")
        return FilesOffer(Ticket(self.name, blob.digest, ""))

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
        about = f"artifact {_where(self._store, ticket)}"
        with transfer_errors(about):
            async with asyncio.timeout(stall_s) as deadline:
                opened = await self._verified(ticket.address, manifest, deadline, stall_s)
                with opened.file:
                    return await _copy(opened, target, deadline, stall_s, progress)

    async def _verified(self, digest: str, manifest: Manifest, deadline: asyncio.Timeout, stall_s: float) -> Opened:
        """Fetched and compared off the loop, because a disk or a server may hang. A thread that is left behind there
        only reads, stops at its next slice, and closes what it opened."""
        left, loop = threading.Event(), asyncio.get_running_loop()

        def moved() -> None:
            if not left.is_set() and not deadline.expired():
                _put_off(deadline, stall_s)

        def step(steps: Generator[int, None, Opened]) -> None:
            next(steps)
            if left.is_set():
                raise TransferError("retracted", f"nobody waits for {digest} any more")
            loop.call_soon_threadsafe(moved)

        thread = asyncio.ensure_future(asyncio.to_thread(_verify, verify_weights(self._store, digest, manifest), step))
        try:
            return await asyncio.shield(thread)
        except Unavailable as error:
            raise TransferError("closed", f"artifact {self._store.where(digest)}: {error}") from error
        except BaseException:
            left.set()
            thread.add_done_callback(_close)
            raise


def _verify(steps: Generator[int, None, Opened], step: Callable[[Generator[int, None, Opened]], None]) -> Opened:
    with contextlib.closing(steps):
        while True:
            try:
                step(steps)
            except StopIteration as end:
                opened: Opened = end.value
                return opened


def _close(thread: asyncio.Future[Opened]) -> None:
    """What a thread had opened when nobody waited for it any more."""
    if not thread.cancelled() and thread.exception() is None:
        thread.result().file.close()


async def _copy(
    opened: Opened,
    target: Pieces,
    deadline: asyncio.Timeout,
    stall_s: float,
    progress: Callable[[int], None] | None,
) -> int:
    """On the loop, slice by slice, from pages that verifying has just read: no thread ever holds the target, so
    that nothing is left to write into it after a cancel."""
    total = 0
    with contextlib.closing(copy_weights(opened, target)) as steps:
        for count in steps:
            total += count
            _put_off(deadline, stall_s)
            if progress is not None:
                progress(total)
            await asyncio.sleep(0)
    return total


class FilesOffer(Offer):
    """Nothing is held open: the artifact stays readable after `close`, because it is nobody's attempt."""

    def __init__(self, ticket: Ticket) -> None:
        self._ticket = ticket

    @property
    def ticket(self) -> Ticket:
        return self._ticket

    @property
    def sent_bytes(self) -> int:
        return 0

    async def close(self) -> None:
        return None


def _where(store: ArtifactStore, ticket: Ticket) -> str:
    try:
        if ticket.transport == "files":
            return store.where(ticket.address)
    except ContractError:
        pass
    raise TransferError("protocol", f"expected a files ticket for a blob, found {ticket.transport} {ticket.address!r}")


def _put_off(deadline: asyncio.Timeout, stall_s: float) -> None:
    deadline.reschedule(asyncio.get_running_loop().time() + stall_s)
