"""The commands by which a person asks for something: each appends a request, and waits for the owner's answer.

Knows: how a request gets onto the log, and what answers it. Must not know: whether it can be had; its owner decides.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import getpass
import os
from collections.abc import Callable, Iterable, Mapping

from reef_bus.cli_log import line, say, say_json
from reef_bus.core.world import World
from reef_bus.envelope import to_json
from reef_bus.errors import Rejected, Unavailable
from reef_bus.events import (
    Draft,
    EngineRetireRequested,
    JobDiscardRequested,
    JobRestoreRequested,
    OperatorEvent,
    PromotionRequested,
    PublicationHaltRequested,
    PublicationRefused,
    Recorded,
    RecoveryResumeRequested,
    RequestRefused,
    RollbackRequested,
)
from reef_bus.inspect import Judge, events, fetching, head, opened
from reef_bus.jetstream import JetStreamJournal
from reef_bus.journal import LOG

OK, NOT_IN_ORDER = 0, 1
ANSWER_S = 10.0

Build = Callable[[World], OperatorEvent]


def actor(args: argparse.Namespace) -> str:
    """Who asks. Raises Rejected where the system does not know its user."""
    try:
        return str(args.actor) or getpass.getuser()
    except (OSError, KeyError) as error:
        raise Rejected("this system does not say who its user is; --actor NAME says it") from error


def decided_on(world: World, scenario: str = "") -> str:
    """The scenario's head that the person could see."""
    head = world.publications.head_of(scenario)
    return head.load_id if head else ""


REQUESTS: Mapping[str, type[OperatorEvent]] = {
    "rollback": RollbackRequested,
    "promote": PromotionRequested,
    "discard": JobDiscardRequested,
    "retrain": JobRestoreRequested,
    "halt": PublicationHaltRequested,
    "retire": EngineRetireRequested,
    "resume": RecoveryResumeRequested,
}


async def request(args: argparse.Namespace) -> int:
    """Ask for what the command line says; exit status 1 for a refusal."""
    who, kind = actor(args), REQUESTS[args.request]

    def build(world: World) -> OperatorEvent:
        named = _named(world, args)
        said = {"actor": who, "why": args.why, "head": decided_on(world, named["scenario"]), **named}
        return kind(**{field: said[field] for field in kind.__struct_fields__})

    return say_answer(args, await ask(args, build))


def _named(world: World, args: argparse.Namespace) -> dict[str, str]:
    """What the command line names, and what the log knows with it. Raises Rejected for what the log never had."""
    said = {"scenario": world.training.scenario, **{word: getattr(args, word) for word in args.words}}
    _known("scenario", said["scenario"], [world.training.scenario, *world.training.adapters])
    if "engine" in said:
        _known("engine", args.engine, world.membership.engines)
        said["boot"] = world.membership.engines[args.engine].boot
    if "component" in said:
        _known("component", args.component, world.components)
    return said


def _known(kind: str, name: str, known: Iterable[str]) -> None:
    if name not in known:
        raise Rejected(f"no {kind} {name!r} on this log, which has: {', '.join(sorted(known)) or 'none'}")


def say_answer(args: argparse.Namespace, answer: Recorded) -> int:
    """Show what answered; exit status 1 for a refusal."""
    say_json(to_json(answer)) if args.json else say(line(answer))
    return NOT_IN_ORDER if isinstance(answer.event, RequestRefused | PublicationRefused) else OK


async def ask(args: argparse.Namespace, build: Build) -> Recorded:
    """Put the request that `build` makes of the state at the head onto the log; returns the event that answers it.

    Raises Rejected for what can be seen to be a mistake, Unavailable when no answer came: the request then stands.
    """
    async with opened(args) as (journal, config):
        judge = Judge(fetching(config))
        return await answer(journal, judge, await put(journal, judge, build))


async def put(journal: JetStreamJournal, judge: Judge, build: Build) -> int:
    """The sequence of the request. `judge` has folded at least up to the state that it was made of."""
    await read(journal, judge, await head(journal, LOG))
    event = build(judge.world)
    draft = Draft(event=event, writer=f"person/{event.key}", boot=f"cli-{os.urandom(6).hex()}")
    return (await journal.append(draft, 0)).seq


async def read(journal: JetStreamJournal, judge: Judge, until: int) -> None:
    """Fold up to `until`. Raises what cannot be followed: nobody asks on half a log."""
    async with contextlib.aclosing(events(journal, LOG, judge.world.seq, until)) as found:
        async for recorded in found:
            judge.judge(recorded)
            if judge.error:
                raise judge.error


async def answer(journal: JetStreamJournal, judge: Judge, request: int) -> Recorded:
    """The event that counts and names the request."""
    try:
        async with (
            asyncio.timeout(ANSWER_S),
            contextlib.aclosing(events(journal, LOG, judge.world.seq)) as found,
        ):
            async for recorded in found:
                if not judge.judge(recorded) and getattr(recorded.event, "request", 0) == request:
                    return recorded
    except TimeoutError:
        pass
    asked = judge.world.requests.get(request)
    if asked and asked.refused:
        raise Unavailable(
            f"request {request} can never be met ({asked.refused}: it was decided on {asked.head or 'no head'}), and "
            "no publisher runs that would say so; look at `reef-bus status`, and ask again"
        )
    raise Unavailable(
        f"request {request} is on the log, and nobody answered within {ANSWER_S:g} s. It stands; `reef-bus status` "
        f"says who runs, `reef-bus log show {request}` what came of it"
    )
