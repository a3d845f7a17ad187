"""Attention written out in numpy, in float64, one head after the other; nothing of the library is
used but names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

Array = np.ndarray[Any, np.dtype[np.float64]]


def numbers(layer: torch.nn.Module) -> dict[str, Array]:
    """Every number of a layer by its full name."""
    return {name: tensor.detach().double().numpy() for name, tensor in layer.state_dict().items()}


def projected(w: Mapping[str, Array], x: Array, side: str, heads: int) -> Array:
    """One side [B, T, heads, width], with its bias if it has one."""
    flat = x @ w[f"project.{side}"].T + w.get(f"project.{side}_bias", 0.0)
    return flat.reshape(*x.shape[:2], heads, -1)


def shares(q: Array, k: Array, *, causal: bool = False) -> Array:
    """softmax(q k^T / sqrt(width)) of one head: [B, T, S]."""
    scores = q @ k.transpose(0, 2, 1) / np.sqrt(q.shape[-1])
    if causal:
        scores = np.where(np.tri(*scores.shape[1:], dtype=bool), scores, -np.inf)
    exp = np.exp(scores - scores.max(-1, keepdims=True))
    return exp / exp.sum(-1, keepdims=True)


def read(q: Array, k: Array, v: Array, reads: Sequence[int], *, causal: bool = False) -> Array:
    """What every head reads, [B, T, heads, width of values]; head h has the key and value head
    reads[h].
    """
    each = [shares(q[:, :, h], k[:, :, g], causal=causal) @ v[:, :, g] for h, g in enumerate(reads)]
    return np.stack(each, 2)


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def far(ours: torch.Tensor, theirs: Array) -> float:
    """The largest difference, relative to the largest number."""
    if tuple(ours.shape) != theirs.shape:
        raise ValueError(f"ours is {tuple(ours.shape)} and theirs {theirs.shape}")
    return float(np.abs(ours.detach().numpy() - theirs).max() / np.abs(theirs).max())
