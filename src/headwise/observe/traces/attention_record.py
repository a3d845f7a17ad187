"""Records of a trace: for each layer and call, the tensors from which its weights follow; compact
masks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

# --- Masks and score biases in compact form -------------------------------------------------------


Array = NDArray[Any]

MASKED_BELOW = -1e4  # a bias of this or less is treated as a mask


@dataclass(frozen=True)
class PackedMask:
    """Pack a mask or bias on scores, [B or 1, H or 1, T or 1, S], in the smallest of three forms.

    "bits" adds 0 where the bit is set and `low` elsewhere. "band" has one number per offset (key
    minus query), the most negative offset first. "full" has one number per pair.

    >>> triangle = PackedMask.pack(np.tri(3, dtype=bool)[None, None])
    >>> triangle.form, triangle.unpack_rows(0, 0, 1, 3)
    ('bits', array([[  0.,   0., -inf],
           [  0.,   0.,   0.]], dtype=float32))
    >>> far = -np.abs(np.arange(3.0)[:, None] - np.arange(3.0))
    >>> PackedMask.pack(far[None, None]).form
    'band'
    """

    form: str
    shape: tuple[int, int, int, int]
    values: Array
    low: float = -np.inf

    @staticmethod
    def pack(a: Array) -> PackedMask:
        """Pack a boolean mask (true: attend) or a bias into its smallest form."""
        batch, heads, queries, keys = a.shape
        shape = batch, heads, queries, keys
        if a.dtype == np.bool_:
            return PackedMask("bits", shape, np.packbits(a, -1))
        masked = a <= MASKED_BELOW
        if not masked.any() and not a.any():
            shape = (1, 1, 1, keys)
            return PackedMask("bits", shape, np.packbits(np.ones(shape, bool), -1))
        low = float(a.min())
        if not np.any(a[~masked]) and np.all(a[masked] == low):
            return PackedMask("bits", shape, np.packbits(~masked, -1), low)
        if queries > 1 and np.array_equal(a[:, :, :-1, :-1], a[:, :, 1:, 1:]):
            band = np.concatenate([a[:, :, ::-1, 0], a[:, :, 0, 1:]], -1)
            return PackedMask("band", shape, band.astype(np.float32))
        return PackedMask("full", shape, np.ascontiguousarray(a, np.float32))

    @property
    def identity(self) -> tuple[Any, ...]:
        """Key for deduplication: equal for masks with equal content."""
        return self.form, self.shape, self.low, self.values.tobytes()

    def select_row(self, row: int) -> PackedMask:
        """Return the mask of one row of the batch."""
        if self.shape[0] == 1:
            return self
        return replace(self, shape=(1, *self.shape[1:]), values=self.values[row : row + 1])

    def unpack_rows(self, row: int, head: int, first_query: int, end_query: int) -> Array:
        """Return the bias of one head for a range of queries, [T or 1, S]."""
        batch, heads, queries, keys = self.shape
        head_values = self.values[row if batch > 1 else 0, head if heads > 1 else 0]
        if self.form == "band":
            offset_of_key_0 = queries - 1 - np.arange(first_query, end_query)
            return head_values[offset_of_key_0[:, None] + np.arange(keys)]
        head_values = head_values[first_query:end_query] if queries > 1 else head_values
        if self.form == "full":
            return head_values
        allowed = np.unpackbits(head_values, axis=-1, count=keys).astype(bool)
        return np.where(allowed, np.float32(0), np.float32(self.low))


# --- Records of layers and calls ------------------------------------------------------------------


@dataclass(frozen=True)
class TokenRow:
    """The tokens of one text: ids, strings (`words`), and, if known, the text and each token's
    `offsets` in it.

    The strings come from a tokenizer and may contain any character; escape them before showing
    them.
    """

    ids: tuple[int, ...]
    words: tuple[str, ...]
    offsets: tuple[tuple[int, int], ...] = ()
    text: str = ""

    def __post_init__(self) -> None:
        if len(self.words) != len(self.ids) or len(self.offsets) not in (0, len(self.ids)):
            counts = f"{len(self.ids)} ids, {len(self.words)} words and {len(self.offsets)} offsets"
            raise ValueError(
                f"cannot make a row of tokens of {counts}: give equally many of each, or no offsets"
            )

    @staticmethod
    def from_words(words: tuple[str, ...]) -> TokenRow:
        """Make a row of token strings without known ids; the ids become 0, 1, 2, ..."""
        return TokenRow(tuple(range(len(words))), words)


@dataclass(frozen=True)
class AttentionCallRecord:
    """One forward call of an attention layer: its query and key ranges, and how their scores are
    computed.

    `queries` is the range of query positions in the text. The queries start at row
    `first_query_row` of the array "q"; the keys are rows `keys` of the array "k". Scores are q k^T
    times `scale`, soft-capped at `cap`, plus the trace's masks with the indices `grids`; with
    `causal`, keys after the query are masked. `first` is the position of the first key; if the
    positions have gaps, `places` is the number n of the array "places.n" that lists them; if both
    are None, the positions are unknown. If the weights were recorded, `weights` is the number n of
    the array "weights.n".
    """

    queries: tuple[int, int]
    keys: tuple[int, int]
    first: int | None = 0
    scale: float = 1.0
    cap: float | None = None
    causal: bool = False
    grids: tuple[int, ...] = ()
    weights: int | None = None
    first_query_row: int = 0
    places: int | None = None


@dataclass(frozen=True)
class AttentionRecord:
    """Store one attention layer: its site, its calls in order, and the recorded tensors.

    `kv_head_of_query[h]` is the KV head of head h. `arrays` holds the recorded ones among "q" and
    "z" [B, queries, heads, head_dim], "k" and "v" [B, keys, kv_heads, head_dim], "sinks" [heads],
    "weights.0" [B, heads, queries, keys] and "places.0" [keys]. `query_stream` and `key_stream`
    name the token streams.
    """

    name: str
    stack: str
    layer: int
    kind: str
    path: str
    heads: int
    kv_head_of_query: tuple[int, ...]
    query_stream: str
    key_stream: str
    calls: tuple[AttentionCallRecord, ...]
    arrays: Mapping[str, Array] = field(repr=False)

    @property
    def num_queries(self) -> int:
        """Count queries over all calls."""
        return max((call.queries[1] for call in self.calls), default=0)

    @property
    def num_keys(self) -> int:
        """Count key positions over all calls."""
        end = 0
        for call in self.calls:
            positions = self._key_positions(call)
            is_range = isinstance(positions, slice)
            end = max(end, positions.stop if is_range else int(positions.max(initial=-1)) + 1)
        return end

    @property
    def kv(self) -> int:
        """Return the number of KV heads, as far as the recorded keys tell it."""
        return max(self.kv_head_of_query, default=self.heads - 1) + 1

    @property
    def recorded(self) -> list[str]:
        """Return the kinds of recorded arrays, such as q and k."""
        return sorted({name.partition(".")[0] for name in self.arrays})

    @property
    def batch_size(self) -> int:
        """Return the number of rows in the batch."""
        return len(next(array for name, array in self.arrays.items() if name[0] in "qw"))

    def select_row(self, row: int) -> AttentionRecord:
        """Return the record of one row of the batch."""
        arrays = {
            name: array if name.partition(".")[0] in ("sinks", "places") else array[row : row + 1]
            for name, array in self.arrays.items()
        }
        return replace(self, arrays=arrays)

    def check(self, *, head: int = 0, row: int = 0, query: int = 0) -> None:
        """Raise unless the layer has this head, row and query."""
        sizes = {"head": self.heads, "row": self.batch_size, "query": self.num_queries}
        for what, number in (("head", head), ("row", row), ("query", query)):
            if number and not 0 <= number < sizes[what]:
                raise ValueError(
                    f"{self.name} has no {what} {number}; give one in 0..{sizes[what] - 1}"
                )

    def find_call(self, query: int) -> AttentionCallRecord:
        """Return the call that contains a query; raise if its key positions are unknown."""
        call = next(one for one in self.calls if one.queries[0] <= query < one.queries[1])
        self.key_indices(call)
        return call

    def queries_of(
        self, call: AttentionCallRecord, head: int, row: int, start: int, stop: int
    ) -> Array:
        """Return queries of a head in a range counted from the start of the call, [T, head_dim]."""
        first = call.first_query_row
        return self.arrays["q"][row, first + start : first + stop, head].astype(np.float32)

    def keys_of(
        self,
        call: AttentionCallRecord,
        head: int,
        row: int,
        name: str = "k",
        count: int | None = None,
    ) -> Array:
        """Return the first `count` keys of a head in a call, or values with `name="v"`, [S,
        head_dim].
        """
        stop = call.keys[1] if count is None else call.keys[0] + count
        kv_head = self.kv_head_of_query[head]
        return self.arrays[name][row, call.keys[0] : stop, kv_head].astype(np.float32)

    def weights(
        self, head: int, row: int, queries: tuple[int, int], grids: tuple[PackedMask, ...]
    ) -> Array:
        """Compute attention weights of one head for a range of queries, [queries, keys], in
        float32.
        """
        weights = np.zeros((queries[1] - queries[0], self.num_keys), np.float32)
        for call, rows, start, stop in self._calls_of(queries):
            self.key_indices(call)
            if call.weights is not None:
                recorded = self.arrays[f"weights.{call.weights}"]
                weights[rows, self._key_positions(call)] = recorded[row, head, start:stop]
                continue
            num_keys = call.keys[1] - call.keys[0]
            # later keys are masked for all of these queries
            reach = min(stop, num_keys) if call.causal else num_keys
            k = self.keys_of(call, head, row, count=reach)
            scores = self.queries_of(call, head, row, start, stop) @ k.T
            scores *= np.float32(call.scale)
            if call.cap is not None:
                scores = np.float32(call.cap) * np.tanh(scores / np.float32(call.cap))
            for number in call.grids:
                scores += grids[number].unpack_rows(row, head, start, stop)[:, :reach]
            if call.causal:
                np.copyto(scores, -np.inf, where=np.arange(reach) > np.arange(start, stop)[:, None])
            call_weights = np.zeros((len(scores), num_keys), np.float32)
            call_weights[:, :reach] = softmax_with_sink(scores, self.sink(head))
            weights[rows, self._key_positions(call)] = call_weights
        return weights

    def allowed(
        self, head: int, row: int, queries: tuple[int, int], grids: tuple[PackedMask, ...]
    ) -> Array:
        """True where a query may attend to a key, [queries, keys].

        If only weights were recorded, the pairs with a weight above zero count as allowed.
        """
        allowed = np.zeros((queries[1] - queries[0], self.num_keys), bool)
        for call, rows, start, stop in self._calls_of(queries):
            if call.weights is not None:
                is_allowed = self.arrays[f"weights.{call.weights}"][row, head, start:stop] > 0
            else:
                num_keys = call.keys[1] - call.keys[0]
                is_allowed: Array = np.ones((stop - start, num_keys), bool)
                for number in call.grids:
                    bias = grids[number].unpack_rows(row, head, start, stop)
                    is_allowed &= bias > MASKED_BELOW
                if call.causal:
                    is_allowed &= np.arange(num_keys) <= np.arange(start, stop)[:, None]
            allowed[rows, self._key_positions(call)] = is_allowed
        return allowed

    def _calls_of(
        self, queries: tuple[int, int]
    ) -> Iterator[tuple[AttentionCallRecord, slice, int, int]]:
        """Yield the calls with queries in this range.

        Each item is the call, the rows of its queries in the range, and the first and the end of
        its queries, counted from the start of the call.
        """
        for call in self.calls:
            first = max(queries[0], call.queries[0])
            end = min(queries[1], call.queries[1])
            if first < end:
                rows = slice(first - queries[0], end - queries[0])
                yield call, rows, first - call.queries[0], end - call.queries[0]

    def key_indices(self, call: AttentionCallRecord) -> Array:
        """Return the key positions of a call; raise if they are unknown."""
        if call.first is None and call.places is None:
            raise ValueError(
                f"the key positions of queries {call.queries[0]}..{call.queries[1] - 1} of "
                f"{self.name} are unknown, because their cache was reordered; trace the whole "
                "text in one forward call"
            )
        positions = self._key_positions(call)
        if isinstance(positions, slice):
            return np.arange(positions.start, positions.stop, dtype=np.int64)
        return positions

    def _key_positions(self, call: AttentionCallRecord) -> Array | slice:
        """Return the key positions of a call: a slice, fast to assign to, unless they have gaps."""
        if call.places is not None:
            return self.arrays[f"places.{call.places}"]
        first = call.first or 0
        return slice(first, first + call.keys[1] - call.keys[0])

    def sink(self, head: int) -> float | None:
        """Return the sink score of a head, or None."""
        sinks = self.arrays.get("sinks")
        return None if sinks is None else float(sinks[head])


def softmax_with_sink(scores: Array, sink: float | None = None) -> Array:
    """Apply softmax over the last axis in place.

    A sink takes part of each row. A row without allowed keys is zero.

    >>> softmax_with_sink(np.array([[0.0, 0.0], [-np.inf, -np.inf]]))
    array([[0.5, 0.5],
           [0. , 0. ]])
    >>> softmax_with_sink(np.zeros((1, 1)), sink=0.0)
    array([[0.5]])
    """
    row_max = scores.max(-1, keepdims=True, initial=-np.inf if sink is None else sink)
    row_max: Array = np.where(np.isneginf(row_max), 0, row_max)
    np.exp(np.subtract(scores, row_max, out=scores), out=scores)
    row_sum = scores.sum(-1, keepdims=True)
    if sink is not None:
        row_sum = row_sum + np.exp(sink - row_max)
    return np.divide(scores, row_sum, out=scores, where=row_sum > 0)
