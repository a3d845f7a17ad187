"""DeepSeek-V2 and V3: multi-head latent attention (MLA), and experts after the
first dense layers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from ..model_spec import (
    ApproximateAttention,
    BlockSpec,
    EmbeddingSpec,
    ExpertsSpec,
    FeedForwardSpec,
    ModelSpec,
    NormSpec,
    OutputHeadSpec,
    StackSpec,
)
from ..parts.latent_attention import Latent
from ..presets import design
from ..spec.attention_spec import AttentionSpec
from .attention_config import RopeConfig, make_dot
from .config_reader import TransformersConfig, make_decoder_model, read_tied_stack, register_family
from .llama import LLAMA_WEIGHTS as LLAMA
from .weight_names import TensorLocation


class DeepseekDefaults(NamedTuple):
    """Defaults for keys missing in a config."""

    vocab_size: int
    model: int
    hidden: int
    layers: int
    heads: int
    length: int
    dense: int
    experts: int
    active: int
    expert: int
    shared: int
    groups: int
    active_groups: int


V2_EXPERTS = {
    "dense": 0,
    "experts": 64,
    "active": 6,
    "expert": 1407,
    "shared": 2,
    "groups": 1,
    "active_groups": 1,
}
V3_EXPERTS = {
    "dense": 3,
    "experts": 256,
    "active": 8,
    "expert": 2048,
    "shared": 1,
    "groups": 8,
    "active_groups": 4,
}
V2_DEFAULTS = DeepseekDefaults(102400, 4096, 11008, 32, 32, 2048, **V2_EXPERTS)
V3_DEFAULTS = DeepseekDefaults(129280, 7168, 18432, 61, 128, 4096, **V3_EXPERTS)
V2_METHODS = ("greedy", "group_limited_greedy")
UNREAD_ROUTING = "is not what transformers computes, which does not read the key"


@register_family("deepseek_v2", "DeepseekV2")
def read_deepseek_v2(config: TransformersConfig, task: str) -> ModelSpec:
    """Read DeepSeek-V2 (2405.04434); a softmax chooses the experts, in the larger sizes within
    groups.
    """
    config.require_default("norm_topk_prob", False, UNREAD_ROUTING)
    config.require_default("scoring_func", "softmax", UNREAD_ROUTING)
    routing: dict[str, Any] = {"scale": config.read_float("routed_scaling_factor", default=1.0)}
    if config.read_choice("topk_method", "greedy", V2_METHODS) == "group_limited_greedy":
        routing |= _read_groups(config, V2_DEFAULTS)
    return _build_deepseek(config, task, V2_DEFAULTS, "interleaved", routing)


@register_family("deepseek_v3", "DeepseekV3")
def read_deepseek_v3(config: TransformersConfig, task: str) -> ModelSpec:
    """Read DeepSeek-V3 (2412.19437); sigmoids with a load-balancing bias choose the experts within
    groups.
    """
    config.require_default("topk_method", "noaux_tc", UNREAD_ROUTING)
    config.require_default("scoring_func", "sigmoid", UNREAD_ROUTING)
    is_normalised = config.read_bool("norm_topk_prob", True)
    routing: dict[str, Any] = {
        "scores": "sigmoid" if is_normalised else "sigmoid_sum",
        "bias": "constant",
    }
    routing |= {
        "scale": config.read_float("routed_scaling_factor", default=2.5),
        "group_score": "top2",
    }
    routing |= _read_groups(config, V3_DEFAULTS)
    pairs = "interleaved" if config.read_bool("rope_interleave", True) else "half"
    if config.read_int("num_nextn_predict_layers", "num_mtp_layers", default=0, minimum=0):
        config.add_note(
            "num_nextn_predict_layers: the multi-token prediction layers are left out, as in "
            "transformers"
        )
    return _build_deepseek(config, task, V3_DEFAULTS, pairs, routing)


def _read_groups(config: TransformersConfig, usual: DeepseekDefaults) -> dict[str, int]:
    """Return the number of groups of experts, and of those that each token may use."""
    groups = config.read_int("n_group", default=usual.groups)
    return {
        "groups": groups,
        "active_groups": config.read_int("topk_group", default=usual.active_groups),
    }


def _build_deepseek(
    config: TransformersConfig,
    task: str,
    usual: DeepseekDefaults,
    pairs: str,
    routing: dict[str, Any],
) -> ModelSpec:
    model = config.read_int("hidden_size", default=usual.model)
    layers = config.read_num_layers("num_hidden_layers", default=usual.layers)
    dense = config.read_int("first_k_dense_replace", default=usual.dense, minimum=0)
    config.require_default("moe_layer_freq", 1, "replaces expert layers that transformers keeps")
    attention = _make_latent_attention(config, model, usual, pairs)

    norm = NormSpec("rms", config.read_float("rms_norm_eps", default=1e-6))
    act = config.read_activation("hidden_act", "silu")
    bias = (
        "ugd" if config.family_name == "deepseek_v2" and config.read_bool("mlp_bias", False) else ""
    )
    dense_feed = FeedForwardSpec(
        config.read_int("intermediate_size", default=usual.hidden), act, "gated", bias
    )
    each = FeedForwardSpec(
        config.read_int("moe_intermediate_size", default=usual.expert), act, "gated"
    )
    count = config.read_int(
        "n_routed_experts", "num_experts", "num_local_experts", default=usual.experts
    )
    active = config.read_int("num_experts_per_tok", default=usual.active, maximum=count)
    shared = config.read_int("n_shared_experts", default=usual.shared, minimum=0)
    shared_expert = replace(each, hidden=shared * each.hidden, bias=bias) if shared else None
    experts = ExpertsSpec(each, count, active, shared_expert, **routing)
    blocks = [
        BlockSpec(attention, feed=dense_feed if depth < dense else experts, norm=norm)
        for depth in range(layers)
    ]

    tokens = config.read_int("vocab_size", default=usual.vocab_size)
    stack = StackSpec.from_blocks(
        "decoder", model, blocks, embedding=EmbeddingSpec(tokens), norm=norm
    )
    return make_decoder_model(
        config,
        task,
        stack,
        OutputHeadSpec("tokens", tokens, table=read_tied_stack(config, "decoder", False)),
    )


def _make_latent_attention(
    config: TransformersConfig, model: int, defaults: DeepseekDefaults, pairs: str
) -> AttentionSpec | ApproximateAttention:
    heads = config.read_num_heads("num_attention_heads", default=defaults.heads)
    if config.read_num_kv_heads(heads) != heads:
        config.fail(
            "num_key_value_heads differs from num_attention_heads",
            "give both alike: in MLA every query head has its own keys",
        )
    dim = config.read_head_dim("qk_nope_head_dim", default=128)
    rope_dim = config.read_head_dim("qk_rope_head_dim", default=64)
    project = Latent(
        rank=config.read_int("kv_lora_rank", default=512),
        rope=rope_dim,
        query_rank=config.read_optional_int("q_lora_rank", default=1536),
    )
    rope = RopeConfig(config, config.read_int("max_position_embeddings", default=defaults.length))
    default_scale = (dim + rope_dim) ** -0.5
    biased = config.read_bool("attention_bias", False)
    spec = design(
        model=model,
        heads=heads,
        dim=dim,
        vdim=config.read_head_dim("v_head_dim", default=128),
        pattern="causal()",
        project=project,
        bias="o" if biased else "",
        similarity=make_dot(default_scale * rope.attention_mscale() ** 2, default_scale),
        modifiers=(rope.make_rotary(rope_dim, pairs),),
    )
    if not biased:
        return rope.attention_with_limits(spec)
    ranks = (
        ("project.q_down_bias", project.query_rank or 0),
        ("project.kv_down_bias", project.rank + rope_dim),
    )
    parameters = tuple((name, size) for name, size in ranks if size)
    return ApproximateAttention(
        spec, "attention_bias adds biases to the latent vectors, which Latent lacks", parameters
    )


# --- Weight names of DeepSeek, and of others with separate tensors per expert ---------------------

OWN_LAYER, FILE_ATTENTION = "decoder.{layer}", ".layers.{layer}.self_attn"
FILE_EXPERT, FILE_SHARED_EXPERT = (
    ".layers.{layer}.mlp.experts.{expert}",
    ".layers.{layer}.mlp.shared_experts",
)
FILE_KV_UP, FUSED_KV_LAYOUT = f"{FILE_ATTENTION}.kv_b_proj.weight", "(kv [dim|vdim]) rank"

DEEPSEEK_WEIGHTS = LLAMA._replace(
    families=("deepseek_v2", "deepseek_v3", "qwen3_moe", "olmoe"),
    locations={
        **LLAMA.locations,
        f"{OWN_LAYER}.attention.project.q_down": f"{FILE_ATTENTION}.q_a_proj.weight",
        f"{OWN_LAYER}.attention.project.q_norm": f"{FILE_ATTENTION}.q_a_layernorm.weight",
        f"{OWN_LAYER}.attention.project.q_up": f"{FILE_ATTENTION}.q_b_proj.weight",
        f"{OWN_LAYER}.attention.project.kv_down": f"{FILE_ATTENTION}.kv_a_proj_with_mqa.weight",
        f"{OWN_LAYER}.attention.project.kv_norm": f"{FILE_ATTENTION}.kv_a_layernorm.weight",
        f"{OWN_LAYER}.attention.project.k_up": TensorLocation(
            FILE_KV_UP, FUSED_KV_LAYOUT, {"dim|vdim": "dim"}
        ),
        f"{OWN_LAYER}.attention.project.v_up": TensorLocation(
            FILE_KV_UP, FUSED_KV_LAYOUT, {"dim|vdim": "vdim"}
        ),
        f"{OWN_LAYER}.feed.router": ".layers.{layer}.mlp.gate.weight",
        f"{OWN_LAYER}.feed.router_bias": ".layers.{layer}.mlp.gate.e_score_correction_bias",
        f"{OWN_LAYER}.feed.each.gate": TensorLocation(
            f"{FILE_EXPERT}.gate_proj.weight", "hidden model"
        ),
        f"{OWN_LAYER}.feed.each.up": TensorLocation(
            f"{FILE_EXPERT}.up_proj.weight", "hidden model"
        ),
        f"{OWN_LAYER}.feed.each.down": TensorLocation(
            f"{FILE_EXPERT}.down_proj.weight", "model hidden"
        ),
        f"{OWN_LAYER}.feed.shared.gate": f"{FILE_SHARED_EXPERT}.gate_proj.weight",
        f"{OWN_LAYER}.feed.shared.up": f"{FILE_SHARED_EXPERT}.up_proj.weight",
        f"{OWN_LAYER}.feed.shared.down": f"{FILE_SHARED_EXPERT}.down_proj.weight",
        f"{OWN_LAYER}.feed.shared.gate_bias": f"{FILE_SHARED_EXPERT}.gate_proj.bias",
        f"{OWN_LAYER}.feed.shared.up_bias": f"{FILE_SHARED_EXPERT}.up_proj.bias",
        f"{OWN_LAYER}.feed.shared.down_bias": f"{FILE_SHARED_EXPERT}.down_proj.bias",
    },
)
