"""Changing a function of the real code for a while: its source with a piece replaced, compiled into the same function.

Knows: functions and their source. Must not know: why anything is changed. Whoever imported the function, or keeps it in
a table, has the changed one: the function stays the same object, only its code is another.
"""

from __future__ import annotations
import __future__ as future

import contextlib
import importlib
import inspect
import textwrap
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any, NamedTuple

Function = Callable[..., Any]


class Edit(NamedTuple):
    """In the function at `path` ("package.module:Class.method"), `old`, which is there exactly once, becomes `new`."""

    path: str
    old: str
    new: str


def found(path: str) -> Function:
    """The function at `path`; one that was moved or renamed raises here."""
    module, _, name = path.partition(":")
    value: Any = importlib.import_module(module)
    for part in name.split("."):
        value = getattr(value, part)
    return value.fget if isinstance(value, property) else value  # type: ignore[no-any-return, return-value]


def source(function: Function) -> str:
    return textwrap.dedent(inspect.getsource(function))


def compiled(text: str, function: Function) -> CodeType:
    """The code of the one function that `text` defines, as its module would have it."""
    flags = future.annotations.compiler_flag
    module = compile(text, str(inspect.getsourcefile(function)), "exec", flags=flags, dont_inherit=True)
    code = next(constant for constant in module.co_consts if isinstance(constant, CodeType))
    assert code.co_freevars == function.__code__.co_freevars, f"{function.__qualname__} is a closure"
    return code


def changed(edit: Edit) -> tuple[Function, CodeType]:
    function = found(edit.path)
    text = source(function)
    if text.count(edit.old) != 1:
        raise LookupError(
            f"{edit.path} holds {edit.old!r} {text.count(edit.old)} times, and not once: it was written anew. "
            "Say in tests/simulation/breakages.py how to break what it is now"
        )
    return function, compiled(text.replace(edit.old, edit.new), function)


@contextlib.contextmanager
def broken(edits: tuple[Edit, ...]) -> Iterator[None]:
    """Within this block the real code is changed so."""
    with contextlib.ExitStack() as stack:
        for edit in edits:
            function, code = changed(edit)
            stack.callback(setattr, function, "__code__", function.__code__)
            function.__code__ = code
        yield
