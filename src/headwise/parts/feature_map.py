"""Linear attention: a similarity that splits into features of the query and features of the key."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..interfaces import Similarity
from ..interfaces.axis_layout import AxisLayout
from ..interfaces.core_types import CallSize, CoreShape, Param, PartParams, Phase, SpecFactory
from ..interfaces.registry import part
from ..spec.attention_spec import AttentionSpec
from .initialisers import fixed_values
from .precision import to_at_least_float32, without_autocast

FEATURE_MAP_KINDS = ("elu", "relu", "favor")
MAX_EXPONENT = 64.0  # exponent of a key's feature: float32 ends at 88, and sums over keys times values need the rest
EXPONENT_OFFSET = 40.0  # at most, of the 87 that float32 has below 0


@part
class FeatureMap(Similarity):
    """s = phi(q).phi(k) with phi never negative, and without a scale; kind="elu": phi(x) = elu(x) + 1 (2006.16236).

    kind="relu": phi(x) = max(x, 0); where no channel of a query meets one of a key, it reads zero.
    kind="favor": positive random features (2009.14794), phi(x) = exp(w_i.x' - |x'|^2 / 2) / sqrt(draws) with
    x' = x dim^(-1/4), so that s is exp(q.k / sqrt(dim)) on average over what is drawn. The `draws` directions w_i, 0
    for dim ceil(ln(dim + 1)), are orthogonal in blocks of dim and as long as Gaussians (the paper's unbiased choice;
    of length sqrt(dim) they would only be close), and shared by all heads as in the paper's code. `seed` draws them,
    once: nobody redraws. Scores are told but for a factor of each query and one of all keys, which Sum divides out.
    In float32 weights are right to 2e-5 where queries and keys are up to 12 dim^(1/4) long; longer queries lose digits
    with the size of their exponents, and keys of 15 dim^(1/4) leave no weight at all from dim 128 on. The exponent
    of a key counts as 64 at most, which it passes only near directions longer than 14, as heads above dim 128 have.

    All past tokens fit in one state per head: the sum of phi(k) v^T and the sum of phi(k).

    >>> FeatureMap().pair(torch.zeros(3), torch.zeros(3), 1.0, {}).item()
    3.0
    """

    paper = "2006.16236"
    disagreements: ClassVar[tuple[str, ...]] = (
        (
            "Performer's code takes the largest exponent of each query, and of all keys, off before exp and adds a "
            "small number: here a query's own alone, because with the others parallel, chunked and recurrent forms "
            "would differ."
        ),
    )
    signed: ClassVar[bool] = False
    kind: str = "elu"
    draws: int = 0
    seed: int = 0

    def conflicts(self, spec: AttentionSpec) -> Iterable[str]:
        if self.kind not in FEATURE_MAP_KINDS:
            yield f"FeatureMap(kind={self.kind!r}) is unknown; use 'elu', 'relu' or 'favor'"
        elif self.kind != "favor" and (self.draws or self.seed):
            yield f"FeatureMap(kind={self.kind!r}) draws nothing; leave draws and seed out, or use kind 'favor'"
        if self.draws < 0:
            yield f"FeatureMap(draws={self.draws}) is no number of directions; use at least 1, or leave it out"
        if not 0 <= self.seed < 2**63:
            yield f"FeatureMap(seed={self.seed}) seeds no generator; use 0 or more, below 2^63"
        if self.kind == "favor" and not spec.project.uses_head_dims:
            name = type(spec.project).__name__
            yield f"FeatureMap(kind='favor') draws directions as wide as a head, unlike {name}; use project Direct()"
        if not spec.normaliser.proportional:
            name = type(spec.normaliser).__name__
            yield f"FeatureMap keeps past tokens as sums, of which {name} cannot be made; use normaliser Sum()"
        if any(modifier.phase in (Phase.SCORES, Phase.WEIGHTS, Phase.VALUES) for modifier in spec.modifiers):
            yield "FeatureMap never forms scores while decoding, so nothing may change scores, weights or values"

    def score_scale(self, core: CoreShape) -> float:
        return 1.0

    def num_state_features(self, core: CoreShape) -> int:
        if self.kind != "favor":
            return core.dim
        return self.draws or core.dim * math.ceil(math.log(core.dim + 1))

    def feature_dim(self, core: CoreShape) -> int:
        return self.num_state_features(core)

    def sizes(self, spec: AttentionSpec) -> Mapping[str, int]:
        return {"feature": self.num_state_features(spec.core)}

    def params(self, spec: AttentionSpec) -> Mapping[str, Param]:
        if self.kind != "favor":
            return {}
        return {
            "directions": Param(
                AxisLayout.parse("feature dim"), partial(sample_orthogonal_gaussian, self.seed), trainable=False
            )
        }

    def flops(self, spec: AttentionSpec, work: CallSize) -> int:
        if self.kind != "favor":
            return 0
        # A state never meets a key again, and no source is kept in one.
        keys = work.new_tokens if spec.is_recurrent and spec.source is None else work.keys
        lifted = work.queries * spec.heads.q + keys * spec.heads.kv
        return 2 * work.batch * lifted * self.num_state_features(spec.core) * spec.heads.dim

    def constant_flops(self, spec: AttentionSpec, work: CallSize) -> int:
        return self.flops(spec, work)

    def can_be_all_zero(self) -> bool:
        return self.kind == "relu"

    def pair(self, q_K: Tensor, k_K: Tensor, scale: float, p_h: Mapping[str, Tensor]) -> Tensor:
        if self.kind == "elu":
            return ((F.elu(q_K) + 1) * (F.elu(k_K) + 1)).sum(-1)
        if self.kind == "relu":
            return (q_K.clamp(min=0) * k_K.clamp(min=0)).sum(-1)
        q, k, directions = q_K / len(q_K) ** 0.25, k_K / len(k_K) ** 0.25, p_h["directions"]
        asks = (directions * q).sum(-1)
        tells = (directions * k).sum(-1) - k.square().sum() / 2 - key_exponent_offset(directions)
        return (asks - asks.max() + tells.clamp(max=MAX_EXPONENT)).exp().mean()

    def feature_map(self, x_BTHK: Tensor, side: str, p: PartParams) -> Tensor:
        if self.kind == "elu":
            return F.elu(x_BTHK) + 1
        if self.kind == "relu":
            return F.relu(x_BTHK)
        x, directions = to_at_least_float32(x_BTHK) * x_BTHK.shape[-1] ** -0.25, p["directions"]
        with without_autocast(x):
            along = F.linear(x, directions.to(x.dtype))
        # Whatever all features of a query have in common goes when weights are divided by their sum: its largest
        # exponent, with which its length goes too. A key meets many queries, so only what all keys have in common
        # may go, and that is known before there is any.
        if side == "q":
            return (along - along.amax(-1, keepdim=True)).exp()
        exponents = along - x.square().sum(-1, keepdim=True) / 2 - key_exponent_offset(directions).to(x.dtype)
        return exponents.clamp(max=MAX_EXPONENT).exp() / len(directions)

    def scores(self, q_BHTK: Tensor, k_BHSK: Tensor, scale: float, p: PartParams) -> Tensor:
        return torch.matmul(q_BHTK, k_BHSK.transpose(-1, -2))

    def unnormalised_weights(self, q_BHTK: Tensor, k_BHSK: Tensor, scale: float, p: PartParams) -> Tensor:
        return self.scores(q_BHTK, k_BHSK, scale, p)

    def state_layouts(self, spec: AttentionSpec) -> Mapping[str, AxisLayout]:
        return {"kv": AxisLayout.parse("voice feature vdim"), "k": AxisLayout.parse("voice feature")}

    def update_state(
        self, state: Mapping[str, Tensor], k_BHSK: Tensor, v_BHSV: Tensor, live_BS: Tensor, p: PartParams
    ) -> dict[str, Tensor]:
        wide = state["k"].dtype  # bfloat16 keeps 8 bits, too few for a sum of thousands
        phi = k_BHSK.to(wide).masked_fill(~live_BS[:, None, :, None], 0.0)
        return {"kv": state["kv"] + phi.transpose(-1, -2) @ v_BHSV.to(wide), "k": state["k"] + phi.sum(-2)}

    def read_state(self, q_BHTK: Tensor, state: Mapping[str, Tensor], p: PartParams) -> tuple[Tensor, Tensor]:
        phi = q_BHTK.to(state["k"].dtype)
        return phi @ state["kv"], (phi @ state["k"][..., None]).squeeze(-1)

    @classmethod
    def examples(cls, base: SpecFactory) -> Iterator[AttentionSpec]:
        from .sum_normaliser import Sum

        yield base(similarity=cls(), normaliser=Sum(), kv=2, vdim=5)
        yield base(similarity=cls(kind="relu"), normaliser=Sum(), pattern="window(4)", kv=3)
        yield base(similarity=cls(kind="favor", draws=9, seed=1), normaliser=Sum(), pattern="causal", kv=2, vdim=5)
        yield base(similarity=cls(kind="favor"), normaliser=Sum(), source=13)


def key_exponent_offset(directions: Tensor) -> Tensor:
    """What the exponents of all keys are lowered by, so that w.k - |k|^2 / 2, at most |w|^2 / 2, is at most HIGHEST.

    No further than LOWERED, so that keys of length 0 keep as many digits as others.
    """
    return (directions.square().sum(-1).amax() / 2 - MAX_EXPONENT).clamp(0, EXPONENT_OFFSET)


def sample_orthogonal_gaussian(seed: int, shape: tuple[int, ...]) -> Tensor:
    """Rows that are Gaussian vectors each, and orthogonal in blocks as high as they are wide."""
    count, dim = shape
    hat = torch.Generator().manual_seed(seed)
    draw = partial(torch.randn, generator=hat, dtype=torch.float64, device="cpu")
    blocks = []
    for _ in range(0, count, dim):
        q, r = torch.linalg.qr(draw(dim, dim))
        blocks.append(q * r.diagonal().sign())  # only with these signs are all rotations as likely
    lengths = draw(count, dim).norm(dim=1, keepdim=True)
    return fixed_values((torch.cat(blocks)[:count] * lengths).flatten().tolist())(shape)
