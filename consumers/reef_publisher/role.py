"""A publisher: targets, aborts, commits, refuses and halts, by appending alone. Run as many as you like.

Knows: the fold and whose heartbeats it has missed. Must not know: weights, engines' addresses, or other publishers.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence

from reef_bus import process
from reef_bus.config import Config
from reef_bus.core import reactions
from reef_bus.core.effects import Debt, Me
from reef_bus.core.world import World
from reef_bus.events import Event
from reef_bus.journal import Beat, Journal
from reef_bus.runner import Role

SECOND = 1_000_000_000
DEAF_S = 2.0  # the loop asks every few hundred ms: after a longer pause this process was stopped, and heard nobody


class Heartbeats:
    """Which boots were not heard for too long. Silence counts only while this process could have heard them: as long
    as somebody is heard, be it this process itself, whose own heartbeats come back to it."""

    def __init__(self, journal: Journal, lapse_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.journal = journal
        self.lapse_s = lapse_s
        self.clock = clock
        self._heard: dict[str, float] = {}
        self._listening = self._asked = self._anybody = clock()

    def hear(self, beat: Beat) -> None:
        self._anybody = self._heard[str(beat.get("boot"))] = self.clock()

    def silent(self, boots: Sequence[str]) -> frozenset[str]:
        now = self.clock()
        if not self.journal.connected() or now - self._asked > DEAF_S or now - self._anybody > self._quiet_s():
            self._listening = now
        self._asked = now
        for boot in boots:
            self._heard.setdefault(boot, now)
        self._heard = {boot: self._heard[boot] for boot in boots}
        return frozenset(b for b in boots if now - max(self._heard[b], self._listening) > self.lapse_s)

    def _quiet_s(self) -> float:
        """After so long without anybody's heartbeat, it is the server that stands still, or our connection to it."""
        return min(DEAF_S, self.lapse_s / 2)


class Publisher(Role):
    """One publisher process."""

    name = "publisher"

    def __init__(self, config: Config, me: Me, heartbeats: Heartbeats) -> None:
        super().__init__(me)
        self.policy = config.policy()
        self.patience = int(config.patience_s(me.id) * SECOND)
        self.heartbeats = heartbeats
        self._since: dict[str, int] = {}

    def react(self, world: World, now: int) -> Sequence[Debt]:
        boots = [engine.boot for engine in world.membership.engines.values()]
        return self._patient(reactions.publisher(world, self.policy, now, self.heartbeats.silent(boots)), now)

    def _patient(self, debts: Sequence[Debt], now: int) -> Sequence[Debt]:
        """A standby leaves a fresh debt to whoever acts first. Counted by this process's clock alone, debt by debt: a
        busy log, or a clock that differs from the broker's, makes no standby wait for ever."""
        self._since = {debt.key: min(self._since.get(debt.key, now), now) for debt in debts}
        return [debt for debt in debts if now - self._since[debt.key] >= self.patience]

    async def perform(self, debt: Debt, scope: contextlib.AsyncExitStack) -> Event | None:
        raise AssertionError(f"a publisher only appends, and was asked for {debt.effect}")


async def _build(config: Config, journal: Journal, me: Me, stack: contextlib.AsyncExitStack) -> Role:
    heartbeats = Heartbeats(journal, config.publication.deadlines.heartbeat_s)
    await journal.beats(heartbeats.hear)
    return Publisher(config, me, heartbeats)


def run(config: Config, id_: str) -> int:
    """Run a publisher in this process; returns its exit status."""
    return process.run(id_, config, _build)
