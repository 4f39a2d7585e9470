"""The checkers of protocol.md section 8: what no history of a deployment may show. `check` is the whole audit.

Knows: the fold, the serving rule, and the raw events, of which it keeps a ledger of its own beside the fold.
Must not know: where a history comes from, how a batch is stored, or why anybody decided as they did.
"""

from __future__ import annotations

from reef_bus.core.invariants.findings import Audit, Final, Rewards, Violation
from reef_bus.core.invariants.records import Batches, Consumption, Trained, Unread
from reef_bus.core.invariants.walk import check

__all__ = ["check", "Audit", "Violation", "Rewards", "Final", "Batches", "Consumption", "Trained", "Unread"]
