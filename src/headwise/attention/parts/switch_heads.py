"""SwitchHead: each head has several value and output projections, of which a token chooses some."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from ..interfaces import Gate
from ..interfaces.core_types import (
    AuxLosses,
    CallSize,
    Param,
    PartParams,
    QueryContext,
    SpecFactory,
    TransformsQK,
)
from ..interfaces.part import part
from ..spec.attention_spec import AttentionSpec
from ..spec.heads import Heads
from .initialisers import constant, weight, xavier_uniform, zeros_init
from .linear_projection import KeyValueProjection


def score_experts(x: Tensor, router: Tensor, experts: int) -> Tensor:
    """The scores [..., heads, experts] of tokens, in at least 32 bits: rounding would change the
    choice.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    return F.linear(x.to(dtype), router.to(dtype)).unflatten(-1, (-1, experts))


def choose_experts(scores: Tensor, active: int) -> Tensor:
    """sigmoid(scores) [..., experts] of the `active` largest, and 0 for the others; of equal ones
    the first.

    >>> choose_experts(torch.tensor([0.0, 0.0, -1.0]), 1).tolist()
    [0.5, 0.0, 0.0]
    """
    best = scores.sort(dim=-1, descending=True, stable=True).indices[..., :active]
    chosen = torch.zeros_like(scores).scatter(-1, best, 1.0)
    return scores.sigmoid() * chosen


@part
class SwitchValues(KeyValueProjection):
    """v_h = sum over the chosen experts e of sigmoid(z s_he) z W_V^he: the `active` of `experts`
    with the largest scores z s_he, for each token and value head; q and k are those of plain heads
    (2312.07987).

    A token is multiplied with the experts that it chose only; torch.compile multiplies with all.
    The cache holds values, not experts. Choosing 2 of 4 experts takes the FLOPs of two projections
    and has the parameters of four:

    >>> import headwise as hw
    >>> spec = hw.design(model=64, heads=2, project=SwitchValues(experts=4, active=2))
    >>> hw.costs.count_parameters(spec) - hw.costs.count_parameters(hw.design(model=64, heads=2))
    12800
    >>> 3 * 64 * 64 + 2 * 4 * 64
    12800
    """

    paper = "2312.07987"
    experts: int = 4
    active: int = 2
    field_minima: ClassVar = {"experts": 1, "active": 1}
    letter_fields: ClassVar = {"bias": "qk"}
    kv_only_params: ClassVar = ("k_bias", "v")

    def conflicts(self, spec: AttentionSpec) -> Iterable[str]:
        if self.active > self.experts:
            yield (
                f"SwitchValues(active={self.active}) is more than experts={self.experts}; use at "
                f"most {self.experts}"
            )

    def sizes(self, spec: AttentionSpec) -> Mapping[str, int]:
        return {"expert": self.experts}

    def params(self, spec: AttentionSpec) -> Mapping[str, Param]:
        axis = spec.heads.value_axis
        queries_and_keys = {
            "q": weight("(q dim) model", xavier_uniform, "query"),
            "k": weight("(kv dim) source", xavier_uniform, "source"),
            "v": weight(f"({axis} expert vdim) source", xavier_uniform),
            "router": weight(f"({axis} expert) source", xavier_uniform, "source"),
        }
        rows = {"q": "(q dim)", "k": "(kv dim)"}
        return queries_and_keys | {
            f"{side}_bias": weight(rows[side], zeros_init) for side in self.bias
        }

    def absorb_matrix(
        self, spec: AttentionSpec, weights: Mapping[str, Tensor], side: str, matrix: Tensor
    ) -> Mapping[str, Tensor]:
        if side == "v" and matrix.dim() == 3:
            matrix = matrix.repeat_interleave(self.experts, 0)
        return super().absorb_matrix(spec, weights, side, matrix)

    def flops(self, spec: AttentionSpec, work: CallSize) -> int:
        heads = spec.heads
        rows = heads.num_value_heads * self.active * heads.vdim
        return 2 * work.tokens("source") * rows * spec.sizes_of(self)["source"]

    def project_query(self, x_BTD: Tensor, transform: TransformsQK, p: PartParams) -> Tensor:
        return transform(self._project(x_BTD, "q", ("q", "dim"), p), "q")

    def project_kv(
        self, z_BSE: Tensor, transform: TransformsQK, p: PartParams
    ) -> dict[str, Tensor]:
        k_BSGK = self._project(z_BSE, "k", ("kv", "dim"), p)
        scores = score_experts(z_BSE, p["router"], self.experts)
        gates_NGX = choose_experts(scores, self.active).flatten(0, 1).to(z_BSE.dtype)
        experts = p["v"].unflatten(0, (gates_NGX.shape[1], self.experts, -1))
        v_NGV = _multiply_chosen(z_BSE.flatten(0, 1), gates_NGX, experts, self.active)
        v_BSGV = v_NGV.unflatten(0, z_BSE.shape[:2]).to(k_BSGK.dtype)  # under autocast
        return {"k": transform(k_BSGK, "k"), "v": transform(v_BSGV, "v")}

    @classmethod
    def examples(cls, base: SpecFactory) -> Iterator[AttentionSpec]:
        from .rotary_embedding import Rotary

        yield base(project=cls(), modifiers=(Rotary(),), pattern="causal", kv=2, vdim=5)
        yield base(project=cls(experts=3, active=1, bias="qk"), source=13)


