"""GPT-2: learned positions, LayerNorm before, biases everywhere, the table of tokens again at the end."""

from __future__ import annotations

from typing import Any

from ..blueprint import BlockSpec, FeedForwardSpec, EmbeddingSpec, OutputHeadSpec, ModelSpec, NormSpec, PositionSpec, StackSpec
from ..parts.dot import Dot
from ..presets import design
from ..spec import AttentionSpec
from .attention import make_dot
from .config import TransformersConfig
from .registry import make_decoder_model, register_family, read_tied_stack, register_writer
from .writing import activation_to_config, get_first_layer


@register_family("gpt2", "GPT2", default_task="LMHeadModel")
def read_gpt2(config: TransformersConfig, task: str) -> ModelSpec:
    """Scores may be divided by the depth, counted from 1."""
    model = config.read_int("n_embd", "hidden_size", default=768)
    heads = config.read_num_heads("n_head", "num_attention_heads", default=12)
    layers = config.read_num_layers("n_layer", "num_hidden_layers", default=12)
    tokens = config.read_int("vocab_size", default=50257)
    norm = NormSpec("layer", config.read_float("layer_norm_epsilon", default=1e-5))
    act = config.read_activation("activation_function", "gelu_new")
    feed = FeedForwardSpec(config.read_optional_int("n_inner") or 4 * model, act, bias="ud")
    config.require_default("add_cross_attention", False, "reads a model that this file does not describe")

    usual = config.resolve_head_dim(model, heads) ** -0.5
    scale = usual if config.read_bool("scale_attn_weights", True) else 1.0
    by_depth = config.read_bool("scale_attn_by_inverse_layer_idx", False)
    said: dict[str, Any] = {"model": model, "heads": heads, "pattern": "causal()", "bias": "qkvo"}
    scales = [make_dot(scale / (depth + 1 if by_depth else 1), usual) for depth in range(layers)]
    blocks = [BlockSpec(design(**said, similarity=similarity), feed=feed, norm=norm) for similarity in scales]

    positions = PositionSpec("learned", config.read_int("n_positions", "max_position_embeddings", default=1024))
    stack = StackSpec.from_blocks("decoder", model, blocks, embedding=EmbeddingSpec(tokens, positions=positions), norm=norm)
    return make_decoder_model(config, task, stack, OutputHeadSpec("tokens", tokens, table=read_tied_stack(config, "decoder", True)))


@register_writer("gpt2")
def write_gpt2_config(model: ModelSpec, name: str) -> dict[str, Any]:
    """The sizes of a GPT-2; its scores are divided by the depth where layers scale them differently."""
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
