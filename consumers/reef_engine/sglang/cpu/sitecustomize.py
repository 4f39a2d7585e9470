"""Three things that SGLang 0.5.23 needs on a CPU. Python runs this by itself where this folder is on PYTHONPATH.

Knows: what SGLang imports, and torch. Must not know: us. Does nothing where torch has a GPU, and changes no file.
README.md, beside this one, says what breaks without each.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

UNPINNED = ("tensor", "zeros")  # those that --lora-backend torch_native calls


class OnImport(MetaPathFinder):
    """Asked at every import. Each thing waits for the module that needs it, so that no other process pays for torch."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        prepare = NEEDED_BY.get(name)
        if prepare is None:
            return None
        import torch

        return None if torch.cuda.is_available() else prepare(torch)


def kernels(torch: Any) -> ModuleSpec | None:
    """SGLang imports compiled kernels by name, and without AMX calls none of them. Real ones win, if there are any."""
    return PathFinder.find_spec("sgl_kernel") or ModuleSpec("sgl_kernel", NoKernels())


class NoKernels(Loader):
    """Makes a module in which every name is a function that, once called, says that it is missing."""

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__getattr__"] = no_kernel


def no_kernel(name: str) -> Callable[..., None]:
    if name.startswith("__"):
        raise AttributeError(name)

    def kernel(*args: object, **kwargs: object) -> None:
        raise NotImplementedError(f"sgl_kernel.{name}: there is no such kernel for a CPU without AMX")

    return kernel


def image_operators(torch: Any) -> None:
    """torchvision describes these two, which the library beside it should declare; but that loads only with CUDA."""
    if not sys.modules["torchvision.extension"]._has_ops():
        DECLARED.append(torch.library.Library("torchvision", "DEF"))
        for name in ("nms", "qnms"):
            DECLARED[0].define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


DECLARED: list[Any] = []
"""What was declared goes with its object, so it stays here."""


def unpinned_memory(torch: Any) -> None:
    """SGLang's LoRA code wants memory that a GPU could read directly, and without a GPU torch refuses to give it."""
    for name in UNPINNED:
        setattr(torch, name, without_pin_memory(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda tensor, device=None: tensor


def without_pin_memory(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def made(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
        return make(*args, **kwargs)

    return made


NEEDED_BY: dict[str, Callable[[Any], ModuleSpec | None]] = {
    "sgl_kernel": kernels,
    "sglang.srt.lora": unpinned_memory,
    "torchvision._meta_registrations": image_operators,
}
sys.meta_path.insert(0, OnImport())
