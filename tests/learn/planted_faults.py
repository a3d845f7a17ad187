"""Faults that are planted in functions of the product while an entry of `headwise learn` is checked.

A line of faults.txt is `id -> module.py function: old => new`: the text `old` of that function
becomes `new`. The function gets the changed code in place, so every module that imported it runs
it; nothing is written to the source tree.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from itertools import chain
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from headwise.attention import tensor_attention
from headwise.learn import measured_layers
from headwise.learn.catalogue import Entry
from mutation.lists import PACKAGE, SOURCE, dotted

TABLE = Path(__file__).with_name("faults.txt")


@dataclass(frozen=True)
class Fault:
    """A change of the text of one function; `module` is relative to the package."""

    module: str
    function: str
    old: str
    new: str

    @classmethod
    def from_text(cls, text: str) -> Fault:
        """Read `module.py function: old => new`."""
        place, _, change = text.partition(": ")
        module, _, function = place.partition(" ")
        old, arrow, new = change.partition(" => ")
        assert arrow, f"a fault is `module.py function: old => new`, not {text!r}"
        return cls(module, function, old, new)

    def changed_code(self) -> CodeType:
        """The code of the function with the change."""
        path = SOURCE / PACKAGE / self.module
        source = path.read_text("utf-8")
        node: ast.AST = ast.parse(source)
        for name in self.function.split("."):
            node = next(
                child
                for child in ast.iter_child_nodes(node)
                if isinstance(child, (ast.FunctionDef, ast.ClassDef)) and child.name == name
            )
        assert isinstance(node, ast.FunctionDef)
        lines = source.splitlines(keepends=True)
        start = node.lineno - 1
        body = "".join(lines[start : node.end_lineno])
        assert body.count(self.old) == 1, f"{self} is {body.count(self.old)} times in the function"
        changed = body.replace(self.old, self.new)
        text = "".join([*lines[:start], changed, *lines[node.end_lineno :]])
        code = compile(text, str(path), "exec")
        for name in self.function.split("."):
            code = next(
                constant
                for constant in code.co_consts
                if isinstance(constant, CodeType) and constant.co_name == name
            )
        return code

    def find_function(self) -> FunctionType:
        """The function in the imported module, below properties and other wrappers."""
        found: Any = import_module(dotted(self.module))
        for name in self.function.split("."):
            found = inspect.getattr_static(found, name)
        while not isinstance(found, FunctionType):
            found = next(
                getattr(found, name)
                for name in ("fget", "func", "__func__", "__wrapped__")
                if getattr(found, name, None) is not None
            )
        return inspect.unwrap(found)


def read_faults() -> list[tuple[str, Fault]]:
    """The id of an entry and a fault of its subject, for each line of the table."""
    lines = (line.partition(" -> ") for line in TABLE.read_text("utf-8").splitlines())
    return [(id, Fault.from_text(text)) for id, arrow, text in lines if arrow]


@contextmanager
def planted(fault: Fault) -> Iterator[None]:
    """Run the changed code of the function inside this context."""
    function = fault.find_function()
    code = function.__code__
    forget_results()
    try:
        function.__code__ = fault.changed_code()
        yield
    finally:
        function.__code__ = code
        forget_results()


def forget_results() -> None:
    """Clear what the package keeps of earlier calls: plans, tables and cached functions."""
    tensor_attention._plans.clear()
    measured_layers._reach.clear()
    measured_layers._cells.clear()
    modules = [module for name, module in sys.modules.items() if name.startswith(PACKAGE)]
    for value in chain.from_iterable(vars(module).values() for module in modules):
        if isinstance(value, functools._lru_cache_wrapper):
            value.cache_clear()


def notices(entry: Entry, fault: Fault) -> bool:
    """True if the entry is not checked as if nothing had happened: it fails, or its verdict is
    another one.
    """
    with planted(fault):
        try:
            return entry.check().verdict != entry.verdict
        except Exception:
            return True
