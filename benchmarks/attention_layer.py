"""One attention layer against layers of other libraries: long rows, small calls, and its q, k and v
projections.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.attention.attention import Attention
from headwise.attention.bound_parts import QKTransforms
from headwise.attention.interfaces.part import REGISTRY
from headwise.attention.masking.sequence_info import SequenceInfo
from headwise.attention.presets import design

from .harness import (
    BenchmarkCase,
    CaseKind,
    MissingPeer,
    RequiredWork,
    TimedCall,
    make_peer,
)

MODEL_WIDTH = 512
NUM_HEADS = 8
NUM_TOKENS = 2048
HEAD_DIM = MODEL_WIDTH // NUM_HEADS
Forward = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class _BenchmarkLayer:
    """Sizes of a layer, from which headwise and every peer build it with the same weights."""

    kv: int
    causal: bool

    @property
    def headwise_layer(self) -> Attention:
        """The layer in headwise, with weights from a fixed seed."""
        torch.manual_seed(0)
        return Attention(
            design(
                model=MODEL_WIDTH,
                heads=NUM_HEADS,
                kv=self.kv,
                pattern="causal()" if self.causal else "full()",
            )
        )

    def required_work(self, backward: bool) -> RequiredWork:
        """Return the FLOPs of the projections and of scores and values on allowed pairs.

        The backward pass has two products of the same size for each; it also recomputes the scores
        (2205.14135).
        """
        maps = 2 * NUM_TOKENS * MODEL_WIDTH * 2 * (MODEL_WIDTH + self.kv * HEAD_DIM)
        core = 4 * NUM_TOKENS * NUM_TOKENS * MODEL_WIDTH // (2 if self.causal else 1)
        return RequiredWork(flops=3 * maps + 7 * core // 2 if backward else maps + core)


def attention_layer_cases(quick: bool) -> Iterator[BenchmarkCase]:
    """Yield a bidirectional layer and a causal one, forward, and forward with backward."""
    encoder = _BenchmarkLayer(NUM_HEADS, causal=False)
    decoder = _BenchmarkLayer(2, causal=True)
    for backward in (False, True):
        yield _layer_case(
            "8 heads, all pairs",
            encoder,
            backward,
            {
                "SDPA by hand": _bare_sdpa_layer(encoder),
                "nn.MultiheadAttention": _torch_layer(encoder),
                "x-transformers": make_peer(
                    "x_transformers", lambda library: _x_transformers_layer(library, encoder)
                ),
                "transformers BERT (sdpa)": make_peer(
                    "transformers", lambda library: _bert_layer(encoder)
                ),
            },
        )
        yield _layer_case(
            "8 heads on 2 key heads, causal",
            decoder,
            backward,
            {
                "SDPA by hand": _bare_sdpa_layer(decoder),
                "FlexAttention by hand": _flex_layer(decoder),
                "x-transformers": make_peer(
                    "x_transformers", lambda library: _x_transformers_layer(library, decoder)
                ),
                "transformers Llama (sdpa)": make_peer(
                    "transformers", lambda library: _llama_layer(decoder)
                ),
            },
        )


def _layer_case(
    name: str, layer: _BenchmarkLayer, backward: bool, peers: Mapping[str, Any]
) -> BenchmarkCase:
    x = torch.randn(1, NUM_TOKENS, MODEL_WIDTH)
    ours = layer.headwise_layer
    make_call: Callable[[Any], TimedCall] = (
        (lambda run: _backward(run, x)) if backward else (lambda run: _forward(run, x))
    )
    others = {
        name: run if isinstance(run, MissingPeer) else make_call(run) for name, run in peers.items()
    }
    title = f"{name}, {'forward and backward' if backward else 'forward'}"
    return BenchmarkCase(
        title,
        make_call((ours, list(ours.parameters()))),
        others,
        required_work=layer.required_work(backward),
    )


def _forward(run: tuple[Forward, list[Tensor]], x: Tensor) -> TimedCall:
    return without_grad(run[0], x)


def _backward(run: tuple[Forward, list[Tensor]], x: Tensor) -> TimedCall:
    """Return a call that gives the gradient of x; gradients of weights are computed, but their
    layouts differ.
    """
    forward, weights = run
    x = x.detach().requires_grad_()
    back = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))

    def both() -> Tensor:
        return torch.autograd.grad(forward(x), [x, *weights], back)[0]

    return both


def _copy_weights(layer: _BenchmarkLayer) -> list[Tensor]:
    return [weight.clone().requires_grad_() for weight in stacked_weights(layer.headwise_layer)]


def _bare_sdpa_layer(layer: _BenchmarkLayer) -> tuple[Forward, list[Tensor]]:
    weights = _copy_weights(layer)
    return _functional_layer(
        weights,
        lambda q, k, v: F.scaled_dot_product_attention(
            q, k, v, is_causal=layer.causal, enable_gqa=layer.kv < NUM_HEADS
        ),
    ), weights


def _flex_layer(layer: _BenchmarkLayer) -> tuple[Forward, list[Tensor]]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask = create_block_mask(
        lambda b, h, i, j: i >= j, None, None, NUM_TOKENS, NUM_TOKENS, device="cpu"
    )
    core: Any = torch.compile(flex_attention)
    weights = _copy_weights(layer)
    return _functional_layer(
        weights, lambda q, k, v: core(q, k, v, block_mask=mask, enable_gqa=True)
    ), weights


def _functional_layer(
    weights: list[Tensor], core: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> Forward:
    q_w, k_w, v_w, o_w = weights

    def forward(x: Tensor) -> Tensor:
        q, k, v = (
            F.linear(x, each).view(1, NUM_TOKENS, -1, HEAD_DIM).transpose(1, 2)
            for each in (q_w, k_w, v_w)
        )
        return F.linear(core(q, k, v).transpose(1, 2).reshape(1, NUM_TOKENS, MODEL_WIDTH), o_w)

    return forward


def _torch_layer(layer: _BenchmarkLayer) -> tuple[Forward, list[Tensor]]:
    q, k, v, o = stacked_weights(layer.headwise_layer)
    theirs = nn.MultiheadAttention(MODEL_WIDTH, NUM_HEADS, bias=False, batch_first=True)
    theirs.load_state_dict({"in_proj_weight": torch.cat([q, k, v]), "out_proj.weight": o})
    return (lambda x: theirs(x, x, x, need_weights=False)[0]), list(theirs.parameters())


def _x_transformers_layer(library: Any, layer: _BenchmarkLayer) -> Any:
    theirs = library.Attention(
        MODEL_WIDTH,
        dim_head=HEAD_DIM,
        heads=NUM_HEADS,
        kv_heads=layer.kv,
        causal=layer.causal,
        flash=True,
    )
    _load_weights(theirs, ("to_q", "to_k", "to_v", "to_out"), layer)
    with (
        torch.no_grad()
    ):  # its consecutive query heads use different key heads, those of headwise share one
        for weight in (theirs.to_q.weight, theirs.to_out.weight.T):
            heads = weight.reshape(layer.kv, NUM_HEADS // layer.kv, HEAD_DIM, MODEL_WIDTH)
            weight.copy_(heads.transpose(0, 1).reshape(MODEL_WIDTH, MODEL_WIDTH))
    return (lambda x: _first_output(theirs(x))), list(theirs.parameters())


def _bert_layer(layer: _BenchmarkLayer) -> Any:
    from transformers import BertConfig
    from transformers.models.bert.modeling_bert import BertSelfAttention

    config = BertConfig(
        hidden_size=MODEL_WIDTH, num_attention_heads=NUM_HEADS, attention_probs_dropout_prob=0.0
    )
    config._attn_implementation = "sdpa"
    theirs = BertSelfAttention(config)
    _load_weights(theirs, ("query", "key", "value"), layer)
    out = (
        stacked_weights(layer.headwise_layer)[3].clone().requires_grad_()
    )  # BERT has W_O in another module
    return (lambda x: F.linear(_first_output(theirs(x)), out)), [*theirs.parameters(), out]


def _llama_layer(layer: _BenchmarkLayer) -> Any:
    """Return the Llama layer with rotary angles of 0, which is the layer without positions."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaAttention

    config = LlamaConfig(
        hidden_size=MODEL_WIDTH, num_attention_heads=NUM_HEADS, num_key_value_heads=layer.kv
    )
    config._attn_implementation = "sdpa"
    theirs = LlamaAttention(config, 0)
    _load_weights(theirs, ("q_proj", "k_proj", "v_proj", "o_proj"), layer)
    no_rotation = torch.ones(1, NUM_TOKENS, HEAD_DIM), torch.zeros(1, NUM_TOKENS, HEAD_DIM)
    return (lambda x: _first_output(theirs(x, no_rotation))), list(theirs.parameters())


