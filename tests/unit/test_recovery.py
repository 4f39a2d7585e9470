"""What a supervisor owes: the order of recovery, its budget, and what waits for a person.

Knows: the `deployment` family's facts. Must not know: processes (`test_processes.py`, `test_supervisor.py`).
"""

from __future__ import annotations

import pytest

from reef_bus.core.effects import Append, CleanUp, Effect, Me, Policy, Restarts, StartComponent
from reef_bus.core.recovery import Seen, supervisor
from reef_bus.core.serving import present
from reef_bus.core.world import World, refusal
from reef_bus.events import (
    CleanupUnconfirmed,
    ComponentLost,
    ComponentStarted,
    EngineExcluded,
    EngineLeft,
    Event,
    ReadinessPublished,
    ReadinessWithdrawn,
    RecoveryHalted,
    RecoveryResumed,
    RecoveryResumeRequested,
    RestartScheduled,
)
from reef_bus.views import status, waiting
from tests.facts import (
    E0,
    E1,
    SERVING,
    aborted,
    excluded,
    halted,
    joined,
    opened,
    target,
    trained,
    trainer_joined,
)
from tests.spec import SECOND, T0, Given, Step, after, by, given, publisher_debts

RESTARTS = Restarts(max_restarts=3, window_s=300.0, delay_s=1.0, grace_s=5.0)
RUNS = Seen(role="gateway", exit=None, owned=True)
KILLED = Seen(role="gateway", exit=-9, owned=True)
AWAY = Seen(role="gateway")
ELSEWHERE = Seen(role="gateway", exit=None)


def heard(boot: str, role: str = "gateway", *, says_halted: bool = False) -> Seen:
    return Seen(role=role, exit=None, owned=True, boot=boot, halted=says_halted)


def up(starts: int = 1, name: str = "c") -> ComponentStarted:
    return ComponentStarted(component=name, pid=1, starts=starts)


def published(boot: str = "b1", name: str = "c") -> ReadinessPublished:
    return ReadinessPublished(component=name, boot=boot)


def withdrawn(reason: str = "its process ended with signal 9", name: str = "c") -> ReadinessWithdrawn:
    return ReadinessWithdrawn(component=name, reason=reason)


def unconfirmed(*pids: int) -> CleanupUnconfirmed:
    return CleanupUnconfirmed(component="c", pids=pids)


def lost(status: int = -9) -> ComponentLost:
    return ComponentLost(component="c", exit=status)


def scheduled(restart: int = 1, delay_s: float = 1.0) -> RestartScheduled:
    return RestartScheduled(component="c", restart=restart, delay_s=delay_s)


def gave_up() -> RecoveryHalted:
    return RecoveryHalted(component="c", restarts=3, window_s=300.0)


def asked(name: str = "c") -> RecoveryResumeRequested:
    return RecoveryResumeRequested(actor="ada", why="mended", head="", component=name)


def resumed(request: int) -> RecoveryResumed:
    return RecoveryResumed(component="c", request=request)


def failures(count: int, last: int = -9) -> tuple[Step, ...]:
    """So many lives that ended badly, and what each one's end led to; the last one's end is the last fact."""
    lives = [(up(n), withdrawn(), lost(), scheduled(n)) for n in range(1, count + 1)]
    facts = [fact for life in lives for fact in life]
    return (*facts[:-2], lost(last))


def owed(
    *history: Step, seen: Seen = AWAY, later_s: float = 0.0, boot: str = "s1", name: str = "c"
) -> Event | Effect | None:
    """The one thing that is owed to the component, if any."""
    state = given(opened(), *history)
    debts = supervisor(state.world, Me("supervisor", boot), {name: seen}, RESTARTS, state.now + int(later_s * SECOND))
    assert len(debts) <= 1, debts
    effects = [debt.effect.event if isinstance(debt.effect, Append) else debt.effect for debt in debts]
    return effects[0] if effects else None


# -- up


def test_nothing_before_the_log_is_open() -> None:
    assert supervisor(World(), Me("supervisor", "s1"), {"c": AWAY}, RESTARTS, T0) == []


def test_a_component_that_never_ran_is_started() -> None:
    assert owed() == StartComponent("c", 1)


def test_one_that_runs_and_has_said_nothing_yet_owes_nothing() -> None:
    assert owed(up(), seen=RUNS) is None


def test_who_does_not_join_is_ready_at_its_first_heartbeat_and_once() -> None:
    assert owed(up(), seen=heard("b1")) == published("b1")
    assert owed(up(), published("b1"), seen=heard("b1")) is None


