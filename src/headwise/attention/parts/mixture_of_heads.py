"""A router chooses the active heads of each token: mixture-of-head attention (MoH), and mixture of
attention heads (MoA).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from ...util.errors import SpecError
from ..interfaces import Gate, QKTransform
from ..interfaces.core_types import (
    AuxLosses,
    AxisLayout,
    Param,
    PartParams,
    QueryContext,
    SpecFactory,
)
from ..interfaces.part import part
from ..spec.attention_spec import AttentionSpec
from .initialisers import constant, fixed_values, weight, xavier_uniform


@part
class MixtureOfHeads(Gate):
    """The first `always` heads are always active; of the others, the top `active` for each token
    (2410.11842).

    router="learned": p = softmax(x W_r) over the E routed heads. norm="code" follows the released
    code: the gates of the chosen heads are p, renormalised to sum to `active` (so a uniform router
    gives 1); the gates of the shared heads are a separate softmax that sums to `always`; and the
    two kinds are weighted by 2 softmax(x W_h). norm="paper" omits these factors and the
    renormalisation (eq. 5, 6). norm="moa" follows MoA (2210.05144), which has no shared heads: the
    gates of the chosen heads are p over their sum, which gets no gradient.

    router="norm" has no parameters and suits trained models: p = softmax(|q_i| / s), where s is the
    unbiased standard deviation of |q_i| over the routed heads. Gates are 0 or 1, and always 1 for
    shared heads. In the backward pass the gradient of every routed head's gate, chosen or not, goes
    straight through to p (eq. 10; the released code supports inference only).

    Ties go to the first head. In training, the auxiliary loss "balance" is E sum_i P_i f_i, where
    P_i is the mean of p and f_i the fraction of tokens that chose head i; in the paper, and with
    norm="paper", it has no factor E, and with norm="moa" f_i is a fraction of all choices. MoA adds
    the loss "z", the mean of (log sum exp(x W_r))^2. Auxiliary losses are summed over layers:
    balance="sum" is the sum over layers, "mean", as released, the mean over the `layers` of a stack
    of routed layers only; `at_depth` sets their number.

    A pruned head still takes part in the choice: `slot` is the index of each remaining head's gate,
    `asker` the score head with the query that scores each routed head. With router="norm" its query
    projection therefore stays; its keys, values and scores do not.

    >>> import headwise as hw
    >>> spec = hw.design(model=8, heads=4, modifiers=(MixtureOfHeads(always=2, active=1),))
    >>> hw.costs.count_parameters(spec) - hw.costs.count_parameters(
    ...     hw.design(model=8, heads=4)
    ... )  # (h + 2) d
    48
    """

    paper = "2410.11842"
    unrestricted_sides: ClassVar[str] = "kv"  # only the lengths of queries are used
    disagreements: ClassVar[tuple[str, ...]] = (
        (
            "The paper (eq. 5, 6) multiplies by plain probabilities; its code renormalises them, "
            "so that a"
            ' uniform router gives 1: see `norm`, by default "code".'
        ),
        "The balance loss is sum P f in the paper and E times that in its code: see `norm`.",
        "The code takes the mean of the balance loss over layers: see `balance`, by default the "
        "sum.",
        (
            "For trained models the paper describes straight-through routing by |q|; the released "
            "LLaMA code"
            " has only the forward pass: this follows eq. 10."
        ),
    )
    always: int = 1
    active: int = 1
    norm: str = "code"
    heads: int = 0
    router: str = "learned"
    balance: str = "sum"
    layers: int = 1
    field_choices: ClassVar = {
        "norm": ("code", "paper", "moa"),
        "router": ("learned", "norm"),
        "balance": ("sum", "mean"),
    }

    def conflicts(self, spec: AttentionSpec) -> Iterable[str]:
        heads = self.heads or len(spec.score_head_of_output)
        if heads < len(spec.score_head_of_output):
            yield (
                f"MixtureOfHeads(heads={heads}) is less than the {len(spec.score_head_of_output)} "
                "output heads; leave heads out"
            )
        if self.layers < 1 or (self.layers > 1 and self.balance == "sum"):
            yield (
                f"MixtureOfHeads(layers={self.layers}) is the number of layers of a mean; use "
                "balance='mean', or leave it out"
            )
        if self.norm == "moa" and (self.always or self.router == "norm"):
            yield (
                "MixtureOfHeads(norm='moa') has a learned router for all heads; use always=0 and "
                "router='learned'"
            )
        if not (0 <= self.always <= heads and 0 <= self.active <= heads - self.always):
            yield (
                f"MixtureOfHeads(always={self.always}, active={self.active}) needs more than the "
                f"{heads} heads there are"
            )
        elif self.active == 0 and self.always < heads:
            yield (
                f"MixtureOfHeads(active=0) never uses {heads - self.always} heads; prune them, or "
                "use active=1"
            )
        if self.router == "norm":
            yield from self._norm_router_conflicts(spec, heads - self.always)

    def _norm_router_conflicts(self, spec: AttentionSpec, routed: int) -> Iterable[str]:
        if routed == 1:
            fewer_shared = f"use always={self.always - 1}, " if self.always else ""
            remedy = f"{fewer_shared}or always={self.always + 1} and active=0"
            yield f"MixtureOfHeads(router='norm') needs at least 2 routed heads, not 1; {remedy}"
        if spec.heads.rows != spec.heads.q:
            yield (
                "MixtureOfHeads(router='norm') needs one row per score head, but a mix changes "
                "their number; use 'learned'"
            )
        if not spec.project.uses_head_dims:
            name = type(spec.project).__name__
            yield (
                "MixtureOfHeads(router='norm') needs queries with heads.dim channels, unlike "
                f"{name}; use 'learned'"
            )
        for name, transform in spec.parts_of(QKTransform):
            if "q" in transform.transformed_sides(spec) and transform.normalises_length():
                yield (
                    "MixtureOfHeads(router='norm') needs queries of different lengths, unlike "
                    f"{name}; use router='learned'"
                )

    def at_depth(self, layer: int, layers: int) -> Self:
        return replace(self, layers=layers) if self.balance == "mean" else self

    def with_fixed_sizes(self, spec: AttentionSpec) -> Self:
        return replace(self, heads=self.heads or len(spec.score_head_of_output))

    def sizes(self, spec: AttentionSpec) -> Mapping[str, int]:
        heads = self.heads or len(spec.score_head_of_output)
        return {"shared": self.always, "routed": heads - self.always, "kind": 2}

    def params(self, spec: AttentionSpec) -> Mapping[str, Param]:
        sizes = self.sizes(spec)
        score_heads = spec.score_head_of_output
        count = len(score_heads)
        params = {"slot": constant("out", range(count))}
        if self.router == "norm":
            # Correct for unpruned layers only; after pruning, the assignment is taken from the
            # weights.
            asker = fixed_values(
                [score_heads[(self.always + n) % count] for n in range(sizes["routed"])]
            )
            return params | {"asker": Param(AxisLayout.parse("routed"), asker, trainable=False)}
        if sizes["routed"]:
            params["router"] = weight("routed model", xavier_uniform, "query")
        if sizes["shared"] > 1:
            params["shared"] = weight("shared model", xavier_uniform, "query")
        if sizes["routed"] and sizes["shared"]:
            params["kind"] = weight("kind model", xavier_uniform, "query")
        return params

    def open_fractions(self, spec: AttentionSpec) -> tuple[Fraction, ...] | None:
        routed = self.sizes(spec)["routed"]
        num_outputs = len(spec.score_head_of_output)
        if self.active == routed:
            return None
        # pruned: only the weights know which heads remain, so use the average
        if num_outputs < self.always + routed:
            return (Fraction(self.always + self.active, self.always + routed),) * num_outputs
        return (Fraction(1),) * self.always + (Fraction(self.active, routed),) * routed

    def blocks_gradient_when_closed(self) -> bool:
        return self.router != "norm"

    def required_score_heads(self, spec: AttentionSpec, heads: frozenset[int]) -> frozenset[int]:
        return frozenset(range(spec.heads.q)) if self.router == "norm" else heads

    def gate(self, context: QueryContext, p: PartParams, aux_losses: AuxLosses | None) -> Tensor:
        gates = [self._shared(context.x_BTD, p)] if p.sizes["shared"] else []
        if p.sizes["routed"]:
            gates.append(self._routed(context, p, aux_losses))
        if "kind" in p:
            kind = F.linear(context.x_BTD, p["kind"]).softmax(-1) * self._factor(2)
            gates = [gate_part * kind[..., n : n + 1] for n, gate_part in enumerate(gates)]
        return torch.cat(gates, -1).index_select(-1, p["slot"])[..., None]

    def _factor(self, count: int) -> int:
        """Scale a uniform softmax over `count` entries to 1 each; no scale with norm="paper"."""
        return count if self.norm == "code" else 1

    def _shared(self, x_BTD: Tensor, p: PartParams) -> Tensor:
        if "shared" not in p:
            return x_BTD.new_ones(*x_BTD.shape[:-1], self.always)
        return F.linear(x_BTD, p["shared"]).softmax(-1) * self._factor(self.always)

    def _routed(self, context: QueryContext, p: PartParams, aux_losses: AuxLosses | None) -> Tensor:
        scores = self._router_scores(context, p)
        probabilities = scores.softmax(-1)
        best = scores.sort(dim=-1, descending=True, stable=True).indices[..., : self.active]
        chosen = torch.zeros_like(probabilities).scatter(-1, best, 1.0)
        if aux_losses is not None:
            logits = scores.to(torch.promote_types(scores.dtype, torch.float32))
            columns = (logits.logsumexp(-1, keepdim=True).square(), probabilities, chosen)
            size, mean, frequency = self._means_over_tokens(context, columns, aux_losses)
            factor = self._balance_factor(len(mean)) / self.layers
            aux_losses.set("balance", factor * (mean * frequency).sum())
            if self.norm == "moa":
                aux_losses.set("z", size.sum() / self.layers)
        if self.router == "norm":
            return (chosen + (probabilities - probabilities.detach())).to(context.q_BTHK.dtype)
        if self.norm == "paper":
            return probabilities * chosen
        total = (probabilities * chosen).sum(-1, keepdim=True)
        total = total.clamp(min=torch.finfo(probabilities.dtype).eps)
        if self.norm == "moa":
            return probabilities * chosen / total.detach()
        return self.active * probabilities * chosen / total

    def _router_scores(self, context: QueryContext, p: PartParams) -> Tensor:
        if self.router == "learned":
            return F.linear(context.x_BTD, p["router"])
        q_BTHK = context.q_BTHK.index_select(2, p["asker"])
        length = torch.linalg.vector_norm(
            q_BTHK, dim=-1, dtype=torch.promote_types(q_BTHK.dtype, torch.float32)
        )
        deviation = length - length.mean(-1, keepdim=True)
        variance = deviation.square().sum(-1, keepdim=True) / (length.shape[-1] - 1)
        # Clamped before the root: queries of equal length have variance 0, where the root has no
        # gradient.
        return length / variance.clamp(min=torch.finfo(length.dtype).eps ** 2).sqrt()

    def _balance_factor(self, routed: int) -> float:
        return routed / self.active if self.norm == "moa" else self._factor(routed)

    @staticmethod
    def _means_over_tokens(
        context: QueryContext, tensors_BTN: Sequence[Tensor], aux_losses: AuxLosses
    ) -> list[Tensor]:
        """The mean of each column over the tokens of the batch that are no padding."""
        live = context.sequence.is_real.expand(tensors_BTN[0].shape[:-1])[..., None].to(
            torch.promote_types(tensors_BTN[0].dtype, torch.float32)
        )
        sums = [live.sum((0, 1)), *((t * live).sum((0, 1)) for t in tensors_BTN)]
        widths = [1, *(t.shape[-1] for t in tensors_BTN)]
        count, *totals = aux_losses.sum_over(torch.cat(sums), "tokens").split(widths)
        return [total / count.clamp(min=1) for total in totals]

    @classmethod
    def examples(cls, base: SpecFactory) -> Iterator[AttentionSpec]:
        from .rotary_embedding import Rotary

        yield base(modifiers=(cls(always=2, active=3),), pattern="causal", kv=2)
        yield base(modifiers=(cls(always=1, active=2, norm="paper"),), vdim=5)
        yield base(modifiers=(cls(always=0, active=2),))
        yield base(modifiers=(cls(always=0, active=2, norm="moa"),), kv=1, pattern="causal")
        yield base(modifiers=(cls(always=2, active=3, heads=6, balance="mean", layers=3),))
        yield base(
            modifiers=(Rotary(), cls(always=2, active=3, router="norm")), pattern="causal", kv=2
        )


def convert_to_mixture_of_heads(
    spec: AttentionSpec,
    weights: Mapping[str, Tensor],
    shared_heads: Sequence[int],
    num_active_heads: int,
) -> tuple[AttentionSpec, dict[str, Tensor]]:
    """Add norm-based routing to a trained layer: `shared_heads` stay active, plus
    `num_active_heads` others per token.

    Of the other output heads, those with the longest queries are active (2410.11842, its conversion
    of a trained model). No weight changes, and there is nothing to learn; the assignment of heads
    to gates is a constant of the layer. If all other heads are active, the function is unchanged.
    The paper continues training afterwards.

    >>> import headwise as hw
    >>> spec = hw.design(model=8, heads=4)
    >>> routed, weights = convert_to_mixture_of_heads(
    ...     spec, hw.Attention(spec).state_dict(), shared_heads=[2], num_active_heads=2
    ... )
    >>> (
    ...     routed.modifiers,
    ...     weights["mixture_of_heads.slot"].tolist(),
    ...     weights["mixture_of_heads.asker"].tolist(),
    ... )
    ((MixtureOfHeads(active=2, router='norm'),), [1, 2, 0, 3], [0, 1, 3])
    """
    score_heads = spec.score_head_of_output
    heads = range(len(score_heads))
    shared = sorted(set(shared_heads))
    if len(shared) != len(shared_heads) or not set(shared) <= set(heads):
        raise SpecError(
            f"shared_heads={list(shared_heads)} must be heads in 0..{heads[-1]}, each at most once"
        )
    if any(isinstance(modifier, MixtureOfHeads) for modifier in spec.modifiers):
        raise SpecError(
            "the heads of this layer are routed already; give a layer without MixtureOfHeads"
        )
    gate = MixtureOfHeads(always=len(shared), active=num_active_heads, router="norm")
    routed_spec = replace(spec, modifiers=(*spec.modifiers, gate))
    others = [head for head in heads if head not in shared]
    slot_of_head = {head: slot for slot, head in enumerate((*shared, *others))}
    options: dict[str, Any] = {"dtype": torch.int64}
    options["device"] = next(iter(weights.values())).device
    new_weights = {
        "mixture_of_heads.slot": torch.tensor([slot_of_head[head] for head in heads], **options),
        "mixture_of_heads.asker": torch.tensor([score_heads[head] for head in others], **options),
    }
    return routed_spec, {name: tensor.clone() for name, tensor in weights.items()} | new_weights
