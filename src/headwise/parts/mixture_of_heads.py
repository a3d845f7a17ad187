"""Mixture of heads: every token chooses which heads speak for it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import SpecError
from ..interfaces import Gate, QKTransform
from ..interfaces.axis_layout import AxisLayout
from ..interfaces.core_types import AuxLosses, Param, PartParams, QueryContext, SpecFactory
from ..interfaces.registry import part
from ..spec.attention_spec import AttentionSpec
from .initialisers import fixed_values, xavier_uniform


@part
class Routed(Gate):
    """The first `always` heads always speak, of the others the `active` best for each token (2410.11842).

    router="learned": p = softmax(x W_r) over the E routed heads. As the released code, the chosen ones share
    `active` in proportion to p (so a uniform router gives 1), the shared ones `always` by a softmax of their own,
    and the two kinds weigh 2 softmax(x W_h); norm="paper" has none of these factors nor the sharing out (eq. 5, 6).

    router="norm" has no parameters, for a trained model to start from: p = softmax(|q_i| / s), with s the unbiased
    standard deviation of |q_i| over the routed heads. Gates are 0 or 1, those of shared heads 1. Backwards, what
    comes to the gate of any routed head, chosen or not, goes to its p (eq. 10; the released code only infers).

    Of equals the first is chosen. Training sets the term "balance" in the ledger: E sum_i P_i f_i, with P_i the
    mean of p and f_i how often head i was chosen; the paper, and norm="paper", has it without E.

    A cut head still takes part in the choice: `slot` says which choice each remaining head listens to, `asker`
    whose query speaks for each routed head.

    >>> import headwise as hw
    >>> spec = hw.design(model=8, heads=4, modifiers=(Routed(always=2, active=1),))
    >>> hw.costs.count_parameters(spec) - hw.costs.count_parameters(hw.design(model=8, heads=4))  # (h + 2) d
    48
    """

    paper = "2410.11842"
    unrestricted_sides: ClassVar[str] = "kv"  # of queries it sees lengths alone
    disagreements: ClassVar[tuple[str, ...]] = (
        (
            "The paper (eq. 5, 6) multiplies by bare probabilities; its code shares them out again, so that a"
            ' uniform router gives 1. norm says which; "code" unless told.'
        ),
        "The balance is sum P f in the paper and E times that in its code; norm decides here too.",
        (
            "For a trained model the paper describes straight-through routing by |q|; the released LLaMA code"
            " has the forward half alone. Eq. 10 is followed."
        ),
    )
    always: int = 1
    active: int = 1
    norm: str = "code"
    heads: int = 0
    router: str = "learned"

    def conflicts(self, spec: AttentionSpec) -> Iterable[str]:
        heads = self.heads or len(spec.score_head_of_output)
        if heads < len(spec.score_head_of_output):
            yield (
                f"Routed(heads={heads}) is fewer than the {len(spec.score_head_of_output)} that speak; leave heads out"
            )
        if self.norm not in ("code", "paper"):
            yield f"Routed(norm={self.norm!r}) is unknown; use 'code' or 'paper'"
        if self.router not in ("learned", "norm"):
            yield f"Routed(router={self.router!r}) is unknown; use 'learned' or 'norm'"
        if not (0 <= self.always <= heads and 0 <= self.active <= heads - self.always):
            yield f"Routed(always={self.always}, active={self.active}) asks for more than {heads} heads can give"
        elif self.active == 0 and self.always < heads:
            yield f"Routed(active=0) would never let {heads - self.always} heads speak; prune them, or use active=1"
        if self.router == "norm":
            yield from self._clashes_of_norms(spec, heads - self.always)

    def _clashes_of_norms(self, spec: AttentionSpec, routed: int) -> Iterable[str]:
        if routed == 1:
            few = f"use always={self.always - 1}, " if self.always else ""
            none = f"{few}or always={self.always + 1} and active=0"
            yield f"Routed(router='norm') compares queries of at least 2 routed heads, not 1; {none}"
        if spec.heads.rows != spec.heads.q:
            yield "Routed(router='norm') asks by score heads, but a mixing makes other rows of them; use 'learned'"
        if not spec.project.uses_head_dims:
            name = type(spec.project).__name__
            yield f"Routed(router='norm') compares the queries of heads, but {name} asks with others; use 'learned'"
        for name, turn in spec.parts_of(QKTransform):
            if "q" in turn.transformed_sides(spec) and turn.normalises_length():
                yield f"Routed(router='norm') finds queries of one length after {name}; use router='learned'"

    def with_fixed_sizes(self, spec: AttentionSpec) -> Self:
        return replace(self, heads=self.heads or len(spec.score_head_of_output))

    def sizes(self, spec: AttentionSpec) -> Mapping[str, int]:
        heads = self.heads or len(spec.score_head_of_output)
        return {"shared": self.always, "routed": heads - self.always, "kind": 2}

    def params(self, spec: AttentionSpec) -> Mapping[str, Param]:
        sizes, own = self.sizes(spec), spec.score_head_of_output
        params = {"slot": Param(AxisLayout.parse("out"), fixed_values(range(len(own))), trainable=False)}
        if self.router == "norm":
            # Right before any head is cut; in a layer that was cut only its weights know who asked for whom.
            asker = fixed_values([own[(self.always + n) % len(own)] for n in range(sizes["routed"])])
            return params | {"asker": Param(AxisLayout.parse("routed"), asker, trainable=False)}
        if sizes["routed"]:
            params["router"] = Param(AxisLayout.parse("routed model"), xavier_uniform, "query")
        if sizes["shared"] > 1:
            params["shared"] = Param(AxisLayout.parse("shared model"), xavier_uniform, "query")
        if sizes["routed"] and sizes["shared"]:
            params["kind"] = Param(AxisLayout.parse("kind model"), xavier_uniform, "query")
        return params

    def open_fractions(self, spec: AttentionSpec) -> tuple[Fraction, ...] | None:
        routed, own = self.sizes(spec)["routed"], len(spec.score_head_of_output)
        if self.active == routed:
            return None
        if own < self.always + routed:  # of a layer that was cut only its weights know who is left
            return (Fraction(self.always + self.active, self.always + routed),) * own
        return (Fraction(1),) * self.always + (Fraction(self.active, routed),) * routed

    def blocks_gradient_when_closed(self) -> bool:
        return self.router != "norm"

    def required_score_heads(self, spec: AttentionSpec, heads: frozenset[int]) -> frozenset[int]:
        return frozenset(range(spec.heads.q)) if self.router == "norm" else heads

    def gate(self, asked: QueryContext, p: PartParams, aux_losses: AuxLosses | None) -> Tensor:
        shares = [self._shared(asked.x_BTD, p)] if p.sizes["shared"] else []
        if p.sizes["routed"]:
            shares.append(self._routed(asked, p, aux_losses))
        if "kind" in p:
            kind = F.linear(asked.x_BTD, p["kind"]).softmax(-1) * self._factor(2)
            shares = [share * kind[..., n : n + 1] for n, share in enumerate(shares)]
        return torch.cat(shares, -1).index_select(-1, p["slot"])[..., None]

    def _factor(self, count: int) -> int:
        """What a uniform share is multiplied with, so that it becomes 1."""
        return count if self.norm == "code" else 1

    def _shared(self, x_BTD: Tensor, p: PartParams) -> Tensor:
        if "shared" not in p:
            return x_BTD.new_ones(*x_BTD.shape[:-1], self.always)
        return F.linear(x_BTD, p["shared"]).softmax(-1) * self._factor(self.always)

    def _routed(self, asked: QueryContext, p: PartParams, ledger: AuxLosses | None) -> Tensor:
        share = self._scores(asked, p).softmax(-1)
        best = share.sort(dim=-1, descending=True, stable=True).indices[..., : self.active]
        chosen = torch.zeros_like(share).scatter(-1, best, 1.0)
        if ledger is not None:
            ledger.set("balance", self._balance(asked, share, chosen, ledger))
        if self.router == "norm":
            return (chosen + (share - share.detach())).to(asked.q_BTHK.dtype)
        if self.norm == "paper":
            return share * chosen
        kept = (share * chosen).sum(-1, keepdim=True)
        return self.active * share * chosen / kept.clamp(min=torch.finfo(share.dtype).eps)

    def _scores(self, asked: QueryContext, p: PartParams) -> Tensor:
        if self.router == "learned":
            return F.linear(asked.x_BTD, p["router"])
        q_BTHK = asked.q_BTHK.index_select(2, p["asker"])
        long = torch.linalg.vector_norm(q_BTHK, dim=-1, dtype=torch.promote_types(q_BTHK.dtype, torch.float32))
        apart = long - long.mean(-1, keepdim=True)
        spread = apart.square().sum(-1, keepdim=True) / (long.shape[-1] - 1)
        # Bounded under the root: equal queries have no spread, and a root of zero has no gradient.
        return long / spread.clamp(min=torch.finfo(long.dtype).eps ** 2).sqrt()

    def _balance(self, asked: QueryContext, share: Tensor, chosen: Tensor, ledger: AuxLosses) -> Tensor:
        live = asked.sequence.is_real.expand(share.shape[:-1])[..., None].to(
            torch.promote_types(share.dtype, torch.float32)
        )
        sums = [live.sum((0, 1)), *((t * live).sum((0, 1)) for t in (share, chosen))]
        count, mean, often = ledger.sum_over(torch.cat(sums), "tokens").split([1, *chosen.shape[-1:] * 2])
        mean, often = (total / count.clamp(min=1) for total in (mean, often))
        return self._factor(share.shape[-1]) * (mean * often).sum()

    @classmethod
    def examples(cls, base: SpecFactory) -> Iterator[AttentionSpec]:
        from .rotary_embedding import Rotary

        yield base(modifiers=(cls(always=2, active=3),), pattern="causal", kv=2)
        yield base(modifiers=(cls(always=1, active=2, norm="paper"),), vdim=5)
        yield base(modifiers=(cls(always=0, active=2),))
        yield base(modifiers=(cls(always=2, active=3, heads=6),))
        yield base(modifiers=(Rotary(), cls(always=2, active=3, router="norm")), pattern="causal", kv=2)


def convert_to_mixture_of_heads(
    spec: AttentionSpec, weights: Mapping[str, Tensor], shared_heads: Sequence[int], num_active_heads: int
) -> tuple[AttentionSpec, dict[str, Tensor]]:
    """A trained layer in which these output heads always speak, of the others the `active` with the longest queries.

    No weight changes and none is learned (2410.11842, its conversion of a trained model); which head makes which choice
    is a constant of the layer. With all others active it is the same function. The paper then trains on.

    >>> import headwise as hw
    >>> spec = hw.design(model=8, heads=4)
    >>> routed, told = convert_to_mixture_of_heads(
    ...     spec, hw.Attention(spec).state_dict(), shared_heads=[2], num_active_heads=2
    ... )
    >>> routed.modifiers, told["routed.slot"].tolist(), told["routed.asker"].tolist()
    ((Routed(active=2, router='norm'),), [1, 2, 0, 3], [0, 1, 3])
    """
    speaks = spec.score_head_of_output
    first = sorted(set(shared_heads))
    if len(first) != len(shared_heads) or not set(first) <= set(range(len(speaks))):
        raise SpecError(f"shared={list(shared_heads)} must name heads within 0..{len(speaks) - 1}, each at most once")
    if any(isinstance(modifier, Routed) for modifier in spec.modifiers):
        raise SpecError("the heads of this layer are routed already; give a layer without Routed")
    gate = Routed(always=len(first), active=num_active_heads, router="norm")
    routed = replace(spec, modifiers=(*spec.modifiers, gate))
    others = [head for head in range(len(speaks)) if head not in first]
    choice = {head: n for n, head in enumerate((*first, *others))}
    own = {
        "routed.slot": torch.tensor([choice[head] for head in range(len(speaks))]),
        "routed.asker": torch.tensor([speaks[head] for head in others], dtype=torch.int64),
    }
    return routed, {name: tensor.clone() for name, tensor in weights.items()} | own
