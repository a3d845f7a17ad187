"""Quality of a model over texts: loss, perplexity, accuracy and task scores with confidence
intervals.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import chain
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import torch
from torch import Tensor, nn

from ...models import Transformer
from ...models.distributed.sharded_model import BatchForward
from ...models.generation import eval_mode, load_tokenizers, max_positions
from ...models.generation.decoding_state import greedy_decode
from ...models.generation.generate import generate
from ...observe.head_analysis.annotated_examples import Example
from ...observe.head_analysis.attention_sinks import DistinctExamples
from ...observe.head_analysis.objectives import (
    EvaluationInput,
    Objective,
    OutputDrift,
    choose_objective,
)
from ...observe.head_analysis.resampling import CONFIDENCE, ROUNDING, SHARES, Array, Jackknife
from ...observe.inspect.model_inputs import ModelInputs
from ...training.data import IGNORE_INDEX, Batch, Task
from ...training.data.translation import (
    BLEU_ORDER,
    choose_bleu_tokenizer,
    count_bleu_tokens,
    make_bleu,
)
from ...util.errors import SpecError, pluralise
from .model_comparison import JsonRecord, compute_output, get_model_name

LOSS = "loss"
PERPLEXITY = "perplexity"
ACCURACY = "accuracy"


class IntervalEstimate(NamedTuple):
    """A value and its confidence interval over texts."""

    value: float
    low: float
    high: float

    def clip(self, smallest: float, largest: float) -> IntervalEstimate:
        """Clip the interval to the smallest and largest possible value."""
        return IntervalEstimate(
            self.value, *(float(np.clip(end, smallest, largest)) for end in self[1:])
        )


class MetricRow(NamedTuple):
    """One metric of a model, of the model before, and their paired difference after - before.

    `better` is "lower" or "higher".
    """

    name: str
    better: str
    after: IntervalEstimate
    before: IntervalEstimate | None = None
    change: IntervalEstimate | None = None


@dataclass(frozen=True)
class QualityReport(JsonRecord):
    """Metrics of an objective over `texts` texts with `num_positions` scored positions."""

    objective: str
    texts: int
    num_positions: int
    rows: tuple[MetricRow, ...]
    notes: tuple[str, ...] = ()

    def row(self, name: str) -> MetricRow:
        """Return the metric of this name."""
        return next(row for row in self.rows if row.name == name)


class TextCounts(NamedTuple):
    """Metrics of one text, summed over its positions, and their number."""

    sums: Mapping[str, float]
    num_positions: int


def measure_quality(
    net: nn.Module,
    examples: Sequence[Example],
    objective: str | Objective | None = None,
    baseline: nn.Module | None = None,
) -> QualityReport:
    """Measure the quality of a model over texts, paired with `baseline`, the model before, if
    given.

    The default objective follows from the model's output head; for an unknown head it is the drift
    from `baseline`. The loss is a mean over all scored positions; confidence intervals are over
    texts.

    >>> import headwise as hw, torch
    >>> config = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 11}
    >>> net = hw.build(hw.families.read_model_spec(config), seed=0)
    >>> texts = [Example({"x": torch.tensor([[n, 1, 4, 1, 5]])}, {}) for n in range(5)]
    >>> report = measure_quality(net.eval(), texts)
    >>> [row.name for row in report.rows], report.texts, report.num_positions
    (['loss', 'perplexity', 'accuracy'], 5, 20)
    """
    evaluator = ModelEvaluator(baseline or net, examples, objective)
    if baseline is not None:
        return evaluator.evaluate(net)
    if isinstance(evaluator.objective, OutputDrift):
        raise ValueError(
            "drift is the distance from another model; give baseline=, the model before"
        )
    return evaluator.baseline.report


@dataclass
class QualityTally:
    """Per-text metrics of a model and of the model before, collected one text at a time."""

    objective: Objective
    notes: list[str]
    after: list[TextCounts] = field(default_factory=list)
    before: list[TextCounts] = field(default_factory=list)
    num_unscored: int = 0

    def add(self, question: EvaluationInput, after: Tensor, before: Tensor | None) -> None:
        """Add a text with the outputs of both models, or of one; drift needs both."""
        if not question.num_targets:
            self.num_unscored += 1
            return
        self.after.append(self._counts(question, after, before))
        if before is not None and not isinstance(self.objective, OutputDrift):
            self.before.append(self._counts(question, before, None))

    def _counts(
        self, question: EvaluationInput, output: Tensor, baseline: Tensor | None
    ) -> TextCounts:
        loss = float(self.objective.value(output, baseline, question))
        sums = {LOSS: loss * question.num_targets}
        if question.labels is not None:
            flat = output.reshape(-1, output.shape[-1])
            labels = question.labels.to(output.device)
            sums[ACCURACY] = float(((flat.argmax(-1) == labels) & (labels != IGNORE_INDEX)).sum())
        return TextCounts(sums, question.num_targets)

    @property
    def report(self) -> QualityReport:
        """Return the metrics of all texts added so far."""
        count = len(self.after)
        name = self.objective.name
        check_min_count(count, "texts with targets")
        notes = list(self.notes)
        if self.num_unscored:
            notes.append(f"left out {pluralise(self.num_unscored, 'text')} without targets")
        pair = (self.after, self.before or None)
        rows = [build_metric_row(name, name, pair) for name in self.after[0].sums]
        if isinstance(self.objective, OutputDrift):
            rows = [row._replace(name=name) for row in rows]
        elif name != "label":
            rows.insert(1, build_metric_row(PERPLEXITY, LOSS, pair, np.exp))
        return QualityReport(
            name, count, sum(text.num_positions for text in self.after), tuple(rows), tuple(notes)
        )


def check_min_count(count: int, what: str) -> None:
    """Raise ValueError for fewer than 2 items, because they give no confidence interval."""
    if count < 2:
        raise ValueError(
            f"cannot compute a confidence interval over {count} {what}. Give at least 2"
        )


def build_metric_row(
    name: str,
    sum_name: str,
    counts: tuple[Sequence[TextCounts], Sequence[TextCounts] | None],
    transform: Callable[[Array], Array] = lambda values: values,
) -> MetricRow:
    """Return the mean of a metric over positions, transformed, with confidence intervals over
    texts.

    >>> some = [TextCounts({"loss": 4.0}, 2), TextCounts({"loss": 9.0}, 4)]
    >>> [round(number, 2) for number in build_metric_row("loss", "loss", (some, None)).after]
    [2.17, 0.58, 3.75]
    """
    largest = 1.0 if name.startswith(SHARES) else math.inf
    means = list[Jackknife]()
    estimates = list[IntervalEstimate]()
    for texts in counts:
        if texts is None:
            continue
        sums = np.array([text.sums[sum_name] for text in texts])
        mean = Jackknife.of_ratio(sums, np.array([float(text.num_positions) for text in texts]))
        # `transform` is increasing, so it maps the ends of the mean's interval
        ends = [float(transform(number)) for number in (mean.value, *mean.interval())]
        estimates.append(IntervalEstimate(*ends).clip(0, largest))
        means.append(mean.map(transform))
    if len(means) > 1:
        change = make_estimate(means[0] - means[1])
        estimates.append(change.clip(-largest, largest))
    return MetricRow(name, "lower" if sum_name == LOSS else "higher", *estimates)


def make_estimate(statistic: Jackknife) -> IntervalEstimate:
    """Return a statistic of the texts with its confidence interval."""
    return IntervalEstimate(
        *(float(number) for number in (statistic.value, *statistic.interval(CONFIDENCE)))
    )


# of the larger of both values: a wider interval around 0 does not show that nothing changed
MAX_EQUAL_CHANGE = 0.1


def describe_change(row: MetricRow) -> str:
    """Return "better", "worse", "no difference shown", "undecided, too few texts" or "not
    compared".

    If the interval of the change contains 0, a metric counts as unchanged only if the interval is
    narrow: within a tenth of the larger value. Otherwise, or without an interval, the texts are too
    few to decide.

    >>> after, before = IntervalEstimate(0.0, 0.0, 0.0), IntervalEstimate(69.0, 0.0, 100.0)
    >>> describe_change(
    ...     MetricRow("BLEU", "higher", after, before, IntervalEstimate(-69.0, -100.0, 0.0))
    ... )
    'undecided, too few texts'
    """
    change = row.change
    before = row.before
    if change is None or before is None or math.isnan(change.value):
        return "not compared"
    scale = max(abs(before.value), abs(row.after.value))
    if abs(change.value) <= ROUNDING * scale and not change.low < change.high:
        return "no difference shown"
    if math.isnan(change.low):
        return "undecided, too few texts"
    if not change.low <= 0 <= change.high:
        return "better" if (change.value > 0) == (row.better == "higher") else "worse"
    is_narrow = (
        max(abs(change.low), abs(change.high), abs(change.value)) <= MAX_EQUAL_CHANGE * scale
    )
    return "no difference shown" if is_narrow else "undecided, too few texts"


# --- Scores of generated answers ------------------------------------------------------------------

SCORING_BATCH_SIZE = 32
DEFAULT_NUM_EXAMPLES = 100  # of a task, generated and scored
BLEU = "BLEU"
EXACT_MATCH = "exact_match"
MAX_ANSWER_TOKENS = 64  # per translation


class TranslationPair(NamedTuple):
    """Token ids of a source, and the text of its reference translation."""

    source: Sequence[int]
    target: str


def compare_task_scores(
    before: Transformer, after: Transformer, task: Task, num_examples: int = DEFAULT_NUM_EXAMPLES
) -> list[MetricRow]:
    """Score both models on held-out examples of a task: generated answers, or teacher-forced
    outputs if it has none.

    >>> import headwise as hw
    >>> from headwise.training.data import make_task
    >>> dates = make_task("dates")
    >>> net = hw.build(dates.model(), seed=0).eval()
    >>> [
    ...     (row.name, row.before.value, row.change.value)
    ...     for row in compare_task_scores(net, net, dates, 4)
    ... ][:1]
    [('exact_match', 0.0, 0.0)]
    """
    check_min_count(num_examples, f"examples of {task.name}")
    return compare_tallies(*(list(score_task(net, task, num_examples)) for net in (before, after)))


def compare_tallies(before: Sequence[Any], after: Sequence[Any]) -> list[MetricRow]:
    """Return one row per score of a task, from its tallies of both models by example."""
    names = dict.fromkeys(chain.from_iterable(before))
    rows = list[MetricRow]()
    for name in names:
        counts = list[list[TextCounts]]()
        for tallies in (after, before):
            own = [tally[name] for tally in tallies if name in tally]
            counts.append([TextCounts({name: total}, number) for total, number in own])
        if sum(text.num_positions for text in counts[0]) and len(counts[0]) > 1:
            rows.append(build_metric_row(name, name, (counts[0], counts[1])))
    return rows


def score_task(net: Transformer, task: Task, num_examples: int) -> Iterator[Any]:
    """Yield the task's tally of every example, of generated answers if the task has any."""
    device = next(net.parameters()).device
    num_batches = task.batches(SCORING_BATCH_SIZE, "valid")
    index = 0
    while num_examples and (num_batches is None or index < num_batches):
        batch = task.batch(index, SCORING_BATCH_SIZE, "valid")
        rows = min(num_examples, len(batch.labels))
        batch = batch.rows(slice(0, rows))
        index = index + 1
        num_examples = num_examples - rows
        on_device = batch.to(device)
        outputs: Any
        with torch.inference_mode():
            if task.answers:
                prompt_ids, tokens = task.prompt(batch)
                prompts = Batch(prompt_ids, prompt_ids, tokens).to(device)
                source = on_device.source
                outputs = greedy_decode(
                    net,
                    prompts.x,
                    max_new_tokens=task.answers,
                    sequence=prompts.tokens,
                    end_id=task.end,
                    encoder_output=None
                    if source is None
                    else net.encode(source, sequence=on_device.source_tokens),
                )
            else:
                outputs = BatchForward(net)(on_device).float().cpu()
        for number in range(rows):
            example = batch.rows(slice(number, number + 1))
            output = outputs[number : number + 1]
            yield task.score(output, example) if task.answers else task.measure(output, example)


