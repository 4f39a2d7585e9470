"""A model of chains of deltas with anchors, for releases in order: what is kept, read, and needed no more.

Knows: digests, sizes. Must not know: bytes, files, or `reef_bus.stored`, which is held against it.
A blob is named by content: a rollback brings a digest back, and whatever was kept under it serves again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from reef_bus.errors import Rejected

Edge = tuple[str, str]
"""A delta: the digests that it leads from and to."""


class Release(NamedTuple):
    """`delta`: bytes of the delta from the release before it, None where there is none."""

    digest: str
    full: int
    delta: int | None = None


class Kept(NamedTuple):
    """What can be read: the digests that are there in full, and the deltas."""

    fulls: frozenset[str] = frozenset()
    deltas: frozenset[Edge] = frozenset()

    def without(self, gone: Kept) -> Kept:
        return Kept(self.fulls - gone.fulls, self.deltas - gone.deltas)


class Reader(NamedTuple):
    """Who wants release number `target`, and proved to hold `held`."""

    target: int
    held: str | None = None


class Reading(NamedTuple):
    """One version in full, or none if what is held will do; then deltas, in this order."""

    full: str | None
    deltas: tuple[Edge, ...]
    nbytes: int


def anchors(releases: Sequence[Release], every: int) -> frozenset[int]:
    """Which releases are kept in full: the first, then each that has no delta worth reading or would be the `every`th
    delta in a row. So fewer than `every` deltas lead from an anchor to any release."""
    found, row = set[int](), 0
    for number, release in enumerate(releases):
        row += 1
        if number == 0 or row >= every or not _pays(release):
            found.add(number)
            row = 0
    return frozenset(found)


def publishes(releases: Sequence[Release], every: int) -> Kept:
    """What is there when all of them were published and nothing was removed: anchors in full, and every delta that is
    smaller than the full bytes, also one that leads to an anchor, for those who hold the release before it."""
    fulls = frozenset(releases[number].digest for number in anchors(releases, every))
    paying = (number for number in range(1, len(releases)) if _pays(releases[number]))
    return Kept(fulls, frozenset(_edge(releases, number) for number in paying))


def route(releases: Sequence[Release], kept: Kept, every: int, reader: Reader) -> Reading | None:
    """The fewest bytes to the reader's target: at most one version in full, then at most `every` deltas. None where
    what is kept does not lead there."""
    found: list[Reading] = []
    deltas: tuple[Edge, ...] = ()
    nbytes = 0
    for number in range(reader.target, -1, -1):
        release = releases[number]
        if release.digest == reader.held:
            found.append(Reading(None, deltas, nbytes))
        if release.digest in kept.fulls:
            found.append(Reading(release.digest, deltas, nbytes + release.full))
        if number == 0 or len(deltas) == every or release.delta is None or _edge(releases, number) not in kept.deltas:
            break
        deltas, nbytes = (_edge(releases, number), *deltas), nbytes + release.delta
    return min(found, key=lambda option: (option.nbytes, len(option.deltas)), default=None)


def removable(releases: Sequence[Release], kept: Kept, every: int, readers: Iterable[Reader]) -> Kept:
    """All that is kept and that none of these readers needs. Name them all: the late joiner of each release that must
    stay readable (the head, and as far back as a rollback may go), and every engine that is about to read a delta.
    Raises Rejected for a reader that what is kept does not serve: then nothing should be removed."""
    readings = [_served(releases, kept, every, reader) for reader in readers]
    fulls = frozenset(found.full for found in readings if found.full is not None)
    return kept.without(Kept(fulls, frozenset(edge for found in readings for edge in found.deltas)))


def _served(releases: Sequence[Release], kept: Kept, every: int, reader: Reader) -> Reading:
    found = route(releases, kept, every, reader)
    if found is None:
        digest = releases[reader.target].digest
        raise Rejected(
            f"release {digest} cannot be read from what is kept; store it in full before anything is removed"
        )
    return found


def _pays(release: Release) -> bool:
    return release.delta is not None and release.delta < release.full


def _edge(releases: Sequence[Release], number: int) -> Edge:
    return releases[number - 1].digest, releases[number].digest
