"""What only a GPU can show of an SGLang server: NCCL, CUDA graphs, sums that are taken on the device, several ranks.

Knows: one real server after the other. Must not know: agents or the log. `make test-gpu` runs these.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from reef_bus.backends import Prompt
from reef_bus.config import UPDATES
from tests.sglang.subject import greedy, running

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: run `make test-gpu` where there is one"),
]

GREEDY = Prompt(ids=(11, 7, 10), max_tokens=16, temperature=0.0)
LONG = Prompt(ids=(11, 7, 10), max_tokens=900)


async def test_a_version_is_loaded_in_each_way_and_proven_on_the_device(tmp_path: Path) -> None:
    """By NCCL, from the request, from the room's folder; and a wrong bit is found in each."""
    async with running(tmp_path, device="cuda") as subject:
        for seed, update in enumerate(UPDATES):
            with subject.with_(update=update):
                manifest = await subject.load(seed, f"i:{seed}")
                assert (await subject.engine.answer(GREEDY)).completion.ids == greedy(subject.policy(seed), GREEDY)
                version = subject.version(seed)
                room = subject.engine.room({n: (p.dtype, p.shape, p.data.nbytes) for n, p in version.items()})
                room["lm_head.weight"].data[5] ^= 0x10
                await asyncio.to_thread(subject.engine.take, "i:9")
                assert "lm_head.weight" in await subject.flaw(manifest, "i:9")
        assert subject.engine.proof(manifest, "i:9").algorithm.endswith("gpu_tensor_hash-64")


@pytest.mark.parametrize("prefix_cache", [False, True], ids=["in_place", "retract"])
async def test_an_answer_goes_on_with_the_next_version(tmp_path: Path, prefix_cache: bool) -> None:
    async with running(tmp_path, device="cuda", prefix_cache=prefix_cache) as subject:
        await subject.load(1, "i:1")
        asked = asyncio.create_task(subject.engine.answer(LONG))
        await asyncio.sleep(0.3)
        await subject.engine.halt()
        await subject.load(2, "i:2")
        await subject.engine.go_on()
        assert [load_id for load_id, _ in (await asked).versions] == ["i:1", "i:2"]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
async def test_each_rank_holds_its_part(tmp_path: Path) -> None:
    async with running(tmp_path, device="cuda", tensor_parallel_size=2) as subject:
        manifest = await subject.load(1, "i:1")
        assert [each.rank for each in subject.engine._expected[manifest]] == [0, 1]
        assert (await subject.engine.answer(GREEDY)).completion.ids == greedy(subject.policy(1), GREEDY)
