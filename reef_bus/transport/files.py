"""Weights from the artifact store: always works; for late joiners, rollback and sites, where no sender lives.

Knows: the artifact store, manifests, the progress deadline.
Must not know: sockets, the log, or who else reads the artifact. Artifacts are immutable, so attempts share them.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Generator, Iterator
from typing import Any, TypeVar

from reef_bus.artifacts import ArtifactStore, copy_weights, verify_weights, weights_blob
from reef_bus.backends import Pieces
from reef_bus.errors import ContractError, TransferError, Unavailable
from reef_bus.manifest import Manifest, describe, differences, require_fit
from reef_bus.shelf import SLICE_BYTES, Opened
from reef_bus.stored import arriving, build, chain_at
from reef_bus.transport import STALL_S, Offer, Ticket, Transport, transfer_errors

T = TypeVar("T")


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

    def stored(self, weights: str) -> Offer | None:
        """Of a chain alone: what is kept in full is offered by its tensors, and compared with them."""
        return FilesOffer(Ticket(self.name, weights, "")) if chain_at(self._store, weights) else None

    async def delta(
        self, ticket: Ticket, manifest: Manifest, base: str, *, publication: str, attempt: int, stall_s: float = STALL_S
    ) -> bytes | bytearray | None:
        """The last link of the chain, for who holds what is before it: the rest of the chain need not be read."""
        about = f"artifact {_where(self._store, ticket)}"
        with transfer_errors(about), _answered(about):
            async with asyncio.timeout(stall_s) as deadline:
                return await self._read(self._last(ticket.address, base), deadline, stall_s)

    def _last(self, weights: str, base: str) -> Generator[int, None, bytes | None]:
        chain = chain_at(self._store, weights)
        if chain is None or not chain.links or chain.manifests[-2] != base:
            return None
        return (yield from arriving(self._store, chain.links[-1].delta.digest))

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
        with transfer_errors(about), _answered(about):
            async with asyncio.timeout(stall_s) as deadline:
                chain = await asyncio.to_thread(chain_at, self._store, ticket.address)
                if chain is not None:
                    built = await self._read(build(self._store, chain, manifest), deadline, stall_s)
                    await _copy(_slices(built, target), deadline, stall_s, progress)
                    return chain.nbytes
                opened = await self._read(verify_weights(self._store, ticket.address, manifest), deadline, stall_s)
                with opened.file:
                    return await _copy(copy_weights(opened, target), deadline, stall_s, progress)

    async def _read(self, steps: Generator[int, None, T], deadline: asyncio.Timeout, stall_s: float) -> T:
        """Fetched and compared off the loop, because a disk or a server may hang. A thread that is left behind there
        only reads, into memory that is nobody's, stops at its next step, and closes what it opened."""
        left, loop = threading.Event(), asyncio.get_running_loop()

        def moved() -> None:
            if not left.is_set() and not deadline.expired():
                _put_off(deadline, stall_s)

        def step() -> None:
            next(steps)
            if left.is_set():
                raise TransferError("retracted", "nobody waits for it any more")
            loop.call_soon_threadsafe(moved)

        thread = asyncio.ensure_future(asyncio.to_thread(_exhausted, steps, step))
        try:
            return await asyncio.shield(thread)
        except BaseException:
            left.set()
            thread.add_done_callback(_close)
            raise


def _exhausted(steps: Generator[int, None, T], step: Callable[[], None]) -> T:
    with contextlib.closing(steps):
        while True:
            try:
                step()
            except StopIteration as end:
                found: T = end.value
                return found


def _close(thread: asyncio.Future[Any]) -> None:
    """What a thread had opened when nobody waited for it any more."""
    if not thread.cancelled() and thread.exception() is None and isinstance(thread.result(), Opened):
        thread.result().file.close()


@contextlib.contextmanager
def _answered(about: str) -> Iterator[None]:
    try:
        yield
    except Unavailable as error:
        raise TransferError("closed", f"{about}: {error}") from error


async def _copy(
    steps: Generator[int, None, None],
    deadline: asyncio.Timeout,
    stall_s: float,
    progress: Callable[[int], None] | None,
) -> int:
    """On the loop, slice by slice, from pages that verifying has just read: no thread ever holds the target, so
    that nothing is left to write into it after a cancel."""
    total = 0
    with contextlib.closing(steps):
        for count in steps:
            total += count
            _put_off(deadline, stall_s)
            if progress is not None:
                progress(total)
            await asyncio.sleep(0)
    return total


def _slices(source: Pieces, target: Pieces) -> Generator[int, None, None]:
    """Copy one version's memory, yielding bytes per step."""
    for name, piece in target.items():
        for start in range(0, piece.data.nbytes, SLICE_BYTES):
            part = source[name].data[start : start + SLICE_BYTES]
            piece.data[start : start + part.nbytes] = part
            yield part.nbytes


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
