"""Runs of document 003, sections 4 and 5: attention compared with RNN and CNN, its variants, and
the listing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from statistics import linear_regression

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from .. import costs
from ..attention.attention import Attention
from ..attention.presets import design, from_toml
from ..attention.tensor_attention import attend
from .attention_mechanism import gru_steps
from .catalogue import Outcome, judge, judge_condition
from .matrix_figures import draw_curves
from .measured_layers import (
    complexity_by_layer,
    draw_masks,
    largest_difference,
    make_gru,
    make_layer,
    sample,
    samples,
    table_beside_convolution,
    table_beside_recurrence,
)

__all__ = ["table_beside_convolution", "table_beside_recurrence"]  # runs of this document's tables


def compare_with_recurrence(*, tokens: int = 4096, model: int = 512) -> Outcome:
    """Sequential steps, path lengths and FLOPs of self-attention and a GRU; attention costs less up
    to n = d.
    """
    layers = complexity_by_layer(tokens, model)
    attention = layers["self-attention"]
    gru = layers["GRU"]
    numbers = {
        "attention_serial": attention.serial,
        "gru_serial": gru.serial,
        "attention_path": attention.path,
    }
    numbers |= {"gru_path": gru.path, "attention_flops": attention.flops, "gru_flops": gru.flops}
    numbers |= {"dearer": gru.dearer or 0, "tokens": tokens, "model": model}
    work = 8 * tokens * model**2 + 4 * tokens**2 * model
    is_counted = (attention.flops, gru.flops) == (work, 12 * tokens * model**2)
    has_steps = (attention.serial, attention.path, gru.serial, gru.path) == (1, 1, tokens, tokens)
    return judge_condition(
        attention.flops > gru.flops and is_counted and has_steps,
        gru.dearer != model + 1,
        **numbers,
    )


def stream_of_keys(*, rescale: bool = True) -> Outcome:
    """Keys and values read once, one after the other, with a running maximum: equal to attention in
    any order.

    The states of a GRU depend on the order; attention does not. `rescale` corrects the sums when
    the maximum grows.
    """
    q, k, v = samples((5,), (11, 5), (11, 3))
    whole = attend(q[None], k, v)[0][0]
    streamed = largest_difference(_stream(q, k, v, rescale), whole)
    permuted = largest_difference(_stream(q, k.flip(0), v.flip(0), rescale), whole)
    gru = make_gru(5)
    changed = largest_difference(gru_steps(gru, k)[-1], gru_steps(gru, k.flip(0))[-1])
    random_access = max(streamed, permuted) > 1e-12
    return judge(
        random_access,
        corrected=changed > 1e-3,
        streamed=streamed,
        permuted=permuted,
        gru=changed,
    )


def _stream(q: Tensor, k: Tensor, v: Tensor, rescale: bool) -> Tensor:
    most = -math.inf
    total = 0.0
    mixed = torch.zeros_like(v[0])
    for key, value in zip(k, v, strict=True):
        score = float(q @ key) / math.sqrt(len(q))
        larger = max(most, score)
        factor = math.exp(most - larger) if rescale else 1.0
        weight = math.exp(score - larger)
        total = total * factor + weight
        mixed = mixed * factor + weight * value
        most = larger
    return mixed / total


def inductive_bias(*, pattern: str = "full()") -> Outcome:
    """Attention commutes with every permutation of the tokens; a convolution commutes with shifts
    alone.
    """
    layer = make_layer(design(model=8, heads=2, pattern=pattern))
    x = sample(1, 7, 8)
    kernel = sample(2, 8, 8, 3)
    order = torch.tensor([3, 0, 6, 1, 5, 2, 4])

    def convolve(x: Tensor) -> Tensor:
        return F.conv1d(F.pad(x.T[None], (1, 1), mode="circular"), kernel)[0].T

    attention = largest_difference(layer(x[None, order])[0], layer(x[None])[0, order])
    convolution = largest_difference(convolve(x[order]), convolve(x)[order])
    shifted = largest_difference(convolve(x.roll(2, 0)), convolve(x).roll(2, 0))
    causal = make_layer(design(model=8, heads=2, pattern="causal()"))
    broken = largest_difference(causal(x[None, order])[0], causal(x[None])[0, order])
    return judge(
        attention > 1e-9,
        corrected=max(attention, shifted) < 1e-12 < min(convolution, broken),
        attention=attention,
        convolution=convolution,
        shifted=shifted,
    )


def shared_by_positions(*, pattern: str = "full()") -> Outcome:
    """Parameters for 10 and 10,000 tokens, and the derivative of one output by another token's
    input.
    """
    spec = design(model=16, heads=2, pattern=pattern)
    layer = make_layer(spec)
    x = sample(1, 5, 16)
    jacobian = torch.func.jacrev(lambda x: layer(x[None])[0, 0])(x).detach()
    other = float(jacobian[:, 1:].abs().max())
    parameters = costs.count_parameters(spec)
    return judge(
        other < 1e-12,
        corrected=parameters == 4 * 16**2 and other > 1e-3,
        parameters=parameters,
        other=other,
    )


def receptive_field(*, kernel: int = 3, tokens: int = 4096) -> Outcome:
    """Layers until the first token reaches the last: a convolution, a dilated
    one, and attention.
    """
    layers = complexity_by_layer(tokens, 512, kernel=kernel)
    convolution = layers["convolution"].path
    attention = layers["self-attention"].path
    numbers = {"dilated": layers["dilated convolution"].path, "tokens": tokens}
    is_reached = convolution == -(-(tokens - 1) // (kernel - 1)) > numbers["dilated"]
    holds = is_reached and attention == 1
    return judge(holds, convolution=convolution, attention=attention, **numbers)


def linear_attention(*, spread: float = 1.0) -> Outcome:
    """Linear attention with elu features, compared with softmax attention, a Performer, and the
    blockwise algorithm.

    `spread` scales queries and keys; at 0 all weights are uniform.
    """
    x = sample(1, 1, 9, 16)
    weights = make_layer(design(model=16, heads=2)).state_dict()
    weights |= {name: weights[name] * spread / 2 for name in ("project.q", "project.k")}
    exact = head_outputs("", weights, x)
    linear = largest_difference(head_outputs(ELU, weights, x), exact)
    numbers = {"linear": linear}
    for draws in (64, 16384):
        favor = PERFORMER.format(draws=draws, seed=7)
        numbers[f"performer_{draws}"] = largest_difference(head_outputs(favor, weights, x), exact)
    q, k, v = _project_heads(weights, x)
    errors = []
    for head in range(2):
        streamed = torch.stack([_stream(query, k[head], v[head], True) for query in q[head]])
        errors.append(largest_difference(streamed, exact[0, :, head]))
    numbers["flash"] = max(errors)
    converges = numbers["performer_16384"] < 0.5 * numbers["performer_64"]
    return judge(
        linear < 0.01,
        corrected=linear_error(weights, x) < 1e-12 and converges and numbers["flash"] < 1e-12,
        **numbers,
    )


ELU = 'similarity = {part = "FeatureMap"}\nnormaliser = {part = "SumNormaliser"}'
PERFORMER = """similarity = {{part = "FeatureMap", kind = "favor", draws = {draws}, seed = {seed}}}
normaliser = {{part = "SumNormaliser"}}"""


def head_outputs(lines: str, weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """The head outputs of a layer with 2 heads of 8 channels, these weights and these parts."""
    layer = Attention(from_toml(f"model = 16\nheads = {{q = 2, dim = 8}}\n{lines}")).double()
    layer.load_state_dict(weights, strict=False)  # all but the directions of the features
    return layer.head_outputs(x).detach()


def _project_heads(weights: Mapping[str, Tensor], x: Tensor) -> tuple[Tensor, ...]:
    """Queries, keys and values [heads, tokens, channels] of one text."""
    projected = (x[0] @ weights[f"project.{side}"].T for side in "qkv")
    return tuple(each.unflatten(-1, (2, -1)).transpose(0, 1) for each in projected)


def linear_error(weights: Mapping[str, Tensor], x: Tensor) -> float:
    """Error of linear attention from its formula, phi(q) sum phi(k) v over phi(q) sum phi(k)."""
    q, k, v = _project_heads(weights, x)
    phi_q, phi_k = (F.elu(side) + 1 for side in (q, k))
    total = phi_q @ phi_k.sum(1, keepdim=True).mT
    written = (phi_q @ (phi_k.mT @ v) / total).transpose(0, 1)
    return largest_difference(written, head_outputs(ELU, weights, x)[0])


DRAWS = (32, 64, 128, 256, 512, 1024, 2048, 4096)


def performer_errors(*, samples: int = 16, draws: tuple[int, ...] = DRAWS) -> dict[int, float]:
    """Root mean square of ||o - o_exact|| / ||o_exact|| over samples of FAVOR+ features, for each
    number of them.

    Queries and keys of 32 random tokens have a quarter of the usual scale; at the usual one, means
    of so few features have heavy tails.
    """
    x = sample(1, 1, 32, 16)
    plain = make_layer(design(model=16, heads=2))
    weights = plain.state_dict()
    weights |= {name: weights[name] / 4 for name in ("project.q", "project.k")}
    plain.load_state_dict(weights)
    exact = plain.head_outputs(x).detach()
    errors = {}
    for count in draws:
        squares = []
        for seed in range(samples):
            outputs = head_outputs(PERFORMER.format(draws=count, seed=seed), weights, x)
            squares.append(float((outputs - exact).square().sum() / exact.square().sum()))
        errors[count] = math.sqrt(sum(squares) / samples)
    return errors


def performer_curve(*, draws: tuple[int, ...] = DRAWS, repeated: bool = False) -> Outcome:
    """The slope of the error of a Performer over its number of features, both logarithmic; -1/2 for
    samples.

    `repeated` features are copies of the first ones, which estimate nothing more.
    """
    errors = performer_errors(draws=draws[:1]) if repeated else performer_errors(draws=draws)
    errors |= dict.fromkeys(draws, errors[draws[0]]) if repeated else {}
    slope = linear_regression(
        *(list(map(math.log, one)) for one in (errors, errors.values()))
    ).slope
    numbers = {
        "few": draws[0],
        "error_few": errors[draws[0]],
        "many": draws[-1],
        "error_many": errors[draws[-1]],
    }
    line = {count: errors[draws[0]] * (draws[0] / count) ** 0.5 for count in draws}
    curves = {"measured": errors, "1 / sqrt(m)": line}
    return judge(
        -0.6 < slope < -0.4,
        **numbers,
        slope=slope,
        figure=draw_curves(
            curves, "random features m", "relative error", log="xy", lines={"1 / sqrt(m)": "--"}
        ),
    )


def sparse_pairs(*, pattern: str = "window(64)") -> Outcome:
    """Allowed pairs of a pattern at 1,024 and 2,048 tokens, and the pairs of full attention."""
    numbers = {}
    for tokens in (1024, 2048):
        numbers[f"pairs_{tokens}"] = _required_core(pattern, tokens)
        numbers[f"full_{tokens}"] = _required_core("full()", tokens)
    growth = numbers["pairs_2048"] / numbers["pairs_1024"]
    is_counted = all(
        numbers[f"pairs_{n}"] == 64 * n - 64 * 63 // 2 and numbers[f"full_{n}"] == n**2
        for n in (1024, 2048)
    )
    figure = draw_masks({"full": "full()", "window(8)": "window(8)"}, 32)
    return judge(growth < 2.2 and is_counted, **numbers, growth=growth, figure=figure)


def _required_core(pattern: str, tokens: int) -> int:
    """Allowed pairs: the core's FLOPs over 2 dim + 2 vdim of one head."""
    spec = design(model=8, heads=1, pattern=pattern)
    work = costs.self_attention_work(spec, batch=1, queries=tokens)
    return (costs.required_flops(spec, work) - 2 * 4 * 8 * 8 * tokens) // (4 * 8)


