"""Initialisation again: weights that shrink with the depth of a layer (DS-Init), and new random
features.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import chain

import torch
from torch import Tensor, nn

from ..util.errors import SpecError
from .attention import Attention
from .parts.initialisers import xavier_uniform, xavier_uniform_bound


def depth_scaled_init(
    modules: nn.Module | Iterable[nn.Module],
    *,
    depth: int,
    exponent: float = 0.5,
    alpha: float = 1.0,
    generator: torch.Generator | None = None,
) -> None:
    """W ~ U(-b, b) with b = sqrt(6 / (d_in + d_out)) alpha / depth^exponent: DS-Init (1908.11365).

    `modules` are the modules of one layer of a stack; `depth` counts layers from 1. exponent=0.5 is
    what the paper writes; the released code passes depth^-0.5 to an initialiser that scales the
    variance, which makes it 0.25.

    Every weight matrix is initialised again: Xavier-uniform ones in headwise layers, and all in
    nn.Linear and nn.MultiheadAttention. Biases, norms, embeddings, constants, and
    matrices that a part initialises in another way stay.

    Four times as deep, half as wide:

    >>> maps = nn.Linear(1, 5), nn.Linear(1, 5)
    >>> for depth, linear in zip((1, 4), maps):
    ...     depth_scaled_init(linear, depth=depth, generator=torch.Generator().manual_seed(0))
    >>> (maps[0].weight / maps[1].weight).flatten().tolist()
    [2.0, 2.0, 2.0, 2.0, 2.0]
    """
    factor = _factor(depth, exponent, alpha)
    matrices = list(_matrices([modules] if isinstance(modules, nn.Module) else modules))
    if not matrices:
        raise SpecError(
            "there is no weight matrix to draw; give a layer with attention or nn.Linear in it"
        )
    with torch.no_grad():
        for matrix in matrices:
            bound = xavier_uniform_bound(tuple(matrix.shape)) * factor
            matrix.uniform_(-bound, bound, generator=generator)


def _factor(depth: int, exponent: float, alpha: float) -> float:
    if not isinstance(depth, int) or isinstance(depth, bool) or depth < 1:
        raise SpecError(f"depth={depth!r} is not a layer of a stack; count them from 1")
    if not (_number(exponent) and exponent >= 0):
        raise SpecError(
            f"exponent={exponent!r} would let weights grow with depth; use 0.5 (paper) or 0.25 "
            "(its code)"
        )
    if not (_number(alpha) and 0 < alpha <= 1):
        raise SpecError(
            f"alpha={alpha!r} is outside the paper's range; use more than 0 and at most 1, such "
            "as 1.0"
        )
    return alpha / depth**exponent


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _matrices(modules: Iterable[nn.Module]) -> Iterator[Tensor]:
    """Every matrix to initialise."""
    for module in chain.from_iterable(whole.modules() for whole in modules):
        if isinstance(module, Attention):
            declared = module.spec.params()
            for name, tensor in module.named_parameters():
                if declared[name].applied is not None and declared[name].init is xavier_uniform:
                    yield tensor
        elif isinstance(module, nn.Linear):
            yield module.weight
        elif isinstance(module, nn.MultiheadAttention):
            if module.in_proj_weight is not None:
                yield from module.in_proj_weight.chunk(3)
            else:
                yield from (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)


SEEDS = 2**63  # seeds of random features are below


@torch.no_grad()
def redraw_features(model: torch.nn.Module, seed: int) -> int:
    """Sample the random features of every linear attention in the model again, in place; returns
    the number of layers.

    Each layer gets other features, which depend on `seed` and on the layer's number alone. Trained
    weights stay. The features are constants that are saved with the weights, so a saved model
    computes with those it has at that time.

    >>> import headwise as hw
    >>> layer = hw.Attention(hw.design(preset="performer", model=8, heads=2))
    >>> before = layer.similarity["directions"].clone()
    >>> redraw_features(layer, seed=1), torch.equal(layer.similarity["directions"], before)
    (1, False)
    """
    if not 0 <= seed < SEEDS:
        raise SpecError(f"seed={seed} is not a valid seed; use 0 or more, below 2^63")
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    redrawn = 0
    for number, layer in enumerate(layers):
        layer_seed = (seed * 1_000_003 + number) % SEEDS
        for name, part in layer.spec.parts():
            for key, values in part.resample_constants(layer.spec, layer_seed).items():
                layer.get_buffer(f"{name}.{key}").copy_(values)
                redrawn += 1
    return redrawn
