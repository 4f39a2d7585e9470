"""What an audit says: violations, figures, what could not be judged, and what the history ends in the middle of.

Knows: its own shape. Must not know: how anything in it is found.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

MAX_SEQUENCES = 20  # a violation by thousands of events names the first of them


class Violation(msgspec.Struct, frozen=True, kw_only=True):
    """What was found and what was expected. `sequences` are of LOG, `records` of RECORDS, oldest first.

    `invariant` is a number of section 8, or a name: `fold` (the log contradicts itself), `gap` (a stream's sequences
    have holes), `decision` (something undecided was published), `report` (reports that point nowhere, or changed),
    `reward` (a job trained on other figures than were recorded), `frozen` (the base model of adapters was trained or
    published), `adapter` (one was told to go that answers requests, came in another way than adapters do, or is said
    not to be loadable by who holds it, or has no need of it).
    """

    invariant: int | str
    text: str
    sequences: tuple[int, ...] = ()
    records: tuple[int, ...] = ()


class Rewards(msgspec.Struct, frozen=True):
    """The mean score of `n` reported records."""

    n: int
    mean: float


class Final(msgspec.Struct, frozen=True, kw_only=True):
    """Reported answers tagged `phase: final` that name the head's load id; `engines` counts them by engine."""

    load_id: str
    n: int
    mean: float | None
    engines: dict[str, int]


class Audit(msgspec.Struct, frozen=True, kw_only=True):
    """The whole result; clean if and only if `violations` is empty.

    `releases` are commits, `releases_with_base` counts release 0 too; `receivers_verified` the proofs that commits
    name; `consumed` the records of `jobs`; `engines` recorded answers by engine; `rewards` by load id; `finals` are
    those of the scenarios that train adapters. `unchecked` says what could not be judged, and why. `open` is what the
    history ends in the middle of: invariant 12 is about histories that are over, so these are notices.
    """

    violations: tuple[Violation, ...]
    void_events: int
    log_events: int
    records: int
    reports: int
    releases: int
    releases_with_base: int
    receivers_verified: int
    jobs: int
    consumed: int
    engines: dict[str, int]
    rewards: dict[str, Rewards]
    final: Final
    finals: dict[str, Final]
    unchecked: tuple[str, ...]
    open: tuple[str, ...]


class Findings(msgspec.Struct):
    """An audit on its way: violations in the order of their discovery."""

    violations: list[Violation] = []
    unchecked: list[str] = []

    def add(self, invariant: int | str, text: str, log: Iterable[int] = (), records: Iterable[int] = ()) -> None:
        sequences, places = sorted(set(log))[:MAX_SEQUENCES], sorted(set(records))[:MAX_SEQUENCES]
        found = Violation(invariant=invariant, text=text, sequences=tuple(sequences), records=tuple(places))
        self.violations.append(found)

    def extend(self, later: Findings) -> None:
        self.violations += later.violations
        self.unchecked += later.unchecked
