"""What must hold, judged by what really happened: raw events, true contents, memories, receipts.

Knows: everything that the simulation knows. Must not know: why anybody decided as they did; no role asks here.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping

from reef_bus.artifacts import ArtifactStore
from reef_bus.audit import _batches
from reef_bus.backends import Generated
from reef_bus.core.invariants import check
from reef_bus.core.memory import lending
from reef_bus.core.publication import IN_PLACE
from reef_bus.core.serving import may_generate, present, version
from reef_bus.core.world import World, fold
from reef_bus.errors import ContractError
from reef_bus.events import (
    AdapterRegistered,
    CandidateReady,
    InferenceRecorded,
    Member,
    Recorded,
    ReleaseCommitted,
    ReportReceived,
    ScenarioRegistered,
)
from reef_bus.journal import LOG
from tests.judge import Audit
from tests.simulation.adapting import AdapterMemory
from tests.simulation.boots import STORE, Boot
from tests.simulation.hands import Registry


class Violation(Exception):
    """Something happened that must not."""


class Truth:
    """The log as it is stored, folded once more; and what the load ids in it really name."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self.log: list[Recorded] = []
        self.records: list[Recorded] = []
        self.world, self.audit = World(), Audit()
        self.content: dict[str, bytes] = {}  # of committed load ids
        self.none: dict[str, bytes] = {}  # by scenario, the adapter that changes nothing
        self.owner: dict[str, str] = {}  # of committed load ids, the scenario whose adapter it is
        self.receipts: dict[str, InferenceRecorded] = {}
        self.reports: dict[str, float] = {}

    def saw(self, stream: str, recorded: Recorded) -> str:
        """Every stored event, at once. Returns why it is void."""
        if stream != LOG:
            self.records.append(recorded)
            return ""
        self.log.append(recorded)
        try:
            void = fold(self.world, recorded)
        except ContractError as error:
            raise Violation(f"the log contradicts itself: {error}") from error
        if not void:
            try:
                self.audit.saw(recorded)
            except AssertionError as error:
                why = str(error) or traceback.extract_tb(error.__traceback__)[-1].line
                raise Violation(f"event {recorded.seq} {recorded.name} must not be: {why}") from error
            self._enter(recorded)
        return void

    def _enter(self, recorded: Recorded) -> None:
        contents, event = self.registry.contents, recorded.event
        match event:
            case ScenarioRegistered(manifest=manifest):
                self.content[self.audit.head] = contents[manifest]
            case AdapterRegistered(scenario=scenario, manifest=manifest):
                self.none[scenario] = contents[manifest]
            case CandidateReady(manifest=manifest, base=base):
                trained_from = self.registry.parents[contents[manifest]]
                if trained_from != contents[self.world.training.candidates[base].manifest]:
                    raise Violation(f"event {recorded.seq}: {event.candidate} was not trained from {base}")
            case ReleaseCommitted(load_id=load_id, manifest=manifest, parent=parent):
                content, scenario = contents[manifest], event.scenario if event.scenario in self.none else ""
                self.content[load_id], self.owner[load_id] = content, scenario
                before = self.content[parent] if parent in self.owner else self.none.get(scenario, self.content[parent])
                if not self.audit.rollback and before not in self._ancestors(content):
                    raise Violation(f"event {recorded.seq}: {load_id} was not trained from {parent}")

    def _ancestors(self, content: bytes) -> list[bytes]:
        """What it was trained from, and what that was, as long as only what was superseded lies between."""
        fates, made, contents = self.audit.fates, self.audit.made, self.registry.contents
        superseded = {contents[made[name].manifest] for name, fate in fates.items() if fate == "superseded"}
        found = [self.registry.parents[content]]
        while found[-1] in superseded:
            found.append(self.registry.parents[found[-1]])
        return found

    # -- after every step, and every answer

    def check_engine(self, boot: Boot) -> None:
        """What it may generate with now is what its load id names, and no fence that it has seen covers it."""
        agent, memory = boot.agent, boot.memory
        if agent is None or memory is None or not agent.open.is_set():
            return
        head = agent.world.publications.head
        if head is None or memory.content != self.content.get(head.load_id):
            held = [load_id for load_id, content in self.content.items() if content == memory.content]
            raise Violation(f"{boot.name} serves {head and head.load_id} with the memory of {held or 'no release'}")
        if memory.out:
            raise Violation(f"{boot.name} may generate, and {memory.out} of its memory is out")
        if self.audit.closed(agent.world.seq) or Member(boot.component, boot.name) in self.audit.fence(agent.world.seq):
            raise Violation(f"{boot.name} may generate at {agent.world.seq}, where a fence covers it")
        for scenario in self.none:
            self._check_adapter(boot, scenario)
        lease_s, link = agent.config.inference.lease_s, boot.link
        if lease_s and not link.up.is_set() and boot.loop.now > link.cut_at + lease_s and agent.may_generate():
            raise Violation(f"{boot.name} may generate at {boot.loop.now:.3f} s, cut off since {link.cut_at:.3f} s")

    def _check_adapter(self, boot: Boot, scenario: str) -> None:
        """What it would answer the scenario with is there, under the name that it would use."""
        assert boot.agent is not None and isinstance(boot.memory, AdapterMemory)
        found = boot.agent.version(scenario)
        if found is None:
            return
        if self.owner.get(found.load_id, "") != (scenario if found.adapter else ""):
            raise Violation(f"{boot.name} would answer {scenario} with {found.load_id}, which is not its release")
        if found.adapter and boot.memory.held.get(found.adapter) != self.content[found.load_id]:
            raise Violation(f"{boot.name} would answer {scenario} with {found}, and holds {sorted(boot.memory.held)}")

    def check_answer(self, answer: Generated, pause: str, scenario: str = "") -> None:
        """Each token was generated with what it is said to be from, and only pauses in place leave several parts."""
        for load_id in (answer.load_id, *(span.load_id for span in answer.spans)):
            if scenario and self.owner.get(load_id, scenario) != scenario:
                raise Violation(f"an answer of {answer.boot} to {scenario} names {load_id} of {self.owner[load_id]!r}")
        made, said = bytes(answer.completion.ids), b""
        for span in answer.spans:
            said += self.content.get(span.load_id, b"")[span.first : span.first + span.count]
        if made != (said if answer.spans else self.content.get(answer.load_id)):
            named = [(span.load_id, span.count) for span in answer.spans] or answer.load_id
            raise Violation(f"an answer of {answer.boot} names {named}; it was not generated with that")
        if answer.spans and pause != IN_PLACE:
            raise Violation(f"an answer of {answer.boot} goes on after a pause, and pauses are {pause}")

    # -- memory that is lent

    def check_given(self, boots: Mapping[str, Boot]) -> None:
        """A colocated job begins: every engine that was there before, and whose process is not said to have ended, has
        given all of its memory away."""
        handover = self.world.handover
        if handover is None or handover.ended:
            return
        for engine in self.world.membership.engines.values():
            memory = boots[engine.boot].memory
            there = engine.joined < handover.seq and present(self.world, engine) and boots[engine.boot].exit is None
            if there and memory is not None and memory.out != set(memory.releases):
                raise Violation(f"{handover.job} starts, and {engine.boot} has given away {memory.out} only")

    def check_taken(self, boot: Boot) -> None:
        """An engine takes memory back: no job that it gave it to has begun and is open."""
        job, engine = self.world.training.job, self.world.membership.engines.get(boot.component)
        if job is None or engine is None or engine.boot != boot.name or not lending(self.world.handover):
            return
        if job.attempt and self.world.handover and engine.lent == self.world.handover.seq:
            raise Violation(f"{boot.name} takes memory back that {job.id} has")

    # -- in the end

    def settled(self) -> bool:
        """Invariant 12, on the log: everything selected has ended, nothing is open, every engine may serve the head."""
        world = self.world
        engines = world.membership.engines
        return (
            world.publications.head is not None
            and all(candidate in world.publications.ended for candidate in world.training.selected)
            and world.publications.open is None
            and world.training.job is None
            and not self.audit.pending
            and not world.requests
            and all(may_generate(world, name, engine.boot) for name, engine in engines.items())
            and all(version(world, engine, each) for engine in engines.values() for each in self.none)
        )

    def check_end(self) -> None:
        """The audit that `reef-bus audit` runs, and that nobody's receipt was lost."""
        found = check(self.log, self.records, _batches(ArtifactStore(STORE), self.log))
        wrong = [violation.text for violation in found.violations] + list(found.open) + list(found.unchecked)
        if wrong:
            raise Violation(f"the audit finds: {'; '.join(wrong)}")
        stored = [recorded.event for recorded in self.records]
        answers = [event for event in stored if isinstance(event, InferenceRecorded)]
        reports = {event.report: event.score for event in stored if isinstance(event, ReportReceived)}
        for record, event in self.receipts.items():
            if answers.count(event) != 1:
                raise Violation(f"receipt {record} was handed out, and is stored {answers.count(event)} times")
        for report, score in self.reports.items():
            if reports.get(report) != score:
                raise Violation(f"report {report} was accepted with {score}, and is stored as {reports.get(report)}")
