"""An asyncio event loop in simulated time: one process's callbacks in turn, processes in an order drawn from a seed.

Knows: handles, timers, simulated processes that can be stopped, continued and killed. Must not know: what runs on it.
Nothing here waits: when nothing is ready, the clock jumps to the next timer. Same seed, same order, on every machine.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import random
from collections import deque
from collections.abc import Callable, Coroutine
from heapq import heappop, heappush
from typing import Any

import msgspec

MOST_STEPS = 200_000
"""Callbacks at one point of time: beyond, something spins without ever waiting."""

PROCESS: contextvars.ContextVar[Process | None] = contextvars.ContextVar("PROCESS", default=None)


NEVER = 1 << 60


class Stuck(Exception):
    """Nothing can ever happen any more, or something spins while time stands still."""


class Task(asyncio.Task[Any]):
    """Hashes by its number: asyncio keeps tasks in sets, and a set by addresses has another order in every run. Plain
    futures are in no set whose order counts; that every process tells the same histories is tested."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], loop: Loop, context: contextvars.Context | None) -> None:
        self.number = next(loop.numbers)
        super().__init__(coroutine, loop=loop, name=f"t{self.number}", context=context)
        loop.tasks.append(self)

    def __hash__(self) -> int:
        return self.number


class Process:
    """What the scheduler knows of a simulated operating-system process: its callbacks, and whether they run."""

    def __init__(self, loop: Loop, name: str) -> None:
        self.loop, self.name = loop, name
        self.dead = self.stopped = False
        self.watched = False  # whether somebody looks at it after each of its steps
        self.held: list[Handle] = []
        self.context = contextvars.Context()
        self.context.run(PROCESS.set, self)

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        return self.loop.create_task(coroutine, context=self.context)

    def kill(self) -> None:
        """SIGKILL: not one more line of it runs, no clean-up either."""
        self.dead = True

    def stop(self) -> None:
        self.stopped = True

    def proceed(self) -> None:
        """What came due meanwhile is due now."""
        self.stopped = False
        if not self.dead:
            self.loop.ready.extend(self.held)
            self.held = []


class Handle(msgspec.Struct, eq=False):
    """A callback that is due, or will be. As asyncio's own, without what nobody here asks: it is half of every step."""

    callback: Callable[..., Any] | None
    args: tuple[Any, ...]
    context: contextvars.Context
    process: Process | None

    def cancel(self) -> None:
        self.callback, self.args = None, ()

    def cancelled(self) -> bool:
        return self.callback is None


