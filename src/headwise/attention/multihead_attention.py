"""Multi-head attention layers with the interfaces of two well-known codes, on `attend`.

`MultiHeadAttention` is called as layer(query, key, value, mask), as in the Annotated Transformer;
`MultiheadAttention` takes the place of torch's class of that name. A layer with anything beyond
plain softmax attention is an `Attention` of a spec.

Shapes: B batch, T queries, S keys, D model width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .tensor_attention import attend


class MultiHeadAttention(nn.Module):
    """Multi-head attention: queries, keys and values may come from three sequences.

    >>> layer = MultiHeadAttention(64, heads=8)
    >>> x, memory = torch.randn(2, 5, 64), torch.randn(2, 9, 64)
    >>> layer(x, memory, memory).shape
    torch.Size([2, 5, 64])
    >>> layer(x, x, x, torch.ones(5, 5).tril()).shape
    torch.Size([2, 5, 64])
    """

    def __init__(
        self,
        d_model: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        dropout: float = 0.0,
        bias: bool = True,
    ) -> None:
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        if min(d_model, heads, kv_heads) < 1 or d_model % heads or heads % kv_heads:
            raise ValueError(
                f"d_model={d_model}, heads={heads}, kv_heads={kv_heads}: heads must divide "
                "d_model, and kv_heads heads"
            )
        self.heads = heads
        self.kv_heads = kv_heads
        self.dropout = dropout
        kv_width = d_model // heads * kv_heads
        self.query = nn.Linear(d_model, d_model, bias)
        self.key, self.value = (nn.Linear(d_model, kv_width, bias) for _ in range(2))
        self.output = nn.Linear(d_model, d_model, bias)
        self.attn: Tensor | None = None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
        *,
        need_weights: bool = False,
    ) -> Tensor:
        """y [B, T, D] of query [B, T, D], key and value [B, S, D].

        `mask` [B or 1, T or 1, S] or [T, S] is True or 1 where a query may attend to a key, alike
        for all heads. With `need_weights`, the weights [B, heads, T, S] are kept in `attn`.
        """
        q = self.query(query).unflatten(-1, (self.heads, -1)).transpose(-3, -2)
        k = self.key(key).unflatten(-1, (self.kv_heads, -1)).transpose(-3, -2)
        v = self.value(value).unflatten(-1, (self.kv_heads, -1)).transpose(-3, -2)
        dropout = self.dropout if self.training else 0.0
        o, self.attn = attend(q, k, v, mask, dropout=dropout, need_weights=need_weights)
        return self.output(o.transpose(-3, -2).flatten(-2))


class MultiheadAttention(nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention`, computed by headwise: the same arguments, parameters, masks
    and results.

    A query that may attend to nothing gets the output of zeros, where torch's class returns NaN.

    >>> theirs, ours = (
    ...     nn.MultiheadAttention(16, 4, batch_first=True),
    ...     MultiheadAttention(16, 4, batch_first=True),
    ... )
    >>> _ = ours.load_state_dict(theirs.state_dict())
    >>> x = torch.randn(2, 5, 16)
    >>> torch.allclose(ours(x, x, x)[0], theirs(x, x, x)[0], atol=1e-6)
    True
    """

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As torch's: boolean masks are True where a query may not attend, others are added to the
        scores.

        `is_causal` declares that `attn_mask`, which has to be given, is causal.
        """
        if is_causal and attn_mask is None:
            raise ValueError(
                "is_causal=True needs attn_mask; give "
                "nn.Transformer.generate_square_subsequent_mask(T)"
            )
        is_batched = query.dim() == 3
        sequences = [self._batch_first(tensor, is_batched) for tensor in (query, key, value)]
        q, k, v = (self._split_heads(x) for x in self._project(*sequences))
        allowed, bias = self._masks(attn_mask, key_padding_mask, (*q.shape[:3], k.shape[2]))
        num_added = int(self.bias_k is not None)
        if self.add_zero_attn:
            k, v = (nn.functional.pad(tensor, (0, 0, 0, 1)) for tensor in (k, v))
            num_added += 1
        if num_added:
            allowed = (
                None if allowed is None else nn.functional.pad(allowed, (0, num_added), value=True)
            )
            bias = None if bias is None else nn.functional.pad(bias, (0, num_added))
        dropout = self.dropout if self.training else 0.0
        o, weights = attend(q, k, v, allowed, bias, dropout=dropout, need_weights=need_weights)
        y_BTD = self.out_proj(o.transpose(1, 2).flatten(2))
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        if not is_batched:
            return y_BTD[0], None if weights is None else weights[0]
        return y_BTD if self.batch_first else y_BTD.transpose(0, 1), weights

    def _batch_first(self, x: Tensor, is_batched: bool) -> Tensor:
        if x.dim() != (3 if is_batched else 2):
            raise ValueError(
                f"query, key and value need equally many dimensions, 3 or 2; one has {x.dim()}"
            )
        return (
            x if is_batched and self.batch_first else x.transpose(0, 1) if is_batched else x[None]
        )

    def _split_heads(self, x_BTD: Tensor) -> Tensor:
        return x_BTD.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        if self.in_proj_weight is not None:
            weights = self.in_proj_weight.chunk(3)
        else:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        inputs = zip((query, key, value), weights, biases, strict=True)
        projected = [nn.functional.linear(x, weight, bias) for x, weight, bias in inputs]
        for index, added in ((1, self.bias_k), (2, self.bias_v)):
            if added is not None:
                batch = projected[index].shape[0]
                projected[index] = torch.cat([projected[index], added.expand(batch, 1, -1)], 1)
        return projected

    def _masks(
        self, attn_mask: Tensor | None, key_padding_mask: Tensor | None, shape: tuple[int, ...]
    ) -> tuple[Tensor | None, Tensor | None]:
        """The allowed pairs, and the numbers added to the scores, each [B or 1, H or 1, T or 1, S]
        or None.
        """
        batch, heads, queries, keys = shape
        keys -= int(self.bias_k is not None)
        allowed: Tensor | None = None
        bias: Tensor | None = None
        masks = []
        if attn_mask is not None:
            masks = [_view_mask("attn_mask", attn_mask, (batch, heads, queries, keys))]
        if key_padding_mask is not None:
            padding = key_padding_mask if key_padding_mask.dim() == 2 else key_padding_mask[None]
            if padding.shape != (batch, keys):
                raise ValueError(
                    f"key_padding_mask {list(key_padding_mask.shape)}: give [{batch}, {keys}]"
                )
            masks.append(padding[:, None, None])
        for mask in masks:
            if mask.is_floating_point():
                bias = mask if bias is None else bias + mask
            else:
                allowed = ~mask if allowed is None else allowed & ~mask
        return allowed, bias


def _view_mask(name: str, mask: Tensor, shape: tuple[int, int, int, int]) -> Tensor:
    """A mask of torch's shapes, [T, S] or [B * heads, T, S], as [B or 1, heads or 1, T, S]."""
    batch, heads, queries, keys = shape
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError(
            f"{name} is {mask.dtype}; give booleans, True where a query may not attend, or "
            "additive values"
        )
    if mask.shape == (queries, keys):
        return mask[None, None]
    if mask.shape == (batch * heads, queries, keys):
        return mask.unflatten(0, (batch, heads))
    raise ValueError(
        f"{name} {list(mask.shape)}: give [{queries}, {keys}] or [{batch * heads}, {queries}, "
        f"{keys}]"
    )
