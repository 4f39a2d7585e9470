"""The order of facts about a component, under every interleaving of ends, supervisors, exclusions and requests.

Knows: what can happen to processes, and the one order that a log may show. Must not know: how any of it is decided.
"""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from reef_bus.core.effects import Append, CleanUp, Debt, Me, Restarts, StartComponent
from reef_bus.core.recovery import Seen, supervisor
from reef_bus.core.world import World, fold, refusal
from reef_bus.events import (
    CleanupUnconfirmed,
    ComponentEvent,
    ComponentLost,
    ComponentStarted,
    Draft,
    EngineExcluded,
    Event,
    RecoveryResumeRequested,
)
from tests import facts
from tests.judge import LETTERS, in_order
from tests.spec import MILLI, SECOND, Scribe

RESTARTS = Restarts(max_restarts=1, window_s=3600.0, delay_s=1.0, grace_s=2.0)
ROLES = {"e0": "engine", "gateway": "gateway"}


class Process:
    """What a supervisor started. `left` says that something of it will survive its clean-up."""

    def __init__(self, boot: str) -> None:
        self.boot, self.said, self.left, self.reaped = boot, False, False, False
        self.exit: int | None = None


class Machine:
    """One machine, its log, and a supervisor that may be replaced at any moment, its children ending with it."""

    def __init__(self) -> None:
        self.world, self.scribe = World(), Scribe()
        self.processes: dict[str, Process] = {}
        self.supervisors = self.boots = 0
        self.say(facts.opened())

    def say(self, event: Event, boot: str = "") -> None:
        self.scribe.now += MILLI
        draft = Draft(event=event, writer="w", boot=boot or f"s{self.supervisors}")
        assert fold(self.world, self.scribe.store(draft, self.scribe.tails.get(event.chain, 0))) == ""

    def debts(self) -> list[Debt]:
        seen = {name: self.see(name, role) for name, role in ROLES.items()}
        return supervisor(self.world, Me("supervisor", f"s{self.supervisors}"), seen, RESTARTS, self.scribe.now)

    def see(self, name: str, role: str) -> Seen:
        found = self.processes.get(name)
        if found is None or found.reaped:
            return Seen(role=role)
        return Seen(role=role, exit=found.exit, owned=True, boot=found.boot if found.said else "")

    def perform(self, debt: Debt) -> None:
        match debt.effect:
            case Append(event=event):
                self.say(event)
            case StartComponent(component=name, starts=starts):
                before = self.processes.get(name)
                assert before is None or before.reaped, f"a second process of {name}"
                self.boots += 1
                self.processes[name] = Process(f"{name}.{self.boots}")
                self.say(ComponentStarted(component=name, pid=self.boots, starts=starts))
            case CleanUp(component=name):
                self.say(self.clean_up(name))

    def clean_up(self, name: str) -> Event:
        found = self.processes.get(name)
        if found is None:
            return ComponentLost(component=name, exit=0)
        found.exit = -9 if found.exit is None else found.exit
        if found.left:
            found.left = False  # somebody will look after it
            return CleanupUnconfirmed(component=name, pids=(1,))
        found.reaped = True
        return ComponentLost(component=name, exit=found.exit)

    # -- what can happen

    def happen(self, what: str, name: str) -> None:
        found = self.processes.get(name)
        lives = found is not None and found.exit is None
        if what == "supervisor":
            self.supervisors, self.processes = self.supervisors + 1, {}
        elif what == "ask":
            self.say(RecoveryResumeRequested(actor="ada", why="w", head="", component=name), "cli")
        elif found and lives:
            self.befall(what, name, found)

    def befall(self, what: str, name: str, found: Process) -> None:
        if what == "speak":
            found.said = True
            if name == "e0" and found.boot not in self.scribe.boots.values():
                self.say(facts.joined(name), found.boot)
        elif what in ("crash", "end"):
            found.exit = -9 if what == "crash" else 0
        elif what == "leave behind":
            found.exit, found.left = 1, True
        elif what == "cast out" and name == "e0" and found.said:
            self.say(EngineExcluded(scenario="digit", engine="e0", boot=found.boot, reason="silent"), "p1")

    def word(self, name: str) -> str:
        events = [r.event for r in self.scribe.log if isinstance(r.event, ComponentEvent)]
        return "".join(LETTERS[type(event).__name__] for event in events if event.component == name)


ALL = 3
HAPPENINGS = ("speak", "crash", "end", "leave behind", "cast out", "ask", "supervisor")
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("owed"), st.integers(0, ALL)),
        st.tuples(st.just("owed"), st.just(ALL)),
        st.tuples(st.sampled_from(HAPPENINGS), st.sampled_from(sorted(ROLES))),
        st.tuples(st.just("wait"), st.sampled_from([0.5, 3.0, 70.0])),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(STEPS)
def test_facts_come_in_one_order_and_never_two_processes_at_once(steps: list[tuple[str, int | float | str]]) -> None:
    """withdrawn → (lost | unconfirmed) → scheduled → started → published, for every component, at every prefix."""
    machine = Machine()
    for what, detail in steps:
        debts = machine.debts()
        if what == "wait":
            machine.scribe.now += int(float(detail) * SECOND)
        elif what != "owed":
            machine.happen(what, str(detail))
        elif debts:
            for debt in debts if detail == ALL else [debts[int(detail) % len(debts)]]:
                machine.perform(debt)
        for name in ROLES:
            assert in_order(machine.word(name)), machine.word(name)


@settings(max_examples=60, deadline=None)
@given(STEPS)
def test_when_the_trouble_is_over_and_a_person_has_looked_everything_runs(
    steps: list[tuple[str, int | float | str]],
) -> None:
    machine = Machine()
    for what, detail in steps:
        if what == "wait":
            machine.scribe.now += int(float(detail) * SECOND)
        elif what != "owed":
            machine.happen(what, str(detail))
        elif debts := machine.debts():
            machine.perform(debts[int(detail) % len(debts)])
    for _ in range(12):
        machine.scribe.now += 70 * SECOND
        for name in ROLES:
            machine.happen("ask", name)
            machine.happen("speak", name)
        for debt in machine.debts():
            machine.perform(debt)
    assert {name: machine.world.components[name].state for name in ROLES} == dict.fromkeys(ROLES, "running")
    assert [r for r in machine.world.requests.values() if not r.refused and not refusal(machine.world, r)] == []
