"""Cohere's Command R: one norm for attention and feed-forward, neighbouring channels turn together."""

from __future__ import annotations

from ..blueprint import Block, Dense, Model, Nearly, Norm
from ..presets import design
from . import trunk
from .attention import FULL, SLIDING, Rope, kinds
from .config import Config
from .registry import family


@family("cohere", "Cohere")
def cohere(config: Config, task: str) -> Model:
    """LayerNorm without a bias; logits are scaled."""
    sizes, rope = trunk.sizes(config, model=8192, heads=64), _rope(config)
    turns = (rope.rotary(sizes.dim, "interleaved"),)
    spec = design(**sizes.words, pattern="causal()", bias=_bias(config), modifiers=turns)
    attention = rope.said(spec)
    if config.flag("use_qk_norm", False):
        wide = (("q_norm.weight", sizes.heads * sizes.dim), ("k_norm.weight", sizes.kv * sizes.dim))
        why = "use_qk_norm takes the mean off queries and keys and has weights for each head, which QKNorm has not"
        attention = Nearly(spec, why, wide)
    return _whole(config, task, [attention] * trunk.depth(config, 40))


@family("cohere2", "Cohere2")
def cohere2(config: Config, task: str) -> Model:
    """Three layers with a window, which turn queries and keys, to one without, which does not (2504.00698)."""
    sizes, rope, layers = trunk.sizes(config, model=8192, heads=64), _rope(config), trunk.depth(config, 40)
    window, every = config.maybe("sliding_window", default=4096), config.size("sliding_window_pattern", default=4)
    usual = [FULL if (layer + 1) % every == 0 else SLIDING for layer in range(layers)]

    def attention(kind: str) -> trunk.Attention:
        if kind == FULL:
            return design(**sizes.words, bias=_bias(config), pattern="causal()")
        turns = (rope.rotary(sizes.dim, "interleaved"),)
        return rope.said(design(**sizes.words, bias=_bias(config), pattern=f"window({window})", modifiers=turns))

    return _whole(config, task, trunk.each(kinds(config, layers, usual, window), attention))


def _rope(config: Config) -> Rope:
    return Rope(config, trunk.length(config, 8192), theta=500_000.0 if config.name == "cohere" else 10_000.0)


def _bias(config: Config) -> str:
    return "qkvo" if config.flag("attention_bias", False) else ""


def _whole(config: Config, task: str, attentions: list[trunk.Attention]) -> Model:
    norm = Norm("unbiased", config.number("layer_norm_eps", default=1e-5))
    act = config.activation("hidden_act", "silu")
    feed = Dense(config.size("intermediate_size", default=22528), act, "gated")
    blocks: list[Block] = trunk.blocks(attentions, feed, norm, placement="parallel")
    said = config.number("logit_scale", default=0.0625)
    ends = trunk.Ends(config.size("vocab_size", default=256000), True, said=said)
    return trunk.decoder(config, task, blocks, norm, ends)
