"""Values that parts, the layer, the cost model, probes and backends exchange.

Tensor names end in the letters of their axes: B batch, T queries, S keys, H score heads, G key or
value heads, R rows of weights, O output heads, K key channels, V value channels, D model width, E
width of the source (the model width in self-attention), C channels before they are divided among
heads.

H, R and O count three kinds of head, and are equal in plain multi-head attention. A score head (H)
computes one score per (query, key) pair. A row of weights (R) is one head's attention weights after
any mixing of heads; it is multiplied with one value head. An output head (O) is what the merge
receives; some output steps combine several rows into one output head, as differential attention
does with two.

An `AxisLayout` names every axis of a tensor. ``"(q dim) model"`` is a matrix with q x dim rows: q
heads of dim channels each. ``"q [nope|rope] rank"`` concatenates two axes into one. Code that
prunes, groups, counts, shards or checks weights reads their layouts, so it needs no knowledge of
particular layers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import partial
from itertools import chain, product
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, runtime_checkable

from ...util.errors import SpecError, suggest

if TYPE_CHECKING:
    from torch import Tensor

    from ..masking.sequence_info import SequenceInfo

# Types of `headwise.attention.spec`, which imports this package.
AttentionSpec = Any
Heads = Any
AppliedTo = Literal["query", "source", "recalled"]


class Phase(IntEnum):
    """The phase of the computation in which a modifier acts.

    A spec sorts its modifiers by phase; within a phase they keep the order in which they were
    written.
    """

    QK_TRANSFORM = 1
    SCORES = 2
    WEIGHTS = 3
    VALUES = 4
    OUTPUTS = 5
    GATES = 6


@dataclass(frozen=True)
class CoreShape:
    """The shapes of the attention core, as backends and the cost model see them.

    ``key_head_of_query[h]`` is the key head of score head h, ``value_head_of_row[r]`` the value
    head of row r of the weights. `dim` and `vdim` are the channels per key and value head.
    `score_dim` is the number of channels in the product of query and key; it equals `dim` unless
    the similarity applies a feature map.
    """

    key_head_of_query: tuple[int, ...]
    value_head_of_row: tuple[int, ...]
    dim: int
    vdim: int
    scale: float
    score_dim: int = -1

    def __post_init__(self) -> None:
        if self.score_dim < 0:
            object.__setattr__(self, "score_dim", self.dim)

    def flops(self, pairs: int) -> int:
        """FLOPs of the two matrix products over `pairs` (query, key) pairs: scores, then weights
        times values.
        """
        scores = len(self.key_head_of_query) * self.score_dim
        values = len(self.value_head_of_row) * self.vdim
        return 2 * pairs * (scores + values)


@dataclass(frozen=True)
class Param:
    """Declaration of a parameter: its axes, its initialiser, and the tokens it is multiplied with.

    `applied` names the tokens that are multiplied with the parameter in a matrix product:
    "query" for every query token, "source" for every token once, when its cache entry is computed,
    "recalled" for every cached token each time it is read; None for parameters that only add or
    scale. A constant (``trainable=False``) is saved, pruned and moved with the other parameters but
    never trained. `tied_to` names the parameter it shares memory with.
    """

    layout: AxisLayout
    init: Callable[[tuple[int, ...]], Tensor]
    applied: AppliedTo | None = None
    trainable: bool = True
    tied_to: str | None = None


@dataclass(frozen=True)
class CallSize:
    """The sizes of one forward call.

    `batch` rows; and for one row: `queries`, `new_tokens` written to the cache, `keys` to attend
    to, and `pairs`, the number of (query, key) pairs that the pattern allows (default: all of
    them). If heads have different patterns, `head_pairs` has the number of each head, and `pairs`
    counts the pairs that at least one head allows.
    """

    batch: int
    queries: int
    new_tokens: int
    keys: int
    pairs: int = -1
    head_pairs: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.pairs < 0:
            object.__setattr__(self, "pairs", self.queries * self.keys)

    def with_pairs(self, pairs: int) -> CallSize:
        """A copy in which every head has this number of pairs."""
        return replace(self, pairs=pairs, head_pairs=())

    def tokens(self, applied: str | None) -> int:
        """The number of tokens in this call that a parameter with this `applied` multiplies."""
        tokens_per_row = {"query": self.queries, "source": self.new_tokens, "recalled": self.keys}
        return self.batch * tokens_per_row[applied] if applied else 0


@runtime_checkable
class PartParams(Protocol):
    """The parameters of one part.

    ``p[name]`` is a parameter, ``p.head(h)`` the slices of score head h, `broadcast_over_scores`
    all parameters reshaped to broadcast over a score tensor, and `trainable` those that are
    trained. A part may keep values in `cached` that it computed from constants.
    `kv_head_of_query` has the key-value head of each query head.
    """

    sizes: Mapping[str, int]
    kv_head_of_query: tuple[int, ...]
    cached: dict[Any, Any]

    @property
    def training(self) -> bool: ...
    def __getitem__(self, name: str) -> Tensor: ...
    def __contains__(self, name: str) -> bool: ...
    def head(self, h: Any) -> Mapping[str, Tensor]: ...
    def broadcast_over_scores(self) -> Mapping[str, Tensor]: ...
    def trainable(self) -> list[Tensor]: ...


@runtime_checkable
class TransformsQK(Protocol):
    """Applies all query/key transforms of the layer (RoPE, QK-norm) to x_BTHK; `side` is "q", "k"
    or "v".
    """

    def __call__(self, x_BTHK: Tensor, side: str) -> Tensor: ...


class QueryContext(NamedTuple):
    """Queries as gates and score steps see them.

    `x_BTD` is the layer's input, `q_BTHK` the transformed queries, `scale` the factor of the
    scores, and `sequence` the positions and segments of the query tokens.
    """

    x_BTD: Tensor
    q_BTHK: Tensor
    scale: float
    sequence: SequenceInfo


@runtime_checkable
class ScorePosition(Protocol):
    """Positions of the (query, key) pairs being scored: `i` of the query and `j` of the key.

    `take` selects per-query factors at an index, such as the relative position.
    """

    @property
    def i(self) -> Any: ...
    @property
    def j(self) -> Any: ...
    def take(self, factors: Tensor, index: Any) -> Tensor: ...


class SymmetryGroup(NamedTuple):
    """A group of orthogonal maps of a head's channels: rotations within each plane, any map within
    each block.

    `planes` are pairs of channels, `blocks` sets of channels. ``a & b`` is the intersection of two
    groups:

    >>> SymmetryGroup(planes=((0, 2), (1, 3))) & SymmetryGroup(blocks=((0, 1, 2), (3,)))
    SymmetryGroup(planes=((0, 2),), blocks=())
    """

    planes: tuple[tuple[int, int], ...] = ()
    blocks: tuple[tuple[int, ...], ...] = ()

    @staticmethod
    def full(width: int) -> SymmetryGroup:
        """All orthogonal maps of `width` channels."""
        return SymmetryGroup(blocks=(tuple(range(width)),) if width else ())

    @staticmethod
    def commuting_with_scales(columns: Sequence[Sequence[float]]) -> SymmetryGroup:
        """The orthogonal maps that commute with scaling channel c by each of the factors in
        ``columns[c]``.

        Channels with equal factors form a block.

        >>> SymmetryGroup.commuting_with_scales([(1.0, 2.0), (1.0, 3.0), (1.0, 2.0)])
        SymmetryGroup(planes=(), blocks=((0, 2), (1,)))
        """
        blocks: dict[tuple[float, ...], list[int]] = {}
        for channel, factors in enumerate(columns):
            blocks.setdefault(tuple(factors), []).append(channel)
        return SymmetryGroup(blocks=tuple(map(tuple, blocks.values())))

    def __and__(self, other: SymmetryGroup) -> SymmetryGroup:
        own_planes = [plane for plane in self.planes if other._contains(plane)]
        planes = list(map(set, own_planes))
        other_planes = [
            plane for plane in other.planes if self._contains(plane) and set(plane) not in planes
        ]
        pairs = product(self.blocks, other.blocks)
        blocks = [tuple(sorted(set(a) & set(b))) for a, b in pairs]
        return SymmetryGroup(
            (*own_planes, *other_planes), tuple(block for block in blocks if block)
        )

    def _contains(self, plane: tuple[int, int]) -> bool:
        channels = set(plane)
        return any(channels == set(own) for own in self.planes) or any(
            channels <= set(block) for block in self.blocks
        )


@runtime_checkable
class SpecFactory(Protocol):
    """Builds a small spec from keyword arguments of `design`.

    Sizes that are not given get defaults that differ between axes, so that mixed-up axes cause an
    error.
    """

    def __call__(self, **options: Any) -> AttentionSpec: ...


@runtime_checkable
class ReductionGroup(Protocol):
    """The processes over which the heads of a layer, or the tokens of its batch, are sharded.

    `sum_over` adds up a tensor over all shards. `own_share` is this process's share of an auxiliary
    loss: the gradients of all processes add up to the gradient of the loss.
    """

    def sum_over(self, x: Tensor, over: Literal["heads", "tokens"]) -> Tensor: ...
    def own_share(self, value: Tensor) -> Tensor: ...


@dataclass
class AuxLosses:
    """Auxiliary losses by (layer, term), such as a router's load-balancing loss.

    Terms are overwritten, never accumulated, so that recomputing a layer (activation checkpointing)
    cannot count them twice. `group` is set where the layer is sharded over processes.
    """

    terms: dict[tuple[str, str], Tensor] = field(default_factory=dict[tuple[str, str], "Tensor"])
    layer: str = ""
    group: ReductionGroup | None = None

    def set(self, term: str, value: Tensor) -> None:
        """Set one term of the current layer."""
        self.terms[self.layer, term] = value if self.group is None else self.group.own_share(value)

    def sum_over(self, x: Tensor, over: Literal["heads", "tokens"]) -> Tensor:
        """Sum x, a sum over this process's "heads" or "tokens", over the layer's processes."""
        return x if self.group is None else self.group.sum_over(x, over)

    def total(self, term: str) -> Tensor | float:
        """The sum of one term over all layers."""
        return sum((value for (_, name), value in self.terms.items() if name == term), 0.0)


# --- Probes ---------------------------------------------------------------------------------------

# The points that can be probed, with the axes of their tensors.
PROBE_POINTS = {
    "q": "B T H K",
    "k": "B S G K",
    "v": "B S G V",
    "scores": "B H T S",
    "weights": "B H T S",
    "lse": "B H T",
    "heads": "B T O V",
}


class Probe:
    """Calls ``callback(point, tensor)`` at each of the given points; a tensor that it returns
    replaces the original.

    Without a callback the probe records the tensors in `tensors`. `aux_losses` collects the
    auxiliary losses of parts.

    >>> import headwise as hw, torch
    >>> layer = hw.Attention(hw.design(model=8, heads=2))
    >>> with_weights = hw.Probe("weights")
    >>> _ = layer(torch.randn(1, 3, 8), probe=with_weights)
    >>> with_weights.tensors["weights"].shape
    torch.Size([1, 2, 3, 3])
    """

    def __init__(
        self,
        *points: str,
        callback: Callable[[str, Tensor], Tensor | None] | None = None,
        aux_losses: AuxLosses | None = None,
    ) -> None:
        for point in points:
            if point not in PROBE_POINTS:
                raise ValueError(
                    f"cannot probe {point!r}: there is no such point; "
                    f"{suggest(point, PROBE_POINTS)}"
                )
        self.points: frozenset[str] = frozenset(points)
        self.callback = callback
        self.aux_losses = aux_losses
        self.tensors: dict[str, Tensor] = {}

    def __call__(self, point: str, tensor: Tensor) -> Tensor:
        if point not in self.points:
            return tensor
        if self.callback is None:
            self.tensors[point] = tensor
            return tensor
        changed = self.callback(point, tensor)
        return tensor if changed is None else changed


_TOKEN_PATTERN = re.compile(r"\(|\)|\[[a-z_0-9|]+\]|[a-z_][a-z_0-9]*|\S")
_AXIS_PATTERN = re.compile(r"[a-z_][a-z_0-9]*(\|[a-z_][a-z_0-9]*)*")


@dataclass(frozen=True)
class AxisLayout:
    """The axes of each dimension of a tensor; one dimension may hold several axes.

    >>> layout = AxisLayout.parse("(q dim) model")
    >>> (
    ...     layout.shape({"q": 2, "dim": 3, "model": 5}),
    ...     layout.unmerged_shape({"q": 2, "dim": 3, "model": 5}),
    ... )
    ((6, 5), (2, 3, 5))
    """

    dims: tuple[tuple[str, ...], ...]

    @staticmethod
    def parse(text: str) -> AxisLayout:
        """Parse a layout such as ``"(q dim) model"``; ``[a|b]`` concatenates the axes a and b."""
        dims: list[tuple[str, ...]] = []
        group: list[str] | None = None
        for token in _TOKEN_PATTERN.findall(text):
            name = token[1:-1] if token.startswith("[") else token
            if token == "(" and group is None:
                group = []
            elif token == ")" and group:
                dims.append(tuple(group))
                group = None
            elif _AXIS_PATTERN.fullmatch(name) and group is not None:
                group.append(name)
            elif _AXIS_PATTERN.fullmatch(name):
                dims.append((name,))
            else:
                raise SpecError(
                    f"cannot parse layout {text!r} at {token!r}; write axes such as '(q dim) model'"
                )
        if group is not None:
            raise SpecError(
                f"layout {text!r} has an unclosed '('; write axes such as '(q dim) model'"
            )
        layout = AxisLayout(tuple(dims))
        if len(set(layout.axes)) != len(layout.axes):
            raise SpecError(
                f"layout {text!r} uses an axis name twice; give every axis a different name"
            )
        return layout

    @property
    def axes(self) -> tuple[str, ...]:
        """All axis names in order, ignoring how they are grouped into dimensions."""
        return tuple(chain.from_iterable(self.dims))

    def unmerged_shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The tensor's shape with one dimension per axis."""
        return tuple(_axis_size(axis, sizes) for axis in self.axes)

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The tensor's shape as stored."""
        size_of = partial(_axis_size, sizes=sizes)
        return tuple(math.prod(map(size_of, dim)) for dim in self.dims)

    def numel(self, sizes: Mapping[str, int]) -> int:
        """The number of elements of the tensor."""
        return math.prod(self.unmerged_shape(sizes))

    def __str__(self) -> str:
        named: list[str] = []
        for dim in self.dims:
            text = " ".join(f"[{axis}]" if "|" in axis else axis for axis in dim)
            named.append(f"({text})" if len(dim) > 1 else text)
        return " ".join(named)


