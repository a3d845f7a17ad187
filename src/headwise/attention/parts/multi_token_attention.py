"""Multi-token attention: scores of neighbouring queries and keys decide together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..interfaces import RowFactors, RowStep
from ..interfaces.core_types import AxisLayout, CallSize, Param, PartParams, SpecFactory
from ..interfaces.part import part
from ..masking.patterns import Causal
from ..spec.attention_spec import AttentionSpec
from .initialisers import weight


@part
class KeyQueryConvolution(RowStep):
    """s_ij -> the sum over a < `queries` and |b| <= `keys` // 2 of W_ab s_(i-a)(j+b): a convolution
    over queries and keys, with one kernel W per head (2504.00927).

    Scores of later keys than their query count as 0 before the convolution, and are masked after
    it. The kernel starts as the identity, so that a new layer equals plain attention. Each token
    caches the queries of all heads, of which a decode step reads the last `queries` - 1. A kernel
    of ones over two queries adds the score of the query before:

    >>> import headwise as hw
    >>> modifiers = (KeyQueryConvolution(queries=2, keys=1),)
    >>> layer = hw.Attention(hw.design(model=1, heads=1, pattern="causal", modifiers=modifiers))
    >>> _ = [weight.data.fill_(1.0) for weight in layer.parameters()]
    >>> scores = hw.Probe("scores")
    >>> _ = layer(torch.ones(1, 3, 1), probe=scores)
    >>> scores.tensors["scores"][0, 0, 2].tolist()
    [2.0, 2.0, 1.0]
    """

    paper = "2504.00927"
    disagreements: ClassVar[tuple[str, ...]] = (
        "The formula masks s_(i-a)(j+b) by the position of the query i, the simpler form that the "
        "paper and its code use by that of the query i - a: as in the code.",
        "The released configurations also convolve weights after the softmax, and replace the "
        "scaling by depth of the group norm by a gate; here the convolution is on the scores only.",
    )
    needed_head_dims: ClassVar[str] = "queries and keys with heads.dim channels"
    needed_dot_product: ClassVar[str] = "scores of earlier queries"
    unrestricted_sides: ClassVar[str] = "kv"
    needs_one_mask: ClassVar[bool] = True
    queries: int = 6
    keys: int = 11
    field_minima: ClassVar = {"queries": 1, "keys": 1}

    def conflicts(self, spec: AttentionSpec) -> Iterable[str]:
        yield from self.order_conflicts(spec)
        if self.keys % 2 == 0:
            yield (
                f"KeyQueryConvolution(keys={self.keys}) has no middle key; use keys={self.keys + 1}"
            )
        if spec.pattern != Causal():
            yield (
                "KeyQueryConvolution reads the keys of earlier queries, which "
                f"{spec.pattern.text} may hide; use pattern causal()"
            )
        yield from self.first_step_conflicts(spec, "reads")

    def sizes(self, spec: AttentionSpec) -> Mapping[str, int]:
        return {"query_offset": self.queries, "key_offset": self.keys}

    def params(self, spec: AttentionSpec) -> Mapping[str, Param]:
        return {"kernel": weight("q query_offset key_offset", _identity_kernel)}

    def kv_entry_layouts(self, spec: AttentionSpec) -> Mapping[str, AxisLayout]:
        return {"query": AxisLayout.parse("q dim")}

    def flops(self, spec: AttentionSpec, work: CallSize) -> int:
        sizes = spec.sizes_of(self)
        kernel = 2 * work.batch * work.pairs * sizes["q"] * self.queries * self.keys
        if work.queries == work.keys:
            return kernel
        pairs = work.queries * work.keys
        earlier = 2 * work.batch * pairs * sizes["q"] * sizes["dim"] * (self.queries - 1)
        return kernel + earlier

    def key_factors(self, z_BSE: Tensor, q_BSHK: Tensor, p: PartParams) -> dict[str, Tensor]:
        return {"query": q_BSHK}

    def change_row(self, s_S: Tensor, head: int, factors: RowFactors, p: PartParams) -> Tensor:
        index = {int(j): n for n, j in enumerate(factors.positions.j)}
        i = int(factors.positions.i)
        key_SK = factors.keys_of(head)
        changed: list[Tensor] = []
        for j in index:
            total = torch.zeros_like(s_S[0])
            for a in range(self.queries):
                for b in range(-(self.keys // 2), self.keys // 2 + 1):
                    is_there = j + b in index and j + b <= i - a and (a == 0 or i - a in index)
                    if not is_there:
                        continue
                    score = s_S[index[j + b]]
                    if a:
                        query_K = factors.key["query"][index[i - a], head]
                        score = (query_K * key_SK[index[j + b]]).sum() * factors.scale
                    total = total + self._weight(p, head, a, b) * score
            changed.append(total)
        return torch.stack(changed) if changed else s_S

    def _weight(self, p: PartParams, head: int, a: int, b: int) -> Tensor:
        """The weight of the score of a queries earlier and b keys later."""
        return p["kernel"][head, self.queries - 1 - a, self.keys // 2 + b]

    def change_rows(self, s_BHTS: Tensor, factors: RowFactors, p: PartParams) -> Tensor:
        assert factors.allowed is not None, "one query has no mask"
        if not s_BHTS.numel():
            return s_BHTS  # torch convolves no empty tensors
        distance = factors.positions.i - factors.positions.j
        planes: list[Tensor] = []  # the scores of each query offset, in the order of the kernel
        for a in reversed(range(self.queries)):
            is_earlier = factors.allowed & (distance == a)
            has_earlier = is_earlier.any(-1, keepdim=True) | (a == 0)
            readable = factors.allowed & (distance >= a) & has_earlier
            scores = self._earlier_scores(s_BHTS, a, is_earlier, factors) if a else s_BHTS
            planes.append(scores.masked_fill(~readable, 0.0))
        kernel = p["kernel"].to(s_BHTS.dtype)
        padding = (0, self.keys // 2)
        changed: list[Tensor] = []
        for head, own_kernel in enumerate(kernel):  # grouped ones count too many FLOPs in torch
            own_planes = torch.stack([plane[:, head] for plane in planes], 1)
            changed.append(F.conv2d(own_planes, own_kernel[None, :, None], padding=padding))
        return torch.cat(changed, 1)

    def _earlier_scores(
        self, s_BHTS: Tensor, a: int, is_earlier: Tensor, factors: RowFactors
    ) -> Tensor:
        """The scores [B, H, T, S] of the tokens `a` before the queries."""
        if factors.carried is not None:
            rows = torch.cat([self._carried(s_BHTS, factors), s_BHTS], 2)
            start = self.queries - 1 - a
            return rows[:, :, start : start + s_BHTS.shape[2]]
        q_BSHK = factors.key["query"]
        index = is_earlier[:, 0].int().argmax(-1)[..., None, None]
        index = index.expand(len(q_BSHK), s_BHTS.shape[2], *q_BSHK.shape[2:])
        q_BHTK = q_BSHK.gather(1, index).transpose(1, 2)
        k_BHSK = factors.keys[:, :, list(factors.key_head_of_query)].transpose(1, 2)
        return (q_BHTK * factors.scale @ k_BHSK.mT).to(s_BHTS.dtype)

    def carry(self, s_BHTS: Tensor, factors: RowFactors, p: PartParams) -> Tensor | None:
        """The scores of the last `queries` - 1 queries."""
        if factors.carried is None or self.queries == 1:
            return None
        rows = torch.cat([self._carried(s_BHTS, factors), s_BHTS], 2)
        return rows[:, :, 1 - self.queries :]

    def _carried(self, s_BHTS: Tensor, factors: RowFactors) -> Tensor:
        batch, heads, _, keys = s_BHTS.shape
        if not isinstance(factors.carried, Tensor):
            return s_BHTS.new_zeros(batch, heads, self.queries - 1, keys)
        return F.pad(factors.carried, (0, keys - factors.carried.shape[3]))

    @classmethod
    def examples(cls, base: SpecFactory) -> Iterator[AttentionSpec]:
        from .rotary_embedding import Rotary

        yield base(modifiers=(cls(queries=2, keys=3),), pattern="causal", kv=2)
        modifiers = (Rotary(base=30.0), cls(queries=3, keys=5))
        yield base(modifiers=modifiers, pattern="causal", vdim=5)


def _identity_kernel(shape: tuple[int, ...]) -> Tensor:
    kernel = torch.zeros(shape)
    kernel[:, -1, shape[2] // 2] = 1.0
    return kernel
