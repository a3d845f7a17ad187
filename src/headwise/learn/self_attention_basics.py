"""Runs of document 000: self-attention compared with RNN and CNN, and why weights come from queries
and keys.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import costs
from ..attention.attention import Attention
from ..attention.interfaces.core_types import Probe
from ..attention.parts import REGISTRY
from ..attention.presets import design, from_toml
from ..attention.tensor_attention import attend
from ..costs.complexity import LAYERS, WIDTH, gradient_norms
from ..surgery.attention_replacement import fold_bias
from .attention_mechanism import attention_formula
from .catalogue import ItemList, Outcome, judge, judge_condition
from .matrix_figures import draw_curves, draw_grids, draw_heads
from .measured_layers import (
    complexity_by_layer,
    draw_flops,
    largest_difference,
    make_layer,
    sample,
    samples,
    size_text,
    table_beside_recurrence,
    table_of_lengths,
    weights_of,
)

__all__ = ["attention_formula", "table_beside_recurrence", "table_of_lengths"]  # runs of others


# --- Section 0: cost and dilution -----------------------------------------------------------------


def constant_cost(*, of: str = "work") -> Outcome:
    """FLOPs and sequential operations of self-attention at 4,096 and at 8,192 tokens; `of` is
    "work" or "steps".
    """
    one, two = (complexity_by_layer(n, 512)["self-attention"] for n in (4096, 8192))
    numbers = {"flops": one.flops, "twice": two.flops, "growth": two.flops / one.flops}
    constant = two.flops == one.flops if of == "work" else two.serial == one.serial
    counted = [row.flops for row in (one, two)]
    grows = counted == [_attention_flops(n, 512) for n in (4096, 8192)]
    return judge(
        constant,
        corrected=grows and one.serial == two.serial == one.path == two.path == 1,
        **numbers,
        serial=one.serial,
        serial_twice=two.serial,
    )


def _attention_flops(tokens: int, model: int) -> int:
    return 8 * tokens * model**2 + 4 * tokens**2 * model


def diluted_weight(*, gap: float = 3.0, grow: bool = False) -> Outcome:
    """Weight of one key with a score `gap` above n - 1 others, with softmax and 1.5-entmax.

    With `grow`, scores are multiplied by log n / log 8.
    """
    numbers = {}
    errors = []
    grown = {}
    softmax = REGISTRY["Softmax"]()
    entmax = REGISTRY["Entmax"](alpha=1.5)
    for tokens in (8, 64, 512, 4096):
        scores = torch.zeros(tokens, dtype=torch.float64)
        larger = gap * math.log(tokens) / math.log(8)
        scores[0] = larger
        grown[tokens] = float(softmax.normalise_row(scores, {})[0])
        numbers[f"grown_{tokens}"] = grown[tokens]
        scores[0] = larger if grow else gap
        numbers[f"softmax_{tokens}"] = float(softmax.normalise_row(scores, {})[0])
        numbers[f"entmax_{tokens}"] = float(entmax.normalise_row(scores, {})[0])
        power = math.exp(gap)
        errors.append(abs(numbers[f"softmax_{tokens}"] - power / (power + tokens - 1)))
    ratios = {
        name: numbers[f"{name}_4096"] / numbers[f"{name}_8"] for name in ("softmax", "entmax")
    }
    diluted = ratios["softmax"] < 0.1 and max(errors) < 1e-12 and grown[4096] > grown[8]
    return judge_condition(diluted, ratios["entmax"] < 0.1, **numbers)


def several_heads_read_several_values(*, targets: int = 2) -> Outcome:
    """Error of the best linear read-out of `targets` values from one head that looks up all of
    their keys, and from a head each.
    """
    numbers = {}
    keys = torch.eye(4, dtype=torch.float64)
    for count in (1, targets):
        values = sample(1, 200, 4, 3)
        goal = values[:, :count].flatten(1)
        averaged = _look_up(keys[:count].sum(0, keepdim=True), keys, values)
        separate = _look_up(keys[:count], keys, values)
        numbers[f"one_head_{count}"] = _readout_error(averaged, goal)
        numbers[f"heads_{count}"] = _readout_error(separate, goal)
    helps = numbers[f"one_head_{targets}"] > 0.1 > numbers[f"heads_{targets}"]
    named = {"one_head": numbers[f"one_head_{targets}"], "heads": numbers[f"heads_{targets}"]}
    return judge_condition(
        helps, numbers["one_head_1"] > 0.1, **named, single=numbers["one_head_1"]
    )


def _look_up(queries_HK: Tensor, keys_SK: Tensor, values_BSV: Tensor) -> Tensor:
    """The outputs of heads with one query each over the same keys, side by side."""
    batch, heads = len(values_BSV), len(queries_HK)
    q = queries_HK[None, :, None].expand(batch, heads, 1, -1)
    k = keys_SK.expand(batch, heads, -1, -1)
    v = values_BSV[:, None].expand(-1, heads, -1, -1)
    return attend(q, k, v, scale=200.0)[0].flatten(1)


def _readout_error(inputs: Tensor, goal: Tensor) -> float:
    solution = torch.linalg.lstsq(inputs, goal).solution
    return float((inputs @ solution - goal).square().mean().sqrt())


# --- Section 1: the table of three kinds of layers ------------------------------------------------


def recurrent_range(*, memoryless: bool = False, tokens: int = 9) -> Outcome:
    """Pairs of positions with a nonzero derivative in a GRU; with `memoryless`, its state weights
    are 0.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layer = LAYERS["GRU"]().double()
    gru = layer.get_submodule("inner")
    with torch.no_grad():
        if memoryless:
            gru.get_parameter("weight_hh_l0").zero_()
            # the update gate is exactly 0
            gru.get_parameter("bias_ih_l0")[WIDTH : 2 * WIDTH] = -1e4
    x = sample(1, tokens, WIDTH)
    sizes = torch.stack([gradient_norms(layer, x, output) for output in range(tokens)])
    pairs = int((sizes > 0).sum())
    past = tokens * (tokens + 1) // 2
    far = float(sizes[-1, 0])
    return judge(
        pairs < past,
        corrected=pairs == past and 0 < far < sizes[-1, -1] / 10,
        figure=draw_grids({"": sizes}, "input", "output"),
        pairs=pairs,
        past=past,
        far=far,
    )


