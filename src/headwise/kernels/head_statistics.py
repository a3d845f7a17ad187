"""Statistics of the attention weights of every head, without storing the weights: for GPUs, by
Triton.

`head_statistics` runs the kernel of `head_statistics_kernel` on one attention call of one text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import head_statistics_kernel as kernel
from .head_statistics_kernel import HeadStatistics

INPUT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

# Places of the pairs of sum and count; all but the first group are of weights outside sinks, in
# rows that keep enough of them.
PLACES = (
    *("entropy", "breadth", "confidence", "distance", "sink", "first", "separator"),
    *("punctuation", "duplicate", "induction", "rare", "squares", "pairs"),
    *("first_of_several", "uniform_first"),
)
FIRST_BY_OFFSET = 32
NUM_OFFSETS = 33  # -16..16


def _value(number: Any) -> Any:
    """Return the number of a constant of a kernel."""
    return getattr(number, "value", number)


NUM_LANES = _value(kernel.NUM_LANES)
NUM_SLOTS = _value(kernel.NUM_SLOTS)


class ScoreInputs(NamedTuple):
    """Inputs of the scores of one text.

    - `q_THK`, `k_SGK`: queries and keys; scores are their products times `scale`, soft-capped at
      `softcap` unless it is None.
    - `kv_head_of_query`: the KV head of each query head.
    - `is_causal`: keys after the query are masked.
    - `bias_HTS`: added to scores; -10,000 or less is a mask. `mask_HTS`: true where a key is
      allowed. Their axes may have size 1.
    - `sinks_H`: one more score of each head, without a key.
    """

    q_THK: Tensor
    k_SGK: Tensor
    kv_head_of_query: Sequence[int]
    scale: float
    softcap: float | None = None
    is_causal: bool = False
    bias_HTS: Tensor | None = None
    mask_HTS: Tensor | None = None
    sinks_H: Tensor | None = None


class TokenInputs(NamedTuple):
    """Annotations of the tokens of one text.

    - `query_ids`, `key_ids`: token ids, [T] and [S]; the same tensor in self-attention.
    - `is_sink`, `is_separator`, `is_punctuation`, `is_rarest`: flags of the keys.
    - `sampled_queries`: queries of which the weights are returned.
    """

    query_ids: Tensor
    key_ids: Tensor
    is_sink: Tensor
    is_separator: Tensor
    is_punctuation: Tensor
    is_rarest: Tensor
    sampled_queries: Tensor


def head_statistics(inputs: ScoreInputs, tokens: TokenInputs) -> HeadStatistics:
    """Return the statistics of every head."""
    return _launch(inputs, tokens, inputs.q_THK.shape[1], 0)


def uniform_statistics(inputs: ScoreInputs, tokens: TokenInputs) -> HeadStatistics:
    """Return the statistics of one head that reads every key equally that some head may read."""
    bias = inputs.bias_HTS
    mask = inputs.mask_HTS
    if bias is not None and (len(bias) > 1 or mask is not None):
        is_added = bias > _value(kernel.MASKED)
        mask = is_added if mask is None else is_added & mask
        bias = None
    if mask is not None:
        mask = mask.any(0, keepdim=True)
    merged = inputs._replace(bias_HTS=bias, mask_HTS=mask, sinks_H=None)
    return _launch(merged, tokens, 1, kernel.UNIFORM)


def _launch(
    inputs: ScoreInputs, tokens: TokenInputs, num_heads: int, options: Any
) -> HeadStatistics:
    q = inputs.q_THK
    k = inputs.k_SGK
    device = q.device
    num_queries, _, num_dims = q.shape
    num_keys = len(k)
    args = kernel.ScoreArgs(
        kernel.StridedInput(q, q.stride(1), q.stride(0), q.stride(2)),
        kernel.StridedInput(k, k.stride(1), k.stride(0), k.stride(2)),
        torch.tensor(inputs.kv_head_of_query, dtype=torch.int32, device=device),
        _make_strided(inputs.bias_HTS),
        _make_strided(inputs.mask_HTS),
        inputs.sinks_H,
        num_queries,
        num_keys,
        num_dims,
        float(inputs.scale),
        inputs.softcap,
    )
    flags = torch.zeros(num_keys, dtype=torch.int32, device=device)
    bits = (kernel.SINK, kernel.SEPARATOR, kernel.PUNCTUATION, kernel.RAREST)
    for bit, is_marked in zip(bits, tokens[2:6], strict=True):
        flags |= is_marked.to(torch.int32) * _value(bit)
    num_samples = len(tokens.sampled_queries)
    sample_of_query = torch.full((num_queries,), -1, dtype=torch.int32, device=device)
    sample_of_query[tokens.sampled_queries] = torch.arange(
        num_samples, dtype=torch.int32, device=device
    )
    is_self = tokens.query_ids is tokens.key_ids
    token_args = kernel.TokenArgs(
        tokens.query_ids, tokens.key_ids, flags, sample_of_query, num_samples
    )
    tiles = -(-num_queries // _value(kernel.BLOCK_ROWS))
    outputs = HeadStatistics(
        torch.zeros(num_heads, tiles, NUM_SLOTS, dtype=torch.float64, device=device),
        torch.zeros(num_heads, num_queries, dtype=torch.int32, device=device),
        torch.zeros(num_heads, num_samples, num_keys, device=device),
        torch.zeros(num_heads, num_keys, device=device),
    )
    chosen = _value(options)
    chosen |= _value(kernel.CAUSAL) if inputs.is_causal else 0
    chosen |= _value(kernel.SELF_ATTENTION) if is_self else 0
    num_warps = 8 if torch.version.hip is None else 4
    with torch.cuda.device_of(q):
        kernel.head_statistics_kernel[(tiles, num_heads)](
            args, token_args, outputs, OPTIONS=chosen, num_warps=num_warps
        )
    return outputs._replace(sums=outputs.sums.sum(1))


def _make_strided(x_HTS: Tensor | None) -> kernel.StridedInput:
    if x_HTS is None:
        return kernel.StridedInput(None, 0, 0, 0)
    data = x_HTS.view(torch.uint8) if x_HTS.dtype == torch.bool else x_HTS
    strides = (0 if size == 1 else x_HTS.stride(axis) for axis, size in enumerate(x_HTS.shape))
    return kernel.StridedInput(data, *strides)
