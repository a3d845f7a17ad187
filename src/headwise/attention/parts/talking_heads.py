"""Talking-heads attention: a learned linear mix of all heads, the same at every (query, key) pair.
Knocking-heads attention: one small matrix, shared by all heads, transforms queries, keys or values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from ..interfaces import Mix, QKTransform, ScoreStep
from ..interfaces.core_types import AxisLayout, CallSize, Param, PartParams, Phase, SpecFactory
from ..interfaces.part import part
from ..interfaces.part_types import MixFactors
from ..spec.attention_spec import AttentionSpec
from ..spec.heads import Heads
from .initialisers import identity_init, weight, zeros_init


@part
class TalkingHeads(Mix):
    """a'_h = sum over g of a_g P[g, h], on the scores before masking or on the weights
    (2003.02436).

    With `bias`, b_h is added to a'_h at every pair of a query and an allowed key, as in CaiT
    (2103.17239). It starts at
    0.

    `heads` is the number of heads after mixing, if it differs from the number before: the paper's
    h_k score heads, h softmaxes and h_v value heads are TalkingHeads(heads=h) on the scores and
    TalkingHeads(on="weights", heads=h_v). P starts as the identity, so that a new layer equals
    plain attention (CaiT's released code starts at random):

    >>> import torch
    >>> no_factors = MixFactors({}, {})
    >>> p = {"mixing": torch.eye(2)}
    >>> TalkingHeads().mix_pair(torch.tensor([1.0, 2.0]), no_factors, p).tolist()
    [1.0, 2.0]
    """

    paper = "2003.02436"
    disagreements: ClassVar[tuple[str, ...]] = (
        "The mixing starts as the identity; CaiT's released code starts it at random.",
        (
            "CaiT's released code adds a bias per head after each mix, the paper of talking heads "
            "none: see `bias`, by "
            "default none. On the scores the bias cancels in softmax; on the weights it adds b_h "
            "times the sum of all "
            "allowed values to head h."
        ),
    )
    position_independent: ClassVar[bool] = True
    on: str = "scores"
    heads: int = 0
    bias: bool = False
    field_choices: ClassVar = {"on": ("scores", "weights")}
    field_minima: ClassVar = {"heads": 0}

    @property
    def phase(self) -> Phase:
        return Phase.WEIGHTS if self.on == "weights" else Phase.SCORES

    def conflicts(self, spec: AttentionSpec) -> Iterable[str]:
        if self.phase is Phase.SCORES and self.num_outputs(spec.heads.q) != spec.heads.q:
            yield from self._head_count_conflicts(spec)

    def _head_count_conflicts(self, spec: AttentionSpec) -> Iterable[str]:
        """Conflicts with later parts that have parameters per score head: this mix changes how
        many.
        """
        mixes = [mix for _, mix in spec.parts_of(Mix)]
        mixes.remove(self)  # one of them: a spec may hold the same part twice
        earlier = spec.modifiers[: spec.modifiers.index(self)]
        scores = [step for _, step in spec.parts_of(ScoreStep)][
            sum(isinstance(step, ScoreStep) for step in earlier) :
        ]
        for later in (spec.normaliser, *mixes, *scores):
            per_head = isinstance(later, ScoreStep) and later.per_head
            if per_head or any("q" in param.layout.axes for param in later.params(spec).values()):
                name = type(later).__name__
                yield (
                    f"TalkingHeads(heads={self.heads}) changes the number of heads, but {name} "
                    "has parameters for "
                    f"{spec.heads.q} heads; use heads=0, or leave out {name}"
                )
        if any(mix.phase is Phase.SCORES for mix in mixes):
            yield (
                f"TalkingHeads(heads={self.heads}) must be the only mix on the scores; use heads=0"
            )

    def num_outputs(self, heads: int) -> int:
        return self.heads or heads

    def fit_heads(self, heads: Heads) -> Heads:
        return replace(heads, value_heads=tuple(range(self.heads))) if self.heads else heads

    def params(self, spec: AttentionSpec) -> Mapping[str, Param]:
        mixed = "out" if self.on == "weights" else "mixed"
        params = {"mixing": weight(f"given {mixed}", identity_init)}
        return params | ({"bias": weight(mixed, zeros_init)} if self.bias else {})

    def sizes(self, spec: AttentionSpec) -> Mapping[str, int]:
        inputs = spec.heads.q if self.on == "scores" else spec.num_heads_after(Phase.SCORES)
        return {"given": inputs, "mixed": self.num_outputs(inputs)}

    def flops(self, spec: AttentionSpec, work: CallSize) -> int:
        sizes = self.sizes(spec)
        heads = sizes["mixed"] if self.on == "scores" else len(spec.score_head_of_row)
        return 2 * work.batch * work.pairs * sizes["given"] * heads

    def required_score_heads(self, spec: AttentionSpec, heads: frozenset[int]) -> frozenset[int]:
        return frozenset(range(spec.heads.q))

    def mix_pair(self, a_H: Tensor, factors: MixFactors, p: PartParams) -> Tensor:
        mixed = a_H @ p["mixing"].to(a_H.dtype)
        return mixed + p["bias"].to(a_H.dtype) if self.bias else mixed

    def mix(self, a_BHTS: Tensor, factors: MixFactors, p: PartParams) -> Tensor:
        return (p["mixing"].to(a_BHTS.dtype).T @ a_BHTS.flatten(2)).unflatten(2, a_BHTS.shape[2:])

    def pair_bias(self, p: PartParams) -> Tensor | None:
        return p["bias"] if self.bias else None

    @classmethod
    def examples(cls, base: SpecFactory) -> Iterator[AttentionSpec]:
        from .relative_position_bias import Alibi

        yield base(modifiers=(cls(),), pattern="causal", kv=2)
        yield base(modifiers=(cls(on="scores"), cls(on="weights")), pattern="window(4)", vdim=5)
        yield base(
            modifiers=(Alibi(), cls(heads=7), cls(on="weights", heads=5)), pattern="causal", vdim=9
        )
        yield base(modifiers=(cls(heads=5),), kv=3, source=13)
        yield base(modifiers=(cls(bias=True), cls(on="weights", bias=True)), pattern="causal", kv=2)


@part
class KnockingHeads(QKTransform):
    """x_h -> x_h T, with one T per side, shared by all heads; `sides` are any of q, k and v
    (2510.23052).

    T starts as the identity. kind="mlp", for values only: v_h -> 2 (v_h W_up * sigmoid(v_h W_gate))
    W_down, where W_up and W_down start as the identity and W_gate as zero, so that both kinds start
    as plain attention. The paper finds that values matter most. `fold_qk_transforms` folds the
    linear kind into the projections.

    >>> weights = {"v": torch.tensor([[1.0, 2.0], [0.0, 1.0]])}  # [out, in]
    >>> KnockingHeads().transform(torch.tensor([[[[3.0, 4.0]]]]), "v", None, weights).tolist()
    [[[[11.0, 4.0]]]]
    """

    paper = "2510.23052"
    kv_only_params: ClassVar = ("k", "v", "up", "gate", "down")
    kind: str = "linear"
    sides: str = "v"
    field_choices: ClassVar = {"kind": ("linear", "mlp")}

    def conflicts(self, spec: AttentionSpec) -> Iterable[str]:
        if (
            not self.sides
            or set(self.sides) - set("qkv")
            or len(set(self.sides)) != len(self.sides)
        ):
            yield (
                f"KnockingHeads(sides={self.sides!r}) is unknown; name each of q, k and v at most "
                "once"
            )
        elif self.kind == "mlp" and self.sides != "v":
            yield (
                f"KnockingHeads(kind='mlp', sides={self.sides!r}) is defined for values only; use "
                "sides='v'"
            )
        values = AxisLayout.parse(f"{spec.heads.value_axis} vdim")
        values_only = self.sides == "v" and spec.project.kv_entry_layouts(spec).get("v") == values
        if not (spec.project.uses_head_dims or values_only):
            name = type(spec.project).__name__
            yield (
                "KnockingHeads needs queries, keys and values with heads.dim and heads.vdim "
                f"channels, unlike {name}; use project LinearProjection()"
            )

    def sizes(self, spec: AttentionSpec) -> Mapping[str, int]:
        return {"knocked": spec.heads.dim, "vknocked": spec.heads.vdim}

    def params(self, spec: AttentionSpec) -> Mapping[str, Param]:
        if self.kind == "mlp":
            return {
                "up": weight("vknocked vdim", identity_init),
                "gate": weight("vknocked vdim", zeros_init),
                "down": weight("vdim vknocked", identity_init),
            }
        axes = {"q": "knocked dim", "k": "knocked dim", "v": "vknocked vdim"}
        return {side: weight(axes[side], identity_init) for side in self.sides}

    def flops(self, spec: AttentionSpec, work: CallSize) -> int:
        heads = spec.heads
        matrices = 3 if self.kind == "mlp" else 1
        elements = {
            "q": work.queries * heads.q * heads.dim**2,
            "k": work.new_tokens * heads.kv * heads.dim**2,
            "v": work.new_tokens * heads.num_value_heads * heads.vdim**2,
        }
        return 2 * work.batch * matrices * sum(elements[side] for side in self.sides)

    def transformed_sides(self, spec: AttentionSpec) -> frozenset[str]:
        return frozenset(self.sides)

    def transform(self, x_BTHK: Tensor, side: str, precomputed: None, p: PartParams) -> Tensor:
        if self.kind == "linear":
            return F.linear(x_BTHK, p[side])
        open_BTHK = torch.sigmoid(F.linear(x_BTHK, p["gate"]))
        return F.linear(2 * F.linear(x_BTHK, p["up"]) * open_BTHK, p["down"])

    def as_matrix(self, side: str, p: Mapping[str, Tensor]) -> Tensor | None:
        return p[side] if self.kind == "linear" else None

    def without_sides(self, sides: frozenset[str]) -> Self | None:
        remaining = "".join(side for side in self.sides if side not in sides)
        return replace(self, sides=remaining) if remaining else None

    @classmethod
    def examples(cls, base: SpecFactory) -> Iterator[AttentionSpec]:
        from .rotary_embedding import Rotary

        yield base(modifiers=(cls(),), kv=2, vdim=5, bias="qkvo")
        yield base(modifiers=(cls(sides="qkv"), Rotary()), pattern="causal", kv=2)
        yield base(modifiers=(cls(kind="mlp"),), pattern="causal", vdim=5)
