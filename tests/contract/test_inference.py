"""The contract of inference backends over the torch engine, and over the model of an engine that is apart.

Knows: how each of them is made, and what each must answer. Must not know: what is promised.
"""

from __future__ import annotations

import asyncio

import pytest
import torch
from torch import Tensor

from consumers.reef_engine.torch_backend import TorchEngine
from reef_bus.backends import Piece, Pieces, Prompt
from reef_bus.errors import Rejected, TransferError
from reef_bus.events import Lora
from reef_bus.lora import shapes
from reef_bus.manifest import describe
from reef_bus.policy import Cache, Policy, PolicyConfig, new_policy, pieces
from tests import apart
from tests.contract.inference import PROMISES, Promise, Subject
from tests.contract.subject import Adapter

CONFIG = PolicyConfig()
POLICIES = {name: new_policy(CONFIG, seed) for seed, name in enumerate(("one", "other"))}


def by_the_policy(tensors: Pieces, prompt: Prompt) -> tuple[int, ...]:
    """From all that precedes each token, over a cache that is made anew each time."""
    return token_by_token(next(each for name, each in POLICIES.items() if tensors is VERSIONS[name]), prompt)


def token_by_token(policy: Policy, prompt: Prompt) -> tuple[int, ...]:
    ids = list(prompt.ids)
    with torch.inference_mode():
        for _ in range(prompt.max_tokens):
            ids.append(int(policy(torch.tensor([ids]), Cache(CONFIG, 1, len(ids)))[0, -1].argmax()))
    return tuple(ids[len(prompt.ids) :])


VERSIONS: dict[str, Pieces] = {name: pieces(dict(each.named_parameters())) for name, each in POLICIES.items()}


ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LORAS = {"first": Lora(4, 8, ALL), "second": Lora(2, 6, ("o_proj", "down_proj"))}


def drawn(lora: Lora, seed: int) -> Pieces:
    generator = torch.Generator().manual_seed(seed)
    like = shapes(POLICIES["one"], lora)
    return pieces({name: torch.randn(shape, generator=generator) / 2 for name, shape in like.items()})


TORCH_ADAPTERS = {name: (drawn(lora, seed), lora) for seed, (name, lora) in enumerate(LORAS.items())}


def merged(tensors: Pieces, adapter: Adapter, prompt: Prompt) -> tuple[int, ...]:
    """By a whole policy of the same shape, to whose weights alpha / rank × B A has been added."""
    policy, (added, lora) = new_policy(CONFIG, 0), adapter
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            parameter.copy_(tensor(tensors[name]))
            a, b = (f"base_model.model.{name.removesuffix('weight')}lora_{each}.weight" for each in "AB")
            if a in added:
                parameter += lora.alpha / lora.rank * tensor(added[b]) @ tensor(added[a])
    return token_by_token(policy, prompt)


def tensor(piece: Piece) -> Tensor:
    return torch.frombuffer(bytearray(piece.data), dtype=torch.float32).view(piece.shape)


def torch_engine() -> Subject:
    engine = TorchEngine()
    engine.start()
    subject = Subject(engine, VERSIONS, CONFIG.vocab, CONFIG.max_len, (11, 3, 10), by_the_policy)
    return subject._replace(adapters=TORCH_ADAPTERS, adapted=merged)


def model_engine() -> Subject:
    engine = apart.Apart()
    versions = {name: apart.version(name) for name in ("one", "other")}
    adapters = {name: apart.adapter(name) for name in ("first", "second")}

    def greedy(tensors: Pieces, prompt: Prompt) -> tuple[int, ...]:
        name = next(name for name, each in versions.items() if each is tensors)
        return apart.by_hand(prompt, (name, prompt.max_tokens)).ids

    def adapted(tensors: Pieces, adapter: Adapter, prompt: Prompt) -> tuple[int, ...]:
        name = next(name for name, each in adapters.items() if each is adapter)
        return apart.by_hand(prompt, ("one", prompt.max_tokens), with_adapter=name).ids

    subject = Subject(engine, versions, apart.VOCABULARY, apart.LONGEST, (11, 3, 10), greedy, some_steps, 200)
    return subject._replace(adapters=adapters, adapted=adapted)


async def some_steps() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


ENGINES = {"torch": torch_engine, "model": model_engine}


@pytest.fixture(params=ENGINES)
def subject(request: pytest.FixtureRequest) -> Subject:
    return ENGINES[request.param]()


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.__name__)
async def test_it_keeps_what_every_backend_promises(subject: Subject, promise: Promise) -> None:
    await promise(subject)


FAULTY_LOADS: tuple[apart.Load, ...] = ("loads nothing", "loads another", "flips a bit", "scales it twice")


@pytest.mark.parametrize("fate", FAULTY_LOADS)
async def test_the_models_proof_finds_an_adapter_that_it_was_said_to_hold(fate: apart.Load) -> None:
    engine, (tensors, lora) = apart.Apart(), apart.adapter("first")
    engine.server.adapter_loads.append(fate)
    engine.load_adapter("a", tensors, lora)
    assert engine.adapter_proof("a", describe(tensors).digest, lora).flaw


@pytest.mark.parametrize(("fate", "held"), [("refuses", set()), ("fails and holds it", {"a"})])
def test_the_model_refuses_an_adapter_and_may_hold_it_all_the_same(fate: apart.Load, held: set[str]) -> None:
    engine, (tensors, lora) = apart.Apart(), apart.adapter("first")
    engine.server.adapter_loads.append(fate)
    with pytest.raises(TransferError, match="refused"):
        engine.load_adapter("a", tensors, lora)
    assert engine.resident() == held


@pytest.mark.parametrize(
    ("fate", "said", "listed"),
    [("refuses", "lists a still", {"a"}), ("leaks", "answers a still", set()), ("lost", "", set())],
)
async def test_the_model_says_an_adapter_is_gone_by_what_it_lists_and_answers(
    fate: apart.Unload, said: str, listed: set[str]
) -> None:
    engine, (tensors, lora) = apart.Apart(), apart.adapter("first")
    engine.load_adapter("a", tensors, lora)
    engine.server.adapter_unloads.append(fate)
    found = engine.unload_adapter("a")
    assert said in found and bool(found) == bool(said)
    assert engine.resident() == listed
    prompt = Prompt(ids=(11, 3, 10), max_tokens=2, adapter="a")
    if found:
        assert len((await engine.answer(prompt)).completion.ids) == 2
    else:
        with pytest.raises(Rejected):
            await engine.answer(prompt)
