"""The sum of a tensor on a GPU, worked out without one, held against SGLang's own kernel in Triton's interpreter.

Knows: where SGLang keeps the kernel. Must not know: models.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from consumers.reef_engine.sglang.gpu_sum import TILE, gpu_sum

THEIRS = """
import importlib.util, json, sys, torch
spec = importlib.util.spec_from_file_location("theirs", sys.argv[1])
theirs = importlib.util.module_from_spec(spec)
spec.loader.exec_module(theirs)
tensors = torch.load(sys.argv[2])
print(json.dumps([theirs.gpu_tensor_hash(each, use_cg=False) for each in tensors]))
"""


def test_it_is_the_sum_of_sglangs_own_kernel(tmp_path: Path) -> None:
    """Without its assertions (-O) that what it is given lies on a GPU."""
    some = torch.Generator().manual_seed(1)
    shapes = [(), (1,), (7,), (16, 64), (TILE,), (TILE + 1,), (3 * TILE + 17,), (300, 301), (0,)]
    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64]
    tensors = [(torch.randn(shape, generator=some) * 9).to(dtype) for shape in shapes for dtype in dtypes]
    torch.save(tensors, tmp_path / "tensors")
    package = importlib.util.find_spec("sglang")
    assert package is not None and package.submodule_search_locations is not None
    kernel = Path(package.submodule_search_locations[0], "kernels", "ops", "memory", "gpu_tensor_hash.py")
    said = subprocess.run(
        [sys.executable, "-O", "-c", THEIRS, str(kernel), str(tmp_path / "tensors")],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        check=True,
        capture_output=True,
        timeout=300,
    )
    ours = [gpu_sum(each.contiguous().view(-1).view(torch.uint8).numpy()) for each in tensors]
    assert json.loads(said.stdout) == ours and len(set(ours)) > 40
