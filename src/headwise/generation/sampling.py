"""Choose the next token of each row: the most likely one, or a sample after filtering."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..ops.counter_rng import RandomStream
from .decoding_config import DEFAULT_DECODING, DecodingConfig

NEG_INF = float("-inf")
TokenHistory = Sequence[Sequence[int]]  # the ids that each row has read or written so far


def sample_tokens(
    logits: Tensor,
    history: TokenHistory = (),
    *,
    temperature: float = 0.0,
    config: DecodingConfig = DEFAULT_DECODING,
    streams: Sequence[RandomStream] = (),
) -> list[int]:
    """Return the next id of each row of logits [rows, vocabulary].

    At temperature 0 it is the most likely one; otherwise each row samples with its own stream. `history` holds the ids
    of each row so far, for the repetition penalty.

    >>> sample_tokens(torch.tensor([[0.0, 2.0, 1.0]]))
    [1]
    >>> sample_tokens(torch.tensor([[0.0, 2.0, 1.0]]), [[1]], config=DecodingConfig(repetition=3.0))
    [2]
    """
    logits = apply_repetition_penalty(
        logits.to(torch.promote_types(logits.dtype, torch.float32)), history, config.repetition
    )
    highest, likeliest = logits.max(-1)
    if bool(highest.isnan().any()):
        raise ValueError("the model produced NaN logits, so its weights are broken; load another checkpoint")
    if temperature == 0:
        return likeliest.tolist()
    return draw_tokens(filter_logits(logits / temperature, config), streams)


def apply_repetition_penalty(logits: Tensor, history: TokenHistory, penalty: float) -> Tensor:
    """Divide the logits of ids in the history by the penalty, or multiply them where negative (1909.05858).

    >>> apply_repetition_penalty(torch.tensor([[2.0, -2.0, 2.0]]), [[0, 1]], 4.0).tolist()
    [[0.5, -8.0, 2.0]]
    """
    if penalty == 1:
        return logits
    seen = torch.zeros_like(logits, dtype=torch.bool)
    rows = [row for row, ids in enumerate(history) for _ in ids]
    seen[rows, [token_id for ids in history for token_id in ids]] = True
    return torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def filter_logits(logits: Tensor, config: DecodingConfig) -> Tensor:
    """Set the logits of excluded tokens to -inf; applies `top_k`, then `top_p`, then `min_p`.

    >>> filter_logits(torch.tensor([[0.1, 0.2, 0.7]]).log(), DecodingConfig(top_p=0.8)).isfinite().tolist()
    [[False, True, True]]
    """
    if config.top_k is not None and config.top_k < logits.shape[-1]:
        least = logits.topk(config.top_k).values[..., -1:]
        logits = logits.masked_fill(logits < least, NEG_INF)
    if config.top_p is not None:
        ordered, order = logits.sort(dim=-1)
        excluded = ordered.softmax(-1).cumsum(-1) <= 1 - config.top_p  # in ascending order of probability
        excluded[..., -1] = False
        logits = logits.masked_fill(excluded.scatter(-1, order, excluded), NEG_INF)
    if config.min_p is not None:
        share = logits.softmax(-1)
        logits = logits.masked_fill(share < config.min_p * share.amax(-1, keepdim=True), NEG_INF)
    return logits


def draw_tokens(logits: Tensor, streams: Sequence[RandomStream]) -> list[int]:
    """Sample an id per row from softmax(logits), using one number of the row's stream."""
    unit = torch.tensor([[stream.uniform()] for stream in streams], dtype=torch.float64, device=logits.device)
    cumulative = logits.double().softmax(-1).cumsum(-1)
    total = cumulative[:, -1:]
    below = torch.minimum(
        unit * total, total.nextafter(torch.zeros_like(total))
    )  # the product may round up to the total
    return torch.searchsorted(cumulative, below, right=True)[:, 0].tolist()
