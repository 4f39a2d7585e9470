"""LoRA adapters of a policy: what they consist of, the one that changes nothing, and the policy with one of them.

Knows: the policy's linear layers, and PEFT's names for what is added to them. Must not know: PEFT, optimizers, files.
W x + alpha / rank · B A x (Hu et al. 2021), in PEFT's order of operations, so that both round alike.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reef_bus.errors import Rejected
from reef_bus.events import Lora
from reef_bus.peft_names import layer_of, meant, pair
from reef_bus.policy import Linear, Policy


class LowRank(nn.Module):
    """A layer of the base model, and beside it what the adapter adds to its output."""

    def __init__(self, base: Linear, a: Tensor, b: Tensor, scale: float) -> None:
        super().__init__()
        self.base, self.a, self.b, self.scale = base, a, b, scale

    def forward(self, x: Tensor) -> Tensor:
        added = F.linear(F.linear(x, self.a), self.b) * self.scale
        out: Tensor = self.base(x) + added
        return out


def adapted(policy: Policy, tensors: Mapping[str, Tensor], lora: Lora) -> Policy:
    """The policy with these very `tensors` beside its own parameters, which it goes on sharing: nothing is copied."""
    shared = {id(tensor): tensor for tensor in (*policy.parameters(), *policy.buffers())}
    found = copy.deepcopy(policy, shared)
    for name, layer in targeted(policy, lora).items():
        parent, _, last = name.rpartition(".")
        a, b = (tensors[each] for each in pair(name))
        setattr(found.get_submodule(parent), last, LowRank(layer, a, b, lora.alpha / lora.rank))
    return found


def beside(policy: Policy) -> dict[str, Tensor]:
    """The adapter's tensors as the forward pass of this policy reads them, in the policy's order."""
    found: dict[str, Tensor] = {}
    for name, layer in policy.named_modules():
        if isinstance(layer, LowRank):
            found.update(zip(pair(name), (layer.a, layer.b), strict=True))
    return found


def shapes(policy: Policy, lora: Lora) -> dict[str, torch.Size]:
    """Exactly the tensors of an adapter of this policy, in the policy's order. Raises as `targeted`."""
    found: dict[str, torch.Size] = {}
    for name, layer in targeted(policy, lora).items():
        both = torch.Size((lora.rank, layer.in_features)), torch.Size((layer.out_features, lora.rank))
        found.update(zip(pair(name), both, strict=True))
    return found


def zero_adapter(of: Mapping[str, torch.Size], seed: int) -> dict[str, Tensor]:
    """The adapter of these `shapes` that changes nothing: each A is uniform in ±1/√inputs, as PEFT draws it, each B is
    zero. The seed alone decides the bytes, on every machine."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.zeros(shape) if layer_of(name)[1] == "B" else _uniform(shape, generator)
        for name, shape in of.items()
    }


def _uniform(shape: torch.Size, generator: torch.Generator) -> Tensor:
    """From integers: torch's own formula for floats depends on how it was compiled."""
    drawn = torch.randint(0, 2**24, shape, generator=generator).double() / 2**23 - 1
    return (drawn / math.sqrt(shape[1])).float()


def targeted(policy: Policy, lora: Lora) -> dict[str, Linear]:
    """The layers to which the adapter adds, by name, in the policy's order. Raises Rejected for a target that names
    none, and for a rank or a scale that no adapter has."""
    if lora.rank < 1 or lora.alpha < 1:
        raise Rejected(f"found rank {lora.rank}, alpha {lora.alpha}; expected both to be 1 or more")
    layers = {name: layer for name, layer in policy.named_modules() if isinstance(layer, Linear)}
    found = {name: layer for name, layer in layers.items() if any(meant(name, each) for each in lora.targets)}
    if lost := [each for each in lora.targets if not any(meant(name, each) for name in found)]:
        ends = sorted({name.rpartition(".")[2] for name in layers})
        raise Rejected(f"target {lost[0]!r} names no linear layer of the model; it has {', '.join(ends)}")
    if not found:
        raise Rejected("an adapter without targets changes nothing; name at least one linear layer")
    return found
