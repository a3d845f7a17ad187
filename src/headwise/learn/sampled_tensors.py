"""Random inputs of the runs: float64, from a seed, without changing torch's global state."""

from __future__ import annotations

import torch
from torch import Tensor

from ..nn.attention import Attention
from ..spec.attention_spec import AttentionSpec


def sample(seed: int, *shape: int) -> Tensor:
    """Standard normal numbers in float64.

    >>> sample(0, 2, 3).shape, bool((sample(0, 2) == sample(0, 2)).all())
    (torch.Size([2, 3]), True)
    """
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def make_layer(spec: AttentionSpec, seed: int = 0, scale: float | None = None) -> Attention:
    """A layer in float64 whose weights are normal with deviation `scale` (default: 1/sqrt(inputs))."""
    layer = Attention(spec).double().eval()
    with torch.no_grad():
        for number, parameter in enumerate(layer.parameters()):
            deviation = parameter.shape[-1] ** -0.5 if scale is None else scale
            parameter.copy_(sample(1000 * seed + number, *parameter.shape) * deviation)
    return layer


def largest_difference(one: Tensor, other: Tensor) -> float:
    """The largest absolute difference of two tensors."""
    return float((one - other).abs().max())
