"""LoRA adapters on an unmodified SGLang server: what it is given, answers with, is proven to hold, and is rid of.

Knows: one real server that takes adapters, for all of these tests; the policy, with adapters merged by the tests' own
arithmetic. Must not know: agents or the log.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from msgspec.structs import replace

from consumers.reef_engine.sglang import requests
from consumers.reef_engine.sglang.borrowed import Info
from consumers.reef_engine.sglang.start import KEY
from reef_bus.backends import Answer, Piece, Pieces, Prompt
from reef_bus.config import UPDATES
from reef_bus.errors import Misfit, Rejected, TransferError
from reef_bus.events import Lora
from reef_bus.manifest import describe
from reef_bus.policy import Policy, pieces
from reef_bus.sections import Adapters
from tests.contract.adapters import ADAPTERS
from tests.contract.subject import Adapter, Promise
from tests.contract.subject import Subject as Promised
from tests.sglang.subject import CLOSE, SHAPE, Subject, begun, borrowing, greedy, logprobs, replaced, running, under_way

pytestmark = pytest.mark.asyncio(loop_scope="module")

TAKEN = Adapters(scenarios=("red", "green", "blue"), rank=8, alpha=16)
LORA = Lora(8, 16, ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"))
SIDES = {"q_proj": (64, 64), "k_proj": (32, 64), "v_proj": (32, 64), "o_proj": (64, 64)}
SIDES |= {"gate_proj": (128, 64), "up_proj": (128, 64), "down_proj": (64, 128)}
"""Rows and columns of each layer's weights: hidden 64, heads 4 of 16, of which 2 for keys and values, ffn 128."""
GREEDY = Prompt(ids=(11, 7, 10), max_tokens=12, temperature=0.0)
LONG = Prompt(ids=(11, 7, 10), max_tokens=600)
HALFWAY = Prompt(ids=tuple((7 * n) % 15 for n in range(200)), max_tokens=800)
Tensors = dict[str, torch.Tensor]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["broadcast", "disk"])
async def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Subject]:
    """With a prefix cache; the base model, version 1, is loaded and proven. With `disk` the server reads adapters from
    a folder; else they are sent."""
    async with running(tmp_path_factory.mktemp("sglang"), TAKEN, prefix_cache=True, update=request.param) as found:
        await found.load(1, "i:0")
        yield found
        assert found.died == []


def drawn(seed: int, size: float = 0.1, lora: Lora = LORA) -> Tensors:
    """An adapter far enough from none, so that it answers otherwise from the first token."""
    generator, found = torch.Generator().manual_seed(seed), {}
    for layer, target in itertools.product(range(SHAPE.layers), lora.targets):
        part = "self_attn" if target[0] in "qkvo" else "mlp"
        rows, columns = SIDES[target]
        name = f"base_model.model.model.layers.{layer}.{part}.{target}"
        found[f"{name}.lora_A.weight"] = torch.randn(lora.rank, columns, generator=generator) * size
        found[f"{name}.lora_B.weight"] = torch.randn(rows, lora.rank, generator=generator) * size
    return found


def merged(subject: Subject, adapter: Tensors, scale: float = 2.0) -> Policy:
    """The base model with alpha / rank = 2 times B A added to its weights."""
    policy = subject.policy(1)
    named = dict(policy.named_parameters())
    with torch.no_grad():
        for name, a in adapter.items():
            if name.endswith("lora_A.weight"):
                b = adapter[name.replace("lora_A", "lora_B")]
                named[name.removeprefix("base_model.model.").replace("lora_A.", "")].add_(scale * (b @ a))
    return policy


NAMES = (f"reef-adapter-cmVk.i.{n}" for n in itertools.count(1))