def get_translation_pairs(net: Transformer, examples: Sequence[Example]) -> list[TranslationPair]:
    """Return the source ids and reference translation of every example."""
    tokenizer = load_tokenizers(net)[1]
    num_begin = len(net.usage.bos)
    return [
        TranslationPair(
            example.streams["source"].ids.tolist(),
            tokenizer.text(example.streams["text"].ids.tolist()[num_begin:]),
        )
        for example in examples
    ]


def can_compute_bleu(net: nn.Module) -> TypeGuard[Transformer]:
    """True if BLEU can be computed: encoder-decoder, tokenizer and begin token known, sacrebleu
    installed.
    """
    return (
        isinstance(net, Transformer)
        and net.spec.kind == "encoder-decoder"
        and bool(net.usage.bos)
        and net.usage.tokenizer is not None
        and find_spec("sacrebleu") is not None
    )


def compare_translated_texts(
    before: Sequence[str], after: Sequence[str], pairs: Sequence[TranslationPair]
) -> tuple[MetricRow, str]:
    """Compare translations before and after: one metric with intervals over pairs, and a note or
    "".

    The metric is sacreBLEU (0 to 100) with the tokenizer for the script of the references. BLEU
    counts n-grams of up to four tokens. If most references are shorter, the metric is the share of
    answers that equal their reference.
    """
    check_min_count(len(pairs), "translations")
    references = [pair.target for pair in pairs]
    bleu = make_bleu(choose_bleu_tokenizer(references), effective_order=True)
    num_long = sum(count >= BLEU_ORDER for count in count_bleu_tokens(bleu, references))
    if 2 * num_long < len(references):
        counts = list[list[TextCounts]]()
        for texts in (after, before):
            pairs_of_texts = zip(texts, references, strict=True)
            hits = [text.strip() == reference.strip() for text, reference in pairs_of_texts]
            counts.append([TextCounts({EXACT_MATCH: float(hit)}, 1) for hit in hits])
        note = (
            f"BLEU is not computed: only {num_long} of {len(references)} references have "
            f"{BLEU_ORDER} tokens"
        )
        return build_metric_row(EXACT_MATCH, EXACT_MATCH, (counts[0], counts[1])), note
    scores = [_jackknife_bleu(bleu, texts, references) for texts in (after, before)]
    estimates = map(make_estimate, (*scores, scores[0] - scores[1]))
    return MetricRow(BLEU, "higher", *estimates), ""


