"""An answer of several parts, at every hand that it goes through: gateway, client, audit, book, batch.

Knows: spans. Must not know: how an answer came to have them.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from reef_bus.artifacts import ArtifactStore
from reef_bus.audit import consumption
from reef_bus.backends import Generated, Sample
from reef_bus.core.invariants import Audit
from reef_bus.core.membership import Engine
from reef_bus.core.records import choose, make_up, retire
from reef_bus.events import InferenceRecorded, Span
from reef_bus.journal import RECORDS, MemoryJournal, MemoryStreams
from reef_bus.producer import connect
from reef_bus.samples import Batch, decode_batch, decode_rows, encode_batch
from tests.facts import E0, E1, SERVING, fenced, halted, holds, paused, released, target, trained
from tests.spec import Step
from tests.unit import test_book, test_gateway, test_invariants_staged, test_records
from tests.unit.test_book import SECOND, batch, nothing, shelf, world  # noqa: F401 - a fixture
from tests.unit.test_gateway import PROMPT, QUESTION, Scripted, gateway, generated
from tests.unit.test_invariants import Play, answer, report
from tests.unit.test_invariants_staged import COMMIT, SWAP, invariants

COMMITTED = (*SERVING, *trained("c1"), *paused("in_place", *released(1, "c1", E0, E1)))


def spans(*parts: tuple[int, int, int, int]) -> tuple[Span, ...]:
    """Of (release, tokens, as_of, done_as_of), one after the other."""
    firsts = [sum(tokens for _, tokens, _, _ in parts[:n]) for n in range(len(parts))]
    return tuple(Span(f"inc:{n}", first, count, *when) for first, (n, count, *when) in zip(firsts, parts, strict=True))


# -- what makes up an answer


WHOLE = Span("inc:0", 0, 5, 7, 20)
PARTS = spans((0, 2, 7, 9), (1, 3, 18, 20))


def test_parts_make_up_an_answer_token_by_token_and_one_after_the_other() -> None:
    assert make_up(PARTS, WHOLE)
    assert make_up(spans((0, 2, 7, 9), (1, 1, 9, 9), (1, 2, 20, 20)), WHOLE)


WRONG = {
    "a gap": (PARTS[0], replace(PARTS[1], first=3, count=2)),
    "an overlap": (PARTS[0], replace(PARTS[1], first=1, count=4)),
    "too few": (PARTS[0], replace(PARTS[1], count=2)),
    "too many": (PARTS[0], replace(PARTS[1], count=4)),
    "none": (replace(PARTS[0], count=0), replace(PARTS[1], first=0, count=5)),
    "less than none": (replace(PARTS[0], count=-1), replace(PARTS[1], first=-1, count=6)),
    "another order": PARTS[::-1],
    "begun before the last one had ended": (replace(PARTS[0], done_as_of=19), PARTS[1]),
    "ended before it began": (PARTS[0], replace(PARTS[1], as_of=21)),
    "named after its last part": (replace(PARTS[0], load_id="inc:1"), PARTS[1]),
    "begun at another point": (replace(PARTS[0], as_of=8), PARTS[1]),
    "ended at another point": (PARTS[0], replace(PARTS[1], done_as_of=19)),
}


@pytest.mark.parametrize("parts", WRONG.values(), ids=WRONG)
def test_what_does_not_make_up_an_answer(parts: tuple[Span, ...]) -> None:
    assert not make_up(parts, WHOLE)


# -- the gateway, and its client


def mixed(engine: Engine, parts: tuple[Span, ...] = spans((0, 1, 7, 8), (1, 1, 17, 17))) -> Generated:
    return replace(generated(engine), spans=parts, as_of=parts[0].as_of, done_as_of=parts[-1].done_as_of)


async def test_an_answer_of_several_versions_waits_for_the_last_of_them_to_be_known_as_committed() -> None:
    async def hands(engine: Engine) -> Generated:
        return mixed(engine)

    router = Scripted(hands)
    router.moved(world(*SERVING))
    asked = asyncio.create_task(router.generate(PROMPT))
    await asyncio.sleep(0.05)
    assert not asked.done()
    router.moved(world(*COMMITTED))
    assert [span.load_id for span in (await asked).spans] == ["inc:0", "inc:1"] and len(router.asked) == 1


@pytest.mark.parametrize(
    "parts",
    [spans((0, 1, 7, 8), (9, 1, 8, 8)), spans((0, 1, 7, 8), (1, 2, 17, 17)), spans((0, 2, 7, 8), (1, 0, 17, 17))],
    ids=["no release", "more than it is", "an empty part"],
)
async def test_an_answer_whose_spans_do_not_hold_is_asked_for_again(parts: tuple[Span, ...]) -> None:
    answers = iter([parts, spans((0, 1, 7, 8), (1, 1, 17, 17))])

    async def hands(engine: Engine) -> Generated:
        return mixed(engine, next(answers))

    router = Scripted(hands)
    router.moved(world(*COMMITTED))
    assert [span.load_id for span in (await router.generate(PROMPT)).spans] == ["inc:0", "inc:1"]
    assert len(router.asked) == 2


async def test_an_answer_that_goes_on_over_a_release_that_drains_is_asked_for_again() -> None:
    async def hands(engine: Engine) -> Generated:
        return mixed(engine) if len(router.asked) == 1 else generated(engine)

    router = Scripted(hands)
    router.moved(world(*paused("drain", *COMMITTED)))
    assert (await router.generate(PROMPT)).spans == () and len(router.asked) == 2


async def test_the_record_the_blob_and_the_client_are_told_which_release_made_which_tokens(tmp_path: Path) -> None:
    journal = MemoryJournal(MemoryStreams())
    async with gateway(journal, tmp_path) as (url, _, found):

        async def hands(engine: Engine) -> Generated:
            return mixed(engine)

        assert isinstance(found.router, Scripted)
        found.router.hands = hands
        found.router.moved(world(*COMMITTED))
        async with connect(url, QUESTION["model"]) as client:  # type: ignore[arg-type]
            said = await client.ask("7")
            found.router.hands = test_gateway.at_once
            alone = await client.ask("7")
    assert (said.load_id, said.spans) == ("inc:0", (("inc:0", 1), ("inc:1", 1)))
    assert (alone.load_id, alone.spans) == ("inc:0", ())
    record, other = [(await journal.read(RECORDS, seq)).event for seq in (1, 2)]
    assert isinstance(record, InferenceRecorded) and isinstance(other, InferenceRecorded)
    assert record.spans == spans((0, 1, 7, 8), (1, 1, 17, 17)) and other.spans == ()
    assert (record.load_id, record.as_of, record.done_as_of) == ("inc:0", 7, 17)
    (row,) = decode_rows(ArtifactStore(tmp_path).get(record.blob.digest))
    assert row.load_ids == ("inc:0", "inc:1")


# -- the audit: each part is judged as an answer of its own


def audited(*parts: tuple[int, int, int, int], pause: str = "in_place", **changes: object) -> Audit:
    """Of a staged release, whose first engine gave this answer of five tokens."""
    found, named = test_invariants_staged.play(pause=pause), spans(*parts)
    whole = replace(answer("r1", E0, parts[0][0], parts[0][2], {}), done_as_of=parts[-1][3], answer_tokens=5)
    found.record(replace(whole, **{"spans": named, **changes}))
    return found.audit()


def test_an_answer_across_a_swap_is_clean_if_it_says_so() -> None:
    assert audited((0, 2, 7, COMMIT), (1, 3, SWAP, SWAP)).violations == ()


@pytest.mark.parametrize("pause", ["drain", "retract"])
def test_the_same_answer_where_a_release_leaves_nothing_half_done_is_not(pause: str) -> None:
    audit = audited((0, 2, 7, COMMIT), (1, 3, SWAP, SWAP), pause=pause)
    assert invariants(audit) == {2} and "drains or retracts" in audit.violations[0].text


def test_the_same_answer_under_one_name_is_not() -> None:
    assert invariants(audited((0, 5, 7, SWAP), spans=())) == {2}
    assert invariants(audited((1, 5, 7, SWAP), spans=())) == {1, 2}


@pytest.mark.parametrize(
    ("parts", "broken"),
    [
        (((0, 2, 7, SWAP), (1, 3, SWAP, SWAP)), {2}),
        (((0, 2, 7, 8), (1, 3, COMMIT, SWAP + 1)), {2}),
        (((0, 2, 7, 8), (1, 3, COMMIT - 1, COMMIT - 1)), {1}),
        (((0, 2, 7, 8), (0, 3, SWAP, SWAP)), {2}),
        (((0, 2, 7, 8), (7, 3, SWAP, SWAP)), {1}),
    ],
    ids=["old weights over the swap", "new ones before it", "before the commit", "the old name", "no release"],
)
def test_a_part_that_would_be_a_wrong_answer_is_found(
    parts: tuple[tuple[int, int, int, int], ...], broken: set[int | str]
) -> None:
    assert invariants(audited(*parts)) == broken


def loaded(*parts: tuple[int, int, int, int]) -> Audit:
    """Of an engine whose swap failed: it loaded the release, and once more proved what it then held."""
    found = test_invariants_staged.play(pause="in_place")
    found.edit("ReceiverVerified", 3, method="artifact")
    found.say(holds("e0", 1, "c1"))
    whole = replace(answer("r1", E0, parts[0][0], parts[0][2], {}), done_as_of=parts[-1][3], answer_tokens=5)
    found.record(replace(whole, spans=spans(*parts) if len(parts) > 1 else ()))
    return found.audit()


def test_no_part_reaches_over_a_load_either_and_every_part_may_over_a_second_proof() -> None:
    again = SWAP + 2
    assert loaded((0, 2, 7, COMMIT), (1, 3, SWAP, SWAP)).violations == ()
    assert invariants(loaded((0, 5, 7, SWAP))) == invariants(loaded((0, 2, 7, SWAP), (1, 3, SWAP, SWAP))) == {2}
    assert loaded((1, 5, SWAP, again)).violations == ()


def test_parts_that_do_not_make_up_the_answer_are_found() -> None:
    assert invariants(audited((0, 2, 7, COMMIT), (1, 2, SWAP, SWAP))) == {1}
    assert invariants(audited((0, 2, 7, COMMIT), (1, 3, SWAP, SWAP), load_id="inc:1")) == {1}


def test_two_parts_of_one_release_around_a_fence_are_clean_and_one_is_not() -> None:
    history: tuple[Step, ...] = (*SERVING, *trained("c1"), target(1, "c1", E0, E1), fenced("e0", 1), fenced("e1", 1))
    history = (*history, halted(1), holds("e0", 0, "base"))
    for parts, broken in ((((0, 2, 7, 8), (0, 3, len(history), len(history))), set()), ((), {2})):
        found, named = Play(*history), spans(*parts)
        whole = replace(answer("r1", E0, 0, 7, {}), done_as_of=len(history), answer_tokens=5, spans=named)
        found.record(whole)
        assert invariants(found.audit()) == broken


@pytest.mark.parametrize("forgotten", [True, False])
def test_a_batch_that_forgets_the_spans_of_its_samples_is_found(forgotten: bool) -> None:
    found = Play(*SERVING)
    found.train("c1", "base", 1, found.answers(0, E0, E1))
    found.release(1, "c1", E0, E1)
    found.edit("TargetPersisted", pause="in_place")
    now = len(found.log)
    named = spans((0, 2, 7, 8), (1, 3, now, now))
    found.record(replace(answer("mixed", E0, 0, 7, {}), done_as_of=now, answer_tokens=5, spans=named))
    found.record(report("mixed", score=1.0))
    found.train("c2", "c1", 2, ["mixed", *found.answers(1, E0, E1, count=7)])
    if not forgotten:
        found.edit_batch("job-c2", spans={"mixed": named})
    assert invariants(found.audit()) == ({6} if forgotten else set())


# -- the book and its batches: as stale as the oldest token


def of_both(record: str, group: str = "g") -> InferenceRecorded:
    return replace(test_records.answer(record, "inc:0", group), spans=spans((0, 1, 7, 8), (1, 1, 17, 17)))


@pytest.mark.parametrize(
    ("lags", "fresh"), [({"inc:0": 1, "inc:1": 0}, True), ({"inc:1": 0}, False), ({"inc:0": 1}, False)]
)
def test_an_answer_of_two_releases_is_fresh_only_while_both_are(lags: dict[str, int], fresh: bool) -> None:
    found = test_records.book(of_both("a"), of_both("b"), test_records.scored("a", "b"))
    assert bool(choose(found, "digit", lags.get, 1, 2)) == fresh


def test_an_answer_with_hopeless_tokens_is_forgotten() -> None:
    for hopeless, left in (("inc:0", ["b"]), ("inc:1", []), ("inc:2", ["a", "b"])):
        found = test_records.book(of_both("a"), test_records.answer("b", "inc:1"))
        retire(found, lambda _, load_id: load_id == hopeless)  # noqa: B023
        assert list(found.units) == left


async def test_a_batch_carries_the_spans_of_every_answer_and_keeps_them(shelf: test_book.Shelf) -> None:  # noqa: F811
    await shelf.put(of_both("a"), test_records.answer("b", "inc:1"), test_records.scored("a", "b"))
    async with shelf.boot(world(*SECOND)) as found:
        made = await batch(found, "c1")
    again = decode_batch(encode_batch(made))
    assert [sample.spans for sample in again.samples] == [spans((0, 1, 7, 8), (1, 1, 17, 17)), ()]
    assert consumption(again).spans == {"a": spans((0, 1, 7, 8), (1, 1, 17, 17))}


async def test_an_answer_whose_oldest_token_is_too_stale_is_in_no_batch(shelf: test_book.Shelf) -> None:  # noqa: F811
    """`max_staleness` is 1: two releases after its first token the answer is of no use, whatever its last one is."""
    await shelf.put(of_both("a"), of_both("b"), test_records.scored("a", "b"))
    async with shelf.boot(world(*test_book.THIRD)) as found:
        assert await nothing(found, "c2")


def test_a_batch_without_spans_is_spelled_as_before() -> None:
    """Its digest is that of the job: the same samples are the same batch."""
    sample = Sample(record="r", group="g", prompt=(1,), completion=(2,), logprobs=(-1.0,), load_id="inc:0", reward=1.0)
    plain = msgspec.msgpack.decode(
        encode_batch(
            Batch(job="j", step=1, base="b", seed=0, samples=(sample,), records=(("r", 1),), floor=0, taken=())
        )
    )
    assert set(plain["samples"][0]) == {"record", "group", "prompt", "completion", "logprobs", "load_id", "reward"}
