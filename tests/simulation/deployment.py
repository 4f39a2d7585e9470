"""One seed's history: a deployment begins, faults fall upon it, they stop, and everything must come to its end.

Knows: how each fault is carried out, and when a run is over. Must not know: what any role does.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hashlib
import logging
import random
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from reef_bus.envelope import decode
from reef_bus.events import Recorded
from reef_bus.journal import LOG
from tests.simulation.adapting import AdapterMemory
from tests.simulation.boots import Boot, Machines
from tests.simulation.broker import Broker
from tests.simulation.faults import COLOCATED, Faults, Nemesis, aim
from tests.simulation.hands import Network, Registry
from tests.simulation.harness import Harness
from tests.simulation.loop import Loop, Process, Stuck
from tests.simulation.person import Person
from tests.simulation.shape import Shape
from tests.simulation.spoiling import Spoiler
from tests.simulation.truth import Truth, Violation
from tests.spec import SECOND

FAULTS_S = 18.0
SETTLED_S = 120.0
"""Faults may fall for so long; after they stop, everything must have come to its end within so long."""


@dataclass(frozen=True)
class Outcome:
    """How a seed went. `violation` is empty if nothing happened that must not; `settled_s` is how long everything took
    to come to its end once the faults had stopped."""

    seed: int
    violation: str
    digest: str
    seconds: float
    settled_s: float
    steps: int
    hits: Counter[tuple[str, str]]
    events: Counter[str]
    ended: Counter[str]
    voids: int
    story: tuple[tuple[float, str], ...] = field(repr=False)

    def without_story(self) -> Outcome:
        return replace(self, story=())


Cue = tuple[str, Callable[[Recorded], bool]]
"""The name of an event, and what is to happen when one was stored; True if the cue is used up."""


class Deployment(Machines):
    """A trainer, engines, two publishers, a gateway and their supervisor; clients; and a person who looks after it."""

    def __init__(
        self, seed: int, faults: Faults | None = None, shape: Shape | None = None, *, colocated: bool = False
    ) -> None:
        super().__init__()
        self.chance = chance = random.Random(seed)
        self.story: list[tuple[float, str]] = []
        drawn = Faults.drawn(chance), Shape.drawn(chance)
        self.faults, self.shape = faults or drawn[0], shape or drawn[1]
        if faults is None:
            asked = tuple(aim(chance, (kind,)) for kind, _ in self.shape.asks)
            asked += (("crash", "JobStarted"), aim(chance, ("JobAmbiguous",))) if self.shape.in_place else ()
            self.faults = replace(self.faults, aims=(*self.faults.aims, *asked))
        if colocated:
            self.shape = self.shape.colocated()
            aims = tuple(aim(chance, COLOCATED) for _ in range(chance.randrange(4)))
            rate = chance.choice((0.0, 0.0, 0.03, 0.1))
            self.faults = replace(self.faults, aims=(*self.faults.aims, *aims), no_memory=rate)
        self.loop = Loop(chance, shuffle=self.shape.shuffle, thread_s=self.shape.thread_s)
        self.loop.longer["generate_until"] = self.shape.generate_s
        self.nemesis = Nemesis(self.faults, chance, self.tell)
        self.nemesis.strike = self._strike
        self.registry = Registry()
        self.truth = Truth(self.registry)
        self.broker = Broker(self.loop, chance, self.nemesis, self.shape.semantics, self._saw)
        self.network = Network(self.loop, chance, self.nemesis)
        self.config = self.shape.config()
        self.roles = {"supervisor": "supervisor", **self.config.components()}
        self.person = Person(self, self.truth, self.shape.asks)
        self.spoiler = Spoiler(self, self.truth, seed)
        self.violation = ""
        self.cues: list[Cue] = []
        self.healed = 0.0
        self.clients: list[asyncio.Task[None]] = []

    # -- what happens

    def tell(self, text: str) -> None:
        self.story.append((self.loop.now, text))

    def _saw(self, stream: str, recorded: Recorded) -> None:
        try:
            void = self.truth.saw(stream, recorded)
            if stream == LOG and not void:
                self._judge_memory(recorded)
                self.spoiler.judge(recorded)
        except Violation as violation:
            self._violate(str(violation))
            return
        if stream == LOG:
            if not void:
                self.nemesis.saw(recorded.name, recorded.boot)
                self.loop.pause_at = self.nemesis.next_at()
                if self.nemesis.active:
                    self.person.saw(recorded)
                    self.spoiler.saw(recorded)
            said = f"{recorded.seq:3} {recorded.name:24} {recorded.boot:14} {recorded.event.key:12} {recorded.id[:8]}"
            self.tell(said + (f"  void: {void}" if void else ""))
            self.cues = [cue for cue in self.cues if cue[0] != recorded.name or not cue[1](recorded)]

    def _judge_memory(self, recorded: Recorded) -> None:
        """What engines and trainer say of their memory is so."""
        if recorded.name == "JobStarted":
            self.truth.check_given(self.boots)
        boot = self.boots.get(recorded.boot)
        if self.shape.colocate and recorded.name in ("CandidateReady", "JobDropped") and boot is not None:
            if boot.optimizer is not None and boot.optimizer.busy:
                raise Violation(f"{boot.name} says {recorded.name} with the memory that its step took")

    def took(self, boot: Boot) -> None:
        try:
            self.truth.check_taken(boot)
            trainer = self.boots.get(self.truth.world.training.boot)
            if trainer is not None and trainer.exit is None and trainer.optimizer and trainer.optimizer.busy:
                raise Violation(f"{boot.name} takes memory back that a step of {trainer.name} has")
        except Violation as violation:
            self._violate(str(violation))

    def _after_step(self, process: Process | None) -> None:
        if process is not None and process.watched:
            assert isinstance(process, Boot) and process.agent is not None
            if process.agent.open.is_set() and process.exit is None:
                self._check(process)
        if self.loop.steps >= self.loop.pause_at:
            self.nemesis.step(self.loop.steps)
            self.loop.pause_at = self.nemesis.next_at()

    def _check(self, boot: Boot) -> None:
        try:
            self.truth.check_engine(boot)
        except Violation as violation:
            self._violate(str(violation))

    def _violate(self, text: str) -> None:
        if not self.violation:
            self.violation = text
            self.tell(f"VIOLATION {text}")

    async def run(self) -> None:
        """From an empty log to an audited one."""
        self.loop.after_step, self.loop.pause_at = self._after_step, self.nemesis.next_at()
        self.start("supervisor")
        asks = [(name, of) for of in self.config.adapters.scenarios or ("",) for name in ("x", "y")]
        clients = [Harness(self, self.truth, f"{of}{name}", of) for name, of in asks]
        self.clients = [asyncio.create_task(client.run()) for client in clients]
        self.clients.append(self.person.spawn(self.person.live()))
        await self._until(self._over, FAULTS_S)
        self._heal()
        await self._settle()

    async def _until(self, holds: Any, seconds: float) -> bool:
        end = self.loop.now + seconds
        while not holds() and self.loop.now < end and not self.violation:
            self._look()
            await asyncio.sleep(0.25)
        return bool(holds())

    def _look(self) -> None:
        """What is wrong with nobody's memory: boots that died of a defect, consumers that halted, lost clients."""
        if self.defects:
            self._violate(self.defects[0])
        for client in self.clients:
            if client.done():
                self._violate(f"a client ended: {client.exception()!r}")
        for boot in self.running():
            if boot.runner is not None and boot.runner.halted:
                self._violate(f"{boot.name} halted: {boot.runner.halted}")

    def _over(self) -> bool:
        """Every job was dispatched and everything has ended."""
        world = self.truth.world
        return world.training.dispatched >= self.config.training.max_jobs and self.truth.settled()

    def _everybody_serves(self) -> bool:
        """The boots that the log shows are those that run, and every engine's own gate is open with the head."""
        if not self._over() or len(self._latest()) < len(self.roles):
            return False
        world = self.truth.world
        current = {engine.boot for engine in world.membership.engines.values()} | {world.training.boot}
        running = {boot.name: boot for boot in self.running()}
        return current <= running.keys() and all(
            boot.agent.serving() == world.publications.head.load_id  # type: ignore[union-attr]
            and all(self._answers(boot, scenario) for scenario in self.config.adapters.scenarios)
            for boot in running.values()
            if boot.agent is not None and boot.name in current
        )

    def _answers(self, boot: Boot, scenario: str) -> bool:
        assert boot.agent is not None
        found, head = boot.agent.version(scenario), self.truth.world.publications.adapters.get(scenario)
        return found is not None and head is not None and found.load_id == head.load_id

    def _latest(self) -> set[str]:
        return {boot.component for boot in self.running()}

    # -- scripts

    def when(self, name: str, what: Callable[[], object], nth: int = 1, boot: str = "") -> None:
        """Do `what` as soon as the `nth` such event (by that boot, if one is given) is stored."""
        left = nth

        def cue(recorded: Recorded) -> bool:
            nonlocal left
            left -= boot in ("", recorded.boot)
            if left or boot not in ("", recorded.boot):
                return False
            what()
            return True

        self.cues.append((name, cue))

    def current(self, component: str) -> Boot:
        """The boot that runs; the newest if there are several."""
        return [boot for boot in self.running() if boot.component == component][-1]

    def pause(self, component: str, seconds: float) -> None:
        """SIGSTOP, and SIGCONT so much later."""
        boot = self.current(component)
        boot.stop()
        self._after(seconds, boot.proceed)

    # -- the person

    def _heal(self) -> None:
        """Faults stop: networks are whole, clocks are right, nobody is stopped."""
        self.tell("-- faults stop")
        self.healed = self.loop.now
        self.nemesis.active = False
        self.loop.pause_at = self.nemesis.next_at()
        self.broker.skew = 0
        for boot in self.boots.values():
            boot.skew, boot.link.lag, boot.link.silent = 0, 0.0, False
            boot.link.mend()
            boot.proceed()

    async def _settle(self) -> None:
        """A supervisor that is gone is started again."""
        end = self.loop.now + SETTLED_S
        while not await self._until(self._everybody_serves, 5.0) and not self.violation:
            if self.loop.now > end:
                self._violate(f"not settled {SETTLED_S:g} s after the faults stopped: {self._unsettled()}")
                return
            self._supervise()
        self._look()

    def _unsettled(self) -> str:
        world = self.truth.world
        pending = [c for c in world.training.selected if c not in world.publications.ended]
        open_ = world.publications.open
        return (
            f"jobs {world.training.dispatched}, open job {world.training.job and world.training.job.id}, open target "
            f"{open_ and open_.load_id}, pending {pending}, running {sorted(boot.name for boot in self.running())}, "
            f"serving {[b.name for b in self.running() if b.agent and b.agent.serving()]}"
        )

    def check_wire(self) -> None:
        """What all followers shared is still what the wire says: no fold has changed an event."""
        for stream, events in self.broker.read_once.items():
            for recorded, message in zip(events, self.broker.messages[stream], strict=True):
                if recorded != decode(*message):
                    raise Violation(f"{stream} {recorded.seq} {recorded.name} was changed in memory after it was read")

    # -- strikes

    def _strike(self, kind: str, whom: str) -> str:
        """Carry a strike out, upon that boot if it can be; returns upon whom, or nothing if nobody was there."""
        if kind == "outage":
            return self._outage()
        boots = [b for b in self.running() if not b.stopped and (b.component != "supervisor" or kind != "stop")]
        if not boots:
            return ""
        wanted = [boot for boot in boots if boot.name == whom]
        boot = self.chance.choice(wanted or boots)
        return str(getattr(self, f"_{kind}")(boot))

    def _after(self, seconds: float, what: Any, *args: Any) -> None:
        self.loop.call_later(seconds, what, *args, context=self.loop.outside)

    def _a_while(self) -> float:
        """Mostly short, at times long: 0.1 to 60 s."""
        return float(0.1 * 600 ** (self.chance.random() ** 2))

    def _crash(self, boot: Boot) -> str:
        boot.kill()
        if boot.component == "supervisor":
            self._after(self._a_while() / 4, self._supervise)
        return boot.name

    def _lose(self, boot: Boot) -> str:
        engines = [each for each in self.running() if isinstance(each.memory, AdapterMemory) and each.runner]
        found = boot if boot in engines else self.chance.choice(engines) if engines else boot
        return found.name if found.lose() else ""

    def _remain(self, boot: Boot) -> str:
        """Its main process ends; a child of it hangs in the kernel."""
        if boot.component == "supervisor":
            return ""
        seconds = 1 + self.chance.random() * 5
        boot.remains_until = self.loop.now + seconds
        boot.kill()
        return f"{boot.name} for {seconds:.1f} s"

    def _supervise(self) -> None:
        if not any(boot.component == "supervisor" for boot in self.running()):
            self.start("supervisor")

    def _stop(self, boot: Boot) -> str:
        assert boot.main is not None
        boot.main.cancel()
        return boot.name

    def _pause(self, boot: Boot) -> str:
        seconds = self._a_while()
        boot.stop()
        self._after(seconds, boot.proceed)
        return f"{boot.name} for {seconds:.1f} s"

    def _partition(self, boot: Boot) -> str:
        seconds = self._a_while()
        boot.link.cut()
        self._after(seconds, boot.link.mend)
        return f"{boot.name} for {seconds:.1f} s"

    def _outage(self) -> str:
        seconds = self._a_while() / 4
        for boot in self.running():
            boot.link.cut()
            self._after(seconds, boot.link.mend)
        return f"of the broker for {seconds:.1f} s"

    def _lag(self, boot: Boot) -> str:
        boot.link.lag, seconds = self.chance.random() * 3, self._a_while()
        self._after(seconds, setattr, boot.link, "lag", 0.0)
        return f"{boot.name} by {boot.link.lag:.1f} s for {seconds:.1f} s"

    def _silence(self, boot: Boot) -> str:
        boot.link.silent, seconds = True, self._a_while()
        self._after(seconds, setattr, boot.link, "silent", False)
        return f"{boot.name} for {seconds:.1f} s"

    def _skew(self, boot: Boot) -> str:
        """A wall clock jumps: of one process or, now and then, the broker's."""
        seconds = self.chance.choice((-30, -3, -0.5, 0.5, 3, 30))
        if self.chance.random() < 0.2:
            self.broker.skew += int(seconds * SECOND)
            return f"the broker by {seconds} s"
        boot.skew += int(seconds * SECOND)
        return f"{boot.name} by {seconds} s"

    def _twin(self, boot: Boot) -> str:
        """Somebody starts a component by hand although it runs."""
        return self.start(boot.component).name if boot.component != "supervisor" else ""