def _load_weights(theirs: nn.Module, names: tuple[str, ...], layer: _BenchmarkLayer) -> None:
    """Copy the weights of headwise into the linear layers of these names; set biases to zero."""
    with torch.no_grad():
        for name, weight in zip(names, stacked_weights(layer.headwise_layer), strict=False):
            linear = theirs.get_submodule(name)
            assert isinstance(linear, nn.Linear)
            linear.weight.copy_(weight)
            if linear.bias is not None:
                linear.bias.zero_()


def _first_output(outputs: Any) -> Tensor:
    return outputs[0] if isinstance(outputs, tuple) else outputs


SMALL_WIDTH = 256
NUM_HEADS = 8
SMALL_KV_HEADS = 2
BATCH = 1
CAPACITY = 512
NUM_CACHED = 100
PROMPT_LENGTHS = (1, 16, 64)


def call_overhead_cases(quick: bool) -> Iterator[BenchmarkCase]:
    """Yield a decode step without positions and with RoPE, and calls with a few tokens."""
    yield _decode_step_case("one decoded token, 100 cached", ())
    yield _decode_step_case("one decoded token, 100 cached, rotary", (REGISTRY["Rotary"](),))
    for tokens in PROMPT_LENGTHS:
        yield _short_call_case(tokens)


