"""The command line: `reef-bus …`.

Knows: arguments, what a terminal shows, exit statuses. Must not know: how anything that it shows came about.
`--help` must answer at once, so a command imports what it needs when it runs. Exit status: 0; 1 when what was looked at
is not in order; 2 for a mistake of the caller; 3 when the other side gave no answer; 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from reef_bus import __version__
from reef_bus.errors import ReefError, Rejected, Unavailable

OK, NOT_IN_ORDER, MISTAKE, NO_ANSWER, INTERRUPTED = 0, 1, 2, 3, 130
COMMANDS = "reef_bus.commands"
REQUESTS = {
    "rollback": ("publish an earlier release again, under a new load id", "scenario", "release"),
    "promote": ("select a candidate that is held for review", "scenario", "candidate"),
    "discard": ("end a job without a candidate", "scenario", "job"),
    "retrain": ("train an ambiguous job again, from its stored base", "scenario", "job"),
    "halt": ("give an open publication up", "scenario", "publication"),
    "retire": ("take the present boot of an engine out", "engine"),
    "resume": ("have a component started again that the supervisor gave up", "component"),
}
"""What a person may ask for: what it means, and what it names."""
EXTRAS = {"aiohttp": "serve", "prometheus_client": "serve", "yaml": "serve", "xxhash": "weights"}
EXTRAS |= {"safetensors": "weights", "torch": "torch", "numpy": "torch", "rich": "demo", "psutil": "demo"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    _lenient()
    try:
        status = _run(words)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # whoever read has read enough; the interpreter flushes once more when it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except KeyboardInterrupt:
        return INTERRUPTED
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else OK if end.code is None else MISTAKE
    except ModuleNotFoundError as error:
        return _complain(_missing(words[0], error), MISTAKE)
    except ReefError as error:
        return _complain(str(error), NO_ANSWER if isinstance(error, Unavailable) else MISTAKE)
    except OSError as error:
        return _complain(f"{error.filename}: {error.strerror}" if error.filename else str(error), MISTAKE)


def _lenient() -> None:
    """A terminal that lacks a character shows a replacement, not a stack trace."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _complain(text: str, status: int) -> int:
    print(f"reef-bus: {' '.join(text.split())}", file=sys.stderr)
    return status


def _missing(command: str, error: ModuleNotFoundError) -> str:
    """The line that installs what a command misses; a module that is in no extra is a defect of ours."""
    module = (error.name or "").partition(".")[0]
    if module not in EXTRAS:
        raise error
    extra = "demo" if command in ("demo", "up") else EXTRAS[module]
    return f"`{command}` uses {module}, which needs an extra: pip install 'reef-bus[{extra}]'"


def _run(words: list[str]) -> int:
    if words and words[0] in ("demo", "up"):  # their own parsers take the rest, `--help` too
        return _installed(words[0])(words[1:])
    args = _parser().parse_args(words)
    command: Callable[[argparse.Namespace], int] = args.command
    return command(args)


def _installed(name: str) -> Callable[[list[str]], int]:
    from importlib import metadata

    found = list(metadata.entry_points(group=COMMANDS, name=name))
    if not found:
        raise Rejected(f"`{name}` is not installed here: expected entry point {name!r} in {COMMANDS}; pip install .")
    command: Callable[[list[str]], int] = found[0].load()
    return command


# -- arguments


class Parser(argparse.ArgumentParser):
    """argparse, with a mistake as one line."""

    def error(self, message: str) -> Any:
        raise Rejected(f"{message}; `{self.prog} --help` lists what there is")


