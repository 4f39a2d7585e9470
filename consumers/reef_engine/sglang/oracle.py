"""One rank's expected sums: loads a file as the installed SGLang would, and sums up what came of it by its checksum.

Knows: SGLang's model, loader and checksum, in a process of its own, on the CPU. Must not know: any server.
Reads paths from stdin, as JSON, a line each, and answers each with a line; ends with its stdin. The answers go to a
pipe of their own, for whatever is imported here may print.
"""

from __future__ import annotations

import bisect
import os
import sys
from collections.abc import Mapping, Sequence
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
from sglang.srt.utils import weight_checker
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from consumers.reef_engine.sglang.sums import Said, Sums

SENTINEL = 0x7B
"""A byte of which no parameter consists that was loaded: what still does afterwards was not."""

HASHES = {"cpu": "sha256", "cuda": "gpu_tensor_hash"}
"""By device, which one SGLang's `tensor_hash` is; 64 bits in both."""

SCALE = "weight_scale_inv"
"""Summed up together with its weight."""


class Readings(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Which tensors of a file were read while it is active; SGLang's loaders pass by what they do not know. A view of a
    tensor reads nothing of it."""

    def __init__(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        by_place = sorted((tensor.data_ptr(), tensor.nbytes, name) for name, tensor in tensors if tensor.nbytes)
        self.places = [place for place, _, _ in by_place]
        self.sizes = [size for _, size, _ in by_place]
        self.names = [name for _, _, name in by_place]
        self.unread = set(self.names)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if not func.is_view:
            for each in tree_leaves((args, kwargs)):
                if isinstance(each, torch.Tensor):
                    self._read(each.data_ptr())
        return func(*args, **(kwargs or {}))

    def _read(self, place: int) -> None:
        found = bisect.bisect_right(self.places, place) - 1
        if found >= 0 and place < self.places[found] + self.sizes[found]:
            self.unread.discard(self.names[found])


class Model:
    """The model of one rank, on the CPU, whatever it was told to hold last."""

    def __init__(self, rank: int, port: int, flags: list[str]) -> None:
        self.rank, self.device = rank, torch.device("cpu")
        args: Any = prepare_server_args(flags)
        ranks = SpawnRanks(world_rank=spawn_world_rank(args, tp_rank=rank, pp_rank=0), gpu_id=0)
        publish(args, role="scheduler", ranks=ranks)
        initialize_moe_config()
        config = ModelConfig.from_server_args(args)
        bootstrap.init_parallel_runtime(server_args=args, device="cpu", dist_port=port)
        bootstrap.init_layer_runtime(model_config=config)
        self.model: Any = get_model(
            model_config=config, load_config=LoadConfig(load_format="dummy"), device_config=DeviceConfig("cpu")
        )
        self.checker: Any = weight_checker.WeightChecker(get_model=lambda: self.model)
        self.algorithm = f"sglang-{version('sglang')}-{HASHES[args.device]}-64"
        if args.device != "cpu":  # SGLang hashes otherwise what lies there: one tensor at a time, as the server has it
            own, there = weight_checker._hash_tensor, f"{args.device}:{args.base_gpu_id + rank * args.gpu_id_step}"
            weight_checker._hash_tensor = lambda tensor: own(tensor.to(there))

    def said(self, weights: Path) -> Said:
        for parameter in self.model.parameters():
            data = parameter.data if parameter.dim() else parameter.data.view(1)
            data.view(torch.uint8).fill_(SENTINEL)
        with safe_open(weights, "pt") as file:
            tensors = [(name, file.get_tensor(name)) for name in file.keys()]
        DefaultModelLoader.restore_weights_before_loading(self.model, self.device)
        with Readings(tensors) as readings:
            DefaultModelLoader.load_weights_and_postprocess(self.model, iter(tensors), self.device)
        if empty := [name for name, parameter in self.model.named_parameters() if _untouched(parameter.data)]:
            raise ValueError(f"the version leaves parameter {empty[0]!r} of SGLang's model empty")
        found = self.checker.handle("checksum", role="target")["checksums"]
        if passed := [name for name, _ in self.model.named_parameters() if name not in found and SCALE not in name]:
            raise ValueError(f"SGLang's checksum passes by parameter {passed[0]!r}: what it holds cannot be proven")
        return Said(Sums(self.rank, self.algorithm, found), unread=tuple(sorted(readings.unread)))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _untouched(tensor: torch.Tensor) -> bool:
    """Whether a value of it is as it was before, padding included; where values are one byte, whether all are."""
    values = (_bytes(tensor).view(-1, tensor.element_size()) == SENTINEL).all(1)
    return bool(values.all() if tensor.element_size() == 1 else values.any())


def main() -> None:
    rank, port, out, *flags = sys.argv[1:]
    model = Model(int(rank), int(port), flags)
    with os.fdopen(int(out), "wb") as answers:
        for line in sys.stdin.buffer:
            try:
                said = model.said(Path(msgspec.json.decode(line, type=str)))
            except Exception as error:  # SGLang's loader raises what it likes: that is the answer
                said = Said(error=f"{type(error).__name__}: {error}")
            answers.write(msgspec.json.encode(said) + b"\n")
            answers.flush()


if __name__ == "__main__":
    main()
