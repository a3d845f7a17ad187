"""StableLM and Cohere: Llama's names, norms that may have biases, and may be one for both sublayers."""

from __future__ import annotations

from .llama import MAP as LLAMA

LAYER, THERE = "decoder.{layer}", ".layers.{layer}"
MORE = {
    f"{LAYER}.attention_norm.bias": f"{THERE}.input_layernorm.bias",
    f"{LAYER}.feed_norm.bias": f"{THERE}.post_attention_layernorm.bias",
    f"{LAYER}.norm.weight": f"{THERE}.input_layernorm.weight",
    f"{LAYER}.norm.bias": f"{THERE}.input_layernorm.bias",
    "decoder.norm.bias": ".norm.bias",
}
MAP = LLAMA._replace(families=("stablelm", "cohere", "cohere2"), slots={**LLAMA.slots, **MORE})
