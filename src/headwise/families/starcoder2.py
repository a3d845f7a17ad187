"""StarCoder 2: grouped heads, biases everywhere, LayerNorm, a plain feed-forward, perhaps a window (2402.19173)."""

from __future__ import annotations

from ..blueprint import Dense, Model, Norm
from ..presets import design
from . import trunk
from .attention import Rope
from .config import Config
from .registry import family


@family("starcoder2", "Starcoder2")
def starcoder2(config: Config, task: str) -> Model:
    """The table of tokens again at the end."""
    sizes = trunk.sizes(config, model=3072, heads=24, kv=2)
    rope = Rope(config, trunk.length(config, 4096))
    window = config.maybe("sliding_window")
    pattern = "causal()" if window is None else f"window({window})"
    biased = config.flag("use_bias", True)
    spec = design(**sizes.words, pattern=pattern, bias="qkvo" if biased else "", modifiers=(rope.rotary(sizes.dim),))
    act = config.activation("hidden_act", "gelu_pytorch_tanh")
    feed = Dense(config.size("intermediate_size", default=12288), act, bias="ud" if biased else "")
    norm = Norm("layer", config.number("norm_epsilon", default=1e-5))
    blocks = trunk.blocks([rope.said(spec)] * trunk.depth(config, 30), feed, norm)
    return trunk.decoder(config, task, blocks, norm, trunk.Ends(config.size("vocab_size", default=49152), True))
