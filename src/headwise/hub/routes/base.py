"""What a way into attentions is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import NamedTuple

from torch import nn

from ...site import Site
from ..watching import Stand


class Found(NamedTuple):
    """A site and the module it speaks of."""

    site: Site
    module: nn.Module
    route: Route


class Route(ABC):
    """One way into attentions."""

    @abstractmethod
    def find(self, model: nn.Module) -> Iterator[Found]:
        """The sites of a model that this way leads to."""

    @abstractmethod
    def stands(self) -> list[Stand]:
        """What of which classes is replaced while somebody watches."""
