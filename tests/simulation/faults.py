"""What may go wrong, each kind with a switch and a rate; and the nemesis that draws when, and to whom, it does.

Knows: names of faults, rates, the last event of LOG. Must not know: how a fault is carried out, or what is right.
Swarm testing: every seed turns on some kinds only, because faults hide each other.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from reef_bus.events import CATALOGUE
from tests.simulation.loop import NEVER

STRIKES = ("crash", "stop", "pause", "partition", "outage", "lag", "silence", "skew", "twin", "remain")
"""Fall upon a process between two of its steps. `remain`: it ends, and something of it cannot be ended for a while."""
APPENDS = ("lost", "lost_ack", "late", "misspelt", "duplicate")
"""Fall upon an append on its way to the broker or back."""
TRANSFERS = ("slow", "stuck", "corrupt", "skip", "swap", "late_bytes")
"""Fall upon one receiver of an attempt. `skip` and `swap` are receivers that lie about what they loaded."""
HANDS = ("reject", "drop", "no_room", "no_artifact", "no_swap", "repeat")
"""Fall upon what a role does: a decision against, a batch that cannot be trained, memory, an artifact that is away, a
second copy that cannot be swapped in; a harness that says everything twice."""
LENDING = ("no_memory",)
"""Falls upon engines that give memory away or take it back; never drawn with the others."""
KINDS = (*STRIKES, *APPENDS, *TRANSFERS, *HANDS)
LOADS = ("no_load", "late_load", "another_load", "skip_load")
"""Fall upon the load of an adapter: it is refused; it is there, and nobody hears of it; it is another one; it is not
there, and nobody says so."""
ADAPTING = (*LOADS, "no_proof", "leak", "lose")
"""Fall upon adapters: also a proof that the engine refuses, an unload that is not confirmed, and, as a strike, an
engine that was started again behind its agent's back and holds nothing any more."""

SPOILED_AT = ("ReleaseCommitted", "EngineJoined")
"""When `spoil` strikes: the artifact of a committed adapter is away, or damaged, for a while. Who draws it has a stream
of chance of its own: a seed without it has the history that it would have anyway."""

ADAPTERS = ("AdapterRegistered", "AdapterUnloaded", "AdapterLeaked")
COLOCATED = ("EngineMemoryReleased", "EngineMemoryRestored")
APART = (*ADAPTERS, *COLOCATED)
EVENTS = tuple(name for name, event in CATALOGUE.items() if event.family != "record" and name not in APART)
"""Of deployments that train the whole model, beside their engines. What a seed draws depends on how many they are:
those of other kinds of deployments stand apart, so that older seeds keep their histories."""
REQUESTS = tuple(name for name, event in CATALOGUE.items() if event.family == "operator")

RARE = (
    *("RecoveryHalted", "RecoveryResumed", "CleanupUnconfirmed", "JobDropped", "JobAmbiguous", "JobDiscarded"),
    *("CandidateRejected", "SenderFailed", "TrainerRestored", "PublicationRefused", "PublicationHalted"),
    *("ReceiverFailed", "EngineLeft", "EngineExcluded", "RequestRefused", "EngineStaged", *REQUESTS),
)
"""Events that most runs never see; strikes lie in wait for them."""

RAREST = (
    *("RecoveryHalted", "JobDropped", "JobAmbiguous", "JobDiscarded", "CandidateRejected", "SenderFailed"),
    *("TrainerRestored", "PublicationRefused", "PublicationHalted", "RollbackRequested", "JobRestoreRequested"),
    *("PublicationHaltRequested", "EngineRetireRequested", "ReceiverFailed"),
)
"""What `ambushes` lie in wait for, whichever comes."""


@dataclass(frozen=True, kw_only=True)
class Faults:
    """0 is off. Strikes: per thousand scheduler steps; the rest: of the occasions, a part between 0 and 1.

    `aims` are strikes and appends that wait for an event: (kind, event name), each once;
    `ambushes` are such kinds that wait for any of the rarest.
    """

    crash: float = 0.0
    stop: float = 0.0
    pause: float = 0.0
    partition: float = 0.0
    outage: float = 0.0
    lag: float = 0.0
    silence: float = 0.0
    skew: float = 0.0
    twin: float = 0.0
    remain: float = 0.0
    lost: float = 0.0
    lost_ack: float = 0.0
    late: float = 0.0
    misspelt: float = 0.0
    duplicate: float = 0.0
    slow: float = 0.0
    stuck: float = 0.0
    corrupt: float = 0.0
    skip: float = 0.0
    swap: float = 0.0
    late_bytes: float = 0.0
    reject: float = 0.0
    drop: float = 0.0
    no_room: float = 0.0
    no_artifact: float = 0.0
    no_swap: float = 0.0
    repeat: float = 0.0
    no_load: float = 0.0
    late_load: float = 0.0
    another_load: float = 0.0
    skip_load: float = 0.0
    no_proof: float = 0.0
    leak: float = 0.0
    lose: float = 0.0
    spoil: float = 0.0
    no_memory: float = 0.0
    aims: tuple[tuple[str, str], ...] = ()
    ambushes: tuple[str, ...] = ()

    @classmethod
    def drawn(cls, chance: random.Random) -> Faults:
        """A seed's own subset."""
        rates = {kind: _rate(kind, chance) for kind in KINDS if chance.random() < (0.4 if kind in HANDS else 0.25)}
        aims = tuple(aim(chance, chance.choice((RARE, EVENTS))) for _ in range(chance.randrange(7)))
        ambushes = tuple(aim(chance, EVENTS)[0] for _ in range(chance.randrange(5)))
        return replace(cls(aims=aims, ambushes=ambushes), **rates)

    @classmethod
    def adapted(cls, chance: random.Random) -> Faults:
        """The same, and some of what may happen to adapters; strikes lie in wait for their events, too."""
        drawn = cls.drawn(chance)
        rates = {kind: _rate(kind, chance) for kind in ADAPTING if chance.random() < 0.35}
        aims = tuple(aim(chance, ADAPTERS) for _ in range(chance.randrange(3)))
        return replace(drawn, aims=(*drawn.aims, *aims), **rates)

    def besides(self, chance: random.Random) -> Faults:
        """What is drawn from a stream of its own: artifacts that are spoiled; and, as few unloads come to it by
        themselves, leaks for which strikes lie in wait."""
        found = replace(self, spoil=chance.choice((0.1, 0.3, 0.6))) if chance.random() < 0.35 else self
        if chance.random() < 0.8:
            return found
        aims = tuple(aim(chance, ("AdapterLeaked",)) for _ in range(2))
        return replace(found, leak=0.3, aims=(*found.aims, *aims))