def test_a_life_before_is_no_readiness_of_this_one() -> None:
    again = (up(), published("b1"), withdrawn(), lost(), scheduled(), up(2))
    assert owed(*again, seen=RUNS) is None
    assert owed(*again, seen=heard("b2")) == published("b2")


def test_an_engine_is_ready_when_its_own_boot_is_the_one_that_joined() -> None:
    start, ear = up(name="e0"), heard("e0.1", "engine")
    assert owed(start, seen=ear, name="e0") is None
    assert owed(by("e0.0", joined("e0")), start, seen=ear, name="e0") is None
    assert owed(start, joined("e0"), seen=ear, name="e0") == published("e0.1", "e0")
    assert owed(start, joined("e0"), seen=heard("", "engine"), name="e0") is None


def test_a_join_that_overtook_its_start_on_the_log_counts_as_well() -> None:
    assert owed(joined("e0"), up(name="e0"), seen=heard("e0.1", "engine"), name="e0") == published("e0.1", "e0")


def test_a_trainer_is_ready_when_it_has_joined() -> None:
    assert owed(up(), seen=heard("t1", "trainer")) is None
    assert owed(up(), trainer_joined(), seen=heard("t1", "trainer")) == published("t1")
    assert owed(up(), trainer_joined(), seen=Seen(role="trainer", exit=None, owned=True)) is None


# -- down, and up again


@pytest.mark.parametrize(
    ("seen", "reason"),
    [
        (KILLED, "its process ended with signal 9"),
        (Seen(role="gateway", exit=3, owned=True), "its process ended with status 3"),
        (AWAY, "its supervisor ended"),
    ],
)
def test_readiness_is_withdrawn_before_anything_is_cleaned_up(seen: Seen, reason: str) -> None:
    assert owed(up(), published(), seen=seen) == withdrawn(reason)
    assert owed(up(), seen=seen) == withdrawn(reason)  # also of one that had not become ready
    assert owed(up(), published(), withdrawn(reason), seen=seen) == CleanUp("c")


def test_after_the_clean_up_a_restart_is_scheduled_and_then_due() -> None:
    down = (up(), published(), withdrawn(), lost())
    assert owed(*down, seen=KILLED) == scheduled(1, 1.0)
    assert owed(*down, scheduled(1, 1.0), later_s=0.99) is None
    assert owed(*down, scheduled(1, 1.0), later_s=1.001) == StartComponent("c", 2)


@pytest.mark.parametrize(("losses", "delay_s"), [(1, 1.0), (2, 2.0), (3, 4.0)])
def test_delays_double_and_count_from_the_schedules_own_time(losses: int, delay_s: float) -> None:
    history = (*failures(losses), after(100, scheduled(losses, delay_s)))
    assert owed(*failures(losses)) == scheduled(losses, delay_s)
    assert owed(*history, later_s=delay_s - 0.01) is None
    assert owed(*history, later_s=delay_s + 0.001) == StartComponent("c", losses + 1)


def test_an_asked_for_end_costs_nothing() -> None:
    assert owed(up(), withdrawn(), lost(0)) == scheduled(0, 0.0)
    assert owed(*failures(2, last=0)) == scheduled(1, 0.0)


def test_what_runs_under_another_parent_is_neither_lost_nor_started_a_second_time() -> None:
    assert owed(up(), published(), seen=ELSEWHERE) is None
    assert owed(seen=ELSEWHERE) is None
    assert owed(up(), withdrawn(), lost(), scheduled(), seen=ELSEWHERE, later_s=9) is None


def test_facts_name_what_made_them_owed_and_keys_stay_while_the_debt_does() -> None:
    state = given(opened(), up(), withdrawn())
    for later in (0, 60 * SECOND):
        (debt,) = supervisor(state.world, Me("supervisor", "s1"), {"c": KILLED}, RESTARTS, state.now + later)
        assert (debt.key, debt.cause) == ("clean-up/c/3", 3)


# -- the budget


def test_the_fourth_loss_within_the_window_halts_recovery_and_then_nothing_is_owed() -> None:
    assert owed(*failures(4), later_s=60) == gave_up()
    assert owed(*failures(4), gave_up(), later_s=60) is None


def test_losses_before_the_window_are_forgotten() -> None:
    old = (*failures(3), scheduled(3, 4.0))
    assert owed(*old, after(301, up(4)), withdrawn(), lost()) == scheduled(1, 1.0)


