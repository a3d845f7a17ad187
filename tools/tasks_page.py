"""The generated part of docs/tasks.md: every synthetic task with an example, its options, metrics
and chance level.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import fields
from typing import Any, NamedTuple

import torch

from headwise.training.data import IGNORE_INDEX, TASKS, Batch, Task, make_task
from headwise.training.data.synthetic_task import SyntheticTask


class TaskNotes(NamedTuple):
    """Notes about a task: options of a short example, which models the task distinguishes, and
    which not.
    """

    example_options: dict[str, Any]
    distinguishes: str
    does_not_distinguish: str


TASK_NOTES = {
    "copy": TaskNotes(
        {"symbols": 9, "block": 5, "gap": 2},
        "models with one and with two layers (2209.11895, 2408.14332); sliding windows, because "
        "information moves at "
        "most `layers * (window - 1)` tokens; position encodings, on longer sequences than in "
        "training (2402.01032); "
        "linear and softmax attention",
        "MHA, GQA and MQA",
    ),
    "dates": TaskNotes(
        {},
        "correct and broken implementations of cross-attention, padding and decoding with a KV "
        "cache; cross-attention "
        "heads and the true alignments, which are known",
        "most attention variants: all score close to 1",
    ),
    "graph": TaskNotes(
        {"nodes": 14, "chords": 2, "sources": 4},
        "attention patterns, because information moves along edges only; numbers of layers, "
        "because fewer than `reach` "
        "layers cannot solve the task",
        "MHA, GQA and MQA; models for arbitrary graphs, because the pattern is part of the spec "
        "and all examples have "
        "the same graph",
    ),
    "group": TaskNotes(
        {"group": "S3", "length": 12},
        "recurrence and attention; numbers of layers, because A5 needs more layers for longer "
        "rows and cyclic groups "
        "do not (2404.08819); linear recurrences with and without negative eigenvalues "
        "(2411.12537)",
        "variants of softmax attention, for which the task is a negative control: all learn the "
        "training length, and "
        "none generalises parity far beyond it (2207.02098)",
    ),
    "lookup2": TaskNotes(
        {"entities": 2, "attributes": 2, "values": 9, "direct": 1, "composed": 1},
        "possibly methods that compose heads: 2405.08553 suggests that models with fewer heads "
        "than attributes learn "
        "such a task late. Test this before you rely on it. The default model did not learn the "
        "task: with 4 entities, "
        "2 attributes and 16 values its accuracy was 0.39 after 1,600 steps, with a chance level "
        "of 0.06",
        "models that have at least as many heads as attributes",
    ),
    "markov": TaskNotes(
        {"symbols": 3, "length": 16},
        "numbers of layers; stages of training, because models first predict uniformly, then by "
        "unigrams, then by "
        "bigrams (2402.11004)",
        "most variants after convergence, including linear attention, which can count bigrams "
        "too. Compare the number "
        "of steps until convergence instead",
    ),
    "recall": TaskNotes(
        {"vocabulary": 32, "length": 20, "pairs": 4},
        "softmax attention (MHA, GQA or MQA) and linear attention, whose state must grow with the "
        "number of pairs; "
        "windows shorter than the sequence (2312.04927, 2403.17844)",
        "MHA, GQA and MQA",
    ),
}


def page() -> str:
    """Markdown with a section per synthetic task."""
    return "\n\n".join(
        section(name) for name, cls in sorted(TASKS.items()) if issubclass(cls, SyntheticTask)
    )


def section(name: str) -> str:
    """Markdown section about one task."""
    task, notes = make_task(name), TASK_NOTES[name]
    spec = task.model()
    num_params = sum(weight.numel for weight in spec.weights() if weight.trainable)
    layers = " + ".join(str(len(stack.layers)) for stack in spec.stacks)
    options = ", ".join(f"`{field.name}={getattr(task, field.name)!r}`" for field in fields(task))
    chance = ", ".join(f"{metric} {value:.3g}" for metric, value in task.chance.items())
    lines = [
        f"### {name}",
        "",
        prose(type(task)),
        "",
        *example(make_task(name, **notes.example_options)),
        "",
    ]
    lines += [
        f"- **options**: {options}",
        f"- **metrics**: {metrics(task)}",
        f"- **chance**: {chance}",
    ]
    width = spec.stacks[-1].model
    lines += [
        (
            f"- **default model**: {spec.kind}, {layers} layers, {width} channels, {num_params:,} "
            "parameters"
        )
    ]
    lines += [
        f"- **distinguishes**: {notes.distinguishes}",
        f"- **does not distinguish**: {notes.does_not_distinguish}",
    ]
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
        metric + (f" by {', '.join(slices)}" if slices else "")
        for metric, slices in slices_of_metric.items()
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
    label_texts = [
        "" if label == IGNORE_INDEX else task.text([label]) for label in labels[is_real].tolist()
    ]
    columns = [
        (task.text([token]), label) for token, label in zip(inputs, label_texts, strict=True)
    ]
    for header, row in zip(("input ", "labels"), zip(*columns, strict=True), strict=True):
        cells = [
            cell.rjust(max(map(len, column))) for cell, column in zip(row, columns, strict=True)
        ]
        yield f"{header}  {' '.join(cells)}".rstrip()
