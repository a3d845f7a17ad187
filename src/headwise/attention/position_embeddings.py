"""Position embeddings that are added to the input of the first layer."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..kernels.devices import to_float64
from ..util.errors import SpecError

SINUSOID_LAYOUTS = ("interleaved", "halves")


def sinusoidal_table(
    position: Tensor, model: int, layout: str = "interleaved", base: float = 10_000.0
) -> Tensor:
    """sin and cos of t base^(-2i/model), i = 0 .. model/2 - 1, for each position t (1706.03762,
    section 3.5).

    layout="interleaved" alternates sines and cosines, as in the paper; "halves" puts all sines
    first, as tensor2tensor does. A model trained with one layout does not work with the other.

    >>> sinusoidal_table(torch.tensor([0, 1]), 4).round(decimals=4)[1].tolist()
    [0.8415, 0.5403, 0.01, 1.0]
    """
    if layout not in SINUSOID_LAYOUTS:
        raise SpecError(
            f"sinusoidal layout {layout!r} is unknown; use one of {', '.join(SINUSOID_LAYOUTS)}"
        )
    if model % 2 or model < 2:
        raise SpecError(f"sines and cosines come in pairs, but model={model}; use an even width")
    position = to_float64(position)
    rate = torch.exp(
        torch.arange(0, model, 2, device=position.device, dtype=torch.float64)
        * (-math.log(base) / model)
    )
    angle = position[..., None] * rate
    pair = torch.stack([angle.sin(), angle.cos()], -1)
    return pair.flatten(-2) if layout == "interleaved" else pair.transpose(-1, -2).flatten(-2)
