"""`redraw_features`: new random features for the linear attention of a model."""

from __future__ import annotations

import torch

from ..errors import SpecError
from .attention import Attention

SEEDS = 2**63  # seeds of random features are below


@torch.no_grad()
def redraw_features(model: torch.nn.Module, seed: int) -> int:
    """Sample the random features of every linear attention in the model again, in place; returns the number of layers.

    Each layer gets other features, which depend on `seed` and on the layer's number alone. Trained weights stay. The
    features are constants that are saved with the weights, so a saved model computes with those it has at that time.

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