def linear_growth(*, layer: str = "linear") -> Outcome:
    """Growth of the FLOPs of a layer of `headwise cost --complexity` when the length doubles from
    65,536.
    """
    flops = [complexity_by_layer(tokens, 64)[layer].flops for tokens in (65536, 131072)]
    growth = flops[1] / flops[0]
    weights = make_layer(design(model=16, heads=2)).state_dict()
    error = linear_error(weights, sample(1, 1, 9, 16))
    return judge(growth < 2.05 and error < 1e-12, growth=growth, error=error)


def listing_on_visible_rows(*, fill: float = -1e9, largest: float = 1.0) -> Outcome:
    """The listing against hw.attend, where each row has a visible key, and where one has none.

    `largest` scales the queries: scores far below `fill` would show the keys that are masked.
    """
    q, k, v = samples((2, 7, 5), (2, 11, 5), (2, 11, 3))
    q = q * largest
    mask = sample(4, 2, 7, 11) > 0
    mask[:, :, 0] = True
    equal = largest_difference(_listing(q, k, v, mask, fill)[0], attend(q, k, v, mask)[0])
    mask[0, 1] = False
    theirs = _listing(q, k, v, mask, fill)
    ours = attend(q, k, v, mask)[0]
    numbers = {
        "visible": equal,
        "weight": float(theirs[1][0, 1, 0]),
        "ours": float(ours[0, 1].abs().max()),
    }
    holds = equal < 1e-12 and numbers["ours"] == 0
    return judge_condition(holds, abs(numbers["weight"]) < 1e-12, **numbers)


