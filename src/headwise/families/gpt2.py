"""GPT-2: learned positions, pre-LayerNorm, biases everywhere, tied token embeddings."""

from __future__ import annotations

from typing import Any

from ..model_spec import (
    BlockSpec,
    EmbeddingSpec,
    FeedForwardSpec,
    ModelSpec,
    NormSpec,
    OutputHeadSpec,
    PositionSpec,
    StackSpec,
)
from ..parts.dot_product import Dot
from ..presets import design
from ..spec.attention_spec import AttentionSpec
from .attention_config import make_dot
from .config_reader import TransformersConfig, make_decoder_model, read_tied_stack, register_family, register_writer
from .config_writer import activation_to_config, get_first_layer
from .weight_names import TensorLocation, WeightNames


@register_family("gpt2", "GPT2", default_task="LMHeadModel")
def read_gpt2(config: TransformersConfig, task: str) -> ModelSpec:
    """Read GPT-2; attention scores may be divided by the layer number, counted from 1."""
    model = config.read_int("n_embd", "hidden_size", default=768)
    heads = config.read_num_heads("n_head", "num_attention_heads", default=12)
    layers = config.read_num_layers("n_layer", "num_hidden_layers", default=12)
    tokens = config.read_int("vocab_size", default=50257)
    norm = NormSpec("layer", config.read_float("layer_norm_epsilon", default=1e-5))
    act = config.read_activation("activation_function", "gelu_new")
    feed = FeedForwardSpec(config.read_optional_int("n_inner") or 4 * model, act, bias="ud")
    config.require_default(
        "add_cross_attention", False, "adds cross-attention to a second model, which is not described"
    )

    default_scale = config.resolve_head_dim(model, heads) ** -0.5
    scale = default_scale if config.read_bool("scale_attn_weights", True) else 1.0
    by_depth = config.read_bool("scale_attn_by_inverse_layer_idx", False)
    design_args: dict[str, Any] = {"model": model, "heads": heads, "pattern": "causal()", "bias": "qkvo"}
    scales = [make_dot(scale / (depth + 1 if by_depth else 1), default_scale) for depth in range(layers)]
    blocks = [BlockSpec(design(**design_args, similarity=similarity), feed=feed, norm=norm) for similarity in scales]

    positions = PositionSpec("learned", config.read_int("n_positions", "max_position_embeddings", default=1024))
    stack = StackSpec.from_blocks(
        "decoder", model, blocks, embedding=EmbeddingSpec(tokens, positions=positions), norm=norm
    )
    return make_decoder_model(
        config, task, stack, OutputHeadSpec("tokens", tokens, table=read_tied_stack(config, "decoder", True))
    )


@register_writer("gpt2")
def write_gpt2_config(model: ModelSpec, name: str) -> dict[str, Any]:
    """Write the config keys of GPT-2; if score scales differ between layers, they are divided by the layer number."""
    stack, spec, feed = get_first_layer(model, name)
    positions = stack.embedding.positions if stack.embedding else None
    scales = [block.attention.similarity for block in stack.layers if isinstance(block.attention, AttentionSpec)]
    keys: dict[str, Any] = {"n_embd": stack.model, "n_head": spec.heads.q, "n_layer": len(stack.layers)}
    keys |= {"n_inner": feed.hidden, "activation_function": activation_to_config(feed.activation)}
    keys |= {"vocab_size": stack.embedding.tokens if stack.embedding else 0}
    keys |= {"n_positions": (positions and positions.length) or 1024, "layer_norm_epsilon": stack.layers[0].norm.eps}
    keys |= {"scale_attn_by_inverse_layer_idx": len(set(scales)) > 1, "scale_attn_weights": scales[0] != Dot(scale=1.0)}
    keys |= {"tie_word_embeddings": any(head.table for head in model.heads)}
    return keys | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)


# --- GPT-2 ---------------------------------------------------------------------------------------------

FUSED_QKV, FUSED_QKV_BIAS = ".h.{layer}.attn.c_attn.weight", ".h.{layer}.attn.c_attn.bias"
QKV_AXIS = {"qkv": 3}

GPT2_WEIGHTS = WeightNames(
    families=("gpt2",),
    prefixes=("transformer", ""),
    locations={
        "decoder.embedding.tokens": ".wte.weight",
        "decoder.embedding.positions": ".wpe.weight",
        "decoder.{layer}.attention_norm.weight": ".h.{layer}.ln_1.weight",
        "decoder.{layer}.attention_norm.bias": ".h.{layer}.ln_1.bias",
        "decoder.{layer}.attention.project.q": TensorLocation(FUSED_QKV, "model (qkv q dim)", {"qkv": 0}, QKV_AXIS),
        "decoder.{layer}.attention.project.k": TensorLocation(FUSED_QKV, "source (qkv kv dim)", {"qkv": 1}, QKV_AXIS),
        "decoder.{layer}.attention.project.v": TensorLocation(FUSED_QKV, "source (qkv kv vdim)", {"qkv": 2}, QKV_AXIS),
        "decoder.{layer}.attention.project.q_bias": TensorLocation(FUSED_QKV_BIAS, "(qkv q dim)", {"qkv": 0}, QKV_AXIS),
        "decoder.{layer}.attention.project.k_bias": TensorLocation(
            FUSED_QKV_BIAS, "(qkv kv dim)", {"qkv": 1}, QKV_AXIS
        ),
        "decoder.{layer}.attention.project.v_bias": TensorLocation(
            FUSED_QKV_BIAS, "(qkv kv vdim)", {"qkv": 2}, QKV_AXIS
        ),
        "decoder.{layer}.attention.output.o": TensorLocation(".h.{layer}.attn.c_proj.weight", "(out vdim) model"),
        "decoder.{layer}.attention.output.o_bias": ".h.{layer}.attn.c_proj.bias",
        "decoder.{layer}.feed_norm.weight": ".h.{layer}.ln_2.weight",
        "decoder.{layer}.feed_norm.bias": ".h.{layer}.ln_2.bias",
        "decoder.{layer}.feed.up": TensorLocation(".h.{layer}.mlp.c_fc.weight", "model hidden"),
        "decoder.{layer}.feed.up_bias": ".h.{layer}.mlp.c_fc.bias",
        "decoder.{layer}.feed.down": TensorLocation(".h.{layer}.mlp.c_proj.weight", "hidden model"),
        "decoder.{layer}.feed.down_bias": ".h.{layer}.mlp.c_proj.bias",
        "decoder.norm.weight": ".ln_f.weight",
        "decoder.norm.bias": ".ln_f.bias",
        "head.tokens.weight": "lm_head.weight",
        "head.classes.weight": "score.weight",
    },
    ignored=(r"(^|\.)attn\.(bias|masked_bias)$",),
)
