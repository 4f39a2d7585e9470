"""The ledger: what each raw event is an entry of, so that the fold's own checks are not their own judge.

Knows: events that count, one after the other. Must not know: the world, or the code that decides on a release. What
is wrong with a target or a commit, `releases.py` says; what engines hold of adapters, `holdings.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from reef_bus.core.ids import BASE, LoadId, adapter_base
from reef_bus.core.invariants import holdings, lending
from reef_bus.core.invariants.records import consume
from reef_bus.core.invariants.releases import commit, target
from reef_bus.core.invariants.state import Content, Ledger, Open, Said
from reef_bus.events import (
    AdapterLeaked,
    AdapterRegistered,
    AdapterUnloaded,
    CandidateReady,
    CandidateRejected,
    CandidateSelected,
    EngineFenced,
    EngineJoined,
    EngineMemoryReleased,
    EngineMemoryRestored,
    EngineStaged,
    Event,
    JobDiscarded,
    JobDispatched,
    JobDropped,
    LogOpened,
    PublicationHalted,
    PublicationRefused,
    ReceiverFailed,
    ReceiverVerified,
    Recorded,
    ReleaseCommitted,
    RollbackRequested,
    ScenarioRegistered,
    TargetPersisted,
    TransferAborted,
)


def note(ledger: Ledger, recorded: Recorded) -> None:
    """Enter one event that is not void."""
    entry = ENTRIES.get(type(recorded.event))
    if entry:
        entry(ledger, recorded, recorded.event)
    lending.note(ledger.lending, recorded, ledger.findings)


def _open_log(ledger: Ledger, recorded: Recorded, event: LogOpened) -> None:
    ledger.incarnation = event.incarnation


def _ask(ledger: Ledger, recorded: Recorded, event: RollbackRequested) -> None:
    ledger.rollbacks[recorded.seq] = event


# -- what engines say


def _join(ledger: Ledger, recorded: Recorded, event: EngineJoined) -> None:
    ledger.engines.add(event.engine)
    holdings.join(ledger.holdings, recorded, event)


def _stage(ledger: Ledger, recorded: Recorded, event: EngineStaged) -> None:
    _report(ledger, recorded, event)
    if event.adapter:
        flaw = holdings.stage(ledger.holdings, recorded, event, ledger.findings)
        ledger.misproved.setdefault((recorded.boot, event.publication, event.attempt), flaw)


def _unload(ledger: Ledger, recorded: Recorded, event: AdapterUnloaded | AdapterLeaked) -> None:
    holdings.unload(ledger.holdings, recorded, event, ledger.findings)


def _report(ledger: Ledger, recorded: Recorded, event: EngineStaged | ReceiverVerified | ReceiverFailed) -> None:
    word = (recorded.boot, event.publication, event.attempt)
    ledger.reports.setdefault(word, Said(recorded.seq, event))
    if type(event) is ReceiverVerified:
        _prove(ledger, recorded, event)
    elif type(event) is ReceiverFailed and not event.staged:
        ledger.held.pop(recorded.boot, None)
    elif type(event) is ReceiverFailed:
        holdings.fail(ledger.holdings, recorded, event, ledger.findings)


def _prove(ledger: Ledger, recorded: Recorded, event: ReceiverVerified) -> None:
    """Whoever proves again what it holds may generate before that is stored: its gate asks its own memory."""
    proven = event.load_id, event.manifest
    if event.method == "swapped" or ledger.held.get(recorded.boot) != proven:
        ledger.stops.setdefault(recorded.boot, []).append(recorded.seq)
    ledger.held[recorded.boot] = proven


def _fence(ledger: Ledger, recorded: Recorded, event: EngineFenced) -> None:
    """Invariant 10: whoever stops, stops for a target; and a candidate that is refused has none."""
    seq, boot, candidate = recorded.seq, recorded.boot, ledger.publications.get(event.publication)
    if candidate is None:
        text = f"{event.engine} boot {boot} stopped for publication {event.publication}; expected one with a target"
        ledger.findings.add(10, text, [seq])
    elif candidate in ledger.refused:
        refused = ledger.refused[candidate]
        text = f"{event.engine} boot {boot} stopped for candidate {candidate}, which was refused at {refused}"
        ledger.findings.add(10, text, [refused, seq])
    ledger.fences.setdefault((boot, event.publication, event.attempt), seq)
    ledger.held.pop(boot, None)
    if ledger.open and (ledger.open.target.publication, ledger.open.attempt) == (event.publication, event.attempt):
        ledger.stops.setdefault(boot, []).append(seq)


def _memory(ledger: Ledger, recorded: Recorded, event: EngineMemoryReleased | EngineMemoryRestored) -> None:
    """Weights that were away are proven anew, and whoever gave memory away had stopped."""
    if "weights" in event.regions:
        ledger.held.pop(recorded.boot, None)
    if type(event) is EngineMemoryReleased and event.fence == ledger.lending.fence:
        ledger.stops.setdefault(recorded.boot, []).append(recorded.seq)


# -- what the trainer says


def _register(ledger: Ledger, recorded: Recorded, event: ScenarioRegistered) -> None:
    ledger.head, ledger.head_candidate = str(LoadId(ledger.incarnation, 0)), BASE
    ledger.contents[BASE] = Content("", event.manifest, event.weights)
    ledger.releases[ledger.head] = BASE
    ledger.digests[ledger.head] = event.manifest
    ledger.selected[BASE], ledger.ended[BASE] = recorded.seq, "committed"


def _register_adapter(ledger: Ledger, recorded: Recorded, event: AdapterRegistered) -> None:
    """Its release 0 is the base model, and its content the adapter that changes nothing."""
    origin, scenario, load_id = adapter_base(event.scenario), event.scenario, str(LoadId(ledger.incarnation, 0))
    ledger.contents[origin] = Content("", event.manifest, event.weights, scenario)
    ledger.selected[origin], ledger.ended[origin] = recorded.seq, "committed"
    ledger.tips[scenario], ledger.origins[scenario] = origin, (load_id, origin)
    ledger.holdings.loras[scenario] = event.lora
    ledger.holdings.heads[scenario] = [(recorded.seq, load_id)]


def _dispatch(ledger: Ledger, recorded: Recorded, event: JobDispatched) -> None:
    if ledger.tips:
        _dispatch_adapter(ledger, recorded, event)
    if ledger.job:
        text = f"job {event.job} is dispatched while {ledger.job} is open; expected at most one open job"
        ledger.findings.add(8, text, [recorded.seq])
    ledger.job, ledger.jobs = event.job, ledger.jobs + 1
    if ledger.batches is not None:
        consume(ledger.answers, ledger.batches, recorded.seq, event, ledger.findings)


def _dispatch_adapter(ledger: Ledger, recorded: Recorded, event: JobDispatched) -> None:
    if event.colocated:
        text = f"LOG {recorded.seq} lends engines' memory to job {event.job}; expected none where it holds adapters"
        ledger.findings.add(lending.COLOCATED, text, [recorded.seq])
    if event.scenario not in ledger.tips:
        text = (
            f"LOG {recorded.seq} dispatches job {event.job} of {event.scenario}; the base model of adapters is frozen"
        )
        ledger.findings.add("frozen", text, [recorded.seq])
    elif (base := ledger.contents.get(event.base)) and base.scenario != event.scenario:
        text = f"LOG {recorded.seq} trains {event.scenario} from {event.base}, which is of {base.scenario or BASE}"
        ledger.findings.add(5, text, [recorded.seq])


def _ready(ledger: Ledger, recorded: Recorded, event: CandidateReady) -> None:
    scenario = event.scenario if ledger.tips else ""
    ledger.contents.setdefault(event.candidate, Content(event.base, event.manifest, event.weights, scenario))


def _select(ledger: Ledger, recorded: Recorded, event: CandidateSelected) -> None:
    ledger.job, ledger.selected[event.candidate] = "", recorded.seq


def _close_job(ledger: Ledger, recorded: Recorded, event: CandidateRejected | JobDropped | JobDiscarded) -> None:
    ledger.job = ""


# -- what publishers say, beside targets and commits


def _abort(ledger: Ledger, recorded: Recorded, event: TransferAborted) -> None:
    if ledger.open:
        ledger.open = Open(ledger.open.target, event.next_attempt, event.members)


def _halt(ledger: Ledger, recorded: Recorded, event: PublicationHalted) -> None:
    if ledger.open:
        if not ledger.open.target.request:
            ledger.ended[ledger.open.target.candidate] = "halted"
        ledger.open = None


def _refuse(ledger: Ledger, recorded: Recorded, event: PublicationRefused) -> None:
    seq = recorded.seq
    if event.request:
        ledger.rollbacks.pop(event.request, None)
        return
    if event.candidate in ledger.targeted:
        text = f"candidate {event.candidate} is refused at {seq}, after its target had raised a fence"
        ledger.findings.add(10, text, [ledger.targeted[event.candidate], seq])
    ledger.ended[event.candidate], ledger.refused[event.candidate] = event.reason, seq


ENTRIES: Mapping[type[Event], Callable[[Ledger, Recorded, Any], None]] = {
    LogOpened: _open_log,
    RollbackRequested: _ask,
    EngineJoined: _join,
    EngineFenced: _fence,
    EngineMemoryReleased: _memory,
    EngineMemoryRestored: _memory,
    EngineStaged: _stage,
    ReceiverVerified: _report,
    ReceiverFailed: _report,
    AdapterUnloaded: _unload,
    AdapterLeaked: _unload,
    ScenarioRegistered: _register,
    AdapterRegistered: _register_adapter,
    JobDispatched: _dispatch,
    CandidateReady: _ready,
    CandidateSelected: _select,
    CandidateRejected: _close_job,
    JobDropped: _close_job,
    JobDiscarded: _close_job,
    TargetPersisted: target,
    TransferAborted: _abort,
    ReleaseCommitted: commit,
    PublicationHalted: _halt,
    PublicationRefused: _refuse,
}
