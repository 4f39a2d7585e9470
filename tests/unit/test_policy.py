"""The policy's arithmetic, its sampler and its bytes, against values derived without it.

Knows: Hugging Face's parameter names, Llama's and Qwen3's formulas (in numpy). Must not know: rewards, backends.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
import numpy.typing as npt
import pytest
import torch

from reef_bus import tokens
from reef_bus.errors import ContractError, Rejected
from reef_bus.policy import Cache, Policy, PolicyConfig, fill, new_policy, pieces, sample, sample_with

CONFIG = PolicyConfig()
QWEN3 = PolicyConfig(qk_norm=True)
KINDS = pytest.mark.parametrize("config", [CONFIG, QWEN3], ids=["llama", "qwen3"])
PROMPTS = torch.tensor([[11, 3, 10], [11, 8, 10]])
Array = npt.NDArray[np.float64]


def noisy(seed: int, config: PolicyConfig = CONFIG) -> Policy:
    """A policy far from uniform, norms included, so that a mistake in any of its parts shows."""
    policy, generator = new_policy(config, seed), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
    return policy


def digest(policy: Policy) -> str:
    whole = b"".join(bytes(piece.data) for piece in pieces(dict(policy.named_parameters())).values())
    return hashlib.sha256(whole).hexdigest()


def test_the_config_agrees_with_the_vocabulary() -> None:
    assert (CONFIG.vocab, CONFIG.max_len) == (tokens.VOCAB, tokens.MAX_LEN)


def test_parameters_carry_hugging_face_names_and_shapes() -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in Policy(CONFIG).state_dict().items()}
    layer = {
        "input_layernorm.weight": (64,),
        "self_attn.q_proj.weight": (64, 64),
        "self_attn.k_proj.weight": (32, 64),
        "self_attn.v_proj.weight": (32, 64),
        "self_attn.o_proj.weight": (64, 64),
        "post_attention_layernorm.weight": (64,),
        "mlp.gate_proj.weight": (128, 64),
        "mlp.up_proj.weight": (128, 64),
        "mlp.down_proj.weight": (64, 128),
    }
    blocks = {f"model.layers.{i}.{name}": shape for i in range(2) for name, shape in layer.items()}
    ends = {"model.embed_tokens.weight": (16, 64), "model.norm.weight": (64,), "lm_head.weight": (16, 64)}
    assert shapes == blocks | ends
    assert sum(math.prod(shape) for shape in shapes.values()) == 76_096


def test_a_qwen3_has_two_norms_more_in_every_layer() -> None:
    """2 layers with 2 norms of one head's 16 dimensions: 64 parameters more."""
    llama, qwen3 = ({n: tuple(t.shape) for n, t in Policy(c).state_dict().items()} for c in (CONFIG, QWEN3))
    norms = {f"model.layers.{i}.self_attn.{name}_norm.weight": (16,) for i in range(2) for name in ("q", "k")}
    assert qwen3 == llama | norms
    assert sum(math.prod(shape) for shape in qwen3.values()) == 76_096 + 64


def test_a_qwen3_starts_from_the_llama_of_its_seed_with_norms_of_one() -> None:
    llama, qwen3 = (dict(new_policy(config, 5).named_parameters()) for config in (CONFIG, QWEN3))
    assert all(torch.equal(qwen3[name], parameter) for name, parameter in llama.items())
    assert all(bool((qwen3[name] == 1).all()) for name in qwen3.keys() - llama.keys())


@KINDS
def test_an_unfilled_policy_is_nan_everywhere(config: PolicyConfig) -> None:
    assert all(bool(parameter.isnan().all()) for parameter in Policy(config).parameters())


def test_a_seed_decides_the_bytes_and_global_generators_are_left_alone() -> None:
    before = torch.random.get_rng_state()
    assert digest(new_policy(CONFIG, 5)) == digest(new_policy(CONFIG, 5)) != digest(new_policy(CONFIG, 6))
    assert torch.equal(before, torch.random.get_rng_state())