def aim(chance: random.Random, events: tuple[str, ...]) -> tuple[str, str]:
    return chance.choice((*STRIKES, *APPENDS)), chance.choice(events)


def _rate(kind: str, chance: random.Random) -> float:
    if kind in STRIKES or kind == "lose":
        return round(chance.uniform(0.1, 0.8), 3)
    return round(chance.choice((0.03, 0.1, 0.3)), 3)


class Nemesis:
    """Draws faults and counts them by the event that was the log's last. `strike` carries a strike out."""

    def __init__(self, faults: Faults, chance: random.Random, tell: Callable[[str], None]) -> None:
        self.faults, self.chance, self.tell = faults, chance, tell
        self.hits: Counter[tuple[str, str]] = Counter()
        self.orders: list[tuple[str, str]] = []  # (occasion, or "" for any append; kind): what is else drawn
        self.last = ""
        self.active = True
        self._spoiled: dict[str, str] = {}
        self.strike: Callable[[str, str], str] = lambda kind, whom: ""
        self._rates = {kind: rate for kind in (*KINDS, *ADAPTING, *LENDING) if (rate := getattr(faults, kind))}
        self._weights = {kind: rate for kind, rate in self._rates.items() if kind in (*STRIKES, "lose")}
        self._total = sum(self._weights.values()) / 1000
        self._aims = list(faults.aims)
        self._ambushes = list(faults.ambushes)
        self.due: list[tuple[int, str, str]] = []
        self._strikes_at = self._draw()

    def saw(self, event: str, boot: str) -> None:
        """LOG's last event is another one now, written by that boot."""
        self.last = event
        if not self.active:
            return
        for aim in [aim for aim in self._aims if aim[1] == event]:
            self._aims.remove(aim)
            self._fall_due(aim[0], boot)
        if self._ambushes and event in RAREST and self.chance.random() < 0.6:
            self._fall_due(self._ambushes.pop(), boot)

    def _fall_due(self, kind: str, boot: str) -> None:
        """Upon the next append, whoever's; or soon upon a process, as likely as not the one that was waited for."""
        if kind in APPENDS:
            self.orders.append(("", kind))
        else:
            self.due.append((self.chance.randrange(6), kind, boot if self.chance.random() < 0.5 else ""))

    def next_at(self) -> int:
        """The step after which `step` is to be called."""
        return NEVER if not self.active else 0 if self.due else self._strikes_at

    def step(self, steps: int) -> None:
        """Between two steps of anybody, when something is due: so many were taken."""
        if steps >= self._strikes_at:
            self._strikes_at = steps + self._draw()
            self._strike(self.chance.choices(list(self._weights), list(self._weights.values()))[0])
        if self.due:
            due, self.due = self.due, []
            for steps, kind, whom in due:
                if steps:
                    self.due.append((steps - 1, kind, whom))
                else:
                    self._strike(kind, whom)

    def befalls(self, kinds: tuple[str, ...]) -> str:
        """Which of these kinds, if any, falls upon the occasion at hand; it is counted as having struck."""
        if self.active:
            for kind in kinds:
                rate = self._rates.get(kind)
                if rate and self.chance.random() < rate:
                    self.hit(kind)
                    return kind
        return ""

    def falls_upon(self, occasion: str, kinds: tuple[str, ...]) -> str:
        """What was ordered for that occasion (an event's append, or `receive`), else what is drawn of `kinds`."""
        for order in self.orders:
            if self.active and (order[0] == occasion or (kinds is APPENDS and not order[0])):
                self.orders.remove(order)
                self.hit(order[1])
                return order[1]
        return self.befalls(kinds)

    @property
    def spoiled(self) -> dict[str, str]:
        """Blobs that engines find `damaged`, or do not find (`away`)."""
        return self._spoiled if self.active else {}

    def hit(self, kind: str, whom: str = "") -> None:
        self.hits[kind, self.last] += 1
        self.tell(f"!! {kind} {whom}".rstrip())

    def _draw(self) -> int:
        return int(self.chance.expovariate(self._total)) + 1 if self._total else NEVER

    def _strike(self, kind: str, whom: str = "") -> None:
        if struck := self.strike(kind, whom):
            self.hit(kind, struck)
