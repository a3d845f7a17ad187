"""What `coverage.py` compares: what a model says, its own weights, and those that were captured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from headwise.inspect.adapters import transformers_interface
from headwise.inspect.hooks import AttentionCall, WeightsOnlyCall


class Keep:
    """A watcher that keeps the first of what an attention worked with, and of what its heads said."""

    needs_call = True

    def __init__(self) -> None:
        self.seen: AttentionCall | None = None
        self.said: Tensor | None = None

    def on_call(self, seen: AttentionCall) -> None:
        """Keep it."""
        self.seen = self.seen or seen

    def on_head_outputs(self, z: Tensor) -> None:
        """Keep it."""
        self.said = z.detach().clone() if self.said is None else self.said


@contextmanager
def own_weights() -> Iterator[dict[int, Tensor]]:
    """What the functions of the interface give as weights, by module."""
    given: dict[int, Tensor] = {}
    original = transformers_interface._call_with_hooks

    def noting(function: Any, name: str, module: nn.Module, *said: Any, **more: Any) -> Any:
        def also(*a: Any, **k: Any) -> Any:
            got = function(*a, **k)
            if isinstance(got[1], Tensor):
                given.setdefault(id(module), got[1])
            return got

        return original(also, name, module, *said, **more)

    transformers_interface._call_with_hooks = noting
    try:
        yield given
    finally:
        transformers_interface._call_with_hooks = original


def tensors(said: Any) -> Iterator[Tensor]:
    """All numbers that a model gives."""
    if isinstance(said, Tensor):
        if said.is_floating_point():
            yield said.detach().float()
    elif isinstance(said, (dict, list, tuple)):
        for value in said.values() if isinstance(said, dict) else said:
            yield from tensors(value)


def run(model: nn.Module, told: dict[str, Tensor], **more: Any) -> Any:
    """What a model says; some draw."""
    torch.manual_seed(2)
    return model(**told, **more)


def difference(said: Any, other: Any) -> float:
    """The largest of what two runs give, by the largest number there is."""
    pairs = [(one, two) for one, two in zip(tensors(said), tensors(other), strict=True) if one.numel()]
    largest = max([1.0, *(float(two[two.isfinite()].abs().max()) for _, two in pairs if two.isfinite().any())])
    return max(float((one - two).nan_to_num(0, 0, 0).abs().max()) for one, two in pairs) / largest


def attentions(model: nn.Module, told: dict[str, Tensor]) -> list[Tensor]:
    """What a model gives as its weights when it is asked."""
    try:
        said = run(model, told, output_attentions=True)
    except TypeError:
        return []
    grids = [value for key, value in said.items() if "attentions" in key]
    return [grid for grid in tensors(grids) if grid.dim() == 4]


def apart(core: AttentionCall, own: Tensor) -> float:
    """How far weights are from a model's own; a band is compared diagonal by diagonal."""
    if isinstance(core, WeightsOnlyCall) and own.shape[:2] != core.weights.shape[:2]:
        return torch.inf
    if isinstance(core, WeightsOnlyCall) and own.shape[2:] != core.weights.shape[2:]:
        wide, (length, keys) = core.weights, own.shape[2:]  # the band: keys from so many before to as many behind
        if length > min(wide.shape[-2:]) or keys % 2 == 0:
            return torch.inf
        cells = [(t, t + n - keys // 2, n) for t in range(length) for n in range(keys)]
        return max(float((wide[..., t, s] - own[..., t, n]).abs().max()) for t, s, n in cells if 0 <= s < length)
    rows = [core.head_weights(head).float() for head in range(own.shape[1])]
    same = all(row.shape == own[:, 0].shape for row in rows)
    return max(float((row - own[:, n].float()).abs().max()) for n, row in enumerate(rows)) if same else torch.inf
