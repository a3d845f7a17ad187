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
from .collectives import Beside, Enter, Leave, Total, Wire

ORDERS = ("runs", "zigzag")
HELD = 4  # sets of tokens whose places are remembered: those of both stacks, and of a call before


class Ranks(ParallelContext):
    """Heads are divided among the ranks of `tensor`, the tokens of a row among those of `context`.

    order="runs": rank r of n holds the r-th of n equal runs of a row; "zigzag": of 2 n runs the r-th and the r-th
    from the end, so that under a causal pattern all have as many pairs.
    """

    def __init__(self, tensor: Wire | None = None, context: Wire | None = None, order: str = "runs") -> None:
        if order not in ORDERS:
            raise SpecError(f"order={order!r} is unknown; {suggest(order, ORDERS)}")
        self.tensor, self.context, self.order = tensor, context, order
        self.adds_output_bias = tensor is None or tensor.rank == 0
        self.num_token_shards = 1 if context is None else context.size
        self._told: list[tuple[SequenceInfo, SequenceInfo]] = []

    def copy_to_heads(self, x: Tensor) -> Tensor:
        return x if self.tensor is None else _run(Enter, x, self.tensor)

    def reduce_from_heads(self, y: Tensor) -> Tensor:
        return y if self.tensor is None else _run(Leave, y, self.tensor)

    def gather_tokens(self, entry: dict[str, Tensor], at: SequenceInfo) -> tuple[dict[str, Tensor], SequenceInfo]:
        if self.context is None:
            return entry, at
        told, joined = self._tokens(at, self.context), dict[str, Tensor]()
        for dtype in dict.fromkeys(held.dtype for held in entry.values()):  # one message for all of a kind
            some = {name: held for name, held in entry.items() if held.dtype == dtype}
            flat = torch.cat([held.flatten(2) for held in some.values()], -1)
            both = in_order(_run(Beside, flat, self.context), self.order)
            widths = [held.flatten(2).shape[-1] for held in some.values()]
            for (name, held), part in zip(some.items(), both.split(widths, -1), strict=True):
                joined[name] = part.unflatten(-1, held.shape[2:])
        return {name: joined[name] for name in entry}, told

    @contextmanager
    def _drawing(self, rank: int) -> Iterator[None]:
        """A stream that follows from torch's own, which all of the group have alike and go on with."""
        seed = int(torch.randint(2**62, ())) + rank
        cards = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
        with torch.random.fork_rng(cards):
            torch.default_generator.manual_seed(seed)
            if cards:
                torch.cuda.manual_seed(seed)
            yield

    def head_local_rng(self, training: bool) -> AbstractContextManager[None]:
        return self._drawing(self.tensor.rank) if training and self.tensor else SINGLE_PROCESS.head_local_rng(training)

    def aux_losses(self, ledger: AuxLosses) -> AuxLosses:
        return replace(ledger, group=self)

    def without_token_shards(self) -> ParallelContext:
        return Ranks(self.tensor)

    def whole(self, x: Tensor, over: Literal["heads", "tokens"]) -> Tensor:
        """The sum over all heads, or all tokens."""
        wire = {"heads": self.tensor, "tokens": self.context}[over]
        return x if wire is None else _run(Total, x, wire)

    def term(self, value: Tensor) -> Tensor:
        """A term that all have alike, so that the gradients of all add up to its own, and over tokens the values."""
        value = value / self.num_token_shards
        each = value / (1 if self.tensor is None else self.tensor.size)
        return each + (value - each).detach()

    def _tokens(self, at: SequenceInfo, wire: Wire) -> SequenceInfo:
        """Where the tokens of all stand; asked once, however many layers are told the same."""
        if at.start is not None:
            return self._runs(at, at.start, wire)
        for own, told in self._told:
            if own is at:
                return told
        both = in_order(wire.beside(torch.stack([at.position, at.segment], -1)), self.order)
        told = SequenceInfo(
            both[..., 0], both[..., 1]
        )  # refuses that two stand at one place, which nobody else could see
        self._told = [(at, told), *self._told[: HELD - 1]]
        return told

    def _runs(self, at: SequenceInfo, start: int, wire: Wire) -> SequenceInfo:
        first = start - wire.rank * at.count
        if first < 0 or self.order != "runs":
            raise ValueError(
                f"rank {wire.rank} of {wire.size} takes its {at.count} tokens for the first of their rows; "
                "hand over the tokens= that spread.context.part_of gives"
            )
        return SequenceInfo.contiguous(first, wire.size * at.count, at.position.device)


def in_order(both: Tensor, order: str) -> Tensor:
    """[ranks, B, T, ...] as [B, ranks * T, ...], tokens as they stand in their row.

    >>> in_order(torch.tensor([[[0, 3]], [[1, 2]]]), "zigzag").tolist()
    [[0, 1, 2, 3]]
    """
    if order == "zigzag":
        if both.shape[2] % 2:
            raise ValueError(f"{both.shape[2]} tokens are no two runs; hand over what spread.context.part_of gives")
        halves = both.unflatten(2, (2, -1))
        both = torch.cat([halves[:, :, 0], halves[:, :, 1].flip(0)])
    return both.movedim(0, 1).flatten(1, 2)


def set_peers(net: nn.Module, peers: ParallelContext) -> None:
    """Tell everything in a model that may have peers who they are."""
    for module in net.modules():
        if isinstance(module, HasParallelContext):
            module.parallel = peers


@contextmanager
def whole_rows(net: nn.Module) -> Iterator[None]:
    """A model whose rows are whole again, on every rank: to evaluate, or to generate; heads stay divided."""
    before = [(module, module.parallel) for module in net.modules() if isinstance(module, HasParallelContext)]
    for module, peers in before:
        module.parallel = peers.without_token_shards()
    try:
        yield
    finally:
        for module, peers in before:
            module.parallel = peers


def _run(function: type[torch.autograd.Function], x: Tensor, wire: Wire) -> Tensor:
    return cast(Tensor, function.apply(x, wire))
