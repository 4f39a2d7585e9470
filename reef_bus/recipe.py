"""What a recipe decides: how a candidate is measured, and whether it shall be published.

Knows: candidates and metrics. Must not know: weights, engines, or the log.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import NamedTuple

from reef_bus.core.training import Candidate


class Decision(NamedTuple):
    """Whether to publish, and why; it becomes a fact on the log before anything happens. `select` None holds the
    candidate until a person decides."""

    select: bool | None
    why: str


class Evaluator(ABC):
    """Measures a candidate."""

    name: str

    @abstractmethod
    def evaluate(self, candidate: Candidate, metrics: Mapping[str, float]) -> dict[str, float]:
        """Finite figures about the candidate, given the metrics of its own training. May block."""


class Selector(ABC):
    """Decides on a candidate."""

    name: str

    @abstractmethod
    def decide(self, candidate: Candidate, metrics: Mapping[str, float]) -> Decision:
        """Select, reject or hold, given what the evaluator found."""


class TrainingMetrics(Evaluator):
    """Takes the training metrics as they are."""

    name = "training-metrics"

    def evaluate(self, candidate: Candidate, metrics: Mapping[str, float]) -> dict[str, float]:
        return dict(metrics)


class SelectFinite(Selector):
    """Selects whatever trained without a non-finite figure."""

    name = "finite"

    def decide(self, candidate: Candidate, metrics: Mapping[str, float]) -> Decision:
        wrong = sorted(name for name, value in metrics.items() if not math.isfinite(value))
        return Decision(not wrong, f"not finite: {', '.join(wrong)}" if wrong else "every figure is finite")


class HoldForReview(SelectFinite):
    """Rejects what is not finite, and leaves the rest to a person."""

    name = "review"

    def decide(self, candidate: Candidate, metrics: Mapping[str, float]) -> Decision:
        found = super().decide(candidate, metrics)
        return Decision(None, "held for review") if found.select else found
