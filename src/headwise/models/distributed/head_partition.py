"""Partition of a model's heads among ranks: each rank gets a smaller spec and a piece of each
tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor

from ...attention.head_axis_ops import KeptHeads, select_heads
from ...attention.interfaces.core_types import AxisLayout
from ...attention.spec.attention_spec import AttentionSpec
from ...util.errors import SpecError, pluralise
from ..model_spec import BlockSpec, ExpertsSpec, FeedForwardSpec, ModelSpec, WeightSpec
from ..model_spec.model import group_blocks

# roles of divided weights; all others are replicated on every rank
DIVIDED_ROLES = ("attention", "cross", "feed")

IndicesByAxis = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class TensorShard:
    """A smaller tensor cut out of a full one; `indices` are those kept along each axis that is cut.

    >>> piece = TensorShard(
    ...     AxisLayout.parse("(q dim) model"), {"q": 3, "dim": 2, "model": 1}, {"q": (0, 2)}
    ... )
    >>> piece.cut_from(torch.arange(6.0)[:, None]).flatten().tolist()
    [0.0, 1.0, 4.0, 5.0]
    """

    layout: AxisLayout
    sizes: Mapping[str, int]
    indices: IndicesByAxis

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the shard, as stored."""
        return self.layout.shape(self._shard_sizes)

    @property
    def unmerged_shape(self) -> tuple[int, ...]:
        """Shape of the shard with one dimension per axis."""
        return self.layout.unmerged_shape(self._shard_sizes)

    def cut_from(self, full: Tensor) -> Tensor:
        """Cut the shard out of the full tensor; returns a copy."""
        opened = full.reshape(self.layout.unmerged_shape(self.sizes))
        for axis, places in self.indices.items():
            opened = select_heads(places)(opened, self.layout.axes.index(axis))
        return opened.reshape(self.shape).clone()

    def write_into(self, shard: Tensor, full: Tensor) -> None:
        """Write the shard to its place in the full tensor."""
        opened = self.layout.unmerged_shape(self.sizes)
        full.view(self.layout.unmerged_shape(self.sizes))[
            _outer_indices(
                [
                    self.indices.get(axis, range(size))
                    for axis, size in zip(self.layout.axes, opened, strict=True)
                ]
            )
        ] = shard.reshape(self.unmerged_shape)

    @property
    def cut_indices(self) -> tuple[Tensor, ...]:
        """Open mesh of the kept indices, one tensor per axis; an axis that is not cut has index 0
        only.
        """
        return _outer_indices([self.indices.get(axis, (0,)) for axis in self.layout.axes])

    @property
    def _shard_sizes(self) -> dict[str, int]:
        return {**self.sizes, **{axis: len(places) for axis, places in self.indices.items()}}


def _outer_indices(rows: Sequence[Sequence[int]]) -> tuple[Tensor, ...]:
    """Return an open mesh, as numpy.ix_ does."""
    return tuple(
        torch.tensor(list(row)).view(-1, *[1] * (len(rows) - n - 1)) for n, row in enumerate(rows)
    )


@dataclass(frozen=True)
class ModelShard:
    """One rank's shard: a spec with fewer heads and narrower feed-forwards, and its piece of each
    tensor.
    """

    spec: ModelSpec
    pieces: Mapping[str, TensorShard]


def partition_model(model_spec: ModelSpec, num_ranks: int) -> tuple[ModelShard, ...]:
    """Divide a model among `num_ranks` ranks: output heads with the queries, keys and values that
    they need, and the hidden units of feed-forwards.

    Tensors without such an axis are replicated. If a size is not divisible, some ranks get one head
    or unit more.

    >>> import headwise as hw
    >>> config = {
    ...     "model_type": "llama",
    ...     "hidden_size": 8,
    ...     "intermediate_size": 6,
    ...     "num_attention_heads": 4,
    ... }
    >>> config |= {"num_key_value_heads": 2, "num_hidden_layers": 1, "vocab_size": 11}
    >>> first, second = partition_model(hw.families.read_model_spec(config), 2)
    >>> first.spec.stacks[0].layers[0].attention.heads
    Heads.grouped(q=2, kv=1, dim=2)
    >>> second.pieces["decoder.0.attention.project.k"].indices
    {'kv': (1,)}
    """
    cuts = {
        name: partition_heads(name, spec, num_ranks) for name, spec in model_spec.attention_specs()
    }
    shards = list[ModelShard]()
    for rank in range(num_ranks):
        own = {name: cut[rank] for name, cut in cuts.items()}
        stacks = []
        for stack in model_spec.stacks:
            blocks = [
                _partition_block(block, f"{stack.name}.{depth}", rank, num_ranks, own)
                for depth, block in enumerate(stack.layers)
            ]
            stacks.append(replace(stack, runs=group_blocks(blocks)))
        pieces = {
            w.name: TensorShard(w.layout, w.axis_sizes, _kept_indices(w, rank, num_ranks, own))
            for w in model_spec.weights()
        }
        shards.append(ModelShard(replace(model_spec, stacks=tuple(stacks)), pieces))
    return tuple(shards)


