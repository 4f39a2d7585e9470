"""The import rules of the architecture, held against the code as it is.

Knows: the source tree, import-linter's contracts in pyproject.toml. Must not know: what any module does.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CORE = sorted((ROOT / "reef_bus" / "core").rglob("*.py"))
MODULES = sorted(path for folder in ("reef_bus", "consumers", "deploy") for path in (ROOT / folder).rglob("*.py"))
EXTRAS = {"aiohttp", "backports", "fsspec", "numpy", "prometheus_client", "psutil", "rich", "safetensors", "torch"}
EXTRAS |= {"jinja2", "peft", "tokenizers", "transformers", "xxhash", "yaml"}
IMPURE_BUILTINS = {"eval", "exec", "hash", "id", "input", "open", "print"}  # hash and id differ between processes
CORE_MAY_IMPORT = {"msgspec", "reef_bus.core", "reef_bus.errors", "reef_bus.events"}


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imported(path: Path) -> Iterator[str]:
    """Every module that a file imports, wherever in the file; `from reef_bus import events` is reef_bus.events."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            parent = node.module or ""
            yield from (f"reef_bus.{alias.name}" for alias in node.names) if parent == "reef_bus" else (parent,)


def core_may_import(module: str) -> bool:
    own = any(module == allowed or module.startswith(allowed + ".") for allowed in CORE_MAY_IMPORT)
    return own or module.partition(".")[0] in sys.stdlib_module_names


def loaded_after(code: str) -> set[str]:
    """Top-level modules of a fresh interpreter that ran `code` from the checkout."""
    script = f"{code}\nimport sys, json; print(json.dumps(sorted({{m.partition('.')[0] for m in sys.modules}})))"
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_the_import_contracts_of_pyproject_hold() -> None:
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()", "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", CORE, ids=name)
def test_the_core_imports_only_the_standard_library_msgspec_events_and_errors(path: Path) -> None:
    assert [module for module in imported(path) if not core_may_import(module)] == []


@pytest.mark.parametrize("path", CORE, ids=name)
def test_the_core_calls_no_impure_builtin(path: Path) -> None:
    calls = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    assert [(f.id, f.lineno) for f in calls if isinstance(f, ast.Name) and f.id in IMPURE_BUILTINS] == []


def test_importing_the_library_loads_no_extra() -> None:
    assert loaded_after("import reef_bus") & EXTRAS == set()


def test_importing_the_command_line_loads_no_extra() -> None:
    assert loaded_after("import reef_bus.cli") & EXTRAS == set()


def test_peft_is_for_whoever_trains_adapters_alone() -> None:
    """It brings transformers: 124 MiB of memory, and some four seconds of every start."""
    engine = loaded_after("import consumers.reef_engine.torch_backend, consumers.reef_trainer.torch_backend")
    assert "torch" in engine and not engine & {"peft", "transformers", "accelerate"}
    assert "torch" not in loaded_after("import reef_bus.peft_folder")


def test_the_artifact_store_loads_fsspec_for_a_url_only() -> None:
    assert "fsspec" not in loaded_after("from reef_bus.artifacts import ArtifactStore; import reef_bus.backup")


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_a_module_stops_at_450_lines(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 450
