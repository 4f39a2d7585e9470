"""One role as one operating-system process: lock, boot id, connection, loop, signals, exit status.

Knows: how a boot begins and ends. Must not know: what any role does.
Exit status: 0 after SIGTERM or SIGINT, 2 for a user's mistake, 3 when the boot is over (replaced, excluded, or unable
to go on: start a new one), 1 for a defect. A consumer that met a contradiction stays up, halted, and says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from importlib import metadata

import msgspec

from reef_bus.collector import without_collector
from reef_bus.config import Config
from reef_bus.core.effects import Me
from reef_bus.embedded import Lock
from reef_bus.errors import ReefError, Rejected
from reef_bus.jetstream import JetStreamJournal, connect
from reef_bus.origin import blobs_in
from reef_bus.runner import Retired, Role, Runner

log = logging.getLogger(__name__)

OK, DEFECT, MISTAKE, OVER = 0, 1, 2, 3
ROLES = "reef_bus.roles"
FAULT = "REEF_FAULT_FLIP"
"""Environment: `<engine>@<sequence>` flips a bit of that engine's live weights, once, after it received that target."""

Build = Callable[[Config, JetStreamJournal, Me, contextlib.AsyncExitStack], Awaitable[Role]]


def run_role(role: str, config: Config, id_: str) -> int:
    """Load a role by its entry point and run it in this process until it ends. Returns the exit status."""
    found = list(metadata.entry_points(group=ROLES, name=role))
    if not found:
        names = sorted(entry.name for entry in metadata.entry_points(group=ROLES))
        raise Rejected(f"no role {role!r}; installed: {', '.join(names) or 'none'}")
    try:
        with without_collector():
            run: Callable[[Config, str], int] = found[0].load()
    except ImportError as error:
        raise Rejected(f"role {role} needs an extra ({error.name}): pip install 'reef-bus[demo]'") from error
    return run(config, id_)


def run(id_: str, config: Config, build: Build) -> int:
    """Run what `build` makes as one boot of component `id_`."""
    _log_to_stderr(id_)
    lock = Lock(config.folder("locks") / f"{id_}.lock", f"component {id_} of {config.state_dir}")
    me = Me(id_, lock.token)
    try:
        return asyncio.run(_run(config, me, build))
    except Retired as end:
        log.warning("this boot ends: %s", end)
        return OVER
    except ReefError as error:
        log.error("%s", error)
        return MISTAKE if isinstance(error, Rejected) else OVER
    finally:
        lock.release()


def _log_to_stderr(id_: str) -> None:
    handler = logging.StreamHandler(sys.stderr)
    line = f"%(asctime)s {id_} %(levelname)s %(message)s"
    handler.setFormatter(JsonLines() if os.environ.get("REEF_LOG_FORMAT") == "json" else logging.Formatter(line))
    logging.basicConfig(level=os.environ.get("REEF_LOG_LEVEL", "INFO"), handlers=[handler])


class JsonLines(logging.Formatter):
    """One JSON object per record; a traceback is part of the message."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        said = {"time": record.created, "level": record.levelname, "logger": record.name, "message": text}
        return msgspec.json.encode(said).decode()


async def _run(config: Config, me: Me, build: Build) -> int:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    boot, stopped = asyncio.ensure_future(_boot(config, me, build)), asyncio.ensure_future(stop.wait())
    await asyncio.wait({boot, stopped}, return_when=asyncio.FIRST_COMPLETED)
    if boot.done():
        await boot
    boot.cancel()  # also while it is still being built: who asked waits no longer than for what must be undone
    for error in await asyncio.gather(boot, return_exceptions=True):
        if isinstance(error, Exception):
            log.error("ending: %r", error)
    log.info("boot %s ends, as asked", me.boot)
    return OK


async def _boot(config: Config, me: Me, build: Build) -> None:
    """From the connection to the end of the loop; whatever was opened is closed again, in reverse order."""
    async with contextlib.AsyncExitStack() as stack:
        journal = await connect(config.nats.url, config.deployment, f"reef-{me.id}")
        stack.push_async_callback(journal.close)
        role = await build(config, journal, me, stack)
        gc.freeze()  # what its imports made stays: no later collection looks through it
        runner = Runner(journal, role, fetch=blobs_in(config.artifact_root()))
        if config.metrics.port:
            from reef_bus import metrics  # an extra, and half a second of imports, for those who ask for it

            await metrics.serve(config, me.id, runner, stack)
        log.info("boot %s is up", me.boot)
        await runner.run()
