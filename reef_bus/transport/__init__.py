"""How weights move: the small contract that every transport keeps, and the transports that exist here.

Knows: manifests, pieces of memory, attempts, one error for every failure.
Must not know: the log, who is fenced, or whether what arrived is right: the receiver hashes its own memory afterwards.
"""

from __future__ import annotations

import contextlib
import errno
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from reef_bus.artifacts import ArtifactStore
from reef_bus.backends import Pieces
from reef_bus.errors import Rejected, TransferError
from reef_bus.manifest import Manifest

STALL_S = 10.0
"""Default progress deadline of every wait: no library notices a stopped peer, so each transport must."""


class Ticket(msgspec.Struct, frozen=True):
    """What a receiver needs to begin; rides in `SenderReady`. `token` admits to one attempt, and is no secret from
    whoever may read the log."""

    transport: str
    address: str
    token: str


class Delta(NamedTuple):
    """A version as a sender may tell it to whoever proved to hold exactly `base`, a manifest's digest."""

    base: str
    data: bytes


class Offer(ABC):
    """One attempt's open door at the sender."""

    @property
    @abstractmethod
    def ticket(self) -> Ticket:
        """What receivers of this attempt need."""

    @property
    @abstractmethod
    def sent_bytes(self) -> int:
        """Bytes of tensors, or of deltas, handed to the network so far, all receivers together."""

    def tell(self, delta: Delta) -> None:
        """Have this delta to give, beside the full bytes. A transport that tells no deltas has no use for it."""

    @abstractmethod
    async def close(self) -> None:
        """End every connection of this attempt and admit nobody any more; safe to repeat."""


class Transport(ABC):
    """Moves one version's bytes from a sender's memory, or an artifact, into receivers' memory.

    Every failure is a TransferError, within the progress deadline; to cancel closes what was open. The next attempt
    is not affected by how an earlier one ended."""

    name: str

    def lacks(self) -> str:
        """What this transport needs and is not here, with the line that installs it; empty where it lacks nothing."""
        return ""

    @abstractmethod
    async def offer(self, manifest: Manifest, source: Pieces, *, publication: str, attempt: int) -> Offer:
        """Open the door of one attempt. `source` must hold what the manifest describes and must not change until the
        offer is closed. Raises TransferError("mismatch") if it does not fit."""

    @abstractmethod
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
        """Fill `target`'s memory; returns bytes. A target that does not fit is refused before a byte moves.

        `progress` gets the bytes that have arrived so far. When this returns, raises or is cancelled, nothing of the
        attempt can write into `target` any more, so the caller may hash it. It has **not** been hashed."""

    async def delta(
        self, ticket: Ticket, manifest: Manifest, base: str, *, publication: str, attempt: int, stall_s: float = STALL_S
    ) -> bytes | bytearray | None:
        """What tells the version from `base`, the digest that the receiver has proven to hold, in less than all bytes.
        None where there is no such thing: then all are to be received. Nothing of it has been looked at."""
        return None

    def stored(self, weights: str) -> Offer | None:
        """An offer of what the store has under that name, where receivers read it there by themselves and need no
        tensors of a sender's. None: `offer` those."""
        return None


@contextlib.contextmanager
def transfer_errors(about: str) -> Iterator[None]:
    """Turn what operating systems and deadlines raise into the one error of this contract. `about` names the peer."""
    try:
        yield
    except TimeoutError as error:
        raise TransferError("stalled", f"{about}: no progress within the deadline") from error
    except (ConnectionRefusedError, FileNotFoundError) as error:
        raise TransferError("refused", f"{about}: nothing is there ({error.strerror})") from error
    except MemoryError as error:
        raise TransferError("memory", f"{about}: out of memory") from error
    except OSError as error:
        cause = "memory" if error.errno in (errno.ENOMEM, errno.ENOBUFS, errno.ENOSPC) else "closed"
        raise TransferError(cause, f"{about}: {error.strerror or error}") from error


def transports(
    store: ArtifactStore,
    host: str = "127.0.0.1",
    stall_s: float = STALL_S,
    use: Sequence[str] = (),
    torch_device: str = "cpu",
) -> dict[str, Transport]:
    """The transports of this build, by name. `host` is an address of this machine that receivers can reach,
    `stall_s` the sender's own progress deadline. Raises Rejected for one of `use` that cannot work here: at the start
    of a role, and not when engines are paused."""
    # Imported here because each transport inherits from this module.
    from reef_bus.transport.files import FilesTransport
    from reef_bus.transport.shm import ShmTransport
    from reef_bus.transport.tcp import TcpTransport
    from reef_bus.transport.torch_group import TorchTransport
    from reef_bus.transport.ucx import UcxTransport

    afar = (TcpTransport(host, stall_s), TorchTransport(host, stall_s, torch_device), UcxTransport(host, stall_s))
    known = (*afar, ShmTransport(stall_s), FilesTransport(store))
    for transport in known:
        if transport.name in use and (line := transport.lacks()):
            raise Rejected(f"transport {transport.name} cannot work here: {line}; or take it out of the lists")
    return {transport.name: transport for transport in known}