def _listing(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, fill: float) -> tuple[Tensor, Tensor]:
    """Output and weights by the five steps of the listing."""
    scores = torch.matmul(q, k.transpose(-2, -1)) / torch.sqrt(
        torch.tensor(q.size(-1), dtype=q.dtype)
    )
    weights = F.softmax(scores.masked_fill(mask == 0, fill), dim=-1)
    return torch.matmul(weights, v), weights


def masking_constant(*, fill: float = -1e9) -> Outcome:
    """Four faults of a finite masking constant: float16, a fully masked row, lost differences, a
    very low score.
    """
    try:
        torch.zeros(2, dtype=torch.float16).masked_fill(torch.tensor([True, False]), fill)
        half = "no error"
    except RuntimeError:
        half = "error"
    row = torch.zeros(4).masked_fill(torch.ones(4, dtype=torch.bool), fill).softmax(-1)
    ours = attend(torch.zeros(1, 2), torch.zeros(4, 2), torch.ones(4, 2), torch.zeros(1, 4))[0]
    added = torch.tensor([1.0, 30.0]) + fill
    low = torch.tensor([-2e9, 0.0]).masked_fill(torch.tensor([False, True]), fill).softmax(-1)
    numbers = {
        "uniform": float(row[0]),
        "ours": float(ours.abs().max()),
        "kept": float(added[1] - added[0]),
    }
    faultless = half == "no error" and not numbers["uniform"] > 0 and float(low[1]) == 0.0
    corrected = half == "error" and numbers == {"uniform": 0.25, "ours": 0.0, "kept": 0.0}
    return judge(
        faultless,
        corrected=corrected and float(low[1]) == 1.0,
        half=half,
        masked_weight=float(low[1]),
        **numbers,
    )


