"""Versions of several ranks: a manifest per rank, and one digest over them in their order.

Knows: manifests, the artifact store. Must not know: how a model was split, or who runs which rank.
A rank needs nothing of another one: it is saved, loaded and compared by its own manifest.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from reef_bus.artifacts import ArtifactStore, load_weights, save_weights
from reef_bus.backends import Pieces
from reef_bus.errors import ContractError, Rejected, TransferError
from reef_bus.events import Blob
from reef_bus.manifest import Manifest, TensorEntry, describe, differences

_SHA256 = re.compile(r"[0-9a-f]{64}")


class Rank(msgspec.Struct, frozen=True):
    """One rank: the digest of its manifest, and the sum of its tensors' bytes."""

    manifest: str
    total: int


class Ranks(msgspec.Struct, frozen=True, tag_field="format", tag="reef-ranks.v1"):
    """All ranks of a version, from rank 0 on; `total` is the sum of their bytes."""

    ranks: tuple[Rank, ...]
    total: int

    def encode(self) -> bytes:
        """The one spelling: equal versions encode to equal bytes."""
        return msgspec.json.encode(self)

    @property
    def digest(self) -> str:
        """sha256 of `encode()` in hex. It depends on every byte of every rank, and on their number and order."""
        return hashlib.sha256(self.encode()).hexdigest()

    @classmethod
    def decode(cls, data: bytes) -> Ranks:
        """What `encode` wrote, and nothing else; ContractError for every other spelling."""
        try:
            ranks = msgspec.json.decode(data, type=cls)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise ContractError(f"these {len(data)} bytes are no manifest of ranks: {error}") from error
        flaw = next(_flaws(ranks, data), None)
        if flaw is not None:
            raise ContractError(f"the manifest of ranks contradicts itself: {flaw}")
        return ranks

    def of(self, rank: int) -> Rank:
        """Raises Rejected for a rank that the version does not have."""
        if not 0 <= rank < len(self.ranks):
            raise Rejected(f"there is no rank {rank}: the version has ranks 0 to {len(self.ranks) - 1}")
        return self.ranks[rank]


def ranked(manifests: Sequence[Manifest]) -> Ranks:
    """The version whose rank n has `manifests[n]`: where each rank described its own tensors."""
    if not manifests:
        raise Rejected("no ranks were given: a version consists of at least one")
    ranks = tuple(Rank(manifest.digest, manifest.total) for manifest in manifests)
    return Ranks(ranks, sum(rank.total for rank in ranks))


def describe_ranks(shards: Sequence[Pieces], *, check_finite: bool = False) -> tuple[Ranks, tuple[Manifest, ...]]:
    """As `describe`, for the tensors of every rank; the names may be the same in all of them."""
    manifests = []
    for rank, pieces in enumerate(shards):
        try:
            manifests.append(describe(pieces, check_finite=check_finite))
        except Rejected as error:
            raise Rejected(f"rank {rank}: {error}", error.status) from error
    return ranked(manifests), tuple(manifests)


def rank_differences(expected: Sequence[Manifest], found: Mapping[int, Manifest]) -> list[str]:
    """One sentence per difference, each naming its rank, and its tensor if it is one; empty exactly when both are the
    same version. `found` is by rank: one that is not there has not answered."""
    said = [
        f"rank {rank} is missing: found {len(found)} ranks, expected {len(expected)}"
        for rank in _lacking(expected, found)
    ]
    said += [
        f"rank {rank} is unexpected: the version has {len(expected)} ranks"
        for rank in sorted(found)
        if rank not in range(len(expected))
    ]
    for rank, want in enumerate(expected):
        if rank in found and found[rank] != want:
            said += _of_rank(rank, expected, found)
    return said


# -- in the artifact store


def save_ranks(store: ArtifactStore, shards: Sequence[Pieces]) -> tuple[Ranks, tuple[Blob, ...]]:
    """Keep every rank's weights as a safetensors blob of its own, the manifests of all, and the manifest over them.
    Where ranks are processes, each calls `save_weights`, and one of them `keep_ranks` with the manifests of all."""
    saved = [save_weights(store, pieces) for pieces in shards]
    return keep_ranks(store, [manifest for _, manifest in saved]), tuple(blob for blob, _ in saved)


