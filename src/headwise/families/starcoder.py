"""StarCoder and StarCoder 2."""

from __future__ import annotations

from ..model_spec import FeedForwardSpec, ModelSpec, NormSpec, PositionSpec
from ..presets import design
from . import model_builders
from .attention_config import RopeConfig, make_dot
from .cohere_stablelm import FILE_LAYER, OWN_LAYER, STABLELM_WEIGHTS as STABLELM
from .config_reader import TransformersConfig, register_family


@register_family("gpt_bigcode", "GPTBigCode")
def read_gpt_bigcode(config: TransformersConfig, task: str) -> ModelSpec:
    """Read StarCoder (2305.06161): GPT-2 with multi-query attention, or multi-head if multi_query is false."""
    model = config.read_int("n_embd", "hidden_size", default=768)
    heads = config.read_num_heads("n_head", "num_attention_heads", default=12)
    usual = config.resolve_head_dim(model, heads) ** -0.5
    config.require_default(
        "add_cross_attention", False, "adds cross-attention to a second model, which is not described"
    )
    kv = 1 if config.read_bool("multi_query", True) else heads
    scale = make_dot(usual if config.read_bool("scale_attn_weights", True) else 1.0, usual)
    spec = design(model=model, heads=heads, kv=kv, pattern="causal()", bias="qkvo", similarity=scale)
    act = config.read_activation("activation_function", "gelu_pytorch_tanh")
    feed = FeedForwardSpec(config.read_optional_int("n_inner") or 4 * model, act, bias="ud")
    norm = NormSpec("layer", config.read_float("layer_norm_epsilon", default=1e-5))
    layers = config.read_num_layers("n_layer", "num_hidden_layers", default=12)
    positions = PositionSpec("learned", config.read_int("n_positions", "max_position_embeddings", default=1024))
    ends = model_builders.DecoderEnds(config.read_int("vocab_size", default=50257), True, positions=positions)
    return model_builders.build_decoder(
        config, task, model_builders.make_blocks([spec] * layers, feed, norm), norm, ends
    )


# --- StarCoder 2 ---------------------------------------------------------------------------------------


@register_family("starcoder2", "Starcoder2")
def read_starcoder2(config: TransformersConfig, task: str) -> ModelSpec:
    """Read StarCoder 2, with tied token embeddings."""
    sizes = model_builders.read_decoder_sizes(config, model=3072, heads=24, kv=2)
    rope = RopeConfig(config, model_builders.read_max_length(config, 4096))
    window = config.read_optional_int("sliding_window")
    pattern = "causal()" if window is None else f"window({window})"
    biased = config.read_bool("use_bias", True)
    spec = design(
        **sizes.design_args, pattern=pattern, bias="qkvo" if biased else "", modifiers=(rope.make_rotary(sizes.dim),)
    )
    act = config.read_activation("hidden_act", "gelu_pytorch_tanh")
    feed = FeedForwardSpec(config.read_int("intermediate_size", default=12288), act, bias="ud" if biased else "")
    norm = NormSpec("layer", config.read_float("norm_epsilon", default=1e-5))
    blocks = model_builders.make_blocks(
        [rope.attention_with_limits(spec)] * model_builders.read_num_layers(config, 30), feed, norm
    )
    return model_builders.build_decoder(
        config, task, blocks, norm, model_builders.DecoderEnds(config.read_int("vocab_size", default=49152), True)
    )


# --- StarCoder 2 ---------------------------------------------------------------------------------------

STARCODER2_FEED_FORWARD = {
    f"{OWN_LAYER}.feed.up": f"{FILE_LAYER}.mlp.c_fc.weight",
    f"{OWN_LAYER}.feed.up_bias": f"{FILE_LAYER}.mlp.c_fc.bias",
    f"{OWN_LAYER}.feed.down": f"{FILE_LAYER}.mlp.c_proj.weight",
    f"{OWN_LAYER}.feed.down_bias": f"{FILE_LAYER}.mlp.c_proj.bias",
}
STARCODER2_WEIGHTS = STABLELM._replace(
    families=("starcoder2",), locations={**STABLELM.locations, **STARCODER2_FEED_FORWARD}
)
