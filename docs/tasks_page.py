"""What `docs/build.py` writes into docs/tasks.md: every generated task with its knobs, an example and its chance."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import fields
from typing import Any, NamedTuple

import torch

from headwise.data import IGNORE_INDEX, TASKS, Batch, Task, make_task
from headwise.data.synthetic_task import SyntheticTask


class Told(NamedTuple):
    """What cannot be read off a task: knobs of a short example, what the task separates, and what it does not."""

    short: dict[str, Any]
    separates: str
    same: str


TOLD = {
    "copy": Told(
        {"symbols": 9, "block": 5, "gap": 2},
        "one layer from two (2209.11895, 2408.14332); windows, which reach `layers * (window - 1)` tokens back and no "
        "further; kinds of positions, on texts longer than in training (2402.01032); linear attention from softmax",
        "ways of sharing heads",
    ),
    "dates": Told(
        {},
        "what is broken from what is not: cross-attention, padding, decoding from a cache. Its alignments are known, "
        "so that heads of the cross-attention can be held against them",
        "most variants, which all come near 1",
    ),
    "graph": Told(
        {"nodes": 14, "chords": 2, "sources": 4},
        "patterns: what is not joined is not heard of, and fewer layers than `reach` cannot know",
        "ways of sharing heads. The graph is the same for all examples, because a pattern is part of a spec",
    ),
    "group": Told(
        {"group": "S3", "length": 12},
        "recurrence from attention, and depth: A5 needs more layers for longer rows, clocks do not (2404.08819); in "
        "linear recurrences, those with negative eigenvalues (2411.12537)",
        "variants of softmax attention: a negative control. All learn the length of training, and none holds parity "
        "far beyond it (2207.02098)",
    ),
    "listops": Told(
        {"arguments": 4, "shortest": 12, "longest": 20},
        "full from local, linear and sparse attention: in the Arena's table 36 % against 16 to 18 % (2011.04006, which "
        "tuned nothing; later work changed the order)",
        "ways of sharing heads",
    ),
    "lookup2": Told(
        {"entities": 2, "attributes": 2, "values": 9, "direct": 1, "composed": 1},
        "perhaps ways of composing heads: the motivation of 2405.08553 suggests that fewer heads than attributes learn "
        "it late. That is a hypothesis, to be tested before it is relied on: the model proposed here was not seen to "
        "learn it, with 4 entities, 2 attributes and 16 values it read 0.39 after 1,600 steps where chance is 0.06",
        "anything, when there are as many heads as attributes",
    ),
    "markov": Told(
        {"symbols": 3, "length": 16},
        "depth, and when things are learnt: first all symbols alike, then their counts, then the bigram (2402.11004)",
        "most variants once they have converged, linear attention among them, which can count: compare steps",
    ),
    "recall": Told(
        {"vocabulary": 32, "length": 20, "pairs": 4},
        "softmax attention, however its heads are shared, from linear attention, which needs a state that grows with "
        "the number of pairs, and from windows shorter than the text (2312.04927, 2403.17844)",
        "MHA, GQA and MQA",
    ),
}


def page() -> str:
    """All of it, as Markdown."""
    return "\n\n".join(section(name) for name, cls in sorted(TASKS.items()) if issubclass(cls, SyntheticTask))


def section(name: str) -> str:
    """One task."""
    one, told = make_task(name), TOLD[name]
    short = make_task(name, **told.short)
    described = one.model()
    count = sum(weight.numel for weight in described.weights() if weight.trainable)
    layers = " + ".join(str(len(stack.layers)) for stack in described.stacks)
    lines = [f"### {name}", "", prose(type(one)), "", *example(short), ""]
    lines += ["- **knobs**: " + ", ".join(f"`{field.name}={getattr(one, field.name)!r}`" for field in fields(one))]
    lines += [f"- **measures**: {measures(one)}"]
    lines += ["- **chance**: " + ", ".join(f"{name} {level:.3g}" for name, level in one.chance.items())]
    width = described.stacks[-1].model
    lines += [f"- **default model**: {described.kind}, {layers} layers, {width} wide, {count:,} parameters"]
    lines += [f"- **separates**: {told.separates}", f"- **does not separate**: {told.same}"]
    return "\n".join(lines)


def prose(cls: type[Task]) -> str:
    """A docstring without its examples, one line a paragraph."""
    text = (inspect.getdoc(cls) or "").split(">>>")[0].strip()
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))


def measures(one: Task) -> str:
    """What `measure` and `score` give, with the kinds of their slices."""
    batch = one.batch(0, 64, "valid")
    logits = torch.zeros(*batch.labels.shape, one.model().heads[0].outputs)
    names = list(one.measure(logits, batch))
    names += list(one.score([[]] * len(batch.x), batch)) if one.answers else []
    kinds: dict[str, list[str]] = {}
    for name in names:
        measure, _, piece = name.partition("@")
        found = kinds.setdefault(measure, [])
        kind = re.split("[<>=]", piece)[0] if re.search("[<>=]", piece) else piece
        found += [kind] if piece and kind not in found else []
    return "; ".join(f"{measure}" + (f" by {', '.join(found)}" if found else "") for measure, found in kinds.items())


def example(one: Task) -> Iterator[str]:
    """The first training example, what is wanted under what is read; of translations, a few."""
    batch = one.batch(0, 4)
    yield "```"
    if batch.source is not None:
        for n in range(4):
            yield f"{one.text(batch.source[n].tolist())} -> {one.text(batch.labels[n].tolist())}"
    else:
        yield from aligned(one, batch)
    yield "```"


def aligned(one: Task, batch: Batch) -> Iterator[str]:
    """What is read, and what is wanted at each place."""
    live = slice(None) if batch.tokens is None else batch.tokens.is_real[0]
    read, labels = batch.x[0][live].tolist(), batch.labels[0]
    if labels.dim() == 0:
        yield f"reads   {one.text(read)}"
        yield f"wanted  {int(labels)}"
        return
    wanted = ["" if label == IGNORE_INDEX else one.text([label]) for label in labels[live].tolist()]
    columns = [(one.text([token]), want) for token, want in zip(read, wanted, strict=True)]
    for head, row in zip(("reads ", "wanted"), zip(*columns, strict=True), strict=True):
        cells = [cell.rjust(max(map(len, column))) for cell, column in zip(row, columns, strict=True)]
        yield f"{head}  {' '.join(cells)}".rstrip()
