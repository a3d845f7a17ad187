"""Attention layers that divide heads (tensor parallelism) or tokens (context parallelism) among
ranks, and the messages between the ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, Literal, Self, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ...attention.interfaces.core_types import (
    AuxLosses,
    HasParallelContext,
    ParallelContext,
)
from ...attention.masking.sequence_info import SequenceInfo
from ...util.errors import SpecError
from ..batch import IGNORE_INDEX, Batch
from ..model_spec import ModelSpec

# gathered sequences to remember: both stacks, in this forward call and the previous one
MAX_CACHED_SEQUENCES = 4


class TensorContextParallel(ParallelContext):
    """Divides heads within `tensor_group` and the tokens of a row within `context_group`.

    Rank r of n holds the r-th of n equal runs of a row.
    """

    def __init__(
        self,
        tensor_group: CollectiveGroup | None = None,
        context_group: CollectiveGroup | None = None,
    ) -> None:
        self.tensor = tensor_group
        self.context = context_group
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
        # one message per dtype
        for dtype in dict.fromkeys(tensor.dtype for tensor in entry.values()):
            same_dtype = {name: tensor for name, tensor in entry.items() if tensor.dtype == dtype}
            flat = torch.cat([tensor.flatten(2) for tensor in same_dtype.values()], -1)
            gathered = join_runs(_apply_collective(AllGather, flat, self.context))
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
        if training and self.tensor:
            return self._rank_rng(self.tensor.rank)
        return super().head_local_rng(training)

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
            first = at.start - group.rank * at.count
            if first < 0:
                raise ValueError(
                    f"rank {group.rank} of {group.size} got {at.count} tokens from position "
                    f"{at.start}, not its shard; pass the tokens= that "
                    "distributed.parallel_attention.shard_tokens returns"
                )
            return SequenceInfo.contiguous(first, group.size * at.count, at.position.device)
        for own, sequence in self._gathered_sequences:
            if own is at:
                return sequence
        gathered = join_runs(group.all_gather(torch.stack([at.position, at.segment], -1)))
        # The constructor checks that no two ranks hold the same position, which no single rank can
        # detect.
        sequence = SequenceInfo(gathered[..., 0], gathered[..., 1])
        self._gathered_sequences = [
            (at, sequence),
            *self._gathered_sequences[: MAX_CACHED_SEQUENCES - 1],
        ]
        return sequence


def join_runs(gathered: Tensor) -> Tensor:
    """Reshape gathered [ranks, B, T, ...] to rows [B, ranks * T, ...]."""
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
    """Raise SpecError for GRUs, and for image and speech models: their embedding makes tokens."""
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


def shard_tokens(batch: Batch, group: CollectiveGroup) -> Batch:
    """Return this rank's tokens of a batch that all ranks have.

    Rows are padded so that all ranks hold equally many tokens. If each row has a single label, the
    first rank keeps it.
    """
    x, tokens = _shard_sequence(batch.x, batch.tokens, group)
    labels = batch.labels
    if labels.dim() == 2:
        labels = _select_run(labels, group, IGNORE_INDEX)
    elif group.rank:
        labels = torch.full_like(labels, IGNORE_INDEX)
    source = batch.source
    source_sequence = batch.source_tokens
    if source is not None:
        source, source_sequence = _shard_sequence(source, source_sequence, group)
    return replace(
        batch, x=x, labels=labels, tokens=tokens, source=source, source_tokens=source_sequence
    )


def _shard_sequence(
    x: Tensor, tokens: SequenceInfo | None, group: CollectiveGroup
) -> tuple[Tensor, SequenceInfo]:
    """Return this rank's tokens of an encoder or decoder input, and their positions."""
    own = _select_run(x, group, 0)
    length = own.shape[1]
    sequence = SequenceInfo.contiguous(0, x.shape[1], x.device) if tokens is None else tokens
    if sequence.start is not None and length * group.size == x.shape[1]:
        first = sequence.start + group.rank * length
        return own, SequenceInfo.contiguous(first, length, x.device)
    position = _select_run(sequence.position, group, 0)
    segment = _select_run(sequence.segment, group, -1)
    return own, SequenceInfo(position, segment, checked=True)


