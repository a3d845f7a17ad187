"""`headwise heads`: measure and classify every head of a model; optionally importance, redundancy
and a baseline.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..output_paths import check_output
from ..progress import ProgressReporter
from ..translation.terminal_text import wrap
from . import known_names
from .argument_checks import (
    check_choice,
    check_engine,
    check_heads_of_config,
    check_input_file,
    check_model_path,
    check_output_folder,
    check_positive,
)
from .arguments import (
    add_engine_arguments,
    add_json_argument,
    add_overwrite_argument,
    existing_mode,
    print_note,
    print_page,
    supports_style,
    to_json,
)
from .command_parser import CommandParser, UsageError
from .one_text import ONE_TEXT_OPTIONS, add_one_text_arguments, check_one_text, show_one_text
from .text_arguments import (
    add_text_arguments,
    attach_named_tokenizer,
    check_text_arguments,
    read_examples,
)

if TYPE_CHECKING:
    from ..head_analysis.annotated_examples import Example
    from ..head_analysis.head_redundancy import RedundancyResult
    from ..head_analysis.head_table import HeadTable, ImportanceResult


TRACE_SUFFIX = ".trace"


@dataclass
class ExtraAnalyses:
    """Results of --importance, --redundancy and --random-baseline; None if not requested.

    `weights` holds the results of --circuits, --spectra and --collapse as plain values. `lines`
    summarise all of them.
    """

    importance: ImportanceResult | None = None
    redundancy: RedundancyResult | None = None
    random_baseline: HeadTable | None = None
    weights: dict[str, Any] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)

    @property
    def data(self) -> dict[str, Any]:
        """Results as plain values, by option."""
        results = {
            "importance": self.importance,
            "redundancy": self.redundancy,
            "random_baseline": self.random_baseline,
        }
        return {
            name: result.data for name, result in results.items() if result is not None
        } | self.weights


def add_extra_arguments(parser: CommandParser) -> None:
    """Add --importance, --redundancy and --random-baseline."""
    parser.add_argument(
        "--importance",
        metavar="METHOD",
        help="estimate head importance: leave-one-out, michel or shapley",
    )
    parser.add_argument(
        "--redundancy",
        action="store_true",
        help="measure how similar heads are, compared with chance",
    )
    parser.add_argument(
        "--random-baseline",
        action="store_true",
        help="also measure a randomly initialised copy of the model",
    )


def run_extras(
    model: Any,
    table: HeadTable,
    examples: Sequence[Example],
    args: argparse.Namespace,
    measure: Callable[[Any], HeadTable],
    report: ProgressReporter,
) -> tuple[HeadTable, ExtraAnalyses]:
    """Run the requested analyses; `measure` makes the head table of another model. Return the table
    and the results.
    """
    extras = ExtraAnalyses()
    if args.importance is not None:
        extras.importance = _measure_importance(model, examples, args, report)
        table = _add_importance(table, extras)
    baseline = None
    if args.random_baseline:
        from ..head_analysis.random_baseline import make_random_baseline

        baseline = make_random_baseline(model, seed=args.seed)
        extras.random_baseline = measure(baseline)
        extras.lines.append(
            f"classes here: {_count_classes(table)}; of the randomly initialised model: "
            f"{_count_classes(extras.random_baseline)}"
        )
    if args.redundancy:
        from ..head_analysis.head_redundancy import measure_redundancy

        report("comparing heads")
        extras.redundancy = measure_redundancy(model, examples, name=table.model)
        extras.lines += extras.redundancy.sentence.splitlines()
        if baseline is not None:
            of_baseline = measure_redundancy(baseline, examples, name="its random baseline")
            extras.lines += extras.redundancy.compare_with(of_baseline).splitlines()
    _describe_weights(model, examples, args, extras)
    return table, extras


def _describe_weights(
    model: Any, examples: Sequence[Example], args: argparse.Namespace, extras: ExtraAnalyses
) -> None:
    """Run --circuits, --spectra and --collapse."""
    from ..head_analysis import circuit_summary, rank_analysis

    if args.circuits:
        heads = circuit_summary.measure_head_circuits(model)
        extras.weights["circuits"] = [head.data for head in heads]
        extras.lines += circuit_summary.describe_circuits(heads)
    if args.spectra:
        spectra = rank_analysis.measure_qk_spectra(model, seed=args.seed)
        extras.weights["spectra"] = [spectrum.data for spectrum in spectra]
        extras.lines += [circuit_summary.describe_spectrum(spectrum) for spectrum in spectra]
    if args.collapse:
        depths = rank_analysis.measure_rank_collapse(model, examples)
        extras.weights["collapse"] = circuit_summary.collapse_data(depths)
        extras.lines += circuit_summary.describe_collapse(depths)


def _measure_importance(
    model: Any, examples: Sequence[Example], args: argparse.Namespace, report: ProgressReporter
) -> ImportanceResult:
    from ..head_analysis.head_importance import estimate_importance
    from ..head_analysis.importance_methods import ImportanceOptions

    options = ImportanceOptions(
        max_seconds=args.budget,
        normalisation="layer" if args.normalise_layers else "",
        seed=args.seed,
    )
    progress = report.counter(f"importance of heads ({args.importance})", len(examples), "texts")
    return estimate_importance(
        model, examples, method=args.importance, options=options, progress=progress
    )


def _add_importance(table: HeadTable, extras: ExtraAnalyses) -> HeadTable:
    """Return the table with the importance of every head as a measure; adds a line on the most
    important ones.
    """
    from ..head_analysis.measure_tables import format_interval

    result = extras.importance
    assert result is not None
    by_head = {(head.site, head.head): head.measure for head in result.heads}
    heads = tuple(
        replace(head, measures={**head.measures, "importance": by_head[head.site, head.head]})
        if (head.site, head.head) in by_head
        else head
        for head in table.heads
    )
    top_heads = ", ".join(
        f"{head.site} {head.head} {format_interval(head.measure)}"
        for head in result.by_importance[:5]
    )
    extras.lines.append(
        f"importance ({result.method}, {result.objective}, {result.texts} texts), with 95 % "
        "intervals: most important "
        f"are {top_heads}"
    )
    return replace(table, heads=heads, notes=(*table.notes, *result.notes))


def _count_classes(table: HeadTable) -> str:
    from ..head_analysis.head_figures import class_group

    counts = Counter(
        group
        for head in table.heads
        for group in {class_group(head_class.name) for head_class in head.classes}
    )
    return ", ".join(f"{count} {name}" for name, count in counts.most_common()) or "no class"


def format_extras(extras: ExtraAnalyses) -> str:
    """Format each summary line as a paragraph."""
    return "".join("\n\n" + "\n".join(wrap(line)) for line in extras.lines)


# --- `headwise heads` -----------------------------------------------------------------------------


def main(argv: list[str]) -> int:
    """Measure and classify the heads of a model, print the table, and write figures if asked."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.model.endswith(TRACE_SUFFIX):
        return _draw_from_trace(args, parser)
    if args.text is not None:
        check_one_text(args, parser)
        return show_one_text(args)
    _check_arguments(args, parser)
    from ..hub.pretrained_models import load_original
    from ..inspect.attention_sites import sites

    model = load_original(args.model).eval()
    attach_named_tokenizer(model, args)
    drawn_heads = _locate_drawn_heads(args, sites(model)) if args.draw else []
    examples, notes, sites_of_images = _read_examples(model, args)
    report = ProgressReporter()
    measure = partial(
        _measure_model, examples=examples, args=args, report=report, site_names=sites_of_images
    )
    table, extras = run_extras(model, measure(model), examples, args, measure, report)
    table = replace(table, notes=(*table.notes, *notes))
    report("")
    if args.out is not None:
        from ..head_analysis.head_report import ReportOptions, write_head_report

        pair, existing = _parse_head_pair(args.pair), existing_mode(args)
        options = ReportOptions(extras.importance, extras.redundancy, pair, drawn_heads, existing)
        for name in write_head_report(model, table, examples, Path(args.out), options):
            print_note(name)
    print_page(
        to_json(table.data | extras.data)
        if args.json
        else _format_table(table, args) + format_extras(extras)
    )
    return 0


