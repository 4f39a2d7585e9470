"""An unmodified SGLang server, driven by our backend: what it is given, what it holds, what it answers, how it stops.

Knows: one real server for all of these tests. Must not know: agents or the log.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from msgspec.structs import replace

from consumers.reef_engine.sglang import moves
from consumers.reef_engine.sglang.launch import Process, environment
from consumers.reef_engine.sglang.limits import RESERVED
from consumers.reef_engine.sglang.start import KEY, start
from reef_bus.backends import Answer, Piece, Pieces, Prompt
from reef_bus.config import UPDATES
from reef_bus.core.effects import Me
from reef_bus.core.memory import REGIONS
from reef_bus.errors import Rejected, TransferError, Unavailable
from reef_bus.runner import blocking
from tests.sglang.subject import CLOSE, SHAPE, Subject, borrowing, config, greedy, logprobs, replaced, under_way, used

pytestmark = pytest.mark.asyncio(loop_scope="session")

PROMPT = Prompt(ids=(11, 7, 10), max_tokens=4)
GREEDY = Prompt(ids=(11, 7, 10), max_tokens=16, temperature=0.0)
LONG = Prompt(ids=(11, 7, 10), max_tokens=900)
SMALL = 20_000
"""Bytes of a request, so that a version takes several."""


@pytest.mark.parametrize("update", UPDATES)
async def test_what_was_loaded_is_what_answers(subject: Subject, update: str) -> None:
    with subject.with_(update=update):
        for seed in (1, 2):
            await subject.load(seed, f"i:{update}-{seed}")
            answer = await subject.engine.answer(GREEDY)
            assert answer.completion.ids == greedy(subject.policy(seed), GREEDY)
            assert answer.versions == ((f"i:{update}-{seed}", 16),)


async def test_logprobs_are_those_of_the_trainers_forward_pass(subject: Subject) -> None:
    await subject.load(3, "i:3")
    found = (await subject.engine.answer(LONG)).completion
    expected = logprobs(subject.policy(3), LONG, found)
    assert torch.tensor(found.logprobs).sub(expected).abs().max() < CLOSE


async def test_logprobs_are_of_the_temperature_that_was_asked_for(subject: Subject) -> None:
    """Whatever the temperatures of the others in the batch are."""
    await subject.load(3, "i:4")
    prompts = [replace(LONG, max_tokens=200, temperature=each) for each in (0.5, 1.0, 2.0)]
    *found, _ = await asyncio.gather(*map(subject.engine.answer, [*prompts, replace(GREEDY, max_tokens=200)]))
    for prompt, answer in zip(prompts, found, strict=True):
        expected = logprobs(subject.policy(3), prompt, answer.completion)
        assert torch.tensor(answer.completion.logprobs).sub(expected).abs().max() < CLOSE


async def test_the_room_is_the_same_memory_as_long_as_it_is_asked_for_the_same(subject: Subject) -> None:
    layouts = {"b": ("BF16", (2, 2), 8), "a": ("F32", (4,), 16)}
    first, second = subject.engine.room(layouts), subject.engine.room(layouts)
    assert first is second and {name: piece.data.nbytes for name, piece in first.items()} == {"a": 16, "b": 8}


# -- memory


async def test_the_server_understands_that_it_is_to_lend_memory_and_without_a_gpu_keeps_it(subject: Subject) -> None:
    """What is shown here is that it says yes, idle or a moment after its last answer, and goes on: no memory saver is
    there on a CPU, so an engine on one says that it releases nothing."""
    await subject.load(1, "i:lent")
    before = (await subject.engine.answer(GREEDY)).completion.ids
    await blocking(subject.engine.release, REGIONS)
    await blocking(subject.engine.resume, ("weights",))
    await blocking(subject.engine.resume, ("kv_cache", "cuda_graph"))
    assert (await subject.engine.answer(GREEDY)).completion.ids == before
    assert subject.engine.releases == ()


# -- an update that says success


def renamed(version: Pieces, name: str) -> Pieces:
    return {("no.such.weight" if each == name else each): piece for each, piece in version.items()}


def without(version: Pieces, name: str) -> Pieces:
    return {each: piece for each, piece in version.items() if each != name}


NORM = "model.norm.weight"
Q, FUSED = "model.layers.1.self_attn.q_proj.weight", "model.layers.1.self_attn.qkv_proj.weight"


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("wrong", [renamed, without])
async def test_a_tensor_that_the_server_did_not_load_is_found_though_it_says_success(
    subject: Subject, wrong: object, update: str
) -> None:
    """The server goes on with the tensor that it had."""
    await subject.load(1, "i:10")
    manifest = await subject.receive(subject.version(2))
    await asyncio.to_thread(subject.engine.expect, manifest)
    await subject.receive(wrong(subject.version(2), NORM))  # type: ignore[operator]
    with subject.with_(update=update):
        await asyncio.to_thread(subject.engine.take, "i:11")
    assert NORM in await subject.flaw(manifest, "i:11")


@pytest.mark.parametrize("update", UPDATES)
async def test_one_flipped_bit_is_found_and_the_parameter_named(subject: Subject, update: str) -> None:
    manifest = await subject.receive(subject.version(1))
    await asyncio.to_thread(subject.engine.expect, manifest)
    weights = subject.engine.room({n: (p.dtype, p.shape, p.data.nbytes) for n, p in subject.version(1).items()})
    weights[Q].data[5] ^= 0x10
    with subject.with_(update=update):
        await asyncio.to_thread(subject.engine.take, "i:20")
    assert re.search(
        rf"rank 0: parameter '{FUSED}' sums up to [0-9a-f]{{16}}, expected ", await subject.flaw(manifest, "i:20")
    )


def reshaped(version: Pieces, name: str) -> Pieces:
    rows, *rest = version[name].shape
    return {**version, name: Piece("F32", (rows * 2, rest[0] // 2) if rest else (8, rows // 8), version[name].data)}


def with_a_bias(version: Pieces, name: str) -> Pieces:
    """Which the model does not have: the server passes by it, and says success."""
    bias = bytearray(4 * version[name].shape[0])
    return {**version, name.replace("weight", "bias"): Piece("F32", version[name].shape[:1], memoryview(bias))}


@pytest.mark.parametrize("wrong", [renamed, without, reshaped, with_a_bias])
@pytest.mark.parametrize("name", [Q, NORM])
async def test_what_is_no_version_of_the_model_is_refused_before_the_server_hears_of_it(
    subject: Subject, wrong: object, name: str
) -> None:
    """A wrong shape ends the server's process, whether it is sent as tensors or read from disk."""
    manifest = await subject.receive(wrong(subject.version(2), name))  # type: ignore[operator]
    with pytest.raises(TransferError, match=r"^mismatch: "):
        await asyncio.to_thread(subject.engine.expect, manifest)


