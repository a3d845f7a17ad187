"""What a head can do, from its weights alone: which states it compares, and what it carries from where it reads.

Scores are x W_Q W_K^T z, and what is written is w z W_V W_O: two maps of the model's width, each the product of two
narrow matrices, and kept so (Elhage et al. 2021). Biases, norms and what turns queries and keys stand outside of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..errors import SpecError
from ..hub.finding import found
from ..module import Attention
from ..seams import Mix, OutputStep, Turn
from ..spec import AttentionSpec
from .sampled import Who
from .twins import as_ours

SIDES = ("left", "right")
MAPS = ("qk", "ov")


class Factors(NamedTuple):
    """A map as two narrow matrices, left [in, r] and right [r, out]: x of it is x @ left @ right."""

    left: Tensor
    right: Tensor

    @property
    def whole(self) -> Tensor:
        """The product, [in, out]: as large as the model is wide, squared."""
        return self.left @ self.right

    @property
    def shape(self) -> tuple[int, int]:
        """How wide it is, in and out."""
        return self.left.shape[0], self.right.shape[1]

    @property
    def singular(self) -> Tensor:
        """Its singular values but for those that are zero by its shape, the largest first.

        >>> Factors(torch.tensor([[3.0], [4.0]]), torch.tensor([[2.0, 0.0]])).singular.tolist()
        [10.0]
        """
        left, right = (torch.linalg.qr(each, mode="r").R for each in (self.left.double(), self.right.double().T))
        return torch.linalg.svdvals(left @ right.T)

    def inner(self, other: Factors) -> Tensor:
        """The sum of products of the entries of two such maps, worked out between the narrow sides."""
        left = self.left.double().T @ other.left.double()
        return (left * (self.right.double() @ other.right.double().T)).sum()


def similarity(one: Factors, other: Factors) -> float:
    """The inner product of two maps over their norms: 1 where they are one map up to scale, 0 where they share nothing.

    >>> similarity(Factors(torch.eye(2), torch.eye(2)), Factors(torch.eye(2), -2 * torch.eye(2)))
    -1.0
    """
    scale = (one.inner(one) * other.inner(other)).sqrt()
    return float(one.inner(other) / scale) if scale > 0 else float("nan")


def angles(one: Factors, other: Factors, side: str = "left") -> Tensor:
    """The principal angles, in radians, between what two maps read ("left") or write ("right"), the smallest first.

    Their cosines, squared, are r / width on average where subspaces of r dimensions are drawn.

    >>> x, y = torch.eye(3).split([2, 1])
    >>> angles(Factors(x.T, x), Factors(y.T, y)).tolist() == [torch.pi / 2]
    True
    """
    if side not in SIDES:
        raise ValueError(f"side={side!r} is unknown; use 'left', what is read, or 'right', what is written")
    spans = [_span(each.left if side == "left" else each.right.T) for each in (one, other)]
    return torch.linalg.svdvals(spans[0].T @ spans[1]).clamp(max=1).acos()


def _span(columns: Tensor) -> Tensor:
    """An orthonormal basis of what the columns reach."""
    basis, size, _ = torch.linalg.svd(columns.double(), full_matrices=False)
    return basis[:, size > 1e-10 * size[:1].clamp(min=1e-300)]


def copying(ov: Factors, embed: Tensor | None = None, unembed: Tensor | None = None) -> float:
    """Whether a head writes of a token what raises that token: the sum of eigenvalues over the sum of their sizes.

    Of embed W_V W_O unembed, tokens to tokens, whose eigenvalues but for zeros are those of a matrix as small as the
    head; 1 where all are positive, -1 where all are negative (Elhage et al. 2021). `embed` is [tokens, model],
    `unembed` [model, tokens]; without them it is of states.

    >>> ov = Factors(torch.eye(3)[:, :2], torch.eye(3)[:2])
    >>> copying(ov), copying(Factors(ov.left, -ov.right))
    (1.0, -1.0)
    """
    left, right = ov.left.double(), ov.right.double()
    if embed is not None and unembed is not None:
        left, right = embed.double() @ left, right @ unembed.double()
    values = torch.linalg.eigvals(right @ left)
    size = values.abs().sum()
    return float(values.real.sum() / size) if size > 0 else float("nan")


@dataclass(frozen=True, eq=False)
class Circuits:
    """The maps of one attention, head by head, and what they leave out (`caveats`)."""

    site: str
    layer: Attention
    caveats: tuple[str, ...]

    @property
    def spec(self) -> AttentionSpec:
        """What the attention is."""
        return self.layer.spec

    def qk(self, head: int) -> Factors:
        """W_Q and W_K^T of a score head: which states it compares."""
        heads = self.spec.heads
        _check(head, heads.q, "score head")
        if not self.spec.similarity.linear:
            raise SpecError(f"{self.site} scores with {self.spec.similarity!r}, which is no product of W_Q and W_K")
        q, k = self._by_head("q", "q dim model"), self._by_head("k", "kv dim source")
        return Factors(q[head].T, k[heads.reads[head]])

    def ov(self, head: int) -> Factors:
        """W_V and W_O of an output head: what it carries from the tokens that it reads."""
        spec = self.spec
        _check(head, len(spec.speaks), "output head")
        joins = [step for _, step in spec.steps(OutputStep) if step.joins]
        if joins:
            raise SpecError(f"{self.site} joins rows by {joins[0]!r}, so that no one W_V is an output head's")
        v = self._by_head("v", f"{spec.heads.value_axis} vdim source")
        return Factors(v[spec.core_of(spec.form(one=False)).values[head]].T, self.writes(head))

    def writes(self, head: int) -> Tensor:
        """W_O of an output head, [vdim, model]: what the merge makes of each of its channels."""
        spec, like = self.spec, self._tensor("project", next(iter(self.spec.project.params(self.spec))))
        _check(head, len(spec.speaks), "output head")
        vdim = spec.heads.vdim
        each = torch.zeros(1, vdim + 1, len(spec.speaks), vdim, dtype=like.dtype, device=like.device)
        each[0, :vdim, head] = torch.eye(vdim, dtype=like.dtype, device=like.device)
        with torch.inference_mode():
            y = self.layer.merge(each)[0]
        return y[:-1] - y[-1]

    def _by_head(self, side: str, axes: str) -> Tensor:
        """The matrix of one side, [heads, width, in], where the project declares it by these axes."""
        spec = self.spec
        param = spec.project.params(spec).get(side)
        if param is None or " ".join(param.layout.axes) != axes:
            fact = f"{self.site} has {spec.project!r}, in which no one matrix by head gives {side}"
            raise SpecError(f"{fact}; circuits are of layers whose {side} is one linear map of the input")
        sizes = spec.sizes_of(spec.project)
        return self._tensor("project", side).view(*(sizes[axis] for axis in param.layout.axes))

    def _tensor(self, part: str, name: str) -> Tensor:
        return self.layer.weights[part][name].detach()


def _check(head: int, count: int, what: str) -> None:
    if not 0 <= head < count:
        raise ValueError(f"there is no {what} {head} of {count}; give one in 0..{count - 1}")


def circuits(model: nn.Module) -> Mapping[str, Circuits]:
    """The circuits of every attention of a model by the name of its site: ours, or one of transformers that hw.load
    reads.

    >>> import headwise as hw
    >>> net = hw.build(hw.families.read({"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1}), seed=0)
    >>> made = circuits(net)["decoder.0.attention"]
    >>> made.qk(1).left.shape, made.ov(0).whole.shape
    (torch.Size([8, 4]), torch.Size([8, 8]))
    """
    known = found(model)
    ours = [one for one in known if isinstance(one.module, Attention)]
    if len(ours) < len(known) or not known:
        ours = found(as_ours(model))
    modules = {one.site.name: one.module for one in ours}
    return {
        name: Circuits(name, module, tuple(_caveats(module.spec)))
        for name, module in modules.items()
        if isinstance(module, Attention)
    }


class Kin(NamedTuple):
    """Heads, and how alike the maps of every two of them are, [heads, heads]; nan where they are of other widths."""

    heads: tuple[Who, ...]
    values: Tensor


def kin(model: nn.Module, which: str = "qk") -> Kin:
    """How alike the maps of all heads of a model are: "qk", which states they compare, or "ov", what they carry.

    Two drawn maps have an inner product of zero on average; `kin(twin(model), which)` says how far from it they come.

    >>> import headwise as hw
    >>> net = hw.build(hw.families.read({"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1}), seed=0)
    >>> kin(net, "ov").values.shape
    torch.Size([2, 2])
    """
    if which not in MAPS:
        raise ValueError(f"which={which!r} is unknown; use 'qk' or 'ov'")
    heads, maps = list[Who](), list[Factors]()
    layers = {one.site.name: one.site.layer for one in found(model)}
    for own in circuits(model).values():
        count = own.spec.heads.q if which == "qk" else len(own.spec.speaks)
        heads += [Who(own.site, layers[own.site], head) for head in range(count)]
        maps += [own.qk(head) if which == "qk" else own.ov(head) for head in range(count)]
    values = torch.full((len(maps), len(maps)), torch.nan, dtype=torch.float64)
    for one, own in enumerate(maps):
        for two in range(one, len(maps)):
            if own.shape == maps[two].shape:
                values[one, two] = values[two, one] = own.inner(maps[two])
    size = values.diagonal().sqrt()
    return Kin(tuple(heads), values / (size[:, None] * size))


def _caveats(spec: AttentionSpec) -> Iterator[str]:
    """What stands between these maps and what the layer does."""
    for _, turn in spec.steps(Turn):
        if sides := [side for side in "qkv" if side in turn.reaches(spec)]:
            yield f"{turn!r} changes {' and '.join(sides)} token by token"
    for _, step in spec.steps(OutputStep):
        yield f"{step!r} changes what heads say before it is written"
    for _, mix in spec.steps(Mix):
        yield f"{mix!r} mixes heads, so that none compares or reads by itself"


class Tables(NamedTuple):
    """The tables through which tokens enter a model and leave it, and what stands for the second where it has none."""

    embed: Tensor
    unembed: Tensor
    note: str


def tables(model: nn.Module, stack: str) -> Tables:
    """The tables of the tokens that a stack reads and of those that the model says, [tokens, model], [model, tokens].

    A model that says no tokens is held to its own table: whether a head raises what it read.
    """
    net = as_ours(model)
    owners, state = net.described.ties(), net.state_dict(keep_vars=True)

    def held(name: str) -> Tensor | None:
        tensor = state.get(owners.get(name, name))
        return None if tensor is None else tensor.detach()

    embed = held(f"{stack}.embedding.tokens")
    if embed is None:
        raise SpecError(f"{stack} of {net.described.name} has no table of tokens; copying of states has copying(ov)")
    heads = [head for head in net.described.heads if head.outputs == len(embed) and head.at == "each"]
    own = held(f"head.{heads[0].name}.weight") if heads else None
    if own is None or own.shape != embed.shape:
        return Tables(embed, embed.T, "the model says no such tokens: held to the table that it reads")
    note = "" if heads[0].transform is None else "what the head does before its table is left out"
    return Tables(embed, own.T, note)
