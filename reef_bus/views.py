"""Read models for people: pure folds of the world and its events, as plain values.

Knows: the world, deadlines. Must not know: terminals, HTTP, or any other source of truth.
"""

from __future__ import annotations

from typing import Any

from reef_bus.config import ATTACHED
from reef_bus.core.effects import Policy
from reef_bus.core.membership import Engine
from reef_bus.core.publication import FENCED, Publication
from reef_bus.core.reactions.common import word
from reef_bus.core.residency import Residency
from reef_bus.core.serving import fenced, holders, live, may_generate, present, serving, version
from reef_bus.core.supervision import Component
from reef_bus.core.training import Job
from reef_bus.core.world import World
from reef_bus.events import Event

SECOND = 1_000_000_000
ANSWERS = {
    **dict.fromkeys(("PromotionRequested", "JobDiscardRequested", "JobRestoreRequested"), "the trainer"),
    "RecoveryResumeRequested": "the supervisor",
}
"""Who answers a request; the others are a publisher's."""


def status(world: World, now: int, policy: Policy) -> dict[str, Any]:
    """What `reef-bus status` and GET /reef/status say: versions, engines, on whom we wait, since when, what is next."""
    published, training = world.publications, world.training
    head = published.head
    return {
        "incarnation": world.incarnation,
        "log_events": world.seq,
        "void_events": world.void,
        "scenario": training.scenario,
        "model": training.model,
        "head": {"load_id": head.load_id, "candidate": head.candidate, "manifest": head.manifest} if head else None,
        "releases": len(published.releases),
        "adapters": {scenario: _adapter(world, scenario) for scenario in training.adapters},
        "engines": {name: _engine(world, name) for name in sorted(world.membership.engines)},
        "trainer": {"boot": training.boot, "jobs": training.dispatched},
        "open_job": {"job": training.job.id, "attempt": training.job.attempt} if training.job else None,
        "open_publication": _publication(published.open) if published.open else None,
        "waiting": waiting(world, now, policy),
        "components": {name: _component(component) for name, component in sorted(world.components.items())},
    }


def _component(component: Component) -> dict[str, Any]:
    return {
        "state": component.state,
        "running": component.running,
        "ready": component.published or None,
        "starts": component.starts,
        "lost": len(component.lost),
        "halted": component.halted,
        "left": list(component.left),
    }


def _adapter(world: World, scenario: str) -> dict[str, Any]:
    """A scenario's head, and which engines answer with it."""
    head = world.publications.adapters[scenario]
    able = [engine.id for engine in serving(world) if version(world, engine, scenario)]
    return {"load_id": head.load_id, "candidate": head.candidate, "manifest": head.manifest, "engines": able}


def _engine(world: World, name: str) -> dict[str, Any]:
    engine = world.membership.engines[name]
    shown = {
        "boot": engine.boot,
        "url": engine.url,
        "state": engine_state(world, name),
        "holds": engine.verified.load_id if engine.verified else None,
        "released": list(engine.released),
    }
    return {**shown, "adapters": _residency(engine, engine.residency)} if engine.residency else shown


def _residency(engine: Engine, held: Residency) -> dict[str, Any]:
    """What a boot holds; `leaked` adapters keep their places, and nobody may use them. `failing`: by scenario, which
    head has an artifact that it cannot load, and why."""
    slots = held.slots.items()
    return {
        "capacity": held.capacity,
        "resident": sorted(name for name, slot in slots if slot.load_ids),
        "leaked": sorted(name for name, slot in slots if slot.leaked),
        "expected": sorted(name for name, slot in slots if not slot.load_ids and not slot.leaked),
        "failing": {name: {"load_id": each.load_id, "why": each.why} for name, each in engine.failing.items()},
    }


def engine_state(world: World, name: str) -> str:
    """One word: serving, fenced, released (its memory is a job's), catching-up, down, excluded or left."""
    engine = world.membership.engines[name]
    if engine.left:
        return "left"
    if not live(world, engine):
        return "excluded"
    if not present(world, engine):
        return "down"
    if fenced(world, name, engine.boot):
        return "released" if engine.released else "fenced"
    return "serving" if may_generate(world, name, engine.boot) else "catching-up"


