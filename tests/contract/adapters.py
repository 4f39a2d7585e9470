"""What every inference backend that takes LoRA adapters promises, as functions over one that has been started.

Knows: the contract in reef_bus/backends.py, and `Subject`. Must not know: any engine, agents, or the log.
Each leaves the engine without adapters.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable
from typing import Any

from msgspec.structs import replace

from reef_bus.backends import ContinuousBackend, Piece, Pieces
from reef_bus.core.ids import adapter_name
from reef_bus.errors import Misfit, NotHeld, Rejected, TransferError
from reef_bus.events import Lora
from reef_bus.manifest import describe
from tests.contract.subject import Promise, Subject, numbers


async def _takes_none(subject: Subject) -> bool:
    """Whether it takes no adapters, so that nothing is promised; else the base model "one" is loaded."""
    if subject.backend.adapters == 0:
        return True
    assert len(subject.adapters) >= 2, "an engine that takes adapters is to be shown with two of them"
    await subject.fill("one")
    return False


def _two(subject: Subject) -> tuple[str, str]:
    first, second, *_ = subject.adapters
    return first, second


def _fresh() -> str:
    return adapter_name("contract", f"contract:{next(numbers)}")


async def _load(subject: Subject, name: str, tensors: Pieces, lora: Lora) -> None:
    await asyncio.to_thread(subject.backend.load_adapter, name, tensors, lora)


async def _unload(subject: Subject, name: str) -> str:
    return await asyncio.to_thread(subject.backend.unload_adapter, name)


@contextlib.asynccontextmanager
async def _held(subject: Subject, *which: str) -> AsyncIterator[tuple[str, ...]]:
    """The names that these adapters go by meanwhile."""
    names = tuple(_fresh() for _ in which)
    for name, each in zip(names, which, strict=True):
        await _load(subject, name, *subject.adapters[each])
    try:
        yield names
    finally:
        assert [await _unload(subject, name) for name in names] == [""] * len(names)
        assert not subject.backend.resident() & set(names)


async def _said(subject: Subject, adapter: str = "", count: int = 8) -> tuple[int, ...]:
    return (await subject.ask(subject.asking(count, adapter=adapter))).completion.ids


def _must(subject: Subject, which: str, count: int = 8) -> tuple[int, ...] | None:
    """What it must say with this adapter, where there is other code that tells."""
    if subject.adapted is None:
        return None
    return subject.adapted(subject.versions["one"], subject.adapters[which], subject.asking(count))


async def _flaw(subject: Subject, name: str, tensors: Pieces, lora: Lora) -> str:
    proof = await asyncio.to_thread(subject.backend.adapter_proof, name, describe(tensors).digest, lora)
    assert proof.flaw or (proof.tensors > 0 and proof.algorithm)
    return proof.flaw


async def _refused(asked: Awaitable[Any], family: type[Exception]) -> None:
    try:
        await asked
    except family:
        return
    raise AssertionError(f"expected {family.__name__}, found that it was done")


async def each_adapter_answers_as_it_must_and_the_base_as_before(subject: Subject) -> None:
    if await _takes_none(subject):
        return
    one, other = _two(subject)
    alone = await _said(subject)
    async with _held(subject, one) as (first,):
        assert subject.backend.resident() == {first}
        before = await _said(subject, first)
        async with _held(subject, other) as (second,):
            assert subject.backend.resident() == {first, second}
            beside = await _said(subject, second)
            assert len({alone, before, beside}) == 3
            assert await _said(subject, first) == before and await _said(subject) == alone
        assert await _said(subject, first) == before and await _said(subject) == alone
    assert await _said(subject) == alone
    assert before == (_must(subject, one) or before) and beside == (_must(subject, other) or beside)


async def prompts_of_one_batch_may_ask_for_different_adapters(subject: Subject) -> None:
    if await _takes_none(subject):
        return
    async with _held(subject, *_two(subject)) as names:
        asked = ["", names[0], names[1], "", names[1], names[0]]
        alone = {each: await _said(subject, each) for each in set(asked)}
        prompts = [subject.asking(adapter=each) for each in asked]
        if isinstance(subject.backend, ContinuousBackend):
            said = [answer.completion for answer in await asyncio.gather(*map(subject.backend.answer, prompts))]
        else:
            said = await asyncio.to_thread(subject.backend.generate, prompts)
        assert [each.ids for each in said] == [alone[each] for each in asked]


async def what_is_not_held_is_not_answered_by_anything_else(subject: Subject) -> None:
    """Neither before it was loaded nor after it is gone; and whoever shares its batch may ask again."""
    if await _takes_none(subject):
        return
    one, other = _two(subject)
    async with _held(subject, other) as (second,):
        beside, alone = await _said(subject, second), await _said(subject)
        async with _held(subject, one) as (first,):
            await _said(subject, first)
        for name in (first, _fresh()):
            assert name not in subject.backend.resident()
            await _refused(_said(subject, name), NotHeld)
            assert await _unload(subject, name) == ""
        assert await _said(subject, second) == beside and await _said(subject) == alone
        if not isinstance(subject.backend, ContinuousBackend):
            batch = [subject.asking(), subject.asking(adapter=first)]
            await _refused(asyncio.to_thread(subject.backend.generate, batch), NotHeld)


async def a_name_is_loaded_once(subject: Subject) -> None:
    if await _takes_none(subject):
        return
    one, other = _two(subject)
    async with _held(subject, one) as (first,):
        before = await _said(subject, first)
        await _refused(_load(subject, first, *subject.adapters[other]), TransferError)
        assert await _said(subject, first) == before
        assert await _flaw(subject, first, *subject.adapters[one]) == ""


async def what_answers_is_proven_and_told_from_all_else(subject: Subject) -> None:
    if await _takes_none(subject):
        return
    one, other = _two(subject)
    async with _held(subject, one, other) as (first, second):
        (tensors, lora), (theirs, of_theirs) = subject.adapters[one], subject.adapters[other]
        assert await _flaw(subject, first, tensors, lora) == ""
        assert await _flaw(subject, second, theirs, of_theirs) == ""
        assert await _flaw(subject, first, theirs, of_theirs) and await _flaw(subject, second, tensors, lora)
        assert await _flaw(subject, first, tensors, Lora(lora.rank, lora.alpha * 2, lora.targets)), "another scale"
    assert await _flaw(subject, first, tensors, lora), "it is not there any more"


async def a_tensor_that_is_not_as_it_should_be_is_found(subject: Subject) -> None:
    if await _takes_none(subject):
        return
    tensors, lora = subject.adapters[_two(subject)[0]]
    for name, piece in list(tensors.items())[:2]:
        wrong = {**tensors, name: Piece(piece.dtype, piece.shape, memoryview(bytes(piece.data.nbytes)))}
        held = _fresh()
        await _load(subject, held, wrong, lora)
        assert await _flaw(subject, held, tensors, lora), f"{name} is all zeros"
        assert await _unload(subject, held) == ""


async def what_does_not_fit_is_refused_and_spoils_nothing(subject: Subject) -> None:
    if await _takes_none(subject):
        return
    one, other = _two(subject)
    tensors, lora = subject.adapters[one]
    short = dict(list(tensors.items())[1:])
    named = {f"{name}.x": piece for name, piece in tensors.items()}
    async with _held(subject, other) as (beside,):
        before, alone = await _said(subject, beside), await _said(subject)
        for bad, of_it in ((tensors, Lora(lora.rank + 1, lora.alpha, lora.targets)), (short, lora), (named, lora)):
            name = _fresh()
            await _refused(_load(subject, name, bad, of_it), Misfit)
            assert await _unload(subject, name) == ""
            await _refused(_said(subject, name), NotHeld)
        assert await _said(subject, beside) == before and await _said(subject) == alone


async def others_come_and_go_while_one_is_sampled(subject: Subject) -> None:
    if await _takes_none(subject):
        return
    one, other = _two(subject)
    async with _held(subject, one) as (first,):
        for adapter in ("", first):
            alone = await _said(subject, adapter, subject.long)
            asked = asyncio.ensure_future(_said(subject, adapter, subject.long))
            await subject.begun()
            async with _held(subject, other) as (second,):
                await _flaw(subject, second, *subject.adapters[other])
            assert await asked == alone


async def it_holds_as_many_as_it_says_and_lets_none_go_by_itself(subject: Subject) -> None:
    if await _takes_none(subject):
        return
    most, one = subject.backend.adapters, _two(subject)[0]
    if most is None:
        return
    async with _held(subject, *[one] * most) as names:
        before = await _said(subject, names[0])
        too_many = _fresh()
        await _refused(_load(subject, too_many, *subject.adapters[one]), TransferError)
        assert await _unload(subject, too_many) == ""
        assert subject.backend.resident() == set(names)
        assert {await _said(subject, name) for name in names} == {before}


async def a_bad_prompt_is_rejected_with_an_adapter_too(subject: Subject) -> None:
    if await _takes_none(subject):
        return
    async with _held(subject, _two(subject)[0]) as (first,):
        good = subject.asking(adapter=first)
        for bad in (replace(good, ids=()), replace(good, max_tokens=0), replace(good, temperature=-1.0)):
            await _refused(subject.ask(bad), Rejected)


ADAPTERS: tuple[Promise, ...] = (
    each_adapter_answers_as_it_must_and_the_base_as_before,
    prompts_of_one_batch_may_ask_for_different_adapters,
    what_is_not_held_is_not_answered_by_anything_else,
    a_name_is_loaded_once,
    what_answers_is_proven_and_told_from_all_else,
    a_tensor_that_is_not_as_it_should_be_is_found,
    what_does_not_fit_is_refused_and_spoils_nothing,
    others_come_and_go_while_one_is_sampled,
    it_holds_as_many_as_it_says_and_lets_none_go_by_itself,
    a_bad_prompt_is_rejected_with_an_adapter_too,
)
