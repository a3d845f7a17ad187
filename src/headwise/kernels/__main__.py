"""Compile kernels ahead of time: `python -m headwise.kernels TASK...`, with tasks such as
`head_mixing_kernel:float32`.

Without a task, all kernels for float32 and bfloat16 are compiled. `compilation` starts this in the
background.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from itertools import chain
from pathlib import Path

from .launch import KernelSet


def find_kernel_sets() -> list[KernelSet]:
    """Return the kernel sets of all modules of this package."""
    names = sorted(
        path.stem for path in Path(__file__).parent.glob("*.py") if not path.stem.startswith("_")
    )
    modules = [
        import_module(f"{__package__}.{name}")
        for name in names
        if not name.endswith(("kernel", "kernels"))
    ]
    values = chain.from_iterable(vars(module).values() for module in modules)
    sets_by_id = {id(value): value for value in values if isinstance(value, KernelSet)}
    return list(sets_by_id.values())


def main(tasks: list[str]) -> None:
    """Compile the kernels of these tasks, or all of them."""
    for kernels in find_kernel_sets():
        for dtype in kernels.dtypes:
            if not tasks or kernels.task_name(dtype) in tasks:
                for name in kernels.functions:
                    kernels.compiled_function(name, dtype)


if __name__ == "__main__":
    os.nice(10)
    main(sys.argv[1:])
