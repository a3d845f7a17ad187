"""Gaussian kernel similarity: scores depend on the distance between query and key."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar

import torch
from torch import Tensor

from ..interfaces import Similarity
from ..interfaces.core_types import CoreShape, PartParams, SpecFactory
from ..interfaces.part import part
from ..spec.attention_spec import AttentionSpec
from .precision import to_at_least_float32, without_autocast

MAX_DIFFERENCE_NUMEL = 2**24  # limit on the elements of query-key differences in memory at once
MIN_BANDWIDTH = 1e-9  # for smaller widths, distance / width^2 can overflow float32


@part
class Gaussian(Similarity):
    """s = -|q - k|^2 / (2 width^2); with Softmax, the kernel regression of Nadaraya (1964) and Watson (1964).

    A small width selects the nearest key, a large one averages all keys. If all keys have equal length it is the same
    as Dot(scale=1 / width^2), because the length of the query is constant within its row.

    Computed as q.k - |q|^2 / 2 - |k|^2 / 2, small distances between long vectors would be lost to rounding. So the
    difference of every pair is computed, in blocks of queries; the backward pass still needs the differences of all
    blocks.

    >>> Gaussian(width=2.0).pair(torch.tensor([3.0, 1.0]), torch.tensor([0.0, 5.0]), 1.0, {}).item()  # -25 / 8
    -3.125
    """

    unrestricted_sides: ClassVar[str] = "kv"
    width: float = 1.0

    def conflicts(self, spec: AttentionSpec) -> Iterable[str]:
        if not self.width >= MIN_BANDWIDTH:
            yield (
                f"Gaussian(width={self.width!r}) is too small to divide by; use at least {MIN_BANDWIDTH}, such as 1.0"
            )
        if not spec.project.uses_head_dims:
            name = type(spec.project).__name__
            yield f"Gaussian needs queries and keys with heads.dim channels, unlike {name}; use project Direct()"

    def score_scale(self, core: CoreShape) -> float:
        return 1.0

    def pair(self, q_K: Tensor, k_K: Tensor, scale: float, p_h: Mapping[str, Tensor]) -> Tensor:
        return -(q_K - k_K).square().sum(-1) / (2 * self.width**2)

    def scores(self, q_BHTK: Tensor, k_BHSK: Tensor, scale: float, p: PartParams) -> Tensor:
        q, k = to_at_least_float32(q_BHTK), to_at_least_float32(k_BHSK)
        queries = max(1, MAX_DIFFERENCE_NUMEL // max(1, k.numel()))
        with without_autocast(q):
            blocks = [self._block_scores(block, k) for block in q.split(queries, 2)]
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks, 2)

    def _block_scores(self, q_BHTK: Tensor, k_BHSK: Tensor) -> Tensor:
        """s_BHTS of a block of queries, as matrix products of differences, as `CoreShape.flops` counts them."""
        difference = (q_BHTK[:, :, :, None] - k_BHSK[:, :, None]) / self.width
        return torch.matmul(difference[..., None, :], difference[..., None]).flatten(-3) / -2

    @classmethod
    def examples(cls, base: SpecFactory) -> Iterator[AttentionSpec]:
        yield base(similarity=cls(width=1.5), pattern="causal", kv=2, vdim=5)
        yield base(similarity=cls(width=0.7), source=13)