Prepare = Callable[[Deployment], object]


def simulate(
    seed: int,
    faults: Faults | None = None,
    shape: Shape | None = None,
    prepare: Prepare = lambda deployment: None,
    *,
    colocated: bool = False,
) -> Outcome:
    """Run one seed to its end. `faults` and `shape` instead of the seed's own; `prepare` gets the deployment before it
    begins. `colocated`: it trains where its engines are."""
    before = logging.root.manager.disable
    if before < logging.CRITICAL:  # to say it again would cost a look at every logger
        logging.disable(logging.CRITICAL)
    collects = gc.isenabled()
    gc.disable()
    try:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, contextlib.chdir(folder):
            found = Deployment(seed, faults, shape, colocated=colocated)
            prepare(found)
            return _simulate(seed, found)
    finally:
        if before < logging.CRITICAL:
            logging.disable(before)
        if collects:
            gc.enable()


def adapted(seed: int) -> Outcome:
    """A seed of the other kind: a deployment that trains adapters, and what may happen to these."""
    chance = random.Random(f"adapters {seed}")
    faults = Faults.adapted(chance).besides(random.Random(f"besides {seed}"))
    return simulate(seed, faults, Shape.adapted(chance))


def _simulate(seed: int, found: Deployment) -> Outcome:
    loop, truth = found.loop, found.truth
    loop.set_exception_handler(lambda _, about: found._violate(f"unhandled: {about.get('exception')!r} {about}"))
    main = loop.create_task(found.run(), context=loop.outside)
    try:
        loop.run_until_complete(main)
        if not found.violation:
            truth.check_end()
            found.check_wire()
    except (Violation, Stuck) as error:
        found._violate(str(error))
    seconds, steps, story = loop.now, loop.steps, tuple(found.story)
    loop.set_exception_handler(lambda loop, about: None)
    loop.bury(list(found.boots.values()))
    loop.close()
    text = "\n".join(f"{when:.6f} {line}" for when, line in story)
    return Outcome(
        seed=seed,
        violation=found.violation,
        digest=hashlib.sha256(text.encode()).hexdigest(),
        seconds=seconds,
        settled_s=seconds - found.healed,
        steps=steps,
        hits=found.nemesis.hits,
        events=Counter(recorded.name for recorded in truth.log),
        ended=Counter(how for name, how in truth.world.publications.ended.items() if not name.startswith("base")),
        voids=truth.world.void,
        story=story,
    )
