"""Linear attention: scores are products of feature maps of query and key, and `SumNormaliser`
divides them by their sum.

Also helpers for computations that must not run in the layer's low precision or under autocast.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..interfaces import Normaliser, RecurrentPart, Similarity
from ..interfaces.core_types import (
    AxisLayout,
    CallSize,
    CoreShape,
    Param,
    PartParams,
    Phase,
    SpecFactory,
)
from ..interfaces.part import part
from ..spec.attention_spec import AttentionSpec
from .initialisers import fixed_values


def to_at_least_float32(x: Tensor) -> Tensor:
    """x converted to float32 if its dtype is less precise."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """A context in which matrix products run in the dtype of their operands, without autocast."""
    kind = x.device.type
    lowered = kind != "meta" and torch.is_autocast_enabled(kind)
    return torch.autocast(kind, enabled=False) if lowered else nullcontext()


# of a key's feature; float32 overflows at 88, and the sum over keys times values needs the rest
MAX_EXPONENT = 64.0
EXPONENT_OFFSET = 40.0  # largest offset subtracted from exponents; float32 underflows at -87


@part
class FeatureMap(Similarity, RecurrentPart):
    """s = phi(q).phi(k) with phi never negative, and without a scale; kind="elu": phi(x) = elu(x) +
    1 (2006.16236).

    kind="relu": phi(x) = max(x, 0); the output is zero for queries without a positive channel in
    common with any key.

    kind="favor": positive random features (2009.14794), phi(x) = exp(w_i.x' - |x'|^2 / 2) /
    sqrt(draws) with x' = x dim^(-1/4), so that the expected value of s is exp(q.k / sqrt(dim)).
    There are `draws` directions w_i (0: dim ceil(ln(dim + 1))). They are orthogonal in blocks of
    dim, have the lengths of Gaussian vectors (the paper's unbiased choice; with length sqrt(dim) it
    would only be nearly unbiased), and are shared by all heads as in its code. They are sampled
    from `seed`; `hw.attention.redraw_features` and `Recipe.redraw_features` sample them again.
    Scores are computed up to one factor per query and one for all keys, which SumNormaliser divides
    out. `eps` is added to the features of queries and keys; for queries after the largest w_i.q'
    was subtracted from the exponents, as in the released code.

    In float32, weights are accurate to 2e-5 for queries and keys of length up to 12 dim^(1/4).
    Longer queries lose digits in proportion to their exponents, and keys of length 15 dim^(1/4)
    have no weight at all from dim 128 on. Exponents of keys are clamped to 64, which they exceed
    only near directions longer than 14 (heads with dim > 128).

    Decoding needs one state per head instead of a cache: the sum of phi(k) v^T and the sum of
    phi(k).

    >>> FeatureMap().pair(torch.zeros(3), torch.zeros(3), 1.0, {}).item()
    3.0
    """

    paper = "2006.16236"
    disagreements: ClassVar[tuple[str, ...]] = (
        (
            "Performer's code subtracts the largest exponent of each query and of all keys before "
            "exp and adds a "
            "small number: here only that of each query, because otherwise the parallel, chunked "
            "and recurrent forms "
            "would differ."
        ),
        (
            "The paper adds nothing to random features; its JAX code adds 1e-4: see `eps` of "
            "`FeatureMap`, by default "
            "0. Its 1e-4 is relative to the largest feature of all keys, later ones included; "
            "`eps` is relative to 1."
        ),
        (
            "Performer's code samples the directions again during training: see "
            "`hw.attention.redraw_features`; by default they "
            "stay."
        ),
    )
    signed: ClassVar[bool] = False
    kind: str = "elu"
    draws: int = 0
    seed: int = 0
    eps: float = 0.0
    field_choices: ClassVar = {"kind": ("elu", "relu", "favor")}
    field_minima: ClassVar = {"eps": 0, "draws": 0}

    def conflicts(self, spec: AttentionSpec) -> Iterable[str]:
        if self.kind != "favor" and (self.draws or self.seed):
            yield (
                f"FeatureMap(kind={self.kind!r}) samples nothing; leave draws and seed out, or "
                "use kind 'favor'"
            )
        elif self.kind != "favor" and self.eps:
            yield (
                f"FeatureMap(kind={self.kind!r}, eps={self.eps!r}) has no eps; use normaliser "
                f"SumNormaliser(eps={self.eps!r})"
            )
        if not 0 <= self.seed < 2**63:
            yield f"FeatureMap(seed={self.seed}) is not a valid seed; use 0 or more, below 2^63"
        if self.kind == "favor" and not spec.project.uses_head_dims:
            name = type(spec.project).__name__
            yield (
                "FeatureMap(kind='favor') needs queries with heads.dim channels, unlike "
                f"{name}; use project LinearProjection()"
            )
        if not spec.normaliser.proportional:
            name = type(spec.normaliser).__name__
            yield (
                f"FeatureMap sums over past tokens, which {name} does not support; use "
                "normaliser SumNormaliser()"
            )
        if any(
            modifier.phase in (Phase.SCORES, Phase.WEIGHTS, Phase.VALUES)
            for modifier in spec.modifiers
        ):
            yield (
                "FeatureMap computes no scores while decoding, so modifiers cannot change "
                "scores, weights or values"
            )

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
                AxisLayout.parse("feature dim"),
                partial(sample_orthogonal_gaussian, self.seed),
                trainable=False,
            )
        }

    def resample_constants(self, spec: AttentionSpec, seed: int) -> Mapping[str, Tensor]:
        if self.kind != "favor":
            return {}
        return {
            "directions": sample_orthogonal_gaussian(
                seed, (self.num_state_features(spec.core), spec.core.dim)
            )
        }

    def flops(self, spec: AttentionSpec, work: CallSize) -> int:
        if self.kind != "favor":
            return 0
        # A recurrent state maps each key once, when it arrives; a cross-attention source has no
        # state.
        keys = work.new_tokens if spec.is_recurrent and spec.source is None else work.keys
        vectors = work.queries * spec.num_core_heads + keys * spec.heads.kv
        return 2 * work.batch * vectors * self.num_state_features(spec.core) * spec.heads.dim

    def constant_flops(self, spec: AttentionSpec, work: CallSize) -> int:
        return self.flops(spec, work)

    def can_be_all_zero(self) -> bool:
        return self.kind == "relu"

    def has_arbitrary_scale(self) -> bool:
        return self.kind == "favor"

    def pair(self, q_K: Tensor, k_K: Tensor, scale: float, p_h: Mapping[str, Tensor]) -> Tensor:
        if self.kind == "elu":
            return ((F.elu(q_K) + 1) * (F.elu(k_K) + 1)).sum(-1)
        if self.kind == "relu":
            return (q_K.clamp(min=0) * k_K.clamp(min=0)).sum(-1)
        q = q_K / len(q_K) ** 0.25
        k = k_K / len(k_K) ** 0.25
        directions = p_h["directions"]
        q_exponents = (directions * q).sum(-1)
        k_exponents = (
            (directions * k).sum(-1) - k.square().sum() / 2 - key_exponent_offset(directions)
        )
        if not self.eps:
            return (
                (q_exponents - q_exponents.max() + k_exponents.clamp(max=MAX_EXPONENT)).exp().mean()
            )
        q_features = (q_exponents - q_exponents.max() - q.square().sum() / 2).exp() + self.eps
        k_eps = self.eps * (-key_exponent_offset(directions)).exp()
        return (q_features * (k_exponents.clamp(max=MAX_EXPONENT).exp() + k_eps)).mean()

    def feature_map(self, x_BTHK: Tensor, side: str, p: PartParams) -> Tensor:
        if self.kind == "elu":
            return F.elu(x_BTHK) + 1
        if self.kind == "relu":
            return F.relu(x_BTHK)
        x = to_at_least_float32(x_BTHK) * x_BTHK.shape[-1] ** -0.25
        directions = p["directions"]
        with without_autocast(x):
            projections = F.linear(x, directions.to(x.dtype))
        # Factors common to all features of a query cancel when weights are divided by their sum, so
        # its largest exponent is subtracted and its length left out. A key is used by many queries,
        # so only an offset common to all keys cancels, and it must be known before the first key
        # arrives.
        half_square = x.square().sum(-1, keepdim=True) / 2
        if side == "q":
            exponents = projections - projections.amax(-1, keepdim=True)
            return (exponents - half_square).exp() + self.eps if self.eps else exponents.exp()
        offset = key_exponent_offset(directions).to(x.dtype)
        features = (projections - half_square - offset).clamp(max=MAX_EXPONENT).exp()
        return (features + self.eps * (-offset).exp() if self.eps else features) / len(directions)

    def scores(self, q_BHTK: Tensor, k_BHSK: Tensor, scale: float, p: PartParams) -> Tensor:
        return torch.matmul(q_BHTK, k_BHSK.transpose(-1, -2))

    def unnormalised_weights(
        self, q_BHTK: Tensor, k_BHSK: Tensor, scale: float, p: PartParams
    ) -> Tensor:
        return self.scores(q_BHTK, k_BHSK, scale, p)

    def state_layouts(self, spec: AttentionSpec) -> Mapping[str, AxisLayout]:
        return {"kv": AxisLayout.parse("row feature vdim"), "k": AxisLayout.parse("row feature")}

    def update_state(
        self,
        state: Mapping[str, Tensor],
        k_BHSK: Tensor,
        v_BHSV: Tensor,
        live_BS: Tensor,
        p: PartParams,
    ) -> dict[str, Tensor]:
        # wider than bfloat16: 8 bits are too few for sums over thousands of tokens
        wide = state["k"].dtype
        phi = k_BHSK.to(wide).masked_fill(~live_BS[:, None, :, None], 0.0)
        return {
            "kv": state["kv"] + phi.transpose(-1, -2) @ v_BHSV.to(wide),
            "k": state["k"] + phi.sum(-2),
        }

    def read_state(
        self, q_BHTK: Tensor, state: Mapping[str, Tensor], p: PartParams
    ) -> tuple[Tensor, Tensor]:
        phi = q_BHTK.to(state["k"].dtype)
        return phi @ state["kv"], (phi @ state["k"][..., None]).squeeze(-1)

    @classmethod
    def examples(cls, base: SpecFactory) -> Iterator[AttentionSpec]:
        yield base(similarity=cls(), normaliser=SumNormaliser(), kv=2, vdim=5)
        yield base(
            similarity=cls(kind="relu"), normaliser=SumNormaliser(), pattern="window(4)", kv=3
        )
        yield base(
            similarity=cls(kind="favor", draws=9, seed=1),
            normaliser=SumNormaliser(),
            pattern="causal",
            kv=2,
            vdim=5,
        )
        yield base(similarity=cls(kind="favor"), normaliser=SumNormaliser(), source=13)
        yield base(
            similarity=cls(kind="favor", draws=9, eps=0.1),
            normaliser=SumNormaliser(),
            pattern="causal",
            kv=3,
        )


def key_exponent_offset(directions: Tensor) -> Tensor:
    """The offset subtracted from the exponents of all keys.

    With it w.k - |k|^2 / 2, which is at most |w|^2 / 2, stays below MAX_EXPONENT. The offset is at
    most EXPONENT_OFFSET, so that keys of length 0 do not underflow.
    """
    return (directions.square().sum(-1).amax() / 2 - MAX_EXPONENT).clamp(0, EXPONENT_OFFSET)


def sample_orthogonal_gaussian(seed: int, shape: tuple[int, ...]) -> Tensor:
    """Sample a matrix [count, dim] of Gaussian rows, orthogonal within blocks of dim rows."""
    count, dim = shape
    generator = torch.Generator().manual_seed(seed)
    sample = partial(torch.randn, generator=generator, dtype=torch.float64, device="cpu")
    blocks = []
    for _ in range(0, count, dim):
        q, r = torch.linalg.qr(sample(dim, dim))
        blocks.append(q * r.diagonal().sign())  # the signs make the rotation uniformly distributed
    lengths = sample(count, dim).norm(dim=1, keepdim=True)
    return fixed_values((torch.cat(blocks)[:count] * lengths).flatten().tolist())(shape)


@part
class SumNormaliser(Normaliser):
    """w_j = s_j / (eps + sum of s), for similarities that are never negative (2006.16236). A row of
    zeros stays zero.

    With `eps` = 0, as in the paper, weights sum to one. The authors' code adds eps=1e-6.

    >>> import torch
    >>> SumNormaliser().normalise_row(torch.tensor([1.0, 3.0]), {}).tolist()
    [0.25, 0.75]
    >>> SumNormaliser(eps=1.0).normalise_row(torch.tensor([1.0, 2.0]), {}).tolist()
    [0.25, 0.5]
    """

    paper = "2006.16236"
    disagreements: ClassVar[tuple[str, ...]] = (
        "The paper divides by the sum of the scores; its code adds 1e-6 to the sum: see `eps` of "
        "`SumNormaliser`, by default 0.",
    )
    sums_to_one: ClassVar[bool] = True
    proportional: ClassVar[bool] = True
    eps: float = 0.0
    field_minima: ClassVar = {"eps": 0}

    def conflicts(self, spec: AttentionSpec) -> Iterable[str]:
        if spec.similarity.signed:
            name = type(spec.similarity).__name__
            yield (
                f"SumNormaliser needs scores that are never negative, unlike {name}; use "
                "similarity FeatureMap()"
            )
        if self.eps and spec.similarity.has_arbitrary_scale():
            name = repr(spec.similarity)
            yield (
                f"SumNormaliser(eps={self.eps!r}) needs scores of a known scale, unlike {name}; "
                "use the eps of the similarity"
            )

    def divisor(self, total: Tensor) -> Tensor:
        return total + self.eps if self.eps else total.masked_fill(total == 0, 1.0)

    def always_sums_to_one(self) -> bool:
        return self.eps == 0

    def normalise_row(self, s_S: Tensor, p_h: Mapping[str, Tensor]) -> Tensor:
        return s_S / self.divisor(s_S.sum())

    def normalise(self, s_BHTS: Tensor, allowed: Tensor, p: PartParams) -> Tensor:
        s_BHTS = s_BHTS.masked_fill(~allowed, 0.0)
        # a product with the reciprocal is faster, but overflows for sums that are not 0 but tiny
        return s_BHTS / self.divisor(s_BHTS.sum(-1, keepdim=True))

    @classmethod
    def examples(cls, base: SpecFactory) -> Iterator[AttentionSpec]:
        yield base(normaliser=cls(), similarity=FeatureMap(), pattern="causal")
        yield base(normaliser=cls(eps=0.5), similarity=FeatureMap(), pattern="causal", kv=2)
