"""What is owed because a colocated job needs the memory of the engines: it is lent, waited for, taken back in order.

Knows: the world, one engine, the deadline of fences. Must not know: how memory is freed, or what a job does with it.
In a publication: once its bytes may come, weights; what else is out once they were proven, for the agent takes it back
before it hashes. When the fence ends without one, everything at once; then the head is owed as it always is.
"""

from __future__ import annotations

from reef_bus.core.effects import Append, Deadlines, Debt, Receive, ReleaseMemory, RestoreMemory
from reef_bus.core.membership import Engine
from reef_bus.core.memory import WEIGHTS, lending, ordered
from reef_bus.core.reactions.common import SECOND
from reef_bus.core.serving import holders, live
from reef_bus.core.world import World, agrees
from reef_bus.events import EngineExcluded


def lend(world: World, found: Engine) -> list[Debt]:
    """Once for each fence: also by a boot that joined meanwhile, or whose memory is out since an earlier one."""
    handover = world.handover
    if handover is None or not lending(handover) or found.lent == handover.seq:
        return []
    effect = ReleaseMemory(handover.job, handover.seq, found.releases)
    key = f"release/{handover.seq}"
    return [Debt(key=key, effect=effect, cause=handover.seq, correlation=handover.job)]


def in_turn(world: World, found: Engine, out: tuple[str, ...], owed: list[Debt]) -> list[Debt]:
    """What an attempt owes, after the memory that it needs. What the open job has been given, it keeps: the attempt
    waits. A job that waits for this boot's word cannot have begun."""
    away, open_, handover = _away(found, out), world.publications.open, world.handover
    if not away or open_ is None:
        return owed
    if owed and isinstance(owed[0].effect, Receive):
        if handover is not None and lending(handover) and found.lent == handover.seq:
            return []
        return [_restore(world, found, (WEIGHTS,), owed[0].cause)] if WEIGHTS in away else owed
    report = world.membership.report(found.boot, open_.id, open_.attempt)
    proven = not owed and report is not None and agrees(report, open_)
    return [_restore(world, found, away, report.seq)] if proven and report else owed


def take_back(world: World, found: Engine, out: tuple[str, ...]) -> list[Debt]:
    """Everything that is out, when no fence covers the boot any more."""
    away, handover = _away(found, out), world.handover
    since = max(found.memory, handover.ended if handover else 0)
    return [_restore(world, found, away, since)] if away else []


def overdue(world: World, deadlines: Deadlines, now: int) -> list[Debt]:
    """Whom a job has waited for long enough, since its fence was raised or the engine's last word."""
    handover = world.handover
    debts = []
    for engine in holders(world):
        since = max(handover.time if handover else 0, world.tails[f"engine.{engine.id}"].time)
        if live(world, engine) and now > since + deadlines.fence_s * SECOND:
            debts.append(_exclude(world, engine, deadlines))
    return debts


def _exclude(world: World, engine: Engine, deadlines: Deadlines) -> Debt:
    reason = f"it did not release its memory within {deadlines.fence_s:g} s"
    event = EngineExcluded(scenario=world.training.scenario, engine=engine.id, boot=engine.boot, reason=reason)
    return Debt(key=f"exclude/{engine.joined}", effect=Append(event), cause=engine.joined, at_head=True)


def _away(found: Engine, out: tuple[str, ...]) -> tuple[str, ...]:
    """What the log says, and what is so: a word on either may have been lost."""
    return ordered({*found.released, *out})


def _restore(world: World, found: Engine, regions: tuple[str, ...], since: int) -> Debt:
    job = world.handover.job if world.handover else ""
    return Debt(key=f"restore/{since}", effect=RestoreMemory(job, regions), cause=since, correlation=job)
