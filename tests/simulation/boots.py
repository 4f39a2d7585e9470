"""Boots of roles: the real role and the real runner, on a simulated process, connection and pair of hands.

Knows: how each role's `_build` puts its parts together, and how `reef_bus.process` ends a boot. Must not know: when
anything fails, or what must hold.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import traceback
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp

from consumers.reef_engine.agent import Agent
from consumers.reef_engine.endpoint import Waiting
from consumers.reef_engine.fault import Fault
from consumers.reef_engine.server import Server
from consumers.reef_gateway.recorder import Recorder
from consumers.reef_gateway.role import Gateway
from consumers.reef_gateway.router import Router
from consumers.reef_publisher.role import Heartbeats, Publisher
from consumers.reef_supervisor.role import Supervisor
from consumers.reef_trainer.book import RecordBook
from consumers.reef_trainer.role import Trainer
from reef_bus.artifacts import ArtifactStore
from reef_bus.backends import Generated, Prompt, TrainingBackend
from reef_bus.config import Config
from reef_bus.core.effects import Me
from reef_bus.core.membership import Engine
from reef_bus.core.recovery import Seen
from reef_bus.errors import ReefError, Unavailable
from reef_bus.events import CleanupUnconfirmed, ComponentLost, Event, Lora
from reef_bus.journal import open_log
from reef_bus.process import DEFECT, OK, OVER
from reef_bus.runner import Retired, Role, Runner
from tests.simulation.adapting import AdapterMemory, AdapterOptimizer
from tests.simulation.broker import Broker, Connection, Link
from tests.simulation.faults import Nemesis
from tests.simulation.hands import Memory, Network, Optimizer, Picky, Registry, Shelf, Wire
from tests.simulation.loop import Loop, Process
from tests.simulation.shape import Shape

STORE = Path("artifacts")
SIGKILL = -9
PATIENCE_S = 1.0  # for which a supervisor's clean-up waits, in no time here
STRAY = 10_000  # added to a process's pid: that of what it left behind
WAIT_S = 2.0
TICK_S = BEAT_S = 1.0


class Machines:
    """What every boot stands on, and every boot that there ever was, by its id."""

    loop: Loop
    chance: random.Random
    config: Config
    broker: Broker
    network: Network
    nemesis: Nemesis
    registry: Registry
    roles: dict[str, str]
    shape: Shape

    def __init__(self) -> None:
        self.boots: dict[str, Boot] = {}
        self.links: dict[str, Link] = {}
        self.defects: list[str] = []
        self.pids = itertools.count(100)

    def tell(self, text: str) -> None:
        """A line of the story."""

    def took(self, boot: Boot) -> None:
        """An engine takes memory back."""

    def start(self, component: str) -> Boot:
        number = 1 + sum(boot.component == component for boot in self.boots.values())
        boot = Boot(self, component, f"{component}.{number}")
        self.boots[boot.name] = boot
        boot.main = boot.spawn(boot.live())
        boot.main.add_done_callback(lambda _: boot.end(OK))  # also when it is asked to stop before its first step
        return boot

    def running(self) -> list[Boot]:
        return [boot for boot in self.boots.values() if boot.exit is None]


class Boot(Process):
    """One process. `poll` and `pid` are what a supervisor knows of it; `skew` is its wall clock's error in ns."""

    def __init__(self, machines: Machines, component: str, name: str) -> None:
        super().__init__(machines.loop, name)
        self.machines, self.component = machines, component
        self.me, self.pid, self.exit = Me(component, name), next(machines.pids), None
        self.exit: int | None
        self.link, self.skew = Link(machines.loop), 0
        self.remains_until = 0.0  # until then something of it lives on that no signal ends
        self.missed: set[str] = set()  # blobs that its artifact store did not have when it last asked for them
        self.calls: dict[asyncio.Future[Any], None] = {}  # in order, as a set is not
        self.children: list[Boot] = []
        self.journal = Connection(machines.broker, self, self.link)
        self.main: asyncio.Task[None] | None = None
        self.role: Role | None = None
        self.runner: Runner | None = None
        self.agent: Agent | None = None
        self.memory: Memory | None = None
        self.optimizer: Optimizer | None = None
        self.server: Server | None = None
        self.recorder: Recorder | None = None

    def wall(self) -> int:
        return self.machines.broker.wall() + self.skew

    def poll(self) -> int | None:
        return self.exit

    # -- as reef_bus.process runs a boot

    async def live(self) -> None:
        try:
            await self._boot()
        except Retired:
            self.end(OVER)
        except asyncio.CancelledError:
            self.end(OK)
        except ReefError as error:
            self.machines.tell(f"{self.name} gives up: {error}")
            if not isinstance(error, Unavailable):
                self.machines.defects.append(f"{self.name} ends: {type(error).__name__}: {error}")
            self.end(OVER)
        except Exception:
            self.machines.defects.append(f"{self.name} died of a defect: {traceback.format_exc()}")
            self.end(DEFECT)

    async def _boot(self) -> None:
        async with contextlib.AsyncExitStack() as stack:
            await self.journal.connect(WAIT_S)
            self.role = await BUILD[self.machines.roles[self.component]](self, stack)
            self.runner = Runner(self.journal, self.role, clock=self.wall, tick_s=TICK_S, beat_s=BEAT_S)
            await self.runner.run()

    def end(self, status: int) -> None:
        """The kernel's part: what hung on the process hears that it is gone."""
        if self.exit is not None:
            return
        self.exit, self.dead = status, True
        self.machines.tell(f"{self.name} ended ({status})")
        for call in [call for call in self.calls if not call.done()]:
            call.set_exception(aiohttp.ClientConnectionError("the peer is gone"))
        self.machines.broker.ears = [ear for ear in self.machines.broker.ears if ear[0] is not self]
        for child in self.children:
            child.end(SIGKILL)  # PR_SET_PDEATHSIG

    def kill(self) -> None:
        self.end(SIGKILL)

    def lose(self) -> bool:
        """Its engine was started again by itself while it had nothing to do, and its agent has noticed."""
        agent, memory, runner = self.agent, self.memory, self.runner
        if not isinstance(memory, AdapterMemory) or not agent or not runner:
            return False
        if agent.ingress.locked() or agent.memory.locked():
            return False
        memory.lose()
        agent.doubt()
        runner.ask()
        return True

    def remains(self) -> bool:
        """Whether anything of it lives."""
        return self.exit is None or self.loop.now < self.remains_until


