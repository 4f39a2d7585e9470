"""What the agent of an engine owes.

Knows: the world, and who is asking. Must not know: the trainer's jobs, or whether a release should happen.
"""

from __future__ import annotations

from reef_bus.core.effects import (
    Deadlines,
    Debt,
    Fence,
    Me,
    Receive,
    Retire,
    Stage,
    VerifyHead,
)
from reef_bus.core.membership import Engine
from reef_bus.core.publication import STAGED, Publication
from reef_bus.core.reactions.adapters import adapters
from reef_bus.core.reactions.common import all_fenced, join_or_retire, word
from reef_bus.core.reactions.memory import in_turn, lend, take_back
from reef_bus.core.serving import fenced, live, owes_head, targeted
from reef_bus.core.world import World
from reef_bus.events import Member


def engine(
    world: World,
    me: Me,
    deadlines: Deadlines,
    *,
    written: bool = False,
    lost: frozenset[str] = frozenset(),
    mended: frozenset[int] = frozenset(),
    out: tuple[str, ...] = (),
) -> list[Debt]:
    """What the agent of one engine owes. What no log can know: `written`, its memory is not what it last proved;
    `lost`, the adapters that the engine lists no more; `mended`, its words on artifacts that can be read by now; and
    which regions of its memory are `out`, really."""
    if not world.incarnation:
        return []
    found = world.membership.engines.get(me.id)
    if found is None or found.boot != me.boot:
        return [join_or_retire(world, me, f"engine.{me.id}", found.boot if found else "")]
    if not live(world, found):
        return [Debt(key="retire", effect=Retire(f"boot {me.boot} of {me.id} was excluded"))]
    open_ = world.publications.open
    if open_ is not None and targeted(world, me.id, me.boot):
        return in_turn(world, found, out, _attempt(world, me, open_, deadlines))
    if fenced(world, me.id, me.boot):
        return lend(world, found)
    if away := take_back(world, found, out):
        return away
    if head := _head(world, found, written):
        return head
    return adapters(world, found, deadlines, lost, mended) or _staging(world, me, open_, deadlines)


def _attempt(world: World, me: Me, open_: Publication, deadlines: Deadlines) -> list[Debt]:
    if world.membership.fence(me.boot, open_.id, open_.attempt) is None:
        fence = Fence(open_.id, open_.attempt, open_.pause)
        return [Debt(key=f"fence/{open_.attempt_seq}", effect=fence, cause=open_.attempt_seq, correlation=open_.id)]
    return _ingress(world, me, open_, deadlines, Receive) if all_fenced(world, open_) else []


def _staging(world: World, me: Me, open_: Publication | None, deadlines: Deadlines) -> list[Debt]:
    """Only beside a proven head: what was staged for it was swapped in, or dropped for the artifact, before."""
    if open_ is None or open_.mode != STAGED or open_.lora or Member(me.id, me.boot) not in open_.members:
        return []
    return _ingress(world, me, open_, deadlines, Stage)


def _ingress(
    world: World, me: Me, open_: Publication, deadlines: Deadlines, kind: type[Receive] | type[Stage]
) -> list[Debt]:
    sender = word(world, open_)
    if world.membership.report(me.boot, open_.id, open_.attempt) or sender is None or sender.failure:
        return []
    ingress = kind(
        open_.id,
        open_.attempt,
        open_.load_id,
        open_.manifest,
        sender.transport,
        sender.address,
        sender.token,
        deadlines.stall_s,
    )
    return [Debt(key=f"receive/{sender.seq}", effect=ingress, cause=sender.seq, correlation=open_.id)]


def _head(world: World, found: Engine, written: bool) -> list[Debt]:
    since, head = owes_head(world, found) or (found.reported if written else 0), world.publications.head
    if not since or head is None:
        return []
    verify = VerifyHead(head.load_id, head.manifest, head.weights, head.pause)
    return [Debt(key=f"head/{since}", effect=verify, cause=since)]
