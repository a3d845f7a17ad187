"""A layer whose heads are on several ranks, or the tokens of its rows, or both."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Literal, cast

import torch
from torch import Tensor, nn

from ..errors import SpecError, suggest
from ..interfaces.core_types import AuxLosses
from ..masking.sequence_info import SequenceInfo
from ..nn.parallel_context import SINGLE_PROCESS, HasParallelContext, ParallelContext
from .collectives import AllGather, AllReduceSum, CollectiveGroup, CopyToGroup, ReduceFromGroup

TOKEN_ORDERS = ("runs", "zigzag")
MAX_CACHED_SEQUENCES = 4  # sets of tokens whose places are remembered: those of both stacks, and of a call before


class TensorContextParallel(ParallelContext):
    """Heads are divided among the ranks of `tensor`, the tokens of a row among those of `context`.

    order="runs": rank r of n holds the r-th of n equal runs of a row; "zigzag": of 2 n runs the r-th and the r-th
    from the end, so that under a causal pattern all have as many pairs.
    """

    def __init__(
        self,
        tensor_group: CollectiveGroup | None = None,
        context_group: CollectiveGroup | None = None,
        token_order: str = "runs",
    ) -> None:
        if token_order not in TOKEN_ORDERS:
            raise SpecError(f"order={token_order!r} is unknown; {suggest(token_order, TOKEN_ORDERS)}")
        self.tensor, self.context, self.order = tensor_group, context_group, token_order
        self.adds_output_bias = tensor_group is None or tensor_group.rank == 0
        self.num_token_shards = 1 if context_group is None else context_group.size
        self._gathered_sequences: list[tuple[SequenceInfo, SequenceInfo]] = []

    def copy_to_heads(self, x: Tensor) -> Tensor:
        return x if self.tensor is None else _apply_collective(CopyToGroup, x, self.tensor)

    def reduce_from_heads(self, y: Tensor) -> Tensor:
        return y if self.tensor is None else _apply_collective(ReduceFromGroup, y, self.tensor)

    def gather_tokens(self, entry: dict[str, Tensor], at: SequenceInfo) -> tuple[dict[str, Tensor], SequenceInfo]:
        if self.context is None:
            return entry, at
        told, joined = self._gather_sequence(at, self.context), dict[str, Tensor]()
        for dtype in dict.fromkeys(held.dtype for held in entry.values()):  # one message for all of a kind
            some = {name: held for name, held in entry.items() if held.dtype == dtype}
            flat = torch.cat([held.flatten(2) for held in some.values()], -1)
            both = restore_token_order(_apply_collective(AllGather, flat, self.context), self.order)
            widths = [held.flatten(2).shape[-1] for held in some.values()]
            for (name, held), part in zip(some.items(), both.split(widths, -1), strict=True):
                joined[name] = part.unflatten(-1, held.shape[2:])
        return {name: joined[name] for name in entry}, told

    @contextmanager
    def _rank_rng(self, rank: int) -> Iterator[None]:
        """A stream that follows from torch's own, which all of the group have alike and go on with."""
        seed = int(torch.randint(2**62, ())) + rank
        cards = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
        with torch.random.fork_rng(cards):
            torch.default_generator.manual_seed(seed)
            if cards:
                torch.cuda.manual_seed(seed)
            yield

    def head_local_rng(self, training: bool) -> AbstractContextManager[None]:
        return self._rank_rng(self.tensor.rank) if training and self.tensor else SINGLE_PROCESS.head_local_rng(training)

    def aux_losses(self, ledger: AuxLosses) -> AuxLosses:
        return replace(ledger, group=self)

    def without_token_shards(self) -> ParallelContext:
        return TensorContextParallel(self.tensor)

    def sum_over(self, x: Tensor, over: Literal["heads", "tokens"]) -> Tensor:
        """The sum over all heads, or all tokens."""
        wire = {"heads": self.tensor, "tokens": self.context}[over]
        return x if wire is None else _apply_collective(AllReduceSum, x, wire)

    def own_share(self, value: Tensor) -> Tensor:
        """A term that all have alike, so that the gradients of all add up to its own, and over tokens the values."""
        value = value / self.num_token_shards
        each = value / (1 if self.tensor is None else self.tensor.size)
        return each + (value - each).detach()

    def _gather_sequence(self, at: SequenceInfo, wire: CollectiveGroup) -> SequenceInfo:
        """Where the tokens of all stand; asked once, however many layers are told the same."""
        if at.start is not None:
            return self._contiguous_sequence(at, at.start, wire)
        for own, told in self._gathered_sequences:
            if own is at:
                return told
        both = restore_token_order(wire.beside(torch.stack([at.position, at.segment], -1)), self.order)
        told = SequenceInfo(
            both[..., 0], both[..., 1]
        )  # refuses that two stand at one place, which nobody else could see
        self._gathered_sequences = [(at, told), *self._gathered_sequences[: MAX_CACHED_SEQUENCES - 1]]
        return told

    def _contiguous_sequence(self, at: SequenceInfo, start: int, wire: CollectiveGroup) -> SequenceInfo:
        first = start - wire.rank * at.count
        if first < 0 or self.order != "runs":
            raise ValueError(
                f"rank {wire.rank} of {wire.size} takes its {at.count} tokens for the first of their rows; "
                "hand over the tokens= that spread.context.part_of gives"
            )
        return SequenceInfo.contiguous(first, wire.size * at.count, at.position.device)


def restore_token_order(gathered: Tensor, token_order: str) -> Tensor:
    """[ranks, B, T, ...] as [B, ranks * T, ...], tokens as they stand in their row.

    >>> restore_token_order(torch.tensor([[[0, 3]], [[1, 2]]]), "zigzag").tolist()
    [[0, 1, 2, 3]]
    """
    if token_order == "zigzag":
        if gathered.shape[2] % 2:
            raise ValueError(f"{gathered.shape[2]} tokens are no two runs; hand over what spread.context.part_of gives")
        halves = gathered.unflatten(2, (2, -1))
        gathered = torch.cat([halves[:, :, 0], halves[:, :, 1].flip(0)])
    return gathered.movedim(0, 1).flatten(1, 2)


def set_parallel_context(net: nn.Module, parallel: ParallelContext) -> None:
    """Tell everything in a model that may have peers who they are."""
    for module in net.modules():
        if isinstance(module, HasParallelContext):
            module.parallel = parallel


@contextmanager
def use_whole_rows(net: nn.Module) -> Iterator[None]:
    """A model whose rows are whole again, on every rank: to evaluate, or to generate; heads stay divided."""
    before = [(module, module.parallel) for module in net.modules() if isinstance(module, HasParallelContext)]
    for module, peers in before:
        module.parallel = peers.without_token_shards()
    try:
        yield
    finally:
        for module, peers in before:
            module.parallel = peers


def _apply_collective(function: type[torch.autograd.Function], x: Tensor, wire: CollectiveGroup) -> Tensor:
    return cast(Tensor, function.apply(x, wire))
