"""What became of a candidate, on a log that goes on from another one.

Knows: facts, the fold, a start. Must not know: who asks (`test_attach.py`).
"""

from __future__ import annotations

from reef_bus.core.world import World, fold
from reef_bus.outcomes import Committed, Endings, note, outcome
from tests.facts import E0, E1, holds, joined, released, rollback_asked, rolled_back, trained, trainer_joined
from tests.unit.test_start import RELEASED, continued, first, start_of_log


def test_a_rollback_on_a_later_log_is_not_the_release_that_its_candidate_became() -> None:
    """`c1` became inc:1 on the log before; brought back here it is inc:3, by other evidence."""
    start = start_of_log(*RELEASED, *trained("c2", "c1", 2), *released(2, "c2", E0, E1))
    back = (trainer_joined(), joined("e0"), joined("e1"), holds("e0", 2, "c2"), holds("e1", 2, "c2"))
    asked = rollback_asked(1, on=2)
    steps = (first(start), *back, asked)
    world, endings = World(start=start), Endings()
    log = continued(start, *steps, *rolled_back(3, "c1", start.seq + len(steps), E0, E1))
    for recorded in log:
        assert fold(world, recorded) == ""
        note(endings, recorded.event)
    assert world.publications.head is not None and world.publications.head.load_id == "inc:3"
    assert outcome(world, endings, "c1") == Committed(1, "c1", "inc:1", ())
