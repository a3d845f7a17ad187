"""What training keeps between the way forth and the way back, and what checkpoints make of it."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..screen import WIDTH, Wrong

if TYPE_CHECKING:
    from ...counting.bills import Bill
    from ...counting.costs import Costs
    from ...counting.nets import Way


def take(parser: argparse.ArgumentParser) -> None:
    """Add its options."""
    parser.add_argument("--kept", action="store_true", help="bytes kept for the gradients, step by step")
    parser.add_argument(
        "--profile",
        metavar="NAME",
        help="how it runs: dense, composed, halves, sdpa, flash-cuda, or as published: paper-2022, zhihu-624740065",
    )
    parser.add_argument("--checkpoint", metavar="WHAT", help="computed anew on the way back: none, block or core")
    parser.add_argument("--dropout", type=float, metavar="RATE", help="dropped behind every branch of a model's blocks")


def views(given: argparse.Namespace, costs: Costs) -> Mapping[str, Training]:
    """What every layer or model keeps, when any of its options is given."""
    asked = (given.kept, given.profile is not None, given.checkpoint is not None, given.dropout is not None)
    if not any(asked):
        return {}
    from ...counting.nets import Way

    if given.profile == "":
        raise Wrong("--profile is empty; leave it out, or name one such as sdpa")
    checkpoint = "none" if given.checkpoint is None else given.checkpoint
    way = Way(given.profile or "", checkpoint, given.dropout or 0.0, given.source)
    return {"training": Training(tuple(Kept.of(one.name, one.described, one.load, way) for one in costs))}


@dataclass(frozen=True)
class Kept:
    """One layer or model: what it keeps, the most it keeps at once, and what is done again."""

    name: str
    way: Way
    profile: str
    bill: Bill
    peak: int
    again: Bill

    @staticmethod
    def of(name: str, described: Any, load: Any, way: Way) -> Kept:
        """Under one load."""
        from ...counting.checkpoints import recomputed_by
        from ...counting.nets import kept_by, peak, profiles

        bill, most = kept_by(described, load, way), peak(described, load, way)
        return Kept(name, way, profiles(described, load, way), bill, most, recomputed_by(described, load, way))

    @property
    def data(self) -> dict[str, Any]:
        """The same as plain values."""
        return {
            "profile": self.profile,
            "checkpoint": self.way.checkpoint,
            "dropout": self.way.dropout,
            "kept_bytes": self.bill.total,
            "peak_bytes": self.peak,
            "recomputed_flops": self.again.total,
            "terms": [term._asdict() for term in self.bill.terms],
        }

    def __str__(self) -> str:
        sums = [("kept, bytes", self.bill.total), ("at most at once, bytes", self.peak)]
        sums += [("done again, FLOP", self.again.total)] if self.again.terms else []
        rows = [f"  {name:<46}{value:>30,}" for name, value in sums]
        terms = [f"{term.name} = {term.formula} = {term.value:,}" for term in self.bill.terms]
        rows += [line for term in terms for line in textwrap.wrap(term, WIDTH - 4, initial_indent="    ",
                                                                 subsequent_indent="        ")]  # fmt: skip
        anew = {"none": "nothing computed anew", "block": "blocks computed anew", "core": "cores computed anew"}
        return "\n".join([f"{self.name}: in training, {self.profile}, {anew[self.way.checkpoint]}", *rows])


@dataclass(frozen=True)
class Training:
    """What all of them keep, one after the other."""

    each: tuple[Kept, ...]

    @property
    def data(self) -> dict[str, Any]:
        """The same as plain values, by name."""
        return {one.name: one.data for one in self.each}

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.each))
