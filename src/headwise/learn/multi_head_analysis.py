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
import torch.nn.functional as F
from scipy.stats import spearmanr
from torch import nn

from .. import costs
from ..attention import head_axis_ops
from ..attention.attention import Attention
from ..attention.interfaces.core_types import Probe
from ..attention.presets import design, from_toml
from ..costs.roofline import Device
from ..models.families import PUBLISHED_MODELS, read_model_spec
from ..observe.bundled_sample import load_sample_model
from ..observe.head_analysis.annotated_examples import count_tokens
from ..observe.head_analysis.head_metrics import argmax_offset_sums, select_largest
from ..observe.head_analysis.head_table import HeadMeasures, Measure
from ..observe.head_analysis.rank_analysis import measure_qk_spectra
from ..observe.head_analysis.weight_bands import WeightBand
from ..surgery.any_model import convert
from ..surgery.conversion import ToCollaborative
from .attention_mechanism import multi_head_formula
from .catalogue import Outcome, Verdict, judge, judge_condition
from .matrix_figures import (
    Picture,
    draw_columns,
    draw_curves,
    draw_grids,
    draw_heads,
    draw_matrices,
)
from .measured_layers import entropy, largest_difference, make_layer, sample, weights_of
from .misconceptions import redundant_heads
from .parameters_and_scaling import heads_against_noise
from .translator_runs import (
    MEASURED_TEXTS,
    NUM_TEXTS,
    holds_the_energy,
    load_translator,
    measure_translator,
    record_weights,
)

__all__ = ["heads_against_noise", "multi_head_formula", "redundant_heads"]


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
    decoding = {name: numbers[name] * dtype_bytes / 2 for name in ("mha", "gqa")}
    is_memory_bound = 10 * numbers["gqa"] < Device.from_name("h200").ridge_point("bf16")
    return judge(
        max(own, numbers["gqa"]) < 1,
        corrected=decoding == {"mha": 1.0, "gqa": group} and is_memory_bound,
        **numbers,
        group=group,
    )


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
    is_needed = cores == [1.0, 1.0] and abs(tokens - ridge) < 1e-9 and 100 < ridge < 1000
    return judge_condition(
        intensity[batch] > ridge and is_needed,
        intensity[64] > ridge,
        **numbers,
        batch=batch,
        figure=figure,
    )


def _decode_intensity(batch: int) -> float:
    """FLOPs per cached byte of scores and values of a decode step in bf16."""
    spec = design(model=512, heads=8)
    work = costs.self_attention_work(spec, batch=batch, queries=1, past=1023)
    core = costs.required_flops(spec, work) - 2 * batch * costs.count_parameters(spec)
    return core / (2 * batch * 1024 * costs.cached_numbers_per_token(spec))


def share_of_cores(*, pattern: str = "causal()") -> Outcome:
    """Share of scores and values in the FLOPs of an attention layer in a decode step at
    d = 4096, by length of the context.
    """
    spec = design(model=4096, heads=32, pattern=pattern)
    numbers = dict[str, float]()
    for tokens in (512, 4096, 32768):
        work = costs.self_attention_work(spec, batch=1, queries=1, past=tokens - 1)
        flops = costs.required_flops(spec, work)
        numbers[f"n{tokens}"] = 1 - 2 * costs.count_parameters(spec) / flops
    errors = [abs(numbers[f"n{n}"] - n / (2 * 4096 + n)) for n in (512, 4096, 32768)]
    return judge(max(errors) < 1e-9, **numbers)


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


def draw_broad_and_next_head() -> Picture:
    """A head of MiniLM that attends broadly, and one that attends to the next token."""
    stored = read_stored_heads()
    heads = [head for head in stored["gallery"] if head["class"] in ("broad", "next")]
    named = [(f"{head['class']}: head {head['head']}", head["weights"]) for head in heads]
    return draw_heads(named, stored["words"], stored["words"])


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
        (f"{head['class']}: E{head['site'].split('.')[1]}H{head['head']}", head["weights"])
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
    has_fewer_parameters = numbers["shared_params"] < numbers["mha_params"]
    return judge(
        numbers["shared_flops"] < numbers["mha_flops"],
        corrected=has_fewer_parameters and _scores_over_shared_width() < 1e-12,
        **numbers,
    )


def _scores_over_shared_width() -> float:
    """Error of (x W_Q m_i).(x W_K) over the whole shared width, for scores of two heads."""
    layer = make_layer(
        from_toml(
            'model = 12\nheads = {q = 2, dim = 6}\nproject = {part = "Collaborative", width = 8}'
        )
    )
    x = sample(1, 1, 5, 12)
    probe = Probe("scores")
    layer(x, probe=probe)
    state = layer.state_dict()
    q, k, content = (x[0] @ state[f"project.{name}"].T for name in ("q", "k", "content"))
    mixed = q[None] * state["project.mixing"][:, None]
    scores = (mixed @ k.T + content.T[:, None]) / math.sqrt(6)
    return largest_difference(scores, probe.tensors["scores"][0])


