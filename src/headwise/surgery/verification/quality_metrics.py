"""How well a model speaks, over texts: a named objective and what is right, with intervals, alone or beside another."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...data import IGNORE_INDEX, Batch, Task
from ...generation import load_tokenizers, max_positions
from ...generation.generate import generate
from ...generation.greedy_decoding import greedy_decode
from ...head_analysis.annotated_examples import Example
from ...head_analysis.objectives import EvaluationInput, Objective, OutputDrift, choose_objective
from ...head_analysis.resampling import Array, confidence_interval, draw_resamples, ratio_of_sums, resampled_ratios
from ...models import Transformer
from .model_comparison import compute_output

BOOTSTRAP_RESAMPLES, BOOTSTRAP_SEED = 1000, 0
LOSS, PERPLEXITY, ACCURACY = "loss", "perplexity", "accuracy"


class IntervalEstimate(NamedTuple):
    """A mean over texts, and between which values it might have come out."""

    value: float
    low: float
    high: float


class MetricRow(NamedTuple):
    """One number of a model, beside that of another, `before`, and the difference, text by text: after - before.

    `better` says which is better, "lower" or "higher".
    """

    name: str
    better: str
    after: IntervalEstimate
    before: IntervalEstimate | None = None
    change: IntervalEstimate | None = None

    @property
    def data(self) -> dict[str, Any]:
        """As plain values."""
        told = {"before": self.before, "after": self.after, "change": self.change}
        return {"name": self.name, "better": self.better} | {
            name: None if one is None else one._asdict() for name, one in told.items()
        }


@dataclass(frozen=True)
class QualityReport:
    """Rows of an objective over so many texts, in which so many places were asked."""

    objective: str
    texts: int
    num_positions: int
    rows: tuple[MetricRow, ...]
    notes: tuple[str, ...] = ()

    def row(self, name: str) -> MetricRow:
        """One of them."""
        return next(row for row in self.rows if row.name == name)

    @property
    def data(self) -> dict[str, Any]:
        """As plain values."""
        told = {"objective": self.objective, "texts": self.texts, "places": self.num_positions}
        return told | {"rows": [row.data for row in self.rows], "notes": list(self.notes)}


class TextCounts(NamedTuple):
    """Of one text: sums by name, and of how many places."""

    sums: Mapping[str, float]
    num_positions: int


def measure_quality(
    net: Transformer,
    examples: Iterable[Example],
    objective: str | Objective | None = None,
    baseline: Transformer | None = None,
) -> QualityReport:
    """How well a model speaks over texts; beside `other`, the model before, text by text, where that is given.

    The objective is that of the model's own head where none is named, and how far it drifts from `other` where the head
    is not known. A loss is a mean over the places that are asked, in all texts together; intervals resample texts.

    >>> import headwise as hw, torch
    >>> net = hw.build(
    ...     hw.families.read_model_spec(
    ...         {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 11}
    ...     ),
    ...     seed=0,
    ... )
    >>> texts = [Example({"x": torch.tensor([[n, 1, 4, 1, 5]])}, {}) for n in range(5)]
    >>> found = measure_quality(net.eval(), texts)
    >>> [row.name for row in found.rows], found.texts, found.num_positions
    (['loss', 'perplexity', 'accuracy'], 5, 20)
    """
    texts = iter(examples)
    if (first := next(texts, None)) is None:
        raise ValueError("no text was given; give at least two")
    chosen, said = choose_objective(net, objective, first)
    check_drift_baseline(chosen, baseline)
    sums = QualityTally(chosen, [said] if said else [])
    for number, scene in enumerate(chain([first], texts)):
        question = chosen.prepare_input(net, scene, number)
        own = compute_output(net, question.inputs)
        sums.add_pair(question, own, None if baseline is None else compute_output(baseline, question.inputs))
    return sums.report


def check_drift_baseline(objective: Objective, baseline: Transformer | None) -> None:
    """Refuse to measure how far a model drifts from nothing."""
    if isinstance(objective, OutputDrift) and baseline is None:
        raise ValueError("drift is how far a model lies from another; give other=, the model before")


@dataclass
class QualityTally:
    """What was counted, text by text, of a model and of the one before."""

    objective: Objective
    notes: list[str]
    after: list[TextCounts] = field(default_factory=list)
    before: list[TextCounts] = field(default_factory=list)
    num_unscored: int = 0

    def add_pair(self, question: EvaluationInput, own: Tensor, other: Tensor | None) -> float | None:
        """One text more; how much worse it got, None where nothing is asked of it."""
        if not self.add(question, own, other) or other is None:
            return 0.0 if question.num_targets else None
        if not isinstance(self.objective, OutputDrift):
            self.before.append(self._counts(question, other, other))
        return self.last_loss_change

    def add(self, question: EvaluationInput, own: Tensor, other: Tensor | None) -> bool:
        """One text more of the model after alone; whether anything is asked of it."""
        if question.num_targets:
            self.after.append(self._counts(question, own, other))
        else:
            self.num_unscored += 1
        return bool(question.num_targets)

    @property
    def last_loss_change(self) -> float:
        """How much worse the last text got."""
        before, after = self.last_losses
        return after - before

    @property
    def last_losses(self) -> tuple[float, float]:
        """Of the last text, before and after, means over its places."""
        own = self.after[-1]
        past = self.before[-1].sums[LOSS] if self.before else 0.0
        return past / own.num_positions, own.sums[LOSS] / own.num_positions

    def _counts(self, question: EvaluationInput, own: Tensor, plain: Tensor | None) -> TextCounts:
        value = float(self.objective.value(own, plain, question))
        found = {LOSS: value * question.num_targets}
        if question.labels is not None:
            flat, labels = own.reshape(-1, own.shape[-1]), question.labels.to(own.device)
            found[ACCURACY] = float(((flat.argmax(-1) == labels) & (labels != IGNORE_INDEX)).sum())
        return TextCounts(found, question.num_targets)

    @property
    def report(self) -> QualityReport:
        """The whole of it."""
        count, name = len(self.after), self.objective.name
        check_min_count(count, "texts in which something is asked")
        notes = list(self.notes)
        if self.num_unscored:
            notes.append(f"{self.num_unscored} texts in which nothing is asked were left out")
        rows = list(build_metric_rows(self.after, self.before or None))
        if isinstance(self.objective, OutputDrift):
            rows = [row._replace(name=name) for row in rows]
        elif name != "label":
            rows.insert(1, build_metric_row(PERPLEXITY, LOSS, (self.after, self.before or None), np.exp))
        return QualityReport(name, count, sum(one.num_positions for one in self.after), tuple(rows), tuple(notes))


def check_min_count(count: int, what: str) -> None:
    """Refuse an interval over fewer than two."""
    if count < 2:
        raise ValueError(f"{count} {what} leave no interval; give at least two")


def build_metric_rows(after: Sequence[TextCounts], before: Sequence[TextCounts] | None) -> list[MetricRow]:
    """A row for everything that was counted."""
    return [build_metric_row(name, name, (after, before)) for name in after[0].sums]


def build_metric_row(
    name: str,
    sum_name: str,
    counts: tuple[Sequence[TextCounts], Sequence[TextCounts] | None],
    transform: Callable[[Array], Array] = lambda one: one,
) -> MetricRow:
    """A mean over places, after `shape`, with the interval over texts; both models have the same texts drawn.

    >>> some = [TextCounts({"loss": 4.0}, 2), TextCounts({"loss": 8.0}, 4)]
    >>> build_metric_row("loss", "loss", (some, None)).after
    IntervalEstimate(value=2.0, low=2.0, high=2.0)
    """
    draws = draw_resamples(len(counts[0]), BOOTSTRAP_RESAMPLES, BOOTSTRAP_SEED)
    own = _bootstrap_means(counts[0], sum_name, draws, transform)
    better = "lower" if sum_name == LOSS else "higher"
    if counts[1] is None:
        return MetricRow(name, better, _interval_estimate(*own))
    other = _bootstrap_means(counts[1], sum_name, draws, transform)
    return MetricRow(
        name,
        better,
        _interval_estimate(*own),
        _interval_estimate(*other),
        _interval_estimate(own[0] - other[0], own[1] - other[1]),
    )


def _bootstrap_means(
    counts: Sequence[TextCounts], of: str, draws: Array, shape: Callable[[Array], Array]
) -> tuple[Array, Array]:
    """The mean, and that of every draw."""
    sums = np.array([[one.sums[of]] for one in counts])
    places = np.array([[float(one.num_positions)] for one in counts])
    return shape(ratio_of_sums(sums, places)), shape(resampled_ratios(sums, places, draws))


def _interval_estimate(value: Array, drawn: Array) -> IntervalEstimate:
    low, high = confidence_interval(drawn)
    return IntervalEstimate(*(float(one[0]) for one in (value, low, high)))


def describe_significance(change: IntervalEstimate | None) -> str:
    """Whether a change is told from none: "more", "less" or "no difference shown".

    >>> describe_significance(IntervalEstimate(0.5, 0.1, 0.9)), describe_significance(IntervalEstimate(0.5, -0.1, 0.9))
    ('more', 'no difference shown')
    """
    if change is None or math.isnan(change.value) or change.low <= 0 <= change.high:
        return "no difference shown"
    return "more" if change.value > 0 else "less"


# --- What free answers of two models are worth ---------------------------------------------------------

SCORING_BATCH_SIZE = 32
DEFAULT_NUM_EXAMPLES = 100  # of a task
BLEU = "BLEU"
MAX_ANSWER_TOKENS = 64  # tokens of a translation


class TranslationPair(NamedTuple):
    """The ids of a source, and the translation that is wanted."""

    source: Sequence[int]
    target: str


def compare_task_scores(
    before: Transformer, after: Transformer, task: Task, num_examples: int = DEFAULT_NUM_EXAMPLES
) -> list[MetricRow]:
    """What a task says of free answers of both models to its held-out examples; where it asks for none, of what they
    say with the truth before it.

    >>> import headwise as hw
    >>> from headwise.data import make_task
    >>> dates = make_task("dates")
    >>> net = hw.build(dates.model(), seed=0).eval()
    >>> [(row.name, row.before.value, row.change.value) for row in compare_task_scores(net, net, dates, 4)][:1]
    [('exact_match', 0.0, 0.0)]
    """
    check_min_count(num_examples, f"examples of {task.name}")
    return compare_tallies(*(list(score_task(net, task, num_examples)) for net in (before, after)))


def compare_tallies(before: Sequence[Any], after: Sequence[Any]) -> list[MetricRow]:
    """A row for everything that a task tallied of two models, example by example."""
    both = (before, after)
    names = dict.fromkeys(name for told in both[0] for name in told)
    found = list[MetricRow]()
    for name in names:
        counts = tuple([TextCounts({name: one[name][0]}, one[name][1]) for one in told if name in one] for told in both)
        if sum(one.num_positions for one in counts[1]) and len(counts[1]) > 1:
            found.append(build_metric_row(name, name, (counts[1], counts[0])))
    return found


def score_task(net: Transformer, task: Task, num_examples: int) -> Iterator[Any]:
    """The tally of every example of a task, of a model's free answers where it asks for some."""
    device, whole, index = next(net.parameters()).device, task.batches(SCORING_BATCH_SIZE, "valid"), 0
    while num_examples and (whole is None or index < whole):
        batch = task.batch(index, SCORING_BATCH_SIZE, "valid")
        rows = min(num_examples, len(batch.labels))
        batch, index, num_examples = batch.rows(slice(0, rows)), index + 1, num_examples - rows
        with torch.inference_mode():
            said: Any = (
                _generate_answers(net, task, batch, device) if task.answers else _compute_logits(net, batch, device)
            )
        for number in range(rows):
            own, one = batch.rows(slice(number, number + 1)), said[number : number + 1]
            yield task.score(one, own) if task.answers else task.measure(one, own)


