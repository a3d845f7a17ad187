"""Llama and those built like it: RMSNorm before, rotary positions, grouped heads, a gated feed-forward."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..blueprint import Block, Dense, Embedding, Head, Model, Norm, Stack
from ..errors import SpecError
from ..parts.qk_norm import QKNorm
from ..pattern import Window
from ..presets import design
from ..spec import AttentionSpec
from .attention import FULL, SLIDING, Rope, patterns, rope_of
from .config import Config
from .registry import decoder, family, tied, writes
from .writing import activation_of, parts_of


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


def depth(config: Config, usual: int = 32) -> int:
    """How many layers."""
    return config.layers("num_hidden_layers", default=usual)


def biases(config: Config) -> str:
    """Those of the attention."""
    return "qkvo" if config.flag("attention_bias", False) else ""


def windows(config: Config, usual: int = 32) -> list[str]:
    """Qwen's rule: where windows are used at all, the first layers still read everything."""
    window = config.maybe("sliding_window", default=4096) if config.flag("use_sliding_window", False) else None
    first = config.size("max_window_layers", default=28, least=0)
    layers = depth(config, usual)
    types = [SLIDING if window and layer >= first else FULL for layer in range(layers)]
    return patterns(config, layers, types, window)


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


@writes("llama", "mistral", "qwen2", "qwen3")
def llama_keys(model: Model, name: str) -> dict[str, Any]:
    """The sizes of a decoder like Llama, with what its first layer says of all."""
    stack, spec, feed = parts_of(model, name)
    heads = spec.heads
    if name == "llama" and stack.model % heads.q:
        raise SpecError(f"transformers takes no llama of {stack.model} channels on {heads.q} heads; write a mistral")
    keys: dict[str, Any] = {"hidden_size": stack.model, "intermediate_size": feed.hidden}
    keys |= {"num_hidden_layers": len(stack.layers), "num_attention_heads": heads.q, "num_key_value_heads": heads.kv}
    keys |= {"head_dim": heads.dim, "hidden_act": activation_of(feed.activation), "mlp_bias": bool(feed.bias)}
    keys |= {"rms_norm_eps": stack.layers[0].norm.eps, "attention_bias": "project.q_bias" in spec.params()}
    keys |= {"vocab_size": stack.embedding.tokens if stack.embedding else 0, "rope_parameters": rope_of(spec)}
    keys |= {"tie_word_embeddings": any(head.table for head in model.heads)}
    return keys | (_windows(stack, name) if name != "llama" else {})


def _windows(stack: Stack, name: str) -> dict[str, Any]:
    """Which layers read a window, as far as this family can say it."""
    read = [block.attention.pattern for block in stack.layers if isinstance(block.attention, AttentionSpec)]
    sizes = [pattern.keys if isinstance(pattern, Window) else None for pattern in read]
    window = next((size for size in sizes if size), None)
    if name == "mistral":
        return {"sliding_window": window}
    types = [FULL if size is None else SLIDING for size in sizes]
    return {"use_sliding_window": window is not None, "sliding_window": window, "layer_types": types}