def translate_sources(net: Transformer, pairs: Sequence[TranslationPair]) -> list[str]:
    """Translate sources by greedy decoding."""
    limit = max_positions(net.spec.stacks[-1])
    count = MAX_ANSWER_TOKENS
    if limit is not None:
        count = min(count, max(1, limit - len(net.usage.bos)))
    tokenizer = load_tokenizers(net)[1]
    translations = list[str]()
    for start in range(0, len(pairs), SCORING_BATCH_SIZE):
        sources = [list(pair.source) for pair in pairs[start : start + SCORING_BATCH_SIZE]]
        outputs = generate(net, sources, max_new_tokens=count)
        translations += [tokenizer.text(ids) for ids in outputs]
    return translations


def _jackknife_bleu(bleu: Any, translations: Sequence[str], references: Sequence[str]) -> Jackknife:
    """Return BLEU of all pairs and without each of them; n-grams are counted once per pair and
    summed.
    """
    sentence_scores = [
        bleu.sentence_score(translation, [reference])
        for translation, reference in zip(translations, references, strict=True)
    ]
    counts = np.array(
        [[*score.counts, *score.totals, score.sys_len, score.ref_len] for score in sentence_scores]
    )
    sums = np.concatenate([counts.sum(0)[None], counts.sum(0) - counts]).tolist()
    scores = np.array([bleu.compute_bleu(row[:4], row[4:8], row[8], row[9]).score for row in sums])
    return Jackknife(scores[0], scores[1:], np.ones(len(counts), dtype=bool), np.abs(scores[0]))


