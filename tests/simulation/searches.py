"""Where a breakage is looked for: simulated deployments, the smaller machine, scripted histories; each by seeds.

Knows: how each is run, and what it says when something is wrong. Must not know: what is broken.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any, NamedTuple

from reef_bus.core.effects import Restarts
from reef_bus.errors import ReefError
from reef_bus.events import ComponentEvent, ComponentLost, ReceiverFailed, Recorded
from tests.fleet import wander
from tests.judge import LETTERS, in_order
from tests.simulation.deployment import Deployment, Shape, adapted, simulate
from tests.simulation.faults import Faults
from tests.simulation.patching import Edit
from tests.simulation.spoiling import whole
from tests.spec import SECOND

LOOK_S, SOON_S = 0.25, 6.0

Search = Callable[[int], str]
"""What a seed finds: a violation, or an empty string."""


def simulated(faults: Faults | None, shape: Shape | None, seed: int) -> str:
    return simulate(seed, faults, shape).violation


def of_adapters(seed: int) -> str:
    return adapted(seed).violation


def lending(seed: int) -> str:
    """The seed's own faults and shape, in a deployment that trains where its engines are."""
    return simulate(seed, colocated=True).violation


def roamed(seed: int) -> str:
    """The smaller machine, with people who ask for things, trainers in place, and `publish: latest`."""
    return _raised(wander, seed)


def told(history: Callable[..., None], args: tuple[Any, ...], seed: int) -> str:
    """A scripted history, and what it expects of the log."""
    return _raised(history, seed, *args)


def _raised(function: Callable[..., object], *args: Any) -> str:
    """What it says is wrong: its message, or the assertion itself."""
    try:
        function(*args)
    except (AssertionError, ReefError) as error:
        return str(error) or str(traceback.extract_tb(error.__traceback__)[-1].line)
    return ""


def hasty(seed: int) -> str:
    """An engine that needs nearly as long as it may to stop, and a publisher that sees everything a second late."""

    def script(deployment: Deployment) -> None:
        deployment.when("TargetPersisted", lambda: deployment.pause("engine-0", 1.5))
        deployment.when("TargetPersisted", lambda: setattr(deployment.current("publisher").link, "lag", 1.0))

    found = simulate(seed, Faults(), Shape(jobs=2, thread_s=0.1), script)
    return found.violation or (
        "an engine that kept its deadline is given up" if found.events["TransferAborted"] else ""
    )


def supervised(seed: int) -> str:
    """Processes that crash, and what the log says about each of them: in order, and within the budget of restarts."""
    kept: list[Deployment] = []
    found = simulate(seed, Faults(crash=1.5), Shape(jobs=4), kept.append)
    return found.violation or next(filter(None, map(_wrong_life, _lives(kept[0]))), "")


def spoiled(seed: int) -> str:
    """Artifacts are away or damaged, engines end, and nothing else goes wrong: all else that is committed is answered
    by every engine soon, as is what can be read again; and the log is told once of each time."""
    kept: list[Deployment] = []

    def watch(deployment: Deployment) -> None:
        kept.append(deployment)
        deployment.loop.call_later(LOOK_S, _look, deployment, {}, context=deployment.loop.outside)

    shape = Shape(adapters=("math", "code"), jobs=6)
    return simulate(seed, Faults(spoil=0.6), shape, watch).violation or _told_too_often(kept[0])


def _look(deployment: Deployment, since: dict[tuple[str, str], float]) -> None:
    now = deployment.loop.now
    for boot in deployment.running():
        for head in deployment.truth.world.publications.adapters.values():
            key = boot.name, head.load_id
            if boot.agent is None or not boot.agent.open.is_set() or not whole(deployment, head):
                since.pop(key, None)
            elif deployment._answers(boot, head.scenario):
                since.pop(key, None)
            elif now > since.setdefault(key, now) + SOON_S:
                deployment._violate(f"{boot.name} could load {head.scenario}'s {head.load_id} since {since[key]:.1f} s")
    deployment.loop.call_later(LOOK_S, _look, deployment, since, context=deployment.loop.outside)


def _told_too_often(deployment: Deployment) -> str:
    told = Counter[tuple[str, str]]()
    for each in deployment.truth.log:
        if isinstance(event := each.event, ReceiverFailed) and not event.publication:
            told[each.boot, event.load_id] += 1
            times = deployment.spoiler.times[event.load_id]
            if told[each.boot, event.load_id] > times:
                return f"{each.boot} says more often than {times} times that it cannot load {event.load_id}"
    return ""


def _lives(deployment: Deployment) -> Iterator[tuple[str, list[Recorded], Restarts]]:
    """By component: the events about it that count, for every one of them is chained to the one before."""
    log = [each for each in deployment.truth.log if isinstance(each.event, ComponentEvent)]
    for name in deployment.roles:
        yield name, [each for each in log if each.event.component == name], deployment.config.supervision  # type: ignore[attr-defined]


def _wrong_life(life: tuple[str, list[Recorded], Restarts]) -> str:
    name, log, budget = life
    word = "".join(LETTERS.get(each.name, "") for each in log)
    if not in_order(word):
        return f"the events about {name} come in the order {word}"
    failed: list[int] = []
    for each in log:
        failed = [] if each.name == "RecoveryHalted" else failed
        if isinstance(each.event, ComponentLost) and each.event.exit:
            failed = [at for at in failed if at > each.time - budget.window_s * SECOND] + [each.time]
        if each.name == "RestartScheduled" and len(failed) > budget.max_restarts + 1:
            return f"{name} is started again after {len(failed)} failures within {budget.window_s:g} s"
    return ""


@cache  # the same search is the same object: what it finds in the code as it is needs to be looked for once
def under(shape: Shape | None = None, **rates: float) -> Search:
    return partial(simulated, Faults(**rates), shape)


@cache
def history(of: Callable[..., None], *args: Any) -> Search:
    return partial(told, of, args)


DRAWN: Search = partial(simulated, None, None)
FLEET: Search = roamed
ADAPTED: Search = of_adapters


class Breakage(NamedTuple):
    """`breaks` says what is not so any more. `shielded`: no seed catches it, and this is why."""

    name: str
    breaks: str
    edits: tuple[Edit, ...]
    where: Search = DRAWN
    shielded: str = ""
