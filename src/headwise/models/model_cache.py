"""KV caches of all layers of a model, and the encoder output that a decoder attends to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from ..cache import KVCache, ProjectedSource
from ..masking.sequence_info import SequenceInfo


@dataclass(eq=False)
class ModelCache:
    """The KV caches of every layer: made by `net.cache(...)`, passed to the model as `cache=`.

    >>> import headwise as hw, torch
    >>> from headwise import model_spec as bp
    >>> block = bp.BlockSpec(hw.design(model=8, heads=2, kv=1, pattern="window(3)"), feed=bp.FeedForwardSpec(16))
    >>> net = hw.build(
    ...     bp.ModelSpec(
    ...         "small",
    ...         "decoder",
    ...         (bp.StackSpec.from_blocks("decoder", 8, [block] * 2, embedding=bp.EmbeddingSpec(11)),),
    ...     )
    ... )
    >>> cache = net.cache(batch=1, capacity=100)
    >>> _ = net(torch.tensor([[3, 1, 4, 1, 5]]), cache=cache)
    >>> cache.used, cache.nbytes  # 2 layers of 3 tokens of 8 numbers of 4 bytes
    (5, 192)
    """

    layers: Sequence[Mapping[str, KVCache]]

    def _iter_caches(self) -> Iterator[KVCache]:
        return (cache for layer in self.layers for cache in layer.values())

    @property
    def one(self) -> KVCache:
        """One of the caches; all of them have received the same tokens."""
        return next(self._iter_caches())

    @property
    def used(self) -> int:
        """The number of tokens received per row, including padding."""
        return self.one.used

    @property
    def batch(self) -> int:
        """The number of rows (batch size)."""
        return self.one.batch

    @property
    def nbytes(self) -> int:
        """The total `nbytes` of all caches: bytes of cached tokens."""
        return sum(cache.nbytes for cache in self._iter_caches())

    @property
    def is_predictable(self) -> bool:
        """Whether `is_predictable` holds for every cache: the next token of each row needs no new kind of update."""
        return all(cache.is_predictable for cache in self._iter_caches())

    def next_positions(self, count: int) -> SequenceInfo:
        """Return the positions of the next `count` tokens: directly after the cached ones."""
        return self.one.next_positions(count)

    def rows(self, index: Tensor) -> None:
        """Keep these rows of the batch, in this order; a row may occur more than once."""
        for cache in self._iter_caches():
            cache.select_rows(index)


class EncoderOutput(NamedTuple):
    """Encoder states, their positions, and their keys and values for every decoder layer, projected once."""

    states: Tensor
    tokens: SequenceInfo
    layers: tuple[ProjectedSource | None, ...]

    def rows(self, index: Tensor) -> EncoderOutput:
        """Return these rows of the batch, in this order; a row may occur more than once."""
        tokens = _select_sequence_rows(self.tokens, index)
        layers = tuple(
            layer and ProjectedSource({name: entry[index] for name, entry in layer.entry.items()}, tokens, layer.spec)
            for layer in self.layers
        )
        return EncoderOutput(self.states[index], tokens, layers)


def _select_sequence_rows(tokens: SequenceInfo, index: Tensor) -> SequenceInfo:
    if tokens.position.shape[0] == 1:
        return tokens
    return SequenceInfo(tokens.position[index], tokens.segment[index], checked=True)
