"""Phi and Phi-3: a turn of half of a head beside a parallel feed-forward; then Llama with fused maps."""

from __future__ import annotations

from ..blueprint import Dense, Model, Nearly, Norm
from ..presets import design
from . import trunk
from .attention import Rope
from .config import Config
from .registry import family


@family("phi", "Phi")
def phi(config: Config, task: str) -> Model:
    """One norm for attention and feed-forward, biases everywhere (2306.11644)."""
    sizes = trunk.sizes(config, model=2048, heads=32)
    rope = Rope(config, trunk.length(config, 2048), part=0.5)
    spec = design(**sizes.words, pattern="causal()", bias="qkvo", modifiers=(rope.rotary(sizes.dim),))
    attention = rope.said(spec)
    if config.flag("qk_layernorm", False):
        norms = tuple((f"{side}_norm.{name}", sizes.dim) for side in "qk" for name in ("weight", "bias"))
        attention = Nearly(spec, "qk_layernorm takes the mean off every query and key, which QKNorm does not", norms)
    feed = Dense(config.size("intermediate_size", default=8192), config.activation("hidden_act", "gelu_new"), bias="ud")
    norm = Norm("layer", config.number("layer_norm_eps", default=1e-5))
    blocks = trunk.blocks([attention] * trunk.depth(config, 24), feed, norm, placement="parallel")
    ends = trunk.Ends(config.size("vocab_size", default=51200), bias="learned")
    return trunk.decoder(config, task, blocks, norm, ends)


@family("phi3", "Phi3")
def phi3(config: Config, task: str) -> Model:
    """Queries, keys and values lie in one matrix, gates and ups in another (2404.14219)."""
    sizes = trunk.sizes(config, model=3072, heads=32)
    usual = config.size("original_max_position_embeddings", default=4096)
    rope = Rope(config, usual)
    if rope.kind == "yarn":
        rope.kind = "su"  # what the first files called yarn is none (as transformers reads them)
    window = config.maybe("sliding_window")
    pattern = "causal()" if window is None else f"window({window})"
    spec = design(**sizes.words, pattern=pattern, modifiers=(rope.rotary(sizes.dim),))
    act = config.activation("hidden_act", "silu")
    feed = Dense(config.size("intermediate_size", default=8192), act, "gated")
    norm = Norm("rms", config.number("rms_norm_eps", default=1e-5))
    blocks = trunk.blocks([rope.said(spec)] * trunk.depth(config, 32), feed, norm)
    return trunk.decoder(config, task, blocks, norm, trunk.Ends(config.size("vocab_size", default=32064)))
