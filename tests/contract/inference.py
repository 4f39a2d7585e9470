"""What every inference backend promises, as functions over one that has been started; PROMISES is all of them.

Knows: the contract in reef_bus/backends.py, `Subject`, and what adapters.py says of adapters. Must not know: any
engine, agents, or the log.
Any suite runs them in three lines: a fixture `subject` with its engine in it, and

    @pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.__name__)
    async def test_it_keeps_what_every_backend_promises(subject: Subject, promise: Promise) -> None:
        await promise(subject)

One engine may serve them all, in their order: each loads what it needs, and the last one closes it. An engine whose
connections belong to one event loop needs `loop_scope="module"` for the fixture and for the test alike.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Mapping

from msgspec.structs import replace

from reef_bus.backends import Answer, Completion, ContinuousBackend, Piece, Prompt, never
from reef_bus.core.publication import IN_PLACE, PAUSES, RETRACT
from reef_bus.errors import Rejected
from reef_bus.manifest import Manifest, describe
from tests.contract.adapters import ADAPTERS
from tests.contract.subject import Promise, Subject, write

TRIES = 8  # to stop a long answer somewhere between its first token and its last one


def _digest(subject: Subject, name: str) -> str:
    return describe(subject.versions[name]).digest


# -- weights


async def what_was_received_is_what_is_read(subject: Subject) -> None:
    """And it is told from any other version, from another name, and from one tensor that is not as it should be."""
    load_id = await subject.fill("one")
    backend, one, other = subject.backend, _digest(subject, "one"), _digest(subject, "other")
    if not backend.apart:
        assert describe(backend.live()).digest == one
        return
    proof = backend.proof(one, load_id)
    assert proof.flaw == "" and proof.tensors > 0 and int(proof.algorithm.rpartition("-")[2]) >= 32
    assert backend.proof(other, load_id).flaw and backend.proof(one, "contract:0").flaw
    renamed = await subject.fill("other")
    assert backend.proof(one, renamed).flaw and backend.proof(other, load_id).flaw


async def what_is_told_to_expect_decides_and_not_what_was_taken(subject: Subject) -> None:
    """A byte that changed between the two is found: the engine's own memory is the witness."""
    if not subject.backend.apart:
        return
    manifest = describe(subject.versions["one"])
    name = max(subject.versions["one"], key=lambda name: subject.versions["one"][name].data.nbytes)
    room = await _received(subject, "one", manifest)
    await asyncio.to_thread(subject.backend.expect, manifest.digest)
    room[name].data[0] ^= 0x01
    await asyncio.to_thread(subject.backend.take, "contract:flipped")
    proof = await asyncio.to_thread(subject.backend.proof, manifest.digest, "contract:flipped")
    assert proof.flaw


async def _received(subject: Subject, name: str, manifest: Manifest) -> Mapping[str, Piece]:
    room = await asyncio.to_thread(subject.backend.room, manifest.layouts())
    write(room, subject.versions[name])
    return room


async def answers_are_those_of_the_version_that_is_loaded(subject: Subject) -> None:
    said: dict[str, Completion] = {}
    for name in ("one", "other", "one"):
        load_id = await subject.fill(name)
        answer = await subject.ask(subject.asking())
        _greedy(subject, name, answer.completion)
        _named(subject, answer, load_id)
        assert said.setdefault(name, answer.completion).ids == answer.completion.ids
    assert said["one"].ids != said["other"].ids


def _greedy(subject: Subject, name: str, completion: Completion, first: int = 0) -> None:
    """Whether its tokens, or those `first` ones, are what that version must give."""
    prompt = subject.asking(len(completion.ids))
    if subject.greedy is not None:
        expected = subject.greedy(subject.versions[name], prompt)
        assert completion.ids[: first or None] == expected[: first or None]


def _named(subject: Subject, answer: Answer, load_id: str) -> None:
    if isinstance(subject.backend, ContinuousBackend):
        assert answer.versions == ((load_id, len(answer.completion.ids)),)


