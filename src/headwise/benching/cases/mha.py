"""Whole layers of plain heads and of heads that share keys, at 2k tokens, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...module import Attention
from ...presets import design
from ..case import Absent, Case, Need, Run
from ..others import given
from .overhead import quietly, weights

TITLE = "One layer, 2,048 tokens"
MODEL, HEADS, TOKENS = 512, 8, 2048
DIM = MODEL // HEADS
Forward = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class _Layer:
    """A layer of ours, and the same by others, with the same weights."""

    kv: int
    causal: bool

    @property
    def ours(self) -> Attention:
        """Ours, with weights that follow from the seed."""
        torch.manual_seed(0)
        return Attention(design(model=MODEL, heads=HEADS, kv=self.kv, pattern="causal()" if self.causal else "full()"))

    def need(self, backward: bool) -> Need:
        """Products with weights, and of scores and values with those pairs that count; backwards what that takes.

        Of every product backwards two are as large; scores that nobody kept are formed once more (2205.14135).
        """
        maps = 2 * TOKENS * MODEL * 2 * (MODEL + self.kv * DIM)
        core = 4 * TOKENS * TOKENS * MODEL // (2 if self.causal else 1)
        return Need(flops=3 * maps + 7 * core // 2 if backward else maps + core)


def cases(quick: bool) -> Iterator[Case]:
    """An encoder's layer and a decoder's, forward, and forward with backward."""
    encoder, decoder = _Layer(HEADS, causal=False), _Layer(2, causal=True)
    for backward in (False, True):
        yield _case("8 heads, all pairs", encoder, backward, {
            "SDPA by hand": _bare(encoder), "nn.MultiheadAttention": _torch(encoder),
            "x-transformers": given("x_transformers", lambda library: _x_transformers(library, encoder)),
            "transformers BERT (sdpa)": given("transformers", lambda library: _bert(encoder)),
        })  # fmt: skip
        yield _case("8 heads on 2 key heads, causal", decoder, backward, {
            "SDPA by hand": _bare(decoder), "FlexAttention by hand": _flex(decoder),
            "x-transformers": given("x_transformers", lambda library: _x_transformers(library, decoder)),
            "transformers Llama (sdpa)": given("transformers", lambda library: _llama(decoder)),
        })  # fmt: skip


def _case(name: str, layer: _Layer, backward: bool, peers: Mapping[str, Any]) -> Case:
    x = torch.randn(1, TOKENS, MODEL)
    ours = layer.ours
    how: Callable[[Any], Run] = (lambda run: _backward(run, x)) if backward else (lambda run: _forward(run, x))
    others = {name: run if isinstance(run, Absent) else how(run) for name, run in peers.items()}
    title = f"{name}, {'forward and backward' if backward else 'forward'}"
    return Case(title, how((ours, list(ours.parameters()))), others, need=layer.need(backward))


def _forward(run: tuple[Forward, list[Tensor]], x: Tensor) -> Run:
    return quietly(run[0], x)


def _backward(run: tuple[Forward, list[Tensor]], x: Tensor) -> Run:
    """What x gets; weights get theirs too, but others lay them out in another way."""
    forward, own = run
    x = x.detach().requires_grad_()
    back = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))

    def both() -> Tensor:
        return torch.autograd.grad(forward(x), [x, *own], back)[0]

    return both


def _copies(layer: _Layer) -> list[Tensor]:
    return [weight.clone().requires_grad_() for weight in weights(layer.ours)]


def _bare(layer: _Layer) -> tuple[Forward, list[Tensor]]:
    own = _copies(layer)
    return _by_hand(
        own,
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=layer.causal, enable_gqa=layer.kv < HEADS),
    ), own


def _flex(layer: _Layer) -> tuple[Forward, list[Tensor]]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, TOKENS, TOKENS, device="cpu")
    core: Any = torch.compile(flex_attention)
    own = _copies(layer)
    return _by_hand(own, lambda q, k, v: core(q, k, v, block_mask=mask, enable_gqa=True)), own


def _by_hand(own: list[Tensor], core: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Forward:
    q_w, k_w, v_w, o_w = own

    def forward(x: Tensor) -> Tensor:
        q, k, v = (F.linear(x, each).view(1, TOKENS, -1, DIM).transpose(1, 2) for each in (q_w, k_w, v_w))
        return F.linear(core(q, k, v).transpose(1, 2).reshape(1, TOKENS, MODEL), o_w)

    return forward


def _torch(layer: _Layer) -> tuple[Forward, list[Tensor]]:
    q, k, v, o = weights(layer.ours)
    theirs = nn.MultiheadAttention(MODEL, HEADS, bias=False, batch_first=True)
    theirs.load_state_dict({"in_proj_weight": torch.cat([q, k, v]), "out_proj.weight": o})
    return (lambda x: theirs(x, x, x, need_weights=False)[0]), list(theirs.parameters())


def _x_transformers(library: Any, layer: _Layer) -> Any:
    theirs = library.Attention(MODEL, dim_head=DIM, heads=HEADS, kv_heads=layer.kv, causal=layer.causal, flash=True)
    _filled(theirs, ("to_q", "to_k", "to_v", "to_out"), layer)
    with torch.no_grad():  # its neighbours read different key heads, ours the same one
        for weight in (theirs.to_q.weight, theirs.to_out.weight.T):
            heads = weight.reshape(layer.kv, HEADS // layer.kv, DIM, MODEL)
            weight.copy_(heads.transpose(0, 1).reshape(MODEL, MODEL))
    return (lambda x: _first(theirs(x))), list(theirs.parameters())


def _bert(layer: _Layer) -> Any:
    from transformers import BertConfig
    from transformers.models.bert.modeling_bert import BertSelfAttention

    config = BertConfig(hidden_size=MODEL, num_attention_heads=HEADS, attention_probs_dropout_prob=0.0)
    config._attn_implementation = "sdpa"
    theirs = BertSelfAttention(config)
    _filled(theirs, ("query", "key", "value"), layer)
    out = weights(layer.ours)[3].clone().requires_grad_()  # BERT keeps it in another module, beside a norm
    return (lambda x: F.linear(_first(theirs(x)), out)), [*theirs.parameters(), out]


def _llama(layer: _Layer) -> Any:
    """Turned by no angle: without positions it is the same layer."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaAttention

    config = LlamaConfig(hidden_size=MODEL, num_attention_heads=HEADS, num_key_value_heads=layer.kv)
    config._attn_implementation = "sdpa"
    theirs = LlamaAttention(config, 0)
    _filled(theirs, ("q_proj", "k_proj", "v_proj", "o_proj"), layer)
    still = torch.ones(1, TOKENS, DIM), torch.zeros(1, TOKENS, DIM)
    return (lambda x: _first(theirs(x, still))), list(theirs.parameters())


def _filled(theirs: nn.Module, names: tuple[str, ...], layer: _Layer) -> None:
    """Our weights in the linear maps of these names, without biases."""
    with torch.no_grad():
        for name, weight in zip(names, weights(layer.ours), strict=False):
            linear = theirs.get_submodule(name)
            assert isinstance(linear, nn.Linear)
            linear.weight.copy_(weight)
            if linear.bias is not None:
                linear.bias.zero_()


def _first(given: Any) -> Tensor:
    return given[0] if isinstance(given, tuple) else given
