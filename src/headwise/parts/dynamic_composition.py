"""Dynamically composable heads: the mixing of heads depends on who asks and who is asked."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from ..interfaces import Mix
from ..interfaces.axis_layout import AxisLayout
from ..interfaces.core_types import AppliedTo, CallSize, Param, PartParams, Phase, SpecFactory
from ..interfaces.registry import part
from ..kernels import head_mixing as composing
from ..spec.attention_spec import AttentionSpec
from .initialisers import fixed_values, normal_with_std, zeros_init

_EPS = 1e-6
_FACTOR_NAMES = ("source", "target", "gate")
# The width that the factors of each side grow out of, and the tokens that bring them.
_SIDE_AXES: dict[str, tuple[str, AppliedTo]] = {"query": ("model", "query"), "key": ("source", "source")}


@part
class Dynamic(Mix):
    """a' = a + a W_b + sum_r (a.w1_r) w2_r + a * g, once with the factors of the query, once with the key's.

    DCMHA's Compose (2405.08553; as in the released code: w1 is normalised over heads, w2 is not). The factors
    come from the layer's input: u = GELU(x W1), [w1; w2] = u W2, g = tanh(x Wg), with a hidden width of
    2 rank H. On weights, what is kept of a head when others are cut are its own columns of w2, g and W_b.

    `sides` leaves one of the two out: "query" remembers nothing beside keys and values. With `groups`, heads are
    composed within `groups` equal neighbourhoods alone, each with W1, W2, Wg, W_b and a norm of its own, as if they
    were so many layers; `members`, the heads of one, is what `groups` becomes where whole groups have been cut.

    Where the two released codes differ: W_b starts from 0 and GELU is exact (torch), Wg starts as in JAX, a tenth
    of torch's. Their windows of n keys are n in JAX and decoding, n + 1 in torch's training; ours are n.

    With all factors zero, which is close to how it starts, every pair is left as it is:

    >>> zero = {"source": torch.zeros(2, 3), "target": torch.zeros(2, 3), "gate": torch.zeros(3)}
    >>> Dynamic().mix_pair(torch.ones(3), zero, zero, {}).tolist()
    [1.0, 1.0, 1.0]
    """

    paper = "2405.08553"
    disagreements: ClassVar[tuple[str, ...]] = (
        "W_g starts ten times larger in the torch code than in JAX: as in JAX.",
        "GELU is exact in torch and the tanh form in JAX: exact.",
        'W_b starts at 0 in torch and at random in JAX: at 0, and off unless static="full".',
        "A window of n keys holds n + 1 in torch training and n elsewhere: n.",
        "The released configuration of the 2.8B model switches composition off: here it is on.",
    )
    on: str = "scores"
    rank: int = 2
    static: str = "none"
    groups: int = 1
    sides: str = "both"
    members: int = 0

    @property
    def phase(self) -> Phase:
        return Phase.WEIGHTS if self.on == "weights" else Phase.SCORES

    def conflicts(self, spec: AttentionSpec) -> Iterable[str]:
        heads = spec.heads.q
        if self.on not in ("scores", "weights"):
            yield f"Dynamic(on={self.on!r}) is unknown; use 'scores' or 'weights'"
        if self.static not in ("none", "full"):
            yield f"Dynamic(static={self.static!r}) is unknown; use 'none' or 'full'"
        if self.rank < 1:
            yield f"Dynamic(rank={self.rank}) mixes nothing; use at least 1, 2 is published"
        if self.sides not in ("both", *_SIDE_AXES):
            yield f"Dynamic(sides={self.sides!r}) is unknown; use 'both', 'query' or 'key'"
        if self.members and self.groups != 1:
            yield f"Dynamic(groups={self.groups}, members={self.members}) says one thing twice; leave members out"
        for said in ("groups", "members"):
            count, ways = getattr(self, said), [n for n in range(1, heads + 1) if heads % n == 0]
            if count not in ways and (said, count) != ("members", 0):
                yield f"Dynamic({said}={count}) does not divide {heads} heads; use {said} in {ways}"

    def with_fixed_sizes(self, spec: AttentionSpec) -> Self:
        return self if self._whole else replace(self, groups=1, members=self._each(spec.heads.q))

    @property
    def _whole(self) -> bool:
        """Whether all heads are one group, so that none of them is ever cut from what is composed."""
        return self.groups == 1 and not self.members

    @property
    def _target(self) -> str:
        return "out" if self._whole and self.on == "weights" else "q"

    def _each(self, heads: int) -> int:
        return self.members or max(1, heads // max(1, self.groups))

    def sizes(self, spec: AttentionSpec) -> Mapping[str, int]:
        each, unit = self._each(spec.heads.q), 2 * max(1, self.rank)  # others may ask before it is refused
        return {"rank": self.rank, "unit": unit, "hidden": unit * each, "member": each}

    def params(self, spec: AttentionSpec) -> Mapping[str, Param]:
        sizes = spec.sizes_of(self)
        heads, hidden, target = sizes["member"], sizes["hidden"], self._target
        second = normal_with_std(0.02 / (math.sqrt(hidden) * (heads + self.rank)))
        params: dict[str, Param] = {}
        for side in self._sides:
            width, met = _SIDE_AXES[side]
            first = normal_with_std(math.sqrt(2 / (sizes[width] + hidden)))
            gate = normal_with_std(0.005 * math.sqrt(2 / (sizes[width] + heads)))
            params |= {
                f"{side}_hidden": Param(AxisLayout.parse(f"(q unit) {width}"), first, met),
                f"{side}_source": Param(AxisLayout.parse("(rank q) hidden"), second, met),
                f"{side}_target": Param(AxisLayout.parse(f"(rank {target}) hidden"), second, met),
                f"{side}_gate": Param(AxisLayout.parse(f"{target} {width}"), gate, met),
            }
        if self.static == "full":
            params["static"] = Param(AxisLayout.parse("q out" if target == "out" else "q member"), zeros_init)
        if self.on == "weights":
            # By name and not by place: places change when whole groups before them are cut.
            params["own"] = Param(AxisLayout.parse("out"), fixed_values(spec.score_head_of_row), trainable=False)
            params["name"] = Param(AxisLayout.parse("q"), fixed_values(range(spec.heads.q)), trainable=False)
        return params

    @property
    def _sides(self) -> tuple[str, ...]:
        return tuple(_SIDE_AXES) if self.sides == "both" else (self.sides,)

    def kv_entry_layouts(self, spec: AttentionSpec) -> Mapping[str, AxisLayout]:
        if "key" not in self._sides:
            return {}
        source, target = AxisLayout.parse("rank q"), AxisLayout.parse(f"rank {self._target}")
        return {"source": source, "target": target, "gate": AxisLayout.parse(self._target)}

    def flops(self, spec: AttentionSpec, work: CallSize) -> int:
        sizes = spec.sizes_of(self)
        to = sizes[self._target]
        ranks = len(self._sides) * self.rank * (spec.heads.q + to)
        static = spec.heads.q * (to if self._whole else sizes["member"])
        return 2 * work.batch * work.pairs * (ranks + (static if self.static == "full" else 0))

    def required_score_heads(self, spec: AttentionSpec, heads: frozenset[int]) -> frozenset[int]:
        each = self._each(spec.heads.q)
        return frozenset(head for head in range(spec.heads.q) if head // each in {one // each for one in heads})

    def query_factors(self, x_BTD: Tensor, p: PartParams) -> dict[str, Tensor]:
        return self._factors(x_BTD, "query", p) if "query" in self._sides else {}

    def key_factors(self, z_BSE: Tensor, p: PartParams) -> dict[str, Tensor]:
        return self._factors(z_BSE, "key", p) if "key" in self._sides else {}

    def _factors(self, x: Tensor, side: str, p: PartParams) -> dict[str, Tensor]:
        hidden = F.gelu(F.linear(x, p[f"{side}_hidden"])).unflatten(-1, (-1, p.sizes["hidden"]))
        source = _project_group_factors(hidden, p[f"{side}_source"], self.rank)
        return {
            "source": F.rms_norm(source, source.shape[-1:], eps=_EPS).flatten(-2),
            "target": _project_group_factors(hidden, p[f"{side}_target"], self.rank).flatten(-2),
            "gate": torch.tanh(F.linear(x, p[f"{side}_gate"])),
        }

    def mix_pair(self, a_H: Tensor, asked: Mapping[str, Tensor], kept: Mapping[str, Tensor], p: PartParams) -> Tensor:
        heads = torch.arange(len(a_H), device=a_H.device)
        own = heads if self.on == "scores" else torch.searchsorted(p["name"], p["own"])
        to = own if self._target == "out" else heads
        each = self._each(len(a_H))
        joined = heads[:, None] // each == to // each
        mixing = (heads[:, None] == to).to(a_H.dtype)
        for f in filter(None, (asked, kept)):
            mixing = mixing + f["source"].T @ f["target"] * joined + (heads[:, None] == to) * f["gate"]
        if "static" in p:
            mixing = mixing + p["static"].repeat(1, len(to) // p["static"].shape[1]) * joined
        return a_H @ mixing if self._target == "out" else (a_H @ mixing)[own]

    def mix(self, a_BHTS: Tensor, asked: Mapping[str, Tensor], kept: Mapping[str, Tensor], p: PartParams) -> Tensor:
        own = a_BHTS if self._target == "q" else self._owned(a_BHTS, p)
        mixed = own
        # By query, the pairs of one query are the columns of a product; by key, those of one key.
        if asked:
            by_query = self._composed(a_BHTS.permute(0, 2, 1, 3), asked).permute(0, 2, 1, 3)
            mixed = mixed + by_query + own * asked["gate"].transpose(1, 2)[..., None].to(own.dtype)
        if kept:
            by_key = self._composed(a_BHTS.permute(0, 3, 1, 2), kept).permute(0, 2, 3, 1)
            mixed = mixed + by_key + own * kept["gate"].transpose(1, 2)[..., None, :].to(own.dtype)
        if "static" in p:
            mixed = mixed + self._by_all(a_BHTS, p)
        return self._owned(mixed, p) if self._target == "q" and self.on == "weights" else mixed

    def fused_mix(
        self, a_BHTS: Tensor, asked: Mapping[str, Tensor], kept: Mapping[str, Tensor], p: PartParams
    ) -> Tensor:
        if not composing.has_head_mixing_kernel(a_BHTS):
            return self.mix(a_BHTS, asked, kept, p)
        heads, on_weights = a_BHTS.shape[1], self.on == "weights"
        every = torch.arange(heads, device=a_BHTS.device)
        own = torch.searchsorted(p["name"], p["own"]) if on_weights else every
        to = own if self._target == "out" else every
        factors = [*_query_factors(a_BHTS, to, asked), *_key_factors(a_BHTS, to, kept)]
        mixed = composing.mix_heads_by_factors(a_BHTS, to, self._each(heads), factors)
        if "static" in p:
            mixed = mixed + self._by_all(a_BHTS, p)
        return mixed.index_select(1, own) if on_weights and self._target == "q" else mixed

    def _by_all(self, a_BHTS: Tensor, p: PartParams) -> Tensor:
        """What the part that is alike at all pairs adds."""
        static = self._grouped(p["static"].to(a_BHTS.dtype), 0)
        return (static.mT @ self._grouped(a_BHTS.flatten(2), 1)).flatten(1, 2).unflatten(2, a_BHTS.shape[2:])

    def _composed(self, a: Tensor, factors: Mapping[str, Tensor]) -> Tensor:
        """Heads to ranks to heads, within groups: [B, T, H, N] to [B, T, O, N]."""
        a = self._grouped(a, 2)
        source, target = (factors[name].to(a.dtype).unflatten(-1, (a.shape[2], -1)) for name in ("source", "target"))
        ranks = source.transpose(2, 3) @ a
        return (target.permute(0, 1, 3, 4, 2) @ ranks).flatten(2, 3)

    def _grouped(self, heads: Tensor, axis: int) -> Tensor:
        """The axis of heads as two: groups, and heads of each."""
        return heads.unflatten(axis, (-1, self._each(heads.shape[axis])))

    def _owned(self, a_BHTS: Tensor, p: PartParams) -> Tensor:
        return a_BHTS.index_select(1, torch.searchsorted(p["name"], p["own"]))

    @classmethod
    def examples(cls, base: SpecFactory) -> Iterator[AttentionSpec]:
        yield base(modifiers=(cls(rank=1), cls(on="weights", rank=2)), pattern="causal", kv=2)
        yield base(modifiers=(cls(on="weights", static="full"),), pattern="window(4)", source=13)
        crossing = (cls(groups=2, static="full", rank=1), cls(on="weights", groups=3))
        yield base(modifiers=crossing, pattern="causal", kv=3)
        yield base(modifiers=(cls(sides="query"), cls(on="weights", groups=2, sides="key", static="full")), vdim=5)
        yield base(modifiers=(cls(on="weights", members=3, sides="query"),), kv=2)


def _project_group_factors(hidden: Tensor, weight: Tensor, rank: int) -> Tensor:
    """Each group's vectors from its own hidden units: [B, T, groups, units] to [B, T, rank, groups, heads]."""
    batch, count, groups, units = hidden.shape
    each = weight.view(rank, groups, -1, units).permute(1, 3, 0, 2)  # groups units rank heads
    grown = hidden.flatten(0, 1).transpose(0, 1) @ each.flatten(2)
    return grown.view(groups, batch, count, *each.shape[2:]).permute(1, 2, 3, 0, 4)


def _query_factors(a_BHTS: Tensor, to: Tensor, asked: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """The factors of queries as the kernel takes them; none are no ranks, and a head's own as it is."""
    batch, heads, queries, _ = a_BHTS.shape
    if not asked:
        source, target = (a_BHTS.new_zeros(batch, queries, 0, n) for n in (heads, len(to)))
        return source, target, a_BHTS.new_ones(batch, queries, len(to))
    source, target, gate = (
        asked[name].to(a_BHTS.dtype).expand(batch, *asked[name].shape[1:]) for name in _FACTOR_NAMES
    )
    return source, target, gate + 1


def _key_factors(a_BHTS: Tensor, to: Tensor, kept: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """The factors of keys, [B, R, heads, S]."""
    batch, heads, _, keys = a_BHTS.shape
    if not kept:
        source, target, gate = (a_BHTS.new_zeros(batch, 0, n, keys) for n in (heads, len(to), len(to)))
        return source, target, gate
    source, target, gate = (kept[name].to(a_BHTS.dtype).expand(batch, *kept[name].shape[1:]) for name in _FACTOR_NAMES)
    return source.permute(0, 2, 3, 1), target.permute(0, 2, 3, 1), gate[:, None].transpose(2, 3)
