"""Which token comes next: the likeliest, or one that is drawn from those that are likely enough."""

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
    """The next id of each row of logits [rows, tokens]; at a temperature each row draws from a stream of its own.

    `past` are the ids before, which a penalty for repetition looks at.

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
        raise ValueError("the model says NaN of how likely a token is, so its weights are broken; load others")
    if temperature == 0:
        return likeliest.tolist()
    return draw_tokens(filter_logits(logits / temperature, config), streams)


def apply_repetition_penalty(logits: Tensor, history: TokenHistory, penalty: float) -> Tensor:
    """Logits of ids that were there before divided by the penalty, or multiplied where they are negative (1909.05858).

    >>> apply_repetition_penalty(torch.tensor([[2.0, -2.0, 2.0]]), [[0, 1]], 4.0).tolist()
    [[0.5, -8.0, 2.0]]
    """
    if penalty == 1:
        return logits
    seen = torch.zeros_like(logits, dtype=torch.bool)
    rows = [row for row, ids in enumerate(history) for _ in ids]
    seen[rows, [one for ids in history for one in ids]] = True
    return torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def filter_logits(logits: Tensor, config: DecodingConfig) -> Tensor:
    """Logits with -inf for what is not to be drawn: by `top_k`, of the rest by `top_p`, of the rest by `min_p`.

    >>> filter_logits(torch.tensor([[0.1, 0.2, 0.7]]).log(), DecodingConfig(top_p=0.8)).isfinite().tolist()
    [[False, True, True]]
    """
    if config.top_k is not None and config.top_k < logits.shape[-1]:
        least = logits.topk(config.top_k).values[..., -1:]
        logits = logits.masked_fill(logits < least, NEG_INF)
    if config.top_p is not None:
        ordered, order = logits.sort(dim=-1)
        out = ordered.softmax(-1).cumsum(-1) <= 1 - config.top_p  # from the least likely on
        out[..., -1] = False
        logits = logits.masked_fill(out.scatter(-1, order, out), NEG_INF)
    if config.min_p is not None:
        share = logits.softmax(-1)
        logits = logits.masked_fill(share < config.min_p * share.amax(-1, keepdim=True), NEG_INF)
    return logits


def draw_tokens(logits: Tensor, streams: Sequence[RandomStream]) -> list[int]:
    """An id of each row, as likely as its logit says, by one number of the row's own stream."""
    unit = torch.tensor([[stream.uniform()] for stream in streams], dtype=torch.float64, device=logits.device)
    up_to = logits.double().softmax(-1).cumsum(-1)
    whole = up_to[:, -1:]
    below = torch.minimum(unit * whole, whole.nextafter(torch.zeros_like(whole)))  # the product may be rounded up
    return torch.searchsorted(up_to, below, right=True)[:, 0].tolist()
