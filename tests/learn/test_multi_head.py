"""Document 002, sections 0 to 2: every number against numpy, and every verdict with an input that
changes it.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import headwise as hw
from headwise.attention.attention import Attention
from headwise.learn.measured_layers import make_layer, sample
from headwise.learn.multi_head_analysis import STORED_HEADS
from headwise.learn.translator_runs import held_out_texts, measure_translator
from headwise.observe import bundled_sample
from headwise.observe.head_analysis.head_circuits import make_random_baseline
from learn import learn_entries as learn
from learn.learn_entries import array, entropy, layer_parts, softmax

ENTRIES = learn.entries_of("002")
STORED = json.loads(STORED_HEADS.read_text())
SAMPLE = json.loads(Path(bundled_sample.MEASURES).read_text())


def diagonals() -> dict:
    x, w_q, w_k = (
        array(sample(1, 200, 64, 64)),
        array(sample(2, 64, 64)) / 8,
        array(sample(3, 64, 64)) / 8,
    )
    numbers = {}
    for name, keys in (("", w_k), ("tied_", w_q)):
        scores = np.einsum("bid,bjd->bij", x @ w_q, x @ keys) / 8
        inside = np.eye(64, dtype=bool)
        numbers[f"{name}mean"] = float(scores[:, inside].mean())
        numbers[f"{name}weight"] = float(softmax(scores)[:, inside].mean())
        if not name:
            numbers |= {
                "off": float(scores[:, ~inside].mean()),
                "spread": float(scores[:, ~inside].std(ddof=1)),
            }
    return numbers | {"uniform": 1 / 64}


def contributions() -> dict:
    layer, x = make_layer(hw.design(model=16, heads=4)), array(sample(1, 1, 7, 16))[0]
    outputs, w_o = layer_parts(layer, x, 4)[1], array(layer.state_dict()["output.o"])
    norms = [
        np.linalg.norm(outputs[:, head] @ w_o[:, 4 * head : 4 * head + 4].T) for head in range(4)
    ]
    return {"ratio": float(max(norms) / min(norms)), "difference": 0.0}


def coupling() -> dict:
    weight = array(make_layer(hw.design(model=12, heads=3)).state_dict()["output.o"])
    return {"coupling": float(np.abs(2 * weight[:, :4].T @ weight[:, 4:8]).max())}


def support() -> dict:
    shares, uniform = [], []
    for site, batches in learn.translator_weights().items():
        for weights in batches:
            count = weights.shape[3]
            is_causal = "decoder" in site and not site.endswith("cross")
            visible = 1 + np.arange(count) if is_causal else np.full(weights.shape[2], count)
            sums = np.cumsum(np.sort(weights)[..., ::-1], -1)
            needed = np.argmax(sums >= 0.9 - 1e-6, -1) + 1
            shares.append((needed / visible).mean())
            uniform.append((np.ceil(0.9 * visible - 1e-6) / visible).mean())
    numbers = {"support": float(np.mean(shares)), "uniform": float(np.mean(uniform))}
    return numbers | {"heads": 54, "texts": 64}


def intensities() -> dict:
    weights = {name: 2 * 4096 / (4096 * size + 2 * min(size, 2)) for name, size in BYTES.items()}
    return weights | {
        "mha": 4 * 128 / (2 * 128 * 2),
        "gqa": 8 * 4 * 128 / (2 * 128 * 2),
        "group": 8,
    }


BYTES = {"fp32": 4, "bf16": 2, "int8": 1, "int4": 0.5}


def roofline() -> dict:
    ridge = 989e12 / 4800e9
    return {
        "tokens": ridge,
        "ridge": ridge,
        "batch": 512,
        "large": 512.0,
        "small": 64.0,
        "core": 1.0,
    }


def two_heads_of_minilm() -> dict:
    a, b = (np.array(head["weights"]) for head in STORED["two"])
    divergence = float((entropy((a + b) / 2) - (entropy(a) + entropy(b)) / 2).mean())
    numbers = {
        "one": STORED["two"][0]["head"],
        "other": STORED["two"][1]["head"],
        "most": math.log(2),
    }
    previous = float(np.mean([a[row, row - 1] for row in range(1, len(a))]))
    repeated = (b[0, 4] + b[4, 0]) / 2
    return numbers | {"divergence": divergence, "previous": previous, "repeated": float(repeated)}


def gallery() -> dict:
    weights = {head["class"]: np.array(head["weights"]) for head in STORED["gallery"]}
    words = weights["punctuation"][:, 1:8]
    return {
        "broad": float(np.exp(entropy(weights["broad"])).mean() / 9),
        "next": float(np.mean([weights["next"][row, row + 1] for row in range(8)])),
        "separator": float(weights["separator"][:, 8].mean()),
        "punctuation": float((words[:, 6] / words.sum(1)).mean()),
        "chance": 1 / 9,
    }


def heads_left() -> dict:
    column = STORED["pruned"]["columns"][4]
    assert sum(column["classes"].values()) == 24
    numbers = {"share": 17 / 48, "pruned": 31 / 48, "all": 72, "left": 24, "drift": column["drift"]}
    return numbers | {"sinks": column["classes"]["sink"], "texts": 120}


def shared_space() -> dict:
    d, n, h, wide = 512, 2048, 8, 256
    shared = (
        2 * d * wide + 2 * d * d + h * wide + h * d
    )  # queries, keys; values, output; mixing, content
    mha_flops = 8 * n * d * d + 4 * n * n * d
    return {"mha_params": 4 * d * d, "mha_flops": mha_flops, "shared_params": shared}


def energy_share() -> dict:
    shares = []
    for name, weight in (state := bundled_sample.load_sample_model().state_dict()).items():
        if name.endswith("project.q"):
            summed = array(weight).astype(float).T @ array(state[name[:-1] + "k"]).astype(float)
            energy = np.linalg.svd(summed, compute_uv=False) ** 2
            shares.append((1 + int((energy.cumsum() < 0.9 * energy.sum()).sum())) / 96)
    rng = np.random.default_rng(1)
    draws = [rng.standard_normal((96, 96)) @ rng.standard_normal((96, 96)) for _ in range(8)]
    energies = [np.linalg.svd(draw, compute_uv=False) ** 2 for draw in draws]
    chance = np.mean([1 + (e.cumsum() < 0.9 * e.sum()).sum() for e in energies]) / 96
    return {"share": float(np.mean(shares)), "layers": 9, "chance": pytest.approx(chance, rel=0.05)}


def own_weight() -> dict:
    numbers = {"chance": 1 / 32}
    for heads in (1, 16):
        dim = 64 // heads
        x, w_q, w_k = (
            array(sample(1, 20, 1, 32, 64)),
            *(array(sample(s, heads, 64, dim)) / 8 for s in (2, 3)),
        )
        weights = softmax((x @ w_q) @ np.swapaxes(x @ w_k, -1, -2) / math.sqrt(dim))
        numbers[f"h{heads}"] = float(np.diagonal(weights, axis1=-2, axis2=-1).mean())
    return numbers


def self_attention() -> list[Any]:
    return [head for head in measure_translator().heads if head.kind == "attention"]


def has_role(head: Any) -> bool:
    return [one.name for one in head.classes[:1]] not in ([], ["unclear"])


def positional() -> dict:
    shares = [head.measures["positional_share"].value for head in self_attention()]
    return {
        "fixed": sum(share > 0.5 for share in shares),
        "heads": 36,
        "mean": float(np.mean(shares)),
        "named": sum(map(has_role, self_attention())),
        "texts": 64,
    }


def by_depth() -> dict:
    shares = dict[str, list[float]]()
    for head in self_attention():
        value = head.measures["positional_share"].value
        shares.setdefault(f"{head.stack}_{head.layer}", []).append(value)
    return {name: float(np.mean(values)) for name, values in shares.items() if "1" not in name} | {
        "texts": 64
    }


def spreads() -> dict:
    numbers = {"texts": 64}
    for number, name in enumerate(("first", "second", "third")):
        rows = [
            (entropy(weights.mean(1)) - entropy(weights).mean(1)).ravel() / math.log(6)
            for weights in learn.translator_weights()[f"encoder.{number}.attention"]
        ]
        numbers[name] = float(np.concatenate(rows).mean())
    return numbers


def chains() -> dict:
    """A step of a GRU adds ten operations to the longest chain (test_measured_layers); attention
    does not grow.
    """
    with torch.random.fork_rng(devices=[]):
        output = Attention(hw.design(model=16, heads=2), backend="dense")(torch.ones(1, 5, 16))[0]
        first = torch.nn.GRU(16, 16)(torch.ones(1, 16))[0]
    attention, step = (learn.longest_chain(each) for each in (output, first))
    return {
        "layer_32": attention,
        "layer_64": attention,
        "gru_32": step + 310,
        "gru_64": step + 630,
    }


def roles() -> dict:
    heads = measure_translator().heads
    kinds = {head.classes[0].name for head in heads if has_role(head)}
    named = sum(map(has_role, heads))
    return {"named": named, "heads": 54, "kinds": len(kinds), "texts": 64}


def test_roles_over_fewer_texts_are_mostly_those_of_the_stored_measures():
    stored = {(head["site"], head["head"]): head["classes"] for head in SAMPLE["heads"]}
    equal = [
        head.classes[0].name == stored[head.site, head.head][0]["name"]
        for head in measure_translator().heads
        if has_role(head)
    ]
    assert np.mean(equal) > 0.6


def far_keys() -> dict:
    weights = {"single_50": math.exp(-50), "single_200": 0.0, "double_200": math.exp(-200)}
    return {name: pytest.approx(weight, rel=1e-4, abs=0) for name, weight in weights.items()}


def own_tokens() -> dict:
    heads = self_attention()
    ratios = [head.measures["self"].value / head.measures["self"].chance for head in heads]
    roles = [has_role(head) and head.classes[0].name != "self" for head in heads]
    named = [role and ratio <= 2 for role, ratio in zip(roles, ratios, strict=True)]
    return {
        "modest": sum(ratio <= 2 for ratio in ratios),
        "heads": 36,
        "named": sum(named),
        "most": max(head.measures["self"].value for head in heads),
        "texts": 64,
    }


def ratios_of_weights() -> dict:
    """The log-ratio is q.(k_0 - k_1) / sqrt(d); the first layer, with its residual connection,
    changed all states.
    """
    first, second = (make_layer(hw.design(model=12, heads=1), seed=seed) for seed in (1, 2))
    x = array(sample(1, 5, 12))
    other, ratios = x.copy(), []
    other[3] = array(sample(2, 12))
    for rows in (x, other):
        states = rows + learn.layer_output(first, rows, 1)
        q, k = (states @ array(second.state_dict()[f"project.{side}"]).T for side in "qk")
        ratios.append(float(q[2] @ (k[0] - k[1]) / math.sqrt(12)))
    return {"first": 0.0, "second": abs(ratios[0] - ratios[1])}


# Width and heads as printed: 1706.03762, GPT-2, GPT-3, BERT, LLaMA, Llama 3, DeepSeek-V3, gpt-oss,
# ViT.
PUBLISHED = [
    (512, 8),
    (1024, 16),
    (768, 12),
    (12288, 96),
    (768, 12),
    (8192, 64),
    (4096, 32),
    (7168, 128),
]
PUBLISHED += [(2880, 64), (2880, 64), (768, 12)]


def published_heads() -> dict:
    """Pearson's correlation of mean ranks is Spearman's."""
    ranks = [
        [np.mean(np.nonzero(np.sort(side) == one)[0]) for one in side]
        for side in np.array(PUBLISHED).T
    ]
    ends = {"models": 11, "narrowest": 512, "fewest": 8, "widest": 12288, "most": 96}
    return ends | {"correlation": float(np.corrcoef(ranks)[0, 1])}


SIZES = "queries and keys need equal channels, keys and values equal other sizes"


COMPUTED = {
    "002-0d": chains,
    "002-2.1j": roles,
    "002-2.2e": far_keys,
    "002-2.6m": own_tokens,
    "002-2.6n": ratios_of_weights,
    "002-1.1": diagonals,
    "002-2.1g": contributions,
    "002-2.2b": coupling,
    "002-2.2c": support,
    "002-2.3b": intensities,
    "002-2.3c": roofline,
    "002-2.4": two_heads_of_minilm,
    "002-2.5": shared_space,
    "002-2.5b": energy_share,
    "002-2.6": own_weight,
    "002-2.6c": positional,
    "002-2.6j": learn.heads_of_the_translator,
    "002-2.6k": published_heads,
    "002-2.6d": by_depth,
    "002-2.6e": spreads,
    "002-2.6h": heads_left,
    "002-2.6l": gallery,
    "002-2.7b": dict,
}


@pytest.mark.parametrize("id", learn.runnable("002", "012"))
def test_numbers_and_verdict(id: str):
    trained = {"few", "many", "clean_few", "clean_many"}  # test_short_documents
    learn.check_numbers(
        ENTRIES[id],
        COMPUTED,
        globals(),
        counted_elsewhere={"002-2.5": {"shared_flops"}, "002-2.7b": trained},
    )


def test_one_head_aligns_words_and_is_not_needed():
    """The numbers of the exercise: the tokens that the head promotes by its matrices, and what is
    lost without columns of the output projection.
    """
    numbers = learn.checked(ENTRIES["002-2.1j"]).numbers
    net = bundled_sample.load_sample_model().double()
    site = "decoder.2.cross"
    state = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    output = state[f"{site}.output.o"]
    centre = torch.eye(96, dtype=torch.float64) - 1 / 96
    to_logits = centre @ state["decoder.norm.weight"].diag() @ state["encoder.embedding.tokens"].T
    right: list[torch.Tensor] = []
    before: list[torch.Tensor] = []
    for inputs in held_out_texts():
        z = hw.head_outputs(net, inputs, [(site, 2)])[site, 2]
        effects = z @ output[:, 32:48].T @ to_logits
        right.append((effects[:, :-1].argmax(-1) == inputs["x"][:, 1:]).flatten())
        before.append(net(**inputs).detach().flatten(0, 1).log_softmax(-1))
    promoted = torch.cat(right).double()
    assert numbers["promoted"] == pytest.approx(promoted.mean().item())
    assert numbers["positions"] == len(promoted)
    for name, columns in {"alone": slice(32, 48), "layer": slice(None)}.items():
        changed = dict(state) | {f"{site}.output.o": output.clone()}
        changed[f"{site}.output.o"][:, columns] = 0
        net.load_state_dict(changed)
        after = [
            net(**inputs).detach().flatten(0, 1).log_softmax(-1) for inputs in held_out_texts()
        ]
        divergence = F.kl_div(
            torch.cat(after), torch.cat(before), log_target=True, reduction="batchmean"
        )
        assert numbers[name] == pytest.approx(divergence.item(), rel=1e-6)
    assert float(numbers["aligned"]) > 5 * float(numbers["aligned_chance"])


def test_random_weights_need_more_than_a_third():
    baseline = make_random_baseline(bundled_sample.load_sample_model())
    assert ENTRIES["002-2.5b"].run(model=baseline).verdict != ENTRIES["002-2.5b"].verdict


def test_flops_of_collaborative_scores():
    """Scores cost 2 n^2 h D over the shared width D = 256, values 2 n^2 d, and the queries are
    mixed once per head.
    """
    numbers, n, h, wide, d = learn.checked(ENTRIES["002-2.5"]).numbers, 2048, 8, 256, 512
    core = 2 * n * n * (h * wide + d)
    projections = 2 * n * d * (wide + wide + d + d)
    assert core < numbers["shared_flops"] - projections < 1.03 * core


def test_figures_of_heads_have_their_weights():
    for id, name in (("002-2.4", "two"), ("002-2.6l", "gallery")):
        panels = learn.checked(ENTRIES[id]).figure.panels
        assert [list(panel.weights.values()) for panel in panels] == [
            [head["weights"]] for head in STORED[name]
        ]
        assert {panel.headings for panel in panels} == {("query", "key")}


def test_the_figure_of_columns_has_a_box_for_each_class_that_is_left():
    columns = STORED["pruned"]["columns"]
    names = {name for column in columns for name in column["classes"]}
    figure = learn.checked(ENTRIES["002-2.6h"]).figure
    (bars,) = figure.panels
    assert set(bars.groups) == names == set(bars.texts)
    assert len(figure.legend) == len(names)
    for place, column in enumerate(columns):
        assert {name: rows[place] for name, rows in bars.groups.items() if rows[place]} == column[
            "classes"
        ]
        assert bars.columns[place] == str(sum(column["classes"].values()))


def test_the_three_parts_have_the_intensities_of_the_reason():
    (panel,) = learn.checked(ENTRIES["002-2.3c"]).figure.panels
    assert panel.texts == [["1.00", "512.00"], ["1.00", "1.00"], ["1.00", "512.00"]]
