"""With whom a layer shares its work: with nobody, unless a model is spread over several ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from .terms import Ledger
from .tokens import Tokens


class Peers(ABC):
    """Ranks that hold the other heads of a layer, or the other tokens of its rows.

    Each computes a part of what the layer says, and the parts are added up: so the gradient of anything that several
    of them hold is the sum of what each finds. `first` is the one that adds what is added once, such as an output
    bias; `spans` is over how many of them the tokens of a row are spread.
    """

    first: bool = True
    spans: int = 1

    @abstractmethod
    def enter(self, x: Tensor) -> Tensor:
        """x, on its way to the heads in hand; its gradient comes back from the heads of all."""

    @abstractmethod
    def leave(self, y: Tensor) -> Tensor:
        """What the heads of all say, from what those in hand say."""

    @abstractmethod
    def gather(self, entry: dict[str, Tensor], at: Tokens) -> tuple[dict[str, Tensor], Tokens]:
        """What the tokens of all leave behind [B, tokens, ...], and where these stand, from those in hand."""

    @abstractmethod
    def apart(self, training: bool) -> AbstractContextManager[None]:
        """Where random numbers are drawn for the heads in hand alone."""

    @abstractmethod
    def ledger(self, ledger: Ledger) -> Ledger:
        """The same ledger, for parts that see some of the heads and tokens."""

    @abstractmethod
    def of_whole_rows(self) -> Peers:
        """Those who hold other heads alone."""


class Alone(Peers):
    """Nobody: every head and every token is here."""

    def enter(self, x: Tensor) -> Tensor:
        return x

    def leave(self, y: Tensor) -> Tensor:
        return y

    def gather(self, entry: dict[str, Tensor], at: Tokens) -> tuple[dict[str, Tensor], Tokens]:
        return entry, at

    def apart(self, training: bool) -> AbstractContextManager[None]:
        return NOTHING

    def ledger(self, ledger: Ledger) -> Ledger:
        return ledger

    def of_whole_rows(self) -> Peers:
        return self


NOTHING = nullcontext()
ALONE = Alone()


class Peered:
    """What may have peers; whoever spreads a model says which."""

    peers: Peers = ALONE