async def test_a_broadcast_that_the_server_refuses_leaves_it_fit_for_the_next(subject: Subject) -> None:
    await subject.load(1, "i:29")
    await subject.receive(reshaped(subject.version(1), Q))
    with pytest.raises(TransferError, match=r"^refused: "):
        await asyncio.to_thread(subject.engine.take, "i:30")
    assert named(subject) == "i:29"
    await subject.load(2, "i:31")
    assert subject.died == []


def named(subject: Subject) -> str:
    """What the server calls what it holds."""
    return str(subject.engine.client.get("model_info")["weight_version"])


@pytest.mark.parametrize("update", ["tensors", "broadcast"])
async def test_a_version_that_takes_several_requests_gets_its_name_with_the_last(
    subject: Subject, monkeypatch: pytest.MonkeyPatch, update: str
) -> None:
    """And the cache is emptied then: before that the server holds some of each version."""
    monkeypatch.setattr(moves, "BUCKET_BYTES", SMALL)
    sent: list[tuple[bool, str | None]] = []

    def noted(honest: Callable[..., Any], route: str, body: dict[str, Any], *args: Any) -> Any:
        if route.startswith("update_weights_from"):
            sent.append((body["flush_cache"], body.get("weight_version")))
        return honest(route, body, *args)

    load_id = f"i:32-{update}"
    with subject.with_(update=update), replaced(subject, "post", noted):
        await subject.load(1, load_id)
    assert len(sent) > 5 and sent == [(False, None)] * (len(sent) - 1) + [(True, load_id)]
    assert (await subject.engine.answer(GREEDY)).completion.ids == greedy(subject.policy(1), GREEDY)


