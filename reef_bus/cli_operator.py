"""The commands by which a person asks for something: each appends a request, and waits for the owner's answer.

Knows: how a request gets onto the log, and what answers it. Must not know: whether it can be had; its owner decides.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import getpass
import os
from collections.abc import Callable

from reef_bus.cli_log import line, say, say_json
from reef_bus.core.world import World
from reef_bus.envelope import to_json
from reef_bus.errors import Rejected, Unavailable
from reef_bus.events import Draft, OperatorEvent, Recorded, RecoveryResumeRequested, RequestRefused
from reef_bus.inspect import Judge, events, head, opened
from reef_bus.jetstream import JetStreamJournal
from reef_bus.journal import LOG

OK, NOT_IN_ORDER = 0, 1
ANSWER_S = 10.0
TRIES = 5  # somebody else may ask under the same name at the same moment

Build = Callable[[World], OperatorEvent]


def actor(args: argparse.Namespace) -> str:
    """Who asks. Raises Rejected where the system does not know its user."""
    try:
        return str(args.actor) or getpass.getuser()
    except (OSError, KeyError) as error:
        raise Rejected("this system does not say who its user is; --actor NAME says it") from error


def decided_on(world: World) -> str:
    """The head that the person could see."""
    return world.publications.head.load_id if world.publications.head else ""


async def resume(args: argparse.Namespace) -> int:
    """Have a component started again that the supervisor gave up."""
    who = actor(args)

    def build(world: World) -> OperatorEvent:
        if args.component not in world.components:
            known = ", ".join(sorted(world.components)) or "none"
            raise Rejected(f"no component {args.component!r} on this log, which has: {known}")
        return RecoveryResumeRequested(actor=who, why=args.why, head=decided_on(world), component=args.component)

    return say_answer(args, await ask(args, build))


def say_answer(args: argparse.Namespace, answer: Recorded) -> int:
    """Show what answered; exit status 1 for a refusal."""
    say_json(to_json(answer)) if args.json else say(line(answer))
    return NOT_IN_ORDER if isinstance(answer.event, RequestRefused) else OK


async def ask(args: argparse.Namespace, build: Build) -> Recorded:
    """Put the request that `build` makes of the state at the head onto the log; returns the event that answers it.

    Raises Rejected for what can be seen to be a mistake, Unavailable when no answer came: the request then stands.
    """
    async with opened(args) as (journal, _):
        judge = Judge()
        return await answer(journal, judge, await put(journal, judge, build))


async def put(journal: JetStreamJournal, judge: Judge, build: Build) -> int:
    """The sequence of the request, which counts. `judge` has then folded up to it."""
    for _ in range(TRIES):
        await _read(journal, judge, await head(journal, LOG))
        event, boot = build(judge.world), f"cli-{os.urandom(6).hex()}"
        draft = Draft(event=event, writer=f"person/{event.key}", boot=boot)
        stored = await journal.append(draft, judge.world.tail(event.chain))
        if not await _read(journal, judge, stored.seq):
            return stored.seq
    raise Unavailable(f"{TRIES} requests of {event.key} were overtaken by others of the same name; ask again")


async def _read(journal: JetStreamJournal, judge: Judge, until: int) -> str:
    """Fold up to `until`; returns the last verdict. Raises what cannot be followed: nobody asks on half a log."""
    verdict = ""
    async with contextlib.aclosing(events(journal, LOG, judge.world.seq, until)) as found:
        async for recorded in found:
            verdict = judge.judge(recorded)
            if judge.error:
                raise judge.error
    return verdict


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
    raise Unavailable(
        f"request {request} is on the log, and nobody answered within {ANSWER_S:g} s. It stands; `reef-bus status` "
        f"says who runs, `reef-bus log show {request}` what came of it"
    )
