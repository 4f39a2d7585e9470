"""What kind of deployment a seed has: how many of what, in which mode, and what people will ask of it.

Knows: the configuration and its choices, names of requests. Must not know: faults, or what is to come of any of it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Literal

from reef_bus.config import Adapters, Config, Inference, Publication, Training
from reef_bus.core.effects import Deadlines, Restarts
from reef_bus.core.publication import IN_PLACE, PAUSES
from tests.simulation.faults import EVENTS, RARE, REQUESTS

SCENARIOS = ("math", "code", "chat")
DEADLINES = Deadlines(fence_s=2.0, sender_s=2.0, stall_s=1.0, verify_s=2.0, heartbeat_s=2.5)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """`noisy`: no two trainings of a batch give the same weights; `eager`: there are records for more than one job, so
    that training overlaps publication; `single_copy`: so many engines have no room for a second copy; `asks`: requests
    (kind, event) that somebody makes as soon as such an event is stored; `shuffle` and `thread_s` are the loop's;
    `generate_s`: how much longer than other blocking calls an answer takes; `adapters`: scenarios that train one each,
    of which an engine holds `capacity` (0: one for each, and the next one). `colocate` is never drawn."""

    engines: int = 2
    jobs: int = 3
    publishers: int = 2
    transport: str = "tcp"
    mode: str = "fenced"
    pause: str = "drain"
    single_copy: int = 0
    publish: str = "every"
    hold: bool = False
    in_place: bool = False
    lease_s: float = 0.0
    asks: tuple[tuple[str, str], ...] = ()
    semantics: Literal["single", "cluster"] = "single"
    noisy: bool = False
    eager: bool = False
    shuffle: bool = False
    thread_s: float = 0.01
    generate_s: float = 0.0
    adapters: tuple[str, ...] = ()
    capacity: int = 0
    colocate: bool = False

    def colocated(self) -> Shape:
        """The same deployment, as far as it can train where its engines are."""
        pause = "drain" if self.pause == IN_PLACE else self.pause
        return replace(self, colocate=True, mode="fenced", single_copy=0, pause=pause, hold=False)

    @classmethod
    def drawn(cls, chance: random.Random) -> Shape:
        staged = chance.random() < 0.35
        return cls(
            engines=chance.choice((1, 1, 2, 2, 3)),
            jobs=chance.choice((1, 1, 2, 3)),
            publishers=chance.choice((1, 1, 1, 2, 3)),
            transport="files" if chance.random() < 0.15 else "tcp",
            mode="staged" if staged else "fenced",
            pause=chance.choice(PAUSES),
            single_copy=int(staged and chance.random() < 0.1),
            publish=chance.choice(("every", "latest")),
            hold=chance.random() < 0.15,
            in_place=chance.random() < 0.25,
            lease_s=chance.choice((0.0, 0.0, 2.0)),
            asks=_asks(chance) if chance.random() < 0.6 else (),
            semantics=chance.choice(("single", "cluster")),
            noisy=chance.random() < 0.5,
            eager=chance.random() < 0.25,
            shuffle=chance.random() < 0.3,
            thread_s=chance.choice((0.001, 0.01, 0.1)),
            generate_s=chance.choice((0.0, 0.2)),
        )

    @classmethod
    def adapted(cls, chance: random.Random) -> Shape:
        """A deployment of adapters: what is sent or stopped for a release does not matter to them."""
        scenarios = SCENARIOS[: chance.choice((2, 2, 2, 3))]
        return replace(
            cls.drawn(chance),
            adapters=scenarios,
            capacity=len(scenarios) + chance.choice((1, 1, 2, 4)),
            jobs=chance.choice((2, 3, 4)),
            mode="fenced",
            single_copy=0,
            in_place=False,
        )

    def config(self) -> Config:
        return Config(
            deployment="sim",
            scenario="s",
            state_dir=".",
            inference=Inference(
                engines=tuple(f"engine-{n}" for n in range(self.engines)), max_batch=2, lease_s=self.lease_s
            ),
            training=Training(
                groups=2,
                group_size=2,
                max_staleness=1,
                max_jobs=self.jobs,
                hold=self.hold,
                colocate=self.colocate,
            ),
            publication=Publication(
                transport=self.transport,
                mode=self.mode,
                pause=self.pause,
                publish=self.publish,
                publishers=self.publishers,
                deadlines=DEADLINES,
            ),
            adapters=Adapters(scenarios=self.adapters, capacity=self.capacity),
            supervision=Restarts(max_restarts=3, window_s=20.0, delay_s=0.1),
        )


def _asks(chance: random.Random) -> tuple[tuple[str, str], ...]:
    return tuple(
        (chance.choice(REQUESTS), chance.choice(chance.choice((APT, RARE, EVENTS))))
        for _ in range(1 + chance.randrange(5))
    )


APT = (
    *("TargetPersisted", "EngineFenced", "SenderReady", "ReceiverVerified", "EngineStaged", "ReleaseCommitted"),
    *("JobStarted", "CandidateReady", "CandidateEvaluated", "CandidateSelected", "JobAmbiguous", "TransferAborted"),
)
"""Events in the middle of something: whoever asks then, asks about what is just being changed."""
