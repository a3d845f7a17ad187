"""The tour of the bundled translator: its heads, one head ablated, half of them pruned and
verified.

Every section is printed as soon as it is computed, and the report, one HTML page, is written again
after each. The first two sections need the recorded trace only.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..observe.bundled_sample import (
    MODEL,
    SOURCE,
    load_sample_model,
    load_sample_table,
    load_sample_trace,
)
from ..observe.head_analysis.head_table import CLASS_STYLES, HeadMeasures, HeadTable, class_group
from ..observe.traces import Trace
from ..report.data import Estimate, Figure, HeatMap, Item, Page, Section, Table
from ..report.render import to_html, to_text
from ..report.text import NO_SPREAD
from ..util.errors import SpecError
from ..util.files import FolderLock, write_atomically
from ..util.output_paths import check_output
from .language import join_clauses, join_items, localise, use_language

if TYPE_CHECKING:
    from ..models import Transformer

DIGITS = 8  # of the task that the sample was trained on
PROBES = (SOURCE, "<iso>20 November 2026", "<en>二〇二六年十一月二十日", "<en>USD 1204.50")
SHOWN_CLASSES = ("alignment", "previous", "sink")
FOLDER_NAME = "sample"
PRUNED_NAME = "pruned"
REPORT_FILE = "report.html"
SCORE_NAME = "exact_match"

# Texts of the tour in English and Chinese.
TEXTS = {
    "page": ("The heads of a small translator", "一个小型翻译模型的头"),
    "sample": ("A translator and three of its heads", "一个翻译模型及其三个头"),
    "model": (
        "A small trained translator of dates and amounts: {heads} attention heads in {layers} "
        "layers. It reads {source} and writes {text}.",
        "一个训练好的日期和金额翻译模型：{layers} 层共 {heads} 个注意力头。它读入 {source}，写出 {text}。",
    ),
    "weights": (
        "{name}: weights from the tokens that it reads (columns) to each token (rows)",
        "{name}：每个词元（行）对所读词元（列）的权重",
    ),
    "head": ("{site} head {head}", "{site} 的头 {head}"),
    "classes": ("What its heads do", "各头的作用"),
    "grid": (
        "The class of each head beside sinks, over {texts}; {counts}",
        "各头在汇点之外的类别，基于 {texts}；{counts}",
    ),
    "ablated": ("One head ablated", "消融一个头"),
    "importance": (
        "Each of the {heads} heads was ablated alone, over {texts} held-out texts. Without {name} "
        "the loss rises by {value:.3g} (95 % interval {low:.3g} to {high:.3g}), the most of all.",
        "在 {texts} 段留出的文本上逐一消融 {heads} 个头。没有 {name} 时损失增加 {value:.3g}"
        "（95 % 区间 {low:.3g} 至 {high:.3g}），为各头中最多。",
    ),
    "translation": (
        "{source}: {before}; without the head {after}",
        "{source} 译为“{before}”；没有该头时译为“{after}”",
    ),
    "pruned": ("Half of the heads pruned, and verified", "剪去一半的头，并验证"),
    "kept": ("Heads that are kept (filled)", "保留的头（实心）"),
    "before": ("before", "之前"),
    "cut": ("pruned", "剪枝后"),
    "after": ("retrained", "重新训练后"),
    "score": ("exact match, 95 % interval", "完全匹配，95 % 区间"),
    "scores": ("Before and after", "之前与之后"),
    "holds": (
        "{what}. It was retrained for {steps} steps by distillation. The verification holds: "
        "{verification}",
        "{what}。随后通过蒸馏重新训练 {steps} 步。验证成立：{verification}",
    ),
    "fails": (
        "{what}. The verification does NOT hold: {verification}",
        "{what}。验证不成立：{verification}",
    ),
    "done": ("Done in {seconds:.0f} s. Report: {report}", "用时 {seconds:.0f} 秒。报告：{report}"),
    "next": (
        "Next: headwise view, or headwise view {folder}",
        "接着：headwise view，或 headwise view {folder}",
    ),
    "next_quick": ("Next: headwise view", "接着：headwise view"),
}


class TourScale(NamedTuple):
    """Numbers of examples for importance, ranking, distillation, verification and scores;
    retraining steps; timing seconds.
    """

    num_importance_texts: int = 24
    num_selection_texts: int = 96
    num_distillation_texts: int = 1200
    num_verification_texts: int = 48
    num_scored_examples: int = 200
    steps: int = 75
    seconds: float = 1.5


DEFAULT_SCALE = TourScale()


@dataclass
class Tour:
    """Results of the tour so far; `data` has all numbers as plain values."""

    folder: Path
    language: str = "en"
    scale: TourScale = DEFAULT_SCALE
    progress: Callable[[str], object] = str
    trace: Trace = field(default_factory=load_sample_trace)
    table: HeadTable = field(default_factory=load_sample_table)
    texts: Mapping[str, tuple[str, str]] = field(default_factory=lambda: TEXTS)
    shown_classes: Sequence[str] = SHOWN_CLASSES
    sections: list[Section] = field(default_factory=list)
    ablation: dict[str, Any] | None = None
    pruning: dict[str, Any] | None = None

    def text(self, key: str, **values: Any) -> str:
        """Return a text of the tour in its language."""
        return self.texts[key][self.language == "zh"].format(**values)

    @property
    def data(self) -> dict[str, Any]:
        """All numbers as plain values."""
        return {
            "texts": {name: rows[0].text for name, rows in self.trace.streams.items()},
            "heads": self.table.data["heads"],
            "ablation": self.ablation,
            "pruning": self.pruning,
        }


def run_sample_tour(
    show: Callable[[str], object],
    title: Callable[[str], object],
    out: Path,
    scale: TourScale = DEFAULT_SCALE,
    *,
    language: str = "en",
    quick: bool = False,
    progress: Callable[[str], object] = str,
) -> Tour:
    """Show every section of the tour and write the report to `out`; `quick` prunes nothing."""
    tour = Tour(out / FOLDER_NAME, language, scale, progress)
    makers = [describe_sample, describe_classes, ablate_one_head, prune_half_of_sample]
    return run_tour(tour, makers[:3] if quick else makers, show, title)


def run_tour(
    tour: Tour,
    makers: Sequence[Callable[[Any], Section]],
    show: Callable[[str], object],
    title: Callable[[str], object],
) -> Tour:
    """Make and show every section of a tour; the report is written after each."""
    started = time.monotonic()
    with FolderLock(tour.folder):
        check_output_folder(tour.folder / PRUNED_NAME)
        try:
            for number, make in enumerate(makers, 1):
                with use_language(tour.language):
                    section = make(tour)
                tour.sections.append(section)
                title(f"{number}  {section.title}")
                for item in section.items:
                    show(to_text(item) + "\n")
                if number == 1:  # the first pictures need no model
                    write_page(tour)
        finally:
            if len(tour.sections) > 1:
                write_page(tour)
        report = tour.folder / REPORT_FILE
        show(tour.text("done", seconds=time.monotonic() - started, report=report))
        pruned = tour.folder / PRUNED_NAME
        show(tour.text("next", folder=pruned) if tour.pruning else tour.text("next_quick"))
    return tour


def write_page(tour: Tour) -> None:
    """Write the sections so far as one page."""
    page = Page(tour.text("page"), tour.sections, language=tour.language)
    write_atomically(tour.folder / REPORT_FILE, to_html(page).encode())


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


# --- The sample and its heads ---------------------------------------------------------------------


def describe_sample(tour: Tour) -> Section:
    """The sample, and the weights of a head of each of three classes over its text."""
    trace = tour.trace
    num_heads = sum(layer.heads for layer in trace.layers)
    items: list[Item] = [
        tour.text(
            "model",
            heads=num_heads,
            layers=len(trace.layers),
            source=SOURCE,
            text=trace.streams["text"][0].text,
        )
    ]
    for class_name in tour.shown_classes:
        head = best_of_class(tour.table, class_name)
        evidence = next(one.evidence for one in head.classes if one.name == class_name)
        layer = trace.get_layer(head.site)
        rows = trace.streams[layer.query_stream][0].words
        columns = trace.streams[layer.key_stream][0].words
        name = tour.text("head", site=head.site, head=head.head)
        name = join_clauses([name, localise(class_name)])
        heat_map = HeatMap(trace.head_weights(head.site, head.head), rows, columns)
        items.append(Figure(tour.text("weights", name=name), [heat_map], note=localise(evidence)))
    return Section(tour.text("sample"), items)


def best_of_class(table: HeadTable, class_name: str) -> HeadMeasures:
    """Return the head with the highest score for a class."""

    def score(head: HeadMeasures) -> float:
        return max((one.score for one in head.classes if one.name == class_name), default=-1.0)

    return max(table.heads, key=score)


def describe_classes(tour: Tour) -> Section:
    """The class of every head as a table of letters: a row for each site."""
    most = max(head.head for head in tour.table.heads) + 1
    rows = {site: [""] * most for site in tour.table.sites}
    groups: Counter[str] = Counter()
    for head in tour.table.heads:
        letter = "·"
        if head.classes:
            group = class_group(head.classes[0].name)
            letter = CLASS_STYLES[group][0]
            groups[group] += 1
        rows[head.site][head.head] = letter
    counts = join_items(
        f"{CLASS_STYLES[group][0]} {localise(group)} {n}" for group, n in groups.most_common()
    )
    title = tour.text("grid", texts=localise(tour.table.texts), counts=counts)
    columns = [localise("site"), *map(str, range(most))]
    table = Table(title, columns, [[site, *cells] for site, cells in rows.items()])
    return Section(tour.text("classes"), [table])


# --- One head ablated -----------------------------------------------------------------------------


def make_examples(net: Transformer, count: int, split: str = "test") -> list[Any]:
    """Return examples of the task that the sample was trained on."""
    from ..observe.head_analysis.annotated_examples import examples_from_task
    from ..training.data.date_translation import DateTranslation

    return examples_from_task(
        net, DateTranslation(digits=DIGITS), count, split
    ).examples_with_frequencies()


def ablate_one_head(tour: Tour) -> Section:
    """Ablate every head in turn, then translate without the one that matters most."""
    from ..models.generation.generate import generate
    from ..observe.head_analysis.head_importance import estimate_importance
    from ..observe.inspect.ablation import ablate

    net = load_sample_model()
    texts = make_examples(net, tour.scale.num_importance_texts)
    result = estimate_importance(net, texts, method="leave-one-out")
    top = result.by_importance[0]
    before = generate(net, list(PROBES))
    with ablate(net, [(top.site, top.head)]):
        after = generate(net, list(PROBES))
    outputs = list(zip(PROBES, before, after, strict=True))
    numbers = {"value": top.measure.value, "low": top.measure.low, "high": top.measure.high}
    tour.ablation = {"site": top.site, "head": top.head, **numbers, "texts": result.texts}
    tour.ablation["outputs"] = outputs
    sentence = tour.text(
        "importance",
        heads=len(result.heads),
        texts=result.texts,
        name=tour.text("head", site=top.site, head=top.head),
        **numbers,
    )
    lines = [
        tour.text("translation", source=source, before=first, after=second)
        for source, first, second in outputs
    ]
    return Section(tour.text("ablated"), [sentence, lines])


# --- Half of the heads pruned and verified --------------------------------------------------------


def prune_half_of_sample(tour: Tour) -> Section:
    """Remove half of the heads, retrain briefly, verify the result, and compare it with the
    original.
    """
    from ..surgery import HeadRanking, KeepTop
    from ..surgery.any_model import prune

    net = load_sample_model()
    texts = make_examples(net, tour.scale.num_distillation_texts, "train")
    selection = KeepTop(0.5, HeadRanking(num_examples=64), scope="model")
    chosen_by = texts[: tour.scale.num_selection_texts]
    result = prune(net, selection, chosen_by, fold="mean", log=tour.progress)
    tour.pruning = retrain_and_verify(tour, net, result, texts)
    return Section(tour.text("pruned"), list(compare_models(tour, tour.pruning)))


def retrain_and_verify(
    tour: Tour, net: Transformer, result: Any, texts: Sequence[Any]
) -> dict[str, Any]:
    """Retrain the pruned model from the original, write it and its verification report, and return
    the numbers.
    """
    from ..surgery.distillation import RetrainingPoint, UptrainingOptions, uptrain
    from ..surgery.model_and_texts import OutputFolder, write_and_verify
    from ..surgery.verification.efficiency import TimingOptions
    from ..surgery.verification.model_comparison import to_data
    from ..surgery.verification.quality_metrics import compare_task_scores
    from ..surgery.verification.verify import VerificationOptions
    from ..training.data.date_translation import DateTranslation

    scale = tour.scale
    task = DateTranslation(digits=DIGITS)
    scores = compare_task_scores(net, result.after, task, scale.num_scored_examples)
    options = UptrainingOptions(steps=scale.steps, batch=64, rate=1e-3, alpha=1.0, every=50)

    def report(point: RetrainingPoint) -> None:
        tour.progress(f"step {point.step}")

    retrained = uptrain(result.after, net, texts, options, report)
    record = {
        **result.data,
        "demo": FOLDER_NAME,
        "cut": next(to_data(row) for row in scores if row.name == SCORE_NAME),
        "kept": retrained.step,
        "steps": scale.steps,
    }
    pruned = tour.folder / PRUNED_NAME
    verification_options = VerificationOptions(
        result.summary,
        task=task,
        num_examples=scale.num_scored_examples,
        timing=TimingOptions(batch=16, length=16, steps=task.answers, seconds=scale.seconds),
        notes=(f"retrained for {scale.steps} steps; step {retrained.step} is kept",),
        command="headwise demo",
    )
    examples = make_examples(net, scale.num_verification_texts)
    folder = OutputFolder(pruned, "overwrite", MODEL)
    _, verification = write_and_verify(
        result, retrained.net, examples, verification_options, folder, record, tour.progress
    )
    return {"folder": str(pruned), **record, "verification": verification.data}


def show_kept_heads(tour: Tour, pruning: dict[str, Any]) -> Table:
    """A table of which heads stay: a row for each site."""
    counts: dict[str, int] = pruning["head_counts"]
    most = max(counts.values())
    rows: list[list[str]] = []
    for site, count in counts.items():
        heads = pruning["keep"].get(site, range(count))  # a site that is not named keeps all
        marks = ["█" if head in heads else "·" for head in range(count)]
        rows.append([site, *marks, *[""] * (most - count)])
    return Table(tour.text("kept"), [localise("site"), *map(str, range(most))], rows)


def compare_models(tour: Tour, pruning: dict[str, Any]) -> Iterator[Item]:
    """Yield which heads stay, sizes and scores before and after, and whether the verification
    holds.
    """
    verification = pruning["verification"]
    yield show_kept_heads(tour, pruning)
    scores = next(row for row in verification["quality"]["rows"] if row["name"] == SCORE_NAME)
    estimates = [
        localise(f"{score['value']:g} [{NO_SPREAD}]")
        if score["low"] is None
        else Estimate(score["value"], score["low"], score["high"])
        for score in (scores["before"], pruning["cut"]["after"], scores["after"])
    ]
    sizes = [[name, before, after, after] for name, before, after in list_sizes(verification)]
    columns = ["", *(tour.text(name) for name in ("before", "cut", "after"))]
    yield Table(tour.text("scores"), columns, [[tour.text("score"), *estimates], *sizes])
    yield describe_verification(tour, pruning)


def list_sizes(verification: Mapping[str, Any]) -> list[tuple[str, int, int]]:
    """Parameters and cache: name, before, after."""
    return [
        (localise(number["name"]), number["before"], number["after"])
        for number in verification["savings"]["numbers"]
        if number["name"] in ("parameters", "cache per token", "cache per source token")
    ]


def describe_verification(tour: Tour, pruning: Mapping[str, Any]) -> str:
    """Whether the verification holds, and where its report is."""
    verification = pruning["verification"]
    path = Path(pruning["folder"]) / "VERIFICATION.md"
    key = "holds" if verification["holds"] else "fails"
    steps = pruning.get("steps", 0)
    return tour.text(key, what=localise(verification["what"]), steps=steps, verification=path)