def test_the_base_model_is_the_seeds_mersenne_twister_and_integer_arithmetic() -> None:
    """numpy's legacy generator is the same twister, so these bytes owe nothing to torch or to the CPU."""
    raw = np.random.RandomState(5).randint(0, 2**32, 12 * 16 * 64, dtype=np.uint32) % 65_536
    expected = (raw.reshape(12, 16, 64).sum(0) - 12 * 32_767.5) / 65_536 * 0.05
    found = new_policy(CONFIG, 5).model.embed_tokens.weight.detach().numpy()
    assert found.tobytes() == expected.astype(np.float32).tobytes()


def test_matrices_start_near_normal_and_norms_at_one() -> None:
    named = dict(new_policy(CONFIG, 0).named_parameters())
    assert bool((named["model.norm.weight"] == 1).all())
    drawn = torch.cat([tensor.detach().flatten() for tensor in named.values() if tensor.dim() == 2]) / 0.05
    assert abs(float(drawn.mean())) < 0.02
    assert abs(float(drawn.std()) - 1) < 0.02
    assert abs(float((drawn.abs() < 1).float().mean()) - 0.683) < 0.01  # the normal's share within one sigma


@pytest.mark.parametrize("wrong", [{"hidden": 60}, {"heads": 3}, {"kv_heads": 3}])
def test_a_shape_that_does_not_divide_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(Rejected, match="multiple"):
        PolicyConfig(**wrong)


@KINDS
def test_logits_equal_the_model_written_out_in_numpy(config: PolicyConfig) -> None:
    policy = noisy(1, config)
    weights = {name: p.detach().numpy().astype(np.float64) for name, p in policy.named_parameters()}
    ids = [11, 4, 7, 10, 7, 7]
    with torch.no_grad():
        found = policy(torch.tensor([ids]))[0].numpy()
    np.testing.assert_allclose(found, written_out(weights, ids), rtol=1e-4, atol=1e-4)


def test_the_norm_of_a_head_is_taken_before_it_is_rotated_and_forgets_its_length() -> None:
    """Queries of any length are one query; in a Llama they are not. Scaling by 4 is exact."""
    ids = torch.tensor([[11, 4, 7, 10, 7, 7]])
    for config, same in ((QWEN3, True), (CONFIG, False)):
        policy = noisy(7, config)
        with torch.no_grad():
            before = policy(ids)
            for layer in policy.model.layers:
                layer.self_attn.q_proj.weight.mul_(4)
            assert torch.allclose(policy(ids), before, atol=1e-3) is same


