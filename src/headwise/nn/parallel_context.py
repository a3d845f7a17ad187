"""With whom a layer shares its work: with nobody, unless a model is spread over several ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from ..interfaces.core_types import AuxLosses
from ..masking.sequence_info import SequenceInfo


class ParallelContext(ABC):
    """Ranks that hold the other heads of a layer, or the other tokens of its rows.

    Each computes a part of what the layer says, and the parts are added up: so the gradient of anything that several
    of them hold is the sum of what each finds. `first` is the one that adds what is added once, such as an output
    bias; `spans` is over how many of them the tokens of a row are spread.
    """

    adds_output_bias: bool = True
    num_token_shards: int = 1

    @abstractmethod
    def copy_to_heads(self, x: Tensor) -> Tensor:
        """x, on its way to the heads in hand; its gradient comes back from the heads of all."""

    @abstractmethod
    def reduce_from_heads(self, y: Tensor) -> Tensor:
        """What the heads of all say, from what those in hand say."""

    @abstractmethod
    def gather_tokens(self, entry: dict[str, Tensor], at: SequenceInfo) -> tuple[dict[str, Tensor], SequenceInfo]:
        """What the tokens of all leave behind [B, tokens, ...], and where these stand, from those in hand."""

    @abstractmethod
    def head_local_rng(self, training: bool) -> AbstractContextManager[None]:
        """Where random numbers are drawn for the heads in hand alone."""

    @abstractmethod
    def aux_losses(self, ledger: AuxLosses) -> AuxLosses:
        """The same ledger, for parts that see some of the heads and tokens."""

    @abstractmethod
    def without_token_shards(self) -> ParallelContext:
        """Those who hold other heads alone."""


class SingleProcess(ParallelContext):
    """Nobody: every head and every token is here."""

    def copy_to_heads(self, x: Tensor) -> Tensor:
        return x

    def reduce_from_heads(self, y: Tensor) -> Tensor:
        return y

    def gather_tokens(self, entry: dict[str, Tensor], at: SequenceInfo) -> tuple[dict[str, Tensor], SequenceInfo]:
        return entry, at

    def head_local_rng(self, training: bool) -> AbstractContextManager[None]:
        return NO_CONTEXT

    def aux_losses(self, ledger: AuxLosses) -> AuxLosses:
        return ledger

    def without_token_shards(self) -> ParallelContext:
        return self


NO_CONTEXT = nullcontext()
SINGLE_PROCESS = SingleProcess()


class HasParallelContext:
    """What may have peers; whoever spreads a model says which."""

    parallel: ParallelContext = SINGLE_PROCESS
