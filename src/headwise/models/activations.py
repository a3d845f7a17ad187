"""Activations by the names that blueprints use."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..blueprint import FeedForwardSpec
from ..errors import SpecError, suggest
from ..kernels import few

Act = Callable[[Tensor], Tensor]
Maps = Callable[[str], Tensor]  # what one of the maps before the last, "up" or "gate", makes of the input

ACTIVATIONS: dict[str, Act] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "relu6": F.relu6,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "mish": F.mish,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "linear": lambda x: x,
}
BOUNDED = re.compile(r"bounded_silu\(([-+.\w]+), ([-+.\w]+)\)")


def activation(name: str) -> Act:
    """The function of this name.

    >>> activation("relu2")(torch.tensor([-3.0, 3.0])).tolist()
    [0.0, 9.0]
    """
    if name not in ACTIVATIONS:
        raise SpecError(f"there is no activation {name!r}; {suggest(name, ACTIVATIONS)}")
    return ACTIVATIONS[name]


def joined(described: FeedForwardSpec) -> Callable[[Maps], Tensor]:
    """What a feed-forward makes of its first maps, before the last: act(up), or act(gate) up.

    "bounded_silu(gain, limit)" bounds both first: g sigmoid(gain g) (u + 1), g <= limit, |u| <= limit (2508.10925).
    """
    if bounded := BOUNDED.fullmatch(described.activation):
        if described.form != "gated":
            raise SpecError(f"{described.activation} bounds a gate too; give Dense(form='gated')")
        return _bounded(*(float(number) for number in bounded.groups()))
    act = activation(described.activation)
    if described.form == "gated":
        if described.activation == "silu":
            return _swish
        return lambda maps: act(maps("gate")) * maps("up")
    return lambda maps: act(maps("up"))


def _swish(maps: Maps) -> Tensor:
    gate, up = maps("gate"), maps("up")
    return few.silu_and_multiply(gate, up).view(up.shape) if few.is_small_batch(gate, up) else F.silu(gate) * up


def _bounded(gain: float, limit: float) -> Callable[[Maps], Tensor]:
    def join(maps: Maps) -> Tensor:
        gate, up = maps("gate").clamp(max=limit), maps("up").clamp(-limit, limit)
        return gate * torch.sigmoid(gain * gate) * (up + 1)

    return join
