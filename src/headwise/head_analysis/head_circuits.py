"""What a head can do, from its weights alone: which states it compares, and what it carries from where it reads.

Scores are x W_Q W_K^T z, and what is written is w z W_V W_O: two maps of the model's width, each the product of two
narrow matrices, and kept so (Elhage et al. 2021). Biases, norms and what turns queries and keys stand outside of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..errors import SpecError
from ..inspect.attention_sites import find_attention
from ..interfaces import Mix, OutputStep, QKTransform
from ..nn.attention import Attention
from ..spec.attention_spec import AttentionSpec
from .annotated_examples import Example
from .head_similarity import HeadLocation, collect_head_outputs
from .head_table import Measure
from .random_baseline import as_native_model
from .resampling import FoldedSums

FACTOR_SIDES = ("left", "right")
CIRCUIT_KINDS = ("qk", "ov")


class LowRankMap(NamedTuple):
    """A map as two narrow matrices, left [in, r] and right [r, out]: x of it is x @ left @ right."""

    left: Tensor
    right: Tensor

    @property
    def product(self) -> Tensor:
        """The product, [in, out]: as large as the model is wide, squared."""
        return self.left @ self.right

    @property
    def shape(self) -> tuple[int, int]:
        """How wide it is, in and out."""
        return self.left.shape[0], self.right.shape[1]

    @property
    def singular_values(self) -> Tensor:
        """Its singular values but for those that are zero by its shape, the largest first.

        >>> LowRankMap(torch.tensor([[3.0], [4.0]]), torch.tensor([[2.0, 0.0]])).singular_values.tolist()
        [10.0]
        """
        left, right = (torch.linalg.qr(each, mode="r").R for each in (self.left.double(), self.right.double().T))
        return torch.linalg.svdvals(left @ right.T)

    def inner_product(self, other: LowRankMap) -> Tensor:
        """The sum of products of the entries of two such maps, worked out between the narrow sides."""
        left = self.left.double().T @ other.left.double()
        return (left * (self.right.double() @ other.right.double().T)).sum()


def map_similarity(one: LowRankMap, other: LowRankMap) -> float:
    """The inner product of two maps over their norms: 1 where they are one map up to scale, 0 where they share nothing.

    >>> map_similarity(LowRankMap(torch.eye(2), torch.eye(2)), LowRankMap(torch.eye(2), -2 * torch.eye(2)))
    -1.0
    """
    scale = (one.inner_product(one) * other.inner_product(other)).sqrt()
    return float(one.inner_product(other) / scale) if scale > 0 else float("nan")


def principal_angles(one: LowRankMap, other: LowRankMap, side: str = "left") -> Tensor:
    """The principal angles, in radians, between what two maps read ("left") or write ("right"), the smallest first.

    Their cosines, squared, are r / width on average where subspaces of r dimensions are drawn.

    >>> x, y = torch.eye(3).split([2, 1])
    >>> principal_angles(LowRankMap(x.T, x), LowRankMap(y.T, y)).tolist() == [torch.pi / 2]
    True
    """
    if side not in FACTOR_SIDES:
        raise ValueError(f"side={side!r} is unknown; use 'left', what is read, or 'right', what is written")
    spans = [_orthonormal_basis(each.left if side == "left" else each.right.T) for each in (one, other)]
    return torch.linalg.svdvals(spans[0].T @ spans[1]).clamp(max=1).acos()


def _orthonormal_basis(columns: Tensor) -> Tensor:
    """An orthonormal basis of what the columns reach."""
    basis, size, _ = torch.linalg.svd(columns.double(), full_matrices=False)
    return basis[:, size > 1e-10 * size[:1].clamp(min=1e-300)]


def copying_score(ov: LowRankMap, embed: Tensor | None = None, unembed: Tensor | None = None) -> float:
    """Whether a head writes of a token what raises that token: the sum of eigenvalues over the sum of their sizes.

    Of embed W_V W_O unembed, tokens to tokens, whose eigenvalues but for zeros are those of a matrix as small as the
    head; 1 where all are positive, -1 where all are negative (Elhage et al. 2021). `embed` is [tokens, model],
    `unembed` [model, tokens]; without them it is of states.

    >>> ov = LowRankMap(torch.eye(3)[:, :2], torch.eye(3)[:2])
    >>> copying_score(ov), copying_score(LowRankMap(ov.left, -ov.right))
    (1.0, -1.0)
    """
    left, right = ov.left.double(), ov.right.double()
    if embed is not None and unembed is not None:
        left, right = embed.double() @ left, right @ unembed.double()
    values = torch.linalg.eigvals(right @ left)
    size = values.abs().sum()
    return float(values.real.sum() / size) if size > 0 else float("nan")


@dataclass(frozen=True, eq=False)
class AttentionCircuits:
    """The maps of one attention, head by head, and what they leave out (`caveats`)."""

    site: str
    layer: Attention
    caveats: tuple[str, ...]

    @property
    def spec(self) -> AttentionSpec:
        """What the attention is."""
        return self.layer.spec

    def qk_circuit(self, head: int) -> LowRankMap:
        """W_Q and W_K^T of a score head: which states it compares."""
        heads = self.spec.heads
        _check_head(head, heads.q, "score head")
        if not self.spec.similarity.linear:
            raise SpecError(f"{self.site} scores with {self.spec.similarity!r}, which is no product of W_Q and W_K")
        q, k = self._head_matrices("q", "q dim model"), self._head_matrices("k", "kv dim source")
        return LowRankMap(q[head].T, k[heads.reads[head]])

    def ov_circuit(self, head: int) -> LowRankMap:
        """W_V and W_O of an output head: what it carries from the tokens that it reads."""
        spec = self.spec
        _check_head(head, len(spec.score_head_of_output), "output head")
        joins = [step for _, step in spec.parts_of(OutputStep) if step.combines_rows]
        if joins:
            raise SpecError(f"{self.site} joins rows by {joins[0]!r}, so that no one W_V is an output head's")
        v = self._head_matrices("v", f"{spec.heads.value_axis} vdim source")
        return LowRankMap(
            v[spec.core_of(spec.projection_form(one=False)).value_head_of_row[head]].T, self.output_map(head)
        )

    def output_map(self, head: int) -> Tensor:
        """W_O of an output head, [vdim, model]: what the merge makes of each of its channels."""
        spec, like = self.spec, self._get_weight("project", next(iter(self.spec.project.params(self.spec))))
        _check_head(head, len(spec.score_head_of_output), "output head")
        vdim = spec.heads.vdim
        each = torch.zeros(1, vdim + 1, len(spec.score_head_of_output), vdim, dtype=like.dtype, device=like.device)
        each[0, :vdim, head] = torch.eye(vdim, dtype=like.dtype, device=like.device)
        with torch.inference_mode():
            y = self.layer.merge_heads(each)[0]
        return y[:-1] - y[-1]

    def _head_matrices(self, side: str, axes: str) -> Tensor:
        """The matrix of one side, [heads, width, in], where the project declares it by these axes."""
        spec = self.spec
        param = spec.project.params(spec).get(side)
        if param is None or " ".join(param.layout.axes) != axes:
            fact = f"{self.site} has {spec.project!r}, in which no one matrix by head gives {side}"
            raise SpecError(f"{fact}; circuits are of layers whose {side} is one linear map of the input")
        sizes = spec.sizes_of(spec.project)
        return self._get_weight("project", side).view(*(sizes[axis] for axis in param.layout.axes))

    def _get_weight(self, part: str, name: str) -> Tensor:
        return self.layer.weights[part][name].detach()


def _check_head(head: int, count: int, what: str) -> None:
    if not 0 <= head < count:
        raise ValueError(f"there is no {what} {head} of {count}; give one in 0..{count - 1}")


def get_circuits(model: nn.Module) -> Mapping[str, AttentionCircuits]:
    """The circuits of every attention of a model by the name of its site: ours, or one of transformers that hw.load
    reads.

    >>> import headwise as hw
    >>> net = hw.build(
    ...     hw.families.read_model_spec({"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1}), seed=0
    ... )
    >>> made = get_circuits(net)["decoder.0.attention"]
    >>> made.qk_circuit(1).left.shape, made.ov_circuit(0).product.shape
    (torch.Size([8, 4]), torch.Size([8, 8]))
    """
    known = find_attention(model)
    ours = [one for one in known if isinstance(one.module, Attention)]
    if len(ours) < len(known) or not known:
        ours = find_attention(as_native_model(model))
    modules = {one.site.name: one.module for one in ours}
    return {
        name: AttentionCircuits(name, module, tuple(_caveats(module.spec)))
        for name, module in modules.items()
        if isinstance(module, Attention)
    }


class CircuitSimilarity(NamedTuple):
    """Heads, and how alike the maps of every two of them are, [heads, heads]; nan where they are of other widths."""

    heads: tuple[HeadLocation, ...]
    values: Tensor


def compare_circuits(model: nn.Module, circuit: str = "qk") -> CircuitSimilarity:
    """How alike the maps of all heads of a model are: "qk", which states they compare, or "ov", what they carry.

    Two drawn maps have an inner product of zero on average; `kin(twin(model), which)` says how far from it they come.

    >>> import headwise as hw
    >>> net = hw.build(
    ...     hw.families.read_model_spec({"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1}), seed=0
    ... )
    >>> compare_circuits(net, "ov").values.shape
    torch.Size([2, 2])
    """
    if circuit not in CIRCUIT_KINDS:
        raise ValueError(f"which={circuit!r} is unknown; use 'qk' or 'ov'")
    heads, maps = list[HeadLocation](), list[LowRankMap]()
    layers = {one.site.name: one.site.layer for one in find_attention(model)}
    for own in get_circuits(model).values():
        count = own.spec.heads.q if circuit == "qk" else len(own.spec.score_head_of_output)
        heads += [HeadLocation(own.site, layers[own.site], head) for head in range(count)]
        maps += [own.qk_circuit(head) if circuit == "qk" else own.ov_circuit(head) for head in range(count)]
    values = torch.full((len(maps), len(maps)), torch.nan, dtype=torch.float64)
    for one, own in enumerate(maps):
        for two in range(one, len(maps)):
            if own.shape == maps[two].shape:
                values[one, two] = values[two, one] = own.inner_product(maps[two])
    size = values.diagonal().sqrt()
    return CircuitSimilarity(tuple(heads), values / (size[:, None] * size))


def _caveats(spec: AttentionSpec) -> Iterator[str]:
    """What stands between these maps and what the layer does."""
    for _, turn in spec.parts_of(QKTransform):
        if sides := [side for side in "qkv" if side in turn.transformed_sides(spec)]:
            yield f"{turn!r} changes {' and '.join(sides)} token by token"
    for _, step in spec.parts_of(OutputStep):
        yield f"{step!r} changes what heads say before it is written"
    for _, mix in spec.parts_of(Mix):
        yield f"{mix!r} mixes heads, so that none compares or reads by itself"


class TokenTables(NamedTuple):
    """The tables through which tokens enter a model and leave it, and what stands for the second where it has none."""

    embed: Tensor
    unembed: Tensor
    note: str


def get_token_tables(model: nn.Module, stack: str) -> TokenTables:
    """The tables of the tokens that a stack reads and of those that the model says, [tokens, model], [model, tokens].

    A model that says no tokens is held to its own table: whether a head raises what it read.
    """
    net = as_native_model(model)
    owners, state = net.spec.tied_weights(), net.state_dict(keep_vars=True)

    def held(name: str) -> Tensor | None:
        tensor = state.get(owners.get(name, name))
        return None if tensor is None else tensor.detach()

    embed = held(f"{stack}.embedding.tokens")
    if embed is None:
        raise SpecError(f"{stack} of {net.spec.name} has no table of tokens; copying of states has copying(ov)")
    heads = [head for head in net.spec.heads if head.outputs == len(embed) and head.at == "each"]
    own = held(f"head.{heads[0].name}.weight") if heads else None
    if own is None or own.shape != embed.shape:
        return TokenTables(embed, embed.T, "the model says no such tokens: held to the table that it reads")
    note = "" if heads[0].transform is None else "what the head does before its table is left out"
    return TokenTables(embed, own.T, note)


# --- What each head writes into the states of a model --------------------------------------------------

MAX_CHUNK_CELLS = 2**22  # numbers that all heads of a layer write at once, at most


class ResidualContribution(NamedTuple):
    """One head: the norm of z W_O, and its share of what its layer writes, each a mean over tokens.

    A share is the part along the sum of all heads, <own, sum> / <sum, sum>: shares of a layer sum to one, and one that
    is below zero takes back what others write. The chance of a share is one over the number of heads; a norm has none.
    """

    site: str
    head: int
    norm: Measure
    share: Measure


def measure_residual_contributions(
    model: nn.Module, examples: Iterable[Example], *, num_resamples: int = 1000, seed: int = 0
) -> tuple[ResidualContribution, ...]:
    """How much every head of a model writes over texts, of models whose circuits are known.

    What output biases add belongs to no head, and what a norm behind the attention does is left out.
    """
    maps = {
        name: torch.stack([own.output_map(head) for head in range(len(own.spec.score_head_of_output))])
        for name, own in get_circuits(model).items()
    }
    those = [one for one in find_attention(model) if one.site.silence.can and one.site.name in maps]
    sums = {one.site.name: FoldedSums() for one in those}
    for number, scene in enumerate(examples):
        for name, z in collect_head_outputs(model, those, scene).items():
            told = _contribution_norms(z, maps[name].to(z))
            sums[name].add(number, told.sum(0).cpu().numpy(), len(told))
    rows: list[ResidualContribution] = []
    for name, held in sums.items():
        if held.count:
            told = held.mean_intervals(num_resamples, seed)
            heads = told.mean.shape[1]
            rows += [
                ResidualContribution(name, head, told.measure_at((0, head)), told.measure_at((1, head), 1 / heads))
                for head in range(heads)
            ]
    if not rows:
        raise ValueError("no text was read; give at least two")
    return tuple(rows)


def _contribution_norms(z: Tensor, maps: Tensor) -> Tensor:
    """Norm and share of each head at each token, [tokens, 2, heads], in float64."""
    step = max(1, MAX_CHUNK_CELLS // max(1, maps.shape[0] * maps.shape[2]))
    found: list[Tensor] = []
    for start in range(0, len(z), step):
        own = torch.einsum("tov,ovd->tod", z[start : start + step], maps).double()
        total = own.sum(1, keepdim=True)
        whole = total.square().sum(-1)
        share = torch.where(whole > 0, (own * total).sum(-1) / whole.clamp(min=1e-300), 1 / own.shape[1])
        found.append(torch.stack([own.norm(dim=-1), share], 1))
    return torch.cat(found)
