"""The contract of inference backends over a real SGLang server.

Knows: how the server's subject is made. Must not know: what is promised.
"""

from __future__ import annotations

import pytest

from consumers.reef_engine.sglang.limits import PROMPT_RESERVED, RESERVED
from reef_bus.backends import Pieces, Prompt
from tests.contract.inference import PROMISES, Promise
from tests.contract.inference import Subject as Promised
from tests.sglang.subject import SHAPE, Subject, begun, greedy

pytestmark = pytest.mark.asyncio(loop_scope="session")


PROMPT = (11, 7, 10)


@pytest.fixture(scope="module")
def promised(subject: Subject) -> Promised:
    seeds = {"one": 1, "other": 2}
    versions = {name: subject.version(seed) for name, seed in seeds.items()}

    def by_the_policy(tensors: Pieces, prompt: Prompt) -> tuple[int, ...]:
        name = next(name for name, version in versions.items() if version is tensors)
        return greedy(subject.policy(seeds[name]), prompt)

    return Promised(
        subject.engine,
        versions,
        SHAPE.vocab,
        SHAPE.max_len - RESERVED,
        PROMPT,
        by_the_policy,
        begun(subject, PROMPT),
        long=900,
        longest_prompt=SHAPE.max_len - PROMPT_RESERVED,
    )


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.__name__)
async def test_it_keeps_what_every_backend_promises(promised: Promised, promise: Promise) -> None:
    await promise(promised)
