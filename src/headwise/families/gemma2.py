"""Gemma 2: a norm on either side of every sublayer, windows in every other layer, scores and logits bent."""

from __future__ import annotations

from typing import Any

from ..blueprint import Block, Dense, Embedding, Head, Model, Norm, Stack
from ..parts.softcap import Softcap
from ..presets import design
from .attention import Rope, alternating, patterns, scaled
from .config import Config
from .registry import decoder, family, tied


@family("gemma2", "Gemma2")
def gemma2(config: Config, task: str) -> Model:
    """The scale of scores follows a number of its own, not the width of a head (2408.00118)."""
    model = config.size("hidden_size", default=2304)
    heads = config.heads("num_attention_heads", default=8)
    layers = config.layers("num_hidden_layers", default=26)
    dim = config.dim(model, heads, "head_dim", default=256)
    rope = Rope(config, config.size("max_position_embeddings", default=8192))
    caps = {key: _cap(config, f"{key}_logit_softcapping", usual) for key, usual in (("attn", 50.0), ("final", 30.0))}
    config.refuse("use_bidirectional_attention", False, "reads ahead, which is not described")

    said: dict[str, Any] = {"model": model, "heads": heads, "kv": config.grouped(heads, default=4), "dim": dim}
    said |= {"bias": "qkvo" if config.flag("attention_bias", False) else ""}
    said |= {"similarity": scaled(config.number("query_pre_attn_scalar", default=256) ** -0.5, dim**-0.5)}
    said |= {"modifiers": (rope.rotary(dim), *((Softcap(caps["attn"]),) if caps["attn"] else ()))}
    norm = Norm("offset", config.number("rms_norm_eps", default=1e-6))
    act = config.activation("hidden_activation", "gelu_pytorch_tanh")
    feed = Dense(config.size("intermediate_size", default=9216), act, "gated")
    each = patterns(config, layers, alternating(layers), config.maybe("sliding_window", default=4096))
    specs = {pattern: rope.said(design(**said, pattern=pattern)) for pattern in set(each)}
    blocks = [Block(specs[pattern], feed=feed, norm=norm, placement="sandwich") for pattern in each]

    tokens = config.size("vocab_size", default=256000)
    stack = Stack.of("decoder", model, blocks, embedding=Embedding(tokens, scale=model**0.5), norm=norm)
    head = Head("tokens", tokens, table=tied(config, "decoder", True), cap=caps["final"])
    return decoder(config, task, stack, head)


def _cap(config: Config, name: str, usual: float) -> float | None:
    return None if config.get([name], usual)[1] is None else config.number(name, default=usual)
