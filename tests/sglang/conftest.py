"""What the tests of SGLang share: the installed package, made importable on a CPU as a server's process makes it.

Knows: the folder of shims, and that SGLang's imports warn. Must not know: what is tested.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import sys
import warnings
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import ModuleType

import pytest
import pytest_asyncio
import torch

import consumers.reef_engine.sglang as ours
from tests.sglang.subject import Subject, running

if importlib.util.find_spec("sglang") is None:
    raise pytest.UsageError(f"{sys.executable} has no sglang: run `make test-sglang`, which has an environment for it")

CPU = Path(ours.__file__).parent / "cpu"

# Read when sglang and transformers are imported; nothing here may ask the network for a model.
os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
if not torch.cuda.is_available():
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def subject(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Subject]:
    """One server for all tests: it takes half a minute to start."""
    async with running(tmp_path_factory.mktemp("sglang")) as found:
        yield found
        assert found.died == []


@pytest.fixture(scope="session")
def imported() -> Callable[[str], ModuleType]:
    """Imports a module of SGLang, or of what it brings. Their own deprecations are not our errors."""
    _run_shims()
    _keep_swigs_types()

    def load(name: str) -> ModuleType:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(name)

    return load


def _run_shims() -> None:
    """Python would do it at its start, were the folder on PYTHONPATH. This process has a sitecustomize already."""
    spec = importlib.util.spec_from_file_location("shims", CPU / "sitecustomize.py")
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


def _keep_swigs_types() -> None:
    """sentencepiece 0.2.1 frees SWIG's table of types when Python has already torn down what that needs: the process
    ends by SIGSEGV after the last test. A reference too many keeps the table for ever."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("sentencepiece")
    for name, module in sys.modules.items():
        if name.startswith("swig_runtime_data"):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(vars(module)["type_pointer_capsule"]))
