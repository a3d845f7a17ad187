"""Log-probabilities of the tokens of a text, in one pass of the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..models import Transformer
from .text_output import REPLACEMENT_CHAR, IncrementalDetokenizer, ModelTokenizer


class TokenScore(NamedTuple):
    """One token: its text, its log-probability (None for the first, which nothing predicts), and the likeliest."""

    text: str
    logprob: float | None
    top: Sequence[tuple[str, float]]


def score_tokens(
    net: Transformer,
    tokenizer: ModelTokenizer,
    ids: Sequence[int],
    first: int,
    num_top: int,
    source_ids: Sequence[int] = (),
) -> list[TokenScore]:
    """The scores of `ids[first:]`, each given all ids before it, which the decoder reads at once.

    `source_ids` are the source of an encoder-decoder.
    """
    with torch.inference_mode():
        device = next(net.parameters()).device
        source = net.encode(torch.tensor([list(source_ids)], device=device)) if source_ids else None
        logits = net(torch.tensor([list(ids)], device=device), source=source)[0].double()
        logprobs = logits.log_softmax(-1).cpu()
    detokenizer = IncrementalDetokenizer(tokenizer, () if source_ids else ids[:first])
    scores: list[TokenScore] = []
    for position in range(first, len(ids)):
        start = len(detokenizer.text)
        detokenizer.append(ids[position])
        text = detokenizer.text[start:]
        if position == 0:
            scores.append(TokenScore(text, None, ()))
            continue
        row = logprobs[position - 1]
        values, likeliest = row.topk(min(num_top, len(row)))
        pairs = zip(likeliest.tolist(), values.tolist(), strict=True)
        top = [(_name_token(tokenizer, token), value) for token, value in pairs]
        scores.append(TokenScore(text, float(row[ids[position]]), top))
    return scores


def _name_token(tokenizer: ModelTokenizer, token_id: int) -> str:
    """The text of a token; of one that is a part of a character, what the tokenizer calls it."""
    text = tokenizer.text([token_id])
    return tokenizer.token_text(token_id) if REPLACEMENT_CHAR in text or not text else text