class Loaded:
    """An adapter on the server, and what it should be."""

    def __init__(self, subject: Subject, tensors: Tensors, name: str = "", within: float = CLOSE) -> None:
        """`within`: how close its proof has to be."""
        self.subject, self.tensors, self.name, self.within = subject, tensors, name or next(NAMES), within
        self.pieces = pieces(tensors)
        self.manifest = describe(self.pieces).digest

    async def load(self) -> None:
        await asyncio.to_thread(self.subject.engine.load_adapter, self.name, self.pieces, LORA)

    async def flaw(self) -> str:
        proof = await asyncio.to_thread(self.subject.engine.adapter_proof, self.name, self.manifest, LORA)
        sums = "" if self.subject.engine.inference.update == "disk" else "sha256+"
        assert (proof.tensors, proof.algorithm) == (28, f"{sums}logprobs-within-{self.within:g}")
        return proof.flaw

    async def unload(self) -> str:
        return await asyncio.to_thread(self.subject.engine.unload_adapter, self.name)

    async def answer(self, prompt: Prompt = GREEDY) -> Answer:
        return await self.subject.engine.answer(replace(prompt, adapter=self.name))

    def policy(self) -> Policy:
        return merged(self.subject, self.tensors)

    def expected(self, prompt: Prompt = GREEDY) -> tuple[int, ...]:
        return greedy(self.policy(), prompt)


def says(policy: Policy, prompt: Prompt, answer: Answer, within: float = CLOSE) -> bool:
    """Whether the answer's logprobs are the policy's."""
    found = torch.tensor(answer.completion.logprobs)
    return bool(found.sub(logprobs(policy, prompt, answer.completion)).abs().max() < within)


@contextlib.asynccontextmanager
async def loaded(subject: Subject, *seeds: int, within: float = CLOSE) -> AsyncIterator[list[Loaded]]:
    found = [Loaded(subject, drawn(seed), within=within) for seed in seeds]
    for each in found:
        await each.load()
    try:
        yield found
    finally:
        assert [await each.unload() for each in found] == [""] * len(found)


# -- the base model beneath


@pytest.mark.parametrize("update", UPDATES)
async def test_the_base_models_parameters_are_all_reached_and_proven_beneath_the_adapters(
    subject: Subject, update: str
) -> None:
    with subject.with_(update=update):
        for seed, load_id in ((2, "i:1"), (1, "i:0")):
            await subject.load(seed, load_id)
            assert (await subject.engine.answer(GREEDY)).completion.ids == greedy(subject.policy(seed), GREEDY)


async def test_the_base_models_proof_finds_one_flipped_bit_of_a_layer_that_is_a_target(subject: Subject) -> None:
    manifest = await subject.receive(subject.version(1))
    await asyncio.to_thread(subject.engine.expect, manifest)
    subject.engine.room_.fit(subject.engine.room_.layouts)["model.layers.1.mlp.up_proj.weight"].data[7] ^= 1
    await asyncio.to_thread(subject.engine.take, "i:2")
    assert "'model.layers.1.mlp.gate_up_proj.weight' sums up to" in await subject.flaw(manifest, "i:2")
    await subject.load(1, "i:0")


async def in_hand(subject: Subject) -> asyncio.Task[Answer]:
    """An answer that has come some way."""
    asked = asyncio.create_task(subject.engine.answer(HALFWAY))
    await under_way(subject, asked, HALFWAY)
    return asked


async def test_what_is_halted_goes_on_with_the_next_base_model_and_with_nothing_that_the_last_one_has_computed(
    subject: Subject,
) -> None:
    """Neither of its answer nor of its prompt, which is in the prefix cache."""
    first = await subject.engine.answer(HALFWAY)
    asked = await in_hand(subject)
    await subject.engine.halt()
    await subject.load(2, "i:1")
    await subject.engine.go_on()
    answer, next_one = await asked, await subject.engine.answer(HALFWAY)
    await subject.load(1, "i:0")
    (one, before), (other, after) = answer.versions
    assert (one, other, before + after) == ("i:0", "i:1", HALFWAY.max_tokens) and before > 0
    found = torch.tensor(answer.completion.logprobs)
    far = [found.sub(logprobs(subject.policy(seed), HALFWAY, answer.completion)).abs() for seed in (1, 2)]
    assert far[0][:before].max() < CLOSE > far[1][before:].max() and far[0][before:].max() > CLOSE
    assert says(subject.policy(1), HALFWAY, first) and says(subject.policy(2), HALFWAY, next_one)


