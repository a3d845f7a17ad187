"""Dynamically composable multi-head attention (DCMHA): heads are mixed depending on the query and
key tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels import head_mixing as composing
from ..interfaces import Mix
from ..interfaces.core_types import (
    AppliedTo,
    AxisLayout,
    CallSize,
    Param,
    PartParams,
    Phase,
    SpecFactory,
)
from ..interfaces.part import part
from ..interfaces.part_types import MixFactors
from ..spec.attention_spec import AttentionSpec
from .initialisers import constant, normal_with_std, weight, zeros_init

_EPS = 1e-6
_FACTOR_NAMES = ("source", "target", "gate")
# For each side: the axis that its factors are projected from, and the tokens that they depend on.
_SIDE_AXES: dict[str, tuple[str, AppliedTo]] = {
    "query": ("model", "query"),
    "key": ("source", "source"),
}


@part
class DynamicComposition(Mix):
    """a' = a + a W_b + sum_r (a.w1_r) w2_r + a * g, once with the factors of the query, once with
    the key's.

    This is Compose of DCMHA (2405.08553; as in the released code, w1 is normalised over heads, w2
    is not). The factors are computed from the layer's input: u = GELU(x W1), [w1; w2] = u W2, g =
    tanh(x Wg), with a hidden width of 2 rank H. When heads are pruned after mixing weights, a
    remaining head keeps its own columns of w2, g and W_b.

    `sides` leaves out one of the two factors; with "query", nothing but keys and values is cached.
    With `groups`, heads are mixed only within `groups` equal groups of neighbouring heads, each
    with its own W1, W2, Wg, W_b and norm. `members` gives the heads per group instead; it replaces
    `groups` after whole groups have been pruned.

    Where the two released codes differ: W_b starts at 0 and GELU is exact (as in torch), Wg starts
    as in JAX, at a tenth of torch's values. Their windows of n keys have n keys in JAX and in
    decoding, but n + 1 in torch training; here they have n.

    With all factors zero, which is close to the initialisation, heads are not mixed:

    >>> zero = {"source": torch.zeros(2, 3), "target": torch.zeros(2, 3), "gate": torch.zeros(3)}
    >>> DynamicComposition().mix_pair(torch.ones(3), MixFactors(zero, zero), {}).tolist()
    [1.0, 1.0, 1.0]
    """

    paper = "2405.08553"
    disagreements: ClassVar[tuple[str, ...]] = (
        "W_g starts ten times larger in the torch code than in JAX: as in JAX.",
        "GELU is exact in torch and the tanh form in JAX: exact.",
        'W_b starts at 0 in torch and at random in JAX: at 0, and off unless static="full".',
        (
            "A window of n keys holds n + 1 in torch training and n elsewhere: n. For the mask of "
            "torch training, "
            'train with pattern="window(n + 1)" and set window(n) afterwards.'
        ),
        "The released configuration of the 2.8B model switches composition off: here it is on.",
    )
    on: str = "scores"
    rank: int = 2
    static: str = "none"
    groups: int = 1
    sides: str = "both"
    members: int = 0
    field_choices: ClassVar = {
        "on": ("scores", "weights"),
        "static": ("none", "full"),
        "sides": ("both", *_SIDE_AXES),
    }
    field_minima: ClassVar = {"rank": 1}

    @property
    def phase(self) -> Phase:
        return Phase.WEIGHTS if self.on == "weights" else Phase.SCORES

    def conflicts(self, spec: AttentionSpec) -> Iterable[str]:
        heads = spec.heads.q
        if self.members and self.groups != 1:
            yield (
                f"DynamicComposition(groups={self.groups}, members={self.members}) sets the group "
                "size twice; leave members out"
            )
        divisors = [n for n in range(1, heads + 1) if heads % n == 0]
        for option in ("groups", "members"):
            count = getattr(self, option)
            if count not in divisors and (option, count) != ("members", 0):
                yield (
                    f"DynamicComposition({option}={count}) does not divide {heads} heads; use "
                    f"{option} in {divisors}"
                )

    def with_fixed_sizes(self, spec: AttentionSpec) -> Self:
        if self._is_one_group:
            return self
        return replace(self, groups=1, members=self._group_size(spec.heads.q))

    @property
    def _is_one_group(self) -> bool:
        """True if all heads form one group, so that pruning never removes an input of the mix."""
        return self.groups == 1 and not self.members

    @property
    def _target(self) -> str:
        """The axis of the heads that the mix computes."""
        return "out" if self._is_one_group and self.on == "weights" else "q"

    def _group_size(self, heads: int) -> int:
        return self.members or max(1, heads // max(1, self.groups))

    def sizes(self, spec: AttentionSpec) -> Mapping[str, int]:
        group_size = self._group_size(spec.heads.q)
        unit = 2 * max(1, self.rank)  # called before conflicts are checked
        return {"rank": self.rank, "unit": unit, "hidden": unit * group_size, "member": group_size}

    def params(self, spec: AttentionSpec) -> Mapping[str, Param]:
        sizes = spec.sizes_of(self)
        heads = sizes["member"]
        hidden = sizes["hidden"]
        target = self._target
        second = normal_with_std(0.02 / (math.sqrt(hidden) * (heads + self.rank)))
        params: dict[str, Param] = {}
        for side in self._sides:
            width, applied_to = _SIDE_AXES[side]
            first = normal_with_std(math.sqrt(2 / (sizes[width] + hidden)))
            gate = normal_with_std(0.005 * math.sqrt(2 / (sizes[width] + heads)))
            params |= {
                f"{side}_hidden": weight(f"(q unit) {width}", first, applied_to),
                f"{side}_source": weight("(rank q) hidden", second, applied_to),
                f"{side}_target": weight(f"(rank {target}) hidden", second, applied_to),
                f"{side}_gate": weight(f"{target} {width}", gate, applied_to),
            }
        if self.static == "full":
            params["static"] = weight("q out" if target == "out" else "q member", zeros_init)
        if self.on == "weights":
            # Heads are identified by their original index, because positions change when whole
            # groups are pruned.
            params["own"] = constant("out", spec.score_head_of_row)
            params["name"] = constant("q", range(spec.heads.q))
        return params

    @property
    def _sides(self) -> tuple[str, ...]:
        return tuple(_SIDE_AXES) if self.sides == "both" else (self.sides,)

    def kv_entry_layouts(self, spec: AttentionSpec) -> Mapping[str, AxisLayout]:
        if "key" not in self._sides:
            return {}
        source = AxisLayout.parse("rank q")
        target = AxisLayout.parse(f"rank {self._target}")
        return {"source": source, "target": target, "gate": AxisLayout.parse(self._target)}

    def flops(self, spec: AttentionSpec, work: CallSize) -> int:
        to_outputs = len(self._sides) * self.rank * spec.sizes_of(self)[self._target]
        return self.mixed_flops(spec, work) + 2 * work.batch * work.pairs * to_outputs

    def mixed_flops(self, spec: AttentionSpec, work: CallSize) -> int:
        sizes = spec.sizes_of(self)
        to_ranks = len(self._sides) * self.rank * spec.heads.q
        static = spec.heads.q * (sizes[self._target] if self._is_one_group else sizes["member"])
        return 2 * work.batch * work.pairs * (to_ranks + (static if self.static == "full" else 0))

    def required_score_heads(self, spec: AttentionSpec, heads: frozenset[int]) -> frozenset[int]:
        size = self._group_size(spec.heads.q)
        groups = {head // size for head in heads}
        return frozenset(head for head in range(spec.heads.q) if head // size in groups)

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

    def mix_pair(self, a_H: Tensor, factors: MixFactors, p: PartParams) -> Tensor:
        heads = torch.arange(len(a_H), device=a_H.device)
        outputs = heads if self.on == "scores" else torch.searchsorted(p["name"], p["own"])
        targets = outputs if self._target == "out" else heads
        size = self._group_size(len(a_H))
        same_group = heads[:, None] // size == targets // size
        mixing = (heads[:, None] == targets).to(a_H.dtype)
        for f in filter(None, factors):
            mixing = (
                mixing
                + f["source"].T @ f["target"] * same_group
                + (heads[:, None] == targets) * f["gate"]
            )
        if "static" in p:
            mixing = (
                mixing + p["static"].repeat(1, len(targets) // p["static"].shape[1]) * same_group
            )
        return a_H @ mixing if self._target == "out" else (a_H @ mixing)[outputs]

    def mix(self, a_BHTS: Tensor, factors: MixFactors, p: PartParams) -> Tensor:
        own = a_BHTS if self._target == "q" else self._select_outputs(a_BHTS, p)
        mixed = own
        # Query factors are shared by all pairs of one query (a row), key factors by all pairs of
        # one key (a column).
        if factors.query:
            by_query = self._mix_by_factors(a_BHTS.permute(0, 2, 1, 3), factors.query).permute(
                0, 2, 1, 3
            )
            mixed = (
                mixed
                + by_query
                + own * factors.query["gate"].transpose(1, 2)[..., None].to(own.dtype)
            )
        if factors.key:
            by_key = self._mix_by_factors(a_BHTS.permute(0, 3, 1, 2), factors.key).permute(
                0, 2, 3, 1
            )
            mixed = (
                mixed
                + by_key
                + own * factors.key["gate"].transpose(1, 2)[..., None, :].to(own.dtype)
            )
        if "static" in p:
            mixed = mixed + self._static_mix(a_BHTS, p)
        if self._target == "q" and self.on == "weights":
            return self._select_outputs(mixed, p)
        return mixed

    def fused_mix(self, a_BHTS: Tensor, factors: MixFactors, p: PartParams) -> Tensor:
        if not composing.can_mix(a_BHTS, self.rank):
            return self.mix(a_BHTS, factors, p)
        heads = a_BHTS.shape[1]
        on_weights = self.on == "weights"
        all_heads = torch.arange(heads, device=a_BHTS.device)
        outputs = torch.searchsorted(p["name"], p["own"]) if on_weights else all_heads
        targets = outputs if self._target == "out" else all_heads
        operands = [
            *_query_factors(a_BHTS, targets, factors.query),
            *_key_factors(a_BHTS, targets, factors.key),
        ]
        mixed = composing.mix_heads_by_factors(a_BHTS, targets, self._group_size(heads), operands)
        if "static" in p:
            mixed = mixed + self._static_mix(a_BHTS, p)
        return mixed.index_select(1, outputs) if on_weights and self._target == "q" else mixed

    def _static_mix(self, a_BHTS: Tensor, p: PartParams) -> Tensor:
        """The contribution of the static mixing matrix, which is the same at all pairs."""
        static = self._split_groups(p["static"].to(a_BHTS.dtype), 0)
        return (
            (static.mT @ self._split_groups(a_BHTS.flatten(2), 1))
            .flatten(1, 2)
            .unflatten(2, a_BHTS.shape[2:])
        )

    def _mix_by_factors(self, a: Tensor, factors: Mapping[str, Tensor]) -> Tensor:
        """Low-rank mix within groups, heads to ranks to heads: [B, T, H, N] to [B, T, O, N]."""
        a = self._split_groups(a, 2)
        source, target = (
            factors[name].to(a.dtype).unflatten(-1, (a.shape[2], -1))
            for name in ("source", "target")
        )
        ranks = source.transpose(2, 3) @ a
        return (target.permute(0, 1, 3, 4, 2) @ ranks).flatten(2, 3)

    def _split_groups(self, heads: Tensor, axis: int) -> Tensor:
        """Split the axis of heads into two: groups, and heads within a group."""
        return heads.unflatten(axis, (-1, self._group_size(heads.shape[axis])))

    def _select_outputs(self, a_BHTS: Tensor, p: PartParams) -> Tensor:
        return a_BHTS.index_select(1, torch.searchsorted(p["name"], p["own"]))

    @classmethod
    def examples(cls, base: SpecFactory) -> Iterator[AttentionSpec]:
        yield base(modifiers=(cls(rank=1), cls(on="weights", rank=2)), pattern="causal", kv=2)
        yield base(modifiers=(cls(on="weights", static="full"),), pattern="window(4)", source=13)
        grouped = (cls(groups=2, static="full", rank=1), cls(on="weights", groups=3))
        yield base(modifiers=grouped, pattern="causal", kv=3)
        yield base(
            modifiers=(cls(sides="query"), cls(on="weights", groups=2, sides="key", static="full")),
            vdim=5,
        )
        yield base(modifiers=(cls(on="weights", members=3, sides="query"),), kv=2)


def _project_group_factors(hidden: Tensor, weight: Tensor, rank: int) -> Tensor:
    """The factors of each group from its own hidden units: [B, T, groups, units] to [B, T, rank,
    groups, heads].
    """
    batch, count, groups, units = hidden.shape
    by_group = weight.view(rank, groups, -1, units).permute(1, 3, 0, 2)  # groups units rank heads
    factors = hidden.flatten(0, 1).transpose(0, 1) @ by_group.flatten(2)
    return factors.view(groups, batch, count, *by_group.shape[2:]).permute(1, 2, 3, 0, 4)


def _query_factors(
    a_BHTS: Tensor, targets: Tensor, from_query: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """The query factors in the kernel's layout; without factors, rank 0 and gates of one.

    The kernel multiplies by its query gate, so the gate here is 1 + g.
    """
    batch, heads, queries, _ = a_BHTS.shape
    if not from_query:
        source, target = (a_BHTS.new_zeros(batch, queries, 0, n) for n in (heads, len(targets)))
        return source, target, a_BHTS.new_ones(batch, queries, len(targets))
    source, target, gate = (
        from_query[name].to(a_BHTS.dtype).expand(batch, *from_query[name].shape[1:])
        for name in _FACTOR_NAMES
    )
    return source, target, gate + 1


def _key_factors(
    a_BHTS: Tensor, targets: Tensor, from_key: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """The key factors in the kernel's layout, [B, R, heads, S]."""
    batch, heads, _, keys = a_BHTS.shape
    if not from_key:
        source, target, gate = (
            a_BHTS.new_zeros(batch, 0, n, keys) for n in (heads, len(targets), len(targets))
        )
        return source, target, gate
    source, target, gate = (
        from_key[name].to(a_BHTS.dtype).expand(batch, *from_key[name].shape[1:])
        for name in _FACTOR_NAMES
    )
    return source.permute(0, 2, 3, 1), target.permute(0, 2, 3, 1), gate[:, None].transpose(2, 3)
