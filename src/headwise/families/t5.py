"""T5: a table of relative positions that all layers of a stack share, no scale, no biases, RMSNorm before."""

from __future__ import annotations

from typing import Any

from ..blueprint import Block, Dense, Embedding, Head, Model, Norm, Stack
from ..parts.dot import Dot
from ..parts.t5_bias import T5Bias
from ..presets import design
from .config import ACTIVATIONS, Config
from .registry import choose, family, labels


@family("t5", "T5", usual="ForConditionalGeneration")
def t5(config: Config, task: str) -> Model:
    """One table of tokens everywhere; v1.1 has gated feed-forwards and does not scale what its head reads."""
    model = config.size("d_model", "hidden_size", default=512)
    tokens = config.size("vocab_size", default=32128)
    layers = config.layers("num_layers", "num_hidden_layers", default=6)
    deep = config.maybe("num_decoder_layers", most=10_000) or layers
    norm = Norm("rms", config.number("layer_norm_epsilon", default=1e-6))
    buckets = config.size("relative_attention_num_buckets", default=32, most=1 << 16)
    reach = config.size("relative_attention_max_distance", default=128)
    heads = config.heads("num_heads", "num_attention_heads", default=8)
    said: dict[str, Any] = {"model": model, "heads": heads, "dim": config.width("d_kv", "head_dim", default=64)}
    said |= {"similarity": Dot(scale=1.0)}

    both = design(**said, modifiers=(T5Bias(buckets, reach, "both"),))
    back = design(**said, modifiers=(T5Bias(buckets, reach, "back"),), pattern="causal()")
    feed = _feed(config)
    encoder = [Block(both, feed=feed, norm=norm)] * layers
    decoder = [Block(back, design(**said), feed, norm)] * deep
    stacks = (
        Stack.of("encoder", model, encoder, embedding=Embedding(tokens), norm=norm),
        Stack.of("decoder", model, decoder, embedding=Embedding(tokens, table="encoder"), norm=norm),
    )
    # What older files say of the table decides whether it is scaled; transformers 5 writes that as a key of its own.
    tied = config.flag("tie_word_embeddings", True)
    scale = model**-0.5 if config.flag("scale_decoder_outputs", tied) else 1.0
    classes = Head("classes", labels(config), bias="learned")
    ways = {
        "ForConditionalGeneration": [Head("tokens", tokens, table="encoder", scale=scale)],
        "WithLMHeadModel": [Head("tokens", tokens, table="encoder", scale=scale)],
        "Model": [],
        "EncoderModel": [],
        "ForTokenClassification": [classes],
    }
    kind, there = ("encoder", 1) if task in ("EncoderModel", "ForTokenClassification") else ("encoder-decoder", 2)
    return Model("t5", kind, stacks[:there], choose(config, task, ways), tuple(config.notes))


def _feed(config: Config) -> Dense:
    """ "relu", or "gated-gelu", whose gelu is the one by tanh."""
    told = {name: ("plain", ours) for name, ours in ACTIVATIONS.items()}
    told |= {f"gated-{name}": ("gated", ours) for name, ours in ACTIVATIONS.items()}
    told["gated-gelu"] = ("gated", "gelu_tanh")
    form, act = told[config.word("feed_forward_proj", "relu", told)]
    return Dense(config.size("d_ff", default=2048), act, form)
