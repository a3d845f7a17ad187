"""`--optimiser`: what training keeps of every learned number, and what only answering does."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ..screen import WIDTH

if TYPE_CHECKING:
    from ...counting.costs import Costs
    from ...counting.optimisers import Optimiser

NAMES = "zero, megatron, zhihu-624740065, adam-fp32, sgd-momentum or muon"


class States(NamedTuple):
    """Bytes of the learned numbers by what holds them, for each that is priced."""

    optimiser: Optimiser
    rows: Mapping[str, Mapping[str, int]]

    @property
    def data(self) -> dict[str, Any]:
        """The same as plain values."""
        told = {"optimiser": self.optimiser.name, "bytes_each": self.optimiser.each}
        return told | {"rows": [{"name": name, **row} for name, row in self.rows.items()]}

    def __str__(self) -> str:
        one = self.optimiser
        head = f"training state, {one.each} bytes of each learned number; {one.name}: {one.what}"
        lines = textwrap.wrap(head, WIDTH)
        for name, row in self.rows.items():
            lines += ["", name, *(f"  {what.replace('_', ' '):<22}{number:>24,} bytes" for what, number in row.items())]
        return "\n".join(lines)


def take(parser: argparse.ArgumentParser) -> None:
    """Its option."""
    parser.add_argument("--optimiser", metavar="NAME", help=f"what training keeps besides activations: {NAMES}")


def views(given: argparse.Namespace, costs: Costs) -> Mapping[str, States]:
    """What training keeps of everything that is priced."""
    if given.optimiser is None:
        return {}
    from ...counting.optimisers import Optimiser

    optimiser = Optimiser.named(given.optimiser)
    rows = {
        price.name: {what: each * price.parameters.total for what, each in optimiser.holds.items()}
        | {"in_all": optimiser.each * price.parameters.total, "weights_for_inference": price.weights_bytes}
        for price in costs
    }
    return {"training_state": States(optimiser, rows)}
