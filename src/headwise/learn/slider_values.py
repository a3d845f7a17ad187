"""Values that the sliders of the pages show. Each function has the id of a slider in
`sliders.toml`. Its arguments are the inputs of the slider, and it returns the outputs by name:
numbers, lists, matrices, or under "labels" texts. `sliders.ts` computes them again in the page.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import nn

from .. import costs
from ..attention.initialisation import depth_scaled_init
from ..attention.masking.patterns import Causal, Global, Pattern, Window
from ..attention.parts import REGISTRY
from ..attention.parts.relative_position_bias import alibi_slopes
from ..attention.position_embeddings import sinusoidal_table
from ..attention.presets import design, from_toml
from ..costs.roofline import Device
from ..observe.head_analysis.rank_analysis import rank_one_residual
from .kernel_lookup import (
    KEYS,
    distance_weights,
    gaussian_weights,
    inverse_distance_weights,
    look_up,
)
from .layer_experiments import smallest_wanted_weight
from .measured_layers import entropy
from .parameters_and_scaling import compare_tokens, softmax_jacobian_norm, softmax_weights

Output = float | Sequence[float] | Sequence[Sequence[float]] | Sequence[str]
Compute = Callable[..., Mapping[str, Output]]
MOST_TOKENS = 16  # of a sentence of one's own
MOST_PAIRS = 12
LETTER_CHANNELS = 64
# A word is a run of characters that are neither spaces, punctuation nor Chinese; any other
# character is a token.
WORD = re.compile(
    r"[^\s!-&(-,./:-@\[-`{-~\u2010-\u2027\u3000-\u303f\u4e00-\u9fff\uff00-\uffef]+|\S"
)
NUMBER = r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[-+]?[0-9]+)?"
PAIR = re.compile(rf"\s*({NUMBER})\s*=\s*({NUMBER})\s*", re.IGNORECASE)
QUANTILES = (1.4, 0.7, 0.2, -0.2, -0.7, -1.4)  # scores of six keys, in standard deviations


def find_computation(id: str) -> Compute:
    """Return the function of a slider."""
    return COMPUTATIONS[id]


# --- Document 004 ---------------------------------------------------------------------------------


def kernel_width(query: float, width: float) -> dict[str, Output]:
    """Weights of a Gaussian kernel, and the estimate."""
    weigh = gaussian_weights(width)
    return {"weights": weigh(query, KEYS), "estimate": look_up(weigh, query)}


def distance_rule(query: float) -> dict[str, Output]:
    """Weights by distance, as the source writes, and by inverse distance."""
    return {
        "source": distance_weights(query, KEYS),
        "inverse": inverse_distance_weights(query, KEYS),
        "source_estimate": look_up(distance_weights, query),
        "inverse_estimate": look_up(inverse_distance_weights, query),
    }


def own_lookup(pairs: str, query: float, width: float) -> dict[str, Output]:
    """The kernel over pairs of the reader, written as key=value."""
    labels, keys, values = parse_pairs(pairs)
    weights = gaussian_weights(width)(query, keys)
    return {"labels": labels, "weights": weights, "estimate": float(np.dot(weights, values))}


def parse_pairs(text: str) -> tuple[list[str], list[float], list[float]]:
    """Return the keys as written, the keys and the values of a text "key=value, ...".

    Raises:
        ValueError: for other texts; the message is the name of the error in `sliders.toml`.
    """
    listed = re.split(r"[,;\u3001\n]", unicodedata.normalize("NFKC", text))
    matches = [PAIR.fullmatch(row) for row in listed if row.strip()]
    pairs = [match.groups() for match in matches if match]
    labels = [key for key, _ in pairs]
    keys = [float(key) for key in labels]
    values = [float(value) for _, value in pairs]
    if not pairs or None in matches or not np.isfinite([*keys, *values]).all():
        raise ValueError("format")
    if len(pairs) > MOST_PAIRS:
        raise ValueError("count")
    if min(keys) < 0 or max(keys) > 100:
        raise ValueError("range")
    if len({*keys}) < len(keys):
        raise ValueError("equal")
    return labels, keys, values


# --- Document 000 ---------------------------------------------------------------------------------


def dilution(gap: float, tokens: int) -> dict[str, Output]:
    """Weight of a key that scores higher than all others, and the length where it is one half."""
    scores = torch.zeros(tokens, dtype=torch.float64)
    scores[0] = gap
    weight = float(REGISTRY["Softmax"]().normalise_row(scores, {})[0])
    return {"weight": weight, "others": 1 - weight, "half": 1 + math.exp(gap)}


def heads_share(gap: float, tokens: int, heads: int) -> dict[str, Output]:
    """Smallest weight of eight wanted keys, divided over the heads, and with one head."""
    return {
        "heads_weight": smallest_wanted_weight(heads, 8, tokens, gap),
        "one_weight": smallest_wanted_weight(1, 8, tokens, gap),
    }


def path_length(tokens: int, kernel: int) -> dict[str, Output]:
    """Steps or layers until the last position depends on the first token."""
    layers = {"recurrent": tokens, "convolution": 0, "dilated": 0, "attention": 1}
    reach = {"convolution": 1, "dilated": 1}  # tokens that an output depends on
    while reach["convolution"] < tokens:
        reach["convolution"] += kernel - 1
        layers["convolution"] += 1
    while reach["dilated"] < tokens:
        reach["dilated"] *= kernel
        layers["dilated"] += 1
    return {**layers}


def layer_flops(tokens: int, model: int) -> dict[str, Output]:
    """FLOPs of one layer over a sequence: two for each parameter and token, and the core."""
    spec = design(model=model, heads=8)
    attention = costs.required_flops(spec, costs.self_attention_work(spec, batch=1, queries=tokens))
    gates = 3 * 2 * model**2
    kernel = 3 * model**2
    return {"attention": attention, "gru": 2 * tokens * gates, "convolution": 2 * tokens * kernel}


def gradient_decay(factor: float, distance: int) -> dict[str, Output]:
    """Product of a constant factor over the steps of a recurrent layer and over the one step of
    attention, and the steps to one half.
    """
    recurrent = float(np.prod(np.full(distance, factor)))
    return {"recurrent": recurrent, "attention": factor, "half_life": math.log(0.5, factor)}


def learned_table(tokens: int, model: int, heads: int) -> dict[str, Output]:
    """Parameters of a table of weights, and of the two projections that replace it."""
    shapes = design(model=model, heads=heads).shapes()
    projections = sum(math.prod(shapes[f"project.{side}"]) for side in "qk")
    equal = math.sqrt(projections / heads)
    return {"table": heads * tokens**2, "projections": projections, "equal": equal}


def long_key(length: float, angle: float) -> dict[str, Output]:
    """Weights of a unit key in the query's direction and of a longer key, by dot product and by
    cosine.
    """
    radians = math.radians(angle)
    direction = torch.tensor([math.cos(radians), math.sin(radians)], dtype=torch.float64)
    query = torch.tensor([[[1.0, 0.0]]], dtype=torch.float64)
    outputs: dict[str, Output] = {}
    for name, factor in (("dot", length), ("cosine", 1.0)):
        keys = torch.stack([query[0, 0], factor * direction])[None]
        outputs[name] = softmax_weights(compare_tokens(query, keys, 1.0)[0])[0].tolist()
    return outputs


def own_sentence(sentence: str, temperature: float) -> dict[str, Output]:
    """Attention by spelling: softmax of the cosines of hashed pairs of characters."""
    tokens = WORD.findall(sentence)[:MOST_TOKENS]
    vectors = np.array([_count_letter_pairs(token) for token in tokens])
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    scores = torch.from_numpy(vectors @ vectors.T / temperature)
    return {"labels": tokens, "weights": softmax_weights(scores).tolist()}


def _count_letter_pairs(token: str) -> list[float]:
    """Count the pairs of neighbouring characters, with both ends marked, in 64 channels."""
    counts = [0.0] * LETTER_CHANNELS
    marked = f"^{re.sub('[A-Z]', lambda match: match[0].lower(), token)}$"
    for pair in pairwise(marked):
        digest = 2166136261  # 32-bit FNV-1a over code points
        for character in pair:
            digest = ((digest ^ ord(character)) * 16777619) % 2**32
        counts[digest % LETTER_CHANNELS] += 1
    return counts


def kv_cache(layers: int, kv: int, tokens: int) -> dict[str, Output]:
    """Bytes of the KV cache of 32 query heads of 128 channels in bf16."""
    spec = design(model=4096, heads=32, kv=kv)
    of_layer = costs.cache_bytes(spec, batch=1, capacity=tokens, bytes_per_number=2)
    return {"per_token": layers * of_layer / tokens, "gib": layers * of_layer / 2**30}


# --- Document 001 ---------------------------------------------------------------------------------


def dot_variance(width: int, mean: float, deviation: float) -> dict[str, Output]:
    """Mean and variance of a dot product of independent normal components, and after scaling."""
    second = deviation**2 + mean**2
    variance = width * (second**2 - mean**4)
    scale = math.sqrt(width)
    return {
        "mean": width * mean**2,
        "variance": variance,
        "scaled_mean": width * mean**2 / scale,
        "scaled_variance": variance / scale**2,
    }


def saturation(width: int, exponent: float) -> dict[str, Output]:
    """Weights of six keys whose scores have the standard deviation sqrt(d_k) / d_k^exponent."""
    units = torch.tensor([QUANTILES], dtype=torch.float64)
    scores = units * math.sqrt(width) / width**exponent
    weights = softmax_weights(scores)[0].tolist()
    return {"weights": weights, "largest": max(weights), "gradient": softmax_jacobian_norm(scores)}


def layer_parameters(model: int, heads: int, width: int, bias: int) -> dict[str, Output]:
    """Parameters of the four projections, and the formula of the source."""
    spec = design(model=model, heads=heads, dim=width, bias="qkvo" if bias else "")
    shapes = spec.shapes()
    parts = [
        sum(math.prod(shape) for name, shape in shapes.items() if name in names)
        for names in [*_names_of("project", "qkv"), *_names_of("output", "o")]
    ]
    formula = 3 * heads * model * width + model**2
    return {"parts": parts, "total": costs.count_parameters(spec), "formula": formula}


def _names_of(part: str, sides: str) -> list[tuple[str, ...]]:
    return [(f"{part}.{side}", f"{part}.{side}_bias") for side in sides]


def noisy_heads(heads: int, bad: int) -> dict[str, Output]:
    """Relative error of the concatenated output if some heads are replaced by independent noise of
    the same size.
    """
    return {"error": math.sqrt(2 * min(bad, heads) / heads), "share": min(bad, heads) / heads}


# --- Document 002 ---------------------------------------------------------------------------------


def decode_intensity(batch: int, group: int, context: int) -> dict[str, Output]:
    """FLOPs per byte of a decode step in bf16: weights, scores and values, and the whole layer."""
    spec = design(model=4096, heads=32, kv=32 // group)
    work = costs.self_attention_work(spec, batch=batch, queries=1, past=context - 1)
    parameters = costs.count_parameters(spec)
    total = costs.required_flops(spec, work)
    projections = 2 * batch * parameters
    cached = 2 * batch * context * costs.cached_numbers_per_token(spec)
    return {
        "weights": projections / (2 * parameters),
        "core": (total - projections) / cached,
        "layer": total / (2 * parameters + cached),
        "ridge": Device.from_name("h200").ridge_point("bf16"),
    }


def overlapping(heads: int, width: int, overlap: int) -> dict[str, Output]:
    """Channels of each head and of all, and parameters of W_O, also without overlap."""
    sizes = f"heads = {{q = {heads}, dim = {width}, vdim = {width + 2 * overlap}}}"
    project = f'project = {{part = "Overlapping", overlap = {overlap}}}'
    model = heads * width
    shapes = from_toml(f"model = {model}\n{sizes}\n{project}").shapes()
    plain = design(model=model, heads=heads, dim=width).shapes()
    concatenated = shapes["output.o"][1]
    return {
        "used": concatenated / heads,
        "concatenated": concatenated,
        "output": math.prod(shapes["output.o"]),
        "plain_output": math.prod(plain["output.o"]),
    }


def routed_heads(always: int, active: int, model: int) -> dict[str, Output]:
    """Share of 16 heads that are open for a token, and parameters of the router."""
    chosen = min(active, 16 - always)
    router = REGISTRY["MixtureOfHeads"](always=always, active=chosen)
    modifier = f'modifiers = [{{part = "MixtureOfHeads", always = {always}, active = {chosen}}}]'
    spec = from_toml(f"model = {model}\nheads = {{q = 16, dim = {model // 16}}}\n{modifier}")
    plain = costs.count_parameters(design(model=model, heads=16))
    fractions = router.open_fractions(spec) or (1,) * 16
    return {
        "fractions": [float(share) for share in fractions],
        "chosen": chosen,
        "open": float(sum(fractions)) / 16,
        "router": costs.count_parameters(spec) - plain,
    }


def shared_width(heads: int, share: float) -> dict[str, Output]:
    """Parameters and products of scores if the heads at d = 512 share a query-key space."""
    width = round(512 * share)
    sizes = f"model = 512\nheads = {{q = {heads}, dim = {512 // heads}}}"
    spec = from_toml(f'{sizes}\nproject = {{part = "Collaborative", width = {width}}}')
    plain = design(model=512, heads=heads)
    outputs: dict[str, Output] = {}
    for name, layer in (("plain", plain), ("shared", spec)):
        shapes = layer.shapes()
        matrices = [shape for key, shape in shapes.items() if key in SCORE_WEIGHTS]
        outputs[f"{name}_parameters"] = sum(map(math.prod, matrices))
    return outputs | {"plain_products": 512, "shared_products": heads * width}


SCORE_WEIGHTS = tuple(f"project.{name}" for name in ("q", "k", "mixing", "content"))


def spectrum(decay: float, energy: float) -> dict[str, Output]:
    """Dimensions that hold a share of the energy of 64 singular values i^-decay."""
    squares = np.arange(1, 65, dtype=np.float64) ** (-2 * decay)
    shares = np.cumsum(squares) / squares.sum()
    dims = int(np.argmax(shares >= energy)) + 1
    return {"shares": shares.tolist(), "dims": dims, "part": dims / 64}


def grouped_queries(kv: int) -> dict[str, Output]:
    """Which of the key-value heads each of 16 query heads uses, and the cache relative to MHA."""
    spec = design(model=1024, heads=16, kv=kv)
    plain = design(model=1024, heads=16)
    mapping = spec.heads.kv_head_of_query
    uses = [[float(mapping[head] == row) for head in range(16)] for row in range(kv)]
    cached = costs.cached_numbers_per_token(spec)
    return {
        "uses": uses,
        "cached": cached,
        "share": cached / costs.cached_numbers_per_token(plain),
        "parameters": costs.count_parameters(spec),
    }


def depth_init(layers: int, exponent: float) -> dict[str, Output]:
    """Bound of the initial weights of each layer, relative to the first."""
    bounds: list[float] = []
    for depth in range(1, layers + 1):
        linear = nn.Linear(1, 1, bias=False, dtype=torch.float64)
        generator = torch.Generator().manual_seed(0)
        depth_scaled_init(linear, depth=depth, exponent=exponent, generator=generator)
        bounds.append(linear.weight.item())
    bounds = [bound / bounds[0] for bound in bounds]
    return {"bounds": bounds, "last": bounds[-1]}


def entmax_alpha(alpha: float, spread: float) -> dict[str, Output]:
    """Entmax weights of five scores, and how many are exactly 0."""
    scores = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0], dtype=torch.float64) * spread
    part = REGISTRY["Softmax"]() if alpha == 1 else REGISTRY["Entmax"](alpha=alpha)
    weights = part.normalise_row(scores, {}).tolist()
    return {"weights": weights, "zeros": weights.count(0.0), "largest": max(weights)}


def rank_collapse(layers: int, window: int, skip: float) -> dict[str, Output]:
    """Influence of 12 tokens on each other after layers of equal causal weights, and what is left
    of their differences.
    """
    allowed = _allowed(Window(window), 12)
    layer = skip * np.eye(12) + (1 - skip) * allowed / allowed.sum(1, keepdims=True)
    product = np.linalg.matrix_power(layer, layers)
    return {
        "influence": product.tolist(),
        "residual": rank_one_residual(torch.from_numpy(product)),
    }


def _allowed(pattern: Pattern, tokens: int) -> np.ndarray:
    i, j = np.ogrid[:tokens, :tokens]
    allowed = np.asarray(pattern.allows(torch.from_numpy(i), torch.from_numpy(j)), dtype=float)
    return np.broadcast_to(allowed, (tokens, tokens))


def pruned_heads(removed: int) -> dict[str, Output]:
    """Parameters, FLOPs and cache of a layer of 12 heads of 64 channels without some of them."""
    outputs: dict[str, Output] = {"left": 12 - removed}
    spec = design(model=768, heads=12 - removed, dim=64)
    plain = design(model=768, heads=12, dim=64)
    work = costs.self_attention_work(spec, batch=1, queries=512)
    outputs["parameters"] = costs.count_parameters(spec)
    outputs["share"] = costs.count_parameters(spec) / costs.count_parameters(plain)
    outputs["flops"] = costs.required_flops(spec, work)
    return outputs | {"cached": costs.cached_numbers_per_token(spec)}


# --- Document 003 ---------------------------------------------------------------------------------


def temperature(temperature: float) -> dict[str, Output]:
    """Softmax of five scores divided by a temperature, its entropy and effective number of keys."""
    scores = torch.tensor([[3.0, 2.0, 1.0, 0.0, -1.0]], dtype=torch.float64) / temperature
    weights = softmax_weights(scores)[0]
    nats = float(entropy(weights))
    return {"weights": weights.tolist(), "entropy": nats, "effective": math.exp(nats)}


def causal_window(tokens: int, window: int) -> dict[str, Output]:
    """Pairs that a causal window allows."""
    pattern = Causal() & Window(window)
    pairs = pattern.pairs(range(tokens), range(tokens))
    matrix = _allowed(pattern, tokens).tolist()
    return {"allowed": matrix, "pairs": pairs, "share": pairs / tokens**2}


def global_tokens(tokens: int, reach: int, globals: int) -> dict[str, Output]:
    """Pairs of a symmetric window with global tokens, as in Longformer."""
    pattern = Window(2 * reach + 1, after=reach) | Global(tuple(range(globals)))
    matrix = _allowed(pattern, tokens)
    pairs = pattern.pairs(range(tokens), range(tokens))
    return {"allowed": matrix.tolist(), "pairs": pairs, "share": pairs / tokens**2}


def window_cost(tokens: int, window: int) -> dict[str, Output]:
    """Allowed pairs of causal attention, with and without a window."""
    full = Causal().pairs(range(tokens), range(tokens))
    local = Window(window).pairs(range(tokens), range(tokens))
    return {"full": full, "local": local, "ratio": full / local}


def linear_cost(tokens: int, width: int) -> dict[str, Output]:
    """FLOPs of one head of softmax and of linear attention, without projections."""
    spec = design(model=width, heads=1)
    work = costs.self_attention_work(spec, batch=1, queries=tokens)
    softmax = costs.required_flops(spec, work) - 2 * tokens * costs.count_parameters(spec)
    linear = 2 * tokens * 2 * width**2  # phi(k) v^T into the state, phi(q) with the state
    return {"softmax": softmax, "linear": linear, "ratio": softmax / linear}


def random_features(features: int, angle: float) -> dict[str, Output]:
    """Relative standard deviation of the Performer's estimate of exp(q.k) for unit vectors at an
    angle.
    """
    squared = 2 + 2 * math.cos(math.radians(angle))  # |q + k|^2
    return {"error": math.sqrt(math.expm1(squared) / features), "kernel": math.exp(squared / 2 - 1)}


def sinusoid(position: int, pair: int) -> dict[str, Output]:
    """One pair of channels of the sinusoidal encoding of width 64."""
    row = sinusoidal_table(torch.tensor([position]), 64)[0]
    length = 2 * math.pi * 10_000 ** (2 * pair / 64)
    return {"sine": float(row[2 * pair]), "cosine": float(row[2 * pair + 1]), "wavelength": length}


def sinusoid_offset(offset: int, model: int) -> dict[str, Output]:
    """Cosine of the encodings of two positions, by their distance."""
    table = sinusoidal_table(torch.tensor([0, offset, 100, 100 + offset]), model)
    norm = model / 2
    return {
        "similarity": float(table[0] @ table[1]) / norm,
        "elsewhere": float(table[2] @ table[3]) / norm,
    }


def rotary_offset(query: int, key: int, base: int) -> dict[str, Output]:
    """Score of equal vectors of 64 channels, all pairs of equal length, at two positions."""
    rates = np.array(REGISTRY["Rotary"](base=float(base)).frequencies(64))
    cosines = np.cos(rates * query) * np.cos(rates * key)
    sines = np.sin(rates * query) * np.sin(rates * key)
    return {"score": float(np.mean(cosines + sines)), "distance": query - key}


def rotary_pair(pair: int, base: int, length: int) -> dict[str, Output]:
    """Wavelength of a pair of a head of 128 channels, and its turns over a text."""
    rate = REGISTRY["Rotary"](base=float(base)).frequencies(128)[pair]
    return {"wavelength": 2 * math.pi / rate, "turns": length * rate / (2 * math.pi)}


def alibi(heads: int, head: int, distance: int) -> dict[str, Output]:
    """Slope of a head, the bias at a distance, and its factor on the weight."""
    slope = alibi_slopes(heads)[min(head, heads) - 1]
    return {"slope": slope, "bias": -slope * distance, "factor": math.exp(-slope * distance)}


def log_sum_exp(largest: float) -> dict[str, Output]:
    """Log of the sum of exponentials of three scores, and the size of the largest exponential."""
    scores = torch.tensor([largest, largest - 1, largest - 2], dtype=torch.float64)
    digits = largest / math.log(10)
    return {
        "lse": float(scores.logsumexp(0)),
        "digits": digits,
        "float16": float(digits > math.log10(torch.finfo(torch.float16).max)),
        "float32": float(digits > math.log10(torch.finfo(torch.float32).max)),
    }


COMPUTATIONS: dict[str, Compute] = {
    function.__name__: function
    for function in (
        kernel_width,
        distance_rule,
        own_lookup,
        dilution,
        heads_share,
        path_length,
        layer_flops,
        gradient_decay,
        learned_table,
        long_key,
        own_sentence,
        kv_cache,
        dot_variance,
        saturation,
        layer_parameters,
        noisy_heads,
        decode_intensity,
        overlapping,
        routed_heads,
        shared_width,
        spectrum,
        grouped_queries,
        depth_init,
        entmax_alpha,
        rank_collapse,
        pruned_heads,
        temperature,
        causal_window,
        global_tokens,
        window_cost,
        linear_cost,
        random_features,
        sinusoid,
        sinusoid_offset,
        rotary_offset,
        rotary_pair,
        alibi,
        log_sum_exp,
    )
}
