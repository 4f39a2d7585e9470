"""Model folders that we write, opened by transformers: the same logits, the same greedy tokens.

Knows: transformers' own classes. Must not know: SGLang, which builds on the same folders.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from reef_bus.model_folder import write_model_folder
from reef_bus.policy import Policy, PolicyConfig, new_policy, pieces, sample

SHAPES = {
    "llama": PolicyConfig(),
    "llama-other": PolicyConfig(layers=3, heads=2, kv_heads=1, ffn=96, rope_theta=500.0),
    "qwen3": PolicyConfig(qk_norm=True),
    "qwen3-other": PolicyConfig(qk_norm=True, layers=1, heads=8, kv_heads=8, ffn=96, max_len=48, rope_theta=500.0),
}


def noisy(config: PolicyConfig) -> Policy:
    """Far from uniform, norms included."""
    policy, generator = new_policy(config, 1), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    return policy


@pytest.fixture(params=SHAPES)
def pair(request: pytest.FixtureRequest, tmp_path: Path, imported: Callable[[str], ModuleType]) -> tuple[Policy, Any]:
    """A policy, and the model that transformers makes of its folder: every tensor used, none made up."""
    config = SHAPES[request.param]
    policy = noisy(config)
    write_model_folder(tmp_path, config, pieces(dict(policy.named_parameters())))
    transformers = imported("transformers")
    transformers.utils.logging.disable_progress_bar()
    kind = transformers.Qwen3ForCausalLM if config.qk_norm else transformers.LlamaForCausalLM
    model, report = kind.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    return policy, model.eval()


def test_the_folder_names_its_class(pair: tuple[Policy, Any]) -> None:
    policy, model = pair
    assert model.config.architectures == [type(model).__name__]
    assert model.dtype == torch.float32
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in policy.parameters())


def test_logits_are_equal_at_every_position(pair: tuple[Policy, Any]) -> None:
    policy, model = pair
    shape = (4, policy.config.max_len)
    ids = torch.randint(0, policy.config.vocab, shape, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected, found = model(ids).logits, policy(ids)
    assert float(expected.std()) > 0.3  # not everything alike
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_greedy_tokens_are_equal(pair: tuple[Policy, Any]) -> None:
    policy, model = pair
    prompts = torch.tensor([[11, 3, 10], [11, 8, 10]])
    found, _ = sample(policy, prompts, 20, 0.0, torch.Generator())
    expected = model.generate(
        prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=20, do_sample=False, pad_token_id=0
    )
    assert torch.equal(found, expected[:, 3:])
