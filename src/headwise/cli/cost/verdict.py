"""`headwise cost --verdict`: whether it fits on the device, and what would."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from .serving import demand_of

if TYPE_CHECKING:
    from ...counting.costs import Costs
    from ...counting.verdict import Verdict


@dataclass(frozen=True)
class Verdicts:
    """The verdict on every spec."""

    found: Mapping[str, Verdict]

    def __str__(self) -> str:
        return "\n\n".join(f"{name}: {verdict}" for name, verdict in self.found.items())

    @property
    def data(self) -> dict[str, Any]:
        """The same as plain values."""
        return {name: verdict.data for name, verdict in self.found.items()}


def take(parser: argparse.ArgumentParser) -> None:
    """The page."""
    told = "whether it fits on the device, and what would; with --optimiser, whether training does"
    parser.add_argument("--verdict", action="store_true", help=told)


def views(given: argparse.Namespace, costs: Costs) -> Mapping[str, Verdicts]:
    """The verdict on every spec, when it is asked for."""
    if not given.verdict:
        return {}
    from ...counting.optimisers import Optimiser
    from ...counting.verdict import judge

    training = Optimiser.named(given.optimiser).each if given.optimiser else 0
    return {
        "verdict": Verdicts({price.name: judge(replace(demand_of(given, price), training=training)) for price in costs})
    }
