"""Log-probabilities of tokens: of a text in one pass of the model, and of each output token as it is chosen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..models import Transformer
from .text_output import REPLACEMENT_CHAR, IncrementalDetokenizer, ModelTokenizer


class TokenScore(NamedTuple):
    """One token: its text, its log-probability (None for the first, which nothing predicts), and the likeliest."""

    text: str
    logprob: float | None
    top: Sequence[tuple[str, float]]


class TokenLogprob(NamedTuple):
    """The log-probability of one token, and the likeliest tokens in its place with theirs."""

    logprob: float
    top_ids: Sequence[int]
    top_logprobs: Sequence[float]

    @staticmethod
    def of(logits_V: Tensor, token_id: int, num_top: int) -> TokenLogprob:
        """Read from the logits that predict the token, before temperature, filters and constraints.

        >>> TokenLogprob.of(torch.tensor([0.5, 0.25, 0.25]).log(), 1, 1).top_ids
        [0]
        """
        logprobs_V = logits_V.double().log_softmax(-1)
        values, likeliest = logprobs_V.topk(min(num_top, len(logprobs_V)))
        return TokenLogprob(float(logprobs_V[token_id]), likeliest.tolist(), values.tolist())


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
        logits_TV = net(torch.tensor([list(ids)], device=device), source=source)[0].cpu()
    logprobs = [
        TokenLogprob.of(logits_TV[position - 1], ids[position], num_top) if position else None
        for position in range(first, len(ids))
    ]
    detokenizer = IncrementalDetokenizer(tokenizer, () if source_ids else ids[:first])
    return [describe_token(detokenizer, *pair) for pair in zip(ids[first:], logprobs, strict=True)]


def describe_token(detokenizer: IncrementalDetokenizer, token_id: int, logprob: TokenLogprob | None) -> TokenScore:
    """Append a token to a text, and return its score with the text that it adds."""
    start = len(detokenizer.text)
    detokenizer.append(token_id)
    text = detokenizer.text[start:]
    if logprob is None:
        return TokenScore(text, None, ())
    names = [_name_token(detokenizer.words, top_id) for top_id in logprob.top_ids]
    return TokenScore(text, logprob.logprob, list(zip(names, logprob.top_logprobs, strict=True)))


def _name_token(tokenizer: ModelTokenizer, token_id: int) -> str:
    """The text of a token; of one that is a part of a character, what the tokenizer calls it."""
    text = tokenizer.text([token_id])
    return tokenizer.token_text(token_id) if REPLACEMENT_CHAR in text or not text else text
