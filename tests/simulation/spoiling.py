"""Artifacts of committed adapters that engines find damaged, or do not find: which, how and for how long.

Knows: the heads that the log shows, a stream of chance of its own. Must not know: how an engine loads, or what it says.
"""

from __future__ import annotations

import random
from collections import Counter

from reef_bus.core.ids import adapter_name
from reef_bus.core.publication import Release
from reef_bus.events import EngineLeft, Recorded
from tests.simulation.boots import Machines
from tests.simulation.faults import SPOILED_AT
from tests.simulation.truth import Truth, Violation


class Spoiler:
    """Upon some commits and joins, a head's artifact is spoiled for a while; after a commit, an engine may end, too."""

    def __init__(self, machines: Machines, truth: Truth, seed: int) -> None:
        self.machines, self.truth, self.chance = machines, truth, random.Random(f"spoils {seed}")
        self.times = Counter[str]()  # by load id

    def saw(self, recorded: Recorded) -> None:
        """An event of LOG that counts."""
        if recorded.name in SPOILED_AT and self.chance.random() < self.machines.nemesis.faults.spoil:
            self._spoil(recorded.name)

    def judge(self, recorded: Recorded) -> None:
        """What it could not read when it last tried is no reason for a boot to end."""
        if not isinstance(event := recorded.event, EngineLeft):
            return
        boot = self.machines.boots[recorded.boot]
        for release in self.truth.world.publications.releases.values():
            blames = release.scenario and adapter_name(release.scenario, release.load_id) in event.reason
            if blames and boot.missed & {release.manifest, release.weights.digest}:
                raise Violation(f"{boot.name} ends over the artifact of {release.scenario}: {event.reason}")

    def _spoil(self, event: str) -> None:
        heads = [head for head in self.truth.world.publications.adapters.values() if head.parent]
        if not heads:
            return
        head = self.chance.choice(heads)
        digest, how = self.chance.choice((head.manifest, head.weights.digest)), self.chance.choice(("away", "damaged"))
        seconds = 0.5 * 60 ** self.chance.random()
        self.machines.nemesis.spoiled[digest] = how
        self.times[head.load_id] += 1
        self.machines.nemesis.hit("spoil", f"{head.scenario} {head.load_id}, {how} for {seconds:.1f} s")
        self._after(seconds, self.machines.nemesis.spoiled.pop, digest, None)
        if event == "ReleaseCommitted":
            self._after(0.1, self._end_one)

    def _end_one(self) -> None:
        engines = [boot for boot in self.machines.running() if boot.agent is not None]
        if engines and self.chance.random() < 0.7:
            self.chance.choice(engines).kill()

    def _after(self, seconds: float, what: object, *args: object) -> None:
        loop = self.machines.loop
        loop.call_later(seconds, what, *args, context=loop.outside)  # type: ignore[arg-type]


def whole(machines: Machines, release: Release) -> bool:
    """Whether engines can read its artifact."""
    return not machines.nemesis.spoiled.keys() & {release.manifest, release.weights.digest}
