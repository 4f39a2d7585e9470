"""One rank's expected sums: loads a file as the installed SGLang would, and sums up what came of it by its checksum.

Knows: SGLang's model, loader and checksum, in a process of its own. Must not know: any server.
It works on the server's kind of device: on another one parameters may lie, and are summed up, in another way.
Reads paths from stdin, as JSON, a line each, and answers each with a line; ends with its stdin.
"""

from __future__ import annotations

import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import safe_open
from sglang.srt.configs.device_config import DeviceConfig
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed import bootstrap
from sglang.srt.layers.moe import initialize_moe_config
from sglang.srt.model_loader import get_model
from sglang.srt.model_loader.loader import DefaultModelLoader
from sglang.srt.runtime_context import SpawnRanks, publish, spawn_world_rank
from sglang.srt.server_args import prepare_server_args
from sglang.srt.utils.weight_checker import WeightChecker

from consumers.reef_engine.sglang.sums import Sums

SENTINEL = 0x7B
"""A byte of which no parameter consists that was loaded: what still does afterwards was not."""


SUMS = {"cpu": "sha256", "cuda": "gpu_tensor_hash"}
"""By device, what SGLang's `tensor_hash` is there; 64 bits in both."""


class Model:
    """The model of one rank, whatever it was told to hold last."""

    def __init__(self, rank: int, port: int, flags: list[str]) -> None:
        args: Any = prepare_server_args(flags)
        kind = args.device
        self.rank, self.device = rank, torch.device(kind if kind == "cpu" else f"{kind}:{rank}")
        if kind != "cpu":
            torch.cuda.set_device(self.device)
        ranks = SpawnRanks(world_rank=spawn_world_rank(args, tp_rank=rank, pp_rank=0), gpu_id=rank)
        publish(args, role="scheduler", ranks=ranks)
        initialize_moe_config()
        config = ModelConfig.from_server_args(args)
        bootstrap.init_parallel_runtime(server_args=args, device=kind, dist_port=port)
        bootstrap.init_layer_runtime(model_config=config)
        self.model: Any = get_model(
            model_config=config, load_config=LoadConfig(load_format="dummy"), device_config=DeviceConfig(kind)
        )
        self.checker: Any = WeightChecker(get_model=lambda: self.model)
        self.algorithm = f"sglang-{version('sglang')}-{SUMS[kind]}-64"

    def sums(self, weights: Path) -> Sums:
        for parameter in self.model.parameters():
            parameter.data.view(torch.uint8).fill_(SENTINEL)
        with safe_open(weights, "pt") as file:
            tensors = [(name, file.get_tensor(name)) for name in file.keys()]
        DefaultModelLoader.restore_weights_before_loading(self.model, self.device)
        DefaultModelLoader.load_weights_and_postprocess(self.model, iter(tensors), self.device)
        if empty := [name for name, parameter in self.model.named_parameters() if _untouched(parameter.data)]:
            raise ValueError(f"the version leaves parameter {empty[0]!r} of SGLang's model empty")
        return Sums(self.rank, self.algorithm, self.checker.handle("checksum", role="target")["checksums"])


def _untouched(tensor: torch.Tensor) -> bool:
    """Whether a value of it is as it was before, padding included; where values are one byte, whether all are."""
    values = (tensor.contiguous().view(torch.uint8).view(-1, tensor.element_size()) == SENTINEL).all(1)
    return bool(values.all() if tensor.element_size() == 1 else values.any())


def main() -> None:
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints, prints into the log
    model = Model(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
    for line in sys.stdin.buffer:
        try:
            said = {"sums": model.sums(Path(msgspec.json.decode(line, type=str)))}
        except Exception as error:  # SGLang's loader raises what it likes: that is the answer
            said = {"error": f"{type(error).__name__}: {error}"}  # type: ignore[dict-item]
        out.write(msgspec.json.encode(said) + b"\n")
        out.flush()


if __name__ == "__main__":
    main()
