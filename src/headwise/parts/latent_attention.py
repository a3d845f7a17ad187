"""Multi-head latent attention: one small vector per token is remembered, keys and values grow out of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import SpecError
from ..interfaces import Project, QKTransform, SingleVectorTransform
from ..interfaces.axis_layout import AxisLayout
from ..interfaces.core_types import CallSize, CoreShape, Param, PartParams, SpecFactory, TransformsQK
from ..interfaces.registry import part
from ..spec.attention_spec import AttentionSpec
from .initialisers import ones_init, xavier_uniform, zeros_init
from .linear_projection import Direct, absorb_matrix_per_head


@part
class Latent(Project):
    """c = RMSNorm(z W_DKV), r = turn(z W_KR) shared by heads; k_h = [c W_UK_h, r], v_h = c W_UV_h (2405.04434).

    Only c (`rank` numbers) and r (`rope` numbers) are remembered. `heads.dim` is the width that is not turned;
    queries may pass a norm of their own at `query_rank`. form="expanded" makes keys and values anew;
    form="absorbed" moves W_UK into the query and W_UV behind the reading, so that a single query reads the
    latent itself. Both are the same function of the same parameters. Scale: 1/sqrt(dim + rope). `bias` names what has
    one: "q" the queries, "kv" c and r before the norm. norm="none" leaves c as it is: so a trained layer whose heads
    share keys and values becomes one of these by `as_latent`.

    DeepSeek-V3 remembers 576 numbers per token where its 128 heads would need 40,960:

    >>> import headwise as hw
    >>> hw.costs.cached_numbers_per_token(hw.design(preset="mla", model=7168, heads=128))
    576
    """

    paper = "2405.04434"
    supports_grouping: ClassVar[bool] = False
    rank: int = 512
    rope: int = 64
    query_rank: int | None = None
    form: str = "expanded"
    eps: float = 1e-6
    norm: str = "rms"
    bias: str = ""

    def conflicts(self, spec: AttentionSpec) -> Iterable[str]:
        if not self.eps > 0:
            yield f"{type(self).__name__}(eps={self.eps!r}) must be positive; 1e-6 is usual"
        if self.form not in ("expanded", "absorbed"):
            yield f"Latent(form={self.form!r}) is unknown; use 'expanded' or 'absorbed'"
        if self.norm not in ("rms", "none"):
            yield f"Latent(norm={self.norm!r}) is unknown; use 'rms' or 'none'"
        if self.bias not in ("", "q", "kv", "qkv"):
            yield f"Latent(bias={self.bias!r}) is unknown, for k and v grow out of one vector; use 'q', 'kv' or 'qkv'"
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

    def transformed_dims(self, spec: AttentionSpec) -> int:
        return self.rope

    def params(self, spec: AttentionSpec) -> Mapping[str, Param]:
        wide = "(q [dim|rope])"
        if self.query_rank is None:
            query = {"q": Param(AxisLayout.parse(f"{wide} model"), xavier_uniform, "query")}
        else:
            query = {
                "q_down": Param(AxisLayout.parse("query_rank model"), xavier_uniform, "query"),
                "q_norm": Param(AxisLayout.parse("query_rank"), ones_init),
                "q_up": Param(AxisLayout.parse(f"{wide} query_rank"), xavier_uniform, "query"),
            }
        applied = "query" if self.form == "absorbed" else "recalled"
        return query | {
            "kv_down": Param(AxisLayout.parse("[rank|rope] source"), xavier_uniform, "source"),
            **({"kv_norm": Param(AxisLayout.parse("rank"), ones_init)} if self.norm == "rms" else {}),
            "k_up": Param(AxisLayout.parse("(kv dim) rank"), xavier_uniform, applied),
            "v_up": Param(AxisLayout.parse("(kv vdim) rank"), xavier_uniform, applied),
            **({"q_bias": Param(AxisLayout.parse(wide), zeros_init)} if "q" in self.bias else {}),
            **({"kv_bias": Param(AxisLayout.parse("[rank|rope]"), zeros_init)} if "kv" in self.bias else {}),
        }

    def flops(self, spec: AttentionSpec, work: CallSize) -> int:
        """Absorbed, an output row passes the `v_up` of its own head alone: where only some heads have an output,
        the others' count less than their parameters say."""
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
        heads, scale = spec.heads, (spec.heads.dim + self.rope) ** -0.5
        if self.form == "expanded":
            return CoreShape(heads.reads, spec.score_head_of_row, heads.dim + self.rope, heads.vdim, scale)
        return CoreShape((0,) * heads.q, (0,) * len(spec.score_head_of_row), self.rank + self.rope, self.rank, scale)

    def equivalent_forms(self, spec: AttentionSpec) -> Mapping[str, Project]:
        return {"step": replace(self, form="absorbed")}

    def project_query(self, x_BTD: Tensor, turn: TransformsQK, p: PartParams) -> Tensor:
        bias = p["q_bias"] if "q" in self.bias else None
        if self.query_rank is None:
            flat = F.linear(x_BTD, p["q"], bias)
        else:
            low = F.linear(x_BTD, p["q_down"])
            low = F.rms_norm(low, (self.query_rank,), p["q_norm"].to(low.dtype), self.eps)
            flat = F.linear(low, p["q_up"], bias)
        dim = p.sizes["dim"]
        q_BTHK = flat.unflatten(-1, (p.sizes["q"], dim + self.rope))
        own, shared = q_BTHK.split([dim, self.rope], -1)
        if self.form == "absorbed":
            own = torch.einsum("bthk,hkr->bthr", own, p["k_up"].view(-1, dim, self.rank))
        return torch.cat([own, turn(shared, "q")], -1)

    def project_kv(self, z_BSE: Tensor, turn: TransformsQK, p: PartParams) -> dict[str, Tensor]:
        down = F.linear(z_BSE, p["kv_down"], p["kv_bias"] if "kv" in self.bias else None)
        c, r = down.split([self.rank, self.rope], -1)
        if self.norm == "rms":
            c = F.rms_norm(c, (self.rank,), p["kv_norm"].to(c.dtype), self.eps)
        return {"c": c, "r": turn(r[..., None, :], "k").squeeze(-2)}

    def expand_kv(self, entry: Mapping[str, Tensor], turn: TransformsQK, p: PartParams) -> tuple[Tensor, Tensor]:
        c, r = entry["c"], entry["r"]
        if self.form == "absorbed":
            return torch.cat([c, r], -1)[..., None, :], c[..., None, :]
        own = F.linear(c, p["k_up"]).unflatten(-1, (p.sizes["kv"], p.sizes["dim"]))
        shared = r[..., None, :].expand(*own.shape[:-1], -1)
        v = F.linear(c, p["v_up"]).unflatten(-1, (p.sizes["kv"], p.sizes["vdim"]))
        return torch.cat([own, shared], -1), v

    def project_heads(self, o_BTHV: Tensor, voices: tuple[int, ...], p: PartParams) -> Tensor:
        if self.form == "expanded":
            return o_BTHV
        up = p["v_up"].view(-1, p.sizes["vdim"], self.rank)
        if voices != tuple(range(up.shape[0])):
            up = up[list(voices)]
        return torch.einsum("bthr,hvr->bthv", o_BTHV, up)

    @classmethod
    def examples(cls, base: SpecFactory) -> Iterator[AttentionSpec]:
        from .rotary_embedding import Rotary
        from .talking_heads import TalkingHeads

        turned = (Rotary(),)
        yield base(project=cls(rank=8, rope=2), modifiers=turned, pattern="causal", vdim=5)
        yield base(project=cls(rank=8, rope=2, query_rank=9, eps=1e-5), modifiers=turned, pattern="causal")
        yield base(project=cls(rank=8, rope=0, form="absorbed"))
        yield base(project=cls(rank=8, rope=2, norm="none", bias="qkv"), modifiers=turned)
        yield base(project=cls(rank=8, rope=0, form="absorbed"), modifiers=(TalkingHeads(),), vdim=5)


