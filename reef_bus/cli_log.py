"""The commands that show a log: status, log; and how anything is shown, for people or as JSON.

Knows: how events and their read models look on a terminal. Must not know: how a deployment is found or its
streams are read (`inspect.py`).
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import difflib
import json
import os
import sys
import time
from collections.abc import Callable, Coroutine, Iterable
from datetime import UTC, datetime
from typing import Any

from reef_bus import views
from reef_bus.config import Config
from reef_bus.core.ids import parse_adapter_name
from reef_bus.envelope import to_json
from reef_bus.errors import ContractError, Rejected
from reef_bus.events import CATALOGUE, Recorded
from reef_bus.inspect import Judge, causes, effects, events, fetching, head, opened, raw, runs, target
from reef_bus.journal import LOG, RECORDS
from reef_bus.topology import FAMILIES

OK = 0
LAST = 8  # events below a status
TAIL = 20
GREEN, YELLOW, RED = 32, 33, 31
COLOURS = {
    **dict.fromkeys(("ok", "serving", "running"), GREEN),
    **dict.fromkeys(("absent", "warning", "unchecked", "fenced", "released", "catching-up"), YELLOW),
    **dict.fromkeys(("failed", "violation", "contradiction", "void", "excluded", "left"), RED),
    **dict.fromkeys(("halted", "unconfirmed", "down"), RED),
}


# -- what a terminal shows


def paint(word: str) -> str:
    """The word, in the colour of the state that it names, where somebody can see it."""
    code = COLOURS.get(word.partition(":")[0])
    visible = code and sys.stdout.isatty() and "NO_COLOR" not in os.environ
    return f"\x1b[{code}m{word}\x1b[0m" if visible else word


def say(text: str = "") -> None:
    """A line that is there at once, for who follows through a pipe."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def say_json(value: Any, indent: int | None = None) -> None:
    say(json.dumps(value, ensure_ascii=False, indent=indent))


def _when(ns: int) -> str:
    return datetime.fromtimestamp(ns / 1e9, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]


def _age(seconds: float | None) -> str:
    if seconds is None:
        return "the beginning"
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.1f} s"


def line(recorded: Recorded, verdict: str = "") -> str:
    """An event on one line, with the reason when it does not count."""
    text = f"{recorded.seq:>6}  {_when(recorded.time)}  {recorded.writer:<20} {recorded.name:<18} "
    return text + views.sentence(recorded.event) + (f"  [{paint(verdict)}]" if verdict else "")


def _status_lines(state: dict[str, Any]) -> Iterable[str]:
    top, waiting, open_ = state["head"], state["waiting"], state["open_publication"]
    name = f"{state['deployment']} · {state['scenario'] or 'no scenario yet'} · {state['model'] or 'no model yet'}"
    yield f"{name}   ({state['log_events']} events, {state['void_events']} void)"
    if state["runs"] is False:
        yield f"{paint('down')}         nobody runs it here: what follows is what its log said last"
    yield f"head         {top['load_id']}, candidate {top['candidate']}" if top else "head         none yet"
    for scenario, each in state["adapters"].items():
        engines = ", ".join(each["engines"]) or "no engine"
        yield f"adapter      {scenario:<12} {each['load_id']}, candidate {each['candidate']}, answered by {engines}"
    for engine, each in state["engines"].items():
        held = f"holds {each['holds'] or 'nothing proven'}"
        yield f"engine       {engine:<12} {paint(each['state'])}, {held}, boot {each['boot']} at {each['url']}"
        yield from _adapter_lines(each.get("adapters"))
    for component, each in state["components"].items():
        word = each["state"] if each["state"] in COLOURS else "down"
        yield f"component    {component:<12} {paint(word)}, started {each['starts']}×, lost {each['lost']}×"
    if state["open_job"]:
        yield f"job          {state['open_job']['job']}, attempt {state['open_job']['attempt']}"
    if open_:
        members = ", ".join(open_["members"])
        yield f"publication  {open_['load_id']} by {open_['transport']}, attempt {open_['attempt']}, to {members}"
    yield f"waiting      on {waiting['on']}, since {_age(waiting['since_s'])}"
    yield f"  next       {waiting['next']}"
    if waiting["command"]:
        yield f"  run        {waiting['command']}"


def _adapter_lines(held: dict[str, Any] | None) -> Iterable[str]:
    """What one engine has of them, and how many it has room for; `expected` is on its way, `leaked` only takes room."""
    if held is None:
        return
    most = "any number" if held["capacity"] is None else f"{held['capacity']} at most"
    for kind in ("resident", "expected", "leaked"):
        if named := ", ".join(map(_adapter, held[kind])):
            yield f"  {kind:<10} {named}  ({most})"
    for scenario, each in held["failing"].items():
        yield f"  {'failing':<10} {scenario} {each['load_id']}: {each['why']}"


def _adapter(name: str) -> str:
    """Whose it is, and which load of it: the name itself says so to nobody."""
    try:
        return " ".join(parse_adapter_name(name))
    except ContractError:
        return name


async def status(args: argparse.Namespace) -> int:
    """Where the deployment stands, as its log says; with `--watch` again and again."""
    judge, last = Judge(fetching(target(args))), collections.deque[Recorded](maxlen=LAST)

    async def read(until: int | None) -> None:
        async with contextlib.aclosing(events(journal, LOG, judge.world.seq, until)) as found:
            async for recorded in found:
                last.append(recorded)
                judge.judge(recorded)
                if judge.error:
                    raise judge.error

    async with opened(args) as (journal, config):
        end = await head(journal, LOG)
        try:
            await read(end)
        finally:  # what stands before an event that cannot be followed is still worth seeing
            _print_status(args, config, judge, last)
        if args.watch:
            await _watch(read(None), lambda: _print_status(args, config, judge, last))
    return OK


