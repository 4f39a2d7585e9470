"""Every breakage of the protocol is caught by the seed that is kept for it, and by nothing but the breakage.

Knows: the list and its catches. Must not know: what any of them breaks.
"""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache

import pytest

from reef_bus.core.void import Tail, why_void
from tests import facts
from tests.simulation.breakages import BREAKAGES, attempt, known
from tests.simulation.mutants import CORE, coded, mutants
from tests.simulation.patching import Edit, broken, changed
from tests.simulation.searches import Breakage, Search
from tests.spec import Scribe, chained_to

CAUGHT = [each for each in BREAKAGES if not each.shielded]
AGAIN = "python -m tests.simulation.breakages --find"


@cache
def whole(search: Search, seed: int) -> str:
    """What it finds in the protocol as it is: the same for every breakage that this seed of this search catches."""
    return search(seed)


@pytest.mark.parametrize("breakage", CAUGHT, ids=lambda breakage: breakage.name)
def test_the_protocol_broken_in_one_place_is_caught_by_its_seed_and_whole_it_is_clean(breakage: Breakage) -> None:
    catch = known().get(breakage.name)
    assert catch, f"no seed is kept for it: {AGAIN} {breakage.name}"
    assert attempt(breakage, catch.seed), f"seed {catch.seed} does not catch it any more: {AGAIN} {breakage.name}"
    found = whole(breakage.where, catch.seed)
    assert found == "", f"without it seed {catch.seed} is not clean: {AGAIN} {breakage.name}"


def test_at_least_twenty_five_are_caught_and_of_every_other_it_is_said_what_shields_it() -> None:
    names = [each.name for each in BREAKAGES]
    assert len(names) == len(set(names)) and len(CAUGHT) >= 25
    assert known().keys() == {each.name for each in CAUGHT}


@pytest.mark.parametrize("breakage", BREAKAGES, ids=lambda breakage: breakage.name)
def test_what_a_breakage_replaces_is_there(breakage: Breakage) -> None:
    for edit in breakage.edits:
        function, code = changed(edit)
        assert code.co_code != function.__code__.co_code or code.co_consts != function.__code__.co_consts


def test_code_that_was_written_anew_is_named_and_not_silently_left_as_it_is() -> None:
    with pytest.raises(LookupError, match=r"void:why_void holds 'what was there before' 0 times"):
        changed(Edit("reef_bus.core.void:why_void", "what was there before", "nothing"))


def test_a_breakage_lasts_as_long_as_its_block() -> None:
    scribe = Scribe()
    scribe.write(facts.opened())
    late = scribe.write(chained_to(7, facts.trainer_joined()))
    with broken((Edit("reef_bus.core.void:why_void", "if recorded.prev != tail.seq:", "if False:"),)):
        assert why_void(Tail(), late) == ""
    assert why_void(Tail(), late) == "its prev is 7, the family's last stored event is 0"


def test_a_mutant_is_one_small_change_of_one_function() -> None:
    made = mutants(CORE / "ids.py")
    assert {"drop a clause", "return nothing", "negate a condition"} <= {
        each.kind for each in made + mutants(CORE / "void.py")
    }
    for mutant in made:
        function, code = coded(mutant)
        assert code.co_name == function.__name__ and code != function.__code__ and mutant.diff


def test_the_command_says_what_caught_each_mutant() -> None:
    """In the smallest module every mutant loses something that was found."""
    command = [sys.executable, "-m", "tests.simulation.mutants", "--module", "findings", "--json"]
    done = subprocess.run(command, cwd=CORE.parents[1], capture_output=True, text=True, check=True)
    verdicts = json.loads(done.stdout)
    assert {verdict["kind"] for verdict in verdicts} == {
        "drop self.violations.append(found)",
        "drop self.violations += later.violations",
        "drop self.unchecked += later.unchecked",
    }
    assert {verdict["by"] for verdict in verdicts} == {"units"}
    assert all(verdict["what"].startswith("tests/unit/test_") for verdict in verdicts)
