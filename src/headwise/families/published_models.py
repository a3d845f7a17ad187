"""Published models by name: the keys of their config.json that differ from the defaults of their
family.

Their names can be given where a model folder is expected, as in ``headwise cost gpt3``. Weights are
not part of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class PublishedModel(NamedTuple):
    """Where a model is described, the number of its parameters there, and its config."""

    source: str
    parameters: str
    config: Mapping[str, Any]


def _transformer(width: int, heads: int, hidden: int) -> dict[str, Any]:
    """The encoder-decoder of 1706.03762: six layers each, one table of about 37,000 tokens for both
    languages.
    """
    stacks = {
        f"{side}_{key}": value
        for side in ("encoder", "decoder")
        for key, value in (("layers", 6), ("attention_heads", heads), ("ffn_dim", hidden))
    }
    return {
        "model_type": "marian",
        "vocab_size": 37_000,
        "d_model": width,
        "activation_function": "relu",
        "scale_embedding": True,
        **stacks,
    }


def _llama(width: int, layers: int, heads: int, hidden: int, **others: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": hidden,
        **others,
    }


def _gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    """The experts of gpt-oss are published in mxfp4, everything else in bfloat16."""
    unquantized = [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ]
    return {
        "model_type": "gpt_oss",
        "num_hidden_layers": layers,
        "num_local_experts": experts,
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": unquantized},
    }


PUBLISHED_MODELS: Mapping[str, PublishedModel] = {
    "transformer-base": PublishedModel(
        "1706.03762, table 3", "65 million", _transformer(512, 8, 2048)
    ),
    "transformer-big": PublishedModel(
        "1706.03762, table 3", "213 million", _transformer(1024, 16, 4096)
    ),
    "gpt2": PublishedModel(
        "openai-community/gpt2, config.json", "124 million", {"model_type": "gpt2"}
    ),
    "gpt3": PublishedModel(
        "2005.14165, table 2.1; its locally banded layers are counted as dense",
        "175 billion",
        {"model_type": "gpt2", "n_embd": 12_288, "n_head": 96, "n_layer": 96, "n_positions": 2048},
    ),
    "bert-base": PublishedModel("1810.04805, section 3", "110 million", {"model_type": "bert"}),
    "llama-65b": PublishedModel(
        "2302.13971, table 2",
        "65.2 billion",
        _llama(8192, 80, 64, 22_016, vocab_size=32_000, max_position_embeddings=2048),
    ),
    "llama-3-8b": PublishedModel(
        "2407.21783, table 3",
        "8 billion",
        _llama(
            4096,
            32,
            32,
            14_336,
            num_key_value_heads=8,
            vocab_size=128_256,
            rope_theta=500_000.0,
            max_position_embeddings=8192,
        ),
    ),
    "deepseek-v3": PublishedModel(
        "2412.19437, section 4.2",
        "671 billion",
        {
            "model_type": "deepseek_v3",
            "hidden_size": 7168,
            "num_hidden_layers": 61,
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "intermediate_size": 18_432,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "n_group": 8,
            "topk_group": 4,
            "first_k_dense_replace": 3,
            "vocab_size": 129_280,
            "max_position_embeddings": 4096,
            "quantization_config": {
                "quant_method": "fp8",
                "activation_scheme": "dynamic",
                "fmt": "e4m3",
                "weight_block_size": [128, 128],
            },
        },
    ),
    "gpt-oss-20b": PublishedModel("2508.10925, table 1", "20.9 billion", _gpt_oss(24, 32)),
    "gpt-oss-120b": PublishedModel("2508.10925, table 1", "116.8 billion", _gpt_oss(36, 128)),
    "vit-base": PublishedModel(
        "2010.11929, table 1; patches of 16 x 16", "86 million", {"model_type": "vit"}
    ),
}
