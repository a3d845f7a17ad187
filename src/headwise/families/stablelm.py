"""StableLM: LayerNorm, a quarter of a head turns, a gated feed-forward (2402.17834)."""

from __future__ import annotations

from ..blueprint import Dense, Model, Nearly, Norm
from ..presets import design
from . import trunk
from .attention import Rope
from .config import Config
from .registry import family


@family("stablelm", "StableLm")
def stablelm(config: Config, task: str) -> Model:
    """Feed-forwards may stand beside attention, with its norm."""
    sizes = trunk.sizes(config, model=2560, heads=32, kv=32)
    rope = Rope(config, trunk.length(config, 4096), part=0.25)
    bias = "qkv" if config.flag("use_qkv_bias", False) else ""
    spec = design(**sizes.words, pattern="causal()", bias=bias, modifiers=(rope.rotary(sizes.dim),))
    attention = rope.said(spec)
    if config.flag("qk_layernorm", False):
        wide = (("q_norm.weights", sizes.heads * sizes.dim), ("k_norm.weights", sizes.kv * sizes.dim))
        why = "qk_layernorm takes the mean off queries and keys and has weights for each head, which QKNorm has not"
        attention = Nearly(spec, why, wide)
    act = config.activation("hidden_act", "silu")
    feed = Dense(config.size("intermediate_size", default=6912), act, "gated")
    norm = Norm("layer", config.number("layer_norm_eps", default=1e-5))
    placement = "parallel" if config.flag("use_parallel_residual", False) else "pre"
    blocks = trunk.blocks([attention] * trunk.depth(config, 32), feed, norm, placement=placement)
    return trunk.decoder(config, task, blocks, norm, trunk.Ends(config.size("vocab_size", default=50304)))
