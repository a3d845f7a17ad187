"""The generated part of docs/tasks.md: every synthetic task with an example, its options, metrics and chance level."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import fields
from typing import Any, NamedTuple

import torch

from headwise.data import IGNORE_INDEX, TASKS, Batch, Task, make_task
from headwise.data.synthetic_task import SyntheticTask


class TaskNotes(NamedTuple):
    """Notes about a task: options of a short example, which model variants the task distinguishes, and which not."""

    example_options: dict[str, Any]
    separates: str
    does_not_separate: str


TASK_NOTES = {
    "copy": TaskNotes(
        {"symbols": 9, "block": 5, "gap": 2},
        "one layer from two (2209.11895, 2408.14332); sliding windows, which reach at most `layers * (window - 1)` "
        "tokens back; position encodings, on longer sequences than in training (2402.01032); linear from softmax "
        "attention",
        "MHA, GQA and MQA",
    ),
    "dates": TaskNotes(
        {},
        "broken from correct implementations of cross-attention, padding and decoding with a KV cache; the token "
        "alignments are known, so cross-attention heads can be compared with them",
        "most variants, which all score close to 1",
    ),
    "graph": TaskNotes(
        {"nodes": 14, "chords": 2, "sources": 4},
        "attention patterns: without a path of edges no information arrives, and fewer than `reach` layers are too few",
        "MHA, GQA and MQA. The graph is equal for all examples, because a pattern is part of a spec",
    ),
    "group": TaskNotes(
        {"group": "S3", "length": 12},
        "recurrence from attention, and depths: A5 needs more layers for longer rows, cyclic groups do not "
        "(2404.08819); linear recurrences with negative eigenvalues from others (2411.12537)",
        "variants of softmax attention, for which it is a negative control: all learn the training length, and none "
        "generalises parity far beyond it (2207.02098)",
    ),
    "listops": TaskNotes(
        {"arguments": 4, "shortest": 12, "longest": 20},
        "full from local, linear and sparse attention: 36 % against 16 to 18 % in the table of 2011.04006, without "
        "tuning; later work found another order",
        "MHA, GQA and MQA",
    ),
    "lookup2": TaskNotes(
        {"entities": 2, "attributes": 2, "values": 9, "direct": 1, "composed": 1},
        "possibly ways of composing heads: 2405.08553 motivates the hypothesis that models with fewer heads than "
        "attributes learn the task late. Test it before you rely on it: the default model was not seen to learn the "
        "task; with 4 entities, 2 attributes and 16 values its accuracy was 0.39 after 1,600 steps, with a chance "
        "level of 0.06",
        "any models with as many heads as attributes",
    ),
    "markov": TaskNotes(
        {"symbols": 3, "length": 16},
        "depths, and stages of training: models first predict uniformly, then unigrams, then bigrams (2402.11004)",
        "most variants after convergence, including linear attention, which can count: compare the steps they need",
    ),
    "recall": TaskNotes(
        {"vocabulary": 32, "length": 20, "pairs": 4},
        "softmax attention (MHA, GQA or MQA) from linear attention, whose state must grow with the number of pairs, "
        "and from windows shorter than the sequence (2312.04927, 2403.17844)",
        "MHA, GQA and MQA",
    ),
}


def page() -> str:
    """Markdown with a section per synthetic task."""
    return "\n\n".join(section(name) for name, cls in sorted(TASKS.items()) if issubclass(cls, SyntheticTask))


def section(name: str) -> str:
    """Markdown section about one task."""
    task, notes = make_task(name), TASK_NOTES[name]
    spec = task.model()
    num_params = sum(weight.numel for weight in spec.weights() if weight.trainable)
    layers = " + ".join(str(len(stack.layers)) for stack in spec.stacks)
    options = ", ".join(f"`{field.name}={getattr(task, field.name)!r}`" for field in fields(task))
    chance = ", ".join(f"{metric} {value:.3g}" for metric, value in task.chance.items())
    lines = [f"### {name}", "", prose(type(task)), "", *example(make_task(name, **notes.example_options)), ""]
    lines += [f"- **options**: {options}", f"- **metrics**: {metrics(task)}", f"- **chance**: {chance}"]
    width = spec.stacks[-1].model
    lines += [f"- **default model**: {spec.kind}, {layers} layers, {width} channels, {num_params:,} parameters"]
    lines += [f"- **separates**: {notes.separates}", f"- **does not separate**: {notes.does_not_separate}"]
    return "\n".join(lines)


def prose(cls: type[Task]) -> str:
    """A docstring without its examples, with one line per paragraph."""
    text = (inspect.getdoc(cls) or "").split(">>>")[0].strip()
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))


def metrics(task: Task) -> str:
    """Metrics of `measure` and `score`, with the kinds of their slices."""
    batch = task.batch(0, 64, "valid")
    logits = torch.zeros(*batch.labels.shape, task.model().heads[0].outputs)
    names = list(task.measure(logits, batch))
    names += list(task.score([[]] * len(batch.x), batch)) if task.answers else []
    slices_of_metric: dict[str, list[str]] = {}
    for name in names:
        metric, _, label = name.partition("@")
        slices = slices_of_metric.setdefault(metric, [])
        kind = re.split("[<>=]", label)[0] if re.search("[<>=]", label) else label
        slices += [kind] if label and kind not in slices else []
    return "; ".join(
        metric + (f" by {', '.join(slices)}" if slices else "") for metric, slices in slices_of_metric.items()
    )


def example(task: Task) -> Iterator[str]:
    """A code block with the first training example, or with four of a translation task."""
    batch = task.batch(0, 4)
    yield "```"
    if batch.source is not None:
        for n in range(4):
            yield f"{task.text(batch.source[n].tolist())} -> {task.text(batch.labels[n].tolist())}"
    else:
        yield from aligned(task, batch)
    yield "```"


def aligned(task: Task, batch: Batch) -> Iterator[str]:
    """The first row of a batch: input tokens above their labels."""
    is_real = slice(None) if batch.tokens is None else batch.tokens.is_real[0]
    inputs, labels = batch.x[0][is_real].tolist(), batch.labels[0]
    if labels.dim() == 0:
        yield f"input  {task.text(inputs)}"
        yield f"label  {int(labels)}"
        return
    label_texts = ["" if label == IGNORE_INDEX else task.text([label]) for label in labels[is_real].tolist()]
    columns = [(task.text([token]), label) for token, label in zip(inputs, label_texts, strict=True)]
    for header, row in zip(("input ", "labels"), zip(*columns, strict=True), strict=True):
        cells = [cell.rjust(max(map(len, column))) for cell, column in zip(row, columns, strict=True)]
        yield f"{header}  {' '.join(cells)}".rstrip()
