"""`headwise heads`: measure and classify every head of a model; optionally importance, redundancy
and a baseline.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..output_paths import check_output
from ..progress import ProgressReporter
from ..report.data import Table
from ..report.render import to_text
from .argument_checks import check_heads_of_config, check_input_file, check_model_path
from .arguments import (
    check_engine,
    existing_mode,
    print_note,
    print_page,
    supports_style,
    to_json,
)
from .one_text import check_one_text, show_one_text
from .options import (
    Count,
    InputFiles,
    ModelFolder,
    Positive,
    UsageError,
    Words,
    check_choice,
    help_entries,
    options,
)
from .text_arguments import TextOptions, attach_named_tokenizer, read_examples

if TYPE_CHECKING:
    from ..head_analysis.annotated_examples import Example
    from ..head_analysis.head_redundancy import RedundancyResult
    from ..head_analysis.head_table import HeadTable, ImportanceResult


TRACE_SUFFIX = ".trace"


@options
class HeadsOptions(TextOptions):
    """Measure what every head of a model attends to over texts or images, compare it with chance, and
    classify the heads, with confidence intervals.

    --images PATH  images of a vision model: a folder, or an .npy
    --sort MEASURE  list heads by this measure, largest first
    --importance METHOD  estimate head importance: leave-one-out, michel or shapley
    --redundancy  measure how similar heads are, compared with chance
    --random-baseline  also measure a randomly initialised copy of the model
    --out DIR  write the table and figures (SVG, PNG) to this folder
    --draw HEAD  with --out, also draw these heads on the first text, such as L3H2 or SITE:HEAD;
        the model may then be a .trace file
    --overwrite  replace an earlier output of this command
    --json  print one JSON document instead of text
    --text TEXT  show the heads over this text alone; see --show in --help-all

    one text (--text):
    --show VIEW  weights, norms (weights times the length of values after W_O), rollout, logits
        (what heads add to a logit) or points (queries and keys of a head on a plane) (default:
        weights)
    --target TEXT  target text, for an encoder-decoder model
    --head HEAD  show weights, norms or points of this head, such as L3H2
    --over HOW  without --head, mean, max, min or sum over heads and layers (default: mean)
    --position INDEX  position whose logit --show logits explains (default: the last)
    --token ID  token id to explain (default: the likeliest token)
    --top COUNT  keys to list for each query (default: 3)
    --compare-text TEXT  compare the weights of every head with this text
    --compare-model MODEL  compare with another checkpoint on the same text

    weights and hidden states:
    --circuits  copying score of each head, and the norms of its slice of W_O and of W_V W_O
    --spectra  number of dimensions in which the heads of each layer compare tokens, beside
        Gaussian matrices
    --collapse  how much the states of a text's tokens differ before and after all layers

    details of the measurement:
    --align SOURCE TARGET GOLD  read parallel lines, and word alignments as in 0-0 1-2 2?3
    --criteria NAME  definitions of the head classes: ours, untested (ours without the test),
        clark or voita
    --engine NAME  where texts are measured: local: in this process; ray: on a cluster of several
        machines
    --address HOST:PORT  Ray cluster (default: start one here)
    --seed INT  random seed
    --budget SECONDS  time limit for --importance (default: no limit)
    --normalise-layers  with --importance, divide the scores of each layer by their l2 norm
    --pair SITE:HEAD  with --out, draw these two heads over each other (default: the most global
        and the most local)

    examples:
    headwise heads path/to/model --data texts.txt --importance michel
    headwise heads path/to/model --text 'The cat sat.' --show norms
    """

    command = "heads"
    names = {"--align": "align_files"}
    choices = {
        "importance": "head_analysis.head_importance:IMPORTANCE_METHODS",
        "show": "weights norms rollout logits points",
        "over": "head_analysis.attention_maps:AGGREGATIONS",
        "criteria": "head_analysis.head_classes:CLASSIFIERS",
        "engine": "local ray",
    }
    images: str | None = None
    sort: str | None = None
    importance: str | None = None
    redundancy: bool = False
    random_baseline: bool = False
    out: str | None = None
    draw: Words = ()
    overwrite: bool = False
    json: bool = False
    text: str | None = None
    show: str | None = None
    target: str | None = None
    head: str | None = None
    over: str | None = None
    position: int | None = None
    token: int | None = None
    top: Count | None = None
    compare_text: str | None = None
    compare_model: ModelFolder | None = None
    circuits: bool = False
    spectra: bool = False
    collapse: bool = False
    align_files: InputFiles = ()
    criteria: str = "ours"
    engine: str = "local"
    address: str = ""
    seed: int = 0
    budget: Positive | None = None
    normalise_layers: bool = False
    pair: Words = ()

    @property
    def text_sources(self) -> dict[str, bool]:
        """The options that name texts or images, and whether they are given."""
        more = {"--align": bool(self.align_files), "--images": self.images is not None}
        return super().text_sources | more

    def check(self) -> None:
        """Refuse what cannot work before the model is loaded."""
        entries = help_entries(HeadsOptions)
        one_text = {name for name, entry in entries.items() if entry.group == "one text (--text)"}
        if self.model.endswith(TRACE_SUFFIX):
            self._check_trace()
        elif self.text is not None:
            shared = ("model", "text", "tokenizer", "json")
            for name, flag in self.options_set.items():
                if name not in shared and name not in one_text:
                    raise UsageError(
                        f"{flag} needs many texts, and --text gives one; leave one of them out"
                    )
            check_one_text(self)
        else:
            check_model_path("MODEL", self.model)
            for name, flag in self.options_set.items():
                if name in one_text:
                    raise UsageError(f"{flag} is for one text; add --text TEXT")
            self._check_many_texts()
            self._check_drawing()

    def _check_many_texts(self) -> None:
        self.check_texts()
        if self.images is not None:
            self._check_images()
        if self.answer_after and self.importance is None:
            raise UsageError(
                "--answer-after limits the loss of --importance; add --importance METHOD"
            )
        if self.normalise_layers and self.importance is None:
            raise UsageError("--normalise-layers needs scores to divide; add --importance METHOD")
        if self.sort is not None and self.data is not None:  # other texts have further measures
            check_choice("--sort", self.sort, self._list_measures())
        if _parse_head_pair(self.pair) and self.out is None:
            raise UsageError("--pair needs a folder for the figure; add --out DIR")
        check_engine(self.engine, self.address)
        if self.engine == "ray" and self.data is None and self.images is None:
            raise UsageError(
                "--engine ray measures texts and images without dependencies and alignments; "
                "leave it out"
            )

    def _check_images(self) -> None:
        """Refuse options that need texts."""
        if self.criteria in ("clark", "voita"):
            raise UsageError(
                f"--criteria {self.criteria} is defined on texts; leave it out with --images"
            )
        if self.importance is not None:
            raise UsageError(
                "--importance needs texts or labels, and --images has neither; leave it out"
            )
        if self.tokenizer is not None:
            raise UsageError("--tokenizer is for texts; leave it out with --images")

    def _list_measures(self) -> list[str]:
        """The measures of texts without annotations."""
        from ..head_analysis.head_metrics import HEAD_METRICS
        from ..head_analysis.literature_metrics import LITERATURE_METRICS

        published = [name for name in LITERATURE_METRICS if name.startswith(f"{self.criteria} ")]
        return [*HEAD_METRICS, *published, *(["importance"] if self.importance else [])]

    def _check_drawing(self) -> None:
        from ..head_analysis.head_table import HEAD_NAME, check_head_name

        for name in self.draw:
            check_head_name(name)
            match = HEAD_NAME.fullmatch(name)
            if match and match[1] == "L":
                check_heads_of_config(self.model, name, int(match[2]), [int(match[3])])
        if self.draw and self.out is None:
            raise UsageError("--draw needs a folder for the figures; add --out DIR")
        if self.out is not None:
            from ..head_analysis.head_report import HEAD_REPORT

            check_output(self.out, HEAD_REPORT, existing_mode(self))

    def _check_trace(self) -> None:
        """Refuse everything but drawing heads of a trace."""
        self._check_drawing()
        check_input_file("MODEL", self.model)
        if not self.draw:
            raise UsageError(
                f"{self.model} is a trace, whose heads can only be drawn; add --draw HEAD --out DIR"
            )
        for name, flag in self.options_set.items():
            if name not in ("model", "draw", "out", "overwrite"):
                raise UsageError(f"{flag} needs a model, but {self.model} is a trace; leave it out")


@dataclass
class ExtraAnalyses:
    """Results of --importance, --redundancy and --random-baseline; None if not requested.

    `weights` holds the results of --circuits, --spectra and --collapse as plain values. `items` are
    tables of all of them.
    """

    importance: ImportanceResult | None = None
    redundancy: RedundancyResult | None = None
    random_baseline: HeadTable | None = None
    weights: dict[str, Any] = field(default_factory=dict)
    items: list[Table] = field(default_factory=list)

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


def run_extras(
    model: Any,
    table: HeadTable,
    examples: Sequence[Example],
    args: HeadsOptions,
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
        extras.items.append(_count_classes(table, extras.random_baseline))
    if args.redundancy:
        from ..head_analysis.head_redundancy import measure_redundancy

        report("comparing heads")
        extras.redundancy = measure_redundancy(model, examples, name=table.model)
        extras.items.append(extras.redundancy.table)
        if baseline is not None:
            name = "random baseline"
            extras.items.append(measure_redundancy(baseline, examples, name=name).table)
    _describe_weights(model, examples, args, extras)
    return table, extras


def _describe_weights(
    model: Any, examples: Sequence[Example], args: HeadsOptions, extras: ExtraAnalyses
) -> None:
    """Run --circuits, --spectra and --collapse."""
    from ..head_analysis import head_circuits, rank_analysis

    if args.circuits:
        heads = head_circuits.measure_head_circuits(model)
        extras.weights["circuits"] = [head.data for head in heads]
        extras.items.append(head_circuits.circuit_table(heads))
    if args.spectra:
        spectra = rank_analysis.measure_qk_spectra(model, seed=args.seed)
        extras.weights["spectra"] = [spectrum.data for spectrum in spectra]
        extras.items.append(rank_analysis.spectra_table(spectra))
    if args.collapse:
        depths = rank_analysis.measure_rank_collapse(model, examples)
        extras.weights["collapse"] = [depth.data for depth in depths]
        extras.items.append(rank_analysis.collapse_table(depths))


def _measure_importance(
    model: Any, examples: Sequence[Example], args: Any, report: ProgressReporter
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
    """Return the table with the importance of every head as a measure."""
    result = extras.importance
    assert result is not None
    by_head = {(head.site, head.head): head.measure for head in result.heads}
    heads = tuple(
        replace(head, measures={**head.measures, "importance": by_head[head.site, head.head]})
        if (head.site, head.head) in by_head
        else head
        for head in table.heads
    )
    extras.items.append(replace(result, notes=()).table)
    return replace(table, heads=heads, notes=(*table.notes, *result.notes))


def _count_classes(table: HeadTable, baseline: HeadTable) -> Table:
    from ..head_analysis.head_table import class_group

    counts: list[Counter[str]] = []
    for one in (table, baseline):
        groups = [{class_group(named.name) for named in head.classes} for head in one.heads]
        counts.append(Counter(group for named in groups for group in named))
    names = sorted({*counts[0], *counts[1]}, key=lambda name: -counts[0][name])
    rows = [(name, counts[0][name], counts[1][name]) for name in names]
    return Table("heads by class", ("class", "this model", "randomly initialised"), rows)


# --- `headwise heads` -----------------------------------------------------------------------------


def main(argv: list[str]) -> int:
    """Measure and classify the heads of a model, print the table, and write figures if asked."""
    args = HeadsOptions.parse(argv)
    if args.model.endswith(TRACE_SUFFIX):
        return _draw_from_trace(args)
    if args.text is not None:
        return show_one_text(args)
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

        pair = _parse_head_pair(args.pair)
        existing = existing_mode(args)
        options = ReportOptions(extras.importance, extras.redundancy, pair, drawn_heads, existing)
        for name in write_head_report(model, table, examples, Path(args.out), options):
            print_note(name)
    if args.json:
        print_page(to_json(table.data | extras.data))
        return 0
    style = supports_style()
    shown = to_text(table.ranking(args.sort)) if args.sort else table.to_text(colour=style)
    print_page("\n\n".join([shown, *map(to_text, extras.items)]))
    return 0


def _read_examples(
    model: Any, args: HeadsOptions
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


def _locate_drawn_heads(args: HeadsOptions, layers: Sequence[Any]) -> list[tuple[str, int]]:
    from ..head_analysis.head_table import locate_head

    return [locate_head(name, layers) for name in args.draw]


def _draw_from_trace(args: Any) -> int:
    """Draw heads of a trace, which needs neither the model nor texts."""
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


def _parse_head_pair(names: Sequence[str]) -> list[tuple[str, int]]:
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
    args: HeadsOptions,
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
    has_links = bool(args.align_files) or args.task is not None
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