def _multiply_chosen(z_NE: Tensor, gates_NGX: Tensor, experts_GXVE: Tensor, active: int) -> Tensor:
    """The sums over experts of gate times z W, [tokens, heads, V]; experts with a gate of zero, all
    but `active`, are not computed.
    """
    if torch.compiler.is_compiling():
        values = torch.einsum("ne,gxve->ngxv", z_NE, experts_GXVE)
        return (values * gates_NGX[..., None]).sum(2)
    heads, num_experts, width = experts_GXVE.shape[:3]
    slots = gates_NGX.flatten(1).T  # one row for each expert of each head
    if slots.is_meta:  # without numbers, as many for each expert
        chosen = heads * len(z_NE) * active
        slot, token = torch.empty(chosen, 2, dtype=torch.int64, device="meta").unbind(1)
        counts = [len(part) for part in torch.arange(chosen).tensor_split(len(slots))]
    else:
        slot, token = slots.nonzero(as_tuple=True)
        counts = slots.count_nonzero(1).tolist()
    products = [
        z_NE[tokens] @ expert.T
        for tokens, expert in zip(token.split(counts), experts_GXVE.flatten(0, 1), strict=True)
    ]
    place = slot.div(num_experts, rounding_mode="floor") * len(z_NE) + token
    values = slots[slot, token][:, None] * torch.cat(products)
    sums = values.new_zeros(heads * len(z_NE), width).index_add(0, place, values)
    return sums.unflatten(0, (heads, -1)).transpose(0, 1)


@part
class SwitchOutputs(Gate):
    """o_h -> the outputs sigmoid(x s_he) o_h of the chosen experts e, each with its own block of
    W_O: the `active` of `experts` with the largest scores x s_he, for each token and head
    (2312.07987).

    The experts of a head are output heads that share its weights, so `design` makes `experts` times
    as many output heads as rows of weights, and an expert can be ablated or pruned by itself; a
    pruned one still takes part in the choice. Outputs of experts that were not chosen are zero, and
    the merge multiplies with them. W_O of two heads with four experts each:

    >>> import headwise as hw
    >>> spec = hw.design(model=8, heads=2, modifiers=(SwitchOutputs(experts=4, active=2),))
    >>> spec.shapes()["output.o"], spec.heads.score_head_of_output
    ((8, 32), (0, 0, 0, 0, 1, 1, 1, 1))
    """

    paper = "2312.07987"
    disagreements: ClassVar[tuple[str, ...]] = (
        "The released code drops experts in training with a probability of their own; here none "
        "is dropped.",
        "The released code starts experts normal with a deviation of their own; here they start by "
        "Xavier's rule.",
    )
    unrestricted_sides: ClassVar[str] = "kv"  # only the input is used
    experts: int = 4
    active: int = 2
    heads: int = 0
    field_minima: ClassVar = {"experts": 1, "active": 1, "heads": 0}

    def conflicts(self, spec: AttentionSpec) -> Iterable[str]:
        if self.active > self.experts:
            yield (
                f"SwitchOutputs(active={self.active}) is more than experts={self.experts}; use at "
                f"most {self.experts}"
            )
        outputs = len(spec.score_head_of_output)
        repeated = tuple(row for row in range(spec.heads.rows) for _ in range(self.experts))
        if not self.heads and spec.score_head_of_output != repeated:
            yield (
                f"SwitchOutputs(experts={self.experts}) needs {self.experts} output heads for each "
                f"of {spec.heads.rows} rows of weights, not {outputs} in all; make the spec with "
                "design, or give score_head_of_output"
            )
        if outputs > self._slots(spec):
            yield (
                f"SwitchOutputs(experts={self.experts}) has {self._slots(spec)} experts for "
                f"{outputs} output heads; leave heads out"
            )

    def widen_heads(self, heads: Heads) -> Heads:
        if heads.score_head_of_output:
            return heads
        repeated = tuple(row for row in range(heads.rows) for _ in range(max(1, self.experts)))
        return replace(heads, score_head_of_output=repeated)

    def _slots(self, spec: AttentionSpec) -> int:
        return self.heads * self.experts or len(spec.score_head_of_output)

    def with_fixed_sizes(self, spec: AttentionSpec) -> Self:
        return replace(self, heads=self._slots(spec) // self.experts)

    def sizes(self, spec: AttentionSpec) -> Mapping[str, int]:
        return {"expert": self._slots(spec)}

    def params(self, spec: AttentionSpec) -> Mapping[str, Param]:
        return {
            "router": weight("expert model", xavier_uniform, "query"),
            "slot": constant("out", range(len(spec.score_head_of_output))),
        }

    def gate(self, context: QueryContext, p: PartParams, aux_losses: AuxLosses | None) -> Tensor:
        scores = score_experts(context.x_BTD, p["router"], self.experts)
        gates = choose_experts(scores, self.active).flatten(-2).to(context.x_BTD.dtype)
        return gates.index_select(-1, p["slot"])[..., None]

    def blocks_gradient_when_closed(self) -> bool:
        return True

    @classmethod
    def examples(cls, base: SpecFactory) -> Iterator[AttentionSpec]:
        yield base(modifiers=(cls(experts=3, active=2),), kv=2, pattern="causal")
        yield base(modifiers=(cls(experts=2, active=1),), vdim=5)
