"""A policy as a model folder: what config.json says, and that the weights beside it are the policy's.

Knows: Hugging Face's names. Must not know: transformers or a server, which open such folders in tests/sglang.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from reef_bus.checkpoint import open_checkpoint
from reef_bus.errors import Rejected
from reef_bus.model_folder import hugging_face_config, read_policy_config, write_model_folder
from reef_bus.policy import PolicyConfig, new_policy, pieces

QWEN3 = PolicyConfig(qk_norm=True, layers=3, heads=2, kv_heads=1, rope_theta=500.0, init_std=0.125)


def test_the_config_of_a_qwen3() -> None:
    assert hugging_face_config(QWEN3) == {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 16,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 32,
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.125,
        "rope_theta": 500.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": "float32",
    }


def test_the_config_of_a_llama_differs_in_its_name_and_its_biases() -> None:
    qwen3, llama = hugging_face_config(PolicyConfig(qk_norm=True)), hugging_face_config(PolicyConfig())
    differing = {name for name in qwen3.keys() | llama.keys() if qwen3.get(name) != llama.get(name)}
    assert differing == {"architectures", "model_type", "use_sliding_window", "mlp_bias"}
    assert (llama["architectures"], llama["model_type"], llama["mlp_bias"]) == (["LlamaForCausalLM"], "llama", False)


def test_a_folder_holds_the_config_and_the_weights(tmp_path: Path) -> None:
    weights = pieces(dict(new_policy(QWEN3, 3).named_parameters()))
    write_model_folder(tmp_path / "new" / "model", QWEN3, weights)
    folder = tmp_path / "new" / "model"
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors"}
    assert json.loads((folder / "config.json").read_text()) == hugging_face_config(QWEN3)
    found = open_checkpoint(folder)
    assert {name: (p.dtype, p.shape, bytes(p.data)) for name, p in found.items()} == {
        name: (p.dtype, p.shape, bytes(p.data)) for name, p in weights.items()
    }


def test_a_folder_says_from_what_a_base_model_is_drawn(tmp_path: Path) -> None:
    write_model_folder(tmp_path, QWEN3)
    assert read_policy_config(tmp_path) == QWEN3
    said = json.loads((tmp_path / "config.json").read_text())
    del said["initializer_range"]
    (tmp_path / "config.json").write_text(json.dumps(said))
    assert read_policy_config(tmp_path).init_std == 0.05


def test_without_weights_there_is_the_config_alone(tmp_path: Path) -> None:
    write_model_folder(tmp_path, PolicyConfig())
    write_model_folder(tmp_path, QWEN3)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "qwen3"


def test_a_folder_that_has_weights_keeps_them_and_its_config(tmp_path: Path) -> None:
    write_model_folder(tmp_path, QWEN3, pieces(dict(new_policy(QWEN3, 3).named_parameters())))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    other = PolicyConfig()
    with pytest.raises(Rejected, match="is there already"):
        write_model_folder(tmp_path, other, pieces(dict(new_policy(other, 3).named_parameters())))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
