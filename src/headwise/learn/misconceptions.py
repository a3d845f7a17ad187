"""Runs of document 003, sections 6 to 8: seven questions, five misconceptions, and further
mechanisms.
"""

from __future__ import annotations

import math
from itertools import combinations, product
from statistics import fmean

import torch
from torch import Tensor, nn

from .. import costs
from ..attention.interfaces.core_types import Probe
from ..attention.position_embeddings import sinusoidal_table
from ..attention.presets import design, from_toml
from ..attention.tensor_attention import attend
from ..observe.bundled_sample import load_sample_model
from ..observe.head_analysis.rank_analysis import measure_qk_spectra
from .attention_mechanism import cost_by_heads
from .catalogue import ItemList, Outcome, Verdict, judge, judge_condition
from .matrix_figures import draw_curves, draw_matrices
from .measured_layers import (
    complexity_by_layer,
    draw_flops,
    draw_masks,
    entropy,
    largest_difference,
    make_layer,
    sample,
    samples,
    weights_of,
)
from .parameters_and_scaling import sample_scores
from .translator_runs import NUM_TEXTS, holds_the_energy, load_translator, record_weights


def _weights(q: Tensor, k: Tensor, scale: float | None = None) -> Tensor:
    weights = attend(q, k, k, need_weights=True, scale=scale)[1]
    assert weights is not None
    return weights


# --- Section 6: seven questions -------------------------------------------------------------------


def soft_addressing(*, sharp: float = 100.0) -> Outcome:
    """Entropy of weights at a scale near 0 (an average), 1/sqrt(d_k), and `sharp` (a look-up), over
    8 keys.
    """
    q, k = samples((5, 4), (8, 4))
    scales = (("average", 1e-12), ("soft", None), ("hard", sharp))
    weights = {name: _weights(q, k, scale) for name, scale in scales}
    entropies = {name: float(entropy(rows).mean()) for name, rows in weights.items()}
    most = math.log(8)
    is_between = entropies["hard"] < 0.1 * most < entropies["soft"] < 0.99 * most
    ordered = abs(entropies["average"] - most) < 1e-9 and is_between
    titles = ("scale near 0", "scale 1/sqrt(d_k)", f"scale {sharp:g}")
    figure = draw_matrices(list(zip(titles, weights.values(), strict=True)))
    return judge(ordered, **entropies, most=most, figure=figure)


def square_root_of_width(*, exponent: float = 0.5) -> Outcome:
    """Standard deviation of scores over d_k^exponent, for d_k = 4, 64 and 1024."""
    deviations = _deviations(None if exponent == 0.5 else exponent)
    others = [_deviations(other) for other in (0.25, 1.0)]
    keeps = [max(each.values()) < 1.1 * min(each.values()) for each in (deviations, *others)]
    return judge(keeps == [True, False, False], **deviations)


def _deviations(exponent: float | None) -> dict[str, float]:
    """The deviation of scores over d_k^exponent for three d_k; without, with the layer's scale."""
    scales = {width: None if exponent is None else width**-exponent for width in (4, 64, 1024)}
    return {
        f"std_{width}": float(sample_scores(width, scale=scale).std())
        for width, scale in scales.items()
    }


def sum_or_concat(*, tied: bool = True) -> Outcome:
    """Summing heads before one projection against concatenation with equal blocks of W_O, and the
    ranks of both.

    The rank is of the linear map from the outputs of all heads to the output of the layer. `tied`
    repeats one block.
    """
    summed = make_layer(
        from_toml('model = 12\nheads = {q = 3, dim = 4}\nmerge = {part = "SumMerge"}')
    )
    concat = make_layer(design(model=12, heads=3))
    state = summed.state_dict()
    block = state["output.o"]
    own = concat.state_dict()["output.o"].clone()
    concat.load_state_dict(state | {"output.o": block.repeat(1, 3) if tied else own})
    x = sample(1, 1, 7, 12)
    difference = largest_difference(summed(x), concat(x))
    ranks = [int(torch.linalg.matrix_rank(weight)) for weight in (block.repeat(1, 3), own)]
    return judge(
        difference < 1e-12 and ranks[0] < ranks[1],
        difference=difference,
        sum_rank=ranks[0],
        concat_rank=ranks[1],
    )