def partition_heads(name: str, spec: AttentionSpec, num_ranks: int) -> list[KeptHeads]:
    """Divide the heads of a layer among `num_ranks` ranks so that no rank needs a score head of
    another.
    """
    groups = find_independent_heads(spec)
    if len(groups) < num_ranks:
        raise SpecError(f"{name}: {_too_few_groups_message(spec, len(groups), num_ranks)}")
    heads_of_ranks = list[KeptHeads]()
    for rank in range(num_ranks):
        own = [groups[n] for n in _range_of_rank(len(groups), rank, num_ranks)]
        heads_of_ranks.append(KeptHeads.from_spec(spec, list(chain.from_iterable(own))))
    return heads_of_ranks


def find_independent_heads(spec: AttentionSpec) -> list[list[int]]:
    """Return groups of output heads that have no score head in common, so that they can be computed
    on different ranks.

    >>> import headwise as hw
    >>> find_independent_heads(
    ...     hw.design(model=8, heads=4, modifiers=(hw.parts.DynamicComposition(groups=2),))
    ... )
    [[0, 1], [2, 3]]
    """
    groups: list[tuple[list[int], frozenset[int]]] = []
    for out in range(len(spec.score_head_of_output)):
        required = spec.required_score_heads(out)
        overlapping = [group for group in groups if group[1] & required]
        groups = [group for group in groups if not group[1] & required]
        outs = sorted([out, *chain.from_iterable(outs for outs, _ in overlapping)])
        groups.append((outs, required.union(*(needed for _, needed in overlapping))))
    return sorted(outs for outs, _ in groups)


def _too_few_groups_message(spec: AttentionSpec, groups: int, count: int) -> str:
    outs = len(spec.score_head_of_output)
    score_heads = range(spec.heads.q)
    if groups == outs:
        return (
            f"cannot divide {pluralise(outs, 'head')} among {count} ranks; use tensor={outs} "
            "or less"
        )
    mixing_parts = [
        name
        for name, part in spec.parts()
        if any(len(part.required_score_heads(spec, frozenset([h]))) > 1 for h in score_heads)
    ]
    problem = (
        f"{' and '.join(mixing_parts)} join{'s' * (len(mixing_parts) == 1)} the scores of "
        f"{outs} heads"
    )
    if groups == 1:
        return (
            f"{problem}, so that none can be computed without the others; use data= or "
            "context= instead of tensor="
        )
    return (
        f"{problem} in {groups} groups, which cannot be divided among {count} ranks; use "
        f"tensor={groups} or less"
    )


def _partition_block(
    block: BlockSpec, name: str, rank: int, count: int, cuts: Mapping[str, KeptHeads]
) -> BlockSpec:
    own = {role: cuts[f"{name}.{role}"].spec for role in block.attention_specs}
    feed = block.feed
    if isinstance(feed, ExpertsSpec):
        shared = feed.shared and _partition_feed_forward(feed.shared, name, rank, count)
        feed = replace(
            feed, expert=_partition_feed_forward(feed.expert, name, rank, count), shared=shared
        )
    elif feed is not None:
        feed = _partition_feed_forward(feed, name, rank, count)
    return replace(block, **own, feed=feed)


def _partition_feed_forward(
    feed: FeedForwardSpec, name: str, rank: int, count: int
) -> FeedForwardSpec:
    if feed.hidden < count:
        problem = f"{name}.feed: {feed.hidden} hidden units cannot be divided among {count} ranks"
        raise SpecError(f"{problem}; use tensor={feed.hidden} or less")
    return replace(feed, hidden=len(_range_of_rank(feed.hidden, rank, count)))


def _range_of_rank(size: int, rank: int, count: int) -> tuple[int, ...]:
    return tuple(range(rank * size // count, (rank + 1) * size // count))


def _kept_indices(
    w: WeightSpec, rank: int, count: int, cuts: Mapping[str, KeptHeads]
) -> dict[str, tuple[int, ...]]:
    """Return the indices of a tensor that a rank holds, along each axis that is cut."""
    sublayer = ".".join(w.name.split(".")[:3])
    by_axis: IndicesByAxis = cuts[sublayer].by_axis if sublayer in cuts else {}
    if w.role == "feed":
        by_axis = {}
        if "hidden" in w.layout.axes:
            by_axis = {"hidden": _range_of_rank(w.axis_sizes["hidden"], rank, count)}
    return {axis: indices for axis, indices in by_axis.items() if axis in w.layout.axes}


def count_holders(shards: Sequence[TensorShard]) -> Tensor:
    """Count the ranks that hold each element of a tensor; axes that are not cut_axes have size 1 in
    the result.

    >>> both = AxisLayout.parse("kv model"), {"kv": 2, "model": 5}
    >>> count_holders(
    ...     [TensorShard(*both, {"kv": (0,)}), TensorShard(*both, {"kv": (0, 1)})]
    ... ).tolist()
    [[2], [1]]
    """
    layout = shards[0].layout
    sizes = shards[0].sizes
    cut_axes = shards[0].indices
    shape = [
        size if axis in cut_axes else 1
        for axis, size in zip(layout.axes, layout.unmerged_shape(sizes), strict=True)
    ]
    num_holders = torch.zeros(shape, dtype=torch.int64)
    for piece in shards:
        num_holders[piece.cut_indices] += 1
    return num_holders
