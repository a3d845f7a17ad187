"""Phi, with parallel blocks and RoPE on half of each head, and Phi-3, Llama with fused projections."""

from __future__ import annotations

from ..model_spec import ApproximateAttention, FeedForwardSpec, ModelSpec, NormSpec
from ..presets import design
from . import model_builders
from .attention_config import RopeConfig
from .cohere_stablelm import FILE_LAYER, OWN_LAYER, STABLELM_WEIGHTS as STABLELM
from .config_reader import TransformersConfig, register_family
from .llama import LLAMA_WEIGHTS as LLAMA
from .weight_names import TensorLocation


@register_family("phi", "Phi")
def read_phi(config: TransformersConfig, task: str) -> ModelSpec:
    """Read Phi (2306.11644): parallel blocks with one norm, biases everywhere."""
    sizes = model_builders.read_decoder_sizes(config, model=2048, heads=32)
    rope = RopeConfig(config, model_builders.read_max_length(config, 2048), rotary_fraction=0.5)
    spec = design(**sizes.design_args, pattern="causal()", bias="qkvo", modifiers=(rope.make_rotary(sizes.dim),))
    attention = rope.attention_with_limits(spec)
    if config.read_bool("qk_layernorm", False):
        norms = tuple((f"{side}_norm.{name}", sizes.dim) for side in "qk" for name in ("weight", "bias"))
        attention = ApproximateAttention(
            spec, "qk_layernorm subtracts the mean from queries and keys, which QKNorm does not", norms
        )
    feed = FeedForwardSpec(
        config.read_int("intermediate_size", default=8192), config.read_activation("hidden_act", "gelu_new"), bias="ud"
    )
    norm = NormSpec("layer", config.read_float("layer_norm_eps", default=1e-5))
    blocks = model_builders.make_blocks(
        [attention] * model_builders.read_num_layers(config, 24), feed, norm, placement="parallel"
    )
    ends = model_builders.DecoderEnds(config.read_int("vocab_size", default=51200), head_bias="learned")
    return model_builders.build_decoder(config, task, blocks, norm, ends)


@register_family("phi3", "Phi3")
def read_phi3(config: TransformersConfig, task: str) -> ModelSpec:
    """Read Phi-3 (2404.14219); Q, K and V are stored as one matrix, gate and up projections as another."""
    sizes = model_builders.read_decoder_sizes(config, model=3072, heads=32)
    usual = config.read_int("original_max_position_embeddings", default=4096)
    rope = RopeConfig(config, usual)
    if rope.rope_type == "yarn":
        rope.rope_type = "su"  # early files call longrope "yarn"; transformers reads them in this way too
    window = config.read_optional_int("sliding_window")
    pattern = "causal()" if window is None else f"window({window})"
    spec = design(**sizes.design_args, pattern=pattern, modifiers=(rope.make_rotary(sizes.dim),))
    act = config.read_activation("hidden_act", "silu")
    feed = FeedForwardSpec(config.read_int("intermediate_size", default=8192), act, "gated")
    norm = NormSpec("rms", config.read_float("rms_norm_eps", default=1e-5))
    blocks = model_builders.make_blocks(
        [rope.attention_with_limits(spec)] * model_builders.read_num_layers(config, 32), feed, norm
    )
    return model_builders.build_decoder(
        config, task, blocks, norm, model_builders.DecoderEnds(config.read_int("vocab_size", default=32064))
    )


# --- Phi -----------------------------------------------------------------------------------------------

PHI_NAMES = {
    f"{OWN_LAYER}.attention.output.o": f"{FILE_LAYER}.self_attn.dense.weight",
    f"{OWN_LAYER}.attention.output.o_bias": f"{FILE_LAYER}.self_attn.dense.bias",
    f"{OWN_LAYER}.feed.up": f"{FILE_LAYER}.mlp.fc1.weight",
    f"{OWN_LAYER}.feed.up_bias": f"{FILE_LAYER}.mlp.fc1.bias",
    f"{OWN_LAYER}.feed.down": f"{FILE_LAYER}.mlp.fc2.weight",
    f"{OWN_LAYER}.feed.down_bias": f"{FILE_LAYER}.mlp.fc2.bias",
    "decoder.norm.weight": ".final_layernorm.weight",
    "decoder.norm.bias": ".final_layernorm.bias",
    "head.tokens.bias": "lm_head.bias",
}
PHI_WEIGHTS = STABLELM._replace(families=("phi",), locations={**STABLELM.locations, **PHI_NAMES})

# --- Phi-3 ---------------------------------------------------------------------------------------------

PHI3_QKV, PHI3_PROJECTION = ".layers.{layer}.self_attn.qkv_proj.weight", "decoder.{layer}.attention.project"
FUSED_QKV_LAYOUT, FUSED_GATE_UP_LAYOUT = "([q|kv|v] dim) model", "(side hidden) model"
PHI3_GATE_UP = ".layers.{layer}.mlp.gate_up_proj.weight"

FUSED_GATE_UP_NAMES = {
    "decoder.{layer}.feed.gate": TensorLocation(PHI3_GATE_UP, FUSED_GATE_UP_LAYOUT, {"side": 0}, {"side": 2}),
    "decoder.{layer}.feed.up": TensorLocation(PHI3_GATE_UP, FUSED_GATE_UP_LAYOUT, {"side": 1}, {"side": 2}),
}
PHI3_WEIGHTS = LLAMA._replace(
    families=("phi3",),
    locations={
        **LLAMA.locations,
        **FUSED_GATE_UP_NAMES,
        f"{PHI3_PROJECTION}.q": TensorLocation(PHI3_QKV, FUSED_QKV_LAYOUT, {"q|kv|v": "q"}, own_layout="(q dim) model"),
        f"{PHI3_PROJECTION}.k": TensorLocation(
            PHI3_QKV, FUSED_QKV_LAYOUT, {"q|kv|v": "kv"}, own_layout="(kv dim) model"
        ),
        f"{PHI3_PROJECTION}.v": TensorLocation(PHI3_QKV, FUSED_QKV_LAYOUT, {"q|kv|v": "v"}, own_layout="(v dim) model"),
    },
)
