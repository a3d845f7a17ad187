"""Runs of document 004: estimate a value from stored pairs, and how attention follows from it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F

from ..attention.presets import design, from_toml
from ..attention.tensor_attention import attend
from .catalogue import ItemList, Outcome, judge
from .matrix_figures import Picture, draw_curves, draw_matrices
from .measured_layers import largest_difference, make_layer, sample, samples, size_text

KEYS = (51.0, 56.0, 58.0)
VALUES = (40.0, 43.0, 48.0)
QUERY = 57.0
KERNEL_WIDTHS = (0.5, 1.0, 2.0, 5.0, 10.0)

WeightFunction = Callable[[float, Sequence[float]], list[float]]


def normalise(values: Sequence[float]) -> list[float]:
    """Divide the values by their sum."""
    return [value / sum(values) for value in values]


def distance_weights(query: float, keys: Sequence[float]) -> list[float]:
    """|q - k| / sum |q - k|, which grows with distance.

    >>> distance_weights(57.0, [51.0, 56.0, 58.0])
    [0.75, 0.125, 0.125]
    """
    return normalise([abs(query - key) for key in keys])


def inverse_distance_weights(query: float, keys: Sequence[float]) -> list[float]:
    """1/|q - k|, normalised; a key equal to the query gets all the weight.

    >>> (
    ...     [round(w, 3) for w in inverse_distance_weights(57.0, [51.0, 56.0, 58.0])],
    ...     inverse_distance_weights(56.0, [51.0, 56.0]),
    ... )
    ([0.077, 0.462, 0.462], [0.0, 1.0])
    """
    if query in keys:
        return [float(key == query) for key in keys]
    return normalise([1 / abs(query - key) for key in keys])


def linear_interpolation_weights(query: float, keys: Sequence[float]) -> list[float]:
    """Linear interpolation between the two neighbours in a sorted sequence of keys.

    >>> linear_interpolation_weights(56.5, [51.0, 56.0, 58.0])
    [0.0, 0.75, 0.25]
    """
    above = next(n for n, key in enumerate(keys) if key >= query and n > 0)
    lower = keys[above - 1]
    upper = keys[above]
    share = (query - lower) / (upper - lower)
    return [1 - share if n == above - 1 else share if n == above else 0.0 for n in range(len(keys))]


def gaussian_weights(width: float) -> WeightFunction:
    """exp(-(q - k)^2 / (2 width^2)) normalised: kernel regression (Nadaraya 1964, Watson 1964).

    >>> [round(w, 3) for w in gaussian_weights(2.0)(57.0, [51.0, 56.0, 58.0])]
    [0.006, 0.497, 0.497]
    """

    def weigh(query: float, keys: Sequence[float]) -> list[float]:
        nearest = min(
            abs(query - key) for key in keys
        )  # subtracted so that narrow widths do not underflow
        return normalise(
            [math.exp((nearest**2 - (query - key) ** 2) / (2 * width**2)) for key in keys]
        )

    return weigh


def look_up(
    weight_function: WeightFunction, query: float = QUERY, keys: Sequence[float] = KEYS
) -> float:
    """The weighted mean of the values of these stored keys, for one method of weighting.

    >>> look_up(distance_weights)
    41.375
    """
    weights = zip(keys, weight_function(query, keys), strict=True)
    value_of_key = dict(zip(KEYS, VALUES, strict=True))
    return sum(weight * value_of_key[key] for key, weight in weights)


def attention_weights(width: float) -> WeightFunction:
    """The weights of `attend` with -(q - k)^2 / (2 width^2) as scores."""

    def weigh(query: float, keys: Sequence[float]) -> list[float]:
        k = torch.tensor(keys, dtype=torch.float64)[:, None]
        bias = -((query - k.T) ** 2) / (2 * width**2)
        empty = torch.zeros(1, 1, dtype=torch.float64)
        _, weights = attend(empty, k, k, bias=bias, need_weights=True)
        assert weights is not None
        return weights[0].tolist()

    return weigh


def draw_estimates(methods: Mapping[str, WeightFunction]) -> Picture:
    """The estimate of each method from the first key to the last, and the stored pairs."""
    queries = [KEYS[0] + 0.1 * step for step in range(1, 70)]
    curves = {
        name: {query: look_up(method, query) for query in queries}
        for name, method in methods.items()
    }
    pairs = {"stored pairs": dict(zip(KEYS, VALUES, strict=True))}
    return draw_curves({**curves, **pairs}, "query", "value", lines={"stored pairs": ""})


# --- Runs ---------------------------------------------------------------------------------------


def between_neighbours(*, query: float = QUERY) -> Outcome:
    """The value between the two neighbours: their mean, and linear interpolation at this query and
    at 56.5.
    """
    line = look_up(linear_interpolation_weights, query)
    other = look_up(linear_interpolation_weights, 56.5)
    mean = (VALUES[1] + VALUES[2]) / 2
    figure = draw_estimates({"linear interpolation": linear_interpolation_weights})
    return judge(line == mean, value=line, mean=mean, other=other, figure=figure)


def indices_of_neighbours(*, query: float = QUERY) -> Outcome:
    """Indices, from 1, of the two keys next to the query."""
    order = sorted(range(len(KEYS)), key=lambda n: abs(KEYS[n] - query))[:2]
    nearest = ItemList(", ".join(str(n + 1) for n in sorted(order)))
    return judge(nearest == "1, 2", corrected=nearest == "2, 3", indices=nearest)


def distance_as_weight(*, power: float = 1.0) -> Outcome:
    """|q - k|^power over its sum as a weight: with all keys, with two neighbours, at 56.5 and at a
    key.
    """

    def weights(query: float, keys: tuple[float, ...]) -> list[float]:
        return normalise([abs(query - key) ** power for key in keys])

    every = weights(QUERY, KEYS)
    numbers = {"far": every[0], "near": every[1], "all": _mean(every, VALUES)}
    numbers["two"] = _mean(weights(QUERY, KEYS[1:]), VALUES[1:])
    numbers["unequal"] = _mean(weights(56.5, KEYS[1:]), VALUES[1:])
    if power > 0:
        numbers["at_key"] = _mean(weights(KEYS[0], KEYS), VALUES)
    numbers["line"] = look_up(linear_interpolation_weights, 56.5)
    numbers["inverse"] = look_up(inverse_distance_weights)
    errors = []
    for width in KERNEL_WIDTHS:
        name = f"kernel_{width:g}".replace(".", "_")
        numbers[name] = look_up(attention_weights(width))
        errors.append(abs(numbers[name] - look_up(gaussian_weights(width))))
    grows = numbers["far"] > numbers["near"] and numbers["all"] != numbers["two"] == 45.5
    is_wrong_elsewhere = abs(numbers["unequal"] - numbers["line"]) > 1
    return judge(
        numbers["near"] > numbers["far"],
        corrected=grows and is_wrong_elsewhere and max(errors) < 1e-9,
        **numbers,
    )


def _mean(weights: list[float], values: tuple[float, ...]) -> float:
    return sum(weight * value for weight, value in zip(weights, values, strict=True))


def query_at_every_key(*, keys: tuple[float, ...] = (51.0,), query: float = 51.0) -> Outcome:
    """The distance weights if the query equals every key, and the weights of softmax for the same
    keys.
    """
    try:
        weights = distance_weights(query, keys)
        distance = ItemList(", ".join(f"{weight:g}" for weight in weights))
    except ZeroDivisionError:
        distance = "0/0"
    weights = attention_weights(1.0)(query, keys)
    return judge(
        distance != "0/0",
        corrected=abs(sum(weights) - 1) < 1e-12,
        distance=distance,
        softmax=weights[0],
    )


def far_key_counts(*, width: float = 5.0) -> Outcome:
    """Weight of the key 51 and the estimate, with a Gaussian kernel of this width."""
    weigh = attention_weights(width)
    weight = weigh(QUERY, KEYS)[0]
    narrow = attention_weights(1.0)(QUERY, KEYS)[0]
    is_exact = abs(weight - gaussian_weights(width)(QUERY, KEYS)[0]) < 1e-12
    holds = weight > 0.01 and narrow < 1e-6 and is_exact
    curves: dict[str, dict[float, float]] = {f"key {key:g}": {} for key in KEYS}
    for wide in (1.0, 2.0, 3.0, 5.0, 7.0, 10.0, 15.0, 20.0):
        weights = attention_weights(wide)(QUERY, KEYS)
        for curve, one in zip(curves.values(), weights, strict=True):
            curve[wide] = one
    figure = draw_curves(curves, "width of the kernel", "weight")
    return judge(holds, weight=weight, value=look_up(weigh), width=width, figure=figure)


def kernel_is_attention(*, width: float = 2.0, unit: bool = True) -> Outcome:
    """The kernel estimate as hw.attend with a bias, and the similarity Gaussian against a dot
    product of unit keys.

    Without `unit`, keys have different lengths.
    """
    store = [torch.tensor(numbers, dtype=torch.float64)[:, None] for numbers in (KEYS, VALUES)]
    query = torch.tensor([[QUERY]], dtype=torch.float64)
    bias = -((query - store[0].T) ** 2) / (2 * width**2)
    value = float(attend(torch.zeros_like(query), store[0], store[1], bias=bias)[0])
    kernel = look_up(gaussian_weights(width))
    q, k, v = samples((5, 4), (7, 4), (7, 3))
    k = F.normalize(k, dim=-1) if unit else k
    weights = (-(torch.cdist(q, k) ** 2) / (2 * width**2)).softmax(-1)
    dot = largest_difference(weights @ v, attend(q, k, v, scale=1 / width**2)[0])
    layer = _gaussian_layer_error(width)
    holds = max(dot, layer, abs(value - kernel)) < 1e-12
    return judge(holds, value=value, kernel=kernel, dot=dot, layer=layer)


def _gaussian_layer_error(width: float) -> float:
    """Difference of a layer with similarity Gaussian from its formula."""
    spec = from_toml(
        'model = 8\nheads = {q = 2, dim = 4}\nsimilarity = {part = "Gaussian", width = '
        f"{width}}}"
    )
    layer = make_layer(spec)
    x = sample(4, 1, 5, 8)
    q, k, v = (
        (x @ layer.state_dict()[f"project.{side}"].T).unflatten(-1, (2, 4)).transpose(1, 2)
        for side in "qkv"
    )
    weights = (-(torch.cdist(q, k) ** 2) / (2 * width**2)).softmax(-1)
    y = (weights @ v).transpose(1, 2).flatten(2) @ layer.state_dict()["output.o"].T
    return largest_difference(y, layer(x))


def kernel_widths(*, narrow: float = 0.01, wide: float = 1e4) -> Outcome:
    """Estimates at 56.9 for a very narrow and a very wide kernel: the nearest value, and the mean
    of all.
    """
    near, far = (look_up(attention_weights(w), 56.9) for w in (narrow, wide))
    mean = sum(VALUES) / len(VALUES)
    return judge(
        abs(near - VALUES[1]) < 1e-6 and abs(far - mean) < 1e-6,
        near=near,
        far=far,
        mean=mean,
        figure=draw_estimates({f"width {w:g}": attention_weights(w) for w in KERNEL_WIDTHS}),
    )


def order_of_the_product(*, row_vector: bool = False) -> Outcome:
    """Test if V times alpha has fitting shapes, with V [n, d_v] and alpha [m, n]; a row vector of
    values fits.
    """
    values = sample(2, 7, 3)
    _, weights = attend(sample(1, 5, 4), sample(3, 7, 4), values, need_weights=True)
    assert weights is not None
    values = values.T if row_vector else values
    alpha = weights.T if row_vector else weights
    right = size_text(weights @ (values.T if row_vector else values))
    try:
        product = size_text(values @ alpha)
    except RuntimeError:
        product = "-"
    return judge(product != "-", corrected=right == "5 x 3", product=product, right=right)


def queries_and_keys(*, queries: int = 5, keys: int = 7) -> Outcome:
    """Attention of m queries over n keys: the shape of the weights, and the sum of a row."""
    _, weights = attend(
        sample(1, queries, 4), sample(2, keys, 4), sample(3, keys, 3), need_weights=True
    )
    assert weights is not None
    shape = size_text(weights)
    row_sum = float(weights.sum(-1).mean())
    return judge(
        queries == keys,
        corrected=shape == f"{queries} x {keys}" and abs(row_sum - 1) < 1e-12,
        shape=shape,
        row_sum=row_sum,
        queries=queries,
        keys=keys,
        figure=draw_matrices([("weights", weights)]),
    )


def weight_matrix(*, normaliser: str = "Softmax") -> Outcome:
    """Row i of alpha(Q, K) holds the weights of query i: they are positive and sum to 1.

    `hand` and `out` are the weights and the output of the exercise by hand, (1, 1) over three keys.
    """
    spec = from_toml(
        f'model = 8\nheads = {{q = 1, dim = 8}}\nnormaliser = {{part = "{normaliser}"}}'
    )
    layer = make_layer(spec)
    x = sample(1, 1, 3, 8)
    source = sample(2, 1, 4, 8)
    ones = layer.head_outputs(x, source=source)
    state = layer.state_dict()
    values = source @ state["project.v"].T
    solution = torch.linalg.lstsq(values[0].T, ones[0, :, 0].T).solution.T.detach()
    sums = solution.sum(-1)
    holds = float((sums - 1).abs().max()) < 1e-9
    figure = draw_matrices([("weights", solution)])
    q = torch.ones(1, 2, dtype=torch.float64)
    k = torch.tensor([[2.0, 0.0], [1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    v = torch.tensor([[1.0, 2.0], [3.0, 0.0], [5.0, 4.0]], dtype=torch.float64)
    output, weights = attend(q, k, v, need_weights=True)
    assert weights is not None
    by_hand = {f"hand_{n}": weight for n, weight in enumerate(weights[0].tolist(), 1)}
    by_hand |= {f"out_{n}": number for n, number in enumerate(output[0].tolist(), 1)}
    return judge(holds, rows=3, columns=4, first_sum=float(sums[0]), figure=figure, **by_hand)


def one_source_or_two(*, other_source: bool = False) -> Outcome:
    """Self-attention: queries, keys and values from one X, against the layer
    with X as its source.
    """
    layer = make_layer(design(model=12, heads=3))
    x = sample(1, 1, 5, 12)
    source = sample(2, 1, 5, 12) if other_source else x
    difference = largest_difference(layer(x), layer(x, source=source))
    return judge(difference < 1e-12, difference=difference)


def cross_attention(*, cut: bool = False) -> Outcome:
    """Cross-attention of 5 tokens to 7: shape, and change of the output when the source changes.

    With `cut`, the keys do not depend on the source.
    """
    layer = make_layer(design(model=12, heads=3))
    x = sample(1, 1, 5, 12)
    one = sample(2, 1, 7, 12)
    other = sample(3, 1, 7, 12)
    outputs = [layer(x, source=one if cut else source).detach() for source in (one, other)]
    change = largest_difference(*outputs)
    return judge(change > 1e-6, shape=size_text(outputs[0][0]), change=change)


def learned_maps(*, steps: int = 60, rate: float = 0.1) -> Outcome:
    """Training W_Q, W_K and W_V to look up a value by content: loss before and after."""
    layer = make_layer(design(model=8, heads=1, dim=8), scale=0.3)
    x = sample(1, 16, 4, 8)
    target_of = sample(2, 8, 8) / math.sqrt(8)
    target = (x @ target_of).softmax(-1)
    optimizer = torch.optim.Adam(layer.parameters(), lr=rate)
    losses = []
    for _ in range(steps + 1):
        loss = ((layer(x) - target) ** 2).mean()
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    moved = sum(p.numel() for p in layer.parameters())
    return judge(
        losses[-1] < losses[0] / 10,
        before=losses[0],
        after=losses[-1],
        parameters=moved,
        figure=draw_curves({"loss": dict(enumerate(losses))}, "step", "loss", log="y"),
    )
