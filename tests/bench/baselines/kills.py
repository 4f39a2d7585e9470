"""The harness of the baselines: an update and a kill per cell, and what was seen of it from outside.

Knows: the fleet, its traffic, the columns. Must not know: how a pattern updates.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tests.bench.baselines.fleet import Fleet, ended, fleet
from tests.bench.baselines.outcome import LIMIT_S, Cell, Result
from tests.bench.baselines.patterns import PHASES, RECEIVERS, Pattern
from tests.bench.baselines.process import POLL_S, START_S
from tests.bench.baselines.traffic import RIGHT, TORN, Seen, Traffic

Show = Callable[[str, Cell], None]


async def baseline(
    pattern: Pattern, cells: int, until: float, seed: int, folder: Path, log: Path, show: Show
) -> Result:
    """One undisturbed update, `cells` with a kill or as many as begin before `until`, and one undisturbed update that
    takes in what was still queued."""
    result = Result(pattern=pattern.name, title=pattern.title)
    async with fleet(pattern, folder, log) as found:
        harness = Harness(found)
        asking = asyncio.create_task(harness.traffic.run())
        try:
            await harness.undisturbed()
            for number in range(cells):
                if time.monotonic() > until:
                    break
                result.cells.append(await harness.cell(*draw(pattern, number, seed)))
                show(pattern.name, result.cells[-1])
            await ended(asking)
            await harness.undisturbed(answering=False)
        finally:
            await ended(asking)
        result.updates, result.answers = harness.target, len(harness.traffic.seen)
        trained = found.trained()
    result.lost = len(harness.traffic.accepted - set(trained))
    result.twice = len(trained) - len(set(trained))
    return result


def in_turn(roles: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Every role in every phase, all phases early."""
    for shift in range(len(PHASES)):
        for index, role in enumerate(roles):
            yield role, PHASES[(index + shift) % len(PHASES)]


def draw(pattern: Pattern, number: int, seed: int) -> tuple[str, str, str]:
    """Victim, phase, point: the seed chooses the point, and which receiver."""
    chance = random.Random(f"{seed}:{pattern.name}:{number}")
    places = list(in_turn(pattern.roles))
    role, phase = places[number % len(places)]
    victim = chance.choice(RECEIVERS) if role == "receiver" else role
    return victim, phase, chance.choice(pattern.points[role, phase])


class Harness:
    """Watches one fleet through its answers."""

    def __init__(self, found: Fleet) -> None:
        self.fleet, self.traffic = found, Traffic(found)
        self.target = 0  # the version of the last update that was asked for

    async def undisturbed(self, answering: bool = True) -> None:
        """An update that must work."""
        before = await self._idle(START_S)
        await self._go()
        if answering and await self.whole(time.monotonic(), LIMIT_S) is None:
            raise RuntimeError(f"{self.fleet.pattern.name}: an undisturbed update failed; see {self.fleet.log}")
        if await self._idle() == before:
            raise RuntimeError(
                f"{self.fleet.pattern.name}: an undisturbed update changed nothing; see {self.fleet.log}"
            )

    async def _idle(self, seconds: float = LIMIT_S) -> list[int]:
        until = time.monotonic() + seconds
        while (found := await self.fleet.versions()) is None:
            if time.monotonic() > until:
                raise RuntimeError(f"{self.fleet.pattern.name}: not idle within {seconds:g} s; see {self.fleet.log}")
            await asyncio.sleep(POLL_S)
        return found

    async def _go(self) -> None:
        self.target = max(await self._idle()) + 1
        self.traffic.newest = self.target
        await self.fleet.go()

    async def cell(self, victim: str, phase: str, point: str) -> Cell:
        cell = Cell(victim=victim, phase=phase, point=point)
        began = time.monotonic()
        note = await self.fleet.arm(victim, point)
        await self._go()
        killed = await self._killed(note, f"{victim} at {point}")
        cell.whole_s = await self.whole(killed, LIMIT_S)
        await self._judge(cell, [seen for seen in self.traffic.seen if seen.got >= began], killed)
        if cell.whole_s is None:
            cell.by_hand = await self.mend()
        return cell

    async def _killed(self, note: Path, what: str) -> float:
        """When; on the clock that all processes of this machine share."""
        until = time.monotonic() + LIMIT_S
        while time.monotonic() < until:
            if note.exists() and (text := note.read_text()):
                return float(text)
            await asyncio.sleep(0.002)
        raise RuntimeError(f"{what}: the point was not reached within {LIMIT_S:g} s; see {self.fleet.log}")

    async def whole(self, since: float, seconds: float) -> float | None:
        """Seconds from `since` until every updater is idle, and every receiver, asked after that, answers rightly with
        the same version; None if it does not come to that."""
        idle, before = 0.0, None
        while (now := time.monotonic()) < since + seconds:
            found = await self.fleet.versions()
            if found is None or found != before:  # one look is not enough: work may pass from one process to another
                idle = 0.0
            else:
                idle = idle or now
                if self._all_right(self._last(idle)):
                    return time.monotonic() - since
            before = found
            await asyncio.sleep(POLL_S / 2)
        return None

    def _last(self, after: float) -> dict[str, Seen]:
        return {seen.receiver: seen for seen in self.traffic.seen[-100:] if seen.asked > after}

    def _all_right(self, last: dict[str, Seen]) -> bool:
        found = list(last.values())
        return (
            len(found) == len(RECEIVERS)
            and all(seen.verdict == RIGHT for seen in found)
            and len({seen.label for seen in found}) == 1
        )

    async def _judge(self, cell: Cell, seen: list[Seen], killed: float) -> None:
        last = {name: await self.traffic.ask(name) for name in RECEIVERS}
        answers = [each for each in last.values() if each]
        wrong = [each for each in (*seen, *answers) if each.verdict != RIGHT]
        torn = {each.receiver for each in wrong if each.verdict == TORN}
        torn |= {name for name in RECEIVERS if await self.traffic.torn_memory(name)}
        cell.torn, cell.wrong = len(torn), len(wrong)
        cell.stuck = sum(each is None for each in last.values())
        cell.mixed = len({each.label for each in answers}) > 1
        cell.delivered = len(answers) == len(RECEIVERS) and all(each.label == self.target for each in answers)
        unsafe = any(each.verdict != RIGHT for each in answers)
        cell.safe_s = None if unsafe else max((each.got - killed for each in wrong), default=0.0)
        right = (each.got - killed for each in (*seen, *answers) if each.verdict == RIGHT and each.asked > killed)
        cell.serving_s = min(right, default=None)

    async def mend(self) -> int:
        """Back to a whole fleet; returns how many processes had to be restarted by hand. The next update comes first:
        what it heals costs nobody anything."""
        by_hand = 0
        for names in ((), self._not_right(), self.fleet.pattern.processes):
            for name in names:
                await self.fleet.kill(name)
            by_hand += len(names)
            await self._go()
            if await self.whole(time.monotonic(), LIMIT_S) is not None:
                return by_hand
        raise RuntimeError(f"{self.fleet.pattern.name}: nothing mends it; see {self.fleet.log}")

    def _not_right(self) -> list[str]:
        last = self._last(time.monotonic() - 1)
        return [name for name in RECEIVERS if name not in last or last[name].verdict != RIGHT]