# --- Many models against one ---------------------------------------------------------------------


class ModelEvaluator:
    """Evaluates pruned models against one baseline model. The baseline runs once.

    `count` wraps the texts of the baseline, to show progress.

    >>> import headwise as hw, torch
    >>> config = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 11}
    >>> net = hw.build(hw.families.read_model_spec(config), seed=0)
    >>> texts = [Example({"x": torch.tensor([[n, 1, 4, 1, 5]])}, {}) for n in range(5)]
    >>> ModelEvaluator(net, texts).evaluate(net).row("loss").change.value
    0.0
    """

    def __init__(
        self,
        net: nn.Module,
        examples: Sequence[Example],
        objective: str | Objective | None = None,
        count: Callable[[list[Example]], Iterable[Example]] = iter,
    ) -> None:
        distinct = DistinctExamples(examples)
        self.net: Any = net
        self.examples = list(distinct)
        check_min_count(len(self.examples), "texts")
        self.objective, note = choose_objective(net, objective, self.examples[0])
        self.baseline = QualityTally(self.objective, [*([note] if note else []), *distinct.notes])
        self._questions = list[tuple[EvaluationInput, Tensor | None]]()
        with eval_mode(net):
            for number, example in enumerate(count(self.examples)):
                question = self.objective.prepare_input(net, example, number)
                output = compute_output(net, question.inputs)
                # the output of the baseline is kept if the objective compares with it
                reference = output if isinstance(self.objective, OutputDrift) else None
                self._questions.append((question, reference))
                self.baseline.add(question, output, reference)
        self._task: Task | None = None
        self._pairs: Sequence[TranslationPair] = ()
        self._answers: Sequence[Any] = ()

    def prepare_generation(self, task: Task | None = None) -> None:
        """Generate the baseline's answers: of a task, or translations."""
        if task is None and not can_compute_bleu(self.net):
            raise SpecError(
                f"cannot score generated answers of {get_model_name(self.net)}. Give a task, or "
                "use a translation model with text pairs and sacrebleu installed"
            )
        self._task = task
        self._pairs = () if task is not None else get_translation_pairs(self.net, self.examples)
        self._answers = self._generate_answers(self.net)

    def evaluate(
        self, after: nn.Module, watch: Callable[[ModelInputs, Tensor], object] | None = None
    ) -> QualityReport:
        """Measure a model against the baseline; `watch` gets the inputs and the output of each
        text.
        """
        is_drift = isinstance(self.objective, OutputDrift)
        before = [] if is_drift else self.baseline.after
        tally = QualityTally(self.objective, list(self.baseline.notes), before=before)
        if after is self.net:
            tally.after = self.baseline.after
            tally.num_unscored = self.baseline.num_unscored
            return tally.report
        with eval_mode(after):
            for question, reference in self._questions:
                output = compute_output(after, question.inputs)
                tally.add(question, output, reference)
                if watch is not None:
                    watch(question.inputs, output)
        return tally.report

    def score_generation(self, after: Transformer) -> list[MetricRow]:
        """Score the generated answers of a model against the baseline's, by the task's scores, or
        as translations.
        """
        answers = self._answers if after is self.net else self._generate_answers(after)
        if self._task is None:
            return [compare_translated_texts(self._answers, answers, self._pairs)[0]]
        return [row for row in compare_tallies(self._answers, answers) if "/" not in row.name]

    def _generate_answers(self, net: Transformer) -> list[Any]:
        with eval_mode(net):
            if self._task is None:
                return translate_sources(net, self._pairs)
            return list(score_task(net, self._task, DEFAULT_NUM_EXAMPLES))
