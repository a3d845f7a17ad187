"""What free answers of two models are worth: by a task's own score, and of translations BLEU, with intervals."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import torch

from ..heads.intervals import interval, resampled
from ..heads.scene import Scene
from ..models import Transformer, generate, greedy
from ..models.generating import longest, words_of
from ..tasks import Batch, Task
from .quality import RESAMPLES, SEED, Between, Counts, Row, check_count, row_of

BATCH = 32
EXAMPLES = 100  # of a task
BLEU = "BLEU"
ANSWERED = 64  # tokens of a translation


class Pair(NamedTuple):
    """The ids of a source, and the translation that is wanted."""

    source: Sequence[int]
    wanted: str


def task_rows(before: Transformer, after: Transformer, task: Task, examples: int = EXAMPLES) -> list[Row]:
    """What a task says of free answers of both models to its held-out examples; where it asks for none, of what they
    say with the truth before it.

    >>> import headwise as hw
    >>> from headwise.tasks import task
    >>> dates = task("dates")
    >>> net = hw.build(dates.model(), seed=0).eval()
    >>> [(row.name, row.before.value, row.change.value) for row in task_rows(net, net, dates, 4)][:1]
    [('exact_match', 0.0, 0.0)]
    """
    check_count(examples, f"examples of {task.name}")
    return rows_between(*(list(scored(net, task, examples)) for net in (before, after)))


def rows_between(before: Sequence[Any], after: Sequence[Any]) -> list[Row]:
    """A row for everything that a task tallied of two models, example by example."""
    both = (before, after)
    names = dict.fromkeys(name for told in both[0] for name in told)
    found = list[Row]()
    for name in names:
        counts = tuple([Counts({name: one[name][0]}, one[name][1]) for one in told if name in one] for told in both)
        if sum(one.places for one in counts[1]) and len(counts[1]) > 1:
            found.append(row_of(name, name, (counts[1], counts[0])))
    return found


def scored(net: Transformer, task: Task, examples: int) -> Iterator[Any]:
    """The tally of every example of a task, of a model's free answers where it asks for some."""
    device, whole, index = next(net.parameters()).device, task.batches(BATCH, "valid"), 0
    while examples and (whole is None or index < whole):
        batch = task.batch(index, BATCH, "valid")
        rows = min(examples, len(batch.labels))
        batch, index, examples = batch.rows(slice(0, rows)), index + 1, examples - rows
        with torch.inference_mode():
            said: Any = _answers(net, task, batch, device) if task.answers else _logits(net, batch, device)
        for number in range(rows):
            own, one = batch.rows(slice(number, number + 1)), said[number : number + 1]
            yield task.score(one, own) if task.answers else task.measure(one, own)


def _answers(net: Transformer, task: Task, batch: Batch, device: torch.device) -> list[list[int]]:
    prompt, tokens = task.prompt(batch)
    here = batch.to(device)
    memory = None if here.source is None else net.encode(here.source, tokens=here.source_tokens)
    given = Batch(prompt, prompt, tokens).to(device)
    return greedy(net, given.x, count=task.answers, tokens=given.tokens, end=task.end, memory=memory)


def _logits(net: Transformer, batch: Batch, device: torch.device) -> Any:
    here = batch.to(device)
    return net(here.x, tokens=here.tokens, source=here.source, source_tokens=here.source_tokens).float().cpu()


def pairs_of(net: Transformer, scenes: Sequence[Scene]) -> list[Pair]:
    """Sources of scenes with the texts that stand beside them, as translations that are wanted."""
    words, begin = words_of(net)[1], len(net.usage.begin)
    return [
        Pair(one.streams["source"].ids.tolist(), words.text(one.streams["text"].ids.tolist()[begin:])) for one in scenes
    ]


def can_bleu(net: Transformer) -> bool:
    """Whether translations of a model can be held to others: it says what begins one, it has words, BLEU is there."""
    told = net.described.kind == "encoder-decoder" and bool(net.usage.begin) and net.usage.tokenizer is not None
    return told and find_spec("sacrebleu") is not None


def bleu_row(before: Transformer, after: Transformer, pairs: Sequence[Pair]) -> Row:
    """BLEU of what both models say of sources, 0 to 100, as sacreBLEU reckons it; intervals resample pairs."""
    return bleu_between(translated(before, pairs), translated(after, pairs), pairs)


def bleu_between(before: Sequence[str], after: Sequence[str], pairs: Sequence[Pair]) -> Row:
    """The same of what was said of the sources before and after."""
    check_count(len(pairs), "translations")
    draws = resampled(len(pairs), RESAMPLES, SEED)
    own, other = (_bleus(said, pairs, draws) for said in (after, before))
    return Row(BLEU, "higher", *(_between(one) for one in (own, other, own - other)))


def _between(found: Any) -> Between:
    low, high = interval(found[1:])
    return Between(float(found[0]), float(low), float(high))


def translated(net: Transformer, pairs: Sequence[Pair]) -> list[str]:
    """What a model says of sources, the likeliest token each time."""
    room = longest(net.described.stacks[-1])
    count = min(ANSWERED, ANSWERED if room is None else max(1, room - len(net.usage.begin)))
    words, found = words_of(net)[1], list[str]()
    for at in range(0, len(pairs), BATCH):
        said = generate(net, [list(one.source) for one in pairs[at : at + BATCH]], max_new_tokens=count)
        found += [words.text(ids) for ids in said]
    return found


def _bleus(said: Sequence[str], pairs: Sequence[Pair], draws: Any) -> Any:
    """Of all pairs, then of every draw: counts of n-grams are summed over pairs, so that none is cut twice."""
    kind = import_module("sacrebleu.metrics").BLEU
    metric = kind(effective_order=True)
    each = [metric.sentence_score(one, [pair.wanted]) for one, pair in zip(said, pairs, strict=True)]
    counts = np.array([[*one.counts, *one.totals, one.sys_len, one.ref_len] for one in each], dtype=np.float64)
    sums = np.concatenate([counts.sum(0)[None], draws @ counts]).astype(np.int64).tolist()
    return np.array([kind.compute_bleu(row[:4], row[4:8], row[8], row[9]).score for row in sums])
