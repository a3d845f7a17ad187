"""Longformer's weights, which it keeps as a band: those of a query by how far away the key is.

A row of what its forward gives is [global keys, then keys from `side` before to `side` behind]; queries that read
everything have rows of their own, over all keys ([Longformer](https://arxiv.org/abs/2004.05150), section 3.1).
"""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from .base import WeightsOnlyCall

WINDOW_ATTRIBUTE = "one_sided_attn_window_size"


def is_banded(module: nn.Module) -> bool:
    """Whether a module keeps its weights so."""
    return isinstance(getattr(module, WINDOW_ATTRIBUTE, None), int)


def run_banded(module: nn.Module, run: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, WeightsOnlyCall]:
    """What such a module gives, and its weights [B, H, T, S]."""
    said = signature(type(module).forward).bind(module, *args, **kwargs)
    said.apply_defaults()
    asked = said.arguments.pop("output_attentions")
    told = {name: value for name, value in said.arguments.items() if name != "self"}
    z, band, *rows = run(**told, output_attentions=True)
    reads = told["is_index_global_attn"] if rows else None
    weights = unband_weights(band, getattr(module, WINDOW_ATTRIBUTE), reads, rows[0] if rows else None)
    return (z, band, *rows) if asked else (z,), WeightsOnlyCall(weights)


def unband_weights(band: Tensor, half_window: int, reads_BT: Tensor | None, rows: Tensor | None) -> Tensor:
    """Weights [B, H, T, S] of a band [B, T, H, global + 2 side + 1] and the rows of queries that read everything.

    >>> band = torch.tensor([[0.0, 0.9, 0.1], [0.2, 0.3, 0.5], [0.6, 0.4, 0.0]])[None, :, None]
    >>> unband_weights(band, 1, None, None)[0, 0]
    tensor([[0.9000, 0.1000, 0.0000],
            [0.2000, 0.3000, 0.5000],
            [0.0000, 0.6000, 0.4000]])
    """
    batch, length, heads, wide = band.shape
    everywhere = wide - 2 * half_window - 1
    padded = band.new_zeros(batch, length, heads, length + 2 * half_window)
    place = torch.arange(length, device=band.device)[:, None] + torch.arange(2 * half_window + 1, device=band.device)
    index = place[None, :, None, :].expand(batch, length, heads, -1)
    padded.scatter_(-1, index, band[..., everywhere:])
    weights = padded[..., half_window : half_window + length].permute(0, 2, 1, 3).contiguous()
    if reads_BT is None or rows is None:
        return weights
    for row, reads in enumerate(reads_BT):
        tokens = reads.nonzero().flatten()
        weights[row][:, :, tokens] += band[row, :, :, : len(tokens)].transpose(0, 1)
        weights[row][:, tokens] = rows[row][:, : len(tokens)].to(weights)
    return weights