def convert_to_latent(spec: AttentionSpec, weights: Mapping[str, Tensor]) -> tuple[AttentionSpec, dict[str, Tensor]]:
    """A trained layer of Direct as one of Latent, exactly: one vector holds all key-value heads, k_up and v_up copy it.

    What a turn reaches of keys lies end to end in the shared slice, where each query has its own head's channels and
    zeros elsewhere; the rest of keys, and values, are the latent, without a norm (2502.07864, its merge). A token needs
    as many numbers as before. Queries take up that the scale now follows from another width; where turns reach all of a
    key one channel of zeros stands for the rest.

    >>> import headwise as hw
    >>> spec = hw.design(model=8, heads=4, kv=2, modifiers=(hw.Rotary(base=50.0, dims=2, pairs="interleaved"),), dim=3)
    >>> shared, _ = convert_to_latent(spec, hw.Attention(spec).state_dict())
    >>> shared.project
    Latent(rank=8, rope=4, norm='none')
    >>> [hw.costs.cached_numbers_per_token(one) for one in (spec, shared)]
    [12, 12]
    """
    name, turn, joined = _merged_key_transform(spec, weights)
    lay = joined.channel_sources if joined else ()
    rest = [c for c in range(spec.heads.dim) if c not in {channel for _, channel in lay}]
    told = spec.project.constant_biases(spec, weights)
    project = Latent(
        rank=spec.heads.kv * (len(rest) + spec.heads.vdim),
        rope=len(lay),
        norm="none",
        bias=("q" if "project.q_bias" in weights else "") + ("kv" if told else ""),
    )
    shared = replace(
        spec,
        heads=replace(spec.heads, kv=spec.heads.q, dim=max(len(rest), 1), reads=()),
        project=project,
        modifiers=tuple(joined.transform if joined and one == turn else one for one in spec.modifiers),
    )
    own = _merged_projection_weights(
        spec, weights, lay, rest, spec.similarity.score_scale(spec.core) / shared.similarity.score_scale(shared.core)
    )
    own |= {f"{name}.{key}": held for key, held in joined.weights.items()} if joined else {}
    return shared, own | _other_part_weights(shared, weights, own)


