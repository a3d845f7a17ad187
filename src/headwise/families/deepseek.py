"""DeepSeek-V2 (2405.04434) and V3 (2412.19437): latent attention, experts after dense layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..model_spec import (
    ApproximateAttention,
    ExpertsSpec,
    FeedForwardSpec,
)
from ..parts.latent_attention import Latent
from ..presets import design
from .attention_config import (
    RopeConfig,
    make_dot,
)
from .config_reader import TransformersConfig
from .decoders import (
    Decoder,
    Extras,
    LayerFeed,
    Sizes,
    Switch,
    register_decoders,
)

UNREAD_ROUTING = "is not what transformers computes, which does not read the key"
KEPT_EXPERTS = {"moe_layer_freq": (1, "replaces expert layers that transformers keeps")}


DEEPSEEK_EXPERTS: dict[str, dict[str, int]] = {
    "deepseek_v2": {"dense": 0, "experts": 64, "active": 6, "hidden": 1407, "shared": 2},
    "deepseek_v3": {"dense": 3, "experts": 256, "active": 8, "hidden": 2048, "shared": 1},
}


def _read_groups(config: TransformersConfig, groups: int, active: int) -> dict[str, int]:
    """The number of groups of experts, and of those that each token may use."""
    return {
        "groups": config.read_int("n_group", default=groups),
        "active_groups": config.read_int("topk_group", default=active),
    }


def _read_routing(config: TransformersConfig) -> dict[str, Any]:
    """V2: a softmax chooses the experts, in the larger sizes within groups. V3: sigmoids with a
    load-balancing bias choose them within groups.
    """
    if config.family_name == "deepseek_v2":
        scale = config.read_float("routed_scaling_factor", default=1.0)
        methods = ("greedy", "group_limited_greedy")
        method = config.read_choice("topk_method", "greedy", methods)
        return {"scale": scale} | ({} if method == "greedy" else _read_groups(config, 1, 1))
    is_normalised = config.read_bool("norm_topk_prob", True)
    return {
        "scores": "sigmoid" if is_normalised else "sigmoid_sum",
        "bias": "constant",
        "scale": config.read_float("routed_scaling_factor", default=2.5),
        "group_score": "top2",
        **_read_groups(config, 8, 4),
    }


def _deepseek_feeds(
    config: TransformersConfig, sizes: Sizes, dense: FeedForwardSpec
) -> list[LayerFeed]:
    usual = DEEPSEEK_EXPERTS[config.family_name]
    routing = _read_routing(config)
    first = config.read_int("first_k_dense_replace", default=usual["dense"], minimum=0)
    hidden = config.read_int("moe_intermediate_size", default=usual["hidden"])
    names = ("n_routed_experts", "num_experts", "num_local_experts")
    count = config.read_int(*names, default=usual["experts"])
    active = config.read_int("num_experts_per_tok", default=usual["active"], maximum=count)
    number = config.read_int("n_shared_experts", default=usual["shared"], minimum=0)
    expert = replace(dense, hidden=hidden, bias="")
    shared = replace(dense, hidden=number * hidden) if number else None
    experts = ExpertsSpec(expert, count, active, shared, **routing)
    return [dense if layer < first else experts for layer in range(sizes.layers)]


def _deepseek(config: TransformersConfig, sizes: Sizes) -> Extras:
    """Multi-head latent attention."""
    if sizes.kv != sizes.heads:
        config.fail(
            "num_key_value_heads differs from num_attention_heads",
            "give both alike: in MLA every query head has its own keys",
        )
    dim = config.read_head_dim("qk_nope_head_dim", default=128)
    rope_dim = config.read_head_dim("qk_rope_head_dim", default=64)
    rank = config.read_int("kv_lora_rank", default=512)
    query_rank = config.read_optional_int("q_lora_rank", default=1536)
    rope = RopeConfig(config, sizes.length)
    pairs = "interleaved"
    if config.family_name == "deepseek_v3":
        pairs = "interleaved" if config.read_bool("rope_interleave", True) else "half"
        names = ("num_nextn_predict_layers", "num_mtp_layers")
        if config.read_int(*names, default=0, minimum=0):
            config.add_note(
                "num_nextn_predict_layers: the multi-token prediction layers are left out, as in "
                "transformers"
            )
    default_scale = (dim + rope_dim) ** -0.5
    is_biased = config.read_bool("attention_bias", False)
    spec = design(
        model=sizes.model,
        heads=sizes.heads,
        dim=dim,
        vdim=config.read_head_dim("v_head_dim", default=128),
        pattern="causal()",
        project=Latent(rank=rank, rope=rope_dim, query_rank=query_rank),
        bias="o" if is_biased else "",
        similarity=make_dot(default_scale * rope.attention_mscale() ** 2, default_scale),
        modifiers=(rope.make_rotary(rope_dim, pairs),),
    )
    if not is_biased:
        return Extras(attention=rope.attention_with_limits(spec))
    ranks = {"project.q_down_bias": query_rank or 0, "project.kv_down_bias": rank + rope_dim}
    own = tuple((name, size) for name, size in ranks.items() if size)
    reason = "attention_bias adds biases to the latent vectors, which Latent lacks"
    return Extras(attention=ApproximateAttention(spec, reason, own))


register_decoders(
    {
        "deepseek_v2": Decoder(
            "DeepseekV2",
            *(4096, 32, 32, 11008, 2048, 102400),
            keys={"dim": "qk_nope_head_dim"},
            dim=128,
            refused=KEPT_EXPERTS
            | {
                "norm_topk_prob": (False, UNREAD_ROUTING),
                "scoring_func": ("softmax", UNREAD_ROUTING),
            },
            feed_bias=Switch("mlp_bias", False, "ugd"),
            feeds_of=_deepseek_feeds,
            extras=_deepseek,
        ),
        "deepseek_v3": Decoder(
            "DeepseekV3",
            *(7168, 128, 61, 18432, 4096, 129280),
            keys={"dim": "qk_nope_head_dim"},
            dim=128,
            refused=KEPT_EXPERTS
            | {
                "topk_method": ("noaux_tc", UNREAD_ROUTING),
                "scoring_func": ("sigmoid", UNREAD_ROUTING),
            },
            feeds_of=_deepseek_feeds,
            extras=_deepseek,
        ),
    }
)
