"""Full comparison of a model before and after a change, and its report: VERIFICATION.md, or for a
terminal.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ... import __version__
from ...kernels.devices import dtype_name
from ...models import Transformer
from ...models.generation import eval_mode
from ...models.model_spec.serialization import MANIFEST_FILE, RECORD_FILE
from ...observe.head_analysis.annotated_examples import Example
from ...observe.head_analysis.attention_sinks import DistinctExamples
from ...observe.head_analysis.objectives import Objective
from ...observe.inspect.ablation import HeadRef
from ...observe.inspect.model_inputs import ModelInputs
from ...report.data import Column, Estimate, Item, Page, Table
from ...report.notebook import NotebookResult
from ...report.progress import count_items
from ...report.render import make_page, to_markdown, to_text
from ...report.text import format_bytes, format_count, format_number, format_share
from ...training.data import Task
from ...util.errors import pluralise
from ...util.escaping import escape_terminal
from ...util.files import write_atomically
from ...util.output_paths import FolderKind, check_output
from .efficiency import (
    CostComparison,
    CostPair,
    LogFunction,
    PhaseSpeed,
    SpeedComparison,
    TimingOptions,
    compare_cost,
    compare_speed,
)
from .evaluation_tasks import (
    EvaluationTasks,
    PerplexityOptions,
    compare_on_tasks,
    compare_perplexity,
)
from .model_comparison import (
    ABLATION,
    DOUBLE_TOLERANCE,
    OUTPUT_TOLERANCE,
    DeferredModel,
    JsonRecord,
    ModelCall,
    OutputComparison,
    OutputDifference,
    RecordedOutput,
    build_ablations,
    compare_ablated,
    compare_outputs,
    compare_weights,
    full_precision,
    get_model_name,
    parameter_dtype,
)
from .quality_metrics import (
    DEFAULT_NUM_EXAMPLES,
    MAX_EQUAL_CHANGE,
    ModelEvaluator,
    QualityReport,
    can_compute_bleu,
    check_min_count,
    compare_task_scores,
    compare_translated_texts,
    describe_change,
    get_translation_pairs,
    translate_sources,
)

# --- Results --------------------------------------------------------------------------------------

VERIFICATION_VERSION = 1  # of the JSON document
VERIFICATION_JSON = "verification.json"
VERIFICATION_PAGE = "VERIFICATION.md"


@dataclass(frozen=True, repr=False)
class VerificationReport(JsonRecord, NotebookResult):
    """Result of all comparisons of a model before and after a change.

    `what` is the change in a sentence and `keep` the heads kept by site. `equal` has the
    comparisons that must agree up to rounding (ablated against removed heads, exported against
    written models), `rounding` the differences of models of 16 bits in their own dtype. `savings`
    has sizes and FLOPs, `speeds` timings, `quality` losses and scores.
    """

    computed: ClassVar = ("holds",)
    model: str
    what: str
    keep: Mapping[str, tuple[int, ...]]
    num_texts: int
    equal: tuple[OutputDifference, ...]
    savings: CostComparison
    speeds: SpeedComparison
    quality: QualityReport
    command: str = ""
    versions: Mapping[str, str] = field(default_factory=dict[str, str])
    notes: tuple[str, ...] = ()
    rounding: tuple[OutputDifference, ...] = ()

    @property
    def holds(self) -> bool:
        """True if all outputs that must be equal are equal up to rounding."""
        return all(difference.same for difference in self.equal)

    @property
    def report_items(self) -> Sequence[Item]:
        """The table of the most important numbers."""
        return [replace(summary_table(self), title=f"{self.model}: {self.what}", notes=self.notes)]

    def __str__(self) -> str:
        return render_summary(self)

    @property
    def data(self) -> dict[str, Any]:
        """Proof as JSON-serialisable values; NaN and infinities become None."""
        rounding = [asdict(difference) for difference in self.rounding]
        return {"version": VERIFICATION_VERSION, **super().data, "rounding": rounding}


VERIFICATION_FOLDER = FolderKind(
    "folder of a model", (VERIFICATION_JSON, RECORD_FILE, MANIFEST_FILE, "config.json")
)


# --- Comparison -----------------------------------------------------------------------------------

NO_SPEED = SpeedComparison((), 0, 0, 0, "")


@dataclass(frozen=True)
class VerificationOptions:
    """Options of `verify`: `change` is a sentence that describes what was done to the model.

    `keep` has the heads kept by each site, `replacements` the constant outputs of removed heads if
    they were folded into biases. `equivalents` return models that must compute the same as the
    original, `exports` models that must compute the same as the model after, such as those read
    back from disk; they are called like the model. `surgery_pair` is the model before and after the
    change of its heads, if that is not the pair that is compared. `exact_change` makes the same
    change to a copy in float32, for changes that round new weights to the dtype of the model.
    `length` is the number of tokens for FLOPs and cache; without `timing`, no speed is measured.
    `task` scores generated answers, `evaluation` runs tasks of lm-evaluation-harness, and
    `perplexity` reads a text file.
    `command` is shown as the command that reproduces the verification.
    """

    change: str
    keep: Mapping[str, Sequence[int]] = field(default_factory=dict)
    replacements: Mapping[HeadRef, Tensor] = field(default_factory=dict)
    exports: Mapping[str, Callable[[], ModelCall]] = field(default_factory=dict)
    equivalents: Mapping[str, Callable[[], ModelCall]] = field(default_factory=dict)
    surgery_pair: tuple[nn.Module, nn.Module] | None = None
    exact_change: Callable[[], nn.Module] | None = None
    objective: str | Objective | None = None
    timing: TimingOptions | None = field(default_factory=TimingOptions)
    length: int | None = None
    task: Task | None = None
    num_examples: int = DEFAULT_NUM_EXAMPLES
    evaluation: EvaluationTasks | None = None
    perplexity: PerplexityOptions | None = None
    command: str = ""
    notes: tuple[str, ...] = ()


def verify(
    before: nn.Module,
    after: nn.Module,
    texts: Sequence[Example],
    options: VerificationOptions,
    log: LogFunction = lambda _: None,
) -> VerificationReport:
    """Compare a pruned or converted model with the original, on the same texts.

    >>> import headwise as hw
    >>> config = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 11}
    >>> net = hw.build(hw.families.read_model_spec(config), seed=0)
    >>> texts = [Example({"x": torch.tensor([[n, 1, 4, 1, 5]])}, {}) for n in range(5)]
    >>> verification = verify(
    ...     net,
    ...     net,
    ...     texts,
    ...     VerificationOptions("no change", timing=TimingOptions(length=8, steps=2, seconds=0.01)),
    ... )
    >>> verification.holds, verification.quality.row("loss").change.value
    (True, 0.0)
    """
    distinct = DistinctExamples(texts)
    texts = list(distinct)
    check_min_count(len(texts), "different texts")
    _check_comparable(before, after)
    with eval_mode(before), eval_mode(after):
        log(f"comparing {len(texts)} texts before and after")
        evaluator = ModelEvaluator(
            before,
            texts,
            options.objective,
            lambda items: count_items(items, log, "comparing texts before and after", "texts"),
        )
        log("comparing removed with ablated heads")
        surgery_pair = options.surgery_pair or (before, after)
        removal = [_make_removal_comparison(surgery_pair, options)] if options.keep else []
        exports = [
            OutputComparison(name, (after, DeferredModel(load)))
            for name, load in options.exports.items()
        ]
        # of one export, because its weights stay in memory
        quality = _compare_together(evaluator, after, (*removal, *exports[:1]), log)
        removed = [comparison.finish(texts) for comparison in removal]
        equal, rounding = check_surgery(surgery_pair, texts, options, *removed)
        log("comparing exported models")
        equal += [export.finish(texts) for export in exports]
        log("scoring generated answers")
        quality, generation_notes = _add_generation_scores(quality, (before, after), texts, options)
        speeds = NO_SPEED
        if options.timing is not None:
            speeds = compare_speed(before, after, options.timing, log)
        savings = compare_cost(before, after, options.length)
    notes = (*options.notes, *distinct.notes, *generation_notes)
    notes += (*savings.notes, *savings.uncut_cache_notes)
    return VerificationReport(
        model=get_model_name(before),
        what=options.change,
        keep={site: tuple(heads) for site, heads in options.keep.items()},
        num_texts=len(texts),
        equal=tuple(equal),
        rounding=tuple(rounding),
        savings=savings,
        speeds=speeds,
        quality=quality,
        command=options.command,
        versions={"headwise": __version__, "torch": torch.__version__},
        notes=notes,
    )


def _compare_together(
    evaluator: ModelEvaluator,
    after: nn.Module,
    comparisons: Sequence[OutputComparison],
    log: LogFunction,
) -> QualityReport:
    """Return the quality of the model after, which runs once on each text for it and for those of
    the comparisons that take its outputs.
    """
    shared = [comparison for comparison in comparisons if comparison.takes_outputs(after)]
    counted = count_items(evaluator.examples, log, "comparing removed with ablated heads", "texts")

    def compare(inputs: ModelInputs, output: Tensor) -> None:
        next(counted)
        for comparison in shared:
            comparison.add(inputs, RecordedOutput(after, output))

    quality = evaluator.evaluate(after, compare)
    for comparison in shared:
        comparison.finish(evaluator.examples)
    return quality


def _make_removal_comparison(
    pair: tuple[nn.Module, nn.Module], options: VerificationOptions
) -> OutputComparison:
    """Return the comparison of ablated with removed heads in the dtype of the models."""
    full, _ = pair
    dtype = parameter_dtype(full)
    name = ABLATION if dtype == full_precision(dtype) else f"same comparison in {dtype_name(dtype)}"
    patches = build_ablations(full, options.keep, options.replacements)
    return OutputComparison(name, pair, patches, dtype)


def check_surgery(
    pair: tuple[nn.Module, nn.Module],
    texts: Sequence[Example],
    options: VerificationOptions,
    removed: OutputDifference | None = None,
) -> tuple[list[OutputDifference], list[OutputDifference]]:
    """Compare the models that must be equal. Compares 16-bit models also in their own dtype,
    without tolerance.

    A change that rounds new weights to 16 bits is compared before rounding, in float32, and its
    weights with the rounded ones. `removed` is the comparison of ablated with removed heads in the
    dtype of the models, if it was made.
    """
    full, changed = pair
    dtype = parameter_dtype(full)
    is_rounded = dtype != full_precision(dtype)
    exact_change = options.exact_change if is_rounded else None
    equal = list[OutputDifference]()
    rounding = list[OutputDifference]()
    if options.keep:
        removed = removed or _make_removal_comparison(pair, options).finish(texts)
        exact = changed if exact_change is None else DeferredModel(exact_change)
        single = None if is_rounded else removed
        equal += compare_ablated(full, exact, texts, options.keep, options.replacements, single)
        rounding += [removed] if is_rounded else []
    for name, load in options.equivalents.items():
        pair_of_equals = (full, DeferredModel(load))
        equal.append(compare_outputs(name, pair_of_equals, texts))
        if is_rounded:
            own = f"same comparison in {dtype_name(dtype)}"
            rounding.append(compare_outputs(own, pair_of_equals, texts, dtype=dtype))
    if exact_change is not None:
        equal.append(compare_weights("weights rounded from float32", changed, exact_change()))
    return equal, rounding


def _add_generation_scores(
    report: QualityReport,
    nets: tuple[nn.Module, nn.Module],
    examples: Sequence[Example],
    options: VerificationOptions,
) -> tuple[QualityReport, list[str]]:
    """Return the report with scores of generated answers, if the model can
    generate any, and notes.
    """
    rows = {row.name: row for row in report.rows}
    notes = list[str]()
    before: Any
    after: Any
    before, after = nets
    if options.task is not None and isinstance(before, Transformer):
        for row in compare_task_scores(before, after, options.task, options.num_examples):
            rows.setdefault(row.name, row)
    if can_compute_bleu(before):
        pairs = get_translation_pairs(before, examples)
        answers = [translate_sources(net, pairs) for net in (before, after)]
        row, note = compare_translated_texts(answers[0], answers[1], pairs)
        rows.setdefault(row.name, row)
        notes += [note] if note else []
    if options.perplexity is not None:
        row = compare_perplexity(*nets, options.perplexity)
        rows.setdefault(row.name, row)
    if options.evaluation is not None:
        task_rows, task_notes = compare_on_tasks(*nets, options.evaluation)
        rows |= {row.name: row for row in task_rows}
        notes += task_notes
    return replace(report, rows=tuple(rows.values())), notes


def _check_comparable(before: nn.Module, after: nn.Module) -> None:
    """Raise ValueError if two models differ in kind, layers or output heads."""
    if not isinstance(before, Transformer) or not isinstance(after, Transformer):
        if type(before) is not type(after):
            raise ValueError(
                f"cannot compare a {type(before).__name__} and a {type(after).__name__}. Give a "
                "model made from the first"
            )
        return
    kinds: list[tuple[str, list[tuple[str, int]]]] = []
    depths: list[list[int]] = []
    for net in (before, after):
        kinds.append((net.spec.kind, [(head.name, head.outputs) for head in net.spec.heads]))
        depths.append([len(list(stack.layers)) for stack in net.spec.stacks])
    if kinds[0] != kinds[1]:
        raise ValueError(
            f"cannot compare models: before is {kinds[0]}, after is {kinds[1]}. Give a model made "
            "from the first"
        )
    if depths[0] != depths[1]:
        raise ValueError(
            f"cannot compare models with {depths[0]} and {depths[1]} layers. Give models with the "
            "same layers"
        )


MAX_LINE_LENGTH = 240  # characters of a text that are shown


def write_verification(verification: VerificationReport, folder: Path | str) -> tuple[Path, Path]:
    """Write verification.json and VERIFICATION.md to a folder, which is created if missing; return
    both paths.
    """
    folder = check_output(folder, VERIFICATION_FOLDER, "continue")
    folder.mkdir(parents=True, exist_ok=True)
    paths = folder / VERIFICATION_JSON, folder / VERIFICATION_PAGE
    write_atomically(
        paths[0], (json.dumps(verification.data, indent=1, allow_nan=False) + "\n").encode()
    )
    write_atomically(paths[1], render_verification(verification).encode())
    return paths


def render_verification(verification: VerificationReport) -> str:
    """Return the verification as a Markdown page."""
    return to_markdown(make_verification_page(verification))


def render_summary(verification: VerificationReport) -> str:
    """Return the summary for a terminal: plain text, 80 columns."""
    title = f"{_one_line(verification.model)}: {_one_line(verification.what)}"
    notes = [f"note: {_one_line(note)}" for note in verification.notes]
    return "\n".join(map(to_text, [title, "", summary_table(verification), *notes]))


def _one_line(text: str) -> str:
    return escape_terminal(text, MAX_LINE_LENGTH)


def summary_table(verification: VerificationReport) -> Table:
    """Return the results of all comparisons, one a row: both models and the verdict."""
    rows = list[tuple[str | None, ...]]()
    if verification.equal:
        outputs = [difference for difference in verification.equal if difference.texts]
        worst = max(outputs, key=lambda difference: difference.apart / (difference.allowed or 1.0))
        result = "equal up to rounding" if verification.holds else "NOT equal"
        result = f"{result}, {worst.apart:.1e}"
        rows.append((f"outputs, {pluralise(len(verification.equal), 'check')}", None, None, result))
    for pair in verification.savings.costs:
        if pair.name in ("parameters", "cache per token"):
            name, before, after, ratio = _cost_row(pair)
            rows.append((name, before, after, "" if ratio is None else f"{ratio - 1:+.1%}"))
    for phase in verification.speeds.phases:
        name, before, after, factor, *_ = _speed_row(phase)
        verdict = phase.verdict.partition(":")[0]
        rows.append((name, before, after, f"{verdict}, {factor}" if factor else verdict))
    for row in verification.quality.rows:
        if "/" not in row.name:
            before = None if row.before is None else format_number(row.before.value)
            result = describe_change(row)
            rows.append((_one_line(row.name), before, format_number(row.after.value), result))
    return Table("", ("", "before", "after", "result"), rows)


# --- Page -----------------------------------------------------------------------------------------


def make_verification_page(verification: VerificationReport) -> Page:
    """Return the verification as a page of tables."""
    versions = ", ".join(f"{name} {version}" for name, version in verification.versions.items())
    notes = [
        "All numbers are in verification.json, with the heads that were kept.",
        versions,
        *verification.notes,
    ]
    command = [_one_line(verification.command)] if verification.command else []
    speeds = verification.speeds
    no_speed = "; ".join(["No speed was measured", *speeds.notes]) + "."
    return make_page(
        f"{_one_line(verification.model)}: report of the changed model",
        ("Summary", [summary_table(verification)]),
        (
            "Equality checks",
            [_equality_table(verification) if verification.equal else "No equality was checked."],
        ),
        (
            "Size and cost",
            [
                cost_table(verification.savings),
                *([_site_table(verification)] if verification.savings.sites else []),
            ],
        ),
        ("Speed", [_speed_table(verification) if speeds.phases else no_speed]),
        ("Quality", [_quality_table(verification)]),
        ("How to reproduce", [*command, [_one_line(note) for note in notes if note]]),
        summary=_one_line(verification.what),
    )


def _equality_table(verification: VerificationReport) -> Table:
    rows = [
        (
            _one_line(check.what),
            f"{check.apart:.1e}",
            f"{check.allowed:.1e}",
            check.texts,
            check.same,
        )
        for check in verification.equal
    ]
    rows += [
        (_one_line(other.what), f"{other.apart:.1e}", None, other.texts, None)
        for other in verification.rounding
    ]
    notes = [
        "Difference is the largest absolute difference of any output on any text. Tolerance is "
        f"{OUTPUT_TOLERANCE:.0e} of the largest output, {DOUBLE_TOLERANCE:.0e} in float64."
    ]
    if any(not check.texts for check in verification.equal):
        notes.append("Rows of 0 texts compare weights, relative to the largest of each tensor.")
    if verification.rounding:
        notes.append(
            "Models of 16 bits are compared in float32, on one text. The row without a tolerance "
            "shows their rounding, which would hide a wrong head."
        )
    columns = ("outputs compared", "difference", "tolerance", "texts", "equal")
    return Table("", columns, rows, notes)


def cost_table(saved: CostComparison) -> Table:
    """Return the costs of both models as a table."""
    source = f" and a source of {saved.source_length:,}" if saved.source_length else ""
    note = (
        f"For one sequence of {saved.length:,} tokens{source}, {saved.dtype}. FLOPs count allowed "
        "query-key pairs only."
    )
    columns = ("cost", "before", "after", Column("ratio", format_share))
    return Table("", columns, [_cost_row(pair) for pair in saved.costs], [note])


def _cost_row(pair: CostPair) -> tuple[Any, ...]:
    show = {"": "{:,}".format, "bytes": format_bytes, "FLOPs": format_count}[pair.unit]
    unit = " FLOPs" if pair.unit == "FLOPs" else ""
    return pair.name + unit, show(pair.before), show(pair.after), pair.ratio


def _site_table(verification: VerificationReport) -> Table:
    """Tabulate the sizes of the changed attentions."""
    rows = list[tuple[str, ...]]()
    for site, before, after in verification.savings.sites:
        cells = list[str]()
        for old, new in zip(before, after, strict=True):
            change = "-" if old is None or new is None else f"{old:,} -> {new:,}"
            cells.append(f"{old:,}" if old == new and old is not None else change)
        rows.append((site, *cells))
    columns = ("attention", "heads", "kv heads", "parameters", "keys and values cached per token")
    return Table("", columns, rows)


def _speed_table(verification: VerificationReport) -> Table:
    speeds = verification.speeds
    note = (
        f"Both models were measured alternately in one process ({speeds.machine}): batch "
        f"{speeds.batch}, {speeds.length:,} prompt tokens, {speeds.steps} decode steps; units per "
        "second, medians, and the quartiles of the speedup. Spread is the interquartile range of "
        "the rounds over their median; above 20 % there is no verdict."
    )
    columns = ("phase", "before", "after", "speedup", "spread", "rounds", "verdict")
    rows = [_speed_row(phase) for phase in speeds.phases]
    return Table("", columns, rows, [note, *map(_one_line, speeds.notes)])


def _speed_row(phase: PhaseSpeed) -> tuple[Any, ...]:
    factor = (
        f"{phase.speedup:.2f} [{phase.low:.2f}, {phase.high:.2f}]" if phase.has_verdict else None
    )
    return (
        f"{phase.phase}, {phase.unit}",
        format_count(round(phase.before)),
        format_count(round(phase.after)),
        factor,
        format_share(phase.spread),
        phase.rounds,
        phase.verdict,
    )


def _quality_table(verification: VerificationReport) -> Table:
    quality = verification.quality
    rows = list[tuple[Any, ...]]()
    for row in quality.rows:
        estimates = (row.before, row.after, row.change)
        cells = [None if one is None else Estimate(*one) for one in estimates]
        rows.append((_one_line(row.name), *cells))
    note = (
        f"Over {quality.texts:,} texts with {quality.num_positions:,} scored positions. Intervals "
        "are 95 % confidence intervals over texts, for the change over pairs; no difference is "
        f"shown only if the interval stays within {MAX_EQUAL_CHANGE:.0%} of the value."
    )
    columns = (_one_line(quality.objective), "before", "after", "change")
    return Table("", columns, rows, [note, *map(_one_line, quality.notes)])
