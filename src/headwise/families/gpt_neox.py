"""GPT-NeoX and Pythia: a quarter of a head turns; attention and feed-forward side by side (2204.06745)."""

from __future__ import annotations

from ..blueprint import FeedForwardSpec, ModelSpec, NormSpec
from ..presets import design
from . import trunk
from .attention import RopeConfig
from .config import TransformersConfig
from .registry import register_family


@register_family("gpt_neox", "GPTNeoX")
def read_gpt_neox(config: TransformersConfig, task: str) -> ModelSpec:
    """A norm for each of the two."""
    sizes = trunk.read_decoder_sizes(config, model=6144, heads=64)
    theta, part = config.read_float("rotary_emb_base", default=10_000.0), config.read_float("rotary_pct", default=0.25)
    rope = RopeConfig(config, trunk.read_max_length(config, 2048), theta=theta, rotary_fraction=part)
    bias = "qkvo" if config.read_bool("attention_bias", True) else ""
    spec = design(**sizes.design_args, pattern="causal()", bias=bias, modifiers=(rope.make_rotary(sizes.dim),))
    feed = FeedForwardSpec(config.read_int("intermediate_size", default=24576), config.read_activation("hidden_act", "gelu"), bias="ud")
    norm = NormSpec("layer", config.read_float("layer_norm_eps", default=1e-5))
    placement = "abreast" if config.read_bool("use_parallel_residual", True) else "pre"
    blocks = trunk.make_blocks([rope.attention_with_limits(spec)] * trunk.read_num_layers(config, 44), feed, norm, placement=placement)
    return trunk.build_decoder(config, task, blocks, norm, trunk.DecoderEnds(config.read_int("vocab_size", default=50432)))
