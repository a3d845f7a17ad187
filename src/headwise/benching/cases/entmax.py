"""Sparse weights of long rows: entmax 1.5 of 4,096 rows of 1,024 scores."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ...presets import design
from ..case import Absent, Aim, Case, Need, Run
from ..others import given

TITLE = "Entmax 1.5, 4,096 rows of 1,024 scores"
ROWS, KEYS = 4096, 1024
PACKAGE, SOFTMAX = "entmax package (entmax15)", "softmax, for scale"
Weigh = Callable[[Tensor], Tensor]


def cases(quick: bool) -> Iterator[Case]:
    """Forward, and forward with backward: by the kernel, in plain tensor operations, and these compiled."""
    part = design(preset="entmax", model=64, heads=1).normaliser
    allowed = torch.ones(1, 1, 1, KEYS, dtype=torch.bool)
    ways: list[tuple[str, Weigh, float]] = [
        ("kernel", lambda s: part.fused(s, allowed, None), 20.0),
        ("plain tensor operations", lambda s: part.normalise(s, allowed, None), 2.0),
    ]
    if not quick and any(map(shutil.which, ("c++", "g++", "clang++"))):
        plain: Any = torch.compile(part.normalise, dynamic=False)
        ways.append(("plain tensor operations compiled", lambda s: plain(s, allowed, None), 20.0))
    for name, weigh, times in ways:
        for backward in (False, True):
            yield _case(name, weigh, times, backward)


def _case(name: str, ours: Weigh, times: float, backward: bool) -> Case:
    torch.manual_seed(0)
    s, grad = torch.randn(1, 1, ROWS, KEYS), torch.randn(1, 1, ROWS, KEYS)
    how: Callable[[Weigh], Run] = (
        (lambda weigh: _both(weigh, s, grad)) if backward else (lambda weigh: lambda: weigh(s))
    )
    peers: dict[str, Run | Absent] = {
        PACKAGE: given("entmax", lambda library: how(lambda s: library.entmax15(s, dim=-1))),
        "entmax package (entmax_bisect)": given("entmax", lambda library: how(lambda s: library.entmax_bisect(s, 1.5))),
        SOFTMAX: how(lambda s: s.softmax(-1)),
    }
    title = f"{name}, {'forward and backward' if backward else 'forward'}"
    need = Need(reads=s.nbytes * (3 if backward else 1))
    return Case(title, how(ours), peers, (Aim(PACKAGE, times),), need, beside=(SOFTMAX,))


def _both(weigh: Weigh, s: Tensor, grad: Tensor) -> Run:
    s = s.clone().requires_grad_()
    return lambda: torch.autograd.grad(weigh(s), s, grad)[0]
