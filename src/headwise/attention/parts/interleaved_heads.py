"""Interleaved heads: every head has several pseudo queries, keys and values of a token, each a
learned sum over all heads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from ...util.errors import SpecError
from ...util.size_limits import MAX_HEADS
from ..interfaces import Mix, Normaliser, Project, QKTransform, ScoreStep
from ..interfaces.core_types import (
    AxisLayout,
    CallSize,
    CoreShape,
    Param,
    PartParams,
    Phase,
    ScorePosition,
    SpecFactory,
    TransformsQK,
)
from ..interfaces.part import part
from ..masking.sequence_info import SequenceInfo
from ..spec.attention_spec import AttentionSpec
from ..spec.heads import Heads
from .composed_heads import init_composition
from .initialisers import Initialiser, constant, weight, xavier_uniform
from .rotary_embedding import Rotary, rotate_pairs
from .row_groups import RowGroups, whole_groups

START_NOISE = 0.02  # so that the pseudo heads of a head differ at the start


def num_pseudo_heads(sizes: Mapping[str, int]) -> int:
    """The number P of pseudo heads of each head, which has P key-value heads and P^2 score heads:
    one for each pair of a pseudo query and a pseudo key.
    """
    # The sizes may be symbols of a cost formula, which would print nested quotients.
    return int(sizes["q"]) // int(sizes["kv"])


def init_pseudo_heads(shape: tuple[int, ...]) -> Tensor:
    """Weights [pseudo heads, heads]: one for the head that a pseudo head belongs to, and noise."""
    noise = torch.randn(shape).mul_(START_NOISE)
    return noise.add_(init_composition(shape))


@part
class PseudoHeads(Project):
    """q_hp = sum over g of A_hpg x W_Q^g, k_hp = sum over g of B_hpg z W_K^g and v_hp = sum over g
    of C_hpg z W_V^g (2602.21371).

    Score head (h, p', p), in this order, compares the pseudo query p with the pseudo key p' of head
    h. `HeadCollapse` makes these heads; W_Q, W_K and W_V have `components` heads, by default as
    many as there are output heads. The keys and values of all pseudo heads are cached:

    >>> import headwise as hw
    >>> [
    ...     hw.costs.cached_numbers_per_token(hw.design(preset=preset, model=512, heads=8))
    ...     for preset in ("mha", "iha")
    ... ]
    [1024, 2048]
    """

    paper = "2602.21371"
    disagreements: ClassVar[tuple[str, ...]] = (
        "No code is released, and only descriptions of the paper could be read. How the sums start "
        "was not found: each pseudo head starts as its own head, with noise of 0.02.",
    )
    uses_head_dims: ClassVar[bool] = True
    caches_keys_and_values: ClassVar[bool] = True
    kv_only_params: ClassVar = ("key_sum", "value_sum")
    components: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_fields({"components": (0, MAX_HEADS)}, {})

    def conflicts(self, spec: AttentionSpec) -> Iterable[str]:
        yield from pseudo_head_errors(type(self).__name__, spec.heads)

    def sizes(self, spec: AttentionSpec) -> Mapping[str, int]:
        pairs = num_pseudo_heads(spec.sizes) ** 2
        return {"component": self.components or int(spec.heads.q) // pairs}

    def with_fixed_sizes(self, spec: AttentionSpec) -> Self:
        return replace(self, components=self.sizes(spec)["component"])

    def params(self, spec: AttentionSpec) -> Mapping[str, Param]:
        sums = weight("kv component", init_pseudo_heads)
        return {
            "q": weight("(component dim) model", xavier_uniform, "query"),
            "k": weight("(component dim) source", xavier_uniform, "source"),
            "v": weight("(component vdim) source", xavier_uniform, "source"),
            "query_sum": sums,
            "key_sum": sums,
            "value_sum": sums,
        }

    def kv_entry_layouts(self, spec: AttentionSpec) -> Mapping[str, AxisLayout]:
        return {"k": AxisLayout.parse("kv dim"), "v": AxisLayout.parse("kv vdim")}

    def flops(self, spec: AttentionSpec, work: CallSize) -> int:
        sums = 2 * spec.heads.kv * self.sizes(spec)["component"]
        of_queries = sums * work.tokens("query") * spec.heads.dim
        return of_queries + sums * work.tokens("source") * (spec.heads.dim + spec.heads.vdim)

    def core(self, spec: AttentionSpec) -> CoreShape:
        heads = spec.heads
        keys = heads.kv_head_of_query
        return CoreShape(keys, spec.value_head_of_row, heads.dim, heads.vdim, heads.dim**-0.5)

    def project_query(self, x_BTD: Tensor, transform: TransformsQK, p: PartParams) -> Tensor:
        pseudo = num_pseudo_heads(p.sizes)
        queries = transform(self._project(x_BTD, "q", "query_sum", p), "q")
        by_head = queries.unflatten(2, (-1, 1, pseudo))
        return by_head.expand(-1, -1, -1, pseudo, -1, -1).flatten(2, 4)

    def project_kv(
        self, z_BSE: Tensor, transform: TransformsQK, p: PartParams
    ) -> dict[str, Tensor]:
        keys = self._project(z_BSE, "k", "key_sum", p)
        values = self._project(z_BSE, "v", "value_sum", p)
        return {"k": transform(keys, "k"), "v": transform(values, "v")}

    def expand_kv(
        self, entry: Mapping[str, Tensor], transform: TransformsQK, p: PartParams
    ) -> tuple[Tensor, Tensor]:
        return entry["k"], entry["v"]

    @staticmethod
    def _project(x: Tensor, side: str, sums: str, p: PartParams) -> Tensor:
        return p[sums] @ F.linear(x, p[side]).unflatten(-1, (p.sizes["component"], -1))

    @classmethod
    def examples(cls, base: SpecFactory) -> Iterator[AttentionSpec]:
        pseudo = (JointSoftmax(), HeadCollapse())
        yield base(project=cls(), normaliser=pseudo[0], modifiers=pseudo[1:], vdim=5)
        yield base(project=cls(components=3), normaliser=pseudo[0], modifiers=pseudo[1:], source=13)


def pseudo_head_errors(name: str, heads: Heads) -> Iterator[str]:
    """Reasons why these score heads are not all pairs of the pseudo queries and keys of heads."""
    pseudo, rest = divmod(heads.q, heads.kv)
    plain = tuple(head // pseudo for head in range(heads.q))
    if rest or heads.q % pseudo**2 or heads.kv_head_of_query != plain:
        yield (
            f"{name} needs P key-value heads and P^2 score heads for each head, but kv={heads.kv} "
            f"and q={heads.q}; use design(preset='iha', heads=4)"
        )
    elif heads.value_heads and heads.value_heads != plain:
        yield f"{name} has one value for each pseudo key; leave value_heads out"


@part
class JointSoftmax(Normaliser):
    """The softmax of a pseudo query over the pseudo keys of its head and all tokens together
    (2602.21371).

    The weights of score heads (h, 0, p) to (h, P - 1, p) sum to one. With two pseudo heads of equal
    scores and one key, each weight is 1/2:

    >>> import headwise as hw, torch
    >>> layer = hw.Attention(hw.design(preset="iha", model=4, heads=1, modifiers=(HeadCollapse(),)))
    >>> with_weights = hw.Probe("weights")
    >>> _ = layer(torch.zeros(1, 1, 4), probe=with_weights)
    >>> with_weights.tensors["weights"].flatten().tolist()
    [0.5, 0.5, 0.5, 0.5]
    """

    paper = "2602.21371"

    def conflicts(self, spec: AttentionSpec) -> Iterable[str]:
        yield from pseudo_head_errors(type(self).__name__, spec.heads)

    def heads_of_row(self, spec: AttentionSpec, head: int) -> tuple[int, ...]:
        pseudo = num_pseudo_heads(spec.sizes)
        first = head - head % pseudo**2 + head % pseudo
        return tuple(range(first, first + pseudo**2, pseudo))

    def required_score_heads(self, spec: AttentionSpec, heads: frozenset[int]) -> frozenset[int]:
        return whole_groups(heads, num_pseudo_heads(spec.sizes) ** 2)

    def normalise_row(self, s_S: Tensor, p_h: Mapping[str, Tensor]) -> Tensor:
        return s_S.softmax(-1)

    def normalise(self, s_BHTS: Tensor, allowed: Tensor, p: PartParams) -> Tensor:
        pseudo = num_pseudo_heads(p.sizes)
        lowest = torch.finfo(s_BHTS.dtype).min
        by_pair = s_BHTS.masked_fill(~allowed, lowest).unflatten(1, (-1, pseudo, pseudo))
        rows = by_pair.movedim(2, 4)  # [B, head, p, T, p', S]
        weights = rows.flatten(-2).softmax(-1).view(rows.shape).movedim(4, 2)
        return weights.flatten(1, 3).masked_fill(~allowed, 0.0)

    @classmethod
    def examples(cls, base: SpecFactory) -> Iterator[AttentionSpec]:
        step = HeadCollapse(pseudo=3)
        yield base(project=PseudoHeads(), normaliser=cls(), modifiers=(step,), pattern="causal")


@part
class PseudoRotary(QKTransform):
    """Rotates pseudo query and key p of a token at position t as RoPE does at position t P + p
    (2602.21371).

    `rotary` has the frequencies. With P = 2, the second pseudo head of the first token is at
    position 1:

    >>> import headwise as hw, torch
    >>> layer = hw.Attention(hw.design(preset="iha", model=4, heads=2, dim=2))
    >>> queries = hw.Probe("q")
    >>> with torch.no_grad():
    ...     _ = layer.weights["project"]["q"].copy_(torch.eye(4))
    ...     for name in ("query_sum", "key_sum", "value_sum"):
    ...         _ = layer.weights["project"][name].copy_(torch.eye(2).repeat_interleave(2, 0))
    >>> _ = layer(torch.tensor([[[1.0, 0.0, 0.0, 0.0]]]), probe=queries)
    >>> [round(x, 4) for x in queries.tensors["q"][0, 0, 1].tolist()]  # cos 1 and sin 1
    [0.5403, 0.8415]
    """

    paper = "2602.21371"
    positional: ClassVar[bool] = True
    needed_head_dims: ClassVar[str] = "queries and keys with heads.dim channels"
    rotary: Rotary = Rotary()

    def conflicts(self, spec: AttentionSpec) -> Iterable[str]:
        yield from pseudo_head_errors(type(self).__name__, spec.heads)
        yield from self.rotary.conflicts(spec)

    def params(self, spec: AttentionSpec) -> Mapping[str, Param]:
        pseudo = num_pseudo_heads(spec.sizes)
        return {**self.rotary.params(spec), "offset": constant("pseudo", list(range(pseudo)))}

    def sizes(self, spec: AttentionSpec) -> Mapping[str, int]:
        return {**self.rotary.sizes(spec), "pseudo": num_pseudo_heads(spec.sizes)}

    def precompute(
        self, sequence: SequenceInfo, table_dtype: torch.dtype, p: PartParams, keeps: bool = False
    ) -> tuple[Tensor, Tensor]:
        offset = p["offset"]
        position = sequence.position.to(offset.device)[..., None] * len(offset) + offset
        angles = self.rotary.cos_sin(position, p["frequency"], table_dtype, sequence.device)
        cos, sin = (angle.squeeze(3)[:, :, None] for angle in angles)
        return cos, sin  # [B, T, 1, pseudo, dims]

    def transform(
        self, x_BTHK: Tensor, side: str, precomputed: tuple[Tensor, Tensor], p: PartParams
    ) -> Tensor:
        by_head = x_BTHK.unflatten(2, (-1, len(p["offset"])))
        return rotate_pairs(by_head, *precomputed, self.rotary.pairs).flatten(2, 3)

    @classmethod
    def examples(cls, base: SpecFactory) -> Iterator[AttentionSpec]:
        joint = {"project": PseudoHeads(), "normaliser": JointSoftmax(), "pattern": "causal"}
        yield base(**joint, modifiers=(cls(), HeadCollapse()))
        partial = Rotary(base=50.0, dims=2, pairs="interleaved")
        yield base(**joint, modifiers=(cls(rotary=partial), HeadCollapse(pseudo=3)))


@part
class PseudoOrder(ScoreStep):
    """Pseudo query p of a token does not attend to the pseudo keys p' > p of the same token: s is
    -inf (2602.21371).

    This is the causal mask of a sequence with P tokens for each token. Without it, a pseudo query
    attends to all pseudo keys of its token. The pseudo keys need a common softmax, `JointSoftmax`.
    """

    paper = "2602.21371"
    disagreements: ClassVar[tuple[str, ...]] = (
        "The causal mask of the interleaved sequence orders the pseudo heads of a token; "
        "descriptions of the paper do not agree on it. Leave this part out for the other form.",
    )
    positional: ClassVar[bool] = True
    additive: ClassVar[bool] = True
    per_head: ClassVar[bool] = True
    unrestricted_sides: ClassVar[str] = "kv"

    def conflicts(self, spec: AttentionSpec) -> Iterable[str]:
        yield from pseudo_head_errors(type(self).__name__, spec.heads)
        if spec.source is not None:
            yield "PseudoOrder needs queries and keys of one sequence; leave PseudoOrder out"
        if spec.normaliser.heads_of_row(spec, 0) == (0,):
            name = type(spec.normaliser).__name__
            yield (
                f"PseudoOrder would leave rows without keys for {name}, which normalises each "
                "pseudo key alone; use normaliser JointSoftmax()"
            )
        for mix in spec.modifiers[spec.modifiers.index(self) + 1 :]:
            if isinstance(mix, Mix) and mix.phase is Phase.SCORES:
                name = type(mix).__name__
                yield f"{name} would mix scores of -inf; write it before PseudoOrder"

    def params(self, spec: AttentionSpec) -> Mapping[str, Param]:
        pseudo = num_pseudo_heads(spec.sizes)
        later = [int(head // pseudo % pseudo > head % pseudo) for head in range(spec.heads.q)]
        return {"later": constant("q", later)}

    def score(
        self, s: Tensor, position: ScorePosition, factors: Tensor | None, p: Mapping[str, Tensor]
    ) -> Tensor:
        forbidden = (position.i == position.j) & (p["later"] > 0)
        return torch.where(forbidden, -torch.inf, s)

    @classmethod
    def examples(cls, base: SpecFactory) -> Iterator[AttentionSpec]:
        joint = {"project": PseudoHeads(), "normaliser": JointSoftmax(), "pattern": "causal"}
        yield base(**joint, modifiers=(PseudoRotary(), cls(), HeadCollapse()))


def init_collapse(pseudo: int) -> Initialiser:
    """Weights with which each output head starts as the mean of its own pseudo heads."""

    def make(shape: tuple[int, ...]) -> Tensor:
        if shape[-1] == pseudo:
            return torch.full(shape, 1 / pseudo)
        own = torch.eye(shape[0], shape[1] // pseudo)
        return own.repeat_interleave(pseudo, 1).div_(pseudo)

    return make


@part
class HeadCollapse(RowGroups):
    """o_h = sum over p of R_hp u_hp, where u_hp is the output of pseudo query p of head h
    (2602.21371).

    kind="head" is the paper's Algorithm 1; kind="global", its Definition 3, sums over the pseudo
    queries of all heads g: o_h = sum over g, p of R_hgp u_gp. `design(heads=h)` makes P = `pseudo`
    key-value heads and P^2 score heads for each head, so that P = q / kv:

    >>> import headwise as hw
    >>> hw.design(model=8, heads=2, project=PseudoHeads(), modifiers=(HeadCollapse(),)).heads
    Heads.grouped(q=8, kv=4, dim=4)
    """

    paper = "2602.21371"
    disagreements: ClassVar[tuple[str, ...]] = (
        "The paper has two definitions of R: see `kind`. By default each head has its own, as in "
        "the paper's algorithm.",
    )
    pseudo: int = 2
    kind: str = "head"
    field_choices: ClassVar = {"kind": ("head", "global")}

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_fields({"pseudo": (1, MAX_HEADS)}, {})

    @property
    def group_size(self) -> int:
        """The pairs of pseudo queries and pseudo keys of a head."""
        return self.pseudo**2

    @property
    def needs_all_groups(self) -> bool:
        """True for sums over all heads."""
        return self.kind == "global"

    def conflicts(self, spec: AttentionSpec) -> Iterable[str]:
        heads = spec.heads
        errors = [*self.grouping_errors(heads)] or [*pseudo_head_errors("HeadCollapse", heads)]
        yield from errors
        if not errors and heads.q != heads.kv * self.pseudo:
            yield (
                f"HeadCollapse(pseudo={self.pseudo}) needs {self.pseudo} score heads for each "
                f"key-value head, but kv={heads.kv} and q={heads.q}; use pseudo="
                f"{heads.q // heads.kv}"
            )

    def fit_heads(self, heads: Heads) -> Heads:
        if heads.kv != heads.q:
            raise SpecError(
                f"HeadCollapse makes {self.pseudo} key-value heads for each of {heads.q} heads, "
                f"but kv={heads.kv}; leave kv, and other parts that add score heads, out"
            )
        kv = heads.q * self.pseudo
        return Heads.grouped(q=kv * self.pseudo, kv=kv, dim=heads.dim, vdim=heads.vdim)

    def params(self, spec: AttentionSpec) -> Mapping[str, Param]:
        inputs = "pseudo" if self.kind == "head" else "pseudo_query"
        return {"sum": weight(f"out {inputs}", init_collapse(self.pseudo))}

    def sizes(self, spec: AttentionSpec) -> Mapping[str, int]:
        return {"pseudo": self.pseudo, "pseudo_query": spec.heads.q // self.pseudo}

    def flops(self, spec: AttentionSpec, work: CallSize) -> int:
        inputs = self.pseudo if self.kind == "head" else spec.heads.q // self.pseudo
        outputs = len(spec.score_head_of_output)
        return 2 * work.tokens("query") * outputs * inputs * spec.heads.vdim

    def transform_outputs(self, o_BTRV: Tensor, x_BTD: Tensor, p: PartParams) -> Tensor:
        u = o_BTRV.unflatten(2, (-1, self.pseudo, self.pseudo)).sum(3)  # [B, T, head, p, V]
        if self.kind == "global":
            return p["sum"] @ u.flatten(2, 3)
        return (p["sum"][:, None] @ u).squeeze(3)

    @classmethod
    def examples(cls, base: SpecFactory) -> Iterator[AttentionSpec]:
        joint = {"project": PseudoHeads(), "normaliser": JointSoftmax()}
        yield base(**joint, modifiers=(cls(pseudo=3, kind="global"),), heads=3, vdim=5)
        yield base(**joint, modifiers=(PseudoRotary(), PseudoOrder(), cls()), pattern="causal")
