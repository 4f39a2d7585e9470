"""The contract of inference backends over the torch engine, and over the model of an engine that is apart.

Knows: how each of them is made, and what each must answer. Must not know: what is promised.
"""

from __future__ import annotations

import asyncio

import pytest
import torch

from consumers.reef_engine.torch_backend import TorchEngine
from reef_bus.backends import Pieces, Prompt
from reef_bus.policy import Cache, PolicyConfig, new_policy, pieces
from tests import apart
from tests.contract.inference import PROMISES, Promise, Subject

CONFIG = PolicyConfig()
POLICIES = {name: new_policy(CONFIG, seed) for seed, name in enumerate(("one", "other"))}


def by_the_policy(tensors: Pieces, prompt: Prompt) -> tuple[int, ...]:
    """Token by token from all that precedes it, over a cache that is made anew each time."""
    policy = next(each for name, each in POLICIES.items() if tensors is VERSIONS[name])
    ids = list(prompt.ids)
    with torch.inference_mode():
        for _ in range(prompt.max_tokens):
            ids.append(int(policy(torch.tensor([ids]), Cache(CONFIG, 1, len(ids)))[0, -1].argmax()))
    return tuple(ids[len(prompt.ids) :])


VERSIONS: dict[str, Pieces] = {name: pieces(dict(each.named_parameters())) for name, each in POLICIES.items()}


def torch_engine() -> Subject:
    engine = TorchEngine()
    engine.start()
    return Subject(engine, VERSIONS, CONFIG.vocab, CONFIG.max_len, (11, 3, 10), by_the_policy)


def model_engine() -> Subject:
    engine = apart.Apart()
    versions = {name: apart.version(name) for name in ("one", "other")}

    def greedy(tensors: Pieces, prompt: Prompt) -> tuple[int, ...]:
        name = next(name for name, each in versions.items() if each is tensors)
        return apart.by_hand(prompt, (name, prompt.max_tokens)).ids

    return Subject(engine, versions, apart.VOCABULARY, apart.LONGEST, (11, 3, 10), greedy, some_steps, 200)


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
