"""`headwise cost --verdict`: whether it fits on the device, and what would."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from .serving import memory_demand

if TYPE_CHECKING:
    from ...counting.costs import CostReport
    from ...counting.verdict import MemoryFit


@dataclass(frozen=True)
class MemoryFitView:
    """The verdict on every spec."""

    fits: Mapping[str, MemoryFit]

    def __str__(self) -> str:
        return "\n\n".join(f"{name}: {verdict}" for name, verdict in self.fits.items())

    @property
    def data(self) -> dict[str, Any]:
        """The same as plain values."""
        return {name: verdict.data for name, verdict in self.fits.items()}


def add_memory_fit_arguments(parser: argparse.ArgumentParser) -> None:
    """The page."""
    told = "whether it fits on the device, and what would; with --optimiser, whether training does"
    parser.add_argument("--verdict", action="store_true", help=told)


def make_memory_fit_views(given: argparse.Namespace, costs: CostReport) -> Mapping[str, MemoryFitView]:
    """The verdict on every spec, when it is asked for."""
    if not given.verdict:
        return {}
    from ...counting.optimisers import OptimiserMemory
    from ...counting.verdict import check_memory_fit

    training = OptimiserMemory.from_name(given.optimiser).bytes_per_parameter if given.optimiser else 0
    return {
        "verdict": MemoryFitView({price.name: check_memory_fit(replace(memory_demand(given, price), training_bytes_per_parameter=training)) for price in costs})
    }
