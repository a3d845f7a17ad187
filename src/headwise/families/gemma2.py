"""Gemma 2: a norm on either side of every sublayer, windows in every other layer, scores and logits bent."""

from __future__ import annotations

from typing import Any

from ..blueprint import BlockSpec, FeedForwardSpec, EmbeddingSpec, OutputHeadSpec, ModelSpec, NormSpec, StackSpec
from ..parts.softcap import Softcap
from ..presets import design
from .attention import RopeConfig, alternate_layer_types, read_layer_patterns, make_dot
from .config import TransformersConfig
from .registry import make_decoder_model, register_family, read_tied_stack


@register_family("gemma2", "Gemma2")
def read_gemma2(config: TransformersConfig, task: str) -> ModelSpec:
    """The scale of scores follows a number of its own, not the width of a head (2408.00118)."""
    model = config.read_int("hidden_size", default=2304)
    heads = config.read_num_heads("num_attention_heads", default=8)
    layers = config.read_num_layers("num_hidden_layers", default=26)
    dim = config.resolve_head_dim(model, heads, "head_dim", default=256)
    rope = RopeConfig(config, config.read_int("max_position_embeddings", default=8192))
    caps = {key: _read_softcap(config, f"{key}_logit_softcapping", usual) for key, usual in (("attn", 50.0), ("final", 30.0))}
    config.require_default("use_bidirectional_attention", False, "reads ahead, which is not described")

    said: dict[str, Any] = {"model": model, "heads": heads, "kv": config.read_num_kv_heads(heads, default=4), "dim": dim}
    said |= {"bias": "qkvo" if config.read_bool("attention_bias", False) else ""}
    said |= {"similarity": make_dot(config.read_float("query_pre_attn_scalar", default=256) ** -0.5, dim**-0.5)}
    said |= {"modifiers": (rope.make_rotary(dim), *((Softcap(caps["attn"]),) if caps["attn"] else ()))}
    norm = NormSpec("offset", config.read_float("rms_norm_eps", default=1e-6))
    act = config.read_activation("hidden_activation", "gelu_pytorch_tanh")
    feed = FeedForwardSpec(config.read_int("intermediate_size", default=9216), act, "gated")
    each = read_layer_patterns(config, layers, alternate_layer_types(layers), config.read_optional_int("sliding_window", default=4096))
    specs = {pattern: rope.attention_with_limits(design(**said, pattern=pattern)) for pattern in set(each)}
    blocks = [BlockSpec(specs[pattern], feed=feed, norm=norm, placement="sandwich") for pattern in each]

    tokens = config.read_int("vocab_size", default=256000)
    stack = StackSpec.from_blocks("decoder", model, blocks, embedding=EmbeddingSpec(tokens, scale=model**0.5), norm=norm)
    head = OutputHeadSpec("tokens", tokens, table=read_tied_stack(config, "decoder", True), cap=caps["final"])
    return make_decoder_model(config, task, stack, head)


def _read_softcap(config: TransformersConfig, name: str, usual: float) -> float | None:
    return None if config.find_key([name], usual)[1] is None else config.read_float(name, default=usual)
