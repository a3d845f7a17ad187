"""`--optimiser`: what training keeps of every learned number, and what only answering does."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ..screen import TERMINAL_WIDTH

if TYPE_CHECKING:
    from ...counting.costs import CostReport
    from ...counting.optimisers import OptimiserMemory

OPTIMISER_NAMES = "zero, megatron, zhihu-624740065, adam-fp32, sgd-momentum or muon"


class OptimiserMemoryView(NamedTuple):
    """Bytes of the learned numbers by what holds them, for each that is priced."""

    optimiser: OptimiserMemory
    rows: Mapping[str, Mapping[str, int]]

    @property
    def data(self) -> dict[str, Any]:
        """The same as plain values."""
        told = {"optimiser": self.optimiser.name, "bytes_each": self.optimiser.bytes_per_parameter}
        return told | {"rows": [{"name": name, **row} for name, row in self.rows.items()]}

    def __str__(self) -> str:
        one = self.optimiser
        head = f"training state, {one.bytes_per_parameter} bytes of each learned number; {one.name}: {one.description}"
        lines = textwrap.wrap(head, TERMINAL_WIDTH)
        for name, row in self.rows.items():
            lines += ["", name, *(f"  {what.replace('_', ' '):<22}{number:>24,} bytes" for what, number in row.items())]
        return "\n".join(lines)


def add_optimiser_arguments(parser: argparse.ArgumentParser) -> None:
    """Its option."""
    parser.add_argument("--optimiser", metavar="NAME", help=f"what training keeps besides activations: {OPTIMISER_NAMES}")


def make_optimiser_views(given: argparse.Namespace, costs: CostReport) -> Mapping[str, OptimiserMemoryView]:
    """What training keeps of everything that is priced."""
    if given.optimiser is None:
        return {}
    from ...counting.optimisers import OptimiserMemory

    optimiser = OptimiserMemory.from_name(given.optimiser)
    rows = {
        price.name: {what: each * price.parameters.total for what, each in optimiser.bytes_by_tensor.items()}
        | {"in_all": optimiser.bytes_per_parameter * price.parameters.total, "weights_for_inference": price.weights_bytes}
        for price in costs
    }
    return {"training_state": OptimiserMemoryView(optimiser, rows)}
