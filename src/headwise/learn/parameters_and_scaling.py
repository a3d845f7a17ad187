"""Runs of document 001: the formula, the number of parameters, and why scores are divided by
sqrt(d_k).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from statistics import fmean
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import costs
from ..attention.attention import Attention
from ..attention.parts import REGISTRY
from ..attention.presets import design, from_toml
from ..attention.tensor_attention import attend
from ..kernels.capabilities import use_threads
from .catalogue import Outcome, Verdict, judge, judge_condition
from .matrix_figures import draw_curves, draw_grids, draw_matrices, draw_numbers
from .measured_layers import (
    VALUES,
    entropy,
    largest_difference,
    make_layer,
    marked_values,
    sample,
    samples,
)
from .translator_runs import NUM_TEXTS, load_translator, record_weights

KEY_WIDTHS = (4, 16, 64, 256, 1024)
NUM_KEYS = 16
NUM_ROWS = 512


def sample_scores(
    width: int, spread: float = 1.0, mean: float = 0.0, scale: float | None = 1.0
) -> Tensor:
    """Scores of random queries with 16 random keys as a layer computes them, [rows, keys]; a
    `scale` of None is the layer's own.
    """
    queries = sample(width, NUM_ROWS, 1, width) * spread + mean
    keys = sample(width + 1, NUM_ROWS, NUM_KEYS, width) * spread + mean
    return compare_tokens(queries, keys, scale).squeeze(1)


def compare_tokens(queries: Tensor, keys: Tensor, scale: float | None = None) -> Tensor:
    """Scores [B, T, S] of scaled dot products of queries [B, T, K] and keys [B, S, K]; without a
    `scale`, that of the layer.
    """
    similarity = REGISTRY["DotProduct"](scale=scale)
    spec = design(model=queries.shape[-1], heads=1, similarity=similarity)
    factor = similarity.score_scale(spec.core_of(spec.project))
    return similarity.scores(queries[:, None], keys[:, None], factor, {})[:, 0]


def softmax_weights(scores: Tensor) -> Tensor:
    """The weights of `attend` for rows of scores [rows, keys]."""
    unit = torch.eye(scores.shape[-1], dtype=scores.dtype)
    return attend(scores, unit, unit, scale=1.0)[0]


def softmax_jacobian_norm(scores: Tensor) -> float:
    """Mean Frobenius norm of diag(p) - p p^T over the rows."""
    p = softmax_weights(scores)
    jacobian = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    return float(jacobian.square().sum((1, 2)).sqrt().mean())


def score_variance(*, repeated: bool = False) -> Outcome:
    """Variance of q.k over d_k; with `repeated`, all components of a query and
    of a key are equal.
    """
    ratios = {}
    for width in KEY_WIDTHS:
        scores = sample_scores(1) * width if repeated else sample_scores(width)
        ratios[f"ratio_{width}"] = float(scores.var()) / width
    variances = {width: width * ratios[f"ratio_{width}"] for width in KEY_WIDTHS}
    curves = {"variance of scores": variances, "d_k": {width: width for width in KEY_WIDTHS}}
    figure = draw_curves(curves, "d_k", "variance", log="xy", lines={"d_k": "--"})
    return judge(all(0.8 < ratio < 1.2 for ratio in ratios.values()), **ratios, figure=figure)


def gradient_of_softmax(*, exponent: float = 0.5) -> Outcome:
    """Softmax Jacobian and entropy without scaling, and with scores divided by d_k^exponent."""
    numbers: dict[str, float] = {}
    is_unit = True
    for width in KEY_WIDTHS:
        scores = sample_scores(width)
        scaled = sample_scores(width, scale=None) if exponent == 0.5 else scores / width**exponent
        numbers[f"raw_{width}"] = softmax_jacobian_norm(scores)
        is_unit &= abs(float(scaled.std()) - 1) < 0.1
        numbers[f"scaled_{width}"] = softmax_jacobian_norm(scaled)
        log_p = scores.log_softmax(-1)
        numbers[f"entropy_{width}"] = float(-(log_p.exp() * log_p).sum(-1).mean())
    vanishes = numbers["raw_1024"] < numbers["raw_4"] / 3
    steady = abs(numbers["scaled_1024"] / numbers["scaled_4"] - 1) < 0.1 and is_unit
    return judge(vanishes and steady, **numbers)


def vanishing_needs_unit_variance(*, spread: float = 1.0) -> Outcome:
    """Test if unscaled scores saturate: with components of deviation `spread`, and with small
    components.
    """
    numbers = {
        "unit": softmax_jacobian_norm(sample_scores(1024, spread)),
        "small": softmax_jacobian_norm(sample_scores(1024, 1024**-0.25)),
        "width_4": softmax_jacobian_norm(sample_scores(4)),
    }
    threshold = numbers["width_4"] / 3
    ordered = {
        f"d_k = {width}": softmax_weights(sample_scores(width)).sort(descending=True).values.mean(0)
        for width in (4, 64, 1024)
    }
    curves = {name: dict(enumerate(weights.tolist(), 1)) for name, weights in ordered.items()}
    return judge_condition(
        numbers["unit"] < threshold,
        numbers["small"] < threshold,
        **numbers,
        figure=draw_curves(curves, "key, by its weight", "weight"),
    )


def scaling_and_the_mean(*, mean: float = 0.0) -> Outcome:
    """Mean and variance of scores before and after division by sqrt(d_k), for components with this
    mean.
    """
    scores = sample_scores(256, mean=mean)
    scaled = sample_scores(256, mean=mean, scale=None)
    numbers = {
        "mean_raw": float(scores.mean()),
        "mean_scaled": float(scaled.mean()),
        "variance_raw": float(scores.var()),
        "variance_scaled": float(scaled.var()),
    }
    error_of_mean = math.sqrt(numbers["variance_raw"] / scores.numel())
    scales_variance = abs(numbers["variance_raw"] / 256 / numbers["variance_scaled"] - 1) < 1e-9
    return judge(
        abs(numbers["mean_raw"]) > 6 * error_of_mean,
        corrected=scales_variance and 0.8 < numbers["variance_scaled"] < 1.2,
        **numbers,
    )


def normalisation_is_not_scaling(*, stretch: float = 3.0) -> Outcome:
    """Test if division by sqrt(d_k) undoes a change of the input's scale, as layer normalisation
    does.
    """
    queries = sample(3, 64, 256)[None]
    keys = sample(4, 64, 256)[None]
    scaled = float(
        compare_tokens(stretch * queries, keys).std() / compare_tokens(queries, keys).std()
    )
    normed = torch.nn.functional.layer_norm(stretch * queries, (256,)).std()
    normed_ratio = float(normed / torch.nn.functional.layer_norm(queries, (256,)).std())
    return judge(
        abs(scaled - normed_ratio) < 0.01,
        corrected=abs(scaled - stretch) < 1e-9 and abs(normed_ratio - 1) < 0.01,
        scaled=scaled,
        normed=normed_ratio,
    )


def parameters_of_one_matrix(*, matrices: int = 1, model: int = 512, width: int = 64) -> Outcome:
    """Parameters of the first `matrices` of W_Q, W_K and W_V of one head, and of all three."""
    shapes = design(model=model, heads=1, dim=width).shapes()
    sizes = [math.prod(shapes[f"project.{side}"]) for side in "qkv"]
    one = sum(sizes[:matrices])
    three = 3 * model * width
    of_output = math.prod(shapes["output.o"])
    return judge(
        one == three,
        corrected=sizes == [three // 3] * 3 and of_output == width * model,
        one=one,
        three=sum(sizes),
    )


def total_parameters(*, model: int = 512, heads: int = 8, width: int | None = None) -> Outcome:
    """3 h d d_k + d^2 against the counted parameters, with d_k = d/h and with another width of
    heads.
    """
    width = model // heads if width is None else width
    counted = costs.count_parameters(design(model=model, heads=heads, dim=width))
    other = costs.count_parameters(design(model=model, heads=heads, dim=2 * model // heads))
    formula = 3 * heads * model * width + model**2
    wide_formula = 3 * heads * model * (2 * model // heads) + model**2
    biased = costs.count_parameters(design(model=model, heads=heads, dim=width, bias="qkvo"))
    numbers = {
        "counted": counted,
        "formula": formula,
        "biased": biased,
        "wide": other,
        "wide_formula": wide_formula,
    }
    has_four_biases = biased == counted + 3 * heads * width + model
    return judge_condition(counted == formula and has_four_biases, other == wide_formula, **numbers)


def parameters_by_heads(*, width: int | None = None) -> Outcome:
    """Test if parameters grow with h at d = 512; with `width`, every head has this width."""
    curves: dict[str, dict[int, float]] = {"d_k = d / h": {}, "d_k = 64": {}}
    counts: dict[str, int] = {}
    for heads in (1, 2, 4, 8, 16, 32):
        sizes = [width, 64]
        for curve, dim in zip(curves.values(), sizes, strict=True):
            curve[heads] = costs.count_parameters(design(model=512, heads=heads, dim=dim))
        counts[f"h{heads}"] = int(curves["d_k = d / h"][heads])
    return judge(
        counts["h32"] > counts["h1"],
        corrected=set(counts.values()) == {4 * 512**2},
        figure=draw_curves(curves, "heads", "parameters", log="xy"),
        **counts,
    )


def parameters_stay_equal(*, width: int | None = None) -> Outcome:
    """The reverse of `parameters_by_heads`: one head and many heads have
    equally many parameters.
    """
    numbers = parameters_by_heads(width=width).numbers
    return judge(set(numbers.values()) == {4 * 512**2}, **numbers)


def equal_widths_needed(*, query: int = 5, key: int = 4) -> Outcome:
    """Test if attend accepts queries and keys of different widths. The figure has the matrices of
    one head with values of another width.
    """
    message = _refusal(query, key)
    x = sample(4, 3, 4)
    projections = {"W_Q": sample(5, 4, 3), "W_K": sample(6, 4, 3), "W_V": sample(7, 4, 2)}
    q, k, v = (x @ projection for projection in projections.values())
    output = attend(q, k, v)[0]
    return judge(
        message == "-",
        corrected=_refusal(key, key) == "-" != message,
        query=query,
        key=key,
        message=message,
        figure=draw_matrices([*projections.items(), ("Q K^T", q @ k.T), ("output", output)]),
    )


def _refusal(query: int, key: int) -> str:
    """The error for queries and keys of these widths with values of 2 channels; "-" without one."""
    try:
        attend(sample(1, 3, query), sample(2, 7, key), sample(3, 7, 2))
    except ValueError as error:
        return str(error)
    return "-"


def different_patterns(*, tied: bool = False) -> Outcome:
    """Mean Jensen-Shannon divergence between the weights of 4 heads; `tied` gives all heads one
    projection.
    """
    q, k = samples((4, 12, 16), (4, 12, 16))
    equal = _divergence_of_heads(q[:1].expand_as(q), k[:1].expand_as(k))
    divergence = equal if tied else _divergence_of_heads(q, k)
    weights = _weights_of_heads(q[:1].expand_as(q) if tied else q, k)
    figure = draw_grids({f"head {n}": each for n, each in enumerate(weights)}, "key", "query")
    most = math.log(4)
    return judge(divergence > 0.01 > abs(equal), divergence=divergence, most=most, figure=figure)


def _divergence_of_heads(q: Tensor, k: Tensor) -> float:
    weights = _weights_of_heads(q, k)
    return float(entropy(weights.mean(0)).mean() - entropy(weights).mean())


def _weights_of_heads(q: Tensor, k: Tensor) -> Tensor:
    weights = attend(q, k, q, need_weights=True)[1]
    assert weights is not None
    return weights


def heads_interact(*, modifiers: str = "") -> Outcome:
    """Change of the first head's output when queries and keys of the other heads are replaced,
    relative to it.
    """
    change = change_by_other_heads(modifiers)
    return judge(change > 0, corrected=change == 0 and mixes_let_heads_interact(), change=change)


def mixes_let_heads_interact() -> bool:
    """True if talking heads and DCMHA, on scores, make a head depend on the others."""
    parts = ('{part = "TalkingHeads"}', '{part = "DynamicComposition"}')
    return all(change_by_other_heads(part) > 1e-3 for part in parts)


def change_by_other_heads(modifiers: str) -> float:
    """Largest change of the output of head 0 of 3 if the others have new query and key projections,
    relative to it.
    """
    layer = make_layer(
        from_toml(f"model = 12\nheads = {{q = 3, dim = 4}}\nmodifiers = [{modifiers}]")
    )
    x = sample(1, 1, 7, 12)
    before = layer.head_outputs(x)[0, :, 0].detach()
    with torch.no_grad():
        for side in "qk":
            layer.get_parameter(f"project.{side}")[4:] = sample(2, 8, 12)
    return largest_difference(layer.head_outputs(x)[0, :, 0], before) / float(before.abs().max())


def four_axis_listing(*, scale_power: float = 0.5) -> Outcome:
    """softmax(Q K^T / d_k^0.5) V on [batch, h, seq_len, d_k], as the listing writes it, against
    hw.attend.
    """
    q, k, v = samples((2, 3, 7, 5), (2, 3, 7, 5), (2, 3, 7, 5))
    scores = torch.matmul(q, k.transpose(-1, -2)) / 5**scale_power
    listed = torch.matmul(torch.softmax(scores, dim=-1), v)
    difference = largest_difference(listed, attend(q, k, v)[0])
    return judge(difference < 1e-12, difference=difference, shape=str(tuple(listed.shape)))


def self_attention_formula(*, shared_input: bool = True) -> Outcome:
    """Q = X W_Q, K = X W_K, V = X W_V and the formula, against the layer of headwise."""
    layer = make_layer(design(model=12, heads=1, dim=12))
    x = sample(7, 1, 5, 12)
    state = layer.state_dict()
    z = x if shared_input else sample(8, 1, 5, 12)
    q = x @ state["project.q"].T
    k = z @ state["project.k"].T
    v = z @ state["project.v"].T
    y = (q @ k.mT / math.sqrt(12)).softmax(-1) @ v @ state["output.o"].T
    difference = largest_difference(y, layer(x))
    return judge(difference < 1e-12, difference=difference)


class _HeadsOfOneTask(NamedTuple):
    """Accuracies of one small trained model: on its 24 training texts, on held-out texts, and on
    those if a quarter of the heads, or one head, outputs noise.
    """

    train: float
    held_out: float
    quarter_noisy: float
    one_noisy: float


@cache
def _train_heads(heads: int, seed: int) -> _HeadsOfOneTask:
    """Train one layer to name the value of the one token that is marked, from too few texts."""
    with torch.random.fork_rng(devices=[]), use_threads(1):
        torch.manual_seed(seed)
        layer = Attention(design(model=32, heads=heads))
        embed = nn.Linear(VALUES + 1, 32)
        read = nn.Linear(32, VALUES)

        def predict(x_BTC: Tensor, noisy: range = range(0)) -> Tensor:
            x_BTD = embed(x_BTC)
            o_BTHV = layer.head_outputs(x_BTD)
            is_noisy = torch.tensor([head in noisy for head in range(heads)])[:, None]
            o_BTHV = torch.where(is_noisy, torch.randn_like(o_BTHV) * o_BTHV.std(), o_BTHV)
            return read((x_BTD + layer.merge_heads(o_BTHV))[:, -1])

        def accuracy(x_BTC: Tensor, goal_B: Tensor, bad: int = 0) -> float:
            """With `bad` neighbouring heads noisy: the mean over all such groups of heads."""
            groups = [range(n, n + bad) for n in range(0, heads, bad or heads)]
            right = [predict(x_BTC, group).argmax(-1) == goal_B for group in groups]
            return float(torch.stack(right).float().mean())

        texts = marked_values(24, 16)
        held_out = marked_values(256, 16)
        parameters = nn.ModuleList((embed, layer, read)).parameters()
        optimiser = torch.optim.Adam(parameters, lr=1e-2)
        for _ in range(60):
            optimiser.zero_grad()
            F.cross_entropy(predict(texts[0]), texts[1]).backward()
            optimiser.step()
        with torch.no_grad():
            noisy = [accuracy(*held_out, bad) for bad in (heads // 4, 1)]
            return _HeadsOfOneTask(accuracy(*texts), accuracy(*held_out), *noisy)


def _is_gain(many: Sequence[float], few: Sequence[float]) -> bool:
    """True if the first numbers are larger by a paired t test over 5 seeds, at 5 % (two-sided)."""
    gains = torch.tensor(many) - torch.tensor(few)
    return float(gains.mean()) > 2.776 * float(gains.std()) / math.sqrt(len(gains))


def heads_against_noise(*, fixed: bool = False) -> Outcome:
    """Held-out accuracy of trained models with 4 and with 8 heads, a quarter of which output noise.

    With `fixed`, one head outputs noise whatever the number of heads.
    """
    few, many = ([_train_heads(heads, seed) for seed in range(5)] for heads in (4, 8))
    name = "one_noisy" if fixed else "quarter_noisy"
    numbers = {
        "clean_few": fmean(model.held_out for model in few),
        "clean_many": fmean(model.held_out for model in many),
        "few": fmean(getattr(model, name) for model in few),
        "many": fmean(getattr(model, name) for model in many),
    }
    changes = [
        [getattr(model, name) - model.held_out for model in models] for models in (many, few)
    ]
    is_trained = min(model.train for model in (*few, *many)) > 0.9
    does_harm = numbers["many"] < numbers["clean_many"] - 0.05
    outcome = judge(_is_gain(*changes), corrected=_is_gain(*reversed(changes)), **numbers)
    return _leave_open(outcome, is_trained and does_harm)


def _leave_open(outcome: Outcome, is_valid: bool) -> Outcome:
    """The outcome of a valid experiment that shows no significant difference is not resolved."""
    is_open = outcome.verdict == Verdict.FAULT and is_valid
    return replace(outcome, verdict=Verdict.NOT_RESOLVED) if is_open else outcome


def heads_against_overfitting(*, fixed: bool = False) -> Outcome:
    """Held-out accuracy of models with 1 and with 8 heads that know their training texts by heart;
    and `heads_against_noise`.
    """
    one, many = ([_train_heads(heads, seed) for seed in range(5)] for heads in (1, 8))
    robust = heads_against_noise(fixed=fixed)
    numbers = {
        "gap_one": fmean(model.train - model.held_out for model in one),
        "gap_many": fmean(model.train - model.held_out for model in many),
    }
    held_out = [[model.held_out for model in models] for models in (many, one)]
    is_trained = min(model.train for model in (*one, *many)) > 0.9
    outcome = judge(
        _is_gain(*held_out) or robust.verdict == Verdict.HOLDS,
        corrected=_is_gain(*reversed(held_out)) and robust.verdict == Verdict.WRONG,
        **numbers,
        **robust.numbers,
    )
    return _leave_open(outcome, is_trained and robust.verdict != Verdict.FAULT)


def largest_gradient(*, normalised: bool = True) -> Outcome:
    """Largest singular value of the Jacobian of softmax, for scores of d_k = 64 and 100 and 10,000
    times as large.

    Without `normalised`, exponentials are not divided by their sum.
    """
    numbers: dict[str, float] = {}
    for factor in (1, 100, 10_000):
        scores = sample_scores(64) * factor
        p = softmax_weights(scores) if normalised else scores.exp()
        jacobian = torch.diag_embed(p) - (p[:, :, None] * p[:, None] if normalised else 0.0)
        numbers[f"largest_{factor}"] = (
            float(torch.linalg.eigvalsh(jacobian)[:, -1].max()) if normalised else float(p.max())
        )
    largest = max(numbers.values())
    return judge(largest > 1, corrected=0.4 < largest < 0.5 + 1e-9, **numbers)


def near_and_far_heads(*, uniform: bool = False) -> Outcome:
    """Mean distance that the heads of the translator's last encoder layer attend over in held-out
    texts, the least and the most.

    `uniform` replaces the weights.
    """
    totals = torch.zeros(2, 6, dtype=torch.float64)
    rows = 0
    for weights in record_weights(load_translator(), "encoder.2.attention"):
        equal = torch.full_like(weights, 1 / weights.shape[-1])
        places = torch.arange(weights.shape[-1])
        distance = (places[:, None] - places).abs().double()
        for total, each in zip(totals, (equal if uniform else weights, equal), strict=True):
            total += (each * distance).sum(-1).sum((0, 2))
        rows += weights.shape[0] * weights.shape[2]
    distances, chance = (totals / rows).tolist()
    numbers = {"near": min(distances), "far": max(distances), "chance": chance[0]}
    is_divided = numbers["far"] > 1.5 * numbers["near"] and numbers["near"] < numbers["chance"]
    columns = {f"head {n}": str(n) for n in range(len(distances))}
    levels = {"all tokens alike": "chance"}
    by_head = {str(n): distance for n, distance in enumerate(distances)}
    table = {"columns": columns, "axis": "tokens", "levels": levels}
    figure = draw_numbers(table, numbers | by_head)
    return judge(is_divided, **numbers, heads=len(distances), texts=NUM_TEXTS, figure=figure)
