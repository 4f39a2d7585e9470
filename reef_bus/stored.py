"""How the store keeps a version: in full, or as an anchor and the deltas that lead from it to the version (a chain).

Knows: the artifact store, manifests, deltas. Must not know: the log, transports' peers, or which versions matter.
Whatever is said to be kept was read back from the store and hashed; whatever is read is hashed before anybody gets it.
"""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import xxhash

from reef_bus.artifacts import (
    ArtifactStore,
    copy_weights,
    exhausted,
    load_weights,
    save_weights,
    verify_weights,
)
from reef_bus.backends import Piece, Pieces
from reef_bus.errors import ContractError, DeltaError, TransferError
from reef_bus.events import Blob
from reef_bus.manifest import Manifest, describe, require_fit
from reef_bus.shelf import hash_file
from reef_bus.transport import transfer_errors

_MAGIC = b'{"format":"reef-chain.v1"'
"""What a chain's blob begins with. As the length with which safetensors begin it would be 7e18 bytes: no mistake."""

_logger = logging.getLogger(__name__)


class Link(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One delta, and the manifest digest of the version that it leads to."""

    delta: Blob
    manifest: str


class Chain(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="format", tag="reef-chain.v1"):
    """`anchor` holds in full the version that `manifest` describes; each link leads on from the one before it."""

    anchor: Blob
    manifest: str
    links: tuple[Link, ...] = ()

    @property
    def manifests(self) -> tuple[str, ...]:
        """Digests of all versions on the way, the last of which is the one that the chain is about."""
        return (self.manifest, *(link.manifest for link in self.links))

    @property
    def nbytes(self) -> int:
        """That have to be read for it."""
        return self.anchor.size + sum(link.delta.size for link in self.links)

    @property
    def blobs(self) -> frozenset[str]:
        """All that it stands on."""
        return frozenset((self.anchor.digest, *self.manifests, *(link.delta.digest for link in self.links)))


class Base(NamedTuple):
    """A version that is kept already: under which name, what it is, and its tensors, which nobody writes to."""

    weights: Blob
    manifest: Manifest
    pieces: Pieces


class Saved(NamedTuple):
    """A version that is kept: `weights` names it, in full or as a chain. `delta` tells it from its base, if it pays."""

    weights: Blob
    manifest: Manifest
    delta: Blob | None = None


# -- reading


def chain_at(store: ArtifactStore, weights: str) -> Chain | None:
    """The chain of that name; None where it names anything else, or nothing. Raises TransferError for a damaged one,
    Unavailable where that cannot be told."""
    try:
        if store.head(weights, len(_MAGIC)) != _MAGIC:
            return None
    except ContractError:
        return None  # it is not there, as whoever goes on to read it is told
    return decode_chain(part(store, weights), store.where(weights))


def decode_chain(data: bytes, about: str) -> Chain:
    try:
        return msgspec.json.decode(data, type=Chain)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise TransferError("protocol", f"{about} is no chain that this version reads: {error}") from error


def load(store: ArtifactStore, weights: str, into: Pieces, manifest: Manifest) -> int:
    """As `load_weights`, however the version is kept; returns the bytes that were read."""
    chain = chain_at(store, weights)
    if chain is None:
        return load_weights(store, weights, into, manifest)
    require_fit(manifest, into, writable=True)
    built = _whole(store, chain, manifest)
    for name, piece in into.items():
        piece.data[:] = built[name].data
    return chain.nbytes


def read(store: ArtifactStore, weights: str, manifest: Manifest) -> Pieces:
    """The version in memory of its own, however it is kept. Raises as `load_weights`."""
    chain = chain_at(store, weights)
    if chain is not None:
        return _whole(store, chain, manifest)
    memory = _memory(manifest)
    load_weights(store, weights, memory, manifest)
    return memory


def build(store: ArtifactStore, chain: Chain, manifest: Manifest) -> Generator[int, None, Pieces]:
    """Read the anchor, apply the deltas, hash what comes out: in two copies of memory of its own, one of which is
    returned. Yields bytes per step. Raises TransferError naming the blob, or the tensor, that is missing or damaged."""
    if chain.manifests[-1] != manifest.digest:
        raise TransferError("mismatch", f"the chain leads to {chain.manifests[-1]}, expected {manifest.digest}")
    known = yield from _manifest(store, chain.manifest)
    here = yield from _room(known)
    there = yield from _room(known)
    with transfer_errors(f"anchor {store.where(chain.anchor.digest)}"):
        opened = yield from verify_weights(store, chain.anchor.digest, known)
        with opened.file:
            yield from copy_weights(opened, here)
    for link in chain.links:
        target = yield from _manifest(store, link.manifest)
        yield from _applied(store, link, here, known, there, target)
        here, there, known = there, here, target
    yield from _require_same(here, manifest, f"the chain from anchor {chain.anchor.digest}")
    return here


def _applied(
    store: ArtifactStore, link: Link, base: Pieces, base_manifest: Manifest, into: Pieces, manifest: Manifest
) -> Iterator[int]:
    from reef_bus.delta import apply  # an extra (numpy, zstd), for those who keep chains

    data = yield from arriving(store, link.delta.digest)
    try:
        yield from apply(data, base, base_manifest, into, manifest)
    except DeltaError as error:
        raise TransferError(error.cause, f"{store.where(link.delta.digest)} cannot be applied: {error}") from error


def _whole(store: ArtifactStore, chain: Chain, manifest: Manifest) -> Pieces:
    return exhausted(build(store, chain, manifest))


def _memory(manifest: Manifest) -> Pieces:
    return exhausted(_room(manifest))


def _room(manifest: Manifest) -> Generator[int, None, Pieces]:
    """As `_memory`, in steps of no byte: to clear what a large version takes is slower than a deadline is long."""
    room: dict[str, Piece] = {}
    for entry in manifest.tensors:
        room[entry.name] = Piece(entry.dtype, entry.shape, memoryview(bytearray(entry.nbytes)))
        yield 0
    return room


def _require_same(built: Pieces, manifest: Manifest, about: str) -> Iterator[int]:
    """Hash every tensor of what has the manifest's layout, yielding bytes per tensor."""
    for entry in manifest.tensors:
        found = xxhash.xxh3_128_hexdigest(built[entry.name].data)
        if found != entry.xxh3:
            said = f"tensor {entry.name!r}: bytes differ, found xxh3 {found}, expected {entry.xxh3}"
            raise TransferError("mismatch", f"{about} gives other bytes: {said}")
        yield entry.nbytes


def _manifest(store: ArtifactStore, digest: str) -> Generator[int, None, Manifest]:
    data = yield from arriving(store, digest)
    try:
        return Manifest.decode(data)
    except ContractError as error:
        raise TransferError("mismatch", f"{store.where(digest)}: {error}") from error


def part(store: ArtifactStore, digest: str) -> bytes:
    """As `arriving`, in one step."""
    return exhausted(arriving(store, digest))


def arriving(store: ArtifactStore, digest: str) -> Generator[int, None, bytes]:
    """A blob that a version is kept with, yielding bytes as they come. Raises TransferError naming its place where it
    is missing or damaged, Unavailable where the store gives no answer."""
    try:
        if not store.has(digest):
            raise TransferError("refused", f"no blob at {store.where(digest)}: copy it there from where it was written")
        return (yield from store.arriving(digest))
    except ContractError as error:
        raise TransferError("mismatch", str(error)) from error


@contextlib.contextmanager
def blob_file(store: ArtifactStore, digest: str) -> Iterator[Path]:
    """As `ArtifactStore.local`, its bytes compared with their name. Raises TransferError where they are others,
    TransferError or ContractError where there are none."""
    with store.local(digest) as path:
        with transfer_errors(store.where(digest)):
            found = hash_file(path)
        if found != digest:
            said = f"{store.where(digest)} is damaged: its bytes hash to {found}"
            raise TransferError("mismatch", f"{said}; remove it and copy it there again")
        yield path


@contextlib.contextmanager
def as_file(store: ArtifactStore, weights: str, manifest: str, scratch: Path) -> Iterator[Path]:
    """The version as a safetensors file, however it is kept; one that had to be made lies in `scratch`, and is gone
    afterwards. Raises as `blob_file`."""
    if chain_at(store, weights) is None:
        with blob_file(store, weights) as path:
            yield path
        return
    scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        own = ArtifactStore(Path(folder))
        blob, _ = save_weights(own, read(store, weights, exhausted(_manifest(store, manifest))))
        yield own.path(blob.digest)


# -- writing


def save(store: ArtifactStore, new: Pieces, base: Base | None, anchor_every: int) -> Saved:
    """Keep `new`: in full if there is no smaller delta from `base`, or if it would be the `anchor_every`th in a row;
    else as a chain. Neither may change meanwhile. Raises as `save_weights`."""
    manifest = describe(new)
    chain = longer(store, new, manifest, base)
    delta = chain.links[-1].delta if chain else None
    if chain is None or len(chain.links) >= anchor_every:
        return Saved(*save_weights(store, new), delta)
    return Saved(store.put(msgspec.json.encode(chain)), manifest, delta)


def longer(store: ArtifactStore, new: Pieces, manifest: Manifest, base: Base | None) -> Chain | None:
    """The chain that `base` is kept as, with one more delta, which leads to `new`: durable, and proven by reading the
    whole chain back. None where the delta is no smaller than the full bytes, or where anything about it is in doubt."""
    if base is None:
        return None
    try:
        delta = _delta(store, new, manifest, base)
        if delta is None:
            return None
        before = chain_at(store, base.weights.digest) or Chain(base.weights, base.manifest.digest)
        store.put(manifest.encode())
        chain = Chain(before.anchor, before.manifest, (*before.links, Link(delta, manifest.digest)))
        _whole(store, chain, manifest)
    except (TransferError, MemoryError) as error:
        _logger.warning("there will be no delta to %s, only its full bytes: %r", manifest.digest, error)
        return None
    return chain


def _delta(store: ArtifactStore, new: Pieces, manifest: Manifest, base: Base) -> Blob | None:
    from reef_bus.delta import encode

    parts, size = list[bytes](), 0
    for chunk in encode(base.pieces, base.manifest, new, manifest):
        parts.append(chunk)
        size += len(chunk)
        if size >= manifest.total:
            return None
    return store.put_parts(parts)