def test_the_next_supervisor_tries_again_with_a_fresh_budget_because_a_person_started_it() -> None:
    over = (*failures(4), gave_up())
    assert owed(*over, boot="s2") == scheduled(0, 0.0)
    assert owed(*over, by("s2", scheduled(0, 0.0)), boot="s2") == StartComponent("c", 5)
    again = (*over, by("s2", scheduled(0, 0.0)), by("s2", up(5)), by("s2", withdrawn()), by("s2", lost()))
    assert owed(*again, boot="s2") == scheduled(1, 1.0)


# -- what waits for a person


def test_with_something_left_of_it_a_component_is_not_started_not_even_by_the_next_supervisor() -> None:
    stuck = (up(), withdrawn(), unconfirmed(77, 78))
    assert given(opened(), *stuck).world.components["c"].left == (77, 78)
    for boot in ("s1", "s2"):
        assert owed(*stuck, boot=boot, later_s=3600) is None


def test_a_person_who_asks_is_answered_and_the_clean_up_is_tried_again() -> None:
    stuck = (up(), withdrawn(), unconfirmed(77), asked())
    assert owed(*stuck) == resumed(5)
    assert owed(*stuck, resumed(5)) == CleanUp("c")
    assert owed(*stuck, resumed(5), unconfirmed(77)) is None
    assert owed(*stuck, resumed(5), lost()) == scheduled(1, 1.0)


def test_a_person_who_asks_gives_a_halted_component_a_new_budget() -> None:
    over = (*failures(4), gave_up(), asked())
    request = len(failures(4)) + 3
    assert owed(*over) == resumed(request)
    assert owed(*over, resumed(request)) == scheduled(0, 0.0)
    assert owed(*over, resumed(request), scheduled(0, 0.0)) == StartComponent("c", 5)


def standing(world: World) -> dict[str, int]:
    """The oldest request by component that can still be met."""
    found = [r for r in world.requests.values() if not r.refused and not refusal(world, r)]
    return {each.about: each.seq for each in reversed(found)}


@pytest.mark.parametrize(
    "history", [(), (up(),), (up(), withdrawn()), (up(), withdrawn(), lost()), (up(), withdrawn(), lost(), scheduled())]
)
def test_a_request_for_what_was_not_given_up_is_dead_on_arrival(history: tuple[Step, ...]) -> None:
    assert standing(given(opened(), *history, asked(), asked("unknown")).world) == {}


def test_of_two_requests_the_first_is_answered_and_the_second_came_too_late() -> None:
    over = (up(), withdrawn(), unconfirmed(77), asked(), by("elsewhere", asked()))
    assert standing(given(opened(), *over).world) == {"c": 5}
    assert standing(given(opened(), *over, resumed(5)).world) == {}


def test_when_the_next_supervisor_was_faster_publishers_say_so() -> None:
    over = (*failures(4), gave_up(), asked(), by("s2", scheduled(0, 0.0)))
    state = given(opened(), *over)
    debts = supervisor(state.world, Me("supervisor", "s2"), {"c": AWAY}, RESTARTS, state.now + 1)
    assert [type(d.effect).__name__ for d in debts] == ["StartComponent"]
    assert [refusal(state.world, asked) for asked in state.world.requests.values()] == ["not_given_up"]


def test_status_names_the_component_and_the_exact_command() -> None:
    stuck = given(opened(), up(), withdrawn(), unconfirmed(77, 78))
    found = waiting(stuck.world, stuck.now + 3 * SECOND, Policy())
    assert (found["on"], found["command"]) == ("c", "reef-bus resume c --why …") and "77, 78" in found["next"]
    over = given(opened(), *failures(4), gave_up())
    found = waiting(over.world, over.now, Policy())
    assert (found["on"], found["command"]) == ("c", "reef-bus resume c --why …") and "too often" in found["next"]
    assert status(over.world, over.now, Policy())["components"]["c"]["state"] == "halted"


# -- a boot that is out, and a process that goes on


def out(seen: Seen, *history: Step, later_s: float) -> Event | Effect | None:
    return owed(up(name="e0"), joined("e0"), *history, seen=seen, later_s=later_s, name="e0")


HUNG = heard("e0.1", "engine")
FORCED = withdrawn("its boot is out, and its process went on for 5 s", "e0")


