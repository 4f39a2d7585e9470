"""Does anything notice? The core changed in one small place at a time, against its unit tests and then the simulation.

Knows: syntax. Must not know: what any function is for. A mutant that nothing notices is a missing test, or is
equivalent: then it is as right as what it replaces, and a person says why.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import difflib
import json
import os
import random
import resource
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

import pytest
from _pytest.runner import runtestprotocol

from tests.simulation.patching import compiled, found
from tests.simulation.searches import ADAPTED, DRAWN, FLEET

ROOT = Path(__file__).parents[2]
CORE = ROOT / "reef_bus" / "core"
NAMES = (
    *("ids", "world", "void", "reactions", "serving", "requests", "rollback", "base_chain", "ambiguity", "recovery"),
    *("staged", "records", "invariants", "start", "adapters", "residency", "memory"),
)
UNITS = [str(path) for name in NAMES for path in sorted((ROOT / "tests" / "unit").glob(f"test_{name}*.py"))]
PER_MODULE, SIMULATED, ROAMED = 12, 4, 40
WORKERS, CPU_S, MEMORY = 2, 40, 4 << 30
ENDLESS = "it never ends"

Node = Any
Change = tuple[str, Callable[[], None]]
"""What is changed, and how to change it in the tree at hand."""


class Mutant(NamedTuple):
    module: str
    path: str  # "package.module:function"
    kind: str
    line: int
    text: str
    diff: str


class Verdict(NamedTuple):
    mutant: Mutant
    by: str  # units, simulation, or nothing
    what: str


# -- making mutants

SWAPPED = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq},
    **{ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is},
}
EMPTY = {"str": "''", "bool": "False", "int": "0", "list": "[]", "tuple": "()", "dict": "{}", "set": "set()"}


def mutants(file: Path) -> list[Mutant]:
    """Every mutant of every function of a module, in the order of its lines."""
    text = file.read_text()
    module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
    return [
        mutant
        for name, function in _functions(ast.parse(text))
        for mutant in _of_function(module, f"{module}:{name}", function)
    ]


def _functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        if isinstance(node, ast.ClassDef):
            yield from ((f"{node.name}.{each.name}", each) for each in node.body if isinstance(each, ast.FunctionDef))


def _of_function(module: str, path: str, function: ast.FunctionDef) -> Iterator[Mutant]:
    before = ast.unparse(function)
    for place in range(sum(1 for _ in ast.walk(function))):
        for number in range(len(list(_changes(function, _node(function, place))))):
            tree = copy.deepcopy(function)
            node = _node(tree, place)
            kind, change = list(_changes(tree, node))[number]
            change()
            text = ast.unparse(ast.fix_missing_locations(tree))
            if text != before:
                line = getattr(_node(function, place), "lineno", function.lineno)
                yield Mutant(module, path, kind, line, text, _diff(before, text))


def _node(tree: ast.AST, place: int) -> Node:
    return next(node for number, node in enumerate(ast.walk(tree)) if number == place)


def _diff(before: str, after: str) -> str:
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), n=0, lineterm="")
    return "\n".join(line for line in lines if not line.startswith(("---", "+++", "@@")))


def _changes(function: ast.FunctionDef, node: Node) -> Iterator[Change]:
    if isinstance(node, ast.If | ast.IfExp | ast.While):
        yield "negate a condition", lambda: setattr(node, "test", ast.UnaryOp(ast.Not(), node.test))
    if isinstance(node, ast.comprehension):
        for number, test in enumerate(node.ifs):
            yield "negate a condition", _put(node.ifs, number, ast.UnaryOp(ast.Not(), test))
    if isinstance(node, ast.BoolOp):
        for number in range(len(node.values)):
            yield "drop a clause", lambda number=number: node.values.pop(number)  # type: ignore[misc]
    if isinstance(node, ast.Compare):
        yield from (
            (f"swap {type(op).__name__}", _put(node.ops, n, SWAPPED[type(op)]())) for n, op in enumerate(node.ops)
        )
    if isinstance(node, ast.Return) and node.value is not None:
        yield "return nothing", lambda: setattr(node, "value", _empty(function))
    if isinstance(node, ast.Constant) and type(node.value) is int:
        yield "off by one", lambda: setattr(node, "value", node.value + 1)
    yield from _dropped(node)


def _put(places: list[Any], number: int, value: Node) -> Callable[[], None]:
    return lambda: places.__setitem__(number, value)


def _empty(function: ast.FunctionDef) -> ast.expr:
    said = ast.unparse(function.returns) if function.returns else ""
    return ast.parse(EMPTY.get(said.partition("[")[0], "None"), mode="eval").body


def _dropped(node: Node) -> Iterator[Change]:
    for field in ("body", "orelse"):
        block = getattr(node, field, None)
        for number, statement in enumerate(block if isinstance(block, list) else []):
            if _acts(statement):
                yield f"drop {ast.unparse(statement)}"[:60], _put(block, number, ast.Pass())  # type: ignore[arg-type]


def _acts(statement: ast.stmt) -> bool:
    """It does something that its function goes on without: a call, or a change of what is somebody's."""
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Call)
    if isinstance(statement, ast.AugAssign):
        return True
    if isinstance(statement, ast.Assign):
        return any(not isinstance(each, ast.Name) for target in statement.targets for each in _targets(target))
    return False


