"""`reef-bus demo`: a policy that learns while it serves, on one machine, every version through the log.

Knows: how to play the harness over a deployment, and when it has shown enough. Must not know: any role's inside.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping, Sequence
from typing import Any

import psutil

from consumers.reef_supervisor.demo_config import check, configured
from consumers.reef_supervisor.deployment import Deployment, deployment
from consumers.reef_supervisor.harness import Harness, Scored, harness
from consumers.reef_supervisor.screen import Screen
from consumers.reef_supervisor.tally import Tally
from reef_bus.artifacts import ArtifactStore
from reef_bus.audit import audit_history, read_history
from reef_bus.config import Config
from reef_bus.core.invariants import Audit
from reef_bus.core.serving import serving, version
from reef_bus.core.world import World
from reef_bus.errors import Unavailable
from reef_bus.events import Recorded
from reef_bus.process import FAULT

CONCURRENCY = 64
MARGIN = 0.03  # training stops when a release's mean is this far above the target, so that fresh answers are too
MEASURED = 128  # answers that a release's mean is taken over, before it is believed
FINAL, FINAL_EACH, FINAL_MOST = 96, 16, 512
QUIET_S = 0.5
INTERRUPTED = 130
SAMPLE_S = 0.5
TIMEOUT_S, TIMEOUT_SGLANG_S = 240.0, 900.0
LOOK_S = 0.05
LEAST_FREE = 256 * 1024  # bytes: below, neither the log nor a checkpoint can be written


Clients = Mapping[str, Harness]
Final = Mapping[str, list[Scored]]
"""By scenario; the whole model's is the empty name."""


class Kills:
    """`--kill ROLE@EVENT`: SIGKILL when the event appears in the log, once each."""

    def __init__(self, orders: Sequence[str], since: int) -> None:
        self.since = since
        self.waiting = collections.deque(tuple(order.split("@", 1)) for order in orders)
        self.done: list[dict[str, Any]] = []

    def see(self, running: Deployment, recorded: Recorded) -> None:
        for order in list(self.waiting):
            component, event = order
            if event == recorded.name and recorded.time >= self.since and component in _alive(running):
                self.waiting.remove(order)
                self.done.append({"component": component, "event": event, "seq": recorded.seq})
                running.kill(component)
                return


def _alive(running: Deployment) -> set[str]:
    children = running.supervisor.children
    return {"nats", *(name for name, child in children.items() if child.poll() is None)}


