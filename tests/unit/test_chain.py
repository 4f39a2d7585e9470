"""Chains of deltas, by example: what is an anchor, what a reader reads, what may go.

Knows: releases a, b, c … of 100 bytes each, deltas of a few. Must not know: how the fewest bytes are found.
"""

from __future__ import annotations

import pytest

from reef_bus.errors import Rejected
from tests.chains import Kept, Reader, Reading, Release, anchors, publishes, removable, route

# Anchors every 3: a, d, g.
SEVEN = [Release("a", 100), *(Release(digest, 100, 4) for digest in "bcdefg")]
ALL = publishes(SEVEN, 3)


def read(target: int, held: str | None = None, kept: Kept = ALL, releases: list[Release] = SEVEN) -> Reading | None:
    return route(releases, kept, 3, Reader(target, held))


def test_every_third_release_is_kept_in_full() -> None:
    assert anchors(SEVEN, 3) == {0, 3, 6}
    assert ALL.fulls == {"a", "d", "g"}
    assert ALL.deltas == {("a", "b"), ("b", "c"), ("c", "d"), ("d", "e"), ("e", "f"), ("f", "g")}


def test_with_an_anchor_at_every_release_nobody_needs_a_delta() -> None:
    assert anchors(SEVEN, 1) == set(range(7))


def test_a_release_without_a_delta_that_pays_is_an_anchor_and_the_count_begins_anew() -> None:
    releases = [Release("a", 100), Release("b", 100, 4), Release("c", 100), *(Release(d, 100, 4) for d in "def")]
    assert anchors(releases, 3) == {0, 2, 5}
    as_large = [Release("a", 100), Release("b", 100, 100), Release("c", 100, 99)]
    assert anchors(as_large, 3) == {0, 1}
    assert publishes(as_large, 3) == Kept(frozenset("ab"), frozenset({("b", "c")}))


def test_a_late_joiner_reads_one_anchor_and_the_deltas_since() -> None:
    assert read(5) == Reading("d", (("d", "e"), ("e", "f")), 108)
    assert read(6) == Reading("g", (), 100)


def test_who_holds_the_release_before_reads_one_delta_also_to_an_anchor() -> None:
    assert read(6, held="f") == Reading(None, (("f", "g"),), 4)


def test_who_holds_the_target_reads_nothing() -> None:
    assert read(5, held="f") == Reading(None, (), 0)


def test_who_is_too_far_behind_reads_an_anchor() -> None:
    assert read(6, held="d") == Reading(None, (("d", "e"), ("e", "f"), ("f", "g")), 12)
    assert read(6, held="c") == Reading("g", (), 100)


def test_deltas_that_add_up_to_more_than_the_full_bytes_are_not_read() -> None:
    heavy = [Release("a", 100), *(Release(digest, 100, 60) for digest in "bcd")]
    assert read(3, held="b", kept=publishes(heavy, 3), releases=heavy) == Reading("d", (), 100)


def test_a_rollback_finds_what_was_kept_of_the_content_that_it_brings_back() -> None:
    releases = [*SEVEN, Release("d", 100, 30)]
    kept = publishes(releases, 3)
    assert read(7, kept=kept, releases=releases) == Reading("d", (), 100)
    assert read(7, held="g", kept=kept, releases=releases) == Reading(None, (("g", "d"),), 30)


def test_what_cannot_be_reached_is_not_readable() -> None:
    assert read(5, kept=ALL.without(Kept(frozenset("d")))) is None
    assert read(5, kept=ALL.without(Kept(deltas=frozenset({("d", "e")})))) is None


def test_retention_keeps_what_the_head_and_the_readers_under_way_need() -> None:
    gone = removable(SEVEN, ALL, 3, [Reader(5), Reader(5, "c")])
    assert ALL.without(gone) == Kept(frozenset("d"), frozenset({("c", "d"), ("d", "e"), ("e", "f")}))


def test_retention_keeps_a_content_that_a_later_release_has_again() -> None:
    releases = [*SEVEN, Release("a", 100)]
    kept = publishes(releases, 3)
    assert kept.without(removable(releases, kept, 3, [Reader(7)])).fulls == {"a"}


def test_nothing_is_removed_while_a_reader_cannot_be_served() -> None:
    with pytest.raises(Rejected, match="release f cannot be read"):
        removable(SEVEN, ALL.without(Kept(frozenset("d"))), 3, [Reader(6), Reader(5)])
