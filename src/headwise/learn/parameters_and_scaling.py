"""Runs of document 001: the formula, the number of parameters, and why scores are divided by
sqrt(d_k).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .. import costs
from ..attention.presets import design, from_toml
from ..attention.tensor_attention import attend
from ..observe.bundled_sample import load_sample_trace
from .catalogue import Outcome, judge, judge_condition
from .measured_layers import entropy, largest_difference, make_layer, sample, samples

KEY_WIDTHS = (4, 16, 64, 256, 1024)
NUM_KEYS = 16
NUM_ROWS = 512


def sample_scores(width: int, spread: float = 1.0, mean: float = 0.0) -> Tensor:
    """Dot products of random queries with 16 random keys, [rows, keys]."""
    queries = sample(width, NUM_ROWS, 1, width) * spread + mean
    keys = sample(width + 1, NUM_ROWS, NUM_KEYS, width) * spread + mean
    return (queries * keys).sum(-1)


def softmax_jacobian_norm(scores: Tensor) -> float:
    """Mean Frobenius norm of diag(p) - p p^T over the rows."""
    p = scores.softmax(-1)
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
    return judge(all(0.8 < ratio < 1.2 for ratio in ratios.values()), **ratios)


def gradient_of_softmax(*, exponent: float = 0.5) -> Outcome:
    """Softmax Jacobian and entropy without scaling, and with scores divided by d_k^exponent."""
    numbers: dict[str, float] = {}
    for width in KEY_WIDTHS:
        scores = sample_scores(width)
        numbers[f"raw_{width}"] = softmax_jacobian_norm(scores)
        numbers[f"scaled_{width}"] = softmax_jacobian_norm(scores / width**exponent)
        log_p = scores.log_softmax(-1)
        numbers[f"entropy_{width}"] = float(-(log_p.exp() * log_p).sum(-1).mean())
    vanishes = numbers["raw_1024"] < numbers["raw_4"] / 3
    steady = abs(numbers["scaled_1024"] / numbers["scaled_4"] - 1) < 0.1
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
    return judge_condition(numbers["unit"] < threshold, numbers["small"] < threshold, **numbers)


def scaling_and_the_mean(*, mean: float = 0.0) -> Outcome:
    """Mean and variance of scores before and after division by sqrt(d_k), for components with this
    mean.
    """
    scores = sample_scores(256, mean=mean)
    width = 256
    numbers = {
        "mean_raw": float(scores.mean()),
        "mean_scaled": float((scores / math.sqrt(width)).mean()),
        "variance_raw": float(scores.var()),
        "variance_scaled": float((scores / math.sqrt(width)).var()),
    }
    error_of_mean = math.sqrt(numbers["variance_raw"] / scores.numel())
    return judge(abs(numbers["mean_raw"]) > 6 * error_of_mean, **numbers)


def normalisation_is_not_scaling(*, stretch: float = 3.0) -> Outcome:
    """Test if division by sqrt(d_k) undoes a change of the input's scale, as layer normalisation
    does.
    """
    queries = sample(3, 64, 256)
    keys = sample(4, 64, 256)
    scaled = float(((stretch * queries) @ keys.T / 16).std() / (queries @ keys.T / 16).std())
    normed = torch.nn.functional.layer_norm(stretch * queries, (256,)).std()
    normed_ratio = float(normed / torch.nn.functional.layer_norm(queries, (256,)).std())
    return judge(abs(scaled - normed_ratio) < 0.01, scaled=scaled, normed=normed_ratio)


def parameters_of_one_matrix(*, matrices: int = 1, model: int = 512, width: int = 64) -> Outcome:
    """Parameters of the first `matrices` of W_Q, W_K and W_V of one head, and of all three."""
    shapes = design(model=model, heads=1, dim=width).shapes()
    sizes = [math.prod(shapes[f"project.{side}"]) for side in "qkv"]
    one = sum(sizes[:matrices])
    return judge(one == 3 * model * width, one=one, three=sum(sizes))


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
    return judge_condition(counted == formula, other == wide_formula, **numbers)


def parameters_by_heads(*, width: int | None = None) -> Outcome:
    """Test if parameters grow with h at d = 512; with `width`, every head has this width."""
    counts = {
        f"h{heads}": costs.count_parameters(design(model=512, heads=heads, dim=width))
        for heads in (1, 2, 4, 8, 16, 32)
    }
    return judge(counts["h32"] > counts["h1"], **counts)


def parameters_stay_equal(*, width: int | None = None) -> Outcome:
    """The reverse of `parameters_by_heads`: one head and many heads have
    equally many parameters.
    """
    numbers = parameters_by_heads(width=width).numbers
    return judge(len(set(numbers.values())) == 1, **numbers)


def equal_widths_needed(*, query: int = 5, key: int = 4) -> Outcome:
    """Test if attend accepts queries and keys of different widths."""
    try:
        attend(sample(1, 3, query), sample(2, 7, key), sample(3, 7, 2))
    except ValueError as error:
        return judge(False, query=query, key=key, message=str(error))
    return judge(True, query=query, key=key, message="-")


def different_patterns(*, tied: bool = False) -> Outcome:
    """Mean Jensen-Shannon divergence between the weights of 4 heads; `tied` gives all heads one
    projection.
    """
    q, k = samples((4, 12, 16), (4, 12, 16))
    if tied:
        q = q[:1].expand_as(q)
        k = k[:1].expand_as(k)
    _, weights = attend(q, k, q, need_weights=True)
    assert weights is not None
    mean = weights.mean(0)
    divergence = entropy(mean).mean() - entropy(weights).mean()
    return judge(float(divergence) > 0.01, divergence=float(divergence), most=math.log(4))


def heads_interact(*, modifiers: str = "") -> Outcome:
    """Change of the first head's output when queries and keys of the other heads are replaced,
    relative to it.
    """
    change = change_by_other_heads(modifiers)
    return judge(change > 0, change=change)


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


def robust_to_corrupted_heads(
    *, heads: int = 8, corrupted: float = 0.25, fixed: bool = False
) -> Outcome:
    """Relative change of a random layer's output when a quarter of its heads outputs noise, with 4
    and `heads` heads.

    With `fixed`, one head is corrupted whatever the number of heads.
    """
    numbers = {}
    for count in (4, heads):
        layer = make_layer(design(model=64, heads=count))
        x = sample(5, 4, 9, 64)
        o = layer.head_outputs(x).detach()
        bad = 1 if fixed else round(corrupted * count)
        noise = sample(6, *o.shape) * o.std()
        changed = torch.cat([noise[:, :, :bad], o[:, :, bad:]], 2)
        before = layer.merge_heads(o)
        after = layer.merge_heads(changed)
        numbers[f"h{count}"] = float((after - before).norm().detach() / before.norm().detach())
    first = numbers["h4"]
    last = numbers[f"h{heads}"]
    return judge(last < 0.8 * first, few=first, many=last)


def largest_gradient(*, normalised: bool = True) -> Outcome:
    """Largest singular value of the Jacobian of softmax, for scores of d_k = 64 and 100 and 10,000
    times as large.

    Without `normalised`, exponentials are not divided by their sum.
    """
    numbers: dict[str, float] = {}
    for factor in (1, 100, 10_000):
        scores = sample_scores(64) * factor
        p = scores.softmax(-1) if normalised else scores.exp()
        jacobian = torch.diag_embed(p) - (p[:, :, None] * p[:, None] if normalised else 0.0)
        numbers[f"largest_{factor}"] = (
            float(torch.linalg.eigvalsh(jacobian)[:, -1].max()) if normalised else float(p.max())
        )
    return judge(max(numbers.values()) > 1, **numbers)


def near_and_far_heads(*, uniform: bool = False) -> Outcome:
    """Mean distance that the heads of the translator's last encoder layer attend over, the least
    and the most.

    `uniform` replaces the weights.
    """
    trace = load_sample_trace()
    site = "encoder.2.attention"
    distances = []
    for head in range(trace.get_layer(site).heads):
        weights = torch.as_tensor(trace.head_weights(site, head)).double()
        places = torch.arange(len(weights))
        distance = (places[:, None] - places).abs().double()
        weights = torch.full_like(weights, 1 / len(weights)) if uniform else weights
        distances.append(float((weights * distance).sum(-1).mean()))
    numbers = {"near": min(distances), "far": max(distances), "chance": float(distance.mean())}
    return judge(
        numbers["far"] > 1.5 * numbers["near"], **numbers, heads=len(distances), tokens=len(places)
    )