def keep_ranks(store: ArtifactStore, manifests: Sequence[Manifest]) -> Ranks:
    """Keep the manifest over ranks whose own manifests are in the store. It is the last to be there."""
    ranks = ranked(manifests)
    for number, rank in enumerate(ranks.ranks):
        if not store.has(rank.manifest):
            raise ContractError(
                f"the manifest of rank {number}, {rank.manifest}, is not in the store: save_weights first"
            )
    store.put(ranks.encode())
    return ranks


def rank_manifest(store: ArtifactStore, digest: str, rank: int) -> Manifest:
    """The manifest of one rank of the version `digest`; nothing else of another rank is read than its digest."""
    return Manifest.decode(store.get(Ranks.decode(store.get(digest)).of(rank).manifest))


def load_rank(store: ArtifactStore, digest: str, rank: int, blob_digest: str, into: Pieces) -> int:
    """As `load_weights`, of one rank: only its bytes are read and verified. Errors name the rank."""
    manifest = rank_manifest(store, digest, rank)
    try:
        return load_weights(store, blob_digest, into, manifest)
    except TransferError as error:
        raise _naming(rank, error) from error


def verify_rank(store: ArtifactStore, digest: str, rank: int, pieces: Pieces) -> Manifest:
    """What `pieces` hold, if that is rank `rank` of the version; TransferError("mismatch") naming the tensor if not."""
    manifest, found = rank_manifest(store, digest, rank), describe(pieces)
    said = differences(manifest, found)
    if said:
        raise TransferError("mismatch", f"rank {rank}: {said[0]}")
    return found


def _naming(rank: int, error: TransferError) -> TransferError:
    return TransferError(error.cause, f"rank {rank}: {str(error).removeprefix(f'{error.cause}: ')}")


def _lacking(expected: Sequence[Manifest], found: Mapping[int, Manifest]) -> Iterator[int]:
    return (rank for rank in range(len(expected)) if rank not in found)


def _of_rank(rank: int, expected: Sequence[Manifest], found: Mapping[int, Manifest]) -> list[str]:
    """A rank that holds another one's tensors is told as that, and not by each of them."""
    other = next((o for o, manifest in enumerate(expected) if manifest == found[rank]), None)
    if other is not None:
        swapped = found.get(other) == expected[rank]
        return [f"ranks {rank} and {other} are swapped" if swapped else f"rank {rank} holds what is rank {other}'s"]
    said = [f"rank {rank}: {text}" for text in differences(expected[rank], found[rank])]
    return said + list(_strays(rank, expected, found[rank]))


def _strays(rank: int, expected: Sequence[Manifest], found: Manifest) -> Iterator[str]:
    """Tensors that are not this rank's, and are another one's."""
    wanted = {entry.name: entry for entry in expected[rank].tensors}
    for entry in found.tensors:
        if entry.name not in wanted or wanted[entry.name].xxh3 != entry.xxh3:
            owner = next(_owners(rank, expected, entry), None)
            if owner is not None:
                yield f"rank {rank}: tensor {entry.name!r} holds the bytes of rank {owner[0]}'s {owner[1]!r}"


def _owners(rank: int, expected: Sequence[Manifest], entry: TensorEntry) -> Iterator[tuple[int, str]]:
    for other, manifest in enumerate(expected):
        if other != rank:
            yield from ((other, each.name) for each in manifest.tensors if each.nbytes and each.xxh3 == entry.xxh3)


def _flaws(ranks: Ranks, data: bytes) -> Iterator[str]:
    """Why what parsed is still no manifest of ranks."""
    if not ranks.ranks:
        yield "it names no rank"
    for number, rank in enumerate(ranks.ranks):
        if not _SHA256.fullmatch(rank.manifest) or rank.total < 0:
            yield f"rank {number} names manifest {rank.manifest!r} of {rank.total} bytes"
    if ranks.total != sum(rank.total for rank in ranks.ranks):
        yield f"its total is {ranks.total}, its ranks add up to {sum(rank.total for rank in ranks.ranks)}"
    if ranks.encode() != data:
        yield "it is not in the canonical spelling"
