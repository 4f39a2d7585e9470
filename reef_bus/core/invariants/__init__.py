"""The checkers of protocol.md section 8: what no history of a deployment may show. `check` is the whole audit,
`examine` one that keeps no event.

Knows: the fold, the serving rule, and the raw events, of which it keeps a ledger of its own beside the fold.
Must not know: where a history comes from, how a batch is stored, or why anybody decided as they did.
"""

from __future__ import annotations

from reef_bus.core.invariants.findings import Audit, Final, Findings, Rewards, Violation
from reef_bus.core.invariants.records import Answers, Batches, Consumption, Trained, Unread, enter
from reef_bus.core.invariants.walk import check, examine

__all__ = [
    "Answers",
    "Audit",
    "Batches",
    "Consumption",
    "Final",
    "Findings",
    "Rewards",
    "Trained",
    "Unread",
    "Violation",
    "check",
    "enter",
    "examine",
]