def _short_call_case(tokens: int) -> BenchmarkCase:
    """Return the case of a multi-head layer on one row of `tokens` tokens."""
    layer = Attention(design(model=SMALL_WIDTH, heads=NUM_HEADS)).eval()
    theirs = nn.MultiheadAttention(SMALL_WIDTH, NUM_HEADS, bias=False, batch_first=True).eval()
    q, k, v, o = stacked_weights(layer)
    theirs.load_state_dict({"in_proj_weight": torch.cat([q, k, v]), "out_proj.weight": o})
    x = torch.randn(BATCH, tokens, SMALL_WIDTH)

    def bare(x: Tensor) -> Tensor:
        heads = [
            F.linear(x, each).view(BATCH, tokens, NUM_HEADS, -1).transpose(1, 2)
            for each in (q, k, v)
        ]
        outputs = F.scaled_dot_product_attention(heads[0], heads[1], heads[2])
        return F.linear(outputs.transpose(1, 2).reshape(BATCH, tokens, -1), o)

    peers = {
        "SDPA by hand": bare,
        "nn.MultiheadAttention": lambda x: theirs(x, x, x, need_weights=False)[0],
    }
    name = (
        f"{tokens} token{'s' if tokens > 1 else ''}, {NUM_HEADS} heads of "
        f"{SMALL_WIDTH // NUM_HEADS}"
    )
    return BenchmarkCase(
        name, without_grad(layer, x), {name: without_grad(run, x) for name, run in peers.items()}
    )