def _read_examples(
    model: Any, args: argparse.Namespace
) -> tuple[list[Example], tuple[str, ...], tuple[str, ...]]:
    """The texts or images that the options name, notes on what was skipped, and the sites to
    measure (empty: all).
    """
    if args.images is None:
        return (*read_examples(model, args), ())
    from ..head_analysis.head_metrics import NOT_FOR_IMAGES
    from ..head_analysis.image_examples import examples_from_images

    images = examples_from_images(model, args.images, args.limit)
    return images.examples, (*images.notes, NOT_FOR_IMAGES), images.sites


def _parser() -> CommandParser:
    parser = CommandParser(
        "heads",
        "Measure what every head of a model attends to over texts or images, compare it with "
        "chance, and classify the "
        "heads, with confidence intervals.",
        "headwise heads path/to/model --data texts.txt --importance michel",
        "headwise heads path/to/model --text 'The cat sat.' --show norms",
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a headwise or transformers folder; with --draw also a .trace file",
    )
    add_text_arguments(
        parser,
        "use examples of a task with known alignments: dates",
        "read parsed sentences, and measure their dependency relations",
    )
    parser.add_argument(
        "--images", metavar="PATH", help="images of a vision model: a folder, or an .npy"
    )
    parser.add_argument(
        "--sort", metavar="MEASURE", help="list heads by this measure, largest first"
    )
    add_extra_arguments(parser)
    parser.add_argument(
        "--out", metavar="DIR", help="write the table and figures (SVG, PNG) to this folder"
    )
    parser.add_argument(
        "--draw",
        nargs="+",
        default=[],
        metavar="HEAD",
        help="with --out, also draw these heads on the first text, such as L3H2 or SITE:HEAD",
    )
    add_overwrite_argument(parser)
    add_json_argument(parser)
    add_one_text_arguments(parser)
    _add_expert_arguments(parser)
    return parser


