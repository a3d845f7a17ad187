"""Runs of document 003, sections 1 to 3: look-up by content, the formula and its steps, several
heads, and RNNs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import costs
from ..attention.presets import design, from_toml
from ..attention.tensor_attention import attend
from ..costs.weight_storage import parameter_terms
from ..models.families import read_model_spec
from ..models.model_spec import ModelSpec
from .catalogue import Outcome, judge, judge_condition
from .matrix_figures import draw_curves, draw_grids, draw_matrices
from .measured_layers import largest_difference, make_gru, make_layer, sample, samples, size_text
from .parameters_and_scaling import gradient_of_softmax, score_variance
from .translator_runs import NUM_TEXTS, load_translator, record_weights

__all__ = ["gradient_of_softmax", "score_variance"]


def content_lookup(*, scale: float = 200.0, repeated_key: bool = False) -> Outcome:
    """Query a store with its own unit keys: error of the value at the usual scale, and at a large
    scale.
    """
    keys = F.normalize(sample(1, 6, 8), dim=-1)
    values = sample(2, 6, 3)
    if repeated_key:
        keys[1] = keys[0]
    errors: list[float] = []
    grids: dict[str, Tensor] = {}
    for name, each in (("scale 1/sqrt(d_k)", None), (f"scale {scale:g}", scale)):
        looked_up, weights = attend(keys, keys, values, scale=each, need_weights=True)
        assert weights is not None
        errors.append(largest_difference(looked_up, values))
        grids[name] = weights
    usual, sharp = errors
    figure = draw_grids(grids, "stored key", "query")
    return judge_condition(
        sharp < 1e-6, usual < 1e-6, usual=usual, sharp=sharp, scale=scale, figure=figure
    )


def reach_of_one_layer(*, pattern: str = "full()", tokens: int = 9) -> Outcome:
    """Pairs of tokens with a nonzero derivative in one layer: attention, and a convolution of 3
    tokens.
    """
    layer = make_layer(design(model=4, heads=2, pattern=pattern))
    kernel = sample(3, 4, 4, 3)

    def convolve(x: Tensor) -> Tensor:
        return F.conv1d(x.T[None], kernel, padding=1)[0].T

    x = sample(4, tokens, 4)
    sizes = {
        "attention": torch.func.jacrev(lambda x: layer(x[None])[0])(x).detach().abs().amax((1, 3)),
        "convolution": torch.func.jacrev(convolve)(x).abs().amax((1, 3)),
    }
    pairs = {name: int((size > 0).sum()) for name, size in sizes.items()}
    names = ("self-attention", "convolution")
    figure = draw_matrices(list(zip(names, sizes.values(), strict=True)))
    is_local = pairs["convolution"] == 3 * tokens - 2
    return judge(
        pairs["attention"] == tokens**2 and is_local, **pairs, all=tokens**2, figure=figure
    )


def attention_formula(*, power: float = 0.5) -> Outcome:
    """hw.attend against softmax(Q K^T / d_k^power) V written out, with n = 7 queries and m = 13
    keys.
    """
    q, k, v = samples((7, 5), (13, 5), (13, 3))
    weights = torch.exp(q @ k.T / 5**power)
    written = weights / weights.sum(-1, keepdim=True) @ v
    ours = attend(q, k, v)[0]
    shape = size_text(ours)
    difference = largest_difference(ours, written)
    return judge(difference < 1e-12, difference=difference, shape=shape)


WORDS = ("I", "love", "you")


def five_steps(*, power: float = 0.5) -> Outcome:
    """Scores, scaling, mask, softmax and weighted sum of three tokens, step by step, against
    hw.attend.
    """
    q = torch.tensor([[1.0, 0.0], [0.5, 1.0], [0.0, 2.0]], dtype=torch.float64)
    k = torch.tensor([[2.0, 1.0], [0.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    v = torch.tensor([[1.0, 2.0], [3.0, 0.0], [5.0, 4.0]], dtype=torch.float64)
    scores = q @ k.T
    scaled = scores / 2**power
    masked = scaled.masked_fill(~torch.ones(3, 3, dtype=torch.bool).tril(), -math.inf)
    weights = masked.softmax(-1)
    output = weights @ v
    difference = largest_difference(output, attend(q, k, v, causal=True)[0])
    row_sum = float(weights.sum(-1).max())
    steps = [
        ("Q", q),
        ("K", k),
        ("V", v),
        ("1 QK^T", scores),
        ("2 / √d_k, d_k = 2", scaled),
        ("3 mask", masked),
        ("4 softmax", weights),
        ("5 · V", output),
    ]
    figure = draw_matrices(steps, WORDS)
    numbers = {
        "score_21": float(scores[1, 0]),
        "scaled_21": float(scaled[1, 0]),
        "weight_21": float(weights[1, 0]),
    }
    numbers |= {"output_2": ", ".join(f"{number:.4f}" for number in output[1].tolist())}
    return judge(
        difference < 1e-12 and abs(row_sum - 1) < 1e-12,
        **numbers,
        row_sum=row_sum,
        difference=difference,
        figure=figure,
    )


def causal_mask(*, pattern: str = "causal()", changed: int = 5) -> Outcome:
    """Change of the outputs before and from a position on, when the tokens from there on are
    replaced.
    """
    layer = make_layer(design(model=12, heads=3, pattern=pattern))
    x = sample(2, 1, 9, 12)
    other = torch.cat([x[:, :changed], sample(3, 1, 9 - changed, 12)], 1)
    difference = (layer(x) - layer(other)).abs().detach()
    before = float(difference[:, :changed].max())
    after = float(difference[:, changed:].max())
    figure = draw_grids({"": difference[0]}, "channel", "position")
    return judge(
        before < 1e-12 < after, before=before, after=after, position=changed, figure=figure
    )


def multi_head_formula(*, own_projection: bool = True) -> Outcome:
    """Concat(head_1 .. head_h) W^O with W_i^Q, W_i^K, W_i^V per head, against hw.Attention,
    with d_v = 5.
    """
    model = 12
    heads = 3
    dim = 4
    vdim = 5
    layer = make_layer(design(model=model, heads=heads, dim=dim, vdim=vdim))
    x = sample(1, 7, model)
    state = layer.state_dict()
    outputs = []
    steps: list[tuple[str, Tensor]] = [("X", x)]
    for head in range(heads):
        index = head if own_projection else 0
        w_q, w_k = (state[f"project.{side}"][index * dim : (index + 1) * dim].T for side in "qk")
        w_v = state["project.v"][index * vdim : (index + 1) * vdim].T
        weights = ((x @ w_q) @ (x @ w_k).T / math.sqrt(dim)).softmax(-1)
        outputs.append(weights @ (x @ w_v))
        steps += [(f"A head {head}", weights), (f"Z head {head}", outputs[-1])]
    concat = torch.cat(outputs, -1)
    y = concat @ state["output.o"].T
    difference = largest_difference(y, layer(x[None])[0])
    shape = size_text(state["output.o"].T)
    steps += [("concat", concat), ("W_O", state["output.o"].T), ("concat W_O", y)]
    figure = draw_matrices(steps)
    return judge(difference < 1e-12, difference=difference, w_o=shape, figure=figure)


def cost_by_heads(*, width: int | None = None, tokens: int = 512) -> Outcome:
    """Parameters, FLOPs and numbers in the score tensor for 1 to 32 heads at d = 512; `width` fixes
    d_k.
    """
    numbers: dict[str, int] = {}
    for heads in (1, 8, 32):
        spec = design(model=512, heads=heads, dim=width)
        numbers[f"params_{heads}"] = costs.count_parameters(spec)
        work = costs.self_attention_work(spec, batch=1, queries=tokens)
        numbers[f"flops_{heads}"] = costs.required_flops(spec, work)
        numbers[f"scores_{heads}"] = heads * tokens**2
    equal_params = numbers["params_1"] == numbers["params_8"] == numbers["params_32"]
    equal_flops = numbers["flops_1"] == numbers["flops_8"] == numbers["flops_32"]
    work = 8 * tokens * 512**2 + 4 * tokens**2 * 512
    is_counted = numbers["params_1"] == 4 * 512**2 and numbers["flops_1"] == work
    return judge(equal_params and equal_flops and is_counted, **numbers)


def additive_attention(*, bias: float = 1.0) -> Outcome:
    """v^T tanh(W_q q + W_k k + b) of Bahdanau, against the scores of headwise;
    `bias` multiplies b.
    """
    spec = from_toml('model = 12\nheads = {q = 3, dim = 4}\nsimilarity = {part = "Additive"}')
    layer = make_layer(spec, scale=0.5)
    x = sample(1, 1, 5, 12)
    state = layer.state_dict()
    q = _project(state["project.q"], x)
    k = _project(state["project.k"], x)
    v = state["similarity.v"]
    b = state["similarity.bias"] * bias
    hidden = torch.tanh(q[:, :, :, None] + k[:, :, None] + b[:, None, None])
    weights = (hidden * v[:, None, None]).sum(-1).softmax(-1)
    values = _project(state["project.v"], x)
    y = (weights @ values).transpose(1, 2).flatten(2) @ state["output.o"].T
    difference = largest_difference(y, layer(x))
    return judge(difference < 1e-12, difference=difference)


def _project(weight: Tensor, x_BTD: Tensor, heads: int = 3) -> Tensor:
    """[B, H, T, K] of the rows of a projection."""
    return (x_BTD @ weight.T).unflatten(-1, (heads, -1)).transpose(1, 2)


def fixed_vector(*, steps: int = 12, width: int = 4, decoder_steps: int = 12) -> Outcome:
    """Rank of the derivative of what a decoder receives by all source vectors: one state, or
    attention contexts.
    """
    gru = make_gru(width)
    queries = sample(1, decoder_steps, width)
    x = sample(2, steps, width)
    state = torch.func.jacrev(lambda x: gru_steps(gru, x)[-1])(x)
    contexts = torch.func.jacrev(lambda v: attend(queries, x, v)[0])(x)
    fixed, free = (
        int(torch.linalg.matrix_rank(matrix, rtol=1e-9))
        for matrix in (state.reshape(width, -1), contexts.reshape(decoder_steps * width, -1))
    )
    return judge(
        fixed <= width < free, fixed=fixed, attention=free, source=steps * width, width=width
    )


def gru_steps(gru: nn.GRU, x_TD: Tensor) -> Tensor:
    """All states of a GRU, by its equations, so that derivatives of any order exist."""
    state = x_TD.new_zeros(gru.hidden_size)
    states = []
    parameters = dict(gru.named_parameters())
    for x in x_TD:
        from_input = F.linear(x, parameters["weight_ih_l0"], parameters["bias_ih_l0"]).chunk(3)
        from_state = F.linear(state, parameters["weight_hh_l0"], parameters["bias_hh_l0"]).chunk(3)
        reset, update = (torch.sigmoid(from_input[n] + from_state[n]) for n in (0, 1))
        new = torch.tanh(from_input[2] + reset * from_state[2])
        state = (1 - update) * new + update * state
        states.append(state)
    return torch.stack(states)


def gradient_by_distance(*, update_bias: float = 0.0, tokens: int = 41) -> Outcome:
    """Derivative of the last output by the first and by the last but one input: a GRU at its start,
    and attention.
    """
    width = 16
    x = sample(1, tokens, width)
    recurrent, open_gate = (_gru_gradients(bias, x) for bias in (update_bias, 20.0))
    layer = make_layer(design(model=width, heads=2))
    attention = torch.func.jacrev(lambda x: layer(x[None])[0, -1])(x).norm(dim=(0, 2)).detach()
    numbers = {
        "gru": float(recurrent[0] / recurrent[-2]),
        "attention": float(attention[0] / attention[-2]),
    }
    keeps = float(open_gate[0] / open_gate[-2]) > 0.5
    gradients = {"GRU": recurrent, "GRU, open gate": open_gate, "attention": attention}
    curves = {
        name: dict(enumerate((each / each[-2]).flip(0)[1:].tolist(), 1))
        for name, each in gradients.items()
    }
    return judge(
        numbers["gru"] < 1e-3 and numbers["attention"] > 0.05 and keeps,
        **numbers,
        distance=tokens - 1,
        figure=draw_curves(
            curves, "distance", "derivative relative to that at distance 1", log="y"
        ),
    )


def _gru_gradients(update_bias: float, x_TD: Tensor) -> Tensor:
    """Norm of the derivative of a GRU's last state by each input."""
    width = x_TD.shape[1]
    gru = make_gru(width)
    with torch.no_grad():
        # a gate near 1 copies the state
        gru.get_parameter("bias_ih_l0")[width : 2 * width] += update_bias
    derivative = torch.func.jacrev(lambda x: gru_steps(gru, x)[-1])(x_TD)
    return derivative.norm(dim=(0, 2)).detach()


