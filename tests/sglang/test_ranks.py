"""A server of two ranks on one CPU: each holds its part, and is held to it.

Knows: one real server with tensor parallelism. Must not know: agents or the log.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from reef_bus.backends import Prompt
from reef_bus.config import UPDATES
from tests.sglang.subject import greedy, running
from tests.sglang.test_adapters import TAKEN, loaded

pytestmark = pytest.mark.asyncio(loop_scope="session")

PROMPT = Prompt(ids=(11, 7, 10), max_tokens=16, temperature=0.0)
Q, FUSED = "model.layers.1.self_attn.q_proj.weight", "model.layers.1.self_attn.qkv_proj.weight"


async def test_each_rank_holds_its_part_of_what_was_loaded(tmp_path: Path) -> None:
    """The last heads are the second rank's: a bit that is wrong there is wrong in no other one."""
    async with running(tmp_path, TAKEN, tensor_parallel_size=2) as subject:
        for seed, update in enumerate(UPDATES):
            with subject.with_(update=update):
                manifest = await subject.load(seed, f"i:{seed}")
            assert (await subject.engine.answer(PROMPT)).completion.ids == greedy(subject.policy(seed), PROMPT)
        async with loaded(subject, 1) as (one,):
            assert await one.flaw() == ""
        assert [each.rank for each in subject.engine._expected[manifest]] == [0, 1]
        weights = subject.engine.room({n: (p.dtype, p.shape, p.data.nbytes) for n, p in subject.version(2).items()})
        weights[Q].data[-1] ^= 0x10
        await asyncio.to_thread(subject.engine.take, "i:9")
        assert (await subject.flaw(manifest, "i:9")).startswith(f"rank 1: parameter '{FUSED}' sums up to ")