# -- as each role's `_build` puts it together


async def _engine(boot: Boot, stack: contextlib.AsyncExitStack) -> Role:
    machines = boot.machines
    single = machines.shape.engines - machines.shape.single_copy
    stages = machines.shape.mode == "staged" and int(boot.component.rpartition("-")[2]) < single
    boot.memory = _memory(machines, stages)
    boot.memory.took = lambda: machines.took(boot)
    store = Shelf(STORE, machines.nemesis, boot.missed)
    agent = Agent(machines.config, boot.me, f"http://{boot.name}", boot.memory, store, Fault(), clock=boot.wall)
    agent.transports["tcp"] = Wire(machines.network, boot)
    boot.watched = True
    boot.agent, boot.server = agent, Server(agent, machines.config.inference.max_batch)
    worker = asyncio.create_task(boot.server.work())
    worker.add_done_callback(partial(_worked, boot))
    stack.callback(worker.cancel)
    if machines.config.inference.lease_s:
        stack.callback(asyncio.create_task(agent.renew(boot.journal)).cancel)
    return agent


def _memory(machines: Machines, stages: bool) -> Memory:
    if most := machines.config.adapters.most():
        return AdapterMemory(machines.chance, machines.nemesis, most)
    return Memory(machines.chance, machines.nemesis, stages=stages, lends=machines.shape.colocate)


def _worked(boot: Boot, worker: asyncio.Task[None]) -> None:
    """An engine that cannot go on is no engine any more, and somebody has asked it for what it cannot do."""
    if not worker.cancelled() and (error := worker.exception()):
        boot.machines.defects.append(f"{boot.name} cannot generate: {error!r}")
        boot.end(DEFECT)


async def _trainer(boot: Boot, stack: contextlib.AsyncExitStack) -> Role:
    machines, store = boot.machines, ArtifactStore(STORE)
    noise = machines.chance if machines.shape.noisy else None
    backend = Optimizer(machines.registry, machines.nemesis, noise, in_place=machines.shape.in_place)
    boot.optimizer = backend
    book = RecordBook(machines.config, boot.journal, store)
    await book.start(stack)
    trainer = Trainer(machines.config, boot.me, backend, store, book, adapting=partial(_adapting, machines))
    trainer.transports["tcp"] = Wire(machines.network, boot)
    if not machines.config.training.hold:
        trainer.selector = Picky(machines.nemesis)
    return trainer


