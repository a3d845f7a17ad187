"""Multi-head latent attention: one small vector per token is remembered, keys and values grow out of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..layout import Layout
from ..registry import part
from ..seams import Project
from ..spec import AttentionSpec
from ..terms import Base, Core, Param, Turning, Weighted
from .start import ones, xavier


@part
class Latent(Project):
    """c = RMSNorm(z W_DKV), r = turn(z W_KR) shared by heads; k_h = [c W_UK_h, r], v_h = c W_UV_h (2405.04434).

    Only c (`rank` numbers) and r (`rope` numbers) are remembered. `heads.dim` is the width that is not turned;
    queries may pass a norm of their own at `query_rank`. form="expanded" makes keys and values anew;
    form="absorbed" moves W_UK into the query and W_UV behind the reading, so that a single query reads the
    latent itself. Both are the same function of the same parameters. Scale: 1/sqrt(dim + rope).

    DeepSeek-V3 remembers 576 numbers per token where its 128 heads would need 40,960:

    >>> import headwise as hw
    >>> hw.counting.cache_numbers(hw.design(preset="mla", model=7168, heads=128))
    576
    """

    paper = "2405.04434"
    grouped: ClassVar[bool] = False
    rank: int = 512
    rope: int = 64
    query_rank: int | None = None
    form: str = "expanded"
    eps: float = 1e-6

    def clashes(self, spec: AttentionSpec) -> Iterable[str]:
        if not self.eps > 0:
            yield f"{type(self).__name__}(eps={self.eps!r}) must be positive; 1e-6 is usual"
        if self.form not in ("expanded", "absorbed"):
            yield f"Latent(form={self.form!r}) is unknown; use 'expanded' or 'absorbed'"
        if not spec.similarity.linear:
            name = type(spec.similarity).__name__
            yield f"Latent reads a single query absorbed, which keeps dot products alone, not {name}; use Dot()"
        if min(self.rank, 1 if self.query_rank is None else self.query_rank) < 1 or self.rope < 0:
            yield f"{self!r} has an impossible width; rank and query_rank need at least 1, rope at least 0"
        if spec.heads.kv != spec.heads.q or spec.heads.values or spec.heads.reads != tuple(range(spec.heads.q)):
            apart = spec.heads.values or spec.heads.kv == spec.heads.q
            why = (
                "heads that are grouped apart; use project Direct()"
                if apart
                else f"kv={spec.heads.kv}; use kv={spec.heads.q}"
            )
            yield f"Latent gives every head a key and a value of its own, unlike {why}"

    def sizes(self, spec: AttentionSpec) -> Mapping[str, int]:
        return {"rank": self.rank, "rope": self.rope, "query_rank": self.query_rank or 0}

    def turned(self, spec: AttentionSpec) -> int:
        return self.rope

    def params(self, spec: AttentionSpec) -> Mapping[str, Param]:
        wide = "(q [dim|rope])"
        if self.query_rank is None:
            query = {"q": Param(Layout.parse(f"{wide} model"), xavier, "query")}
        else:
            query = {
                "q_down": Param(Layout.parse("query_rank model"), xavier, "query"),
                "q_norm": Param(Layout.parse("query_rank"), ones),
                "q_up": Param(Layout.parse(f"{wide} query_rank"), xavier, "query"),
            }
        applied = "query" if self.form == "absorbed" else "recalled"
        return query | {
            "kv_down": Param(Layout.parse("[rank|rope] source"), xavier, "source"),
            "kv_norm": Param(Layout.parse("rank"), ones),
            "k_up": Param(Layout.parse("(kv dim) rank"), xavier, applied),
            "v_up": Param(Layout.parse("(kv vdim) rank"), xavier, applied),
        }

    def entry(self, spec: AttentionSpec) -> Mapping[str, Layout]:
        return {"c": Layout.parse("rank"), "r": Layout.parse("rope")}

    def core(self, spec: AttentionSpec) -> Core:
        heads, scale = spec.heads, (spec.heads.dim + self.rope) ** -0.5
        if self.form == "expanded":
            return Core(heads.reads, spec.voices, heads.dim + self.rope, heads.vdim, scale)
        return Core((0,) * heads.q, (0,) * len(spec.voices), self.rank + self.rope, self.rank, scale)

    def rewrites(self, spec: AttentionSpec) -> Mapping[str, Project]:
        return {"step": replace(self, form="absorbed")}

    def ask(self, x_BTD: Tensor, turn: Turning, p: Weighted) -> Tensor:
        if self.query_rank is None:
            flat = F.linear(x_BTD, p["q"])
        else:
            low = F.linear(x_BTD, p["q_down"])
            low = F.rms_norm(low, (self.query_rank,), p["q_norm"].to(low.dtype), self.eps)
            flat = F.linear(low, p["q_up"])
        dim = p.sizes["dim"]
        q_BTHK = flat.unflatten(-1, (p.sizes["q"], dim + self.rope))
        own, shared = q_BTHK.split([dim, self.rope], -1)
        if self.form == "absorbed":
            own = torch.einsum("bthk,hkr->bthr", own, p["k_up"].view(-1, dim, self.rank))
        return torch.cat([own, turn(shared, "q")], -1)

    def remember(self, z_BSE: Tensor, turn: Turning, p: Weighted) -> dict[str, Tensor]:
        c, r = F.linear(z_BSE, p["kv_down"]).split([self.rank, self.rope], -1)
        return {
            "c": F.rms_norm(c, (self.rank,), p["kv_norm"].to(c.dtype), self.eps),
            "r": turn(r[..., None, :], "k").squeeze(-2),
        }

    def recall(self, entry: Mapping[str, Tensor], turn: Turning, p: Weighted) -> tuple[Tensor, Tensor]:
        c, r = entry["c"], entry["r"]
        if self.form == "absorbed":
            return torch.cat([c, r], -1)[..., None, :], c[..., None, :]
        own = F.linear(c, p["k_up"]).unflatten(-1, (p.sizes["kv"], p.sizes["dim"]))
        shared = r[..., None, :].expand(*own.shape[:-1], -1)
        v = F.linear(c, p["v_up"]).unflatten(-1, (p.sizes["kv"], p.sizes["vdim"]))
        return torch.cat([own, shared], -1), v

    def deliver(self, o_BTHV: Tensor, voices: tuple[int, ...], p: Weighted) -> Tensor:
        if self.form == "expanded":
            return o_BTHV
        up = p["v_up"].view(-1, p.sizes["vdim"], self.rank)
        if voices != tuple(range(up.shape[0])):
            up = up[list(voices)]
        return torch.einsum("bthr,hvr->bthv", o_BTHV, up)

    @classmethod
    def examples(cls, base: Base) -> Iterator[AttentionSpec]:
        from .rotary import Rotary
        from .talking_heads import TalkingHeads

        turned = (Rotary(),)
        yield base(project=cls(rank=8, rope=2), modifiers=turned, pattern="causal", vdim=5)
        yield base(project=cls(rank=8, rope=2, query_rank=9, eps=1e-5), modifiers=turned, pattern="causal")
        yield base(project=cls(rank=8, rope=0, form="absorbed"))
        yield base(project=cls(rank=8, rope=0, form="absorbed"), modifiers=(TalkingHeads(),), vdim=5)