@pytest.mark.parametrize("fact", [excluded("e0"), EngineLeft(engine="e0", reason="load")])
def test_a_process_whose_boot_is_out_has_a_grace_and_is_then_ended(fact: EngineExcluded | EngineLeft) -> None:
    ready = published("e0.1", "e0")
    assert out(HUNG, ready, fact, later_s=4.99) is None
    assert out(HUNG, ready, fact, later_s=5.01) == FORCED
    assert out(HUNG, ready, fact, FORCED, later_s=5.01) == CleanUp("e0")


@pytest.mark.parametrize("fact", [aborted(1, 1, E0, excluded=(E1,)), halted(1, excluded=(E1,))])
def test_however_it_was_excluded(fact: Event) -> None:
    state = given(
        *SERVING, *trained("c1"), target(1, "c1", E0, E1), up(name="e1"), published("e1.1", "e1"), after(7, fact)
    )
    seen, me = {"e1": heard("e1.1", "engine")}, Me("supervisor", "s1")
    assert supervisor(state.world, me, seen, RESTARTS, state.now + 5 * SECOND) == []
    (debt,) = supervisor(state.world, me, seen, RESTARTS, state.now + 5 * SECOND + 1)
    assert isinstance(debt.effect, Append) and isinstance(debt.effect.event, ReadinessWithdrawn) and debt.at_head


def test_a_boot_that_is_out_is_not_held_against_its_successor() -> None:
    """The exclusion of an earlier boot, also one by hand before any supervisor, ends no process that came after."""
    before = (joined("e0"), excluded("e0"), up(name="e0"))
    assert owed(*before, seen=heard("", "engine"), later_s=60, name="e0") is None
    assert owed(*before, seen=heard("e0.2", "engine"), later_s=60, name="e0") is None
    ready = published("e0.2", "e0")
    assert owed(*before, by("e0.2", joined("e0")), ready, seen=heard("e0.2", "engine"), later_s=60, name="e0") is None


def test_a_consumer_that_halted_at_a_contradiction_stays_up() -> None:
    seen = heard("e0.1", "engine", says_halted=True)
    assert out(seen, published("e0.1", "e0"), excluded("e0"), later_s=60) is None


def test_one_that_is_not_ours_and_goes_on_is_withdrawn_too_and_its_clean_up_can_only_wait() -> None:
    seen = Seen(role="engine", exit=None)
    assert out(seen, excluded("e0"), later_s=60) == FORCED


# -- what others make of it


def test_who_was_withdrawn_is_not_counted_on_any_more_and_its_next_boot_is() -> None:
    state = given(*SERVING, up(name="e0"))
    e0 = state.world.membership.engines["e0"]
    assert present(state.world, e0)
    world = given(*SERVING, up(name="e0"), withdrawn(name="e0")).world
    assert not present(world, world.membership.engines["e0"])
    world = given(*SERVING, up(name="e0"), withdrawn(name="e0"), by("e0.2", joined("e0"))).world
    assert present(world, world.membership.engines["e0"])


def test_publishers_react_to_the_withdrawal_and_do_not_wait_for_the_clean_up() -> None:
    def excludes(state: Given) -> list[str]:
        events = [d.effect.event for d in publisher_debts(state.world, state.now) if isinstance(d.effect, Append)]
        return [event.boot for event in events if isinstance(event, EngineExcluded)]

    assert excludes(given(*SERVING, up(name="e0"))) == []
    assert excludes(given(*SERVING, up(name="e0"), withdrawn(name="e0"))) == ["e0.1"]


def test_a_log_without_readiness_reads_as_it_did() -> None:
    """What versions wrote that had neither withdrawals nor schedules: an end is an end, and nothing else is."""
    world = given(opened(), up(), lost(), up(2), lost(1)).world
    component = world.components["c"]
    assert (component.running, component.starts, component.ended, len(component.lost)) == (False, 2, 5, 2)
    assert owed(up(), lost(), up(2), lost(1)) == scheduled(2, 2.0)


def test_a_boot_whose_component_is_withdrawn_is_counted_on_no_more() -> None:
    assert given(opened(), up(), published("b1")).world.components["c"].published == "b1"
    assert given(opened(), up(), published("b1"), withdrawn()).world.components["c"].published == ""


def test_when_a_person_resumes_after_an_unconfirmed_clean_up_the_budget_begins_anew() -> None:
    """Three failures before, one after: the fourth would be one too many."""
    stuck = (*failures(3), scheduled(3, 4.0), up(4), withdrawn(), unconfirmed(77))
    assert owed(*stuck, asked(), resumed(17), lost()) == scheduled(1, 1.0)