@pytest.mark.parametrize("update", ["tensors", "broadcast"])
async def test_what_ends_after_some_of_its_requests_is_no_version_and_the_next_one_is_loaded(
    subject: Subject, monkeypatch: pytest.MonkeyPatch, update: str
) -> None:
    """The server goes by the old name, which is not proven any more, either."""
    old = await subject.load(1, "i:33")
    monkeypatch.setattr(moves, "BUCKET_BYTES", SMALL)
    new = await subject.receive(subject.version(2))
    await asyncio.to_thread(subject.engine.expect, new)
    sent = itertools.count(1)

    def second_refused(honest: Callable[..., Any], route: str, *args: Any) -> Any:
        if route.startswith("update_weights_from") and next(sent) == 2:
            raise TransferError("refused", "no more of it")
        return honest(route, *args)

    load_id = f"i:34-{update}"
    with subject.with_(update=update):
        with replaced(subject, "post", second_refused), pytest.raises(TransferError, match="no more of it"):
            await asyncio.to_thread(subject.engine.take, load_id)
        assert named(subject) == "i:33" and next(sent) == 3
        assert "'i:33', expected" in await subject.flaw(new, load_id)
        assert "sums up to" in await subject.flaw(old, "i:33")
        await subject.load(2, load_id)
    assert subject.died == []


@pytest.mark.parametrize("update", ["tensors", "broadcast"])
async def test_a_session_that_a_killed_agent_left_open_is_in_nobodys_way(subject: Subject, update: str) -> None:
    subject.engine.client.post("begin_weight_update", {})
    with subject.with_(update=update):
        await subject.load(2, f"i:35-{update}")


async def test_another_name_is_another_version_whatever_it_sums_up_to(subject: Subject) -> None:
    manifest = await subject.load(1, "i:40")
    assert "'i:40'" in await subject.flaw(manifest, "i:41")


async def test_what_nobody_has_worked_out_is_not_proven(subject: Subject) -> None:
    await subject.load(1, "i:50")
    assert "nobody" in await subject.flaw("0" * 64, "i:50")


async def test_the_model_and_its_name_stay_what_they_were(subject: Subject) -> None:
    before = subject.engine.client.get("model_info")
    with subject.with_(update="disk"):
        await subject.load(1, "i:60")
    after = subject.engine.client.get("model_info")
    assert after["weight_version"] == "i:60"
    for name in ("model_path", "served_model_name"):
        assert after[name] == before[name]


# -- prompts


@pytest.mark.parametrize(
    "wrong",
    [
        {"ids": (11, SHAPE.vocab, 10)},
        {"ids": (11, -1, 10)},
        {"ids": ()},
        {"max_tokens": 0},
        {"max_tokens": SHAPE.max_len - RESERVED - 2},
        {"temperature": float("nan")},
        {"temperature": -1.0},
    ],
)
async def test_a_prompt_that_would_end_or_trick_the_server_is_never_sent(
    subject: Subject, wrong: dict[str, object]
) -> None:
    with pytest.raises(Rejected):
        await subject.engine.answer(Prompt(**{"ids": (11, 7, 10), "max_tokens": 4, **wrong}))  # type: ignore[arg-type]
    assert len((await subject.engine.answer(PROMPT)).completion.ids) == 4


async def test_the_longest_answer_has_all_of_its_tokens(subject: Subject) -> None:
    longest = Prompt(ids=(11,) * 1000, max_tokens=SHAPE.max_len - RESERVED - 1000)
    assert len((await subject.engine.answer(longest)).completion.ids) == longest.max_tokens


# -- stopping


async def in_hand(subject: Subject, prompt: Prompt = LONG) -> asyncio.Task[Answer]:
    """An answer that has come some way."""
    asked = asyncio.create_task(subject.engine.answer(prompt))
    await under_way(subject, asked, prompt)
    return asked


async def test_what_is_aborted_comes_back_unfinished(subject: Subject) -> None:
    await subject.load(1, "i:70")
    asked = await in_hand(subject)
    await subject.engine.abort()
    answer = await asked
    assert answer.completion.finish_reason == "" and 0 < len(answer.completion.ids) < LONG.max_tokens


