"""A trainer of LoRA adapters in this process: PEFT puts them into the policy, all else is as for whole policies.

Knows: PEFT, the frozen base model. Must not know: scenarios, engines, the log.
Importing PEFT brings transformers: whoever trains no adapter must not import this module.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

from consumers.reef_trainer.torch_backend import Hyper, State, Tensors, TorchTrainer, fresh, policy_shapes, read_tensors
from reef_bus.errors import ContractError
from reef_bus.events import Lora
from reef_bus.lora import shapes, zero_adapter
from reef_bus.policy import Policy, PolicyConfig, fill


class LoraTrainer(TorchTrainer):
    """Trains adapters of one base model, each a state of its own. All of them take turns on one copy of the base and
    one set of adapter parameters, which is filled anew for every step: nothing of a state is ever in it for good. The
    hyperparameters' seed draws what `initial` gives; rank, alpha and targets are the same for all."""

    def __init__(self, config: PolicyConfig, base: Path, lora: Lora, hyper: Hyper | None = None) -> None:
        """`base`: a safetensors file with the whole base model; it is read once, here, and may go then. Raises
        ContractError for a damaged one, Rejected for an adapter that this model cannot have."""
        super().__init__(config, hyper)
        self._policy = fill(Policy(config), read_tensors(base, policy_shapes(config), torch.float32))
        self._shapes = shapes(self._policy, lora)
        self._parameters = _injected(self._policy, lora, self._shapes)

    def initial(self) -> State:
        return fresh(zero_adapter(self._shapes, self.hyper.seed))

    def shapes(self) -> Mapping[str, torch.Size]:
        return self._shapes

    def filled(self, weights: Tensors) -> tuple[Policy, Mapping[str, nn.Parameter]]:
        """The same policy on every call: what was computed with earlier weights is over by then."""
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(weights[name])
        return self._policy, self._parameters


def _injected(policy: Policy, lora: Lora, expected: Mapping[str, torch.Size]) -> dict[str, nn.Parameter]:
    """Let PEFT freeze the policy and put an adapter's layers into it; its parameters come back, by the names that they
    have in PEFT's files, in the order of `expected`."""
    wanted = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=list(lora.targets), lora_dropout=0.0)
    with torch.random.fork_rng(devices=[]):  # PEFT draws first values from the global generator; they are never used
        inject_adapter_in_model(wanted, policy)
    trained = {name: parameter for name, parameter in policy.named_parameters() if parameter.requires_grad}
    found = {"base_model.model." + name.replace(".default.", "."): parameter for name, parameter in trained.items()}
    if {name: parameter.shape for name, parameter in found.items()} != dict(expected):
        wrong = sorted(found.keys() ^ expected.keys()) or sorted(found)
        raise ContractError(f"PEFT's adapter of this model is not ours: {wrong[:4]}; install what the extra lora says")
    return {name: found[name] for name in expected}
