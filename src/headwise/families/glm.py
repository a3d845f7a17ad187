"""GLM-4: interleaved RoPE on half of each head; gate and up projections in one matrix (2406.12793)."""

from __future__ import annotations

from ..model_spec import FeedForwardSpec, ModelSpec, NormSpec
from ..presets import design
from . import model_builders
from .attention_config import RopeConfig
from .config_reader import TransformersConfig, register_family
from .llama import LLAMA_WEIGHTS as LLAMA
from .phi import FUSED_GATE_UP_NAMES


@register_family("glm", "Glm")
def read_glm(config: TransformersConfig, task: str) -> ModelSpec:
    """Read GLM-4 with pre-norm layers."""
    return _build_glm(config, task, "pre")


@register_family("glm4", "Glm4")
def read_glm4(config: TransformersConfig, task: str) -> ModelSpec:
    """Read GLM-4-0414, with norms before and after every sublayer."""
    return _build_glm(config, task, "sandwich")


def _build_glm(config: TransformersConfig, task: str, placement: str) -> ModelSpec:
    sizes = model_builders.read_decoder_sizes(config, model=4096, heads=32, kv=2, dim=128)
    rope = RopeConfig(config, model_builders.read_max_length(config, 131072), rotary_fraction=0.5)
    bias = "qkv" if config.read_bool("attention_bias", True) else ""
    turns = (rope.make_rotary(sizes.dim, "interleaved"),)
    spec = design(**sizes.design_args, pattern="causal()", bias=bias, modifiers=turns)
    act = config.read_activation("hidden_act", "silu")
    feed = FeedForwardSpec(config.read_int("intermediate_size", default=13696), act, "gated")
    norm = NormSpec("rms", config.read_float("rms_norm_eps", default=1.5625e-7))
    blocks = model_builders.make_blocks(
        [rope.attention_with_limits(spec)] * model_builders.read_num_layers(config, 40), feed, norm, placement=placement
    )
    return model_builders.build_decoder(
        config, task, blocks, norm, model_builders.DecoderEnds(config.read_int("vocab_size", default=151552))
    )


# --- GLM-4 ---------------------------------------------------------------------------------------------

GLM_WEIGHTS = LLAMA._replace(families=("glm",), locations={**LLAMA.locations, **FUSED_GATE_UP_NAMES})
