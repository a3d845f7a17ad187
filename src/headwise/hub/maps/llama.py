"""Llama, and those whose files are named like its own."""

from __future__ import annotations

from ..plan import WeightNames

LLAMA_WEIGHTS = WeightNames(
    families=("llama", "mistral", "qwen2", "qwen3", "gemma", "granite", "smollm3", "olmo"),
    prefixes=("model", "transformer", ""),
    locations={
        "decoder.embedding.tokens": ".embed_tokens.weight",
        "decoder.{layer}.attention.project.q": ".layers.{layer}.self_attn.q_proj.weight",
        "decoder.{layer}.attention.project.k": ".layers.{layer}.self_attn.k_proj.weight",
        "decoder.{layer}.attention.project.v": ".layers.{layer}.self_attn.v_proj.weight",
        "decoder.{layer}.attention.project.q_bias": ".layers.{layer}.self_attn.q_proj.bias",
        "decoder.{layer}.attention.project.k_bias": ".layers.{layer}.self_attn.k_proj.bias",
        "decoder.{layer}.attention.project.v_bias": ".layers.{layer}.self_attn.v_proj.bias",
        "decoder.{layer}.attention.qk_norm.q": ".layers.{layer}.self_attn.q_norm.weight",
        "decoder.{layer}.attention.qk_norm.k": ".layers.{layer}.self_attn.k_norm.weight",
        "decoder.{layer}.attention.output.o": ".layers.{layer}.self_attn.o_proj.weight",
        "decoder.{layer}.attention.output.o_bias": ".layers.{layer}.self_attn.o_proj.bias",
        "decoder.{layer}.attention_norm.weight": ".layers.{layer}.input_layernorm.weight",
        "decoder.{layer}.feed.gate": ".layers.{layer}.mlp.gate_proj.weight",
        "decoder.{layer}.feed.up": ".layers.{layer}.mlp.up_proj.weight",
        "decoder.{layer}.feed.down": ".layers.{layer}.mlp.down_proj.weight",
        "decoder.{layer}.feed.gate_bias": ".layers.{layer}.mlp.gate_proj.bias",
        "decoder.{layer}.feed.up_bias": ".layers.{layer}.mlp.up_proj.bias",
        "decoder.{layer}.feed.down_bias": ".layers.{layer}.mlp.down_proj.bias",
        "decoder.{layer}.feed_norm.weight": ".layers.{layer}.post_attention_layernorm.weight",
        "decoder.norm.weight": ".norm.weight",
        "head.tokens.weight": "lm_head.weight",
        "head.classes.weight": "score.weight",
        "head.classes.bias": "score.bias",
        "head.span.weight": "qa_outputs.weight",
        "head.span.bias": "qa_outputs.bias",
    },
    ignored=(r"rotary_emb\.inv_freq$",),
)