def parallel_convolution(*, layer: str = "convolution") -> Outcome:
    """Sequential operations of a layer over 4,096 tokens, and a convolution computed one position
    at a time.
    """
    x = sample(1, 4, 11)
    kernel = sample(2, 5, 4, 3)
    whole = F.conv1d(x[None], kernel)[0]
    order = torch.randperm(9, generator=torch.Generator().manual_seed(0)).tolist()
    single = torch.empty_like(whole)
    for position in order:
        single[:, position] = torch.einsum("oik,ik->o", kernel, x[:, position : position + 3])
    serial = complexity_by_layer(4096, 512)[layer].serial
    difference = largest_difference(whole, single)
    return judge(
        serial > 1,
        corrected=serial == 1 and difference < 1e-12,
        serial=serial,
        difference=difference,
    )


def no_decay(*, positions: str = "") -> Outcome:
    """Weight of a key 40 steps earlier over the weight of the query's own key, if all tokens are
    equal: plain, and with ALiBi.

    Of 8 heads, the one that decays most. Also the mean weight at 16 and at 1,024 tokens, which is
    1/n.
    """
    curves = {
        "attention": _weights_by_distance(positions),
        "ALiBi": _weights_by_distance('modifiers = [{part = "Alibi"}]'),
    }
    plain, alibi = (float(curve[-1]) for curve in curves.values())
    layer = make_layer(design(model=8, heads=1))
    shares = {}
    for tokens in (16, 1024):
        shares[f"weight_{tokens}"] = float(weights_of(layer, sample(1, 1, tokens, 8)).mean())
    is_diluted = all(abs(shares[f"weight_{tokens}"] * tokens - 1) < 1e-9 for tokens in (16, 1024))
    return judge_condition(
        abs(plain - 1) < 1e-9 and is_diluted,
        alibi > 0.05,
        plain=plain,
        alibi=alibi,
        **shares,
        figure=draw_curves(
            {name: dict(enumerate(curve.tolist())) for name, curve in curves.items()},
            "distance",
            "weight relative to that of the own token",
        ),
    )


def _weights_by_distance(modifiers: str) -> Tensor:
    layer = make_layer(
        from_toml(f"model = 16\nheads = {{q = 8, dim = 2}}\npattern = 'causal()'\n{modifiers}")
    )
    weights = weights_of(layer, sample(1, 1, 1, 16).expand(1, 41, 16))[0, :, -1]
    ratios = weights / weights[:, -1:]
    return ratios[ratios[:, 0].argmin()].flip(0)


