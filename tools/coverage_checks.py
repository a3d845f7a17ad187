"""Comparisons of `coverage_page.py`: outputs of two runs, and captured attention weights with those of the model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from headwise.inspect.adapters import transformers_interface
from headwise.inspect.hooks import ObservedCall, WeightsOnlyCall


class Recorder:
    """Hook that records the first call of an attention layer and its first head outputs."""

    needs_call = True

    def __init__(self) -> None:
        self.call: ObservedCall | None = None
        self.outputs: Tensor | None = None

    def on_call(self, call: ObservedCall) -> None:
        """Record the first call."""
        self.call = self.call or call

    def on_head_outputs(self, z: Tensor) -> None:
        """Record the first head outputs."""
        self.outputs = z.detach().clone() if self.outputs is None else self.outputs


@contextmanager
def record_own_weights() -> Iterator[dict[int, Tensor]]:
    """Yield a dictionary that collects the weights returned by attention functions, by the id of the module."""
    weights: dict[int, Tensor] = {}
    original = transformers_interface._call_with_hooks

    def call_and_record(function: Any, name: str, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        def recording(*args: Any, **kwargs: Any) -> Any:
            outputs = function(*args, **kwargs)
            if isinstance(outputs[1], Tensor):
                weights.setdefault(id(module), outputs[1])
            return outputs

        return original(recording, name, module, *args, **kwargs)

    transformers_interface._call_with_hooks = call_and_record
    try:
        yield weights
    finally:
        transformers_interface._call_with_hooks = original


def tensors(outputs: Any) -> Iterator[Tensor]:
    """Yield every floating-point tensor in the outputs of a model."""
    if isinstance(outputs, Tensor):
        if outputs.is_floating_point():
            yield outputs.detach().float()
    elif isinstance(outputs, (dict, list, tuple)):
        for value in outputs.values() if isinstance(outputs, dict) else outputs:
            yield from tensors(value)


def run(model: nn.Module, inputs: dict[str, Tensor], **options: Any) -> Any:
    """Run a model from a fixed seed, because some models sample."""
    torch.manual_seed(2)
    return model(**inputs, **options)


def output_difference(outputs: Any, expected: Any) -> float:
    """Return the largest difference of two outputs, relative to the largest number (at least 1)."""
    pairs = [(a, b) for a, b in zip(tensors(outputs), tensors(expected), strict=True) if a.numel()]
    largest = max([1.0, *(float(b[b.isfinite()].abs().max()) for _, b in pairs if b.isfinite().any())])
    return max(float((a - b).nan_to_num(0, 0, 0).abs().max()) for a, b in pairs) / largest


def output_attentions(model: nn.Module, inputs: dict[str, Tensor]) -> list[Tensor]:
    """Return the weights of a model with output_attentions=True; none if it lacks this option."""
    try:
        outputs = run(model, inputs, output_attentions=True)
    except TypeError:
        return []
    weights = [value for key, value in outputs.items() if "attentions" in key]
    return [tensor for tensor in tensors(weights) if tensor.dim() == 4]


def weight_error(core: ObservedCall, own: Tensor) -> float:
    """Return the largest error of captured weights; those of a sliding window are compared by diagonal."""
    if isinstance(core, WeightsOnlyCall) and own.shape[:2] != core.weights.shape[:2]:
        return torch.inf
    if isinstance(core, WeightsOnlyCall) and own.shape[2:] != core.weights.shape[2:]:
        wide, (length, keys) = core.weights, own.shape[2:]  # a window of keys centred on the query
        if length > min(wide.shape[-2:]) or keys % 2 == 0:
            return torch.inf
        cells = [(t, t + n - keys // 2, n) for t in range(length) for n in range(keys)]
        return max(float((wide[..., t, s] - own[..., t, n]).abs().max()) for t, s, n in cells if 0 <= s < length)
    rows = [core.head_weights(head).float() for head in range(own.shape[1])]
    same = all(row.shape == own[:, 0].shape for row in rows)
    return max(float((row - own[:, n].float()).abs().max()) for n, row in enumerate(rows)) if same else torch.inf
