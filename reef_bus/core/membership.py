"""The engines' side of the state: who is joined, fenced, and what each boot has proven to hold.

Knows: the `engine` families. Must not know: which release is the head, or how weights are hashed. Which adapters a boot
holds is kept here too, and changed by `adapters.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from reef_bus.core.memory import WEIGHTS, ordered
from reef_bus.core.residency import Residency
from reef_bus.events import (
    EngineFenced,
    EngineJoined,
    EngineLeft,
    EngineMemoryReleased,
    EngineMemoryRestored,
    EngineStaged,
    Event,
    Member,
    ReceiverFailed,
    ReceiverVerified,
    Recorded,
)


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What a boot said at `seq` about its memory, or about the copy `staged` beside it: the digest that it verified, or
    why it failed."""

    seq: int
    time: int
    load_id: str
    manifest: str
    failure: str = ""
    staged: bool = False


class Failing(msgspec.Struct, frozen=True, kw_only=True):
    """Why a boot does not hold a scenario's head, whose artifact is to blame: as it said at `seq` for the `tries`-th
    time, the first time at `since` (ns)."""

    load_id: str
    seq: int
    tries: int
    since: int
    why: str


class Engine(msgspec.Struct, kw_only=True):
    """One engine id and its current boot. `verified` is this boot's last proof since its last fence, by any way; `out`
    the broker time (ns) at which the boot left or was excluded. `residency`: which adapters it holds, None if it takes
    none; `adapted` is the sequence of its last word on them, `leaks` those by name of unloads that failed, `failing`
    the scenarios whose head has an artifact that it cannot load. Of the regions that it `releases`, those `released`
    are a job's now: it gave them for the fence raised at `lent`, and the last word on them is at `memory`."""

    id: str
    boot: str
    joined: int
    url: str
    backend: str
    accepts: tuple[str, ...]
    modes: tuple[str, ...] = ("fenced",)
    pauses: tuple[str, ...] = ("drain",)
    left: bool = False
    out: int = 0
    fenced: int = 0
    verified: Report | None = None
    reported: int = 0
    residency: Residency | None = None
    adapted: int = 0
    leaks: dict[str, int] = {}
    failing: dict[str, Failing] = {}
    releases: tuple[str, ...] = ()
    released: tuple[str, ...] = ()
    lent: int = 0
    memory: int = 0


class Membership(msgspec.Struct):
    """Current boots by engine id, and each boot's first words on the attempts of the latest publication.

    A boot that was replaced after it spoke has still spoken: `reports` and `fences` outlive it.
    """

    engines: dict[str, Engine] = {}
    reports: dict[str, Report] = {}
    fences: dict[str, Report] = {}

    def report(self, boot: str, publication: str, attempt: int) -> Report | None:
        return self.reports.get(_key(boot, publication, attempt))

    def fence(self, boot: str, publication: str, attempt: int) -> Report | None:
        return self.fences.get(_key(boot, publication, attempt))


def _key(boot: str, publication: str, attempt: int) -> str:
    return f"{boot} {publication}#{attempt}"


def evolve(membership: Membership, recorded: Recorded) -> None:
    """Apply one event of an `engine` family that is not void."""
    change = CHANGES.get(type(recorded.event))
    if change:
        change(membership, recorded, recorded.event)


def _join(membership: Membership, recorded: Recorded, event: EngineJoined) -> None:
    membership.engines[event.engine] = Engine(
        id=event.engine,
        boot=recorded.boot,
        joined=recorded.seq,
        url=event.url,
        backend=event.backend,
        accepts=event.accepts,
        modes=event.modes,
        pauses=event.pauses,
        releases=event.releases,
    )


def _fence(membership: Membership, recorded: Recorded, event: EngineFenced) -> None:
    engine = membership.engines[event.engine]
    engine.fenced, engine.verified = recorded.seq, None
    word = Report(seq=recorded.seq, time=recorded.time, load_id="", manifest="")
    membership.fences.setdefault(_key(recorded.boot, event.publication, event.attempt), word)


def _stage(membership: Membership, recorded: Recorded, event: EngineStaged) -> None:
    report = Report(seq=recorded.seq, time=recorded.time, load_id=event.load_id, manifest=event.manifest, staged=True)
    _report(membership, recorded, event, report)


def _verify(membership: Membership, recorded: Recorded, event: ReceiverVerified) -> None:
    report = Report(seq=recorded.seq, time=recorded.time, load_id=event.load_id, manifest=event.manifest)
    _report(membership, recorded, event, report)


def _fail(membership: Membership, recorded: Recorded, event: ReceiverFailed) -> None:
    report = Report(
        seq=recorded.seq,
        time=recorded.time,
        load_id=event.load_id,
        manifest=event.observed,
        failure=f"{event.cause}: {event.detail}",
        staged=event.staged,
    )
    _report(membership, recorded, event, report)


def _report(
    membership: Membership, recorded: Recorded, event: EngineStaged | ReceiverVerified | ReceiverFailed, report: Report
) -> None:
    """The first word on an attempt stays. What is said of a staging changes no trust in what is served."""
    membership.reports.setdefault(_key(recorded.boot, event.publication, event.attempt), report)
    if not report.staged:
        found = membership.engines[event.engine]
        found.reported, found.verified = report.seq, None if report.failure else report


def _release(membership: Membership, recorded: Recorded, event: EngineMemoryReleased) -> None:
    engine = membership.engines[event.engine]
    engine.released, engine.lent = ordered({*engine.released, *event.regions}), event.fence
    _moved(engine, recorded.seq, event.regions)


def _restore(membership: Membership, recorded: Recorded, event: EngineMemoryRestored) -> None:
    engine = membership.engines[event.engine]
    engine.released, engine.lent = ordered(set(engine.released) - set(event.regions)), 0
    _moved(engine, recorded.seq, event.regions)


def _moved(engine: Engine, seq: int, regions: tuple[str, ...]) -> None:
    """Weights whose memory was another's, or is new, are no proof of anything."""
    engine.memory = seq
    if WEIGHTS in regions:
        engine.verified = None


def _leave(membership: Membership, recorded: Recorded, event: EngineLeft) -> None:
    engine = membership.engines[event.engine]
    engine.left, engine.out = True, recorded.time


CHANGES: Mapping[type[Event], Callable[[Membership, Recorded, Any], None]] = {
    EngineJoined: _join,
    EngineFenced: _fence,
    EngineStaged: _stage,
    ReceiverVerified: _verify,
    ReceiverFailed: _fail,
    EngineMemoryReleased: _release,
    EngineMemoryRestored: _restore,
    EngineLeft: _leave,
}


def forget_attempts(membership: Membership) -> None:
    """A new target: what was said about older publications can no longer matter."""
    membership.reports.clear()
    membership.fences.clear()


def current(membership: Membership, member: Member) -> bool:
    """The member's boot is its engine's newest and has not left."""
    engine = membership.engines.get(member.engine)
    return engine is not None and engine.boot == member.boot and not engine.left
