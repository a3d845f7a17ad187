"""Random attention maps with annotated tokens, as head metrics see them, and their bands."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from headwise.observe.head_analysis.annotated_examples import TokenAnnotations
from headwise.observe.head_analysis.weight_bands import WeightBand

HEADS = 3


def random_tokens(
    count: int, draw: np.random.Generator, *, kinds: int = 5, ends: bool = True
) -> TokenAnnotations:
    """Tokens of few kinds, some of them special, with words of one to three pieces between them."""
    special = draw.random(count) < 0.15
    if ends:
        special[[0, -1]] = True
    separator = special & (draw.random(count) < 0.6)
    word, at = np.full(count, -1), -1
    for t in np.flatnonzero(~special):
        new = t == 0 or special[t - 1] or draw.random() < 0.6
        at += bool(new)
        word[t] = at
    ids = draw.integers(0, kinds, count)
    common = draw.integers(1, 4, kinds)[ids] * (draw.random(kinds) < 0.9)[ids]
    texts = tuple([".", ",", "a", "bc", "d"][one % 5] for one in ids)
    flags = [
        torch.from_numpy(np.asarray(one)) for one in (special, separator, ~special & (ids < 2))
    ]
    return TokenAnnotations(
        torch.from_numpy(ids), texts, *flags, torch.from_numpy(word), torch.from_numpy(common)
    )


def random_mask(
    kind: str, num_queries: int, num_keys: int, draw: np.random.Generator
) -> np.ndarray:
    """An attention mask: "full", "causal", "holes" with rows without allowed keys, or "each" head
    with its own.
    """
    if kind == "full":
        return np.ones((num_queries, num_keys), bool)
    causal = np.tril(np.ones((num_queries, num_keys), bool), num_keys - num_queries)
    if kind == "causal":
        return causal
    if kind == "holes":
        holes = causal & (draw.random((num_queries, num_keys)) < 0.7)
        holes[draw.integers(0, num_queries)] = False
        return holes
    return np.stack(
        [causal, np.ones((num_queries, num_keys), bool), draw.random((num_queries, num_keys)) < 0.5]
    )


def weight_map(
    kind: str, seed: int, *, count: int = 17, other: int = 0, **options: Any
) -> WeightBand:
    """The attention map of one text, or of a target of `other` tokens over a source of `count`."""
    draw = np.random.default_rng(seed)
    key_tokens = random_tokens(count, draw, **options)
    query_tokens = random_tokens(other, draw, **options) if other else key_tokens
    allowed = random_mask(kind, query_tokens.count, key_tokens.count, draw)
    scores = draw.normal(0, 2, (HEADS, query_tokens.count, key_tokens.count))
    scores[:, :, 0] += draw.choice(
        [0, 8], (HEADS, query_tokens.count)
    )  # some rows leave nothing beside sinks
    raw = np.where(allowed, np.exp(scores), 0)
    mass = raw.sum(-1, keepdims=True)
    weights = np.divide(raw, mass, out=np.zeros_like(raw), where=mass > 0)
    weights[0] *= 0.9  # a learned sink takes the rest
    return WeightBand(
        torch.from_numpy(weights), torch.from_numpy(allowed), 0, query_tokens, key_tokens
    )


def split_bands(whole: WeightBand, step: int) -> Iterator[WeightBand]:
    """The map in bands of `step` rows."""
    for start in range(0, whole.query_tokens.count, step):
        rows = slice(start, start + step)
        yield WeightBand(
            *(whole.w_HTS[:, rows], whole.allowed[..., rows, :], start, whole.query_tokens),
            whole.key_tokens,
        )
