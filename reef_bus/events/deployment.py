"""The `deployment` family: the log's beginning, and the processes of a deployment.

Knows: what the supervisor may say. Must not know: who reacts to it.
"""

from __future__ import annotations

from reef_bus.events.shapes import Blob, Event


class LogOpened(Event, frozen=True, kw_only=True):
    """The first event of a log: mints the incarnation and fixes the rules by which the log is folded."""

    family = "deployment"
    incarnation: str
    rules: int
    start: Blob | None = None
    predecessor: str = ""
    predecessor_seq: int = 0
    predecessor_id: str = ""


class ComponentEvent(Event, frozen=True, kw_only=True):
    """Written by the supervisor, about one component."""

    family = "deployment"
    id_field = "component"
    component: str


class ComponentStarted(ComponentEvent, frozen=True, kw_only=True):
    """The supervisor started an operating-system process for a component."""

    pid: int
    starts: int


class ComponentLost(ComponentEvent, frozen=True, kw_only=True):
    """A component's process ended without having been asked to. `exit` is its status, negative for a signal."""

    exit: int
    detail: str = ""


class RestartScheduled(ComponentEvent, frozen=True, kw_only=True):
    """The component will be started again `delay_s` after this event, as restart number `restart` of the window."""

    restart: int
    delay_s: float


class CleanupUnconfirmed(ComponentEvent, frozen=True, kw_only=True):
    """Something of the component's ended process may still live (`pids`): it is not started again before a person has
    looked and asks for recovery."""

    pids: tuple[int, ...]
    detail: str = ""


class ReadinessPublished(ComponentEvent, frozen=True, kw_only=True):
    """The component's process has announced itself as `boot`, and can be counted on."""

    boot: str


class ReadinessWithdrawn(ComponentEvent, frozen=True, kw_only=True):
    """The component must not be counted on from here on; whatever cleaning up it needs follows this."""

    reason: str


class RecoveryResumed(ComponentEvent, frozen=True, kw_only=True):
    """A person asked (`request`) for a halted component to be started again; its budget begins anew."""

    request: int


class RecoveryHalted(ComponentEvent, frozen=True, kw_only=True):
    """A component ended too often within the window; it stays down until a person asks for recovery, or a
    supervisor is started again."""

    restarts: int
    window_s: float
    detail: str = ""
