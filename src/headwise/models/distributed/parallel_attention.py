"""Attention layers whose heads (tensor parallelism) or tokens (context parallelism) are divided
among ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...attention.interfaces.core_types import AuxLosses
from ...attention.masking.sequence_info import SequenceInfo
from ...attention.parallel_context import SINGLE_PROCESS, HasParallelContext, ParallelContext
from ...util.errors import SpecError, suggest
from ..batch import IGNORE_INDEX, Batch
from ..model_spec import ModelSpec
from .collectives import AllGather, AllReduceSum, CollectiveGroup, CopyToGroup, ReduceFromGroup

TOKEN_ORDERS = ("runs", "zigzag")
# gathered sequences to remember: those of both stacks, in this forward call and the previous one
MAX_CACHED_SEQUENCES = 4


class TensorContextParallel(ParallelContext):
    """Divides heads among the ranks of `tensor_group` and the tokens of a row among those of
    `context_group`.

    token_order="runs": rank r of n holds the r-th of n equal runs of a row. token_order="zigzag":
    of 2 n runs, rank r holds the r-th from the start and the r-th from the end, so that all have
    equally many pairs under a causal pattern.
    """

    def __init__(
        self,
        tensor_group: CollectiveGroup | None = None,
        context_group: CollectiveGroup | None = None,
        token_order: str = "runs",
    ) -> None:
        if token_order not in TOKEN_ORDERS:
            raise SpecError(
                f"token_order={token_order!r} is unknown; {suggest(token_order, TOKEN_ORDERS)}"
            )
        self.tensor = tensor_group
        self.context = context_group
        self.order = token_order
        self.adds_output_bias = tensor_group is None or tensor_group.rank == 0
        self.num_token_shards = 1 if context_group is None else context_group.size
        self._gathered_sequences: list[tuple[SequenceInfo, SequenceInfo]] = []

    def copy_to_heads(self, x: Tensor) -> Tensor:
        return x if self.tensor is None else _apply_collective(CopyToGroup, x, self.tensor)

    def reduce_from_heads(self, y: Tensor) -> Tensor:
        return y if self.tensor is None else _apply_collective(ReduceFromGroup, y, self.tensor)

    def gather_tokens(
        self, entry: dict[str, Tensor], at: SequenceInfo
    ) -> tuple[dict[str, Tensor], SequenceInfo]:
        if self.context is None:
            return entry, at
        sequence = self._gather_sequence(at, self.context)
        entry_of_all = dict[str, Tensor]()
        for dtype in dict.fromkeys(
            tensor.dtype for tensor in entry.values()
        ):  # one message per dtype
            same_dtype = {name: tensor for name, tensor in entry.items() if tensor.dtype == dtype}
            flat = torch.cat([tensor.flatten(2) for tensor in same_dtype.values()], -1)
            gathered = restore_token_order(
                _apply_collective(AllGather, flat, self.context), self.order
            )
            widths = [tensor.flatten(2).shape[-1] for tensor in same_dtype.values()]
            for (name, tensor), part in zip(
                same_dtype.items(), gathered.split(widths, -1), strict=True
            ):
                entry_of_all[name] = part.unflatten(-1, tensor.shape[2:])
        return {name: entry_of_all[name] for name in entry}, sequence

    @contextmanager
    def _rank_rng(self, rank: int) -> Iterator[None]:
        """Fork the random state with a seed of this rank, derived from the generator that the group
        has in common.
        """
        seed = int(torch.randint(2**62, ())) + rank
        devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
        with torch.random.fork_rng(devices):
            torch.default_generator.manual_seed(seed)
            if devices:
                torch.cuda.manual_seed(seed)
            yield

    def head_local_rng(self, training: bool) -> AbstractContextManager[None]:
        return (
            self._rank_rng(self.tensor.rank)
            if training and self.tensor
            else SINGLE_PROCESS.head_local_rng(training)
        )

    def aux_losses(self, losses: AuxLosses | None) -> AuxLosses | None:
        return None if losses is None else replace(losses, group=self)

    def without_token_shards(self) -> ParallelContext:
        return TensorContextParallel(self.tensor)

    def sum_over(self, x: Tensor, over: Literal["heads", "tokens"]) -> Tensor:
        """Return the sum of x over the ranks that divide the heads, or the tokens."""
        group = {"heads": self.tensor, "tokens": self.context}[over]
        return x if group is None else _apply_collective(AllReduceSum, x, group)

    def own_share(self, value: Tensor) -> Tensor:
        """Scale a loss term of all ranks so that gradients sum to its own over all ranks, values
        over token ranks.
        """
        value = value / self.num_token_shards
        share = value / (1 if self.tensor is None else self.tensor.size)
        return share + (value - share).detach()

    def _gather_sequence(self, at: SequenceInfo, group: CollectiveGroup) -> SequenceInfo:
        """Return the positions of the tokens of all ranks; cached, because every layer gets the
        same `at`.
        """
        if at.start is not None:
            return self._contiguous_sequence(at, at.start, group)
        for own, sequence in self._gathered_sequences:
            if own is at:
                return sequence
        gathered = restore_token_order(
            group.all_gather(torch.stack([at.position, at.segment], -1)), self.order
        )
        # The constructor checks that no two ranks hold the same position, which no single rank can
        # detect.
        sequence = SequenceInfo(gathered[..., 0], gathered[..., 1])
        self._gathered_sequences = [
            (at, sequence),
            *self._gathered_sequences[: MAX_CACHED_SEQUENCES - 1],
        ]
        return sequence

    def _contiguous_sequence(
        self, at: SequenceInfo, start: int, group: CollectiveGroup
    ) -> SequenceInfo:
        first = start - group.rank * at.count
        if first < 0 or self.order != "runs":
            raise ValueError(
                f"rank {group.rank} of {group.size} got {at.count} tokens from position {start}, "
                "not its shard; "
                "pass the tokens= that distributed.parallel_attention.shard_tokens returns"
            )
        return SequenceInfo.contiguous(first, group.size * at.count, at.position.device)


def restore_token_order(gathered: Tensor, token_order: str) -> Tensor:
    """Reshape gathered [ranks, B, T, ...] to [B, ranks * T, ...] with the tokens in the order of
    their row.

    >>> restore_token_order(torch.tensor([[[0, 3]], [[1, 2]]]), "zigzag").tolist()
    [[0, 1, 2, 3]]
    """
    if token_order == "zigzag":
        if gathered.shape[2] % 2:
            raise ValueError(
                f"cannot split {gathered.shape[2]} tokens into two runs; pass the batch that "
                "shard_tokens returns"
            )
        halves = gathered.unflatten(2, (2, -1))
        gathered = torch.cat([halves[:, :, 0], halves[:, :, 1].flip(0)])
    return gathered.movedim(0, 1).flatten(1, 2)


def set_parallel_context(net: nn.Module, parallel: ParallelContext) -> None:
    """Set the parallel context of every module that supports one."""
    for module in net.modules():
        if isinstance(module, HasParallelContext):
            module.parallel = parallel


@contextmanager
def use_whole_rows(net: nn.Module) -> Iterator[None]:
    """Disable context parallelism inside the block, for evaluation and generation; heads stay
    divided.
    """
    contexts = [
        (module, module.parallel)
        for module in net.modules()
        if isinstance(module, HasParallelContext)
    ]
    for module, parallel in contexts:
        module.parallel = parallel.without_token_shards()
    try:
        yield
    finally:
        for module, parallel in contexts:
            module.parallel = parallel


def _apply_collective(
    function: type[torch.autograd.Function], x: Tensor, group: CollectiveGroup
) -> Tensor:
    return cast(Tensor, function.apply(x, group))


# --- Context parallelism --------------------------------------------------------------------------


def check_context_parallel(spec: ModelSpec) -> None:
    """Raise SpecError for models of images or speech, whose rows become tokens only in the
    embedding, and for GRUs.
    """
    if spec.has_mixer:
        fact = (
            f"{spec.name} has a recurrence or convolution, whose state needs the tokens in "
            "order on one rank"
        )
        raise SpecError(f"{fact}; use data= or tensor= instead of context=")
    for stack in spec.stacks:
        if stack.embedding and stack.embedding.patches:
            raise SpecError(
                f"{stack.name} embeds pixels or frames, so its rows cannot be divided into tokens "
                "beforehand; "
                "use data= or tensor= instead of context="
            )


def positions_of_rank(num_tokens: int, rank: int, num_ranks: int, token_order: str) -> list[int]:
    """Return the positions of a row of `num_tokens` tokens that a rank holds; positions >=
    `num_tokens` are padding.

    >>> positions_of_rank(7, 1, 2, "runs"), positions_of_rank(7, 1, 2, "zigzag")
    ([4, 5, 6, 7], [2, 3, 4, 5])
    """
    runs = {"runs": [rank], "zigzag": [rank, 2 * num_ranks - 1 - rank]}[token_order]
    run_length = -(-num_tokens // (num_ranks * len(runs)))
    return [
        position for run in runs for position in range(run * run_length, (run + 1) * run_length)
    ]


def shard_tokens(batch: Batch, group: CollectiveGroup, token_order: str = "runs") -> Batch:
    """Return this rank's tokens of a batch that all ranks have.

    Rows are padded so that all ranks hold equally many tokens. If each row has a single label, the
    first rank keeps it.
    """
    x, tokens = _shard_sequence(batch.x, batch.tokens, group, token_order)
    labels = batch.labels
    if labels.dim() == 2:
        labels = _select_positions(labels, group, token_order, IGNORE_INDEX)
    elif group.rank:
        labels = torch.full_like(labels, IGNORE_INDEX)
    source = batch.source
    source_sequence = batch.source_tokens
    if source is not None:
        source, source_sequence = _shard_sequence(source, source_sequence, group, token_order)
    return replace(
        batch, x=x, labels=labels, tokens=tokens, source=source, source_tokens=source_sequence
    )


def gather_token_outputs(
    y: Tensor, num_tokens: int, group: CollectiveGroup, token_order: str = "runs"
) -> Tensor:
    """Gather the outputs of every token [B, num_tokens, ...] from those of each rank, without
    gradients.
    """
    return restore_token_order(group.all_gather(y.detach()), token_order)[:, :num_tokens]


def _shard_sequence(
    x: Tensor, tokens: SequenceInfo | None, group: CollectiveGroup, order: str
) -> tuple[Tensor, SequenceInfo]:
    """Return this rank's tokens of an encoder or decoder input, and their positions."""
    own = _select_positions(x, group, order, 0)
    count = x.shape[1]
    sequence = SequenceInfo.contiguous(0, count, x.device) if tokens is None else tokens
    if sequence.start is not None and order == "runs" and own.shape[1] * group.size == count:
        return own, SequenceInfo.contiguous(
            sequence.start + group.rank * own.shape[1], own.shape[1], x.device
        )
    position = _select_positions(sequence.position, group, order, 0)
    segment = _select_positions(sequence.segment, group, order, -1)
    return own, SequenceInfo(position, segment, checked=True)


def _select_positions(x: Tensor, group: CollectiveGroup, order: str, fill: Any) -> Tensor:
    """Select this rank's positions of x [B, T, ...], padded with `fill`."""
    positions = positions_of_rank(x.shape[1], group.rank, group.size, order)
    missing = max(0, max(positions, default=-1) + 1 - x.shape[1])
    padded = F.pad(x, (*[0] * (2 * (x.dim() - 2)), 0, missing), value=fill)
    return padded.index_select(1, torch.tensor(positions, device=x.device))
