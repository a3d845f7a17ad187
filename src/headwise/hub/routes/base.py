"""What a way into attentions is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor, nn

from ...site import Site
from ..watching import SharedPatch, HeadValues


class SiteModule(NamedTuple):
    """A site, the module that one watches there, and the way that leads to it.

    A module may serve several sites: this one is its call number `call` of the `calls` in a forward.
    """

    site: Site
    module: nn.Module
    adapter: SiteAdapter
    call_index: int = 0
    calls_per_forward: int = 1


class SiteAdapter(ABC):
    """One way into attentions."""

    @abstractmethod
    def find_sites(self, model: nn.Module) -> Iterator[SiteModule]:
        """The sites of a model that this way leads to."""

    @abstractmethod
    def patches(self) -> Sequence[SharedPatch]:
        """What is replaced while somebody watches."""

    def visible_tensors(self, module: nn.Module) -> str:
        """What one sees there: "scores", what they are computed of, or the "weights" alone."""
        return "weights"


class WeightsOnlyCall:
    """What an attention worked with, where its weights [B, H, T, S] are at hand."""

    attention_inputs = key_positions = None

    def __init__(self, weights: Tensor) -> None:
        self.weights = weights

    def head_weights(self, head: int, queries: slice = slice(None)) -> Tensor:
        """The weights of one head for some queries, [B, T, S]."""
        return self.weights[:, head, queries]

    def all_weights(self, queries: slice = slice(None), keys: slice = slice(None)) -> Tensor:
        """The weights of all heads for some queries, [B, H, T, S]."""
        return self.weights[:, :, queries, keys]

    def allowed_pairs(self, queries: slice = slice(None)) -> Tensor:
        """Where any head has a weight: who may read whom was not told."""
        return (self.weights[:, :, queries] != 0).any(1, keepdim=True)

    def head_values(self, head: int) -> HeadValues:
        """Refused."""
        raise ValueError("only weights are seen here, not the values that they multiply; give this head a mean instead")
