"""What only a GPU can show of an SGLang server: NCCL, CUDA graphs, sums that are taken on the device, memory that comes
back, LoRA kernels, several ranks.

Knows: one real server after the other. Must not know: agents or the log. `make test-gpu` runs these.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from msgspec.structs import replace

from consumers.reef_engine.sglang.adapters import WITHIN_ROUNDED
from reef_bus.backends import Prompt
from reef_bus.config import UPDATES, check
from reef_bus.core.memory import REGIONS
from reef_bus.errors import Rejected
from reef_bus.sections import Publication, Training
from tests.sglang.subject import Subject, config, likeliest, running, serving, under_way
from tests.sglang.test_adapters import TAKEN, loaded, says

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: run `make test-gpu` where there is one"),
]

GREEDY = Prompt(ids=(11, 7, 10), max_tokens=16, temperature=0.0)
SAMPLED = Prompt(ids=(11, 7, 10), max_tokens=32)
LONG = Prompt(ids=(11, 7, 10), max_tokens=900)
TOKENS = 1 << 22
"""Of KV cache: 1 GiB. By itself a server would take nine tenths of the GPU, and so small a model's pool of that size is
none that anybody has."""
CUDA = {"device": "cuda", "dtype": "bfloat16", "options": {"attention-backend": "triton", "max-total-tokens": TOKENS}}
"""Not float32: SGLang's own norms are compiled for 16 bits alone, and so is fa3, its choice on Hopper. Heads are of 16
here, which triton's attention takes."""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def subject(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Subject]:
    """One server for whatever needs no other flags."""
    async with running(tmp_path_factory.mktemp("sglang"), **CUDA) as found:
        yield found
        assert found.died == []


async def answers_as(subject: Subject, seed: int) -> bool:
    """Greedily, as version `seed`, and not as another one."""
    answer = (await subject.engine.answer(GREEDY)).completion
    right, other = (likeliest(subject.policy(each), GREEDY, answer, WITHIN_ROUNDED) for each in (seed, seed + 1))
    return right and not other


async def test_cuda_graphs_are_in_use(subject: Subject) -> None:
    """`disable_cuda_graph` is what was asked for, and `cuda_graph_config` what came of it."""
    said = subject.engine.client.get("server_info")
    assert (said["disable_cuda_graph"], said["cuda_graph_config"]["decode"]["backend"]) == (False, "full")


async def test_a_version_is_loaded_in_each_way_and_proven_on_the_device(subject: Subject) -> None:
    """Broadcast (by NCCL where there is a second GPU, else by gloo), from the request, from the room's folder; and a
    wrong bit is found in each."""
    for seed, update in enumerate(UPDATES):
        with subject.with_(update=update):
            manifest = await subject.load(seed, f"i:{seed}")
            assert await answers_as(subject, seed)
            version = subject.version(seed)
            room = subject.engine.room({n: (p.dtype, p.shape, p.data.nbytes) for n, p in version.items()})
            room["lm_head.weight"].data[6] ^= 0x10  # of the 16 bits that the server keeps
            await asyncio.to_thread(subject.engine.take, "i:9")
            assert "lm_head.weight" in await subject.flaw(manifest, "i:9")
    assert subject.engine.proof(manifest, "i:9").algorithm.endswith("gpu_tensor_hash-64")


@pytest.mark.parametrize("prefix_cache", [False, True], ids=["in_place", "retract"])
async def test_an_answer_goes_on_with_the_next_version(subject: Subject, prefix_cache: bool) -> None:
    await subject.load(1, "i:1")
    await subject.engine.answer(GREEDY)  # the first one waits for kernels that are compiled
    with subject.with_(prefix_cache=prefix_cache):
        asked = asyncio.create_task(subject.engine.answer(LONG))
        await under_way(subject, asked, LONG)
        await subject.engine.halt()
        await subject.load(2, "i:2")
        await subject.engine.go_on()
        assert [load_id for load_id, _ in (await asked).versions] == ["i:1", "i:2"]


async def test_memory_comes_back_and_what_is_loaded_after_that_is_proven_and_answers(tmp_path: Path) -> None:
    chosen = replace(config(tmp_path, **CUDA), training=Training(colocate=True), publication=Publication())
    async with serving(check(chosen)) as subject:
        assert subject.engine.releases == REGIONS
        await subject.load(1, "i:1")
        assert await answers_as(subject, 1)
        cache = subject.engine.client.get("server_info")["internal_states"][0]["memory_usage"]["kvcache"]
        before = torch.cuda.mem_get_info()[0]
        await asyncio.to_thread(subject.engine.release, REGIONS)
        freed = torch.cuda.mem_get_info()[0] - before
        assert freed > 0.9 * cache * (1 << 30) > 0.5 * (1 << 30)
        await asyncio.to_thread(subject.engine.resume, REGIONS)
        assert torch.cuda.mem_get_info()[0] - before < 0.1 * freed
        await subject.load(2, "i:2")
        assert await answers_as(subject, 2)
        assert subject.died == []


async def test_an_adapter_is_sent_or_read_proven_answers_and_is_gone(tmp_path: Path) -> None:
    """The server has been started with weights, so that it takes both."""
    async with running(tmp_path, TAKEN, **CUDA, update="disk") as subject:
        await subject.load(1, "i:1")
        base = subject.policy(1)
        for seed, update in enumerate(("broadcast", "disk")):
            assert subject.engine.held is not None
            subject.engine.held.reads = update == "disk"
            with subject.with_(update=update):
                async with loaded(subject, seed, within=WITHIN_ROUNDED) as (one,):
                    assert await one.flaw() == ""
                    answer = await one.answer(SAMPLED)
                    assert says(one.policy(), SAMPLED, answer, WITHIN_ROUNDED)
                    assert not says(base, SAMPLED, answer, WITHIN_ROUNDED)
                    answer = await one.answer(GREEDY)
                    assert likeliest(one.policy(), GREEDY, answer.completion, WITHIN_ROUNDED)
                    assert await one.unload() == ""
                    with pytest.raises(Rejected, match="LoRA adapter"):
                        await one.answer(GREEDY)
        assert await answers_as(subject, 1)
        assert subject.died == []


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
async def test_each_rank_holds_its_part(tmp_path: Path) -> None:
    async with running(tmp_path, **CUDA, tensor_parallel_size=2) as subject:
        manifest = await subject.load(1, "i:1")
        assert [each.rank for each in subject.engine._expected[manifest]] == [0, 1]
        assert await answers_as(subject, 1)