def parallel_equals_sequential(*, pattern: str = "causal()") -> Outcome:
    """All positions in one call, against one call per position with a KV cache; and the steps that
    a GRU needs.
    """
    layer = make_layer(design(model=12, heads=3, pattern=pattern))
    x = sample(1, 1, 9, 12)
    whole = layer(x).detach()
    steps = torch.cat([layer(x[:, : t + 1])[:, -1:].detach() for t in range(9)], 1)
    difference = largest_difference(whole, steps)
    return judge(difference < 1e-12, difference=difference, steps=9)


def only_attention(*, feed_forward: bool = True) -> Outcome:
    """Shares of attention and feed-forward layers in the parameters of the Transformer (base), and
    its recurrences.
    """
    model = read_model_spec("transformer-base")
    terms = parameter_terms(model).terms
    layers = [
        term for term in terms if "*" in term.name and (feed_forward or ".feed" not in term.name)
    ]
    total = sum(term.value for term in layers)
    feed = sum(term.value for term in layers if ".feed." in term.name) / total
    attention = (
        sum(term.value for term in layers if ".attention." in term.name or ".cross." in term.name)
        / total
    )
    recurrent = sum(spec.is_recurrent for _, spec in model.attention_specs())
    specs = [spec for _, spec in model.attention_specs()]
    is_counted = (
        not feed_forward or abs(attention * total - sum(map(costs.count_parameters, specs))) < 1
    )
    return judge_condition(
        recurrent == 0 and len(specs) == 6 + 12 and is_counted,
        feed == 0,
        feed=feed,
        attention=attention,
        recurrent=recurrent,
    )