async def loading_twice_changes_nothing(subject: Subject) -> None:
    load_id = await subject.fill("one")
    before = await subject.ask(subject.asking())
    await subject.fill("one", load_id)
    after = await subject.ask(subject.asking())
    assert after.completion.ids == before.completion.ids and after.versions == before.versions


async def what_lies_beside_is_not_read_before_it_is_taken(subject: Subject) -> None:
    load_id = await subject.fill("one")
    backend, before = subject.backend, await subject.ask(subject.asking())
    if backend.apart:
        await _received(subject, "other", describe(subject.versions["other"]))
        assert (await asyncio.to_thread(backend.proof, _digest(subject, "one"), load_id)).flaw == ""
    elif backend.stages:
        write(backend.stage(), subject.versions["other"])
        assert describe(backend.live()).digest == _digest(subject, "one")
    assert (await subject.ask(subject.asking())).completion.ids == before.completion.ids


async def a_swap_reads_what_was_staged(subject: Subject) -> None:
    if subject.backend.apart or not subject.backend.stages:
        return
    await subject.fill("one")
    write(subject.backend.stage(), subject.versions["other"])
    subject.backend.swap()
    assert describe(subject.backend.live()).digest == _digest(subject, "other")
    _greedy(subject, "other", (await subject.ask(subject.asking())).completion)
    subject.backend.unstage()
    subject.backend.unstage()
    _greedy(subject, "other", (await subject.ask(subject.asking())).completion)


# -- answers


async def an_answer_has_as_many_tokens_as_were_asked_for(subject: Subject) -> None:
    """And each of them a logprob, which is finite and no probability above one."""
    load_id = await subject.fill("one")
    for count, temperature in itertools.product((1, 2, 17), (0.0, 0.7, 1.0)):
        answer = await subject.ask(subject.asking(count, temperature, seed=count))
        said = answer.completion
        assert (len(said.ids), len(said.logprobs), said.finish_reason) == (count, count, "length")
        assert all(0 <= token < subject.vocabulary for token in said.ids)
        assert all(math.isfinite(logprob) and logprob <= 1e-3 for logprob in said.logprobs)
        _named(subject, answer, load_id)


async def an_answer_ends_with_the_first_of_its_stop_ids(subject: Subject) -> None:
    """Which is its last token, and none of those before it."""
    load_id = await subject.fill("one")
    whole = (await subject.ask(subject.asking())).completion
    never = next(token for token in range(subject.vocabulary) if token not in whole.ids)
    ends = {whole.ids.index(token) + 1: replace(subject.asking(), stop_ids=(never, token)) for token in whole.ids}
    answers = await asyncio.gather(*map(subject.ask, ends.values()))
    for count, answer in zip(ends, answers, strict=True):
        said = answer.completion
        assert (said.ids, len(said.logprobs), said.finish_reason) == (whole.ids[:count], count, "stop")
        _named(subject, answer, load_id)
    nowhere = (never, subject.vocabulary, 2**40, 2**63, -1)
    said = (await subject.ask(replace(subject.asking(), stop_ids=nowhere))).completion
    assert (said.ids, said.finish_reason) == (whole.ids, "length")
    if not isinstance(subject.backend, ContinuousBackend):
        together = subject.backend.generate([*ends.values(), subject.asking()])
        assert [each.ids for each in together] == [*(whole.ids[:count] for count in ends), whole.ids]


async def the_longest_that_fits_is_answered_whole(subject: Subject) -> None:
    """No engine gives fewer tokens than it was asked for, and says nothing."""
    await subject.fill("one")
    for length in (len(subject.prompt), _longest_prompt(subject)):
        ids = tuple(itertools.islice(itertools.cycle(subject.prompt), length))
        answer = await subject.ask(Prompt(ids=ids, max_tokens=subject.longest - length, temperature=0.0))
        assert len(answer.completion.ids) == subject.longest - length, f"after {length}"


def _longest_prompt(subject: Subject) -> int:
    return subject.longest_prompt or subject.longest - 1