def _publication(open_: Publication) -> dict[str, Any]:
    return {
        "publication": open_.id,
        "load_id": open_.load_id,
        "candidate": open_.candidate,
        "attempt": open_.attempt,
        "members": [member.engine for member in open_.members],
        "transport": open_.transport,
        "mode": open_.mode,
    }


def waiting(world: World, now: int, policy: Policy) -> dict[str, Any]:
    """On whom the deployment waits, since when (seconds), what happens next, and what a person can do."""
    open_ = world.publications.open
    given_up = {name: component for name, component in sorted(world.components.items()) if component.given_up}
    if given_up:
        return _waiting_for_a_person(given_up, now)
    if not world.incarnation:
        return _wait("the supervisor", 0, now, "it opens the log", "reef-bus streams apply")
    if not world.training.scenario:
        return _wait("the trainer", _moved(world, "train"), now, "it registers the base model as release 0")
    if open_:
        return _waiting_for_publication(world, open_, now, policy)
    if asked := next((r for r in world.requests.values() if not r.refused), None):
        then = f"request {asked.seq} of {asked.actor} ({asked.name}) is answered"
        return _wait(ANSWERS.get(asked.name, "a publisher"), _moved(world, f"operator.{asked.actor}"), now, then)
    if not any(present(world, engine) for engine in world.membership.engines.values()):
        since = max((each.time for name, each in world.tails.items() if name.startswith("engine.")), default=0)
        return _wait("an engine", since, now, "it joins, loads and proves the head")
    behind = [n for n in sorted(world.membership.engines) if engine_state(world, n) == "catching-up"]
    if behind:
        since = max(_moved(world, "release"), *(_moved(world, f"engine.{name}") for name in behind))
        return _wait(", ".join(behind), since, now, "it loads and proves the head")
    if failing := _failing(world):
        return _waiting_for_an_artifact(world, failing, now)
    if lacking := _lacking(world):
        engine, scenario = lacking
        since = max(_moved(world, "release"), _moved(world, f"engine.{engine}"))
        return _wait(engine, since, now, f"it loads and proves the adapter of {scenario}")
    if world.training.job:
        return _waiting_for_training(world, world.training.job, now, policy)
    if world.training.backend == ATTACHED:
        return _wait("the training loop", _moved(world, "train"), now, "it publishes its next step")
    then = "enough fresh, reported answers make the next batch"
    return _wait("the harness", _moved(world, "train"), now, then)


def _failing(world: World) -> str:
    """A scenario whose adapter an engine that serves cannot load."""
    return next((scenario for engine in serving(world) for scenario in engine.failing), "")


def _waiting_for_an_artifact(world: World, scenario: str, now: int) -> dict[str, Any]:
    """It heals by itself, once a person has mended what is named; other scenarios do not wait."""
    head = world.publications.adapters[scenario]
    found = [engine for engine in serving(world) if scenario in engine.failing]
    failed = min((engine.failing[scenario] for engine in found), key=lambda each: each.since)
    then = (
        f"it loads {scenario}'s adapter {head.load_id} as soon as it can; nothing else waits for that. It said: "
        f"{failed.why}. Mend that: copy a blob there again, start an engine anew that was started for other adapters; "
        "or go back to an earlier release"
    )
    on = ", ".join(engine.id for engine in found)
    return _wait(on, failed.since, now, then, f"reef-bus rollback {scenario} {head.parent} --why …")


def _lacking(world: World) -> tuple[str, str] | None:
    """An engine that serves, and a scenario whose adapter it does not hold yet."""
    pairs = ((engine, scenario) for engine in serving(world) for scenario in world.training.adapters)
    return next(((engine.id, scenario) for engine, scenario in pairs if not version(world, engine, scenario)), None)


def _moved(world: World, family: str) -> int:
    """When (ns) something last counted in a family; 0: never."""
    return world.tails[family].time if family in world.tails else 0