def sources_by_step(*, uniform: bool = False) -> Outcome:
    """Source tokens of a text with the largest weight over the steps of the bundled translator's
    decoder, in each cross head: the mean over held-out texts.

    With `uniform` weights, every step attends to all of them alike.
    """
    net = load_translator()
    counts = []
    for site, spec in net.spec.attention_specs():
        if not site.endswith("cross"):
            continue
        by_head = torch.zeros(spec.heads.q)
        for weights in record_weights(net, site):
            rows = torch.full_like(weights, 1 / weights.shape[-1]) if uniform else weights
            chosen = F.one_hot(rows.argmax(-1), rows.shape[-1]).amax(2)  # of every text and head
            by_head += chosen.sum(-1).sum(0)
        counts += (by_head / NUM_TEXTS).tolist()
    fewest = min(counts)
    most = max(counts)
    return judge(
        fewest > 1.5,
        fewest=fewest,
        most=most,
        mean=sum(counts) / len(counts),
        texts=NUM_TEXTS,
        heads=len(counts),
    )


def pretrained_models(*, models: Sequence[ModelSpec] | None = None) -> Outcome:
    """Layers of BERT (base) and GPT-2 with attention, those with a recurrence, and the sides that a
    token sees.
    """
    specs = [read_model_spec(name) for name in ("bert-base", "gpt2")] if models is None else models
    stacks = chain.from_iterable(spec.stacks for spec in specs)
    layers = list(chain.from_iterable(stack.layers for stack in stacks))
    attending = sum(block.attention is not None for block in layers)
    recurrent = sum(block.mixer is not None for block in layers)
    numbers = {"layers": len(layers), "attending": attending, "recurrent": recurrent}
    return judge(attending == len(layers) and not recurrent, **numbers)