def orders_of_layers(*, tokens: int = 256, model: int = 512) -> Outcome:
    """FLOPs of attention, a GRU, an LSTM and a convolution of 3 tokens at n = 256 and d = 512."""
    layers = complexity_by_layer(tokens, model)
    names = {"attention": "self-attention", "gru": "GRU", "lstm": "LSTM"}
    numbers = {name: layers[layer].flops for name, layer in names.items()}
    work = tokens * model**2
    counted = numbers == {
        "attention": _attention_flops(tokens, model),
        "gru": 12 * work,
        "lstm": 16 * work,
    }
    return judge(
        numbers["attention"] > numbers["gru"],
        corrected=counted and layers["GRU"].dearer == model + 1,
        **numbers,
        figure=draw_flops(("self-attention", "GRU", "LSTM", "convolution"), model),
    )


def heads_share_weights(*, kv: int = 3) -> Outcome:
    """Count heads with outputs that change with the first key head's W_K; with kv = 1, all heads
    share that key head.
    """
    layer = make_layer(design(model=12, heads=3, kv=kv))
    changed = heads_by_key_head(kv)[:, 0] > 1e-9
    sizes = {"changed": int(changed.sum()), "parameters": costs.count_parameters(layer.spec)}
    counted = sum(parameter.numel() for parameter in layer.parameters())
    return judge(
        bool(changed.all()),
        corrected=sizes == {"changed": 1, "parameters": 4 * 12 * 12} and counted == 4 * 12 * 12,
        **sizes,
    )


def heads_by_key_head(kv: int) -> Tensor:
    """The largest change of the output of each of 3 heads if 1 is added to W_K of each key head."""
    layer = make_layer(design(model=12, heads=3, kv=kv))
    x = sample(1, 1, 5, 12)
    before = layer.head_outputs(x).detach()
    changes: list[Tensor] = []
    for head in range(kv):
        rows = layer.get_parameter("project.k")[4 * head : 4 * head + 4]
        with torch.no_grad():
            rows += 1.0
            changes.append((layer.head_outputs(x) - before).abs().amax((0, 1, 3)))
            rows -= 1.0
    return torch.stack(changes, 1)


# --- Section 1.1: the formula ---------------------------------------------------------------------


def dot_product_as_similarity(*, unit: bool = False) -> Outcome:
    """Share of queries with the highest dot product at the nearest key: for unit keys, and for
    random keys.
    """
    q, k = samples((500, 8), (20, 8))
    units = F.normalize(k, dim=-1)
    shares = {}
    for name, keys in (("unit", units), ("random", units if unit else k)):
        nearest = torch.cdist(q, keys).argmin(-1)
        weights = attend(q, keys, keys, need_weights=True)[1]
        assert weights is not None
        shares[name] = float((weights.argmax(-1) == nearest).double().mean())
    return judge_condition(shares["unit"] == 1, shares["random"] == 1, **shares)


# --- Section 1.2: weights from queries and keys, or learned ---------------------------------------


def long_sequences(*, pattern: str = "full()") -> Outcome:
    """Output shape at 3 and 3,000 tokens with the same weights, and growth of the core's FLOPs per
    doubling.
    """
    layer = make_layer(design(model=8, heads=1, pattern=pattern))
    shapes = [layer(sample(1, 1, tokens, 8)).shape[1] for tokens in (3, 3000)]
    flops = [_core_flops(layer, tokens) for tokens in (4096, 8192)]
    growth = flops[1] / flops[0]
    narrow = make_layer(design(model=8, heads=1, pattern="window(64)"))
    sparse = [_core_flops(narrow, tokens) for tokens in (4096, 8192)]
    is_sparse_cheaper = sparse[1] < 2.2 * sparse[0] and 10 * sparse[0] < 4 * 4096**2 * 8
    return judge_condition(
        shapes == [3, 3000] and is_sparse_cheaper,
        growth < 2.2,
        shortest=shapes[0],
        longest=shapes[1],
        growth=growth,
    )


def _core_flops(layer: Attention, tokens: int) -> int:
    spec = layer.spec
    work = costs.self_attention_work(spec, batch=1, queries=tokens)
    return costs.required_flops(spec, work) - 2 * costs.count_parameters(spec) * tokens


LEARNED = (
    'model = 16\nheads = {{q = 2, dim = 8}}\nproject = {{part = "ValueProjection"}}\nmodifiers = '
    '[{{part = "LearnedScores", {}}}]'
)


