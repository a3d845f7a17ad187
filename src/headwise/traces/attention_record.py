"""What a trace holds: tokens, and what each attention worked with while it read them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from .packed_masks import Array, PackedMask

RECORDED_TENSORS = ("q", "k", "v", "z")


@dataclass(frozen=True)
class TokenRow:
    """The tokens of one text: their ids, how they are written, and where each stands in the text, where that is known.

    Nothing is known of the strings: they come from a tokenizer, and may hold any character.
    """

    ids: tuple[int, ...]
    words: tuple[str, ...]
    offsets: tuple[tuple[int, int], ...] = ()
    text: str = ""

    def __post_init__(self) -> None:
        if len(self.words) != len(self.ids) or len(self.offsets) not in (0, len(self.ids)):
            counts = f"{len(self.ids)} ids, {len(self.words)} words and {len(self.offsets)} offsets"
            raise ValueError(f"{counts} are of no one text; give as many of each, or no offsets")

    @staticmethod
    def from_words(words: tuple[str, ...]) -> TokenRow:
        """Tokens of which only the writing is known."""
        return TokenRow(tuple(range(len(words))), words)


@dataclass(frozen=True)
class AttentionCallRecord:
    """One call of an attention: which queries asked, by their numbers, which keys were there, and how they compare.

    Its queries begin at `asked` in "q", its keys are those at `keys` in "k". Scores are q k^T times `scale`, capped
    softly at `cap`, plus the numbers of `grids` of the trace; with `causal` a pair counts where the key is not ahead of
    the query. `first` is the number of the first key among the tokens that are read; where they leave gaps, `places`
    numbers the array that says which they are; neither, where that is not known. Where weights were kept instead,
    `weights` numbers them.
    """

    queries: tuple[int, int]
    keys: tuple[int, int]
    first: int | None = 0
    scale: float = 1.0
    cap: float | None = None
    causal: bool = False
    grids: tuple[int, ...] = ()
    weights: int | None = None
    asked: int = 0
    places: int | None = None


@dataclass(frozen=True)
class AttentionRecord:
    """One attention: who it is, what it worked with, and when.

    `reads[h]` is the head of keys that head h reads. `arrays` holds "q" and "z" [B, queries, heads, width], "k" and "v"
    [B, keys, heads of keys, width], "sinks" [heads], "weights.0" [B, heads, queries, keys] and "places.0" [keys], as
    far as each was kept.
    `asks` and `told` name the streams of tokens that queries and keys belong to.
    """

    name: str
    stack: str
    layer: int
    kind: str
    path: str
    heads: int
    reads: tuple[int, ...]
    asks: str
    told: str
    calls: tuple[AttentionCallRecord, ...]
    arrays: Mapping[str, Array] = field(repr=False)

    @property
    def num_queries(self) -> int:
        """How many queries were asked in all."""
        return max((call.queries[1] for call in self.calls), default=0)

    @property
    def num_keys(self) -> int:
        """How many tokens were read in all."""
        return max((int(self._key_indices(call).max(initial=-1)) + 1 for call in self.calls), default=0)

    @property
    def batch_size(self) -> int:
        """How many texts were read side by side."""
        return len(next(array for name, array in self.arrays.items() if name[0] in "qw"))

    def weights(self, head: int, row: int, queries: tuple[int, int], grids: tuple[PackedMask, ...]) -> Array:
        """The weights of one head for some queries, [queries, keys], in float32."""
        start, stop = queries
        found = np.zeros((stop - start, self.num_keys), np.float32)
        for call in self.calls:
            one, other = max(start, call.queries[0]), min(stop, call.queries[1])
            if one >= other:
                continue
            if call.first is None and call.places is None:
                raise ValueError(
                    f"{self.name}: the keys of queries {call.queries[0]}..{call.queries[1] - 1} stand in an order that "
                    "is not known, for their cache was reordered; trace the whole text in one run"
                )
            own = self._call_weights(call, head, row, (one - call.queries[0], other - call.queries[0]), grids)
            found[one - start : other - start, self._key_indices(call)] = own
        return found

    def _key_indices(self, call: AttentionCallRecord) -> Array:
        """The numbers of the keys of a call."""
        if call.places is not None:
            return self.arrays[f"places.{call.places}"]
        return (call.first or 0) + np.arange(call.keys[1] - call.keys[0])

    def _call_weights(
        self, call: AttentionCallRecord, head: int, row: int, at: tuple[int, int], grids: tuple[PackedMask, ...]
    ) -> Array:
        start, stop = at
        if call.weights is not None:
            return self.arrays[f"weights.{call.weights}"][row, head, start:stop].astype(np.float32)
        q = self.arrays["q"][row, call.asked + start : call.asked + stop, head].astype(np.float32)
        k = self.arrays["k"][row, slice(*call.keys), self.reads[head]].astype(np.float32)
        s = q @ k.T * np.float32(call.scale)
        if call.cap is not None:
            s = np.float32(call.cap) * np.tanh(s / np.float32(call.cap))
        for number in call.grids:
            s += grids[number].unpack_rows(row, head, start, stop)
        if call.causal:
            s[np.arange(s.shape[1]) > np.arange(start, stop)[:, None]] = -np.inf
        sinks = self.arrays.get("sinks")
        return softmax_with_sink(s, None if sinks is None else float(sinks[head]))


def softmax_with_sink(s: Array, sink: float | None = None) -> Array:
    """Rows of shares, in place; with a sink some of each row goes to nobody, and a row without a key is zero.

    >>> softmax_with_sink(np.array([[0.0, 0.0], [-np.inf, -np.inf]]))
    array([[0.5, 0.5],
           [0. , 0. ]])
    >>> softmax_with_sink(np.zeros((1, 1)), sink=0.0)
    array([[0.5]])
    """
    top = s.max(-1, keepdims=True, initial=-np.inf if sink is None else sink)
    top: Array = np.where(np.isneginf(top), 0, top)
    np.exp(np.subtract(s, top, out=s), out=s)
    total = s.sum(-1, keepdims=True)
    if sink is not None:
        total = total + np.exp(sink - top)
    return np.divide(s, total, out=s, where=total > 0)
