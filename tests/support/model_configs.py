"""Configs and model specs of published models."""

from __future__ import annotations

from typing import Any

import headwise as hw
from headwise.models.model_spec import (
    BlockSpec,
    EmbeddingSpec,
    FeedForwardSpec,
    ModelSpec,
    NormSpec,
    OutputHeadSpec,
    StackSpec,
)
from support.tiny_configs import model_config

LLAMA3 = model_config("llama", hidden_size=4096, vocab_size=128256, intermediate_size=14336)
LLAMA3 |= {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}


def gemma_3_1b() -> ModelSpec:
    """26 layers: every sixth has full attention, the others a window of 512; one kv head of 256."""
    options = {"model": 1152, "heads": 4, "kv": 1, "dim": 256}
    local, full = (hw.design(**options, pattern=pattern) for pattern in ("window(512)", "causal"))
    blocks = [
        BlockSpec(
            full if n % 6 == 5 else local,
            feed=FeedForwardSpec(6912, form="gated"),
            norm=NormSpec("rms_unit_offset"),
            placement="sandwich",
        )
        for n in range(26)
    ]
    stack = StackSpec.from_blocks(
        "decoder", 1152, blocks, embedding=EmbeddingSpec(262144), norm=NormSpec("rms_unit_offset")
    )
    return ModelSpec(
        "gemma-3-1b", "decoder", (stack,), (OutputHeadSpec("tokens", 262144, table="decoder"),)
    )


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
LLAMA3_ROPE |= {"original_max_position_embeddings": 8192}