def _generate_answers(net: Transformer, task: Task, batch: Batch, device: torch.device) -> list[list[int]]:
    prompt, tokens = task.prompt(batch)
    here = batch.to(device)
    memory = None if here.source is None else net.encode(here.source, sequence=here.source_tokens)
    given = Batch(prompt, prompt, tokens).to(device)
    return greedy_decode(
        net, given.x, max_new_tokens=task.answers, sequence=given.tokens, end_id=task.end, encoder_output=memory
    )


def _compute_logits(net: Transformer, batch: Batch, device: torch.device) -> Any:
    here = batch.to(device)
    return net(here.x, sequence=here.tokens, source=here.source, source_sequence=here.source_tokens).float().cpu()


def get_translation_pairs(net: Transformer, examples: Sequence[Example]) -> list[TranslationPair]:
    """Sources of scenes with the texts that stand beside them, as translations that are wanted."""
    words, begin = load_tokenizers(net)[1], len(net.usage.begin)
    return [
        TranslationPair(one.streams["source"].ids.tolist(), words.text(one.streams["text"].ids.tolist()[begin:]))
        for one in examples
    ]


def can_compute_bleu(net: Transformer) -> bool:
    """Whether translations of a model can be held to others: it says what begins one, it has words, BLEU is there."""
    told = net.spec.kind == "encoder-decoder" and bool(net.usage.begin) and net.usage.tokenizer is not None
    return told and find_spec("sacrebleu") is not None


