"""Initial weights of a model: one initialiser per tensor, and three schemes for whole models."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import SpecError, suggest
from ..model_spec import WeightSpec
from ..nn import depth_scaled_init
from ..parts.initialisers import (
    normal_with_std,
    uniform_within,
    xavier_uniform,
    xavier_uniform_bound,
    zeros_init,
)

if TYPE_CHECKING:
    from .block import TransformerLayer
    from .transformer import Transformer

TABLE_AXES = (
    "token",
    "position",
    "type",
    "first",
)  # first axes of tables, which hold one vector per index
GPT2_STD = 0.02  # standard deviation of every matrix in GPT-2


def initialise_weight(weight: WeightSpec) -> Tensor:
    """Return the initial tensor: zeros for biases, N(0, 1/width) for tables, Xavier-uniform for
    each matrix.

    The matrices of experts are initialised one expert at a time, so that the first axis does not
    change the bound.

    >>> from headwise.model_spec import FeedForwardSpec
    >>> up, down = FeedForwardSpec(2).weights(4)
    >>> (
    ...     bool(initialise_weight(up).abs().max() <= 1),
    ...     initialise_weight(up).shape,
    ... )  # sqrt(6 / (2 + 4))
    (True, torch.Size([2, 4]))
    """
    shape, axes = weight.shape, weight.layout.axes
    if weight.name.endswith("bias"):
        return zeros_init(shape)
    if axes[0] in TABLE_AXES:
        return normal_with_std(shape[-1] ** -0.5)(shape)
    matrix_shape = shape[1:] if axes[0] == "expert" and len(axes) == 3 else shape
    bound = xavier_uniform_bound((matrix_shape[0], math.prod(matrix_shape[1:])))
    return uniform_within(bound, shape)


def initialise_model(net: Transformer, init: str) -> None:
    """Initialise the matrices of a new model by the scheme `init`.

    "xavier" keeps the initial weights of every part. "depth" multiplies the matrices of layer l,
    counted from 1, by l^-0.5 (1908.11365). "gpt2" draws from N(0, 0.02); the standard deviation of
    the last matrix of each sublayer is divided by sqrt(number of sublayers in the stack).
    """
    if init not in INIT_SCHEMES:
        raise SpecError(f"init={init!r} is unknown; {suggest(init, INIT_SCHEMES)}")
    with torch.no_grad():
        INIT_SCHEMES[init](net)


def _keep_part_init(net: Transformer) -> None:
    """Leave the weights as the parts initialised them."""


def _scale_by_depth(net: Transformer) -> None:
    for layers in net.stacks.values():
        for depth, layer in enumerate(layers.blocks, 1):
            if attentions := list(layer.attentions.values()):
                depth_scaled_init(attentions, depth=depth)
            for _, matrix in _feed_matrices(layer):
                matrix.mul_(depth**-0.5)  # already Xavier-uniform


def _initialise_like_gpt2(net: Transformer) -> None:
    for name, tensor in net.named_parameters():
        if tensor.dim() > 1 and (".embedding." in name or name.startswith("head.")):
            tensor.normal_(std=GPT2_STD)
    for layers in net.stacks.values():
        sublayers = sum(len(layer.sublayers) for layer in layers.blocks)
        for layer in layers.blocks:
            for is_last, matrix in (*_attention_matrices(layer), *_feed_matrices(layer)):
                matrix.normal_(std=GPT2_STD * sublayers**-0.5 if is_last else GPT2_STD)


def _attention_matrices(layer: TransformerLayer) -> Iterator[tuple[bool, Tensor]]:
    """Yield matrices that are Xavier-uniform initially, and whether each is the last of its
    sublayer.
    """
    for attention in layer.attentions.values():
        declared = attention.spec.params()
        for name, tensor in attention.named_parameters():
            if declared[name].applied is not None and declared[name].init is xavier_uniform:
                yield name.startswith("output."), tensor


def _feed_matrices(layer: TransformerLayer) -> Iterator[tuple[bool, Tensor]]:
    for name, tensor in layer.named_parameters():
        parts = name.split(".")
        if parts[0] == "feed" and not parts[-1].endswith("bias"):
            yield parts[-1] == "down", tensor


INIT_SCHEMES: dict[str, Callable[[Transformer], None]] = {
    "xavier": _keep_part_init,
    "depth": _scale_by_depth,
    "gpt2": _initialise_like_gpt2,
}
