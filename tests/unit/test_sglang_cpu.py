"""The shims for SGLang on a CPU, without SGLang: what each does, and that none does anything beside a GPU.

Knows: Python's import system, a torch that is replaced. Must not know: whether they suffice (tests/sglang does).
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import consumers.reef_engine.sglang as ours

CPU = Path(ours.__file__).parent / "cpu"
NAMES = ("sgl_kernel", "sglang.srt.lora", "torchvision._meta_registrations")


class Torch(ModuleType):
    """Notes what is declared in it; refuses pinned memory, as torch does without a GPU."""

    def __init__(self, gpu: bool) -> None:
        super().__init__("torch")
        self.declared: list[str] = []
        self.cuda = SimpleNamespace(is_available=lambda: gpu)
        self.library = SimpleNamespace(Library=lambda *_: SimpleNamespace(define=self.declared.append))
        self.Tensor = type("Tensor", (), {"pin_memory": None})
        self.tensor = self.zeros = self.ones = self._make

    def _make(self, *shape: int, dtype: str = "", pin_memory: bool = False) -> Any:
        assert not pin_memory
        return shape, dtype


@pytest.fixture
def torch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Torch:
    torch = Torch(gpu=getattr(request, "param", False))
    monkeypatch.setitem(sys.modules, "torch", torch)
    return torch


@pytest.fixture
def shims(torch: Torch, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    spec = importlib.util.spec_from_file_location("shims", CPU / "sitecustomize.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.modules.pop("sgl_kernel", None)


def vision(monkeypatch: pytest.MonkeyPatch, loads: bool) -> None:
    extension = SimpleNamespace(_has_ops=lambda: loads)
    monkeypatch.setitem(sys.modules, "torchvision.extension", extension)  # type: ignore[arg-type]


@pytest.mark.parametrize("torch", [True], indirect=True)
def test_beside_a_gpu_nothing_is_changed(shims: Any, torch: Torch, monkeypatch: pytest.MonkeyPatch) -> None:
    vision(monkeypatch, loads=False)
    assert [sys.meta_path[0].find_spec(name, None) for name in NAMES] == [None] * 3
    assert torch.declared == [] and torch.tensor == torch.zeros == torch._make
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("sgl_kernel")


def test_other_imports_are_left_alone_and_do_not_bring_torch() -> None:
    code = "import json, sys; assert 'shims' not in sys.modules; sys.exit('torch' in sys.modules)"
    assert "sitecustomize" in run(f"import sitecustomize; print(sitecustomize.__file__); {code}")


def test_a_kernel_is_there_by_name_and_says_what_is_missing_when_it_is_called(shims: Any) -> None:
    kernels = importlib.import_module("sgl_kernel")
    with pytest.raises(NotImplementedError, match=r"sgl_kernel\.copy_cpu"):
        kernels.copy_cpu(1, two=2)
    assert not hasattr(kernels, "__version__")


def test_real_kernels_win(shims: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sgl_kernel.py").write_text("real = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert importlib.import_module("sgl_kernel").real is True


def test_operators_are_declared_where_torchvisions_own_do_not_load(
    shims: Any, torch: Torch, monkeypatch: pytest.MonkeyPatch
) -> None:
    for loads in (True, False):
        vision(monkeypatch, loads)
        assert sys.meta_path[0].find_spec(NAMES[2], None) is None
        assert [line.partition("(")[0] for line in torch.declared] == ([] if loads else ["nms", "qnms"])


def test_memory_is_not_pinned_once_lora_is_imported(shims: Any, torch: Torch) -> None:
    assert sys.meta_path[0].find_spec(NAMES[1], None) is None
    for make in (torch.tensor, torch.zeros):
        assert make(2, dtype="int32", pin_memory=True) == ((2,), "int32")
    tensor = torch.Tensor()
    assert tensor.pin_memory() is tensor  # type: ignore[misc]
    assert torch.ones == torch._make


def test_the_folder_holds_nothing_that_python_could_take_for_another_module() -> None:
    assert {path.name for path in CPU.iterdir()} - {"__pycache__"} == {"README.md", "sitecustomize.py"}


def test_each_line_of_its_environment_names_one_version_here_or_in_the_constraints() -> None:
    """pip would install the newest of what neither pins, and is told to look for no dependency that is missing."""
    deploy = CPU.parents[3] / "deploy"
    wanted, pins = (lines(deploy / name) for name in ("sglang-cpu.txt", "constraints.txt"))
    assert {name for name, pinned in wanted.items() if not pinned} <= pins.keys()
    assert {name for name, pinned in wanted.items() if pinned} & pins.keys() == set()


def lines(path: Path) -> dict[str, str]:
    texts = (line.partition("#")[0].strip() for line in path.read_text().splitlines())
    return {name: pinned for name, _, pinned in (text.partition("==") for text in texts if text)}


def run(code: str) -> str:
    environment = {"PYTHONPATH": str(CPU), "PATH": ""}
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout
