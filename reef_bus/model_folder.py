"""A policy as a model folder of Hugging Face's layout, which transformers and inference servers open.

Knows: the names of Hugging Face's configuration, and the policy's shape.
Must not know: who opens the folder, or what a token means.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from reef_bus.backends import Pieces
from reef_bus.checkpoint import write_checkpoint
from reef_bus.errors import Rejected
from reef_bus.policy import RMS_EPS, PolicyConfig

CONFIG = "config.json"
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


def read_policy_config(folder: Path) -> PolicyConfig:
    """The policy's shape as config.json says it. Raises Rejected for a model that no policy can be."""
    try:
        said = msgspec.json.decode((folder / CONFIG).read_bytes(), type=dict[str, Any])
        found = PolicyConfig(
            vocab=said["vocab_size"],
            hidden=said["hidden_size"],
            layers=said["num_hidden_layers"],
            heads=said["num_attention_heads"],
            kv_heads=said["num_key_value_heads"],
            ffn=said["intermediate_size"],
            max_len=said["max_position_embeddings"],
            rope_theta=said["rope_theta"],
            qk_norm=said["model_type"] == QWEN3["model_type"],
        )
    except (OSError, msgspec.MsgspecError, KeyError, TypeError) as error:
        raise Rejected(f"{folder / CONFIG}: found no model configuration that can be read: {error!r}") from error
    if wrong := [key for key, value in hugging_face_config(found).items() if said.get(key, value) != value]:
        raise Rejected(
            f"{folder / CONFIG}: {wrong[0]} is {said[wrong[0]]!r}; the torch backends have a Llama or a Qwen3 with "
            f"{hugging_face_config(found)[wrong[0]]!r}: train another model with training.backend attached"
        )
    return found
