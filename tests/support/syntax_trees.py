"""Syntax trees of Python sources, parsed once for all tests of a process."""

from __future__ import annotations

import ast
import functools
import gc


@functools.cache
def syntax_nodes(source: str) -> list[ast.AST]:
    """All nodes of the tree, the module first.

    The garbage collector stands still meanwhile and does not see the nodes afterwards: it took four
    fifths of the time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        return [*ast.walk(ast.parse(source))]
    finally:
        gc.freeze()
        if enabled:
            gc.enable()