def scale_tensor(*, as_tensor: bool = True) -> Outcome:
    """Tensor operations of the scaling step with a tensor that is made in each call, and with a
    number.
    """
    scores = sample(1, 7, 7)
    calls = _CountCalls()
    with calls:
        divided = (
            scores / torch.sqrt(torch.tensor(64, dtype=torch.float32))
            if as_tensor
            else scores / math.sqrt(64)
        )
    difference = largest_difference(divided, scores / 8)
    return judge(
        calls.count <= 1,
        corrected=calls.count > 1 and difference == 0,
        operations=calls.count,
        difference=difference,
    )


class _CountCalls(torch.overrides.TorchFunctionMode):
    """Counts the functions of torch that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def separate_value_length(*, keys: int = 11, values: int = 7) -> Outcome:
    """Test if the number of values may differ from the number of keys."""
    message = _refusal(keys, values)
    return judge(
        message == "-",
        corrected=_refusal(keys, keys) == "-" != message,
        keys=keys,
        values=values,
        message=message,
    )


def _refusal(keys: int, values: int) -> str:
    """The error for so many keys and values; "-" without one."""
    try:
        attend(sample(1, 3, 5), sample(2, keys, 5), sample(3, values, 5))
    except ValueError as error:
        return str(error)
    return "-"


def half_precision(*, dtype: torch.dtype = torch.float16) -> Outcome:
    """Error of softmax weights over 4,096 keys when scores and sums are in half precision, and in
    float32.
    """
    scores = sample(1, 64, 4096)
    exact = scores.softmax(-1)
    exponentials = scores.to(dtype).exp()
    total = torch.zeros(64, dtype=dtype)
    for column in exponentials.unbind(-1):
        total = total + column  # rounded to dtype after every key
    low = exponentials / total[:, None]
    single = scores.float().softmax(-1)
    errors = {
        name: float(((w.double() - exact) / exact).abs().max())
        for name, w in (("low", low), ("single", single))
    }
    large = math.isinf(float(torch.tensor(12.0).to(dtype).exp()))
    bound = 10.0 ** math.ceil(
        math.log10(errors["single"])
    )  # the digits of a rounding error differ between machines
    return judge(
        errors["low"] < 100 * errors["single"],
        corrected=errors["low"] > 0.01 and bound < 1e-5 and large,
        low=errors["low"],
        bound=bound,
        overflow=str(large),
    )


def gradient_checkpointing(*, recompute: bool = True) -> Outcome:
    """FLOPs of forward and backward, and numbers kept for the backward pass, of an attention layer
    over 64 tokens with and without gradient checkpointing; and the growth of both at 128.
    """
    layer = Attention(design(model=32, heads=4), backend="dense")
    counts: dict[tuple[int, bool], tuple[int, int]] = {}
    for tokens, again in product((64, 128), (False, recompute)):
        x = sample(1, 1, tokens, 32).float().requires_grad_()
        call = partial(checkpoint, layer, x, use_reentrant=False) if again else partial(layer, x)
        with FlopCounterMode(display=False) as counter:
            y, saved = record_saved_numbers(call)
            y.sum().backward()
        counts[tokens, again] = counter.get_total_flops(), saved
    plain = counts[64, False]
    again = counts[64, recompute]
    ratio = again[0] / plain[0]
    growth = counts[128, recompute][0] / again[0]
    is_counted = plain[0] == 3 * (8 * 64 * 32**2 + 4 * 64**2 * 32)  # backward is twice forward
    return judge(
        ratio <= 1,
        corrected=ratio > 1.2 and again[1] < plain[1] / 4 and growth > 2.2 and is_counted,
        ratio=ratio,
        flops=plain[0],
        saved=plain[1],
        kept=again[1],
        growth=growth,
    )


def log_sum_exp(*, largest: float = 1000.0) -> Outcome:
    """Softmax by exp and sum, and with the maximum subtracted, for scores up to `largest`."""
    scores = torch.tensor([largest, largest - 1, 0.0])
    naive = scores.exp() / scores.exp().sum()
    keys = scores[:, None]
    _, weights = attend(torch.ones(1, 1), keys, keys, scale=1.0, need_weights=True)
    assert weights is not None
    stable = weights[0]
    numbers = {"naive": str(float(naive[0])), "stable": float(stable[0])}
    is_exact = abs(numbers["stable"] - 1 / (1 + math.exp(-1))) < 1e-6
    return judge(bool(naive.isnan().any()) and is_exact, **numbers)


def order_of_attention(*, model: int = 512) -> Outcome:
    """Growth of the FLOPs of self-attention when the length doubles from 64, and from 65,536, at
    this width.
    """
    growth = {}
    is_counted = True
    for tokens in (64, 65536):
        lengths = (tokens, 2 * tokens)
        flops = [
            complexity_by_layer(length, model, heads=1)["self-attention"].flops
            for length in lengths
        ]
        is_counted &= flops == [8 * n * model**2 + 4 * n**2 * model for n in lengths]
        growth[f"from_{tokens}"] = flops[1] / flops[0]
    return judge_condition(
        growth["from_65536"] > 3.8 and is_counted, growth["from_64"] > 3.8, **growth, model=model
    )


def saved_for_backward(*, fused: bool = True) -> Outcome:
    """Numbers that autograd keeps of attention of one head of 16 channels: written out, and by one
    fused call.
    """
    numbers: dict[str, float] = {}
    for name, is_fused in (("written", False), ("fused", fused)):
        counts = [_count_saved_numbers(tokens, is_fused) for tokens in (256, 512)]
        numbers |= {name: counts[1], f"{name}_growth": counts[1] / counts[0]}
    return judge(numbers["fused_growth"] < 2.1 < numbers["written_growth"], **numbers)


def _count_saved_numbers(tokens: int, fused: bool) -> int:
    q, k, v = (sample(seed, 1, 1, tokens, 16).float().requires_grad_() for seed in (1, 2, 3))
    return record_saved_numbers(lambda: attend(q, k, v, need_weights=not fused)[0])[1]


def record_saved_numbers(call: Callable[[], Tensor]) -> tuple[Tensor, int]:
    """The output of a call, and how many numbers autograd keeps for its backward pass."""
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        sizes[tensor.untyped_storage().data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = call()
    return y, sum(sizes.values())  # y keeps the saved tensors; their memory is the key
