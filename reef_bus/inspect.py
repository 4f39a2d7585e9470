"""How a command finds a deployment, and how it reads what is there: a window, never a hand.

Knows: state folders, configurations and urls; the streams; how causes link events. Must not know: terminals.
It changes nothing: at most it lends a state folder its own nats-server for as long as the command runs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import re
import socket
import sys
import urllib.parse
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import msgspec

from reef_bus.config import Config, Nats, check, load
from reef_bus.core.world import World, fold
from reef_bus.embedded import NatsServer, held
from reef_bus.errors import ContractError, Rejected, Unavailable
from reef_bus.events import Recorded
from reef_bus.jetstream import JetStreamJournal, connect
from reef_bus.journal import LOG
from reef_bus.origin import Fetch, blobs_in, nowhere, start_of
from reef_bus.topology import stream_name

STATE = "reef-state"
HANDSHAKE_S = 4.0
PROBE_S = 2.0
DEPTH = 1000  # of a chain of causes: a longer one is not for people


@contextlib.asynccontextmanager
async def opened(args: argparse.Namespace) -> AsyncIterator[tuple[JetStreamJournal, Config]]:
    """The journal and configuration of the deployment that the command line names; closed, and stopped, at the end.

    Raises Rejected when none is named or found, Unavailable when its server does not answer.
    """
    async with contextlib.AsyncExitStack() as stack:
        config = target(args)
        if not config.nats.url:
            config = _with_url(config, _awake(Path(config.state_dir, "nats"), stack))
        journal = await reach(config)
        stack.push_async_callback(journal.close)
        yield journal, config


# -- which deployment


def target(args: argparse.Namespace) -> Config:
    """What `--url`, `-c` or `--state` names. An empty `nats.url` means the state folder's own server."""
    if args.url:
        return check(Config(deployment=args.deployment, nats=Nats(url=args.url), state_dir=""))
    if args.config:
        config = load(Path(args.config), args.set)
        return config if config.nats.url else _kept(Path(config.state_dir), f"{args.config} names no nats.url, and")
    if args.state:
        return _kept(Path(args.state), "")
    return _kept(Path(STATE), "no deployment was named (--state DIR, -c FILE or --url URL), and")


def _kept(folder: Path, why: str) -> Config:
    """What `up` or `demo --keep` left in its state folder, wherever that folder is now."""
    path = folder / "run" / "deployment.json"
    if not path.exists():
        found = f"{folder}/ holds none" if folder.exists() else f"there is no folder {folder}/"
        raise Rejected(f"{why or 'no deployment:'} {found}; `reef-bus demo --keep {folder}` makes one to look at")
    config = msgspec.structs.replace(load(path), state_dir=str(folder.resolve()))
    # The folder's own server has another port with every start: the url in the file is of the last one.
    own = (folder / "nats" / "nats.conf").exists() and config.nats.url.startswith("nats://127.0.0.1:")
    return _with_url(config, "") if own else config


def _with_url(config: Config, url: str) -> Config:
    return msgspec.structs.replace(config, nats=msgspec.structs.replace(config.nats, url=url))


# -- its server


def _awake(folder: Path, stack: contextlib.AsyncExitStack) -> str:
    """The url of the folder's server, which is started when nobody holds the folder."""
    try:
        server = NatsServer(folder)
    except Rejected as held:
        url = announced(folder)
        if not url:
            raise Unavailable(f"{held}; its nats-server is not up: see {folder / 'nats.log'}") from held
        return url
    stack.callback(server.stop)
    survivor = announced(folder)  # its parent died where the kernel does not end children: one store, one server
    if survivor and _listens(survivor):
        return survivor
    sys.stderr.write(f"reef-bus: nothing runs in {folder.parent}; its nats-server is up for this command only\n")
    server.start()
    return server.url


def announced(folder: Path) -> str:
    """The url in the ports file of a server of that folder that lives, or an empty string."""
    for ports in folder.glob("nats-server_*.ports"):
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError, msgspec.DecodeError):
            os.kill(int(ports.stem.partition("_")[2]), 0)
            return str(msgspec.json.decode(ports.read_bytes())["nats"][0])
    return ""


def _listens(url: str) -> bool:
    parts = urllib.parse.urlsplit(url)
    with contextlib.suppress(OSError), socket.create_connection((parts.hostname, parts.port), PROBE_S):
        return True
    return False


def fetching(config: Config) -> Fetch:
    """From the deployment's artifact store, where this machine reaches it."""
    root = artifacts(config)
    return nowhere if root is None else blobs_in(root)


def artifacts(config: Config) -> Path | str | None:
    """Where the artifact store is; None if it is a folder that is not on this machine."""
    root = config.artifact_root()
    if not config.state_dir and not config.artifacts.at:
        return None
    return root if isinstance(root, str) or root.is_dir() else None


