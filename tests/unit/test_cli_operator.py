"""What a person asks for gets onto the log, chained and attributed, and the owner's answer comes back.

Knows: an in-memory journal. Must not know: who answers what.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from reef_bus import cli_operator
from reef_bus.artifacts import ArtifactStore
from reef_bus.cli import main
from reef_bus.config import Config
from reef_bus.errors import ContractError, Rejected, Unavailable
from reef_bus.events import (
    ComponentStarted,
    Draft,
    EngineRetireRequested,
    Event,
    JobDiscardRequested,
    JobRestoreRequested,
    OperatorEvent,
    PromotionRequested,
    PublicationHaltRequested,
    RecoveryHalted,
    RecoveryResumed,
    RequestRefused,
    RollbackRequested,
)
from reef_bus.events import RecoveryResumeRequested as Asked
from reef_bus.inspect import Judge
from reef_bus.journal import LOG, MemoryJournal, MemoryStreams
from reef_bus.origin import Fetch, nowhere
from tests import facts
from tests.loop import put

STARTED = ComponentStarted(component="c", pid=1, starts=1)
HALTED = RecoveryHalted(component="c", restarts=3, window_s=300.0)


class Owner(MemoryJournal):
    """A journal in which somebody reacts to a request: `reaction` is appended as soon as it is stored."""

    reaction: type[RecoveryResumed] | type[RequestRefused] | None = RecoveryResumed
    before: Event | None = None

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
    return found


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """For those whom nobody answers."""
    monkeypatch.setattr(cli_operator, "ANSWER_S", 0.2)


def words(component: str = "c", **other: object) -> argparse.Namespace:
    said = {"request": "resume", "words": ["component"], "component": component}
    return argparse.Namespace(**said | {"why": "mended", "actor": "ada", "json": True} | other)


async def test_a_request_says_who_why_and_on_what_it_was_decided(
    journal: Owner, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await cli_operator.request(words()) == 0
    request = await journal.read(LOG, 4)
    assert request is not None and request.event == Asked(actor="ada", why="mended", head="", component="c")
    assert (request.writer, request.prev) == ("person/ada", 0)
    answer = json.loads(capsys.readouterr().out)
    assert (answer["type"], answer["data"]["request"]) == ("reef.RecoveryResumed.v1", 4)


async def test_the_head_that_the_person_could_see_is_named(journal: Owner) -> None:
    await put(journal, facts.trainer_joined(), facts.registered(), boot="t1")
    await cli_operator.request(words())
    request = await journal.read(LOG, 6)
    assert request is not None and request.event.head == "inc:0"  # type: ignore[attr-defined]


async def test_a_log_that_goes_on_is_read_with_its_start(
    journal: Owner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It lies in the deployment's artifact folder: without it nothing can be asked after a log was rolled."""
    config = Config(state_dir=str(tmp_path))
    start = ArtifactStore(config.artifact_root()).put(b"where it goes on from")

    @contextlib.asynccontextmanager
    async def opened(_: object) -> AsyncIterator[tuple[Owner, Config]]:
        yield journal, config

    def judge(fetch: Fetch = nowhere) -> Judge:
        assert fetch(start.digest) == b"where it goes on from"
        return Judge(fetch)

    monkeypatch.setattr(cli_operator, "opened", opened)
    monkeypatch.setattr(cli_operator, "Judge", judge)
    assert await cli_operator.request(words()) == 0


async def test_every_request_of_a_person_counts_whoever_else_asks_at_that_moment(journal: Owner) -> None:
    """Nothing compares them, so none is overtaken: each is on the log once, and gets its own answer."""
    journal.before = Asked(actor="ada", why="me too", head="", component="c")
    assert await cli_operator.request(words()) == 0
    stored = [await journal.read(LOG, seq) for seq in (4, 5)]
    assert [(r.event.why, r.prev) for r in stored if r and isinstance(r.event, Asked)] == [("me too", 0), ("mended", 0)]


