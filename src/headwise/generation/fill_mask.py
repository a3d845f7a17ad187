"""What may stand for each mask in a text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from ..errors import SpecError
from ..models.transformer import Transformer
from .classification import Guess
from .decoding_state import answering, check_says, side_by_side
from .prompts import read
from .text_output import Words, words_of

MASKS = ("[MASK]", "<mask>")  # as BERT and RoBERTa write it


class Filled(NamedTuple):
    """A text with the likeliest token for each of its masks, and the likeliest tokens for each, best first."""

    text: str
    masks: list[list[Guess]]


def fill(net: Transformer, texts: Sequence[str], *, top: int = 5) -> list[Filled]:
    """What an encoder with a head over tokens takes for the masks of each text, each mask by itself.

    A mask is written as the tokenizer writes it, as in "The [MASK] sat."
    """
    known, kind = check_says(net.described), net.described.kind
    if kind != "encoder":
        raise SpecError(f"{net.described.name} is of kind {kind}, and masks are for encoders; call generate")
    if not isinstance(top, int) or not 1 <= top <= known:
        raise ValueError(f"top={top!r} of {known} tokens cannot be told; give 1..{known}")
    words, _ = words_of(net)
    mask = mask_of(net, words)
    rows = [masked(net, text, mask) for text in texts]
    ids, tokens = side_by_side(rows, next(net.parameters()).device)
    with answering(net):
        logits = net(ids, tokens=tokens)
    found = zip(texts, ids, logits, strict=True)
    return [_filled(words, text, words.token(mask), own[row == mask], top) for text, row, own in found]


def mask_of(net: Transformer, words: Words) -> int:
    """The id of the mask: what the usage says, or the tokenizer's own."""
    found = [net.usage.mask, *map(words.id, MASKS)]
    if (mask := next((one for one in found if one is not None), None)) is None:
        raise SpecError(f"{net.described.name} has no token for a mask; say it, as in net.usage = Usage(mask=103)")
    return mask


def masked(net: Transformer, text: str, mask: int) -> list[int]:
    """The ids of a text that holds masks."""
    row = read(net, text, specials="read")
    if mask not in row:
        token = words_of(net)[0].token(mask)
        raise ValueError(f"{text!r} holds no {token}; write one where a token is to be filled in")
    return row


def _filled(words: Words, text: str, mask: str, logits: Tensor, top: int) -> Filled:
    """The likeliest tokens by the logits [masks, tokens] of a text."""
    likely = logits.float().softmax(-1).topk(top)
    ranked = zip(likely.values.tolist(), likely.indices.tolist(), strict=True)
    masks = [[Guess(_written(words, one), share) for share, one in zip(*row, strict=True)] for row in ranked]
    pieces = text.split(mask)
    between = [guesses[0].name for guesses in masks] + [""]
    return Filled("".join(a + b for a, b in zip(pieces, between, strict=True)), masks)


def _written(words: Words, one: int) -> str:
    """A token as it stands in a text, and a special one by its name."""
    return words.text([one]).strip() or words.token(one)