def _waiting_for_training(world: World, job: Job, now: int, policy: Policy) -> dict[str, Any]:
    since, scenario = _moved(world, "train"), job.scenario
    if job.boot != world.training.boot and (held := holders(world)):
        return _waiting_for_memory(world, job, held, now, policy)
    if job.ambiguous:
        then = (
            f"nothing by itself: boot {job.boot} died inside attempt {job.attempt} of {job.id} and trains in place. "
            f"Serving goes on. Train it again from its stored base, or `reef-bus discard {scenario} {job.id} --why …`"
        )
        return _wait("a person", since, now, then, f"reef-bus retrain {scenario} {job.id} --why …")
    trainer = world.components.get("trainer")
    if trainer and not trainer.running and world.training.backend != ATTACHED:
        return _wait("the supervisor", trainer.ended_time, now, f"it starts the trainer again, which finishes {job.id}")
    if job.evaluated:
        then = f"it decides on {job.candidate}; where candidates are held for review, a person does"
        return _wait("the trainer", since, now, then, f"reef-bus promote {scenario} {job.candidate} --why …")
    return _wait("the trainer", since, now, f"it finishes {job.id}")


def _waiting_for_memory(world: World, job: Job, held: list[Engine], now: int, policy: Policy) -> dict[str, Any]:
    handover, deadline = world.handover, policy.deadlines.fence_s
    since = handover.time if handover else 0
    if alive := [engine.id for engine in held if live(world, engine)]:
        then = f"it stops and releases its memory, and {job.id} starts; after {deadline:g} s it is excluded"
        return _wait(", ".join(alive), since, now, then)
    names = ", ".join(engine.id for engine in held)
    return _wait("the supervisor", since, now, f"it ends what is left of {names}, whose memory {job.id} needs")


def _waiting_for_a_person(given_up: dict[str, Component], now: int) -> dict[str, Any]:
    (name, component), *_ = given_up.items()
    if component.halted:
        then = f"nothing by itself: {name} ended too often. Look at its log, mend it, then have it started again"
    else:
        pids = ", ".join(map(str, component.left)) or "unknown"
        then = f"nothing by itself: of {name}'s last process something may still live (pids: {pids}). End it first"
    return _wait(", ".join(given_up), component.ended_time, now, then, f"reef-bus resume {name} --why …")


def _waiting_for_publication(world: World, open_: Publication, now: int, policy: Policy) -> dict[str, Any]:
    members, deadlines = open_.members, policy.deadlines
    unfenced = [m.engine for m in members if not world.membership.fence(m.boot, open_.id, open_.attempt)]
    if unfenced and open_.mode == FENCED:
        then = (
            f"it stops generating; after {deadlines.fence_s:g} s it is excluded and attempt {open_.attempt + 1} begins"
        )
        return _wait(", ".join(unfenced), open_.attempt_time, now, then)
    sender = word(world, open_)
    if sender is None:
        then = f"it offers the weights; after {deadlines.sender_s:g} s attempt {open_.attempt + 1} begins"
        return _wait("the trainer", open_.attempt_time, now, then)
    unproven = [m.engine for m in members if not world.membership.report(m.boot, open_.id, open_.attempt)]
    if unproven:
        then = f"it proves what it received; after {deadlines.verify_s:g} s attempt {open_.attempt + 1} begins"
        return _wait(", ".join(unproven), sender.time, now, then)
    reports = [world.membership.report(m.boot, open_.id, open_.attempt) for m in members]
    since = max(report.time for report in reports if report)
    return _wait("a publisher", since, now, "it commits the release, or ends the attempt")


def _wait(on: str, since: int, now: int, then: str, command: str = "") -> dict[str, Any]:
    seconds = round(max(0, now - since) / SECOND, 1) if since else None
    return {"on": on, "since_s": seconds, "next": then, "command": command}


WORDS = ("detail", "reason", "why")


def sentence(event: Event) -> str:
    """An event in one line for people: its telling fields, without digests at full length. What is said in words is
    not cut short: the end of it is what to do."""
    shown = []
    for field in event.__struct_fields__:
        value = getattr(event, field)
        if field in ("engine", "component") or value in ("", 0, (), None, {}):
            continue
        shown.append(f"{field}={' '.join(value.split()) if field in WORDS else _short(value)}")
    return " ".join(shown)


def _short(value: object) -> str:
    if isinstance(value, str):
        return value if len(value) <= 24 else value[:8] + "…" if _hex(value) else value[:60]
    if isinstance(value, tuple):
        return "[" + ",".join(_short(getattr(item, "engine", item)) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{_short(v)}" for k, v in list(value.items())[:4]) + "}"
    digest = getattr(value, "digest", None)
    return f"{value:g}" if isinstance(value, float) else _short(digest) if digest else str(value)


def _hex(text: str) -> bool:
    return all(character in "0123456789abcdef:" for character in text)