def _bad(subject: Subject) -> dict[str, Prompt]:
    good, most = subject.asking(), subject.longest
    return {
        "no ids": replace(good, ids=()),
        "an id below 0": replace(good, ids=(*subject.prompt, -1)),
        "an id beyond the vocabulary": replace(good, ids=(subject.vocabulary, *subject.prompt)),
        "an id far beyond it": replace(good, ids=(2**31, *subject.prompt)),
        "too long": replace(good, ids=subject.prompt[:1] * (_longest_prompt(subject) + 1), max_tokens=1),
        "far too long": replace(good, ids=subject.prompt[:1] * 2 * most, max_tokens=1),
        "too long with its answer": replace(good, max_tokens=most - len(subject.prompt) + 1),
        "no tokens": replace(good, max_tokens=0),
        "fewer than none": replace(good, max_tokens=-1),
        "no temperature": replace(good, temperature=math.nan),
        "an endless temperature": replace(good, temperature=math.inf),
        "a temperature below 0": replace(good, temperature=-0.5),
    }


async def what_cannot_be_served_is_rejected_and_spoils_nothing(subject: Subject) -> None:
    await subject.fill("one")
    good = (await subject.ask(subject.asking())).completion.ids
    for what, prompt in _bad(subject).items():
        said = await asyncio.gather(
            *(subject.ask(each) for each in (subject.asking(), prompt, subject.asking())), return_exceptions=True
        )
        assert isinstance(said[1], Rejected), f"{what}: {said[1]!r:.200}"
        for answer in said[::2]:
            assert isinstance(answer, Answer) and answer.completion.ids == good, what
    if not isinstance(subject.backend, ContinuousBackend):
        _together(subject, good)


def _together(subject: Subject, good: tuple[int, ...]) -> None:
    """In one batch nobody is answered; and without the bad one, everybody."""
    for prompt in _bad(subject).values():
        try:
            subject.backend.generate([subject.asking(), prompt])
        except Rejected:
            continue
        raise AssertionError(f"{prompt} was served")
    assert [said.ids for said in subject.backend.generate([subject.asking()] * 2)] == [good] * 2


# -- pauses


async def it_names_the_pauses_that_there_are(subject: Subject) -> None:
    assert subject.backend.pauses and set(subject.backend.pauses) <= set(PAUSES) and "drain" in subject.backend.pauses


