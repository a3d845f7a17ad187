"""`headwise cost`: the cost of specs and models before they run, side by side.

This module has the command and its everyday options. `comparison_options` has those that compare,
match sizes, draw and write CSV; `training_options` the memory of training.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ...errors import SpecError
from ...translation.terminal_text import pad, pad_left
from ..arguments import (
    PRESETS,
    add_json_argument,
    add_set_argument,
    list_spec_keys,
    print_page,
    resolve_target,
    short_name,
    to_json,
)
from ..command_parser import CommandParser, UsageError
from . import comparison_options, training_options

if TYPE_CHECKING:
    from ...costs.cost_report import CostReport
    from ...costs.flops import SpecOrModel
    from ...costs.published_formulas import FormulaCheck


class CostView(Protocol):
    """A report besides the table of costs: printed as text, or under its name
    in the JSON document.
    """

    @property
    def data(self) -> Any:
        """The report as plain values."""
        ...


class CostOptions(NamedTuple):
    """A group of options, and a function that makes the reports for these options."""

    add_arguments: Callable[[CommandParser], None]
    make_views: Callable[[argparse.Namespace, CostReport], Mapping[str, CostView]]


OPTION_GROUPS = (
    CostOptions(
        comparison_options.add_published_arguments, comparison_options.make_published_views
    ),
    CostOptions(training_options.add_optimiser_arguments, training_options.make_optimiser_views),
    CostOptions(training_options.add_activation_arguments, training_options.make_activation_views),
    CostOptions(
        comparison_options.add_comparison_arguments, comparison_options.make_comparison_views
    ),
    CostOptions(comparison_options.add_plot_arguments, comparison_options.make_plot_views),
)


def main(argv: list[str]) -> int:
    """Print the costs of every target on the command line."""
    args = _parse_arguments(_parser(), argv)
    if args.measure:
        _measure_machine(args)
    if args.article is not None:
        return comparison_options.print_article(args)
    comparison_options.check_plot(args)
    costs, views = comparison_options.match_sizes(args, estimate_costs(args))
    checks = verify_formulas(costs) if args.verify else {}
    for group in OPTION_GROUPS:
        views |= group.make_views(args, costs)
    if args.csv:
        print_page(comparison_options.csv_of_costs(args, costs, views).removesuffix("\n"))
    elif args.json:
        document = costs.data | {name: view.data for name, view in views.items()}
        if args.verify:
            document["verified"] = {
                name: [{**check._asdict(), "holds": check.holds} for check in of_spec]
                for name, of_spec in checks.items()
            }
        print_page(to_json(document))
    else:
        sections = [str(costs)]
        sections += [costs.operations] if args.operations else []
        sections += [costs.terms] if args.terms else []
        sections += map(str, views.values())
        sections += [_format_checks(name, of_spec) for name, of_spec in checks.items()]
        print_page("\n\n".join(sections))
    return 0 if all(check.holds for of_spec in checks.values() for check in of_spec) else 1


def _parser() -> CommandParser:
    parser = CommandParser(
        "cost",
        "Estimate what attention layers and models cost before they run: parameters, FLOPs, KV "
        "cache, and the least "
        "time.",
        "headwise cost gqa mla --model 4096 --heads 32 --context 32768 --batch 16",
        "headwise cost path/to/config.json --generate 256 --operations",
    )
    parser.add_argument(
        "specs",
        nargs="*",
        metavar="WHAT",
        help="a preset, a model such as gpt3, a file or a folder",
    )
    parser.add_argument("--model", type=int, metavar="WIDTH", help="model dimension of the presets")
    parser.add_argument(
        "--heads", type=int, metavar="COUNT", help="number of query heads of the presets"
    )
    add_set_argument(parser)
    parser.add_argument(
        "--layer", metavar="PLACE", help="one block of a model (3 or encoder.3), or 3.attention"
    )
    parser.add_argument(
        "--context",
        type=int,
        metavar="TOKENS",
        help="tokens per row (default: 2048, or the maximum of a model)",
    )
    parser.add_argument(
        "--generate",
        type=int,
        default=0,
        metavar="TOKENS",
        help="tokens to generate after the context",
    )
    parser.add_argument("--batch", type=int, default=1, metavar="ROWS", help="batch size")
    parser.add_argument(
        "--dtype", default="bf16", metavar="NAME", help="bf16, fp16, fp32, fp8, int8 or mxfp4"
    )
    parser.add_argument(
        "--device",
        default="h200",
        metavar="NAME",
        help="h200, h100, a100, l40s, rtx4090, m2-max, cpu, or here",
    )
    parser.add_argument(
        "--measure",
        action="store_true",
        help="measure this machine again, for --device here",
    )
    parser.add_argument(
        "--operations",
        action="store_true",
        help="table of operations: FLOPs, bytes, least time, bottleneck",
    )
    add_json_argument(parser)
    for group in OPTION_GROUPS:
        group.add_arguments(parser)
    expert = parser.add_expert_group("specs and formulas")
    expert.add_argument(
        "--preset",
        action="append",
        default=[],
        metavar="NAME",
        help="another preset: " + ", ".join(PRESETS),
    )
    expert.add_argument(
        "--source",
        type=int,
        metavar="TOKENS",
        help="tokens that cross-attention reads (default: the context)",
    )
    expert.add_argument(
        "--weights",
        metavar="DTYPE",
        help="format of the weights, such as fp8 (default: as stored, or --dtype)",
    )
    expert.add_argument(
        "--terms", action="store_true", help="every term with the formula that it was computed by"
    )
    expert.add_argument(
        "--verify",
        action="store_true",
        help="check every formula against a small layer that is run",
    )
    return parser


def _parse_arguments(parser: CommandParser, argv: list[str]) -> argparse.Namespace:
    """Parse the command line; for an unknown option that is a key of a spec, suggest --set."""
    args, unknown = parser.parse_known_args(argv)
    if not unknown:
        return args
    option, *value = unknown[0].split("=", 1) + unknown[1:2]
    for name in [*args.specs, *args.preset]:
        suffix = f".{option.removeprefix('--')}"
        if keys := [
            key for key in list_spec_keys(load_target(name, args, [])) if key.endswith(suffix)
        ]:
            change = f"{keys[0]}={value[0] if value else ''}"
            fact = f"there is no option {option}, but {name} has {keys[0]}"
            try:
                load_target(name, args, [change])
            except SpecError as error:
                raise UsageError(f"{fact}: {error}") from None
            raise UsageError(f"{fact}; write --set {change}")
    return parser.reject_unknown(unknown)


def _measure_machine(args: argparse.Namespace) -> None:
    from ...costs.roofline import remeasure_this_machine

    if args.device != "here":
        raise UsageError(
            f"--measure measures this machine, but the device is {args.device}; add --device here"
        )
    remeasure_this_machine()


def verify_formulas(costs: CostReport) -> dict[str, list[FormulaCheck]]:
    """Check every formula against a small layer of each attention spec."""
    from ...costs.published_formulas import check_formulas

    checks: dict[str, list[FormulaCheck]] = {}
    for estimate in costs:
        for layer, spec in estimate.attention_specs.items():
            checks[estimate.name if layer == estimate.name else f"{estimate.name}: {layer}"] = (
                check_formulas(spec)
            )
    return checks


def _format_checks(name: str, checks: list[FormulaCheck]) -> str:
    rows = [("a small layer of this kind", "formula", "measured", "")]
    for check in checks:
        verdict = "equal" if check.holds else "WRONG"
        rows.append((check.what, f"{check.formula:,}", f"{check.measured:,}", verdict))
    lines = [
        pad(f"  {name}", 28) + pad_left(formula, 16) + pad_left(measured, 16) + f"  {verdict}"
        for name, formula, measured, verdict in rows
    ]
    return "\n".join([name, *(line.rstrip() for line in lines)])


def estimate_costs(args: argparse.Namespace) -> CostReport:
    """Estimate the cost of every target on the command line, in its order."""
    names = [*args.specs, *args.preset]
    if not names:
        raise UsageError(
            "name at least one spec or model: a file, a model's folder, or a preset such as gqa"
        )
    if unknown := [name for name in args.preset if name not in PRESETS]:
        raise UsageError(f"there is no preset {unknown[0]!r}; use one of {', '.join(PRESETS)}")
    from ...costs.cost_report import CostReport, estimate_cost
    from ...costs.weight_storage import STORED
    from ...costs.workload import Workload

    targets = [load_target(name, args, args.changes) for name in names]
    sizes = (args.batch, args.context, args.dtype, args.device, args.source, args.generate)
    workload = Workload(*sizes, weights=STORED if args.weights is None else args.weights).fitted_to(
        targets
    )
    short_names = [short_name(name) for name in names]
    labels = [
        name if short_names.count(short) > 1 else short
        for name, short in zip(names, short_names, strict=True)
    ]
    return CostReport(
        tuple(
            estimate_cost(target, workload, label)
            for target, label in zip(targets, labels, strict=True)
        )
    )


def load_target(name: str, args: argparse.Namespace, changes: list[str]) -> SpecOrModel:
    """Load the spec or model with this name, or the layer of it that --layer selects."""
    from ...costs.workload import select_layer
    from ...model_spec import ModelSpec

    sizes = {
        size: getattr(args, size) for size in ("model", "heads") if getattr(args, size) is not None
    }
    target = resolve_target(name, sizes, changes)
    if args.layer is None:
        return target
    if isinstance(target, ModelSpec):
        return select_layer(target, args.layer)
    raise UsageError(
        f"--layer {args.layer} is for models, and {name} is one layer; leave --layer out"
    )
