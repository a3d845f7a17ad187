"""Initial weights of whole models: three schemes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn

from ..attention import depth_scaled_init
from ..attention.parts.initialisers import xavier_uniform
from ..util.errors import SpecError, suggest
from .block import LayerStack, TransformerLayer

GPT2_STD = 0.02  # standard deviation of every matrix in GPT-2
Stacks = Mapping[str, LayerStack]


def initialise_model(net: nn.Module, stacks: Stacks, init: str) -> None:
    """Initialise the matrices of a new model by the scheme `init`.

    "xavier" keeps the initial weights of every part. "depth" multiplies the matrices of layer l,
    counted from 1, by l^-0.5 (1908.11365). "gpt2" draws from N(0, 0.02); the standard deviation of
    the last matrix of each sublayer is divided by sqrt(number of sublayers in the stack).
    """
    if init not in INIT_SCHEMES:
        raise SpecError(f"init={init!r} is unknown; {suggest(init, INIT_SCHEMES)}")
    with torch.no_grad():
        INIT_SCHEMES[init](net, stacks)


def _keep_part_init(net: nn.Module, stacks: Stacks) -> None:
    """Leave the weights as the parts initialised them."""


def _scale_by_depth(net: nn.Module, stacks: Stacks) -> None:
    for layers in stacks.values():
        for depth, layer in enumerate(layers.blocks, 1):
            attentions = list(layer.attentions.values())
            if attentions:
                depth_scaled_init(attentions, depth=depth)
            for _, matrix in _feed_matrices(layer):
                matrix.mul_(depth**-0.5)  # already Xavier-uniform


def _initialise_like_gpt2(net: nn.Module, stacks: Stacks) -> None:
    for name, tensor in net.named_parameters():
        if tensor.dim() > 1 and (".embedding." in name or name.startswith("head.")):
            tensor.normal_(std=GPT2_STD)
    for layers in stacks.values():
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


INIT_SCHEMES: dict[str, Callable[[nn.Module, Stacks], None]] = {
    "xavier": _keep_part_init,
    "depth": _scale_by_depth,
    "gpt2": _initialise_like_gpt2,
}
