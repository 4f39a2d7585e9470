"""What a supervisor owes: every end, every recovery as facts in one order, within a budget that the log counts.

Knows: the world, and what this supervisor sees of its components. Must not know: processes, or what a component does.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from reef_bus.core.effects import Append, CleanUp, Debt, Effect, Me, Restarts, StartComponent
from reef_bus.core.requests import wanted
from reef_bus.core.supervision import SECOND, Component
from reef_bus.core.world import World, refusal
from reef_bus.events import (
    ReadinessPublished,
    ReadinessWithdrawn,
    RecoveryHalted,
    RecoveryResumed,
    RecoveryResumeRequested,
    RestartScheduled,
)

MAX_DOUBLINGS = 2  # of a restart's delay: 1, 2, 4 s, and 4 s from there on where more restarts are allowed


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """What a supervisor sees of one component, beside the log. `exit` is None while a process runs, `owned` says that
    this supervisor started it; `boot` and `halted` are what that process's last heartbeat said."""

    role: str
    exit: int | None = 0
    owned: bool = False
    boot: str = ""
    halted: bool = False


def supervisor(world: World, me: Me, seen: Mapping[str, Seen], restarts: Restarts, now: int) -> list[Debt]:
    """What the supervisor of the components in `seen` owes; `now` in ns since the epoch.

    What this supervisor gave up stays down; what an earlier one halted is tried again, because a person has started
    this one. Where a clean-up is unconfirmed, only a person's request goes on.
    """
    if not world.incarnation:
        return []
    found = (_component(world, me, name, each, restarts, now) for name, each in seen.items())
    return [*_answers(world, seen), *(debt for debt in found if debt)]


def _answers(world: World, seen: Mapping[str, Seen]) -> list[Debt]:
    asked = [r for name in seen if (r := wanted(world.requests, RecoveryResumeRequested, name))]
    resumed = [RecoveryResumed(component=r.about, request=r.seq) for r in asked if not refusal(world, r)]
    return [Debt(key=f"resume/{e.request}", effect=Append(e), cause=e.request) for e in resumed]


def _component(world: World, me: Me, name: str, seen: Seen, restarts: Restarts, now: int) -> Debt | None:
    component = world.components.get(name, Component())
    foreign = seen.exit is None and not seen.owned
    match component.state:
        case "running":
            return _running(world, name, component, seen, restarts, now)
        case "withdrawn":
            return _debt("clean-up", name, component, CleanUp(name))
        case "lost":
            return _lost(name, component, restarts, now)
        case "halted" if component.by != me.boot:
            return _schedule(name, component, [], restarts)
        case "new" | "scheduled" if now >= component.due and not foreign:
            return _debt("start", name, component, StartComponent(name, component.starts + 1))
    return None


def _debt(what: str, name: str, component: Component, effect: Effect, *, at_head: bool = False) -> Debt:
    return Debt(key=f"{what}/{name}/{component.seq}", effect=effect, cause=component.seq, at_head=at_head)


# -- up


def _running(world: World, name: str, component: Component, seen: Seen, restarts: Restarts, now: int) -> Debt | None:
    if seen.exit is not None:
        return _withdraw(name, component, _why_ended(seen))
    out = _out_since(world, name, component, seen)
    if out and now > out + restarts.grace_s * SECOND:
        reason = f"its boot is out, and its process went on for {restarts.grace_s:g} s"
        return _withdraw(name, component, reason, at_head=True)
    if _announced(world, name, seen) and component.published != seen.boot:
        published = ReadinessPublished(component=name, boot=seen.boot)
        return _debt("publish", name, component, Append(published))
    return None


def _withdraw(name: str, component: Component, reason: str, *, at_head: bool = False) -> Debt:
    withdrawn = ReadinessWithdrawn(component=name, reason=reason)
    return _debt("withdraw", name, component, Append(withdrawn), at_head=at_head)


def _why_ended(seen: Seen) -> str:
    if not seen.owned or seen.exit is None:
        return "its supervisor ended"
    return f"its process ended with {f'signal {-seen.exit}' if seen.exit < 0 else f'status {seen.exit}'}"


def _out_since(world: World, name: str, component: Component, seen: Seen) -> int:
    """Since when (ns) an engine's boot is excluded or has left, while its process goes on; 0 if that is not so.

    Of a process that was started elsewhere no heartbeat is looked at: there the boot is the one that joined since. What
    halted at a contradiction stays up, and says so, by design.
    """
    engine = world.membership.engines.get(name)
    if engine is None or seen.halted:
        return 0
    its = engine.boot == seen.boot if seen.owned else engine.joined > component.ended
    return engine.out if its else 0


def _announced(world: World, name: str, seen: Seen) -> bool:
    """The process has said who it is: by its join, where its role joins, else by its heartbeat."""
    match seen.role:
        case "engine":
            engine = world.membership.engines.get(name)
            return engine is not None and engine.boot == seen.boot
        case "trainer":
            return seen.boot != "" and world.training.boot == seen.boot
    return seen.boot != ""


# -- again


def _lost(name: str, component: Component, restarts: Restarts, now: int) -> Debt:
    recent = [at for at in component.lost if at > now - restarts.window_s * SECOND]
    if len(recent) <= restarts.max_restarts:
        return _schedule(name, component, recent, restarts)
    halted = RecoveryHalted(component=name, restarts=len(recent) - 1, window_s=restarts.window_s)
    return _debt("halt", name, component, Append(halted))


def _schedule(name: str, component: Component, recent: list[int], restarts: Restarts) -> Debt:
    """Its last end costs a delay if it was a failure."""
    failed = bool(recent) and recent[-1] == component.ended_time
    delay_s = restarts.delay_s * 2 ** min(len(recent) - 1, MAX_DOUBLINGS) if failed else 0.0
    scheduled = RestartScheduled(component=name, restart=len(recent), delay_s=delay_s)
    return _debt("schedule", name, component, Append(scheduled))
