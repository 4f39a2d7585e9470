"""The commands that keep a deployment's history: log roll, backup, restore.

Knows: which deployment is meant, that nobody runs where nobody may, what is shown. Must not know: how anything is done
(`roll.py`, `backup.py`).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec

from reef_bus import backup as backups
from reef_bus import roll as rolls
from reef_bus.artifacts import ArtifactStore
from reef_bus.cli_log import say, say_json
from reef_bus.config import Config, build, dump, load
from reef_bus.embedded import Lock, NatsServer
from reef_bus.errors import Rejected
from reef_bus.events import LogOpened
from reef_bus.inspect import head, opened, reach, target
from reef_bus.jetstream import JetStreamJournal
from reef_bus.journal import LOG, RECORDS, Beat

OK = 0
SILENCE_S = 2.0  # components beat twice a second
CONFIG_FILE = "deployment.json"


def progress(text: str) -> None:
    """For people, beside the result."""
    sys.stderr.write(f"reef-bus: {text}\n")
    sys.stderr.flush()


# -- who must not run


@contextlib.contextmanager
def _down(config: Config) -> Iterator[None]:
    """The state folder as `up` holds it, so that nobody brings the deployment up meanwhile."""
    lock = Lock(config.folder() / "lock", f"state folder {config.state_dir}")
    try:
        yield
    finally:
        lock.release()


async def _silent(journal: JetStreamJournal) -> None:
    """Raises Rejected when a component is heard: it may run on another machine, or alone."""
    heard: set[str] = set()

    def hear(beat: Beat) -> None:
        heard.add(str(beat.get("id")))

    await journal.beats(hear)
    await asyncio.sleep(SILENCE_S)
    if heard:
        raise Rejected(f"the deployment runs: {', '.join(sorted(heard))} heard; stop it first. Nothing was changed")


# -- log roll


async def roll(args: argparse.Namespace) -> int:
    """The log is archived, and another one goes on from its state."""
    config = _here(args, "log roll")
    archive = Path(args.archive) if args.archive else None
    with _down(config):
        async with opened(args) as (journal, config):
            await _silent(journal)
            store = ArtifactStore(config.artifact_root())
            done = await rolls.roll(journal, store, config.folder("run"), config.nats.replicas, archive)
    begun = done.opened
    if args.json:
        say_json({"archive": done.archive, "archived": begun.predecessor_seq, "begins": begun.predecessor_seq + 1})
    else:
        say(f"the log up to {begun.predecessor_seq} is archived in {done.archive}")
        say(f"a new one begins at {begun.predecessor_seq + 1}, incarnation {begun.incarnation}; `reef-bus up` goes on")
    return OK


def _here(args: argparse.Namespace, command: str) -> Config:
    """The deployment, whose artifact folder must be on this machine: blobs are read and written there."""
    config = target(args)
    if not config.state_dir or not Path(config.state_dir).is_dir():
        found = f"{config.state_dir} is not here" if config.state_dir else "--url names none"
        raise Rejected(f"{command} needs the deployment's state folder, {found}; name it by -c FILE or --state DIR")
    return config


# -- backup


async def backup(args: argparse.Namespace) -> int:
    """A running deployment is not disturbed."""
    named, folder = _here(args, "backup"), Path(args.dir)
    async with opened(args) as (journal, config):
        await head(journal, LOG)  # says more about a deployment that is not there
        store = ArtifactStore(config.artifact_root())
        found = await backups.backup(journal, named, store, folder, progress)
    counts = {stream: extent.last for stream, extent in found.streams.items()}
    if args.json:
        say_json({"folder": str(folder), "incarnation": found.incarnation, "last": counts, "blobs": len(found.blobs)})
    else:
        text = f"log up to {counts[LOG]}, records up to {counts[RECORDS]}, {len(found.blobs)} blobs, each checked"
        say(f"{folder}: {text}; `reef-bus restore {folder} --state NEWDIR` goes on from it")
    return OK


# -- restore


async def restore(args: argparse.Namespace) -> int:
    """Everything is checked before anything is written."""
    if args.url or not (args.state or args.config):
        raise Rejected("restore where? --state NEWDIR, or -c FILE; its artifact folder must be on this machine")
    found = backups.read_backup(Path(args.dir), progress)
    config = _destination(args, found)
    with _down(config):
        async with _server(config) as (journal, reached):
            await _silent(journal)
            store = ArtifactStore(config.artifact_root())
            begun = await backups.restore(journal, config, store, found, os.urandom(8).hex(), progress)
        (config.folder("run") / CONFIG_FILE).write_bytes(dump(reached))  # by which `--state DIR` finds it
    file = Path(args.config or Path(args.state, CONFIG_FILE))
    if not args.config:
        file.write_bytes(dump(config))
    _say_restored(args, begun, file)
    return OK


def _destination(args: argparse.Namespace, found: backups.Backup) -> Config:
    """The deployment to be; with --state it is configured as the backed up one was."""
    if args.config:
        return load(Path(args.config), args.set)
    here = {"state-dir": str(Path(args.state).resolve())}
    return build(f"{args.dir}/{backups.MANIFEST}", found.inventory.config | here, args.set)


@contextlib.asynccontextmanager
async def _server(config: Config) -> AsyncIterator[tuple[JetStreamJournal, Config]]:
    """The configured server, or the state folder's own for as long as this takes; and the configuration that names
    it."""
    async with contextlib.AsyncExitStack() as stack:
        if not config.nats.url:
            own = NatsServer(config.folder("nats"))
            stack.callback(own.stop)
            own.start()
            config = msgspec.structs.replace(config, nats=msgspec.structs.replace(config.nats, url=own.url))
        journal = await reach(config)
        stack.push_async_callback(journal.close)
        yield journal, config


def _say_restored(args: argparse.Namespace, begun: LogOpened, file: Path) -> None:
    if args.json:
        say_json({"incarnation": begun.incarnation, "begins": begun.predecessor_seq + 1, "config": str(file)})
        return
    say(f"the log goes on at {begun.predecessor_seq + 1} under incarnation {begun.incarnation}; what was open is over")
    say(f"`reef-bus up -c {file}` brings it up")
