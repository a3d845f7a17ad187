"""Dynamically composable heads: the mixing of heads depends on who asks and who is asked."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from ..layout import Layout
from ..registry import part
from ..seams import Mix
from ..spec import AttentionSpec
from ..terms import Applied, Base, Param, Phase, Weighted, Work
from .start import constant, normal, zeros
from .talking_heads import mixed_heads

_EPS = 1e-6


@part
class Dynamic(Mix):
    """a' = a + a W_b + sum_r (a.w1_r) w2_r + a * g, once with the factors of the query, once with the key's.

    DCMHA's Compose (2405.08553; as in the released code: w1 is normalised over heads, w2 is not). The factors
    come from the layer's input: u = GELU(x W1), [w1; w2] = u W2, g = tanh(x Wg), with a hidden width of
    2 rank H. On weights, what is kept of a head when others are cut are its own columns of w2, g and W_b.

    With all factors zero, which is close to how it starts, every pair is left as it is:

    >>> zero = {"source": torch.zeros(2, 3), "target": torch.zeros(2, 3), "gate": torch.zeros(3)}
    >>> Dynamic().pair(torch.ones(3), zero, zero, {"own": torch.arange(3)}).tolist()
    [1.0, 1.0, 1.0]
    """

    paper = "2405.08553"
    on: str = "scores"
    rank: int = 2
    static: str = "none"

    @property
    def phase(self) -> Phase:
        return Phase.WEIGHTS if self.on == "weights" else Phase.SCORES

    def clashes(self, spec: AttentionSpec) -> Iterable[str]:
        if self.on not in ("scores", "weights"):
            yield f"Dynamic(on={self.on!r}) is unknown; use 'scores' or 'weights'"
        if self.static not in ("none", "full"):
            yield f"Dynamic(static={self.static!r}) is unknown; use 'none' or 'full'"
        if self.rank < 1:
            yield f"Dynamic(rank={self.rank}) mixes nothing; use at least 1, 2 is published"

    @property
    def _target(self) -> str:
        return "out" if self.on == "weights" else "mixed"

    def sizes(self, spec: AttentionSpec) -> Mapping[str, int]:
        heads = spec.heads.q
        return {"rank": self.rank, "hidden": 2 * self.rank * heads, "mixed": heads}

    def params(self, spec: AttentionSpec) -> Mapping[str, Param]:
        sizes = spec.sizes_of(self)
        heads, hidden = spec.heads.q, sizes["hidden"]
        second = normal(0.02 / (math.sqrt(hidden) * (heads + self.rank)))
        own = spec.voices if self.on == "weights" else tuple(range(heads))
        params = {"own": Param(Layout.parse(self._target), constant(own), learned=False)}
        sides: tuple[tuple[str, str, Applied], ...] = (("query", "model", "query"), ("key", "source", "source"))
        for side, width, met in sides:
            first = normal(math.sqrt(2 / (sizes[width] + hidden)))
            gate = normal(0.005 * math.sqrt(2 / (sizes[width] + heads)))
            params |= {
                f"{side}_hidden": Param(Layout.parse(f"hidden {width}"), first, met),
                f"{side}_source": Param(Layout.parse("(rank q) hidden"), second, met),
                f"{side}_target": Param(Layout.parse(f"(rank {self._target}) hidden"), second, met),
                f"{side}_gate": Param(Layout.parse(f"{self._target} {width}"), gate, met),
            }
        if self.static == "full":
            params["static"] = Param(Layout.parse(f"q {self._target}"), zeros)
        return params

    def entry(self, spec: AttentionSpec) -> Mapping[str, Layout]:
        return {
            "source": Layout.parse("rank q"),
            "target": Layout.parse(f"rank {self._target}"),
            "gate": Layout.parse(self._target),
        }

    def flops(self, spec: AttentionSpec, work: Work) -> int:
        to = len(spec.voices) if self.on == "weights" else spec.heads.q
        pairs = 2 * work.batch * work.pairs
        ranks = 2 * self.rank * (spec.heads.q + to)
        return pairs * (ranks + (spec.heads.q * to if self.static == "full" else 0))

    def sources(self, spec: AttentionSpec, heads: frozenset[int]) -> frozenset[int]:
        return frozenset(range(spec.heads.q))

    def ask(self, x_BTD: Tensor, p: Weighted) -> dict[str, Tensor]:
        return self._factors(x_BTD, "query", p)

    def remember(self, z_BSE: Tensor, p: Weighted) -> dict[str, Tensor]:
        return self._factors(z_BSE, "key", p)

    def _factors(self, x: Tensor, side: str, p: Weighted) -> dict[str, Tensor]:
        hidden = F.gelu(F.linear(x, p[f"{side}_hidden"]))
        source = F.linear(hidden, p[f"{side}_source"]).unflatten(-1, (self.rank, -1))
        return {
            "source": F.rms_norm(source, source.shape[-1:], eps=_EPS),
            "target": F.linear(hidden, p[f"{side}_target"]).unflatten(-1, (self.rank, -1)),
            "gate": torch.tanh(F.linear(x, p[f"{side}_gate"])),
        }

    def pair(self, a_H: Tensor, asked: Mapping[str, Tensor], kept: Mapping[str, Tensor], p: Weighted) -> Tensor:
        own = a_H[p["own"]]
        mixed = own + a_H @ p["static"] if "static" in p else own
        for f in (asked, kept):
            mixed = mixed + (f["source"] @ a_H) @ f["target"] + own * f["gate"]
        return mixed

    def mix(self, a_BHTS: Tensor, asked: Mapping[str, Tensor], kept: Mapping[str, Tensor], p: Weighted) -> Tensor:
        own = a_BHTS.index_select(1, p["own"])
        # By query, the pairs of one query are the columns of a product; by key, those of one key.
        by_query = _composed(a_BHTS.permute(0, 2, 1, 3), asked).permute(0, 2, 1, 3)
        by_key = _composed(a_BHTS.permute(0, 3, 1, 2), kept).permute(0, 2, 3, 1)
        gate = asked["gate"].transpose(1, 2)[..., None] + kept["gate"].transpose(1, 2)[..., None, :]
        mixed = own + by_query + by_key + own * gate.to(own.dtype)
        return mixed + mixed_heads(a_BHTS, p["static"]) if "static" in p else mixed

    @classmethod
    def examples(cls, base: Base) -> Iterator[AttentionSpec]:
        yield base(modifiers=(cls(rank=1), cls(on="weights", rank=2)), pattern="causal", kv=2)
        yield base(modifiers=(cls(on="weights", static="full"),), pattern="window(4)", source=13)


def _composed(a: Tensor, factors: Mapping[str, Tensor]) -> Tensor:
    """Heads to ranks to heads: [.., H, N] to [.., O, N]."""
    source, target = factors["source"].to(a.dtype), factors["target"].to(a.dtype)
    return target.transpose(-1, -2) @ (source @ a)
