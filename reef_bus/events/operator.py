"""The `operator` family: what people ask for. Requests, never facts: the owner answers each with an event of its own.

Knows: what a person may ask. Must not know: whether it can be had.
"""

from __future__ import annotations

from reef_bus.events.shapes import Event


class OperatorEvent(Event, frozen=True, kw_only=True):
    """Who asks, why, and `head`: the load id of the head on which the person decided. A request for another head than
    the one that it meets is refused."""

    family = "operator"
    id_field = "actor"
    own_chain = True
    actor: str
    why: str
    head: str


class RollbackRequested(OperatorEvent, frozen=True, kw_only=True):
    """The content of an earlier `release` (a load id) shall be published again, under a new load id."""

    scenario: str
    release: str


class PromotionRequested(OperatorEvent, frozen=True, kw_only=True):
    """A candidate that is held for review shall be selected."""

    scenario: str
    candidate: str


class JobDiscardRequested(OperatorEvent, frozen=True, kw_only=True):
    """An open job shall end without a candidate, unless a trainer that mutates in place is inside its step."""

    scenario: str
    job: str


class JobRestoreRequested(OperatorEvent, frozen=True, kw_only=True):
    """An ambiguous job shall be trained again, from its stored base."""

    scenario: str
    job: str


class EngineRetireRequested(OperatorEvent, frozen=True, kw_only=True):
    """A boot of an engine shall be taken out."""

    scenario: str
    engine: str
    boot: str


class PublicationHaltRequested(OperatorEvent, frozen=True, kw_only=True):
    """An open publication shall be given up."""

    scenario: str
    publication: str


class RecoveryResumeRequested(OperatorEvent, frozen=True, kw_only=True):
    """A component that the supervisor gave up shall be started again."""

    component: str
