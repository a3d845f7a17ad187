"""Whole layers of plain heads and of heads that share keys, at 2k tokens, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...nn.attention import Attention
from ...presets import design
from ..benchmark_case import BenchmarkCase, MissingPeer, RequiredWork, TimedCall, make_peer
from .call_overhead import stacked_weights, without_grad

TITLE = "One layer, 2,048 tokens"
MODEL_WIDTH, NUM_HEADS, NUM_TOKENS = 512, 8, 2048
HEAD_DIM = MODEL_WIDTH // NUM_HEADS
Forward = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class _BenchmarkLayer:
    """A layer of ours, and the same by others, with the same weights."""

    kv: int
    causal: bool

    @property
    def headwise_layer(self) -> Attention:
        """Ours, with weights that follow from the seed."""
        torch.manual_seed(0)
        return Attention(
            design(model=MODEL_WIDTH, heads=NUM_HEADS, kv=self.kv, pattern="causal()" if self.causal else "full()")
        )

    def required_work(self, backward: bool) -> RequiredWork:
        """Products with weights, and of scores and values with those pairs that count; backwards what that takes.

        Of every product backwards two are as large; scores that nobody kept are formed once more (2205.14135).
        """
        maps = 2 * NUM_TOKENS * MODEL_WIDTH * 2 * (MODEL_WIDTH + self.kv * HEAD_DIM)
        core = 4 * NUM_TOKENS * NUM_TOKENS * MODEL_WIDTH // (2 if self.causal else 1)
        return RequiredWork(flops=3 * maps + 7 * core // 2 if backward else maps + core)


def cases(quick: bool) -> Iterator[BenchmarkCase]:
    """An encoder's layer and a decoder's, forward, and forward with backward."""
    encoder, decoder = _BenchmarkLayer(NUM_HEADS, causal=False), _BenchmarkLayer(2, causal=True)
    for backward in (False, True):
        yield _case(
            "8 heads, all pairs",
            encoder,
            backward,
            {
                "SDPA by hand": _bare_sdpa_layer(encoder),
                "nn.MultiheadAttention": _torch_layer(encoder),
                "x-transformers": make_peer("x_transformers", lambda library: _x_transformers_layer(library, encoder)),
                "transformers BERT (sdpa)": make_peer("transformers", lambda library: _bert_layer(encoder)),
            },
        )
        yield _case(
            "8 heads on 2 key heads, causal",
            decoder,
            backward,
            {
                "SDPA by hand": _bare_sdpa_layer(decoder),
                "FlexAttention by hand": _flex_layer(decoder),
                "x-transformers": make_peer("x_transformers", lambda library: _x_transformers_layer(library, decoder)),
                "transformers Llama (sdpa)": make_peer("transformers", lambda library: _llama_layer(decoder)),
            },
        )


def _case(name: str, layer: _BenchmarkLayer, backward: bool, peers: Mapping[str, Any]) -> BenchmarkCase:
    x = torch.randn(1, NUM_TOKENS, MODEL_WIDTH)
    ours = layer.headwise_layer
    how: Callable[[Any], TimedCall] = (lambda run: _backward(run, x)) if backward else (lambda run: _forward(run, x))
    others = {name: run if isinstance(run, MissingPeer) else how(run) for name, run in peers.items()}
    title = f"{name}, {'forward and backward' if backward else 'forward'}"
    return BenchmarkCase(
        title, how((ours, list(ours.parameters()))), others, required_work=layer.required_work(backward)
    )


def _forward(run: tuple[Forward, list[Tensor]], x: Tensor) -> TimedCall:
    return without_grad(run[0], x)


def _backward(run: tuple[Forward, list[Tensor]], x: Tensor) -> TimedCall:
    """What x gets; weights get theirs too, but others lay them out in another way."""
    forward, own = run
    x = x.detach().requires_grad_()
    back = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))

    def both() -> Tensor:
        return torch.autograd.grad(forward(x), [x, *own], back)[0]

    return both


def _copy_weights(layer: _BenchmarkLayer) -> list[Tensor]:
    return [weight.clone().requires_grad_() for weight in stacked_weights(layer.headwise_layer)]


def _bare_sdpa_layer(layer: _BenchmarkLayer) -> tuple[Forward, list[Tensor]]:
    own = _copy_weights(layer)
    return _functional_layer(
        own,
        lambda q, k, v: F.scaled_dot_product_attention(
            q, k, v, is_causal=layer.causal, enable_gqa=layer.kv < NUM_HEADS
        ),
    ), own


def _flex_layer(layer: _BenchmarkLayer) -> tuple[Forward, list[Tensor]]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, NUM_TOKENS, NUM_TOKENS, device="cpu")
    core: Any = torch.compile(flex_attention)
    own = _copy_weights(layer)
    return _functional_layer(own, lambda q, k, v: core(q, k, v, block_mask=mask, enable_gqa=True)), own


def _functional_layer(own: list[Tensor], core: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Forward:
    q_w, k_w, v_w, o_w = own

    def forward(x: Tensor) -> Tensor:
        q, k, v = (F.linear(x, each).view(1, NUM_TOKENS, -1, HEAD_DIM).transpose(1, 2) for each in (q_w, k_w, v_w))
        return F.linear(core(q, k, v).transpose(1, 2).reshape(1, NUM_TOKENS, MODEL_WIDTH), o_w)

    return forward


def _torch_layer(layer: _BenchmarkLayer) -> tuple[Forward, list[Tensor]]:
    q, k, v, o = stacked_weights(layer.headwise_layer)
    theirs = nn.MultiheadAttention(MODEL_WIDTH, NUM_HEADS, bias=False, batch_first=True)
    theirs.load_state_dict({"in_proj_weight": torch.cat([q, k, v]), "out_proj.weight": o})
    return (lambda x: theirs(x, x, x, need_weights=False)[0]), list(theirs.parameters())


def _x_transformers_layer(library: Any, layer: _BenchmarkLayer) -> Any:
    theirs = library.Attention(
        MODEL_WIDTH, dim_head=HEAD_DIM, heads=NUM_HEADS, kv_heads=layer.kv, causal=layer.causal, flash=True
    )
    _load_weights(theirs, ("to_q", "to_k", "to_v", "to_out"), layer)
    with torch.no_grad():  # its neighbours read different key heads, ours the same one
        for weight in (theirs.to_q.weight, theirs.to_out.weight.T):
            heads = weight.reshape(layer.kv, NUM_HEADS // layer.kv, HEAD_DIM, MODEL_WIDTH)
            weight.copy_(heads.transpose(0, 1).reshape(MODEL_WIDTH, MODEL_WIDTH))
    return (lambda x: _first_output(theirs(x))), list(theirs.parameters())


def _bert_layer(layer: _BenchmarkLayer) -> Any:
    from transformers import BertConfig
    from transformers.models.bert.modeling_bert import BertSelfAttention

    config = BertConfig(hidden_size=MODEL_WIDTH, num_attention_heads=NUM_HEADS, attention_probs_dropout_prob=0.0)
    config._attn_implementation = "sdpa"
    theirs = BertSelfAttention(config)
    _load_weights(theirs, ("query", "key", "value"), layer)
    out = (
        stacked_weights(layer.headwise_layer)[3].clone().requires_grad_()
    )  # BERT keeps it in another module, beside a norm
    return (lambda x: F.linear(_first_output(theirs(x)), out)), [*theirs.parameters(), out]


def _llama_layer(layer: _BenchmarkLayer) -> Any:
    """Turned by no angle: without positions it is the same layer."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaAttention

    config = LlamaConfig(hidden_size=MODEL_WIDTH, num_attention_heads=NUM_HEADS, num_key_value_heads=layer.kv)
    config._attn_implementation = "sdpa"
    theirs = LlamaAttention(config, 0)
    _load_weights(theirs, ("q_proj", "k_proj", "v_proj", "o_proj"), layer)
    still = torch.ones(1, NUM_TOKENS, HEAD_DIM), torch.zeros(1, NUM_TOKENS, HEAD_DIM)
    return (lambda x: _first_output(theirs(x, still))), list(theirs.parameters())


def _load_weights(theirs: nn.Module, names: tuple[str, ...], layer: _BenchmarkLayer) -> None:
    """Our weights in the linear maps of these names, without biases."""
    with torch.no_grad():
        for name, weight in zip(names, stacked_weights(layer.headwise_layer), strict=False):
            linear = theirs.get_submodule(name)
            assert isinstance(linear, nn.Linear)
            linear.weight.copy_(weight)
            if linear.bias is not None:
                linear.bias.zero_()


def _first_output(given: Any) -> Tensor:
    return given[0] if isinstance(given, tuple) else given
