"""What a way into attentions is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor, nn

from ...site import Site
from ..watching import Holding, Reading


class Found(NamedTuple):
    """A site, the module that one watches there, and the way that leads to it.

    A module may serve several sites: this one is its call number `call` of the `calls` in a forward.
    """

    site: Site
    module: nn.Module
    route: Route
    call: int = 0
    calls: int = 1


class Route(ABC):
    """One way into attentions."""

    @abstractmethod
    def find(self, model: nn.Module) -> Iterator[Found]:
        """The sites of a model that this way leads to."""

    @abstractmethod
    def stands(self) -> Sequence[Holding]:
        """What is replaced while somebody watches."""

    def gives(self, module: nn.Module) -> str:
        """What one sees there: "scores", what they are computed of, or the "weights" alone."""
        return "weights"


class Given:
    """What an attention worked with, where its weights [B, H, T, S] are at hand."""

    told = stands = None

    def __init__(self, weights: Tensor) -> None:
        self.weights = weights

    def rows(self, head: int, queries: slice = slice(None)) -> Tensor:
        """The weights of one head for some queries, [B, T, S]."""
        return self.weights[:, head, queries]

    def every(self, queries: slice = slice(None), keys: slice = slice(None)) -> Tensor:
        """The weights of all heads for some queries, [B, H, T, S]."""
        return self.weights[:, :, queries, keys]

    def allowed(self, queries: slice = slice(None)) -> Tensor:
        """Where any head has a weight: who may read whom was not told."""
        return (self.weights[:, :, queries] != 0).any(1, keepdim=True)

    def reading(self, head: int) -> Reading:
        """Refused."""
        raise ValueError("only weights are seen here, not the values that they multiply; give this head a mean instead")