class Loop(asyncio.BaseEventLoop):
    """`shuffle`: also a process's own ready callbacks run in any order, as after other arrivals; else first come."""

    def __init__(self, chance: random.Random, *, shuffle: bool = False, thread_s: float = 0.002) -> None:
        """`thread_s`: how long a blocking call takes, and how long its result needs back to the loop; on average.

        `after_step` is called between two steps: after each of a process that is watched, and after each of anybody's
        from the step `pause_at` on.
        """
        super().__init__()
        self.chance, self.shuffle, self.thread_s = chance, shuffle, thread_s
        self.longer: dict[str, float] = {}  # by a blocking function's name: what it takes beside that, on average
        self.now, self.steps, self._steps_until = 0.0, 0, MOST_STEPS
        self.ready: deque[Handle] = deque()
        self.timers: list[tuple[float, int, Handle]] = []
        self.tasks: list[asyncio.Task[Any]] = []  # all, so that what was killed is never collected, closed, cleaned up
        self.after_step: Callable[[Process | None], None] = lambda process: None
        self.pause_at = NEVER
        self.outside = contextvars.Context()  # of what belongs to no process: the network, the broker, people
        self.numbers, self._burying, self._set = itertools.count(1), False, itertools.count()

    def time(self) -> float:
        return self.now

    get_debug = bool  # False; asked for every future, so that it is no function of ours

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(  # type: ignore[override]
        self, coroutine: Coroutine[Any, Any, Any], *, name: Any = None, context: Any = None
    ) -> asyncio.Task[Any]:
        return Task(coroutine, self, context)

    # -- the schedule

    def call_soon(self, callback: Callable[..., Any], *args: Any, context: Any = None) -> Handle:  # type: ignore[override]
        if context is None:
            context = contextvars.copy_context()
        handle = Handle(callback, args, context, context.get(PROCESS))
        self.ready.append(handle)
        return handle

    def call_at(self, when: float, callback: Callable[..., Any], *args: Any, context: Any = None) -> Handle:  # type: ignore[override]
        if context is None:
            context = contextvars.copy_context()
        handle = Handle(callback, args, context, context.get(PROCESS))
        heappush(self.timers, (when, next(self._set), handle))
        return handle

    def call_later(self, delay: float, callback: Callable[..., Any], *args: Any, context: Any = None) -> Handle:  # type: ignore[override]
        if context is None:
            context = contextvars.copy_context()
        handle = Handle(callback, args, context, context.get(PROCESS))
        heappush(self.timers, (self.now + delay, next(self._set), handle))
        return handle

    def _run_once(self) -> None:
        """Every step until somebody stops the loop; one function, because it is called for nothing else."""
        ready, timers = self.ready, self.timers
        while not self._stopping:  # type: ignore[attr-defined]
            if not ready:
                self._jump()
            while timers and timers[0][0] <= self.now:
                ready.append(heappop(timers)[2])
            handle = ready.popleft() if len(ready) == 1 else self._pick(ready)
            callback, process = handle.callback, handle.process
            if callback is None:
                continue
            if process is not None and (process.dead or process.stopped) and not self._burying:
                process.held.append(handle)
                continue
            try:
                handle.context.run(callback, *handle.args)
            except Exception as error:
                self.call_exception_handler({"message": f"in {callback!r}", "exception": error})
            steps = self.steps = self.steps + 1
            if steps > self._steps_until:
                raise Stuck(f"{MOST_STEPS} steps at {self.now:.6f} s, the last: {callback!r}")
            if steps >= self.pause_at or (process is not None and process.watched):
                self.after_step(process)

    def _jump(self) -> None:
        timers = self.timers
        while timers and timers[0][2].callback is None:
            heappop(timers)
        if not timers:
            raise Stuck("nothing is ready and no timer is set: everybody waits for somebody else")
        if timers[0][0] > self.now:
            self.now, self._steps_until = timers[0][0], self.steps + MOST_STEPS

    def _pick(self, ready: deque[Handle]) -> Handle:
        """Any of them; if a process shall keep its order, its first instead."""
        place = int(self.chance.random() * len(ready))
        if place and not self.shuffle:
            process = ready[place].process
            for first, handle in enumerate(ready):
                if handle.process is process:
                    place = first
                    break
        handle = ready[place]
        del ready[place]
        return handle

    # -- threads

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """The function runs whole, some time from now, and its caller hears of it some time later."""
        done = self.create_future()
        self.call_later(self._a_while() + self._longer(func), self._work, done, func, args)
        return done

    def _longer(self, func: Callable[..., Any]) -> float:
        seconds = self.longer.get(getattr(getattr(func, "func", func), "__name__", ""), 0.0)
        return min(self.chance.expovariate(1), 3) * seconds if seconds else 0.0

    def _work(self, done: asyncio.Future[Any], func: Callable[..., Any], args: tuple[Any, ...]) -> None:
        try:
            found, error = func(*args), None
        except Exception as failed:
            found, error = None, failed
        self.call_later(self._a_while(), _tell, done, found, error)

    def _a_while(self) -> float:
        return min(self.chance.expovariate(1) * self.thread_s, 10 * self.thread_s)

    # -- what a loop must have

    def _process_events(self, event_list: Any) -> None:
        raise AssertionError("there are no selectors here")

    def _write_to_self(self) -> None:
        return None

    # -- the end

    def bury(self, processes: list[Process]) -> None:
        """Let everything that was left end by cancellation, so that nothing is told of it when it is collected."""
        self.after_step, self._burying = lambda process: None, True
        for process in processes:
            process.dead = False
            process.proceed()
        rest = [task for task in self.tasks if not task.done()]
        for task in rest:
            task.cancel()
        self.run_until_complete(_all(rest))
        for task in self.tasks:
            asyncio._unregister_task(task)  # another loop's have the same numbers: in one set they collide


async def _all(tasks: list[asyncio.Task[Any]]) -> None:
    if tasks:
        await asyncio.wait(tasks)


def _tell(done: asyncio.Future[Any], found: Any, error: Exception | None) -> None:
    if done.cancelled():
        return
    if error is not None:
        done.set_exception(error)
    else:
        done.set_result(found)