async def _watch(reading: Coroutine[Any, Any, None], show: Callable[[], None]) -> None:
    task = asyncio.ensure_future(reading)
    try:
        while not task.done():
            await asyncio.wait({task}, timeout=1.0)
            show()
        await task
    finally:
        task.cancel()


def _print_status(args: argparse.Namespace, config: Config, judge: Judge, last: Iterable[Recorded]) -> None:
    state: dict[str, Any] = {"deployment": config.deployment, "url": config.nats.url, "runs": runs(config)}
    state |= views.status(judge.world, time.time_ns(), config.policy())
    if args.json:
        say_json(state | {"last": [to_json(recorded) for recorded in last]})
        return
    if args.watch and sys.stdout.isatty():
        sys.stdout.write("\x1b[H\x1b[2J")
    newest = ["last events", *map(line, last)] if last else ["no event yet; `reef-bus demo` or `up` makes some"]
    say("\n".join([*_status_lines(state), *newest, *([""] if args.watch else [])]))


async def log(args: argparse.Namespace) -> int:
    """Events that match, or one with what led to it and what it led to."""
    if args.what:
        if args.what[0] != "show" or len(args.what) != 2 or not args.what[1].isdigit():
            raise Rejected(f"log {' '.join(args.what)}: expected `reef-bus log show SEQ`, or `reef-bus log roll`")
        return await _show_event(args, int(args.what[1]))
    return await _list_events(args, _stream_of(args))


def _stream_of(args: argparse.Namespace) -> str:
    """The stream that the filters mean. Raises Rejected for filters that nothing can match."""
    if args.family and args.family not in FAMILIES:
        raise Rejected(f"no family {args.family!r}: {', '.join(FAMILIES)}")
    if args.type and args.type not in CATALOGUE:
        near = difflib.get_close_matches(args.type, CATALOGUE, 3, 0.4) or sorted(CATALOGUE)
        raise Rejected(f"no event is called {args.type!r}: {', '.join(near)}")
    if args.tail is not None and args.tail < 0:
        raise Rejected(f"--tail {args.tail}: expected 0 (all) or more")
    family = args.family or (CATALOGUE[args.type].family if args.type else "")
    stream = FAMILIES[family].stream if family else RECORDS if args.records else LOG
    if stream not in (LOG, RECORDS) or (args.records and stream != RECORDS):
        raise Rejected(f"family {family} is on {stream}: {'leave out --records' if args.records else 'not read yet'}")
    return stream


def _matches(args: argparse.Namespace, recorded: Recorded) -> bool:
    if recorded.seq < args.start or args.family not in (None, recorded.event.family):
        return False
    if args.type not in (None, recorded.name):
        return False
    event = recorded.event
    named = (recorded.correlation, recorded.id, recorded.boot, *(getattr(event, f) for f in event.__struct_fields__))
    return args.correlation is None or args.correlation in [name for name in named if isinstance(name, str)]


async def _list_events(args: argparse.Namespace, stream: str) -> int:
    tail = args.tail if args.tail is not None else TAIL if args.start == 1 else 0
    judge, kept = Judge(fetching(target(args))), collections.deque[tuple[Recorded, str]](maxlen=tail or None)

    async def read(after: int, until: int | None, take: Callable[[tuple[Recorded, str]], None]) -> None:
        async with contextlib.aclosing(events(journal, stream, after, until)) as found:
            async for recorded in found:
                verdict = judge.judge(recorded) if stream == LOG else ""
                if _matches(args, recorded):
                    take((recorded, verdict))

    async with opened(args) as (journal, _):
        end = await head(journal, stream)
        try:
            await read(0, end, kept.append)
        finally:
            for each in kept:
                _print_event(args, *each)
        if not kept and not args.json:
            some = f"none of the {end} events on {stream} matches; `reef-bus log --tail 0` shows all"
            say(some if end else f"no event on {stream} yet; `reef-bus demo` makes some")
        if args.follow:
            await read(end, None, lambda each: _print_event(args, *each))
    return OK


def _print_event(args: argparse.Namespace, recorded: Recorded, verdict: str) -> None:
    if args.json:
        say_json(to_json(recorded) | ({"void": verdict} if verdict else {}))
    else:
        say(line(recorded, verdict))


async def _show_event(args: argparse.Namespace, seq: int) -> int:
    stream = RECORDS if args.records else LOG
    async with opened(args) as (journal, _):
        try:
            recorded = await journal.read(stream, seq)
        except ContractError as error:
            say_json(await raw(journal, stream, seq), None if args.json else 2)
            raise error
        if recorded is None:
            raise Rejected(f"{stream} has no event {seq}; its last is {await head(journal, stream)}")
        up = await causes(journal, recorded)
        down = [] if args.records else await effects(journal, seq)
    if args.json:
        say_json(to_json(recorded) | {"causes": [*map(to_json, up)], "effects": [*map(to_json, down)]})
        return OK
    say("\n".join(_event_lines(recorded, up, down)))
    return OK


def _event_lines(recorded: Recorded, up: Iterable[Recorded], down: Iterable[Recorded]) -> Iterable[str]:
    envelope = to_json(recorded) | {"time": _when(recorded.time)}
    payload = envelope.pop("data")
    yield from (f"{key:<14} {value}" for key, value in envelope.items())
    yield json.dumps(payload, ensure_ascii=False, indent=2)
    for title, found in (("because of", up), ("led to", down)):
        lines = list(map(line, found))
        yield from [title, *lines] if lines else [f"{title}: nothing on the log"]
