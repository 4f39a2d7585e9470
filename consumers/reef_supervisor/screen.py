"""What the demo shows while it runs: on a terminal a board that is redrawn, elsewhere a line per release.

Knows: the tally and the world. Must not know: how anything came about.
"""

from __future__ import annotations

import sys
import time
from typing import TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from consumers.reef_supervisor.tally import Tally
from reef_bus.core.world import World
from reef_bus.views import engine_state, sentence

BLOCKS = "▁▂▃▄▅▆▇█"


class Screen:
    """`quiet` sends everything to stderr, so that stdout holds nothing but the JSON object."""

    def __init__(self, tally: Tally, quiet: bool) -> None:
        self.tally = tally
        self.out: TextIO = sys.stderr if quiet else sys.stdout
        self.began = time.monotonic()
        self.console = Console(file=self.out, highlight=False)
        self.live = Live(console=self.console, refresh_per_second=4) if self.console.is_terminal else None
        self._shown = ""

    def __enter__(self) -> Screen:
        if self.live:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live:
            self.live.stop()

    def say(self, text: str) -> None:
        self.console.print(f"{time.monotonic() - self.began:6.1f} s  {text}", markup=False, soft_wrap=True)

    def show(self, world: World, answers: int) -> None:
        if self.live:
            self.live.update(self._board(world, answers))
        elif self.tally.committed and self.tally.committed[-1] != self._shown:
            self._shown = self.tally.committed[-1]
            self.say(self._line(world, answers))

    def _line(self, world: World, answers: int) -> str:
        engines = ", ".join(f"{name} {engine_state(world, name)}" for name in sorted(world.membership.engines))
        return (
            f"release {_sequence(self._shown):>3}  reward {self.curve()} {self.last():.2f}  "
            f"fence {self.tally.fence_ms() or 0:.0f} ms  {self.rate(answers):.0f} samples/s  {engines}"
        )

    def _board(self, world: World, answers: int) -> Group:
        head = world.publications.head
        table = Table.grid(padding=(0, 2))
        table.add_row("version", head.load_id if head else "none yet")
        table.add_row("reward", f"{self.curve()} {self.last():.2f}")
        for name in sorted(world.membership.engines):
            held = world.membership.engines[name].verified
            table.add_row(name, f"{engine_state(world, name)}  {held.load_id if held else ''}")
        table.add_row("fence", f"{self.tally.fence_ms() or 0:.0f} ms (median, until resumed)")
        table.add_row("samples", f"{answers} ({self.rate(answers):.0f}/s)")
        events = [Text(f"{r.seq:6d} {r.name:19} {sentence(r.event)}"[:118], style="dim") for r in self.tally.recent]
        return Group(table, *events)

    def rate(self, answers: int) -> float:
        return answers / max(0.001, time.monotonic() - self.began)

    def last(self) -> float:
        means = [self.tally.reward(id_, scenario=scenario) for scenario, id_ in self.tally.rewards]
        return next((mean for mean in reversed(means) if mean is not None), 0.0)

    def curve(self) -> str:
        """For each scenario, one block per release, oldest first."""
        return " ".join(self._curve(scenario) for scenario in dict.fromkeys(each for each, _ in self.tally.rewards))

    def _curve(self, scenario: str) -> str:
        ids = sorted((id_ for each, id_ in self.tally.rewards if each == scenario), key=_sequence)
        means = [self.tally.reward(id_, scenario=scenario) or 0.0 for id_ in ids]
        return "".join(BLOCKS[min(7, int(mean * 8))] for mean in means[-40:])


def _sequence(load_id: str) -> int:
    return int(load_id.rpartition(":")[2] or 0)
