"""GPT-2: learned positions, LayerNorm before, biases everywhere, the table of tokens again at the end."""

from __future__ import annotations

from typing import Any

from ..blueprint import Block, Dense, Embedding, Head, Model, Norm, Positions, Stack
from ..parts.dot import Dot
from ..presets import design
from ..spec import AttentionSpec
from .attention import scaled
from .config import Config
from .registry import decoder, family, tied, writes
from .writing import activation_of, parts_of


@family("gpt2", "GPT2", usual="LMHeadModel")
def gpt2(config: Config, task: str) -> Model:
    """Scores may be divided by the depth, counted from 1."""
    model = config.size("n_embd", "hidden_size", default=768)
    heads = config.heads("n_head", "num_attention_heads", default=12)
    layers = config.layers("n_layer", "num_hidden_layers", default=12)
    tokens = config.size("vocab_size", default=50257)
    norm = Norm("layer", config.number("layer_norm_epsilon", default=1e-5))
    act = config.activation("activation_function", "gelu_new")
    feed = Dense(config.maybe("n_inner") or 4 * model, act, bias="ud")
    config.refuse("add_cross_attention", False, "reads a model that this file does not describe")

    usual = config.dim(model, heads) ** -0.5
    scale = usual if config.flag("scale_attn_weights", True) else 1.0
    by_depth = config.flag("scale_attn_by_inverse_layer_idx", False)
    said: dict[str, Any] = {"model": model, "heads": heads, "pattern": "causal()", "bias": "qkvo"}
    scales = [scaled(scale / (depth + 1 if by_depth else 1), usual) for depth in range(layers)]
    blocks = [Block(design(**said, similarity=similarity), feed=feed, norm=norm) for similarity in scales]

    positions = Positions("learned", config.size("n_positions", "max_position_embeddings", default=1024))
    stack = Stack.of("decoder", model, blocks, embedding=Embedding(tokens, positions=positions), norm=norm)
    return decoder(config, task, stack, Head("tokens", tokens, table=tied(config, "decoder", True)))


@writes("gpt2")
def gpt2_keys(model: Model, name: str) -> dict[str, Any]:
    """The sizes of a GPT-2; its scores are divided by the depth where layers scale them differently."""
    stack, spec, feed = parts_of(model, name)
    positions = stack.embedding.positions if stack.embedding else None
    scales = [block.attention.similarity for block in stack.layers if isinstance(block.attention, AttentionSpec)]
    keys: dict[str, Any] = {"n_embd": stack.model, "n_head": spec.heads.q, "n_layer": len(stack.layers)}
    keys |= {"n_inner": feed.hidden, "activation_function": activation_of(feed.activation)}
    keys |= {"vocab_size": stack.embedding.tokens if stack.embedding else 0}
    keys |= {"n_positions": (positions and positions.length) or 1024, "layer_norm_epsilon": stack.layers[0].norm.eps}
    keys |= {"scale_attn_by_inverse_layer_idx": len(set(scales)) > 1, "scale_attn_weights": scales[0] != Dot(scale=1.0)}
    keys |= {"tie_word_embeddings": any(head.table for head in model.heads)}
    return keys | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
