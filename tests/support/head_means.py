"""Zero columns and averaged rows of heads by the names of projections, without headwise."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

KEYS_AND_VALUES = ("k_proj", "v_proj", "key", "value", "key_proj", "value_proj", "kv_b_proj")
FUSED = ("qkv_proj", "Wqkv", "query_key_value")


@torch.no_grad()
def average_neighbours(module: nn.Module, heads: int, kv_heads: int, group: int) -> None:
    """Give each `group` neighbouring key-value heads of an attention the mean of their rows, and of
    their gains where one norm is over the keys of all heads.
    """
    width = kv_heads * int(getattr(module, "head_dim", 0))
    for name, linear in module.named_modules():
        leaf = name.rpartition(".")[2]
        for tensor in linear.parameters(recurse=False):
            if leaf in KEYS_AND_VALUES or (leaf == "k_norm" and len(tensor) == width):
                _average(tensor, kv_heads, group)
            elif leaf in FUSED:  # all heads of q, then of k, then of v
                width = len(tensor) // (heads + 2 * kv_heads)
                _average(tensor[heads * width : (heads + kv_heads) * width], kv_heads, group)
                _average(tensor[(heads + kv_heads) * width :], kv_heads, group)


def _average(rows: Tensor, kv_heads: int, group: int) -> None:
    blocks = rows.unflatten(0, (kv_heads // group, group, -1))
    blocks.copy_(blocks.mean(1, keepdim=True).expand_as(blocks))


@torch.no_grad()
def zero_columns_of(linear: Any, head: int, width: int) -> None:
    """Set the columns of one head to zero; a grouped projection has those of each group apart."""
    groups = getattr(linear, "n_groups", 1)
    if isinstance(linear, nn.Linear):
        per_group = linear.in_features // width
        weight = linear.weight.unflatten(0, (groups, -1)).unflatten(-1, (per_group, width))
        weight[head // per_group if groups > 1 else 0, :, head % per_group] = 0
    else:  # Conv1D
        linear.weight[head * width : (head + 1) * width] = 0
