"""The supervisor's side of the state: components, as the log has them come up, go down and be given up.

Knows: the `deployment` family. Must not know: what is owed (`recovery.py`), or any process.
In order: started, published, withdrawn, lost (or clean-up unconfirmed), scheduled (or recovery halted), started.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from reef_bus.events import (
    CleanupUnconfirmed,
    ComponentEvent,
    ComponentLost,
    ComponentStarted,
    ReadinessPublished,
    ReadinessWithdrawn,
    Recorded,
    RecoveryHalted,
    RecoveryResumed,
    RestartScheduled,
)

SECOND = 1_000_000_000

State = Literal["new", "running", "withdrawn", "unconfirmed", "lost", "scheduled", "halted"]
RESUMED: dict[State, State] = {"halted": "lost", "unconfirmed": "withdrawn"}
"""What a person's resumption of recovery makes of a component that was given up; any other stays what it is."""


class Component(msgspec.Struct, kw_only=True):
    """A process that a supervisor runs. `seq` is the last event about it and `by` the supervisor boot that wrote it.

    `ended` (sequence) and `ended_time` are of its last withdrawal or loss: who joined before is not there any more.
    `published` is the boot that can be counted on, `due` the time (ns) of a scheduled start, `lost` the broker times
    (ns) of its failures since its budget last began, `left` what of its last process may still live.
    """

    state: State = "new"
    seq: int = 0
    by: str = ""
    starts: int = 0
    published: str = ""
    ended: int = 0
    ended_time: int = 0
    due: int = 0
    lost: list[int] = []
    left: tuple[int, ...] = ()

    @property
    def running(self) -> bool:
        return self.state == "running"

    @property
    def halted(self) -> bool:
        return self.state == "halted"

    @property
    def given_up(self) -> bool:
        """Nothing happens to it before a person asks."""
        return self.state in RESUMED


def evolve(components: dict[str, Component], recorded: Recorded) -> None:
    """Apply one event of the `deployment` family that is not void."""
    if not isinstance(recorded.event, ComponentEvent):
        return
    component = components.setdefault(recorded.event.component, Component())
    (_up if isinstance(recorded.event, _UP) else _down)(component, recorded)
    component.seq, component.by = recorded.seq, recorded.boot


_UP = (ComponentStarted, ReadinessPublished, RestartScheduled, RecoveryResumed)


def _up(component: Component, recorded: Recorded) -> None:
    match recorded.event:
        case ComponentStarted(starts=starts):
            component.state, component.starts = "running", starts
        case ReadinessPublished(boot=boot):
            component.published = boot
        case RestartScheduled(delay_s=delay_s):
            component.state, component.due = "scheduled", recorded.time + int(delay_s * SECOND)
        case RecoveryResumed():
            component.state, component.left = RESUMED.get(component.state, component.state), ()
            component.lost.clear()


def _down(component: Component, recorded: Recorded) -> None:
    component.published = ""
    match recorded.event:
        case ReadinessWithdrawn():
            component.state, component.ended, component.ended_time = "withdrawn", recorded.seq, recorded.time
        case ComponentLost(exit=status):
            component.state, component.ended, component.ended_time = "lost", recorded.seq, recorded.time
            if status:
                component.lost.append(recorded.time)
        case CleanupUnconfirmed(pids=pids):
            component.state, component.left = "unconfirmed", pids
        case RecoveryHalted():
            component.state = "halted"
            component.lost.clear()