def _parser() -> Parser:
    parser = Parser(prog="reef-bus", description="Decides, on an event log, when a trainer's weights may serve.")
    parser.add_argument("--version", action="version", version=f"reef-bus {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=Parser)
    commands.add_parser("demo", help="a policy that learns while it serves, on this machine")
    commands.add_parser("up", help="a deployment from a file, until Ctrl-C")
    _run_parser(commands.add_parser("run", help="one role in the foreground"))
    target, machine = _target_options(), _json_option()

    def add(name: str, text: str, command: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
        found = commands.add_parser(name, help=text, description=f"{text}.", parents=[target, machine])
        found.set_defaults(command=command)
        return found

    status = add("status", "which version is where, and on whom the deployment waits", _status)
    status.add_argument("--watch", action="store_true", help="until Ctrl-C")
    _log_options(add("log", "events: the last ones, all that match, or one with its causes", _log))
    audit = add("audit", "check the invariants over a live log or an exported one; exit 1 on a violation", _audit)
    audit.add_argument("file", nargs="?", metavar="FILE", help="what `export` wrote (default: the live log)")
    export = add("export", "the history as JSON lines, for `audit` elsewhere or for a test", _export)
    export.add_argument("-o", "--output", metavar="FILE", help="default: standard output")
    weights = add("weights", "a committed release as files: a checkpoint, or a LoRA adapter as PEFT's folder", _weights)
    weights.add_argument("scenario", metavar="SCENARIO", help="as `status` shows it")
    weights.add_argument("--release", metavar="LOAD_ID", help="default: the scenario's head")
    weights.add_argument("--into", metavar="DIR", required=True, help="a new folder")
    backup = add("backup", "the history and every blob that it names, into a folder; again: what is new", _backup)
    backup.add_argument("dir", metavar="DIR", help="the backup: a new folder, or one of an earlier backup")
    restore = add("restore", "an empty deployment goes on from a backup; name it with --state or -c", _restore)
    restore.add_argument("dir", metavar="DIR", help="what `backup` wrote")
    streams = add("streams", "compare the streams with what they must be, or create them", _streams)
    streams.add_argument(
        "what", choices=("plan", "apply"), help="apply creates what is missing, opens an empty log, changes nothing"
    )
    for name, (text, *words) in REQUESTS.items():
        request = add(name, text, _request)
        for word in words:
            request.add_argument(word, metavar=word.upper(), help="as `status` and `log` show it")
        request.set_defaults(request=name, words=words)
        _operator_options(request)
    add("doctor", "what this machine has and lacks, and what is wrong with a deployment on it", _doctor)
    return parser


def _json_option() -> Parser:
    parent = Parser(add_help=False)
    parent.add_argument("--json", action="store_true", help="for programs")
    return parent


def _target_options() -> Parser:
    parent = Parser(add_help=False)
    group = parent.add_argument_group("which deployment")
    one = group.add_mutually_exclusive_group()
    one.add_argument("--state", metavar="DIR", help="a folder of `up` or `demo --keep` (default: ./reef-state)")
    one.add_argument("-c", "--config", metavar="FILE", help="its configuration")
    one.add_argument("--url", metavar="URL", help="its NATS server")
    group.add_argument("--deployment", metavar="NAME", default="reef", help="its name there, with --url")
    group.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], help="override the configuration")
    return parent


def _run_parser(run: argparse.ArgumentParser) -> None:
    run.description = (
        "One role in the foreground: logs to stderr, ends on SIGTERM. Exit 3: this boot is over, start anew."
    )
    run.add_argument("role", metavar="ROLE", help="gateway, publisher, trainer, engine, router")
    run.add_argument("-c", "--config", metavar="FILE", required=True, help="the deployment; it must name nats.url")
    run.add_argument("--id", default="", help="the component's id (default: the role; an engine must be named)")
    run.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], help="override the configuration")
    run.add_argument("--json", action="store_true", help="one JSON object per line of its log")
    run.set_defaults(command=_role)


def _log_options(log: argparse.ArgumentParser) -> None:
    what = "`show SEQ`: one event with its causes and effects; `roll`: archive a full log, and go on in a new one"
    log.add_argument("what", nargs="*", metavar="show SEQ | roll", help=what)
    log.add_argument("--archive", metavar="DIR", help="roll: where the old log's file goes (default: the artifacts)")
    log.add_argument("--follow", action="store_true", help="go on until Ctrl-C")
    log.add_argument("--tail", type=int, metavar="N", help="the last N that match (default: 20; 0: all)")
    log.add_argument("--family", metavar="F", help="train, release, engine, deployment, record …")
    log.add_argument("--type", metavar="NAME", help="e.g. ReleaseCommitted")
    log.add_argument("--correlation", metavar="ID", help="of a publication, job, candidate, record, load id, boot …")
    log.add_argument("--from", dest="start", type=int, default=1, metavar="SEQ", help="not before this sequence")
    log.add_argument("--records", action="store_true", help="answers and reports instead of decisions")


