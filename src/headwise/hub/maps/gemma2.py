"""Gemma 2 and 3: a norm on either side of every sublayer."""

from __future__ import annotations

from .llama import LLAMA_WEIGHTS as LLAMA

GEMMA2_NORMS = {
    "decoder.{layer}.attention_norm_after.weight": ".layers.{layer}.post_attention_layernorm.weight",
    "decoder.{layer}.feed_norm.weight": ".layers.{layer}.pre_feedforward_layernorm.weight",
    "decoder.{layer}.feed_norm_after.weight": ".layers.{layer}.post_feedforward_layernorm.weight",
}
GEMMA2_WEIGHTS = LLAMA._replace(families=("gemma2", "gemma3_text"), locations={**LLAMA.locations, **GEMMA2_NORMS})
