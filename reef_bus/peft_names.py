"""What PEFT calls the tensors of a LoRA adapter, and which layers its `target_modules` mean.

Knows: spelling. Must not know: tensors, files, any framework.
"""

from __future__ import annotations

import re

_TENSOR = re.compile(r"base_model\.model\.(?P<layer>.+)\.lora_(?P<which>[AB])\.weight")


def pair(layer: str) -> tuple[str, str]:
    """The names of A and B beside this layer of the base model."""
    return f"base_model.model.{layer}.lora_A.weight", f"base_model.model.{layer}.lora_B.weight"


def layer_of(tensor: str) -> tuple[str, str]:
    """The layer that it stands beside, and whether it is its "A" or "B"; both empty for what is neither."""
    found = _TENSOR.fullmatch(tensor)
    return (found["layer"], found["which"]) if found else ("", "")


def meant(layer: str, target: str) -> bool:
    """A target is a layer's whole name, or whole parts at its end."""
    return layer == target or layer.endswith(f".{target}")