@pytest.mark.parametrize("update", UPDATES)
async def test_a_load_waits_for_what_is_in_hand_where_nothing_is_halted(subject: Subject, update: str) -> None:
    asked = await in_hand(subject)
    with subject.with_(update=update):
        await subject.load(2, "i:1")
        answer = await asked
        await subject.load(1, "i:0")
    assert answer.versions == (("i:0", HALFWAY.max_tokens),) and says(subject.policy(1), HALFWAY, answer)


@pytest.mark.parametrize("update", UPDATES)
async def test_a_load_after_which_the_server_keeps_what_it_had_computed_is_no_version(
    subject: Subject, update: str
) -> None:
    """As when somebody else has halted it in place, a moment after it was idle. It holds the new weights, and goes by
    the old name: neither is proven. And what it samples then is not called the old version's."""
    old = await subject.load(1, "i:0")
    new = await subject.receive(subject.version(2))
    await asyncio.to_thread(subject.engine.expect, new)
    client, asked = subject.engine.client, await in_hand(subject)
    client.post("pause_generation", requests.pause_generation("in_place"))
    try:
        client.get("server_info")  # it has heard of it
        seen = replaced(subject, "post", idle)
        with (
            subject.with_(update=update),
            seen,
            pytest.raises(TransferError, match=r"^refused: .* cache was not flushed"),
        ):
            await asyncio.to_thread(subject.engine.take, "i:1")
        assert client.get("model_info")["weight_version"] == "i:0"
        assert "'i:0', expected 'i:1'" in await subject.flaw(new, "i:1")
        assert "sums up to" in await subject.flaw(old, "i:0")
    finally:
        client.post("continue_generation", requests.continue_generation())
    (one, before), (other, after) = (await asked).versions
    assert (one, other, before + after) == ("i:0", "i:1", HALFWAY.max_tokens)
    await subject.load(1, "i:0")


def idle(honest: Callable[..., Any], route: str, *args: Any) -> Any:
    return None if route.startswith("flush_cache") else honest(route, *args)


@pytest.mark.parametrize("update", UPDATES)
async def test_a_load_that_comes_as_the_last_answer_is_out_is_one(subject: Subject, update: str) -> None:
    """The server is still busy then, for a moment."""
    with subject.with_(update=update):
        for seed in (2, 1) * 5:
            manifest = await subject.receive(subject.version(seed))
            await asyncio.to_thread(subject.engine.expect, manifest)
            await subject.engine.answer(GREEDY)
            await asyncio.to_thread(subject.engine.take, f"i:{seed - 1}")


# -- a server that is borrowed