def _decode_step_case(name: str, modifiers: tuple[Any, ...]) -> BenchmarkCase:
    """Return the case of one decode step; the cache grows with every call and is replaced when it
    is full.
    """
    layer = Attention(
        design(
            model=SMALL_WIDTH,
            heads=NUM_HEADS,
            kv=SMALL_KV_HEADS,
            pattern="causal()",
            modifiers=modifiers,
        )
    ).eval()
    x = torch.randn(BATCH, NUM_CACHED + 1, SMALL_WIDTH)
    hand = handwritten_step(layer, bool(modifiers))
    last = x[:, NUM_CACHED:]
    with torch.no_grad():
        cache = layer.cache(batch=BATCH, capacity=CAPACITY)
        layer(x[:, :NUM_CACHED], cache=cache)
        for t in range(NUM_CACHED):
            hand(x[:, t : t + 1], t)
    state: dict[str, Any] = {"cache": cache, "t": NUM_CACHED - 1}

    def ours() -> Tensor:
        if state["cache"].used >= CAPACITY:
            state["cache"] = layer.cache(batch=BATCH, capacity=CAPACITY)
        return layer(last, cache=state["cache"])

    def theirs() -> Tensor:
        state["t"] = (state["t"] + 1) % CAPACITY
        return hand(last, state["t"])

    return BenchmarkCase(name, without_grad(ours), {"by hand": without_grad(theirs)})


