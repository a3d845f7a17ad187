"""`--optimiser`: what training keeps of every learned number, and what only answering does."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ..arguments import TERMINAL_WIDTH, UsageError

if TYPE_CHECKING:
    from ...costs.cost_report import CostReport
    from ...costs.flops import CostBreakdown
    from ...costs.training_memory import ActivationSettings, OptimiserMemory

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
    parser.add_argument(
        "--optimiser", metavar="NAME", help=f"what training keeps besides activations: {OPTIMISER_NAMES}"
    )


def make_optimiser_views(given: argparse.Namespace, costs: CostReport) -> Mapping[str, OptimiserMemoryView]:
    """What training keeps of everything that is priced."""
    if given.optimiser is None:
        return {}
    from ...costs.training_memory import OptimiserMemory

    optimiser = OptimiserMemory.from_name(given.optimiser)
    rows = {
        price.name: {what: each * price.parameters.total for what, each in optimiser.bytes_by_tensor.items()}
        | {
            "in_all": optimiser.bytes_per_parameter * price.parameters.total,
            "weights_for_inference": price.weights_bytes,
        }
        for price in costs
    }
    return {"training_state": OptimiserMemoryView(optimiser, rows)}


# --- What training keeps between the way forth and the way back, and what checkpoints make of it -------


def add_activation_arguments(parser: argparse.ArgumentParser) -> None:
    """Add its options."""
    parser.add_argument("--kept", action="store_true", help="bytes kept for the gradients, step by step")
    parser.add_argument(
        "--profile",
        metavar="NAME",
        help="how it runs: dense, composed, halves, sdpa, flash-cuda, or as published: paper-2022, zhihu-624740065",
    )
    parser.add_argument("--checkpoint", metavar="WHAT", help="computed anew on the way back: none, block or core")
    parser.add_argument("--dropout", type=float, metavar="RATE", help="dropped behind every branch of a model's blocks")


def make_activation_views(given: argparse.Namespace, costs: CostReport) -> Mapping[str, TrainingMemoryView]:
    """What every layer or model keeps, when any of its options is given."""
    asked = (given.kept, given.profile is not None, given.checkpoint is not None, given.dropout is not None)
    if not any(asked):
        return {}
    from ...costs.training_memory import ActivationSettings

    if given.profile == "":
        raise UsageError("--profile is empty; leave it out, or name one such as sdpa")
    checkpoint = "none" if given.checkpoint is None else given.checkpoint
    way = ActivationSettings(given.profile or "", checkpoint, given.dropout or 0.0, given.source)
    return {
        "training": TrainingMemoryView(
            tuple(TrainingMemory.from_workload(one.name, one.spec_or_model, one.workload, way) for one in costs)
        )
    }


@dataclass(frozen=True)
class TrainingMemory:
    """One layer or model: what it keeps, the most it keeps at once, and what is done again."""

    name: str
    settings: ActivationSettings
    profile: str
    activations: CostBreakdown
    peak: int
    recomputed: CostBreakdown

    @staticmethod
    def from_workload(name: str, described: Any, load: Any, way: ActivationSettings) -> TrainingMemory:
        """Under one load."""
        from ...costs.training_memory import (
            activation_memory,
            attention_profiles,
            peak_activation_memory,
            recompute_flops,
        )

        bill, most = activation_memory(described, load, way), peak_activation_memory(described, load, way)
        return TrainingMemory(
            name, way, attention_profiles(described, load, way), bill, most, recompute_flops(described, load, way)
        )

    @property
    def data(self) -> dict[str, Any]:
        """The same as plain values."""
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
        sums = [("kept, bytes", self.activations.total), ("at most at once, bytes", self.peak)]
        sums += [("done again, FLOP", self.recomputed.total)] if self.recomputed.terms else []
        rows = [f"  {name:<46}{value:>30,}" for name, value in sums]
        terms = [f"{term.name} = {term.formula} = {term.value:,}" for term in self.activations.terms]
        rows += [
            line
            for term in terms
            for line in textwrap.wrap(term, TERMINAL_WIDTH - 4, initial_indent="    ", subsequent_indent="        ")
        ]
        anew = {"none": "nothing computed anew", "block": "blocks computed anew", "core": "cores computed anew"}
        return "\n".join([f"{self.name}: in training, {self.profile}, {anew[self.settings.checkpoint]}", *rows])


@dataclass(frozen=True)
class TrainingMemoryView:
    """What all of them keep, one after the other."""

    items: tuple[TrainingMemory, ...]

    @property
    def data(self) -> dict[str, Any]:
        """The same as plain values, by name."""
        return {one.name: one.data for one in self.items}

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.items))
