"""Tiny models of the families of 2026, from configs that fit, with an input of each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

WORDS = 96
SIZES = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1}
ROUTED = EXPERTS | {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "head_dim": 4,
}
INDEXER = {"index_n_heads": 2, "index_head_dim": 8, "index_topk": 4}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
MAMBA = {"mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_n_groups": 1}
MAMBA2 = MAMBA | {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_chunk_size": 8}
PICTURE = {"image_size": 16, "patch_size": 4, "num_channels": 3}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    **PICTURE,
}
TEXT = {**{k: v for k, v in SIZES.items() if k not in ("head_dim", "num_key_value_heads")}}


@dataclass(frozen=True)
class Family:
    """A family by its name in the table: the model_type, sizes beside SIZES, and which inputs its
    tiny model reads ("text", "image", "patches", "clip", "image and text", "audio" or
    "pair").
    """

    name: str
    model_type: str
    sizes: dict[str, Any] = field(default_factory=dict[str, Any])
    reads: str = "text"
    base: dict[str, Any] = field(default_factory=lambda: SIZES)

    def build(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        """Return the model, from a fixed seed, with weights so large that attention is uneven."""
        from transformers import AutoConfig

        from headwise.hub.transformers_loading import find_class_of_task

        config = AutoConfig.for_model(self.model_type, **(self.base | self.sizes))
        torch.manual_seed(0)
        kind = find_class_of_task(config)
        from_config = getattr(kind, "from_config", None) or kind._from_config
        model: nn.Module = from_config(
            config, attn_implementation="eager", experts_implementation="eager"
        )
        model = model.eval().to(dtype)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.is_floating_point():
                    noise = torch.randn(parameter.shape, generator=generator, dtype=dtype)
                    parameter.add_(noise * (0.2 if parameter.ndim > 1 else 0.05))
        return model

    def inputs(self, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        """Return an input of the model."""
        generator = torch.Generator().manual_seed(2)
        ids = torch.randint(3, WORDS - 8, (2, 9), generator=generator)
        image = torch.randn(2, 3, 16, 16, generator=generator, dtype=dtype)
        if self.reads == "image":
            return {"pixel_values": image}
        if self.reads == "patches":  # SigLIP 2: flattened patches of images of any shape
            patches = image.unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 4, 5, 1)
            mask = torch.ones(2, 16, dtype=torch.long)
            shapes = torch.tensor([[4, 4], [4, 4]])
            return {
                "pixel_values": patches.reshape(2, 16, 48),
                "pixel_attention_mask": mask,
                "spatial_shapes": shapes,
            }
        if self.reads == "image and text":  # the image is 16 tokens of the text
            text = torch.cat([ids[:, :3], torch.full((2, 16), WORDS - 1), ids[:, 3:]], 1)
            sizes = torch.tensor([[16, 16]] * 2)
            named = {"input_ids": text, "pixel_values": image}
            return named | ({"image_sizes": sizes} if self.model_type == "mistral3" else {})
        if self.reads == "clip":
            return {"input_ids": ids, "pixel_values": image}
        if self.reads == "audio":
            features = torch.randn(2, 8, 26, generator=generator, dtype=dtype)
            return {"input_features": features, "decoder_input_ids": ids[:, :5]}
        if self.reads == "pair":
            return {"input_ids": ids, "decoder_input_ids": ids[:, :5]}
        options: dict[str, Any] = {"input_ids": ids, "use_cache": False}
        return options


def latent(**sizes: Any) -> dict[str, Any]:
    return LATENT | ROUTED | sizes


FULL = "full_attention"
LINEAR = "linear_attention"
SLIDING = "sliding_attention"
WINDOWED = {"layer_types": [SLIDING, FULL], "sliding_window": 4}
MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
NEXT = DELTA | {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "decoder_sparse_step": 1,
}
T5 = {
    k: v for k, v in SIZES.items() if k not in ("pad_token_id", "bos_token_id", "eos_token_id")
} | WINDOWED
CLIP = {
    "text_config": TEXT | {"projection_dim": 16},
    "vision_config": VISION | {"projection_dim": 16},
    "projection_dim": 16,
}
SEEN = {"image_token_id": WORDS - 1, "image_token_index": WORDS - 1}
WORDED = {k: v for k, v in SIZES.items() if k != "head_dim"} | {"head_dim": 8}

FAMILIES = (
    Family("Qwen3", "qwen3"),
    Family("Qwen3-Next", "qwen3_next", NEXT),
    Family("Qwen3.5", "qwen3_5_text", DELTA),
    Family("Qwen3.5 MoE", "qwen3_5_moe_text", NEXT),
    Family(
        "Gemma 3n",
        "gemma3n_text",
        {
            "num_hidden_layers": 6,
            "layer_types": [SLIDING, FULL] * 3,
            "sliding_window": 4,
            "intermediate_size": 40,
            "vocab_size_per_layer_input": WORDS,
            "hidden_size_per_layer_input": 6,
            "num_kv_shared_layers": 2,
            "laurel_rank": 4,
            "activation_sparsity_pattern": [0.0] * 6,
            "altup_num_inputs": 2,
        },
    ),
    Family(
        "Gemma 3n, nothing shared",
        "gemma3n_text",
        {
            "layer_types": [SLIDING, FULL],
            "sliding_window": 4,
            "intermediate_size": 40,
            "vocab_size_per_layer_input": WORDS,
            "hidden_size_per_layer_input": 6,
            "num_kv_shared_layers": 0,
            "laurel_rank": 4,
            "activation_sparsity_pattern": [0.0] * 2,
            "altup_num_inputs": 2,
        },
    ),
    Family(
        "Gemma 4",
        "gemma4_text",
        WINDOWED
        | {
            "vocab_size_per_layer_input": WORDS,
            "hidden_size_per_layer_input": 6,
            "per_layer_config": {"1": {"head_dim": 16}},
        },
    ),
    Family(
        "Gemma 4, shared keys and values",
        "gemma4_text",
        {
            "num_hidden_layers": 6,
            "layer_types": [SLIDING, FULL] * 3,
            "sliding_window": 4,
            "vocab_size_per_layer_input": WORDS,
            "hidden_size_per_layer_input": 6,
            "num_kv_shared_layers": 2,
            "per_layer_config": {layer: {"head_dim": 16} for layer in "135"},
        },
    ),
    Family("gpt-oss", "gpt_oss", MOE | WINDOWED),
    Family("DeepSeek V3", "deepseek_v3", latent()),
    Family("DeepSeek V3.2", "deepseek_v32", latent(**INDEXER)),
    Family(
        "DeepSeek V4",
        "deepseek_v4",
        {
            "num_key_value_heads": 1,
            "q_lora_rank": 12,
            "o_groups": 2,
            "o_lora_rank": 6,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "hc_mult": 2,
            "sliding_window": 4,
            "qk_rope_head_dim": 4,
            "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"],
            "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
            "mlp_layer_types": ["moe", "moe"],
            **INDEXER,
        },
    ),
    Family("GLM-4.5", "glm4_moe", ROUTED),
    Family("GLM-4.7 Flash", "glm4_moe_lite", latent()),
    Family("GLM-5", "glm_moe_dsa", latent(**INDEXER)),
    Family(
        "Kimi Linear",
        "kimi_linear",
        {
            **LATENT,
            "q_lora_rank": None,
            "num_experts": 4,
            "num_experts_per_token": 2,
            "moe_intermediate_size": 16,
            "num_shared_experts": 1,
            "num_expert_group": 1,
            "topk_group": 1,
            "layer_types": [LINEAR, FULL],
            "mlp_layer_types": ["dense", "sparse"],
            "linear_head_dim": 8,
            "linear_num_heads": 4,
        },
    ),
    Family("Kimi K2", "deepseek_v3", latent(n_group=1, topk_group=1)),
    Family("MiniMax", "minimax", MOE | {"layer_types": [LINEAR, FULL], "block_size": 4}),
    Family("MiniMax M2", "minimax_m2", MOE),
    Family(
        "Llama 4",
        "llama4_text",
        MOE
        | {
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 40,
            "attention_chunk_size": 4,
            "layer_types": ["chunked_attention", FULL],
            "no_rope_layers": [1, 0],
        },
    ),
    Family("Mistral 3", "mistral"),
    Family("Ministral", "ministral", WINDOWED),
    Family("Ministral 3", "ministral3"),
    Family(
        "Mistral 4",
        "mistral4",
        latent(qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=8, head_dim=8),
    ),
    Family("Phi-4", "phi3"),
    Family("Phi MoE", "phimoe", MOE),
    Family(
        "Granite hybrid",
        "granitemoehybrid",
        MAMBA2
        | MOE
        | {
            "layer_types": ["mamba", "attention"],
            "shared_intermediate_size": 16,
        },
    ),
    Family(
        "Nemotron-H",
        "nemotron_h",
        {
            "layers_block_type": [LINEAR, FULL, "mlp", "moe"],
            "ssm_state_size": 8,
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "n_groups": 1,
            "chunk_size": 8,
            "n_routed_experts": 4,
            "moe_intermediate_size": 16,
            "moe_shared_expert_intermediate_size": 16,
        },
    ),
    Family(
        "Jamba",
        "jamba",
        MAMBA
        | {
            "num_experts": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "mamba_dt_rank": 4,
            "use_mamba_kernels": False,
        },
    ),
    Family("Falcon-H1", "falcon_h1", MAMBA2 | {"mamba_d_ssm": 64}),
    Family("LFM2", "lfm2", {"layer_types": ["conv", FULL], "block_multiple_of": 8}),
    Family(
        "LFM2 MoE",
        "lfm2_moe",
        {
            "layer_types": ["conv", FULL],
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "num_dense_layers": 1,
        },
    ),
    Family("OLMo 2", "olmo2"),
    Family("OLMo 3", "olmo3", WINDOWED),
    Family("OLMo hybrid", "olmo_hybrid", DELTA),
    Family("SmolLM3", "smollm3", {"no_rope_layers": [1, 0]}),
    Family("ERNIE 4.5", "ernie4_5"),
    Family(
        "ERNIE 4.5 MoE",
        "ernie4_5_moe",
        {
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_intermediate_size": 16,
            "moe_num_shared_experts": 1,
        },
    ),
    Family("Hunyuan", "hunyuan_v1_dense"),
    Family(
        "Hunyuan MoE",
        "hunyuan_v1_moe",
        {"num_experts": 4, "moe_topk": 2, "moe_intermediate_size": 16},
    ),
    Family("EXAONE 4", "exaone4", WINDOWED),
    Family("Apertus", "apertus"),
    Family(
        "ModernBERT",
        "modernbert",
        {"global_attn_every_n_layers": 2, "local_attention": 4},
        base=TEXT,
    ),
    Family("EuroBERT", "eurobert"),
    Family("DINOv2", "dinov2", VISION | {"mlp_ratio": 2}, "image", {}),
    Family("DINOv3", "dinov3_vit", VISION, "image", {}),
    Family("SigLIP 2 vision", "siglip2_vision_model", VISION | {"num_patches": 16}, "patches", {}),
    Family("SigLIP 2 text", "siglip2_text_model", {"projection_size": 32}, base=TEXT),
    Family("CLIP", "clip", CLIP, "clip", {}),
    Family(
        "Whisper",
        "whisper",
        {
            "vocab_size": WORDS,
            "d_model": 32,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 40,
            "decoder_ffn_dim": 40,
            "num_mel_bins": 8,
            "max_source_positions": 13,
            "max_target_positions": 32,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
        },
        "audio",
        {},
    ),
    Family(
        "T5Gemma",
        "t5gemma",
        {"encoder": T5, "decoder": T5 | {"cross_attention_hidden_size": 32}, "vocab_size": WORDS},
        "pair",
        {},
    ),
    Family(
        "LLaVA",
        "llava",
        {
            "text_config": SIZES | {"model_type": "llama"},
            "vision_config": VISION | {"model_type": "clip_vision_model"},
            **SEEN,
        },
        "image and text",
        {},
    ),
    Family(
        "Mistral 3 with images",
        "mistral3",
        {
            "text_config": SIZES | {"model_type": "mistral"},
            "vision_config": VISION | {"model_type": "pixtral", "head_dim": 8},
            "spatial_merge_size": 1,
            "image_size": 16,
            **SEEN,
        },
        "image and text",
        {},
    ),
    Family(
        "Gemma 3 with images",
        "gemma3",
        {
            "text_config": SIZES | WINDOWED,
            "vision_config": VISION,
            "mm_tokens_per_image": 16,
            **SEEN,
        },
        "image and text",
        {},
    ),
    Family("BERT", "bert", base=TEXT),
    Family("Mamba", "mamba", {"state_size": 8, "expand": 2, "time_step_rank": 4}),
)
