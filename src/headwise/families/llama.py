"""Llama and those built like it: RMSNorm before, rotary positions, grouped heads, a gated feed-forward."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..blueprint import Block, Dense, Embedding, Head, Model, Norm, Stack
from ..parts.qk_norm import QKNorm
from ..presets import design
from .attention import FULL, SLIDING, Rope, patterns
from .config import Config
from .registry import decoder, family, tied


class Usual(NamedTuple):
    """The sizes of a config that does not say its own."""

    tokens: int
    hidden: int
    length: int
    kv: int | None = None
    dim: int | None = None


@family("llama", "Llama")
def llama(config: Config, task: str) -> Model:
    """Biases everywhere or nowhere (2302.13971)."""
    return like_llama(config, task, Usual(32000, 11008, 2048), ["causal()"] * depth(config), bias=biases(config))


@family("mistral", "Mistral")
def mistral(config: Config, task: str) -> Model:
    """Every layer reads one window, or everything where it is null (2310.06825)."""
    window = config.maybe("sliding_window", default=4096)
    pattern = "causal()" if window is None else f"window({window})"
    return like_llama(config, task, Usual(32000, 14336, 131072, kv=8), [pattern] * depth(config))


@family("qwen2", "Qwen2")
def qwen2(config: Config, task: str) -> Model:
    """Biases on queries, keys and values (2407.10671)."""
    return like_llama(config, task, Usual(151936, 22016, 32768, kv=32), windows(config), bias="qkv")


@family("qwen3", "Qwen3")
def qwen3(config: Config, task: str) -> Model:
    """Queries and keys normalised before they turn; heads of 128 unless said (2505.09388)."""
    norms = (QKNorm(eps=config.number("rms_norm_eps", default=1e-6)),)
    usual = Usual(151936, 22016, 32768, kv=32, dim=128)
    return like_llama(config, task, usual, windows(config), bias=biases(config), modifiers=norms)


def depth(config: Config) -> int:
    """How many layers."""
    return config.layers("num_hidden_layers", default=32)


def biases(config: Config) -> str:
    """Those of the attention."""
    return "qkvo" if config.flag("attention_bias", False) else ""


def windows(config: Config) -> list[str]:
    """Qwen's rule: where windows are used at all, the first layers still read everything."""
    window = config.maybe("sliding_window", default=4096) if config.flag("use_sliding_window", False) else None
    first = config.size("max_window_layers", default=28, least=0)
    usual = [SLIDING if window and layer >= first else FULL for layer in range(depth(config))]
    return patterns(config, depth(config), usual, window)


def like_llama(config: Config, task: str, usual: Usual, each: list[str], **said: Any) -> Model:
    """A decoder whose layers have these patterns; `said` are words of `design`, its modifiers act before the turn."""
    model = config.size("hidden_size", default=4096)
    heads = config.heads("num_attention_heads", default=32)
    kv = config.grouped(heads, default=usual.kv)
    dim = config.dim(model, heads, "head_dim", default=usual.dim)
    rope = Rope(config, config.size("max_position_embeddings", default=usual.length))
    said |= {"modifiers": (*said.get("modifiers", ()), rope.rotary(dim))}

    norm = Norm("rms", config.number("rms_norm_eps", default=1e-6))
    hidden = config.size("intermediate_size", default=usual.hidden)
    bias = "ugd" if config.flag("mlp_bias", False) and config.name == "llama" else ""
    feed = Dense(hidden, config.activation("hidden_act", "silu"), "gated", bias)
    specs = {p: rope.said(design(model=model, heads=heads, kv=kv, dim=dim, pattern=p, **said)) for p in set(each)}
    blocks = [Block(specs[pattern], feed=feed, norm=norm) for pattern in each]

    tokens = config.size("vocab_size", default=usual.tokens)
    stack = Stack.of("decoder", model, blocks, embedding=Embedding(tokens), norm=norm)
    return decoder(config, task, stack, Head("tokens", tokens, table=tied(config, "decoder", False)))