def compare_bleu(before: Transformer, after: Transformer, pairs: Sequence[TranslationPair]) -> MetricRow:
    """BLEU of what both models say of sources, 0 to 100, as sacreBLEU reckons it; intervals resample pairs."""
    return compare_bleu_of_texts(translate_sources(before, pairs), translate_sources(after, pairs), pairs)


def compare_bleu_of_texts(before: Sequence[str], after: Sequence[str], pairs: Sequence[TranslationPair]) -> MetricRow:
    """The same of what was said of the sources before and after."""
    check_min_count(len(pairs), "translations")
    draws = draw_resamples(len(pairs), BOOTSTRAP_RESAMPLES, BOOTSTRAP_SEED)
    own, other = (_bootstrap_bleu(said, pairs, draws) for said in (after, before))
    return MetricRow(BLEU, "higher", *(_bleu_estimate(one) for one in (own, other, own - other)))


def _bleu_estimate(found: Any) -> IntervalEstimate:
    low, high = confidence_interval(found[1:])
    return IntervalEstimate(float(found[0]), float(low), float(high))


def translate_sources(net: Transformer, pairs: Sequence[TranslationPair]) -> list[str]:
    """What a model says of sources, the likeliest token each time."""
    room = max_positions(net.spec.stacks[-1])
    count = min(MAX_ANSWER_TOKENS, MAX_ANSWER_TOKENS if room is None else max(1, room - len(net.usage.begin)))
    words, found = load_tokenizers(net)[1], list[str]()
    for at in range(0, len(pairs), SCORING_BATCH_SIZE):
        said = generate(net, [list(one.source) for one in pairs[at : at + SCORING_BATCH_SIZE]], max_new_tokens=count)
        found += [words.text(ids) for ids in said]
    return found


def _bootstrap_bleu(said: Sequence[str], pairs: Sequence[TranslationPair], draws: Any) -> Any:
    """Of all pairs, then of every draw: counts of n-grams are summed over pairs, so that none is cut twice."""
    kind = import_module("sacrebleu.metrics").BLEU
    metric = kind(effective_order=True)
    each = [metric.sentence_score(one, [pair.target]) for one, pair in zip(said, pairs, strict=True)]
    counts = np.array([[*one.counts, *one.totals, one.sys_len, one.ref_len] for one in each], dtype=np.float64)
    sums = np.concatenate([counts.sum(0)[None], draws @ counts]).astype(np.int64).tolist()
    return np.array([kind.compute_bleu(row[:4], row[4:8], row[8], row[9]).score for row in sums])