async def what_is_retracted_is_given_back_unfinished_and_may_start_over(subject: Subject) -> None:
    if RETRACT not in subject.backend.pauses:
        return
    await subject.fill("one")
    prompt = subject.asking(subject.long)
    if isinstance(subject.backend, ContinuousBackend):
        given = await _aborted(subject, subject.backend, prompt)
    else:
        given = subject.backend.generate_until([prompt], _after(subject.long // 2)).completions[0]
    assert given.finish_reason == "" and len(given.ids) < subject.long
    load_id = await subject.fill("other")
    again = await subject.ask(prompt)
    _greedy(subject, "other", again.completion)
    _named(subject, again, load_id)


async def _aborted(subject: Subject, backend: ContinuousBackend, prompt: Prompt) -> Completion:
    asked = asyncio.ensure_future(backend.answer(prompt))
    await subject.begun()
    while not asked.done():
        await backend.abort()
        await asyncio.wait({asked}, timeout=0.05)
    return asked.result().completion


def _after(tokens: int) -> Callable[[], bool]:
    left = iter([False] * tokens)
    return lambda: next(left, True)


async def what_is_stopped_in_place_goes_on_with_what_is_loaded_meanwhile(subject: Subject) -> None:
    if IN_PLACE not in subject.backend.pauses:
        return
    if isinstance(subject.backend, ContinuousBackend):
        await _in_place_apart(subject, subject.backend)
        return
    await subject.fill("one")
    prompt, middle = subject.asking(subject.long), subject.long // 2
    first = subject.backend.generate_until([prompt], _after(middle))
    assert first.kept is not None and len(first.completions[0].ids) == middle
    await subject.fill("other")
    second = subject.backend.generate_until([prompt], never, first.kept)
    (said,) = second.completions
    assert second.kept is None and (len(said.ids), said.finish_reason) == (subject.long, "length")
    assert said.ids[:middle] == first.completions[0].ids
    _greedy(subject, "one", said, middle)


async def _in_place_apart(subject: Subject, backend: ContinuousBackend) -> None:
    """It names both, each for as many tokens as it sampled. Somewhere in the middle, after some tries at most."""
    for _ in range(TRIES):
        one = await subject.fill("one")
        asked = asyncio.ensure_future(backend.answer(subject.asking(subject.long)))
        await subject.begun()
        await backend.halt()
        await asyncio.wait({asked}, timeout=0.2)
        ended = asked.done()
        other = await subject.fill("other")
        await asyncio.wait({asked}, timeout=0.2)
        assert asked.done() == ended, "it was answered while nothing is to be sampled"
        await backend.go_on()
        answer = await asked
        said = answer.completion
        assert len(said.ids) == sum(count for _, count in answer.versions) == subject.long
        if [name for name, _ in answer.versions] == [one, other]:
            _greedy(subject, "one", said, answer.versions[0][1])
            return
        assert answer.versions in (((one, subject.long),), ((other, subject.long),))
    raise AssertionError(f"none of {TRIES} answers was stopped between its first token and its last one")


async def after_a_halt_with_nothing_in_hand_it_goes_on(subject: Subject) -> None:
    """Whatever is asked meanwhile waits, and is sampled by what is loaded afterwards."""
    backend = subject.backend
    if not isinstance(backend, ContinuousBackend) or IN_PLACE not in backend.pauses:
        return
    await subject.fill("one")
    await backend.halt()
    asked = asyncio.ensure_future(backend.answer(subject.asking()))
    await asyncio.wait({asked}, timeout=0.2)
    assert not asked.done()
    load_id = await subject.fill("other")
    await backend.go_on()
    await backend.go_on()
    answer = await asked
    _greedy(subject, "other", answer.completion)
    _named(subject, answer, load_id)


async def whoever_gives_up_is_gone(subject: Subject) -> None:
    """Also while it is halted; and others never notice."""
    backend = subject.backend
    if not isinstance(backend, ContinuousBackend):
        return
    await subject.fill("one")
    good = (await subject.ask(subject.asking())).completion.ids
    for halted in (False, IN_PLACE in backend.pauses):
        asked = asyncio.ensure_future(backend.answer(subject.asking(subject.long)))
        await subject.begun()
        if halted:
            await backend.halt()
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        await backend.go_on()
        assert (await subject.ask(subject.asking())).completion.ids == good


# -- the end


async def what_was_released_is_worthless_when_it_is_back_and_may_be_loaded(subject: Subject) -> None:
    backend = subject.backend
    if not backend.releases:
        return
    await subject.fill("one")
    before = await subject.ask(subject.asking())
    await asyncio.to_thread(backend.release, backend.releases)
    await asyncio.to_thread(backend.resume, backend.releases)
    if not backend.apart:
        assert describe(backend.live()).digest != _digest(subject, "one")
    await subject.fill("one")
    assert (await subject.ask(subject.asking())).completion.ids == before.completion.ids


async def closing_is_safe_to_repeat(subject: Subject) -> None:
    subject.backend.close()
    subject.backend.close()


PROMISES: tuple[Promise, ...] = (
    what_was_received_is_what_is_read,
    what_is_told_to_expect_decides_and_not_what_was_taken,
    answers_are_those_of_the_version_that_is_loaded,
    loading_twice_changes_nothing,
    what_lies_beside_is_not_read_before_it_is_taken,
    a_swap_reads_what_was_staged,
    an_answer_has_as_many_tokens_as_were_asked_for,
    an_answer_ends_with_the_first_of_its_stop_ids,
    the_longest_that_fits_is_answered_whole,
    what_cannot_be_served_is_rejected_and_spoils_nothing,
    it_names_the_pauses_that_there_are,
    what_is_retracted_is_given_back_unfinished_and_may_start_over,
    what_is_stopped_in_place_goes_on_with_what_is_loaded_meanwhile,
    after_a_halt_with_nothing_in_hand_it_goes_on,
    whoever_gives_up_is_gone,
    what_was_released_is_worthless_when_it_is_back_and_may_be_loaded,
    *ADAPTERS,
    closing_is_safe_to_repeat,
)
