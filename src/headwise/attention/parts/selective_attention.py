"""Selective attention: a token masks earlier tokens for all that come after it, in every head."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..interfaces import RowFactors, RowStep
from ..interfaces.core_types import AxisLayout, CallSize, PartParams, SpecFactory
from ..interfaces.part import part
from ..masking.patterns import Causal
from ..spec.attention_spec import AttentionSpec

TILE = 512  # cached tokens whose selections are computed at once


@part
class SelectiveAttention(RowStep):
    """s_ij -> s_ij - F_ij in every head, where F_ij is the sum over the tokens k between j and i of
    ReLU(s_kj) in the first head (2410.02703).

    A token masks others only for the tokens after it, never itself, and nothing masks the first
    token. There are no parameters. Without a cache, F is a running sum over the queries, which the
    backend `chunked` computes in memory linear in the length. Each token caches the query of the
    first head, and a call with a cache computes F from all cached queries: a decode step takes time
    quadratic in the length. Of four tokens with scores of 1, the last query reads the second with a
    score of 0, because the third token masks it:

    >>> import headwise as hw
    >>> modifiers = (SelectiveAttention(),)
    >>> layer = hw.Attention(hw.design(model=1, heads=1, pattern="causal", modifiers=modifiers))
    >>> _ = [weight.data.fill_(1.0) for weight in layer.parameters()]
    >>> scores = hw.Probe("scores")
    >>> _ = layer(torch.ones(1, 4, 1), probe=scores)
    >>> scores.tensors["scores"][0, 0, 3].tolist()
    [1.0, 0.0, 1.0, 1.0]
    """

    paper = "2410.02703"
    disagreements: ClassVar[tuple[str, ...]] = (
        "The paper also drops masked tokens from the cache to a memory budget per layer; here all "
        "tokens stay.",
    )
    needed_head_dims: ClassVar[str] = "queries and keys with heads.dim channels"
    needed_dot_product: ClassVar[str] = "the selection"
    unrestricted_sides: ClassVar[str] = "kv"
    needs_one_mask: ClassVar[bool] = True

    def conflicts(self, spec: AttentionSpec) -> Iterable[str]:
        yield from self.order_conflicts(spec)
        if spec.pattern != Causal():
            yield (
                "SelectiveAttention never masks the first token, which must be a key of every "
                f"query, unlike in {spec.pattern.text}; use pattern causal()"
            )
        yield from self.first_step_conflicts(spec, "sums")

    def required_score_heads(self, spec: AttentionSpec, heads: frozenset[int]) -> frozenset[int]:
        return heads | {0}

    def kv_entry_layouts(self, spec: AttentionSpec) -> Mapping[str, AxisLayout]:
        return {"query": AxisLayout.parse("dim")}

    def flops(self, spec: AttentionSpec, work: CallSize) -> int:
        if work.queries == work.keys:
            return 0
        return 2 * work.batch * work.keys**2 * (spec.sizes_of(self)["dim"] + work.queries)

    def key_factors(self, z_BSE: Tensor, q_BSHK: Tensor, p: PartParams) -> dict[str, Tensor]:
        return {"query": q_BSHK[:, :, 0]}

    def change_row(self, s_S: Tensor, head: int, factors: RowFactors, p: PartParams) -> Tensor:
        masked: list[Tensor] = []
        for j, (score, key_K) in enumerate(zip(s_S, factors.keys_of(0), strict=True)):
            for k in range(j + 1, len(s_S)) if j else ():
                if factors.positions.j[k] < factors.positions.i:
                    selection = (factors.key["query"][k] * key_K).sum() * factors.scale
                    score = score - selection.clamp(min=0)
            masked.append(score)
        return torch.stack(masked) if masked else s_S

    def change_rows(self, s_BHTS: Tensor, factors: RowFactors, p: PartParams) -> Tensor:
        allowed = _mask_of_first_head(factors.allowed)
        if factors.carried is None:
            total_BTS = self._total_of_cached(s_BHTS, allowed, factors)
        else:
            selection_BTS = self._select(s_BHTS, factors)
            total_BTS = selection_BTS.cumsum(1) - selection_BTS + self._carried(s_BHTS, factors)
        is_first = allowed & (allowed.cumsum(-1) == 1)
        return s_BHTS - total_BTS.masked_fill(is_first, 0.0)[:, None]

    def carry(self, s_BHTS: Tensor, factors: RowFactors, p: PartParams) -> Tensor:
        """The sum of the selections of all queries so far, [B, 1, S]."""
        own = self._select(s_BHTS, factors).sum(1, keepdim=True)
        return own + self._carried(s_BHTS, factors)

    def _carried(self, s_BHTS: Tensor, factors: RowFactors) -> Tensor | float:
        """The sum of earlier queries, which select none of the keys after them."""
        if not isinstance(factors.carried, Tensor):
            return 0.0
        return F.pad(factors.carried, (0, s_BHTS.shape[3] - factors.carried.shape[2]))

    def _select(self, s_BHTS: Tensor, factors: RowFactors) -> Tensor:
        """How much each query masks each key before it, [B, T, S]."""
        is_before = _mask_of_first_head(
            factors.allowed & (factors.positions.j < factors.positions.i)
        )
        return s_BHTS[:, 0].relu().masked_fill(~is_before, 0.0)

    def _total_of_cached(self, s_BHTS: Tensor, allowed: Tensor, factors: RowFactors) -> Tensor:
        """F [B, T, S] from the cached queries of all tokens."""
        key_BSK = factors.keys_of(0)
        is_before = allowed & _mask_of_first_head(factors.positions.j < factors.positions.i)
        total_BTS = s_BHTS.new_zeros(s_BHTS.shape[0], *s_BHTS.shape[2:])
        keys = torch.arange(s_BHTS.shape[3], device=s_BHTS.device)
        for start in range(0, s_BHTS.shape[3], TILE):
            tile = slice(start, start + TILE)
            query_BNK = factors.key["query"][:, tile] * factors.scale
            selection_BNS = (query_BNK @ key_BSK.mT).relu().to(s_BHTS.dtype)
            selection_BNS = selection_BNS.masked_fill(keys >= keys[tile, None], 0.0)
            total_BTS = total_BTS + is_before[..., tile].to(s_BHTS.dtype) @ selection_BNS
        return total_BTS

    @classmethod
    def examples(cls, base: SpecFactory) -> Iterator[AttentionSpec]:
        from .rotary_embedding import Rotary

        yield base(modifiers=(cls(),), pattern="causal", kv=2)
        yield base(modifiers=(Rotary(base=30.0), cls()), pattern="causal", vdim=5)


def _mask_of_first_head(pairs: Tensor | None) -> Tensor:
    """Pairs [B, T, S] of a mask for all heads."""
    assert pairs is not None, "one query has no mask"
    return pairs[:, 0]
