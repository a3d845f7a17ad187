"""`headwise cost`: what specs and models cost before they run, side by side."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ...errors import SpecError
from ..arguments import (
    PRESETS,
    CommandParser,
    UsageError,
    add_json_argument,
    add_set_argument,
    list_spec_keys,
    print_page,
    resolve_target,
    short_name,
    to_json,
)
from . import comparison_options, serving_options, training_options

if TYPE_CHECKING:
    from ...costs.cost_report import CostReport
    from ...costs.flops import SpecOrModel
    from ...costs.formula_checks import FormulaCheck


class CostView(Protocol):
    """Something asked besides the prices: printed as text, and under its name in the document."""

    @property
    def data(self) -> Any:
        """The same as plain values."""
        ...


class CostOptions(NamedTuple):
    """A group of options, and the views that are printed when they are given."""

    add_arguments: Callable[[argparse.ArgumentParser], None]
    make_views: Callable[[argparse.Namespace, CostReport], Mapping[str, CostView]]


OPTION_GROUPS = (
    CostOptions(comparison_options.add_published_arguments, comparison_options.make_published_views),
    CostOptions(training_options.add_optimiser_arguments, training_options.make_optimiser_views),
    CostOptions(training_options.add_activation_arguments, training_options.make_activation_views),
    CostOptions(serving_options.add_serving_arguments, serving_options.make_serving_views),
    CostOptions(serving_options.add_memory_fit_arguments, serving_options.make_memory_fit_views),
    CostOptions(serving_options.add_intensity_arguments, serving_options.make_intensity_views),
    CostOptions(comparison_options.add_comparison_arguments, comparison_options.make_comparison_views),
    CostOptions(comparison_options.add_plot_arguments, comparison_options.make_plot_views),
)
DEFAULT_CONTEXT = 2048  # tokens of a row, where nothing says how many and nothing knows fewer


def main(argv: list[str]) -> int:
    """Price everything that is named."""
    given = _parse_arguments(_parser(), argv)
    costs, views = comparison_options.match_sizes(given, estimate_costs(given))
    checks = verify_formulas(costs) if given.verify else {}
    views |= {name: view for group in OPTION_GROUPS for name, view in group.make_views(given, costs).items()}
    if given.csv:
        print(comparison_options.csv_of_costs(given, costs, views), end="")
    elif given.json:
        told = {name: [{**check._asdict(), "holds": check.holds} for check in each] for name, each in checks.items()}
        more = {name: view.data for name, view in views.items()}
        print_page(to_json(costs.data | more | ({"verified": told} if given.verify else {})))
    else:
        asked = {"operations": given.operations, "terms": given.terms}
        said = [str(costs), *(getattr(costs, name) for name in asked if asked[name]), *map(str, views.values())]
        print_page("\n\n".join([*said, *(_format_checks(*item) for item in checks.items())]))
    return 0 if all(check.holds for each in checks.values() for check in each) else 1


def _parser() -> CommandParser:
    parser = CommandParser(
        "cost",
        "What attention layers and whole models cost before they run: parameters, products, cache, and the time they "
        "take at least.",
        "headwise cost gqa mla --model 4096 --heads 32 --context 32768 --batch 16\n"
        "  headwise cost path/to/config.json --generate 256 --operations",
    )
    parser.add_argument(
        "specs", nargs="*", metavar="WHAT", help="a preset, a .toml or .json file, a config.json, or a model's folder"
    )
    parser.add_argument(
        "--preset", action="append", default=[], metavar="NAME", help="one more preset, of " + ", ".join(PRESETS)
    )
    parser.add_argument("--model", type=int, metavar="WIDTH", help="the width of the presets' model")
    parser.add_argument("--heads", type=int, metavar="COUNT", help="how many heads the presets have")
    add_set_argument(parser)
    parser.add_argument("--layer", metavar="PLACE", help="of models one block, 3 or encoder.3, or 3.attention")
    parser.add_argument(
        "--context", type=int, metavar="TOKENS", help=f"tokens of a row ({DEFAULT_CONTEXT}, or all positions)"
    )
    parser.add_argument("--source", type=int, metavar="TOKENS", help="tokens that cross-attention reads (as many)")
    parser.add_argument("--generate", type=int, default=0, metavar="TOKENS", help="how many are written behind them")
    parser.add_argument("--batch", type=int, default=1, metavar="ROWS", help="rows (1)")
    parser.add_argument("--dtype", default="bf16", help="bf16, fp16 or fp32")
    parser.add_argument("--device", default="h200", help="h200, h100, a100, l40s, rtx4090, m2-max, cpu, or here")
    parser.add_argument("--operations", action="store_true", help="the time of each operation, and what it waits for")
    parser.add_argument("--terms", action="store_true", help="every item with the formula that computed it")
    parser.add_argument("--verify", action="store_true", help="build each small and hold every formula against it")
    for group in OPTION_GROUPS:
        group.add_arguments(parser)
    add_json_argument(parser)
    return parser


def _parse_arguments(parser: CommandParser, argv: list[str]) -> argparse.Namespace:
    """What the command line says; a key of a part that is written like an option is told how to say it."""
    given, more = parser.parse_known_args(argv)
    if not more:
        return given
    option, *value = more[0].split("=", 1) + more[1:2]
    for name in [*given.specs, *given.preset]:
        ends = f".{option.removeprefix('--')}"
        if keys := [key for key in list_spec_keys(load_target(name, given, [])) if key.endswith(ends)]:
            change = f"{keys[0]}={value[0] if value else ''}"
            told = f"there is no option {option}, but {name} has {keys[0]}"
            try:
                load_target(name, given, [change])
            except SpecError as error:
                raise UsageError(f"{told}: {error}") from None
            raise UsageError(f"{told}; write --set {change}")
    raise UsageError(f"unrecognized arguments: {' '.join(more)}; see headwise cost --help")


def verify_formulas(costs: CostReport) -> dict[str, list[FormulaCheck]]:
    """Every formula against a small layer of each attention."""
    from ...costs.formula_checks import check_formulas

    places = [(price.name, place, spec) for price in costs for place, spec in price.attention_specs.items()]
    return {name if place == name else f"{name}: {place}": check_formulas(spec) for name, place, spec in places}


def _format_checks(name: str, checks: list[FormulaCheck]) -> str:
    rows = [("a small layer of it", "formula", "measured", "")]
    rows += [(c.what, f"{c.formula:,}", f"{c.measured:,}", "equal" if c.holds else "WRONG") for c in checks]
    return "\n".join([name, *(f"  {a:<24}{b:>16}{c:>16}  {d}".rstrip() for a, b, c, d in rows)])


def estimate_costs(given: argparse.Namespace) -> CostReport:
    """The price of everything that the command line names, in its order."""
    names = [*given.specs, *given.preset]
    if not names:
        raise UsageError("name at least one spec or model: a file, a model's folder, or a preset such as gqa")
    if strange := [name for name in given.preset if name not in PRESETS]:
        raise UsageError(f"there is no preset {strange[0]!r}; use one of {', '.join(PRESETS)}")
    from ...costs.cost_report import CostReport, estimate_cost
    from ...costs.workload import Workload, max_lengths

    found = [load_target(name, given, given.changes) for name in names]
    known = [own - max(given.generate - 1, 0) for own, _ in map(max_lengths, found) if own is not None]
    usual = max(min([DEFAULT_CONTEXT, *known]), 1)
    context = usual if given.context is None else given.context
    load = Workload(given.batch, context, given.dtype, given.device, given.source, given.generate)
    labels = [short_name(name) for name in names]
    labels = [name if labels.count(told) > 1 else told for name, told in zip(names, labels, strict=True)]
    return CostReport(tuple(estimate_cost(one, load, told) for one, told in zip(found, labels, strict=True)))


def load_target(name: str, given: argparse.Namespace, changes: list[str]) -> SpecOrModel:
    """What one name stands for, or the layer of it that is asked for."""
    from ...costs.workload import select_layer
    from ...model_spec import ModelSpec

    sizes = {size: told for size in ("model", "heads") if (told := getattr(given, size)) is not None}
    found = resolve_target(name, sizes, changes)
    if given.layer is None:
        return found
    if isinstance(found, ModelSpec):
        return select_layer(found, given.layer)
    raise UsageError(f"--layer {given.layer} is for models, and {name} is one layer; leave --layer out")
