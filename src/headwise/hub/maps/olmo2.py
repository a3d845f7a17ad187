"""OLMo 2: norms stand behind sublayers alone."""

from __future__ import annotations

from .llama import LLAMA_WEIGHTS as LLAMA

OLMO2_NORMS = {
    "decoder.{layer}.attention_norm.weight": ".layers.{layer}.post_attention_layernorm.weight",
    "decoder.{layer}.feed_norm.weight": ".layers.{layer}.post_feedforward_layernorm.weight",
}
OLMO2_WEIGHTS = LLAMA._replace(families=("olmo2", "olmo3"), locations={**LLAMA.locations, **OLMO2_NORMS})
