"""What the audit finds in staged mode: another word proves a release, and an engine stops at another moment.

Knows: one clean history of a staged release. Must not know: how the audit looks.
"""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from reef_bus.core.invariants import Audit
from reef_bus.events import Evidence
from tests.facts import E0, E1, SERVING, committed, digest, offered, staged, swapped, trained, verified
from tests.spec import Step
from tests.unit.test_invariants import Play, answer
from tests.unit.test_staged import beside

BEFORE: tuple[Step, ...] = (*SERVING, *trained("c1"), beside(1, "c1", E0, E1), offered(1, "c1"))
FIRST_STAGING = len(BEFORE) + 1
COMMIT = FIRST_STAGING + 2
SWAP = COMMIT + 1


def play(*words: Step, mode: str = "staged", pause: str = "drain") -> Play:
    """A release on these words, quoted as evidence in their order; then both swaps."""
    found = Play(*BEFORE)
    found.edit("TargetPersisted", mode=mode, pause=pause)
    found.say(*(words or (staged("e0", 1, "c1"), staged("e1", 1, "c1"))))
    seqs = range(FIRST_STAGING, COMMIT)
    proofs = tuple(Evidence(x.engine, x.boot, n, digest("c1")) for x, n in zip((E0, E1), seqs, strict=True))
    found.say(replace(committed(1, "c1", E0, E1), evidence=proofs))
    found.say(swapped("e0", 1, "c1"), swapped("e1", 1, "c1"))
    return found


def answered(found: Play, load: int, as_of: int, done_as_of: int) -> Audit:
    found.record(replace(answer("r1", E0, load, as_of, {}), done_as_of=done_as_of))
    return found.audit()


def invariants(audit: Audit) -> set[int | str]:
    return {violation.invariant for violation in audit.violations}


def test_a_staged_release_is_clean_and_its_proofs_are_its_stagings() -> None:
    audit = play().audit()
    assert audit.violations == () and audit.open == ()
    assert (audit.releases, audit.receivers_verified) == (1, 2)


def test_every_moment_until_the_commit_is_good_to_answer_by_the_incumbent() -> None:
    for as_of in range(7, COMMIT):
        assert answered(play(), 0, as_of, COMMIT).violations == (), as_of
    assert answered(play(), 1, SWAP, SWAP).violations == ()


@pytest.mark.parametrize(("load", "as_of"), [(0, COMMIT), (1, COMMIT), (1, COMMIT - 1), (0, SWAP)])
def test_nothing_is_answered_between_the_commit_and_the_own_swap(load: int, as_of: int) -> None:
    assert invariants(answered(play(), load, as_of, as_of)) <= {1, 2}
    assert answered(play(), load, as_of, as_of).violations


def test_a_swap_under_a_batch_that_is_being_generated_breaks_invariant_2() -> None:
    """It was begun with the old weights, and was not over when the engine said that it had swapped."""
    audit = answered(play(), 0, COMMIT - 1, SWAP)
    assert invariants(audit) == {2}
    assert audit.violations[0].sequences == (SWAP,)


@pytest.mark.parametrize(
    ("word", "mode"), [(verified("e1", 1, "c1"), "staged"), (staged("e1", 1, "c1"), "fenced")], ids=["served", "beside"]
)
def test_a_word_on_the_other_copy_proves_nothing(word: Step, mode: str) -> None:
    first = staged("e0", 1, "c1") if mode == "staged" else verified("e0", 1, "c1")
    audit = play(first, word, mode=mode).audit()
    assert {"fold", 7} <= invariants(audit)
    assert any(f"proves nothing in mode {mode}" in violation.text for violation in audit.violations)


def test_evidence_that_quotes_another_event_than_the_staging_breaks_invariant_7() -> None:
    found = play()
    quoted = (Evidence("e0", "e0.1", COMMIT - 1, digest("c1")), Evidence("e1", "e1.1", COMMIT - 1, digest("c1")))
    found.edit("ReleaseCommitted", evidence=quoted)
    assert invariants(found.audit()) == {7}
