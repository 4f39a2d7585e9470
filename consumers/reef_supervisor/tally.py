"""What the demo counts while it runs: answers by release, times of releases, transfers, kills.

Knows: answers and events as they come. Must not know: how anything is shown.
"""

from __future__ import annotations

import statistics
from collections import defaultdict, deque

from consumers.reef_supervisor.harness import Scored
from reef_bus.events import (
    CandidateSelected,
    EngineFenced,
    EngineStaged,
    ReceiverVerified,
    Recorded,
    ReleaseCommitted,
    TargetPersisted,
)

MS = 1_000_000


class Tally:
    """Figures of one run; events older than its start were another run's."""

    def __init__(self, since: int) -> None:
        self.since = since
        self.rewards: dict[tuple[str, str], list[float]] = defaultdict(list)  # by scenario and load id
        self.recent: deque[Recorded] = deque(maxlen=8)
        self.verified = 0
        self.bytes = 0
        self.committed: list[str] = []
        self.releases: dict[str, int] = defaultdict(int)  # by scenario
        self._targets: dict[str, int] = {}
        self._adapters: set[str] = set()
        self._selected: dict[str, int] = {}
        self._commits: dict[str, int] = {}
        self._resumed: set[tuple[str, str]] = set()
        self._fence_ms: dict[str, list[float]] = defaultdict(list)
        self._serving_ms: dict[str, list[float]] = defaultdict(list)

    def score(self, scored: Scored, scenario: str = "") -> None:
        self.rewards[scenario, scored.answer.load_id].append(scored.reward)

    def see(self, recorded: Recorded) -> None:
        """Count one event that was not void."""
        self.recent.append(recorded)
        match recorded.event:
            case CandidateSelected(candidate=candidate):
                self._selected[candidate] = recorded.time
            case TargetPersisted(load_id=load_id, candidate=candidate, lora=lora):
                self._targets[load_id] = recorded.time
                self._adapters |= {load_id} if lora else set()
                self._selected[load_id] = self._selected.get(candidate, recorded.time)
            case EngineStaged(bytes=moved):
                self.bytes += moved
            case ReceiverVerified(method="swapped", load_id=load_id) if load_id in self._commits:
                self._fence_ms[load_id].append((recorded.time - self._commits[load_id]) / MS)
                self._serving_ms[load_id].append((recorded.time - self._selected[load_id]) / MS)
            case ReceiverVerified(bytes=moved):
                self.bytes += moved
            case ReleaseCommitted(load_id=load_id, evidence=evidence, scenario=scenario):
                self.verified += len(evidence)
                self._commits[load_id] = recorded.time
                if load_id in self._adapters:  # whoever asks from here on is answered with it
                    self._serving_ms[load_id].append((recorded.time - self._selected[load_id]) / MS)
                if recorded.time >= self.since:
                    self.committed.append(load_id)
                    self.releases[scenario] += 1
            case EngineFenced(engine=engine, previous=load_id, resumed_at=at) if at and load_id in self._targets:
                if (engine, load_id) in self._resumed:
                    return  # it was fenced for a publication that halted, and came back: that is no release's time
                self._resumed.add((engine, load_id))
                self._fence_ms[load_id].append((at - self._targets[load_id]) / MS)
                self._serving_ms[load_id].append((at - self._selected[load_id]) / MS)

    def fence_ms(self) -> float | None:
        """Median over releases of the longest pause of an engine: from what stopped it (the target; in staged mode the
        commit) to its resuming with the release."""
        return _median([max(times) for times in self._fence_ms.values()])

    def serving_ms(self) -> float | None:
        """The same from the candidate's selection on."""
        return _median([max(times) for times in self._serving_ms.values()])

    def reward(self, load_id: str, least: int = 1, scenario: str = "") -> float | None:
        """Mean reward of a scenario's answers by one release, None with fewer than `least`."""
        found = self.rewards.get((scenario, load_id), ())
        return statistics.fmean(found) if len(found) >= least else None


def _median(values: list[float]) -> float | None:
    return round(statistics.median(values), 1) if values else None
