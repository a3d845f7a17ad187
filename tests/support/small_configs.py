"""Configs of every family of transformers with small sizes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

WORDS = 99
LAYERS = {
    "num_hidden_layers": 2,
    "n_layer": 2,
    "n_layers": 2,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "depth": 2,
    "vocab_size": WORDS,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "prediction_length": 4,
}
DEPTHS = ("layers", "layer", "depth")
SMALL = LAYERS | {
    "hidden_size": 64,
    "d_model": 64,
    "n_embd": 64,
    "dim": 64,
    "embed_dim": 64,
    "hidden_dim": 64,
    "model_dim": 64,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "d_kv": 16,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "intermediate_size": 48,
    "d_ff": 48,
    "ffn_dim": 48,
    "n_inner": 48,
    "max_position_embeddings": 64,
    "n_positions": 64,
    "image_size": 32,
    "patch_size": 8,
    "num_channels": 3,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "embedding_size": 64,
    "num_mel_bins": 16,
    "max_source_positions": 13,
    "max_target_positions": 32,
    "rotary_dim": 8,
    "type_vocab_size": 2,
    "num_codebooks": 2,
}
MLA = {
    "deepseek_v2",
    "deepseek_v3",
    "axk1",
    "glm4_moe_lite",
    "kimi_k25",
    "mistral4",
    "minicpm3",
    "youtu",
    "axk2",
    "bailing_hybrid",
    "deepseek_v32",
    "dots3_note_text",
    "glm_moe_dsa",
    "mistral_large4_text",
    "kimi_linear",
}


# with defaults in their code
MULTIMODAL_ROPE = ("_vl", "omni", "glm4v", "glm46v", "glm_image", "glm_ocr", "glmga")


def configs(kind: Any, family: str) -> Iterator[Any]:
    """Yield small configs of one family: all sizes small, few layers only, and small sizes with the
    usual layers.
    """
    for sizes in (
        SMALL,
        LAYERS,
        {key: size for key, size in SMALL.items() if not key.endswith(DEPTHS)},
    ):
        yield shrink(kind(), family, sizes)


def shrink(config: Any, family: str, sizes: dict[str, int]) -> Any:
    """Set small sizes in a config where its attributes can be changed; return it."""
    for key, value in sizes.items():
        try:
            value_now = getattr(config, key)
            if (isinstance(value_now, int) and not isinstance(value_now, bool)) or (
                value_now is None and (key in LAYERS or key == "head_dim")
            ):
                setattr(config, key, value)
        except Exception:  # some sizes are per layer, or computed from others
            continue
    if sizes is not LAYERS:
        _match_sizes(config, family)
    try:
        kinds = list(config.layer_types or [])
        if len(kinds) > 2:
            config.layer_types = [
                kinds[0],
                next((kind for kind in kinds if kind != kinds[0]), kinds[0]),
            ]
    except Exception:
        pass
    for name in getattr(config, "sub_configs", None) or {}:
        part = getattr(config, name, None)
        if part is not None:
            shrink(part, family, sizes)
    return config


def _match_sizes(config: Any, family: str) -> None:
    """Set sizes that depend on others."""
    if family in MLA:
        config.head_dim, config.num_key_value_heads = 8, 4
    rope = getattr(config, "rope_parameters", None)
    if isinstance(rope, dict) and (
        "mrope_section" in rope or any(name in family for name in MULTIMODAL_ROPE)
    ):
        pairs = int(8 * rope.get("partial_rotary_factor", 1))
        rope["mrope_section"] = [
            pairs // 4,
            (pairs - pairs // 4) // 2,
            pairs - pairs // 4 - (pairs - pairs // 4) // 2,
        ]
    heads = getattr(config, "num_heads", None)
    if isinstance(heads, list) and isinstance(getattr(config, "embed_dim", None), int):
        config.embed_dim = 8 * heads[0]
