"""What a person asks for gets onto the log, chained and attributed, and the owner's answer comes back.

Knows: an in-memory journal. Must not know: who answers what.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from reef_bus import cli_operator
from reef_bus.cli import main
from reef_bus.config import Config
from reef_bus.errors import ContractError, Rejected, Unavailable
from reef_bus.events import ComponentStarted, Draft, RecoveryHalted, RecoveryResumed, RequestRefused
from reef_bus.events import RecoveryResumeRequested as Asked
from reef_bus.journal import LOG, MemoryJournal, MemoryStreams
from tests import facts
from tests.loop import put

STARTED = ComponentStarted(component="c", pid=1, starts=1)
HALTED = RecoveryHalted(component="c", restarts=3, window_s=300.0)


class Owner(MemoryJournal):
    """A journal in which somebody reacts to a request: `reaction` is appended as soon as it is stored."""

    reaction: type[RecoveryResumed] | type[RequestRefused] | None = RecoveryResumed
    before: Asked | None = None

    async def append(self, draft: Draft, prev: int) -> Any:
        if self.before and isinstance(draft.event, Asked) and draft.boot != "other":
            rival, self.before = self.before, None
            await put(self, rival)
        stored = await super().append(draft, prev)
        if isinstance(draft.event, Asked) and draft.boot != "other" and self.reaction is RecoveryResumed:
            await put(self, RecoveryResumed(component="c", request=stored.seq + 1))  # another's answer
            await put(self, RecoveryResumed(component="c", request=stored.seq))
        elif isinstance(draft.event, Asked) and self.reaction is RequestRefused:
            await put(self, RequestRefused(scenario=facts.S, request=stored.seq, reason="not_there"))
        return stored


@pytest.fixture
async def journal(monkeypatch: pytest.MonkeyPatch) -> Owner:
    found = Owner(MemoryStreams())
    await put(found, facts.opened(), STARTED, HALTED)

    @contextlib.asynccontextmanager
    async def opened(_: object) -> AsyncIterator[tuple[Owner, Config]]:
        yield found, Config()

    monkeypatch.setattr(cli_operator, "opened", opened)
    monkeypatch.setattr(cli_operator, "ANSWER_S", 0.2)
    return found


def words(component: str = "c", **other: object) -> argparse.Namespace:
    return argparse.Namespace(**{"component": component, "why": "mended", "actor": "ada", "json": True} | other)


async def test_a_request_says_who_why_and_on_what_it_was_decided(
    journal: Owner, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await cli_operator.resume(words()) == 0
    request = await journal.read(LOG, 4)
    assert request is not None and request.event == Asked(actor="ada", why="mended", head="", component="c")
    assert (request.writer, request.prev) == ("person/ada", 0)
    answer = json.loads(capsys.readouterr().out)
    assert (answer["type"], answer["data"]["request"]) == ("reef.RecoveryResumed.v1", 4)


async def test_the_head_that_the_person_could_see_is_named(journal: Owner) -> None:
    await put(journal, facts.trainer_joined(), facts.registered(), boot="t1")
    await cli_operator.resume(words())
    request = await journal.read(LOG, 6)
    assert request is not None and request.event.head == "inc:0"  # type: ignore[attr-defined]


async def test_the_second_request_of_a_person_is_chained_to_the_first(journal: Owner) -> None:
    for _ in range(2):
        await cli_operator.resume(words())
    second = await journal.read(LOG, 7)
    assert second is not None and isinstance(second.event, Asked) and second.prev == 4


async def test_a_request_that_was_overtaken_is_put_again(journal: Owner) -> None:
    """Nothing compares: both are stored, and the later one is void by its prev."""
    journal.before = Asked(actor="ada", why="me too", head="", component="c")
    assert await cli_operator.resume(words()) == 0
    stored = [await journal.read(LOG, seq) for seq in (4, 5, 8)]
    assert [(r.event.why, r.prev) for r in stored if r and isinstance(r.event, Asked)] == [
        ("me too", 0),
        ("mended", 0),
        ("mended", 5),
    ]


async def test_a_refusal_is_shown_and_is_exit_status_one(journal: Owner, capsys: pytest.CaptureFixture[str]) -> None:
    journal.reaction = RequestRefused
    assert await cli_operator.resume(words(json=False)) == 1
    assert "RequestRefused" in capsys.readouterr().out


async def test_without_an_answer_the_request_stands_and_that_is_said(journal: Owner) -> None:
    journal.reaction = None
    with pytest.raises(Unavailable, match=r"request 4 is on the log, and nobody answered within 0\.2 s"):
        await cli_operator.resume(words())
    assert await journal.head(LOG) == 4


async def test_a_name_that_is_no_component_is_not_asked_for(journal: Owner) -> None:
    with pytest.raises(Rejected, match="no component 'engine-9' on this log, which has: c"):
        await cli_operator.resume(words("engine-9"))
    assert await journal.head(LOG) == 3


async def test_nobody_asks_on_a_log_that_cannot_be_followed(journal: Owner) -> None:
    await put(journal, facts.opened())
    with pytest.raises(ContractError):
        await cli_operator.resume(words())


def test_who_asks_is_the_systems_user_unless_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("getpass.getuser", lambda: "grace")
    assert cli_operator.actor(words(actor="")) == "grace"
    assert cli_operator.actor(words()) == "ada"

    def nobody() -> str:
        raise OSError("no user")

    monkeypatch.setattr("getpass.getuser", nobody)
    with pytest.raises(Rejected, match="--actor NAME"):
        cli_operator.actor(words(actor=""))


def test_a_reason_must_be_given(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["resume", "publisher"]) == 2
    assert "--why" in capsys.readouterr().err
