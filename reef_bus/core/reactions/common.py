"""What several roles ask of the world: whether to join, and where an attempt's bytes come from.

Knows: the world. Must not know: what any role does with the answer.
"""

from __future__ import annotations

from reef_bus.core.effects import (
    Debt,
    Join,
    Me,
    Retire,
)
from reef_bus.core.publication import Publication
from reef_bus.core.training import Sender
from reef_bus.core.world import World

SECOND = 1_000_000_000


def join_or_retire(world: World, me: Me, family: str, successor: str) -> Debt:
    tail = world.tails.get(family)
    if tail and me.boot in tail.boots:
        return Debt(key="retire", effect=Retire(f"boot {me.boot} of {me.id} was replaced by {successor}"))
    return Debt(key="join", effect=Join(), cause=1)


def word(world: World, open_: Publication) -> Sender | None:
    """What the living trainer boot says about this attempt: a failure, or a ticket that echoes the target.

    A replaced boot's ticket leads nowhere, and its failure is not its successor's. A rollback needs no sender: its
    members read the artifact.
    """
    if open_.sender == "artifact":
        return _artifact(open_)
    sender = world.training.sender
    if sender is None or sender.boot != world.training.boot:
        return None
    if (sender.publication, sender.attempt) != (open_.id, open_.attempt):
        return None
    echoes = (sender.load_id, sender.manifest) == (open_.load_id, open_.manifest)
    return sender if sender.failure or echoes else None


def _artifact(open_: Publication) -> Sender:
    return Sender(
        boot="",
        publication=open_.id,
        attempt=open_.attempt,
        seq=open_.attempt_seq,
        time=open_.attempt_time,
        load_id=open_.load_id,
        manifest=open_.manifest,
        transport=open_.transport,
        address=open_.weights.digest,
    )


def all_fenced(world: World, open_: Publication) -> bool:
    return all(world.membership.fence(m.boot, open_.id, open_.attempt) for m in open_.members)
