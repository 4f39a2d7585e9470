"""What must hold over a history, judged from its events alone: a second opinion, which shares no code with the fold.

Knows: the invariants of protocol.md section 8. Must not know: worlds, debts, or who made the history.
"""

from __future__ import annotations

import hashlib
import re

from reef_bus.events import (
    AdapterRegistered,
    CandidateReady,
    CandidateRejected,
    CandidateSelected,
    Event,
    JobAmbiguous,
    JobDiscarded,
    JobDispatched,
    JobDropped,
    JobRestoreRequested,
    JobStarted,
    LogOpened,
    Member,
    PublicationHalted,
    PublicationRefused,
    Recorded,
    ReleaseCommitted,
    RollbackRequested,
    ScenarioRegistered,
    TargetPersisted,
    TrainerJoined,
    TransferAborted,
)

ANSWERS = {
    "RollbackRequested": ("TargetPersisted", "PublicationRefused"),
    "PromotionRequested": ("CandidateSelected", "RequestRefused"),
    "JobDiscardRequested": ("JobDiscarded", "RequestRefused"),
    "JobRestoreRequested": ("JobStarted", "RequestRefused"),
    "EngineRetireRequested": ("EngineExcluded", "RequestRefused"),
    "PublicationHaltRequested": ("PublicationHalted", "RequestRefused"),
    "RecoveryResumeRequested": ("RecoveryResumed", "RequestRefused"),
}
"""By which events a request may end."""

LETTERS = {
    **{"ComponentStarted": "S", "ReadinessPublished": "P", "ReadinessWithdrawn": "W", "ComponentLost": "L"},
    **{"CleanupUnconfirmed": "U", "RestartScheduled": "R", "RecoveryHalted": "H", "RecoveryResumed": "M"},
}
ORDER = re.compile(r"(SP?Wu*LH?R)*(SP?(Wu*(U|LH?)?)?)?")


def in_order(word: str) -> bool:
    """A clean-up that was not confirmed needs a person before anything else; other answers to people come when they
    come, as a request may meet a supervisor that was faster."""
    return bool(ORDER.fullmatch(word.replace("UM", "u").replace("M", "")))


