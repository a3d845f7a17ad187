"""Mixture of heads: every token chooses which heads speak for it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from ..layout import Layout
from ..registry import part
from ..seams import Gate
from ..spec import AttentionSpec
from ..terms import Asked, Base, Ledger, Param, Weighted
from .start import constant, xavier


@part
class Routed(Gate):
    """The first `always` heads always speak, of the others the `active` best for each token (2410.11842).

    As the released code: p = softmax over the routed heads, the chosen ones share `active` in proportion to p
    (so a uniform router gives 1), the shared ones `always` by a softmax of their own, and the two kinds weigh
    2 softmax(x W_h). norm="paper" has none of these factors nor the sharing out. Training sets the term
    "balance" in the ledger: E sum_i P_i f_i, with P_i the mean of p and f_i how often head i was chosen.

    A cut head still takes part in the choice: `slot` says which choice each remaining head listens to.

    >>> import headwise as hw
    >>> spec = hw.design(model=8, heads=4, modifiers=(Routed(always=2, active=1),))
    >>> hw.counting.params(spec) - hw.counting.params(hw.design(model=8, heads=4))  # (h + 2) d
    48
    """

    paper = "2410.11842"
    always: int = 1
    active: int = 1
    norm: str = "code"
    heads: int = 0

    def clashes(self, spec: AttentionSpec) -> Iterable[str]:
        heads = self.heads or len(spec.speaks)
        if heads < len(spec.speaks):
            yield f"Routed(heads={heads}) is fewer than the {len(spec.speaks)} that speak; leave heads out"
        if self.norm not in ("code", "paper"):
            yield f"Routed(norm={self.norm!r}) is unknown; use 'code' or 'paper'"
        if not (0 <= self.always <= heads and 0 <= self.active <= heads - self.always):
            yield f"Routed(always={self.always}, active={self.active}) asks for more than {heads} heads can give"
        elif self.active == 0 and self.always < heads:
            yield f"Routed(active=0) would never let {heads - self.always} heads speak; prune them, or use active=1"

    def settled(self, spec: AttentionSpec) -> Self:
        return replace(self, heads=self.heads or len(spec.speaks))

    def sizes(self, spec: AttentionSpec) -> Mapping[str, int]:
        heads = self.heads or len(spec.speaks)
        return {"shared": self.always, "routed": heads - self.always, "kind": 2}

    def params(self, spec: AttentionSpec) -> Mapping[str, Param]:
        sizes = self.sizes(spec)
        params = {"slot": Param(Layout.parse("out"), constant(range(len(spec.speaks))), learned=False)}
        if sizes["routed"]:
            params["router"] = Param(Layout.parse("routed model"), xavier, "query")
        if sizes["shared"] > 1:
            params["shared"] = Param(Layout.parse("shared model"), xavier, "query")
        if sizes["routed"] and sizes["shared"]:
            params["kind"] = Param(Layout.parse("kind model"), xavier, "query")
        return params

    def gate(self, asked: Asked, p: Weighted, ledger: Ledger | None) -> Tensor:
        x_BTD = asked.x_BTD
        scaled = self.norm == "code"
        gates: list[Tensor] = []
        if self.always:
            gates.append(self._shared(x_BTD, scaled, p))
        if "router" in p:
            gates.append(self._routed(asked, scaled, p, ledger))
        if "kind" in p:
            kind = F.linear(x_BTD, p["kind"]).softmax(-1) * (2 if scaled else 1)
            gates = [g * kind[..., n : n + 1] for n, g in enumerate(gates)]
        return torch.cat(gates, -1).index_select(-1, p["slot"])[..., None]

    def _shared(self, x_BTD: Tensor, scaled: bool, p: Weighted) -> Tensor:
        if "shared" not in p:
            return x_BTD.new_ones(*x_BTD.shape[:-1], 1)
        return F.linear(x_BTD, p["shared"]).softmax(-1) * (self.always if scaled else 1)

    def _routed(self, asked: Asked, scaled: bool, p: Weighted, ledger: Ledger | None) -> Tensor:
        share = F.linear(asked.x_BTD, p["router"]).softmax(-1)
        top, index = share.topk(self.active, -1)
        chosen = torch.zeros_like(share).scatter(-1, index, 1.0)
        if ledger is not None:
            live = asked.at.live.expand(share.shape[:-1])[..., None].to(torch.promote_types(share.dtype, torch.float32))
            count = live.sum().clamp(min=1)
            mean, often = ((t * live).sum((0, 1)) / count for t in (share, chosen))
            ledger.set("balance", share.shape[-1] * (mean * often).sum())
        if not scaled:
            return share * chosen
        return self.active * share * chosen / top.sum(-1, keepdim=True).clamp(min=torch.finfo(share.dtype).eps)

    @classmethod
    def examples(cls, base: Base) -> Iterator[AttentionSpec]:
        yield base(modifiers=(cls(always=2, active=3),), pattern="causal", kv=2)
        yield base(modifiers=(cls(always=1, active=2, norm="paper"),), vdim=5)
        yield base(modifiers=(cls(always=0, active=2),))
        yield base(modifiers=(cls(always=2, active=3, heads=6),))