def _other_part_weights(
    shared: AttentionSpec, weights: Mapping[str, Tensor], own: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """What other parts hold, refused where one counts the heads of keys and values that were."""
    left = {key: shape for key, shape in shared.shapes().items() if key not in own}
    if counted := [key for key, shape in left.items() if tuple(weights[key].shape) != tuple(shape)]:
        part = counted[0].partition(".")[0]
        raise SpecError(
            f"{part} counts heads of keys and values, of which a latent has one for each query; take it off"
        )
    return {key: weights[key].clone() for key in left}


def _merged_key_transform(
    spec: AttentionSpec, weights: Mapping[str, Tensor]
) -> tuple[str, QKTransform | None, SingleVectorTransform | None]:
    """The turn of keys, with its name, and as it is where all heads are one; refused where that cannot be."""
    if not isinstance(spec.project, Direct):
        raise SpecError(
            f"as_latent knows the weights of Direct, not of {type(spec.project).__name__}; give such a layer"
        )
    if spec.heads.values:
        raise SpecError(f"keys and values are grouped apart here ({spec.heads}); no latent holds both for a head")
    turns = [(name, turn) for name, turn in spec.parts_of(QKTransform) if turn.transformed_sides(spec) & set("qk")]
    if not turns:
        return "", None, None
    name, turn = turns[0]
    own = {key.removeprefix(f"{name}."): held for key, held in weights.items() if key.startswith(f"{name}.")}
    joined = turn.as_single_vector(spec, spec.heads.kv, own) if len(turns) == 1 else None
    if joined is None:
        names = " and ".join(name for name, _ in turns)
        raise SpecError(
            f"{names} on queries and keys cannot be one turn of all heads laid end to end; leave it as it is"
        )
    return name, turn, joined


def _merged_projection_weights(
    spec: AttentionSpec, weights: Mapping[str, Tensor], lay: Sequence[tuple[int, int]], rest: list[int], grown: float
) -> dict[str, Tensor]:
    """Weights and biases of the merged layer: rows of keys in their new places, queries to meet them, copies."""
    heads, held = spec.heads, {key.removeprefix("project."): tensor.detach() for key, tensor in weights.items()}
    owner, channel = ([place[n] for place in lay] for n in range(2))
    reads = list(heads.reads)
    mine = (torch.tensor(reads)[:, None] == torch.tensor(owner)[None]).to(held["q"])

    def down(k: Tensor, v: Tensor) -> Tensor:
        k, v = k.unflatten(0, (heads.kv, heads.dim)), v.unflatten(0, (heads.kv, heads.vdim))
        return torch.cat([k[:, rest].flatten(0, 1), v.flatten(0, 1), k[owner, channel]])

    def asked(q: Tensor) -> Tensor:
        q = q.unflatten(0, (heads.q, heads.dim)) * grown
        own = q[:, rest] if rest else torch.zeros_like(q[:, :1])
        return torch.cat([own, q[:, channel] * mine.view(*mine.shape, *[1] * (q.dim() - 2))], 1).flatten(0, 1)

    copies = torch.eye(heads.kv * (len(rest) + heads.vdim)).to(held["q"])
    k_up = copies[: heads.kv * len(rest)].unflatten(0, (heads.kv, len(rest)))[reads]
    if not rest:
        k_up = copies.new_zeros(heads.q, 1, copies.shape[1])
    v_up = copies[heads.kv * len(rest) :].unflatten(0, (heads.kv, heads.vdim))[reads]
    made = {"q": asked(held["q"]), "kv_down": down(held["k"], held["v"])}
    made |= {"k_up": k_up.flatten(0, 1), "v_up": v_up.flatten(0, 1)}
    if "q_bias" in held:
        made["q_bias"] = asked(held["q_bias"])
    if {"k_bias", "v_bias"} & set(held):
        made["kv_bias"] = down(*(held.get(f"{side}_bias", held[side].new_zeros(len(held[side]))) for side in "kv"))
    return {f"project.{key}": tensor for key, tensor in made.items()}
