"""`headwise cost`: the cost of specs and models before they run, side by side."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import SpecError, suggest
from .arguments import (
    existing_mode,
    list_spec_keys,
    print_page,
    resolve_target,
    short_name,
    to_json,
)
from .options import CommandParser, Options, UsageError, options

if TYPE_CHECKING:
    from ..costs.components import SpecOrModel
    from ..costs.cost_report import CostEstimate, CostReport
    from ..costs.size_matching import SizeMatch
    from ..report.data import Item
    from ..spec.attention_spec import AttentionSpec

DEFAULT_KERNEL = 3
DEFAULT_WINDOW = 64
# Options and views for which CSV has no room: it has one line for each spec.
NOT_IN_CSV = ("operations", "terms", "verify")


class View(NamedTuple):
    """A report besides the table of costs: shown as text, or under its name in the JSON document."""

    data: Any
    items: Sequence[Item]


def main(argv: list[str]) -> int:
    """Print the costs of every target on the command line."""
    args = _parse_arguments(argv)
    if args.article is not None:
        return _print_article(args)
    if args.plot is not None:
        from ..report.plots import check_figure_path

        check_figure_path(args.plot, existing_mode(args))
    if args.measure:
        from ..costs.roofline import remeasure_this_machine

        remeasure_this_machine()
    costs, matches = _match_sizes(args, estimate_costs(args))
    views = {"matched": matches} if matches else {}
    for name, (is_wanted, make_view) in VIEWS.items():
        if is_wanted(args):
            views[name] = make_view(args, costs)
    if args.csv:
        print_page(_csv_of_costs(args, costs, views).removesuffix("\n"))
    elif args.json:
        print_page(to_json(costs.data | {name: view.data for name, view in views.items()}))
    else:
        print_page(_format_items([*costs.items, *_list_items(args, costs, views)]))
    checks = views["verified"].data.values() if "verified" in views else ()
    return 1 if any(not check["holds"] for of_spec in checks for check in of_spec) else 0


def _list_items(args: CostOptions, costs: CostReport, views: Mapping[str, View]) -> list[Item]:
    items: list[Item] = [*costs.operations] if args.operations else []
    items += costs.terms if args.terms else []
    for view in views.values():
        items += view.items
    return items


def _format_items(items: Sequence[Item]) -> str:
    from ..report.render import to_text

    return "\n\n".join(map(to_text, items))


# --- Options --------------------------------------------------------------------------------------


@options
class CostOptions(Options):
    """Estimate what attention layers and models cost before they run: parameters, FLOPs, KV cache,
    and the least time.

    WHAT  a preset, a model such as gpt3, a file or a folder
    --model WIDTH  model dimension of the presets
    --heads COUNT  number of query heads of the presets
    --set KEY=VALUE  change a field, as in heads.kv=4 or pattern='window(256)'; repeatable
    --layer PLACE  one block of a model (3 or encoder.3), or 3.attention
    --context TOKENS  tokens per row (default: 2048, or the maximum of a model)
    --generate TOKENS  tokens to generate after the context
    --batch ROWS  batch size
    --dtype NAME  bf16, fp16, fp32, fp8, int8 or mxfp4
    --device NAME  h200, h100, a100, l40s, rtx4090, m2-max, cpu, or here
    --measure  measure this machine again, for --device here
    --match WHAT  resize each spec to match the first: params, flops or kv
    --operations  table of operations: FLOPs, bytes, least time, bottleneck
    --plot FILE  draw plots into a .svg, .png or .pdf file
    --csv  print CSV with one line per spec instead of the table
    --json  print one JSON document instead of text

    details of comparing:
    --resize [SPEC=]SIZE  size that --match changes: dim, vdim, kv, q, model, or one of a part, as
        in mla=project.rank; repeatable
    --complexity [HOW=counted]  compare with recurrent and convolutional layers: counted by formulas
        (also without HOW), or measured
    --kernel TOKENS  kernel of its convolutions (default: 3)
    --window TOKENS  window of its local attention (default: 64)

    published formulas:
    --published NAME  compare with published formulas: zhihu-624740065, seeds, paper-2022, palm or
        scaling-book; repeatable
    --article NUMBER  table of an article with numbers of GPT-3 and LLaMA-65B: 624740065

    memory of training:
    --optimiser NAME  memory of weights, gradients and optimiser: zero, megatron, zhihu-624740065,
        adam-fp32, sgd-momentum or muon
    --activations  bytes saved for the backward pass, by step
    --profile NAME  backend that attention runs on in training: dense, chunked, bf16_matmul, sdpa or
        flash-cuda
    --checkpoint WHAT  what the backward pass recomputes: none, block or core (default: none)
    --dropout RATE  dropout rate after every residual branch (default: 0)

    plots:
    --overwrite  replace an earlier output of this command
    --plot-kind KIND  roofline, kv, flops or all (default: all)

    specs and formulas:
    --source TOKENS  tokens that cross-attention reads (default: the context)
    --weights DTYPE  format of the weights, such as fp8 (default: as stored, or --dtype)
    --terms  every term with the formula that it was computed by
    --verify  check every formula against a small layer that is run

    examples:
    headwise cost gqa mla --model 4096 --heads 32 --context 32768 --batch 16
    headwise cost path/to/config.json --generate 256 --operations
    """

    command = "cost"
    names = {"WHAT": "specs", "--set": "changes"}
    choices = {"match": "params flops kv", "complexity": "counted measured"}
    specs: tuple[str, ...] = ()
    model: int | None = None
    heads: int | None = None
    changes: tuple[str, ...] = ()
    layer: str | None = None
    context: int | None = None
    generate: int = 0
    batch: int = 1
    dtype: str = "bf16"
    device: str = "h200"
    measure: bool = False
    match: str | None = None
    operations: bool = False
    plot: str | None = None
    csv: bool = False
    json: bool = False
    resize: tuple[str, ...] = ()
    complexity: str | None = None
    kernel: int | None = None
    window: int | None = None
    published: tuple[str, ...] = ()
    article: str | None = None
    optimiser: str | None = None
    activations: bool = False
    profile: str | None = None
    checkpoint: str | None = None
    dropout: float | None = None
    overwrite: bool = False
    plot_kind: str | None = None
    source: int | None = None
    weights: str | None = None
    terms: bool = False
    verify: bool = False

    def check(self) -> None:
        """Refuse options that have no effect."""
        if self.measure and self.device != "here":
            fact = f"--measure measures this machine, but the device is {self.device}"
            raise UsageError(f"{fact}; add --device here")
        if self.resize and self.match is None:
            fact = f"--resize {self.resize[0]} changes nothing without --match"
            raise UsageError(f"{fact}; give --match params, flops or kv")
        if not self.complexity and (self.kernel is not None or self.window is not None):
            raise UsageError(
                "--kernel and --window are sizes of --complexity; give it, or leave them out"
            )
        if self.profile == "":
            raise UsageError("--profile is empty; leave it out, or name one such as sdpa")
        if self.csv and self.json:
            raise UsageError("--csv and --json are two forms of one document; leave one out")
        if self.plot is None and self.plot_kind is not None:
            fact = f"--plot-kind {self.plot_kind} draws nothing without a file"
            raise UsageError(f"{fact}; give --plot costs.svg")
        if self.article is not None and self.specs:
            fact = f"--article {self.article} is a table of models of its own"
            raise UsageError(f"{fact}; leave {self.specs[0]} out")


def _parse_arguments(argv: Sequence[str]) -> CostOptions:
    """Parse the command line; for an unknown option that is a key of a spec, suggest --set."""
    parser = CommandParser(CostOptions)
    namespace, unknown = parser.parse_known_args(argv)
    args = CostOptions(**vars(namespace))
    if not unknown:
        return args
    option, *value = unknown[0].split("=", 1) + unknown[1:2]
    suffix = f".{option.removeprefix('--')}"
    for name in args.specs:
        keys = [key for key in list_spec_keys(load_target(name, args, ())) if key.endswith(suffix)]
        if keys:
            change = f"{keys[0]}={value[0] if value else ''}"
            fact = f"there is no option {option}, but {name} has {keys[0]}"
            try:
                load_target(name, args, [change])
            except SpecError as error:
                raise UsageError(f"{fact}: {error}") from None
            raise UsageError(f"{fact}; write --set {change}")
    return parser.reject_unknown(unknown)


# --- What is estimated ----------------------------------------------------------------------------


def estimate_costs(args: CostOptions) -> CostReport:
    """Estimate the cost of every target on the command line, in its order."""
    if not args.specs:
        raise UsageError(
            "name at least one spec or model: a file, a model's folder, or a preset such as gqa"
        )
    from ..costs.cost_report import CostReport, estimate_cost
    from ..costs.weight_storage import STORED
    from ..costs.workload import Workload

    targets = [load_target(name, args, args.changes) for name in args.specs]
    names = ("batch", "context", "dtype", "device", "source", "generate")
    settings: dict[str, Any] = {name: getattr(args, name) for name in names}
    weights = STORED if args.weights is None else args.weights
    workload = Workload(**settings, weights=weights).fitted_to(targets)
    short_names = [short_name(name) for name in args.specs]
    estimates: list[CostEstimate] = []
    for name, short, target in zip(args.specs, short_names, targets, strict=True):
        label = name if short_names.count(short) > 1 else short
        estimates.append(estimate_cost(target, workload, label))
    return CostReport(tuple(estimates))


def load_target(name: str, args: CostOptions, changes: Sequence[str]) -> SpecOrModel:
    """Load the spec or model with this name, or the layer of it that --layer selects."""
    from ..costs.workload import select_layer
    from ..model_spec import ModelSpec

    size_options = {"model": args.model, "heads": args.heads}
    sizes = {size: number for size, number in size_options.items() if number is not None}
    target = resolve_target(name, sizes, changes)
    if args.layer is None:
        return target
    if isinstance(target, ModelSpec):
        return select_layer(target, args.layer)
    raise UsageError(
        f"--layer {args.layer} is for models, and {name} is one layer; leave --layer out"
    )


def with_unique_names(costs: CostReport) -> dict[str, CostEstimate]:
    """Return the estimates by name; a repeated name gets a number, as in "gqa (2)"."""
    counts: Counter[str] = Counter()
    by_name: dict[str, CostEstimate] = {}
    for estimate in costs:
        counts[estimate.name] += 1
        number = counts[estimate.name]
        by_name[estimate.name if number == 1 else f"{estimate.name} ({number})"] = estimate
    return by_name


# --- `--match` ------------------------------------------------------------------------------------


def _match_sizes(args: CostOptions, costs: CostReport) -> tuple[CostReport, View | None]:
    """With --match, resize every spec to match the first; return the new estimates, and a report of
    the changes.
    """
    if args.match is None:
        return costs, None
    from ..costs.cost_report import CostReport, estimate_cost

    (first_name, first), *others = with_unique_names(costs).items()
    if not others:
        fact = f"--match resizes others to match the first, and there is only {first_name}"
        raise UsageError(f"{fact}; name one more")
    free = _free_sizes(args, [name for name, _ in others])
    like = _spec_to_match(first_name, first)
    estimates = [first]
    matches: dict[str, SizeMatch] = {}
    for name, other in others:
        from ..costs.size_matching import match_size

        spec = _spec_to_match(name, other)
        workload = other.workload
        try:
            match = match_size(spec, like=like, by=args.match, free=free[name], workload=workload)
        except SpecError as error:
            raise UsageError(f"cannot resize {name} to match {first_name}: {error}") from None
        matches[name] = match
        estimates.append(estimate_cost(match.spec, workload, other.name))
    rows = [{"name": name, **match.data} for name, match in matches.items()]
    lines = [f"{name}: {match}" for name, match in matches.items()]
    view = View({"like": first_name, "rows": rows}, [f"resized to match {first_name}:", lines])
    return CostReport(tuple(estimates)), view


def _free_sizes(args: CostOptions, names: list[str]) -> dict[str, str | None]:
    """Return the size that --resize names for each spec; None if it names none."""
    free: dict[str, str | None] = dict.fromkeys(names)
    for text in args.resize:
        name, equals, size = text.rpartition("=")
        if equals and name not in free:
            raise UsageError(
                f"--resize {text}: there is no resized spec {name!r}; {suggest(name, free)}"
            )
        free |= {name: size} if equals else dict.fromkeys(names, size)
    return free


def _spec_to_match(name: str, estimate: CostEstimate) -> AttentionSpec:
    from ..spec.attention_spec import AttentionSpec

    if isinstance(estimate.spec_or_model, AttentionSpec):
        return estimate.spec_or_model
    fact = f"--match changes single layers, and {name} is a model"
    raise UsageError(f"{fact}; select one attention, as in --layer 0.attention")


# --- Reports besides the table of costs -----------------------------------------------------------


def _published_view(args: CostOptions, costs: CostReport) -> View:
    """Compare published formulas with the estimates, by source."""
    from ..costs.published_formulas import FormulaSource, compare_formulas

    data: list[dict[str, Any]] = []
    items: list[Item] = []
    for source in map(FormulaSource.from_name, args.published):
        items.append(f"{source.name}: {source.source}")
        lines: list[str] = []
        for estimate in costs:
            for row in compare_formulas(estimate, source):
                data.append(row._asdict())
                value = "not estimated" if row.estimate is None else f"{row.estimate:,}"
                lines.append(
                    f"{row.name}: {row.quantity} = {row.formula}: published {row.published:,}, "
                    f"headwise {value}: {row.explanation}"
                )
        items.append(lines)
    return View(data, items)


def _optimiser_view(args: CostOptions, costs: CostReport) -> View:
    """Bytes of weights, gradients and optimiser state."""
    from ..costs.training_memory import OptimiserMemory
    from ..report.data import Table

    optimiser = OptimiserMemory.from_name(args.optimiser or "")
    each = optimiser.bytes_per_parameter
    rows: list[dict[str, Any]] = []
    for estimate in costs:
        count = estimate.parameters.total
        row: dict[str, Any] = {"name": estimate.name}
        row |= {name: size * count for name, size in optimiser.bytes_by_tensor.items()}
        rows.append(row | {"in_all": each * count, "weights_for_inference": estimate.weights_bytes})
    title = f"training state, {each} bytes per parameter; {optimiser.name}: {optimiser.description}"
    labels = {"name": "bytes", "in_all": "total", "weights_for_inference": "weights for inference"}
    names = [row["name"] for row in rows]
    cells = [
        (labels.get(key, key), *(row[key] for row in rows)) for key in rows[0] if key != "name"
    ]
    data = {"optimiser": optimiser.name, "bytes_each": each, "rows": rows}
    return View(data, [Table(title, ["bytes", *names], cells)])


def _activations_view(args: CostOptions, costs: CostReport) -> View:
    """Activation memory of training: saved and peak bytes, and recomputed FLOPs."""
    from ..costs import training_memory
    from ..report.data import Table

    checkpoint = "none" if args.checkpoint is None else args.checkpoint
    settings = training_memory.ActivationSettings(
        args.profile or "", checkpoint, args.dropout or 0.0, args.source
    )
    recomputed_things = {"none": "nothing", "block": "blocks", "core": "cores"}
    data: dict[str, Any] = {}
    items: list[Item] = []
    for estimate in costs:
        of = (estimate.spec_or_model, estimate.workload, settings)
        saved = training_memory.activation_memory(*of)
        peak = training_memory.peak_activation_memory(*of)
        recomputed = training_memory.recompute_flops(*of).total
        profile = training_memory.attention_profiles(*of)
        data[estimate.name] = {
            "profile": profile,
            "checkpoint": checkpoint,
            "dropout": settings.dropout,
            "kept_bytes": saved.total,
            "peak_bytes": peak,
            "recomputed_flops": recomputed,
            "terms": [{"name": term.name, "value": term.value} for term in saved.terms],
        }
        what = recomputed_things[checkpoint]
        title = f"{estimate.name}: in training, {profile}, {what} recomputed"
        rows: list[tuple[str, int]] = [("saved, total", saved.total), ("peak", peak)]
        rows += [("recomputed, FLOPs", recomputed)] if recomputed else []
        rows += [(f"  {term.name}", term.value) for term in saved.terms]
        items.append(Table(title, ["", "bytes"], rows))
    return View(data, items)


def _complexity_view(args: CostOptions, costs: CostReport) -> View:
    """The table of complexities; with --complexity measured, the scaling and the reach of small
    layers.
    """
    from ..costs.complexity import ComplexityTable, LayerSizes, measure_scaling
    from ..costs.layer_reach import measure_layer_reach

    estimate = costs.estimates[0]
    spec = next(iter(estimate.attention_specs.values()), None)
    if spec is None:
        fact = f"--complexity takes its width from an attention layer, and {estimate.name} has none"
        raise UsageError(f"{fact}; name a spec first")
    sizes = LayerSizes(
        tokens=estimate.workload.context,
        model=spec.model,
        heads=math.gcd(spec.heads.q, spec.model),
        kernel=DEFAULT_KERNEL if args.kernel is None else args.kernel,
        window=DEFAULT_WINDOW if args.window is None else args.window,
    )
    table = ComplexityTable.from_sizes(sizes)
    if args.complexity == "counted":
        return View(table.data | {"measured": None, "reach": None}, table.items)
    scaling = measure_scaling(sizes)
    reach = measure_layer_reach()
    data = table.data | {"measured": scaling.data, "reach": reach.data}
    return View(data, [*table.items, *scaling.items, *reach.items])


def _plot_view(args: CostOptions, costs: CostReport) -> View:
    """Draw the plot into its file."""
    from ..costs.cost_plots import save_plot

    kind = args.plot_kind or "all"
    assert args.plot is not None
    save_plot(with_unique_names(costs), args.plot, kind, overwrite=args.overwrite)
    return View({"file": args.plot, "kind": kind}, [f"plot written to {args.plot}"])


def _verified_view(args: CostOptions, costs: CostReport) -> View:
    """Check every formula against a small layer of each attention spec."""
    from ..costs.formula_checks import check_formulas
    from ..report.data import Table

    data: dict[str, list[dict[str, Any]]] = {}
    items: list[Item] = []
    for estimate in costs:
        for layer, spec in estimate.attention_specs.items():
            name = estimate.name if layer == estimate.name else f"{estimate.name}: {layer}"
            checks = check_formulas(spec)
            data[name] = [{**check._asdict(), "holds": check.holds} for check in checks]
            rows = [
                (check.what, check.formula, check.measured, "equal" if check.holds else "WRONG")
                for check in checks
            ]
            title = f"{name}: a small layer of this kind"
            items.append(Table(title, ["", "formula", "measured", ""], rows))
    return View(data, items)


ViewMaker = Callable[[CostOptions, "CostReport"], View]
# When a view is shown, and the function that makes it.
VIEWS: dict[str, tuple[Callable[[CostOptions], bool], ViewMaker]] = {
    "published": (lambda args: bool(args.published), _published_view),
    "training_state": (lambda args: args.optimiser is not None, _optimiser_view),
    "training": (
        lambda args: args.activations or {args.profile, args.checkpoint, args.dropout} != {None},
        _activations_view,
    ),
    "complexity": (lambda args: args.complexity is not None, _complexity_view),
    "plot": (lambda args: args.plot is not None, _plot_view),
    "verified": (lambda args: args.verify, _verified_view),
}


def _csv_of_costs(args: CostOptions, costs: CostReport, views: Mapping[str, View]) -> str:
    """Return the costs as CSV; raise an error if other reports were requested too."""
    unsupported = [f"--{name}" for name in NOT_IN_CSV if getattr(args, name)]
    unsupported += [name for name in views if name not in ("matched", "plot")]
    if unsupported:
        raise UsageError(
            f"--csv has one line per spec and no room for {unsupported[0]}; use --json instead"
        )
    from ..costs.cost_plots import to_csv

    return to_csv(costs.data["rows"])


def _print_article(args: CostOptions) -> int:
    """Print the table of --article, which is of models of its own."""
    from ..costs.published_formulas import ArticleTable

    table = ArticleTable.from_name(args.article or "")
    print_page(to_json(table.data) if args.json else _format_items(table.tables))
    return 0