def learned_weight_count(*, tokens: int = 64, model: int = 512, heads: int = 8) -> Outcome:
    """Count parameters of learned weights, h T^2, and of W_Q and W_K, and find the length at which
    they are equal.
    """
    text = (
        f"model = {model}\nheads = {{q = {heads}, dim = {model // heads}}}\nproject = {{part = "
        '"ValueProjection"}\n'
    )
    learned = from_toml(text + f'modifiers = [{{part = "LearnedScores", length = {tokens}}}]')
    plain = design(model=model, heads=heads)
    table = math.prod(learned.shapes()["learned_scores.table"])
    projections = sum(math.prod(plain.shapes()[f"project.{side}"]) for side in "qk")
    equal = math.sqrt(2 * model * (model // heads))
    return judge(
        table > projections,
        corrected=table == heads * tokens**2 and projections == 2 * model**2 and tokens < equal,
        table=table,
        projections=projections,
        equal=equal,
        tokens=tokens,
    )


def learned_weights_are_fixed(*, kind: str = "random") -> Outcome:
    """Change of learned weights between two inputs, and the message for a longer input."""
    change, dense = (_change_of_weights(_learned_layer(name)) for name in (kind, "dense"))
    layer = _learned_layer(kind)
    try:
        layer(sample(1, 1, 9, 16))
        message = "-"
    except ValueError as error:
        message = str(error)
    holds = change < 1e-12 < dense and message != "-"
    named = {
        f"{name}, input {seed}": weights_of(_learned_layer(kind), sample(seed, 1, 7, 16))[0, 0]
        for name, kind in (("learned", kind), ("computed", "dense"))
        for seed in (1, 2)
    }
    return judge(holds, change=change, message=message, figure=draw_grids(named, "key", "query"))


def _learned_layer(kind: str = "random") -> Attention:
    return make_layer(from_toml(LEARNED.format(f'length = 7, kind = "{kind}"')))


def _change_of_weights(layer: Attention) -> float:
    """The largest change of the weights of 7 tokens between two inputs."""
    return largest_difference(*(weights_of(layer, sample(seed, 1, 7, 16)) for seed in (1, 2)))


def one_bias(*, normaliser: str = "Softmax") -> Outcome:
    """Change of the output when b_Q, b_K or b_V changes, in a layer with four biases; b_V moves all
    queries alike, and is folded into b_O.
    """
    layer = _biased_layer(f'normaliser = {{part = "{normaliser}"}}')
    x = sample(1, 1, 5, 12)
    moved = {side: _move_by_bias(layer, side, x) for side in "qkv"}
    changes = {side: float(change.abs().max()) for side, change in moved.items()}
    spread = float((moved["v"] - moved["v"].mean(1, keepdim=True)).abs().max())
    count = (
        costs.count_parameters(design(model=12, heads=3, bias="qkvo"))
        - costs.count_parameters(layer.spec)
        + 36
    )
    folded = fold_bias(layer.spec, layer.state_dict())
    smaller = Attention(folded.spec).double()
    smaller.load_state_dict(folded.weights)
    others = (
        'modifiers = [{part = "Rotary"}]',
        'normaliser = {part = "SinkSoftmax"}',
        'normaliser = {part = "Sigmoid"}',
    )
    key_changes = [float(_move_by_bias(_biased_layer(text), "k", x).abs().max()) for text in others]
    corrected = (
        changes["k"] < 1e-12 < min(changes["q"], changes["v"])
        and spread < 1e-12
        and min(key_changes) > 1e-6
        and "k" not in folded.spec.project.constant_biases(folded.spec, folded.weights)
        and largest_difference(smaller(x), layer(x)) < 1e-12
    )
    return judge(changes["k"] > 1e-9, corrected=corrected, **changes, spread=spread, biases=count)


def _biased_layer(lines: str) -> Attention:
    return make_layer(
        from_toml(
            "model = 12\nheads = {q = 3, dim = 4}\n"
            f'project = {{part = "LinearProjection", bias = "qkv"}}\n{lines}'
        )
    )


def _move_by_bias(layer: Attention, side: str, x: Tensor) -> Tensor:
    """The change of the output if 1 is added to one bias."""
    before = layer(x).detach()
    bias = layer.get_parameter(f"project.{side}_bias")
    with torch.no_grad():
        bias += 1.0
        moved = layer(x).detach() - before
        bias -= 1.0
    return moved


def projection_listing(*, qkv_bias: bool = True) -> Outcome:
    """Three nn.Linear with a bias, against queries, keys and values of the layer of headwise with
    biases.
    """
    layer = make_layer(design(model=12, heads=3, dim=5, bias="qkv"))
    x = sample(1, 1, 7, 12)
    state = layer.state_dict()
    probe = Probe("q", "k", "v")
    largest = 0.0
    layer(x, probe=probe)
    for side in "qkv":
        linear = nn.Linear(12, 15, bias=qkv_bias).double()
        names = {"weight": f"project.{side}"} | (
            {"bias": f"project.{side}_bias"} if qkv_bias else {}
        )
        linear.load_state_dict({name: state[ours] for name, ours in names.items()})
        largest = max(largest, largest_difference(linear(x), probe.tensors[side].flatten(2)))
    return judge(largest < 1e-12, difference=largest)


def weights_are_no_parameters(*, learned: bool = False) -> Outcome:
    """Names of the parameters of a layer, and the change of its weights between two inputs."""
    layer = _learned_layer() if learned else make_layer(design(model=16, heads=2))
    names = sorted(name for name, _ in layer.named_parameters())
    change = _change_of_weights(layer)
    matrices = ["output.o", *(f"project.{side}" for side in "kqv")]
    return judge(
        change > 1e-6 and names == matrices, names=ItemList(", ".join(names)), change=change
    )


def three_square_matrices(*, output: bool = True) -> Outcome:
    """Parameters of a layer of width 512 with its output projection, against 3 d^2."""
    counted = costs.count_parameters(design(model=512, heads=8)) - (0 if output else 512**2)
    return judge(
        counted == 3 * 512**2,
        corrected=counted == 4 * 512**2,
        counted=counted,
        claimed=3 * 512**2,
    )


SENTENCES = ("The cat sat on the mat .", "The dog sat on the mat .")


def two_sentences(*, learned: bool = False) -> Outcome:
    """Weights of two heads over "The cat sat on the mat." and with another noun; with a figure."""
    table = dict(zip(sorted(set(" ".join(SENTENCES).split())), sample(1, 8, 16), strict=True))
    layer = _learned_layer() if learned else make_layer(design(model=16, heads=2))
    layers: list[Tensor] = []
    for text in SENTENCES:
        x_TD = torch.stack([table[word] for word in text.split()])
        layers.append(weights_of(layer, x_TD[None])[0])
    change = largest_difference(*layers)
    words = SENTENCES[0].split()
    named = [(f"head {head}", layers[0][head].tolist()) for head in range(2)]
    row_error = largest_difference(layers[0].sum(-1), torch.ones(()))
    return judge(
        change > 1e-6 and row_error < 1e-12,
        change=change,
        row_sum=float(layers[0].sum(-1).mean()),
        figure=draw_heads(named, words, words),
    )


def names_of_attention(*, similarity: str = "Additive") -> Outcome:
    """Change of the weights of self-attention under another similarity, and the shape of dot
    products with a source.
    """
    text = f'model = 12\nheads = {{q = 3, dim = 4}}\nsimilarity = {{part = "{similarity}"}}'
    layer = make_layer(from_toml(text))
    plain = make_layer(design(model=12, heads=3))
    plain.load_state_dict({name: layer.state_dict()[name] for name in plain.state_dict()})
    x = sample(1, 1, 5, 12)
    change = largest_difference(weights_of(layer, x), weights_of(plain, x))
    shape = size_text(weights_of(plain, x, sample(2, 1, 7, 12))[0, 0])
    return judge(
        change < 1e-12,
        corrected=change > 1e-3 and shape == "5 x 7",
        change=change,
        shape=shape,
    )


def learned_weights_are_linear(*, kind: str = "random") -> Outcome:
    """Error of f(2 x + 3 z) = 2 f(x) + 3 f(z) for a layer with learned weights,
    and for attention.
    """
    layers = {
        "learned": _learned_layer(kind),
        "attention": make_layer(design(model=16, heads=2)),
    }
    x = sample(1, 1, 7, 16)
    z = sample(2, 1, 7, 16)
    errors = {
        name: largest_difference(layer(2 * x + 3 * z), (2 * layer(x) + 3 * layer(z)))
        for name, layer in layers.items()
    }
    return judge(errors["learned"] < 1e-12 < errors["attention"], **errors)