class Demo:
    """One run: figures, kills, and the phases from the first answer to the audit."""

    def __init__(self, args: argparse.Namespace, config: Config) -> None:
        self.args = args
        self.config = config
        slow = config.inference.backend == "sglang"
        self.timeout_s = args.timeout or (TIMEOUT_SGLANG_S if slow else TIMEOUT_S)
        self.began = time.monotonic()
        now = time.time_ns()
        self.tally = Tally(now)
        self.kills = Kills(args.kill, now)
        self.screen = Screen(self.tally, quiet=args.json)
        self.running: Deployment | None = None
        self.answers = 0
        self.first_answer_s = 0.0
        self.rss = 0

    # -- what the deployment's fold shows

    def watch(self, world: World, batch: Sequence[Recorded]) -> None:
        for recorded in batch:
            self.tally.see(recorded)
            if self.running:
                self.kills.see(self.running, recorded)

    # -- phases

    async def run(self) -> int:
        extra = {self.args.flip.partition("@")[0]: {FAULT: self.args.flip}} if self.args.flip else {}
        with self.screen:
            async with deployment(self.config, self.watch, extra) as running:
                self.running = running
                self.screen.say(f"nats-server at {running.config.nats.url}, gateway at {running.url}")
                async with self._harnesses(running) as clients, self._background(running):
                    summary = await self._phases(running, clients)
        return self._finish(summary)

    @contextlib.asynccontextmanager
    async def _harnesses(self, running: Deployment) -> AsyncIterator[Clients]:
        """One for each scenario; adapters' are called after their tasks. The whole model's is the empty name."""
        url, model, seed = running.url, self.config.model, time.time_ns()
        async with contextlib.AsyncExitStack() as stack:
            if not self.config.adapters.scenarios:
                yield {"": await stack.enter_async_context(harness(url, model, seed))}
                return
            tasks = self.config.adapters.scenarios
            yield {task: await stack.enter_async_context(harness(url, model, seed, task, task)) for task in tasks}

    @contextlib.asynccontextmanager
    async def _background(self, running: Deployment) -> AsyncIterator[None]:
        task = asyncio.create_task(self._measure(running))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _measure(self, running: Deployment) -> None:
        """Memory of all processes together, and the screen."""
        while True:
            self.screen.show(running.world, self.answers)
            total = psutil.Process().memory_info().rss
            for pid in running.pids():
                with contextlib.suppress(psutil.Error):
                    child = psutil.Process(pid)
                    total += sum(each.memory_info().rss for each in (child, *child.children(recursive=True)))
            self.rss = max(self.rss, total)
            free = shutil.disk_usage(self.config.state_dir).free
            if free < LEAST_FREE and not running.failure.done():
                why = f"state folder {self.config.state_dir}: the disk is full ({free} bytes free); make room"
                running.failure.set_exception(
                    Unavailable(f"{why}, then `reef-bus demo --resume` goes on from a kept one")
                )
            await asyncio.sleep(SAMPLE_S)

    async def _phases(self, running: Deployment, clients: Clients) -> dict[str, Any]:
        try:
            async with asyncio.timeout(self.timeout_s):
                await self._first_answer(running, clients)
                final: Final = {}
                while not final:
                    await self._train(running, clients)
                    await self._settle(running)
                    final = await self._finals(running, clients)
        except TimeoutError as error:
            raise Unavailable(
                f"not done after {self.timeout_s:g} s: {len(self.tally.committed)} releases, reward "
                f"{self.screen.last():.2f}; see {self.config.state_dir}/logs"
            ) from error
        seconds = time.monotonic() - self.began
        history = await read_history(running.journal, ArtifactStore(running.config.artifact_root()))
        audit = audit_history(history)
        return self._summary(running, audit, final, seconds)

    async def _first_answer(self, running: Deployment, clients: Clients) -> None:
        scenario, client = next(iter(clients.items()))
        asked = asyncio.ensure_future(client.exchange("7", {"phase": "first"}, train=False))
        either: set[asyncio.Future[Any]] = {asked, running.failure}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if running.failure.done():
            asked.cancel()
            running.failure.result()
        self.tally.score(await asked, scenario)
        self.first_answer_s = time.monotonic() - self.began
        self.screen.say(f"first answer after {self.first_answer_s:.1f} s")

    async def _train(self, running: Deployment, clients: Clients) -> None:
        """Serve, score and report until there are enough releases, and each scenario's newest is good enough: who has
        that asks no more, and is trained no more."""
        asking = dict(clients)
        for client in asking.values():
            client.start(CONCURRENCY // len(clients))
        while asking:
            await asyncio.sleep(LOOK_S)
            self._count(clients)
            _raise_first(next(filter(None, (client.failed() for client in asking.values())), None), running)
            for scenario in [each for each in asking if self._enough(running.world, each)]:
                await asking.pop(scenario).stop()
        self._count(clients)

    def _count(self, clients: Clients) -> None:
        for scenario, client in clients.items():
            while not client.answers.empty():
                self.answers += 1
                self.tally.score(client.answers.get_nowait(), scenario)

    def _enough(self, world: World, scenario: str) -> bool:
        head = world.publications.head_of(scenario)
        if head is None or len(self.tally.committed) < self.args.releases or self.kills.waiting:
            return False
        mean = self.tally.reward(head.load_id, MEASURED, scenario)
        return self.args.target is None or (mean is not None and mean > min(1.0, self.args.target + MARGIN))

    async def _settle(self, running: Deployment) -> None:
        """Nobody asks any more: wait until what is on its way has arrived and every engine serves the head."""
        quiet = 0.0
        while quiet < QUIET_S:
            await asyncio.sleep(0.1)
            _raise_first(None, running)
            quiet = quiet + 0.1 if _idle(running.world, self.config) else 0.0

    async def _finals(self, running: Deployment, clients: Clients) -> Final:
        """Fresh answers by every scenario's final release; empty when they are not good enough yet."""
        answers = {scenario: await self._final(running, scenario, client) for scenario, client in clients.items()}
        if self.args.target is None or all(_mean(found) > self.args.target for found in answers.values()):
            return answers
        self.args.releases = len(self.tally.committed) + 1
        return {}

    async def _final(self, running: Deployment, scenario: str, client: Harness) -> list[Scored]:
        """Fresh answers by the scenario's final release, from every engine."""
        head = running.world.publications.head_of(scenario)
        assert head is not None
        answers: list[Scored] = []
        while not _spread(answers, self.config):
            if len(answers) >= FINAL_MOST:
                raise Unavailable(f"{FINAL_MOST} answers, and not {FINAL_EACH} of every engine")
            digits = [str(number % 10) for number in range(FINAL // 3)]
            answers += await asyncio.gather(*(client.exchange(d, {"phase": "final"}, train=False) for d in digits))
        wrong = {scored.answer.load_id for scored in answers} - {head.load_id}
        if wrong:
            raise Unavailable(f"final answers name {sorted(wrong)}, the head is {head.load_id}")
        return answers

    # -- result

    def _summary(self, running: Deployment, audit: Audit, final: Final, seconds: float) -> dict[str, Any]:
        origin = f"{running.world.incarnation}:0"
        first = {scenario: self.tally.reward(origin, scenario=scenario) for scenario in final}
        violations = [violation.text for violation in audit.violations] + self._disagreement(audit, final)
        return {
            "releases": audit.releases,
            "engines": len(running.world.membership.engines),
            "receivers_verified": audit.receivers_verified,
            "reward_first": _least(first.values()),
            "reward_last": _least(_mean(answers) for answers in final.values()),
            "seconds_to_first_answer": round(self.first_answer_s, 2),
            "seconds": round(seconds, 2),
            "fence_ms_p50": self.tally.fence_ms(),
            "publish_to_serving_ms_p50": self.tally.serving_ms(),
            "transfer_bytes": self.tally.bytes,
            "records": audit.records,
            "log_events": audit.log_events,
            "void_events": audit.void_events,
            "audit_violations": len(violations),
            "kills": self.kills.done,
            "resumed": self.args.resume is not None,
            "rss_mib_peak": round(self.rss / 2**20),
            "violations": violations,
            **self._scenarios(first, final),
        }

    def _scenarios(self, first: Mapping[str, float | None], final: Final) -> dict[str, Any]:
        """Where there are several, what became of each; the figures above are then those of the least."""
        if "" in final:
            return {}
        return {
            "scenarios": {
                scenario: {
                    "releases": self.tally.releases[scenario],
                    "reward_first": _least([first[scenario]]),
                    "reward_last": _least([_mean(answers)]),
                }
                for scenario, answers in final.items()
            }
        }

    def _disagreement(self, audit: Audit, final: Final) -> list[str]:
        """What the audit, from the log alone, finds otherwise than the harness saw it."""
        if "" not in final:
            return []
        answers, found = final[""], audit.final
        seen = _mean(answers)
        if found.mean is not None and found.n == len(answers) and abs(found.mean - seen) < 1e-9:
            return []
        return [
            f"final reward: the harness saw {seen:.4f} over {len(answers)} answers, the log {found.mean} over {found.n}"
        ]

    def _finish(self, summary: dict[str, Any]) -> int:
        good = self.args.target is None or summary["reward_last"] > self.args.target
        done = good and not summary["audit_violations"] and not self.kills.waiting
        if self.args.json:
            print(json.dumps(summary))
        else:
            _print(summary, self.args, self.config, done)
        return 0 if done else 1


def _least(means: Iterable[float | None]) -> float | None:
    found = [mean for mean in means if mean is not None]
    return round(min(found), 4) if found else None


def _raise_first(error: BaseException | None, running: Deployment) -> None:
    if error:
        raise error
    if running.failure.done():
        running.failure.result()


def _idle(world: World, config: Config) -> bool:
    pending = [c for c in world.training.selected[-8:] if c not in world.publications.ended]
    busy = world.training.job or world.publications.open or pending
    scenarios = world.training.adapters or ("",)
    able = [engine for engine in serving(world) if all(version(world, engine, each) for each in scenarios)]
    return not busy and len(able) == len(config.inference.engines)


def _spread(answers: list[Scored], config: Config) -> bool:
    counts = collections.Counter(scored.answer.engine for scored in answers)
    return len(answers) >= FINAL and all(counts[engine] >= FINAL_EACH for engine in config.inference.engines)


def _mean(answers: list[Scored]) -> float:
    return sum(scored.reward for scored in answers) / len(answers)


def _print(summary: dict[str, Any], args: argparse.Namespace, config: Config, done: bool) -> None:
    print()
    for key, value in summary.items():
        if key not in ("violations", "kills", "scenarios"):
            print(f"  {key.replace('_', ' '):26} {value}")
    for scenario, found in summary.get("scenarios", {}).items():
        print(f"  {scenario:26} {found['releases']} releases, {found['reward_first']} → {found['reward_last']}")
    for kill in summary["kills"]:
        print(f"  killed {kill['component']:19} at {kill['event']} (event {kill['seq']})")
    for violation in summary["violations"]:
        print(f"  VIOLATION {violation}")
    words = "done: every release was proven in the memory of every engine that it was published to, before it served"
    print(f"\n{words if done else 'FAILED'}\n")
    kept = args.keep or args.resume
    where, me = config.state_dir if kept else "reef-demo", sys.argv[0]
    if not kept:
        print(f"  {me} demo --keep reef-demo          keep the log and the weights; then:")
    print(f"  {me} log --tail 20 --state {where}  what was said, event by event")
    print(f"  {me} audit --state {where}          every invariant, from the log alone")
    if kept:
        print(f"  {me} demo --resume {where}          go on from here")


# -- command line


def run(args: argparse.Namespace) -> int:
    """Run the demo as its arguments say; returns its exit status."""
    check(args)
    temporary = None if args.keep or args.resume else tempfile.mkdtemp(prefix="reef-demo-")
    try:
        config = configured(args, temporary)
        return asyncio.run(_until_asked(Demo(args, config).run()))
    except asyncio.CancelledError:
        return INTERRUPTED
    finally:
        if temporary:
            shutil.rmtree(temporary, ignore_errors=True)


async def _until_asked(demo: Coroutine[Any, Any, int]) -> int:
    """Run it; SIGTERM ends it as Ctrl-C does, with everything stopped and the temporary folder removed."""
    task = asyncio.ensure_future(demo)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await task