@pytest.mark.parametrize(
    ("command", "said", "expected"),
    [
        ("rollback", {"scenario": facts.S, "release": "inc:0"}, RollbackRequested),
        ("promote", {"scenario": facts.S, "candidate": "c1"}, PromotionRequested),
        ("discard", {"scenario": facts.S, "job": "j"}, JobDiscardRequested),
        ("retrain", {"scenario": facts.S, "job": "j"}, JobRestoreRequested),
        ("halt", {"scenario": facts.S, "publication": "pub1"}, PublicationHaltRequested),
    ],
)
@pytest.mark.usefixtures("hasty")
async def test_every_command_asks_for_what_it_says(
    journal: Owner, command: str, said: dict[str, str], expected: type[OperatorEvent]
) -> None:
    await put(journal, facts.trainer_joined(), facts.registered(), boot="t1")
    args = argparse.Namespace(request=command, words=list(said), why="w", actor="ada", json=True, **said)
    with pytest.raises(Unavailable):  # nobody here answers these
        await cli_operator.request(args)
    request = await journal.read(LOG, 6)
    assert request is not None and request.event == expected(actor="ada", why="w", head="inc:0", **said)


@pytest.mark.usefixtures("hasty")
async def test_who_retires_an_engine_means_the_boot_that_is_there(journal: Owner) -> None:
    await put(journal, facts.trainer_joined(), facts.registered(), boot="t1")
    await put(journal, facts.joined("e0"), boot="e0.7")
    args = argparse.Namespace(request="retire", words=["engine"], engine="e0", why="w", actor="ada", json=True)
    with pytest.raises(Unavailable):
        await cli_operator.request(args)
    request = await journal.read(LOG, 7)
    assert request is not None and isinstance(request.event, EngineRetireRequested)
    assert (request.event.engine, request.event.boot, request.event.scenario) == ("e0", "e0.7", facts.S)


async def test_another_scenario_is_the_callers_mistake(journal: Owner) -> None:
    await put(journal, facts.trainer_joined(), facts.registered(), boot="t1")
    said = {"scenario": "other", "release": "inc:0"}
    args = argparse.Namespace(request="rollback", words=list(said), why="w", actor="ada", json=True, **said)
    with pytest.raises(Rejected, match=f"no scenario 'other' on this log, which has: {facts.S}"):
        await cli_operator.request(args)
    assert await journal.head(LOG) == 5


async def test_a_refusal_is_shown_and_is_exit_status_one(journal: Owner, capsys: pytest.CaptureFixture[str]) -> None:
    journal.reaction = RequestRefused
    assert await cli_operator.request(words(json=False)) == 1
    assert "RequestRefused" in capsys.readouterr().out


@pytest.mark.usefixtures("hasty")
async def test_without_an_answer_the_request_stands_and_that_is_said(journal: Owner) -> None:
    journal.reaction = None
    with pytest.raises(Unavailable, match=r"request 4 is on the log, and nobody answered within 0\.2 s"):
        await cli_operator.request(words())
    assert await journal.head(LOG) == 4


@pytest.mark.usefixtures("hasty")
async def test_who_asks_on_a_head_that_moves_meanwhile_hears_to_ask_again_also_where_no_publisher_runs(
    journal: Owner,
) -> None:
    """The refusal is a publisher's to write, and it may be the one that was given up."""
    await put(journal, facts.trainer_joined())
    journal.before, journal.reaction = facts.registered(), None
    with pytest.raises(Unavailable, match=r"request 6 can never be met \(head_moved: it was decided on no head\)"):
        await cli_operator.request(words())


async def test_a_name_that_is_no_component_is_not_asked_for(journal: Owner) -> None:
    with pytest.raises(Rejected, match="no component 'engine-9' on this log, which has: c"):
        await cli_operator.request(words("engine-9"))
    assert await journal.head(LOG) == 3


async def test_nobody_asks_on_a_log_that_cannot_be_followed(journal: Owner) -> None:
    await put(journal, facts.opened())
    with pytest.raises(ContractError):
        await cli_operator.request(words())


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