def unseen_angles(*, trained: int = 64, model: int = 64) -> Outcome:
    """Pairs of a sinusoid with unseen angles beyond the trained length: pairs of longer periods."""
    periods = 2 * math.pi * 10000 ** (torch.arange(0, model, 2, dtype=torch.float64) / model)
    table = sinusoidal_table(torch.arange(2 * trained), model)
    trained_rows = table[:trained]
    beyond = table[trained:]
    nearest = torch.cdist(beyond, trained_rows).amin(-1)
    spacing = float((table[1] - table[0]).norm())
    unseen = int((periods > trained).sum())
    distance = float(nearest[-1])
    # a sine and a cosine of one angle have squares that sum to 1
    is_circle = largest_difference(table.square().sum(-1), torch.tensor(model / 2)) < 1e-9
    curve = dict(enumerate(nearest.tolist(), trained))
    return judge(
        unseen == 0,
        corrected=is_circle and distance > 2 * spacing,
        unseen=unseen,
        pairs=model // 2,
        distance=distance,
        spacing=spacing,
        figure=draw_curves(
            {"nearest trained position": curve},
            "position",
            "distance",
            levels={"between neighbours": spacing},
        ),
    )


def cheaper_than_recurrence(*, tokens: int = 512, model: int = 512) -> Outcome:
    """FLOPs and sequential steps of self-attention and a GRU at this length, and where attention
    becomes dearer.
    """
    layers = complexity_by_layer(tokens, model)
    attention = layers["self-attention"]
    gru = layers["GRU"]
    numbers = {
        "attention": attention.flops,
        "gru": gru.flops,
        "dearer": gru.dearer or 0,
        "serial": gru.serial,
    }
    work = 8 * tokens * model**2 + 4 * tokens**2 * model
    is_counted = (attention.flops, gru.flops) == (work, 12 * tokens * model**2)
    has_steps = (attention.serial, gru.serial, gru.dearer) == (1, tokens, model + 1)
    holds = attention.flops <= gru.flops and is_counted and has_steps
    figure = draw_flops(("self-attention", "GRU"), model)
    return judge(holds, **numbers, tokens=tokens, figure=figure)


def redundant_heads(*, trace_heads: bool = True) -> Outcome:
    """Mean Jensen-Shannon divergence of head pairs in a layer of the bundled translator over
    held-out texts, against chance.

    For chance, the keys of the second head are permuted. Without `trace_heads`, six heads each
    attend to another token.
    """
    layers = [[torch.eye(6, dtype=torch.float64)[None, :, None]]]
    if trace_heads:
        net = load_translator()
        sites = [site for site, _ in net.spec.attention_specs()]
        bidirectional = [one for one in sites if "encoder" in one or "cross" in one]
        layers = [record_weights(net, site) for site in bidirectional]
    pairs = []
    chance = []
    for batches in layers:
        for one, other in combinations(range(6), 2):
            generator = torch.Generator().manual_seed(len(pairs))
            gaps = []
            permuted = []
            for weights in batches:
                order = torch.randperm(weights.shape[-1], generator=generator)
                gaps.append(_divergence(weights[:, one], weights[:, other]))
                permuted.append(_divergence(weights[:, one], weights[:, other][..., order]))
            pairs.append(fmean(gaps))
            chance.append(fmean(permuted))
    mean = fmean(pairs)
    by_chance = fmean(chance)
    return judge(
        0 < mean < 0.9 * by_chance,
        closest=min(pairs),
        mean=mean,
        chance=by_chance,
        pairs=len(pairs),
        texts=NUM_TEXTS,
    )


def _divergence(one: Tensor, other: Tensor) -> float:
    return float((entropy((one + other) / 2) - (entropy(one) + entropy(other)) / 2).mean())


def shared_query_key_dimensions(*, draws: int = 8, model: nn.Module | None = None) -> Outcome:
    """Dimensions for 90 % of the squared singular values of the summed W_Q W_K^T, and of Gaussian
    weights.
    """
    net = load_sample_model() if model is None else model
    spectra = measure_qk_spectra(net, num_draws=draws)
    shares = [layer.summed.dims / layer.summed.chance for layer in spectra]
    smallest = min(spectra, key=lambda layer: layer.summed.dims / layer.summed.chance).summed
    mean = sum(shares) / len(shares)
    return judge(
        mean < 0.8 and holds_the_energy(net, spectra),
        share=mean,
        dims=smallest.dims,
        chance=smallest.chance,
        layers=len(spectra),
    )


def one_changed_bit(*, normalised: bool = True) -> Outcome:
    """Largest change of the last output when one of n input bits flips, for n = 16 and 1,024.

    Softmax weights sum to 1, so one token has a share of about 1/n (Hahn 2020). Without
    `normalised`, values are added.
    """
    changes = {}
    for tokens in (16, 64, 256, 1024):
        layer = make_layer(design(model=8, heads=2))
        bits = (sample(3, tokens) > 0).long()
        table = sample(4, 2, 8)
        other = bits.clone()
        other[0] = 1 - other[0]
        before, after = (layer(table[b][None])[0, -1].detach() for b in (bits, other))
        changes[f"change_{tokens}"] = float((after - before).norm()) * (1 if normalised else tokens)
    factor = changes["change_16"] / changes["change_1024"]
    corrected = factor > 16 and min(changes.values()) > 0
    return judge(factor < 8, corrected=corrected, **changes, factor=factor)