def _targets(target: ast.expr) -> list[ast.expr]:
    return list(target.elts) if isinstance(target, ast.Tuple) else [target]


def sample(module: str, limit: int, seed: int) -> list[Mutant]:
    """Some of each module's mutants, drawn by the seed; all of them where there are fewer."""
    drawn = []
    for file in sorted(CORE.rglob("*.py")):
        every = mutants(file) if module in str(file.relative_to(CORE)) else []
        drawn += random.Random(f"{seed} {file.relative_to(CORE)}").sample(every, min(limit, len(every)))
    return drawn


# -- trying them: each in a process of its own


class Trial:
    """A pytest plugin: what it collected once is run for every mutant, in a fork that has that mutant in its code."""

    def __init__(self, chosen: list[Mutant]) -> None:
        self.chosen = chosen
        self.verdicts: list[Verdict] = []
        self.running: dict[int, tuple[Mutant | None, int]] = {}

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self._begin(session.items, None)
        self._end()
        if self.verdicts.pop().by:
            raise pytest.UsageError("something fails without any mutant: run the unit tests first")
        for mutant in self.chosen:
            if len(self.running) == WORKERS:
                self._end()
            self._begin(session.items, mutant)
        while self.running:
            self._end()
        return True

    def _begin(self, items: list[pytest.Item], mutant: Mutant | None) -> None:
        out, into = os.pipe()
        if pid := os.fork():
            os.close(into)
            self.running[pid] = mutant, out
            return
        status = 70
        try:
            resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
            _try(items, mutant, into)
            status = 0
        finally:
            os._exit(status)

    def _end(self) -> None:
        pid, status = os.wait()
        mutant, out = self.running.pop(pid)
        with os.fdopen(out) as said:
            *phases, last = said.read().splitlines()
        if status:
            phases, last = [*phases, last], f"{ENDLESS} (wait status {status})"
        by = phases[-1] if last else ""
        self.verdicts.append(Verdict(mutant, by, last))  # type: ignore[arg-type]
        if mutant:
            print(f"{by or 'SURVIVED':10} {mutant.path}:{mutant.line} {mutant.kind}", file=sys.__stderr__, flush=True)


def _try(items: list[pytest.Item], mutant: Mutant | None, into: int) -> None:
    """Say which phase it is, and what caught it there; an empty line if nothing did."""
    if mutant:
        function, code = coded(mutant)
        function.__code__ = code
    for phase, catch in (("units", lambda: _units(items)), ("simulation", _simulation)):
        os.write(into, f"{phase}\n".encode())
        if what := catch():
            os.write(into, f"{what}\n".encode())
            return
    os.write(into, b"\n")


def coded(mutant: Mutant) -> tuple[Callable[..., Any], CodeType]:
    function = found(mutant.path)
    return function, compiled(mutant.text, function)


def _units(items: list[pytest.Item]) -> str:
    """The first test that fails."""
    for item, after in zip(items, [*items[1:], None], strict=True):
        if any(report.failed for report in runtestprotocol(item, log=False, nextitem=after)):
            return item.nodeid
    return ""


def _simulation() -> str:
    """The first seed that finds something; the small machine's are cheap, and come first."""
    for name, search, seeds in (("fleet", FLEET, ROAMED), ("seed", DRAWN, SIMULATED), ("adapters", ADAPTED, SIMULATED)):
        for seed in range(seeds):
            try:
                wrong = search(seed)
            except Exception as error:  # the small machine runs the core itself, where a mutant may raise anything
                wrong = f"{type(error).__name__}: {error}"
            if wrong:
                return f"{name} {seed}: {' '.join(wrong.split())[:100]}"
    return ""


# -- the command


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.mutants", description=__doc__)
    parser.add_argument("--module", default="", help="only modules of reef_bus/core with this in their path")
    parser.add_argument("--limit", type=int, default=PER_MODULE, help="how many mutants of each module")
    parser.add_argument("--seed", type=int, default=0, help="which ones")
    parser.add_argument("--json", action="store_true", help="every verdict as JSON")
    asked = parser.parse_args()
    trial = Trial(sample(asked.module, asked.limit, asked.seed))
    with contextlib.redirect_stdout(sys.stderr):
        status = pytest.main(["-q", "-p", "no:cacheprovider", "--no-header", "--no-summary", *UNITS], plugins=[trial])
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        return 2
    print(json.dumps([_report(each) for each in trial.verdicts]) if asked.json else _table(trial.verdicts))
    return 0


def _report(verdict: Verdict) -> dict[str, object]:
    return {**verdict.mutant._asdict(), "by": verdict.by or "nothing", "what": verdict.what}


def _table(verdicts: list[Verdict]) -> str:
    count = Counter((each.mutant.module, each.by or "nothing") for each in verdicts)
    lines = [f"{'module':45} {'units':>10} {'simulation':>10} {'survived':>10}"]
    for module in dict.fromkeys(each.mutant.module for each in verdicts):
        cells = " ".join(f"{count[module, by]:10}" for by in ("units", "simulation", "nothing"))
        lines.append(f"{module:45} {cells}")
    total = Counter(each.by or "nothing" for each in verdicts)
    lines.append(f"{len(verdicts)} mutants: {dict(total)}")
    for each in verdicts:
        if not each.by:
            lines.append(
                f"\nsurvived: {each.mutant.path}, line {each.mutant.line}: {each.mutant.kind}\n{each.mutant.diff}"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
