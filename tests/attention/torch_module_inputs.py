"""Torch's own test inputs of nn.MultiheadAttention, run on headwise's class: a script, because they
set global flags.

`python torch_module_inputs.py` prints how many inputs were compared, or raises.
"""

from __future__ import annotations

import sys
import types
import unittest
from typing import Any

import torch
from torch import Tensor, nn

from headwise.attention import MultiheadAttention


def load_inputs(dtype: torch.dtype) -> list[Any]:
    """The inputs of torch's tests of modules; they import expecttest only for the base class of the
    test cases.
    """
    if "expecttest" not in sys.modules:
        expecttest: Any = types.ModuleType("expecttest")
        expecttest.TestCase = unittest.TestCase
        sys.modules["expecttest"] = expecttest
    from torch.testing._internal.common_modules import module_db

    info = next(each for each in module_db if each.module_cls is nn.MultiheadAttention)
    return info.module_inputs_func(info, "cpu", dtype, True, True)


def run(module: nn.Module, call: Any) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    """Output and weights of a call, and the gradients of its inputs and parameters."""
    inputs = [argument.detach().clone().requires_grad_() for argument in call.args]
    results = module(*inputs, **call.kwargs)
    sum(result.square().sum() for result in results).backward()
    return results, [tensor.grad for tensor in (*inputs, *module.parameters())]


def compare(case: Any, dtype: torch.dtype) -> None:
    """One of torch's inputs: outputs, weights and gradients of both classes, and torch's reference
    without a batch.
    """
    made, call = case.constructor_input, case.forward_input
    theirs = nn.MultiheadAttention(*made.args, **made.kwargs, dtype=dtype)
    ours = MultiheadAttention(*made.args, **made.kwargs, dtype=dtype)
    ours.load_state_dict(theirs.state_dict())
    torch.testing.assert_close(run(ours, call), run(theirs, call))
    reference = case.reference_fn(ours, *call.args, **call.kwargs)
    torch.testing.assert_close(ours(*call.args, **call.kwargs), reference)


def main() -> None:
    """Compare all inputs in both dtypes of torch's tests."""
    torch.manual_seed(0)
    count = 0
    for dtype in (torch.float32, torch.float64):
        for case in load_inputs(dtype):
            compare(case, dtype)
            count += 1
    print(count)


if __name__ == "__main__":
    main()
