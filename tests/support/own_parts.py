"""A part that is not headwise's own, in a Python file, and forgetting such parts after a test."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headwise.attention.interfaces import part
from headwise.attention.interfaces.part import REGISTRY

TEMPERATURE = '''
"""A temperature for every head."""

from headwise.attention.interfaces import ScoreStep
from headwise.attention.interfaces.core_types import AxisLayout
from headwise.attention.interfaces.core_types import Param
from headwise.attention.interfaces.part import part
from headwise.attention.parts.initialisers import zeros_init


@part
class Temperature(ScoreStep):
    """s_h -> s_h / exp(a_h + start)."""

    start: float = 0.0

    def params(self, spec):
        return {"log": Param(AxisLayout.parse("q"), zeros_init)}

    def score(self, s, position, factors, p):
        return s * (-p["log"] - self.start).exp().to(s.dtype)
'''


def write_part(folder: Path, name: str = "temperature") -> Path:
    """Write the file of `Temperature` and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.py"
    path.write_text(TEMPERATURE)
    return path


@contextmanager
def forget_parts() -> Iterator[None]:
    """Forget all parts and modules that the block adds."""
    parts, modules, paths = set(REGISTRY), set(sys.modules), list(sys.path)
    try:
        yield
    finally:
        own = [name for name, cls in REGISTRY.items() if not cls.__module__.startswith("headwise.")]
        added = {name: REGISTRY.pop(name) for name in set(own) - parts}
        for name in set(sys.modules) - modules:
            if name in {cls.__module__ for cls in added.values()}:
                del sys.modules[name]
        sys.path[:] = paths
        part.IMPORTED_FILES.clear()
