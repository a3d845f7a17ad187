"""SmolLM3: Llama whose every fourth layer turns nothing."""

from __future__ import annotations

from ..blueprint import FeedForwardSpec, ModelSpec, NormSpec
from ..presets import design
from . import trunk
from .attention import FULL_ATTENTION, SLIDING_ATTENTION, RopeConfig, read_layer_types
from .config import TransformersConfig
from .registry import register_family


@register_family("smollm3", "SmolLM3")
def read_smollm3(config: TransformersConfig, task: str) -> ModelSpec:
    """Layers without positions, after 2305.19466."""
    sizes, layers = trunk.read_decoder_sizes(config, model=2048, heads=16, kv=4), trunk.read_num_layers(config, 36)
    rope = RopeConfig(config, trunk.read_max_length(config, 32768), theta=2_000_000.0)
    turned = _read_rope_layers(config, layers)
    window = config.read_optional_int("sliding_window") if config.read_bool("use_sliding_window", False) else None
    usual = [SLIDING_ATTENTION if window and not turn else FULL_ATTENTION for turn in turned]
    types = read_layer_types(config, layers, usual, window or 1)
    bias = "qkvo" if config.read_bool("attention_bias", False) else ""

    def attention(kind: tuple[str, int]) -> trunk.LayerAttention:
        pattern = f"window({window})" if window and kind[0] == SLIDING_ATTENTION else "causal()"
        spec = design(**sizes.design_args, pattern=pattern, bias=bias, modifiers=(rope.make_rotary(sizes.dim),) if kind[1] else ())
        return rope.attention_with_limits(spec) if kind[1] else spec

    act = config.read_activation("hidden_act", "silu")
    wide = "ugd" if config.read_bool("mlp_bias", False) else ""
    feed = FeedForwardSpec(config.read_int("intermediate_size", default=11008), act, "gated", wide)
    norm = NormSpec("rms", config.read_float("rms_norm_eps", default=1e-6))
    blocks = trunk.make_blocks(trunk.make_attentions(zip(types, turned, strict=True), attention), feed, norm)
    return trunk.build_decoder(config, task, blocks, norm, trunk.DecoderEnds(config.read_int("vocab_size", default=128256), True))


def _read_rope_layers(config: TransformersConfig, layers: int) -> list[int]:
    """Of each layer, 1 if it turns queries and keys."""
    every = config.read_int("no_rope_layer_interval", default=4)
    told = config.read_list("no_rope_layers")
    if told is None:
        return [int((layer + 1) % every != 0) for layer in range(layers)]
    if len(told) != layers or any(turn not in (0, 1) for turn in told):
        config.fail(f"no_rope_layers = {told!r} does not say 0 or 1 of {layers} layers", "list one for each")
    return told