async def test_a_borrowed_server_takes_adapters_as_it_was_configured(
    subject: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert subject.engine.client.get("server_info").keys() >= {*Info.__struct_fields__}
    monkeypatch.setenv(KEY, "boot-1")
    async with borrowing(subject, tmp_path, TAKEN, prefix_cache=True) as other:
        await other.load(1, "i:0")
        async with loaded(other, 13) as (one,):
            assert await one.flaw() == "" and (await one.answer()).completion.ids == one.expected()


# -- what is loaded answers


async def test_a_loaded_adapter_answers_and_the_base_model_stays_as_it_was(subject: Subject) -> None:
    async with loaded(subject, 1) as (one,):
        assert await one.flaw() == ""
        answer = await one.answer()
        assert answer.completion.ids == one.expected() != greedy(subject.policy(1), GREEDY)
        assert answer.versions == (("i:0", 12),)
        assert (await subject.engine.answer(GREEDY)).completion.ids == greedy(subject.policy(1), GREEDY)
        assert await asyncio.to_thread(subject.engine.resident) == {one.name}
    assert await asyncio.to_thread(subject.engine.resident) == frozenset()


async def test_logprobs_are_those_of_the_merged_model(subject: Subject) -> None:
    async with loaded(subject, 2) as (one,):
        answer = await one.answer(LONG)
        assert says(one.policy(), LONG, answer) and not says(subject.policy(1), LONG, answer)


async def test_sixteen_requests_at_once_are_each_answered_with_their_own_adapter(subject: Subject) -> None:
    async with loaded(subject, 3, 4, 5) as found:
        prompts = [replace(GREEDY, ids=(11, 7, n)) for n in range(4)]
        asked = [each.answer(prompt) for prompt in prompts for each in found]
        asked += [subject.engine.answer(prompt) for prompt in prompts]
        answers = await asyncio.gather(*asked)
        expected = [each.expected(prompt) for prompt in prompts for each in found]
        expected += [greedy(subject.policy(1), prompt) for prompt in prompts]
        assert [answer.completion.ids for answer in answers] == expected
        assert len(set(expected)) == 16


async def test_an_adapter_that_changes_nothing_is_proven(subject: Subject) -> None:
    """As the first of each scenario is: B is zero."""
    one = Loaded(subject, {name: each * ("lora_A" in name) for name, each in drawn(6).items()})
    await one.load()
    assert await one.flaw() == ""
    assert (await one.answer()).completion.ids == greedy(subject.policy(1), GREEDY)
    assert await one.unload() == ""


async def test_what_one_has_computed_of_a_prompt_is_never_used_for_another(subject: Subject) -> None:
    """Nor for the next version under the same name: the prefix cache's keys end in an id of each load."""
    long = Prompt(ids=tuple((7 * n) % 15 for n in range(200)), max_tokens=4)
    base = subject.policy(1)
    async with loaded(subject, 7, 8) as (one, other):
        for _ in range(2):  # the second time from the cache
            assert says(base, long, await subject.engine.answer(long))
            assert says(one.policy(), long, await one.answer(long))
            assert says(other.policy(), long, await other.answer(long))
        assert await one.unload() == ""
        next_version = Loaded(subject, drawn(9), one.name)
        await next_version.load()
        answer = await next_version.answer(long)
        assert says(next_version.policy(), long, answer) and not says(one.policy(), long, answer)
        assert await next_version.unload() == ""


@pytest.mark.parametrize("name", ["reef-adapter-cmVk.i.999", "__tensor__"])
async def test_a_request_for_an_adapter_that_is_not_there_is_refused(subject: Subject, name: str) -> None:
    with pytest.raises(Rejected, match="LoRA adapter"):
        await subject.engine.answer(replace(GREEDY, adapter=name))


async def test_requests_in_hand_are_not_disturbed_when_others_come_and_go(subject: Subject) -> None:
    async with loaded(subject, 9) as (one,):
        in_hand = [asyncio.create_task(one.answer(LONG)), asyncio.create_task(subject.engine.answer(LONG))]
        for _ in range(2):
            async with loaded(subject, 10) as (other,):
                assert await other.flaw() == ""
        assert not all(task.done() for task in in_hand), "the machine is too fast for this test: ask for more tokens"
        assert says(one.policy(), LONG, await in_hand[0]) and says(subject.policy(1), LONG, await in_hand[1])


async def test_what_is_halted_goes_on_with_its_adapter(subject: Subject) -> None:
    async with loaded(subject, 11) as (one,):
        task = asyncio.create_task(one.answer(LONG))
        await under_way(subject, task, LONG)
        await subject.engine.halt()
        other = Loaded(subject, drawn(12))
        await other.load()
        await subject.engine.go_on()
        assert says(one.policy(), LONG, await task)
        assert await other.flaw() == "" == await other.unload()


# -- a load that says success


def nothing_loaded(honest: Callable[..., Any], route: str, *args: Any) -> Any:
    return {"success": True} if route.startswith("load_lora") else honest(route, *args)


async def test_a_load_that_says_success_and_has_loaded_nothing_is_found(subject: Subject) -> None:
    one = Loaded(subject, drawn(30))
    with replaced(subject, "post", nothing_loaded):
        await one.load()
    assert "does not list it" in await one.flaw()
    assert await one.unload() == ""


async def test_an_adapter_that_is_listed_and_not_used_is_found(subject: Subject) -> None:
    """Requests that name it are answered by the base model."""

    def without(honest: Callable[..., Any], route: str, body: dict[str, Any], *args: Any) -> Any:
        return honest(route, {name: value for name, value in body.items() if name != "lora_path"}, *args)

    async with loaded(subject, 31) as (one,):
        with replaced(subject, "post", without):
            assert "answers with something else" in await one.flaw()
        assert await one.flaw() == ""


def rescaled(tensors: Tensors) -> Tensors:
    return {name: each * (1.01 if "lora_B" in name else 1) for name, each in tensors.items()}


def without_a_target(tensors: Tensors) -> Tensors:
    return {name: each * (0 if "1.self_attn.k_proj" in name else 1) for name, each in tensors.items()}


def crossed(tensors: Tensors) -> Tensors:
    """B's transpose for A and the other way round, in one layer where the sides allow it."""
    layer = "base_model.model.model.layers.1.self_attn.o_proj"
    a, b = (f"{layer}.lora_{letter}.weight" for letter in "AB")
    return {**tensors, a: tensors[b].T.contiguous(), b: tensors[a].T.contiguous()}


def layers_exchanged(tensors: Tensors) -> Tensors:
    to = {"layers.0.": "layers.1.", "layers.1.": "layers.0."}
    return {name.replace(part, to[part]): each for name, each in tensors.items() for part in to if part in name}


def another(tensors: Tensors) -> Tensors:
    return drawn(99)


@pytest.mark.parametrize("wrong", [rescaled, without_a_target, crossed, layers_exchanged, another])
async def test_an_adapter_that_is_not_the_one_that_was_given_is_found(
    subject: Subject, wrong: Callable[[Tensors], Tensors]
) -> None:
    """The server holds something else under the name, and the agent believes that it has sent the right one."""
    given, held = Loaded(subject, drawn(32)), Loaded(subject, wrong(drawn(32)))
    held.name = given.name
    await held.load()
    subject.engine.room_.drop(given.name)
    subject.engine.room_.keep(given.name, given.pieces, LORA)
    assert "answers with something else" in await given.flaw()
    assert await given.unload() == ""


async def test_an_adapter_of_another_alpha_is_found(subject: Subject) -> None:
    one = Loaded(subject, drawn(33))
    await asyncio.to_thread(subject.engine.load_adapter, one.name, one.pieces, Lora(8, 17, LORA.targets))
    assert "answers with something else" in await one.flaw()
    assert await one.unload() == ""


async def test_an_adapter_that_makes_no_numbers_is_no_adapter(subject: Subject) -> None:
    one = Loaded(subject, drawn(36))
    next(iter(one.tensors.values()))[0, 0] = torch.nan
    one.manifest = describe(one.pieces).digest
    await one.load()
    with pytest.raises(TransferError, match="computes no numbers"):
        await one.flaw()
    assert await one.unload() == ""


async def test_what_was_sent_is_held_against_the_manifest_that_is_asked_for(subject: Subject) -> None:
    async with loaded(subject, 34) as (one,):
        one.manifest = describe(pieces(drawn(35))).digest
        assert f"expected {one.manifest}" in await one.flaw()


# -- what would end the server, or be passed over


def renamed(tensors: Pieces) -> Pieces:
    return {name.replace("0.self_attn.o_proj", "0.self_attn.x_proj"): piece for name, piece in tensors.items()}


def missing(tensors: Pieces) -> Pieces:
    return dict(list(tensors.items())[:-1])


def of_a_layer_too_many(tensors: Pieces) -> Pieces:
    first = {name: piece for name, piece in tensors.items() if "layers.0." in name}
    return {**tensors, **{name.replace("layers.0.", "layers.2."): piece for name, piece in first.items()}}


def transposed(tensors: Pieces) -> Pieces:
    return {name: Piece(piece.dtype, piece.shape[::-1], piece.data) for name, piece in tensors.items()}


def halved(tensors: Pieces) -> Pieces:
    """The bytes as twice as many values of half the width."""
    return {name: Piece("BF16", (piece.shape[0], 2 * piece.shape[1]), piece.data) for name, piece in tensors.items()}


@pytest.mark.parametrize("wrong", [renamed, missing, of_a_layer_too_many, transposed, halved])
async def test_what_is_no_adapter_of_the_model_is_refused_before_the_server_hears_of_it(
    subject: Subject, wrong: Callable[[Pieces], Pieces]
) -> None:
    """Most of these load, and end the server's process at the first request."""
    one = Loaded(subject, drawn(40))
    one.pieces = wrong(one.pieces)
    with pytest.raises(Misfit, match=r"^mismatch: adapter reef-adapter-cmVk"):
        await one.load()
    assert await one.unload() == ""


@pytest.mark.parametrize(
    ("lora", "said"),
    [
        (Lora(16, 16, LORA.targets), "the server was started for"),
        (Lora(8, 16, ("lm_head",)), "the server was started for"),
        (Lora(8, 16, ("k_proj",)), "without q_proj"),
        (Lora(8, 16, ("q_proj",)), "without v_proj"),
        (Lora(8, 16, ("up_proj",)), "without gate_proj"),
    ],
)
async def test_adapters_that_the_server_cannot_hold_are_refused(subject: Subject, lora: Lora, said: str) -> None:
    every = pieces(drawn(41))
    named = {name: piece for name, piece in every.items() if name.split(".")[-3] in lora.targets} or every
    with pytest.raises(Misfit, match=said):
        await asyncio.to_thread(subject.engine.load_adapter, next(NAMES), named, lora)


async def test_an_adapter_of_fewer_targets_and_a_lower_rank_is_held(subject: Subject) -> None:
    lora = Lora(4, 8, ("q_proj", "v_proj", "down_proj"))
    one = Loaded(subject, drawn(42, lora=lora))
    await asyncio.to_thread(subject.engine.load_adapter, one.name, one.pieces, lora)
    assert (await asyncio.to_thread(subject.engine.adapter_proof, one.name, one.manifest, lora)).flaw == ""
    assert (await one.answer()).completion.ids == one.expected()
    assert await one.unload() == ""


async def test_no_more_are_held_than_configured(subject: Subject) -> None:
    async with loaded(subject, 60, 61, 62, 63) as four:
        five = Loaded(subject, drawn(64))
        with pytest.raises(TransferError, match=r"^refused: adapter .* holds 4 already, and adapters\.capacity is 4"):
            await five.load()
        answers = await asyncio.gather(*(each.answer() for each in four))
        assert [answer.completion.ids for answer in answers] == [each.expected() for each in four]
        assert await five.unload() == ""


async def test_a_name_that_is_held_is_not_loaded_over(subject: Subject) -> None:
    async with loaded(subject, 43) as (one,):
        two = Loaded(subject, drawn(44))
        two.name = one.name
        with pytest.raises(TransferError, match="holds one of this name"):
            await two.load()
        assert await one.flaw() == ""


# -- an unload that says success


async def test_after_an_unload_no_request_is_answered_under_the_name(subject: Subject) -> None:
    """A server that has loaded an adapter from a folder would load it again here, if the folder were there."""
    async with loaded(subject, 50) as (one,):
        assert await one.unload() == ""
        for _ in range(2):
            with pytest.raises(Rejected, match=f"Failed to implicitly load LoRA adapter {one.name}"):
                await one.answer()
        assert one.name not in await asyncio.to_thread(subject.engine.resident)


async def test_what_a_server_would_load_again_from_its_folder_is_not_gone(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was sent is never loaded again, whatever lies in its folder."""
    async with loaded(subject, 56) as (one,):
        with monkeypatch.context() as kept:
            kept.setattr(subject.engine.room_, "drop", lambda name: None)
            said = await one.unload()
        if subject.engine.inference.update == "disk":
            assert said == "the server still answers requests that name it"
            assert (await one.answer()).completion.ids == one.expected()
        else:
            assert said == ""


async def test_what_was_never_loaded_is_certainly_gone(subject: Subject) -> None:
    assert await Loaded(subject, drawn(51)).unload() == ""


def not_unloaded(honest: Callable[..., Any], route: str, *args: Any) -> Any:
    return {"success": True} if route.startswith("unload_lora") else honest(route, *args)


def nothing_listed(honest: Callable[..., Any], route: str, *args: Any) -> Any:
    return {"data": []} if route == "v1/models" else honest(route, *args)


async def test_an_unload_that_says_success_and_has_unloaded_nothing_is_found(subject: Subject) -> None:
    async with loaded(subject, 52) as (one,):
        with replaced(subject, "post", not_unloaded):
            assert "still lists it" in await one.unload()
            with replaced(subject, "get", nothing_listed):
                assert "still answers" in await one.unload()
        assert (await one.answer()).completion.ids == one.expected()


def too_busy(honest: Callable[..., Any], route: str, *args: Any) -> Any:
    if route == "generate":
        raise TransferError("refused", "/generate: 503 the queue is full")
    return honest(route, *args)


async def test_a_request_that_is_refused_for_another_reason_proves_nothing(subject: Subject) -> None:
    async with loaded(subject, 55) as (one,):
        with replaced(subject, "post", too_busy):
            assert await one.unload() == "refused: /generate: 503 the queue is full"


async def test_a_server_that_gives_no_answer_is_rid_of_nothing(subject: Subject) -> None:
    """Nor does the unload raise."""
    async with loaded(subject, 53) as (one,):
        url = subject.engine.client.url
        subject.engine.client.url = "http://127.0.0.1:1"
        try:
            assert "gave no answer" in await one.unload()
        finally:
            subject.engine.client.url = url


async def test_an_adapter_may_be_loaded_again_once_it_is_gone(subject: Subject) -> None:
    async with loaded(subject, 54) as (one,):
        assert await one.unload() == ""
        await one.load()
        assert await one.flaw() == ""


# -- what every backend promises


@pytest.mark.parametrize("promise", ADAPTERS, ids=lambda promise: promise.__name__)
async def test_it_keeps_what_every_backend_that_takes_adapters_promises(subject: Subject, promise: Promise) -> None:
    smaller = Lora(4, 12, ("q_proj", "v_proj", "down_proj"))
    drawn_of = {"first": (drawn(70), LORA), "second": (drawn(71, lora=smaller), smaller)}

    def by_the_policy(base: Pieces, adapter: Adapter, prompt: Prompt) -> tuple[int, ...]:
        tensors, lora = next(drawn_of[name] for name, each in adapters.items() if each is adapter)
        return greedy(merged(subject, tensors, lora.alpha / lora.rank), prompt)

    adapters: dict[str, Adapter] = {name: (pieces(tensors), lora) for name, (tensors, lora) in drawn_of.items()}
    promised = Promised(subject.engine, {"one": subject.version(1)}, SHAPE.vocab, SHAPE.max_len, GREEDY.ids)
    await promise(
        promised._replace(begun=begun(subject, GREEDY.ids), long=200, adapters=adapters, adapted=by_the_policy)
    )
