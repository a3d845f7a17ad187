"""gpt-oss: experts, a learned sink in every head, windows in every other layer, YaRN from the start."""

from __future__ import annotations

from typing import Any

from ..blueprint import BlockSpec, FeedForwardSpec, EmbeddingSpec, ExpertsSpec, OutputHeadSpec, ModelSpec, NormSpec, StackSpec
from ..parts.sink_softmax import SinkSoftmax
from ..presets import design
from .attention import RopeConfig, alternate_layer_types, read_layer_patterns
from .config import TransformersConfig
from .registry import make_decoder_model, register_family, read_tied_stack

DEFAULT_YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}


@register_family("gpt_oss", "GptOss")
def read_gpt_oss(config: TransformersConfig, task: str) -> ModelSpec:
    """Gates and ups of an expert are bounded before they meet (2508.10925)."""
    model = config.read_int("hidden_size", default=2880)
    heads = config.read_num_heads("num_attention_heads", default=64)
    layers = config.read_num_layers("num_hidden_layers", default=36)
    dim = config.resolve_head_dim(model, heads, "head_dim", default=64)
    rope = RopeConfig(config, config.read_int("max_position_embeddings", default=131072), theta=150_000.0, default=DEFAULT_YARN)

    said: dict[str, Any] = {"model": model, "heads": heads, "kv": config.read_num_kv_heads(heads, default=8), "dim": dim}
    said |= {"bias": "qkvo" if config.read_bool("attention_bias", True) else "", "modifiers": (rope.make_rotary(dim),)}
    each = read_layer_patterns(config, layers, alternate_layer_types(layers), config.read_optional_int("sliding_window", default=128))
    specs = {p: rope.attention_with_limits(design(**said, normaliser=SinkSoftmax(), pattern=p)) for p in set(each)}
    gain, limit = config.read_float("swiglu_alpha", default=1.702), config.read_float("swiglu_limit", default=7.0)
    config.require_default("hidden_act", "silu", "is not what its experts apply")
    hidden = config.read_int("intermediate_size", default=2880)
    expert = FeedForwardSpec(hidden, f"bounded_silu({gain}, {limit})", "gated", bias="ugd")
    count = config.read_int("num_local_experts", "num_experts", default=128)
    active = config.read_int("num_experts_per_tok", "experts_per_token", default=4, maximum=count)
    feed = ExpertsSpec(expert, count, active, scores="chosen", bias="learned")
    norm = NormSpec("rms", config.read_float("rms_norm_eps", default=1e-5))
    blocks = [BlockSpec(specs[pattern], feed=feed, norm=norm) for pattern in each]

    tokens = config.read_int("vocab_size", default=201088)
    stack = StackSpec.from_blocks("decoder", model, blocks, embedding=EmbeddingSpec(tokens), norm=norm)
    return make_decoder_model(config, task, stack, OutputHeadSpec("tokens", tokens, table=read_tied_stack(config, "decoder", False)))
