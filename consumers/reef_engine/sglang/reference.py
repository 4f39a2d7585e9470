"""What a model with an adapter answers by transformers' code, the adapter merged into its weights.

Knows: transformers, in a process of its own, on the CPU. Must not know: SGLang, or any server.
Reads probes from stdin, as JSON, a line each, and answers each with a line; ends with its stdin. The answers go to a
pipe of their own, for whatever is imported here may print.
"""

from __future__ import annotations

import os
import sys

import msgspec
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from consumers.reef_engine.sglang.probes import Probe, Thought

PREFIX = "base_model.model."


def logprobs(probe: Probe) -> tuple[float, ...]:
    """In float32, whatever the model's files are in."""
    model = AutoModelForCausalLM.from_pretrained(probe.base, dtype=torch.float32, local_files_only=True)
    with torch.inference_mode():
        _merge(model, probe)
        table = model(torch.tensor([probe.ids])).logits[0, :-1].log_softmax(-1)
    found = table.gather(1, torch.tensor(probe.ids)[1:, None])[:, 0]
    if not found.isfinite().all():
        raise ValueError("the model with this adapter computes no numbers")
    return tuple(found.tolist())


def _merge(model: torch.nn.Module, probe: Probe) -> None:
    """W + alpha / rank × B A; W itself may be the room's memory, and stays as it is."""
    with safe_open(probe.adapter, "pt") as file:
        for name in file.keys():
            layer, letter, _ = name.removeprefix(PREFIX).rsplit(".", 2)
            if letter == "lora_A":
                a, b = (file.get_tensor(f"{PREFIX}{layer}.lora_{each}.weight").float() for each in "AB")
                linear = model.get_submodule(layer)
                linear.weight = torch.nn.Parameter(linear.weight + probe.scale * (b @ a), requires_grad=False)


def main() -> None:
    with os.fdopen(int(sys.argv[1]), "wb") as answers:
        for line in sys.stdin.buffer:
            try:
                said = Thought(logprobs(msgspec.json.decode(line, type=Probe)))
            except Exception as error:  # transformers raises what it likes: that is the answer
                said = Thought(error=f"{type(error).__name__}: {error}")
            answers.write(msgspec.json.encode(said) + b"\n")
            answers.flush()


if __name__ == "__main__":
    main()
