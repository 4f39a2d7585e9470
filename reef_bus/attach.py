"""Publish weights from a training loop of one's own: plain torch, verl, TRL, Megatron, a notebook.

    with attach_blocking(load(Path("reef-state/run/deployment.json"))) as bus:
        release = bus.publish(dict(model.named_parameters()), step=n)

Knows: one boot of the trainer, from its lock to its end, in a thread with an event loop of its own. Must not know: what
is trained, or what the log says of it (`attached`). However long the caller's loop computes, engines are sent to.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Coroutine, Generator, Iterator, Mapping
from typing import Any, Literal, NoReturn, TypeVar, overload

from reef_bus.artifacts import ArtifactStore
from reef_bus.attached import Attached, Head, Publish
from reef_bus.backends import Pieces
from reef_bus.config import ATTACHED, Config
from reef_bus.core.effects import Me
from reef_bus.embedded import Lock
from reef_bus.errors import ContractError, ReefError, Rejected
from reef_bus.jetstream import connect
from reef_bus.origin import blobs_in
from reef_bus.outcomes import Committed, Halted, Outcome, Refused
from reef_bus.runner import Retired, Runner
from reef_bus.tensors import copied

__all__ = ["Bus", "BlockingBus", "Handle", "Outcome", "attach", "attach_blocking"]
__all__ += ["Committed", "Halted", "Head", "Refused"]

log = logging.getLogger(__name__)
T = TypeVar("T")

COPIES = 2  # that are not durable yet: who publishes faster than the disk writes waits before the next is taken
WATCH_S = 0.2
SLOW_S = 10.0


# -- in the thread


class Boot:
    """One boot and its runner. Everything here runs in the one event loop of both."""

    def __init__(self, role: Attached, runner: Runner) -> None:
        self.role = role
        self.runner = runner
        self.end: asyncio.Future[NoReturn] = asyncio.ensure_future(self._run())
        self._room = asyncio.Semaphore(COPIES)
        self._publishing: set[asyncio.Task[Any] | None] = set()

    async def _run(self) -> NoReturn:
        """Run until the boot is over; raises why, for whoever publishes."""
        running = asyncio.ensure_future(self.runner.run())
        try:
            while not running.done() and not self.runner.halted:
                await asyncio.wait({running}, timeout=WATCH_S)
            if running.done():
                await running
            raise ContractError(self.runner.halted)
        except Retired as end:
            raise Rejected(f"{end}: only one loop may publish, and it is no longer this one; end it", 409) from end
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def close(self) -> None:
        self.end.cancel()
        await asyncio.gather(self.end, return_exceptions=True)

    async def until(self, wanted: asyncio.Future[T]) -> T:
        """What is waited for, or what the boot ended with if that comes first."""
        either: set[asyncio.Future[Any]] = {wanted, self.end}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        return wanted.result() if wanted.done() else self.end.result()

    async def ready(self) -> None:
        """Wait until this boot is the trainer, and until what its predecessor left open is decided."""
        why = "attached, and not the trainer yet, or what was left open is undecided: `reef-bus status` says for whom"
        slow = asyncio.get_running_loop().call_later(SLOW_S, log.warning, why)
        try:
            while not self.role.settled():
                moved = asyncio.ensure_future(self.role.moved.wait())
                try:
                    await self.until(moved)
                finally:
                    moved.cancel()
        finally:
            slow.cancel()

    async def room(self) -> None:
        """Wait until another copy may be taken; whoever took it gives the room back."""
        if self.end.done():
            self.end.result()
        await self._room.acquire()

    def give_back(self) -> None:
        self._room.release()

    async def publish(self, step: int, pieces: Pieces) -> Outcome:
        """Hand one step in, and wait for what becomes of it. It is logged, too: nobody may be looking at a handle."""
        task = asyncio.current_task()
        self._publishing.add(task)
        try:
            handed = await self._hand_in(step, pieces)
            del pieces  # the role keeps them for as long as they are needed
            found = await self.until(handed.told)
        except (ReefError, OSError) as error:
            log.error("step %d: %s", step, error)
            raise
        finally:
            self._publishing.discard(task)
        log.log(logging.INFO if isinstance(found, Committed) else logging.WARNING, "step %d: %s", step, found)
        return found

    async def _hand_in(self, step: int, pieces: Pieces) -> Publish:
        try:
            handed = await self.role.hand_in(step, pieces)
        finally:
            self.give_back()
        log.info("step %d: %d bytes are durable, manifest %s", step, handed.manifest.total, handed.digest)
        self.runner.ask()
        return handed

    async def drained(self) -> None:
        """Wait for what becomes of everything that was handed in: nobody sends it once this boot is over."""
        await asyncio.gather(*filter(None, self._publishing), return_exceptions=True)


@contextlib.asynccontextmanager
async def booted(config: Config) -> AsyncIterator[Boot]:
    """A boot that has joined. Raises Rejected where another process is the trainer, Unavailable without a server."""
    if config.training.backend != ATTACHED:
        raise Rejected(
            f"training.backend is {config.training.backend}: this deployment starts a trainer of its own; bring it up "
            f"with `reef-bus up --set training.backend={ATTACHED}`"
        )
    if not config.nats.url:
        raise Rejected("the configuration names no nats.url; `reef-bus up` writes one that does: run/deployment.json")
    async with contextlib.AsyncExitStack() as stack:
        lock = Lock(config.folder("locks") / "trainer.lock", f"the trainer of {config.state_dir}")
        stack.callback(lock.release)
        journal = await connect(config.nats.url, config.deployment, "reef-trainer")
        stack.push_async_callback(journal.close)
        role = Attached(config, Me("trainer", lock.token), ArtifactStore(config.artifact_root()))
        runner = Runner(journal, role, fetch=blobs_in(config.artifact_root()))
        if config.metrics.port:
            from reef_bus import metrics  # an extra, and half a second of imports, for those who ask for it

            await metrics.serve(config, "trainer", runner, stack)
        boot = Boot(role, runner)
        stack.push_async_callback(boot.close)
        log.info("boot %s joins %s as the trainer", lock.token, config.deployment)
        await boot.ready()
        log.info("boot %s is the trainer; the last step is %d", lock.token, role.place.step)
        yield boot


class Thread:
    """An event loop in a thread, and the boot in it: `opened` once it has joined, `ended` once nothing is left."""

    def __init__(self, config: Config) -> None:
        self.opened: concurrent.futures.Future[Boot] = concurrent.futures.Future()
        self.ended: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._begun = threading.Event()
        self._loop: asyncio.AbstractEventLoop
        self._task: asyncio.Task[None]
        threading.Thread(target=self._main, args=(config,), name="reef-bus", daemon=True).start()
        self._begun.wait()

    def _main(self, config: Config) -> None:
        try:
            asyncio.run(self._live(config))
        except BaseException as error:
            if not self.opened.done():
                self.opened.set_exception(error)
        finally:
            self._begun.set()
            self.ended.set_result(None)

    async def _live(self, config: Config) -> None:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.ensure_future(self._open(config))
        self._begun.set()
        await self._task

    async def _open(self, config: Config) -> None:
        async with booted(config) as boot:
            self.opened.set_result(boot)
            await asyncio.Event().wait()

    def call(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        if self.ended.done():
            coroutine.close()
            raise Rejected("this bus is closed: publish inside its `with` block")
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def soon(self, call: Any) -> None:
        self._loop.call_soon_threadsafe(call)

    def end(self) -> concurrent.futures.Future[None]:
        """Have it closed; what is returned is done when it is."""
        if not self.ended.done():
            self.soon(self._task.cancel)
        return self.ended


# -- for the loop


class Handle:
    """A step whose copy was taken, and which is published whatever its caller does. `await` it in any event loop, or
    ask for its `result()` in any thread. Both raise what `publish` does, and CancelledError when an exception closed
    the bus before there was an outcome."""

    def __init__(self, future: concurrent.futures.Future[Outcome]) -> None:
        self._future = future

    def __await__(self) -> Generator[Any, None, Outcome]:
        return _bridged(self._future).__await__()

    def result(self, timeout: float | None = None) -> Outcome:
        """The outcome. Raises TimeoutError when there is none after `timeout` seconds; it may be asked for again."""
        return self._future.result(timeout)

    def done(self) -> bool:
        return self._future.done()


class _Attachment:
    """What both kinds of bus have."""

    def __init__(self, thread: Thread, boot: Boot) -> None:
        self._thread = thread
        self._boot = boot

    @property
    def step(self) -> int:
        """The last step that was selected: a loop that starts again goes on after it. -1: nothing is registered."""
        return self._boot.role.place.step

    @property
    def head(self) -> Head | None:
        """The release that serves now; after a rollback or a halt its step is not `step`."""
        return self._boot.role.place.head

    def _ask_for_room(self) -> concurrent.futures.Future[None]:
        return self._thread.call(self._boot.room())

    def _no_more(self, room: concurrent.futures.Future[None]) -> None:
        """Who asked for room was interrupted: it is given back, when it is there."""
        if not room.cancelled() and room.exception() is None:
            self._thread.soon(self._boot.give_back)

    def _hand_in(self, named: Mapping[str, Any], step: int) -> Handle:
        """Copy in the caller's thread, where a device's pending work is ordered before the copy."""
        try:
            if step < 0:
                raise Rejected(f"step {step}: expected 0 for the model as it starts, or the number of a later step")
            pieces = copied(named)
        except BaseException:
            self._thread.soon(self._boot.give_back)
            raise
        return Handle(self._thread.call(self._boot.publish(step, pieces)))


class Bus(_Attachment):
    """The bus of a loop that is a coroutine."""

    @overload
    async def publish(self, named_tensors: Mapping[str, Any], *, step: int, wait: Literal[True] = True) -> Outcome: ...

    @overload
    async def publish(self, named_tensors: Mapping[str, Any], *, step: int, wait: Literal[False]) -> Handle: ...

    async def publish(self, named_tensors: Mapping[str, Any], *, step: int, wait: bool = True) -> Outcome | Handle:
        """Publish one step: its tensors, under the names that engines use. As `BlockingBus.publish`."""
        room = self._ask_for_room()
        try:
            await _bridged(room)
        except asyncio.CancelledError:
            room.add_done_callback(self._no_more)
            raise
        handle = self._hand_in(named_tensors, step)
        return await handle if wait else handle


class BlockingBus(_Attachment):
    """The bus of a loop that is a plain function, in a script, a trainer's callback or a notebook's cell."""

    @overload
    def publish(self, named_tensors: Mapping[str, Any], *, step: int, wait: Literal[True] = True) -> Outcome: ...

    @overload
    def publish(self, named_tensors: Mapping[str, Any], *, step: int, wait: Literal[False]) -> Handle: ...

    def publish(self, named_tensors: Mapping[str, Any], *, step: int, wait: bool = True) -> Outcome | Handle:
        """Publish one step: its tensors, under the names that engines use. The first, step 0, registers the model.

        A copy is taken at once, and the loop may go on to write to its tensors. Returns what became of it; without
        `wait`, a handle of that. Waits as long as there is no engine that could take it. Published again, after a
        restart say, a step is found on the log by its content, and nothing is done twice.

        Raises Rejected for tensors that cannot be published, for a step that does not go on from the log, and when
        another loop has taken over; ContractError when the log contradicts itself.
        """
        room = self._ask_for_room()
        try:
            room.result()
        except KeyboardInterrupt:
            room.add_done_callback(self._no_more)
            raise
        handle = self._hand_in(named_tensors, step)
        return handle.result() if wait else handle


@contextlib.asynccontextmanager
async def attach(config: Config) -> AsyncIterator[Bus]:
    """Be the trainer of a deployment whose `training.backend` is `attached`; an older trainer boot retires.

    At the end of the block, what was handed in is waited for; when the block raises, it is left to the next boot.
    """
    thread = Thread(config)
    try:
        boot = await _bridged(thread.opened)
        yield Bus(thread, boot)
        await _bridged(thread.call(boot.drained()))
    finally:
        await _bridged(thread.end())


@contextlib.contextmanager
def attach_blocking(config: Config) -> Iterator[BlockingBus]:
    """As `attach`, for a loop that is a plain function; also where an event loop runs already."""
    thread = Thread(config)
    try:
        boot = thread.opened.result()
        yield BlockingBus(thread, boot)
        thread.call(boot.drained()).result()
    finally:
        thread.end().result()


def _bridged(future: concurrent.futures.Future[T]) -> asyncio.Future[T]:
    """The other thread's future in this event loop. Whoever stops waiting for it ends nothing there."""
    return asyncio.shield(asyncio.wrap_future(future))
