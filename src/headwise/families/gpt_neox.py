"""GPT-NeoX and Pythia: a quarter of a head turns; attention and feed-forward side by side (2204.06745)."""

from __future__ import annotations

from ..blueprint import Dense, Model, Norm
from ..presets import design
from . import trunk
from .attention import Rope
from .config import Config
from .registry import family


@family("gpt_neox", "GPTNeoX")
def gpt_neox(config: Config, task: str) -> Model:
    """A norm for each of the two."""
    sizes = trunk.sizes(config, model=6144, heads=64)
    theta, part = config.number("rotary_emb_base", default=10_000.0), config.number("rotary_pct", default=0.25)
    rope = Rope(config, trunk.length(config, 2048), theta=theta, part=part)
    bias = "qkvo" if config.flag("attention_bias", True) else ""
    spec = design(**sizes.words, pattern="causal()", bias=bias, modifiers=(rope.rotary(sizes.dim),))
    feed = Dense(config.size("intermediate_size", default=24576), config.activation("hidden_act", "gelu"), bias="ud")
    norm = Norm("layer", config.number("layer_norm_eps", default=1e-5))
    placement = "abreast" if config.flag("use_parallel_residual", True) else "pre"
    blocks = trunk.blocks([rope.said(spec)] * trunk.depth(config, 44), feed, norm, placement=placement)
    return trunk.decoder(config, task, blocks, norm, trunk.Ends(config.size("vocab_size", default=50432)))
