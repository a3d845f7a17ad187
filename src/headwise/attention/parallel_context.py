"""How one layer is divided over processes: not at all, unless a model runs in tensor or context
parallelism.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from .interfaces.core_types import AuxLosses
from .masking.sequence_info import SequenceInfo


class ParallelContext(ABC):
    """The ranks that hold the other heads of a layer, or the other tokens of its rows.

    Each rank computes a partial output and the partial outputs are summed, so the gradient of
    anything that several ranks hold is the sum of their gradients. `adds_output_bias` is true on
    one rank; `num_token_shards` is the number of ranks that share the tokens of a row.
    """

    adds_output_bias: bool = True
    num_token_shards: int = 1

    @abstractmethod
    def copy_to_heads(self, x: Tensor) -> Tensor:
        """x unchanged; its gradient is summed over the ranks that hold other heads."""

    @abstractmethod
    def reduce_from_heads(self, y: Tensor) -> Tensor:
        """The sum over ranks of their partial outputs."""

    @abstractmethod
    def gather_tokens(
        self, entry: dict[str, Tensor], at: SequenceInfo
    ) -> tuple[dict[str, Tensor], SequenceInfo]:
        """The kv entry [B, tokens, ...] and positions of the tokens of all ranks, from those of
        this rank.
        """

    @abstractmethod
    def head_local_rng(self, training: bool) -> AbstractContextManager[None]:
        """A context in which random numbers are drawn for the heads of this rank."""

    @abstractmethod
    def aux_losses(self, losses: AuxLosses | None) -> AuxLosses | None:
        """Where parts that see only some heads or tokens add their auxiliary losses; None to
        collect none.
        """

    @abstractmethod
    def without_token_shards(self) -> ParallelContext:
        """The context without context parallelism."""


class SingleProcess(ParallelContext):
    """One process: every head and every token is here."""

    def copy_to_heads(self, x: Tensor) -> Tensor:
        return x

    def reduce_from_heads(self, y: Tensor) -> Tensor:
        return y

    def gather_tokens(
        self, entry: dict[str, Tensor], at: SequenceInfo
    ) -> tuple[dict[str, Tensor], SequenceInfo]:
        return entry, at

    def head_local_rng(self, training: bool) -> AbstractContextManager[None]:
        return NO_CONTEXT

    def aux_losses(self, losses: AuxLosses | None) -> AuxLosses | None:
        return losses

    def without_token_shards(self) -> ParallelContext:
        return self


NO_CONTEXT = nullcontext()
SINGLE_PROCESS = SingleProcess()


class HasParallelContext:
    """A layer that can be divided over ranks; `parallel` is set when a model is parallelised."""

    parallel: ParallelContext = SINGLE_PROCESS