def _adapting(machines: Machines, base: Path, lora: Lora) -> TrainingBackend:
    noise = machines.chance if machines.shape.noisy else None
    return AdapterOptimizer(machines.registry, machines.nemesis, noise, base)


async def _publisher(boot: Boot, stack: contextlib.AsyncExitStack) -> Role:
    lapse_s = boot.machines.config.publication.deadlines.heartbeat_s
    heartbeats = Heartbeats(boot.journal, lapse_s, clock=boot.loop.time)
    await boot.journal.beats(heartbeats.hear)
    return Publisher(boot.machines.config, boot.me, heartbeats)


async def _gateway(boot: Boot, stack: contextlib.AsyncExitStack) -> Role:
    boot.recorder = Recorder(boot.journal, ArtifactStore(STORE), f"gateway/{boot.me.id}", boot.name)
    await boot.recorder.start(stack)
    return Gateway(boot.machines.config, boot.me, Routes(boot.machines), boot.recorder)


async def _supervisor(boot: Boot, stack: contextlib.AsyncExitStack) -> Role:
    incarnation = boot.machines.chance.randbytes(4).hex()
    while True:
        try:
            await open_log(boot.journal, incarnation, "supervisor")
            parent = Parent(boot)
            await boot.journal.beats(parent.hear)
            return parent
        except Unavailable:
            await asyncio.sleep(WAIT_S / 10)


BUILD: dict[str, Callable[[Boot, contextlib.AsyncExitStack], Awaitable[Role]]] = {
    "engine": _engine,
    "trainer": _trainer,
    "publisher": _publisher,
    "gateway": _gateway,
    "supervisor": _supervisor,
}


class Kid:
    """A simulated process as its supervisor sees it: what `reef_supervisor.processes.Child` is of a real one."""

    def __init__(self, process: Boot) -> None:
        self.process, self.pid = process, process.pid
        self.reaped, self.boot, self.halted = False, "", False

    @property
    def exit(self) -> int | None:
        return self.process.exit

    def poll(self) -> int | None:
        return self.process.exit

    def end(self, seconds: float) -> tuple[int, ...]:
        self.process.kill()
        self.reaped = self.process.loop.now + PATIENCE_S > self.process.remains_until
        return () if self.reaped else (self.pid + STRAY,)


class Parent(Supervisor):
    """A supervisor whose children are simulated."""

    def __init__(self, boot: Boot) -> None:
        super().__init__(boot.machines.config, Path("deployment.yaml"), boot.me)
        self.boot = boot
        self.roles = {name: role for name, role in boot.machines.roles.items() if role != "supervisor"}

    def _see(self, name: str, role: str) -> Seen:
        """As the real one, whose locks are files."""
        child = self.children.get(name)
        if child and not child.reaped:
            return Seen(role=role, exit=child.poll(), owned=True, boot=child.boot, halted=child.halted)
        return Seen(role=role, exit=None if self._strangers(name) else 0)

    def _strangers(self, name: str) -> list[Boot]:
        return [b for b in self.boot.machines.boots.values() if b.component == name and b.remains()]

    def _wait_for_stranger(self, name: str) -> Event:
        if left := self._strangers(name):
            return CleanupUnconfirmed(component=name, pids=tuple(b.pid for b in left), detail="not ours")
        return ComponentLost(component=name, exit=0, detail="its supervisor ended")

    def _start(self, name: str) -> int:
        child = self.children.get(name)
        if child is None or child.reaped:
            process = self.boot.machines.start(name)
            self.boot.children.append(process)
            child = self.children[name] = Kid(process)  # type: ignore[assignment]
        return child.pid


class Routes(Router):
    """A router whose requests go over the simulated network."""

    def __init__(self, machines: Machines) -> None:
        super().__init__(None)  # type: ignore[arg-type]
        self.machines = machines

    async def _post(self, engine: Engine, prompt: Prompt) -> Generated | None:
        boot = self.machines.boots[engine.boot]
        await asyncio.sleep(self.machines.broker.delay())
        if boot.exit is not None or boot.server is None:
            raise aiohttp.ClientConnectionError("nobody listens there")
        answer: asyncio.Future[Generated] = self.machines.loop.create_future()
        boot.calls[answer] = None
        try:
            boot.server.queue.put_nowait(Waiting(prompt, answer))
            found = await answer
        finally:
            boot.calls.pop(answer, None)
        await asyncio.sleep(self.machines.broker.delay())
        return found
