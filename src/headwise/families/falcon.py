"""Falcon: one key-value head for all, or groups; attention and feed-forward side by side (2311.16867)."""

from __future__ import annotations

from ..blueprint import Dense, Model, Nearly, Norm
from ..presets import design
from . import trunk
from .attention import Rope
from .config import Config
from .registry import family


@family("falcon", "Falcon")
def falcon(config: Config, task: str) -> Model:
    """The newer architecture has groups, and a norm for each of the two."""
    model = config.size("n_embed", "hidden_size", default=4544)
    heads = config.heads("num_attention_heads", default=71)
    newer, parallel = config.flag("new_decoder_architecture", False), config.flag("parallel_attn", True)
    biased = config.flag("bias", False)
    said = trunk.Sizes(model, heads, _groups(config, heads), config.dim(model, heads)).words
    said |= {"pattern": "causal()", "bias": "qkvo" if biased else ""}
    rope = Rope(config, trunk.length(config, 2048))
    attention = rope.said(design(**said, modifiers=(rope.rotary(said["dim"]),)))
    if config.flag("alibi", False):
        attention = Nearly(design(**said), "alibi adds 16-bit slopes before scores are scaled, which Alibi does not")

    act = config.activation("activation", "gelu")
    feed = Dense(config.maybe("ffn_hidden_size") or 4 * model, act, bias="ud" if biased else "")
    norm = Norm("layer", config.number("layer_norm_epsilon", default=1e-5))
    norms = config.maybe("num_ln_in_parallel_attn") or (2 if newer else 1)
    placement = "pre" if not parallel else "abreast" if newer and norms == 2 else "parallel"
    blocks = trunk.blocks([attention] * trunk.depth(config, 32), feed, norm, placement=placement)
    return trunk.decoder(config, task, blocks, norm, trunk.Ends(config.size("vocab_size", default=65024), True))


def _groups(config: Config, heads: int) -> int:
    """One for all, or as many as are said; the older architecture without multi_query has one for each."""
    if config.flag("new_decoder_architecture", False):
        kv = config.maybe("num_kv_heads") or heads
    else:
        kv = 1 if config.flag("multi_query", True) else heads
    if heads % kv:
        config.wrong(f"num_attention_heads = {heads} do not share num_kv_heads = {kv} evenly", "give a divisor")
    return kv