# --- Section 7: five misconceptions ---------------------------------------------------------------


def weighted_mean(*, normaliser: str = "Softmax") -> Outcome:
    """Two queries over equal values: change of the weights, and whether outputs lie inside the
    range of the values.

    With normaliser "Sigmoid" the weights do not sum to 1, and outputs can leave the range.
    """
    numbers = _mean_of_values(normaliser)
    sigmoid = _mean_of_values("Sigmoid")
    is_mean = {
        name: each["outside"] <= 1e-12 and abs(each["row_sum"] - 1) < 1e-9
        for name, each in (("given", numbers), ("sigmoid", sigmoid))
    }
    depends = numbers["changed"] > 1e-6
    return judge(not is_mean["given"], corrected=depends and not is_mean["sigmoid"], **numbers)


def _mean_of_values(normaliser: str) -> dict[str, float]:
    spec = from_toml(
        f'model = 8\nheads = {{q = 2, dim = 4}}\nnormaliser = {{part = "{normaliser}"}}'
    )
    layer = make_layer(spec)
    source = sample(2, 1, 6, 8)
    one = sample(3, 1, 4, 8)
    other = sample(4, 1, 4, 8)
    weights = [weights_of(layer, x, source) for x in (one, other)]
    values = (source[0] @ layer.state_dict()["project.v"].T).unflatten(-1, (2, 4))
    outputs = layer.head_outputs(one, source=source).detach()[0]
    outside = torch.maximum(outputs - values.amax(0), values.amin(0) - outputs).amax()
    return {
        "changed": largest_difference(*weights),
        "row_sum": float(weights[0].sum(-1).max()),
        "outside": float(outside),
    }


def not_an_ensemble(*, independent: bool = False) -> Outcome:
    """concat(z) W_O against the sum of z_h W_O^h, and the gradient that one head gets from another
    head's output.

    An ensemble would train each head alone: with `independent`, each head has a separate loss.
    """
    layer = make_layer(design(model=12, heads=3))
    x = sample(1, 1, 7, 12)
    o = layer.head_outputs(x).detach()
    blocks = layer.state_dict()["output.o"].split(4, 1)
    parts = [o[:, :, head] @ block.T for head, block in enumerate(blocks)]
    difference = largest_difference(torch.stack(parts).sum(0), layer.merge_heads(o))
    target = sample(2, *x.shape)

    def loss(o: Tensor) -> Tensor:
        if independent:
            return torch.stack(
                [((o[:, :, h] @ b.T - target) ** 2).sum() for h, b in enumerate(blocks)]
            ).sum()
        return ((layer.merge_heads(o) - target) ** 2).sum()

    def of_first_token(first: Tensor) -> Tensor:
        return loss(torch.cat([first[None, None], o[:, 1:]], 1))

    second = torch.autograd.functional.hessian(of_first_token, o[0, 0])
    assert isinstance(second, Tensor)
    coupling = float(second[0, :, 1].abs().max())
    return judge(coupling > 1e-9 and difference < 1e-12, difference=difference, coupling=coupling)


def unequal_lengths(*, queries: int = 7, keys: int = 13, modifiers: str = "") -> Outcome:
    """Self-attention of several lengths with one layer, cross-attention of 7 to 13 tokens, and a
    padded batch.

    A modifier with a table of positions sets a longest length, which is an error beyond it.
    """
    layer = make_layer(from_toml(f"model = 12\nheads = {{q = 3, dim = 4}}\n{modifiers}"))
    shapes = [tuple(layer(sample(1, 1, tokens, 12)).shape) for tokens in (1, queries, keys)]
    cross = tuple(layer(sample(1, 1, queries, 12), source=sample(2, 1, keys, 12)).shape)
    x = sample(3, 1, keys, 12)
    mask = torch.zeros(1, 1, 1, keys, dtype=torch.bool)
    mask[..., :queries] = True
    padded = layer(x, mask=mask)[:, :queries].detach()
    difference = largest_difference(padded, layer(x[:, :queries]))
    works = cross == (1, queries, 12) and [shape[1] for shape in shapes] == [1, queries, keys]
    return judge(
        not works,
        corrected=difference < 1e-12,
        cross=f"{cross[1]} x {keys}",
        padded=difference,
        lengths=ItemList(f"1, {queries}, {keys}"),
    )


