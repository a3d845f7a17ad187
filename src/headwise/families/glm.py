"""GLM-4: half of a head turns, in neighbouring pairs; gates and ups lie in one matrix (2406.12793)."""

from __future__ import annotations

from ..blueprint import Dense, Model, Norm
from ..presets import design
from . import trunk
from .attention import Rope
from .config import Config
from .registry import family


@family("glm", "Glm")
def glm(config: Config, task: str) -> Model:
    """Norms before."""
    return _glm(config, task, "pre")


@family("glm4", "Glm4")
def glm4(config: Config, task: str) -> Model:
    """Norms on either side."""
    return _glm(config, task, "sandwich")


def _glm(config: Config, task: str, placement: str) -> Model:
    sizes = trunk.sizes(config, model=4096, heads=32, kv=2, dim=128)
    rope = Rope(config, trunk.length(config, 131072), part=0.5)
    bias = "qkv" if config.flag("attention_bias", True) else ""
    turns = (rope.rotary(sizes.dim, "interleaved"),)
    spec = design(**sizes.words, pattern="causal()", bias=bias, modifiers=turns)
    act = config.activation("hidden_act", "silu")
    feed = Dense(config.size("intermediate_size", default=13696), act, "gated")
    norm = Norm("rms", config.number("rms_norm_eps", default=1.5625e-7))
    blocks = trunk.blocks([rope.said(spec)] * trunk.depth(config, 40), feed, norm, placement=placement)
    return trunk.decoder(config, task, blocks, norm, trunk.Ends(config.size("vocab_size", default=151552)))