YARN = {
    "type": "yarn",
    "factor": 40,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
YARN |= {"original_max_position_embeddings": 4096}


PLAIN = "hidden_size vocab_size intermediate_size num_hidden_layers num_attention_heads"
GROUPED = f"{PLAIN} num_key_value_heads"
T5_SIZES = "d_model d_ff d_kv num_heads num_layers vocab_size"
VIT_SIZES = (
    "hidden_size image_size intermediate_size num_hidden_layers num_attention_heads patch_size"
)
OSS_SIZES = (
    "hidden_size vocab_size intermediate_size num_hidden_layers num_local_experts "
    "num_experts_per_tok"
)


def _sizes(model_type: str, class_name: str, keys: str, *sizes: int) -> dict[str, Any]:
    named = dict(zip(keys.split(), sizes, strict=True))
    return {"model_type": model_type, "architectures": [class_name]} | named


def _experts(
    hidden: int, dense: int, count: int, shared: int, active: int, query_rank: int | None
) -> dict[str, Any]:
    """Experts and latent attention of DeepSeek."""
    keys = "moe_intermediate_size first_k_dense_replace n_routed_experts n_shared_experts"
    sizes = _sizes("", "", keys, hidden, dense, count, shared)
    del sizes["model_type"], sizes["architectures"]
    sizes |= {"num_experts_per_tok": active, "q_lora_rank": query_rank, "kv_lora_rank": 512}
    return sizes | {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}


# Public models at full size: the keys of their config.json that say sizes, and the numbers that
# they are known to have, where somebody says them: publishers' pages, papers, or safetensors
# indices.
PUBLIC: dict[str, tuple[dict[str, Any], int | None]] = {
    "gpt2": (
        _sizes("gpt2", "GPT2LMHeadModel", "n_embd n_layer n_head vocab_size", 768, 12, 12, 50257)
        | {"n_positions": 1024, "n_ctx": 1024},
        124_439_808,
    ),
    "gpt2-xl": (
        _sizes("gpt2", "GPT2LMHeadModel", "n_embd n_layer n_head", 1600, 48, 25),
        1_557_611_200,
    ),
    "llama-2-7b": (
        _sizes("llama", "LlamaForCausalLM", GROUPED, 4096, 32000, 11008, 32, 32, 32)
        | {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5}
        | {"rope_scaling": None, "tie_word_embeddings": False},
        6_738_415_616,
    ),
    "llama-3-8b": (
        _sizes("llama", "LlamaForCausalLM", GROUPED, 4096, 128256, 14336, 32, 32, 8)
        | {"max_position_embeddings": 131072, "rope_theta": 500000.0, "rope_scaling": LLAMA3_ROPE},
        8_030_261_248,
    ),
    "llama-3-70b": (
        _sizes("llama", "LlamaForCausalLM", GROUPED, 8192, 128256, 28672, 80, 64, 8),
        70_553_706_496,
    ),
    "mistral-7b": (
        _sizes("mistral", "MistralForCausalLM", GROUPED, 4096, 32000, 14336, 32, 32, 8)
        | {"sliding_window": 4096},
        7_241_732_096,
    ),
    "qwen2.5-0.5b": (
        _sizes("qwen2", "Qwen2ForCausalLM", GROUPED, 896, 151936, 4864, 24, 14, 2)
        | {"max_window_layers": 24, "use_sliding_window": False, "tie_word_embeddings": True},
        494_032_768,
    ),
    "qwen3-0.6b": (
        _sizes("qwen3", "Qwen3ForCausalLM", GROUPED, 1024, 151936, 3072, 28, 16, 8)
        | {"head_dim": 128, "rope_theta": 1000000, "tie_word_embeddings": True},
        596_049_920,
    ),
    "gemma-2-2b": (
        _sizes("gemma2", "Gemma2ForCausalLM", GROUPED, 2304, 256000, 9216, 26, 8, 4)
        | {"head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 4096},
        2_614_341_888,
    ),
    "bert-base": (
        _sizes("bert", "BertForMaskedLM", PLAIN, 768, 30522, 3072, 12, 12),
        109_514_298,
    ),
    "t5-small": (
        _sizes("t5", "T5ForConditionalGeneration", T5_SIZES, 512, 2048, 64, 8, 6, 32128),
        60_506_624,
    ),
    "flan-t5-base": (
        _sizes("t5", "T5ForConditionalGeneration", T5_SIZES, 768, 2048, 64, 12, 12, 32128)
        | {"num_decoder_layers": 12, "feed_forward_proj": "gated-gelu"}
        | {"tie_word_embeddings": False},
        None,
    ),
    "bart-base": (
        _sizes("bart", "BartModel", "d_model vocab_size max_position_embeddings", 768, 50265, 1024)
        | {f"{side}_layers": 6 for side in ("encoder", "decoder")}
        | {f"{side}_attention_heads": 12 for side in ("encoder", "decoder")}
        | {f"{side}_ffn_dim": 3072 for side in ("encoder", "decoder")},
        139_420_416,
    ),
    "vit-base": (
        _sizes("vit", "ViTForImageClassification", VIT_SIZES, 768, 224, 3072, 12, 12, 16)
        | {"id2label": {str(n): f"class {n}" for n in range(1000)}},
        86_567_656,
    ),
    "deepseek-v2-lite": (
        _sizes("deepseek_v2", "DeepseekV2ForCausalLM", GROUPED, 2048, 102400, 10944, 27, 16, 16)
        | _experts(1408, 1, 64, 2, 6, None)
        | {"moe_layer_freq": 1},
        15_706_484_224,
    ),
    "deepseek-v3": (
        _sizes("deepseek_v3", "DeepseekV3ForCausalLM", GROUPED, 7168, 129280, 18432, 61, 128, 128)
        | _experts(2048, 3, 256, 1, 8, 1536)
        | {"max_position_embeddings": 163840, "rope_scaling": YARN, "num_nextn_predict_layers": 1}
        | {"n_group": 8, "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}},
        671_026_404_352,
    ),
    "gpt-oss-20b": (
        _sizes("gpt_oss", "GptOssForCausalLM", OSS_SIZES, 2880, 201088, 2880, 24, 32, 4),
        20_914_757_184,
    ),
}
