"""A standby publisher leaves fresh debts to the first one, and every debt is somebody's in the end (protocol.md, 6).

Knows: two publishers of one configuration, and time as each of them has it. Must not know: what is owed, or why.
"""

from __future__ import annotations

from collections.abc import Sequence

from consumers.reef_publisher.role import Heartbeats, Publisher
from reef_bus.config import Config
from reef_bus.core.effects import Debt, Me
from reef_bus.core.world import World, fold
from reef_bus.journal import MemoryJournal, MemoryStreams
from tests.facts import E0, E1, SERVING, joined, released, target, trained
from tests.spec import MILLI, SECOND, Given, Step, by, given

SELECTED: tuple[Step, ...] = (*SERVING, *trained("c1"))


def publisher(name: str) -> Publisher:
    config = Config()
    journal = MemoryJournal(MemoryStreams())
    return Publisher(config, Me(name, f"{name}.1"), Heartbeats(journal, config.publication.deadlines.heartbeat_s))


def names(debts: Sequence[Debt]) -> list[str]:
    return [debt.key.partition("/")[0] for debt in debts]


def go_on(history: Given, *steps: Step) -> World:
    for step in steps:
        assert fold(history.world, history.scribe.write(step)) == ""
    return history.world


def test_there_are_two_by_default_and_only_the_first_acts_at_once() -> None:
    assert Config().publishers() == ["publisher", "publisher-2"]
    history = given(*SELECTED)
    assert names(publisher("publisher").react(history.world, history.now)) == ["target"]
    assert names(publisher("publisher-2").react(history.world, history.now)) == []


def test_a_standby_acts_on_what_is_older_than_250_ms() -> None:
    world, standby, start = given(*SELECTED).world, publisher("publisher-2"), 7 * SECOND
    assert names(standby.react(world, start)) == []
    assert names(standby.react(world, start + 249 * MILLI)) == []
    assert names(standby.react(world, start + 250 * MILLI)) == ["target"]


def test_each_debt_has_its_own_age() -> None:
    history, standby, start = given(*SELECTED), publisher("publisher-2"), 7 * SECOND
    standby.react(history.world, start)
    standby.react(history.world, start + 250 * MILLI)
    go_on(history, *released(1, "c1", E0, E1)[:-1])
    assert names(standby.react(history.world, start + 260 * MILLI)) == []  # the commit is fresh
    assert names(standby.react(history.world, start + 510 * MILLI)) == ["commit"]


def test_a_debt_that_somebody_paid_is_forgotten() -> None:
    history, standby = given(*SELECTED), publisher("publisher-2")
    standby.react(history.world, SECOND)
    go_on(history, target(1, "c1", E0, E1))
    assert names(standby.react(history.world, 9 * SECOND)) == []


def test_a_log_that_is_never_quiet_starves_no_standby() -> None:
    """The first publisher is dead, and an engine joins every 100 ms."""
    history, standby, start = given(*SELECTED), publisher("publisher-2"), 7 * SECOND
    owed = [names(standby.react(history.world, start))]
    for tick in range(1, 4):
        go_on(history, by(f"e2.{tick}", joined("e2")))
        owed.append(names(standby.react(history.world, start + tick * 100 * MILLI)))
    assert owed == [[], [], [], ["target"]]


def test_a_clock_that_is_far_from_the_brokers_starves_no_standby() -> None:
    """This process's own clock is compared with itself alone; set back, it begins to count anew."""
    history, standby = given(*SELECTED), publisher("publisher-2")
    behind = history.now - 3600 * SECOND
    standby.react(history.world, behind)
    assert names(standby.react(history.world, behind + 250 * MILLI)) == ["target"]
    standby.react(history.world, behind - 10 * SECOND)
    assert names(standby.react(history.world, behind - 10 * SECOND + 250 * MILLI)) == ["target"]
