"""The engines' side of the state: who is joined, fenced, and what each boot has proven to hold.

Knows: the `engine` families. Must not know: which release is the head, or how weights are hashed.
"""

from __future__ import annotations

import msgspec

from reef_bus.events import (
    EngineFenced,
    EngineJoined,
    EngineLeft,
    EngineStaged,
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


class Engine(msgspec.Struct, kw_only=True):
    """One engine id and its current boot. `verified` is this boot's last proof since its last fence, by any way."""

    id: str
    boot: str
    joined: int
    url: str
    backend: str
    accepts: tuple[str, ...]
    modes: tuple[str, ...] = ("fenced",)
    left: bool = False
    fenced: int = 0
    verified: Report | None = None
    reported: int = 0


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
    match recorded.event:
        case EngineJoined() as joined:
            membership.engines[joined.engine] = Engine(
                id=joined.engine,
                boot=recorded.boot,
                joined=recorded.seq,
                url=joined.url,
                backend=joined.backend,
                accepts=joined.accepts,
                modes=joined.modes,
            )
        case EngineFenced() as fenced:
            engine = membership.engines[fenced.engine]
            engine.fenced, engine.verified = recorded.seq, None
            word = Report(seq=recorded.seq, time=recorded.time, load_id="", manifest="")
            membership.fences.setdefault(_key(recorded.boot, fenced.publication, fenced.attempt), word)
        case EngineStaged() | ReceiverVerified() | ReceiverFailed() as said:
            key = _key(recorded.boot, said.publication, said.attempt)
            _report(membership, said.engine, key, _heard(recorded, said))
        case EngineLeft(engine=id_):
            membership.engines[id_].left = True


def _heard(recorded: Recorded, event: EngineStaged | ReceiverVerified | ReceiverFailed) -> Report:
    manifest, failure, staged = "", "", False
    match event:
        case EngineStaged(manifest=manifest):
            staged = True
        case ReceiverVerified(manifest=manifest):
            pass
        case ReceiverFailed(observed=manifest, staged=staged):
            failure = f"{event.cause}: {event.detail}"
    return Report(
        seq=recorded.seq,
        time=recorded.time,
        load_id=event.load_id,
        manifest=manifest,
        failure=failure,
        staged=staged,
    )


def _report(membership: Membership, engine: str, key: str, report: Report) -> None:
    """The first word on an attempt stays. What is said of a staging changes no trust in what is served."""
    membership.reports.setdefault(key, report)
    if not report.staged:
        found = membership.engines[engine]
        found.reported, found.verified = report.seq, None if report.failure else report


def forget_attempts(membership: Membership) -> None:
    """A new target: what was said about older publications can no longer matter."""
    membership.reports.clear()
    membership.fences.clear()


def current(membership: Membership, member: Member) -> bool:
    """The member's boot is its engine's newest and has not left."""
    engine = membership.engines.get(member.engine)
    return engine is not None and engine.boot == member.boot and not engine.left
