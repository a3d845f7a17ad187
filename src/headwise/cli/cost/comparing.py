"""`--match`, `--breakeven`, `--complexity`: layers made alike in one number, and beside what they are compared with."""

from __future__ import annotations

import argparse
import math
import textwrap
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...errors import SpecError, suggest
from ..screen import TERMINAL_WIDTH, UsageError

if TYPE_CHECKING:
    from ...counting.complexity import ComplexityTable, LayerSizes
    from ...counting.costs import CostReport
    from ...counting.growth import ScalingMeasurement
    from ...counting.matching import SizeMatch
    from ...counting.pricing import CostEstimate
    from ...spec import AttentionSpec
    from . import CostView

MATCH_QUANTITIES = ("params", "flops", "kv")
DEFAULT_KERNEL, DEFAULT_WINDOW = 3, 64


@dataclass(frozen=True)
class SizeMatchView:
    """What was changed of each spec, so that it comes nearest to the first."""

    first: str
    matches: Mapping[str, SizeMatch]

    def __str__(self) -> str:
        lines = [f"made as large as {self.first} before they were priced:"]
        for name, match in self.matches.items():
            lines += textwrap.wrap(f"{name}: {match}", TERMINAL_WIDTH, initial_indent="  ", subsequent_indent="    ")
        return "\n".join(lines)

    @property
    def data(self) -> dict[str, Any]:
        """The same as plain values."""
        return {"like": self.first, "rows": [{"name": name, **match.data} for name, match in self.matches.items()]}


@dataclass(frozen=True)
class ComplexityView:
    """The table of complexities, and how the time of small layers grows where that was measured."""

    table: ComplexityTable
    measurement: ScalingMeasurement | None

    def __str__(self) -> str:
        return f"{self.table}\n\n{self.measurement}" if self.measurement else str(self.table)

    @property
    def data(self) -> dict[str, Any]:
        """The same as plain values."""
        return self.table.data | {"measured": self.measurement.data if self.measurement else None}


def add_comparison_arguments(parser: argparse.ArgumentParser) -> None:
    """Their options."""
    more = parser.add_argument_group("comparing")
    more.add_argument("--match", choices=MATCH_QUANTITIES, help="change a size of each, so that it comes nearest to the first")
    told = "the size that may change: dim, vdim, kv, q, model, or one of a part, as in mla=project.rank"
    more.add_argument("--free", action="append", default=[], metavar="[SPEC=]SIZE", help=told)
    more.add_argument("--breakeven", action="store_true", help="lengths at which each costs less than the first")
    told = "attention beside recurrent and convolutional layers: counted, or measured as well"
    more.add_argument("--complexity", nargs="?", const="counted", choices=("counted", "measured"), help=told)
    more.add_argument("--kernel", type=int, metavar="TOKENS", help=f"of its convolutions ({DEFAULT_KERNEL})")
    more.add_argument("--window", type=int, metavar="TOKENS", help=f"of its attention in a window ({DEFAULT_WINDOW})")


def make_comparison_views(given: argparse.Namespace, costs: CostReport) -> Mapping[str, CostView]:
    """What was asked for."""
    found: dict[str, CostView] = {}
    if given.breakeven:
        from ...counting.breakeven import find_crossovers

        prices = with_unique_names(costs)
        found["break_even"] = find_crossovers(
            {name: price.spec_or_model for name, price in prices.items()}, costs.estimates[0].workload
        )
    if given.complexity:
        from ...counting.complexity import ComplexityTable

        sizes = _layer_sizes(given, costs)
        found["complexity"] = ComplexityView(ComplexityTable.from_sizes(sizes), _measure_scaling(given, sizes))
    elif given.kernel is not None or given.window is not None:
        raise UsageError("--kernel and --window are sizes of --complexity; give it, or leave them out")
    return found


def match_sizes(given: argparse.Namespace, costs: CostReport) -> tuple[CostReport, dict[str, CostView]]:
    """Everything made as large as the first and priced anew, and what was changed for that."""
    if given.match is None:
        if given.free:
            raise UsageError(f"--free {given.free[0]} changes nothing without --match; give --match params, flops or kv")
        return costs, {}
    from ...counting.costs import CostReport
    from ...counting.pricing import estimate_cost

    first, *others = with_unique_names(costs).items()
    if not others:
        raise UsageError(f"--match makes others as large as the first, and there is only {first[0]}; name one more")
    free = _free_sizes(given, [name for name, _ in others])
    found = {name: _match_estimate(given.match, first, (name, one), free[name]) for name, one in others}
    anew = (estimate_cost(found[name].spec, one.workload, one.name) for name, one in others)
    return CostReport((first[1], *anew)), {"matched": SizeMatchView(first[0], found)}


def with_unique_names(costs: CostReport) -> dict[str, CostEstimate]:
    """Every price under a name of its own: what is named like one before it gets a number."""
    seen: Counter[str] = Counter()
    found: dict[str, CostEstimate] = {}
    for one in costs:
        seen[one.name] += 1
        found[one.name if seen[one.name] == 1 else f"{one.name} ({seen[one.name]})"] = one
    return found


def _free_sizes(given: argparse.Namespace, names: list[str]) -> dict[str, str | None]:
    """The size that is free of each, or None where nothing says which."""
    free: dict[str, str | None] = dict.fromkeys(names)
    for said in given.free:
        name, equals, size = said.rpartition("=")
        if equals and name not in free:
            raise UsageError(f"--free {said}: nothing that is changed is called {name!r}; {suggest(name, free)}")
        free |= {name: size} if equals else dict.fromkeys(names, size)
    return free


def _match_estimate(by: str, first: tuple[str, CostEstimate], other: tuple[str, CostEstimate], free: str | None) -> SizeMatch:
    from ...counting.matching import match_size

    like, spec = _spec_to_match(*first), _spec_to_match(*other)
    try:
        return match_size(spec, like=like, by=by, free=free, workload=other[1].workload)
    except SpecError as error:
        raise UsageError(f"{other[0]} cannot be made as large as {first[0]}: {error}") from None


def _spec_to_match(name: str, price: CostEstimate) -> AttentionSpec:
    from ...spec import AttentionSpec

    if isinstance(price.spec_or_model, AttentionSpec):
        return price.spec_or_model
    raise UsageError(
        f"--match changes single layers, and {name} is more; take one attention of it, as in --layer 0.attention"
    )


def _layer_sizes(given: argparse.Namespace, costs: CostReport) -> LayerSizes:
    """The surroundings of the first attention that is priced."""
    from ...counting.complexity import LayerSizes

    price = costs.estimates[0]
    spec = next(iter(price.attention_specs.values()), None)
    if spec is None:
        raise UsageError(f"--complexity takes its width from an attention, and {price.name} has none; name a spec first")
    kernel, window = (
        (DEFAULT_KERNEL if given.kernel is None else given.kernel),
        (DEFAULT_WINDOW if given.window is None else given.window),
    )
    return LayerSizes(price.workload.context, spec.model, math.gcd(spec.heads.q, spec.model), kernel, window)


def _measure_scaling(given: argparse.Namespace, sizes: LayerSizes) -> ScalingMeasurement | None:
    if given.complexity != "measured":
        return None
    from ...counting.growth import measure_scaling

    return measure_scaling(sizes)