def _axis_size(axis: str, sizes: Mapping[str, int]) -> int:
    missing = [name for name in axis.split("|") if name not in sizes]
    if missing:
        raise SpecError(f"axis {missing[0]!r} has no size; {suggest(missing[0], sizes)}")
    return sum(sizes[name] for name in axis.split("|"))


class ParallelContext:
    """Communication between ranks that hold other heads of a layer, or other tokens of its rows.
    This class is one process, without such ranks; a class for several overrides every method.

    Each rank computes a partial output and the partial outputs are summed, so the gradient of
    anything that several ranks hold is the sum of their gradients. `adds_output_bias` is true on
    one rank; `num_token_shards` is the number of ranks that share the tokens of a row.
    """

    adds_output_bias: bool = True
    num_token_shards: int = 1

    def copy_to_heads(self, x: Tensor) -> Tensor:
        """x unchanged; its gradient is summed over the ranks that hold other heads."""
        return x

    def reduce_from_heads(self, y: Tensor) -> Tensor:
        """The sum over ranks of their partial outputs."""
        return y

    def gather_tokens(
        self, entry: dict[str, Tensor], at: SequenceInfo
    ) -> tuple[dict[str, Tensor], SequenceInfo]:
        """Gather kv entries [B, tokens, ...] and positions from all ranks."""
        return entry, at

    def head_local_rng(self, training: bool) -> AbstractContextManager[None]:
        """A context in which random numbers are drawn for the heads of this rank."""
        return NO_CONTEXT

    def aux_losses(self, losses: AuxLosses | None) -> AuxLosses | None:
        """Where parts that see only some heads or tokens add their auxiliary losses; None to
        collect none.
        """
        return losses

    def without_token_shards(self) -> ParallelContext:
        """The context without context parallelism."""
        return self


NO_CONTEXT = nullcontext()
SINGLE_PROCESS = ParallelContext()


class HasParallelContext:
    """A layer that can be divided over ranks; `parallel` is set when a model is parallelised."""

    parallel: ParallelContext = SINGLE_PROCESS