def _add_expert_arguments(parser: CommandParser) -> None:
    weights = parser.add_expert_group("weights and hidden states")
    weights.add_argument(
        "--circuits",
        action="store_true",
        help="copying score of each head, and the norms of its slice of W_O and of W_V W_O",
    )
    weights.add_argument(
        "--spectra",
        action="store_true",
        help=(
            "number of dimensions in which the heads of each layer compare tokens, beside "
            "Gaussian matrices"
        ),
    )
    weights.add_argument(
        "--collapse",
        action="store_true",
        help="how much the states of a text's tokens differ before and after all layers",
    )
    expert = parser.add_expert_group("details of the measurement")
    expert.add_argument(
        "--align",
        dest="align_files",
        nargs=3,
        metavar=("SOURCE", "TARGET", "GOLD"),
        help="read parallel lines, and word alignments as in 0-0 1-2 2?3",
    )
    expert.add_argument(
        "--criteria",
        default="ours",
        metavar="NAME",
        help=(
            "definitions of the head classes: ours, untested (ours without the test), clark or "
            "voita"
        ),
    )
    add_engine_arguments(
        expert,
        "where texts are measured: local: in this process; ray: on a cluster of several machines",
    )
    expert.add_argument("--seed", type=int, default=0, metavar="INT", help="random seed")
    expert.add_argument(
        "--budget",
        type=float,
        metavar="SECONDS",
        help="time limit for --importance (default: no limit)",
    )
    expert.add_argument(
        "--normalise-layers",
        action="store_true",
        help="with --importance, divide the scores of each layer by their l2 norm",
    )
    expert.add_argument(
        "--pair",
        nargs="*",
        default=[],
        metavar="SITE:HEAD",
        help=(
            "with --out, draw these two heads over each other (default: the most global and the "
            "most local)"
        ),
    )


def _check_arguments(args: argparse.Namespace, parser: CommandParser) -> None:
    check_model_path(args.model)
    if alone := [
        name for name in ONE_TEXT_OPTIONS if getattr(args, name) != parser.get_default(name)
    ]:
        raise UsageError(f"--{alone[0].replace('_', '-')} is for one text; add --text TEXT")
    check_text_arguments(args)
    if args.images is not None:
        _check_image_arguments(args)
    if args.answer_after and args.importance is None:
        raise UsageError("--answer-after limits the loss of --importance; add --importance METHOD")
    if args.normalise_layers and args.importance is None:
        raise UsageError("--normalise-layers needs scores to divide; add --importance METHOD")
    check_choice("--importance", args.importance, known_names.IMPORTANCE_METHODS)
    check_choice("--criteria", args.criteria, known_names.CRITERIA)
    if (
        args.conllu is args.align_files is args.task is args.images is None
    ):  # these have further measures
        check_choice("--sort", args.sort, _list_measures(args))
    check_positive("--budget", args.budget)
    if _parse_head_pair(args.pair) and args.out is None:
        raise UsageError("--pair needs a folder for the figure; add --out DIR")
    _check_engine(args)
    _check_drawing(args)


def _check_engine(args: argparse.Namespace) -> None:
    check_engine(args)
    if args.engine == "ray" and not args.conllu is args.align_files is args.task is None:
        raise UsageError(
            "--engine ray measures texts and images without dependencies and alignments; leave it "
            "out"
        )


def _check_image_arguments(args: argparse.Namespace) -> None:
    """Raise if an option is given that needs texts."""
    if args.criteria in ("clark", "voita"):
        raise UsageError(
            f"--criteria {args.criteria} is defined on texts; leave it out with --images"
        )
    if args.importance is not None:
        raise UsageError(
            "--importance needs texts or labels, and --images has neither; leave it out"
        )
    if args.tokenizer is not None:
        raise UsageError("--tokenizer is for texts; leave it out with --images")


