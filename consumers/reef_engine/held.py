"""What an engine holds: found by hashing it where it lies, or by the sums of an engine whose memory is apart.

Knows: one backend, manifests. Must not know: the log, transports, or what ought to be held.
"""

from __future__ import annotations

from typing import NamedTuple

from reef_bus.backends import InferenceBackend, Pieces, Places
from reef_bus.errors import TransferError
from reef_bus.manifest import Manifest, describe, differences

XXH3 = "xxh3-128"


class Found(NamedTuple):
    """What was hashed. `digest` is a manifest's, or empty where only a `flaw` is known."""

    digest: str
    tensors: int
    algorithm: str = XXH3
    manifest: Manifest | None = None
    flaw: str = ""

    def differs(self, target: Manifest) -> str:
        """The first tensor in which it is not the target."""
        return self.flaw or (differences(target, self.manifest)[0] if self.manifest else "")


class Staging(NamedTuple):
    """The second copy as it was hashed, and where: true as long as nobody has opened an ingress since."""

    load_id: str
    found: Found
    places: Places


def hashed(pieces: Pieces) -> Found:
    found = describe(pieces)
    return Found(found.digest, len(found.tensors), manifest=found)


def arrived(backend: InferenceBackend, pieces: Pieces, target: Manifest) -> Found:
    """What lies in memory that no forward pass reads yet. An engine that is apart is told what it will have to hold."""
    found = hashed(pieces)
    if backend.apart and found.digest == target.digest:
        backend.expect(found.digest)
    return found


def held(backend: InferenceBackend, manifest: str, load_id: str) -> Found:
    """What the forward pass reads, as it is now. Of one that is apart: whether it is this version, of this name; one
    that refuses to say has proven nothing."""
    if not backend.apart:
        return hashed(backend.live())
    try:
        proof = backend.proof(manifest, load_id)
    except TransferError as error:
        return Found("", 0, flaw=f"the engine does not say what it holds: {error}")
    return Found("" if proof.flaw else manifest, proof.tensors, proof.algorithm, flaw=proof.flaw)