async def reach(config: Config) -> JetStreamJournal:
    """A journal on the configured server. Raises Unavailable soon, because a person is waiting."""
    await _probe(config.nats.url)
    return await connect(config.nats.url, config.deployment, "reef-cli", wait_s=HANDSHAKE_S)


async def _probe(urls: str) -> None:
    """Whether anything listens at one of the urls, comma between them; told apart from a server that is silent, and at
    once."""
    addresses = [_address(url) for url in urls.split(",")]
    failed: list[str] = []
    for host, port in addresses:
        try:
            async with asyncio.timeout(PROBE_S):
                _, writer = await asyncio.open_connection(host, port)
        except OSError as error:  # TimeoutError is one
            failed.append(_why(error))
        else:
            writer.close()
            return
    why = ", ".join(dict.fromkeys(failed))
    raise Unavailable(f"no NATS server at {urls}: {why}; is it up? `reef-bus doctor` looks")


def _address(url: str) -> tuple[str, int]:
    try:
        parts = urllib.parse.urlsplit(url if "://" in url else f"nats://{url}")
        return parts.hostname or "", parts.port or 4222
    except ValueError as error:
        raise Rejected(f"nats.url {url!r}: {error}; expected nats://HOST:PORT") from error


def _why(error: OSError) -> str:
    number = error.errno or 0  # asyncio puts addresses into strerror; negative ones are the resolver's
    return os.strerror(number) if number > 0 else error.strerror or str(error) or "no answer"


def runs(config: Config) -> bool | None:
    """Whether a supervisor holds the state folder; None when there is no such folder on this machine."""
    folder = Path(config.state_dir)
    if not config.state_dir or not folder.is_dir():
        return None
    return held(folder / "lock")


# -- its streams


async def head(journal: JetStreamJournal, stream: str) -> int:
    """The stream's last sequence. Raises Rejected when the server has other deployments, and not this one."""
    try:
        return await journal.head(stream)
    except ContractError as error:
        names = [info.config.name or "" for info in await journal.js.streams_info()]
        others = sorted(name[len("REEF_") : -len("_LOG")] for name in names if re.fullmatch("REEF_.+_LOG", name))
        if not others:
            raise
        found = f"no deployment {journal.deployment!r} on this server, which has: {', '.join(others)}"
        raise Rejected(f"{found}; --deployment NAME chooses one") from error


async def events(
    journal: JetStreamJournal, stream: str, after: int = 0, until: int | None = None
) -> AsyncGenerator[Recorded]:
    """Every event after `after` up to `until` (None: for ever). Raises ContractError at one that cannot be read, having
    given everything before it."""
    batches = journal.follow(stream, after)
    try:
        while until is None or after < until:
            for recorded in await anext(batches):
                if until is None or recorded.seq <= until:
                    yield recorded
                    after = recorded.seq
    except ContractError as error:  # its batch never came, although it may begin well
        for seq in range(after + 1, error.seq):
            if found := await journal.read(stream, seq):
                yield found
        raise
    finally:
        if isinstance(batches, AsyncGenerator):
            await batches.aclose()


class Judge:
    """Folds LOG along and says of each event whether it counts. After a contradiction it goes on without judging."""

    def __init__(self, fetch: Fetch = nowhere) -> None:
        self.fetch = fetch
        self.world = World()
        self.error: ContractError | None = None

    def judge(self, recorded: Recorded) -> str:
        """Empty for an event that counts, else a word and the reason."""
        if self.error or self.world.seq not in (0, recorded.seq - 1):
            return ""
        try:
            self.world.start = start_of(recorded, self.fetch)
            why = fold(self.world, recorded)
        except ContractError as error:
            self.error = error
            return "contradiction"
        return f"void: {why}" if why else ""


async def causes(journal: JetStreamJournal, recorded: Recorded) -> list[Recorded]:
    """What led to the event, nearest first: each one's cause is the next."""
    chain: list[Recorded] = []
    seq = recorded.cause
    while seq and len(chain) < DEPTH:
        found = await journal.read(LOG, seq)
        if found is None or (chain and seq >= chain[-1].seq):
            break
        chain.append(found)
        seq = found.cause
    return chain


async def effects(journal: JetStreamJournal, seq: int) -> list[Recorded]:
    """What reacted to the LOG event at `seq`, directly, as far as the log can be read."""
    found = []
    with contextlib.suppress(ContractError):
        async with contextlib.aclosing(events(journal, LOG, seq, await head(journal, LOG))) as later:
            async for recorded in later:
                if recorded.cause == seq:
                    found.append(recorded)
    return found


async def raw(journal: JetStreamJournal, stream: str, seq: int) -> dict[str, Any]:
    """A stored message as it is: for one that is no event of ours."""
    message = await journal.js.get_msg(stream_name(journal.deployment, stream), seq=seq)
    data = message.data or b""
    return {
        "sequence": seq,
        "subject": message.subject,
        "time": message.time.isoformat() if message.time else None,
        "headers": dict(message.headers or {}),
        "bytes": len(data),
        "text": data[:4096].decode(errors="replace"),
    }
