"""Llama and those built like it: RMSNorm before, rotary positions, grouped heads, a gated feed-forward."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..blueprint import BlockSpec, FeedForwardSpec, EmbeddingSpec, OutputHeadSpec, ModelSpec, NormSpec, StackSpec
from ..errors import SpecError
from ..parts.qk_norm import QKNorm
from ..pattern import Window
from ..presets import design
from ..spec import AttentionSpec
from .attention import FULL_ATTENTION, SLIDING_ATTENTION, RopeConfig, read_layer_patterns, rope_to_config
from .config import TransformersConfig
from .registry import make_decoder_model, register_family, read_tied_stack, register_writer
from .writing import activation_to_config, get_first_layer


class LlamaDefaults(NamedTuple):
    """The sizes of a config that does not say its own."""

    vocab_size: int
    hidden: int
    length: int
    kv: int | None = None
    dim: int | None = None


@register_family("llama", "Llama")
def read_llama(config: TransformersConfig, task: str) -> ModelSpec:
    """Biases everywhere or nowhere (2302.13971)."""
    return build_llama_like(config, task, LlamaDefaults(32000, 11008, 2048), ["causal()"] * read_llama_depth(config), bias=read_attention_bias(config))


@register_family("mistral", "Mistral")
def read_mistral(config: TransformersConfig, task: str) -> ModelSpec:
    """Every layer reads one window, or everything where it is null (2310.06825)."""
    window = config.read_optional_int("sliding_window", default=4096)
    pattern = "causal()" if window is None else f"window({window})"
    return build_llama_like(config, task, LlamaDefaults(32000, 14336, 131072, kv=8), [pattern] * read_llama_depth(config))


@register_family("qwen2", "Qwen2")
def read_qwen2(config: TransformersConfig, task: str) -> ModelSpec:
    """Biases on queries, keys and values (2407.10671)."""
    return build_llama_like(config, task, LlamaDefaults(151936, 22016, 32768, kv=32), read_qwen_patterns(config), bias="qkv")


@register_family("qwen3", "Qwen3")
def read_qwen3(config: TransformersConfig, task: str) -> ModelSpec:
    """Queries and keys normalised before they turn; heads of 128 unless said (2505.09388)."""
    norms = (QKNorm(eps=config.read_float("rms_norm_eps", default=1e-6)),)
    usual = LlamaDefaults(151936, 22016, 32768, kv=32, dim=128)
    return build_llama_like(config, task, usual, read_qwen_patterns(config), bias=read_attention_bias(config), modifiers=norms)


def read_llama_depth(config: TransformersConfig, default: int = 32) -> int:
    """How many layers."""
    return config.read_num_layers("num_hidden_layers", default=default)


def read_attention_bias(config: TransformersConfig) -> str:
    """Those of the attention."""
    return "qkvo" if config.read_bool("attention_bias", False) else ""


def read_qwen_patterns(config: TransformersConfig, default: int = 32) -> list[str]:
    """Qwen's rule: where windows are used at all, the first layers still read everything."""
    window = config.read_optional_int("sliding_window", default=4096) if config.read_bool("use_sliding_window", False) else None
    first = config.read_int("max_window_layers", default=28, minimum=0)
    layers = read_llama_depth(config, default)
    types = [SLIDING_ATTENTION if window and layer >= first else FULL_ATTENTION for layer in range(layers)]
    return read_layer_patterns(config, layers, types, window)


def build_llama_like(config: TransformersConfig, task: str, defaults: LlamaDefaults, patterns: list[str], **said: Any) -> ModelSpec:
    """A decoder whose layers have these patterns; `said` are words of `design`, its modifiers act before the turn."""
    model = config.read_int("hidden_size", default=4096)
    heads = config.read_num_heads("num_attention_heads", default=32)
    kv = config.read_num_kv_heads(heads, default=defaults.kv)
    dim = config.resolve_head_dim(model, heads, "head_dim", default=defaults.dim)
    rope = RopeConfig(config, config.read_int("max_position_embeddings", default=defaults.length))
    said |= {"modifiers": (*said.get("modifiers", ()), rope.make_rotary(dim))}

    norm = NormSpec("rms", config.read_float("rms_norm_eps", default=1e-6))
    hidden = config.read_int("intermediate_size", default=defaults.hidden)
    bias = "ugd" if config.read_bool("mlp_bias", False) and config.family_name == "llama" else ""
    feed = FeedForwardSpec(hidden, config.read_activation("hidden_act", "silu"), "gated", bias)
    specs = {p: rope.attention_with_limits(design(model=model, heads=heads, kv=kv, dim=dim, pattern=p, **said)) for p in set(patterns)}
    blocks = [BlockSpec(specs[pattern], feed=feed, norm=norm) for pattern in patterns]

    tokens = config.read_int("vocab_size", default=defaults.vocab_size)
    stack = StackSpec.from_blocks("decoder", model, blocks, embedding=EmbeddingSpec(tokens), norm=norm)
    return make_decoder_model(config, task, stack, OutputHeadSpec("tokens", tokens, table=read_tied_stack(config, "decoder", False)))


@register_writer("llama", "mistral", "qwen2", "qwen3")
def write_llama_config(model: ModelSpec, name: str) -> dict[str, Any]:
    """The sizes of a decoder like Llama, with what its first layer says of all."""
    stack, spec, feed = get_first_layer(model, name)
    heads = spec.heads
    if name == "llama" and stack.model % heads.q:
        raise SpecError(f"transformers takes no llama of {stack.model} channels on {heads.q} heads; write a mistral")
    keys: dict[str, Any] = {"hidden_size": stack.model, "intermediate_size": feed.hidden}
    keys |= {"num_hidden_layers": len(stack.layers), "num_attention_heads": heads.q, "num_key_value_heads": heads.kv}
    keys |= {"head_dim": heads.dim, "hidden_act": activation_to_config(feed.activation), "mlp_bias": bool(feed.bias)}
    keys |= {"rms_norm_eps": stack.layers[0].norm.eps, "attention_bias": "project.q_bias" in spec.params()}
    keys |= {"vocab_size": stack.embedding.tokens if stack.embedding else 0, "rope_parameters": rope_to_config(spec)}
    keys |= {"tie_word_embeddings": any(head.table for head in model.heads)}
    return keys | (_write_windows(stack, name) if name != "llama" else {})


def _write_windows(stack: StackSpec, name: str) -> dict[str, Any]:
    """Which layers read a window, as far as this family can say it."""
    read = [block.attention.pattern for block in stack.layers if isinstance(block.attention, AttentionSpec)]
    sizes = [pattern.keys if isinstance(pattern, Window) else None for pattern in read]
    window = next((size for size in sizes if size), None)
    if name == "mistral":
        return {"sliding_window": window}
    types = [FULL_ATTENTION if size is None else SLIDING_ATTENTION for size in sizes]
    return {"use_sliding_window": window is not None, "sliding_window": window, "layer_types": types}
