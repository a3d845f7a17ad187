"""OLMo 2: norms stand behind sublayers alone."""

from __future__ import annotations

from .llama import MAP as LLAMA

NORMS = {
    "decoder.{layer}.attention_norm.weight": ".layers.{layer}.post_attention_layernorm.weight",
    "decoder.{layer}.feed_norm.weight": ".layers.{layer}.post_feedforward_layernorm.weight",
}
MAP = LLAMA._replace(families=("olmo2", "olmo3"), slots={**LLAMA.slots, **NORMS})
