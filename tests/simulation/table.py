"""The table: which fault struck while which event was the log's last; and which cells must have been hit.

Knows: counts, and where a fault finds its occasion. Must not know: how a fault strikes.
"""

from __future__ import annotations

from collections import Counter

from tests.simulation.faults import ADAPTERS, ADAPTING, APPENDS, EVENTS, KINDS, LOADS, SPOILED_AT, STRIKES, TRANSFERS

Cell = tuple[str, str]

OCCASIONS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys((*STRIKES, *APPENDS), EVENTS),
    **dict.fromkeys(TRANSFERS, ("SenderReady", "EngineFenced", "ReceiverVerified")),
    "reject": ("CandidateEvaluated",),
    "drop": ("JobStarted",),
    "no_room": ("TargetPersisted", "EngineFenced", "TransferAborted"),
    "no_artifact": ("ScenarioRegistered", "EngineJoined", "SenderReady", "PublicationHalted", "ReleaseCommitted"),
    "no_swap": ("ReleaseCommitted",),
    "repeat": ("ReceiverVerified", "ReleaseCommitted"),
}
"""The events after which a fault of that kind finds its occasion. Strikes and appends find one anywhere. A transfer
begins when the last member is fenced and the sender ready; a decision follows an evaluation, and so on: elsewhere such
a fault strikes only if that other event happened to be stored in between, which no number of seeds promises."""


OF_ADAPTERS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys((*STRIKES, *APPENDS), ADAPTERS),
    **dict.fromkeys((*LOADS, "no_proof"), ("TargetPersisted", "EngineStaged", "TransferAborted", "ReceiverVerified")),
    "leak": ("TargetPersisted",),
    "lose": ("ReleaseCommitted", "EngineStaged", "JobDispatched"),
    "spoil": SPOILED_AT,
}
"""The same of deployments that train adapters: what falls upon these, and what falls at their events. Everything else
has its occasion in deployments of the whole model, where it is looked for."""


def missing(hits: Counter[Cell], adapters: bool = False) -> list[str]:
    """Cells with an occasion that were never hit."""
    occasions = OF_ADAPTERS if adapters else OCCASIONS
    return [f"{kind} at {event}" for kind in occasions for event in occasions[kind] if not hits[kind, event]]


def table(hits: Counter[Cell], events: Counter[str], adapters: bool = False) -> str:
    """One row per event, one column per fault; `-` where there was no occasion and nothing struck."""
    kinds, names = ((*KINDS, *ADAPTING, "spoil"), (*EVENTS, *ADAPTERS)) if adapters else (KINDS, EVENTS)
    occasions = OF_ADAPTERS if adapters else OCCASIONS
    lines = [" " * 30 + " ".join(f"{kind[:9]:>9}" for kind in kinds)]
    for event in names:
        cells = [str(hits[kind, event] or ("-", "0")[event in occasions.get(kind, ())]) for kind in kinds]
        lines.append(f"{event:20} {events[event]:8} " + " ".join(f"{cell:>9}" for cell in cells))
    return "\n".join(lines)
