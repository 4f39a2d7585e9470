"""`/metrics` of one role, in Prometheus' text format: what its own fold shows, and how far that is behind the log.

Knows: the world, one gauge per question that an alert asks. Must not know: any role; nothing here is folded back.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from reef_bus.config import Config
from reef_bus.core.ids import parse_load_id
from reef_bus.core.memory import up
from reef_bus.core.serving import live, serving
from reef_bus.core.world import World
from reef_bus.errors import ContractError, Unavailable
from reef_bus.http import listen
from reef_bus.journal import LOG
from reef_bus.runner import Runner

SECOND = 1_000_000_000


class Figures(Collector):
    """One reading of a world at `now` (ns). `head`: the stream's last sequence, None when its leader did not answer."""

    def __init__(self, world: World, head: int | None, now: int, halted: bool = False) -> None:
        self.world, self.head, self.now, self.halted = world, head, now, halted

    def collect(self) -> Iterator[Metric]:
        world, release, open_ = self.world, self.world.publications.head, self.world.publications.open
        lent = world.handover.time if world.handover and up(world.handover) else self.now
        fence = min(lent, open_.time if open_ and open_.mode == "fenced" else self.now)
        released = sum(live(world, engine) and bool(engine.released) for engine in world.membership.engines.values())
        yield GaugeMetricFamily("reef_up", "1 while the log's leader answers", float(self.head is not None))
        yield GaugeMetricFamily("reef_halted", "1 after a contradiction: a person is needed", float(self.halted))
        yield GaugeMetricFamily("reef_log_sequence", "last event of LOG that this role has folded", world.seq)
        if self.head is not None:
            yield GaugeMetricFamily("reef_log_lag_events", "events of LOG not folded yet", self.head - world.seq)
        yield CounterMetricFamily("reef_void_events", "stored events that count for nothing", world.void)
        if release:
            number, age = parse_load_id(release.load_id).sequence, self._since(release.time)
            yield GaugeMetricFamily("reef_release_sequence", "number in the head's load id", number)
            yield GaugeMetricFamily("reef_release_age_seconds", "since the head was committed", age)
        yield from self._adapters()
        yield GaugeMetricFamily("reef_fence_seconds", "how long the present fence has been up", self._since(fence))
        yield GaugeMetricFamily("reef_engines_serving", "engines that may generate", len(serving(world)))
        yield GaugeMetricFamily("reef_engines_released", "engines whose memory a colocated job has", released)
        yield self._restarts()

    def _adapters(self) -> Iterable[Metric]:
        number, age = (
            GaugeMetricFamily(f"reef_adapter_release_{what}", text, labels=["scenario"])
            for what, text in (("sequence", "number in a scenario's load id"), ("age_seconds", "since its commit"))
        )
        for scenario, head in sorted(self.world.publications.adapters.items()):
            number.add_metric([scenario], parse_load_id(head.load_id).sequence)
            age.add_metric([scenario], self._since(head.time))
        return number, age

    def _since(self, then: int) -> float:
        return max(0, self.now - then) / SECOND

    def _restarts(self) -> Metric:
        family = CounterMetricFamily("reef_component_restarts", "starts after the first", labels=["component"])
        for name, component in sorted(self.world.components.items()):
            family.add_metric([name], max(0, component.starts - 1))
        return family


def exposition(figures: Figures) -> bytes:
    """The figures as a scrape wants them."""
    registry = CollectorRegistry()
    registry.register(figures)
    return generate_latest(registry)


async def serve(config: Config, component: str, runner: Runner, stack: contextlib.AsyncExitStack) -> None:
    """Answer `/metrics` for one component until the stack is closed, where the configuration asks for it."""
    if not config.metrics.port:
        return

    async def metrics(request: web.Request) -> web.Response:
        try:
            head = await runner.journal.head(LOG)
        except (Unavailable, ContractError):
            head = None
        found = Figures(runner.world, head, time.time_ns(), bool(runner.halted))
        return web.Response(body=exposition(found), content_type="text/plain", charset="utf-8")

    app = web.Application()
    app.add_routes([web.get("/metrics", metrics)])
    await listen(app, config.metrics.host, config.metrics_port(component), stack)
