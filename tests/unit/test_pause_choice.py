"""Who fixes how engines pause, and who can: the publisher's and the engines' decisions, and the configuration's.

Knows: histories and what is owed after them. Must not know: how an engine stops.
"""

from __future__ import annotations

import msgspec
import pytest

from reef_bus.config import Config, Publication, check
from reef_bus.core import reactions
from reef_bus.core.effects import Append, Fence, Policy, VerifyHead
from reef_bus.errors import Rejected
from reef_bus.events import Event, Member, PublicationRefused, TargetPersisted, TransferAborted
from tests.facts import (
    E0,
    E1,
    SERVING,
    committed,
    failed,
    fenced,
    holds,
    joined,
    m,
    offered,
    opened,
    registered,
    staged,
    target,
    trained,
    trainer_joined,
    verified,
)
from tests.spec import Step, engine_debts, given, only


def paused(pause: str, mode: str = "fenced") -> Step:
    return msgspec.structs.replace(target(1, "c1", E0, E1), mode=mode, pause=pause)


@pytest.mark.parametrize("pause", ["drain", "retract", "in_place"])
def test_engines_take_the_pause_from_the_target_whether_it_raises_a_fence_or_is_swapped_in(pause: str) -> None:
    owed = only(engine_debts(given(*SERVING, *trained("c1"), paused(pause)).world, "e0", ""))
    assert isinstance(owed, Fence) and owed.pause == pause
    beside = (*SERVING, *trained("c1"), paused(pause, "staged"), offered(1, "c1"), staged("e0", 1, "c1"))
    history = (*beside, staged("e1", 1, "c1"), committed(1, "c1", E0, E1))
    owed = only(engine_debts(given(*history).world, "e0", ""))
    assert isinstance(owed, VerifyHead) and owed.pause == pause


ABLE = msgspec.structs.replace(joined("e0"), pauses=("drain", "retract", "in_place"))


def publishes(pause: str, *history: Step) -> Event:
    (debt,) = reactions.publisher(given(*history).world, Policy(pause=pause), 0)
    assert isinstance(debt.effect, Append)
    return debt.effect.event


@pytest.mark.parametrize("pause", ["retract", "in_place"])
def test_a_pause_that_an_engine_cannot_make_is_refused_before_anybody_is_paused(pause: str) -> None:
    """Like a mode: the refusal names who can and who cannot, and what to set."""
    members = (trainer_joined(), registered(), ABLE, joined("e1"), holds("e0", 0, "base"), holds("e1", 0, "base"))
    event = publishes(pause, opened(), *members, *trained("c1"))
    assert isinstance(event, PublicationRefused) and event.reason == "pause"
    assert event.detail == f"pause {pause}: ['e0'] can, refused by ['e1']; set publication.pause to drain"
    assert isinstance(publishes("drain", opened(), *members, *trained("c1")), TargetPersisted)


def test_where_every_engine_can_the_target_fixes_the_pause() -> None:
    members = (trainer_joined(), registered(), ABLE, holds("e0", 0, "base"), *trained("c1"))
    event = publishes("in_place", opened(), *members)
    assert isinstance(event, TargetPersisted) and event.pause == "in_place"


@pytest.mark.parametrize(("pause", "members"), [("drain", (E0, m("e2"))), ("retract", (E0,))])
def test_the_next_attempt_leaves_out_whoever_cannot_make_the_pause(pause: str, members: tuple[Member, ...]) -> None:
    twin = msgspec.structs.replace(ABLE, engine="e1")
    history = (opened(), trainer_joined(), registered(), ABLE, twin, holds("e0", 0, "base"), holds("e1", 0, "base"))
    broken = (fenced("e0", 1), fenced("e1", 1), offered(1, "c1"), verified("e0", 1, "c1"), failed("e1", 1))
    event = publishes(pause, *history, *trained("c1"), paused(pause), joined("e2"), *broken)
    assert isinstance(event, TransferAborted) and event.members == members


@pytest.mark.parametrize("pause", ["drain", "retract", "in_place"])
@pytest.mark.parametrize("mode", ["fenced", "staged"])
def test_every_pause_goes_with_every_mode(mode: str, pause: str) -> None:
    assert check(Config(publication=Publication(mode=mode, pause=pause))).policy().pause == pause


def test_an_unknown_pause_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(Rejected, match="'abort'; expected one of drain, retract, in_place"):
        check(Config(publication=Publication(pause="abort")))
