"""StarCoder 2: grouped heads, biases everywhere, LayerNorm, a plain feed-forward, perhaps a window (2402.19173)."""

from __future__ import annotations

from ..blueprint import FeedForwardSpec, ModelSpec, NormSpec
from ..presets import design
from . import trunk
from .attention import RopeConfig
from .config import TransformersConfig
from .registry import register_family


@register_family("starcoder2", "Starcoder2")
def read_starcoder2(config: TransformersConfig, task: str) -> ModelSpec:
    """The table of tokens again at the end."""
    sizes = trunk.read_decoder_sizes(config, model=3072, heads=24, kv=2)
    rope = RopeConfig(config, trunk.read_max_length(config, 4096))
    window = config.read_optional_int("sliding_window")
    pattern = "causal()" if window is None else f"window({window})"
    biased = config.read_bool("use_bias", True)
    spec = design(**sizes.design_args, pattern=pattern, bias="qkvo" if biased else "", modifiers=(rope.make_rotary(sizes.dim),))
    act = config.read_activation("hidden_act", "gelu_pytorch_tanh")
    feed = FeedForwardSpec(config.read_int("intermediate_size", default=12288), act, bias="ud" if biased else "")
    norm = NormSpec("layer", config.read_float("norm_epsilon", default=1e-5))
    blocks = trunk.make_blocks([rope.attention_with_limits(spec)] * trunk.read_num_layers(config, 30), feed, norm)
    return trunk.build_decoder(config, task, blocks, norm, trunk.DecoderEnds(config.read_int("vocab_size", default=49152), True))
