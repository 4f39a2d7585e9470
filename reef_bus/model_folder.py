"""A policy as a model folder of Hugging Face's layout, which transformers and inference servers open.

Knows: the names of Hugging Face's configuration, and the policy's shape.
Must not know: who opens the folder, or what a token means.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec

from reef_bus.backends import Pieces
from reef_bus.checkpoint import write_checkpoint
from reef_bus.errors import Rejected
from reef_bus.policy import RMS_EPS, PolicyConfig

CONFIG = "config.json"
ATTACHED = "train another model by a loop of your own, with training.backend attached"
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "mlp_bias": False}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "use_sliding_window": False}


def hugging_face_config(config: PolicyConfig) -> dict[str, Any]:
    """What config.json says of a policy. No token begins or ends a text, which readers would otherwise assume."""
    return {
        **(QWEN3 if config.qk_norm else LLAMA),
        "vocab_size": config.vocab,
        "hidden_size": config.hidden,
        "intermediate_size": config.ffn,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_len,
        "rms_norm_eps": RMS_EPS,
        "initializer_range": config.init_std,
        "rope_theta": config.rope_theta,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": "float32",
    }


def write_model_folder(folder: Path, config: PolicyConfig, weights: Pieces | None = None) -> None:
    """Write config.json into `folder`, made if need be, and `weights`, if given, as model.safetensors. Without them a
    server makes its own, and is loaded afterwards. Raises as `write_checkpoint` does, before config.json is touched."""
    folder.mkdir(parents=True, exist_ok=True)
    if weights is not None:
        write_checkpoint(folder, weights)
    text = msgspec.json.format(msgspec.json.encode(hugging_face_config(config)), indent=2)
    (folder / CONFIG).write_bytes(text + b"\n")


class _Shape(msgspec.Struct, frozen=True):
    model_type: Literal["llama", "qwen3"]
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    max_position_embeddings: int
    rope_theta: float
    initializer_range: float = PolicyConfig().init_std


def read_policy_config(folder: Path) -> PolicyConfig:
    """The policy's shape as config.json says it. Raises Rejected for a model that no policy can be."""
    try:
        text = (folder / CONFIG).read_bytes()
        said, shape = msgspec.json.decode(text, type=dict[str, Any]), msgspec.json.decode(text, type=_Shape)
    except (OSError, msgspec.MsgspecError) as error:
        raise Rejected(f"{folder / CONFIG}: found no model that a policy can be: {error}; {ATTACHED}") from error
    found = PolicyConfig(
        vocab=shape.vocab_size,
        hidden=shape.hidden_size,
        layers=shape.num_hidden_layers,
        heads=shape.num_attention_heads,
        kv_heads=shape.num_key_value_heads,
        ffn=shape.intermediate_size,
        max_len=shape.max_position_embeddings,
        init_std=shape.initializer_range,
        rope_theta=shape.rope_theta,
        qk_norm=shape.model_type == QWEN3["model_type"],
    )
    for key, expected in hugging_face_config(found).items():
        if said.get(key, expected) != expected:
            raise Rejected(f"{folder / CONFIG}: {key} is {said[key]!r}, expected {expected!r}; {ATTACHED}")
    return found