def _select_run(x: Tensor, group: CollectiveGroup, fill: int) -> Tensor:
    """Select this rank's run of tokens of x [B, T, ...], padded with `fill`."""
    length = -(-x.shape[1] // group.size)
    missing = length * group.size - x.shape[1]
    padded = F.pad(x, (*[0] * (2 * (x.dim() - 2)), 0, missing), value=fill)
    return padded.narrow(1, group.rank * length, length)


# torch 2.13 renamed both and deprecated their old names.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class CollectiveGroup:
    """Process group of `size` ranks, in which this process has index `rank`."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # a copied model communicates with the same ranks

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of x over the ranks."""
        y = x.contiguous().clone()
        dist.all_reduce(y, group=self.group)
        return y

    def all_gather(self, x: Tensor) -> Tensor:
        """Return x of every rank, stacked as [ranks, *x.shape]."""
        y = x.new_empty(self.size, *x.shape)
        _all_gather(y.flatten(0, 1), x.contiguous(), group=self.group)
        return y


class CopyToGroup(torch.autograd.Function):
    """Identity in the forward pass; the backward pass sums the gradient over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: CollectiveGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.group.all_reduce(grads[0]), None


class ReduceFromGroup(torch.autograd.Function):
    """All-reduce in the forward pass; identity in the backward pass, because every rank has the
    same gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: CollectiveGroup) -> Tensor:
        return group.all_reduce(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class AllReduceSum(torch.autograd.Function):
    """All-reduce in both passes, for a sum from which every rank computes its own loss."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: CollectiveGroup) -> Tensor:
        ctx.group = group
        return group.all_reduce(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.group.all_reduce(grads[0]), None


class AllGather(torch.autograd.Function):
    """All-gather [ranks, *x.shape] in the forward pass; reduce-scatter of the gradient in the
    backward pass.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: CollectiveGroup) -> Tensor:
        ctx.group = group
        return group.all_gather(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        x = grads[0]
        y = x.new_empty(x.shape[1:])
        _reduce_scatter(y, x.contiguous().flatten(0, 1), group=ctx.group.group)
        return y, None


# --- Gradients summed over ranks in buckets, overlapped with the backward pass --------------------

# per bucket: small enough that most buckets are sent while the backward pass still runs
BUCKET_BYTES = 4 << 20


class GradientBuckets:
    """Sums the gradients of some parameters over a group of ranks, one all-reduce per bucket.

    Gradients arrive from the last layer to the first, and buckets are sent in that order on every
    rank, whichever is ready first. Each message ends with one flag per parameter: a parameter that
    no rank used keeps grad=None.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        group: dist.ProcessGroup | None,
        max_bytes: int = BUCKET_BYTES,
    ) -> None:
        self.group = group
        self._buckets = (
            list(_make_buckets(reversed(list(params)), max_bytes)) if group is not None else []
        )
        self._pending: list[tuple[Tensor, Any]] = []
        self._num_missing: list[int] = []
        for index, bucket in enumerate(self._buckets):
            for param in bucket:
                param.register_post_accumulate_grad_hook(
                    lambda _, index=index: self._on_gradient(index)
                )

    def begin_final_backward(self) -> None:
        """Send each bucket as soon as it is full during the next backward pass, the last one of
        this step.
        """
        self._pending = []
        self._num_missing = list(map(len, self._buckets))

    def finish(self) -> None:
        """Send the remaining buckets, wait for all of them and store the summed gradients."""
        while len(self._pending) < len(self._buckets):
            self._send_bucket()
        for bucket, (message, work) in zip(self._buckets, self._pending, strict=True):
            work.wait()
            *flat, has_grad = message.split([*(p.numel() for p in bucket), len(bucket)])
            for index, (param, sums) in enumerate(zip(bucket, flat, strict=True)):
                if param.grad is not None or bool(has_grad[index]):
                    param.grad = sums.view(param.shape)
        self._pending = []
        self._num_missing = []

    def _on_gradient(self, index: int) -> None:
        if self._num_missing:
            self._num_missing[index] -= 1
            while (
                len(self._pending) < len(self._num_missing)
                and self._num_missing[len(self._pending)] == 0
            ):
                self._send_bucket()

    def _send_bucket(self) -> None:
        bucket = self._buckets[len(self._pending)]
        flat = [p.new_zeros(p.numel()) if p.grad is None else p.grad.reshape(-1) for p in bucket]
        has_grad = flat[0].new_tensor([p.grad is not None for p in bucket])
        message = torch.cat([*flat, has_grad])
        self._pending.append((message, dist.all_reduce(message, group=self.group, async_op=True)))


def _make_buckets(params: Iterable[nn.Parameter], max_bytes: int) -> Iterator[list[nn.Parameter]]:
    """Yield consecutive parameters of one dtype, up to `max_bytes` per bucket."""
    bucket: list[nn.Parameter] = []
    for param in params:
        filled = sum(p.numel() for p in bucket)
        if bucket and (
            (filled + param.numel()) * param.itemsize > max_bytes or param.dtype != bucket[0].dtype
        ):
            yield bucket
            bucket = []
        bucket.append(param)
    if bucket:
        yield bucket
