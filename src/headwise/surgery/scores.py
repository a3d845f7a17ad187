"""What free answers of two models are worth: by a task's own score, and of translations BLEU, with intervals."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import torch

from ..heads.intervals import confidence_interval, draw_resamples
from ..heads.scene import Example
from ..models import Transformer, generate, greedy
from ..models.generating import longest, words_of
from ..tasks import Batch, Task
from .quality import BOOTSTRAP_RESAMPLES, BOOTSTRAP_SEED, IntervalEstimate, TextCounts, MetricRow, check_min_count, build_metric_row

SCORING_BATCH_SIZE = 32
DEFAULT_NUM_EXAMPLES = 100  # of a task
BLEU = "BLEU"
MAX_ANSWER_TOKENS = 64  # tokens of a translation


class TranslationPair(NamedTuple):
    """The ids of a source, and the translation that is wanted."""

    source: Sequence[int]
    target: str


def compare_task_scores(before: Transformer, after: Transformer, task: Task, num_examples: int = DEFAULT_NUM_EXAMPLES) -> list[MetricRow]:
    """What a task says of free answers of both models to its held-out examples; where it asks for none, of what they
    say with the truth before it.

    >>> import headwise as hw
    >>> from headwise.tasks import task
    >>> dates = task("dates")
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
            said: Any = _generate_answers(net, task, batch, device) if task.answers else _compute_logits(net, batch, device)
        for number in range(rows):
            own, one = batch.rows(slice(number, number + 1)), said[number : number + 1]
            yield task.score(one, own) if task.answers else task.measure(one, own)


def _generate_answers(net: Transformer, task: Task, batch: Batch, device: torch.device) -> list[list[int]]:
    prompt, tokens = task.prompt(batch)
    here = batch.to(device)
    memory = None if here.source is None else net.encode(here.source, tokens=here.source_tokens)
    given = Batch(prompt, prompt, tokens).to(device)
    return greedy(net, given.x, count=task.answers, tokens=given.tokens, end=task.end, memory=memory)


def _compute_logits(net: Transformer, batch: Batch, device: torch.device) -> Any:
    here = batch.to(device)
    return net(here.x, tokens=here.tokens, source=here.source, source_tokens=here.source_tokens).float().cpu()


def get_translation_pairs(net: Transformer, examples: Sequence[Example]) -> list[TranslationPair]:
    """Sources of scenes with the texts that stand beside them, as translations that are wanted."""
    words, begin = words_of(net)[1], len(net.usage.begin)
    return [
        TranslationPair(one.streams["source"].ids.tolist(), words.text(one.streams["text"].ids.tolist()[begin:])) for one in examples
    ]


def can_compute_bleu(net: Transformer) -> bool:
    """Whether translations of a model can be held to others: it says what begins one, it has words, BLEU is there."""
    told = net.described.kind == "encoder-decoder" and bool(net.usage.begin) and net.usage.tokenizer is not None
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
    room = longest(net.described.stacks[-1])
    count = min(MAX_ANSWER_TOKENS, MAX_ANSWER_TOKENS if room is None else max(1, room - len(net.usage.begin)))
    words, found = words_of(net)[1], list[str]()
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