def handwritten_step(layer: Attention, rotary: bool) -> Callable[[Tensor, int], Tensor]:
    """Return a decode step written for this layer only: RoPE from a table, a sliced cache, one SDPA
    call.
    """
    q_w, k_w, v_w, o_w = stacked_weights(layer)
    dim = layer.spec.heads.dim
    k_cache = torch.zeros(BATCH, SMALL_KV_HEADS, CAPACITY, dim)
    v_cache = torch.zeros(BATCH, SMALL_KV_HEADS, CAPACITY, dim)
    angle = torch.arange(CAPACITY)[:, None] * 10_000.0 ** (-torch.arange(0, dim, 2) / dim)
    cos = angle.cos()
    sin = angle.sin()

    def rotate(x: Tensor, t: int) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos[t] - b * sin[t], a * sin[t] + b * cos[t]], -1)

    def step(x_B1D: Tensor, t: int) -> Tensor:
        q = F.linear(x_B1D, q_w).view(BATCH, NUM_HEADS, 1, dim)
        k = F.linear(x_B1D, k_w).view(BATCH, SMALL_KV_HEADS, 1, dim)
        v = F.linear(x_B1D, v_w).view(BATCH, SMALL_KV_HEADS, 1, dim)
        if rotary:
            q = rotate(q, t)
            k = rotate(k, t)
        k_cache[:, :, t : t + 1], v_cache[:, :, t : t + 1] = k, v
        rows = q.view(BATCH, SMALL_KV_HEADS, NUM_HEADS // SMALL_KV_HEADS, dim)
        o = F.scaled_dot_product_attention(rows, k_cache[:, :, : t + 1], v_cache[:, :, : t + 1])
        return F.linear(o.reshape(BATCH, 1, NUM_HEADS * dim), o_w)

    return step


def stacked_weights(layer: Attention) -> list[Tensor]:
    """Return W_Q, W_K, W_V and W_O of a layer, each [out, in]."""
    params = dict(layer.named_parameters())
    return [params[name].detach() for name in ("project.q", "project.k", "project.v", "output.o")]


def without_grad(run: Callable[..., Any], *args: Tensor) -> TimedCall:
    """Return a call of `run` without gradients."""

    def call() -> Any:
        with torch.no_grad():
            return run(*args)

    return call


MODEL_WIDTH = 512
NUM_HEADS = 8
NUM_TOKENS = 2048
HEAD_DIM = MODEL_WIDTH // NUM_HEADS


def qkv_projection_cases(quick: bool) -> Iterator[BenchmarkCase]:
    """Yield a long row, one token, and a short row of a small model, forward; the rows also with
    backward.
    """
    for tokens, model in ((NUM_TOKENS, MODEL_WIDTH), (1, MODEL_WIDTH), (64, 128)):
        yield _projection_case(tokens, model, backward=False)
        if tokens > 1:
            yield _projection_case(tokens, model, backward=True)


def _projection_case(tokens: int, model: int, *, backward: bool) -> BenchmarkCase:
    heads = model // HEAD_DIM
    layer = Attention(design(model=model, heads=heads))
    x = torch.randn(1, tokens, model)
    qkv_weights = stacked_weights(layer)[:3]
    runs = {
        "ours": _QKVProjection(list(layer.parameters())[:3], layer),
        "one fused matrix": _QKVProjection([torch.cat(qkv_weights)]),
    }
    runs["three matrices"] = _QKVProjection([weight.clone() for weight in qkv_weights])
    runs[f"{3 * heads} matrices, three per head"] = _QKVProjection(
        [row.clone() for weight in qkv_weights for row in weight.split(HEAD_DIM)]
    )
    make_call = _projection_backward if backward else _projection_forward
    calls = {name: make_call(projection, x) for name, projection in runs.items()}
    sizes = f"{tokens:,} token{'s' * (tokens > 1)}, {heads} heads of {HEAD_DIM}"
    return BenchmarkCase(
        f"{sizes}, {'forward and backward' if backward else 'forward'}", calls.pop("ours"), calls
    )


class _QKVProjection:
    """Computes q, k and v [1, T, heads, dim] from any number of matrices [out, in], or by a layer
    of headwise.
    """

    def __init__(self, matrices: Sequence[Tensor], layer: Attention | None = None) -> None:
        self.matrices = (
            [matrix.detach().requires_grad_() for matrix in matrices] if layer is None else matrices
        )
        self.layer = layer

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        if self.layer is not None:
            project = self.layer.spec.project
            sequence = SequenceInfo.contiguous(0, x.shape[1], x.device)
            transforms = QKTransforms(self.layer.parts, sequence)
            q, entry = self.layer.parts.project_qkv(project, x, transforms)
            return q, *project.expand_kv(entry, transforms, self.layer.weights["project"])
        parts = [F.linear(x, matrix) for matrix in self.matrices]
        if len(parts) == 1:
            parts = list(parts[0].chunk(3, -1))
        if len(parts) > 3:
            each = len(parts) // 3
            stacked = [torch.stack(parts[n * each : (n + 1) * each], 2) for n in range(3)]
            return tuple(stacked)
        return tuple(part.unflatten(-1, (-1, HEAD_DIM)) for part in parts)


def _projection_forward(projection: _QKVProjection, x: Tensor) -> TimedCall:
    def forward() -> tuple[Tensor, ...]:
        with torch.no_grad():
            return projection(x)

    return forward


def _projection_backward(projection: _QKVProjection, x: Tensor) -> TimedCall:
    """Return a call that gives the gradient of x; it computes those of the matrices too, which
    differ in shape.
    """
    x = x.detach().requires_grad_()
    generator = torch.Generator().manual_seed(1)
    back = [
        torch.randn(1, x.shape[1], x.shape[2] // HEAD_DIM, HEAD_DIM, generator=generator)
        for _ in range(3)
    ]

    def both() -> Tensor:
        return torch.autograd.grad(projection(x), [x, *projection.matrices], back)[0]

    return both


KINDS = {
    "attention_layer": CaseKind("One layer, 2,048 tokens", attention_layer_cases),
    "call_overhead": CaseKind("Small calls of one layer", call_overhead_cases),
    "qkv_projection": CaseKind(
        "Queries, keys and values: one product or several", qkv_projection_cases
    ),
}