def order_without_positions(*, pattern: str = "full()", positions: bool = False) -> Outcome:
    """ "I love you" and "you love I": the mean of the outputs with and without a causal mask or
    positions.
    """
    embeddings: dict[str, Tensor] = dict(zip(("I", "love", "you"), sample(1, 3, 12), strict=True))

    def pooled(sentence: str, kind: str) -> Tensor:
        x = torch.stack([embeddings[word] for word in sentence.split()])
        x = x + sinusoidal_table(torch.arange(3), 12) if positions else x
        return make_layer(design(model=12, heads=3, pattern=kind))(x[None]).mean(1).detach()

    encoder = largest_difference(pooled("I love you", pattern), pooled("you love I", pattern))
    decoder = largest_difference(pooled("I love you", "causal()"), pooled("you love I", "causal()"))
    return judge_condition(encoder < 1e-12, decoder < 1e-12, encoder=encoder, decoder=decoder)


def heads_need_not_divide(*, model: int = 10, heads: int = 3, width: int = 4) -> Outcome:
    """A layer of width 10 with 3 heads of 4 channels: the shape of its output
    and its parameters.
    """
    spec = design(model=model, heads=heads, dim=width)
    shape = make_layer(spec)(sample(1, 1, 5, model)).shape
    works = shape[-1] == model and heads * width != model
    parameters = costs.count_parameters(spec)
    return judge(
        not works,
        corrected=parameters == 4 * model * heads * width,
        width=heads * width,
        model=model,
        parameters=parameters,
    )


def more_heads_cost_more(*, width: int | None = None) -> Outcome:
    """Parameters, FLOPs and scores for 1 to 32 heads at d = 512; `width` fixes
    the width of a head.
    """
    counted = cost_by_heads(width=width)
    numbers = counted.numbers
    return judge(
        float(numbers["params_32"]) > float(numbers["params_1"]),
        corrected=counted.verdict == Verdict.HOLDS,
        **numbers,
    )


# --- Section 8: further mechanisms ----------------------------------------------------------------


def graph_edges(*, complete: bool = False) -> Outcome:
    """Attention over the edges of a graph: allowed pairs, the influence of nodes that are no
    neighbours, Edges(all).

    With `complete`, the graph has all edges.
    """
    every = tuple(product(range(6), range(6)))
    ring = tuple((i, j) for i, j in every if (i - j) % 6 in (0, 1, 5))
    edges = every if complete else ring
    x = sample(1, 6, 8)
    layer, all_pairs, full = (
        make_layer(design(model=8, heads=2, pattern=pattern))
        for pattern in (_edges(edges), _edges(every), "full()")
    )
    jacobian = torch.func.jacrev(lambda x: layer(x[None])[0, 0])(x).detach()
    far = float(jacobian[:, 3].abs().max())
    difference = largest_difference(all_pairs(x[None]), full(x[None]))
    near = float(jacobian[:, [1, 5]].abs().amax((0, 2)).min())
    return judge(
        far < 1e-12 < near and difference < 1e-12,
        pairs=len(edges),
        far=far,
        difference=difference,
        figure=draw_masks({"": _edges(edges)}, 6),
    )


def _edges(pairs: tuple[tuple[int, int], ...]) -> str:
    return f"edges({pairs!r})"


def long_patterns(*, window: int = 513) -> Outcome:
    """Share of all pairs that Longformer and BigBird allow at 4,096 tokens, of FLOPs of scores and
    values.
    """
    shares = {}
    for name in ("longformer", "bigbird"):
        options = (
            {"pattern": f"window({window}, after={window // 2}) | global((0,))"}
            if name == "longformer"
            else {}
        )
        specs = [
            design(preset=name, model=64, heads=1, **options),
            design(model=64, heads=1, bias="qkvo"),
        ]
        flops = [
            costs.required_flops(spec, costs.self_attention_work(spec, batch=1, queries=4096))
            - 8 * 4096 * 64 * 64
            for spec in specs
        ]
        shares[name] = flops[0] / flops[1]
    places = torch.arange(4096)
    near = (places[:, None] - places).abs() <= window // 2
    near[0] = near[:, 0] = True
    is_counted = abs(shares["longformer"] - float(near.double().mean())) < 1e-9
    small = {
        "Longformer": "window(17, after=8) | global((0,))",
        "BigBird": "bigbird(64, block=4, globals=1)",
    }
    figure = draw_masks(small, 64)
    return judge(max(shares.values()) < 0.25 and is_counted, **shares, figure=figure)


def width_for_each_head(*, heads: int = 64) -> Outcome:
    """Rank of the scores of one head over 50 tokens of width 512, for 1 head, 8
    heads and `heads`.
    """
    x = sample(1, 1, 50, 512)
    numbers = {}
    for name, count in (("h1", 1), ("h8", 8), ("many", heads)):
        probe = Probe("scores")
        make_layer(design(model=512, heads=count))(x, probe=probe)
        scores = probe.tensors["scores"][0, 0].detach()
        numbers[name] = int(torch.linalg.matrix_rank(scores, rtol=1e-9))
    holds = numbers["many"] == 512 // heads < numbers["h8"]
    return judge(holds, **numbers, heads=heads, width=512 // heads)
