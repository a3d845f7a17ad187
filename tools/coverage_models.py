"""Tiny models of transformers families for `coverage_page.py`, built from their configs, and inputs for them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

WORDS, LARGEST = 99, 4e7
LAYERS = {
    "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2, "num_layers": 2, "num_decoder_layers": 2, "encoder_layers": 2,
    "decoder_layers": 2, "depth": 2, "vocab_size": WORDS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 1, "prediction_length": 4,
}  # fmt: skip
SMALL = LAYERS | {
    "hidden_size": 64, "d_model": 64, "n_embd": 64, "dim": 64, "embed_dim": 64, "hidden_dim": 64, "model_dim": 64,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "d_kv": 16,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48, "intermediate_size": 48, "d_ff": 48, "ffn_dim": 48, "n_inner": 48,
    "max_position_embeddings": 64, "n_positions": 64, "image_size": 32, "patch_size": 8, "num_channels": 3,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "num_experts": 4, "num_local_experts": 4,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "embedding_size": 64, "num_mel_bins": 16, "max_source_positions": 13, "max_target_positions": 32,
    "rotary_dim": 8, "type_vocab_size": 2, "num_codebooks": 2,
}  # fmt: skip
MLA = {
    "deepseek_v2", "deepseek_v3", "axk1", "glm4_moe_lite", "kimi_k25", "mistral4", "minicpm3", "youtu", "axk2",
    "bailing_hybrid", "deepseek_v32", "dots3_note_text", "glm_moe_dsa", "mistral_large4_text", "kimi_linear",
}  # fmt: skip


def configs(kind: Any, family: str) -> Iterator[Any]:
    """Yield small configs of one family: first with all sizes small, then with few layers only."""
    for sizes in (SMALL, LAYERS):
        yield shrink(kind(), family, sizes)


def shrink(config: Any, family: str, sizes: dict[str, int]) -> Any:
    """Set small sizes in a config where its attributes can be changed; return it."""
    for key, value in sizes.items():
        try:
            value_now = getattr(config, key)
            if (isinstance(value_now, int) and not isinstance(value_now, bool)) or (
                value_now is None and key in LAYERS
            ):
                setattr(config, key, value)
        except Exception:  # some sizes are per layer, or computed from others
            continue
    if sizes is SMALL:
        _match_sizes(config, family)
    try:
        kinds = list(config.layer_types or [])
        if len(kinds) > 2:
            config.layer_types = [kinds[0], next((kind for kind in kinds if kind != kinds[0]), kinds[0])]
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
    if isinstance(rope, dict) and "mrope_section" in rope:
        rope["mrope_section"] = [2, 3, 3]
    heads = getattr(config, "num_heads", None)
    if isinstance(heads, list) and isinstance(getattr(config, "embed_dim", None), int):
        config.embed_dim = 8 * heads[0]


def build_model(cls: Any, config: Any) -> nn.Module:
    """Return a model with weights so large that attention is not uniform."""
    with torch.device("meta"):
        if sum(p.numel() for p in cls(config).parameters()) > LARGEST:
            raise ValueError("its config has no small form")
    torch.manual_seed(0)
    try:
        model = cls._from_config(config, attn_implementation="eager")
    except (KeyError, ValueError, TypeError):
        model = cls(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3)
    return model.eval()


def find_inputs(model: nn.Module, config: Any) -> dict[str, Tensor]:
    """Return the first inputs that the model runs on: its main input, or text and an image together."""
    first_error: Exception | None = None
    for inputs in candidate_inputs(model, config):
        try:
            torch.manual_seed(2)
            model(**inputs)
            return inputs
        except Exception as error:
            first_error = first_error or error
    raise first_error or ValueError(f"it reads {model.main_input_name}")


def candidate_inputs(model: nn.Module, config: Any) -> Iterator[dict[str, Tensor]]:
    """Yield inputs, the most likely to work first."""
    torch.manual_seed(1)
    ids, first = torch.randint(3, WORDS, (2, 7)), model.main_input_name
    more = {"decoder_input_ids": ids[:, :5]} if getattr(config, "is_encoder_decoder", False) else {}
    if first == "input_ids":
        yield {"input_ids": ids, **more}
        if "use_cache" in inspect.signature(model.forward).parameters:
            yield {"input_ids": ids, "use_cache": False, **more}
        yield {"input_ids": ids, "decoder_input_ids": ids[:, :5]}
        yield {"input_ids": ids, "bbox": torch.zeros(2, 7, 4, dtype=torch.long), **more}
    part = getattr(config, "vision_config", config)
    if first == "pixel_values" or part is not config:
        for image in images(part):
            yield {first: image, **more} if first != "input_ids" else {"input_ids": ids, "pixel_values": image}
            yield {"input_ids": ids, "pixel_values": image, **more}
    if first == "pixel_values_videos":
        yield from ({first: image[:, None].repeat(1, 16, 1, 1, 1)} for image in images(part))
    if first == "input_values":
        yield {first: torch.randn(2, 4000), **more}
        yield {first: torch.randn(2, 1, 4000), **more}
    if first in ("input_features", "input_values"):
        for bins in (16, 80, 128, 160):
            yield {first: torch.randn(2, bins, 26), **more}
            yield {first: torch.randn(2, 64, bins), **more}


def images(config: Any) -> Iterator[Tensor]:
    """Yield images of the size in the config and of common sizes, then a short video."""
    channels, size = getattr(config, "num_channels", 3), getattr(config, "image_size", 32)
    size = size if isinstance(size, (list, tuple)) else (size, size)
    for height, width in dict.fromkeys((tuple(size), (32, 32), (224, 224))):
        yield torch.randn(2, channels, height, width)
    yield torch.randn(2, getattr(config, "num_frames", 8), channels, *size)