def third_of_the_dimensions(*, model: nn.Module | None = None) -> Outcome:
    """Share of the dimensions of the summed W_Q W_K^T that holds 90 % of its energy: translator,
    Gaussian weights.
    """
    net = load_sample_model() if model is None else model
    spectra = measure_qk_spectra(net)
    share = sum(layer.summed.dims / layer.summed.most for layer in spectra) / len(spectra)
    chance = sum(layer.summed.chance / layer.summed.most for layer in spectra) / len(spectra)
    return judge(
        share < 1 / 3 and holds_the_energy(net, spectra),
        share=share,
        chance=chance,
        layers=len(spectra),
        figure=_draw_spectra(net),
    )


def _draw_spectra(net: nn.Module) -> Picture:
    """Share of the energy in the first dimensions of the summed W_Q W_K^T: of the first, the last
    and a Gaussian layer.
    """
    sites = [layer.site for layer in measure_qk_spectra(net, num_draws=1)]
    curves: dict[str, dict[int, float]] = {}
    for name in (sites[0], sites[-1], "Gaussian weights"):
        state = net.get_submodule(name if name in sites else sites[0]).state_dict()
        q, k = (state[f"project.{side}"].double() for side in "qk")
        if name not in sites:
            q, k = (sample(seed, *q.shape) for seed in (1, 2))
        energy = torch.linalg.svdvals(q.T @ k).square().cumsum(0)
        curves[name] = dict(enumerate((energy / energy[-1]).tolist(), 1))
    levels = {"90 %": 0.9}
    return draw_curves(
        curves, "dimensions", "energy", lines={"Gaussian weights": "--"}, levels=levels
    )


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
    learned = convert(load_translator(), ToCollaborative(48), kind="cross").after
    weights = learned.get_submodule("decoder.0.cross").get_parameter("project.mixing")
    grids = {
        "(a) concatenated": blocks,
        "(b) all shared": torch.ones_like(blocks),
        "(c) translator, half as wide": weights.abs(),
    }
    figure = draw_grids(grids, "shared channel", "head")
    return judge(difference < 1e-12, difference=difference, figure=figure)


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
    numbers: dict[str, float] = {
        "narrowest": sizes[0][0],
        "fewest": sizes[0][1],
        "widest": sizes[-1][0],
        "most": sizes[-1][1],
    }
    numbers |= {"models": len(sizes), "correlation": correlation}
    # Sizes of models are the premise of the statement; whether heads bring a gain needs training.
    points = {"published models": dict(sizes)}
    figure = draw_curves(points, "width", "heads", log="xy", lines={"published models": ""})
    return Outcome(Verdict.NOT_RUN if correlation > 0.5 else Verdict.FAULT, numbers, figure)


def few_heads_attend_to_themselves(*, tied: bool = False) -> Outcome:
    """Mean weight of a token on itself in random layers with 1 and 16 heads, over 32 tokens of
    width 64.
    """
    numbers = {f"h{heads}": _self_weight(heads, tied) for heads in (1, 16)}
    are_near_chance = all(abs(32 * weight - 1) < 0.2 for weight in numbers.values())
    return judge(
        numbers["h1"] > 2 * numbers["h16"],
        corrected=are_near_chance and _self_weight(1, True) > 0.5,
        **numbers,
        chance=1 / 32,
    )


