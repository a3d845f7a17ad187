"""`headwise cost`: estimate the costs of specs and models side by side."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from ..util.errors import SpecError, suggest
from .arguments import print_page, print_result, resolve_cost_target, short_name, to_json
from .options import Options, TokenCount, UsageError, options

if TYPE_CHECKING:
    from ..costs.components import SpecOrModel
    from ..costs.cost_estimate import CostEstimate
    from ..costs.cost_report import CostReport
    from ..report.data import Item


class View(NamedTuple):
    """An extra report: shown as text, or under its name in the JSON document."""

    data: Any
    items: Sequence[Item]


def main(argv: list[str]) -> int:
    """Print the costs of every target on the command line."""
    args = CostOptions.parse(argv)
    if args.article is not None:
        from ..costs.published_article import ArticleTable

        article = ArticleTable.from_name(args.article)
        print_result(args, _format_items(article.tables), article.data)
        return 0
    if args.plot is not None:
        from ..report.plots import check_figure_path

        check_figure_path(args.plot, args.existing)
    costs = estimate_costs(args)
    views: dict[str, View] = {}
    if args.match is not None:
        costs, views["matched"] = _match_sizes(args, args.match, costs)
    for name, (is_wanted, make_view) in VIEWS.items():
        if is_wanted(args):
            views[name] = make_view(args, costs)
    if args.json:
        print_page(to_json(costs.data | {name: view.data for name, view in views.items()}))
    else:
        items = [*costs.items, *(costs.operations if args.operations else ())]
        items += costs.terms if args.terms else []
        for view in views.values():
            items += view.items
        print_page(_format_items(items))
    return 0


def _format_items(items: Sequence[Item]) -> str:
    from ..report.render import to_text

    return "\n\n".join(map(to_text, items))


# --- Options --------------------------------------------------------------------------------------


@options
class CostOptions(Options):
    """Estimate what attention layers and models cost before they run: parameters, FLOPs, KV cache,
    and the lower-bound latency.

    WHAT  a preset, a model such as gpt3, a file (.gguf: its header), a folder, or a Hub id
        (org/name), of which only the settings are downloaded
    --model WIDTH  model dimension of the presets
    --heads COUNT  number of query heads of the presets
    --set KEY=VALUE  change a field, as in heads.kv=4 or pattern='window(256)'; repeatable
    --layer PLACE  one block of a model (3 or encoder.3), or 3.attention
    --context TOKENS  tokens per row, as in 8192 or 8k (default: 2048, or the maximum of a model)
    --generate TOKENS  tokens to generate after the context
    --batch ROWS  batch size
    --dtype NAME  bf16, fp16, fp32, fp8, int8 or mxfp4
    --device NAME  h200, h100, a100, l40s, rtx4090, m2-max, cpu, or here (default: none, without
        times; h200 with --operations, --plot and --json)
    --match WHAT  resize each spec to match the first: params, flops or kv
    --operations  table of operations: FLOPs, bytes, lower-bound latency, bottleneck
    --plot FILE  draw plots into a .svg, .png or .pdf file
    --json  print one JSON document instead of text

    details of comparing:
    --resize [SPEC=]SIZE  size that --match changes: dim, vdim, kv, q, model, or one of a part, as
        in mla=project.rank; repeatable
    --complexity  compare with recurrent and convolutional layers

    published numbers:
    --article NUMBER  table of an article with numbers of GPT-3 and LLaMA-65B: 624740065

    memory of training:
    --optimiser NAME  memory of weights, gradients and optimiser: zero, megatron, zhihu-624740065,
        adam-fp32, sgd-momentum or muon
    --activations  bytes saved for the backward pass, by step
    --profile NAME  backend that attention runs on in training: dense, chunked, bf16_matmul, sdpa or
        flash-cuda
    --checkpoint WHAT  what the backward pass recomputes: none or block (default: none)
    --dropout RATE  dropout rate after every residual branch (default: 0)

    plots:
    --overwrite  replace an earlier output of this command

    details of the estimate:
    --source TOKENS  tokens that cross-attention reads (default: the context)
    --weights DTYPE  format of the weights, such as fp8 (default: as stored, or --dtype)
    --terms  every term with the formula that it was computed by

    examples:
    headwise cost gqa mla --model 4096 --heads 32 --context 32768 --batch 16
    headwise cost path/to/config.json --generate 256 --operations
    """

    command = "cost"
    names = {"WHAT": "specs", "--set": "changes"}
    choices = {"match": "params flops kv"}
    needs = {"resize": "match"}
    excludes = ("article specs",)
    specs: tuple[str, ...] = ()
    model: int | None = None
    heads: int | None = None
    changes: tuple[str, ...] = ()
    layer: str | None = None
    context: TokenCount | None = None
    generate: TokenCount = 0
    batch: int = 1
    dtype: str = "bf16"
    device: str | None = None
    match: str | None = None
    operations: bool = False
    plot: str | None = None
    json: bool = False
    resize: tuple[str, ...] = ()
    complexity: bool = False
    article: str | None = None
    optimiser: str | None = None
    activations: bool = False
    profile: str | None = None
    checkpoint: str | None = None
    dropout: float | None = None
    overwrite: bool = False
    source: TokenCount | None = None
    weights: str | None = None
    terms: bool = False

    def check(self) -> None:
        """Refuse options that have no effect."""
        if self.profile == "":
            raise UsageError("--profile is empty; leave it out, or name one such as sdpa")


# --- What is estimated ----------------------------------------------------------------------------


def estimate_costs(args: CostOptions) -> CostReport:
    """Estimate the cost of every target on the command line, in order."""
    if not args.specs:
        raise UsageError(
            "name at least one spec or model: a file, a model's folder, or a preset such as gqa"
        )
    from ..costs.cost_estimate import estimate_cost
    from ..costs.cost_report import CostReport
    from ..costs.weight_storage import STORED
    from ..costs.workload import Workload

    targets = [load_target(name, args, args.changes) for name in args.specs]
    names = ("batch", "context", "dtype", "device", "source", "generate")
    settings: dict[str, Any] = {name: getattr(args, name) for name in names}
    if args.device is None:
        del settings["device"]
    weights = STORED if args.weights is None else args.weights
    workload = Workload(**settings, weights=weights).fitted_to(targets)
    short_names = [short_name(name) for name in args.specs]
    estimates: list[CostEstimate] = []
    for name, short, target in zip(args.specs, short_names, targets, strict=True):
        label = name if short_names.count(short) > 1 else short
        estimates.append(estimate_cost(target, workload, label))
    names_device = bool(args.device or args.operations or args.plot)
    return CostReport(tuple(estimates), names_device)


def load_target(name: str, args: CostOptions, changes: Sequence[str]) -> SpecOrModel:
    """Load the spec or model with this name, or the layer of it that --layer selects."""
    from ..costs.workload import select_layer
    from ..models.model_spec import ModelSpec

    values = {"--set": changes or None, "--activations": args.activations or None}
    values |= {f"--{key}": getattr(args, key) for key in ("layer", "profile", "checkpoint")}
    values["--dropout"] = args.dropout
    options = [option for option, value in values.items() if value is not None]
    sizes = {"model": args.model, "heads": args.heads}
    target = resolve_cost_target(name, sizes, changes, options)
    if args.layer is None:
        return target
    if isinstance(target, ModelSpec):
        return select_layer(target, args.layer)
    raise UsageError(
        f"--layer {args.layer} is for models that headwise reads, and {name} is one layer; leave "
        "--layer out"
    )


def with_unique_names(costs: CostReport) -> dict[str, CostEstimate]:
    """Return the estimates by name; a repeated name gets a number, as in "gqa (2)"."""
    by_name: dict[str, CostEstimate] = {}
    for estimate in costs:
        name = estimate.name
        number = 1
        while name in by_name:
            number += 1
            name = f"{estimate.name} ({number})"
        by_name[name] = estimate
    return by_name


# --- `--match` ------------------------------------------------------------------------------------


def _match_sizes(args: CostOptions, by: str, costs: CostReport) -> tuple[CostReport, View]:
    """Resize every spec to match the first; return the new estimates and a report."""
    from ..attention.spec.attention_spec import AttentionSpec
    from ..costs.cost_estimate import estimate_cost
    from ..costs.cost_report import CostReport
    from ..costs.size_matching import match_size

    estimates = with_unique_names(costs)
    (first_name, first), *others = estimates.items()
    if not others:
        fact = f"--match resizes others to match the first, and there is only {first_name}"
        raise UsageError(f"{fact}; name one more")
    free = dict.fromkeys(estimates)
    del free[first_name]
    for text in args.resize:  # the size that --resize names for one spec, or for all
        name, equals, size = text.rpartition("=")
        if equals and name not in free:
            fact = f"--resize {text}: there is no resized spec {name!r}"
            raise UsageError(f"{fact}; {suggest(name, free)}")
        free |= dict.fromkeys([name] if equals else free, size)
    specs: dict[str, AttentionSpec] = {}
    for name, estimate in estimates.items():
        if not isinstance(estimate.spec_or_model, AttentionSpec):
            fact = f"--match changes single layers, and {name} is a model"
            raise UsageError(f"{fact}; select one attention, as in --layer 0.attention")
        specs[name] = estimate.spec_or_model
    resized = [first]
    rows: list[dict[str, Any]] = []
    lines: list[str] = []
    like = specs[first_name]
    for name, other in others:
        workload = other.workload
        try:
            match = match_size(specs[name], like=like, by=by, free=free[name], workload=workload)
        except SpecError as error:
            raise UsageError(f"cannot resize {name} to match {first_name}: {error}") from None
        resized.append(estimate_cost(match.spec, workload, other.name))
        rows.append({"name": name, **match.data})
        lines.append(f"{name}: {match}")
    view = View({"like": first_name, "rows": rows}, [f"resized to match {first_name}:", lines])
    return CostReport(tuple(resized), costs.names_device), view


# --- Reports besides the table of costs -----------------------------------------------------------


def _optimiser_view(args: CostOptions, costs: CostReport) -> View:
    """Show bytes of weights, gradients and optimiser state."""
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
    names, *cells = [(labels.get(key, key), *map(itemgetter(key), rows)) for key in rows[0]]
    data = {"optimiser": optimiser.name, "bytes_each": each, "rows": rows}
    return View(data, [Table(title, names, cells)])


def _activations_view(args: CostOptions, costs: CostReport) -> View:
    """Show activation memory of training: saved and peak bytes, and recomputed FLOPs."""
    from ..costs import training_memory
    from ..costs.counted_model import CountedModel
    from ..report.data import Table

    checkpoint = "none" if args.checkpoint is None else args.checkpoint
    settings = training_memory.ActivationSettings(
        args.profile or "", checkpoint, args.dropout or 0.0, args.source
    )
    recomputed_things = {"none": "nothing", "block": "blocks"}
    data: dict[str, Any] = {}
    items: list[Item] = []
    for estimate in costs:
        model = estimate.spec_or_model
        assert not isinstance(model, CountedModel)  # load_target refuses --activations of one
        of = (model, estimate.workload, settings)
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
    """Show the table of complexities."""
    from ..costs.complexity import ComplexityTable, LayerSizes

    estimate = costs.estimates[0]
    spec = next(iter(estimate.attention_specs.values()), None)
    if spec is None:
        fact = f"--complexity takes its width from an attention layer, and {estimate.name} has none"
        raise UsageError(f"{fact}; name a spec first")
    sizes = LayerSizes(
        tokens=estimate.workload.context,
        model=spec.model,
        heads=math.gcd(spec.heads.q, spec.model),
    )
    table = ComplexityTable.from_sizes(sizes)
    return View(table.data, table.items)


def _plot_view(args: CostOptions, costs: CostReport) -> View:
    """Draw the plot into its file."""
    from ..costs.cost_report import save_plot

    assert args.plot is not None
    save_plot(with_unique_names(costs), args.plot, "all", overwrite=args.overwrite)
    return View({"file": args.plot}, [f"plot written to {args.plot}"])


ViewMaker = Callable[[CostOptions, "CostReport"], View]
# When a view is shown, and the function that makes it.
VIEWS: dict[str, tuple[Callable[[CostOptions], bool], ViewMaker]] = {
    "training_state": (lambda args: args.optimiser is not None, _optimiser_view),
    "training": (
        lambda args: args.activations or {args.profile, args.checkpoint, args.dropout} != {None},
        _activations_view,
    ),
    "complexity": (lambda args: args.complexity, _complexity_view),
    "plot": (lambda args: args.plot is not None, _plot_view),
}
