"""Runs of document 002, sections 0 to 2.2: why several heads, weights, biases, W_O, sub-spaces and
sparsity.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import costs
from ..attention.attention import Attention
from ..attention.interfaces.core_types import Probe
from ..attention.parts import REGISTRY
from ..attention.presets import design, from_toml
from ..attention.tensor_attention import attend
from ..costs.complexity import LAYERS, WIDTH, longest_chain
from ..models.distributed.head_partition import partition_heads
from .attention_mechanism import parallel_equals_sequential
from .catalogue import Outcome, judge, judge_condition
from .matrix_figures import draw_grids
from .measured_layers import largest_difference, make_layer, sample, samples, weights_of
from .misconceptions import not_an_ensemble
from .parameters_and_scaling import equal_widths_needed
from .self_attention_basics import heads_by_key_head, heads_share_weights
from .translator_runs import (
    MEASURED_TEXTS,
    NUM_TEXTS,
    follow_one_head,
    load_translator,
    measure_translator,
    record_weights,
)

__all__ = ["equal_widths_needed", "parallel_equals_sequential"]


def embedding_in_pieces(*, cut: bool = False) -> Outcome:
    """Channels of the input that the query of one of 4 heads depends on; `cut` gives each head its
    own channels.
    """
    slopes = _queries_by_channels(cut)
    first = slopes[:3]
    channels = int((first.abs().amax(0) > 0).sum())
    grids = {"W_Q of every head": slopes.abs(), "input in pieces": _queries_by_channels(True).abs()}
    heads = [f"h{row // 3}" for row in range(12)]
    return judge(
        channels == len(first),
        corrected=channels == 12 and len(first) == 3,
        channels=channels,
        width=12,
        per_head=len(first),
        figure=draw_grids(grids, "channel of the input", "query of a head", heads),
    )


def _queries_by_channels(cut: bool) -> Tensor:
    """The derivative of the queries of 4 heads [12, 12] by the channels of the input."""
    weight = sample(1, 4, 3, 12)
    if cut:
        for head in range(4):
            weight[head, :, : 3 * head] = weight[head, :, 3 * head + 3 :] = 0
    layer = make_layer(design(model=12, heads=4))
    layer.load_state_dict(layer.state_dict() | {"project.q": weight.flatten(0, 1)})

    def queries(x: Tensor) -> Tensor:
        probe = Probe("q")
        layer(x[None, None], probe=probe)
        return probe.tensors["q"].flatten()

    slopes = torch.autograd.functional.jacobian(queries, sample(2, 12))
    assert isinstance(slopes, Tensor)
    return slopes


def large_diagonal(*, tied: bool = False) -> Outcome:
    """Diagonal of Q K^T / sqrt(d_k) against the rest, for random W_Q and W_K, and for W_Q = W_K; 64
    tokens.
    """
    numbers, weights = _diagonal(tied)
    tied_numbers, tied_weights = _diagonal(True)
    grids = {"W_Q and W_K of their own": weights, "W_Q = W_K": tied_weights}
    equal = {
        f"tied_{name}": value for name, value in tied_numbers.items() if name in ("mean", "weight")
    }
    differs = abs(numbers["mean"]) < 0.1 * numbers["spread"] and equal["tied_weight"] > 0.5
    return judge(
        numbers["mean"] > 3 * numbers["spread"],
        corrected=differs and abs(64 * numbers["weight"] - 1) < 0.2,
        **numbers,
        **equal,
        uniform=1 / 64,
        figure=draw_grids(grids, "key", "query"),
    )


def _diagonal(tied: bool) -> tuple[dict[str, float], Tensor]:
    """Numbers of the diagonal of scores and weights, and the weights of one text."""
    width = 64
    w_q = sample(2, width, width).T / 8
    w_k = w_q if tied else sample(3, width, width).T / 8
    layer = make_layer(design(model=width, heads=1))
    layer.load_state_dict(layer.state_dict() | {"project.q": w_q, "project.k": w_k})
    probe = Probe("scores", "weights")
    layer(sample(1, 200, 64, width), probe=probe)
    scores, weights = (probe.tensors[name][:, 0].detach() for name in ("scores", "weights"))
    diagonal = scores.diagonal(0, -2, -1)
    off = scores[:, ~torch.eye(64, dtype=torch.bool)]
    weight = weights.diagonal(0, -2, -1).mean()
    numbers = {
        "mean": float(diagonal.mean()),
        "spread": float(off.std()),
        "off": float(off.mean()),
        "weight": float(weight),
    }
    return numbers, weights[0, :24, :24]


def own_projections(*, kv: int = 3) -> Outcome:
    """Count heads, of 3, with outputs that change when W_K of one key head changes."""
    numbers = heads_share_weights(kv=kv).numbers
    in_mqa = heads_share_weights(kv=1).numbers["changed"]
    named = {"a key head for each head": kv, "one key head": 1}
    changes = {name: heads_by_key_head(count) for name, count in named.items()}
    figure = draw_grids(changes, "key head", "head")
    return judge(numbers["changed"] == 1 and in_mqa == 3, **numbers, figure=figure)


def sizes_of_the_paper(*, heads: int = 8, model: int = 512) -> Outcome:
    """d_k and d_v of a layer of this width with this many heads."""
    spec = design(model=model, heads=heads)
    sizes = {"dim": spec.heads.dim, "vdim": spec.heads.vdim}
    return judge(sizes == {"dim": 64, "vdim": 64}, **sizes)


def llama_listing(*, bias: str = "") -> Outcome:
    """Parameters of the attention of Llama 3 8B by the shapes of the listing, against the layer of
    headwise.
    """
    dim = 4096
    heads = 32
    kv = 8
    width = 128
    listed = 2 * dim * heads * width + 2 * dim * kv * width
    spec = design(model=dim, heads=heads, kv=kv, bias=bias)
    counted = costs.count_parameters(spec)
    return judge(counted == listed, counted=counted, listed=listed)


def heads_over_ranks(*, ranks: int = 16, kv_heads: int = 8, heads: int = 32) -> Outcome:
    """n_kv_heads // model_parallel for 8 and for `ranks` ranks, and the heads that headwise gives
    to each rank.
    """
    local = {8: kv_heads // 8, ranks: kv_heads // ranks}
    spec = design(model=512, heads=heads, kv=kv_heads)
    counts = {}
    for count in (8, ranks):
        parts = [part.spec.heads for part in partition_heads("layer", spec, count)]
        counts[count] = {(part.q, part.kv) for part in parts}
    needed = {count: {(heads // count, max(1, local[count]))} for count in counts}
    numbers = {
        "at_8": local[8],
        "at_many": local[ranks],
        "ranks": ranks,
        "q_at_many": heads // ranks,
    }
    return judge_condition(local[8] > 0 and counts == needed, local[ranks] > 0, **numbers)


def capacity_of_one_head(*, width: int | None = None) -> Outcome:
    """Parameters of one head and of 8 at d = 512, the share of zero weights, and ranks of summed
    score matrices.

    With `width`, every head has this width.
    """
    one, eight = (
        costs.count_parameters(design(model=512, heads=heads, dim=width)) for heads in (1, 8)
    )
    layer = Attention(design(model=64, heads=8)).double()
    zeros = float((layer.state_dict()["project.q"].abs() < 1e-12).double().mean())
    probe = Probe("scores")
    layer(sample(1, 1, 100, 64), probe=probe)
    rank = int(torch.linalg.matrix_rank(probe.tensors["scores"][0, 0].detach()))
    return judge(
        one < eight or zeros > 0.5,
        corrected=one == eight == 4 * 512**2 and zeros == 0 and rank == 8,
        one=one,
        eight=eight,
        zeros=zeros,
        rank=rank,
    )


def equal_importance(*, equal: bool = False) -> Outcome:
    """Norms of the contributions z_h W_O^h of 4 heads, and their sum against concat(z) W_O.

    With `equal`, all heads have equal weights.
    """
    layer = make_layer(design(model=16, heads=4))
    x = sample(1, 1, 7, 16)
    if equal:
        state = layer.state_dict()
        names = [f"project.{side}" for side in "qkv"]
        layer.load_state_dict(
            {name: state[name][:4].repeat(4, 1) for name in names}
            | {"output.o": state["output.o"][:, :4].repeat(1, 4)}
        )
    o = layer.head_outputs(x).detach()
    blocks = layer.state_dict()["output.o"].split(4, 1)
    parts = torch.stack([o[:, :, head] @ block.T for head, block in enumerate(blocks)])
    norms = parts.flatten(1).norm(dim=1)
    difference = largest_difference(parts.sum(0), layer.merge_heads(o))
    ratio = float(norms.max() / norms.min())
    return judge(
        ratio < 1 + 1e-9,
        corrected=ratio > 1.01 and difference < 1e-12,
        ratio=ratio,
        difference=difference,
    )


def shape_of_w_o(*, vdim: int | None = None) -> Outcome:
    """Rows and columns of W_O with d_v = d/h, and with d_v = 5."""
    shapes = [
        tuple(reversed(design(model=12, heads=3, vdim=size).shapes()["output.o"]))
        for size in (vdim, 5)
    ]
    sizes = {"usual": " x ".join(map(str, shapes[0])), "wide": " x ".join(map(str, shapes[1]))}
    return judge_condition(shapes[0][0] == shapes[0][1], shapes[1][0] == shapes[1][1], **sizes)


def larger_block_of_w_o(*, side: str = "o") -> Outcome:
    """A head's block of W_O times 2 against its output gated by 2; `side` "q" scales its queries
    instead.
    """
    layer = make_layer(design(model=12, heads=3))
    x = sample(1, 1, 7, 12)
    o = layer.head_outputs(x).detach()
    gated = layer.merge_heads(o * torch.tensor([2.0, 1.0, 1.0], dtype=o.dtype)[:, None]).detach()
    state = {name: weight.clone() for name, weight in layer.state_dict().items()}
    if side == "o":
        state["output.o"][:, :4] *= 2
    else:
        state["project.q"][:4] *= 2
    layer.load_state_dict(state)
    difference = largest_difference(layer(x), gated)
    return judge(difference < 1e-12, difference=difference)


def convolution_by_heads(*, heads: int = 3) -> Outcome:
    """A convolution of 3 tokens against heads that each attend to one offset by learned scores,
    with the kernel's slices as W_V W_O.
    """
    x = sample(1, 9, 4)
    kernel = sample(2, 5, 4, 3)
    padded = F.pad(x, (0, 1, 1, 1))  # a last channel for the width 5 of the outputs
    convolved = F.conv1d(x.T[None], kernel, padding=1)[0].T
    scores = '{part = "LearnedScores", length = 11}'
    layer = make_layer(
        from_toml(
            f"model = 5\nheads = {{q = {heads}, dim = 5}}\n"
            f'project = {{part = "ValueProjection"}}\nmodifiers = [{scores}]'
        )
    )
    to_offset = [1000 * torch.eye(13, dtype=x.dtype)[1:-1, 2 - n : 13 - n] for n in range(heads)]
    layer.load_state_dict(
        {
            "project.v": torch.eye(5, dtype=x.dtype).repeat(heads, 1),
            "learned_scores.table": torch.stack(to_offset),
            "output.o": F.pad(kernel[..., :heads], (0, 0, 0, 1)).transpose(1, 2).flatten(1),
        }
    )
    difference = largest_difference(layer(padded[None])[0, 1:-1], convolved)
    weights = weights_of(layer, padded[None])[0]
    figure = draw_grids({f"head {n}": each for n, each in enumerate(weights)}, "key", "query")
    return judge(difference < 1e-12, difference=difference, heads=heads, figure=figure)


def heads_as_ensemble(*, independent: bool = False) -> Outcome:
    """Second derivative of one loss by the outputs of two heads: 0 if heads are an ensemble of
    models.
    """
    numbers = not_an_ensemble(independent=independent).numbers
    coupling = float(numbers["coupling"])
    return judge(
        coupling < 1e-9,
        corrected=coupling > 1e-3 and float(numbers["difference"]) < 1e-12,
        **numbers,
    )


def sparse_rows(*, weights: str = "translator") -> Outcome:
    """Share of the visible keys that holds 90 % of a row's mass, over the heads of the bundled
    translator and held-out texts.

    `weights` "uniform" replaces them by uniform rows.
    """
    net = load_translator()
    shares = []
    chance = []
    heads = 0
    for site, spec in net.spec.attention_specs():
        heads += spec.heads.q
        for rows in record_weights(net, site):
            visible = (rows > 0).any(1, keepdim=True).expand_as(rows).double()
            uniform = visible / visible.sum(-1, keepdim=True)
            shares.append(_support(uniform if weights == "uniform" else rows, visible))
            chance.append(_support(uniform, visible))
    mean = sum(shares) / len(shares)
    by_chance = sum(chance) / len(chance)
    return judge(
        mean < by_chance / 2, support=mean, uniform=by_chance, heads=heads, texts=NUM_TEXTS
    )


def _support(rows: Tensor, visible: Tensor) -> float:
    """Mean share of the visible keys that are needed for 90 % of a row."""
    sums = rows.sort(-1, descending=True).values.cumsum(-1)
    needed = (sums < 0.9 - 1e-6).sum(-1) + 1
    return float((needed / visible.sum(-1)).mean())


def sparsity_and_rank(*, scale: float = 1.0) -> Outcome:
    """Rank of 50 x 50 scores of width 8 before and after softmax."""
    layer = make_layer(design(model=64, heads=8))
    probe = Probe("scores", "weights")
    layer(sample(1, 1, 50, 64) * scale, probe=probe)
    ranks = [
        int(torch.linalg.matrix_rank(probe.tensors[name][0, 0].detach()))
        for name in ("scores", "weights")
    ]
    return judge(
        ranks[1] <= 8, corrected=ranks == [8, 50], scores=ranks[0], weights=ranks[1], width=8
    )


def messages_over_edges(*, missing: int = 0) -> Outcome:
    """Attention as messages: each edge sends exp(score) v and exp(score), and each receiver divides
    the two sums.

    `missing` edges are left out.
    """
    q, k, v = samples((5, 4), (5, 4), (5, 3))
    edges = list(product(range(5), repeat=2))[missing:]
    sums = torch.zeros_like(v)
    totals = torch.zeros(5, dtype=v.dtype)
    for sender, receiver in edges:
        weight = torch.exp(q[receiver] @ k[sender] / 2)
        sums[receiver] += weight * v[sender]
        totals[receiver] += weight
    difference = largest_difference(sums / totals[:, None], attend(q, k, v)[0])
    return judge(difference < 1e-12, difference=difference, edges=len(edges))


def shallow_and_wide(*, layer: str = "attention") -> Outcome:
    """Longest chain of dependent operations at 32 and at 64 tokens, of a layer and of a GRU."""
    chains: dict[str, int] = {}
    for name, kind in (("layer", layer), ("gru", "GRU")):
        with torch.random.fork_rng(devices=[]):
            module = LAYERS[kind]().double()
        chains |= {
            f"{name}_{tokens}": longest_chain(module(sample(1, tokens, WIDTH)))
            for tokens in (32, 64)
        }
    is_shallow = chains["layer_32"] == chains["layer_64"]
    return judge(is_shallow and chains["gru_64"] > 1.5 * chains["gru_32"], **chains)


def heads_get_roles(*, roles: Sequence[str] | None = None) -> Outcome:
    """Heads of the bundled translator with a role as first class over held-out texts, and heads
    without; `roles` default to all. One head is followed further.
    """
    first = [
        head.classes[0].name if head.classes else "unclear" for head in measure_translator().heads
    ]
    named = [name for name in first if name != "unclear" and (roles is None or name in roles)]
    kinds = set(named)
    return judge(
        len(named) > len(first) / 2 and {"alignment", "punctuation", "previous"} <= kinds,
        named=len(named),
        heads=len(first),
        kinds=len(kinds),
        texts=MEASURED_TEXTS,
        **follow_one_head(),
    )


def softmax_is_never_zero(*, alpha: int = 1) -> Outcome:
    """Weight of a key with a score lower by 50 and by 200, in float32 and in float64; `alpha` 2 is
    sparsemax.
    """
    numbers = {}
    sparsemax = REGISTRY["Entmax"](alpha=2.0)
    normaliser = REGISTRY["Softmax"]() if alpha == 1 else sparsemax
    for name, dtype in (("single", torch.float32), ("double", torch.float64)):
        for gap in (50, 200):
            scores = torch.tensor([0.0, -gap], dtype=dtype)
            numbers[f"{name}_{gap}"] = float(normaliser.normalise_row(scores, {})[1])
    is_zero_by_design = float(sparsemax.normalise_row(torch.tensor([0.0, -50.0]), {})[1]) == 0
    holds = min(numbers["single_50"], numbers["double_200"]) > 0 and is_zero_by_design
    return judge_condition(holds, numbers["single_200"] > 0, **numbers)