class Audit:
    """The invariants of protocol.md section 8, from the events alone: no fold, no world."""

    def __init__(self) -> None:
        self.incarnation = ""
        self.in_place: dict[str, bool] = {}  # trainer boots
        self.selected: set[str] = set()
        self.started_by = ""
        self.committed: dict[str, str] = {}
        self.contents: dict[str, str] = {}
        self.named: dict[str, str] = {}
        self.made: dict[str, CandidateReady] = {}
        self.fates: dict[str, str] = {}
        self.pending: dict[int, Event] = {}
        self.base: ScenarioRegistered | None = None
        self.ambiguous = False
        self.rollback = False
        self.candidate = self.mode = ""
        self.heads = {"": ""}  # by the scenario of an adapter; of none: the base model's
        self.origins: dict[str, AdapterRegistered] = {}
        self.of: dict[str, str] = {}  # load ids of adapters: whose they are
        self.scenario = ""  # the open publication's, if it is of an adapter
        self.sequence = 0
        self.job = ""
        self.publication = ""
        self.attempt = (0, frozenset[Member]())
        self.words: dict[tuple[str, str, int], Event] = {}
        self.fences: list[tuple[int, frozenset[Member]]] = [(0, frozenset())]
        self.colocated = self.lent = False
        self.chosen = ""
        self.closings: list[tuple[int, bool]] = [(0, False)]

    @property
    def head(self) -> str:
        return self.heads[""]

    def fence(self, seq: int) -> frozenset[Member]:
        """Whom a fence covered after the event at `seq`."""
        return next(members for since, members in reversed(self.fences) if since <= seq)

    def closed(self, seq: int) -> bool:
        """Whether a colocated job's fence was up after the event at `seq`."""
        return next(lent for since, lent in reversed(self.closings) if since <= seq)

    def _lend(self, event: Event) -> None:
        """From a job's dispatch to the end of what came of it; again, where a person has it trained again."""
        if isinstance(event, JobDispatched):
            self.colocated, self.lent, self.chosen = event.colocated, self.lent or event.colocated, ""
        elif isinstance(event, CandidateSelected):
            self.chosen = event.candidate
        elif isinstance(event, JobRestoreRequested):
            self.lent = self.lent or (self.colocated and self.ambiguous and event.job == self.job)
        elif isinstance(event, ReleaseCommitted | PublicationHalted):
            self.lent = self.lent and not self.chosen
        elif isinstance(event, PublicationRefused):
            self.lent = self.lent and (bool(event.request) or event.candidate != self.chosen)
        elif isinstance(event, CandidateRejected | JobDropped | JobDiscarded | JobAmbiguous):
            self.lent = False

    def saw(self, recorded: Recorded) -> None:
        self._lend(recorded.event)
        if self.lent != self.closings[-1][1]:
            self.closings.append((recorded.seq, self.lent))
        self._saw(recorded)
        covered = self.attempt[1] if self.publication and self.mode == "fenced" else frozenset()
        if covered != self.fences[-1][1]:
            self.fences.append((recorded.seq, covered))

    def _saw(self, recorded: Recorded) -> None:
        event, name = recorded.event, recorded.name
        if event.family == "operator":
            self.pending[recorded.seq] = event
        if request := getattr(event, "request", 0):
            self._answer(recorded, self.pending.pop(request, None))
        if isinstance(event, CandidateSelected):
            self.selected.add(event.candidate)
        if isinstance(event, LogOpened):
            self.incarnation = event.incarnation
        elif isinstance(event, ScenarioRegistered):
            self._register(event)
        elif isinstance(event, AdapterRegistered):
            self._freeze(event)
        elif name == "JobAmbiguous":
            self.ambiguous = True
        elif isinstance(event, TrainerJoined):
            self.in_place[recorded.boot] = event.mutates_in_place
        elif isinstance(event, JobStarted):
            self._start(event, recorded.boot)
        elif isinstance(event, CandidateReady):
            self.made[event.candidate] = event
        elif isinstance(event, PublicationRefused) and not event.request:
            self._refuse(event)
        elif name == "JobDispatched":
            assert not self.job, "two open jobs"
            assert not self.origins or event.scenario in self.origins, "the base model is frozen"  # type: ignore[attr-defined]
            self.job, self.started_by = event.job, ""  # type: ignore[attr-defined]
        elif name in ("JobDropped", "JobDiscarded", "CandidateSelected", "CandidateRejected"):
            assert self.job, f"{name} without a job"
            self.job, self.ambiguous = "", False
        elif name in ("ReceiverVerified", "EngineStaged", "ReceiverFailed"):
            key = (recorded.boot, event.publication, event.attempt)  # type: ignore[attr-defined]
            self.words.setdefault(key, event)
        elif isinstance(event, TargetPersisted):
            self._target(event)
        elif isinstance(event, TransferAborted):
            assert self.publication == event.publication and self.attempt[0] == event.attempt and event.members
            assert event.next_attempt <= 3 and not set(event.members) & set(event.excluded)
            self.attempt = event.next_attempt, frozenset(event.members)
        elif isinstance(event, ReleaseCommitted):
            self._commit(event)
        elif name == "PublicationHalted":
            self._end("" if self.rollback else self.candidate, "halted")
            self.publication = ""

    def _end(self, candidate: str, how: str) -> None:
        """A candidate has one fate; a rollback decides on none."""
        assert candidate not in self.fates, f"{candidate} was {self.fates[candidate]}, and is {how}"
        if candidate:
            self.fates[candidate] = how

    def _start(self, event: JobStarted, boot: str) -> None:
        """Who dies in a step in place leaves behind what nobody knows: a person decides before the job goes on."""
        assert not self.ambiguous or event.request, "an ambiguous job goes on by itself"
        assert self.ambiguous or not self.in_place.get(self.started_by), f"{self.started_by} may have died in a step"
        self.ambiguous, self.started_by = False, boot

    def _refuse(self, event: PublicationRefused) -> None:
        """Only by a candidate that was trained from it is one superseded; and a base is lost that is nowhere ahead."""
        if event.reason == "superseded":
            heirs = [name for name, made in self.made.items() if made.base == event.candidate]
            assert self.selected & set(heirs), f"{event.candidate} is superseded by none that was trained from it"
        if event.reason == "base_lost":
            base = self._base(event.candidate)
            known = base == "base" or base in self.fates or base in self._nothing().values()
            lost = known and base != self._tip(event.scenario)
            assert lost, f"the base of {event.candidate} is not lost"
        self._end(event.candidate, event.reason)

    def _base(self, candidate: str) -> str:
        """What it was trained from, or, where that was superseded, what that was trained from."""
        base = self.made[candidate].base
        while self.fates.get(base) == "superseded":
            base = self.made[base].base
        return self._named(base)

    def _nothing(self) -> dict[str, str]:
        """By scenario: what stands for the adapter that changes nothing."""
        return {scenario: f"none of {scenario}" for scenario in self.origins}

    def _tip(self, scenario: str) -> str:
        """The content of the scenario's head."""
        of = scenario if scenario in self.origins else ""
        return self._release(of, self.heads[of])

    def _release(self, of: str, load_id: str) -> str:
        if of and load_id == f"{self.incarnation}:0":
            return self._nothing()[of]
        return self.contents[load_id] if self.of.get(load_id, "") == of else ""

    def _named(self, candidate: str) -> str:
        """A candidate by its own name, but for those that are no adapter: these are what a scenario begins with."""
        begun = {self._begins(each): nothing for each, nothing in self._nothing().items()}
        return begun.get(candidate, candidate)

    def _begins(self, scenario: str) -> str:
        return f"base-{hashlib.sha256(scenario.encode()).hexdigest()[:16]}"

    def _freeze(self, event: AdapterRegistered) -> None:
        assert (
            self.base is not None and event.base_manifest == self.base.manifest and event.scenario not in self.origins
        )
        assert not self.made, "the whole model was trained"
        self.origins[event.scenario], self.heads[event.scenario] = event, self.head

    def _target(self, event: TargetPersisted) -> None:
        self.scenario = event.scenario if event.lora else ""
        assert bool(event.lora) == bool(self.origins) == (event.scenario in self.origins), "the base model is frozen"
        number = int(event.load_id.removeprefix(f"{self.incarnation}:"))
        assert (
            not self.publication
            and number > self.sequence
            and event.parent == self.heads[self.scenario]
            and event.members
        )
        assert event.load_id not in self.named
        self._content(event)
        self.named[event.load_id], self.sequence = event.manifest, number
        self.rollback, self.candidate, self.mode = bool(event.request), event.candidate, event.mode
        self.publication, self.attempt = event.publication, (1, frozenset(event.members))

    def _register(self, event: ScenarioRegistered) -> None:
        self.heads[""] = f"{self.incarnation}:0"
        self.committed[self.head], self.contents[self.head] = event.manifest, "base"
        self.base = event

    def _answer(self, recorded: Recorded, asked: Event | None) -> None:
        """Every request is answered once, by an event of the right kind; a rollback with what it named."""
        event = recorded.event
        assert asked is not None, f"{recorded.seq} {recorded.name} answers what nobody asked, or what was answered"
        assert recorded.name in ANSWERS[type(asked).__name__], f"{recorded.name} answers {type(asked).__name__}"
        if isinstance(event, TargetPersisted) and isinstance(asked, RollbackRequested):
            of = event.scenario if event.lora else ""
            assert not of or asked.scenario == of
            assert asked.head == self.heads[of] and self._release(of, asked.release) == self._named(event.candidate)

    def _content(self, event: TargetPersisted) -> None:
        """The candidate's own content, once; and its base chain leads to the head, unless it is a rollback's."""
        assert event.sender == ("artifact" if event.request or event.lora else "trainer")
        content = self.made.get(event.candidate) or self.origins.get(self.scenario) or self.base
        assert content is not None and (event.manifest, event.weights) == (content.manifest, content.weights)
        if not event.request:
            assert self._base(event.candidate) == self._tip(event.scenario) and event.candidate not in self.fates
            assert self.made[event.candidate].scenario == event.scenario

    def _commit(self, event: ReleaseCommitted) -> None:
        members = self.attempt[1]
        assert event.publication == self.publication and event.attempt == self.attempt[0] and members
        assert {Member(e.engine, e.boot) for e in event.evidence} == members
        assert self.named[event.load_id] == event.manifest
        for member in members:
            word = self.words[member.boot, event.publication, event.attempt]
            assert not self.scenario or word.scenario == self.scenario  # type: ignore[attr-defined]
            said = (type(word).__name__, word.load_id, word.manifest)  # type: ignore[attr-defined]
            proof = "EngineStaged" if self.mode == "staged" else "ReceiverVerified"
            assert said == (proof, event.load_id, event.manifest)
        self.heads[self.scenario], self.publication, self.of[event.load_id] = event.load_id, "", self.scenario
        self.committed[event.load_id] = event.manifest
        self.contents[event.load_id] = self._named(event.candidate)
        self._end("" if self.rollback else event.candidate, "committed")
