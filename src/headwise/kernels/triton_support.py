"""Triton, if it is installed: kernels for GPUs are decorated here, so that their modules can be
imported without it.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

triton: Any = import_module("triton") if find_spec("triton") else None
tl: Any = import_module("triton.language") if find_spec("triton") else None
IS_INTERPRETED = triton is not None and bool(triton.knobs.runtime.interpret)
if TYPE_CHECKING:
    constexpr = int
else:  # annotation of arguments for which a kernel is compiled anew
    constexpr = int if triton is None else tl.constexpr
DEVICES = {"cuda"}  # kinds of devices whose tensors Triton's kernels read


def jit(function: Callable[..., Any]) -> Any:
    """Return the function as a Triton kernel, or unchanged without Triton."""
    return function if triton is None else triton.jit(function)


def constant(value: float) -> Any:
    """Return a number that a kernel may read as a global."""
    return value if triton is None or IS_INTERPRETED else tl.constexpr(value)


def can_run_triton(device: torch.device) -> bool:
    """True if Triton is installed and has kernels for tensors of this device."""
    return triton is not None and device.type in DEVICES