def _self_weight(heads: int, tied: bool) -> float:
    w_q, w_k = (sample(seed, heads, 64, 64 // heads).mT.flatten(0, 1) / 8 for seed in (2, 3))
    layer = make_layer(design(model=64, heads=heads))
    state = {"project.q": w_q, "project.k": w_q if tied else w_k}
    layer.load_state_dict(layer.state_dict() | state)
    weights = weights_of(layer, sample(1, 20, 1, 32, 64)[:, 0])
    return float(weights.diagonal(0, -2, -1).mean())


def _positional_shares() -> dict[tuple[str, int], list[float]]:
    """R^2 of the weights explained by the offset alone, of each self-attention head of the
    translator, by layer.
    """
    layers: dict[tuple[str, int], list[float]] = {}
    for head in _self_attention_heads():
        share = head.measures["positional_share"].value
        layers.setdefault((head.stack, head.layer), []).append(share)
    return layers


def _self_attention_heads() -> list[HeadMeasures]:
    return [head for head in measure_translator().heads if head.kind == "attention"]


def _has_role(head: HeadMeasures) -> bool:
    return bool(head.classes) and head.classes[0].name != "unclear"


def fixed_patterns(*, shares: Sequence[float] | None = None) -> Outcome:
    """Count heads of the bundled translator where the offset explains over half of the weights
    (R^2).
    """
    values = (
        list(chain.from_iterable(_positional_shares().values())) if shares is None else list(shares)
    )
    fixed = sum(share > 0.5 for share in values)
    heads = _self_attention_heads()
    named = sum(map(_has_role, heads))
    return judge(
        fixed > len(values) / 2,
        corrected=fixed < len(heads) / 4 and named > len(heads) / 2,
        fixed=fixed,
        heads=len(values),
        mean=sum(values) / len(values),
        named=named,
        texts=MEASURED_TEXTS,
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
    falls = all(numbers[f"{stack}_2"] < numbers[f"{stack}_0"] for stack in ("encoder", "decoder"))
    return judge(rises, corrected=falls, **numbers, texts=MEASURED_TEXTS)


def diversity_by_depth(*, reverse: bool = False) -> Outcome:
    """Generalised Jensen-Shannon divergence of the heads of each encoder layer, over log h;
    `reverse` swaps layers.
    """
    net = load_translator()
    layers = []
    for number in range(3):
        spreads = []
        for weights in record_weights(net, f"encoder.{number}.attention"):
            spread = entropy(weights.mean(1)) - entropy(weights).mean(1)
            spreads.append(spread.flatten() / math.log(weights.shape[1]))
        layers.append(float(torch.cat(spreads).mean()))
    layers = layers[::-1] if reverse else layers
    return judge(
        layers[0] > layers[1] > layers[2],
        corrected=0.1 < layers[0] < layers[2],
        first=layers[0],
        second=layers[1],
        third=layers[2],
        texts=NUM_TEXTS,
    )


def left_or_right(*, alternate: bool = True) -> Outcome:
    """A head with its largest weight on the right and left neighbour in turn: share at right or
    left, and at one offset, by the measure of positional heads.
    """
    places = torch.arange(100)
    choice = (places + (1 - 2 * (places % 2) if alternate else 1)).clamp(max=99)
    weights = F.one_hot(choice, 100).float()[None]
    tokens = count_tokens("text", 100)
    band = WeightBand(weights, torch.ones(100, 100, dtype=torch.bool), 0, tokens, tokens)
    sums, counts = argmax_offset_sums(band)
    shares = (sums / counts)[0]  # at the offsets -8 to 8
    either = float(shares[7] + shares[9])
    fixed = float(select_largest(shares))
    return judge(
        (either >= 0.9) == (fixed >= 0.9),
        corrected=either == 1 and fixed == 0.5,
        either=either,
        fixed=fixed,
        figure=draw_grids({"": weights[0, :12, :12]}, "key", "query"),
    )


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
    is_third = 0.3 < numbers["share"] < 0.4 and numbers["sinks"] > left[place] / 2
    return judge(
        abs(remaining / heads - 2 / 3) < 0.05,
        corrected=is_third and pruned["columns"][place]["drift"] < 0.1,
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
    outputs = layer.head_outputs(x)[0]
    steps = {
        "outputs of the heads": outputs,
        "times the gates": outputs * factors,
        "pruned": small.head_outputs(x)[0],
    }
    named = {name: each.detach().abs().flatten(1) for name, each in steps.items()}
    return judge(
        difference < 1e-12,
        difference=difference,
        parameters=costs.count_parameters(spec),
        figure=draw_grids(named, "channel", "token"),
    )


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
        corrected=flops == [4 * 2048**2 * 8 * dim for dim in (32, 64)],
        narrow=flops[0],
        wide=flops[1],
        growth=flops[1] / flops[0],
    )


def heads_with_a_role_elsewhere(*, least: float = 0.25) -> Outcome:
    """Self-attention heads of the translator with a tested role other than the token itself, and a
    weight on the token itself of at most twice chance; fewer than `least` of all are a small part.
    """
    heads = _self_attention_heads()
    modest = [head for head in heads if _is_modest(head.measures["self"])]
    named = [head for head in modest if _has_role(head) and head.classes[0].name != "self"]
    return judge(
        len(named) < least * len(heads),
        corrected=least * len(heads) < len(named) < len(modest),
        named=len(named),
        modest=len(modest),
        heads=len(heads),
        most=max(head.measures["self"].value for head in heads),
        texts=MEASURED_TEXTS,
    )


def _is_modest(measure: Measure) -> bool:
    return measure.value <= 2 * measure.chance


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
