"""Predict the masked tokens of texts with an encoder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from ..errors import SpecError
from ..models.transformer import Transformer
from .classification import Prediction
from .decoding_state import eval_mode, pad_left, require_language_model
from .prompts import encode_text
from .text_output import ModelTokenizer, load_tokenizers

MASK_TOKENS = ("[MASK]", "<mask>")  # as BERT and RoBERTa write it


class FilledText(NamedTuple):
    """A text with each mask replaced by its most likely token, and the `top` predictions for each mask."""

    text: str
    predictions: list[list[Prediction]]


def fill_masks(net: Transformer, texts: Sequence[str], *, top: int = 5) -> list[FilledText]:
    """Predict each mask of each text with an encoder, independently of the other masks.

    A mask is written as the tokenizer writes it, as in "The [MASK] sat."
    """
    known, kind = require_language_model(net.spec), net.spec.kind
    if kind != "encoder":
        raise SpecError(f"{net.spec.name} is of kind {kind}, and masks are for encoders; call generate")
    if not isinstance(top, int) or not 1 <= top <= known:
        raise ValueError(f"cannot return top={top!r} of {known} tokens; give 1..{known}")
    words, _ = load_tokenizers(net)
    mask = find_mask_id(net, words)
    rows = [encode_masked_text(net, text, mask) for text in texts]
    ids, tokens = pad_left(rows, next(net.parameters()).device)
    with eval_mode(net):
        logits = net(ids, sequence=tokens)
    found = zip(texts, ids, logits, strict=True)
    return [_fill_text(words, text, words.token_text(mask), own[row == mask], top) for text, row, own in found]


def find_mask_id(net: Transformer, tokenizer: ModelTokenizer) -> int:
    """Return the id of the mask token: `usage.mask`, or the tokenizer's own."""
    found = [net.usage.mask, *map(tokenizer.id, MASK_TOKENS)]
    if (mask := next((one for one in found if one is not None), None)) is None:
        raise SpecError(f"{net.spec.name} has no mask token; set net.usage = hw.ProcessorSpec(mask=103)")
    return mask


def encode_masked_text(net: Transformer, text: str, mask_id: int) -> list[int]:
    """Return the ids of a text; raise if it has no mask."""
    row = encode_text(net, text, specials="read")
    if mask_id not in row:
        token = load_tokenizers(net)[0].token_text(mask_id)
        raise ValueError(f"{text!r} holds no {token}; write one where a token is to be filled in")
    return row


def _fill_text(words: ModelTokenizer, text: str, mask: str, logits: Tensor, top: int) -> FilledText:
    """Rank tokens by the logits [masks, vocabulary] and fill the best into the text."""
    likely = logits.float().softmax(-1).topk(top)
    ranked = zip(likely.values.tolist(), likely.indices.tolist(), strict=True)
    masks = [[Prediction(_token_text(words, one), share) for share, one in zip(*row, strict=True)] for row in ranked]
    pieces = text.split(mask)
    between = [guesses[0].name for guesses in masks] + [""]
    return FilledText("".join(a + b for a, b in zip(pieces, between, strict=True)), masks)


def _token_text(words: ModelTokenizer, one: int) -> str:
    """Return the token as text; a special token as its name."""
    return words.text([one]).strip() or words.token_text(one)
