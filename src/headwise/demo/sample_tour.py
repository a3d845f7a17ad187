"""The tour of the bundled sample: what its heads do, one head ablated, half of the heads pruned and
proved.

Every page is printed as soon as it is computed, and the report, a page with pictures, is written
again after each. The first page needs the recorded trace only.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import SpecError
from ..files import FolderLock
from ..head_analysis.head_figures import CLASS_STYLES, class_group
from ..head_analysis.head_table import HeadMeasures, HeadTable, Measure
from ..output_paths import check_output, stage_folder
from ..traces import Trace
from ..translation.terminal_text import draw_heat_map, pad, rule, wrap
from ..viewer.bundled_sample import (
    MODEL,
    SOURCE,
    load_sample_model,
    load_sample_table,
    load_sample_trace,
)
from . import before_after, sample_report

if TYPE_CHECKING:
    from ..data.date_translation import DateTranslation
    from ..head_analysis.head_table import ImportanceResult
    from ..models import Transformer

DIGITS = 8  # of the task that the sample was trained on
PROBES = (SOURCE, "<iso>20 November 2026", "<en>二〇二六年十一月二十日", "<en>USD 1204.50")
SHOWN_CLASSES = ("alignment", "previous", "sink")
FOLDER_NAME, PRUNED_NAME = "sample", "pruned"


class TourScale(NamedTuple):
    """Numbers of examples for importance, ranking, distillation, proof and scores; retraining
    steps; timing seconds.
    """

    num_importance_texts: int = 24
    num_selection_texts: int = 96
    num_distillation_texts: int = 2400
    num_proof_texts: int = 48
    num_scored_examples: int = 200
    steps: int = 150
    seconds: float = 1.5


DEFAULT_SCALE = TourScale()


class HeadView(NamedTuple):
    """A head with its class, its weights over the sample text, and the tokens of both axes."""

    site: str
    head: int
    class_name: str
    evidence: str
    weights: list[list[float]]
    queries: tuple[str, ...]
    keys: tuple[str, ...]

    @property
    def name(self) -> str:
        """Name of the head in one line."""
        return f"{self.site} head {self.head}"


class AblationResult(NamedTuple):
    """Loss increase without a head (leave-one-out), and translations with and without it."""

    site: str
    head: int
    value: float
    low: float
    high: float
    texts: int
    outputs: tuple[tuple[str, str, str], ...]  # source, with the head, without it


@dataclass
class Tour:
    """Results of the tour so far; the report shows those that are not None."""

    trace: Trace
    table: HeadTable
    folder: Path
    views: list[HeadView] = field(default_factory=list)
    importance: dict[tuple[str, int], Measure] = field(default_factory=dict)
    ablation: AblationResult | None = None
    pruning: dict[str, Any] | None = None
    started: float = field(default_factory=time.monotonic)

    @property
    def translation(self) -> str:
        """The translation that the model writes for the sample text."""
        return self.trace.streams["text"][0].text

    @property
    def num_heads(self) -> int:
        """Number of heads of the model."""
        return sum(layer.heads for layer in self.trace.layers)

    @property
    def data(self) -> dict[str, Any]:
        """All numbers as plain values."""
        return {
            "source": SOURCE,
            "translation": self.translation,
            "heads": self.table.data["heads"],
            "ablation": None if self.ablation is None else self.ablation._asdict(),
            "pruning": self.pruning,
        }


def run_sample_tour(
    show: Callable[[str], None],
    title: Callable[[str], None],
    out: Path,
    scale: TourScale = DEFAULT_SCALE,
) -> Tour:
    """Show every page of the tour and write the report to `out`."""
    folder = out / FOLDER_NAME
    with FolderLock(folder):
        tour = Tour(load_sample_trace(), load_sample_table(), folder)
        check_output_folder(folder / PRUNED_NAME)
        report = folder / before_after.REPORT_FILE
        for number, (name, make) in enumerate(list_tour_pages(tour, scale), 1):
            title(rule(f"── {number}  {name} "))
            show(make() + "\n")
            sample_report.write_tour_report(tour, report)
            if number == 1:
                show(f"The report grows with every page: {report}" + "\n")
    show(format_ending(tour, report))
    return tour


def list_tour_pages(tour: Tour, scale: TourScale) -> Iterator[tuple[str, Callable[[], str]]]:
    """Yield the title of every page and the function that computes it."""
    yield "A translator and one of its heads", lambda: describe_sample(tour)
    yield "What its heads do", lambda: describe_classes(tour)
    yield "One head ablated", lambda: ablate_one_head(tour, scale)
    yield "Half of the heads pruned", lambda: prune_half_of_sample(tour, scale)


def format_ending(tour: Tour, report: Path) -> str:
    """The last lines: time, report, and what to do next."""
    return "\n".join(
        [
            f"Done in {time.monotonic() - tour.started:.0f} s. Report with pictures: {report}",
            "",
            "Next:",
            f"  headwise view              {'this translator, live in the browser'}",
            f"  headwise view {tour.folder / PRUNED_NAME}",
            f"                             {'the pruned translator'}",
            f"  headwise demo --train      {'train such a model, then compress it'}",
        ]
    )


# --- Page 1 and 2: the sample and its heads -------------------------------------------------------


def view_head(tour: Tour, head: HeadMeasures, class_name: str) -> HeadView:
    """The weights of a head over the sample text, with its evidence for a class."""
    layer = tour.trace.get_layer(head.site)
    evidence = next(one.evidence for one in head.classes if one.name == class_name)
    return HeadView(
        head.site,
        head.head,
        class_name,
        evidence,
        tour.trace.head_weights(head.site, head.head).tolist(),
        tour.trace.streams[layer.query_stream][0].words,
        tour.trace.streams[layer.key_stream][0].words,
    )


def best_of_class(table: HeadTable, class_name: str) -> HeadMeasures:
    """The head with the highest score for a class."""
    scores = {
        (head.site, head.head): one.score
        for head in table.heads
        for one in head.classes
        if one.name == class_name
    }
    return table.head(*max(scores, key=lambda key: scores[key]))


def clearest_sink(tour: Tour) -> HeadMeasures:
    """The sink head that puts most weight on the first key of the sample text."""

    def weight_of_first_key(head: HeadMeasures) -> float:
        return float(tour.trace.head_weights(head.site, head.head)[1:, 0].mean())

    sinks = [head for head in tour.table.heads if any(one.name == "sink" for one in head.classes)]
    return max(sinks, key=weight_of_first_key)


def describe_sample(tour: Tour) -> str:
    """Format the sample and the weights of the head that aligns words best."""
    heads = [
        best_of_class(tour.table, "alignment"),
        best_of_class(tour.table, "previous"),
        clearest_sink(tour),
    ]
    tour.views = [
        view_head(tour, head, name) for head, name in zip(heads, SHOWN_CLASSES, strict=True)
    ]
    best = tour.views[0]
    return "\n".join(
        [
            *wrap(
                f"A small trained translator of dates and amounts: {tour.num_heads} attention "
                "heads in "
                f"{len(tour.trace.layers)} layers."
            ),
            f"{pad('  it reads', 13)}{SOURCE}",
            f"{pad('  it writes', 13)}{tour.translation}",
            "",
            *wrap(
                f"Where {best.name} looks in the source (columns) while it reads the output (rows):"
            ),
            "",
            draw_heat_map(best.queries, best.keys, best.weights),
        ]
    )


def describe_classes(tour: Tour) -> str:
    """Format the class of every head as a grid, and the evidence of the clearest heads."""
    sites = tour.table.sites
    width = max(map(len, sites))
    rows = [
        f"  {site:<{width}}  "
        + " ".join(_class_letter(head) for head in tour.table.heads if head.site == site)
        for site in sites
    ]
    counts = Counter(class_group(head.classes[0].name) for head in tour.table.heads if head.classes)
    legend = ", ".join(
        (f"{CLASS_STYLES[name][0]} {name} {count}" for name, count in counts.most_common())
    )
    title = wrap(f"The strongest class of each head, over {tour.table.texts}:")
    lines = [*title, *wrap(legend), "", *rows, ""]
    for view in tour.views:
        named = ", ".join([view.name, view.class_name])
        lines += wrap(": ".join([named, f"{view.evidence}."]))
    return "\n".join(lines)


def _class_letter(head: HeadMeasures) -> str:
    return CLASS_STYLES[class_group(head.classes[0].name)][0] if head.classes else "·"


# --- Page 3: one head ablated ---------------------------------------------------------------------


def sample_task() -> DateTranslation:
    """The task that the sample was trained on."""
    from ..data.date_translation import DateTranslation

    return DateTranslation(digits=DIGITS)


def ablate_one_head(tour: Tour, scale: TourScale) -> str:
    """Ablate every head in turn, then translate without the one that matters most."""
    from ..generation.generate import generate
    from ..head_analysis.annotated_examples import examples_from_task
    from ..head_analysis.head_importance import estimate_importance
    from ..inspect.ablation import ablate

    net = load_sample_model()
    texts = examples_from_task(
        net, sample_task(), scale.num_importance_texts
    ).examples_with_frequencies()
    result = estimate_importance(net, texts, method="leave-one-out")
    tour.importance = {(head.site, head.head): head.measure for head in result.heads}
    top = result.by_importance[0]
    before = generate(net, list(PROBES))
    with ablate(net, [(top.site, top.head)]):
        after = generate(net, list(PROBES))
    outputs = tuple(zip(PROBES, before, after, strict=True))
    tour.ablation = AblationResult(
        top.site,
        top.head,
        top.measure.value,
        top.measure.low,
        top.measure.high,
        result.texts,
        outputs,
    )
    return _format_ablation(tour.ablation, result)


def _format_ablation(ablation: AblationResult, result: ImportanceResult) -> str:
    lines = wrap(
        f"Each of the {len(result.heads)} heads was ablated alone, over {ablation.texts} held-out "
        "texts. Without "
        f"{ablation.site} head {ablation.head} the loss rises by {ablation.value:.3g} (95% "
        "interval "
        f"{ablation.low:.3g} to {ablation.high:.3g}), the most of all. Its effect on translations:"
    )
    for source, before, after in ablation.outputs:
        lines += [
            "",
            f"  {source}",
            f"{pad('    with it', 16)}{before}",
            f"{pad('    without it', 16)}{after}",
        ]
    return "\n".join(lines)


# --- Page 4: half of the heads pruned and proved --------------------------------------------------


def prune_half_of_sample(tour: Tour, scale: TourScale) -> str:
    """Remove half of the heads, retrain briefly, prove the result, and compare it with the
    original.
    """
    from ..head_analysis.annotated_examples import examples_from_task
    from .translator import RetrainingProgress, prune_half

    net, task = load_sample_model(), sample_task()
    progress = RetrainingProgress(PRUNED_NAME, scale.steps)
    progress.report_stage("generating examples")
    texts = examples_from_task(
        net, task, scale.num_distillation_texts, "train"
    ).examples_with_frequencies()
    compressed = prune_half(net, texts[: scale.num_selection_texts], progress.report_stage)
    tour.pruning = _retrain_and_prove(
        _Pruning(net, task, compressed, scale), texts, tour.folder, progress
    )
    return before_after.format_comparison(tour.pruning)


class _Pruning(NamedTuple):
    net: Transformer
    task: DateTranslation
    compressed: Any
    scale: TourScale


def _retrain_and_prove(
    pruning: _Pruning, texts: Sequence[Any], folder: Path, progress: Any
) -> dict[str, Any]:
    """Retrain the pruned model from the original, write it and its proof, and
    return the numbers.
    """
    from ..head_analysis.annotated_examples import examples_from_task
    from ..hub.pretrained_models import load
    from ..surgery.distillation import UptrainingOptions, uptrain
    from ..surgery.hf_export.model_folder import COMPRESSED_MODEL, write_model_folder
    from ..surgery.verification.efficiency import TimingOptions
    from ..surgery.verification.proof import ProofOptions, prove
    from ..surgery.verification.proof_report import write_proof
    from ..surgery.verification.quality_metrics import compare_task_scores
    from .translator import SCORE_NAME

    net, task, compressed, scale = pruning
    progress.report_stage("translating test examples")
    scores = compare_task_scores(net, compressed.net, task, scale.num_scored_examples)
    options = UptrainingOptions(steps=scale.steps, batch=64, rate=1e-3, alpha=1.0, every=50)
    retrained = uptrain(compressed.net, net, texts, options, progress.report_step)
    record = {
        **compressed.record,
        "demo": FOLDER_NAME,
        "cut": next(row.data for row in scores if row.name == SCORE_NAME),
        "kept": retrained.step,
        "steps": scale.steps,
    }
    proof_texts = examples_from_task(net, task, scale.num_proof_texts).examples_with_frequencies()
    pruned = folder / PRUNED_NAME
    with stage_folder(pruned, COMPRESSED_MODEL, "overwrite") as staged:
        write_model_folder(retrained.net, MODEL, staged, record)
        proof_options = ProofOptions(
            compressed.summary,
            exports={"headwise.load of the written folder": lambda: load(staged)},
            task=task,
            num_examples=scale.num_scored_examples,
            timing=TimingOptions(batch=16, length=16, steps=task.answers, seconds=scale.seconds),
            notes=(
                f"retrained for {scale.steps} steps from the original model; step "
                f"{retrained.step} is kept",
            ),
            command="headwise demo",
            **compressed.verification,
        )
        proof = prove(net, retrained.net, proof_texts, proof_options, progress.report_stage)
        progress.report_stage("")
        write_proof(proof, staged)
    return {"folder": str(pruned), **record, "proof": proof.data}


def check_output_folder(folder: Path) -> None:
    """Raise SpecError if a folder holds anything but the pruned model of an earlier tour, which is
    replaced.
    """
    from ..surgery.hf_export.model_folder import COMPRESSED_MODEL, read_record

    try:
        is_ours = read_record(folder).change.get("demo") == FOLDER_NAME
    except SpecError:
        is_ours = False
    check_output(folder, COMPRESSED_MODEL, "overwrite" if is_ours else "refuse")
