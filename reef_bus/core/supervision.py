"""What the supervisor of a machine's processes owes: ends as facts, restarts within a budget that the log counts.

Knows: the `deployment` family and which processes this supervisor holds. Must not know: what any component does.
"""

from __future__ import annotations

from collections.abc import Mapping

from reef_bus.core.effects import Append, Debt, Me, Restarts, StartComponent
from reef_bus.core.world import Component, World
from reef_bus.events import ComponentLost, RecoveryHalted

SECOND = 1_000_000_000
MAX_DOUBLINGS = 2  # of a restart's delay: 1, 2, 4 s, and 4 s from there on where more restarts are allowed


def supervisor(
    world: World, me: Me, names: tuple[str, ...], exits: Mapping[str, int | None], restarts: Restarts, now: int
) -> list[Debt]:
    """What the supervisor of `names` owes.

    `exits` holds the processes of this supervisor: None while one runs, its exit status afterwards; a component that
    the log shows running and that is not in it ended with its supervisor. What this supervisor gave up stays down; what
    an earlier one gave up is tried again, because a person has started this one.
    """
    if not world.incarnation:
        return []
    return [debt for name in names for debt in _component(world, me, name, exits, restarts, now)]


def _component(
    world: World, me: Me, name: str, exits: Mapping[str, int | None], restarts: Restarts, now: int
) -> list[Debt]:
    component = world.components.get(name, Component())
    exit_ = exits.get(name, 0)
    if component.running and exit_ is not None:
        detail = "" if name in exits else "its supervisor ended"
        lost = ComponentLost(component=name, exit=exit_, detail=detail)
        return [Debt(key=f"lost/{name}/{component.starts}", effect=Append(lost))]
    if component.running or component.halted == me.boot:
        return []
    recent = [at for at in component.lost if at > now - restarts.window_s * SECOND]
    if len(recent) > restarts.max_restarts:
        halted = RecoveryHalted(component=name, restarts=len(recent) - 1, window_s=restarts.window_s)
        return [Debt(key=f"halt/{name}/{component.starts}", effect=Append(halted))]
    delay = restarts.delay_s * 2 ** min(len(recent) - 1, MAX_DOUBLINGS)
    if recent and now < recent[-1] + delay * SECOND:
        return []
    start = StartComponent(name, component.starts + 1)
    return [Debt(key=f"start/{name}/{component.starts + 1}", effect=start)]