def _operator_options(request: argparse.ArgumentParser) -> None:
    request.add_argument("--why", metavar="TEXT", required=True, help="the reason, for who reads the log later")
    request.add_argument("--actor", metavar="NAME", default="", help="who asks (default: this system's user)")


# -- commands


def _role(args: argparse.Namespace) -> int:
    from reef_bus.config import load
    from reef_bus.process import run_role

    config = load(Path(args.config), args.set)
    if not config.nats.url:
        raise Rejected(f"{args.config} names no nats.url: one role alone needs a server that runs; --set nats.url=URL")
    if args.role == "engine" and not args.id:
        raise Rejected(f"run engine: which one? --id {' or --id '.join(config.inference.engines)}")
    if args.json:
        os.environ["REEF_LOG_FORMAT"] = "json"
    return run_role(args.role, config, args.id or args.role)


def _status(args: argparse.Namespace) -> int:
    from reef_bus import cli_log

    return asyncio.run(cli_log.status(args))


def _log(args: argparse.Namespace) -> int:
    from reef_bus import cli_keep, cli_log

    if args.archive and args.what != ["roll"]:
        raise Rejected("--archive belongs to `reef-bus log roll`")
    return asyncio.run(cli_keep.roll(args) if args.what == ["roll"] else cli_log.log(args))


def _backup(args: argparse.Namespace) -> int:
    from reef_bus import cli_keep

    return asyncio.run(cli_keep.backup(args))


def _restore(args: argparse.Namespace) -> int:
    from reef_bus import cli_keep

    return asyncio.run(cli_keep.restore(args))


def _audit(args: argparse.Namespace) -> int:
    from reef_bus import cli_audit

    return asyncio.run(cli_audit.audit(args))


def _export(args: argparse.Namespace) -> int:
    from reef_bus import cli_audit

    return asyncio.run(cli_audit.export(args))


def _weights(args: argparse.Namespace) -> int:
    from reef_bus import cli_weights

    return asyncio.run(cli_weights.weights(args))


def _request(args: argparse.Namespace) -> int:
    from reef_bus import cli_operator

    return asyncio.run(cli_operator.request(args))


def _streams(args: argparse.Namespace) -> int:
    from reef_bus.cli_log import say_json

    plan = args.what == "plan"

    async def ask() -> dict[str, Any]:
        from reef_bus.inspect import opened
        from reef_bus.journal import open_log

        async with opened(args) as (journal, config):
            if plan:
                return dict(await journal.plan(config.nats.replicas))
            done = dict(await journal.apply(config.nats.replicas))
            await open_log(journal, os.urandom(8).hex(), "cli")
            return done

    found = asyncio.run(ask())
    drift = [name for name, lines in found.items() if plan and lines not in ([], ["missing"])]
    if args.json:
        say_json({"streams": found})
    else:
        for name, lines in found.items():
            print(f"{name:<24} {lines if isinstance(lines, str) else '; '.join(lines) or 'as it must be'}")
        if ["missing"] in found.values():
            print(
                "`reef-bus streams apply` creates what is missing" if not drift else "apply refuses while one differs"
            )
    return NOT_IN_ORDER if drift else OK


def _doctor(args: argparse.Namespace) -> int:
    from reef_bus.cli_log import paint, say_json
    from reef_bus.doctor import FAILED, examine

    found = examine(args)
    failed = any(each.state == FAILED for each in found)
    if args.json:
        rows = [{"name": f.name, "state": f.state, "found": f.found, "run": f.run} for f in found]
        say_json({"ok": not failed, "findings": rows})
        return NOT_IN_ORDER if failed else OK
    for each in found:
        print(f"{paint(each.state)}{' ' * (8 - len(each.state))} {each.name:<24} {each.found}")
        if each.run:
            print(f"{'':<34}→ {each.run}")
    return NOT_IN_ORDER if failed else OK


if __name__ == "__main__":
    sys.exit(main())