def written_out(weights: dict[str, Array], ids: list[int]) -> Array:
    """One sequence, head by head, position by position: slow and plain on purpose."""
    x = weights["model.embed_tokens.weight"][ids]
    for layer in range(2):
        w = {name.split(f"layers.{layer}.")[1]: v for name, v in weights.items() if f"layers.{layer}." in name}
        x = x + attention(w, norm(x, w["input_layernorm.weight"]))
        y = norm(x, w["post_attention_layernorm.weight"])
        gate = y @ w["mlp.gate_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * (y @ w["mlp.up_proj.weight"].T)) @ w["mlp.down_proj.weight"].T
    return norm(x, weights["model.norm.weight"]) @ weights["lm_head.weight"].T


def norm(x: Array, gain: Array) -> Array:
    return np.asarray(x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * gain)


def attention(w: dict[str, Array], x: Array) -> Array:
    mixed = np.zeros((len(x), 64))
    for head in range(4):
        own, shared = slice(head * 16, head * 16 + 16), slice(head // 2 * 16, head // 2 * 16 + 16)
        q, k = x @ w["self_attn.q_proj.weight"][own].T, x @ w["self_attn.k_proj.weight"][shared].T
        v = x @ w["self_attn.v_proj.weight"][shared].T
        if "self_attn.q_norm.weight" in w:
            q, k = norm(q, w["self_attn.q_norm.weight"]), norm(k, w["self_attn.k_norm.weight"])
        for t in range(len(x)):
            scores = np.array([turn(q[t], t) @ turn(k[s], s) / 4 for s in range(t + 1)])
            share = np.exp(scores - scores.max())
            mixed[t, own] = share / share.sum() @ v[: t + 1]
    return np.asarray(mixed @ w["self_attn.o_proj.weight"].T)


def turn(x: Array, position: int) -> Array:
    """Rotary embedding: dimension i pairs with i + 8, at angle position / 10000^(i/8)."""
    pairs = (x[:8] + 1j * x[8:]) * np.exp(1j * position / 10_000 ** (np.arange(8) / 8))
    return np.concatenate((pairs.real, pairs.imag))


@KINDS
def test_the_cache_changes_nothing_but_the_cost(config: PolicyConfig) -> None:
    policy, ids = noisy(2, config), torch.tensor([[11, 4, 10, 4, 15, 4], [11, 9, 10, 0, 1, 2]])
    with torch.no_grad():
        whole, cache = policy(ids), Cache(config, 2, 6)
        steps = [policy(part, cache) for part in (ids[:, :3], ids[:, 3:4], ids[:, 4:5], ids[:, 5:])]
    torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_logprobs_are_those_of_the_distribution_that_was_sampled(temperature: float) -> None:
    policy = noisy(3)
    ids, logprobs = sample(policy, PROMPTS, 5, temperature, torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = policy(torch.cat((PROMPTS, ids), 1)[:, :-1])[:, 2:] / temperature
    expected = (logits - logits.logsumexp(-1, keepdim=True)).gather(2, ids.unsqueeze(2)).squeeze(2)
    torch.testing.assert_close(logprobs, expected, rtol=1e-5, atol=1e-5)


def test_sampled_frequencies_follow_the_probabilities() -> None:
    policy = noisy(4)
    many = PROMPTS[:1].expand(20_000, -1)
    ids, _ = sample(policy, many, 1, 1.0, torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = policy(PROMPTS[:1])[0, -1].softmax(-1)
    found = torch.bincount(ids.flatten(), minlength=16) / len(many)
    assert float((found - expected).abs().max()) < 0.015  # four sigma of the likeliest token


@pytest.mark.parametrize("temperature", [0.0, 1e-30])
def test_greedy_takes_the_best_token_with_logprob_zero(temperature: float) -> None:
    policy = noisy(5)
    ids, logprobs = sample(policy, PROMPTS, 4, temperature, torch.Generator().manual_seed(0))
    with torch.no_grad():
        best = policy(torch.cat((PROMPTS, ids), 1)[:, :-1])[:, 2:].argmax(-1)
    assert torch.equal(ids, best)
    assert bool((logprobs == 0).all())


@pytest.mark.parametrize("extreme", [0.0, 1 - 2**-53])
def test_the_extremes_of_a_draw_stay_inside_the_vocabulary(extreme: float) -> None:
    draws = torch.full((2, 3), extreme, dtype=torch.float64)
    ids, logprobs = sample_with(noisy(6), PROMPTS, draws, 1.0)
    assert bool((ids == (0 if extreme == 0 else 15)).all())
    assert bool(torch.isfinite(logprobs).all())


def test_pieces_are_the_parameters_own_memory() -> None:
    policy = new_policy(CONFIG, 0)
    named = dict(policy.named_parameters())
    live = pieces(named, writable=True)
    assert list(live) == list(named)
    head = live["lm_head.weight"]
    assert (head.dtype, head.shape, head.data.format, head.data.nbytes) == ("F32", (16, 64), "B", 4096)
    head.data[:4] = np.float32(2.5).tobytes()
    assert policy.lm_head.weight[0, 0].detach() == 2.5


def test_read_only_pieces_refuse_a_write() -> None:
    data = pieces({"w": torch.zeros(2)})["w"].data
    with pytest.raises(TypeError):
        data[0] = 1


def test_pieces_of_other_types_are_spelled_as_in_safetensors() -> None:
    found = pieces({"half": torch.zeros(3, dtype=torch.bfloat16), "one": torch.zeros(())})
    described = [(piece.dtype, piece.shape, piece.data.nbytes) for piece in found.values()]
    assert described == [("BF16", (3,), 6), ("F32", (), 4)]


def test_memory_that_is_not_in_row_order_is_refused_by_name() -> None:
    with pytest.raises(ContractError, match="turned"):
        pieces({"turned": torch.zeros(2, 3).T})


def test_filling_copies() -> None:
    source = dict(new_policy(CONFIG, 1).named_parameters())
    filled = fill(Policy(CONFIG), source)
    assert digest(filled) == digest(new_policy(CONFIG, 1))
    with torch.no_grad():
        filled.lm_head.weight.zero_()
    assert digest(new_policy(CONFIG, 1)) == digest(fill(Policy(CONFIG), source))
