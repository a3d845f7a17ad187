"""nn.MultiheadAttention with separate projections, of which heads can be removed."""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..util.errors import SpecError

CALL = signature(nn.MultiheadAttention.forward)


class SplitMultiheadAttention(nn.Module):
    """Multi-head attention that is called like nn.MultiheadAttention, with one nn.Linear for each
    of q, k, v and out.

    It takes the place of an nn.MultiheadAttention, also inside nn.Transformer, when heads are
    removed.

    >>> attention = nn.MultiheadAttention(6, 3, batch_first=True).eval()
    >>> split, x = SplitMultiheadAttention(attention), torch.randn(2, 5, 6)
    >>> bool(torch.allclose(split(x, x, x)[0], attention(x, x, x)[0], atol=1e-6))
    True
    """

    # nn.TransformerEncoderLayer reads these before its fused kernel; a layer without them takes its
    # usual steps.
    _qkv_same_embed_dim = False
    in_proj_weight = None
    in_proj_bias = None

    def __init__(self, original: nn.MultiheadAttention) -> None:
        super().__init__()
        if original.bias_k is not None or original.add_zero_attn:
            raise SpecError(
                "cannot prune nn.MultiheadAttention with bias_kv or add_zero_attn; build it "
                "without them"
            )
        self.embed_dim = original.embed_dim
        self.num_heads = original.num_heads
        self.batch_first = original.batch_first
        self.dropout = original.dropout
        weights = (
            original.in_proj_weight.chunk(3)
            if original.in_proj_weight is not None
            else (original.q_proj_weight, original.k_proj_weight, original.v_proj_weight)
        )
        biases = (None,) * 3 if original.in_proj_bias is None else original.in_proj_bias.chunk(3)
        self.q_proj, self.k_proj, self.v_proj = map(_make_linear, weights, biases)
        self.out_proj = _make_linear(original.out_proj.weight, original.out_proj.bias)
        self.train(original.training)

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Outputs and weights for the arguments of nn.MultiheadAttention; `is_causal` needs an
        `attn_mask`.
        """
        call = CALL.bind(self, *args, **kwargs)
        call.apply_defaults()
        options = call.arguments
        is_batched = options["query"].dim() == 3
        if options["is_causal"] and options["attn_mask"] is None:
            raise ValueError("is_causal=True needs attn_mask; give the causal mask")
        q = self._project(self.q_proj, options["query"])
        k = self._project(self.k_proj, options["key"])
        v = self._project(self.v_proj, options["value"])
        scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
        bias = self._bias(scores, options["attn_mask"], options["key_padding_mask"], is_batched)
        weights = (scores + bias).softmax(-1)
        heads = F.dropout(weights, self.dropout, self.training) @ v
        y = self.out_proj(heads.transpose(1, 2).flatten(2))
        if not is_batched:
            y = y[0]
        elif not self.batch_first:
            y = y.transpose(0, 1)
        if not options["need_weights"]:
            return y, None
        weights = weights.mean(1) if options["average_attn_weights"] else weights
        return y, weights if is_batched else weights[0]

    def _project(self, linear: nn.Linear, x: Tensor) -> Tensor:
        """[B, heads, T, dim] of a projected input."""
        y = linear(x)
        if x.dim() == 2:
            y = y[None]
        elif not self.batch_first:
            y = y.transpose(0, 1)
        return y.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def _bias(
        self, scores: Tensor, attn_mask: Tensor | None, padding: Tensor | None, is_batched: bool
    ) -> Tensor:
        """Both masks as one tensor to add to the scores; True in a boolean mask forbids a pair."""
        bias = scores.new_zeros(())
        if attn_mask is not None:
            mask = _to_bias(attn_mask, scores)
            if mask.dim() == 3:  # one for each row and head
                if mask.shape[0] != scores.shape[0] * self.num_heads:
                    raise ValueError(
                        f"attn_mask has {mask.shape[0]} masks for {scores.shape[0]} rows of "
                        f"{self.num_heads} heads; give one for each row and head that is left"
                    )
                mask = mask.unflatten(0, (scores.shape[0], self.num_heads))
            bias = bias + mask
        if padding is not None:
            mask = _to_bias(padding, scores)
            bias = bias + (mask[:, None, None] if is_batched else mask)
        return bias


def _to_bias(mask: Tensor, scores: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(scores.dtype)
    return torch.zeros_like(mask, dtype=scores.dtype).masked_fill(mask, float("-inf"))


def _make_linear(weight: Any, bias: Any) -> nn.Linear:
    """An nn.Linear with copies of these parameters."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight.detach().clone(), requires_grad=weight.requires_grad)
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach().clone(), requires_grad=bias.requires_grad)
    return linear


def split_multihead(model: nn.Module, path: str) -> nn.Module:
    """Replace the nn.MultiheadAttention at a path of a model, and return the new module; other
    modules stay.
    """
    module = model.get_submodule(path)
    if not isinstance(module, nn.MultiheadAttention):
        return module
    if not path:
        raise SpecError(
            "cannot prune nn.MultiheadAttention in place; put it into an nn.Sequential, or "
            "another module"
        )
    parent, _, name = path.rpartition(".")
    new = SplitMultiheadAttention(module)
    setattr(model.get_submodule(parent), name, new)
    for other in model.modules():
        if isinstance(other, nn.TransformerEncoder) and new in other.modules():
            other.use_nested_tensor = False  # only torch's fused layers take nested tensors
    return new