def _list_measures(args: argparse.Namespace) -> tuple[str, ...]:
    """Return the measures of texts without annotations."""
    published = [
        name for name in known_names.LITERATURE_MEASURES if name.startswith(f"{args.criteria} ")
    ]
    return (
        *known_names.MEASURES,
        *published,
        *(() if args.importance is None else ("importance",)),
    )


def _check_drawing(args: argparse.Namespace) -> None:
    """Check --draw and --out."""
    from ..head_analysis.head_table import HEAD_NAME, check_head_name

    for name in args.draw:
        check_head_name(name)
        if (match := HEAD_NAME.fullmatch(name)) and match[1] == "L":
            check_heads_of_config(args.model, name, int(match[2]), [int(match[3])])
    if args.draw and args.out is None:
        raise UsageError("--draw needs a folder for the figures; add --out DIR")
    if args.out is not None:
        check_output_folder(args.out, "report of heads", existing_mode(args))
        from ..head_analysis.head_report import HEAD_REPORT

        check_output(args.out, HEAD_REPORT, existing_mode(args))


def _locate_drawn_heads(args: argparse.Namespace, layers: Sequence[Any]) -> list[tuple[str, int]]:
    from ..head_analysis.head_table import locate_head

    return [locate_head(name, layers) for name in args.draw]


def _draw_from_trace(args: argparse.Namespace, parser: CommandParser) -> int:
    """Draw heads of a trace, which needs neither the model nor texts."""
    _check_drawing(args)
    check_input_file("MODEL", args.model)
    if not args.draw:
        raise UsageError(
            f"{args.model} is a trace, whose heads can only be drawn; add --draw HEAD --out DIR"
        )
    unused = [name for name in vars(args) if getattr(args, name) != parser.get_default(name)]
    if unused := [name for name in unused if name not in ("model", "draw", "out", "overwrite")]:
        raise UsageError(
            f"--{unused[0].replace('_', '-')} needs a model, but {args.model} is a trace; leave "
            "it out"
        )
    from ..head_analysis.head_report import draw_traced_heads
    from ..traces import load_trace

    trace = load_trace(args.model)
    heads = _locate_drawn_heads(args, trace.layers)
    for site, head in heads:
        trace.head_weights(
            site, head, slice(0, 1)
        )  # refuse an unknown head before anything is written
    for name in draw_traced_heads(trace, heads, Path(args.out), existing_mode(args)):
        print_page(name)
    return 0


def _parse_head_pair(names: list[str]) -> list[tuple[str, int]]:
    """Parse --pair: two heads as (site, head), or an empty list."""
    parts = [name.rpartition(":") for name in names]
    if len(names) not in (0, 2) or not all(site and head.isdecimal() for site, _, head in parts):
        raise UsageError(
            f"--pair {' '.join(names)} is not two heads; write SITE:HEAD twice, as in "
            "encoder.0.attention:3"
        )
    return [(site, int(head)) for site, _, head in parts]


def _measure_model(
    model: Any,
    *,
    examples: Sequence[Example],
    args: argparse.Namespace,
    report: ProgressReporter,
    site_names: tuple[str, ...] = (),
) -> HeadTable:
    from ..head_analysis.dependency_syntax import DependencyScores
    from ..head_analysis.head_measurement import MeasureOptions
    from ..head_analysis.head_metrics import IMAGE_METRICS
    from ..head_analysis.text_analysis import measure_and_classify
    from ..head_analysis.word_alignment import AlignmentScores

    kind = "text" if args.images is None else "image"
    options = MeasureOptions(sites=site_names)
    options = options if args.images is None else options._replace(metrics=IMAGE_METRICS)
    if args.engine == "ray":
        from ..studies.ray_engine import RayHeads

        options = options._replace(engine=RayHeads(args.address))
    convention = "clark" if args.criteria == "clark" else "ours"
    has_links = args.align_files is not None or args.task is not None
    collectors = (
        [DependencyScores(convention=convention)]
        if args.conllu is not None
        else [AlignmentScores()]
        if has_links
        else []
    )
    progress = report.counter("measuring heads", len(examples), f"{kind}s")
    table = measure_and_classify(
        model,
        examples,
        criteria=args.criteria,
        options=options,
        collectors=collectors,
        progress=progress,
    )
    return replace(table, texts=table.texts.replace("text", kind))


def _format_table(table: HeadTable, args: argparse.Namespace) -> str:
    from ..head_analysis.head_figures import format_head_table, with_ansi_colour, without_colour
    from ..head_analysis.measure_tables import format_head_ranking

    if args.sort is not None:
        return format_head_ranking(table, args.sort)
    return format_head_table(table, with_ansi_colour if supports_style() else without_colour)
