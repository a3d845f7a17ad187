"""Multi-head latent attention (MLA): caches one small vector per token instead of all keys and
values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ...util.errors import SpecError
from ..interfaces import Project, QKTransform, SingleVectorTransform
from ..interfaces.core_types import (
    AxisLayout,
    CallSize,
    CoreShape,
    Param,
    PartParams,
    SpecFactory,
    TransformsQK,
)
from ..interfaces.part import part
from ..spec.attention_spec import AttentionSpec
from .initialisers import ones_init, weight, xavier_uniform, zeros_init
from .linear_projection import LinearProjection, absorb_matrix_per_head


@part
class MLAProjection(Project):
    """c = RMSNorm(z W_DKV), r = RoPE(z W_KR) shared by heads; k_h = [c W_UK_h, r], v_h = c W_UV_h
    (2405.04434).

    Only the latent c (`rank` numbers) and the rotary key r (`rope` numbers) are cached. `heads.dim`
    is the number of key channels without RoPE. With `query_rank`, queries pass through a
    separate down-projection and norm. form="expanded" computes keys and values from the
    latent; form="absorbed" multiplies W_UK into the query and W_UV into the output, so that a
    single query attends to the latents directly. Both forms compute the same function of the same
    parameters. The scale is 1/sqrt(dim + rope). `bias`: "q" for queries, "kv" for c and r before
    the norm. norm="none" omits the norm of c, so that `convert_to_latent` can convert a trained
    layer of grouped heads exactly.

    DeepSeek-V3 caches 576 numbers per token where its 128 heads would need 40,960:

    >>> import headwise as hw
    >>> hw.costs.cached_numbers_per_token(hw.design(preset="mla", model=7168, heads=128))
    576
    """

    paper = "2405.04434"
    supports_grouping: ClassVar[bool] = False
    projects_heads: ClassVar[bool] = True
    rank: int = 512
    rope: int = 64
    query_rank: int | None = None
    form: str = "expanded"
    eps: float = 1e-6
    norm: str = "rms"
    bias: str = ""
    kv_only_params: ClassVar = ("kv_norm", "kv_bias")
    field_choices: ClassVar = {
        "form": ("expanded", "absorbed"),
        "norm": ("rms", "none"),
        "bias": ("", "q", "kv", "qkv"),
    }
    field_minima: ClassVar = {"rank": 1, "query_rank": 1, "rope": 0}
    positive_fields: ClassVar = ("eps",)
    needed_dot_product: ClassVar = "its absorbed form"

    def sizes(self, spec: AttentionSpec) -> Mapping[str, int]:
        return {"rank": self.rank, "rope": self.rope, "query_rank": self.query_rank or 0}

    def transformed_dims(self, spec: AttentionSpec) -> int:
        return self.rope

    def params(self, spec: AttentionSpec) -> Mapping[str, Param]:
        wide = "(q [dim|rope])"
        if self.query_rank is None:
            query = {"q": weight(f"{wide} model", xavier_uniform, "query")}
        else:
            query = {
                "q_down": weight("query_rank model", xavier_uniform, "query"),
                "q_norm": weight("query_rank", ones_init),
                "q_up": weight(f"{wide} query_rank", xavier_uniform, "query"),
            }
        applied = "query" if self.form == "absorbed" else "recalled"
        return query | {
            "kv_down": weight("[rank|rope] source", xavier_uniform, "source"),
            **({"kv_norm": weight("rank", ones_init)} if self.norm == "rms" else {}),
            "k_up": weight("(kv dim) rank", xavier_uniform, applied),
            "v_up": weight("(kv vdim) rank", xavier_uniform, applied),
            **({"q_bias": weight(wide, zeros_init)} if "q" in self.bias else {}),
            **({"kv_bias": weight("[rank|rope]", zeros_init)} if "kv" in self.bias else {}),
        }

    def flops(self, spec: AttentionSpec, work: CallSize) -> int:
        """A negative correction for the absorbed form, which applies `v_up` only to heads that have
        an output.

        The parameter count of `v_up` includes all heads.
        """
        if self.form == "expanded":
            return 0
        unused = spec.heads.kv - len(spec.score_head_of_row)
        return -2 * unused * spec.heads.vdim * self.rank * work.tokens("query")

    def kv_entry_layouts(self, spec: AttentionSpec) -> Mapping[str, AxisLayout]:
        return {"c": AxisLayout.parse("rank"), "r": AxisLayout.parse("rope")}

    def absorb_matrix(
        self, spec: AttentionSpec, weights: Mapping[str, Tensor], side: str, matrix: Tensor
    ) -> Mapping[str, Tensor]:
        return absorb_matrix_per_head(weights, ["v_up"], matrix) if side == "v" else {}

    def core(self, spec: AttentionSpec) -> CoreShape:
        heads = spec.heads
        scale = (spec.heads.dim + self.rope) ** -0.5
        if self.form == "expanded":
            return CoreShape(
                heads.kv_head_of_query,
                spec.score_head_of_row,
                heads.dim + self.rope,
                heads.vdim,
                scale,
            )
        return CoreShape(
            (0,) * heads.q,
            (0,) * len(spec.score_head_of_row),
            self.rank + self.rope,
            self.rank,
            scale,
        )

    def equivalent_forms(self, spec: AttentionSpec) -> Mapping[str, Project]:
        return {"step": replace(self, form="absorbed")}

    def project_query(self, x_BTD: Tensor, transform: TransformsQK, p: PartParams) -> Tensor:
        bias = p["q_bias"] if "q" in self.bias else None
        if self.query_rank is None:
            flat = F.linear(x_BTD, p["q"], bias)
        else:
            low = F.linear(x_BTD, p["q_down"])
            low = F.rms_norm(low, (self.query_rank,), p["q_norm"].to(low.dtype), self.eps)
            flat = F.linear(low, p["q_up"], bias)
        dim = p.sizes["dim"]
        q_BTHK = flat.unflatten(-1, (-1, dim + self.rope))
        branches = p.sizes["q"] // q_BTHK.shape[2]  # score heads that share a query
        if branches > 1:
            q_BTHK = q_BTHK.repeat_interleave(branches, 2)
        own, shared = q_BTHK.split([dim, self.rope], -1)
        if self.form == "absorbed":
            own = torch.einsum("bthk,hkr->bthr", own, p["k_up"].view(-1, dim, self.rank))
        return torch.cat([own, transform(shared, "q")], -1)

    def project_kv(
        self, z_BSE: Tensor, transform: TransformsQK, p: PartParams
    ) -> dict[str, Tensor]:
        down = F.linear(z_BSE, p["kv_down"], p["kv_bias"] if "kv" in self.bias else None)
        c, r = down.split([self.rank, self.rope], -1)
        if self.norm == "rms":
            c = F.rms_norm(c, (self.rank,), p["kv_norm"].to(c.dtype), self.eps)
        return {"c": c, "r": transform(r[..., None, :], "k").squeeze(-2)}

    def expand_kv(
        self, entry: Mapping[str, Tensor], transform: TransformsQK, p: PartParams
    ) -> tuple[Tensor, Tensor]:
        c = entry["c"]
        r = entry["r"]
        if self.form == "absorbed":
            return torch.cat([c, r], -1)[..., None, :], c[..., None, :]
        own = F.linear(c, p["k_up"]).unflatten(-1, (p.sizes["kv"], p.sizes["dim"]))
        shared = r[..., None, :].expand(*own.shape[:-1], -1)
        v = F.linear(c, p["v_up"]).unflatten(-1, (p.sizes["kv"], p.sizes["vdim"]))
        return torch.cat([own, shared], -1), v

    def project_heads(self, o_BTRV: Tensor, score_heads: tuple[int, ...], p: PartParams) -> Tensor:
        if self.form == "expanded":
            return o_BTRV
        up = p["v_up"].view(-1, p.sizes["vdim"], self.rank)
        if score_heads != tuple(range(up.shape[0])):
            up = up[list(score_heads)]
        return torch.einsum("bthr,hvr->bthv", o_BTRV, up)

    @classmethod
    def examples(cls, base: SpecFactory) -> Iterator[AttentionSpec]:
        from .rotary_embedding import Rotary
        from .talking_heads import TalkingHeads

        rotary = (Rotary(),)
        yield base(project=cls(rank=8, rope=2), modifiers=rotary, pattern="causal", vdim=5)
        yield base(
            project=cls(rank=8, rope=2, query_rank=9, eps=1e-5), modifiers=rotary, pattern="causal"
        )
        yield base(project=cls(rank=8, rope=0, form="absorbed"))
        yield base(project=cls(rank=8, rope=2, norm="none", bias="qkv"), modifiers=rotary)
        yield base(
            project=cls(rank=8, rope=0, form="absorbed"), modifiers=(TalkingHeads(),), vdim=5
        )


def convert_to_latent(
    spec: AttentionSpec, weights: Mapping[str, Tensor]
) -> tuple[AttentionSpec, dict[str, Tensor]]:
    """Convert a trained layer with `LinearProjection` exactly to `MLAProjection`: one latent holds
    the keys and values of all heads.

    (2502.07864, its merge step.) The key channels that RoPE transforms are concatenated into the
    shared rotary key; each query has zeros for the channels of other heads. The other key channels
    and the values form the latent, which has no norm; k_up and v_up select each head's slice from
    it. The cache size per token does not change. Queries are rescaled because the default scale
    depends on the key width. If RoPE transforms all key channels, one channel of zeros is added.

    >>> import headwise as hw
    >>> spec = hw.design(
    ...     model=8,
    ...     heads=4,
    ...     kv=2,
    ...     modifiers=(hw.parts.Rotary(base=50.0, dims=2, pairs="interleaved"),),
    ...     dim=3,
    ... )
    >>> latent_spec, _ = convert_to_latent(spec, hw.Attention(spec).state_dict())
    >>> latent_spec.project
    MLAProjection(rank=8, rope=4, norm='none')
    >>> [hw.costs.cached_numbers_per_token(s) for s in (spec, latent_spec)]
    [12, 12]
    """
    name, transform, merged = _merged_key_transform(spec, weights)
    rotary_channels = merged.channel_sources if merged else ()
    transformed = {channel for _, channel in rotary_channels}
    other_channels = [c for c in range(spec.heads.dim) if c not in transformed]
    has_kv_bias = bool(spec.project.constant_biases(spec, weights))
    project = MLAProjection(
        rank=spec.heads.kv * (len(other_channels) + spec.heads.vdim),
        rope=len(rotary_channels),
        norm="none",
        bias=("q" if "project.q_bias" in weights else "") + ("kv" if has_kv_bias else ""),
    )
    latent_spec = replace(
        spec,
        heads=replace(
            spec.heads, kv=spec.heads.q, dim=max(len(other_channels), 1), kv_head_of_query=()
        ),
        project=project,
        modifiers=tuple(
            merged.transform if merged and m == transform else m for m in spec.modifiers
        ),
    )
    query_scale = spec.similarity.score_scale(spec.core) / latent_spec.similarity.score_scale(
        latent_spec.core
    )
    new_weights = _merged_projection_weights(
        spec, weights, rotary_channels, other_channels, query_scale
    )
    new_weights |= (
        {f"{name}.{key}": tensor for key, tensor in merged.weights.items()} if merged else {}
    )
    shapes = {key: shape for key, shape in latent_spec.shapes().items() if key not in new_weights}
    changed = [key for key, shape in shapes.items() if tuple(weights[key].shape) != tuple(shape)]
    if changed:
        part = changed[0].partition(".")[0]
        raise SpecError(
            f"{part} has parameters per key-value head, but MLAProjection has one key-value head "
            f"per query head; remove {part}"
        )
    return latent_spec, new_weights | {key: weights[key].clone() for key in shapes}


def _merged_key_transform(
    spec: AttentionSpec, weights: Mapping[str, Tensor]
) -> tuple[str, QKTransform | None, SingleVectorTransform | None]:
    """The name of the transform of keys, the transform, and its form for concatenated key heads.

    Raises SpecError if the layer has no such form.
    """
    if not isinstance(spec.project, LinearProjection):
        raise SpecError(
            f"cannot convert a layer with project {type(spec.project).__name__}; give one with "
            "project LinearProjection"
        )
    if spec.heads.value_heads:
        raise SpecError(
            f"cannot convert this layer: keys and values are grouped differently ({spec.heads})"
        )
    transforms = [
        (name, part)
        for name, part in spec.parts_of(QKTransform)
        if part.transformed_sides(spec) & set("qk")
    ]
    if not transforms:
        return "", None, None
    name, transform = transforms[0]
    params = {
        key.removeprefix(f"{name}."): tensor
        for key, tensor in weights.items()
        if key.startswith(f"{name}.")
    }
    merged = (
        transform.as_single_vector(spec, spec.heads.kv, params) if len(transforms) == 1 else None
    )
    if merged is None:
        names = " and ".join(name for name, _ in transforms)
        raise SpecError(
            f"{names} on queries and keys have no form for concatenated heads; give a layer "
            "without them"
        )
    return name, transform, merged


def _merged_projection_weights(
    spec: AttentionSpec,
    weights: Mapping[str, Tensor],
    rotary_channels: Sequence[tuple[int, int]],
    other_channels: list[int],
    query_scale: float,
) -> dict[str, Tensor]:
    """Weights and biases of the latent projection; queries are multiplied by `query_scale`."""
    heads = spec.heads
    old = {key.removeprefix("project."): tensor.detach() for key, tensor in weights.items()}
    rotary_head = [head for head, _ in rotary_channels]
    rotary_channel = [channel for _, channel in rotary_channels]
    kv_head_of_query = list(heads.kv_head_of_query)
    own_channels = (torch.tensor(kv_head_of_query)[:, None] == torch.tensor(rotary_head)[None]).to(
        old["q"]
    )

    def merge_kv(k: Tensor, v: Tensor) -> Tensor:
        k = k.unflatten(0, (heads.kv, heads.dim))
        v = v.unflatten(0, (heads.kv, heads.vdim))
        return torch.cat(
            [k[:, other_channels].flatten(0, 1), v.flatten(0, 1), k[rotary_head, rotary_channel]]
        )

    def widen_queries(q: Tensor) -> Tensor:
        q = q.unflatten(0, (heads.q, heads.dim)) * query_scale
        plain = q[:, other_channels] if other_channels else torch.zeros_like(q[:, :1])
        mask = own_channels.view(*own_channels.shape, *[1] * (q.dim() - 2))
        return torch.cat([plain, q[:, rotary_channel] * mask], 1).flatten(0, 1)

    num_key_rows = heads.kv * len(other_channels)
    selectors = torch.eye(heads.kv * (len(other_channels) + heads.vdim)).to(old["q"])
    k_up = selectors[:num_key_rows].unflatten(0, (heads.kv, len(other_channels)))[kv_head_of_query]
    if not other_channels:
        k_up = selectors.new_zeros(heads.q, 1, selectors.shape[1])
    v_up = selectors[num_key_rows:].unflatten(0, (heads.kv, heads.vdim))[kv_head_of_query]
    new = {"q": widen_queries(old["q"]), "kv_down": merge_kv(old["k"], old["v"])}
    new |= {"k_up": k_up.flatten(0, 1), "v_up": v_up.flatten(0, 1)}
    if "q_bias" in old:
        new["q_bias"] = widen_queries(old["q_bias"])
    if {"k_bias", "v_bias"} & set(old):
        new["kv_bias"] = merge_kv(
            *(old.get(f"{side}_bias", old[side].new_zeros(len(old[side]))) for side in "kv")
        )
    return {f"project.{key}": tensor for key, tensor in new.items()}
