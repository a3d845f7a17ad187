"""Runs of document 002, sections 2.3 to 2.7: cost, composition, and what heads of a trained model
do.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from itertools import chain, product
from pathlib import Path
from typing import Any

import torch
from scipy.stats import spearmanr
from torch import nn

from .. import costs
from ..attention import head_axis_ops
from ..attention.attention import Attention
from ..attention.presets import design, from_toml
from ..costs.roofline import Device
from ..models.families import PUBLISHED_MODELS, read_model_spec
from ..observe.bundled_sample import load_sample_model, load_sample_table, load_sample_trace
from ..observe.head_analysis.rank_analysis import measure_qk_spectra
from .attention_mechanism import multi_head_formula
from .catalogue import Outcome, judge, judge_condition
from .matrix_figures import draw_columns, draw_heads, draw_matrices
from .measured_layers import entropy, largest_difference, make_layer, sample, weights_of
from .misconceptions import redundant_heads
from .parameters_and_scaling import robust_to_corrupted_heads

__all__ = ["multi_head_formula", "redundant_heads", "robust_to_corrupted_heads"]


# --- Section 2.3: arithmetic intensity ------------------------------------------------------------


def intensity_below_one(*, group: int = 8, dtype_bytes: float = 2.0) -> Outcome:
    """FLOPs per byte of a product of a 4096 x 4096 matrix with a vector, and of decoding with
    grouped queries.

    `group` is the number of query heads per key-value head, `dtype_bytes` the bytes of a number of
    weights and cache.
    """
    numbers = {}
    for name, size in (("fp32", 4.0), ("bf16", 2.0), ("int8", 1.0), ("int4", 0.5)):
        numbers[name] = 2 * 4096**2 / (4096**2 * size + 2 * 4096 * min(size, 2.0))
    for name, heads in (("mha", 1), ("gqa", group)):
        spec = design(model=4096, heads=32, kv=32 // heads)
        work = costs.self_attention_work(spec, batch=1, queries=1, past=8191)
        core = costs.required_flops(spec, work) - 2 * costs.count_parameters(spec)
        numbers[name] = core / (8192 * costs.cached_numbers_per_token(spec) * dtype_bytes)
    own = 2 / dtype_bytes
    return judge(max(own, numbers["gqa"]) < 1, **numbers, group=group)


def batching_and_compute(*, batch: int = 512) -> Outcome:
    """FLOPs per byte of a bf16 weight product with a batch of tokens, and the ridge point of an
    H200.
    """
    device = Device.from_name("h200")
    ridge = device.ridge_point("bf16")
    tokens = device.compute_bound_tokens("bf16")
    intensity = {size: 2 * size / 2 for size in (64, batch)}
    cores = [_decode_intensity(rows) for rows in (1, batch)]
    numbers = {
        "large": intensity[batch],
        "small": intensity[64],
        "ridge": ridge,
        "tokens": tokens,
        "core": cores[1],
    }
    parts = {"x W_Q, x W_K, x W_V": (1.0, batch), "q K^T, softmax, a V": cores}
    parts["o W_O"] = (1.0, batch)
    title = f"FLOPs per byte, batch 1 and {batch}"
    figure = draw_matrices([(title, list(parts.values()))], list(parts))
    return judge_condition(
        intensity[batch] > ridge, intensity[64] > ridge, **numbers, batch=batch, figure=figure
    )


def _decode_intensity(batch: int) -> float:
    """FLOPs per cached byte of scores and values of a decode step in bf16."""
    spec = design(model=512, heads=8)
    work = costs.self_attention_work(spec, batch=batch, queries=1, past=1023)
    core = costs.required_flops(spec, work) - 2 * batch * costs.count_parameters(spec)
    return core / (2 * batch * 1024 * costs.cached_numbers_per_token(spec))


def share_of_cores(*, pattern: str = "causal()") -> Outcome:
    """Share of scores and values in the FLOPs of a decode step at d = 4096, by length of the
    context.
    """
    spec = design(model=4096, heads=32, pattern=pattern)
    numbers = dict[str, float]()
    for tokens in (512, 4096, 32768):
        work = costs.self_attention_work(spec, batch=1, queries=1, past=tokens - 1)
        flops = costs.required_flops(spec, work)
        numbers[f"n{tokens}"] = 1 - 2 * costs.count_parameters(spec) / flops
    return judge(numbers["n512"] < numbers["n4096"] < numbers["n32768"], **numbers)


STORED_HEADS = Path(__file__).with_name("stored_heads.json")

# --- Section 2.4: two heads -----------------------------------------------------------------------


def two_trained_heads(*, same: bool = False) -> Outcome:
    """Two heads of one layer of MiniLM over "The cat sat on the mat.", from a stored run, with a
    figure.
    """
    stored = read_stored_heads()
    pair = stored["two"][:1] * 2 if same else stored["two"]
    a, b = (torch.tensor(head["weights"], dtype=torch.float64) for head in pair)
    divergence = float((entropy((a + b) / 2) - (entropy(a) + entropy(b)) / 2).mean())
    words = stored["words"][1:-1]
    previous = float(a.diagonal(-1).mean())
    repeated = float((b[0, 4] + b[4, 0]) / 2)  # "The" and "the"
    numbers = {
        "one": pair[0]["head"],
        "other": pair[1]["head"],
        "divergence": divergence,
        "most": math.log(2),
    }
    named = [(f"head {head['head']}", head["weights"]) for head in pair]
    return judge(
        divergence > 0.1,
        **numbers,
        previous=previous,
        repeated=repeated,
        figure=draw_heads(named, words, words),
    )


def read_stored_heads() -> Any:
    """Weights of heads of MiniLM over one sentence, and the heads left while pruning; see
    tools/learn_figures.py.
    """
    return json.loads(STORED_HEADS.read_text(encoding="utf-8"))


def gallery_of_heads(*, uniform: bool = False) -> Outcome:
    """Four heads of MiniLM over one sentence, with what each class claims; `uniform` replaces the
    weights.
    """
    stored = read_stored_heads()
    weights = {
        head["class"]: torch.tensor(head["weights"], dtype=torch.float64)
        for head in stored["gallery"]
    }
    count = len(stored["words"])
    if uniform:
        weights = {
            name: torch.full((count, count), 1 / count, dtype=torch.float64) for name in weights
        }
    words = weights["punctuation"][:, 1:-1]  # without the sinks [CLS] and [SEP]
    shares = {
        "broad": float(entropy(weights["broad"]).exp().mean()) / count,
        "next": float(weights["next"].diagonal(1).mean()),
        "separator": float(weights["separator"][:, -1].mean()),
        "punctuation": float((words[:, -1] / words.sum(-1)).mean()),
    }
    chance = 1 / count
    holds = shares["broad"] > 0.5 and all(
        shares[name] > 2 * chance for name in shares if name != "broad"
    )
    named = [
        (f"{head['class']}: {head['site'].split('.')[1]}.{head['head']}", head["weights"])
        for head in stored["gallery"]
    ]
    return judge(
        holds, **shares, chance=chance, figure=draw_heads(named, stored["words"], stored["words"])
    )


# --- Section 2.5: collaborative heads -------------------------------------------------------------


def collaborative_cost(*, heads: int = 8) -> Outcome:
    """Parameters and FLOPs of scores of collaborative attention with a shared width d/2, and of
    MHA.
    """
    specs = {
        "mha": design(model=512, heads=heads),
        "shared": design(preset="collaborative", model=512, heads=heads),
    }
    numbers = {}
    for name, spec in specs.items():
        numbers[f"{name}_params"] = costs.count_parameters(spec)
        numbers[f"{name}_flops"] = costs.required_flops(
            spec, costs.self_attention_work(spec, batch=1, queries=2048)
        )
    return judge(numbers["shared_flops"] < numbers["mha_flops"], **numbers)


def third_of_the_dimensions(*, model: nn.Module | None = None) -> Outcome:
    """Share of the dimensions of the summed W_Q W_K^T that holds 90 % of its energy: translator,
    Gaussian weights.
    """
    spectra = measure_qk_spectra(load_sample_model() if model is None else model)
    share = sum(layer.summed.dims / layer.summed.most for layer in spectra) / len(spectra)
    chance = sum(layer.summed.chance / layer.summed.most for layer in spectra) / len(spectra)
    return judge(share < 1 / 3, share=share, chance=chance, layers=len(spectra))


def concat_is_a_special_case(*, mixing: str = "blocks") -> Outcome:
    """Collaborative attention with vectors m_i of zeros and ones, against MHA; `mixing` "ones"
    shares everything.
    """
    plain = make_layer(design(model=12, heads=3))
    text = 'model = 12\nheads = {q = 3, dim = 4}\nproject = {part = "Collaborative", width = 12}'
    shared = make_layer(from_toml(text))
    state = dict(plain.state_dict())
    blocks = torch.eye(3, dtype=torch.float64).repeat_interleave(4, 1)
    state["project.mixing"] = blocks if mixing == "blocks" else torch.ones_like(blocks)
    state["project.content"] = torch.zeros_like(shared.state_dict()["project.content"])
    shared.load_state_dict(state)
    x = sample(1, 1, 7, 12)
    difference = largest_difference(shared(x), plain(x))
    return judge(difference < 1e-12, difference=difference)


# --- Section 2.6: what heads do -------------------------------------------------------------------


def heads_by_width(*, heads: int | None = None) -> Outcome:
    """Rank correlation of width and number of heads in the published models; `heads` gives all of
    them that many.
    """
    specs = [next(iter(read_model_spec(name).attention_specs()))[1] for name in PUBLISHED_MODELS]
    sizes = sorted((spec.model, heads or spec.heads.q) for spec in specs)
    correlation = 0.0
    if len({count for _, count in sizes}) > 1:
        ranks: Any = spearmanr(sizes)
        correlation = float(ranks.statistic)
    numbers = {
        "narrowest": sizes[0][0],
        "fewest": sizes[0][1],
        "widest": sizes[-1][0],
        "most": sizes[-1][1],
    }
    return judge(correlation > 0.5, models=len(sizes), correlation=correlation, **numbers)


def few_heads_attend_to_themselves(*, tied: bool = False) -> Outcome:
    """Mean weight of a token on itself in random layers with 1 and 16 heads, over 32 tokens of
    width 64.
    """
    numbers = {f"h{heads}": _self_weight(heads, tied) for heads in (1, 16)}
    return judge(numbers["h1"] > 2 * numbers["h16"], **numbers, chance=1 / 32)


def _self_weight(heads: int, tied: bool) -> float:
    dim = 64 // heads
    x = sample(1, 20, 1, 32, 64)
    w_q = sample(2, heads, 64, dim) / 8
    w_k = sample(3, heads, 64, dim) / 8
    scores = (x @ w_q) @ (x @ (w_q if tied else w_k)).mT / math.sqrt(dim)
    return float(scores.softmax(-1).diagonal(0, -2, -1).mean())


def _positional_shares() -> dict[tuple[str, int], list[float]]:
    """R^2 of the weights explained by the offset alone, of each self-attention head of the
    translator, by layer.
    """
    layers: dict[tuple[str, int], list[float]] = {}
    for head in load_sample_table().heads:
        if head.kind == "attention":
            layers.setdefault((head.stack, head.layer), []).append(
                head.measures["positional_share"].value
            )
    return layers


def fixed_patterns(*, shares: Sequence[float] | None = None) -> Outcome:
    """Count heads of the bundled translator where the offset explains over half of the weights
    (R^2).
    """
    values = (
        list(chain.from_iterable(_positional_shares().values())) if shares is None else list(shares)
    )
    fixed = sum(share > 0.5 for share in values)
    return judge(
        fixed > len(values) / 2, fixed=fixed, heads=len(values), mean=sum(values) / len(values)
    )


def positions_by_depth(*, shares: Sequence[float] | None = None) -> Outcome:
    """Mean positional share of the first and of the last layer of the translator's encoder and
    decoder.
    """
    layers = _positional_shares()
    means = {key: sum(values) / len(values) for key, values in layers.items()}
    ends = product(("encoder", "decoder"), (0, 2))
    numbers = {f"{stack}_{layer}": means[stack, layer] for stack, layer in ends}
    if shares is not None:
        numbers = dict(zip(numbers, shares, strict=True))
    rises = all(numbers[f"{stack}_2"] > numbers[f"{stack}_0"] for stack in ("encoder", "decoder"))
    return judge(rises, **numbers)


def diversity_by_depth(*, reverse: bool = False) -> Outcome:
    """Generalised Jensen-Shannon divergence of the heads of each encoder layer, over log h;
    `reverse` swaps layers.
    """
    trace = load_sample_trace()
    layers = []
    for number in range(3):
        site = f"encoder.{number}.attention"
        count = trace.get_layer(site).heads
        heads = torch.stack(
            [torch.as_tensor(trace.head_weights(site, head)) for head in range(count)]
        ).double()
        spread = entropy(heads.mean(0)).mean() - entropy(heads).mean()
        layers.append(float(spread) / math.log(count))
    layers = layers[::-1] if reverse else layers
    return judge(
        layers[0] > layers[1] > layers[2], first=layers[0], second=layers[1], third=layers[2]
    )


def left_or_right(*, alternate: bool = True) -> Outcome:
    """A head with its largest weight on the left and right neighbour in turn: share at left or
    right, and at one offset.
    """
    offsets = [(-1 if position % 2 else 1) if alternate else -1 for position in range(1, 101)]
    either = sum(abs(offset) == 1 for offset in offsets) / 100
    fixed = max(offsets.count(offset) for offset in set(offsets)) / 100
    return judge((either >= 0.9) == (fixed >= 0.9), either=either, fixed=fixed)


def heads_that_remain(*, remaining: int = 17, heads: int = 48) -> Outcome:
    """Share of the heads that remain, and that are pruned; with a figure of the heads left in
    MiniLM, by class.
    """
    pruned = read_stored_heads()["pruned"]
    counts = [column["classes"] for column in pruned["columns"]]
    left = [sum(column.values()) for column in counts]
    place = min(
        range(len(left)), key=lambda number: abs(left[number] / left[0] - remaining / heads)
    )
    numbers = {
        "share": remaining / heads,
        "pruned": 1 - remaining / heads,
        "all": left[0],
        "left": left[place],
    }
    numbers |= {
        "drift": pruned["columns"][place]["drift"],
        "sinks": counts[place].get("sink", 0),
        "texts": pruned["texts"],
    }
    axis = f"heads left by {pruned['order']}; letters and colours: class"
    return judge(
        abs(remaining / heads - 2 / 3) < 0.05,
        **numbers,
        figure=draw_columns(counts, [str(count) for count in left], axis),
    )


def gate_and_prune(*, gate: float = 0.0) -> Outcome:
    """A head gated by this factor, against the layer without that head."""
    layer = make_layer(design(model=12, heads=3))
    x = sample(1, 1, 7, 12)
    factors = torch.tensor([1.0, gate, 1.0], dtype=torch.float64)[:, None]
    gated = layer.merge_heads(layer.head_outputs(x) * factors).detach()
    spec, weights = head_axis_ops.keep_heads(layer.spec, layer.state_dict(), [0, 2])
    small = Attention(spec).double()
    small.load_state_dict(weights)
    difference = largest_difference(small(x), gated)
    return judge(difference < 1e-12, difference=difference, parameters=costs.count_parameters(spec))


# --- Section 2.7: cost by the width of a head -----------------------------------------------------


def cost_by_width(*, with_model: bool = False) -> Outcome:
    """FLOPs of scores and values for heads of 32 and 64 channels; `with_model` compares projections
    of d and 2 d.
    """
    flops = []
    for dim in (32, 64):
        spec = design(model=8 * dim if with_model else 512, heads=8, dim=dim)
        work = costs.self_attention_work(spec, batch=1, queries=2048)
        projections = 2 * 2048 * costs.count_parameters(spec)
        flops.append(projections if with_model else costs.required_flops(spec, work) - projections)
    return judge(
        abs(flops[1] / flops[0] - 4) < 0.1,
        narrow=flops[0],
        wide=flops[1],
        growth=flops[1] / flops[0],
    )


def weight_on_oneself(*, times: float = 2.0) -> Outcome:
    """Self-attention heads of the translator with a weight on the token itself of at most `times`
    chance.
    """
    heads = [
        head.measures["self"] for head in load_sample_table().heads if head.kind == "attention"
    ]
    modest = sum(measure.value <= times * measure.chance for measure in heads)
    return judge(
        modest < len(heads) / 2, modest=modest, heads=len(heads), most=max(m.value for m in heads)
    )


def third_tokens(*, layers: int = 2) -> Outcome:
    """Change of log(weight of key 0 / weight of key 1) when token 3 changes, in the first and in
    the last layer.
    """
    first, second = (make_layer(design(model=12, heads=1), seed=seed) for seed in (1, 2))
    x = sample(1, 1, 5, 12)
    changes = []
    other = x.clone()
    other[:, 3] = sample(2, 12)
    for layer, inputs in ((first, (x, other)), (second, (x, other))):
        if layer is second and layers == 2:
            inputs = tuple(each + first(each).detach() for each in inputs)
        ratios = []
        for each in inputs:
            row = weights_of(layer, each)[0, 0, 2]
            ratios.append((row[0] / row[1]).log())
        changes.append(float((ratios[0] - ratios[1]).abs()))
    return judge(changes[0] < 1e-9 < changes[1], first=changes[0], second=changes[1])
