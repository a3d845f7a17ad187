"""Views of a trace with other tokens: subwords merged into words, special tokens or the first token
left out.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from .attention_record import Array, AttentionCallRecord, AttentionRecord, TokenRow
from .attention_trace import Trace, query_blocks

SPECIAL_TOKEN = re.compile(r"(\[[A-Z]+\]|<[^<>\s]{1,24}>|<\|.*\|>)")
WORD_STARTS = ("Ġ", "▁", " ")  # how byte-level BPE and SentencePiece mark the first token of a word
CONTINUATION = "##"  # how WordPiece marks the other tokens
MAX_WEIGHT_BYTES = 10**9  # of the weights of all heads, which a grouped trace stores


@dataclass(frozen=True)
class TokenGrouping:
    """Which tokens become one, and which are left out.

    `words` merges the subwords of a word: weights on them are added, and those of the word are the
    mean of theirs. `special` leaves out tokens that stand for no text, such as [CLS]; `first`
    leaves out the first token of each text, on which many heads put most of their weight. The
    weights of a query on the other tokens are divided by their sum.
    """

    words: bool = False
    special: bool = False
    first: bool = False

    @property
    def changes_anything(self) -> bool:
        """Whether any of the three is asked for."""
        return self.words or self.special or self.first


def group_tokens(trace: Trace, grouping: TokenGrouping, *, row: int = 0) -> Trace:
    """A trace of one text of `trace` with tokens merged or left out. It stores weights, without
    queries and keys.

    >>> from headwise.observe.traces import trace_from_weights
    >>> weights = np.array([[1, 0, 0], [0.5, 0.5, 0], [0.2, 0.4, 0.4]])
    >>> trace = trace_from_weights([weights[None, None]], ["[CLS]", "play", "##ing"])
    >>> group_tokens(trace, TokenGrouping(words=True)).head_weights(0, 0).round(3)
    array([[1.  , 0.  ],
           [0.35, 0.65]], dtype=float32)
    """
    groups = {name: find_groups(rows[row], grouping) for name, rows in trace.streams.items()}
    empty = [name for name, places in groups.items() if not places]
    if empty:
        raise ValueError(
            f"no token of the {empty[0]} would be left; show special tokens or the first token"
        )
    stored = sum(
        4 * layer.heads * len(groups[layer.query_stream]) * len(groups[layer.key_stream])
        for layer in trace.layers
    )
    if stored > MAX_WEIGHT_BYTES:
        raise ValueError(
            f"the weights of all heads take {stored / 1e9:.1f} GB, more than "
            f"{MAX_WEIGHT_BYTES / 1e9:g} GB; use a "
            "shorter text"
        )
    return Trace(
        trace.model,
        {name: (_merge_tokens(rows[row], groups[name]),) for name, rows in trace.streams.items()},
        tuple(_group_layer(trace, layer, groups, grouping, row) for layer in trace.layers),
        skipped=trace.skipped,
        classes=trace.classes,
    )


def find_groups(tokens: TokenRow, grouping: TokenGrouping) -> list[list[int]]:
    """The positions of each token of the view; those of tokens that are left out are in none.

    >>> words = TokenRow.from_words(("[CLS]", "un", "##happy", "cats"))
    >>> find_groups(words, TokenGrouping(words=True, special=True))
    [[1, 2], [3]]
    """
    groups: list[list[int]] = []
    has_marks = any(word.startswith(WORD_STARTS) for word in tokens.words)
    for place, word in enumerate(tokens.words):
        is_special = SPECIAL_TOKEN.fullmatch(word) is not None
        if (grouping.special and is_special) or (grouping.first and place == 0):
            continue
        follows = groups and groups[-1][-1] == place - 1
        if (
            grouping.words
            and follows
            and not is_special
            and _continues_word(tokens, place, has_marks)
        ):
            groups[-1].append(place)
        else:
            groups.append([place])
    return groups


def _continues_word(tokens: TokenRow, place: int, has_marks: bool) -> bool:
    """Whether a token goes on with the word of the token before it."""
    before = tokens.words[place - 1]
    word = tokens.words[place]
    if SPECIAL_TOKEN.fullmatch(before):
        return False
    if word.startswith(CONTINUATION) and len(word) > len(CONTINUATION):
        return True
    if tokens.offsets and tokens.text:
        (_, end) = tokens.offsets[place - 1]
        (start, stop) = tokens.offsets[place]
        return (
            start == end
            and 0 < start < stop
            and _is_inside_word(tokens.text[start - 1], tokens.text[start])
        )
    return has_marks and not word.startswith(WORD_STARTS) and _is_inside_word(before[-1:], word[:1])


def _is_inside_word(before: str, after: str) -> bool:
    """Whether two neighbouring characters belong to one word: letters and digits, but not
    ideographs.
    """
    return all(
        sign.isalnum()
        and not unicodedata.name(sign, "").startswith(("CJK", "HIRAGANA", "KATAKANA", "HANGUL"))
        for sign in (before, after)
    )


def _merge_tokens(tokens: TokenRow, groups: list[list[int]]) -> TokenRow:
    """The tokens of the view; a merged one has the id of its first token."""
    words: list[str] = []
    for places in groups:
        first, *rest = (tokens.words[place] for place in places)
        words.append(first + "".join(word.removeprefix(CONTINUATION) for word in rest))
    offsets = tuple(
        (tokens.offsets[places[0]][0], tokens.offsets[places[-1]][1])
        for places in groups
        if tokens.offsets
    )
    return TokenRow(
        tuple(tokens.ids[places[0]] for places in groups), tuple(words), offsets, tokens.text
    )


def _group_layer(
    trace: Trace,
    layer: AttentionRecord,
    groups: dict[str, list[list[int]]],
    grouping: TokenGrouping,
    row: int,
) -> AttentionRecord:
    queries = groups[layer.query_stream]
    keys = groups[layer.key_stream]
    starts = np.array([places[0] for places in keys])
    key_indices = np.array([place for place in chain.from_iterable(keys) if place < layer.num_keys])
    edges = np.searchsorted(key_indices, starts)
    weights = np.zeros((1, layer.heads, len(queries), len(keys)), np.float32)
    for head in range(layer.heads):
        rows = np.concatenate(
            [
                _keep_keys(
                    trace.head_weights(layer.name, head, slice(*block), row=row),
                    key_indices,
                    grouping,
                )
                for block in query_blocks(layer.num_queries)
            ]
        )
        summed = np.add.reduceat(rows, edges, axis=1)
        weights[0, head] = [summed[places].mean(0) for places in queries]
    call = AttentionCallRecord((0, len(queries)), (0, len(keys)), weights=0)
    return replace(layer, calls=(call,), arrays={"weights.0": weights})


def _keep_keys(weights: Array, key_indices: Array, grouping: TokenGrouping) -> Array:
    """The weights on the keys that are kept; where some were left out, divided by their sum."""
    chosen = weights[:, key_indices]
    if not (grouping.special or grouping.first):
        return chosen
    total = chosen.sum(1, keepdims=True, dtype=np.float64)
    return np.divide(chosen, total, out=np.zeros_like(chosen), where=total > 0)
