"""Calls as on a GPU, on machines without one: tensors without values, and dispatch that takes them
to be on CUDA.

Tensors on torch's "meta" device have shapes and dtypes only. Reading a value, which would wait for
a GPU (`.item()`, `bool()`, `nonzero`), raises an error, and so does every kernel of the CPU. Fake
tensors on the device "cuda" would do the same, but builds of torch without CUDA refuse to index
them or to give them gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
from torch import Tensor

from headwise.attention.backends import flex
from headwise.attention.backends.core_interface import CallSignature
from headwise.attention.backends.dispatch import CoreDispatch


@dataclass
class CudaCalls:
    """What ran inside `calls_on_cuda`: backends in order, and the arguments of FlexAttention's
    kernel.
    """

    backends: list[str] = field(default_factory=list)
    flex_options: list[dict[str, object]] = field(default_factory=list)


@contextmanager
def calls_on_cuda() -> Iterator[CudaCalls]:
    """Inside the context, calls with tensors on "meta" are dispatched as on CUDA.

    FlexAttention's compiled kernel is replaced by its output's shape, because it needs the device
    to compile.
    """
    calls = CudaCalls()
    post_init, select, run_compiled = (
        CallSignature.__post_init__,
        CoreDispatch.select,
        flex._run_compiled,
    )

    def as_cuda(self: CallSignature) -> None:
        if self.device == "meta":
            object.__setattr__(self, "device", "cuda")
        post_init(self)

    def record(self: CoreDispatch, *args: object) -> str:
        calls.backends.append(select(self, *args))
        return calls.backends[-1]

    def run_flex(q: Tensor, k: Tensor, v: Tensor, options: dict[str, object]) -> object:
        calls.flex_options.append(options)
        sums = q.sum(-1) + k.sum() + v.sum()
        o = sums[..., None].expand(*q.shape[:-1], v.shape[-1])
        return (o, SimpleNamespace(lse=sums)) if "return_aux" in options else o

    CallSignature.__post_init__, CoreDispatch.select, flex._run_compiled = as_cuda, record, run_flex
    try:
        yield calls
    finally:
        CallSignature.__post_init__, CoreDispatch.select, flex._run_compiled = (
            post_init,
            select,
            run_compiled,
        )


def meta_input(*shape: int) -> Tensor:
    """A tensor without values, with a gradient."""
    return torch.empty(*shape, device="meta", requires_grad=True)
