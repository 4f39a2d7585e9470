"""Which candidates' artifacts somebody may still read, and which nobody ever will.

Knows: the world. Must not know: files, or who removes them.
What is needed once and is needed no more never becomes needed again: the window moves on, and a refused or halted
candidate is not published later. So whoever decides on an older fold removes nothing that a newer one needs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from reef_bus.core.publication import Publications
from reef_bus.core.training import Candidate
from reef_bus.core.world import World


class Retention(NamedTuple):
    """All candidates: those whose artifacts must stay, and the others."""

    needed: tuple[Candidate, ...]
    spare: tuple[Candidate, ...]


def retention(world: World, keep: int) -> Retention:
    """By a rollback window of `keep` releases before the head; 0 keeps everything."""
    known = world.training.candidates
    ids = _needed(world, keep) if keep else known.keys()
    needed = tuple(known[id_] for id_ in known if id_ in ids)
    return Retention(needed, tuple(known[id_] for id_ in known if id_ not in ids))


def within_reach(published: Publications, keep: int, scenario: str = "") -> frozenset[str]:
    """Load ids of the head and the `keep` releases before it, of an adapter's scenario (empty: of the whole model):
    what a rollback may go back to. 0: all."""
    origin = [published.origins[scenario].load_id] if scenario else []
    loads = [*origin, *(id_ for id_, each in published.releases.items() if each.scenario == scenario)]  # as committed
    return frozenset(loads[-keep - 1 :] if keep else loads)


def blobs(candidates: Iterable[Candidate]) -> frozenset[str]:
    """What these candidates alone name: digests of weights, optimizer states and deltas. Manifests stay for ever."""
    named = (blob for each in candidates for blob in (each.weights, each.optimizer, each.delta))
    return frozenset(blob.digest for blob in named if blob)


def _needed(world: World, keep: int) -> frozenset[str]:
    """What the head and the rollback window hold, what is or may be published, what is being trained, and from what."""
    training, published = world.training, world.publications
    reach = ((s, load) for s in ("", *training.adapters) for load in within_reach(published, keep, s))
    kept = (published.release(scenario, load) for scenario, load in reach)
    found = {release.candidate for release in kept if release}
    found |= {*world.queue, training.base, *(adapter.base for adapter in training.adapters.values())}
    if published.open:
        found.add(published.open.candidate)
    if training.job:
        found |= {training.job.base, training.job.candidate}
    return frozenset(found)
