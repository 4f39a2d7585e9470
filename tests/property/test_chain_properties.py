"""However releases follow one another: everybody gets there, cheaply, and nothing is kept that nobody needs.

Knows: a store that a reading is played on, blob by blob. Must not know: how the fewest bytes are found.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.chains import Edge, Kept, Reader, Reading, Release, anchors, publishes, removable, route

BRIEFLY = settings(max_examples=200, deadline=None)
EVERY = st.integers(1, 5)


@st.composite
def histories(draw: st.DrawFn) -> list[Release]:
    """Contents come back now and then; their sizes come back with them, whoever follows whom."""
    digests = draw(st.lists(st.sampled_from("abcdefghijkl"), min_size=1, max_size=14))
    fulls = {digest: draw(st.integers(1, 50)) for digest in sorted(set(digests))}
    edges = sorted(set(itertools.pairwise(digests)))
    deltas = {edge: draw(st.none() | st.integers(0, 60)) for edge in edges}
    first = Release(digests[0], fulls[digests[0]])
    return [first, *(Release(b, fulls[b], deltas[a, b]) for a, b in itertools.pairwise(digests))]


def readers(history: list[Release]) -> st.SearchStrategy[Reader]:
    held = st.none() | st.sampled_from([release.digest for release in history])
    return st.builds(Reader, st.integers(0, len(history) - 1), held)


def arrives(kept: Kept, reading: Reading, held: str | None) -> str | None:
    """What the reader holds in the end."""
    holds = held
    if reading.full is not None:
        assert reading.full in kept.fulls
        holds = reading.full
    for edge in reading.deltas:
        assert edge in kept.deltas and edge[0] == holds
        holds = edge[1]
    return holds


def cost(history: list[Release], reading: Reading) -> int:
    fulls = {release.digest: release.full for release in history}
    deltas = {(a.digest, b.digest): b.delta or 0 for a, b in itertools.pairwise(history)}
    return (fulls[reading.full] if reading.full else 0) + sum(deltas[edge] for edge in reading.deltas)


def ways(history: list[Release], kept: Kept, every: int, reader: Reader) -> Iterator[int]:
    """Bytes of every way along the history, tried one by one."""
    for first in range(max(0, reader.target - every), reader.target + 1):
        edges: list[Edge] = [(a.digest, b.digest) for a, b in itertools.pairwise(history[first : reader.target + 1])]
        steps = sum(release.delta or 0 for release in history[first + 1 : reader.target + 1])
        if kept.deltas.issuperset(edges):
            if history[first].digest == reader.held:
                yield steps
            if history[first].digest in kept.fulls:
                yield steps + history[first].full


@BRIEFLY
@given(histories(), EVERY, st.data())
def test_every_reader_arrives_by_one_full_version_at_most_and_few_deltas(
    history: list[Release], every: int, data: st.DataObject
) -> None:
    kept, reader = publishes(history, every), data.draw(readers(history))
    found = route(history, kept, every, reader)
    assert found is not None
    assert arrives(kept, found, reader.held) == history[reader.target].digest
    assert len(found.deltas) <= every
    assert found.nbytes == cost(history, found) == min(ways(history, kept, every, reader))


@BRIEFLY
@given(histories(), EVERY)
def test_between_two_anchors_are_fewer_deltas_than_every_and_each_pays(history: list[Release], every: int) -> None:
    found = anchors(history, every)
    for number in range(len(history)):
        since = next(back for back in itertools.count() if number - back in found)
        assert since < every
    paid = [history[number] for number in range(len(history)) if number not in found]
    assert all(release.delta is not None and release.delta < release.full for release in paid)


@BRIEFLY
@given(histories(), EVERY, st.integers(0, 14))
def test_a_later_release_makes_no_earlier_one_an_anchor(history: list[Release], every: int, count: int) -> None:
    assert anchors(history[:count], every) == {number for number in anchors(history, every) if number < count}


@BRIEFLY
@given(histories(), EVERY, st.data())
def test_after_retention_all_who_were_named_arrive_as_cheaply_and_nothing_left_is_idle(
    history: list[Release], every: int, data: st.DataObject
) -> None:
    kept, named = publishes(history, every), data.draw(st.lists(readers(history), max_size=4))
    left = kept.without(removable(history, kept, every, named))
    before = [route(history, kept, every, reader) for reader in named]
    assert [route(history, left, every, reader) for reader in named] == before
    for idle in [Kept(frozenset({full})) for full in left.fulls] + [Kept(deltas=frozenset({e})) for e in left.deltas]:
        poorer = left.without(idle)
        assert [route(history, poorer, every, reader) for reader in named] != before


@BRIEFLY
@given(histories(), EVERY, st.data())
def test_retention_twice_removes_nothing_more(history: list[Release], every: int, data: st.DataObject) -> None:
    kept, named = publishes(history, every), data.draw(st.lists(readers(history), max_size=4))
    left = kept.without(removable(history, kept, every, named))
    assert removable(history, left, every, named) == Kept()
