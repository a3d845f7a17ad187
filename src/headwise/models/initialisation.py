"""How the tensors of a model start."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import SpecError, suggest
from ..model_spec import WeightSpec
from ..nn import depth_scaled_init
from ..parts.initialisers import normal_with_std, xavier_uniform, xavier_uniform_bound, zeros_init

if TYPE_CHECKING:
    from .block import Layer
    from .transformer import Transformer

TABLES = ("token", "position", "type", "first")  # axes of which each index has a vector of its own
STD = 0.02  # of every matrix in GPT-2


def usual(weight: WeightSpec) -> Tensor:
    """Zeros for a bias, vectors of length about 1 for a table, Xavier-uniform for a matrix, expert by expert.

    >>> from headwise.model_spec import Dense
    >>> up, down = Dense(2).weights(4)
    >>> bool(usual(up).abs().max() <= 1), usual(up).shape  # sqrt(6 / (2 + 4))
    (True, torch.Size([2, 4]))
    """
    shape, axes = weight.shape, weight.layout.axes
    if weight.name.endswith("bias"):
        return zeros_init(shape)
    if axes[0] in TABLES:
        return normal_with_std(shape[-1] ** -0.5)(shape)
    each = shape[1:] if axes[0] == "expert" and len(axes) == 3 else shape
    bound = xavier_uniform_bound((each[0], math.prod(each[1:])))
    return torch.rand(shape) * (2 * bound) - bound


def begin(net: Transformer, start: str) -> None:
    """Draw a fresh model's matrices anew, as this start says.

    "xavier": as every part starts itself. "depth": the matrices of layer l, counted from 1, l^-0.5 as large
    (1908.11365). "gpt2": N(0, 0.02), and where a sublayer ends that over the root of how many its stack has.
    """
    if start not in STARTS:
        raise SpecError(f"start={start!r} is unknown; {suggest(start, STARTS)}")
    with torch.no_grad():
        STARTS[start](net)


def _as_parts_start(net: Transformer) -> None:
    """Nothing more: they did when they were made."""


def _by_depth(net: Transformer) -> None:
    for layers in net.stacks.values():
        for depth, layer in enumerate(layers.blocks, 1):
            if attentions := list(layer.attentions.values()):
                depth_scaled_init(attentions, depth=depth)
            for _, matrix in _feed_matrices(layer):
                matrix.mul_(depth**-0.5)  # already Xavier-uniform


def _as_gpt2(net: Transformer) -> None:
    for name, tensor in net.named_parameters():
        if tensor.dim() > 1 and (".embedding." in name or name.startswith("head.")):
            tensor.normal_(std=STD)
    for layers in net.stacks.values():
        sublayers = sum(len(layer.sublayers) for layer in layers.blocks)
        for layer in layers.blocks:
            for ends, matrix in (*_attention_matrices(layer), *_feed_matrices(layer)):
                matrix.normal_(std=STD * sublayers**-0.5 if ends else STD)


def _attention_matrices(layer: Layer) -> Iterator[tuple[bool, Tensor]]:
    """Matrices that start Xavier-uniform, and whether each is the last of its sublayer."""
    for attention in layer.attentions.values():
        declared = attention.spec.params()
        for name, tensor in attention.named_parameters():
            if declared[name].applied is not None and declared[name].init is xavier_uniform:
                yield name.startswith("output."), tensor


def _feed_matrices(layer: Layer) -> Iterator[tuple[bool, Tensor]]:
    for name, tensor in layer.named_parameters():
        parts = name.split(".")
        if parts[0] == "feed" and not parts[-1].endswith("bias"):
            yield parts[-1] == "down", tensor


STARTS: dict[str, Callable[[Transformer], None]] = {
    "xavier": _as_parts_start,
    "depth": _by_depth,
    "gpt2": _as_gpt2,
}
