"""`headwise cost --optimiser` and `--activations`: memory of the optimiser, and activation memory
of training.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ...translation.terminal_text import pad, wrap
from ..command_parser import TERMINAL_WIDTH, CommandParser, UsageError
from ..known_names import ACTIVATION_PROFILES

if TYPE_CHECKING:
    from ...costs.cost_report import CostReport
    from ...costs.flops import CostBreakdown
    from ...costs.training_memory import ActivationSettings, OptimiserMemory

OPTIMISER_NAMES = "zero, megatron, zhihu-624740065, adam-fp32, sgd-momentum or muon"
PRINTED_LABELS = {
    "in_all": "total",
    "weights_for_inference": "weights for inference",
}  # of keys that are not words


class OptimiserMemoryView(NamedTuple):
    """Bytes of weights, gradients and optimiser state, for each estimate."""

    optimiser: OptimiserMemory
    rows: Mapping[str, Mapping[str, int]]

    @property
    def data(self) -> dict[str, Any]:
        """The report as plain values."""
        return {
            "optimiser": self.optimiser.name,
            "bytes_each": self.optimiser.bytes_per_parameter,
            "rows": [{"name": name, **row} for name, row in self.rows.items()],
        }

    def __str__(self) -> str:
        optimiser = self.optimiser
        title = f"training state, {optimiser.bytes_per_parameter} bytes per parameter"
        lines = wrap(f"{title}; {optimiser.name}: {optimiser.description}")
        for name, row in self.rows.items():
            lines += ["", name]
            lines += [
                pad(f"  {PRINTED_LABELS.get(key, key)}", 26) + f"{number:>22,} " + "bytes"
                for key, number in row.items()
            ]
        return "\n".join(lines)


def add_optimiser_arguments(parser: CommandParser) -> None:
    """Add --optimiser."""
    group = parser.add_expert_group("training state")
    group.add_argument(
        "--optimiser",
        metavar="NAME",
        help=f"memory of weights, gradients and optimiser: {OPTIMISER_NAMES}",
    )


def make_optimiser_views(
    args: argparse.Namespace, costs: CostReport
) -> Mapping[str, OptimiserMemoryView]:
    """Return the report of --optimiser, if it is given."""
    if args.optimiser is None:
        return {}
    from ...costs.training_memory import OptimiserMemory

    optimiser = OptimiserMemory.from_name(args.optimiser)
    rows: dict[str, dict[str, int]] = {}
    for estimate in costs:
        num_parameters = estimate.parameters.total
        row = {name: size * num_parameters for name, size in optimiser.bytes_by_tensor.items()}
        row["in_all"] = optimiser.bytes_per_parameter * num_parameters
        row["weights_for_inference"] = estimate.weights_bytes
        rows[estimate.name] = row
    return {"training_state": OptimiserMemoryView(optimiser, rows)}


# --- Activation memory of training, and activation checkpointing ----------------------------------


def add_activation_arguments(parser: CommandParser) -> None:
    """Add --activations, --profile, --checkpoint and --dropout."""
    group = parser.add_expert_group("activation memory of training")
    group.add_argument(
        "--activations", action="store_true", help="bytes saved for the backward pass, by step"
    )
    group.add_argument(
        "--profile",
        metavar="NAME",
        help="backend that attention runs on in training, or a published formula: "
        + ", ".join(ACTIVATION_PROFILES),
    )
    group.add_argument(
        "--checkpoint",
        metavar="WHAT",
        help="what the backward pass recomputes: none, block or core (default: none)",
    )
    group.add_argument(
        "--dropout",
        type=float,
        metavar="RATE",
        help="dropout rate after every residual branch (default: 0)",
    )


def make_activation_views(
    args: argparse.Namespace, costs: CostReport
) -> Mapping[str, TrainingMemoryView]:
    """Return the report of activation memory, if any of its options is given."""
    if (
        not args.activations
        and args.profile is None
        and args.checkpoint is None
        and args.dropout is None
    ):
        return {}
    from ...costs.training_memory import ActivationSettings

    if args.profile == "":
        raise UsageError("--profile is empty; leave it out, or name one such as sdpa")
    checkpoint = "none" if args.checkpoint is None else args.checkpoint
    settings = ActivationSettings(args.profile or "", checkpoint, args.dropout or 0.0, args.source)
    items = tuple(
        TrainingMemory.from_workload(
            estimate.name, estimate.spec_or_model, estimate.workload, settings
        )
        for estimate in costs
    )
    return {"training": TrainingMemoryView(items)}


@dataclass(frozen=True)
class TrainingMemory:
    """Activation memory of one layer or model: saved and peak bytes, and recomputed FLOPs."""

    name: str
    settings: ActivationSettings
    profile: str
    activations: CostBreakdown
    peak: int
    recomputed: CostBreakdown

    @staticmethod
    def from_workload(
        name: str, spec_or_model: Any, workload: Any, settings: ActivationSettings
    ) -> TrainingMemory:
        """Estimate the activation memory under a workload."""
        from ...costs.training_memory import (
            activation_memory,
            attention_profiles,
            peak_activation_memory,
            recompute_flops,
        )

        return TrainingMemory(
            name,
            settings,
            attention_profiles(spec_or_model, workload, settings),
            activation_memory(spec_or_model, workload, settings),
            peak_activation_memory(spec_or_model, workload, settings),
            recompute_flops(spec_or_model, workload, settings),
        )

    @property
    def data(self) -> dict[str, Any]:
        """The estimate as plain values."""
        return {
            "profile": self.profile,
            "checkpoint": self.settings.checkpoint,
            "dropout": self.settings.dropout,
            "kept_bytes": self.activations.total,
            "peak_bytes": self.peak,
            "recomputed_flops": self.recomputed.total,
            "terms": [term._asdict() for term in self.activations.terms],
        }

    def __str__(self) -> str:
        totals = [("saved, bytes", self.activations.total), ("peak, bytes", self.peak)]
        totals += [("recomputed, FLOPs", self.recomputed.total)] if self.recomputed.terms else []
        recomputed = {"none": "nothing", "block": "blocks", "core": "cores"}[
            self.settings.checkpoint
        ]
        lines = wrap(f"{self.name}: in training, {self.profile}, {recomputed} recomputed")
        lines += [pad(f"  {name}", 48) + f"{value:>30,}" for name, value in totals]
        for term in self.activations.terms:
            text = f"{term.name} = {term.formula} = {term.value:,}"
            lines += wrap(text, TERMINAL_WIDTH - 4, indent="    ", hanging="        ")
        return "\n".join(lines)


@dataclass(frozen=True)
class TrainingMemoryView:
    """Activation memory of every layer or model, one after the other."""

    items: tuple[TrainingMemory, ...]

    @property
    def data(self) -> dict[str, Any]:
        """The reports as plain values, by name."""
        return {item.name: item.data for item in self.items}

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.items))
