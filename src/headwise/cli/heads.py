"""`headwise heads`: measure and classify every head of a model; optionally importance, redundancy
and a baseline.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..report.data import Estimate, Figure, Table
from ..report.progress import ProgressReporter
from ..report.render import to_plain, to_text
from .arguments import (
    attach_named_tokenizer,
    check_input_file,
    check_model_path,
    check_text_model,
    load_on_device,
    print_note,
    print_page,
    print_result,
    supports_style,
)
from .options import (
    Count,
    InputFiles,
    Natural,
    Positive,
    UsageError,
    Words,
    check_choice,
    options,
)
from .text_arguments import TextOptions, read_examples

if TYPE_CHECKING:
    from ..observe.head_analysis.annotated_examples import Example
    from ..observe.head_analysis.head_redundancy import RedundancyResult
    from ..observe.head_analysis.head_table import HeadTable, ImportanceResult
    from ..observe.head_analysis.retrieval_heads import Needle
    from ..observe.head_analysis.top_sequences import SequenceCollector

TRACE_SUFFIX = ".trace"
ANNOTATED_TEXTS = ("--conllu", "--align", "--task")  # these have further measures
ONE_TEXT = ("show", "target", "tokens", "position")  # options that need --text


@options
class HeadsOptions(TextOptions):
    """Measure what every head of a model attends to over texts or images, compare it with chance,
    and classify the heads, with confidence intervals. Without texts, it reads general ones that
    come with headwise.

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
    --show VIEW  weights, norms (weights times the length of values after W_O), rollout, or logits
        (what heads add to the logit of a next token)
    --target TEXT  target text, for an encoder-decoder model
    --head HEAD  weights or norms of this head, such as L3H2, or with --sequences instead of --text
        its texts (default: the mean of all heads, or the strongest text of each)
    --tokens A,B  with --show logits, the token, or the two whose difference of logits is explained
        (default: the likeliest)
    --position INDEX  with --show logits, position that predicts it; -1 is the last (default: -1)

    heads over a data set:
    --sequences COUNT  keep the COUNT texts on which each head is strongest, and some of each decile
    --by MEASURE  with --sequences, what makes a head strong: largest (its largest weight apart from
        sinks), or the weight of a query as previous, self, next, duplicate, induction or
        punctuation
    --jobs COUNT  measure texts in this many processes (default: in this one)

    weights and hidden states:
    --circuits  copying score of each head, and the norms of its slice of W_O and of W_V W_O
    --spectra  number of dimensions in which the heads of each layer compare tokens, beside
        Gaussian matrices
    --collapse  how much the states of a text's tokens differ before and after all layers

    long texts:
    --needles [FILE=made-up]  measure which heads retrieve facts that are hidden in the texts: those
        of lines NEEDLE, tab, QUESTION, or without FILE 10 that are made up
    --streaming DIR  measure which heads need only the first and latest tokens, and write their
        scores to this folder, as DuoAttention and kvpress read them
    --sinks COUNT  first tokens that streaming heads keep
    --window COUNT  latest tokens that streaming heads keep

    details of the measurement:
    --align SOURCE TARGET GOLD  read parallel lines, and word alignments as in 0-0 1-2 2?3
    --sinks-first  show a head as a sink if that is its likeliest class; without it, by what it does
        with the weight that sinks leave
    --criteria NAME  definitions of the head classes: ours, untested (ours without the test),
        clark or voita
    --engine NAME  where texts are measured: local: in this process; ray: on a cluster of several
        machines
    --address HOST:PORT  Ray cluster (default: start one here)
    --seed INT  random seed
    --budget SECONDS  time limit for --importance (default: no limit)
    --normalise-layers  with --importance, divide the scores of each layer by their l2 norm

    examples:
    headwise heads Qwen/Qwen3-0.6B
    headwise heads path/to/model --data texts.txt --importance michel
    """

    command = "heads"
    names = {"--align": "align_files"}
    choices = {
        "importance": "observe.head_analysis.head_importance:IMPORTANCE_METHODS",
        "show": "weights norms rollout logits",
        "criteria": "observe.head_analysis.head_classes:CLASSIFIERS",
        "engine": "local ray",
        "by": "observe.head_analysis.top_sequences:SEQUENCE_MEASURES",
    }
    needs = {
        **dict.fromkeys(ONE_TEXT, "text"),
        "draw": "out",
        "normalise_layers": "importance",
        "address": "engine",
        **dict.fromkeys(("sinks", "window"), "streaming"),
        "by": "sequences",
    }
    excludes = (
        *("images importance", "images tokenizer", "images needles"),
        *("images streaming", "images sequences"),
    )
    outputs = {
        "out": "observe.head_analysis.head_report:HEAD_REPORT",
        "streaming": "observe.head_analysis.retrieval_heads:STREAMING_HEADS",
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
    show: str = "weights"
    target: str | None = None
    head: str | None = None
    tokens: str | None = None
    position: int = -1
    sequences: Count | None = None
    by: str = "largest"
    jobs: Count | None = None
    circuits: bool = False
    spectra: bool = False
    collapse: bool = False
    needles: str | None = None
    streaming: str | None = None
    sinks: Natural = 64
    window: Count = 256
    align_files: InputFiles = ()
    sinks_first: bool = False
    criteria: str = "ours"
    engine: str = "local"
    address: str = ""
    seed: int = 0
    budget: Positive | None = None
    normalise_layers: bool = False

    @property
    def text_sources(self) -> dict[str, bool]:
        """Return the options that name texts or images, and which of them are set."""
        more = {"--align": bool(self.align_files), "--images": self.images is not None}
        return super().text_sources | more

    def check(self) -> None:
        """Refuse impossible options before the model is loaded."""
        from ..observe.head_names import parse_heads

        for name in (*self.draw, *filter(None, [self.head])):
            parse_heads(name)
        if self.model.endswith(TRACE_SUFFIX):
            check_input_file("MODEL", self.model)
            if not self.draw:
                fact = f"{self.model} is a trace, whose heads can only be drawn"
                raise UsageError(f"{fact}; add --draw HEAD --out DIR")
            self._allow_only(
                "model draw out overwrite", f"needs a model, but {self.model} is a trace"
            )
            return
        check_model_path("MODEL", self.model)
        if self.text is not None:
            shared = " ".join(("model text head tokenizer device dtype json", *ONE_TEXT))
            remedy = "leave it out, or give --data FILE instead of --text"
            self._allow_only(shared, "reads the texts of a file, and --text gives one", remedy)
            check_text_model(self.model, "--text", "give --images PATH")
            if self.head is not None and self.show in ("rollout", "logits"):
                raise UsageError("--head belongs to --show weights or norms; leave it out")
            if self.show != "logits" and {"tokens", "position"} & set(self.options_set):
                raise UsageError("--tokens and --position belong to --show logits; leave them out")
            return
        if self.head is not None and self.sequences is None:
            self.require("head", "text")
        if any(self.text_sources.values()):
            self.check_texts()
        else:
            check_text_model(self.model, "a measurement without options", "give --images PATH")
        if self.images is not None and self.criteria in ("clark", "voita"):
            fact = f"--criteria {self.criteria} is defined on texts"
            raise UsageError(f"{fact}; leave it out with --images")
        is_annotated = any(self.text_sources[name] for name in ANNOTATED_TEXTS)
        if self.sort is not None and self.images is None and not is_annotated:
            from ..observe.head_analysis.head_metrics import HEAD_METRICS, LITERATURE_METRICS

            published = [
                name for name in LITERATURE_METRICS if name.startswith(f"{self.criteria} ")
            ]
            measures = [*HEAD_METRICS, *published, *(["importance"] if self.importance else [])]
            measures += ["retrieval"] if self.needles else []
            measures += ["outside", "streaming_change"] if self.streaming else []
            check_choice("--sort", self.sort, measures)
        self.read_needles()  # refuses wrong lines

    def read_needles(self) -> list[Needle]:
        """Return the needles of --needles; made-up ones without a file."""
        from ..observe.head_analysis.retrieval_heads import MADE_UP, make_needles, read_needles

        if self.needles in (None, MADE_UP):
            return make_needles(seed=self.seed)
        check_input_file("--needles", self.needles)
        return read_needles(self.needles)

    def _allow_only(self, names: str, fact: str, remedy: str = "leave it out") -> None:
        for name, flag in self.options_set.items():
            if name not in names.split():
                raise UsageError(f"{flag} {fact}; {remedy}")


@dataclass
class ExtraAnalyses:
    """Results of --importance and --redundancy, the data of all analyses, and their tables."""

    importance: ImportanceResult | None = None
    redundancy: RedundancyResult | None = None
    data: dict[str, Any] = field(default_factory=dict[str, Any])
    items: list[Figure | Table] = field(default_factory=list[Figure | Table])

    def add(self, name: str, data: Any, table: Table) -> None:
        """Add the data and the table of one analysis."""
        self.data[name] = data
        self.items.append(table)


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
    from ..observe.head_analysis import head_circuits, rank_analysis, retrieval_heads as long

    extras = ExtraAnalyses()
    if args.importance is not None:
        from ..observe.head_analysis.head_importance import ImportanceOptions, estimate_importance

        options = ImportanceOptions(
            max_seconds=args.budget,
            normalisation="layer" if args.normalise_layers else "",
            seed=args.seed,
        )
        progress = report.counter(
            f"importance of heads ({args.importance})", len(examples), "texts"
        )
        result = extras.importance = estimate_importance(
            model, examples, method=args.importance, options=options, progress=progress, log=report
        )
        extras.items.append(result.grid)
        extras.add("importance", result.data, replace(result, notes=()).table)
        table = _add_measures(table, [(one, {"importance": one.measure}) for one in result.heads])
        table = table.with_notes(result.notes)
    over_long_texts: list[tuple[str, HeadTable]] = []
    if args.needles is not None:
        needles = args.read_needles()
        progress = report.counter("hidden needles", len(needles) * len(long.DEPTHS), "texts")
        retrieval = long.measure_retrieval(model, needles, examples, progress=progress)
        over_long_texts.append((long.RETRIEVAL, retrieval))
    if args.streaming is not None:
        report("measuring streaming heads")
        sizes = {"sinks": args.sinks, "window": args.window}
        streaming = long.measure_streaming(model, examples, **sizes)
        long.StreamingHeads.of(streaming, **sizes).write(args.streaming, args.existing)
        over_long_texts.append((long.CHANGE, streaming))
    for name, one in over_long_texts:
        extras.add(name, one.data, long.top_heads(one, name))
        table = _add_measures(table, [(head, head.measures) for head in one.heads])
    baseline = None
    if args.random_baseline:
        from ..observe.head_analysis.head_circuits import make_random_baseline

        baseline = make_random_baseline(model, seed=args.seed)
        measured = measure(baseline)
        extras.add("random_baseline", measured.data, _count_classes(table, measured))
    if args.redundancy:
        from ..observe.head_analysis.head_redundancy import measure_redundancy

        report("comparing heads")
        redundancy = extras.redundancy = measure_redundancy(model, examples, name=table.model)
        extras.add("redundancy", redundancy.data, redundancy.table)
        if baseline is not None:
            redundancy = measure_redundancy(baseline, examples, name="random baseline")
            extras.items.append(redundancy.table)
    if args.circuits:
        circuits = head_circuits.measure_head_circuits(model)
        extras.add("circuits", to_plain(circuits), head_circuits.circuit_table(circuits))
    if args.spectra:
        spectra = rank_analysis.measure_qk_spectra(model, seed=args.seed)
        extras.add("spectra", to_plain(spectra), rank_analysis.spectra_table(spectra))
    if args.collapse:
        depths = rank_analysis.measure_rank_collapse(model, examples)
        extras.add("collapse", to_plain(depths), rank_analysis.collapse_table(depths))
    return table, extras


def _add_measures(
    table: HeadTable, measured: Sequence[tuple[Any, Mapping[str, Estimate]]]
) -> HeadTable:
    """Return the table with more measures of some heads."""
    more = {(head.site, head.head): measures for head, measures in measured}
    heads = [
        replace(one, measures={**one.measures, **more.get((one.site, one.head), {})})
        for one in table.heads
    ]
    return replace(table, heads=tuple(heads))


def _count_classes(table: HeadTable, baseline: HeadTable) -> Table:
    from ..observe.head_analysis.head_table import class_group

    counts: list[Counter[str]] = [Counter(), Counter()]
    for count, one in zip(counts, (table, baseline), strict=True):
        for head in one.heads:
            count.update({class_group(named.name) for named in head.classes})
    names = sorted({*counts[0], *counts[1]}, key=lambda name: -counts[0][name])
    rows = [(name, counts[0][name], counts[1][name]) for name in names]
    return Table("heads by class", ("class", "this model", "randomly initialised"), rows)


# --- `headwise heads` -----------------------------------------------------------------------------


def main(argv: list[str]) -> int:
    """Measure and classify the heads of a model, print the table, and write figures if asked."""
    args = HeadsOptions.parse(argv)
    if args.model.endswith(TRACE_SUFFIX):
        return _draw_from_trace(args)
    model = _load(args.model, args)
    if args.text is not None:
        print_result(args, _show_one_text(model, args))
        return 0
    from ..observe.inspect.attention_sites import sites

    drawn_heads = _locate_heads(args.draw, sites(model))
    _locate_heads([] if args.head is None else [args.head], sites(model))
    examples, notes, sites_of_images = _read_examples(model, args)
    report = ProgressReporter()
    measure = partial(
        _measure_model, examples=examples, args=args, report=report, site_names=sites_of_images
    )
    collectors = _make_collectors(args)
    measured = measure(model, more_collectors=collectors)
    table, extras = run_extras(model, measured, examples, args, measure, report)
    for collector in collectors:
        top = collector.result(model)
        shown_texts = top.table if args.head is None else top.head_table(args.head)
        extras.add("sequences", top.data, shown_texts)
    table = replace(table, notes=(*table.notes, *notes))
    report("")
    if args.out is not None:
        from ..observe.head_analysis.head_report import write_head_report

        written = write_head_report(
            model,
            table,
            examples,
            Path(args.out),
            importance=extras.importance,
            redundancy=extras.redundancy,
            drawn_heads=drawn_heads,
            existing=args.existing,
        )
        for name in written:
            print_note(name)
    shown = to_text(table.ranking(args.sort)) if args.sort else table.to_text(supports_style())
    text = "\n\n".join([shown, *map(to_text, extras.items)])
    print_result(args, text, table.data | extras.data)
    return 0


def _make_collectors(args: HeadsOptions) -> list[SequenceCollector]:
    """Collectors of what is kept of single texts."""
    if args.sequences is None:
        return []
    from ..observe.head_analysis.top_sequences import SequenceCollector

    return [SequenceCollector(args.by, args.sequences, args.seed)]


def _load(name: str, args: HeadsOptions) -> Any:
    from ..hub.pretrained_models import load_original
    from ..observe.inspect.model_inputs import is_encoder_decoder

    model = load_on_device(load_original, name, args).eval()
    if args.images is None:
        attach_named_tokenizer(model, args)
    if args.text is not None and args.target is None and is_encoder_decoder(model):
        fact = f"{name} is an encoder-decoder"
        raise UsageError(f"{fact}; add --target TEXT, which its decoder reads")
    return model


def _read_examples(
    model: Any, args: HeadsOptions
) -> tuple[list[Example], tuple[str, ...], tuple[str, ...]]:
    """The texts or images that the options name, notes on what was skipped, and the sites to
    measure (empty: all).
    """
    if args.images is None:
        is_alone = not (args.importance or args.redundancy or args.random_baseline)
        return (*read_examples(model, args, min_count=1 if is_alone else 2), ())
    from ..observe.head_analysis.head_metrics import NOT_FOR_IMAGES
    from ..observe.head_analysis.image_examples import examples_from_images

    examples, sites, notes = examples_from_images(model, args.images, args.limit)
    return examples, (*notes, NOT_FOR_IMAGES), sites


def _locate_heads(names: Sequence[str], layers: Sequence[Any]) -> list[tuple[str, int]]:
    from ..observe.head_names import locate_head

    return [locate_head(name, layers) for name in names]


def _draw_from_trace(args: HeadsOptions) -> int:
    """Draw heads of a trace, without model or texts."""
    from ..observe.head_analysis.head_report import draw_traced_heads
    from ..observe.traces import load_trace

    trace = load_trace(args.model)
    heads = _locate_heads(args.draw, trace.layers)
    for site, head in heads:  # refuse an unknown head before anything is written
        trace.head_weights(site, head, slice(0, 1))
    for name in draw_traced_heads(trace, heads, Path(args.out or ""), args.existing):
        print_page(name)
    return 0


def _measure_model(
    model: Any,
    *,
    examples: Sequence[Example],
    args: HeadsOptions,
    report: ProgressReporter,
    site_names: tuple[str, ...] = (),
    more_collectors: Sequence[Any] = (),
) -> HeadTable:
    from ..observe.head_analysis.dependency_syntax import DependencyScores
    from ..observe.head_analysis.head_measurement import MeasureOptions
    from ..observe.head_analysis.head_metrics import IMAGE_METRICS
    from ..observe.head_analysis.text_analysis import measure_and_classify
    from ..observe.head_analysis.word_alignment import AlignmentScores

    kind = "text" if args.images is None else "image"
    options = MeasureOptions(sites=site_names, min_texts=min(2, len(examples)))
    if args.images is not None:
        options = options._replace(metrics=IMAGE_METRICS)
    if args.engine == "ray" or args.jobs is not None:
        from ..studies.process_engine import ProcessHeads, RayHeads

        is_ray = args.engine == "ray"
        engine = RayHeads(args.address, args.jobs) if is_ray else ProcessHeads(args.jobs or 1)
        options = options._replace(engine=engine)
    collectors = [*more_collectors]
    if args.conllu is not None:
        convention = "clark" if args.criteria == "clark" else "ours"
        collectors.append(DependencyScores(convention=convention))
    elif args.align_files or args.task is not None:
        collectors.append(AlignmentScores())
    table = measure_and_classify(
        model,
        examples,
        criteria=args.criteria,
        options=options,
        collectors=collectors,
        progress=report.counter("measuring heads", len(examples), f"{kind}s"),
    )
    table = replace(table, texts=table.texts.replace("text", kind))
    return table.with_sinks_first() if args.sinks_first else table


# --- `headwise heads MODEL --text TEXT` -----------------------------------------------------------


def _show_one_text(model: Any, args: HeadsOptions) -> Any:
    """Return the view of the text named by the options."""
    from ..observe.head_analysis.attention_maps import attribute_logit, compute_attention_maps
    from ..observe.head_analysis.circuit_metrics import find_token_ids
    from ..observe.inspect.attention_sites import sites

    text = args.text
    located = _locate_heads([] if args.head is None else [args.head], sites(model))
    inputs: Any = text if args.target is None else {"source": text, "text": args.target}
    if args.show == "logits":
        names = args.tokens.split(",") if args.tokens else []
        if len(names) > 2:
            raise UsageError(f"--tokens {args.tokens} are {len(names)} tokens; give one, or two")
        token, baseline, *_ = [*find_token_ids(model, names), None, None]
        return attribute_logit(
            model, inputs, position=args.position, token=token, baseline=baseline
        )
    maps = compute_attention_maps(model, inputs)
    if args.show == "rollout":
        return maps.table(maps.rollout(), "rollout over layers")
    if args.head is None:
        title = f"{args.show}, mean over heads and layers"
        return maps.table(maps.aggregate(args.show), title)
    [(site, head)] = located
    matrix = maps.weights(site) if args.show == "weights" else maps.norms(site)
    return maps.table(matrix[head], f"{args.show} of {site} head {head}", site)
