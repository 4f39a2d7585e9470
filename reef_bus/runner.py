"""The loop, once, for every role: follow, fold, ask what is owed, perform, append, until the fold shows it.

Knows: keys of debts and outcomes of appends. Must not know: what any debt is about; it decides nothing.
A key's effect starts once per boot; its result is kept and appended until the fold accepts it or the debt is gone. An
effect's resources live in its scope, which is closed when the debt is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import ParamSpec, TypeVar

from reef_bus.core.effects import Append, Debt, Me, Retire
from reef_bus.core.world import World, fold
from reef_bus.envelope import identify, payload
from reef_bus.errors import Conflict, ContractError, Unavailable
from reef_bus.events import Draft, Event, Recorded
from reef_bus.journal import LOG, Beat, Journal
from reef_bus.origin import Fetch, nowhere, start_of

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

TICK_S = 0.2
BEAT_S = 0.5
RETRY_S = 0.3


class Retired(Exception):
    """This boot is over: it was replaced, excluded, or could not go on. Its process ends."""


class Role(ABC):
    """What a consumer adds to the loop: its question, its hands, and what it does when its fold has moved."""

    name: str

    def __init__(self, me: Me) -> None:
        self.me = me

    @abstractmethod
    def react(self, world: World, now: int) -> Sequence[Debt]:
        """What this boot owes; pure in its arguments. `now` in ns since the epoch."""

    @abstractmethod
    async def perform(self, debt: Debt, scope: contextlib.AsyncExitStack) -> Event | None:
        """Perform the debt's effect and return the fact to append, or None when there is none.

        Raises Unavailable to be tried again, Retired to end the boot, ContractError to halt. May be cancelled at any
        await once the debt is gone; what must be undone then belongs into `scope`.
        """

    def folded(self, world: World, batch: Sequence[Recorded]) -> None:
        """Called after each batch was folded, before anything is asked. Must not block."""
        return None

    def beat(self) -> Beat:
        """What the heartbeat says beside who and where."""
        return {}

    def writer(self) -> str:
        return f"{self.name}/{self.me.id}"


class Runner:
    """Runs one role until it retires or is cancelled. After a contradiction it reads and writes nothing any more."""

    def __init__(
        self,
        journal: Journal,
        role: Role,
        *,
        fetch: Fetch = nowhere,
        clock: Callable[[], int] = time.time_ns,
        tick_s: float = TICK_S,
        beat_s: float = BEAT_S,
    ) -> None:
        self.journal = journal
        self.role = role
        self.fetch = fetch
        self.clock = clock
        self.tick_s, self.beat_s = tick_s, beat_s
        self.world = World()
        self.halted = ""
        self._effects: dict[str, asyncio.Task[Event | None]] = {}
        self._scopes: dict[str, contextlib.AsyncExitStack] = {}
        self._bare: set[str] = set()  # facts that need no effect: none is kept, what is owed now is appended
        self._settled: set[str] = set()
        self._tried: dict[str, dict[str, bool]] = {}  # key → ids of its appends, and whether the fold accepted them
        self._closing: set[asyncio.Task[None]] = set()
        self._moved = asyncio.Event()
        self._ask = asyncio.Event()

    async def run(self) -> None:
        """Returns never; raises Retired at the end of the boot, and whatever an effect failed with."""
        try:
            async with asyncio.TaskGroup() as group:
                for part in (self._follow(), self._tick(), self._react(), self._write(), self._beat()):
                    group.create_task(part)
        except BaseExceptionGroup as failed:
            raise _first(failed) from None
        finally:
            await self._drop(list(self._effects))
            await asyncio.gather(*self._closing, return_exceptions=True)

    # -- fold

    async def _follow(self) -> None:
        try:
            async for batch in self.journal.follow(LOG):
                self._fold(batch)
        except ContractError as error:
            await self._halt(error)

    def _fold(self, batch: Sequence[Recorded]) -> None:
        """Fold as far as it goes: what precedes a contradiction counts, and the role hears of it (a fence, say)."""
        applied: list[Recorded] = []
        try:
            for recorded in batch:
                self.world.start = start_of(recorded, self.fetch)
                void = fold(self.world, recorded)
                for tried in self._tried.values():
                    if recorded.id in tried:
                        tried[recorded.id] = not void
                applied.append(recorded)
        finally:
            if applied:
                self.role.folded(self.world, applied)
                self._wake()
                self._ask.set()

    def _wake(self) -> None:
        """Whoever waits for the fold or for an effect looks again; who comes later waits for the next time."""
        self._moved.set()
        self._moved.clear()

    async def _halt(self, error: ContractError) -> None:
        self.halted = str(error)
        log.error("halted: %s", error)
        await self._drop(list(self._effects))

    async def reached(self, seq: int) -> None:
        """Wait until the fold has applied the event at `seq`."""
        while self.world.seq < seq:
            await self._moved.wait()

    # -- react

    async def _tick(self) -> None:
        """Time alone makes some debts."""
        while True:
            await asyncio.sleep(self.tick_s)
            self._ask.set()

    async def _react(self) -> None:
        await self.reached(await self._head())  # replay to the head, then ask: half a log owes the wrong things
        while True:
            await self._ask.wait()
            self._ask.clear()
            if self.halted:
                continue
            debts = {debt.key: debt for debt in self._owed()}
            self._settled &= debts.keys()
            self._tried = {key: tried for key, tried in self._tried.items() if key in debts}
            gone = [key for key in self._effects if key not in debts]
            if gone:
                self._closing.add(asyncio.create_task(self._drop(gone)))
            self._closing = {task for task in self._closing if not task.done()}
            before, self._bare = self._bare, {key for key, debt in debts.items() if isinstance(debt.effect, Append)}
            for key, debt in debts.items():
                if key not in self._effects and key not in self._bare:
                    self._start(debt)
            if self._bare - before or self._kept(debts):
                self._wake()

    def _kept(self, debts: Mapping[str, Debt]) -> bool:
        """Whether something is done and not told: its debt may have been gone in between, and be back, for a reason
        that is not on the log."""
        done = (key for key, task in self._effects.items() if task.done())
        return any(key in debts and key not in self._settled for key in done)

    def ask(self) -> None:
        """Ask now what is owed, and not at the next tick: something has changed it that is not on the log."""
        self._ask.set()

    def _owed(self) -> Sequence[Debt]:
        return self.role.react(self.world, self.clock())

    def _start(self, debt: Debt) -> None:
        scope = self._scopes[debt.key] = contextlib.AsyncExitStack()
        self._effects[debt.key] = task = asyncio.create_task(self._perform(debt, scope))
        task.add_done_callback(lambda _: self._wake())

    async def _perform(self, debt: Debt, scope: contextlib.AsyncExitStack) -> Event | None:
        if isinstance(debt.effect, Retire):
            raise Retired(debt.effect.why)
        said = ""
        while True:
            try:
                return await self.role.perform(debt, scope)
            except Unavailable as error:
                if str(error) != said:
                    log.warning("%s: %s; trying again until it works", debt.key, error)
                said = str(error)
                await asyncio.sleep(RETRY_S)

    async def _drop(self, keys: list[str]) -> None:
        keys = [key for key in keys if key in self._effects]
        tasks = [self._effects.pop(key) for key in keys]
        scopes = [self._scopes.pop(key) for key in keys]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        closed = await asyncio.gather(*(scope.aclose() for scope in scopes), return_exceptions=True)
        for error in filter(None, closed):
            log.error("closing what an effect had opened: %r", error)

    # -- append

    async def _write(self) -> None:
        while True:
            try:
                debt = self._ready()
            except ContractError as error:
                await self._halt(error)
                continue
            if debt is None:
                await self._moved.wait()
                continue
            event = debt.effect.event if isinstance(debt.effect, Append) else self._effects[debt.key].result()
            if event is None or await self._append(debt, event):
                self._settled.add(debt.key)
            else:
                await asyncio.sleep(0.01)

    def _ready(self) -> Debt | None:
        """The first debt whose effect is done and whose fact is not on the log yet. Raises what an effect raised."""
        if self.halted:
            return None
        done = set(self._bare)
        for key, task in self._effects.items():
            if task.done() and not task.cancelled():
                if error := task.exception():
                    raise error
                done.add(key)
        done -= self._settled
        return next((debt for debt in self._owed() if debt.key in done), None) if done else None

    async def _append(self, debt: Debt, event: Event) -> bool:
        """Whether the fact counts. An acknowledgement is not yet that, and its absence is not a no."""
        if debt.at_head:
            await self.reached(await self._head())
            if self.halted:
                return False
            current = next((owed for owed in self._owed() if owed.key == debt.key), None)
            if current is None:
                return False
            debt, event = current, current.effect.event if isinstance(current.effect, Append) else event
        return await self._try(debt, event)

    async def _try(self, debt: Debt, event: Event) -> bool:
        tried = self._tried.setdefault(debt.key, {})
        if any(tried.values()):  # one that was given up for lost, and landed since
            return True
        prev = self.world.tail(event.chain)
        draft = Draft(
            event=event,
            writer=self.role.writer(),
            boot=self.role.me.boot,
            cause=debt.cause,
            correlation=debt.correlation,
        )
        id_ = identify(draft, prev, payload(event))
        tried[id_] = False
        try:
            stored = (await self.journal.append(draft, prev)).seq
        except Conflict:
            stored = await self._head()
        except Unavailable as error:
            # It may be stored, or be stored yet: with the same prev it is the same event, so looking is enough.
            log.warning("%s: %s; looking whether it is stored", debt.key, error)
            await asyncio.sleep(RETRY_S)
            stored = await self._head()
        await self.reached(stored)
        return any(tried.values())

    async def _head(self) -> int:
        """The stream's head, however long its leader takes to answer: nothing may be appended before."""
        while True:
            try:
                return await self.journal.head(LOG)
            except Unavailable as error:
                log.warning("%s; waiting", error)
                await asyncio.sleep(RETRY_S)

    # -- heartbeat

    async def _beat(self) -> None:
        while True:
            beat = {
                "role": self.role.name,
                "id": self.role.me.id,
                "boot": self.role.me.boot,
                "pid": os.getpid(),
                "seq": self.world.seq,
                "halted": self.halted,
                **self.role.beat(),
            }
            await self.journal.beat(self.role.name, self.role.me.id, beat)
            await asyncio.sleep(self.beat_s)


def _first(failed: BaseExceptionGroup[BaseException]) -> BaseException:
    """The one exception worth showing: a retirement before anything else."""
    leaves: list[BaseException] = []
    for error in failed.exceptions:
        leaves += [_first(error)] if isinstance(error, BaseExceptionGroup) else [error]
    return next((e for e in leaves if isinstance(e, Retired)), leaves[0])


async def blocking(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a blocking call in a thread. Cancelled, however often, it still waits: no call outlives its await."""
    call = asyncio.get_running_loop().run_in_executor(None, partial(function, *args, **kwargs))
    cancelled: asyncio.CancelledError | None = None
    while not call.done():
        try:
            await asyncio.wait({call})  # which, unlike awaiting it, passes no cancellation on
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is None:
        return call.result()
    if not call.cancelled():
        call.exception()  # seen: nobody is left to tell
    raise cancelled