async def test_the_server_is_rid_of_what_nobody_waits_for(subject: Subject) -> None:
    asked = await in_hand(subject)
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    until = time.monotonic() + 5
    while subject.engine.client.get("v1/loads")["loads"][0]["num_running_reqs"]:
        assert time.monotonic() < until
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("prefix_cache", [False, True], ids=["in_place", "retract"])
async def test_what_was_halted_goes_on_with_the_next_version_and_says_who_sampled_what(
    subject: Subject, prefix_cache: bool
) -> None:
    """Halted in place, the keys and values of the first version are kept; retracted, the next one computes its own, so
    that its tokens are those of its own forward pass over all that came before."""
    await subject.load(1, "i:80")
    with subject.with_(prefix_cache=prefix_cache):
        asked = await in_hand(subject)
        await subject.engine.halt()
        await subject.load(2, "i:81")
        await subject.engine.go_on()
        answer = await asked
    (first, before), (second, after) = answer.versions
    assert (first, second, before + after) == ("i:80", "i:81", 900) and before > 0
    found = torch.tensor(answer.completion.logprobs)
    close = [found.sub(logprobs(subject.policy(seed), LONG, answer.completion)).abs() < CLOSE for seed in (1, 2)]
    assert bool(close[0][:before].all())
    assert bool(close[1][before:].all()) == prefix_cache


async def test_nothing_is_sampled_while_it_is_halted(subject: Subject) -> None:
    await subject.load(1, "i:90")
    asked = await in_hand(subject)
    await subject.engine.halt()
    first = used(subject)
    await asyncio.sleep(0.5)
    assert used(subject) == first > 0
    await subject.engine.go_on()
    await subject.engine.go_on()
    assert len((await asked).completion.ids) == 900


# -- start and end


async def test_a_server_that_cannot_start_says_the_end_of_its_log(tmp_path: Path) -> None:
    died: list[str] = []
    async with contextlib.AsyncExitStack() as stack:
        with pytest.raises(Unavailable, match=r"(?s)SGLang ended with status.*no-such-backend.*sglang.log"):
            await start(
                config(tmp_path, options={"attention-backend": "no-such-backend"}), Me("e1", "b"), died.append, stack
            )
    assert died == []


async def test_a_borrowed_server_is_loaded_while_others_use_it_and_lives_on(
    subject: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What others have in hand goes on with what was loaded."""
    monkeypatch.setenv(KEY, "boot-1")
    async with borrowing(subject, tmp_path) as found:
        await found.load(1, "j:0")
        asked = await in_hand(subject)
        await found.load(2, "j:1")
        assert [load_id for load_id, _ in (await asked).versions] == ["j:0", "j:1"]
        assert (await found.engine.answer(GREEDY)).completion.ids == greedy(subject.policy(2), GREEDY)
    assert (await subject.engine.answer(GREEDY)).versions == (("j:1", 16),)


async def test_a_borrowed_server_that_a_killed_agent_left_paused_goes_on(
    subject: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY, "boot-1")
    await subject.load(1, "j:2")
    asked = await in_hand(subject)
    await subject.engine.halt()
    async with borrowing(subject, tmp_path) as found, asyncio.timeout(20):
        assert (await found.engine.answer(GREEDY)).completion.ids == greedy(subject.policy(1), GREEDY)
    assert len((await asked).completion.ids) == LONG.max_tokens
    await subject.engine.go_on()


@pytest.mark.parametrize(
    ("other", "key"),
    [({"tensor_parallel_size": 2}, "tensor-parallel-size"), ({"dtype": "bfloat16"}, "dtype")],
)
async def test_a_borrowed_server_that_is_another_one_is_refused_with_the_key_to_set(
    subject: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: dict[str, object], key: str
) -> None:
    monkeypatch.setenv(KEY, "boot-1")
    with pytest.raises(Rejected, match=f"inference.{key}"):
        async with borrowing(subject, tmp_path, **other):
            pass


async def test_nobody_is_waited_for_longer_than_the_configuration_says(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=r"no SGLang generates at http://127\.0\.0\.1:1 "):
        async with contextlib.AsyncExitStack() as stack:
            chosen = config(tmp_path, urls={"e0": "http://127.0.0.1:1"}, start_s=0.5)
            await start(chosen, Me("e0", "b"), [].append, stack)


async def test_a_process_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    """As a server's: a group of processes, of which some do not listen."""
    script = (
        "import subprocess, sys, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']);"
        "print('up', flush=True); time.sleep(60)"
    )
    process = Process(["-c", script], environment("cpu", tmp_path), tmp_path / "log")
    while "up" not in process.last_words():  # noqa: ASYNC110 - another process says it
        await asyncio.sleep(0.05)
    all_of_it = psutil.Process(process.process.pid).children(recursive=True)
    assert len(all_of_it) == 1
    process.end()
    process.end()
    assert not psutil.wait_procs(all_of_it, timeout=5)[1]
